"""Labels of methods: settings in words."""

from typing import Any

import pytest

from outrider.eval.records.names import setting_words, title_of

REDRAFTER: dict[str, Any] = {"beam_width": 4, "beam_length": 5, "tree_nodes": None, "num_blocks": 2}
MERGE: dict[str, Any] = {"pace": "expected", "tree_nodes": 40, "redrafter": REDRAFTER, "suffix": {}}
GROWING: dict[str, Any] = {"tree_nodes": 256, "pace": "expected", "draft_model": {"length": 5, "top_k": 8}}


@pytest.mark.parametrize(
    ("kind", "options", "setting", "words"),
    [
        ("redrafter", REDRAFTER, {}, "4 beams of 5"),
        ("redrafter", REDRAFTER, {"beam_length": 3, "tree_nodes": 5}, "4 beams of 3, 5 nodes"),
        ("redrafter", REDRAFTER, {"tree_nodes": None}, "4 beams of 5, all nodes"),
        ("redrafter", REDRAFTER, {"num_blocks": 3}, "4 beams of 5, num_blocks 3"),
        ("redrafter", REDRAFTER, None, "turned off by tuning"),
        ("eagle3", {"depth": 5, "top_k": 8, "tree_nodes": 60}, {}, "depth 5, top-k 8, 60 nodes"),
        ("medusa", {"tree_nodes": 1}, {}, "1 node"),
        ("medusa", {}, {"tree_paths": [[0], [1], [0, 0]]}, "3 nodes"),
        ("recycling", {"tree_nodes": 40, "depth": 10}, {}, "40 nodes"),
        ("recycling", {"tree_nodes": 40, "depth": 10}, {"depth": 10}, "depth 10, 40 nodes"),
        ("recycling", {"tree_nodes": 8, "pace": "fixed"}, {"pace": "fixed"}, "8 nodes, fixed pace"),
        ("redrafter+suffix", MERGE, {}, "40 nodes, paced"),
        ("redrafter+suffix", MERGE, {"pace": "fixed"}, "40 nodes"),
        ("redrafter+suffix", MERGE, {"suffix": {"depth": 8}}, '40 nodes, paced, suffix {"depth": 8}'),
        ("draft_model", GROWING, {"pace": "expected"}, "256 nodes, paced"),
    ],
)
def test_a_setting_in_words(kind: str, options: dict[str, Any], setting: dict[str, Any] | None, words: str) -> None:
    assert setting_words(kind, {**options, **(setting or {})}, setting) == words


def test_a_merge_is_named_by_its_parts() -> None:
    assert title_of("redrafter+suffix+recycling") == "ReDrafter + Suffix + Recycling"
    assert title_of("redrafter+medusa+redrafter_2") == "ReDrafter + Medusa + ReDrafter 2"
