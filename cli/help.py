"""The help of a command, made from the class of its options."""

import inspect
import typing
from collections.abc import Iterator
from dataclasses import replace
from textwrap import fill
from typing import Any

from .commands import function_of
from .config import RECIPE_COMMANDS
from .describe import Option, Section, recipe_sections, sections_of

WIDTH = 80


def command_help(name: str, *, show_all: bool = False) -> str:
    """Return the help of a command: how it is called, what it does, and its usual options, or all."""
    text, cls, sections = described(name)
    usual = getattr(cls, "USUAL", ())
    paragraphs = "\n\n".join(fill(paragraph, WIDTH) for paragraph in text.split("\n\n"))
    lines = [f"Usage: {usage(name, cls, sections)}", "", paragraphs, "", "Options:"]
    for section in sections.values():
        for option in section.options:
            if "[]" not in option.name and (show_all or "." not in option.name or option.name in usual):
                lines += option_lines(option)
    if len(sections) > 1:
        lines += ["", fill(RULE.format(" and ".join(filter(None, sections))), WIDTH)]
    return "\n".join(lines) + "\n"


RULE = (
    "--max-new-tokens 64 and eval.max_new_tokens=64 are the same, and so for all options of {}. A list is written as [A,B], or "
    "A and B each with its own --option. --help --all prints all options, and `outrider options SECTION` those of a section."
)


def described(name: str) -> tuple[str, type[Any], dict[str, Section]]:
    """Return what a command does, the class of its options, and their sections."""
    if recipe_command := RECIPE_COMMANDS.get(name):
        return inspect.getdoc(recipe_command) or "", recipe_command, recipe_sections(recipe_command)
    command = function_of(name)
    cls = typing.get_type_hints(command)["options"]
    own = {f"{name}.{key}": value for name, values in getattr(cls, "DEFAULTS", {}).items() for key, value in values.items()}
    sections = {}
    for name, section in sections_of(cls).items():
        options = (replace(option, default=own.get(option.name, option.default)) for option in section.options)
        sections[name] = replace(section, options=tuple(options))
    return inspect.getdoc(command) or "", cls, sections


def usage(name: str, cls: type[Any], sections: dict[str, Section]) -> str:
    """Return a command with its required options."""
    positional, words = getattr(cls, "POSITIONAL", ()), []
    own = {option.name: option for option in sections[""].options}
    for word in positional:
        text = word.upper() + (" ..." if own[word].is_list else "")
        words.append(text if own[word].required else f"[{text}]")
    for section in sections.values() if name not in RECIPE_COMMANDS else ():
        required = [option for option in section.options if option.required and "[]" not in option.name]
        words += [f"{flag(option)} {flag(option)[2:].upper()}" for option in required if option.name not in positional]
    return " ".join(["outrider", name, *words, "[OPTIONS]"])


def flag(option: Option) -> str:
    """Return the shortest flag of an option: `--target` for target.name_or_path."""
    section, _, name = option.name.rpartition(".")
    return f"--{(section if section and option.required and option.is_text else name).replace('_', '-')}"


def option_lines(option: Option) -> Iterator[str]:
    """Yield the lines of an option: its flag, its type and default, and its meaning."""
    name = f"{flag(option)}{f'  {option.name}' if '.' in option.name else ''}"
    yield wrapped(f"{name}  ({facts(option, with_empty=False)})", 2)
    if option.meaning:
        yield wrapped(option.meaning, 6)


def facts(option: Option, *, with_empty: bool = True) -> str:
    """Return an option's type, choices and default. `with_empty` includes the defaults null, [] and {}."""
    text = option.type + (f": {' | '.join(option.choices)}" if option.choices else "")
    if option.required:
        return f"{text}; required"
    return f"{text}; default {shown(option.default)}" if with_empty or option.default not in (None, [], {}) else text


def shown(value: object) -> str:
    """Return a default as in a recipe: null, true, 0.001, [a, b]."""
    import json

    return value if isinstance(value, str) else json.dumps(value)


def wrapped(text: str, indent: int) -> str:
    """Wrap a paragraph to 80 columns."""
    return fill(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2 * (indent < 4)),
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
