"""Benchmark of length-aware scheduling in the padded engine, after S3 (arXiv 2306.06000).

    python scripts/bench_scheduling.py --data ../shared/data/chat/alpaca_eval_outputs.jsonl.gz

The requests are real prompts, and each answer has the length of a chat model's recorded answer, in
the target's tokens. The target decodes real steps, and a row ends at the recorded length. All
lengths, also those of prompts, are divided by --scale, so that a run takes minutes on a CPU.
Predictors read the whole prompt. As in the engine they start without training data; --seen gives
them answers to prompts whose number is below HELD_OUT.

There are two kinds of batches. In `classic` batches (S3's) a finished row idles until its batch
ends. In `leaving` batches (the engine's) it leaves. The engine's policy is compared with first
come, first served, with S3's decreasing first fit, and with an oracle. Policies take turns in every
round. The report has medians over the rounds, and ratios within a round. Seconds are processor
time, including learning and prediction, so that other processes disturb them less. The record has
wall-clock times too. Then steps and batches are counted without decoding, at full lengths, for
several budgets and maxima. Last, predictors are compared on held-out prompts after different
amounts of training data.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scheduling_policies import (
    BASELINE,
    HELD_OUT,
    MAXIMUM,
    ORACLE,
    OURS,
    S3,
    Record,
    Workload,
    make_predictors,
    make_request,
    make_workload,
    policies,
    read_records,
)
from tqdm import tqdm

from outrider.data.files import write_json
from outrider.distill.regenerate.engine import Limits
from outrider.distill.regenerate.engines.batch import BatchDecoder
from outrider.distill.regenerate.lengths.buckets import Buckets, LengthPredictor, Predicted
from outrider.distill.regenerate.lengths.policies import POLICIES, RESERVED_SHARE
from outrider.distill.regenerate.lengths.schedule import (
    Decode,
    Decoded,
    Policy,
    ScheduleStatistics,
    Waiting,
    kv_bytes_per_token,
    summarise,
    supervise,
)
from outrider.eval.measure.environment import describe_environment
from outrider.models.decoding import Sampling
from outrider.models.decoding.types import Counts
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

SHOWN = (
    "num_batches",
    "num_steps",
    "mean_rows",
    "num_evictions",
    "padding_share",
    "unused_share",
    "bucket_accuracy",
    "mean_bucket_distance",
)


# statistics with processor seconds, and wall-clock seconds
Measured = tuple[ScheduleStatistics, float]
Rounds = dict[tuple[str, int, str], list[Measured]]  # by mode, maximum before scaling, and policy


class LeavingDecoder(BatchDecoder):
    """Decoder that ends answers at the recorded lengths."""

    def __init__(self, target: HFTarget, work: Workload) -> None:
        requests = [replace(request, prompt_ids=ids) for request, ids in zip(work.requests, work.prompts, strict=True)]
        limits = Limits(max_new_tokens=work.max_new_tokens, max_tokens=target.context_length)
        super().__init__(target, requests, Sampling(temperature=0.0), limits)
        self.lengths = work.lengths

    def is_ended(self, index: int) -> bool:
        return len(self.tokens[index]) == self.lengths[index]


class ClassicDecoder(LeavingDecoder):
    """Decoder in which a finished row idles until its batch ends.

    The row is computed, but its tokens are discarded.
    """

    def _select(self, rows: list[int], unfinished: list[int]) -> list[int]:
        return rows

    def _step(self, rows: Sequence[int], unfinished: Sequence[int]) -> None:
        before = {index: len(self.tokens[index]) for index in rows}
        super()._step(rows, unfinished)
        idle = [int(index not in unfinished) for index in rows]
        self.target.rewind(Counts.of(idle, self.target.device))
        for index, is_idle in zip(rows, idle, strict=True):
            if is_idle:
                del self.tokens[index][before[index] :]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    target = load_target(TargetConfig(name_or_path=args.target, dtype="float32"), torch.device("cpu"))
    records = read_records(args, target)
    predictors = make_predictors(target)
    work = make_workload(records, args, scale=args.scale, count=args.requests, max_new_tokens=args.max_new_tokens)
    budget = args.budget_tokens // args.scale
    rounds: Rounds = {}
    modes: dict[str, type[LeavingDecoder]] = {"classic": ClassicDecoder, "leaving": LeavingDecoder}
    if args.rounds:
        # warm-up
        run(target, work, policies(work, {}, budget)[ORACLE], LeavingDecoder(target, work).decode, budget)
    for _ in tqdm(range(args.rounds), unit="round"):
        for mode, decoder in modes.items():
            for factor in (1, *args.maximum_factors):
                longer = replace(work, max_new_tokens=work.max_new_tokens * factor)
                for name, policy in policies(longer, predictors, budget).items():
                    if factor > 1 and name not in (MAXIMUM, S3, OURS, ORACLE):
                        continue
                    measured = run(target, longer, policy, decoder(target, longer).decode, budget)
                    rounds.setdefault((mode, args.max_new_tokens * factor, name), []).append(measured)
    report: dict[str, Any] = {"predictors": study(records, args, target), "counted": count(predictors, records, args)}
    if args.rounds:
        report |= {
            "measured": [describe(*key, rounds) for key in rounds],
            "num_requests": len(work.requests),
            "num_held_out": sum(int(request.id) >= HELD_OUT for request in work.requests),
            "mean_prompt_tokens": statistics.mean(map(len, work.prompts)),
            "answer_tokens": {"mean": statistics.mean(work.lengths), "deciles": statistics.quantiles(work.lengths, n=10)},
            "budget_bytes": budget * kv_bytes_per_token(target),
            "reserved_share": RESERVED_SHARE,
            "first_part": POLICIES["shortest"].part,
            "least_share": POLICIES["shortest"].least_share,
            "most_held": POLICIES["shortest"].held_budgets,
            "settings": {**vars(args), "output": str(args.output), "data": args.data.name},
            "environment": asdict(describe_environment(target.device)),
        }
    else:
        report = json.loads(args.output.read_text()) | report
    write_json(args.output, report)
    print_tables(report)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="alpaca_eval_outputs.jsonl.gz")
    parser.add_argument("--target", default="models/demo_target", help="directory or Hub id")
    parser.add_argument("--model", default="vicuna-7b-v1.3", help="model whose answers give the lengths")
    parser.add_argument(
        "--known-model", default="OpenHermes-2.5-Mistral-7B", help="model whose answers stand for the data's old ones"
    )
    parser.add_argument("--requests", type=int, default=160, help="timed requests, including all held-out ones")
    parser.add_argument("--seen", type=int, default=0, help="answers that predictors start from; the engine has none")
    parser.add_argument("--draws", type=int, default=6, help="samples of training data in the comparison of predictors")
    parser.add_argument("--scale", type=int, default=8, help="divisor of all lengths in timed runs")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="maximum number of new tokens, before scaling")
    parser.add_argument("--maximum-factors", type=int, nargs="*", default=[2], help="factors of larger maxima, for policy (a)")
    parser.add_argument("--budget-tokens", type=int, default=16384, help="KV-memory budget in tokens, before scaling")
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed rounds; 0 only counts, and keeps the timings of the record"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/scheduling.json"))
    return parser.parse_args()


def run(target: HFTarget, work: Workload, policy: Policy, decode: Decode, budget: int) -> Measured:
    """Answer all requests within a budget in tokens.

    The seconds include learning and predicting lengths.
    """
    target.release_cache()
    return measure(work, policy, decode, budget)


def measure(work: Workload, policy: Policy, decode: Decode, budget: int) -> Measured:
    started, cpu_started = time.perf_counter(), time.process_time()
    rooms = [work.max_new_tokens] * len(work.lengths)
    reports = list(supervise(list(map(len, work.prompts)), rooms, policy, decode, budget=budget))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    if not isinstance(policy.reservation, Predicted):
        return summarise(reports, [], [], cpu_seconds), seconds
    predicted, actual = policy.reservation.compare(work.lengths)
    learning_seconds = policy.reservation.learning.seconds
    return summarise(reports, predicted, actual, cpu_seconds, learning_seconds=learning_seconds), seconds


def describe(mode: str, maximum: int, name: str, rounds: Rounds) -> dict[str, Any]:
    """Return the medians of one policy, and its speed relative to others, by round."""
    results = rounds[mode, maximum, name]

    def times(other: str) -> dict[str, Any] | None:
        if (mode, maximum, other) not in rounds:
            return None
        pairs = zip(results, rounds[mode, maximum, other], strict=True)
        ratios = [theirs.seconds / ours.seconds for (ours, _), (theirs, _) in pairs]
        return {"median": statistics.median(ratios), "rounds": ratios}

    return {
        "mode": mode,
        "max_new_tokens": maximum,
        "policy": name,
        **results[0][0].record(),
        "seconds": statistics.median(result.seconds for result, _ in results),
        "sequences_per_second": statistics.median(result.sequences_per_second for result, _ in results),
        "rounds_cpu_seconds": [result.seconds for result, _ in results],
        "rounds_clock_seconds": [seconds for _, seconds in results],
        "speed_over_maximum": times(MAXIMUM),
        "speed_over_first_come": times(BASELINE),
        "speed_over_oracle": times(ORACLE),
    }


def study(records: dict[int, Record], args: argparse.Namespace, target: HFTarget) -> list[dict[str, Any]]:
    """Measure how well predictors find the buckets of held-out prompts.

    Figures are means over samples of the training data, for several amounts of it.
    """
    held_out = [number for number in records if number >= HELD_OUT]
    early = [number for number in records if number < HELD_OUT]
    rows = []
    for name, (predictor, knows_lengths) in make_predictors(target).items():
        for num_lessons in sorted({100, 300, len(early)}):
            draws = []
            for seed in range(args.draws):
                lessons = random.Random(seed).sample(early, min(num_lessons, len(early)))
                buckets = Buckets.of([records[number][1] for number in lessons])
                lesson, held = (
                    [make_request(records, number, knows_lengths=knows_lengths) for number in chosen]
                    for chosen in (lessons, held_out)
                )
                started = time.perf_counter()
                predictor.learn(lesson, buckets.index([records[number][1] for number in lessons]))
                probs = predictor.predict(held).double()
                seconds = time.perf_counter() - started
                actual = buckets.index([records[number][1] for number in held_out])
                draws.append({**scores(probs, actual), "seconds": seconds})
            means = {key: statistics.mean(draw[key] for draw in draws) for key in draws[0]}
            rows.append({"predictor": name, "num_lessons": num_lessons, "num_draws": len(draws), **means})
    return rows


def scores(probs: torch.Tensor, actual: torch.Tensor) -> dict[str, float]:
    """Return how well predicted probabilities [request, bucket] fit the actual buckets."""
    guess, middle = probs.argmax(1), (probs.cumsum(1) < 0.5).sum(1)
    return {
        "bucket_accuracy": (guess == actual).double().mean().item(),
        "mean_bucket_distance": (guess - actual).abs().double().mean().item(),
        "median_bucket_distance": (middle - actual).abs().double().mean().item(),
        "nats": -probs.gather(1, actual[:, None]).log().mean().item(),
    }


def count(
    predictors: dict[str, tuple[LengthPredictor, bool]], records: dict[int, Record], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Count batches and their steps at full lengths, without decoding.

    On an accelerator that is limited by reading weights, a step takes the same time for few and
    many rows. There, the number of steps is the time.
    """
    rows = []
    for maximum in (
        args.max_new_tokens // 4,
        args.max_new_tokens // 2,
        *(args.max_new_tokens * factor for factor in (1, 2, 4)),
    ):
        work = make_workload(records, args, scale=1, count=None, max_new_tokens=maximum)
        for budget in (args.budget_tokens // 2, args.budget_tokens, args.budget_tokens * 4):
            results = {}
            for name, policy in policies(work, predictors, budget).items():
                results[name], _ = measure(work, policy, counting(work.lengths), budget)
            for name, counted in results.items():
                steps = {
                    "maximum_steps_over_own": results[MAXIMUM].num_steps / counted.num_steps,
                    "first_come_steps_over_own": results[BASELINE].num_steps / counted.num_steps,
                    "oracle_steps_over_own": results[ORACLE].num_steps / counted.num_steps,
                }
                setting = {"budget_tokens": budget, "max_new_tokens": work.max_new_tokens, "num_requests": len(work.lengths)}
                rows.append({**setting, "policy": name, **counted.record(), **steps})
    return rows


def counting(lengths: Sequence[int]) -> Callable[[Sequence[Waiting], Sequence[int], int], list[Decoded]]:
    """Return a `Decode` that only counts tokens."""

    def decode(batch: Sequence[Waiting], limits: Sequence[int], least: int) -> list[Decoded]:
        new = [min(lengths[row.index] - row.num_written, limit) for row, limit in zip(batch, limits, strict=True)]
        # The batch ends with the token after which fewer than `least` rows continue.
        end = sorted(new, reverse=True)[max(0, least - 1)]
        new = [min(num_new, end) for num_new in new]
        return [
            Decoded(num_new=num_new, ended=row.num_written + num_new == lengths[row.index])
            for row, num_new in zip(batch, new, strict=True)
        ]

    return decode


def print_tables(report: dict[str, Any]) -> None:
    ratios = ("speed_over_maximum", "speed_over_first_come", "speed_over_oracle")
    measured = [row | {name: row[name] and row[name]["median"] for name in ratios} for row in report.get("measured", [])]
    print_table("measured", ("mode", "max_new_tokens", "policy", "sequences_per_second", *ratios, *SHOWN), measured)
    scores = ("bucket_accuracy", "mean_bucket_distance", "median_bucket_distance", "nats", "seconds")
    print_table("predictors on held-out prompts", ("predictor", "num_lessons", *scores), report["predictors"])
    ratios = ("maximum_steps_over_own", "first_come_steps_over_own", "oracle_steps_over_own")
    print_table("counted", ("budget_tokens", "max_new_tokens", "policy", *ratios, *SHOWN), report["counted"])


def print_table(title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column.replace("_", " "))
    for row in rows:
        values = (row[column] for column in columns)
        table.add_row(
            *("-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value) for value in values)
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
