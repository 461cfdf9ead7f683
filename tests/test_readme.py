"""The README is a page, and what it names is there."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
FOLDERS = "benchmarks|conf|docs|scripts|tests"
MOST_LINES = 190


def test_the_readme_is_a_page() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_each_promise_names_a_test_that_exists() -> None:
    table = README.split("| promise | test |")[1].split("\n\n")[0]
    tests = re.findall(r"`(tests/[\w/]+\.py)` \|$", table, re.MULTILINE)
    assert len(tests) == len(table.strip().splitlines()) - 1 >= 8
    assert [name for name in tests if not (REPOSITORY / name).is_file()] == []


def test_paths_of_readme_and_pages_exist() -> None:
    pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")]
    named = {
        (page.name, path)
        for page in pages
        for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", page.read_text())
        if "NAME" not in path
    }
    assert len(named) > 60
    assert sorted(entry for entry in named if not (REPOSITORY / entry[1]).exists()) == []
