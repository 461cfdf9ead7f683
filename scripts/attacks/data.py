"""Attacks by data files and prompt files that a stranger wrote."""

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .cases import RIGHT, WRONG, Case, Finding, outrider
from .lab import TARGET

KIND = "data"
NUM_GOOD = 4
USER, ASSISTANT = {"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "That is 3."}
GOOD = {"messages": [USER, ASSISTANT]}
GOOD_LINE = json.dumps(GOOD)
MEGABYTE = 10**6
DEEP = "[" * 200_000 + "]" * 200_000


def talk(content: Any, role: Any = "user") -> str:
    """Return a line with a conversation whose first turn has this content and role."""
    return json.dumps({"messages": [{"role": role, "content": content}, ASSISTANT]})


LINES: dict[str, str | bytes] = {
    "half a surrogate": talk("\ud800"),
    "half a surrogate in an answer": json.dumps({"messages": [USER, {**ASSISTANT, "content": "\udfff"}]}),
    "a byte of no UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "UTF-16": GOOD_LINE.encode("utf-16"),
    "a mark of byte order": b"\xef\xbb\xbf" + GOOD_LINE.encode(),
    "nested without end": '{"messages": ' + DEEP + "}",
    "nested in a content": f'{{"messages": [{{"role": "user", "content": {DEEP}}}]}}',
    "a line of 10 MB": talk("x" * 10 * MEGABYTE),
    "a line of 10 MB of spaces": talk(" " * 10 * MEGABYTE),
    "a line of 10 MB without JSON": "x" * 10 * MEGABYTE,
    "a number of 10^5 digits": '{"messages": ' + "9" * 100_000 + "}",
    "NaN": '{"messages": NaN}',
    "a null byte": talk("a\x00b"),
    "escapes of a terminal": talk("\x1b[2J\x1b]0;title\x07"),
    "a key twice": '{"messages": [], "messages": 7}',
    "100,000 turns": json.dumps({"messages": [USER, ASSISTANT] * 50_000}),
    "no turns": '{"messages": []}',
    "turns of a text": '{"messages": "hello"}',
    "turns of numbers": '{"messages": [1, 2]}',
    "turns of null": '{"messages": null}',
    "a role of a list": talk("x", ["user"]),
    "an unknown role": talk("x", "root"),
    "a role of 1 MB": talk("x", "r" * MEGABYTE),
    "a content of a number": talk(7),
    "a content of null": talk(None),
    "a content of a mapping": talk({"type": "image", "url": "file:///etc/passwd"}),
    "an empty content": talk(""),
    "special tokens in a content": talk("<|end|></s><|im_end|>"),
    "only an answer": json.dumps({"messages": [ASSISTANT]}),
    "a record of a list": "[1, 2]",
    "a record of null": "null",
    "a record of a number": "7",
    "an unfinished record": '{"messages": [{"role": "user"',
    "two records on a line": GOOD_LINE + GOOD_LINE,
    "code": '{"__class__": "os.system", "args": ["touch stolen"]}',
}
"""Lines of a data file, between good ones."""
FILES: dict[str, tuple[str, bytes]] = {
    "an empty file": ("data.jsonl", b""),
    "a file of line breaks": ("data.jsonl", b"\n" * 1000),
    "JSON nested without end": ("data.json", DEEP.encode()),
    "JSON of one number": ("data.json", b"7"),
    "JSON that is cut": ("data.json", f"[{GOOD_LINE}, ".encode()),
    "gzip that is cut": ("data.jsonl.gz", gzip.compress(GOOD_LINE.encode() * 100)[:-9]),
    "gzip that isn't": ("data.jsonl.gz", b"hello"),
    "gzip of 500 MB of zeros": ("data.jsonl.gz", b"".join(gzip.compress(bytes(50 * MEGABYTE), 1) for _ in range(10))),
    "Parquet that isn't": ("data.parquet", b"PAR1" + bytes(100) + b"PAR1"),
    "a pickle": ("data.jsonl", b"\x80\x04\x95cos\nsystem\n(S'touch stolen'\ntR."),
    "an unknown suffix": ("data.exe", b"MZ"),
}
"""Whole data files, by their names."""
PROMPTS: dict[str, str] = {
    "no turns": '{"question_id": 1, "category": "math", "turns": []}',
    "turns of a number": '{"question_id": 1, "category": "math", "turns": [7]}',
    "half a surrogate": '{"question_id": 1, "category": "math", "turns": ["\\ud800"]}',
    "nested without end": '{"question_id": 1, "category": "math", "turns": ' + DEEP + "}",
    "no JSON": "hello",
    "an id of a list": '{"question_id": [1], "category": "math", "turns": ["x"]}',
    "an id that is a path": '{"question_id": "../../../x", "category": "math", "turns": ["x"]}',
    "a line of 10 MB": json.dumps({"question_id": 1, "category": "math", "turns": ["x" * 10 * MEGABYTE]}),
    "1,000 turns": json.dumps({"question_id": 1, "category": "math", "turns": ["x"] * 1000}),
    "a category of null": '{"question_id": 1, "category": null, "turns": ["x"]}',
    "the same id twice": "\n".join(['{"question_id": 1, "category": "math", "turns": ["x"]}'] * 2),
}
"""Prompt files of an evaluation."""


def make_cases(folder: Path, lab: Path) -> list[Case]:
    """Return a case for each line, file and prompt file."""
    cases = []
    for name, line in LINES.items():
        hostile = line.encode() if isinstance(line, str) else line
        content = b"\n".join([GOOD_LINE.encode()] * 2 + [hostile] + [GOOD_LINE.encode()] * 2) + b"\n"
        cases.append(_case(f"a line: {name}", partial(distil, "data.jsonl", content, num_good=NUM_GOOD)))
    for name, (file, content) in FILES.items():
        cases.append(_case(f"a file: {name}", partial(distil, file, content, num_good=0)))
    for name, text in PROMPTS.items():
        cases.append(_case(f"prompts: {name}", partial(evaluate, text)))
    return cases


def _case(name: str, attack: Callable[[Path], Finding]) -> Case:
    return Case(kind=KIND, name=name, attack=attack)


def distil(file: str, content: bytes, place: Path, *, num_good: int) -> Finding:
    """Distil a data file: it must be an error, or every good conversation must be among the labelled ones."""
    (place / file).write_bytes(content)
    outrider(
        "run", "demo", "stages=[distill]", f"target.name_or_path={TARGET}", "num_threads=1", f"output_dir={place / 'run'}",
        f"data={{source: messages, path: {file}, split: train, overlap_words: null, limit: null, max_length: 256}}",
        "distill={horizon: 3}",
    )  # fmt: skip
    manifest = json.loads((place / "run" / "distill" / "manifest.json").read_text())
    ids = [id for shard in manifest["shards"] for id in shard["ids"]]
    if not num_good <= len(ids) <= NUM_GOOD + 1 or list(place.rglob("stolen")):
        return Finding(WRONG, f"{len(ids)} conversations are labelled")
    return Finding(RIGHT, f"{len(ids)} conversations are labelled")


def evaluate(text: str, place: Path) -> Finding:
    """Evaluate prompt lookup on a prompt file: it must be an error, or lossless answers inside the folder."""
    (place / "prompts.jsonl").write_text(text + "\n")
    outrider(
        "eval", "--target", str(TARGET), "--drafter", "prompt_lookup", "--suite", "mt_bench", "--suite-path",
        "mt_bench=prompts.jsonl", "--max-new-tokens", "4", "--output", str(place / "eval"),
    )  # fmt: skip
    rows = json.loads((place / "eval" / "summary.json").read_text())
    return Finding(RIGHT) if all(row["lossless"] in (True, None) for row in rows) else Finding(WRONG, "not lossless")
