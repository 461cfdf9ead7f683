"""Names of a run's files, and the names of methods as users read them.

Tables, plots and reports show `ReDrafter, 4 beams of 3, 5 nodes` in place of the name of the records,
`redrafter beam_width=4 beam_length=3 tree_nodes=5`. A method gets its label when it is made. This
module imports nothing heavy, so that readers of a finished run start fast.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ...data.paths import SEPARATOR, TRAINING_FREE_NAMES

BASELINE = "baseline"
"""Method name of plain decoding."""
PIPELINED = "pipelined"
"""Word for decoding that drafts while the stages of a target read."""
OOM = "OOM"
"""Text that tables show in place of figures where memory ran out."""

RUN_FILE, RECORDS_FILE, FACTS_FILE = "run.json", "records.jsonl", "facts.json"
AUDITS_FILE = "audits.json"
"""Audits of the run so far."""
SUMMARY_FILE, TABLE_FILE = "summary.json", "table.md"


TITLES = {
    "block": "Block",
    "draft_model": "Draft model",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "mtp": "MTP head",
    "prompt_lookup": "Prompt lookup",
    "recycling": "Recycling",
    "redrafter": "ReDrafter",
    "suffix": "Suffix",
}
PLAIN_DECODING = "plain decoding"
SHAPE_OPTIONS = (
    *("beam_width", "beam_length", "candidates", "depth", "length", "top_k", "tree_nodes", "tree_paths"),
    "width",
)
"""Options of the draft tree."""


def title_of(kind: str) -> str:
    """Return the title of a kind of drafter, or of a merge: `ReDrafter + Suffix`."""
    return " + ".join(_part_title(part) for part in kind.split(SEPARATOR))


def _part_title(part: str) -> str:
    """Return the title of a merge's part; a second one of a kind has a number."""
    kind, _, number = part.rpartition("_")
    return f"{TITLES.get(kind, kind)} {number}" if number.isdecimal() else TITLES.get(part, part)


def setting_words(kind: str, options: Mapping[str, Any], setting: Mapping[str, Any] | None) -> str:
    """Describe a setting in words: `4 beams of 3, 5 nodes`.

    `options` are all options of the drafter in this setting; `setting` has those that were set for
    it.
    """
    if setting is None:
        return "turned off by tuning"
    if kind in TRAINING_FREE_NAMES:  # only the size of the tree, and what was set
        options = {name: value for name, value in options.items() if name in setting or name in ("tree_nodes", "pace")}
    words = [*_shape_words(kind, options)]
    if "tree_nodes" in setting and setting["tree_nodes"] is None:
        words.append("all nodes")
    if options.get("pace") == "expected":
        words.append("paced")
    elif "pace" in setting and SEPARATOR not in kind:
        words.append("fixed pace")  # one drafter, as a merge of one
    others = {name: value for name, value in setting.items() if name not in (*SHAPE_OPTIONS, "pace")}
    return ", ".join([*words, *(f"{name} {_text(value)}" for name, value in others.items())])


def _shape_words(kind: str, options: Mapping[str, Any]) -> Iterable[str]:
    """Describe the shape of the draft tree in the terms of the drafter's kind."""
    width, length = options.get("beam_width"), options.get("beam_length")
    if width is not None:
        yield _counted(width, "beam") + (f" of {length}" if length is not None else "")
    elif length is not None:
        yield f"beams of {length}"
    for name, word in (("depth", "depth"), ("length", "length"), ("width", "width"), ("top_k", "top-k")):
        if options.get(name) is not None:
            yield f"{word} {options[name]}"
    if isinstance(paths := options.get("tree_paths"), list | tuple):
        yield _counted(len(paths), "node")
    elif options.get("tree_nodes") is not None:
        yield _counted(options["tree_nodes"], "node")


def _text(value: Any) -> str:
    """Format a value as YAML writes it: `true`, `null`, `[1, 2]`."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
