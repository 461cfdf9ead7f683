"""Options of a command line, by one rule that the configuration's classes make.

`--max-new-tokens 64`, `--eval.max-new-tokens 64`, `max_new_tokens=64` and `eval.max_new_tokens=64` are
the same option: the field `max_new_tokens` of the section `eval`. A name without its section is
looked up in the command's own options, then in its sections. A section's name alone is its required
text: `target=DIR` is `target.name_or_path=DIR`. This module doesn't import torch.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from ..data.fields import closest
from .describe import Option, Section

ASSIGNMENT = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=")
"""Beginning of NAME=VALUE. Hydra's plus signs mean nothing here."""
FLAG = re.compile(r"-+[A-Za-z]")
"""Beginning of an option. A negative number is a value."""


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
            if name not in without:
                for part in reversed(name.split(".")):
                    value = {part: value}
                nested = merged(nested, value)
        return nested


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with those of `above` on top."""
    both = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], Mapping) and isinstance(above[name], Mapping):
            both[name] = merged(below[name], above[name])
    return both


def read_command_line(
    arguments: Sequence[str], sections: Mapping[str, Section], *, launches: bool = False, groups: Collection[str] = ()
) -> CommandLine:
    """Sort a command's arguments: words, NAME=VALUE, and --NAME VALUE or --NAME=VALUE.

    The options are those of `sections`, where "" has the command's own ones. The name of a section in
    `groups` is an option too: `drafter=medusa`. With `launches`, options of `accelerate launch` may
    follow `--launch NAME`, each with its value.
    """
    line, rest = CommandLine(), list(arguments)
    while rest:
        argument = rest.pop(0)
        num_left, is_flag = len(rest), argument.startswith("-") and argument != "-"
        if not is_flag and not ASSIGNMENT.match(argument):
            line.words.append(argument)
            line.own.append(argument)
            continue
        # 1. The option that it names.
        name, is_assigned, value = argument.partition("=")
        option: Option | None = None
        try:
            if not is_flag or re.match("--[^-]", name):
                option = find_option(name.lstrip("-+").replace("-", "_"), value, sections, groups, is_flag=is_flag)
        except ValueError as error:
            line.problems.append(f"{name} {error}")
            _drop_value(rest, is_assigned)
            continue
        # 2. Its value.
        if launches and option is not None and option.name == "launch":
            line.launch = value if is_assigned else "" if _has_no_value(rest, sections, groups) else rest.pop(0)
            if not line.launch:
                line.problems.append("--launch needs a value: a launch file, by name or path")
        elif option is not None:
            if is_assigned or not option.is_switch:
                if not is_assigned and _has_no_value(rest, sections, groups):
                    line.problems.append(f"{name} needs a value: {option.type}")
                else:
                    _take(line, option.name, value if is_assigned else rest.pop(0), option)
            else:
                is_on = rest.pop(0) == "true" if rest and rest[0] in ("true", "false") else True
                line.values[option.name] = is_on != _is_negated(name, option)
            line.own += [argument, *arguments[len(arguments) - num_left : len(arguments) - len(rest)]]
        elif not is_flag:  # reported with its full name later
            _take(line, name.lstrip("+"), value, None)
            line.own.append(argument)
        elif line.launch is not None and name.removeprefix("--").replace("-", "_") in accelerate_options():
            line.launch_options += [argument, *_drop_value(rest, is_assigned)]
        else:
            line.problems.append(_unknown(name, sections, () if line.launch is None else accelerate_options()))
            _drop_value(rest, is_assigned)
    return line


def _drop_value(rest: list[str], is_assigned: str) -> list[str]:
    """Remove the value of an unknown option from the arguments, if one follows, and return it."""
    return [rest.pop(0)] if not is_assigned and rest and not FLAG.match(rest[0]) and not ASSIGNMENT.match(rest[0]) else []


def _has_no_value(rest: Sequence[str], sections: Mapping[str, Section], groups: Collection[str]) -> bool:
    """Whether no value follows an option: nothing, or the next option."""
    if not rest or FLAG.match(rest[0]):
        return True
    name, _, value = rest[0].partition("=")
    try:
        return bool(ASSIGNMENT.match(rest[0]) and find_option(name, value, sections, groups, is_flag=False))
    except ValueError:
        return True


def find_option(
    name: str, value: str, sections: Mapping[str, Section], groups: Collection[str], *, is_flag: bool
) -> Option | None:
    """Return the option of this name; None if there is none.

    `value` is a section's whole content if it is a mapping, as in `train={steps: 20}`. Raises
    ValueError for a name that several sections share.
    """
    # 1. A name with its section, or a section's name.
    options = {option.name: option for section in sections.values() for option in section.options}
    if name in options:
        return options[name]
    if name in groups:
        return Option(name=name, hint=Any, default=None, meaning="")
    if name in sections:
        texts = (option for option in sections[name].options if option.required and option.is_text)
        return None if value.startswith("{") else next(texts, None)
    section, _, below = name.partition(".")
    if below and section in options and options[section].type == "mapping":  # such as drafter.beam_width
        return Option(name=name, hint=Any, default=None, meaning="")

    # 2. A name alone: as it is, as one value of a list, or negated.
    for form in (name, f"{name}s", name.removeprefix("no_"))[: 3 if is_flag else 2]:
        found = [option for option in options.values() if form in (option.name, option.name.rpartition(".")[2])]
        found = [option for option in found if "[]" not in option.name]
        if form == f"{name}s":
            found = [option for option in found if option.is_list]
        elif form != name:
            found = [option for option in found if option.is_switch]
        found = [option for option in found if "." not in option.name] or found
        if len(found) > 1:
            names = [f"--{option.name.replace('_', '-')}" if is_flag else option.name for option in found]
            raise ValueError(f"is an option of several sections; give {' or '.join(names)}")
        if found:
            return found[0]
    return None


def _is_negated(flag: str, option: Option) -> bool:
    return flag.lstrip("-").replace("-", "_") not in (option.name, option.name.rpartition(".")[2])


@cache
def accelerate_options() -> frozenset[str]:
    """Return the names of the options of `accelerate launch`, read from its source: its import takes seconds."""
    spec = find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "commands" / "launch.py").read_text(encoding="utf-8")
    return frozenset(name.replace("-", "_") for name in re.findall(r'"--([a-z][\w-]*)"', source))


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


def _unknown(flag: str, sections: Mapping[str, Section], others: Collection[str]) -> str:
    """Return the message for an unknown option, with the options that it probably means."""
    name = flag.lstrip("-").replace("-", "_")
    names = [option.name for section in sections.values() for option in section.options if "[]" not in option.name]
    close = (closest(name, [*names, *filter(None, sections), *others, "help"]) or "").split(" or ")
    if len(close) == 1 and "." not in name:
        close = [close[0].rpartition(".")[2]]
    meant = " or ".join(f"--{option if option in others else option.replace('_', '-')}" for option in close if option)
    return f"there is no option {flag}{f'; did you mean {meant}?' if meant else ''} (--help lists the options)"
