"""benchmarks/README.md and the README's table are what the records give."""

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "make_benchmarks_page.py"
TEMPLATE = REPOSITORY / "scripts" / "benchmarks.md.jinja"
NOT_SHOWN = {"run.json", "compare_demo/training.json"}
"""Environments of evaluations, and trainings that another record has too."""
NAMES = re.compile(r"EAGLE-\d|S3|\[95 %\]|temperature 1")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def run(script: dict[str, Any], *arguments: object) -> Any:
    app = typer.Typer()
    app.command()(script["main"])
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_page_and_readme_fit_the_records(script: dict[str, Any]) -> None:
    result = run(script, "--check")
    assert result.exit_code == 0, result.output


def test_a_changed_figure_is_named_with_the_command_that_renews_it(script: dict[str, Any], tmp_path: Path) -> None:
    records, readme = tmp_path / "benchmarks", tmp_path / "README.md"
    shutil.copytree(REPOSITORY / "benchmarks", records, ignore=shutil.ignore_patterns("*.png"))
    readme.write_text(f"# A\n\n{script['BEGIN']}\n| drafter |\n{script['END']}\n\nMore.\n")
    options = ("--records", records, "--readme", readme, "--explanation", readme)
    stale = run(script, *options, "--check")
    assert stale.exit_code == 1
    assert f"{readme} doesn't fit the records in benchmarks/; renew it with `make benchmarks`" in stale.output
    assert run(script, *options).exit_code == 0
    assert run(script, *options, "--check").exit_code == 0
    assert "\n| ReDrafter, 5 nodes | " in readme.read_text()
    assert readme.read_text().endswith(f"{script['END']}\n\nMore.\n")
    # A record that changes makes the page and the README stale; so does one with new rows in place of tables.
    path = records / script["DRAFTERS"]
    record = json.loads(path.read_text())
    for row in record["rows"]:
        row["tokens_per_step"] = 9.0
    path.write_text(json.dumps(record))
    (records / "suffix.json").write_text(
        json.dumps({"command": "python scripts/bench/x.py", "rows": [{"a": "b", "c": 7.25}], "environment": None})
    )
    assert run(script, *options, "--check").output.count("renew it") == 2
    assert run(script, *options).exit_code == 0
    assert "| a | c |\n| --- | ---: |\n| b | 7.25 |\n\n- Record: [suffix.json]" in (records / "README.md").read_text()


def test_every_record_is_shown_and_names_code_that_exists(script: dict[str, Any]) -> None:
    folder = REPOSITORY / "benchmarks"
    shown, page = set(), script["Page"](folder)
    read = page.read
    page.read = lambda name: shown.add(name) or read(name)
    page.written()
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.json")}
    assert {name for name in names - shown if not {name, Path(name).name} & NOT_SHOWN} == set()
    for name in shown:
        record = read(name)
        if isinstance(record, dict) and "command" in record:
            used = re.search(r"scripts/\S+", record["command"])
            gone = used is not None and not (REPOSITORY / used.group()).is_file()
            assert record.get("code") == ("before-halving" if gone else None), name
    assert len(shown) > 30


def test_the_text_around_the_tables_has_no_figure() -> None:
    text = re.sub(r"\{\{.*?\}\}|`[^`]*`|!?\[[^\]]*\]\([^)]*\)", "", TEMPLATE.read_text())
    assert [line for line in text.splitlines() if re.search(r"\d", NAMES.sub("", line))] == []


@pytest.mark.parametrize("text", ["no markers", "{BEGIN}", "{END}{BEGIN}", "{BEGIN}{BEGIN}{END}"])
def test_a_text_without_both_markers_is_refused(script: dict[str, Any], text: str) -> None:
    filled = text.format(BEGIN=script["BEGIN"], END=script["END"])
    with pytest.raises(ValueError, match="begin.*end.*once each"):
        script["with_table"](filled, "| a |")
