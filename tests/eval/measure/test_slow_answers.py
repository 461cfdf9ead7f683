"""Slow answers: a stall of the machine hardly changes a measured speedup, and the bar only goes forward."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure import bench as measure
from outrider.eval.measure import timing
from outrider.eval.measure.plan import Job
from outrider.eval.records.records import BASELINE
from outrider.eval.results.notes import headline
from outrider.eval.results.rows import Row
from outrider.eval.run import evaluate
from outrider.models.llm.hf_target import HFTarget

from ..conftest import read

NUM_PROMPTS = 6
STEP_SECONDS, TREE_SECONDS, PREFILL_SECONDS = 0.010, 0.012, 0.015
STALL_SECONDS = 10.0

Evaluate = Callable[..., list[Row]]


@dataclasses.dataclass(kw_only=True)
class Clock:
    """Clock that only the target's passes advance, and the answers that it measured.

    `stalls` decides how many seconds to add in the middle of a job, by the number of earlier times
    that the same answer was decoded.
    """

    now: float = 100.0
    stalled: float = 0.0
    """Seconds of all stalls, in which the process computes nothing."""
    computes: bool = True
    """Whether processor seconds pass, too."""
    decoded: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    """Prompt, method and repeat of each decoding."""
    stalls: Callable[[str, str, int, int], float] = lambda prompt, method, repeat, attempt: 0.0
    num_passes: int = 0

    def advance(self, seconds: float, *, is_prefill: bool = False) -> None:
        self.now += seconds
        self.num_passes = 0 if is_prefill else self.num_passes + 1
        if self.decoded and self.num_passes == 2:
            added = self.stalls(*self.decoded[-1], self.decoded.count(self.decoded[-1]) - 1)
            self.now += added
            self.stalled += added


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    result = Clock()
    prefill, verify, decode = HFTarget.prefill, HFTarget.verify, measure.Bench._time

    def timed_prefill(self: HFTarget, *arguments: Any, **options: Any) -> Any:
        result.advance(PREFILL_SECONDS, is_prefill=True)
        return prefill(self, *arguments, **options)

    def timed_verify(self: HFTarget, last_token: torch.Tensor, tree: Any, *arguments: Any, **options: Any) -> Any:
        result.advance(TREE_SECONDS if tree.num_nodes else STEP_SECONDS)
        return verify(self, last_token, tree, *arguments, **options)

    def noted(self: measure.Bench, job: Job, *arguments: Any, **options: Any) -> Any:
        if "timed" in options:  # no warm-up
            result.decoded.append((job.turns[0].prompt.id, job.method.name, job.repeat))
        return decode(self, job, *arguments, **options)

    monkeypatch.setattr(HFTarget, "prefill", timed_prefill)
    monkeypatch.setattr(HFTarget, "verify", timed_verify)
    monkeypatch.setattr(measure.Bench, "_time", noted)
    times = {"perf_counter": lambda: result.now, "process_time": lambda: (result.now - result.stalled) * result.computes}
    monkeypatch.setattr(timing, "time", SimpleNamespace(**times))
    return result


@pytest.fixture
def run_tiny(tiny_target: HFTarget, tiny_drafter_dir: Path, tmp_path: Path, clock: Clock) -> Evaluate:
    """Return an evaluation that starts a new list of the clock's answers."""

    def evaluate_tiny(output_dir: Path, **changes: Any) -> list[Row]:
        lines = [{"question_id": str(index), "category": "all", "turns": [f"prompt {index}"]} for index in range(NUM_PROMPTS)]
        suite = tmp_path / "question.jsonl"
        suite.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options: dict[str, Any] = {"max_new_tokens": 5, "profile_prompts": 0, "repeats": 1, **changes}
        config = EvalConfig(suites=[SuiteConfig(name="spec_bench", path=str(suite))], **options)
        clock.decoded.clear()
        return evaluate(config, tiny_target, tiny_target.tokenizer, [tiny_drafter_dir], output_dir)

    return evaluate_tiny


def stall(prompt: str, method: str, attempts: int = 1) -> Callable[[str, str, int, int], float]:
    """Return a function that stalls the first attempts at an answer."""
    return lambda *where: STALL_SECONDS if where[:2] == (prompt, method) and where[3] < attempts else 0.0


def test_a_slow_answer_is_decoded_once_more_and_changes_no_row(run_tiny: Evaluate, clock: Clock, tmp_path: Path) -> None:
    """A stalled baseline counts for no row, and a stalled drafter neither."""
    clean = run_tiny(tmp_path / "clean")
    assert len(clock.decoded) == 2 * NUM_PROMPTS
    for method in (BASELINE, "redrafter"):
        clock.stalls = stall("3", method)
        rows = run_tiny(tmp_path / method)
        assert Counter(clock.decoded)[("3", method, 0)] == 2
        assert len(clock.decoded) == 2 * NUM_PROMPTS + 1, "nothing else is decoded again"
        assert len(read(tmp_path / method)) == 2 * NUM_PROMPTS, "an answer has one record"
        for row, expected in zip(rows, clean, strict=True):
            assert row["tokens_per_second"] == pytest.approx(expected["tokens_per_second"])
            assert row["speedup"] == pytest.approx(expected["speedup"])
            assert not row["noisy"]


@pytest.mark.parametrize(("method", "wrong_attempt"), [(BASELINE, 0), ("redrafter", 1)])
def test_a_wrong_token_of_any_attempt_is_seen(method, wrong_attempt, run_tiny, clock, tmp_path, monkeypatch):
    """An answer that is wrong in one attempt of two must not pass for identical."""
    decode = measure.Bench._time

    def sometimes_wrong(self: measure.Bench, job: Job, *arguments: Any, **options: Any) -> timing.Generation:
        generation = decode(self, job, *arguments, **options)
        of_answer = ("3", method, 0)
        if clock.decoded[-1:] == [of_answer] and clock.decoded.count(of_answer) == 1 + wrong_attempt:
            last = generation.steps[-1]
            tokens = tuple((*row[:-1], (row[-1] + 1) % self.target.vocab_size) for row in last.tokens)
            generation.steps[-1] = dataclasses.replace(last, tokens=tokens)
        return generation

    monkeypatch.setattr(measure.Bench, "_time", sometimes_wrong)
    clock.stalls = stall("3", method)
    _, drafted = run_tiny(tmp_path)
    assert clock.decoded.count(("3", method, 0)) == 2
    assert drafted["lossless_label"] == f"NO (1 of {NUM_PROMPTS} prompts)"
    assert drafted["speedup"] is None


def test_an_answer_stays_if_memory_runs_out_in_its_second_attempt(run_tiny: Evaluate, clock: Clock, tmp_path: Path) -> None:
    def stall_then_fail(prompt: str, method: str, repeat: int, attempt: int) -> float:
        if (prompt, method, attempt) == ("3", BASELINE, 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stall("3", BASELINE)(prompt, method, repeat, attempt)

    clock.stalls = stall_then_fail
    rows = run_tiny(tmp_path)
    assert [(row["out_of_memory"], row["noisy"], row["lossless"]) for row in rows] == [(False, True, True)] * 2


def test_what_stays_slow_is_noisy_and_leaves_the_median(run_tiny: Evaluate, clock: Clock, tmp_path: Path) -> None:
    clean = run_tiny(tmp_path / "clean")
    clock.stalls = stall("3", BASELINE, attempts=9)
    plain, drafted = run_tiny(tmp_path / "noisy")
    assert len(clock.decoded) == 2 * NUM_PROMPTS + 1, "it is decoded once more, not more often"
    assert (plain["noisy"], drafted["noisy"]) == (True, True)
    assert drafted["speedup"] == pytest.approx((drafted["tokens_per_second"] or 0) / (plain["tokens_per_second"] or 1))
    assert ", noisy by ReDrafter" in headline([plain, drafted])
    assert drafted["median_speedup"] == pytest.approx(clean[1]["median_speedup"])
    assert drafted["processor_speedup"] == pytest.approx(clean[1]["processor_speedup"])


@pytest.mark.slow
def test_an_accelerators_answers_are_compared_with_their_repeats(run_tiny, clock, tmp_path, monkeypatch):
    """There the process waits, so its processor time says nothing."""
    monkeypatch.setattr(measure.Bench, "computes", property(lambda self: False))
    clock.computes = False
    clean = run_tiny(tmp_path / "clean", repeats=3)
    clock.stalls = lambda prompt, method, repeat, attempt: STALL_SECONDS * ((prompt, repeat, attempt) == ("3", 1, 0))
    rows = run_tiny(tmp_path / "eval", repeats=3)
    again = [where for where, number in Counter(clock.decoded).items() if number > 1]
    assert sorted(again) == [("3", BASELINE, 1), ("3", "redrafter", 1)]
    assert [row["speedup"] for row in rows] == pytest.approx([row["speedup"] for row in clean])


def test_profiles_are_decoded_again_too(run_tiny: Evaluate, clock: Clock, tmp_path: Path) -> None:
    # Timed and profiled answers to prompt 0: the third decoding is the profile's first attempt.
    clock.stalls = lambda prompt, method, repeat, attempt: STALL_SECONDS * ((prompt, method, attempt) == ("0", "redrafter", 1))
    run_tiny(tmp_path, profile_prompts=2)
    assert clock.decoded.count(("0", "redrafter", 0)) == 3
    assert [record.seconds < STALL_SECONDS for record in read(tmp_path) if record.profiled] == [True] * 4


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the bars of an evaluation, with the number of answers after each update."""
    made: list[Any] = []

    class Bar(measure.tqdm):  # type: ignore[misc, type-arg]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, disable=False)
            made.append(SimpleNamespace(bar=self, totals=[self.total], counts=[self.n]))

        def update(self, n: float | None = 1) -> bool | None:
            result = super().update(n)
            made[-1].totals.append(self.total)
            made[-1].counts.append(self.n)
            return result

    monkeypatch.setattr(measure, "tqdm", Bar)
    return made


@pytest.mark.slow
def test_the_bar_counts_each_answer_once_and_only_goes_forward(run_tiny, clock, bars, tmp_path):
    """Also where answers are decoded again, and where a run is resumed."""
    options: dict[str, Any] = {"repeats": 2, "profile_prompts": 1}
    total = 2 * (2 * NUM_PROMPTS + 1)
    clock.stalls = stall("3", BASELINE, attempts=9)

    def interrupt(prompt: str, method: str, repeat: int, attempt: int) -> float:
        if (prompt, method, repeat) == ("2", BASELINE, 1):
            raise KeyboardInterrupt
        return stall("1", BASELINE, attempts=9)(prompt, method, repeat, attempt)

    clock.stalls = interrupt
    with pytest.raises(KeyboardInterrupt) as caught:
        run_tiny(tmp_path, **options)
    kept = len(read(tmp_path))
    assert 0 < kept < total
    assert str(caught.value).startswith(f"{kept} of {total} answers are kept in ")
    clock.stalls = stall("1", BASELINE, attempts=9)
    run_tiny(tmp_path, **options)
    first, second = bars
    assert {*first.totals, *second.totals} == {total}
    assert (first.counts[0], second.counts[0], second.counts[-1]) == (0, kept, total)
    for bar in bars:
        assert bar.counts == sorted(bar.counts)
    assert len(read(tmp_path)) == total
