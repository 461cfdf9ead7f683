"""A new drafter takes an old one's place only where an evaluation of both shows that it is better."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.data.files import sha256_file
from outrider.eval.results.adoption import Change, changes, objections, pairs
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.drafters.saved.folder import WEIGHTS_FILE
from outrider.models.phases import PhaseSeconds

from ...commands import invoke
from ..conftest import MakeRecord

METHODS = {
    "suffix": {"kind": "suffix", "config": {}, "setting": {}, "weights": ""},
    "a": {"kind": "medusa", "config": {"tree_nodes": 5, "num_heads": 4}, "setting": {}, "weights": "1"},
    "b": {"kind": "medusa", "config": {"tree_nodes": 5, "num_heads": 4}, "setting": {}, "weights": "2"},
    "c": {"kind": "medusa", "config": {"tree_nodes": 9, "num_heads": 4}, "setting": {}, "weights": "2"},
}


def test_methods_are_paired_by_setting():
    assert pairs(METHODS, "1", "2") == {"medusa: tree_nodes 5": ("a", "b")}


@pytest.mark.parametrize(
    ("methods", "old", "new", "message"),
    [
        (METHODS, "1", "1", "the same weights"),
        (METHODS, "3", "2", "doesn't have the old drafter"),
        (METHODS, "1", "3", "doesn't have the new drafter"),
        ({name: METHODS[name] for name in ("a", "c")}, "1", "2", "no setting of both"),
    ],
)
def test_an_evaluation_without_both_is_an_error(methods, old, new, message):
    with pytest.raises(ValueError, match=message):
        pairs(methods, old, new)


@pytest.mark.parametrize("depends", [{"config": {"tree_nodes": 5, "pace": "expected"}}, {"decode": "pipelined"}])
def test_drafts_that_depend_on_the_clock_have_no_part(depends):
    for side in ("a", "b"):
        timed = {**METHODS, side: {**METHODS[side], **depends}}
        with pytest.raises(ValueError, match="or only paced or pipelined"):
            pairs({name: timed[name] for name in ("a", "b")}, "1", "2")
    both = {**METHODS, "d": {**METHODS["b"], "decode": "pipelined"}}
    assert pairs(both, "1", "2") == {"medusa: tree_nodes 5": ("a", "b")}


def test_a_change_is_the_ratio_of_tokens_per_step_on_the_same_prompts(make_record: MakeRecord):
    records = [
        make_record(suite=suite, prompt_id=str(prompt), method=method, accepted_histogram=histogram, repeat=repeat, **extra)
        for repeat in (0, 1)
        for suite in ("x", "y")
        for prompt in range(5)
        for method, histogram, extra in (
            ("a", [0, 10], {"pace": "fixed"}),
            ("b", [0, 0, 10], {"pace": "fixed"}),  # 3 tokens a step, not 2
            ("b", [0, 0, 0, 10], {"phase_seconds": PhaseSeconds(draft=0.1, verify=0.1, accept=0.1)}),
            ("suffix", [0, 10], {}),
        )
    ]
    found = list(changes(records, {"s": ("a", "b")}))
    assert [(change.suite, change.num_prompts, change.ratio, change.low, change.high) for change in found] == [
        ("x", 5, 1.5, 1.5, 1.5),
        ("y", 5, 1.5, 1.5, 1.5),
    ]
    # Each step takes as long in both, so the new one's 31 tokens take as long as the old one's 21.
    assert [change.speed for change in found] == [pytest.approx(31 / 21)] * 2


def test_a_stalled_repeat_of_the_old_drafter_is_no_gain_in_speed(make_record: MakeRecord):
    records = [
        make_record(prompt_id=str(prompt), method=method, repeat=repeat, decode_seconds=seconds)
        for prompt in range(3)
        for method in "ab"
        for repeat in range(3)
        for seconds in [100.0 if (method, repeat) == ("a", 1) else 0.75]
    ]
    (found,) = changes(records, {"s": ("a", "b")})
    assert found.speed == pytest.approx(1.0)


def test_batches_of_other_sizes_are_other_units(make_record: MakeRecord):
    records = [
        make_record(prompt_id=str(prompt), method=method, batch_size=size, num_rows=size)
        for size in (2, 4)
        for prompt in range(size)
        for method in "ab"
    ]
    (found,) = changes(records, {"s": ("a", "b")})
    assert found.speed_high == pytest.approx(1.0), "one unit has no interval"


def test_the_best_of_many_settings_is_no_gain_by_chance(make_record: MakeRecord):
    """With the same numbers, the interval of one setting of four is wider than that of one alone."""
    numbers = np.random.default_rng(0)
    records = [
        make_record(suite="x", prompt_id=str(prompt), method=f"{side}{setting}", accepted_histogram=[0, *counts])
        for prompt in range(20)
        for side in "ab"
        for counts in [numbers.integers(1, 9, 3).tolist()]
        for setting in range(4)
    ]
    (alone,) = changes(records, {"0": ("a0", "b0")})
    of_four = list(changes(records, {str(setting): (f"a{setting}", f"b{setting}") for setting in range(4)}))
    assert all(change.low < alone.low < alone.high < change.high for change in of_four)
    assert all(change.ratio == alone.ratio for change in of_four)


def change(suite: str, ratio: float, low: float, *, prompts: int = 20, setting: str = "s", speed: float = 1.0) -> Change:
    measured = {"ratio": ratio, "low": low, "high": 2 * ratio - low, "speed": speed, "speed_high": speed + 0.05}
    return Change(setting=setting, suite=suite, temperature=0.0, num_prompts=prompts, **measured)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([change("own", 1.2, 1.1), change("mt_bench", 0.995, 0.96)], None),
        ([change("own", 1.2, 1.1), change("own", 1.01, 0.98, setting="t")], None),
        ([change("own", 1.2, 0.98), change("mt_bench", 1.0, 0.97)], r"no gain is shown on own: at best 1.200 \[0.980"),
        ([change("own", 1.2, 1.1), change("mt_bench", 0.98, 0.9)], "mt_bench .* loses 2.0% of its tokens per step"),
        ([change("own", 1.2, 1.1), change("own", 0.995, 0.98, setting="t")], "own .*(t).* loses 0.5%"),
        ([change("own", 1.2, 1.1), change("mt_bench", 0.995, 0.9)], "mt_bench .* may lose 10.0%"),
        ([change("own", 1.2, 1.1, prompts=19)], "own .* has 19 prompts, too few"),
        ([change("own", 1.2, 1.1, speed=0.95)], None),
        ([change("own", 1.2, 1.1, speed=0.9)], "own .* has 0.900 of the old one's speed"),
    ],
)
def test_a_gain_must_be_shown_and_nothing_lost(found, reason):
    reasons = objections(found, [], ["b"], gain_on=["own"], loss=0.01)
    assert len(reasons) == (reason is not None)
    if reason is not None:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(reasons[0])


def test_a_suite_that_was_not_evaluated_is_an_error():
    with pytest.raises(ValueError, match="gain_on has mine, which wasn't evaluated; there are: own"):
        objections([change("own", 1.2, 1.1)], [], [], gain_on=["mine"], loss=0.01)


@pytest.fixture(scope="module")
def evaluated(tiny_target, tiny_target_dir, tiny_drafter_dir, tmp_path_factory):
    """Return an evaluation of two drafters, of which the second one is the target itself, and their folders."""
    folder = tmp_path_factory.mktemp("adopt")
    layers = {"kind": "draft_model", "num_layers": tiny_target.model.config.num_hidden_layers, "init": "target_layers"}
    good = build_drafter(parse_drafter({**layers, "length": 3, "top_k": 1}), tiny_target)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        bad = build_drafter(parse_drafter({**layers, "init": "random", "length": 3, "top_k": 1}), tiny_target)
    for name, drafter in (("old", bad), ("new", good)):
        save_drafter(drafter, folder / name, tiny_target.identity)
    prompts = folder / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"write {number}"}) + "\n" for number in range(20)))
    arguments = ["--target", tiny_target_dir, "--drafter", folder / "old", "--drafter", folder / "new", "--suite", prompts]
    result = invoke(["eval", *arguments, "--max-new-tokens", "12", "--repeats", "1", "--output", folder / "eval"])
    assert result.exit_code == 0, result.output
    return folder


def adopt(folder: Path, *options: str, new: str = "new", old: str = "old"):
    return invoke(["adopt", folder / new, "--old", folder / old, "--records", folder / "eval", "--gain-on", "mine", *options])


def test_a_better_drafter_takes_the_place_and_the_old_one_is_kept(evaluated, tmp_path):
    folder = Path(shutil.copytree(evaluated, tmp_path / "copy"))
    digests = {name: sha256_file(folder / name / WEIGHTS_FILE) for name in ("old", "new")}
    # 1. The other way round, nothing changes.
    refused = adopt(folder, new="old", old="new")
    assert refused.exit_code == 1
    assert "is not adopted" in " ".join(refused.output.split())
    assert "no gain is shown on mine" in refused.output
    # 2. A check changes nothing.
    checked = adopt(folder, "--check")
    assert checked.exit_code == 0, checked.output
    assert "may take the place" in " ".join(checked.output.split())
    assert {name: sha256_file(folder / name / WEIGHTS_FILE) for name in ("old", "new")} == digests
    # 3. The new drafter is adopted.
    done = adopt(folder)
    assert done.exit_code == 0, done.output
    assert sha256_file(folder / "old" / WEIGHTS_FILE) == digests["new"]
    assert sha256_file(folder / "old_earlier_1" / WEIGHTS_FILE) == digests["old"]
    # 4. Once more, there is nothing to adopt.
    again = adopt(folder)
    assert "the same weights" in again.message


def test_bad_input_is_an_error_before_anything_changes(evaluated, tmp_path):
    folder = Path(shutil.copytree(evaluated, tmp_path / "copy"))
    assert "gain_on has other" in adopt(folder, "--gain-on", "other").message
    with (folder / "new" / WEIGHTS_FILE).open("ab") as file:
        file.write(b"x")
    assert "was altered or damaged" in adopt(folder).message
    nothing = invoke(["adopt", evaluated / "new", "--old", folder / "old", "--records", tmp_path, "--gain-on", "mine"])
    assert "not a finished evaluation" in nothing.message
