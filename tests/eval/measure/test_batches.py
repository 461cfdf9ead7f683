"""Batches of prompts: seconds, interrupted runs, and decoders with bugs in batches."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure import bench as measure
from outrider.eval.measure import methods
from outrider.eval.records.records import EvalRecord, RecordFile
from outrider.eval.report.runs import read_groups
from outrider.eval.results import stats
from outrider.eval.results.lossless import find_mismatches
from outrider.eval.results.rows import Row, is_broken
from outrider.eval.run import evaluate
from outrider.models.decoding import Acceptance, DraftTree, GreedyAcceptance, TargetOutput
from outrider.models.decoding.sampling import Randomness
from outrider.models.llm.hf_target import HFTarget
from outrider.models.phases import PhaseSeconds

from ..conftest import MakeRecord, read

NEW_TOKENS = 8
Evaluate = Callable[..., list[Row]]

QUESTIONS = (("a", ["ab", "again"]), ("b", ["word " * 1200]), ("c", ["xyz"]), ("d", ["x", "y"]), ("e", ["short", "longer"]))
"""Prompts of one and of two turns; the second of them doesn't fit the tiny target."""


@pytest.fixture
def run_tiny(tiny_target: HFTarget, tiny_drafter_dir: Path, tmp_path: Path) -> Evaluate:
    suite = tmp_path / "question.jsonl"
    lines = [{"question_id": name, "category": f"of {name}", "turns": turns} for name, turns in QUESTIONS]
    suite.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def evaluate_tiny(output_dir: Path, **changes: Any) -> list[Row]:
        options: dict[str, Any] = {"batch_sizes": [1, 3], "max_new_tokens": NEW_TOKENS, "profile_prompts": 1, "repeats": 1}
        config = EvalConfig(suites=[SuiteConfig(name="spec_bench", path=str(suite))], **{**options, **changes})
        return evaluate(config, tiny_target, tiny_target.tokenizer, [tiny_drafter_dir], output_dir)

    return evaluate_tiny


def test_each_batch_size_is_compared_with_plain_decoding_at_the_same_size(run_tiny: Evaluate, tmp_path: Path) -> None:
    rows = run_tiny(tmp_path / "eval")
    assert [(row["batch_size"], row["method"]) for row in rows] == [
        (1, "baseline"),
        (1, "redrafter"),
        (3, "baseline"),
        (3, "redrafter"),
    ]
    assert not any(is_broken(row) for row in rows)
    assert [(row["num_prompts"], row["num_turns"], row["num_skipped"]) for row in rows] == [(4, 7, 1)] * 4
    assert rows[2]["tokens_per_step"] == 1.0
    assert rows[2]["num_tokens"] == rows[0]["num_tokens"]
    assert all(values["speedup"] is not None for values in rows[1]["by_category"].values())
    # Three prompts of three categories share a batch, so no category has seconds.
    assert [name for name, values in rows[3]["by_category"].items() if values["speedup"] is not None] == ["of e"]
    together: dict[Any, list[str]] = defaultdict(list)
    for record in read(tmp_path / "eval"):
        if record.batch_size == 3 and not record.profiled:
            together[record.method, record.turn, record.batch].append(record.prompt_id)
    for method in ("baseline", "redrafter"):
        # The next prompt replaces the long one. A prompt without a second turn leaves the batch.
        assert together[method, 0, 0] == ["a", "c", "d"]
        assert together[method, 1, 0] == ["a", "d"]
        assert together[method, 0, 1] == together[method, 1, 1] == ["e"]
    # A row's accepted tokens are counted as if it were alone. The tokens that it reads may be
    # padded to the largest tree of the batch.
    counts: dict[Any, list[Any]] = defaultdict(list)
    for record in read(tmp_path / "eval"):
        numbers = (record.token_ids, record.accepted_histogram, record.truncated, record.prompt_sha256)
        counts[record.prompt_id, record.turn, record.method].append(numbers)
    assert len(counts) == 2 * 7
    assert all(len(values) >= 2 and values.count(values[0]) == len(values) for values in counts.values())
    pictures = sorted(path.name for path in (tmp_path / "eval").glob("*.png"))
    assert pictures == ["spec_bench-b3.png", "spec_bench.png"]
    assert "greedy, batch size 3" in (tmp_path / "eval" / "table.md").read_text()


@pytest.mark.slow
def test_a_run_killed_within_a_batch_measures_only_that_batch_again(run_tiny, tmp_path, monkeypatch):
    folder = tmp_path / "eval"
    run_tiny(folder, batch_sizes=[3], temperatures=[0.8], profile_prompts=0)
    whole = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    answers = {record.key: record.token_ids for record in read(folder)}
    sizes: list[int] = []
    original = measure.time_generation

    def counted(*args: Any, **kwargs: Any) -> Any:
        sizes.append(len(args[3]))
        return original(*args, **kwargs)

    monkeypatch.setattr(measure, "time_generation", counted)
    # Three rows of the baseline, three of the drafter, two and two of their second turns, then the
    # single prompts.
    for num_kept, missing in ((4, [3, 2, 2, 1, 1, 1, 1]), (8, [2, 1, 1, 1, 1]), (0, [3, 3, 2, 2, 1, 1, 1, 1])):
        (folder / "records.jsonl").write_bytes(b"".join(whole[:num_kept]) + whole[num_kept][:20])
        sizes.clear()
        run_tiny(folder, batch_sizes=[3], temperatures=[0.8], profile_prompts=0)
        # One row of the drafter's batch is not enough to keep it, and with 8 lines both rows of a
        # second turn were there.
        assert sizes == [3, 3, *missing], "a warm-up, and the rest"
        assert {record.key: record.token_ids for record in read(folder)} == answers


def test_a_batch_with_a_missing_line_is_dropped(make_record: MakeRecord, tmp_path: Path) -> None:
    rows = [make_record(prompt_id=str(index), batch_size=2, batch=index // 2, num_rows=2) for index in range(4)]
    path = tmp_path / "records.jsonl"
    with RecordFile(path) as file:
        file.append(*rows)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    for _ in range(2):  # The second reading shows that the line is gone from the file too.
        with RecordFile(path) as file:
            assert list(file.records.values()) == rows[2:]
    assert path.read_text() == "".join(lines[2:])


def batch(make_record: MakeRecord, seconds: float, steps: list[int], index: int = 0, **changes: Any) -> list[EvalRecord]:
    """Return the records of a batch. Row i took `steps[i]` steps of one token.

    The prefill took a quarter of the seconds.
    """
    return [
        make_record(
            prompt_id=f"{index}.{row}",
            batch_size=2,
            batch=index,
            num_rows=len(steps),
            accepted_histogram=[num_steps],
            prefill_seconds=seconds / 4,
            decode_seconds=3 * seconds / 4,
            **changes,
        )
        for row, num_steps in enumerate(steps)
    ]


def test_the_seconds_of_a_batch_are_counted_once(make_record: MakeRecord) -> None:
    records = batch(make_record, 2.0, [4, 9])
    assert stats.tokens_per_second(records) == (5 + 10) / 2.0
    assert stats.decode_tokens_per_second(records) == (4 + 9) / 1.5
    assert stats.tokens_per_step(records) == 1.0


def test_the_bootstrap_of_a_batched_speedup_draws_whole_batches(make_record: MakeRecord) -> None:
    plain = batch(make_record, 2.0, [9, 9]) + batch(make_record, 6.0, [9, 9], index=1)
    drafted = batch(make_record, 1.0, [9, 9], method="d") + batch(make_record, 2.0, [9, 9], index=1, method="d")
    point, interval = stats.speedup(plain, drafted, seed=0)
    assert point == pytest.approx(8 / 3)
    assert interval == (pytest.approx(2.0), pytest.approx(3.0))
    # Four prompts, but one batch: too few for an interval.
    assert stats.speedup(plain[:2], drafted[:2], seed=0) == (pytest.approx(2.0), None)


def test_a_batch_has_the_steps_of_its_longest_row(make_record: MakeRecord) -> None:
    phases = PhaseSeconds(draft=0.9, verify=0.3, accept=0.0)
    profiled = batch(make_record, 2.0, [9, 3], phase_seconds=phases)
    assert stats.draft_seconds_per_step(profiled) == pytest.approx(0.1)
    assert stats.time_split(profiled) == pytest.approx({"draft": 0.6, "verify": 0.2, "accept": 0.0, "rest": 0.2})
    # Plain decoding: 1.5 s in nine steps.
    assert stats.relative_draft_cost(profiled, profiled) == pytest.approx(0.1 / (1.5 / 9))


def test_answers_are_compared_within_their_batch_size(make_record: MakeRecord) -> None:
    single = make_record(token_ids=[4, 5, 6])
    plain = make_record(token_ids=[4, 5, 7], batch_size=2)
    drafted = make_record(token_ids=[4, 5, 6], batch_size=2, method="d")
    same = make_record(token_ids=[4, 5, 7], batch_size=2, method="e")
    mismatches = find_mismatches([single, plain, drafted, same])
    assert [(mismatch.record.method, mismatch.record.batch_size) for mismatch in mismatches] == [("baseline", 2), ("d", 2)]
    with pytest.raises(ValueError, match="no baseline record of the same prompt"):
        find_mismatches([single, drafted])


def test_batched_plain_decoding_is_compared_with_plain_decoding_of_single_prompts(make_record):
    """Without it, an error common to all methods in batches would pass for the target's answer."""
    single = make_record(token_ids=[4, 5, 6])
    wrong = make_record(token_ids=[4, 5, 7], batch_size=2)
    other_prompt = make_record(token_ids=[4, 5, 7], batch_size=2, prompt_sha256="ff", turn=1)
    mismatches = find_mismatches([single, wrong, make_record(turn=1), other_prompt])
    assert [mismatch.record for mismatch in mismatches] == [wrong]
    assert find_mismatches([wrong, other_prompt]) == []


class WrongForAll(GreedyAcceptance):
    """Decoder with a bug: the rows of a batch swap tokens, also in plain decoding."""

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance:
        right, tokens = super().__call__(tree, output, generator=generator), output.logits[:, 0].argmax(-1)
        return Acceptance(
            path=torch.full_like(right.path, -1),
            num_accepted=torch.zeros_like(right.num_accepted),
            entry=torch.zeros_like(right.entry),
            bonus_token=tokens if len(tokens) == 1 else tokens.flip(0),
        )


def test_wrong_plain_decoding_leaves_every_method_without_a_speedup(run_tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "GreedyAcceptance", WrongForAll)
    rows = run_tiny(tmp_path / "eval", profile_prompts=0)
    assert [is_broken(row) for row in rows] == [False, False, True, True]
    assert rows[3]["lossless_label"].startswith("NO: plain decoding is wrong")
    assert all(values["speedup"] is None for values in rows[3]["by_category"].values())


@pytest.mark.slow
def test_batched_plain_decoding_is_audited_if_no_prompt_was_decoded_alone(run_tiny, tmp_path, monkeypatch):
    """All methods have the same bug, so their answers agree."""
    options: dict[str, Any] = {"batch_sizes": [3], "profile_prompts": 0}
    rows = run_tiny(tmp_path / "right", **options)
    assert [row["lossless_label"] for row in rows] == ["yes", "yes"]
    # three prompts, two of them with two turns
    assert len(json.loads((tmp_path / "right" / "facts.json").read_text())["audits"]) == 5
    monkeypatch.setattr(methods, "GreedyAcceptance", WrongForAll)
    rows = run_tiny(tmp_path / "wrong", **options)
    assert [is_broken(row) for row in rows] == [True, True]
    assert rows[1]["lossless_label"].startswith("NO: plain decoding is wrong")


@pytest.mark.slow
def test_a_batch_size_can_be_added_to_a_finished_run_but_not_removed(run_tiny: Evaluate, tmp_path: Path) -> None:
    """The existing records stay unchanged."""
    folder = tmp_path / "eval"
    before = run_tiny(folder, batch_sizes=[3])
    lines = (folder / "records.jsonl").read_bytes()
    rows = run_tiny(folder, batch_sizes=[1, 3], temperatures=[0.7, 0.0])
    assert (folder / "records.jsonl").read_bytes().startswith(lines)
    assert [(row["temperature"], row["batch_size"]) for row in rows[::2]] == [(0.7, 1), (0.7, 3), (0.0, 1), (0.0, 3)]
    timed = [(row["method"], row["tokens_per_second"], row["speedup"]) for row in rows]
    assert timed[6:] == [(row["method"], row["tokens_per_second"], row["speedup"]) for row in before]
    written = (folder / "records.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"batch_sizes \(was \[1, 3\], is \[3\]\).* may add .* to remove some"):
        run_tiny(folder, batch_sizes=[3, 2], temperatures=[0.0, 0.7])
    with pytest.raises(ValueError, match="differs in methods.redrafter beam_width=1 "):
        run_tiny(folder, batch_sizes=[1, 3, 2], temperatures=[0.0, 0.7], settings=[{}, {"beam_width": 1}])
    assert (folder / "records.jsonl").read_bytes() == written
    assert len(read_groups([folder])[0].runs[0].rows) == len(rows)


def test_the_smaller_last_batch_of_a_suite_is_counted(make_record: MakeRecord) -> None:
    """Three prompts in batches of two: the third prompt has a batch of one."""
    records = batch(make_record, 2.0, [9, 4]) + batch(make_record, 1.0, [9], index=1)
    assert stats.tokens_per_second(records) == 25 / 3.0
    assert stats.answer_tokens_per_second(records) == 25 / (2.0 + 2.0 + 1.0)
    assert stats.rows_per_step(records) == (9 + 4 + 9) / (9 + 9)
