"""Marks of the study of free drafts: each is judged by the figures, reached or not."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from free_cells import BATCH, DEMO, FREE, GROWN, MERGED, PACE, SAMPLED
from free_figures import Pair, StudyRow, has_speed
from transformers_methods import ASSISTED, LOOKUP

RECYCLING_STEPS, MERGED_STEPS = 2.5, 3.0
DEMO_SPEED, LEAST_REPEATING_SPEED, SLOWEST_PROMPT = 1.8, 1.15, 0.95
SAMPLED_SPEED, BATCH_SPEED, GROWN_SPEED, GROWN_BF16_SPEED = 1.2, 1.2, 2.2, 3.0
THEIRS_SPEED = 1.15
BEST_FIXED_MEAN, BEST_FIXED_LEAST, DEFAULT_FIXED = 1.0, 0.97, 1.15
Mark = dict[str, Any]


def judge(rows: Sequence[StudyRow], pairs: Sequence[Pair], *, has_bf16_matrices: bool) -> list[Mark]:
    """Judge the marks of all parts that were measured."""
    return [
        *drafter_marks(rows, pairs),
        *demo_marks(rows, pairs),
        *speed_marks(rows, has_bf16_matrices),
        *pace_marks(pairs),
    ]


def mark(rule: str, reached: bool, figures: str) -> Mark:
    verdict = "reached" if reached else "NOT reached"
    return {"rule": rule, "reached": reached, "figures": figures, "text": f"Mark: {rule}: {verdict}, {figures}."}


def drafter_marks(rows: Sequence[StudyRow], pairs: Sequence[Pair]) -> list[Mark]:
    """Judge prompt lookup against transformers' own, and recycling."""
    demo = {row["method"]: row for row in rows if row["part"] == DEMO}
    lines = []
    if "recycling" in demo:
        steps = demo["recycling"]["tokens_per_step"]
        lines.append(mark(f"recycling at least {RECYCLING_STEPS} tokens per step", steps >= RECYCLING_STEPS, f"{steps:.2f}"))
    lookups = [pair for pair in pairs if pair["part"] == DEMO and pair["method"] == "prompt_lookup"]
    for pair in lookups:
        steps, theirs = (demo[name]["tokens_per_step"] for name in ("prompt_lookup", LOOKUP))
        lines.append(
            mark("prompt_lookup at least transformers' tokens per step", steps >= theirs, f"{steps:.2f} and {theirs:.2f}")
        )
        lines.append(mark("prompt_lookup at least 1.0x of transformers' speed", pair["speedup"] >= 1, times(pair)))
    batched = [row for row in rows if row["part"] == BATCH and row["kind"] == FREE]
    if batched:
        identical = all(row["num_identical"] == row["num_prompts"] for row in batched)
        words = ", ".join(f"{row['method']} {row['num_identical']} of {row['num_prompts']} identical" for row in batched)
        lines.append(mark("training-free drafters decode batches", identical, words))
    return lines


def demo_marks(rows: Sequence[StudyRow], pairs: Sequence[Pair]) -> list[Mark]:
    """Judge the merged tree on the demo: its speed, its slowest prompt, and transformers'."""
    row = expected(rows, DEMO)
    if row is None:
        return []
    lines = [speed_mark(row, f"{name_of(row)} at least {DEMO_SPEED}x", DEMO_SPEED)]
    steps, rare = row["tokens_per_step"], row["least_repeating"]
    lines.append(mark(f"at least {MERGED_STEPS} tokens per step there", steps >= MERGED_STEPS, f"{steps:.2f}"))
    identical = [other for other in rows if other["part"] == DEMO]
    wrong = [other["method"] for other in identical if other["num_identical"] < other["num_prompts"]]
    lines.append(mark("all answers identical there", not wrong, "differing: " + ", ".join(wrong) if wrong else "all"))
    if rare is not None:
        rule = f"at least {LEAST_REPEATING_SPEED}x on the third of its texts that repeats least"
        lines.append(mark(rule, rare["speedup"] >= LEAST_REPEATING_SPEED, times(rare)))
    if row["by_prompt"]:
        prompt, slowest = min(row["by_prompt"].items(), key=lambda item: item[1]["speedup"])
        rule = f"no prompt below {SLOWEST_PROMPT}x"
        lines.append(mark(rule, slowest["speedup"] >= SLOWEST_PROMPT, f"{prompt}: {slowest['speedup']:.2f}x"))
    theirs = [pair for pair in pairs if pair["part"] == DEMO and pair["method"] == row["method"]]
    theirs = [pair for pair in theirs if pair["against"] in (LOOKUP, ASSISTED)]
    if theirs:
        worst = min(theirs, key=lambda pair: pair["speedup"])
        rule = f"at least {THEIRS_SPEED}x of the better one of transformers' methods"
        words = f"{times(worst)} of {worst['other']}" + ("" if len(theirs) > 1 else "; assisted generation wasn't measured")
        lines.append(mark(rule, worst["speedup"] >= THEIRS_SPEED, words))
    return lines


def speed_marks(rows: Sequence[StudyRow], has_bf16_matrices: bool) -> list[Mark]:
    """Judge the merged tree at temperature 1, in batches, and beside the grown target."""
    lines = []
    for part, speed in ((SAMPLED, SAMPLED_SPEED), (BATCH, BATCH_SPEED)):
        if (row := expected(rows, part)) is not None:
            lines.append(speed_mark(row, f"{name_of(row)} at least {speed}x", speed))
    for row in rows:
        if row["part"] == GROWN and is_expected(row):
            speed = GROWN_BF16_SPEED if row["dtype"] == "bfloat16" and has_bf16_matrices else GROWN_SPEED
            lines.append(speed_mark(row, f"{name_of(row)} at least {speed}x", speed))
    return lines


def pace_marks(pairs: Sequence[Pair]) -> list[Mark]:
    """Judge drafting by expected gain against fixed settings, over all pairs."""
    lines = []
    of_pace = [pair for pair in pairs if pair["part"] in (PACE, GROWN)]
    best = [pair for pair in of_pace if pair["against"] == "best fixed"]
    if best:
        average, worst = mean(pair["speedup"] for pair in best), min(best, key=lambda pair: pair["speedup"])
        rule = f"expected against the best fixed setting, mean at least {BEST_FIXED_MEAN}"
        lines.append(mark(rule, average >= BEST_FIXED_MEAN, f"{average:.3f} over {len(best)} cases"))
        rule = f"expected against the best fixed setting, none below {BEST_FIXED_LEAST}"
        lines.append(mark(rule, worst["speedup"] >= BEST_FIXED_LEAST, f"{times(worst)} on {case_of(worst)}"))
    default = [pair for pair in of_pace if pair["against"] == "default fixed"]
    if default:
        average = mean(pair["speedup"] for pair in default)
        rule = f"expected against the default fixed setting, mean at least {DEFAULT_FIXED}"
        lines.append(mark(rule, average >= DEFAULT_FIXED, f"{average:.3f} over {len(default)} cases"))
    return lines


def speed_mark(row: StudyRow, rule: str, least: float) -> Mark:
    """Judge a row's speed; a wrong or impossible one reaches no mark."""
    if not has_speed(row):
        return mark(rule, False, row["fault"] or "error of measurement")
    return mark(rule, row["speedup"] >= least, times(row) + (", disturbed" if row["disturbed"] else ""))


def expected(rows: Sequence[StudyRow], part: str) -> StudyRow | None:
    return next((row for row in rows if row["part"] == part and is_expected(row)), None)


def is_expected(row: StudyRow) -> bool:
    return bool(row["kind"] == MERGED and row["method"] == "merged, expected")


def name_of(row: StudyRow) -> str:
    return f"{row['method']} ({case_of(row)})"


def case_of(row: Mapping[str, Any]) -> str:
    """Describe a cell: size, type, suite, temperature, batch size."""
    size = f"{row['size']} in {row['dtype']}, " if row["size"] else ""
    kind = f"temperature {row['temperature']:g}" if row["temperature"] else "greedy"
    return f"{size}{row['suite']}, {kind}" + (f", batch size {row['batch_size']}" if row["batch_size"] > 1 else "")


def times(row: Mapping[str, Any]) -> str:
    """Format a speedup with its interval, and the one of processor time."""
    interval = "" if row["speedup_ci95"] is None else " [{:.2f}, {:.2f}]".format(*row["speedup_ci95"])
    processor = "" if row["processor_speedup"] is None else f" (processor time {row['processor_speedup']:.2f}x)"
    return f"{row['speedup']:.2f}x{interval}{processor}"
