"""Figures of `bench_offload`, from the answers of its cells."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from offload_cells import PLAIN, RAW, Cell, Method
from offload_run import read_lines

from outrider.data.files import read_json
from outrider.eval.results.stats import bootstrap, ratio_of_ratios

ANSWERS_FILE, WORKERS_FILE = "answers.jsonl", "workers.json"
SEED = 0
Row = dict[str, Any]


def rows_of(cell: Cell, output: Path) -> list[Row]:
    """Compute the figures of all methods of a measured cell."""
    folder = cell.folder(output)
    workers = read_json(folder / WORKERS_FILE)
    answers: dict[str, list[dict[str, Any]]] = {}
    for answer in read_lines(folder / ANSWERS_FILE):
        answers.setdefault(answer["method"], []).append(answer)
    for of_method in answers.values():
        of_method.sort(key=lambda answer: answer["prompt"])
    measured = [method for method in cell.methods if method.key in answers and method.key in workers]
    return [row_of(cell, method, answers, workers[method.key]) for method in measured]


def faults_of(cell: Cell, output: Path) -> list[Row]:
    """Return the methods of a cell whose workers have ended, and why."""
    workers = read_json(cell.folder(output) / WORKERS_FILE)
    return [
        {**cell.described, "letter": method.letter, "title": method.title, "fault": workers[method.key]["fault"]}
        for method in cell.methods
        if workers.get(method.key, {}).get("fault")
    ]


def row_of(cell: Cell, method: Method, answers: dict[str, list[dict[str, Any]]], facts: dict[str, Any]) -> Row:
    """Compute the figures of a method, and its speed over each other one of the cell."""
    own = answers[method.key]
    steps = sum(answer["num_steps"] for answer in own)
    row: Row = {
        **cell.described,
        "key": method.key,
        "letter": method.letter,
        "drafter": method.drafter,
        "free": list(method.free),
        "title": method.title,
        "num_prompts": len(own),
        "pass_seconds": sum(answer["decode_seconds"] for answer in own) / steps,
        "median_pass_seconds": float(np.median([answer["decode_seconds"] / answer["num_steps"] for answer in own])),
        "cached_share": max(answer["cached_share"] for answer in own),
        "facts": facts,
    }
    row["bytes_per_pass"] = sum(answer["read_bytes"] for answer in own) / sum(num_passes(answer) for answer in own)
    if method.letter == RAW:
        return row
    tokens = sum(answer["num_verify_tokens"] for answer in own)
    row |= {
        "seconds_per_token": sum(answer["decode_seconds"] for answer in own) / tokens,
        "tokens_per_step": tokens / steps,
        "draft_tokens_per_step": sum(answer["num_draft_tokens"] for answer in own) / steps,
        "gb_per_token": row["bytes_per_pass"] * steps / tokens / 1e9,
        "faults_per_token": sum(answer["major_faults"] for answer in own) / tokens,
        "num_identical": num_identical(own, answers.get(PLAIN, [])),
        **drafting(own),
    }
    others = {key: compare(theirs, own) for key, theirs in answers.items() if key not in (RAW, method.key)}
    row["over"] = {key: {"ratio": ratio, "ci95": interval} for key, (ratio, interval) in others.items() if ratio is not None}
    return row


def num_passes(answer: dict[str, Any]) -> int:
    """Count the passes of an answer, with its prefill and, in a stream's first answer, its probe."""
    if answer.get("stream"):
        return int(answer["stream"]["passes"])
    return int(answer["num_steps"]) + ("prefill_seconds" in answer)


def compare(
    slow: Sequence[dict[str, Any]], fast: Sequence[dict[str, Any]]
) -> tuple[float, tuple[float, float] | None] | tuple[None, None]:
    """Compute how much faster `fast` writes a token, with the 95 % interval over prompts.

    Prefills are left out. Returns None where the two have no prompt in common.
    """
    common = sorted({answer["prompt"] for answer in slow} & {answer["prompt"] for answer in fast})
    if not common:
        return None, None
    sides = [{answer["prompt"]: answer for answer in side} for side in (slow, fast)]
    sums = np.array([[[side[p]["decode_seconds"], side[p]["num_verify_tokens"]] for p in common] for side in sides])
    return bootstrap(sums, ratio_of_ratios, seed=SEED)


def num_identical(answers: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> int | None:
    """Count the answers that begin as plain decoding's, which may be shorter; None if it wasn't measured."""
    by_prompt = {answer["prompt"]: answer["token_ids"] for answer in plain}
    both = [(answer["token_ids"], by_prompt[answer["prompt"]]) for answer in answers if answer["prompt"] in by_prompt]
    if len(both) < len(answers):
        return None
    return sum(all(first == second for first, second in zip(*texts, strict=False)) for texts in both)


def drafting(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum the seconds of drafting, before passes and in their waits, per step; None where unknown."""
    if any(answer["draft_seconds"] is None for answer in answers):
        return {"draft_seconds": None, "wait_draft_seconds": None, "late_seconds": None}
    steps = sum(answer["num_steps"] for answer in answers)
    streams = [answer["stream"] or {} for answer in answers]
    return {
        "draft_seconds": sum(answer["draft_seconds"] for answer in answers) / steps,
        "wait_draft_seconds": sum(stream.get("draft_seconds", 0.0) for stream in streams) / steps,
        "late_seconds": sum(stream.get("late_seconds", 0.0) for stream in streams) / steps,
    }


def find(rows: Sequence[Row], disk: str, letter: str, *, share: float, drafter: str = "") -> Row | None:
    """Return the row of a method without merged drafters; None if it wasn't measured."""
    wanted = (disk, letter, share, drafter)
    for row in rows:
        if (row["disk"], row["letter"], row["share"], row["drafter"]) == wanted and not row["free"]:
            return row
    return None


def over(row: Row | None, other: Row | None) -> tuple[float | None, list[float] | None]:
    """Return how much faster a row is than another one of its cell, with the interval; None if unknown."""
    pair = None if row is None or other is None else row.get("over", {}).get(other["key"])
    return (None, None) if pair is None else (pair["ratio"], pair["ci95"])
