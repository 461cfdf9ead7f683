"""Names of drafters: parts joined by +, and folders that have a + in their names."""

from pathlib import Path

import pytest

from outrider.data.drafter_names import TRAINING_FREE_NAMES, folders_of, models_of, nearest_name, split_name
from outrider.models.drafters.registry import TRAINING_FREE


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
    assert models_of(name) == ["a+b", "user/d@v1"]
    assert folders_of(name) == ["outputs/c"]
    assert models_of(Path("draft_model:a")) == []
    with pytest.raises(ValueError, match="names no model; give draft_model:DIR"):
        split_name("draft_model:+suffix")


def test_a_near_miss_has_a_hint():
    assert nearest_name("sufix") == "; did you mean suffix?"
    assert nearest_name("drafter") == ""
