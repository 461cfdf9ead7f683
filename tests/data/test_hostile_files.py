"""Data files of strangers: one message that names file, line and rule, and no traceback."""

import gzip
import json
import time
from pathlib import Path

import pytest

from outrider.data import raw_records
from outrider.data.config import DataConfig
from outrider.data.sources import load_conversations
from outrider.data.suites import load_suite

GOOD = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]}
GOOD_LINE = json.dumps(GOOD).encode()
WRONG_LINES = {
    "deep object": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "line 2: JSON that can't be read .*recursion"),
    "deep array": (b"[" * 100_000, "line 2: JSON that can't be read .*recursion"),
    "long number": (b'{"id": ' + b"9" * 5000 + b"}", "line 2: JSON that can't be read .*digits"),
    "NUL bytes": (b"\0" * 100, "line 2, column 1: not JSON"),
    "second mark": (b"\xef\xbb\xbf{}", "line 2, column 1: not JSON .*BOM"),
    "UTF-16": ("{}".encode("utf-16"), "is not UTF-8 text in line 2 "),
    "Latin-1": (b'{"a": "\xe9"}', "is not UTF-8 text in line 2 "),
    "raw surrogate": (b'{"a": "\xed\xa0\x80"}', "is not UTF-8 text in line 2 "),
    "cut off": (GOOD_LINE[:30], "line 2, column 1: not JSON|line 2, column"),
}


def load(path: Path) -> tuple[int, dict[str, int]]:
    conversations, dropped = load_conversations(DataConfig(source="sharegpt", path=str(path)))
    return len(conversations), dict(dropped)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize(("line", "message"), WRONG_LINES.values(), ids=WRONG_LINES)
def test_a_line_that_cant_be_read_is_named(tmp_path, line, message, suffix):
    path, content = tmp_path / f"a{suffix}", GOOD_LINE + b"\n" + line + b"\n"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    for read in (lambda: load(path), lambda: load_suite("a", path=str(path))):
        with pytest.raises(ValueError, match=rf"a{suffix}.*{message}"):
            read()


def test_an_array_that_cant_be_read_is_named(tmp_path):
    (tmp_path / "a.json").write_bytes(b"[" + GOOD_LINE + b",\n" + b"[" * 100_000)
    with pytest.raises(ValueError, match=r"a.json, line 1: JSON that can't be read"):
        load(tmp_path / "a.json")


def test_a_line_without_an_end_is_an_error_before_it_is_read(tmp_path, monkeypatch):
    """As in a small archive that would expand to gigabytes."""
    monkeypatch.setattr(raw_records, "MAX_LINE_CHARS", 1000)
    (tmp_path / "a.jsonl").write_bytes(GOOD_LINE + b"\n" + b" " * 1001)
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: it has more than 1000 characters"):
        load(tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_bytes(b"[" + b",".join([GOOD_LINE] * 100) + b"]")
    assert load(tmp_path / "b.json") == (100, {})


def test_a_line_of_ten_megabytes_is_read_in_seconds(tmp_path):
    large = {"conversations": [{"from": "human", "value": "x " * 5_000_000}, GOOD["conversations"][1]]}
    (tmp_path / "a.jsonl").write_text(json.dumps(large))
    start = time.monotonic()
    assert load(tmp_path / "a.jsonl") == (1, {})
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "record",
    [{"prompt": "\ud800"}, {"prompt": "a", "id": "\udfff"}, {"prompt": "a", "category": "\ud800"}, {"turns": ["a", "b\ud800"]}],
    ids=str,
)
def test_half_a_surrogate_pair_in_a_prompt_is_named(tmp_path, record):
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'prompt': 'Hi'})}\n\n{json.dumps(record)}\n")
    with pytest.raises(ValueError, match=r"a.jsonl, line 3: half a surrogate pair isn't valid Unicode; correct the text"):
        load_suite("a", path=str(tmp_path / "a.jsonl"))
