"""Descriptions of options, drafters, groups, recipes and launch files, read from the code.

`outrider options`, `outrider recipes`, the suggestions for mistyped options and the documentation
use them. This module doesn't import torch: it reads the drafters' options from the source of their
modules.
"""

import ast
import inspect
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin

import annotated_types
import pydantic
import yaml
from pydantic.fields import FieldInfo

from .. import conf
from ..data import fields as option_types
from ..data.fields import OneOf
from ..models import drafters
from .config import RunConfig

CONF = Path(conf.__file__).parent
GROUPS = ("target", "data", "drafter", "eval", "conf")
"""Groups of the configuration: a choice of each is a file in conf/GROUP/."""
_DRAFTERS = Path(drafters.__file__).parent
_NO_LIMIT = 2**31
"""A larger bound only keeps a number inside its type. Descriptions leave it out."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of the configuration."""

    name: str
    """Full dotted name, such as train.learning_rate; inside a list eval.suites[].name."""
    type: str
    """Type in plain words, such as "whole number above 0, or null"."""
    default: Any
    """Default value as in YAML (lists, mappings, numbers, texts, None); MISSING where a value is required."""
    meaning: str
    """The docstring under the field, on one line."""
    choices: tuple[str, ...] = ()
    """The allowed values, if a rule names them; else empty."""
    at_run_time: bool = False
    """Whether this option of a drafter may be changed when a trained drafter is loaded (eval.settings)."""

    @property
    def required(self) -> bool:
        """Whether the option has no default."""
        return self.default is MISSING


@dataclass(frozen=True, kw_only=True)
class Section:
    """The options of one configuration class."""

    name: str
    """Name of the section: "" for a run's own options, train, drafter.eagle3."""
    meaning: str
    """First line of the class's docstring."""
    options: tuple[Option, ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One choice of a group (drafter=eagle3), or a launch file."""

    group: str
    name: str
    meaning: str
    """The comment at the head of its file."""
    path: Path

    @property
    def summary(self) -> str:
        """The comment's first sentence."""
        return re.split(r"(?<=\.)\s", " ".join(self.meaning.split()), maxsplit=1)[0]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe of conf/conf/, with the choices that it makes."""

    name: str
    summary: str
    """First sentence of the comment at the head of its file."""
    comment: str
    """The whole comment, line by line."""
    target: str
    data: str
    drafter: str
    eval: str
    path: Path


# --- options


@cache
def sections() -> dict[str, Section]:
    """Describe the options of the run (section "") and of each section, without the drafters'."""
    described = {"": _section("", RunConfig)}
    for name, kind in typing.get_type_hints(RunConfig).items():
        if is_dataclass(kind):
            described[name] = _section(name, typing.cast(type, kind))
    return described


@cache
def drafter_sections() -> dict[str, Section]:
    """Describe the options of each kind of drafter, by kind.

    Reads the source, because an import of the drafters loads torch.
    """
    registry = _Source(_DRAFTERS / "registry.py")
    (table,) = (
        node.value
        for node in registry.tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "DRAFTERS" and isinstance(node.value, ast.Dict)
    )
    return {
        ast.literal_eval(kind): _drafter_section(ast.literal_eval(kind), *registry.find_class(ast.unparse(drafter)))
        for kind, drafter in zip(table.keys, table.values, strict=True)
        if kind is not None
    }


def _drafter_section(kind: str, source: "_Source", drafter: ast.ClassDef) -> Section:
    """Describe one kind: the options of every drafter, and those of its configuration class."""
    (config,) = (
        ast.unparse(node.value)
        for node in drafter.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "Config"
    )
    config_source, node = source.find_class(config)
    start = _Source(_DRAFTERS / "saved" / "build.py").docstrings()["START_FROM"]
    shared = (
        Option(name="drafter.kind", type="text", default=kind, meaning="The kind of drafter."),
        Option(name="drafter.start_from", type="text, or null", default=None, meaning=start),
    )
    options = _class_options("drafter.", config_source, node)
    return Section(name=f"drafter.{kind}", meaning=_first_line(node), options=(*shared, *options))


def _section(name: str, kind: type) -> Section:
    source, node = _source_of(kind)
    prefix = f"{name}." if name else ""
    return Section(name=name, meaning=_first_line(node), options=tuple(_class_options(prefix, source, node)))


def _class_options(prefix: str, source: "_Source", node: ast.ClassDef) -> Iterator[Option]:
    """Yield a class's options, after its bases' options. A list's fields come after the list."""
    for base in node.bases:
        yield from _class_options(prefix, *source.find_class(ast.unparse(base)))
    at_run_time = _run_time_names(source, node)
    for field, meaning in _documented_fields(node):
        hint = source.evaluate(field.annotation)
        if get_origin(hint) is typing.ClassVar or is_dataclass(hint):
            continue
        name = ast.unparse(field.target)
        yield Option(
            name=prefix + name,
            type=plain_words(hint),
            default=_plain(source.default(field.value)),
            meaning=meaning,
            choices=_choices(hint),
            at_run_time=name in at_run_time,
        )
        for part in _parts(hint):
            if isinstance(part, type) and is_dataclass(part):
                yield from _class_options(f"{prefix}{name}[].", *_source_of(part))


def _documented_fields(node: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Yield the annotated fields of a class, each with the docstring under it."""
    for field, following in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign):
            yield field, re.sub(r"\bNone\b", "null", _docstring(following))  # a recipe writes null


def _run_time_names(source: "_Source", node: ast.ClassDef) -> frozenset[str]:
    for field, _ in _documented_fields(node):
        if ast.unparse(field.target) == "RUNTIME_FIELDS" and field.value is not None:
            return source.evaluate(field.value)
    return frozenset()


def _docstring(node: ast.stmt) -> str:
    """Return the text of a docstring, on one line; "" for other statements."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return " ".join(typing.cast(Any, node).value.value.split()) if is_text else ""


def _first_line(node: ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").split("\n\n", maxsplit=1)[0].replace("\n", " ")


class _Source:
    """The source of a module, whose classes and annotations can be read without importing it."""

    def __init__(self, path: Path, names: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self._names = names

    @property
    def names(self) -> Mapping[str, Any]:
        """Values of the names in annotations.

        For a module that isn't imported: types, rules and plain constants. Other names are None.
        """
        if self._names is None:
            self._names = _Lenient({**vars(typing), **vars(pydantic), **vars(option_types), "field": _field})
            for node in self.tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self._names[node.targets[0].id] = self.evaluate(node.value) if _is_plain(node.value) else None
        return self._names

    def evaluate(self, node: ast.expr) -> Any:
        """Return the value of an annotation or of a default."""
        return eval(compile(ast.Expression(node), str(self.path), "eval"), dict(self.names), self.names)

    def default(self, node: ast.expr | None) -> Any:
        """Return the default of a field: MISSING if there is none."""
        if node is None:
            return MISSING
        value = self.evaluate(node)
        if isinstance(value, _Factory):
            return value.make()
        if hasattr(value, "default_factory"):  # dataclasses.field of an imported module
            return value.default_factory()
        return value

    def find_class(self, name: str) -> "tuple[_Source, ast.ClassDef]":
        """Return the class of this name, from this module or from the one it is imported from."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self, node
            if isinstance(node, ast.ImportFrom) and node.level == 1 and name in [alias.name for alias in node.names]:
                return _Source(self.path.parent / f"{node.module}.py").find_class(name)
        raise AssertionError(f"{self.path} has no class {name}")

    def docstrings(self) -> dict[str, str]:
        """Return the docstrings under the module's constants, by name."""
        pairs = zip(self.tree.body, self.tree.body[1:], strict=False)
        return {ast.unparse(node.targets[0]): _docstring(below) for node, below in pairs if isinstance(node, ast.Assign)}


class _Lenient(dict[str, Any]):
    """Names of a module that isn't imported. An unknown name is a rule without a description."""

    def __missing__(self, name: str) -> Any:
        return BUILTINS.get(name)


BUILTINS: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, tuple, frozenset)}


@dataclass(frozen=True)
class _Factory:
    """The value of `field(default_factory=...)` in a module that isn't imported."""

    make: Any


def _field(default_factory: Any) -> _Factory:
    return _Factory(default_factory)


def _is_plain(node: ast.expr) -> bool:
    """Whether an expression has only constants, such as 2**12 or ("exact", "full")."""
    return not any(isinstance(part, ast.Name | ast.Call | ast.Attribute) for part in ast.walk(node))


def _source_of(kind: type) -> "tuple[_Source, ast.ClassDef]":
    path = inspect.getsourcefile(kind)
    assert path is not None
    return _Source(Path(path), vars(sys.modules[kind.__module__])).find_class(kind.__name__)


# --- types in words


def plain_words(hint: Any) -> str:
    """Return a type in plain words, with its bounds: "whole number above 0, or null"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        described = next((rule for rule in arguments[1:] if get_origin(rule) in (list, UnionType)), arguments[0])
        return plain_words(described) + _bounds(tuple(rule for rule in arguments[1:] if rule is not described))
    if origin in (typing.Union, UnionType):
        return ", or ".join(plain_words(part) for part in arguments)
    if origin is list:
        return f"list of {_plural(plain_words(arguments[0]))}"
    if hint is dict or origin is dict or is_dataclass(hint):
        return "mapping"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "text"
    names = {bool: "true or false", int: "whole number", float: "number", str: "text", NoneType: "null", Any: "any value"}
    return names[hint]


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
            if isinstance(rule, kind) and getattr(rule, name) < _NO_LIMIT:
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
    return str(value.value) if isinstance(value, Enum) else value


# --- groups and recipes


@cache
def choices(group: str) -> dict[str, Choice]:
    """Describe the choices of a group, or the launch files (group "launch"), by name."""
    return {
        path.stem: Choice(group=group, name=path.stem, meaning=_head_comment(path), path=path)
        for path in sorted((CONF / group).glob("*.yaml"))
    }


@cache
def recipes() -> dict[str, Recipe]:
    """Describe the recipes that ship with outrider, by name."""
    described = {}
    for name, choice in choices("conf").items():
        chosen = _chosen(CONF / "config.yaml") | _chosen(choice.path)
        described[name] = Recipe(
            name=name,
            summary=choice.summary,
            comment=choice.meaning,
            **{group: chosen[group] for group in ("target", "data", "drafter", "eval")},
            path=choice.path,
        )
    return described


def _chosen(path: Path) -> dict[str, str]:
    """Return the choices in a recipe's defaults list, and in the recipes that it builds on."""
    chosen: dict[str, str] = {}
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults", []):
        if isinstance(entry, dict):
            chosen |= {key.removeprefix("override ").lstrip("/"): str(value) for key, value in entry.items()}
        elif entry in choices("conf"):
            chosen |= _chosen(choices("conf")[entry].path)
    return chosen


def _head_comment(path: Path) -> str:
    """Return the comment at the head of a file, without Hydra's package line."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)
