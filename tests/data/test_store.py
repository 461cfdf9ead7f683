"""Other data are named by the options that changed, and an older folder still opens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.data.config import DataConfig
from outrider.data.fields import name_digests
from outrider.data.sources import PromptOverlap
from outrider.data.store import DIGESTS, data_changes, describe_data


def texts(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return name_digests(data_changes(before, now), DIGESTS)


def test_a_changed_option_is_named_with_both_values(tmp_path: Path) -> None:
    data = DataConfig(source="messages", path=str(tmp_path / "{chats}.jsonl"), limit=20, chat_template="{0}.jinja")
    before = describe_data(data, "template")
    assert texts(before, describe_data(replace(data, limit=30), "template")) == ["data.limit (was 20, is 30)"]
    assert texts(before, describe_data(replace(data, seed=1, chat_template="{x}.jinja"), "other")) == [
        "data.seed (was 0, is 1)",
        "data.chat_template (was '{0}.jinja', is '{x}.jinja')",
        "the chat template changed (data.chat_template and data.template_options, or the target's)",
    ]


def test_suites_are_compared_where_both_runs_left_their_prompts_out() -> None:
    data = DataConfig(source="stdlib", split="distill")
    overlap = PromptOverlap([], 13)
    overlap.suites["mt_bench"] = "abc"
    before = describe_data(data, "", overlap)
    (text,) = texts(before, describe_data(data, "", PromptOverlap([], 13)))
    assert text.startswith("eval.suites changed")
    assert "no recorded option" in texts(before, describe_data(data, ""))[0]
    assert "no recorded option" in texts({}, before)[0], "of a folder without facts"


def test_digests_are_named_by_what_they_are_of() -> None:
    changes = {"suites.a": "suites.a (was 1, is 2)", "suites.b": "x", "seed": "seed (was 0, is 1)", "target.sha": "y"}
    words = {"suites.": "the prompts of {name}", "target.sha": "the target"}
    assert name_digests(changes, words) == ["the prompts of a", "the prompts of b", "seed (was 0, is 1)", "the target"]
