"""Python's standard library as real text that every machine has.

The demo trains, distils and evaluates on it. Each file has one purpose only. The split is a
function of the module's name, so it is the same for every Python version and machine.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from .choices import Split
from .cuts import Cuts, cut_text
from .types import Conversation

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


def code_conversations(split: Split, cuts: Cuts, root: Path | None = None) -> Iterator[Conversation]:
    """Yield every file of a split, in sorted order, cut into conversations by `cut_text`."""
    root = root or stdlib_root()
    for path in stdlib_files(split, root):
        text = read_source(path)
        if text is not None:
            id = f"stdlib/{path.relative_to(root).as_posix()}"
            yield from cut_text(text, cuts, id=id, source=f"stdlib/{split}", task=TASK)
