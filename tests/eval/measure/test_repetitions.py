"""Repetitions: a stall of the machine or a jump of the clock hardly changes a measured speedup."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure import bench as measure
from outrider.eval.measure import timing
from outrider.eval.measure.jobs import Job
from outrider.eval.records.records import BASELINE, EvalRecord, RecordFile
from outrider.eval.report.card import model_card
from outrider.eval.report.card_options import CardOptions
from outrider.eval.report.page import write_report
from outrider.eval.results.headline import headline
from outrider.eval.results.rows import Row, is_broken, is_timeless
from outrider.eval.results.terminal import note_lines
from outrider.eval.run import evaluate
from outrider.models.llm.hf_target import HFTarget

NUM_PROMPTS = 10
MANY_PROMPTS = 30
NEW_TOKENS = 5
STEP_SECONDS, TREE_SECONDS, PREFILL_SECONDS = 0.010, 0.012, 0.015
STALL_SECONDS = 10.0
COMMAND = "outrider eval --drafter drafter --setting '{depth: 5}'"

PROMPTS = [[f"prompt {index}"] for index in range(NUM_PROMPTS)]

Evaluate = Callable[..., list[Row]]


@dataclasses.dataclass(kw_only=True)
class Clock:
    """Clock that only the target's passes advance, and the answers that it measured.

    `stalls` decides how many seconds to add in the middle of a job, and whether in its prefill.
    """

    now: float = 100.0
    stalled: float = 0.0
    """Seconds of all stalls, in which the process computes nothing."""
    jobs: list[Job] = dataclasses.field(default_factory=list)
    stalls: Callable[[Job], float] = lambda job: 0.0
    in_prefill: bool = False
    num_passes: int = 0

    def advance(self, seconds: float, *, is_prefill: bool = False) -> None:
        self.now += seconds
        self.num_passes = 0 if is_prefill else self.num_passes + 1
        if self.jobs and self.num_passes == (0 if self.in_prefill else 2):
            seconds = self.stalls(self.jobs[-1])
            self.now += seconds
            self.stalled += seconds

    @property
    def decoded(self) -> list[tuple[str, str, int]]:
        """Prompt, method and attempt of each measured answer."""
        return [(turn.prompt.id, job.method.name, job.attempt) for job in self.jobs for turn in job.batch.turns]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    result = Clock()
    prefill, verify, records = HFTarget.prefill, HFTarget.verify, measure.Bench._records

    def timed_prefill(self: HFTarget, *arguments: Any, **options: Any) -> Any:
        result.advance(PREFILL_SECONDS, is_prefill=True)
        return prefill(self, *arguments, **options)

    def timed_verify(self: HFTarget, last_token: torch.Tensor, tree: Any, *arguments: Any, **options: Any) -> Any:
        result.advance(TREE_SECONDS if tree.num_nodes else STEP_SECONDS)
        return verify(self, last_token, tree, *arguments, **options)

    def noted(self: measure.Bench, job: Job) -> list[EvalRecord]:
        result.jobs.append(job)
        return records(self, job)

    monkeypatch.setattr(HFTarget, "prefill", timed_prefill)
    monkeypatch.setattr(HFTarget, "verify", timed_verify)
    monkeypatch.setattr(measure.Bench, "_records", noted)
    monkeypatch.setattr(
        timing, "time", SimpleNamespace(perf_counter=lambda: result.now, process_time=lambda: result.now - result.stalled)
    )
    return result


@pytest.fixture
def run_tiny(tiny_target: HFTarget, tiny_drafter_dir: Path, tmp_path: Path, clock: Clock) -> Evaluate:
    """Return an evaluation that starts a new list of the clock's jobs."""

    def evaluate_tiny(output_dir: Path, prompts: Sequence[Sequence[str]] = PROMPTS, **changes: Any) -> list[Row]:
        lines = [{"question_id": str(index), "category": "all", "turns": turns} for index, turns in enumerate(prompts)]
        suite = tmp_path / "question.jsonl"
        suite.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "profile_prompts": 0, "warmup_prompts": 1, **changes}
        config = EvalConfig(suites=[SuiteConfig(name="spec_bench", path=str(suite))], memory_bandwidth_gbs=10.0, **options)
        clock.jobs.clear()
        return evaluate(config, tiny_target, tiny_target.tokenizer, [tiny_drafter_dir], output_dir, command=COMMAND)

    return evaluate_tiny


@pytest.fixture
def clean(run_tiny: Evaluate, tmp_path: Path) -> list[Row]:
    """Return the rows of an undisturbed run."""
    return run_tiny(tmp_path / "clean")


def read(output_dir: Path) -> list[EvalRecord]:
    with RecordFile(output_dir / "records.jsonl") as file:
        return list(file.records.values())


def stall(*answers: tuple[str, str], attempts: Sequence[int] = (0,), seconds: float = STALL_SECONDS) -> Callable[[Job], float]:
    """Return a function that stalls answers, which have a prompt and a method."""

    def seconds_of(job: Job) -> float:
        is_stalled = any((turn.prompt.id, job.method.name) in answers for turn in job.batch.turns)
        return seconds if is_stalled and job.attempt in attempts else 0.0

    return seconds_of


def test_stalls_hardly_change_the_speedup(run_tiny: Evaluate, clock: Clock, tmp_path: Path) -> None:
    """One stall of ten seconds in thirty answers, in decoding or in the prefill, and then ten."""
    prompts = [[f"prompt {index}"] for index in range(MANY_PROMPTS)]
    clean = run_tiny(tmp_path / "clean", prompts)
    assert len(clock.jobs) == 2 * MANY_PROMPTS
    # 1. One stall.
    for method, clock.in_prefill in (("baseline", True), ("redrafter", False)):
        clock.stalls = stall(("7", method))
        folder = tmp_path / method
        rows = run_tiny(folder, prompts)
        assert rows[1]["speedup"] == pytest.approx(clean[1]["speedup"], rel=0.02)
        assert rows[1]["speedup_ci95"] == pytest.approx(clean[1]["speedup_ci95"], rel=0.02)
        for row, expected in zip(rows, clean, strict=True):
            assert row["tokens_per_second"] == pytest.approx(expected["tokens_per_second"], rel=0.02)
            assert (row["num_repeated"], row["disturbed"]) == (1, [])
        # Every attempt is recorded: the pair was decoded once more.
        assert sorted(clock.decoded[2 * MANY_PROMPTS :]) == [("7", BASELINE, 1), ("7", "redrafter", 1)]
        assert Counter(record.attempt for record in read(folder)) == {0: 2 * MANY_PROMPTS, 1: 2}
        (disturbed,) = [record for record in read(folder) if record.seconds > STALL_SECONDS]
        assert (disturbed.prompt_id, disturbed.method, disturbed.attempt) == ("7", method, 0)
    # 2. Ten stalls.
    clock.stalls = stall(*((str(3 * index), ("baseline", "redrafter")[index % 2]) for index in range(10)))
    rows = run_tiny(tmp_path / "ten", prompts)
    assert len(clock.jobs) == 2 * (MANY_PROMPTS + 10)
    assert rows[1]["speedup"] == pytest.approx(clean[1]["speedup"], rel=0.05)
    assert (rows[1]["num_repeated"], rows[1]["disturbed"]) == (10, [])
    orders = {first.method.name for first in clock.jobs[2 * MANY_PROMPTS :: 2]}
    assert orders == {"baseline", "redrafter"}, "the order alternates"


def test_a_stalled_baseline_is_repeated_with_every_method_and_a_method_only_with_the_baseline(
    run_tiny: Evaluate, clock: Clock, tmp_path: Path
) -> None:
    settings: list[dict[str, Any]] = [{}, {"beam_width": 1}]
    clock.stalls = stall(("4", BASELINE), ("8", "redrafter"))
    rows = run_tiny(tmp_path / "eval", settings=settings)
    assert sorted(clock.decoded[3 * NUM_PROMPTS :]) == [
        ("4", "baseline", 1),
        ("4", "redrafter", 1),
        ("4", "redrafter beam_width=1", 1),
        ("8", "baseline", 1),
        ("8", "redrafter", 1),
    ]
    assert [row["num_repeated"] for row in rows] == [2, 2, 1]
    assert all(row["lossless"] and not row["disturbed"] for row in rows)


def test_what_stays_disturbed_is_marked_and_the_same_command_measures_it_again(
    clean: list[Row], run_tiny: Evaluate, clock: Clock, tmp_path: Path
) -> None:
    folder = tmp_path / "eval"
    pair = [("7", BASELINE), ("7", "redrafter")]
    for num_runs in (1, 2):
        clock.stalls = stall(*pair, attempts=range(100))
        rows = run_tiny(folder)
        repeated = clock.decoded if num_runs == 2 else clock.decoded[2 * NUM_PROMPTS :]
        attempts = range(2 * num_runs - 1, 2 * num_runs + 1)
        assert sorted(repeated) == sorted((*answer, attempt) for answer in pair for attempt in attempts)
        assert [[(answer["prompt_ids"], answer["side"]) for answer in row["disturbed"]] for row in rows] == [
            [(["7"], "baseline")],
            [(["7"], "baseline"), (["7"], "method")],
        ]
        assert all(answer["ratio"] > 3 for row in rows for answer in row["disturbed"])
        assert [row["num_repeated"] for row in rows] == [1, 1]
    clock.stalls = stall()
    rows = run_tiny(folder)
    assert sorted(clock.decoded) == [(*answer, 5) for answer in pair], "one undisturbed pair is enough"
    assert [row["disturbed"] for row in rows] == [[], []]
    assert rows[1]["speedup"] == pytest.approx(clean[1]["speedup"])
    written = (folder / "records.jsonl").read_bytes()
    assert run_tiny(folder) == rows
    assert clock.jobs == []
    assert (folder / "records.jsonl").read_bytes() == written


def test_a_killed_repetition_is_resumed(run_tiny: Evaluate, clock: Clock, tmp_path: Path) -> None:
    clock.stalls = stall(("7", BASELINE), ("2", "redrafter"))
    rows = run_tiny(tmp_path)
    keys = {record.key for record in read(tmp_path)}
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 2 * NUM_PROMPTS + 4
    for num_kept in range(2 * NUM_PROMPTS, len(lines)):
        (tmp_path / "records.jsonl").write_bytes(b"".join(lines[:num_kept]) + lines[num_kept][:50])
        again = run_tiny(tmp_path)
        assert len(clock.jobs) == len(lines) - num_kept
        assert {record.key for record in read(tmp_path)} == keys
        assert [row["speedup"] for row in again] == pytest.approx([row["speedup"] for row in rows])


def test_a_clock_that_jumps_backwards_is_a_disturbance(
    clean: list[Row], run_tiny: Evaluate, clock: Clock, tmp_path: Path
) -> None:
    clock.stalls = stall(("7", "redrafter"), seconds=-5.0)
    rows = run_tiny(tmp_path / "healed")
    assert [row["num_repeated"] for row in rows] == [1, 1]
    assert rows[1]["speedup"] == pytest.approx(clean[1]["speedup"])
    clock.stalls = stall(("7", "redrafter"), seconds=-5.0, attempts=range(9))
    rows = run_tiny(tmp_path / "marked")
    assert rows[1]["disturbed"] == [{"prompt_ids": ["7"], "turn": 0, "repeat": 0, "side": "method", "ratio": 0.0}]
    assert rows[1]["speedup"] == pytest.approx(clean[1]["speedup"], rel=0.02)
    assert rows[1]["num_compared"] == NUM_PROMPTS - 1
    assert [row.get("command") for row in rows] == [None, COMMAND]
    assert f"To measure only these answers again: `{COMMAND}`." in (tmp_path / "marked" / "table.md").read_text()
    json.dumps(rows, allow_nan=False)


def test_a_method_without_a_positive_time_does_not_take_down_the_others_results(
    clean: list[Row], run_tiny: Evaluate, clock: Clock, tiny_drafter_dir: Path, tmp_path: Path
) -> None:
    """Table, plots, report and card show the other methods' speeds, and an error for this one."""
    settings: list[dict[str, Any]] = [{}, {"beam_width": 1}]
    clock.stalls = lambda job: -50.0 if job.method.name == "redrafter beam_width=1" else 0.0
    folder = tmp_path / "eval"
    plain, drafted, timeless = run_tiny(folder, settings=settings)
    assert (drafted["speedup"], plain["disturbed"]) == (pytest.approx(clean[1]["speedup"]), [])
    assert (is_timeless(timeless), timeless["speedup"], is_broken(timeless)) == (True, None, False)
    texts = [
        (folder / "table.md").read_text(),
        write_report([folder], tmp_path / "report").read_text(),
        model_card(tiny_drafter_dir, CardOptions(evaluations=[folder], disturbed="mark")),
    ]
    for text in texts:
        assert "error: no positive time" in text
        assert f"{drafted['speedup']:.2f}x" in text
    assert "the clock jumped in all answers" in " ".join(note_lines([plain, drafted, timeless], 500))
    assert "error of measurement" in headline([plain, drafted, timeless])


@pytest.mark.parametrize(("num_prompts", "batch_size"), [(12, 4), (4, 4), (3, 1), (1, 1)])
def test_few_answers_and_few_batches_are_repeated_too(
    run_tiny: Evaluate, clock: Clock, tmp_path: Path, num_prompts: int, batch_size: int
) -> None:
    """Three have a median; for fewer, the processor seconds show that the process waited."""
    prompts = [[f"prompt {index}"] for index in range(num_prompts)]
    clean = run_tiny(tmp_path / "clean", prompts, batch_sizes=[batch_size])
    num_jobs = len(clock.jobs)
    clock.stalls = stall(("0", "redrafter"))
    rows = run_tiny(tmp_path / "eval", prompts, batch_sizes=[batch_size])
    assert len(clock.jobs) == num_jobs + 2
    assert [(row["num_repeated"], row["disturbed"]) for row in rows] == [(batch_size, [])] * 2
    assert rows[1]["speedup"] == pytest.approx(clean[1]["speedup"])
    clock.stalls = stall(("0", "redrafter"), attempts=range(9))
    rows = run_tiny(tmp_path / "marked", prompts, batch_sizes=[batch_size])
    assert [len(row["disturbed"]) for row in rows] == [0, 1]


def test_batches_turns_repeats_and_samples_are_repeated_too(run_tiny: Evaluate, clock: Clock, tmp_path: Path) -> None:
    prompts = [[f"first {index}", f"second {index}"] for index in range(6)]
    options: dict[str, Any] = {"batch_sizes": [2], "temperatures": [0.0, 0.8], "repeats": 2, "profile_prompts": 2}

    def stalls(job: Job) -> float:
        turn = job.batch.turns[0]
        where = (turn.prompt.id, turn.turn, turn.temperature, job.repeat, job.method.name, job.attempt, job.profiled)
        stalled = [("2", 0, 0.0, 0, BASELINE, 0, False), ("4", 1, 0.8, 1, "redrafter", 0, False)]
        return STALL_SECONDS if where in stalled else 0.0

    clock.stalls = stalls
    rows = run_tiny(tmp_path, prompts, **options)
    records = read(tmp_path)
    repeated = {(r.prompt_id, r.turn, r.temperature, r.repeat, r.method) for r in records if r.attempt}
    assert repeated == {
        *((prompt, 0, 0.0, 0, method) for prompt in "23" for method in (BASELINE, "redrafter")),
        *((prompt, 1, 0.8, 1, method) for prompt in "45" for method in (BASELINE, "redrafter")),
    }
    assert [(row["temperature"], row["num_repeated"]) for row in rows] == [(0.0, 2), (0.0, 2), (0.8, 2), (0.8, 2)]
    assert all(row["lossless"] and not row["disturbed"] for row in rows)
    texts = {(r.prompt_id, r.turn, r.temperature): (r.prompt_sha256, r.token_ids) for r in records if r.is_reference}
    again = [r for r in records if r.attempt]
    assert all(texts[r.prompt_id, r.turn, r.temperature] == (r.prompt_sha256, r.token_ids) for r in again)
    timed = [job for job in clock.jobs if not job.profiled]
    assert clock.jobs[: len(timed)] == timed, "profiles come last"


def test_a_wrong_token_in_a_repetition_is_caught(
    run_tiny: Evaluate, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.stalls = stall(("7", "redrafter"))
    original = measure.Bench._records

    def wrong(self: measure.Bench, job: Job) -> list[EvalRecord]:
        records = original(self, job)
        if job.attempt and job.method.name == "redrafter":
            records = [dataclasses.replace(r, token_ids=[*r.token_ids[:-1], (r.token_ids[-1] + 1) % 50]) for r in records]
        return records

    monkeypatch.setattr(measure.Bench, "_records", wrong)
    assert [is_broken(row) for row in run_tiny(tmp_path)] == [False, True]


def test_nothing_is_repeated_in_another_environment(
    run_tiny: Evaluate, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock.stalls = stall(("7", "redrafter"), attempts=range(9))
    rows = run_tiny(tmp_path)
    before = json.loads((tmp_path / "run.json").read_text())["environment"]["cpu"]
    for name in ("run.json", "records.jsonl"):
        text = (tmp_path / name).read_text()
        if name == "run.json":
            digest = measure.Environment(**json.loads(text)["environment"]).digest
            changed = {**json.loads(text)["environment"], "cpu": "another"}
            text = text.replace(json.dumps(before), '"another"')
        else:
            text = text.replace(digest, measure.Environment(**changed).digest)
        (tmp_path / name).write_text(text)
    assert run_tiny(tmp_path) == rows
    assert clock.jobs == []
    assert "1 disturbed answers or batches are not decoded again" in caplog.text
    assert "cpu (was 'another'" in caplog.text


def test_figures_stay_if_a_repetition_runs_out_of_memory(
    run_tiny: Evaluate, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock.stalls = stall(("7", "redrafter"))
    original = measure.Bench._records

    def limited(self: measure.Bench, job: Job) -> list[EvalRecord]:
        if job.attempt:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(self, job)

    monkeypatch.setattr(measure.Bench, "_records", limited)
    rows = run_tiny(tmp_path)
    assert not any(row["out_of_memory"] for row in rows)
    assert [len(row["disturbed"]) for row in rows] == [0, 1]
    assert "redrafter ran out of memory when an answer was repeated" in caplog.text


def test_the_progress_bar_counts_repetitions(
    run_tiny: Evaluate, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[Any] = []

    class Bar(measure.tqdm):  # type: ignore[type-arg, misc]
        def update(self, num: float | None = 1) -> bool | None:
            bars.append((self.n + (num or 0), self.total))
            return super().update(num)

    monkeypatch.setattr(measure, "tqdm", Bar)
    clock.stalls = stall(("7", "redrafter"), attempts=(0, 1))
    run_tiny(tmp_path)
    assert bars[2 * NUM_PROMPTS - 1 :] == [(20, 20), (21, 22), (22, 22), (23, 24), (24, 24)]


STOPPED = """
import json, os, signal, sys
from pathlib import Path
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure import bench
from outrider.eval.run import evaluate
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

target_dir, drafter_dir, suite, output_dir = sys.argv[1:]
verify, records, current = HFTarget.verify, bench.Bench._records, []

def stopping(self, *arguments, **options):
    if current and current[-1].batch.turns[0].prompt.id == "7" and current[-1].method.name == "redrafter":
        current.clear()
        os.kill(os.getpid(), signal.SIGSTOP)
    return verify(self, *arguments, **options)

def noted(self, job):
    if not job.attempt:
        current.append(job)
    return records(self, job)

HFTarget.verify, bench.Bench._records = stopping, noted
target = load_target(TargetConfig(name_or_path=target_dir, dtype="float32", device="cpu"))
config = EvalConfig(
    suites=[SuiteConfig(name="spec_bench", path=suite)], max_new_tokens=24, profile_prompts=0, memory_bandwidth_gbs=10.0
)
evaluate(config, target, target.tokenizer, [Path(drafter_dir)], Path(output_dir))
"""


@pytest.mark.slow
def test_a_process_that_was_stopped_for_ten_seconds_has_hardly_another_speedup(
    tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path
) -> None:
    """The stop is real. What the run would have measured without it is computed from the records.

    Two runs would differ by more than the stop does, on a busy machine.
    """
    # 1. An evaluation that is stopped in the middle of one answer, and continued after ten seconds.
    suite = tmp_path / "question.jsonl"
    lines = [{"question_id": str(index), "category": "all", "turns": [f"prompt {index}"]} for index in range(MANY_PROMPTS)]
    suite.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = tmp_path / "eval"
    command = [sys.executable, "-c", STOPPED, tiny_target_dir, tiny_drafter_dir, suite, folder]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        stopped = time.perf_counter()
        time.sleep(STALL_SECONDS)
        process.send_signal(signal.SIGCONT)
        stopped = time.perf_counter() - stopped
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
    # 2. The stalled answer was decoded again, and the speedup is that without the stop.
    row = json.loads((folder / "summary.json").read_text())[1]
    records = read(folder)
    (stalled,) = [record for record in records if record.decode_seconds > STALL_SECONDS - 1]
    assert (stalled.prompt_id, stalled.method, stalled.attempt) == ("7", "redrafter", 0)
    assert stalled.processor_seconds is not None
    assert stalled.processor_seconds < STALL_SECONDS / 2, "a stopped process uses no processor"
    assert row["num_repeated"] >= 1
    firsts = [record for record in records if record.attempt == 0]
    seconds = Counter[str]()
    for record in firsts:
        seconds[record.method] += record.seconds - (stopped if record is stalled else 0)  # type: ignore[assignment]
    assert seconds[BASELINE] / (seconds["redrafter"] + stopped) < 0.5 * row["speedup"], "without repetitions it was far off"
    assert row["speedup"] == pytest.approx(seconds[BASELINE] / seconds["redrafter"], rel=0.05)
