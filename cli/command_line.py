"""Options of a command line, by one rule that the configuration's classes make.

`--max-new-tokens 64`, `--eval.max-new-tokens 64` and `eval.max_new_tokens=64` are the same option:
the field `max_new_tokens` of the section `eval`. A name without its section is looked up in the
command's own options, then in its sections. This module doesn't import torch.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import yaml
from omegaconf import OmegaConf

from .describe import Option, Section

ASSIGNMENT = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=")
"""Beginning of NAME=VALUE. Hydra's plus signs mean nothing here."""


@dataclass
class CommandLine:
    """A command's arguments, sorted."""

    words: list[str] = field(default_factory=list)
    """Arguments that are no options, such as a recipe or a folder."""
    values: dict[str, Any] = field(default_factory=dict)
    """Value of each option, by the option's full name."""
    launch: str | None = None
    """Name or path of a launch file."""
    launch_options: list[str] = field(default_factory=list)
    """Options of `accelerate launch`."""
    own: list[str] = field(default_factory=list)
    """All arguments but those of the launch, for the launched processes."""
    problems: list[str] = field(default_factory=list)
    """A line for each argument that can't be read."""

    def nested(self, without: Collection[str] = ()) -> dict[str, Any]:
        """Return the values as a configuration: {"eval": {"max_new_tokens": 64}}.

        Leaves out the options `without`.
        """
        nested: dict[str, Any] = {}
        for name, value in self.values.items():
            if name in without:
                continue
            *sections, last = name.split(".")
            place = nested
            for section in sections:
                if not isinstance(place.setdefault(section, {}), dict):
                    place[section] = {}
                place = place[section]
            if isinstance(value, dict) and isinstance(place.get(last), dict):
                place[last].update(value)
            else:
                place[last] = value
        return nested


def read_command_line(arguments: Sequence[str], sections: Mapping[str, Section], *, launches: bool = False) -> CommandLine:
    """Sort a command's arguments: words, NAME=VALUE, and --NAME VALUE or --NAME=VALUE.

    The options are those of `sections`, where "" has the command's own ones. With `launches`, unknown
    options after `--launch NAME`, each with the value that follows it, are accelerate's.
    """
    line, rest = CommandLine(), list(arguments)
    options = {option.name: option for section in sections.values() for option in section.options}
    while rest:
        argument = rest.pop(0)
        flag, is_assigned, value = argument.partition("=")
        start = len(rest)
        if not argument.startswith("-") or argument == "-":
            if ASSIGNMENT.match(argument):
                _take(line, flag.lstrip("+"), value, options.get(flag.lstrip("+")))
            else:
                line.words.append(argument)
            line.own.append(argument)
        elif launches and flag == "--launch":
            line.launch = value if is_assigned else (rest.pop(0) if rest else "")
        elif option := _find(flag, sections):
            if option.is_switch and not is_assigned:
                line.values[option.name] = not _is_negated(flag, option)
            else:
                if not is_assigned and not rest:
                    line.problems.append(f"{flag} needs a value: {option.type}")
                    break
                _take(line, option.name, value if is_assigned else rest.pop(0), option)
            line.own += [argument, *arguments[len(arguments) - start : len(arguments) - len(rest)]]
        elif line.launch is not None and flag.startswith("--"):
            has_value = not is_assigned and rest and not rest[0].startswith("-") and not ASSIGNMENT.match(rest[0])
            line.launch_options += [argument, *([rest.pop(0)] if has_value else [])]
        else:
            line.problems.append(_unknown(flag, sections))
            if not is_assigned and rest and not rest[0].startswith("-") and not ASSIGNMENT.match(rest[0]):
                rest.pop(0)  # its value
    return line


def _find(flag: str, sections: Mapping[str, Section]) -> Option | None:
    """Return the option that a flag names; None if there is none.

    Raises ValueError for a name that several sections share.
    """
    name = flag.lstrip("-").replace("-", "_")
    # 1. A name with its section, or a section's name, which stands for its required text.
    options = {option.name: option for section in sections.values() for option in section.options}
    if name in options:
        return options[name]
    if name in sections:
        return next((option for option in sections[name].options if option.required and option.is_text), None)
    section, _, below = name.partition(".")
    if section in options and below:  # an entry of a mapping, such as drafter.beam_width
        return Option(name=name, hint=Any, default=None, meaning="")

    # 2. A name alone: as it is, as one value of a list, or negated.
    for form in (name, f"{name}s", name.removeprefix("no_")):
        found = [option for option in options.values() if form in (option.name, option.name.rpartition(".")[2])]
        found = [option for option in found if "[]" not in option.name]
        if form == f"{name}s":
            found = [option for option in found if option.is_list]
        elif form != name:
            found = [option for option in found if option.is_switch]
        found = [option for option in found if "." not in option.name] or found
        if len(found) > 1:
            names = " or ".join(f"--{option.name.replace('_', '-')}" for option in found)
            raise ValueError(f"{flag} is an option of several sections; give {names}")
        if found:
            return found[0]
    return None


def _is_negated(flag: str, option: Option) -> bool:
    return flag.lstrip("-").replace("-", "_") not in (option.name, option.name.rpartition(".")[2])


def _take(line: CommandLine, name: str, text: str, option: Option | None) -> None:
    """Add the value of an option.

    The last value counts. Repeated values of a list are put together, unless one is a whole list, in
    brackets; and so are the options of a section, such as train={steps: 20}.
    """
    try:
        value = parse_value(text, option)
    except ValueError as error:
        line.problems.append(f"{name} is {text}, {error}")
        return
    before = line.values.get(name)
    if isinstance(before, list) and isinstance(value, list) and not text.startswith("["):
        value = before + value
    elif option is None and isinstance(before, dict) and isinstance(value, dict):
        value = {**before, **value}
    line.values[name] = value


def parse_value(text: str, option: Option | None = None) -> Any:
    """Parse a value as in YAML.

    A text needs no quotes where the option is a text, and a list no brackets where it is a list.
    Raises ValueError for what YAML can't read.
    """
    if option is not None and text != "null":
        if option.is_text and not (len(text) > 1 and text[0] == text[-1] and text[0] in "'\""):
            return text
        if option.is_list and not text.startswith(("[", "$")):
            if option.is_list_of_texts:
                return text.split(",")
            text = f"[{text}]"
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        remedy = "close each bracket and quote" if text.startswith(("[", "{")) else "put a text into quotes"
        raise ValueError(f"which can't be read; {remedy}") from error
    if joined := [key for key in _keys(value) if ":" in key]:
        raise ValueError(f"where {joined[0]!r} is one word; put a space after the colon")
    return value


def _keys(value: Any) -> list[str]:
    """Return the keys without a value in a mapping, and in the mappings of a list."""
    if isinstance(value, list):
        return [key for item in value for key in _keys(item)]
    return [str(key) for key, item in value.items() if item is None] if isinstance(value, dict) else []


def _unknown(flag: str, sections: Mapping[str, Section]) -> str:
    """Return the message for an unknown option, with the option that it probably means."""
    names = [option.name for section in sections.values() for option in section.options if "[]" not in option.name]
    known = {f"--{name.rpartition('.')[2].replace('_', '-')}" for name in names} | {"--help"}
    close = get_close_matches(flag, sorted(known), 1)
    return f"there is no option {flag}; {f'did you mean {close[0]}? ' if close else ''}(--help lists the options)"
