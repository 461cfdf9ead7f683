"""Names of methods: readers see kinds and settings, and records keep their keys."""

from typing import Any

import pytest

from outrider.eval.records.method_names import MethodFacts, method_names, name_of_key, setting_words

CONFIG = {"beam_width": 4, "beam_length": 5, "tree_nodes": None, "share_prefixes": True, "head_rank": None, "rnn": True}


def method(key: str, setting: dict[str, Any] | None = None, *, weights: str = "w", **facts: Any) -> MethodFacts:
    training = facts.pop("training", None)
    run = facts.pop("run", "")
    described = {"config": {**CONFIG, **facts}, "setting": setting or {}, "weights": weights}
    return MethodFacts(key=key, described=described, training=training, run=run)


def shown(*methods: MethodFacts) -> list[str]:
    return [str(name) for name in method_names(methods)]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("baseline", "plain decoding"),
        ("redrafter beam_width=4 beam_length=3 tree_nodes=5", "ReDrafter, 4 beams of 3, 5 nodes"),
        ("redrafter beam_width=1 tree_nodes=None", "ReDrafter, 1 beam, all nodes"),
        ("eagle3 depth=5 top_k=8 tree_nodes=60", "EAGLE-3, depth 5, top-k 8, 60 nodes"),
        ("medusa tree_nodes=1", "Medusa, 1 node"),
        ("medusa tree_paths=[[0], [1], [0, 0]]", "Medusa, 3 nodes"),
        ("draft_model length=4 top_k=2", "Draft model, length 4, top-k 2"),
        ("redrafter share_prefixes=False", "ReDrafter, without tree attention"),
        ("redrafter tree_padding=8", "ReDrafter, tree_padding 8"),
        ("redrafter off", "ReDrafter, turned off by tuning"),
        ("redrafter tuned beam_width=2", "ReDrafter, 2 beams, tuned"),
        ("prompt_lookup", "Prompt lookup"),
        ("suffix tree_nodes=16", "Suffix, 16 nodes"),
        ("recycling pace=expected", "Recycling, paced"),
        ("recycling pace=fixed tree_nodes=8", "Recycling, 8 nodes, fixed pace"),
        ("redrafter+suffix+recycling tree_nodes=40 pace=fixed", "ReDrafter + Suffix + Recycling, 40 nodes"),
        ("redrafter+medusa+redrafter_2 pace=expected", "ReDrafter + Medusa + ReDrafter 2, paced"),
        ("draft_model pipelined length=4 top_k=1", "Draft model, pipelined"),
        ("redrafter+suffix a/b pipelined", "ReDrafter + Suffix, pipelined"),
        ("redrafter+suffix a/b tuned tree_nodes=5", "ReDrafter + Suffix, 5 nodes, tuned"),
    ],
)
def test_a_key_without_settings_has_a_readable_name(key: str, name: str) -> None:
    assert name_of_key(key) == name


def test_a_name_includes_the_drafters_default_tree_shape() -> None:
    assert shown(method("redrafter"), method("redrafter beam_length=3", {"beam_length": 3})) == [
        "ReDrafter, 4 beams of 5",
        "ReDrafter, 4 beams of 3",
    ]
    assert setting_words("redrafter", CONFIG, None) == "turned off by tuning"


def test_a_merge_is_named_by_its_parts_its_nodes_and_its_pace():
    options = {"pace": "expected", "tree_nodes": 40, "redrafter": CONFIG, "suffix": {}}
    merges = [
        MethodFacts(key=key, described={"config": options, "setting": setting, "weights": weights})
        for key, setting, weights in (
            ("redrafter+suffix", {}, "1"),
            ("redrafter+suffix pace=fixed", {"pace": "fixed"}, "1"),
            ("redrafter+suffix suffix={'max_depth': 8}", {"suffix": {"max_depth": 8}}, "1"),
        )
    ]
    names = shown(method("redrafter", weights="1"), *merges)
    assert names == [
        "ReDrafter, 4 beams of 5",
        "ReDrafter + Suffix, 40 nodes, paced",
        "ReDrafter + Suffix, 40 nodes",
        'ReDrafter + Suffix, 40 nodes, paced, suffix {"max_depth": 8}',
    ]


def test_a_training_free_drafter_shows_its_nodes_and_what_was_set():
    options = {"tree_nodes": 40, "depth": 10, "top_k": 8}
    assert setting_words("recycling", options, {}) == "40 nodes"
    assert setting_words("recycling", options, {"depth": 10}) == "depth 10, 40 nodes"


def test_two_drafters_of_a_kind_are_named_by_the_options_that_differ() -> None:
    names = shown(method("redrafter a", weights="1"), method("redrafter b", weights="2", rnn=False), method("medusa c"))
    assert names == ["ReDrafter (rnn true), 4 beams of 5", "ReDrafter (rnn false), 4 beams of 5", "Medusa, 4 beams of 5"]


def test_alike_drafters_are_named_by_their_training_and_then_by_their_folders() -> None:
    trainings = [{"labels": labels, "steps": 500} for labels in ("distilled", "text")]
    pair = [method(f"redrafter {index}", weights=str(index), training=training) for index, training in enumerate(trainings)]
    assert shown(*pair) == ["ReDrafter (distilled), 4 beams of 5", "ReDrafter (not distilled), 4 beams of 5"]
    older = [{"labels": labels, "steps": 500} for labels in ("distilled", None)]
    pair = [method(f"redrafter {name}", weights=name, training=training) for name, training in zip("ab", older, strict=True)]
    assert shown(*pair) == ["ReDrafter (distilled), 4 beams of 5", "ReDrafter (labels unknown), 4 beams of 5"]
    steps = [{"labels": "distilled", "steps": number} for number in (500, 2000)]
    pair = [method(f"redrafter {index}", weights=str(index), training=training) for index, training in enumerate(steps)]
    assert shown(*pair) == ["ReDrafter (500 steps), 4 beams of 5", "ReDrafter (2,000 steps), 4 beams of 5"]
    twins = [method(f"redrafter {name}/drafter", weights=name, training=steps[0]) for name in ("one", "two")]
    assert shown(*twins) == ["ReDrafter (one), 4 beams of 5", "ReDrafter (two), 4 beams of 5"]
    runs = [method("redrafter", weights=name, run=name) for name in ("one", "two")]
    assert shown(*runs) == ["ReDrafter (one), 4 beams of 5", "ReDrafter (two), 4 beams of 5"]


def test_only_drafters_with_equal_names_get_more_words() -> None:
    training = {"labels": "distilled", "steps": 1}
    text = {**training, "labels": "text"}
    names = shown(
        method("redrafter a", weights="1", training=training),
        method("redrafter b", weights="2", training=text),
        method("redrafter c", weights="3", training=training, head_rank=64),
    )
    assert [name.removesuffix(", 4 beams of 5") for name in names] == [
        "ReDrafter (head_rank null, distilled)",
        "ReDrafter (head_rank null, not distilled)",
        "ReDrafter (head_rank 64)",
    ]


def test_no_two_methods_have_one_name() -> None:
    same = {"beam_width": 4, "beam_length": 5}
    repeated = shown(method("redrafter"), method("redrafter beam_width=4 beam_length=5", same))
    assert repeated == ["ReDrafter, 4 beams of 5 (as saved)", "ReDrafter, 4 beams of 5 (beam_width=4 beam_length=5)"]
    copies = shown(method("redrafter a/drafter"), method("redrafter b/drafter"))
    assert copies == ["ReDrafter (a), 4 beams of 5", "ReDrafter (b), 4 beams of 5"]


def test_the_same_drafter_of_two_runs_has_one_name() -> None:
    assert shown(method("redrafter", run="a"), method("redrafter", run="b")) == ["ReDrafter, 4 beams of 5"] * 2


def test_a_long_option_is_not_quoted() -> None:
    pair = [method(f"draft_model {name}", weights=name, architecture={"name": name * 40}) for name in ("a", "b")]
    assert shown(*pair) == ["Draft model (a), 4 beams of 5", "Draft model (b), 4 beams of 5"]


def test_a_growing_tree_has_no_length_and_no_width() -> None:
    options = {"length": 5, "top_k": 8, "tree_nodes": 256, "pace": "expected"}
    assert setting_words("draft_model", options, {"pace": "expected"}) == "256 nodes, paced"
    by_confidence = {**options, "pace": "confidence"}
    assert setting_words("draft_model", by_confidence, {"pace": "confidence"}) == "256 nodes, paced by confidence"
    fixed = {**options, "pace": "fixed"}
    assert setting_words("draft_model", fixed, {"pace": "fixed"}) == "length 5, top-k 8, 256 nodes"
