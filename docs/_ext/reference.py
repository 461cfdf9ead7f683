"""Markdown of the reference pages, made from the code, the recipes and the launch files."""

import importlib
import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

from sphinx.pycode import ModuleAnalyzer

from outrider.cli import describe
from outrider.cli.commands import COMMANDS
from outrider.cli.help import described, usage
from outrider.data.forms import FORMS
from outrider.data.turns import ROLES, TURN_KEYS

CONF = Path(__file__).parents[2] / "conf"


def commands() -> str:
    """Return a section for each command: its help, and its own options."""
    return "\n\n".join(map(_command, COMMANDS))


def _command(name: str) -> str:
    text, cls, sections = described(name)
    others = [f"`{section}`" for section in sections if section]
    lines = [f"## outrider {name}", "", text, "", "```text", usage(name, cls, sections), "```"]
    if others:
        lines += ["", f"Further options: those of {', '.join(others)} in [Options](options.md)."]
    return "\n\n".join(["\n".join(lines), *map(_option, describe.sections_of(cls)[""].options)])


def options() -> str:
    """Return a section for each part of the configuration, with its options."""
    return "\n\n".join(_section(section, section.name or "The run") for section in describe.sections().values())


def drafter_options() -> str:
    """Return a section for each kind of drafter, with its options."""
    return "\n\n".join(_section(section, f"drafter, kind {kind}") for kind, section in describe.drafter_sections().items())


def _section(section: describe.Section, title: str) -> str:
    return "\n\n".join([f"## {title}", section.meaning, *map(_option, section.options)])


def _option(option: describe.Option) -> str:
    """An entry of a definition list: name, then type, default, choices and meaning."""
    value = option.default if isinstance(option.default, str) else json.dumps(None if option.required else option.default)
    default = "required" if option.required else f"default `{value}`"
    choices = f", one of {', '.join(f'`{choice}`' for choice in option.choices)}" if option.choices else ""
    at_run_time = " May be changed when a trained drafter is loaded." if option.at_run_time else ""
    return f"`{option.name}`\n: *{option.type}{choices}; {default}.* {option.meaning}{at_run_time}"


def recipes() -> str:
    """Return a table of the recipes, and a section for each: its opening comment and its YAML."""
    known = describe.choices("conf")
    chosen = {name: describe.chosen_by(name) for name in known}
    rows = [(f"[{name}](#{name})", *(chosen[name][group] for group in ("target", "data", "drafter"))) for name in known]
    sections = [_yaml_section(recipe.path, recipe.meaning) for recipe in known.values()]
    return "\n\n".join(["\n".join(table(("recipe", "target", "data", "drafter"), rows)), *sections])


def groups() -> str:
    """Return a section for each group of the configuration but the recipes."""
    parts = []
    for group in describe.GROUPS:
        if group != "conf":
            rows = [(f"`{group}={name}`", choice.summary) for name, choice in describe.choices(group).items()]
            parts.append("\n".join([f"## {group}", "", *table(("choice", "meaning"), rows)]))
    return "\n\n".join(parts)


def forms() -> str:
    """Return a table of the forms of records, and one of the roles of turns, with the keys that are read."""
    rows = [
        (f"`{name}`", f"`{form.example}`", _keys(need.replace("|", " or ") for need in form.needs), _keys(form.uses))
        for name, form in FORMS.items()
    ]
    rows += [("`stdlib`", "none: Python's own library", "", ""), ("`self`", "none: the target writes the questions", "", "")]
    roles = [
        (f"`{role}`", _keys(name for name in ROLES if ROLES[name] == role), _keys(keys)) for role, keys in TURN_KEYS.items()
    ]
    records = table(("`data.source`", "a record", "needed", "further keys"), rows)
    return "\n".join([*records, "", *table(("role", "its names", "keys beside role and text"), roles)])


def _keys(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def launch_files() -> str:
    """Return a section for each configuration of accelerate."""
    return "\n\n".join(_yaml_section(choice.path, choice.meaning) for choice in describe.choices("launch").values())


def _yaml_section(path: Path, comment: str) -> str:
    return f"## {path.stem}\n\n{comment}\n\n```yaml\n{path.read_text().rstrip()}\n```"


def benchmarks() -> str:
    """Return benchmarks/README.md with its links as seen from a page of the reference."""
    text = (CONF.parent / "benchmarks" / "README.md").read_text()
    return re.sub(r"\]\((?!https?:|#)", "](../../benchmarks/", text)


def record(name: str) -> str:
    """Return the docstring of `module:Class`, and a table of its fields."""
    module_name, _, class_name = name.partition(":")
    cls = getattr(importlib.import_module(f"outrider.{module_name}"), class_name)
    rows = [
        (f"`{field}`", f"`{_type_name(kind)}`", _field_docstring(cls, field)) for field, kind in get_type_hints(cls).items()
    ]
    return "\n".join([inspect.getdoc(cls) or "", "", *table(("field", "type", "meaning"), rows)])


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else re.sub(r"[\w.]*\.", "", str(kind))


def _field_docstring(cls: type, field: str) -> str:
    for base in _bases(cls):
        if base.__module__.startswith("outrider"):
            texts = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
            if lines := texts.get((base.__qualname__, field)):
                return " ".join(lines).strip()
    return ""


def _bases(cls: type) -> list[type]:
    """Return a class and all its bases; those of a TypedDict are not in its `__mro__`."""
    bases = [*cls.__mro__, *getattr(cls, "__orig_bases__", ())]
    return [*bases, *(below for base in bases if base is not cls for below in getattr(base, "__orig_bases__", ()))]


def table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    """Return the lines of a Markdown table."""
    cells = [[re.sub(r"\s+", " ", str(cell or "")).replace("|", r"\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [list(columns), ["---"] * len(columns), *cells]]
