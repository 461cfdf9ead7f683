"""The file of records: it survives a kill, and an error names an invalid line."""

import errno
import json
from pathlib import Path

import pytest

from outrider.eval.records.records import EvalRecord, RecordFile
from outrider.models.phases import PhaseSeconds, RunCounts

from ..conftest import MakeRecord

RUNS = RunCounts(num_runs=2, num_entries=2)


def write(path: Path, records: list[EvalRecord]) -> None:
    with RecordFile(path) as file:
        for record in records:
            file.append(record)


def test_written_records_are_read_back_unchanged(tmp_path: Path, make_record: MakeRecord) -> None:
    phases = PhaseSeconds(draft=0.1, verify=0.2, accept=0.3)
    records = [
        make_record(category="Schreiben ü\n"),
        make_record(phase_seconds=phases),
        make_record(turn=1, context_from="x", runs=RUNS),
    ]
    write(tmp_path / "records.jsonl", records)
    with RecordFile(tmp_path / "records.jsonl") as file:
        assert list(file.records.values()) == records
        assert list(file.records) == [record.key for record in records]


@pytest.mark.parametrize("kept", [1, 100, -1])
def test_a_line_torn_by_a_kill_is_dropped_and_can_be_written_again(tmp_path: Path, make_record: MakeRecord, kept: int) -> None:
    path = tmp_path / "records.jsonl"
    first, second = make_record(), make_record(turn=1)
    write(path, [first, second])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:kept])  # -1 removes only the newline
    with RecordFile(path) as file:
        assert list(file.records.values()) == [first]
        file.append(second)
    with RecordFile(path) as file:
        assert list(file.records.values()) == [first, second]


def test_a_full_disk_names_the_file_and_keeps_the_records_before(tmp_path, make_record, monkeypatch):
    path = tmp_path / "records.jsonl"
    first, second = make_record(), make_record(turn=1)
    with RecordFile(path) as file:
        file.append(first)
        with monkeypatch.context() as full:
            full.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
            with pytest.raises(OSError, match=r"the disk is full .* while writing .*records\.jsonl\. The records before"):
                file.append(second)
        assert list(file.records.values()) == [first]


def altered(record: EvalRecord, **changes: object) -> str:
    return json.dumps({**json.loads(record.to_json()), **changes})


def test_a_line_that_cannot_be_a_record_is_named(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "records.jsonl"
    good = make_record()
    missing = json.loads(good.to_json())
    del missing["seed"]
    bad_lines = {
        "not a JSON file": '{"suite": ',
        "notes": altered(good, notes="x"),
        "seed": json.dumps(missing),
        "decode_seconds": altered(good, decode_seconds="1"),
        "token_ids": altered(good, token_ids=[1.5, 2, 3]),
        "the prefill's are those of verify steps": altered(good, num_verify_tokens=3),
        "emits a token or more": altered(good, accepted_histogram=[3]),
        "from 1 to 1 rows": altered(good, num_rows=2),
        "exactly when profiled": altered(good, profiled=True),
        "times are positive": altered(good, prefill_seconds=0.0),
        "accepted_by has all accepted draft tokens": altered(good, accepted_by={"suffix": 1}),
    }
    for message, line in bad_lines.items():
        path.write_text(good.to_json() + "\n" + line + "\n")
        with pytest.raises(ValueError, match=f"(?s)records.jsonl, line 2: .*{message}"):
            RecordFile(path)
    assert len(bad_lines) == 11


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(altered(make_record(), tree_tokens={"separate": [6, 6], "shared": [4, 4]}, drawn=True) + "\n")
    with RecordFile(path) as file:
        assert len(file.records) == 1
