"""Which values are local paths, and names of drafters."""

from pathlib import Path

import pytest

from outrider.data.paths import (
    TRAINING_FREE_NAMES,
    expand_home,
    folders_of,
    looks_like_path,
    nearest_name,
    split_name,
)
from outrider.models.drafters.registry import TRAINING_FREE


@pytest.mark.parametrize("value", ["./model", "../model", ".", "/model", "~/model", "a/b/c", "data.jsonl", "org/x.jinja"])
def test_a_path_is_never_asked_of_the_hub(value: str) -> None:
    assert looks_like_path(value)


@pytest.mark.parametrize("value", ["gpt2", "owner/name", "owner/name-1.5", "light", "package:a==1/b/c.gguf"])
def test_a_name_may_be_the_hubs(value: str) -> None:
    assert not looks_like_path(value)


def test_the_home_directory_is_filled_in_wherever_a_path_may_be() -> None:
    home = str(Path.home())
    values = {"data": {"path": "~/a.jsonl", "limit": 3}, "eval": {"suites": [{"path": "~/b.jsonl"}, "~"]}, "name": "a~/b"}
    assert expand_home(values) == {
        "data": {"path": f"{home}/a.jsonl", "limit": 3},
        "eval": {"suites": [{"path": f"{home}/b.jsonl"}, home]},
        "name": "a~/b",
    }


def test_the_names_are_those_of_the_registry():
    """The list exists because the registry imports torch."""
    assert set(TRAINING_FREE_NAMES) == set(TRAINING_FREE)


def test_a_name_is_split_at_each_plus():
    assert split_name("user/drafter@v2+suffix+recycling") == ["user/drafter@v2", "suffix", "recycling"]
    assert split_name("recycling") == ["recycling"]
    assert folders_of("suffix+outputs/a+recycling+b") == ["outputs/a", "b"]


def test_an_existing_folder_may_have_a_plus_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a+b" / "c+suffix").mkdir(parents=True)
    assert split_name("a+b") == ["a+b"]
    assert split_name("recycling+a+b/c+suffix+suffix") == ["recycling", "a+b/c+suffix", "suffix"]
    (tmp_path / "suffix").mkdir()
    assert folders_of("suffix") == []
    assert folders_of("./suffix") == ["./suffix"]
    assert folders_of(Path("suffix")) == ["suffix"]
    assert folders_of(Path("a+b")) == ["a+b"]


@pytest.mark.parametrize("name", ["", "+", "suffix+", "+suffix", "a++b"])
def test_an_empty_part_is_an_error(name: str):
    with pytest.raises(ValueError, match="empty part"):
        split_name(name)


def test_a_model_is_named_by_its_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a+b").mkdir()
    name = "draft_model:a+b+suffix+outputs/c+draft_model:user/d@v1"
    assert split_name(name) == ["draft_model:a+b", "suffix", "outputs/c", "draft_model:user/d@v1"]
    assert folders_of(name) == ["outputs/c"]
    with pytest.raises(ValueError, match="names no model; give draft_model:DIR"):
        split_name("draft_model:+suffix")


def test_a_near_miss_has_a_hint():
    assert nearest_name("sufix") == "; did you mean suffix?"
    assert nearest_name("drafter") == ""
