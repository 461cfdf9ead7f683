"""What all tables are made with: records, cells and facts about a measurement."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.eval.records.method_names import PLAIN_DECODING, MethodFacts, setting_words, title_of
from outrider.eval.records.names import BASELINE

ROOT = Path(__file__).parents[2]
TAG = "before-halving"
"""Tag of the code of records whose scripts are gone."""


class Records:
    """The records of a folder, read as JSON."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> Any:
        """Return a record's content."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def has(self, name: str) -> bool:
        """Return whether a record was measured."""
        return (self.folder / name).is_file()

    def bound(self, function: Callable[..., str]) -> Callable[..., str]:
        """Return a function that makes a table from these records, for the page's template."""
        return functools.partial(function, self)

    def facts(self, *names: str, command: str, environment: str | None = None) -> str:
        """Return a list of the records, the command that made them and the machine.

        `environment` is the record that describes the machine; unless given, it is the first of `names`.
        """
        links = ", ".join(f"[{name}]({name})" for name in names)
        script = re.search(r"scripts/\S+", command)
        tag = "" if script is None or (ROOT / script.group()).exists() else f", at the git tag `{TAG}`"
        lines = [f"- Records: {links}", f"- Command: `{command}`{tag}", f"- Machine: {self.machine(environment or names[0])}"]
        return "\n".join(lines)

    def machine(self, name: str) -> str:
        """Return where a record was measured, in words."""
        record = self.read(name)
        environment = record.get("environment") if isinstance(record, dict) else None
        if environment is None and isinstance(record, dict) and "runs" in record:
            environment = record["runs"][0]["environment"]
        if environment is None:
            return "not recorded"
        packages = environment["packages"]
        return (
            f"{environment['cpu']}, {count(environment['num_cpus'], 'core')}, {device_name(environment['device'])}, "
            f"{count(environment['num_threads'], 'thread')}, Python {environment['python']}, torch {packages['torch']}, "
            f"transformers {packages['transformers']}, commit {environment['git_hash']}"
        )


def device_name(device: str) -> str:
    """Return the accelerator of a machine, in words."""
    return "no GPU" if device == "cpu" else device


def count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, text_columns: int = 1) -> str:
    """Return a Markdown table.

    All columns but the first `text_columns` are numbers, set to the right.
    """
    rule = ["---" if index < text_columns else "---:" for index in range(len(columns))]
    lines = [list(columns), rule, *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """Return a number with so many decimals; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}{suffix}"


def with_interval(value: float | None, interval: Sequence[float] | None, suffix: str = "") -> str:
    """Return a number with its interval."""
    if interval is None or min(interval) == max(interval):
        return number(value, 2, suffix)
    return f"{number(value, 2, suffix)} [{interval[0]:.2f}, {interval[1]:.2f}]"


KINDS = {
    "redrafter": "ReDrafter",
    "medusa": "Medusa",
    "medusa_paper": "Medusa, the paper's heads",
    "blockwise": "blockwise parallel decoding",
    "eagle": "EAGLE-2",
    "eagle3": "EAGLE-3",
    "draft_model": "draft model",
    "distilled": "ReDrafter, distilled labels",
    "text": "ReDrafter, the text as labels",
}


def method_name(method: str) -> str:
    """Return a method by kind and setting: "ReDrafter, 4 beams of 3, 5 nodes"."""
    if method == BASELINE:
        return PLAIN_DECODING
    facts = MethodFacts(key=method)
    setting = dict(facts.setting or {})
    is_static = setting.pop("tree", None) == "static"
    name = "EAGLE-1" if is_static else KINDS.get(facts.folder or facts.kind) or title_of(facts.kind)
    return ", ".join(filter(None, [name, setting_words(facts.kind, setting, setting)]))


def kind_name(name: str) -> str:
    """Return the kind of a drafter of the comparison by its folder."""
    return re.sub(r"^EAGLE-2$", "EAGLE-1 and -2", KINDS[name])
