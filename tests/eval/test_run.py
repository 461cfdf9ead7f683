"""The evaluation stage on a tiny random target: measurement, resuming, and wrong decoders."""

import csv
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.chat import encode_prompt, template_digest
from outrider.data.conversations import Turn
from outrider.eval import audited, run
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure import bench as measure
from outrider.eval.measure import methods
from outrider.eval.measure.environment import describe_environment
from outrider.eval.measure.plan import answer_seed, evenly_spaced
from outrider.eval.measure.timing import Generation
from outrider.eval.records.records import EvalRecord
from outrider.eval.records.run_files import Audit, Place, read_info
from outrider.eval.report.page import write_report
from outrider.eval.report.runs import read_groups
from outrider.eval.results import lossless
from outrider.eval.results.rows import Row, is_broken, is_unproven
from outrider.eval.run import check_inputs, evaluate
from outrider.models.decoding import Acceptance, DraftTree, GreedyAcceptance, Sampling, SpeculativeSampling, TargetOutput
from outrider.models.decoding.sampling import Randomness
from outrider.models.drafters import build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.redrafter import Redrafter
from outrider.models.drafters.saved.parts import parse_drafter_name
from outrider.models.llm import linears
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from .conftest import forge_info, read

NEW_TOKENS = 8
NUM_TURNS = 4  # The second prompt doesn't fit.
NUM_PROFILED = 2  # one prompt of two turns
TWO_TEMPERATURES = [0.0, 0.8]
NUM_WARM_UPS = 2 * 3  # two prompts, with three methods

Evaluate = Callable[..., list[Row]]


@pytest.fixture
def config(questions: Path) -> EvalConfig:
    return EvalConfig(
        suites=[SuiteConfig(name="mt_bench", path=str(questions))],
        settings=[{}, {"beam_width": 1}],
        max_new_tokens=NEW_TOKENS,
        profile_prompts=1,
        repeats=1,
    )


@pytest.fixture
def run_tiny(tiny_target: HFTarget, tiny_drafter_dir: Path, config: EvalConfig) -> Evaluate:
    def evaluate_tiny(output_dir: Path, target: HFTarget = tiny_target, **changes: Any) -> list[Row]:
        return evaluate(replace(config, **changes), target, target.tokenizer, [tiny_drafter_dir], output_dir)

    return evaluate_tiny


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record every call of the decode loop in order."""
    calls: list[dict[str, Any]] = []
    original = measure.time_generation

    def counted(*args: Any, **kwargs: Any) -> Generation:
        calls.append({"drafter": args[1], **kwargs})
        return original(*args, **kwargs)

    monkeypatch.setattr(measure, "time_generation", counted)
    return calls


@pytest.mark.usefixtures("real_plots")
def test_a_random_drafter_is_lossless_and_everything_is_written(run_tiny: Evaluate, tmp_path: Path) -> None:
    rows = run_tiny(tmp_path)
    assert [row["method"] for row in rows] == ["baseline", "redrafter", "redrafter beam_width=1"]
    for row in rows:
        assert row["lossless"] is True
        assert row["lossless_label"] == "yes"
        assert (row["num_prompts"], row["num_turns"], row["num_skipped"]) == (2, NUM_TURNS, 2)
        assert row["tokens_per_step"] is not None
        assert 1.0 <= row["tokens_per_step"] <= 4.0
        assert row["time_split"] is not None
        assert sum(row["time_split"].values()) == pytest.approx(1.0)
        assert set(row["by_category"]) == {"math", "stem"}
    assert rows[0]["tokens_per_step"] == 1.0
    assert rows[1]["speedup_ci95"] is not None
    assert rows[1]["ceiling"] is not None
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(rows))
    assert "2 turns were SKIPPED" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "mt_bench.png").stat().st_size > 0
    records = read(tmp_path)
    assert len(records) == 3 * (NUM_TURNS + NUM_PROFILED)


@pytest.mark.slow
def test_timed_runs_have_no_phase_timers_and_orders_rotate(run_tiny, generated, tmp_path):
    run_tiny(tmp_path)
    warm_ups, rest = generated[:NUM_WARM_UPS], generated[NUM_WARM_UPS:]
    timed, profiled = rest[: 3 * NUM_TURNS], rest[3 * NUM_TURNS :]
    assert len(profiled) == 3 * NUM_PROFILED
    assert [call["timed"] for call in warm_ups + timed] == [False] * (NUM_WARM_UPS + 3 * NUM_TURNS)
    assert all(call["timed"] for call in profiled)
    drafters = [call["drafter"] for call in warm_ups[:3]]
    orders = [[drafters.index(call["drafter"]) for call in timed[start : start + 3]] for start in range(0, len(timed), 3)]
    # Prompts 0 and 2, both turns. The order rotates by one for each answered prompt.
    assert orders == [[0, 1, 2], [0, 1, 2], [1, 2, 0], [1, 2, 0]]


@pytest.mark.parametrize("is_padded", [False, True])
def test_drafts_are_counted_as_the_target_reads_them(run_tiny, tmp_path, monkeypatch, is_padded):
    """Two beams of three tokens. A shared first token, or two, is read once and not twice, unless trees are padded."""
    if is_padded:
        monkeypatch.setattr(Redrafter, "trim", lambda self, tree: tree)
    rows = run_tiny(tmp_path, settings=[{}])
    assert [row["lossless"] for row in rows] == [True] * 2
    assert drafts_per_step(tmp_path)["baseline"] == {0}
    assert all(4 <= number <= 6 for number in drafts_per_step(tmp_path)["redrafter"])
    assert (rows[1]["draft_tokens_per_step"] == 6.0) == is_padded


def test_samples_are_the_baselines_very_tokens_and_its_answer_precedes_the_second_turn(run_tiny, tiny_target, tmp_path):
    rows = run_tiny(tmp_path, temperatures=TWO_TEMPERATURES, settings=[{}], profile_prompts=0)
    assert [row["lossless_label"] for row in rows] == ["yes"] * 4
    by_turn = {(r.prompt_id, r.turn, r.temperature, r.method): r for r in read(tmp_path)}
    for temperature in TWO_TEMPERATURES:
        tokens = by_turn["2", 0, temperature, "baseline"].token_ids
        messages = [
            Turn(role="user", content="xyz"),
            Turn(role="assistant", content=str(tiny_target.tokenizer.decode(tokens, skip_special_tokens=True))),
            Turn(role="user", content="more"),
        ]
        expected = str(encode_prompt(messages, tiny_target.tokenizer)[0].tolist())
        for method in ("baseline", "redrafter"):
            second = by_turn["2", 1, temperature, method]
            assert second.prompt_sha256 == hashlib.sha256(expected.encode()).hexdigest()
            assert second.context_from == "baseline"
    assert {record.context_from for record in by_turn.values() if record.turn == 0} == {None}
    for (*place, temperature, method), record in by_turn.items():
        assert record.token_ids == by_turn[*place, temperature, "baseline"].token_ids, (temperature, method)
        assert record.token_ids != by_turn[*place, 0.8 - temperature, method].token_ids, "greedy or sampled"


def test_a_run_killed_at_any_point_measures_only_the_missing_answers(run_tiny, generated, tiny_target, tmp_path, monkeypatch):
    """A resumed run computes linear layers as before, though another way would be faster now."""
    monkeypatch.setattr(linears, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(linears, "timed", lambda *_: linears.Times((9, 9, 9), (1, 1, 1), (9, 9, 9)))
    rows = run_tiny(tmp_path)
    chosen = read_info(tmp_path / "run.json").environment.linears
    assert "columns first" in chosen.values()
    monkeypatch.setattr(linears, "timed", lambda *_: linears.Times((1, 1, 1), (9, 9, 9), (9, 9, 9)))
    whole = (tmp_path / "records.jsonl").read_bytes().splitlines(keepends=True)
    tokens = [record.token_ids for record in read(tmp_path)]
    for num_kept in (5, len(whole)):
        torn = whole[num_kept][:30] if num_kept < len(whole) else b""
        (tmp_path / "records.jsonl").write_bytes(b"".join(whole[:num_kept]) + torn)
        generated.clear()
        again = run_tiny(tmp_path)
        num_missing = len(whole) - num_kept
        assert len(generated) == (NUM_WARM_UPS + num_missing if num_missing else 0)
        assert [record.token_ids for record in read(tmp_path)] == tokens
        assert [row["tokens_per_step"] for row in again] == [row["tokens_per_step"] for row in rows]
        assert tiny_target.linears == chosen
    assert again == rows
    tiny_target.plain_linears()


def test_records_of_another_evaluation_are_never_mixed(run_tiny: Evaluate, tmp_path: Path) -> None:
    run_tiny(tmp_path)
    before = (tmp_path / "records.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"differs in max_new_tokens \(was 8, is 6\)"):
        run_tiny(tmp_path, max_new_tokens=6)
    with pytest.raises(ValueError, match=r"methods\.redrafter beam_width=4 \(was None"):
        run_tiny(tmp_path, settings=[{}, {"beam_width": 4}])
    assert (tmp_path / "records.jsonl").read_bytes() == before
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"holds records but no run\.json"):
        run_tiny(tmp_path)


@pytest.mark.slow
def test_an_incomplete_run_is_not_finished_in_another_environment(run_tiny: Evaluate, tmp_path: Path) -> None:
    rows = run_tiny(tmp_path)
    information = json.loads((tmp_path / "run.json").read_text())
    digest = read_info(tmp_path / "run.json").environment.digest
    information["environment"]["cpu"] = "another"
    forge_info(tmp_path, information)
    with pytest.raises(
        ValueError, match=rf"records.jsonl holds records of another evaluation: .* environment_digest '{digest}'"
    ):
        run_tiny(tmp_path)
    text = (tmp_path / "records.jsonl").read_text()
    (tmp_path / "records.jsonl").write_text(text.replace(digest, read_info(tmp_path / "run.json").environment.digest))
    assert run_tiny(tmp_path) == rows  # The run is complete, so no record is added.
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"another environment, which differs in cpu \(was 'another"):
        run_tiny(tmp_path)


def test_each_tuned_setting_is_evaluated_at_its_temperature_and_batch_size(tiny_target, tiny_drafter_dir, config, tmp_path):
    config = replace(config, settings=[{}], batch_sizes=[1, 2], profile_prompts=0)
    tuned: dict[Place, Any] = {(0.0, 1): {"beam_width": 1}, (0.0, 2): None}

    def evaluate_tuned(config: EvalConfig) -> list[Row]:
        choices = {tiny_drafter_dir: {key: tuned[key] for key in product(config.temperatures, config.batch_sizes)}}
        return evaluate(config, tiny_target, tiny_target.tokenizer, [tiny_drafter_dir], tmp_path / "eval", tuned=choices)

    evaluate_tuned(replace(config, batch_sizes=[1]))
    rows = evaluate_tuned(config)  # This adds a batch size and its tuned setting.
    assert [(row["batch_size"], row["method"]) for row in rows] == [
        (1, "baseline"),
        (1, "redrafter tuned beam_width=1"),
        (2, "baseline"),
        (2, "redrafter tuned off"),
    ]
    assert drafts_per_step(tmp_path / "eval") == {
        "baseline": {0},
        "redrafter tuned beam_width=1": {3},
        "redrafter tuned off": {0},
    }
    assert rows[3]["tokens_per_step"] == 1.0
    assert rows[3]["parameters"] is None
    assert [path.name for path in sorted((tmp_path / "eval" / "answers" / "mt_bench-b2").iterdir())] == [
        "baseline.jsonl",
        "redrafter_tuned_off.jsonl",
    ]
    labels = [(entry.label, entry.detail) for entry in read_groups([tmp_path / "eval"])[0].entries]
    assert labels[3] == ("ReDrafter", "turned off by tuning")
    tuned[0.0, 1] = {"beam_width": 2}
    with pytest.raises(ValueError, match="differs in methods.redrafter tuned beam_width=1 "):
        evaluate_tuned(config)


class SamplesHotter(SpeculativeSampling):
    """Rule with a bug: it verifies draft trees at another temperature than plain decoding's."""

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance:
        right = SpeculativeSampling(sampling=self.sampling)
        wrong = SpeculativeSampling(sampling=Sampling(temperature=2 * self.sampling.temperature))
        return (wrong if tree.num_nodes else right)(tree, output, generator=generator)


@pytest.mark.slow
def test_a_sampler_of_a_wrong_distribution_is_caught(run_tiny, tiny_target_dir, tmp_path, monkeypatch):
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="bfloat16", device="cpu"))
    options: dict[str, Any] = {"temperatures": TWO_TEMPERATURES, "settings": [{}], "max_new_tokens": 24}
    assert not any(is_broken(row) for row in run_tiny(tmp_path / "right", target, **options))
    monkeypatch.setattr(methods, "SpeculativeSampling", SamplesHotter)
    rows = run_tiny(tmp_path / "wrong", target, **options)
    assert [is_broken(row) for row in rows] == [False, False, False, True]
    table = (tmp_path / "wrong" / "table.md").read_text()
    assert "ReDrafter, 2 beams of 3 on mt_bench (temperature 0.8) is NOT LOSSLESS, so it has no speedup" in table


def test_every_answer_has_a_different_seed_that_is_the_same_for_all_methods() -> None:
    keys = [(seed, suite, prompt, turn) for seed in (0, 1) for suite in ("a", "b") for prompt in ("1", "2") for turn in (0, 1)]
    assert len({answer_seed(*key) for key in keys}) == len(keys) == 16
    assert answer_seed(0, "a", "1", 0) == answer_seed(0, "a", "1", 0)


class AcceptsAnything(GreedyAcceptance):
    """Rule with a bug: it always accepts the first node of a tree."""

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance:
        if tree.num_nodes == 0:
            return super().__call__(tree, output, generator=generator)
        path = tree.lineage[:, 0].clone()
        path[:, 0], path[:, 1:] = 0, -1
        one = torch.ones_like(path[:, 0])
        return Acceptance(path=path, num_accepted=one, entry=one, bonus_token=output.logits[:, 1].argmax(-1))


def test_a_decoder_broken_on_purpose_is_caught(run_tiny: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "GreedyAcceptance", AcceptsAnything)
    rows = run_tiny(tmp_path)
    assert [is_broken(row) for row in rows] == [False, True, True]
    assert [row["lossless"] for row in rows] == [True, False, False]
    assert rows[1]["speedup"] is None
    assert rows[1]["speedup_ci95"] is None
    assert rows[1]["lossless_label"] == "NO (2 of 2 prompts)"
    assert rows[1]["first_mismatch"] is not None
    assert "NOT LOSSLESS" in (tmp_path / "table.md").read_text()


def test_a_suite_without_a_fitting_prompt_is_an_error(run_tiny: Evaluate, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no prompt of mt_bench fits the context window of 1024"):
        run_tiny(tmp_path, max_new_tokens=1023)


def test_several_drafters_are_named_by_their_directories(tiny_drafter_dir: Path, config: EvalConfig, tmp_path: Path) -> None:
    copies = [Path(shutil.copytree(tiny_drafter_dir, tmp_path / name / "drafter")) for name in ("one", "two")]
    config = replace(config, settings=[{}])
    assert list(methods.method_specs(config, copies)) == ["redrafter one", "redrafter two"]
    with pytest.raises(ValueError, match="would be evaluated twice"):
        check_inputs(config, [copies[0]] * 2)


def test_known_facts_of_a_drafters_training_are_shown(tiny_target, tiny_drafter_dir, config, tmp_path, caplog):
    directory = tmp_path / "drafter"
    shutil.copytree(tiny_drafter_dir, directory)
    parameters = sum(parameter.numel() for parameter in load_drafter(directory, tiny_target).parameters())
    facts = {"steps": 3, "seconds": 1.5, "positions_seen": 9, "tokens_seen": 20, "parameters": parameters}
    facts |= {"labels": "text", "hardware": "one CPU", "chat_template": template_digest(tiny_target.tokenizer)}
    config = replace(config, settings=[{}])

    def evaluate_here() -> list[Row]:
        return evaluate(config, tiny_target, tiny_target.tokenizer, [directory], tmp_path / "eval")

    _, unknown = evaluate_here()
    assert (unknown["parameters"], unknown["training"]) == (parameters, None)
    (directory / "training.json").write_text(json.dumps({**facts, "tokens_per_step_estimate": 1.2}))
    plain, known = evaluate_here()
    assert known["training"] == {**facts, "tokens_per_step_estimate": 1.2}
    assert (plain["parameters"], plain["training"]) == (None, None)
    assert "chat template" not in caplog.text
    other = {**facts, "tokens_per_step_estimate": 1.2, "chat_template": "0" * 16}
    (directory / "training.json").write_text(json.dumps(other))
    evaluate_here()
    assert f"{directory} was trained with another chat template" in caplog.text
    for text, message in (("{", "not a JSON file"), (json.dumps(facts), "tokens_per_step_estimate: is missing")):
        (directory / "training.json").write_text(text)
        with pytest.raises(ValueError, match=f"training.json.*{message}"):
            check_inputs(config, [directory])


def test_a_sample_for_profiling_is_spread_over_the_suite() -> None:
    assert evenly_spaced(range(80), 4) == [0, 20, 40, 60]
    assert evenly_spaced(range(3), 5) == [0, 1, 2]
    assert evenly_spaced(range(3), 0) == []


def drafts_per_step(folder: Path) -> dict[str, set[float]]:
    """Return each method's numbers of draft tokens per verify step."""
    result: dict[str, set[float]] = {}
    for record in read(folder):
        result.setdefault(record.method, set()).add(record.num_draft_tokens / sum(record.accepted_histogram))
    return result


@pytest.mark.slow
def test_typical_acceptance_is_marked_as_lossy(tiny_target: HFTarget, config: EvalConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": "draft_model", "init": "target_layers", "num_layers": 1}), tiny_target)
    save_drafter(drafter, tmp_path / "drafter", tiny_target.identity)
    config = replace(config, settings=[{}], temperatures=[0.0, 1.0], acceptance="typical")
    rows = evaluate(config, tiny_target, tiny_target.tokenizer, [tmp_path / "drafter"], tmp_path / "eval")
    assert [row["lossless_label"] for row in rows] == ["yes", "yes", "yes", "no, by rule"]
    assert [row["lossless"] for row in rows] == [True, True, True, False]
    assert rows[3]["speedup"] is not None
    assert "typical acceptance (arXiv 2401.10774" in (tmp_path / "eval" / "table.md").read_text()
    with pytest.raises(ValueError, match="differs in acceptance"):
        evaluate(
            replace(config, acceptance="exact"), tiny_target, tiny_target.tokenizer, [tmp_path / "drafter"], tmp_path / "eval"
        )


ON_A_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
ON_A_CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")


def run_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
    is_too_large: Callable[[Any, Sequence[torch.Tensor]], bool],
    error: Exception = ON_A_GPU,
    timed_only: bool = False,
) -> list[int]:
    """Simulate a device with too little memory for some drafters' batches of prompts.

    With `timed_only`, only calls with phase timers run out of memory. Returns a list with an entry
    for each released cache.
    """
    released: list[int] = []
    original, release = measure.time_generation, HFTarget.release_cache

    def limited(target: HFTarget, drafter: Any, rule: Any, prompts: Sequence[torch.Tensor], **options: Any) -> Generation:
        result = original(target, drafter, rule, prompts, **options)
        if is_too_large(drafter, prompts) and (options["timed"] or not timed_only):
            raise error
        return result

    def counted(self: HFTarget) -> None:
        released.append(1)
        release(self)

    monkeypatch.setattr(measure, "time_generation", limited)
    monkeypatch.setattr(HFTarget, "release_cache", counted)
    return released


def figures(rows: Sequence[Row]) -> dict[tuple[int, str], float | None]:
    return {(row["batch_size"], row["method"]): row["tokens_per_step"] for row in rows}


@pytest.mark.slow
def test_a_method_that_runs_out_of_memory_is_left_out_and_the_others_are_measured(run_tiny, tmp_path, monkeypatch, caplog):
    """Its second batch after the warm-up is too large.

    Its earlier answers stay, and a resumed run measures the rest.
    """
    options: dict[str, Any] = {"batch_sizes": [1, 2], "temperatures": TWO_TEMPERATURES}
    with monkeypatch.context() as small:
        tried: list[int] = []

        def is_too_large(drafter: Any, prompts: Sequence[torch.Tensor]) -> bool:
            large = getattr(drafter, "max_nodes", 0) == 6 and len(prompts) == 2
            tried.extend([1] * large)
            return large and len(tried) in (4, 6)

        released = run_out_of_memory(small, is_too_large)
        rows = run_tiny(tmp_path / "eval", **options)
    assert len(tried) == 6, "two warm-ups; and at each temperature one batch was answered, and one was not"
    assert len(released) == 2
    assert "redrafter ran out of memory on mt_bench (temperature 0.8, batch size 2)" in caplog.text
    missing = [(row["temperature"], row["batch_size"], row["method"]) for row in rows if row["out_of_memory"]]
    assert missing == [(temperature, 2, "redrafter") for temperature in TWO_TEMPERATURES]
    assert [key for key, value in figures(rows).items() if value is None] == [(2, "redrafter")]
    assert not any(is_broken(row) for row in rows)
    kept = [record for record in read(tmp_path / "eval") if record.method == "redrafter" and record.batch_size == 2]
    assert len(kept) == 4, "two rows of one batch at each temperature"
    shown_everywhere(tmp_path / "eval")

    again = run_tiny(tmp_path / "eval", **options)
    assert not any(row["out_of_memory"] for row in again)
    assert len(again) == len(rows)
    assert json.loads((tmp_path / "eval" / "facts.json").read_text())["out_of_memory"] == []


def names_of(folder: Path) -> dict[str, str]:
    """Return the names of methods in tables, by the method's key."""
    rows = json.loads((folder / "summary.json").read_text())
    return {row["method"]: row["label"] for row in rows}


def shown_everywhere(folder: Path) -> None:
    """Check that all tables and a report show OOM instead of figures."""
    table = (folder / "table.md").read_text()
    name = names_of(folder)["redrafter"]
    (line,) = [line for line in table.splitlines() if line.startswith(f"| mt_bench | 0 | 2 | {name} |")]
    assert line.split("|")[5:8] == [" - ", " OOM ", " OOM "]
    assert "OOM: memory ran out" in table
    header, *lines = csv.reader((folder / "table.csv").read_text().splitlines())
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    result = {(row["batch_size"], row["method"]): (row["out_of_memory"], row["tokens_per_second"] == "") for row in rows}
    assert result["2", "redrafter"] == ("True", True)
    assert result["2", "redrafter beam_width=1"] == result["1", "redrafter"] == ("False", False)
    assert sorted(path.name for path in folder.glob("answers/mt_bench-b2/*")) == [
        "baseline.jsonl",
        "redrafter_beam_width=1.jsonl",
    ]
    assert (folder / "mt_bench-b2.png").stat().st_size > 0
    page = write_report([folder], folder / "report").read_text()
    assert page.count(">OOM<") > 2
    assert "OOM: memory ran out" in page


@pytest.mark.slow
def test_no_method_has_figures_if_plain_decoding_runs_out_of_memory(run_tiny, tmp_path, monkeypatch, caplog):
    run_out_of_memory(monkeypatch, lambda drafter, prompts: len(prompts) == 2 and not drafter.max_nodes, ON_A_CPU)
    rows = run_tiny(tmp_path / "eval", batch_sizes=[1, 2])
    assert [key for key, value in figures(rows).items() if value is None] == [
        (2, method) for method in ("baseline", "redrafter", "redrafter beam_width=1")
    ]
    assert (
        "plain decoding ran out of memory on mt_bench (temperature 0, batch size 2): without it no method has a speedup"
        in caplog.text
    )
    folder = tmp_path / "eval"
    assert write_report([folder], folder / "report").read_text().count(">OOM<") > 3
    assert not (folder / "mt_bench-b2.png").exists(), "of nothing there is no plot"


def test_an_evaluation_that_does_not_fit_into_memory_at_all_is_an_error(run_tiny, tmp_path, monkeypatch):
    run_out_of_memory(monkeypatch, lambda drafter, prompts: True)
    with pytest.raises(ValueError, match="plain decoding ran out of memory on every suite .* lower the batch size"):
        run_tiny(tmp_path / "eval")


def test_an_error_that_is_not_of_memory_ends_the_evaluation(run_tiny, tmp_path, monkeypatch):
    def fail(*arguments: Any, **options: Any) -> Generation:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(measure, "time_generation", fail)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run_tiny(tmp_path / "eval")


@pytest.mark.slow
def test_an_out_of_memory_error_in_a_profile_loses_only_this_profile(run_tiny, tmp_path, monkeypatch, caplog):
    """The second batch is too large, after two warm-ups, the answers and the first profile."""
    tried: list[int] = []

    def is_too_large(drafter: Any, prompts: Sequence[torch.Tensor]) -> bool:
        return drafter.max_nodes == 6 and (tried.append(1) or len(tried) > 2 + NUM_TURNS + 1)

    run_out_of_memory(monkeypatch, is_too_large, timed_only=True)
    rows = run_tiny(tmp_path / "eval")
    assert "redrafter ran out of memory on mt_bench (temperature 0, batch size 1) when it was profiled" in caplog.text
    for row in rows:
        assert (row["out_of_memory"], row["lossless"], row["num_turns"]) == (False, True, NUM_TURNS)
        assert None not in (row["speedup"], row["time_split"])
    assert json.loads((tmp_path / "eval" / "facts.json").read_text())["out_of_memory"] == []
    assert len([record for record in read(tmp_path / "eval") if record.profiled and record.method == "redrafter"]) == 1


@pytest.fixture
def differing(tiny_target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate low precision: the last token of one method's first answer differs.

    All other answers equal plain decoding's.
    """
    monkeypatch.setattr(audited, "to_audit", lambda records, mismatches, dtype: [item.record for item in mismatches])
    monkeypatch.setattr(lossless, "to_audit", audited.to_audit)
    original = measure.Bench._records
    changed: list[str] = []

    def swapped(self: Any, job: Any, generation: Generation) -> list[EvalRecord]:
        records = original(self, job, generation)
        if job.method.name == "redrafter" and not changed:
            changed.append(job.method.name)
            tokens = records[0].token_ids
            records[0] = replace(records[0], token_ids=[*tokens[:-1], (tokens[-1] + 1) % 50])
        return records

    monkeypatch.setattr(measure.Bench, "_records", swapped)


def run_out_in_audits(monkeypatch: pytest.MonkeyPatch, num_failing: int) -> list[int]:
    """Make the first `num_failing` audits run out of memory. All others pass.

    Returns a list with an entry for each attempt.
    """
    tried: list[int] = []

    def limited(*arguments: Any, answers: Sequence[list[int]], **options: Any) -> list[Audit]:
        tried.append(1)
        if len(tried) <= num_failing:
            raise ON_A_GPU
        return [Audit(deficit=0.0, position=0, noise=1.0, ends_rightly=True, within_noise=True) for _ in answers]

    monkeypatch.setattr(audited, "audits", limited)
    return tried


@pytest.mark.slow
def test_an_audit_that_runs_out_of_memory_is_tried_once_more(run_tiny, differing, tmp_path, monkeypatch):
    tried = run_out_in_audits(monkeypatch, 1)
    assert [row["lossless_label"] for row in run_tiny(tmp_path)] == ["yes", "within noise (1)", "yes"]
    assert len(tried) == 2


@pytest.mark.slow
def test_an_answer_is_unproven_if_its_audit_runs_out_of_memory_twice(run_tiny, differing, tmp_path, monkeypatch, caplog):
    run_out_in_audits(monkeypatch, 2)
    folder = tmp_path / "eval"
    plain, unproven, narrow = run_tiny(folder)
    assert unproven["lossless_label"] == "unproven (1 of 2 prompts not audited)"
    assert (unproven["lossless"], unproven["speedup"], unproven["num_unaudited"]) == (False, None, 1)
    assert unproven["tokens_per_second"] is not None
    assert is_unproven(unproven)
    assert [row["lossless_label"] for row in (plain, narrow)] == ["yes", "yes"]
    assert "was not audited, because memory ran out" in caplog.text
    table = (folder / "table.md").read_text()
    assert "NOT PROVEN to be lossless" in table
    assert "NOT LOSSLESS" not in table
    page = write_report([folder], tmp_path / "report").read_text()
    assert ">unproven <small>" in page

    run_out_in_audits(monkeypatch, 0)
    assert run_tiny(folder)[1]["lossless_label"] == "within noise (1)", "the same command audits it"


@pytest.mark.parametrize(("budget", "num_rows"), [(None, 8), (64, 2), (10, 1)])
def test_as_many_answers_are_audited_together_as_a_budget_has_room_for(tiny_target_dir, budget, num_rows):
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="bfloat16", device="cpu"))
    target.budget_tokens, sizes = budget, list[int]()

    def work(answers: Sequence[list[int]]) -> list[Audit]:
        sizes.append(len(answers))
        return [Audit(deficit=0.0, position=0, noise=1.0, ends_rightly=True, within_noise=True) for _ in answers]

    found = audited.audit_within_memory(work, [(number,) for number in range(9)], target, 30)
    assert len(found) == 9
    assert max(sizes) == num_rows


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"of": "x", "audits": {"a": {"wrong": 1}}}'])
def test_a_damaged_file_of_audits_is_left_out(tmp_path, text, caplog):
    (tmp_path / "audits.json").write_text(text)
    assert audited.read_audits(tmp_path / "audits.json", "x") == {}
    assert "are audited again" in caplog.text


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_audits_goes_on_with_the_next(run_tiny, tiny_target_dir, tmp_path, monkeypatch):
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="bfloat16", device="cpu"))
    original, asked = audited.audits, list[int]()

    def killed_at_the_third(*arguments: Any, **options: Any) -> list[Audit]:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(audited, "audits", killed_at_the_third)
    monkeypatch.setattr(audited, "to_audit", lambda records, mismatches, dtype: list(records))
    monkeypatch.setattr(lossless, "to_audit", audited.to_audit)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tmp_path, target)
    kept = json.loads((tmp_path / "audits.json").read_text())["audits"]
    assert kept
    rows = run_tiny(tmp_path, target)
    assert not any(is_broken(row) or is_unproven(row) for row in rows), "processors round differently: some answers may differ"
    assert len(asked) == NUM_TURNS + 1, "each prompt once, and the third one again"
    audits = json.loads((tmp_path / "facts.json").read_text())["audits"]
    assert kept.items() <= audits.items()

    # A finished run has all audits, on every machine; one that is missing is made where the run began.
    monkeypatch.setattr(audited, "audits", lambda *_, **__: pytest.fail("audited again"))
    elsewhere = replace(describe_environment(target.device, target.linears), cpu="another")
    monkeypatch.setattr(run, "describe_environment", lambda *_: elsewhere)
    assert run_tiny(tmp_path, target) == rows
    (tmp_path / "audits.json").unlink()
    with pytest.raises(ValueError, match="started in another environment, which differs in cpu"):
        run_tiny(tmp_path, target)


@pytest.mark.slow
def test_answers_are_unproven_if_the_audit_of_plain_decoding_runs_out_of_memory(run_tiny, tmp_path, monkeypatch):
    """Without single prompts, only audits of plain answers compare decoding with the target."""
    run_out_in_audits(monkeypatch, 100)
    rows = run_tiny(tmp_path, batch_sizes=[2])
    assert [row["lossless"] for row in rows] == [False] * 3
    assert [row["speedup"] for row in rows] == [None] * 3
    assert rows[0]["lossless_label"] == "unproven (2 of 2 prompts not audited)"
    assert rows[1]["lossless_label"] == "unproven: plain decoding is unproven (yes against it)"
    assert "NOT LOSSLESS" not in (tmp_path / "table.md").read_text()


@pytest.mark.slow
def test_baselines_and_merges_are_rows_of_the_table(run_tiny, tiny_drafter_dir, tmp_path, generated, caplog):
    """Baselines come first and merges last, all with the trained drafter's weights in the records."""
    caplog.set_level("INFO")
    options: dict[str, Any] = {"settings": [{"beam_width": 1}], "baselines": ["prompt_lookup"], "merge": ["prompt_lookup"]}
    rows = run_tiny(tmp_path / "out", **options)
    names = ["baseline", "prompt_lookup", "redrafter beam_width=1", "redrafter+prompt_lookup beam_width=1"]
    assert [row["method"] for row in rows] == names
    shown = [
        "plain decoding",
        "Prompt lookup, 10 nodes",
        "ReDrafter, 1 beam of 3",
        "ReDrafter + Prompt lookup, 1 beam, 40 nodes, paced",
    ]
    assert [row["label"] for row in rows] == shown
    assert not any(map(is_broken, rows))
    assert [row["parameters"] for row in rows[:2]] == [None, 0]
    assert rows[2]["parameters"] == rows[3]["parameters"] > 0
    described = read_info(tmp_path / "out" / "run.json").config["methods"]
    digest = hashlib.sha256((tiny_drafter_dir / "model.safetensors").read_bytes()).hexdigest()
    assert [described[name]["weights"] for name in names[1:]] == ["", digest, digest]
    assert described[names[-1]]["config"]["prompt_lookup"]["tree_nodes"] == 10
    # A repeated command measures nothing.
    generated.clear()
    assert [row["method"] for row in run_tiny(tmp_path / "out", **options)] == names
    assert generated == []
    with pytest.raises(ValueError, match="holds another evaluation's records"):
        run_tiny(tmp_path / "out", **{**options, "merge": []})


def test_training_free_drafters_are_methods_without_a_folder(config: EvalConfig) -> None:
    parts = [parse_drafter_name("prompt_lookup")]
    settings = [{"tree_nodes": 3}, {"pace": "fixed", "tree_nodes": 3}]
    specs = methods.method_specs(replace(config, settings=settings), parts)
    assert [spec.label for spec in specs.values()] == ["Prompt lookup, 3 nodes", "Prompt lookup, 3 nodes, fixed pace"]
    with pytest.raises(ValueError, match="prompt_lookup has no option beam_width; it has: max_ngram"):
        check_inputs(replace(config, settings=[{"beam_width": 2}]), parts)
    with pytest.raises(ValueError, match=r"prompt_lookup would be evaluated twice.*out of baselines"):
        check_inputs(replace(config, settings=[{}], baselines=["prompt_lookup"]), parts)
    with pytest.raises(ValueError, match=r"merge is suffix.*has no weights.*prompt_lookup\+suffix"):
        check_inputs(replace(config, settings=[{}], merge=["suffix"]), parts)


def test_a_merge_has_the_first_setting_of_its_trained_drafter(tiny_drafter_dir: Path, config: EvalConfig) -> None:
    settings = [{"beam_width": 1, "tree_nodes": 2}, {"beam_width": 2}]
    merging = replace(config, settings=settings, merge=["suffix"])
    (*_, merged) = methods.method_specs(merging, [tiny_drafter_dir]).values()
    configs = merged.parts.configs(merged.setting or {})
    assert configs["redrafter"].beam_width == 1
    assert configs[""].tree_nodes == 40, "the merge chooses among all nodes"
    paced = replace(merging, settings=[{"pace": "fixed", "tree_nodes": 7}])
    (*_, merged) = methods.method_specs(paced, [tiny_drafter_dir]).values()
    assert merged.setting == {"pace": "fixed", "tree_nodes": 7}
    both = [parse_drafter_name(f"{tiny_drafter_dir}+suffix")]
    with pytest.raises(ValueError, match=r"evaluated twice.*and merge"):
        methods.method_specs(replace(merging, settings=[{}]), both)
    with pytest.raises(ValueError, match=r"suffix has no option beam_width.*Settings hold for each drafter"):
        methods.method_specs(replace(merging, settings=[{"beam_width": 2}]), [tiny_drafter_dir, parse_drafter_name("suffix")])


def test_a_recipe_may_merge_drafters_that_it_has_yet_to_train(config: EvalConfig) -> None:
    check_inputs(replace(config, settings=[{}], merge=["suffix"]), [])
