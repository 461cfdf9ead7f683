"""Tuning: replays take the same steps as decoding, and measurements decide the choice."""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cli.tune import setting_namer, tuning_table, verdict
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure.methods import acceptance_rule
from outrider.eval.run import load_suites
from outrider.eval.tune import run as tune_module
from outrider.eval.tune import search as tuning_module
from outrider.eval.tune.grids import GRIDS, MERGED_NODES, candidates, extended, measured_settings
from outrider.eval.tune.replay import Answered, ReplayTarget, answer_prompts
from outrider.eval.tune.run import MAX_EXTENSIONS, TUNING_FILE, LeftOut, Tuning, tune, tuned_settings
from outrider.eval.tune.search import (
    Decoding,
    Pass,
    Prediction,
    Replay,
    Speed,
    Trial,
    choose,
    finalists,
    regret,
    replay_all,
    run,
)
from outrider.eval.tune.step_times import StepTimes, measure_step_times
from outrider.models.decoding.tree import DraftTree
from outrider.models.decoding.types import TargetOutput
from outrider.models.drafters import DRAFTERS, NullDrafter, build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.oracle import OracleDrafter
from outrider.models.drafters.redrafter import Redrafter
from outrider.models.drafters.registry import TRAINING_FREE
from outrider.models.drafters.saved.build import saved_spec
from outrider.models.drafters.saved.folder import read_drafter_config
from outrider.models.drafters.saved.parts import parse_drafter_name
from outrider.models.drafters.saved.tuned import TUNED_FILE, Choice, describe_setup, load_tuned, save_tuned, tuned_choice
from outrider.models.llm.hf_target import HFTarget

from ...commands import invoke
from ...models.recorder import ReplayingRecorder

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]
WIDE: dict[str, dict[str, Any]] = {
    "block": {"block": 3, "width": 6, "tree_nodes": 18},
    "draft_model": {"num_layers": 2, "init": "target_layers", "top_k": 3, "tree_nodes": 8},
    "eagle": {"depth": 3, "top_k": 6, "tree_nodes": 30},
    "eagle3": {"depth": 3, "top_k": 6, "tree_nodes": 30},
    "medusa": {"num_heads": 3, "tree_nodes": 60},
    "redrafter": {"beam_width": 12, "beam_length": 3, "exit_width": 16},
}
"""Trees so wide that drafters without any training are right now and then."""


def answered_by(target: HFTarget, temperature: float, layers: tuple[int, ...] = ()) -> list[Answered]:
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    rule = acceptance_rule("exact", temperature, target)
    return answer_prompts(target, prompts, rule, max_new_tokens=24, feature_layers=layers, batch_size=2)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*WIDE, "oracle"])
def test_a_replay_takes_the_steps_that_decoding_takes(kind: str, temperature: float, tiny_target: HFTarget) -> None:
    torch.manual_seed(0)
    drafter: Any = None if kind == "oracle" else build_drafter(parse_drafter({"kind": kind, **WIDE[kind]}), tiny_target).eval()
    answered = answered_by(tiny_target, temperature, () if drafter is None else drafter.feature_layers)
    drafter = drafter or OracleDrafter([item.answer.tolist() for item in answered], [1, 3, 2], tiny_target.vocab_size)
    rule = acceptance_rule("exact", temperature, tiny_target)
    real = run(tiny_target, drafter, rule, answered, timed=False)
    replayed = run(ReplayTarget(answered, tiny_target.vocab_size), drafter, rule, answered, timed=True)
    assert replayed.passes == tuple(
        replace(step, own_seconds=again.own_seconds, verify_seconds=again.verify_seconds)
        for step, again in zip(real.passes, replayed.passes, strict=True)
    )
    assert (replayed.num_tokens, replayed.num_steps) == (real.num_tokens, real.num_steps)
    assert real.num_tokens == sum(len(item.answer) - 1 for item in answered)
    assert kind not in ("oracle", "draft_model", "medusa") or real.tokens_per_step > 1, "something was accepted"
    assert replayed.own_seconds > 0


def test_every_kind_is_replayed_and_has_a_grid_of_its_own_options(tiny_target: HFTarget, tmp_path: Path) -> None:
    assert WIDE.keys() == DRAFTERS.keys() == GRIDS.keys()
    for kind, options in WIDE.items():
        save_drafter(
            build_drafter(parse_drafter({"kind": kind, **options}), tiny_target), tmp_path / kind, tiny_target.identity
        )
        settings = candidates(saved_spec(read_drafter_config(tmp_path / kind)), GRIDS[kind])
        assert 10 <= len(settings) <= 130
        assert len({json.dumps(setting) for setting in settings}) == len(settings)
        for setting in settings:
            parse_drafter({"kind": kind, **options}).with_options(setting)
        assert {name: value for name, value in options.items() if name in settings[0]}.items() <= settings[0].items()


def test_a_grid_is_extended_only_at_an_edge_with_the_best_setting() -> None:
    grid = {"depth": (2, 3, 7), "top_k": (1, 8), "tree_nodes": (None, 4, 60)}
    assert extended(grid, {"depth": 3, "top_k": 1, "tree_nodes": None}) == grid, "there is no width below 1"
    assert extended(grid, {"depth": 7, "top_k": 8, "tree_nodes": 60}) == {
        "depth": (2, 3, 7, 14),
        "top_k": (1, 8, 16),
        "tree_nodes": (None, 4, 60, 120),
    }
    assert extended(grid, {"depth": 2, "top_k": 4, "tree_nodes": 4}) == {
        "depth": (2, 3, 7, 1),
        "top_k": (1, 8),
        "tree_nodes": (None, 4, 60, 2),
    }
    assert extended(grid, {"depth": 9, "top_k": 1, "tree_nodes": 8})["depth"] == (2, 3, 7, 9, 18), "the drafter's own"
    assert extended({"tree_nodes": (2, 3)}, {"tree_nodes": 3, "tree_paths": None}) == {"tree_nodes": (2, 3, 6)}


@pytest.fixture
def guessed(
    tiny_target: HFTarget, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Return a function that tunes with a function from setting to speed instead of replays.

    It returns the tried settings in the order of rounds, and the chosen setting.
    """

    def guess(kind: str, speed_of: Callable[[dict[str, Any]], float], settings: Any = None) -> dict[str, Any]:
        rounds: list[list[Any]] = []

        def replay_all(trial: Any, tried: Sequence[Any], sizes: Sequence[int]) -> list[Replay]:
            rounds.append(list(tried))
            steps = (Pass(rows=1, nodes=1, own_seconds=0.0, verify_seconds=0.0),)
            seconds = [1e3 if setting is None else 1e3 / speed_of(setting) for setting in tried]
            runs = [Decoding(num_tokens=1000, num_steps=1, passes=steps, seconds=taken) for taken in seconds]
            return [Replay(setting=setting, batch_size=1, run=run) for setting, run in zip(tried, runs, strict=True)]

        def measure_all(trial: Any, finals: Sequence[Any], size: int) -> list[Speed]:
            return [speed(setting, 1.0 if setting is None else speed_of(setting), size) for setting in finals]

        monkeypatch.setattr(tune_module, "replay_all", replay_all)
        monkeypatch.setattr(tune_module, "measure_all", measure_all)
        save_drafter(
            build_drafter(parse_drafter({"kind": kind, **WIDE[kind]}), tiny_target), tmp_path / kind, tiny_target.identity
        )
        config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=6)
        tuning = tune(config, tiny_target, tmp_path / kind, tmp_path, settings=settings, write=False)
        return {"rounds": rounds, "chosen": tuning.choices[1].setting}

    return guess


def near(**best: int) -> Callable[[dict[str, Any]], float]:
    """Return a speed function with its maximum at the setting `best`.

    The speed falls with the distance in doublings or halvings of each option.
    """

    def speed_of(setting: dict[str, Any]) -> float:
        distance = sum(abs(math.log2((setting[name] or 1) / value)) for name, value in best.items())
        return 100 / (1 + distance)

    return speed_of


def test_a_grid_is_extended_upwards_until_the_best_lies_inside(
    guessed: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    result = guessed("eagle3", near(depth=14, top_k=8, tree_nodes=240))
    assert result["chosen"] == {"depth": 14, "top_k": 8, "tree_nodes": 240}
    depths, nodes = ({setting[name] for setting in result["rounds"][1]} for name in ("depth", "tree_nodes"))
    assert {14, 120} == {max(depths), max(nodes)}
    assert max(setting["tree_nodes"] for settings in result["rounds"][1:] for setting in settings) == 480, "its neighbour, too"
    assert max(setting["depth"] for settings in result["rounds"][1:] for setting in settings) == 28
    assert 2 <= len(result["rounds"]) - 1 <= MAX_EXTENSIONS
    assert "have depth at the edge of the grid: trying (14,) as well" in caplog.text


def test_a_grid_is_extended_downwards_to_one_and_not_beyond(guessed: Callable[..., dict[str, Any]]) -> None:
    result = guessed("redrafter", near(beam_length=1, beam_width=2))
    assert result["chosen"] is not None
    assert result["chosen"]["beam_length"] == 1
    assert len(result["rounds"]) == 2
    assert {setting["beam_length"] for setting in result["rounds"][1]} == {1}


def test_a_best_setting_inside_the_grid_ends_the_search_at_once(guessed: Callable[..., dict[str, Any]]) -> None:
    assert len(guessed("medusa", near(tree_nodes=16))["rounds"]) == 1
    settings = [{"tree_nodes": 60}, {"tree_nodes": 64}]
    named = guessed("medusa", near(tree_nodes=500), settings)
    assert (named["rounds"], named["chosen"]) == ([[None, *settings]], settings[1]), (
        "settings that were named are all there are"
    )


@pytest.mark.parametrize("kind", sorted(WIDE))
def test_no_impossible_setting_is_ever_proposed_and_the_search_ends(kind: str, guessed: Callable[..., dict[str, Any]]) -> None:
    """A larger setting is always faster here, so a search without bounds would never end."""
    result = guessed(kind, lambda setting: float(math.prod(value or 1 for value in setting.values())))
    assert 2 <= len(result["rounds"]) <= 1 + MAX_EXTENSIONS
    tried = [setting for settings in result["rounds"] for setting in settings if setting is not None]
    assert len(tried) > len(result["rounds"][0]), "some were possible"
    for setting in tried:
        parse_drafter({"kind": kind, **WIDE[kind]}).with_options(setting)
    assert len({json.dumps(setting) for setting in tried}) == len(tried), "none is tried twice"


@pytest.mark.slow
def test_settings_that_run_out_of_memory_are_left_out_and_named(
    tiny_target: HFTarget, tiny_drafter_dir: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in a replay, in decoding, and in verify steps with large trees."""
    propose, verify = Redrafter.propose, HFTarget.verify
    error = torch.OutOfMemoryError("CUDA out of memory")

    def limited_propose(self: Redrafter, state: Any, last_token: torch.Tensor, **options: Any) -> DraftTree:
        if self.config.beam_width == 5 and len(last_token) == 2:
            raise error
        return propose(self, state, last_token, **options)

    def limited_verify(self: HFTarget, last_token: torch.Tensor, tree: DraftTree, **options: Any) -> TargetOutput:
        if len(last_token) == 2 and tree.num_nodes > 8:
            raise error
        return verify(self, last_token, tree, **options)

    monkeypatch.setattr(Redrafter, "propose", limited_propose)
    monkeypatch.setattr(HFTarget, "verify", limited_verify)
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=6)
    small, wide, deep = ({"beam_width": width, "beam_length": length} for width, length in ((1, 2), (5, 1), (2, 9)))
    options: dict[str, Any] = {"settings": [small, wide, deep], "batch_sizes": [1, 2], "write": False}
    tuning = tune(config, tiny_target, tiny_drafter_dir, tmp_path, **options)
    assert tuning.left_out == [LeftOut(setting=wide, batch_size=2), LeftOut(setting=deep, batch_size=2)]
    assert [entry.setting for entry in tuning.predictions if entry.batch_size == 2] == [None, small]
    assert {json.dumps(entry.setting) for entry in tuning.finals if entry.batch_size == 2} == {"null", json.dumps(small)}
    assert None in tuning.step_times.seconds[1]
    assert json.loads((tmp_path / TUNING_FILE).read_text())["left_out"][0] == {"setting": wide, "batch_size": 2}


@pytest.mark.slow
def test_a_batch_size_at_which_plain_decoding_does_not_fit_has_no_choice(
    tiny_target: HFTarget, tiny_drafter_dir: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = tuning_module.run
    largest = 1

    def limited(target: Any, drafter: Any, rule: Any, answered: Sequence[Answered], **options: Any) -> Decoding:
        if isinstance(target, HFTarget) and len(answered) > largest and not drafter.max_nodes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(target, drafter, rule, answered, **options)

    monkeypatch.setattr(tuning_module, "run", limited)
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=6)
    options: dict[str, Any] = {"settings": [{"beam_width": 1}], "batch_sizes": [1, 2], "check": True, "write": False}
    tuning = tune(config, tiny_target, tiny_drafter_dir, tmp_path, **options)
    assert list(tuning.choices) == [1]
    assert LeftOut(setting=None, batch_size=2) in tuning.left_out
    largest = 0
    with pytest.raises(ValueError, match="plain decoding ran out of memory in batches of 1, 2, .* lower --batch-size"):
        tune(config, tiny_target, tiny_drafter_dir, tmp_path, **options)


@pytest.fixture
def tune_tiny(tiny_target: HFTarget, tiny_drafter_dir: Path, questions: Path, tmp_path: Path) -> Callable[..., Tuning]:
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=6)

    def tune_it(settings: list[dict[str, Any]]) -> Tuning:
        return tune(config, tiny_target, tiny_drafter_dir, tmp_path, settings=settings, write=False)

    return tune_it


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["the first one", "another one"])
def test_a_setting_is_left_out_and_named_if_its_drafter_does_not_load(
    first: bool, tune_tiny: Callable[..., Tuning], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def limited(*arguments: Any, **setting: Any) -> Any:
        if setting["beam_width"] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load_drafter(*arguments, **setting)

    for module in (tune_module, tuning_module):
        monkeypatch.setattr(module, "load_drafter", limited)
    small, large = {"beam_width": 1}, {"beam_width": 3}
    tuning = tune_tiny([large, small] if first else [small, large])
    assert tuning.left_out == [LeftOut(setting=large, batch_size=1)]
    assert [speed.setting for speed in tuning.predictions] == [None, small]
    assert "{'beam_width': 3} ran out of memory in batches of 1 and is left out" in caplog.text
    with pytest.raises(ValueError, match="ran out of memory while it was loaded, in every setting; .* a narrower type"):
        tune_tiny([large])


@pytest.mark.slow
def test_plain_answers_use_smaller_batches_after_an_out_of_memory_error(
    tune_tiny: Callable[..., Tuning], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = HFTarget.prefill
    largest, tried = 1, []

    def limited(self: HFTarget, prompts: Any, **options: Any) -> TargetOutput:
        tried.append(len(prompts.lengths))
        if len(prompts.lengths) > largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(self, prompts, **options)

    monkeypatch.setattr(HFTarget, "prefill", limited)
    assert tune_tiny([{"beam_width": 1}]).left_out == []
    assert tried[0] == 2, "two prompts fit the context window"
    largest = 0
    with pytest.raises(ValueError, match="ran out of memory while the target answered 2 prompts one by one; lower --max-new"):
        tune_tiny([{"beam_width": 1}])


@pytest.mark.parametrize("is_fixed", [False, True], ids=["eager", "recorded"])
def test_a_replay_counts_the_rows_that_the_target_reads(is_fixed: bool, tiny_target: HFTarget, tmp_path: Path) -> None:
    """Five of eight rows continue. A recorded target still reads eight."""
    answered = answered_by(tiny_target, 0.0)[:1] * 8
    answered = [replace(item, answer=item.answer[: 3 if row < 3 else 9]) for row, item in enumerate(answered)]
    graphed = HFTarget(
        tiny_target.model, tiny_target.tokenizer, tiny_target.identity, cuda_graphs=is_fixed, recorder=ReplayingRecorder()
    )
    trial = Trial(
        parts=parse_drafter_name("prompt_lookup"),
        target=graphed,
        rule=acceptance_rule("exact", 0.0, tiny_target),
        answered=answered,
    )
    (replayed,) = replay_all(trial, [None], [8])
    real = run(graphed, NullDrafter(), trial.rule, answered, timed=False)
    assert [step.rows for step in replayed.run.passes] == [8, 8] + [8 if is_fixed else 5] * 6
    assert [step.rows for step in real.passes] == [step.rows for step in replayed.run.passes]
    assert replayed.run.num_steps == 8 * 2 + 5 * 6, "copies answer nothing"


def test_times_between_measured_points_are_interpolated_linearly() -> None:
    times = StepTimes(batch_sizes=(1, 4), node_counts=(0, 2, 10), seconds=((1.0, 2.0, 6.0), (4.0, 5.0, 9.0)))
    assert times(1, 0) == 1.0
    assert times(1, 1) == pytest.approx(1.5)
    assert times(4, 6) == pytest.approx(7.0)
    assert times(2, 0) == pytest.approx(2.0)
    assert times(1, 12) == pytest.approx(7.0), "beyond the last point as between the last two"
    assert StepTimes(batch_sizes=(1,), node_counts=(0, 2), seconds=((1.0, 0.5),))(1, 8) == 0.5, "never below what was measured"
    assert StepTimes(batch_sizes=(2,), node_counts=(3,), seconds=((7.0,),))(9, 9) == 7.0
    short = StepTimes(batch_sizes=(1, 4), node_counts=(0, 2, 10), seconds=((1.0, 2.0, 6.0), (4.0, 5.0, None)))
    assert [short(4, 2), short(1, 6), short(4, 3), short(2, 6)] == [5.0, pytest.approx(4.0), None, None], "it didn't fit"


def test_the_targets_steps_are_measured_for_every_size(tiny_target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = tiny_target.verify

    def slow_verify(last_token: torch.Tensor, tree: DraftTree) -> TargetOutput:
        time.sleep(0.002 * tree.num_nodes * len(last_token))
        return verify(last_token, tree)

    monkeypatch.setattr(tiny_target, "verify", slow_verify)
    texts = [torch.tensor(prompt) for prompt in PROMPTS]
    times = measure_step_times(tiny_target, texts, [4, 1], [8, 0, 1], repeats=3)
    assert (times.batch_sizes, times.node_counts) == ((1, 4), (0, 1, 8))
    for size, row in zip(times.batch_sizes, times.seconds, strict=True):
        assert all(seconds > 0.002 * nodes * size for nodes, seconds in zip(times.node_counts, row, strict=True))
        assert row[2] > row[1], "a tree is timed as its own size"


def test_a_short_disturbance_is_not_counted_in_the_time_of_a_setting() -> None:
    steps = [Pass(rows=1, nodes=2, own_seconds=seconds, verify_seconds=1.0) for seconds in (0.1, 0.1, 9.0)]
    disturbed = Decoding(num_tokens=6, num_steps=3, passes=tuple(steps), seconds=3 + 9.2 + 0.6)
    assert disturbed.own_seconds == pytest.approx(0.3 + 0.6)


def prediction(setting: dict[str, Any] | None, speed: float, size: int = 1) -> Prediction:
    return Prediction(
        setting=setting, batch_size=size, tokens_per_step=2.0, tokens_per_second=speed, own_seconds=0.0, num_nodes=1.0
    )


def speed(setting: dict[str, Any] | None, tokens_per_second: float, size: int = 1) -> Speed:
    return Speed(setting=setting, batch_size=size, tokens_per_step=2.0, tokens_per_second=tokens_per_second)


def test_speculation_is_off_if_slower_and_regret_is_the_loss_of_the_choice() -> None:
    finals = [speed(None, 10.0), speed({"a": 1}, 12.0), speed({"a": 2}, 11.0)]
    finals += [speed(None, 10.0, 8), speed({"a": 1}, 9.0, 8), speed({"a": 2}, 8.0, 8)]
    assert choose(finals, 1).setting == {"a": 1}
    assert choose(finals, 1).speedup == pytest.approx(1.2)
    assert choose(finals, 8).setting is None
    assert choose(finals, 8).speedup == 1.0
    measured = [speed(None, 5.0), speed({"a": 1}, 9.0), speed({"a": 2}, 10.0), speed({"a": 2}, 99.0, 8)]
    assert regret({"a": 1}, measured, 1) == pytest.approx(0.1)
    assert regret(None, measured, 1) == pytest.approx(0.5)


def test_prediction_errors_compare_predicted_and_measured_speedups() -> None:
    predictions = [prediction(None, 10.0), prediction({"a": 1}, 20.0), prediction(None, 10.0, 2), prediction({"a": 1}, 5.0, 2)]
    checked = [speed(None, 5.0), speed({"a": 1}, 8.0), speed(None, 10.0, 2), speed({"a": 1}, 10.0, 2)]
    times = StepTimes(batch_sizes=(1,), node_counts=(0,), seconds=((1.0,),))
    others: dict[str, Any] = {"choices": {}, "finals": [], "regrets": {}, "predicted_regrets": {}, "step_times": times}
    tuning = Tuning(predictions=predictions, checked=checked, **others)
    assert tuning.errors(1) == [pytest.approx(0.25)]
    assert tuning.errors(2) == [pytest.approx(-0.5)]


def test_finalists_are_plain_decoding_and_the_settings_that_may_be_fastest() -> None:
    predictions = [prediction(None, 30.0), *(prediction({"a": index}, 10.0 - index) for index in range(9))]
    assert finalists(predictions, 1) == [None, {"a": 0}, {"a": 1}, {"a": 2}], "the others are predicted to be over 20 % slower"
    close = [prediction(None, 1.0, 2), *(prediction({"a": index}, 10.0 - index / 10, 2) for index in range(9))]
    assert len(finalists(close, 2)) == 5


def test_a_choice_is_saved_for_its_setup_and_read_for_the_nearest_batch_size(
    tiny_target: HFTarget, tiny_drafter_dir: Path, tmp_path: Path
) -> None:
    for path in tiny_drafter_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    setup = describe_setup(tiny_target, tmp_path)
    facts = {"tokens_per_step": 2.0, "tokens_per_second": 30.0, "plain_tokens_per_second": 20.0}
    one, eight = Choice(setting={"beam_width": 2}, **facts), Choice(setting=None, **facts)
    with pytest.raises(ValueError, match="isn't tuned for .* Run `outrider tune --drafter"):
        tuned_choice(tmp_path, tiny_target)
    save_tuned(tmp_path, replace(setup, device="another"), {1: eight})
    save_tuned(tmp_path, setup, {1: eight, 8: eight})
    save_tuned(tmp_path, setup, {1: one})
    assert len(json.loads((tmp_path / TUNED_FILE).read_text())["entries"]) == 2
    assert [tuned_choice(tmp_path, tiny_target, batch_size=size) for size in (1, 2, 4, 100)] == [one, one, eight, eight]
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


def test_an_evaluation_takes_the_tuned_settings(tiny_target: HFTarget, tiny_drafter_dir: Path, tmp_path: Path) -> None:
    for path in tiny_drafter_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    facts = {"tokens_per_step": 2.0, "tokens_per_second": 30.0, "plain_tokens_per_second": 20.0}
    choices = {1: Choice(setting={"beam_width": 2}, **facts), 2: Choice(setting={"beam_width": 3}, **facts)}
    save_tuned(tmp_path, describe_setup(tiny_target, tmp_path), choices | {8: Choice(setting=None, **facts)})
    suites = [SuiteConfig(name="stdlib")]

    config = EvalConfig(suites=suites, batch_sizes=[1, 2, 8])
    chosen = {(0.0, 1): {"beam_width": 2}, (0.0, 2): {"beam_width": 3}, (0.0, 8): None}
    assert tuned_settings(config, tiny_target, [tmp_path]) == {tmp_path: chosen}
    with pytest.raises(ValueError, match="temperature 0.5 .* Run `outrider tune"):
        tuned_settings(replace(config, temperatures=[0.0, 0.5]), tiny_target, [tmp_path])


def test_tuning_finds_measures_and_writes(
    tiny_target: HFTarget, tiny_drafter_dir: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = Redrafter.propose

    def slow_propose(self: Redrafter, *arguments: Any, **options: Any) -> DraftTree:
        time.sleep(0.2 if self.config.beam_width == 3 else 0)
        return propose(self, *arguments, **options)

    monkeypatch.setattr(Redrafter, "propose", slow_propose)
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=6)
    settings = [{"beam_width": 3, "beam_length": 2}, {"beam_width": 1, "beam_length": 2}]
    options: dict[str, Any] = {"settings": settings, "batch_sizes": [1, 2], "check": True, "write": False}
    tuning = tune(config, tiny_target, tiny_drafter_dir, tmp_path, **options)
    assert not (tiny_drafter_dir / TUNED_FILE).exists()
    ways = [(size, setting) for size in (1, 2) for setting in (None, *settings)]
    assert [(measured.batch_size, measured.setting) for measured in tuning.checked] == ways
    predicted = {(measured.batch_size, str(measured.setting)): measured for measured in tuning.predictions}
    for measured in tuning.checked:
        guess = predicted[measured.batch_size, str(measured.setting)]
        assert guess.tokens_per_step == measured.tokens_per_step
        if measured.setting == settings[0]:
            assert measured.tokens_per_second < 2 * measured.tokens_per_step * measured.batch_size / 0.2
            assert guess.own_seconds > 0.2, "what drafting takes is in the prediction"
    for size in (1, 2):
        assert [measured.setting for measured in tuning.finals if measured.batch_size == size] == [None, settings[1]]
        assert regret(settings[0], tuning.checked, size) > 0.5
        assert tuning.regrets[size] == regret(tuning.choices[size].setting, tuning.checked, size)
        assert len(tuning.errors(size)) == 2
    written = json.loads((tmp_path / TUNING_FILE).read_text())
    assert written["choices"]["1"] == asdict(tuning.choices[1])
    assert written["place"]["dtype"] == "float32"
    summary = verdict(tuning, 2, setting_namer(tiny_drafter_dir))
    assert f"Checked: {100 * tuning.regrets[2]:.1f} % slower than the best setting" in summary


def test_a_batch_that_no_prompts_fill_is_refused(
    tiny_target: HFTarget, tiny_drafter_dir: Path, questions: Path, tmp_path: Path
) -> None:
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=8)
    with pytest.raises(ValueError, match="the batch size 64 exceeds .* raise the suite's limit"):
        tune(config, tiny_target, tiny_drafter_dir, tmp_path, settings=[{"beam_width": 1}], batch_sizes=[64])
    with pytest.raises(ValueError, match="batch size 64 exceeds .* prompts of mt_bench"):
        load_suites(replace(config, batch_sizes=[64]))


def test_the_command_prints_a_table_and_a_verdict(
    tiny_target_dir: Path, tiny_drafter_dir: Path, questions: Path, tmp_path: Path
) -> None:
    command = ["tune", "--target", str(tiny_target_dir), "--drafter", str(tiny_drafter_dir), "--output", str(tmp_path)]
    command += ["--suite", f"{{name: mt_bench, path: {questions}}}", "--max-new-tokens", "6", "--no-write"]
    output = invoke([*command, "--setting", "{beam_width: 2}", "--batch-size", "2"]).output
    assert "plain decoding" in output.replace("\n", " ")
    assert "2 beams of 3" in output.replace("\n", " ")
    assert "Batches of 2: " in output
    assert "batch_sizes[0]=0" in invoke([*command, "--batch-size", "0"]).message


def test_sampled_drafts_cannot_be_replayed(tiny_target: HFTarget, questions: Path, tmp_path: Path) -> None:
    drafter = build_drafter(parse_drafter({"kind": "draft_model", "num_layers": 1, "temperature": 1.0}), tiny_target)
    save_drafter(drafter, tmp_path / "drawn", tiny_target.identity)
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], temperatures=[1.0], max_new_tokens=8)
    with pytest.raises(ValueError, match="samples its drafts at random"):
        tune(config, tiny_target, tmp_path / "drawn", tmp_path)


def test_all_settings_of_a_merge_are_measured_and_expected_gain_is_one_of_them(
    tiny_target: HFTarget, tiny_drafter_dir: Path, questions: Path, tmp_path: Path
) -> None:
    """Replays can't predict them: Recycling reads logits, and paced trees depend on times."""
    drafter = Path(shutil.copytree(tiny_drafter_dir, tmp_path / "drafter"))
    parts = parse_drafter_name(f"{drafter}+prompt_lookup")
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=4)
    tuning = tune(config, tiny_target, parts, tmp_path / "out", batch_sizes=[2])
    settings = [None, {"pace": "expected"}, *({"tree_nodes": size, "pace": "fixed"} for size in MERGED_NODES)]
    assert [speed.setting for speed in tuning.finals] == settings
    assert (tuning.predictions, tuning.step_times) == ([], None)
    name_of = setting_namer(parts)
    assert "Drafting by expected gain has" in verdict(tuning, 2, name_of)
    assert [name_of(setting) for setting in settings[:3]] == ["plain decoding", "40 nodes, paced", f"{MERGED_NODES[0]} nodes"]
    headers = [str(column.header) for column in tuning_table(tuning, 2, name_of).columns]
    assert headers == ["setting", "tok/step", "measured", "speedup"]
    # The choice holds for the merge, not for the drafter alone.
    assert tuned_choice(parts, tiny_target, batch_size=2) == tuning.choices[2]
    with pytest.raises(ValueError, match="it is tuned only for another setup: drafter .*[+]prompt_lookup"):
        tuned_choice(drafter, tiny_target, batch_size=2)
    rows = tuned_settings(replace(config, batch_sizes=[2]), tiny_target, [parts])
    assert rows == {parts: {(0.0, 2): tuning.choices[2].setting}}


def test_tuning_of_a_training_free_drafter_has_no_folder_to_write_to(
    tiny_target: HFTarget, questions: Path, tmp_path: Path
) -> None:
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench", path=str(questions))], max_new_tokens=4)
    parts = parse_drafter_name("prompt_lookup")
    with pytest.raises(ValueError, match="prompt_lookup has no folder.*--no-write"):
        tune(config, tiny_target, parts, tmp_path)
    tuning = tune(config, tiny_target, parts, tmp_path, settings=[{"tree_nodes": 2}], write=False)
    assert [speed.setting for speed in tuning.finals] == [None, {"tree_nodes": 2}]


def test_every_training_free_drafter_has_settings_to_measure() -> None:
    for name in TRAINING_FREE:
        parts = parse_drafter_name(name)
        for setting in measured_settings(parts):
            parts.configs(setting)
