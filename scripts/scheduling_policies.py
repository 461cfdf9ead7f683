"""Requests and policies that `bench_scheduling.py` compares."""

import argparse
import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.distill.regenerate.engine import Request
from outrider.distill.regenerate.lengths.buckets import Experience, LengthPredictor, Lesson, Predicted
from outrider.distill.regenerate.lengths.policies import POLICIES, Schedule, longest_answer_first
from outrider.distill.regenerate.lengths.predictors import make_predictor
from outrider.distill.regenerate.lengths.schedule import (
    Policy,
    Rectangle,
    Waiting,
)
from outrider.distill.regenerate.lengths.stopwatch import Stopwatch
from outrider.models.llm.hf_target import HFTarget

HELD_OUT = 700
"""First number of the held-out prompts, which are never training data."""

ORACLE = "(d) oracle: known lengths, longest first"
BASELINE = "(b) first come, actual need reserved"
MAXIMUM = "(a) first come, maximum reserved"
OURS = "by length, light"
S3 = "S3: light, decreasing first fit"
NOTHING = "by length, nothing predicted"
KNOWN = "by length, light and known length"

# a prompt's tokens, and the lengths of the model's and the known model's answers
Record = tuple[torch.Tensor, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Answer from before the run, as training data of a predictor."""

    request: Request
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests and the lengths of their answers, in decoded tokens."""

    requests: list[Request]
    """Requests with the whole prompts, for predictors."""
    prompts: list[torch.Tensor]
    """The parts of the prompts that the target reads."""
    lengths: list[int]
    seen: list[Seen]
    max_new_tokens: int


def read_records(args: argparse.Namespace, target: HFTarget) -> dict[int, Record]:
    """Read the records by number of the prompt."""
    texts: dict[str, dict[int, tuple[str, str]]] = {args.model: {}, args.known_model: {}}
    with gzip.open(args.data, "rt") as lines:
        for line in lines:
            record = json.loads(line)
            if record["model"] in texts:
                prompt, answer = (turn["value"] for turn in record["conversations"])
                texts[record["model"]][record["prompt_id"]] = prompt, answer
    encode = target.tokenizer
    return {
        number: (
            torch.tensor(encode(prompt).input_ids),
            len(encode(answer).input_ids) + 1,
            len(encode(texts[args.known_model][number][1]).input_ids) + 1,
        )
        for number, (prompt, answer) in sorted(texts[args.model].items())
        if number in texts[args.known_model] and prompt
    }


def make_workload(
    records: dict[int, Record],
    args: argparse.Namespace,
    *,
    scale: int,
    count: int | None,
    max_new_tokens: int,
) -> Workload:
    """Make `count` requests in random order, or all if it is None.

    Held-out prompts are chosen first.
    """
    draw = random.Random(args.seed)
    early = [number for number in records if number < HELD_OUT]
    draw.shuffle(early)
    measured = [number for number in records if number >= HELD_OUT] + early[args.seen :]
    measured = measured[:count]
    draw.shuffle(measured)

    def length(number: int) -> int:
        return max(1, min(max_new_tokens, records[number][1]) // scale)

    return Workload(
        requests=[make_request(records, number, scale=scale) for number in measured],
        prompts=[records[number][0][: -(-len(records[number][0]) // scale)] for number in measured],
        lengths=[length(number) for number in measured],
        seen=[
            Seen(request=make_request(records, number, scale=scale), num_tokens=length(number)) for number in early[: args.seen]
        ],
        max_new_tokens=max_new_tokens // scale,
    )


def make_request(records: dict[int, Record], number: int, *, scale: int = 1, knows_lengths: bool = True) -> Request:
    ids, _, known = records[number]
    num_known_tokens = max(1, known // scale) if knows_lengths else None
    return Request(id=str(number), prompt_ids=ids, seed=number, num_known_tokens=num_known_tokens)


@dataclass(frozen=True, slots=True)
class Pages:
    """Paged cache in which each row has its own pages of `size` tokens."""

    size: int = 16

    def entries(self, batch: Sequence[Waiting]) -> int:
        return sum(-(-(row.num_read + row.num_reserved) // self.size) * self.size for row in batch)

    def limits(self, batch: Sequence[Waiting]) -> list[int]:
        return [row.num_reserved for row in batch]


@dataclass(frozen=True, slots=True)
class Known:
    """Fixed reservations for each request: the maximum, or an oracle's lengths."""

    num_tokens: Sequence[int]

    def reserve(self, indices: Sequence[int]) -> list[int]:
        return [self.num_tokens[index] for index in indices]

    def observe(self, lengths: dict[int, int], unfinished: dict[int, int]) -> bool:
        return False


def first_come(waiting: Sequence[Waiting]) -> list[Waiting]:
    return sorted(waiting, key=lambda row: row.index)


def longest_prompt_first(waiting: Sequence[Waiting]) -> list[Waiting]:
    return sorted(waiting, key=lambda row: (-row.num_read, row.index))


def make_predictors(target: HFTarget) -> dict[str, tuple[LengthPredictor, bool]]:
    """Return the predictors, and whether each knows the length of another model's answer."""
    return {
        NOTHING: (make_predictor("none", target), False),
        OURS: (make_predictor("light", target), False),
        KNOWN: (make_predictor("light", target), True),
    }


def policies(work: Workload, predictors: dict[str, tuple[LengthPredictor, bool]], budget: int) -> dict[str, Policy]:
    """Return all policies of the comparison by name.

    Known lengths are exact, and (b) to (d) reserve exactly these.
    """
    maximum, actual = Known([work.max_new_tokens] * len(work.lengths)), Known(work.lengths)
    memory = Rectangle()
    fixed = {
        MAXIMUM: Policy(reservation=maximum, order=first_come, memory=memory, may_overtake=False),
        BASELINE: Policy(reservation=actual, order=first_come, memory=memory, may_overtake=False),
        "(b) first come, paged memory": Policy(reservation=actual, order=first_come, memory=Pages(), may_overtake=False),
        "(c) longest prompt first": Policy(reservation=actual, order=longest_prompt_first, memory=memory, may_overtake=True),
        ORACLE: Policy(reservation=actual, order=longest_answer_first, memory=memory, may_overtake=True),
    }
    predicted = {name: ("shortest", *predictor) for name, predictor in predictors.items()}
    if OURS in predictors:
        predicted[S3] = ("s3", predictors[OURS][0], False)
    return fixed | {
        name: POLICIES[schedule].policy(predict(predictor, work, POLICIES[schedule], knows_lengths=knows_lengths), budget)
        for name, (schedule, predictor, knows_lengths) in predicted.items()
    }


def predict(predictor: LengthPredictor, work: Workload, schedule: Schedule, *, knows_lengths: bool) -> Predicted:
    def shown(request: Request) -> Request:
        return request if knows_lengths else replace(request, num_known_tokens=None)

    return schedule.reserve(
        Experience(lambda: predictor, [Lesson(request=shown(seen.request), num_tokens=seen.num_tokens) for seen in work.seen]),
        [shown(request) for request in work.requests],
        max_new_tokens=work.max_new_tokens,
        learning=Stopwatch(),
    )
