"""Attacks on every file of a run: damage it, then run the next stage that reads it.

What the damaged run leaves is compared with what the undamaged one leaves, in all files whose
content is the same in two undamaged runs.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from .cases import RECOMPUTED, RIGHT, SILENT, WARNED, YOURS, Case, Finding
from .lab import NUM_STEPS, in_child, run

KIND = "files"
JSON_CHANGES = 1
"""Values of a JSON file that each change is tried on."""
CHECKPOINT, LAST_CHECKPOINT = (f"train/checkpoints/step-{step:08d}" for step in (NUM_STEPS - 1, NUM_STEPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A command that reads some files of a run, once what it makes is removed."""

    files: tuple[str, ...]
    """Patterns of the files that it reads."""
    removed: tuple[str, ...]
    stages: str


AFTER_TRAINING = ("eval", "package", "report.html")
READERS = {
    "distil": Reader(files=("answers/*",), removed=("distill", "train", "drafter", *AFTER_TRAINING), stages="[distill]"),
    "train": Reader(files=("distill/*",), removed=("train", "drafter", *AFTER_TRAINING), stages="[distill,train]"),
    "resume": Reader(
        files=("train/metrics.jsonl", "train/best/*", f"{CHECKPOINT}/*"),
        removed=("train/summary.json", LAST_CHECKPOINT, "drafter", *AFTER_TRAINING),
        stages="[train]",
    ),
    "repeat": Reader(
        files=("train/summary.json", "train/metrics.jsonl", "train/best/*", f"{LAST_CHECKPOINT}/*", "drafter/*", "config.yaml"),
        removed=("package", "report.html"),
        stages="[distill,train,eval,export]",
    ),
    "evaluate": Reader(
        files=("train/summary.json", "drafter/*", "config.yaml"), removed=AFTER_TRAINING, stages="[eval,export]"
    ),
    "report": Reader(files=("eval/*", "eval/answers/*/*"), removed=("package", "report.html"), stages="[eval,export]"),
    "export": Reader(
        files=("package/*", "package/custom_generate/generate.py", "package/custom_generate/requirements.txt", "report.html"),
        removed=(),
        stages="[eval,export]",
    ),
}
COUNTS = "times and counts for readers, from which nothing is computed"
THE_USERS: dict[str, str] = {
    "config.yaml": "each stage's command writes its own sections anew",
    "*/stats.json": COUNTS,
    "*.stats.json": COUNTS,
    "*/data.json": COUNTS,
    "train/metrics.jsonl": "the curve for readers; the last record of the loss is compared with the checkpoint's",
    "train/summary.json": "what later runs read of it is compared with today's run and files",
    "drafter/config.json": "drafting options and the target's name change the speed, never the text",
    "*/calibration.json": "it changes the speed, never the text",
    "eval/records.jsonl": "its times are what was measured; a warning names a changed file",
    "eval/*": "made for readers from the records; the evaluation's command writes it anew",
    "report.html": "made for readers from the records",
    "package/README.md": "the card is there to be edited",
    "package/generation_config.json": "options of generating are there to be edited",
}
"""Files that docs/reference/file-formats.md leaves to the user to edit, by patterns of their paths, and
why; the first that fits counts."""


def make_cases(folder: Path, lab: Path) -> list[Case]:
    """Return a case for each file, reader and damage."""
    finished = lab / "run"
    for name in READERS:
        clean_digests(folder, lab, name)
    cases = []
    for name, reader in READERS.items():
        paths = sorted({path for pattern in reader.files for path in finished.glob(pattern) if path.is_file()})
        for path in paths:
            file = path.relative_to(finished).as_posix()
            for damage, content in damages(path).items():
                attack = partial(damaged, folder, lab, name, file, content)
                cases.append(Case(kind=KIND, name=f"{name}: {file}: {damage}", attack=attack))
    return cases


def clean_digests(folder: Path, lab: Path, name: str) -> dict[str, str]:
    """Return the digests of the files that two undamaged runs of a reader leave alike."""
    path = folder / f"{name}.json"
    if not path.exists():
        runs = []
        for number in range(2):
            copy = folder / f"clean-{number}" / "run"
            prepare(lab, name, copy)
            in_child(partial(run, copy, lab, f"stages={READERS[name].stages}"), folder)
            runs.append(digests(copy))
            shutil.rmtree(copy.parent)
        first, second = runs
        path.write_text(json.dumps({file: digest for file, digest in first.items() if second.get(file) == digest}))
    return dict(json.loads(path.read_text()))


def prepare(lab: Path, name: str, copy: Path) -> None:
    """Copy the finished run, and remove what the reader makes."""
    shutil.copytree(lab / "run", copy)
    for removed in READERS[name].removed:
        path = copy / removed
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, by its path in the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def damaged(folder: Path, lab: Path, name: str, file: str, content: bytes, place: Path) -> Finding:
    """Damage a file of a copy of the run, run the reader, and compare what it leaves."""
    # 1. The attack. The copy has the name of the clean runs, which cards repeat.
    copy = place / "run"
    prepare(lab, name, copy)
    path = copy / file
    original = path.read_bytes()
    path.write_bytes(content)
    run(copy, lab, f"stages={READERS[name].stages}")
    # 2. All files that don't change by themselves.
    left = digests(copy)
    changed = sorted(
        other for other, digest in clean_digests(folder, lab, name).items() if other != file and left.get(other) != digest
    )
    reason = next((reason for pattern, reason in THE_USERS.items() if fnmatch(file, pattern)), "")
    after = path.read_bytes() if path.exists() else None
    if changed and not reason:
        return Finding(SILENT, f"changes {', '.join(changed)}")
    # 3. The file itself.
    if after != content:
        return Finding(RIGHT if after == original else RECOMPUTED)
    if reason:
        return Finding(YOURS, reason)
    warnings = [line for line in (place.parent / "log").read_text(errors="replace").splitlines() if " WARNING " in line]
    if any(path.name in line for line in warnings):
        return Finding(WARNED)
    return Finding(SILENT, "stays damaged in the folder, and changes no other file")


def damages(path: Path) -> dict[str, bytes]:
    """Return the damaged contents of a file, by the name of the damage."""
    content = path.read_bytes()
    chosen = random.Random(path.name)
    middle = len(content) // 2
    damaged_contents = {"removed content": b"", "cut in the middle": content[:middle]}
    for place, index in (("middle", middle), ("last byte", len(content) - 2)):
        if 0 <= index < len(content):
            flipped = bytes([content[index] ^ 1 << chosen.randrange(7)])
            damaged_contents[f"a flipped bit, {place}"] = content[:index] + flipped + content[index + 1 :]
    if path.suffix == ".json":
        values = json_damages(json.loads(content), chosen)
        damaged_contents |= {name: json.dumps(value, indent=2).encode() for name, value in values}
    if path.suffix == ".jsonl":
        first, rest = content.split(b"\n", 1)
        values = json_damages(json.loads(first), chosen)
        damaged_contents |= {f"first line, {name}": json.dumps(value).encode() + b"\n" + rest for name, value in values}
        damaged_contents["no first line"] = rest
        damaged_contents["first line twice"] = first + b"\n" + content
    if path.suffix in {".md", ".html", ".tex", ".csv", ".yaml", ".txt", ".py"}:
        damaged_contents["a line more"] = content + b"\nmore\n"
    return {name: changed for name, changed in damaged_contents.items() if changed != content}


def json_damages(value: Any, chosen: random.Random) -> Iterator[tuple[str, Any]]:
    """Yield copies of a JSON value with a changed value, a dropped or an additional key, another type."""
    places = list(places_of(value))
    leaves = [place for place in places if not isinstance(at(value, place), dict | list)]
    keys = [place for place in places if isinstance(place[-1], str)]
    for kind, choices, change in (
        ("changed", leaves, other_value),
        ("another type", places, other_type),
        ("null", leaves, lambda _: None),
    ):
        for place in some_of(choices, chosen):
            yield f"{dotted(place)} {kind}", replaced(value, place, change)
    for place in some_of(keys, chosen):
        yield f"{dotted(place)} dropped", replaced(value, place, None)
    if isinstance(value, dict):
        yield "an unknown key", {**value, "unknown": 1}
    yield "a list around it", [value]


def some_of(places: list[tuple[Any, ...]], chosen: random.Random) -> list[tuple[Any, ...]]:
    """Return some places: one at the top, the others anywhere."""
    if len(places) <= JSON_CHANGES:
        return places
    top = [place for place in places if len(place) == min(map(len, places))]
    first = chosen.choice(top)
    return [first, *chosen.sample([place for place in places if place != first], JSON_CHANGES - 1)]


def places_of(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*place, key)
        yield from places_of(inner, (*place, key))


def at(value: Any, place: tuple[Any, ...]) -> Any:
    """Return the value at a path."""
    for key in place:
        value = value[key]
    return value


def replaced(value: Any, place: tuple[Any, ...], change: Callable[[Any], Any] | None) -> Any:
    """Return a copy with a changed value at a path; None drops it."""
    copy = json.loads(json.dumps(value))
    *outer, last = place
    holder = at(copy, tuple(outer))
    if change is None:
        del holder[last]
    else:
        holder[last] = change(holder[last])
    return copy


def other_value(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value[:-1] + ("0" if value[-1:] != "0" else "1")


def other_type(value: Any) -> Any:
    """Return a value of another type."""
    return "text" if isinstance(value, dict | list | int | float) or value is None else 7


def dotted(place: tuple[Any, ...]) -> str:
    """Return a path in words."""
    return ".".join(map(str, place))
