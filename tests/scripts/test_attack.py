"""The attacks: what the driver judges, what it keeps, and a few cases of each kind."""

import importlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
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
