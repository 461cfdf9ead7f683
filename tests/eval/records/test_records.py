"""Records survive a kill, and nothing that was altered passes for a measurement."""

import errno
import json
from pathlib import Path

import pytest

from outrider.eval.records.records import EvalRecord, RecordFile, read_records
from outrider.models.decoding.types import PhaseSeconds

from ..conftest import MakeRecord


def write(path: Path, records: list[EvalRecord]) -> None:
    with RecordFile(path) as file:
        for record in records:
            file.append(record)


def test_what_is_written_is_read_back_equal(tmp_path: Path, make_record: MakeRecord) -> None:
    phases = PhaseSeconds(draft=0.1, verify=0.2, accept=0.3)
    records = [make_record(category="Schreiben ü\n"), make_record(phase_seconds=phases), make_record(turn=1, context_from="x")]
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
    path.write_bytes(lines[0] + lines[1][:kept])  # -1 loses just the newline
    with RecordFile(path) as file:
        assert list(file.records.values()) == [first]
        file.append(second)
    with RecordFile(path) as file:
        assert list(file.records.values()) == [first, second]


def test_a_full_disk_names_the_file_and_keeps_the_records_before(
    tmp_path: Path, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    content = {**json.loads(record.to_json()), **changes}
    del content["sha256"]
    return json.dumps(content)


def test_a_changed_figure_is_seen_though_it_could_be_true(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "records.jsonl"
    good = make_record()
    line = good.to_json()
    path.write_text(line + "\n")
    assert list(read_records(path).values()) == [good]
    assert '"decode_seconds": 0.75' in line
    path.write_text(line.replace('"decode_seconds": 0.75', '"decode_seconds": 0.5') + "\n")
    for read in (RecordFile, read_records):
        with pytest.raises(ValueError, match="line 1: .* was altered since it was measured.* delete the line"):
            read(path)


def test_an_altered_line_is_named_and_refused(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "records.jsonl"
    good = make_record()
    missing = json.loads(good.to_json())
    del missing["seed"]
    bad_lines = {
        "not JSON": '{"suite": ',
        "notes: there is no such key": altered(good, notes="x"),
        "seed: is missing": json.dumps(missing),
        "decode_seconds is '1'": altered(good, decode_seconds="1"),
        r"token_ids\[0\] is 1.5": altered(good, token_ids=[1.5, 2, 3]),
        "the prefill emits one": altered(good, num_verify_tokens=3),
        "each emits at least one": altered(good, accepted_histogram=[3]),
        "is negative": altered(good, token_ids=[-1, 2, 3]),
        "temperature is -1.0": altered(good, temperature=-1.0),
        "took 0.0 s .* seconds are positive": altered(good, prefill_seconds=0.0),
        "took inf s": altered(good, prefill_seconds=float("inf")),
        "and nan s": altered(good, decode_seconds=float("nan")),
        "exactly when profiled": altered(good, profiled=True),
        "for each of the 2 verify steps": altered(good, tree_tokens={"separate": [6, 6], "shared": [4]}),
        "entry for each": altered(good, tree_tokens={"separate": [6, 6], "shared": [4, 4], "read": [4]}),
        "fewer draft tokens than its tree has": altered(
            good, tree_tokens={"separate": [6, 6], "shared": [4, 4], "read": [4, 3]}
        ),
        "read 9 draft tokens, and num_draft_tokens is 0": altered(
            good, tree_tokens={"separate": [6, 6], "shared": [4, 4], "read": [5, 4]}
        ),
        "the same generation": good.to_json(),
    }
    for message, line in bad_lines.items():
        path.write_text(good.to_json() + "\n" + line + "\n")
        with pytest.raises(ValueError, match=f"(?s)records.jsonl, line 2: .*({message}|Expecting value)"):
            RecordFile(path)
    assert len(bad_lines) == 18


def test_answers_of_a_batch_that_took_different_times_are_refused(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "records.jsonl"
    pair = [make_record(prompt_id=name, batch_size=2, num_rows=2) for name in ("81", "82")]
    for name, value in (("decode_seconds", 0.5), ("prefill_seconds", 0.5), ("num_rows", 1)):
        path.write_text(pair[0].to_json() + "\n" + altered(pair[1], **{name: value}) + "\n")
        for read in (RecordFile, read_records):
            with pytest.raises(
                ValueError, match=rf"records.jsonl: .*'81'.* has {name} .*, and prompt '82' .* {value}; .* Delete"
            ):
                read(path)


def test_number_of_steps_is_the_histogram_and_seconds_include_the_prefill(make_record: MakeRecord) -> None:
    record = make_record(accepted_histogram=[1, 0, 2])
    assert record.num_steps == 3
    assert record.num_verify_tokens == 7
    assert record.seconds == 1.0
