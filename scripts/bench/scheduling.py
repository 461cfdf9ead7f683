"""Measures the schedules of the regeneration engine `batch`, on real prompts and lengths of answers.

    python scripts/bench/scheduling.py --data alpaca_eval_outputs.jsonl.gz

Each answer has the length of a chat model's recorded answer, in the target's tokens. The target
decodes real steps, and a row ends at the recorded length. All lengths, also those of prompts, are
divided by `--scale`, so that a run takes minutes on a CPU. Predictors read the whole prompt, and
start without known answers, as in the engine.

The engine's schedule is compared with S3's, with first come, first served, and with an oracle that knows all
lengths. They take turns in every round. The seconds include learning and predicting. `steps` counts
forward passes: on an accelerator that is limited by reading weights, they are the time.
"""

import gzip
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from report import finish

from outrider.distill.regenerate.engine import Limits, Request
from outrider.distill.regenerate.engines.batch import BatchDecoder
from outrider.distill.regenerate.lengths.buckets import LightPredictor, Predicted
from outrider.distill.regenerate.lengths.schedule import (
    RESERVED_SHARE,
    SHORTEST,
    UNKNOWN_SHARE,
    Decoded,
    Policy,
    Reservation,
    Waiting,
    supervise,
)
from outrider.models.decoding import Sampling
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

FIRST_COME, ORACLE = "first come, maximum reserved", "oracle: known lengths, longest first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests and the lengths of their answers, in decoded tokens."""

    requests: list[Request]
    """Requests with the whole prompts, for predictors."""
    prompts: list[torch.Tensor]
    """The parts of the prompts that the target reads."""
    lengths: list[int]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Fixed:
    """Reservations of a fixed number of tokens for each request."""

    num_tokens: Sequence[int]

    def reserve(self, indices: Sequence[int]) -> list[int]:
        return [self.num_tokens[index] for index in indices]

    def observe(self, lengths: dict[int, int], unfinished: dict[int, int]) -> bool:
        return False


class RecordedDecoder(BatchDecoder):
    """Decoder that ends answers at the recorded lengths."""

    def __init__(self, target: HFTarget, work: Workload) -> None:
        requests = [replace(request, prompt_ids=ids) for request, ids in zip(work.requests, work.prompts, strict=True)]
        limits = Limits(max_new_tokens=work.max_new_tokens, max_tokens=target.context_length)
        super().__init__(target, requests, Sampling(temperature=0.0), limits)
        self.lengths = work.lengths

    def is_ended(self, index: int) -> bool:
        return len(self.tokens[index]) == self.lengths[index]


def main(
    data: Annotated[Path, typer.Option(help="alpaca_eval_outputs.jsonl.gz")],
    target: Annotated[str, typer.Option(help="directory or Hub id")] = "models/demo_target",
    model: Annotated[str, typer.Option(help="model whose answers give the lengths")] = "vicuna-7b-v1.3",
    known_model: Annotated[
        str, typer.Option(help="model whose answers stand for the data's old ones")
    ] = "OpenHermes-2.5-Mistral-7B",
    requests: Annotated[int, typer.Option(help="number of requests")] = 160,
    scale: Annotated[int, typer.Option(help="divisor of all lengths")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="before the division")] = 1024,
    budget_tokens: Annotated[int, typer.Option(help="KV-memory budget, before the division")] = 16384,
    rounds: int = 3,
    threads: int = 1,
    output: Path = Path("outputs/bench/scheduling.json"),
) -> None:
    """Measure the schedules of the engine `batch`."""
    options = dict(locals())
    torch.set_num_threads(threads)
    loaded = load_target(TargetConfig(name_or_path=target, dtype="float32"), torch.device("cpu"))
    loaded.choose_linears()
    work = read_workload(data, loaded, (model, known_model), requests, scale=scale, max_new_tokens=max_new_tokens)
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds + 1):  # the first one warms up
        for name, (policy, reservation) in policies(work).items():
            loaded.release_cache()
            runs.setdefault(name, []).append(measure(loaded, work, policy, reservation, budget_tokens // scale))
    seconds = {name: [run["processor_seconds"] for run in results[1:]] for name, results in runs.items()}
    rows = [
        {
            "schedule": name,
            "answers_per_processor_second": len(work.lengths) / statistics.median(seconds[name]),
            "speed_over_first_come": statistics.median(
                theirs / ours for ours, theirs in zip(seconds[name], seconds[FIRST_COME], strict=True)
            ),
            **{key: value for key, value in results[-1].items() if not key.endswith("seconds")},
        }
        for name, results in runs.items()
    ]
    rows = [{name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()} for row in rows]
    finish(output, rows, options, device=loaded.device, processor_seconds=seconds)


def read_workload(
    path: Path, target: HFTarget, models: tuple[str, str], count: int, *, scale: int, max_new_tokens: int
) -> Workload:
    """Read the first `count` prompts, and the lengths of two models' answers."""
    answers: dict[str, dict[int, list[int]]] = {model: {} for model in models}
    prompts: dict[int, torch.Tensor] = {}
    with gzip.open(path, "rt") as lines:
        for record in map(json.loads, lines):
            if record["model"] in answers and record["prompt_id"] < count:
                prompt, answer = (target.tokenizer(turn["value"]).input_ids for turn in record["conversations"])
                prompts[record["prompt_id"]] = torch.tensor(prompt)
                answers[record["model"]][record["prompt_id"]] = answer
    actual, known = (answers[model] for model in models)
    return Workload(
        requests=[
            Request(id=str(n), prompt_ids=prompts[n], seed=n, num_known_tokens=max(1, len(known[n]) // scale)) for n in prompts
        ],
        prompts=[ids[: math.ceil(len(ids) / scale)] for ids in prompts.values()],
        lengths=[max(1, min(max_new_tokens, len(actual[n]) + 1) // scale) for n in prompts],
        max_new_tokens=max_new_tokens // scale,
    )


def longest_answer_first(waiting: Sequence[Waiting]) -> list[Waiting]:
    """Sort by decreasing reservation: with first fit, this is S3's decreasing first fit."""
    return sorted(waiting, key=lambda row: (-row.num_reserved, row.index))


def policies(work: Workload) -> dict[str, tuple[Policy, Reservation]]:
    """Return all schedules by name, each with its rooms for answers."""

    def predicted(policy: Policy, *, knows_lengths: bool = False) -> tuple[Policy, Reservation]:
        shown = [request if knows_lengths else replace(request, num_known_tokens=None) for request in work.requests]
        unknown = math.ceil(UNKNOWN_SHARE * work.max_new_tokens)
        return policy, Predicted(LightPredictor(), shown, share=RESERVED_SHARE, part=policy.part, unknown=unknown)

    first_come = Policy(order=lambda waiting: sorted(waiting, key=lambda row: row.index))
    return {
        FIRST_COME: (first_come, Fixed([work.max_new_tokens] * len(work.lengths))),
        ORACLE: (Policy(order=longest_answer_first), Fixed(work.lengths)),
        "S3's, predicted lengths": predicted(Policy(order=longest_answer_first)),
        "the engine's, predicted lengths": predicted(SHORTEST),
        "the engine's, with the other model's lengths": predicted(SHORTEST, knows_lengths=True),
    }


def measure(target: HFTarget, work: Workload, policy: Policy, reservation: Reservation, budget: int) -> dict[str, Any]:
    """Answer all requests within a budget in tokens, and return times and counts."""
    started, processor_started = time.perf_counter(), time.process_time()
    decode = RecordedDecoder(target, work).decode
    rooms = [work.max_new_tokens] * len(work.lengths)
    batches: list[list[tuple[Waiting, Decoded]]] = list(
        supervise(list(map(len, work.prompts)), rooms, policy, reservation, decode, budget=budget)
    )
    steps = sum(max(decoded.num_new for _, decoded in batch) for batch in batches)
    return {
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - processor_started,
        "batches": len(batches),
        "steps": steps,
        "mean_rows": sum(decoded.num_new for batch in batches for _, decoded in batch) / steps,
        "evictions": sum(not decoded.ended for batch in batches for _, decoded in batch),
    }


if __name__ == "__main__":
    typer.run(main)
