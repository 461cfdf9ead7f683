"""Text and source code as conversations; Python's standard library as text that every machine has.

A text is cut into pieces: the start of a piece is the question, its rest the answer. The demo trains,
distils and evaluates on the standard library. Each of its files has one purpose only: the split is a
function of the module's name, so it is the same for every Python version and machine.
"""

import hashlib
import io
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from .config import Split
from .conversations import Conversation, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Sizes of the pieces in characters, rounded up to whole lines.

    The same seed and text id give the same cuts.
    """

    seed: int
    prompt_chars: tuple[int, int] = (200, 900)
    """Range that a prompt's length is sampled from."""
    answer_chars: int = 1500


def cut_text(text: str, cuts: Cuts, *, id: str, task: str) -> Iterator[Conversation]:
    """Cut a text at line ends into conversations of one question and one answer.

    A conversation's id is `id` and the number of its first line, counted from 1. A last piece too
    short for an answer is left out.
    """
    rng = Random(f"{cuts.seed}:{id}")
    # str.splitlines would also split at form feeds and other separators inside a line.
    lines = list(io.StringIO(text, newline="\n"))
    position = 0
    while position < len(lines):
        start = position
        prompt, position = _take_lines(lines, position, rng.randint(*cuts.prompt_chars))
        answer, position = _take_lines(lines, position, cuts.answer_chars)
        if prompt.strip() and answer.strip():
            turns = (Turn(role="user", content=f"{task}\n\n{prompt}"), Turn(role="assistant", content=answer))
            yield Conversation(id=f"{id}:{start + 1}", turns=turns)


def _take_lines(lines: list[str], position: int, num_chars: int) -> tuple[str, int]:
    start, num_taken = position, 0
    while position < len(lines) and num_taken < num_chars:
        num_taken += len(lines[position])
        position += 1
    return "".join(lines[start:position]), position


# Tables of data, not code, and files that are broken on purpose.
EXCLUDED_UNITS = frozenset({"encodings", "pydoc_data", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
# Generated when Python is built, and so different on every machine.
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
# Many distributions ship these separately or not at all, so no later stage may depend on them.
OPTIONAL_UNITS = frozenset({"test", "idlelib", "tkinter", "turtledemo", "turtle", "distutils", "ensurepip", "antigravity"})
# Share of each split in the hash space; the rest trains the target.
HELDOUT_SHARE, DISTILL_SHARE, EVAL_SHARE = 0.05, 0.22, 0.10
MAX_FILE_BYTES = 400_000

TASK = "Continue this code."
MANUAL_TASK = "Name the three most important points of this part of a manual, and explain the last one."
MANUAL_CHARS = {"256 tokens": 1_000, "1k tokens": 4_000, "4k tokens": 16_000}
"""Characters of the manual's parts, by about their number of tokens."""
MANUAL_PARTS = 10
"""Number of parts of each size."""


def split_of(unit: str) -> Split:
    """Return the split that a top-level module or package of the standard library belongs to."""
    if unit in OPTIONAL_UNITS:
        return "target_train"
    point = int.from_bytes(hashlib.sha256(unit.encode()).digest()[:8], "big") / 2**64
    if point < HELDOUT_SHARE:
        return "target_heldout"
    if point < HELDOUT_SHARE + DISTILL_SHARE:
        return "distill"
    if point < HELDOUT_SHARE + DISTILL_SHARE + EVAL_SHARE:
        return "eval"
    return "target_train"


def stdlib_root() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files(split: Split, root: Path | None = None) -> list[Path]:
    """Return the sorted source files of one split, below `root` (default: `stdlib_root`)."""
    root = root or stdlib_root()
    files = []
    for entry in sorted(root.iterdir()):
        unit = entry.name.removesuffix(".py")
        if unit in EXCLUDED_UNITS or unit.startswith(EXCLUDED_PREFIXES) or split_of(unit) != split:
            continue
        for path in sorted(entry.rglob("*.py")) if entry.is_dir() else [entry]:
            folders = path.relative_to(root).parts[:-1]
            excluded = path.suffix != ".py" or "data" in folders or not EXCLUDED_UNITS.isdisjoint(folders)
            if not excluded and 0 < path.stat().st_size <= MAX_FILE_BYTES:
                files.append(path)
    if not files:
        raise ValueError(f"no source file of split {split!r} below {root}; is this Python's standard library complete?")
    return files


def read_source(path: Path) -> str | None:
    """Return the file's text, or None if it isn't UTF-8 (some tests of the library aren't)."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def manual_parts() -> Iterator[tuple[str, str, str]]:
    """Yield an id, the size and the text of parts of Python's manual: prompts with a long context.

    The manual is that of the running Python's `help`. Parts begin at its tenths.
    """
    from pydoc_data.topics import topics

    lines = "\n".join(topics[name] for name in sorted(topics)).splitlines(keepends=True)
    for size, num_chars in MANUAL_CHARS.items():
        for number in range(MANUAL_PARTS):
            start = len(lines) * number // MANUAL_PARTS
            yield f"{size}:{start + 1}", size, _take_lines(lines, start, num_chars)[0]


def code_conversations(split: Split, cuts: Cuts, root: Path | None = None) -> Iterator[Conversation]:
    """Yield every file of a split, in sorted order, cut into conversations by `cut_text`."""
    root = root or stdlib_root()
    for path in stdlib_files(split, root):
        text = read_source(path)
        if text is not None:
            id = f"stdlib/{path.relative_to(root).as_posix()}"
            yield from cut_text(text, cuts, id=id, task=TASK)
