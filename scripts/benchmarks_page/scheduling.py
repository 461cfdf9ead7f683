"""Tables of the record on scheduling by length."""

from collections.abc import Callable
from typing import Any

from .tables import Records, count, number, table

POLICIES = {
    "(a) first come, maximum reserved": "(a) first come, maximum reserved",
    "(b) first come, actual need reserved": "(b) first come, what a request needs reserved",
    "(b) first come, paged memory": "(b) in a paged memory, without a rectangle's corners",
    "(c) longest prompt first": "(c) longest prompt first, what a request needs reserved",
    "S3: light, decreasing first fit": "S3: what `light` predicts reserved, longest first",
    "by length, nothing predicted": "ours, `none`",
    "by length, light": "ours, `light`",
    "by length, light and known length": "ours, `light` with the length of another model's answer",
    "by length, embedding": "ours, by the target's hidden states (no longer in the code)",
    "by length, embedding and known length": "the same, with the length of another model's answer",
    "(d) oracle: known lengths, longest first": "(d) S3's oracle: known lengths, longest first",
}


def scheduling(records: Records, name: str, max_new_tokens: int) -> str:
    """Return measured throughput by policy, with idle rows (S3's batches) and without."""
    measured = [row for row in records.read(name)["measured"] if row["max_new_tokens"] == max_new_tokens]
    by_mode = {(row["policy"], row["mode"]): row for row in measured}
    rows = []
    for policy in [policy for policy in POLICIES if (policy, "classic") in by_mode]:
        idle, leaving = by_mode[policy, "classic"], by_mode[policy, "leaving"]
        pairs = [f"{idle['sequences_per_second']:.1f} / {leaving['sequences_per_second']:.1f}"]
        for key in ("speed_over_maximum", "speed_over_first_come", "speed_over_oracle"):
            values = [row.get(key) for row in (idle, leaving)]
            pairs.append(" / ".join("-" if value is None else number(value["median"], 2, "x") for value in values))
        rows.append(
            [
                POLICIES[policy],
                *pairs,
                leaving["num_steps"],
                number(leaving["num_tokens"] / leaving["num_steps"], 1),
                leaving["num_evictions"],
                number(leaving["padding_share"]),
            ]
        )
    ratios = ["over (a)", "over (b)", "over (d)"]
    columns = ["policy", "sequences/s, rows idle / leave", *ratios, "steps", "mean rows", "evictions", "padding"]
    return table(columns, rows)


def predictors(records: Records, name: str) -> str:
    """Return how well answers' lengths are predicted, by the number of answers to learn from."""
    rows = [
        [
            f"{POLICIES.get(row['predictor'], row['predictor'])}, {row['num_lessons']} lessons",
            number(row["bucket_accuracy"]),
            number(row["mean_bucket_distance"]),
            number(row["median_bucket_distance"]),
            number(row["nats"]),
        ]
        for row in records.read(name)["predictors"]
    ]
    return table(["predictor", "bucket right", "distance of the likeliest", "distance of the median", "nats"], rows)


def counted_steps(records: Records, name: str) -> str:
    """Return the counted steps of each policy over those of ours with `light`."""
    counted = records.read(name)["counted"]
    ours = {_case(row): row["num_steps"] for row in counted if row["policy"] == "by length, light"}
    rows = []
    for policy in [policy for policy in POLICIES if any(row["policy"] == policy for row in counted)]:
        of_policy = [row for row in counted if row["policy"] == policy]
        ratios = [row["num_steps"] / ours[_case(row)] for row in of_policy]
        evictions = [row["num_evictions"] / row["num_requests"] for row in of_policy]
        rows.append([POLICIES[policy], *(f"{min(values):.2f} to {max(values):.2f}" for values in (ratios, evictions))])
    budgets, maxima = ({case[index] for case in ours} for index in (0, 1))
    text = (
        f"{count(counted[0]['num_requests'], 'request')}, maxima of {min(maxima):,} to {max(maxima):,} tokens, budgets of "
        f"{min(budgets):,} to {max(budgets):,} tokens; least to most over the {len(ours)} cases."
    )
    return f"{text}\n\n" + table(["policy", "steps over those of ours, `light`", "evictions of a request"], rows)


def _case(row: dict[str, Any]) -> tuple[int, int]:
    return row["budget_tokens"], row["max_new_tokens"]


def requests(records: Records, name: str) -> str:
    """Return what the requests of the measurement are, in a sentence."""
    record = records.read(name)
    settings, lengths = record["settings"], record["answer_tokens"]
    return (
        f"The lengths are those of {settings['model']}'s answers to AlpacaEval's prompts, divided by {settings['scale']}: "
        f"{count(record['num_requests'], 'request')}, {lengths['mean']:.0f} tokens in the mean. The target decodes real steps "
        f"until each length is reached, in {record['budget_bytes'] / 2**20:.0f} MiB of keys and values. Medians of "
        f"{count(settings['rounds'], 'round')}; ratios are of rounds."
    )


def encoder(records: Records, name: str) -> str:
    """Return how an encoder predicts lengths beside the other predictors, and what schedules gain."""
    record = records.read(name)
    rows = [
        [
            f"encoder, {record['encoder_parameters'] / 1e6:.0f} million parameters"
            if row["predictor"] == "encoder"
            else f"`{row['predictor']}`",
            number(row["bucket_accuracy"]),
            number(row["mean_bucket_distance"]),
            number(row["nats"]),
            number(row["learning_cpu_seconds"], 1),
            *(number(row[f"{schedule}_mean_rows"], 1) for schedule in ("shortest", "s3")),
        ]
        for row in record["rows"]
    ]
    text = (
        f"{count(record['num_lessons'], 'lesson')}, {count(record['num_held_out'], 'held-out request')}, a memory of "
        f"{record['settings']['budget_tokens']:,} tokens. With known lengths S3's schedule has "
        f"{number(record['oracle_mean_rows'], 1)} rows in a step."
    )
    columns = ["predictor", "bucket right", "distance", "nats", "processor seconds to learn", "mean rows, `shortest`", "`s3`"]
    return f"{text}\n\n" + table(columns, rows)


SCHEDULING: dict[str, Callable[..., str]] = {
    "scheduling": scheduling,
    "predictors": predictors,
    "counted_steps": counted_steps,
    "requests": requests,
    "encoder": encoder,
}
