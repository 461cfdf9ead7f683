"""Other data are named by the options that changed, and an older folder still opens."""

from dataclasses import replace
from pathlib import Path

from outrider.data.config import DataConfig
from outrider.data.data_facts import describe_change, describe_data
from outrider.data.decontamination import PromptOverlap
from outrider.data.differences import name_digests


def test_a_changed_option_is_named_with_both_values(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}")
    data = DataConfig(source="messages", path=str(file), limit=20)
    before = describe_data(data, "template")
    assert describe_change(before, describe_data(replace(data, limit=30), "template")) == "data.limit was 20 and is 30"
    file.write_text("{} ")
    text = describe_change(before, describe_data(replace(data, seed=1), "other"))
    assert [part.split(" was ")[0].split(": ")[0] for part in text.split("; ")] == [
        "data.seed",
        f"data.path {file}",
        "the chat template changed (data.chat_template, or the one of the target's tokenizer)",
    ]


def test_suites_are_compared_where_both_runs_left_their_prompts_out() -> None:
    data = DataConfig(source="stdlib", split="distill")
    overlap = PromptOverlap([], 13)
    overlap.suites["mt_bench"] = "abc"
    before = describe_data(data, "", overlap)
    assert "eval.suites changed" in describe_change(before, describe_data(data, "", PromptOverlap([], 13)))
    assert "no option" in describe_change(before, describe_data(data, ""))


def test_a_folder_without_facts_is_another_data_set_without_a_digest() -> None:
    assert "options weren't recorded" in describe_change(None, describe_data(DataConfig(source="stdlib", split="distill"), ""))


def test_digests_are_named_by_what_they_are_of() -> None:
    changes = {"suites.a": "suites.a (was 1, is 2)", "suites.b": "x", "seed": "seed (was 0, is 1)", "target.sha": "y"}
    words = {"suites.": "the prompts of {name}", "target.sha": "the target"}
    texts = ["the prompts of a", "the prompts of b", "seed (was 0, is 1)", "the target"]
    assert name_digests(changes, words) == texts
