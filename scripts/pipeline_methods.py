"""Methods of the pipeline bench in virtual time, and the ablations of pipelined speculation."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline_clock import AnyClock
from pipeline_conditions import Condition
from pipeline_play import outcomes, row

from outrider.models.decoding.growing_tree import GrowingTree
from outrider.models.decoding.speculation import ExpectedSpeculation, PaperSpeculation, Speculation
from outrider.models.decoding.types import NO_NODE
from outrider.models.decoding.window import Window

PLAIN, PIPELINED = "plain", "pipelined"
PAPER = "paper's rule"
OWN_SETTING = "synchronous, own setting"
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
USUAL_LENGTH = 4
MICRO_BATCHES, PAPER_CUTOFF = (1, 2, 4), 0.1
"""Settings of the paper's rule: its best number of draft tokens in a run is chosen in hindsight."""
NO_CANCELLATION, BACKWARD = "no cancellation", "backward cancellation"
ONE_BATCH, NO_PRESSURE = "no continuous speculation", "no back-pressure"
REPEATS = "bonus tokens sent twice"
"""What PipeInfer's code does: a bonus token that is under way is sent once more, alone."""
ABLATIONS = (NO_CANCELLATION, BACKWARD, ONE_BATCH, REPEATS, NO_PRESSURE)
MANY = 1 << 20
Row = dict[str, Any]


def synchronous(num_drafts: int) -> str:
    return f"synchronous {num_drafts}"


def best_synchronous(rows: Mapping[str, Row]) -> Row:
    """Return the row of the fastest number of draft tokens, chosen in hindsight."""
    return fastest(row for name, row in rows.items() if name.startswith("synchronous "))


class OneBatch(PaperSpeculation):
    """Ablation: one batch of drafts behind a new root, then nothing until the batch is answered."""

    def choose(self, window: Window, drafts: GrowingTree, *, max_depth: int, has_more: bool) -> Sequence[int] | None:
        if [*window.runs.values()] != [[NO_NODE]]:
            return ()
        return super().choose(window, drafts, max_depth=max_depth, has_more=has_more)


def expected(clock: AnyClock) -> Speculation:
    return ExpectedSpeculation(clock=lambda: clock.now)


def without_pressure(clock: AnyClock) -> Speculation:
    return ExpectedSpeculation(clock=lambda: clock.now, max_runs=MANY, max_nodes=MANY)


def main_rows(condition: Condition) -> dict[str, Row]:
    """Decode by all methods: plain, synchronous with all lengths, and pipelined."""
    rows = {PLAIN: row(outcomes(condition, num_drafts=0))}
    for length in DRAFT_LENGTHS:
        rows[synchronous(length)] = {"num_drafts": length, **row(outcomes(condition, num_drafts=length))}
    rows[PIPELINED] = row(outcomes(condition, speculation=expected))
    rows[PAPER] = fastest(paper_row(condition, size) for size in MICRO_BATCHES)
    return rows


def paper_row(condition: Condition, micro_batch: int) -> Row:
    """Decode by the paper's rule, with so many draft tokens in a run."""
    make = lambda clock: PaperSpeculation(micro_batch=micro_batch, cutoff=PAPER_CUTOFF)  # noqa: E731
    return {"micro_batch": micro_batch, **row(outcomes(condition, speculation=make))}


def fastest(rows: Iterable[Row]) -> Row:
    return max(rows, key=lambda row: float(row["tokens_per_second"]))


def ablation_rows(condition: Condition) -> dict[str, Row]:
    """Decode by pipelined speculation in full, and without each of its parts."""
    rows = {PIPELINED: row(outcomes(condition, speculation=expected))}
    for name, changed, speculation in ablations(condition):
        rows[name] = row(outcomes(changed, speculation=speculation))
    batches = [
        row(outcomes(condition, speculation=lambda clock, length=length: OneBatch(micro_batch=length, cutoff=0.0)))
        for length in (2, 3, 4, 6, 8, 12)
    ]
    rows[ONE_BATCH] = fastest(batches)
    return rows


def ablations(condition: Condition) -> Iterator[tuple[str, Condition, Callable[[AnyClock], Speculation]]]:
    yield NO_CANCELLATION, replace(condition, cancels=False), expected
    yield BACKWARD, replace(condition, is_backward=True), expected
    yield REPEATS, replace(condition, sends_twice=True), expected
    yield NO_PRESSURE, condition, without_pressure
