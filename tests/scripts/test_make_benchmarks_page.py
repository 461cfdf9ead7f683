"""benchmarks/README.md and the README's table are what the records give."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "scripts"
SCRIPT = SCRIPTS / "make_benchmarks_page.py"
TEMPLATE = SCRIPTS / "benchmarks_page" / "page.md.jinja"
NOT_SHOWN = {"facts.json"}
"""Facts of an evaluation that its summary has too."""
NAMES = re.compile(r"EAGLE-\d|S3|C\+\+|\[95 %\]")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Records, page and a text with a table, all up to date."""
    shutil.copytree(REPOSITORY / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("*.jsonl", "*.png"))
    return tmp_path


def run(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    try:
        script["main"]()
    except SystemExit as status:
        return int(status.code or 0)
    return 0


def test_page_and_readme_fit_the_records(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(script, monkeypatch, "--check") == 0


def test_a_changed_figure_is_named_with_the_command_that_renews_it(
    script: dict[str, Any], copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = copy / "README.md"
    readme.write_text(f"# A\n\n{script['BEGIN']}\n| drafter |\n{script['END']}\n\nMore.\n")
    options = ("--records", copy / "benchmarks", "--readme", readme)
    assert run(script, monkeypatch, *options, "--check") == 1
    assert f"{readme} doesn't fit the records in benchmarks/; renew it with `make benchmarks`" in capsys.readouterr().err
    assert run(script, monkeypatch, *options) == 0
    assert run(script, monkeypatch, *options, "--check") == 0
    assert "\n| ReDrafter, 5 nodes | " in readme.read_text()
    assert readme.read_text().endswith(f"{script['END']}\n\nMore.\n")
    # A record that changes makes the page, the README and the explanation stale.
    path = copy / "benchmarks" / "free_study" / "free_study.json"
    record = json.loads(path.read_text())
    for row in record["rows"]:
        row["tokens_per_step"] = 9.0
    path.write_text(json.dumps(record))
    assert run(script, monkeypatch, *options, "--check") == 1
    assert capsys.readouterr().err.count("renew it") == 3


def test_every_record_is_shown(script: dict[str, Any]) -> None:
    names = {path.relative_to(REPOSITORY / "benchmarks").as_posix() for path in (REPOSITORY / "benchmarks").rglob("*.json")}
    read = set()

    class Spy(script["Records"]):  # type: ignore[misc]
        def read(self, name: str) -> Any:
            read.add(name)
            return super().read(name)

    script["page"](Spy(REPOSITORY / "benchmarks"))
    assert {name for name in names - read if Path(name).name not in NOT_SHOWN} == set()
    assert len(read) > 30


def test_the_text_around_the_tables_has_no_figure() -> None:
    text = re.sub(r"\{\{.*?\}\}|`[^`]*`|!?\[[^\]]*\]\([^)]*\)", "", TEMPLATE.read_text())
    lines = [line for line in text.splitlines() if re.search(r"\d", NAMES.sub("", line))]
    # T is a name of the horizon; temperature 1 is what the table's rows are chosen by.
    assert [line for line in lines if "temperature 1" not in line and "[95 %]" not in line] == []


@pytest.mark.parametrize("text", ["no markers", "{BEGIN}", "{END}{BEGIN}", "{BEGIN}{BEGIN}{END}"])
def test_a_text_without_both_markers_is_refused(script: dict[str, Any], text: str) -> None:
    filled = text.format(BEGIN=script["BEGIN"], END=script["END"])
    with pytest.raises(ValueError, match="begin.*end.*once each"):
        script["with_table"](filled, "| a |")
