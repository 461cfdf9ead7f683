"""Configurations from plain values: all problems at once, each under its option's name.

This module doesn't import torch.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from textwrap import TextWrapper
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS, problems_of
from ..data.paths import expand_home
from .command_line import CommandLine, merged, read_command_line
from .describe import sections_of

T = TypeVar("T")


def build(cls: type[T], values: Mapping[str, Any], problems: Sequence[str] = ()) -> T:
    """Return the configuration that these values make.

    Raises one ValueError with `problems`, and with all unknown keys, wrong and missing values. What
    depends on several sections is checked after that: it may load torch.
    """
    described: type = cls  # for mypy, a type[T] has no hash
    values = expand_home({name: {} for name in sections_of(described) if name} | dict(values))
    # 1. Each field alone.
    if report := [*problems, *field_problems(described, values)]:
        raise ValueError(problem_report(report))

    # 2. The whole.
    try:
        return TypeAdapter(cls).validate_json(_json(values))
    except ValidationError as error:
        raise ValueError(problem_report(problems_of(error, known=_names(described)))) from None


def field_problems(cls: type, values: Mapping[str, Any]) -> list[str]:
    """Return a line for each unknown key, and each wrong or missing value, of a configuration's fields."""
    try:
        _fields_of(cls).validate_json(_json(values), context=values.get("drafter"))
    except ValidationError as error:
        return problems_of(error, known=_names(cls))
    return []


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, default=str)  # YAML has types that JSON lacks


@cache
def _fields_of(cls: type) -> TypeAdapter[Any]:
    """Return a validator of a configuration's fields, which doesn't check them together."""
    return TypeAdapter(dataclass(config=OPTIONS)(type(cls.__name__, (cls,), {"__post_init__": lambda self: None})))


def problem_report(problems: Sequence[str]) -> str:
    """Return one message with all problems of a configuration."""
    # Sections interpolate the run's seed: report a wrong seed once.
    problems = [line for line in dict.fromkeys(problems) if line.partition(".")[2] not in problems]
    layout = TextWrapper(80, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    lines = "\n".join(map(layout.fill, problems))
    return f"{len(problems)} problem(s) in the configuration:\n{lines}"


def _names(cls: type) -> list[str]:
    """Return the names of a configuration's options and sections."""
    sections = sections_of(cls)
    return [*filter(None, sections), *(option.name for section in sections.values() for option in section.options)]


def build_options(cls: type[T], arguments: Sequence[str]) -> tuple[T, CommandLine]:
    """Return a command's configuration, and its arguments as they were read.

    A class names its options that need no name in POSITIONAL (a list takes all further words), and
    its own defaults of its sections' options in DEFAULTS.
    """
    # 1. Read the arguments. Words are the options of POSITIONAL.
    described: type = cls  # for mypy, a type[T] has no hash
    sections = sections_of(described)
    options = {option.name: option for option in sections[""].options}
    line = read_command_line(arguments, sections, launches="launch" in options)
    words = list(line.words)
    for name in getattr(cls, "POSITIONAL", ()):
        if words:
            line.values[name] = words if options[name].is_list else words[0]
            words = [] if options[name].is_list else words[1:]
    line.problems += [f"{word} is one argument too many; an option has the form --NAME VALUE or NAME=VALUE" for word in words]

    # 2. Build the configuration.
    values = merged(getattr(cls, "DEFAULTS", {}), line.nested())
    return build(cls, values, line.problems), line
