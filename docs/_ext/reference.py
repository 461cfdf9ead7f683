"""Markdown of the reference pages, made from the code, the recipes and the launch files."""

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import typer
from sphinx.pycode import ModuleAnalyzer

from outrider.cli import describe
from outrider.cli.arguments import run_help
from outrider.cli.main import app

CONF = Path(__file__).parents[2] / "conf"


def commands() -> str:
    """Return a section for each command: what it does, how it is called, and its options."""
    return "\n\n".join(_command(name, command) for name, command in walk(typer.main.get_command(app), "outrider"))


def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each command that does something, with its full name."""
    if not hasattr(command, "commands"):
        yield name, command
    for part, child in sorted(getattr(command, "commands", {}).items()):
        yield from walk(child, f"{name} {part}")


def _command(name: str, command: Any) -> str:
    context = command.make_context(command.name, [], resilient_parsing=True)
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    required = [option for option in options if option.required]
    usage = [name, *(argument.name.upper() for argument in arguments)]
    usage += [f"{option.opts[0]} {_value(option, context).partition(',')[0].upper()}" for option in required]
    usage += ["[OPTIONS]"] if len(required) < len(options) else []
    lines = [f"## {name}", "", inspect.cleandoc(command.help or ""), "", "```text", " ".join(usage), "```"]
    if name == "outrider run":
        lines[-2] = run_help().rstrip()  # its arguments are a recipe's, which the command's parser doesn't know
    rows = [
        (f"`{_names(parameter)}`", _value(parameter, context), _default(parameter), parameter.help)
        for parameter in command.params
    ]
    return "\n".join([*lines, "", *table(("option", "value", "default", "meaning"), rows)] if rows else lines)


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.name.upper())
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def _value(parameter: Any, context: Any) -> str:
    if getattr(parameter, "is_flag", False):
        return "switch"
    name = re.sub(r"^list\[(.*)\]$", r"\1", parameter.display_type(context).strip("<>"), flags=re.IGNORECASE).lower()
    return f"{name}, repeatable" if parameter.multiple or parameter.nargs == -1 else name


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default() if callable(parameter.default) else parameter.default
    if getattr(parameter, "is_flag", False):
        return "on" if default else "off"
    return "" if default in (None, "", [], ()) else f"`{default}`"


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
    rows = [(f"[{name}](#{name})", recipe.target, recipe.data, recipe.drafter) for name, recipe in describe.recipes().items()]
    sections = [_yaml_section(recipe.path, recipe.comment) for recipe in describe.recipes().values()]
    return "\n\n".join(["\n".join(table(("recipe", "target", "data", "drafter"), rows)), *sections])


def groups() -> str:
    """Return a section for each group of the configuration but the recipes."""
    parts = []
    for group in describe.GROUPS:
        if group != "conf":
            rows = [(f"`{group}={name}`", choice.summary) for name, choice in describe.choices(group).items()]
            parts.append("\n".join([f"## {group}", "", *table(("choice", "meaning"), rows)]))
    return "\n\n".join(parts)


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
    rows = [(f"`{field}`", f"`{_type_name(kind)}`", _field_docstring(cls, field)) for field, kind in _field_types(cls)]
    return "\n".join([inspect.getdoc(cls) or "", "", *table(("field", "type", "meaning"), rows)])


def _field_types(cls: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(cls)
    return [(field.name, hints[field.name]) for field in fields(cls)] if is_dataclass(cls) else list(hints.items())


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
