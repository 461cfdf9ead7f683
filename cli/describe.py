"""Descriptions of options, drafters, groups, recipes and launch files, read from the code.

The command line, `outrider options`, `outrider recipes`, the suggestions for mistyped options and
the documentation use them. This module doesn't import torch.
"""

import ast
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from .. import conf
from ..data.fields import MAX_COUNT, OneOf
from ..models.drafters.options import DRAFTER_OPTIONS
from ..models.drafters.shared_options import DrafterChoice
from .config import RunConfig, RunOptions

CONF = Path(conf.__file__).parent
GROUPS = ("target", "data", "drafter", "eval", "conf")
"""Groups of the configuration: a choice of each is a file in conf/GROUP/."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of the configuration."""

    name: str
    """Full dotted name, such as train.learning_rate; inside a list eval.suites[].name."""
    hint: Any
    """Annotation of the field."""
    default: Any
    """Default value as in YAML (lists, mappings, numbers, texts, None); MISSING where a value is required."""
    meaning: str
    """The docstring under the field, on one line."""
    at_run_time: bool = False
    """Whether this option of a drafter may be changed when a trained drafter is loaded (eval.settings)."""

    @property
    def required(self) -> bool:
        """Whether the option has no default."""
        return self.default is MISSING

    @property
    def type(self) -> str:
        """Type in plain words, such as "whole number above 0, or null"."""
        return plain_words(self.hint)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, if a rule names them; else empty."""
        return _choices(self.hint)

    @property
    def is_text(self) -> bool:
        """Whether each value but null is a text, so that a command line needs no quotes."""
        return _kinds(self.hint) <= {"text", "null"}

    @property
    def is_list(self) -> bool:
        """Whether each value but null is a list."""
        return _kinds(self.hint) - {"null"} == {"list"}

    @property
    def is_list_of_texts(self) -> bool:
        """Whether each item of the list is a text."""
        return self.is_list and all(
            _kinds(get_args(part)[0]) == {"text"} for part in _parts(self.hint) if get_origin(part) is list
        )

    @property
    def is_switch(self) -> bool:
        """Whether the option is true or false."""
        return _kinds(self.hint) == {"true or false"}


@dataclass(frozen=True, kw_only=True)
class Section:
    """The options of one configuration class."""

    name: str
    """Name of the section: "" for a run's own options, train, drafter.eagle3."""
    meaning: str
    """First line of the class's docstring."""
    options: tuple[Option, ...]


@dataclass(frozen=True, kw_only=True)
class OptionChoice:
    """One choice of a group (drafter=eagle3), such as a recipe (conf=demo), or a launch file."""

    name: str
    meaning: str
    """The comment at the head of its file."""
    path: Path

    @property
    def summary(self) -> str:
        """The comment's first sentence."""
        return re.split(r"(?<=\.)\s", " ".join(self.meaning.split()), maxsplit=1)[0]


# --- options


@cache
def sections() -> dict[str, Section]:
    """Describe the options of a run (section "") and of each section, without the drafters'."""
    return sections_of(RunConfig)


@cache
def sections_of(root: type) -> dict[str, Section]:
    """Describe a configuration's own options (section ""), and those of each section in it."""
    described = {"": Section(name="", meaning=first_line(root), options=tuple(_options(root, "")))}
    for name, kind in typing.get_type_hints(root).items():
        if is_dataclass(kind):
            options = tuple(_options(typing.cast(type, kind), f"{name}."))
            described[name] = Section(name=name, meaning=first_line(kind), options=options)
    return described


def recipe_sections(command: type = RunOptions) -> dict[str, Section]:
    """Describe all options of a command on recipes: a recipe's, and the command's own."""
    own, recipe = sections_of(command)[""], sections()[""]
    return {**sections(), "": Section(name="", meaning=own.meaning, options=(*own.options, *recipe.options))}


@cache
def drafter_sections() -> dict[str, Section]:
    """Describe the options of each kind of drafter, by kind."""
    return {
        kind: Section(
            name=f"drafter.{kind}",
            meaning=first_line(options),
            options=(*_options(DrafterChoice, "drafter."), *_options(options, "drafter.")),
        )
        for kind, options in DRAFTER_OPTIONS.items()
    }


def _options(cls: type, prefix: str) -> Iterator[Option]:
    """Yield a class's options. A list's fields come after the list."""
    hints, meanings = typing.get_type_hints(cls, include_extras=True), field_docstrings(cls)
    at_run_time: frozenset[str] = getattr(cls, "RUNTIME_FIELDS", frozenset())
    for field in sorted(fields(cls), key=lambda field: field.name not in cls.__annotations__):  # those of bases come last
        hint = hints[field.name]
        if is_dataclass(hint):
            continue  # a section
        default = field.default
        if isinstance(default, FieldInfo):
            default = MISSING if default.is_required() else default.get_default(call_default_factory=True)
        elif default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        yield Option(
            name=prefix + field.name,
            hint=hint,
            default=default if default is MISSING else _plain(default),
            meaning=re.sub(r"\bNone\b", "null", meanings.get(field.name, "")),  # a recipe writes null
            at_run_time=field.name in at_run_time,
        )
        for part in _parts(hint) if _kinds(hint) == {"list"} else ():
            if isinstance(part, type) and is_dataclass(part):
                yield from _options(part, f"{prefix}{field.name}[].")


@cache
def field_docstrings(cls: type) -> dict[str, str]:
    """Return the docstrings under the fields of a class and of its bases, each on one line."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        node = _classes(base.__module__).get(base.__name__) if is_dataclass(base) else None
        body = node.body if node else []
        for field, below in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                texts[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return texts


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes in the source of an imported module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def first_line(documented: Any) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return (inspect.getdoc(documented) or "").split("\n\n", maxsplit=1)[0].replace("\n", " ")


# --- types in words


def plain_words(hint: Any) -> str:
    """Return a type in plain words, with its bounds: "whole number above 0, or null"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return plain_words(arguments[0]) + _bounds(arguments[1:])
    if origin in (typing.Union, UnionType):
        return ", or ".join(plain_words(part) for part in arguments)
    if origin is list:
        return f"list of {_plural(plain_words(arguments[0]))}"
    if hint is dict or origin is dict or is_dataclass(hint):
        return "mapping"
    if isinstance(hint, type) and issubclass(hint, Enum | Path):
        return "text"
    names = {bool: "true or false", int: "whole number", float: "number", str: "text", NoneType: "null", Any: "any value"}
    return names[hint]


def _kinds(hint: Any) -> set[str]:
    """Return the kinds of value that a type has, without their bounds: {"list", "null"}."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _kinds(arguments[0])
    if origin in (typing.Union, UnionType):
        return set().union(*map(_kinds, arguments))
    return {"list"} if origin is list else {plain_words(hint)}


def _plural(words: str) -> str:
    for noun in ("number", "text", "mapping", "list"):
        words = re.sub(rf"^((whole )?){noun}\b", rf"\1{noun}s", words)
    return words


def _bounds(rules: tuple[Any, ...]) -> str:
    """Return the bounds in the metadata of a type, in words."""
    flat = [part for rule in rules for part in (rule.metadata if isinstance(rule, FieldInfo) else [rule])]
    lower = {annotated_types.Gt: ("above", "gt"), annotated_types.Ge: ("from", "ge")}
    upper = {annotated_types.Lt: ("below", "lt"), annotated_types.Le: ("up to", "le")}
    words = ""
    for rule in flat:
        for kind, (word, name) in {**lower, **upper}.items():
            # A larger bound only keeps a number inside its type.
            if isinstance(rule, kind) and getattr(rule, name) < MAX_COUNT:
                words += f" {word} {getattr(rule, name)}"
    return words + (" (not empty)" if any(isinstance(rule, annotated_types.MinLen) for rule in flat) else "")


def _parts(hint: Any) -> Iterator[Any]:
    """Yield a type and all its parts, rules included."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _choices(hint: Any) -> tuple[str, ...]:
    for part in _parts(hint):
        if isinstance(rule := getattr(part, "func", None), OneOf):
            return rule.choices
        if isinstance(part, type) and issubclass(part, Enum):
            return tuple(str(member.value) for member in part)
    return ()


def _plain(value: Any) -> Any:
    return str(value.value) if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value


# --- groups and recipes


@cache
def choices(group: str) -> dict[str, OptionChoice]:
    """Describe the choices of a group, or the launch files (group "launch"), by name."""
    return {
        path.stem: OptionChoice(name=path.stem, meaning=_head_comment(path), path=path)
        for path in sorted((CONF / group).glob("*.yaml"))
    }


@cache
def chosen_by(recipe: str) -> dict[str, str]:
    """Return the choice of each group in a recipe's defaults list, and in the recipes that it builds on; "" for none."""
    chosen = dict.fromkeys(GROUPS[:-1], "")
    content = yaml.safe_load(choices("conf")[recipe].path.read_text(encoding="utf-8"))
    for entry in content.get("defaults", []):
        if isinstance(entry, dict):
            chosen |= {key.removeprefix("override ").lstrip("/"): str(value) for key, value in entry.items()}
        elif entry in choices("conf"):
            chosen |= {group: name for group, name in chosen_by(entry).items() if name}
    return chosen


def _head_comment(path: Path) -> str:
    """Return the comment at the head of a file, without Hydra's package line."""
    head = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in head if not line.startswith("# @package"))
