"""The attacks: what the driver judges, what it keeps, and a few cases of each kind."""

import importlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
LIMIT_SECONDS = 1.0


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return lambda name: importlib.import_module(f"attacks.{name}")


def raises(error: BaseException) -> Callable[[Path], Any]:
    def attack(place: Path) -> Any:
        raise error

    return attack


def test_each_end_of_a_case_gets_its_verdict(attacks: Callable[[str], Any], tmp_path: Path) -> None:
    cases, processes = attacks("cases"), attacks("processes")
    ends = {
        cases.RIGHT: lambda place: cases.Finding(cases.RIGHT),
        cases.ERROR: raises(ValueError("the value is wrong; change it")),
        cases.TRACEBACK: raises(KeyError("x")),
        cases.HANG: lambda place: time.sleep(60),
        cases.CRASH: lambda place: os.kill(os.getpid(), 9),
        cases.UNCLEAR: raises(SystemExit(3)),
    }
    tried = [cases.Case(kind="toy", name=name, attack=attack) for name, attack in ends.items()]
    outcomes = list(processes.run_cases(tried, tmp_path, limit_seconds=LIMIT_SECONDS, num_processes=6))
    assert {outcome.name: outcome.verdict for outcome in outcomes} == {name: name for name in ends}
    notes = {outcome.name: outcome.note for outcome in outcomes}
    assert notes[cases.ERROR] == "the value is wrong; change it"
    assert list(tmp_path.iterdir()) == [], "the work of a case is removed"


def test_a_traceback_is_no_clear_message_even_where_the_command_ends_well(
    attacks: Callable[[str], Any], tmp_path: Path
) -> None:
    cases, processes = attacks("cases"), attacks("processes")

    def attack(place: Path) -> Any:
        os.write(2, b"Traceback (most recent call last)\n")
        return cases.Finding(cases.RIGHT)

    (outcome,) = processes.run_cases(
        [cases.Case(kind="toy", name="x", attack=attack)], tmp_path, limit_seconds=LIMIT_SECONDS, num_processes=1
    )
    assert outcome.verdict == cases.TRACEBACK


def test_every_kind_has_the_promised_number_of_cases_with_different_names(
    attacks: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drafters").mkdir()
    (tmp_path / "drafters" / "made").touch()
    least = {"drafters": 63, "templates": 22, "data": 57, "recipes": 120, "hub": 42, "architectures": 2 * 47}
    for kind, number in least.items():
        names = [case.name for case in attacks(kind).make_cases(tmp_path / kind, tmp_path)]
        assert len(set(names)) == len(names) >= number, kind


def test_a_json_value_is_changed_dropped_and_retyped(attacks: Callable[[str], Any]) -> None:
    value = {"steps": 3, "run": {"names": ["a", "b"]}}
    damaged = dict(attacks("files").json_damages(value, random.Random(0)))
    assert len(damaged) == 6
    assert all(other != value for other in damaged.values())
    assert value == {"steps": 3, "run": {"names": ["a", "b"]}}


def test_every_file_of_the_user_is_one_in_the_documentation(attacks: Callable[[str], Any]) -> None:
    files = attacks("files")
    text = (SCRIPTS.parent / "docs" / "reference" / "file-formats.md").read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    users = {name for names, protection in rows if "yours" in protection for name in re.findall("`([^`]+)`", names)}
    assert len(users) > 10
    for pattern in files.THE_USERS:
        assert {pattern, pattern.removeprefix("*/")} & users, pattern


def test_only_a_file_whose_digest_was_dropped_is_taken_for_one_of_an_earlier_version(attacks: Callable[[str], Any]) -> None:
    lacks = attacks("files").lacks_only_its_digest
    assert lacks(b'{"a": 1, "sha256": "x"}', b'{"a": 1}')
    for content in (b'{"a": 2}', b'{"a": 1, "sha256": null}', b"", b"[]"):
        assert not lacks(b'{"a": 1, "sha256": "x"}', content)
    assert not lacks(b'{"a": 1}', b"{}")


def test_a_warning_must_name_the_file_that_was_damaged(attacks: Callable[[str], Any]) -> None:
    names, path = attacks("files").names, Path("/x/run/package/code/a.py")
    for line in (
        "removing /x/run/package/code: it isn't complete",
        "/x/run/package has other content (code/a.py)",
        f"{path} changed",
    ):
        assert names(line, path), line
    for line in ("a.py was altered", "/x/run/package has other content (b.py)", "/x/run/best/a.py changed", "/x/run/package"):
        assert not names(line, path), line


def test_a_star_of_a_pattern_stands_for_a_part_of_one_name(attacks: Callable[[str], Any]) -> None:
    fits = attacks("files").fits
    assert fits("distill/shard-00000.stats.json", "*/*.stats.json")
    assert not fits("distill/stats.json", "*/*.stats.json")
    assert not fits("eval/answers/mt_bench/stats.json", "*/stats.json")


@pytest.mark.parametrize(
    ("end", "verdict"),
    [("notices", "error"), ("warns", "warned"), ("rewrites", "right"), ("ignores", "silent"), ("uses", "silent")],
)
def test_a_file_that_a_command_leaves_unread_is_judged_by_the_later_command(
    attacks: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, verdict: str
) -> None:
    """A finished training reads no checkpoint: damage must be noticed when the training is finished again."""
    cases, files, processes = attacks("cases"), attacks("files"), attacks("processes")
    (tmp_path / "lab" / "run" / "best").mkdir(parents=True)
    (tmp_path / "lab" / "run" / "best" / "best.json").write_text("good")

    def run(copy: Path, lab: Path, stages: str) -> None:
        path = copy / "best" / "best.json"
        damaged = stages == "stages=later" and path.read_text() != "good"
        if damaged and end == "notices":
            raise ValueError(f"{path} was altered")
        if damaged and end == "warns":
            os.write(2, f"12:00:00 WARNING outrider: {path} was altered\n".encode())
        if damaged and end == "rewrites":
            path.write_text("good")
        (copy / "result").write_text("other" if damaged and end == "uses" else "right")

    monkeypatch.setattr(files, "run", run)
    monkeypatch.setattr(
        files,
        "READERS",
        {
            "now": files.Reader(files=(), removed=(), stages="now", later="later"),
            "later": files.Reader(files=(), removed=("result",), stages="later"),
        },
    )
    for name in ("now", "later"):
        files.clean_digests(tmp_path, tmp_path / "lab", name)
    attack = partial(files.damaged, tmp_path, tmp_path / "lab", "now", "best/best.json", b"bad")
    case = cases.Case(kind="toy", name="x", attack=attack)
    (outcome,) = processes.run_cases([case], tmp_path / "work", limit_seconds=9, num_processes=1)
    assert outcome.verdict == verdict, outcome.note


def test_the_table_has_counts_reasons_and_what_broke(attacks: Callable[[str], Any]) -> None:
    cases, report, outcome = attacks("cases"), attacks("report"), attacks("processes").Outcome
    assert not set(cases.HELD) & set(cases.BROKE)
    outcomes = [
        outcome(kind="hub", name="a", verdict=cases.ERROR, note="", seconds=1.0),
        outcome(kind="hub", name="b", verdict=cases.ACCEPTED, note="the reason", seconds=1.0),
        outcome(kind="hub", name="c", verdict=cases.HANG, note="a | b", seconds=9.0),
    ]
    record = report.summarise(outcomes)
    (row,) = record["rows"]
    assert (row["tried"], row["held"], row["accepted"], row["broke"]) == (3, 1, 1, 1)
    table = report.table(record)
    assert "| hub | 3 | 1 | 1 | 1 |" in table
    assert "| hub: b | the reason |" in table
    assert "| hub: c | hang | a \\| b |" in table


@pytest.mark.slow
@pytest.mark.long
def test_a_few_cases_of_each_kind_run_and_a_second_command_repeats_none(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "attack.py"), "--output", str(tmp_path), "--limit-seconds", "60", "--most", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode in (0, 1), result.stderr
    record = json.loads((tmp_path / "attacks.json").read_text())
    assert len(record["rows"]) == 7
    assert all(row["tried"] == 1 for row in record["rows"])
    outcomes = (tmp_path / "outcomes.jsonl").read_text()
    repeated = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert repeated.returncode == result.returncode
    assert (tmp_path / "outcomes.jsonl").read_text() == outcomes
