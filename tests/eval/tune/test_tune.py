"""Tuning: the search finds the fastest setting, and the choice is written and read for its setup."""

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.cli.tune import setting_namer, tuning_table, verdict
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure import timing
from outrider.eval.run import load_suites
from outrider.eval.tune import halving
from outrider.eval.tune import run as tune_module
from outrider.eval.tune.halving import FINAL_REPEATS, FINALISTS, FIRST_BATCHES, LeftOut, Speed, Trial, halve
from outrider.eval.tune.run import GRIDS, MERGED_NODES, TUNING_FILE, Tuning, choose, settings_to_try, tune, tuned_settings
from outrider.models.decoding import GreedyAcceptance
from outrider.models.decoding.tree import DraftTree
from outrider.models.decoding.types import TargetOutput
from outrider.models.drafters import DRAFTERS, NullDrafter, build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.redrafter import Redrafter
from outrider.models.drafters.registry import TRAINING_FREE
from outrider.models.drafters.saved.loading import (
    TUNED_FILE,
    TunedChoice,
    describe_setup,
    load_tuned,
    save_tuned,
    tuned_choice,
)
from outrider.models.drafters.saved.parts import parse_drafter_name
from outrider.models.llm.hf_target import HFTarget

from ...commands import invoke

FORMS: dict[str, dict[str, Any]] = {
    "block": {"block": 3, "width": 6, "tree_nodes": 18},
    "draft_model": {"num_layers": 2, "top_k": 3, "tree_nodes": 8},
    "eagle": {"depth": 3, "top_k": 6, "tree_nodes": 30},
    "eagle3": {"depth": 3, "top_k": 6, "tree_nodes": 30},
    "medusa": {"num_heads": 3, "tree_nodes": 60},
    "mtp": {"init": "random", "depth": 3, "top_k": 8, "tree_nodes": 16},
    "redrafter": {"beam_width": 12, "beam_length": 3, "exit_width": 16},
}


# --- the settings


def test_every_kind_has_some_settings_of_its_own_options(tiny_target: HFTarget, tmp_path: Path) -> None:
    assert FORMS.keys() == DRAFTERS.keys() == GRIDS.keys()
    for kind, options in FORMS.items():
        drafter = build_drafter(parse_drafter({"kind": kind, **options}), tiny_target)
        save_drafter(drafter, tmp_path / kind, tiny_target.identity)
        settings = settings_to_try(parse_drafter_name(tmp_path / kind))
        assert 10 <= len(settings) <= 40
        assert len({json.dumps(setting) for setting in settings}) == len(settings), "none is tried twice"
        for setting in settings:
            parse_drafter({"kind": kind, **options}).with_options(setting)
        assert {name: value for name, value in options.items() if name in settings[0]}.items() <= settings[0].items()


@pytest.mark.parametrize("name", sorted(TRAINING_FREE))
def test_every_training_free_drafter_has_settings_to_try(name: str) -> None:
    parts = parse_drafter_name(name)
    for setting in settings_to_try(parts):
        parts.configs(setting)


# --- the search


@pytest.fixture
def simulated(tiny_target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Speed], list[list[Any]]]]:
    """Return a function that searches with a function from setting to speedup instead of decoding.

    It returns the speeds of the last round, and each heat's settings and number of batches.
    """

    def search(
        speedup_of: Callable[[dict[str, Any]], float], settings: Sequence[dict[str, Any]], num_batches: int = 16
    ) -> tuple[list[Speed], list[list[Any]]]:
        heats: list[list[Any]] = []

        def measure_together(trial: Trial, tried: Sequence[Any], batches: int, repeats: int) -> list[Speed]:
            heats.append([batches, repeats, *tried[1:]])
            # The machine is three times slower in every second heat.
            plain = 30.0 if len(heats) % 2 else 10.0
            speedups = [1.0 if setting is None else speedup_of(setting) for setting in tried]
            return [speed(setting, plain * gain, plain) for setting, gain in zip(tried, speedups, strict=True)]

        monkeypatch.setattr(halving, "_measure_together", measure_together)
        batches = [[torch.tensor([1, 2])]] * num_batches
        parts = parse_drafter_name("prompt_lookup")
        trial = Trial(parts=parts, target=tiny_target, rule=GreedyAcceptance(), batches=batches, max_new_tokens=4)
        return halve(trial, settings), heats

    return search


def speed(setting: dict[str, Any] | None, tokens_per_second: float, plain: float, size: int = 1) -> Speed:
    counts = {"batch_size": size, "num_batches": 1, "tokens_per_step": 2.0}
    return Speed(setting=setting, tokens_per_second=tokens_per_second, speedup=tokens_per_second / plain, **counts)


def test_the_faster_half_of_a_round_decodes_twice_as_many_prompts(simulated: Callable[..., Any]) -> None:
    settings = [{"width": width, "nodes": nodes} for width in range(6) for nodes in range(5)]
    finals, heats = simulated(lambda setting: 2 - abs(setting["width"] - 3) / 10 - abs(setting["nodes"] - 2) / 100, settings)
    assert choose(finals).setting == {"width": 3, "nodes": 2}, "whatever the machine does from heat to heat"
    assert finals[0].setting is None
    counts: dict[tuple[int, int], int] = {}
    for batches, repeats, *tried in heats:
        assert len(tried) <= FINALISTS, "only a few drafters are in memory"
        counts[batches, repeats] = counts.get((batches, repeats), 0) + len(tried)
    first = FIRST_BATCHES
    assert counts == {(first, 1): 30, (2 * first, 1): 15, (4 * first, 1): 8, (16, FINAL_REPEATS): 4}
    assert [len(tried) for batches, _, *tried in heats if batches == 4 * first] == [4, 4], "dealt evenly"


def test_few_settings_are_all_finalists_and_few_prompts_are_enough(simulated: Callable[..., Any]) -> None:
    settings = [{"nodes": nodes} for nodes in range(FINALISTS)]
    assert simulated(lambda setting: 1.0, settings)[1] == [[16, FINAL_REPEATS, *settings]]
    many = [{"nodes": nodes} for nodes in range(9)]
    assert {heat[0] for heat in simulated(lambda setting: 1.0, many, num_batches=1)[1]} == {1}
    thirty = [{"nodes": nodes} for nodes in range(30)]
    shapes = [(repeats, len(tried)) for _, repeats, *tried in simulated(lambda setting: 1.0, thirty, num_batches=2)[1]]
    assert shapes == [*[(1, 5)] * 6, (FINAL_REPEATS, FINALISTS)], "another round of the same prompts would show nothing new"


def test_speculation_is_off_if_it_is_slower() -> None:
    choice = choose([speed(None, 10.0, 10.0), speed({"a": 1}, 12.0, 10.0), speed({"a": 2}, 11.0, 10.0)])
    assert (choice.setting, choice.speedup) == ({"a": 1}, pytest.approx(1.2))
    choice = choose([speed(None, 10.0, 10.0), speed({"a": 1}, 9.0, 10.0)])
    assert (choice.setting, choice.speedup) == (None, 1.0)


# --- with a target


@pytest.fixture
def tune_tiny(tiny_target: HFTarget, tiny_drafter_dir: Path, questions: Path, tmp_path: Path) -> Callable[..., Tuning]:
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=6)

    def tune_it(settings: list[dict[str, Any]], *batch_sizes: int) -> Tuning:
        tried = replace(config, settings=settings, batch_sizes=list(batch_sizes or (1,)))
        return tune(tried, tiny_target, tiny_drafter_dir, tmp_path, write=False)

    return tune_it


def test_tuning_finds_measures_and_writes(tune_tiny, tiny_drafter_dir, tmp_path, monkeypatch):
    propose, now = Redrafter.propose, itertools.count()

    def slow_propose(self: Redrafter, *arguments: Any, **options: Any) -> DraftTree:
        for _ in range(5 if self.config.beam_width >= 3 else 0):
            next(now)
        return propose(self, *arguments, **options)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: float(next(now)), process_time=float))
    monkeypatch.setattr(Redrafter, "propose", slow_propose)
    fast = [{"beam_width": 1, "beam_length": length} for length in (1, 2, 3)]
    slow = [{"beam_width": width, "beam_length": 2} for width in (3, 4, 5)]
    tuning = tune_tiny([*slow, *fast], 1, 2)
    assert not (tiny_drafter_dir / TUNED_FILE).exists()
    for size in (1, 2):
        plain, *finalists = [speed for speed in tuning.finals if speed.batch_size == size]
        assert plain.setting is None
        assert plain.speedup == plain.tokens_per_step == 1.0
        assert sorted(str(speed.setting) for speed in finalists) == sorted(map(str, fast)), "the slow half is out"
        assert all(speed.num_batches == 2 // size for speed in finalists)
    written = json.loads((tmp_path / TUNING_FILE).read_text())
    assert written["choices"]["1"] == asdict(tuning.choices[1])
    assert written["place"]["dtype"] == "float32"
    name_of = setting_namer(parse_drafter_name(tiny_drafter_dir))
    assert verdict(tuning, 2, name_of).startswith("Batches of 2: ")
    assert tuning_table(tuning, 2, name_of).caption == "3 more settings were slower on some of the prompts"


@pytest.mark.slow
def test_settings_that_run_out_of_memory_are_left_out_and_named(tune_tiny, tmp_path, monkeypatch, caplog):
    """Memory runs out where a drafter is loaded, where it drafts, and in verify steps with large
    trees."""
    propose, verify = Redrafter.propose, HFTarget.verify
    error = torch.OutOfMemoryError("CUDA out of memory")

    def limited_load(*arguments: Any, **setting: Any) -> Any:
        if setting.get("beam_width") == 3:
            raise error
        return load_drafter(*arguments, **setting)

    def limited_propose(self: Redrafter, state: Any, last_token: torch.Tensor, **options: Any) -> DraftTree:
        if self.config.beam_width == 5 and len(last_token) == 2:
            raise error
        return propose(self, state, last_token, **options)

    def limited_verify(self: HFTarget, last_token: torch.Tensor, tree: DraftTree, **options: Any) -> TargetOutput:
        if len(last_token) == 2 and tree.num_nodes > 8:
            raise error
        return verify(self, last_token, tree, **options)

    for module in (tune_module, halving):
        monkeypatch.setattr(module, "load_drafter", limited_load)
    monkeypatch.setattr(Redrafter, "propose", limited_propose)
    monkeypatch.setattr(HFTarget, "verify", limited_verify)
    large, small, wide, deep = ({"beam_width": w, "beam_length": length} for w, length in ((3, 1), (1, 2), (5, 1), (2, 9)))
    tuning = tune_tiny([large, small, wide, deep], 1, 2)
    left_out = [(large, 1), (large, 2), (wide, 2), (deep, 2)]
    assert tuning.left_out == [LeftOut(setting=setting, batch_size=size) for setting, size in left_out]
    assert [speed.setting for speed in tuning.finals if speed.batch_size == 2] == [None, small]
    assert json.loads((tmp_path / TUNING_FILE).read_text())["left_out"][0] == {"setting": large, "batch_size": 1}
    assert f"{wide} ran out of memory in batches of 2 and is left out" in caplog.text
    with pytest.raises(ValueError, match="ran out of memory while it was loaded, in every setting; .* a narrower type"):
        tune_tiny([large])


@pytest.mark.slow
def test_a_batch_size_at_which_plain_decoding_does_not_fit_has_no_choice(tune_tiny, monkeypatch):
    decode = halving.time_generation
    largest = 1

    def limited(target: Any, drafter: Any, rule: Any, prompts: Sequence[Any], **options: Any) -> Any:
        if len(prompts) > largest and isinstance(drafter, NullDrafter):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(target, drafter, rule, prompts, **options)

    monkeypatch.setattr(halving, "time_generation", limited)
    many = [{"beam_width": width} for width in range(1, FINALISTS + 2)]
    tuning = tune_tiny(many, 1, 2)
    assert list(tuning.choices) == [1]
    assert tuning.left_out == [LeftOut(setting=None, batch_size=2)]
    largest = 0
    with pytest.raises(ValueError, match="plain decoding ran out of memory in batches of 1, 2, .* lower --batch-size"):
        tune_tiny(many, 1, 2)


# --- the choice


def test_a_choice_is_saved_for_its_setup_and_read_for_the_nearest_batch_size(tiny_target, tiny_drafter_dir, tmp_path):
    shutil.copytree(tiny_drafter_dir, tmp_path, dirs_exist_ok=True)
    setup = describe_setup(tiny_target, tmp_path)
    facts = {"tokens_per_step": 2.0, "tokens_per_second": 30.0, "plain_tokens_per_second": 20.0}
    one, eight = TunedChoice(setting={"beam_width": 2}, **facts), TunedChoice(setting=None, **facts)
    with pytest.raises(ValueError, match="isn't tuned for .* Run `outrider tune --drafter"):
        tuned_choice(tmp_path, tiny_target)
    save_tuned(tmp_path, replace(setup, device="another"), {1: eight})
    save_tuned(tmp_path, setup, {1: eight, 8: eight})
    save_tuned(tmp_path, setup, {1: one})
    assert len(json.loads((tmp_path / TUNED_FILE).read_text())["entries"]) == 2
    assert [tuned_choice(tmp_path, tiny_target, batch_size=size) for size in (1, 2, 4, 100)] == [one, one, eight, eight]
    config = EvalConfig(suites=[SuiteConfig(name="stdlib")], batch_sizes=[1, 8])
    assert tuned_settings(config, tiny_target, [tmp_path]) == {tmp_path: {(0.0, 1): {"beam_width": 2}, (0.0, 8): None}}
    with pytest.raises(ValueError, match="temperature 0.5 .* Run `outrider tune"):
        tuned_settings(replace(config, temperatures=[0.0, 0.5]), tiny_target, [tmp_path])
    drafter: Any = load_tuned(tmp_path, tiny_target)
    assert drafter.config.beam_width == 2
    assert isinstance(load_tuned(tmp_path, tiny_target, batch_size=8), NullDrafter)
    with pytest.raises(
        ValueError, match=r"temperature 0.5 \(it is tuned only for another setup: .*device another.* --temperature 0.5"
    ):
        tuned_choice(tmp_path, tiny_target, temperature=0.5)
    file = json.loads((tmp_path / TUNED_FILE).read_text())
    file["entries"][0]["choices"] = {"few": asdict(one)}
    (tmp_path / TUNED_FILE).write_text(json.dumps(file))
    with pytest.raises(ValueError, match=r"tuned.json: .*choices.few.*integer"):
        tuned_choice(tmp_path, tiny_target)
    (tmp_path / TUNED_FILE).unlink()
    save_tuned(tmp_path, setup, {1: one})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="isn't tuned for"):
        tuned_choice(tmp_path, tiny_target)


def test_a_batch_that_no_prompts_fill_is_refused(tiny_target, tiny_drafter_dir, questions, tmp_path):
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=8)
    with pytest.raises(ValueError, match="the batch size 3 exceeds the 2 prompts that fit .* raise the suite's limit"):
        tune(replace(config, settings=[{"beam_width": 1}], batch_sizes=[3]), tiny_target, tiny_drafter_dir, tmp_path)
    with pytest.raises(ValueError, match="batch size 64 exceeds .* prompts of mt_bench"):
        load_suites(replace(config, batch_sizes=[64]))


def test_the_command_prints_a_table_and_a_verdict(tiny_target_dir, tiny_drafter_dir, questions, tmp_path):
    command = ["tune", "--target", str(tiny_target_dir), "--drafter", str(tiny_drafter_dir), "--output", str(tmp_path)]
    command += ["--suite", f"{{name: mt_bench, path: {questions}}}", "--max-new-tokens", "6", "--no-write"]
    output = invoke([*command, "--setting", "{beam_width: 2}", "--batch-size", "2"]).output
    assert "plain decoding" in output.replace("\n", " ")
    assert "2 beams of 3" in output.replace("\n", " ")
    assert "Batches of 2: " in output
    assert "batch_sizes[0]=0" in invoke([*command, "--batch-size", "0"]).message
    assert "eval.repeats: `outrider tune` doesn't use this" in invoke([*command, "--repeats", "5"]).message


def test_all_settings_of_a_merge_are_finalists_and_expected_gain_is_one_of_them(
    tiny_target: HFTarget, tiny_drafter_dir: Path, questions: Path, tmp_path: Path
) -> None:
    drafter = Path(shutil.copytree(tiny_drafter_dir, tmp_path / "drafter"))
    parts = parse_drafter_name(f"{drafter}+prompt_lookup")
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=4, batch_sizes=[2])
    tuning = tune(config, tiny_target, parts, tmp_path / "out")
    settings = [None, {"pace": "expected"}, *({"tree_nodes": size, "pace": "fixed"} for size in MERGED_NODES)]
    assert [speed.setting for speed in tuning.finals] == settings
    name_of = setting_namer(parts)
    assert [name_of(setting) for setting in settings[:3]] == ["plain decoding", "40 nodes, paced", f"{MERGED_NODES[0]} nodes"]
    headers = [str(column.header) for column in tuning_table(tuning, 2, name_of).columns]
    assert headers == ["setting", "tok/step", "tok/s", "speedup"]
    # The choice holds for the merge, not for the drafter alone.
    assert tuned_choice(parts, tiny_target, batch_size=2) == tuning.choices[2]
    with pytest.raises(ValueError, match="it is tuned only for another setup: drafter .*[+]prompt_lookup"):
        tuned_choice(drafter, tiny_target, batch_size=2)
    rows = tuned_settings(config, tiny_target, [parts])
    assert rows == {parts: {(0.0, 2): tuning.choices[2].setting}}


def test_tuning_of_a_training_free_drafter_has_no_folder_to_write_to(tiny_target, questions, tmp_path):
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=4)
    parts = parse_drafter_name("prompt_lookup")
    with pytest.raises(ValueError, match="prompt_lookup has no folder.*--no-write"):
        tune(config, tiny_target, parts, tmp_path)
    tuning = tune(replace(config, settings=[{"tree_nodes": 2}]), tiny_target, parts, tmp_path, write=False)
    assert [speed.setting for speed in tuning.finals] == [None, {"tree_nodes": 2}]
