"""Which values are local paths, and how those that are missing are listed."""

from pathlib import Path

import pytest

from outrider.data.paths import NamedPath, expand_home, looks_like_path, require_paths


@pytest.mark.parametrize("value", ["./model", "../model", ".", "/model", "~/model", "a/b/c", "data.jsonl", "org/x.jinja"])
def test_a_path_is_never_asked_of_the_hub(value: str) -> None:
    assert looks_like_path(value)


@pytest.mark.parametrize("value", ["gpt2", "owner/name", "owner/name-1.5", "light"])
def test_a_name_may_be_the_hubs(value: str) -> None:
    assert not looks_like_path(value)


def test_all_missing_paths_are_listed_at_once(tmp_path: Path) -> None:
    present = tmp_path / "a.jsonl"
    present.touch()
    paths = [
        NamedPath(option="data.path", value=str(present), expected="a file"),
        NamedPath(option="target.name_or_path", value="owner/name", expected="a model"),
        NamedPath(option="eval.suites[0].path", value="nowhere.jsonl", expected="a file"),
        NamedPath(option="distill.drafter", value="~/nowhere", expected="a folder"),
        NamedPath(option="export.certificate", value="nowhere", expected="a certificate", is_local=True),
    ]
    with pytest.raises(ValueError, match="3 paths don't exist") as error:
        require_paths(paths)
    lines = str(error.value).splitlines()[1:]
    assert [line.split(" is ")[0].strip(" -") for line in lines] == [path.option for path in paths[2:]]
    require_paths(paths[:2])


def test_the_home_directory_is_filled_in_wherever_a_path_may_be() -> None:
    home = str(Path.home())
    values = {"data": {"path": "~/a.jsonl", "limit": 3}, "eval": {"suites": [{"path": "~/b.jsonl"}, "~"]}, "name": "a~/b"}
    assert expand_home(values) == {
        "data": {"path": f"{home}/a.jsonl", "limit": 3},
        "eval": {"suites": [{"path": f"{home}/b.jsonl"}, home]},
        "name": "a~/b",
    }
