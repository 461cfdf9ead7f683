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

from .cases import ACCEPTED, RECOMPUTED, RIGHT, SILENT, WARNED, YOURS, Case, Finding
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
    later: str = ""
    """Name of the reader that is run too, on the same damaged folder, where this one left a file
    unread: the damage must be noticed then."""


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
        later="finish",
    ),
    # A finished training reads checkpoint and best drafter only where it writes the drafter again.
    "finish": Reader(files=(), removed=("train/summary.json", "drafter", *AFTER_TRAINING), stages="[train]"),
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
    "*/*.stats.json": COUNTS,
    "*/data.json": COUNTS,
    "train/metrics.jsonl": "the curve for readers; the last record of the loss is compared with the checkpoint's",
    "train/summary.json": "what later runs read of it is compared with today's run and files",
    "drafter/config.json": "drafting options and the target's name change the speed, never the text",
    "package/README.md": "the card is there to be edited",
    "package/generation_config.json": "options of generating are there to be edited",
}
"""Files that docs/reference/file-formats.md leaves to the user ("yours"), by patterns of their paths, and why."""
DIGESTS = ("sha256", "entry_sha256")
"""Keys of a file's digest of its other values."""
WITHOUT_DIGEST = Finding(ACCEPTED, "a file that lacks its digest is taken for one of an earlier version; all else is right")
UNREAD = Finding(SILENT, "stays damaged in the folder, and changes no other file")


def make_cases(folder: Path, lab: Path) -> list[Case]:
    """Return a case for each file, reader and damage."""
    finished = lab / "run"
    unused = [
        pattern
        for pattern in THE_USERS
        if not any(fits(path.relative_to(finished).as_posix(), pattern) for path in finished.rglob("*"))
    ]
    assert not unused, f"no file of the run fits {unused} of THE_USERS: remove them"
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


def the_users(file: str) -> str:
    """Return why a file is the user's to edit, or nothing if it isn't."""
    return next((reason for pattern, reason in THE_USERS.items() if fits(file, pattern)), "")


def fits(file: str, pattern: str) -> bool:
    """Return whether a path fits a pattern, in which a `*` stands for a part of one name."""
    names, patterns = file.split("/"), pattern.split("/")
    return len(names) == len(patterns) and all(map(fnmatch, names, patterns))


def clean_digests(folder: Path, lab: Path, name: str) -> dict[str, str]:
    """Return the digests of the results that two undamaged runs of a reader leave alike."""
    path = folder / f"{name}.json"
    if not path.exists():
        runs = []
        for number in range(2):
            copy = folder / f"clean-{number}" / "run"
            shutil.copytree(lab / "run", copy)
            in_child(partial(read, name, copy, lab), folder)
            runs.append(digests(copy))
            shutil.rmtree(copy.parent)
        first, second = runs
        path.write_text(json.dumps({file: digest for file, digest in first.items() if second.get(file) == digest}))
    return dict(json.loads(path.read_text()))


def read(name: str, copy: Path, lab: Path) -> None:
    """Remove what a reader makes from a finished run, and run the reader."""
    for removed in READERS[name].removed:
        path = copy / removed
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    run(copy, lab, f"stages={READERS[name].stages}")


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that holds results, by its path in the folder."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {file: hashlib.sha256(path.read_bytes()).hexdigest() for file, path in files.items() if the_users(file) != COUNTS}


def damaged(folder: Path, lab: Path, name: str, file: str, content: bytes, place: Path) -> Finding:
    """Damage a file of a copy of the run, run the reader, and compare what it leaves."""
    # 1. The attack. The copy has the name of the clean runs, which cards repeat.
    copy, log = place / "run", place.parent / "log"
    shutil.copytree(lab / "run", copy)
    original = (copy / file).read_bytes()
    (copy / file).write_bytes(content)
    read(name, copy, lab)
    finding = judge(copy, file, original, content, clean_digests(folder, lab, name), log)
    # 2. A file that this reader doesn't read must be noticed by the one that does.
    if finding == UNREAD and lacks_only_its_digest(original, content):
        return WITHOUT_DIGEST
    later = READERS[name].later
    if finding == UNREAD and later:
        read(later, copy, lab)
        finding = judge(copy, file, original, content, clean_digests(folder, lab, later), log)
    return finding


def judge(copy: Path, file: str, original: bytes, content: bytes, clean: dict[str, str], log: Path) -> Finding:
    """Compare what a reader left in a damaged copy, and what it printed, with what an undamaged run leaves."""
    # 1. A file that isn't the user's must change no result, unless a warning names it.
    path, reason = copy / file, the_users(file)
    warnings = [line for line in log.read_text(errors="replace").splitlines() if " WARNING " in line]
    is_warned = any(names(line, path) for line in warnings)
    left = digests(copy)
    changed = sorted(other for other, digest in clean.items() if other != file and left.get(other) != digest)
    if changed and not reason and not is_warned:
        return Finding(SILENT, f"changes {', '.join(changed)}")
    # 2. The file itself.
    after = path.read_bytes() if path.exists() else None
    if after != content:
        return Finding(RIGHT if after == original else RECOMPUTED)
    if is_warned:
        return Finding(WARNED)
    return Finding(YOURS, reason) if reason else UNREAD


def names(line: str, path: Path) -> bool:
    """Return whether a line of the log names a file: by its path, its folder, or a folder and its path in there."""
    return str(path) in line or any(
        f"{folder}: " in line or (f"{folder} " in line and path.relative_to(folder).as_posix() in line)
        for folder in (path.parent, path.parent.parent)
    )


def lacks_only_its_digest(original: bytes, content: bytes) -> bool:
    """Return whether a JSON object was changed by dropping the digest of itself, and nothing else."""
    try:
        before, after = json.loads(original), json.loads(content)
    except ValueError:
        return False
    return isinstance(before, dict) and any(
        after == {name: value for name, value in before.items() if name != key} for key in DIGESTS if key in before
    )


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
