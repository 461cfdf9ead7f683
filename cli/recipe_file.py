"""Recipes in the user's own YAML files, made known to Hydra like packaged recipes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .describe import GROUPS, choices, sections
from .describe import recipes as packaged_recipes
from .keys import closest, unknown_keys

SUFFIXES = (".yaml", ".yml")
MAX_BYTES, MAX_VALUES = 1_000_000, 1000
"""Largest recipe file, and most keys and list items in it."""
PATH_OPTIONS = ("path", "name_or_path", "chat_template", "start_from", "certificate")
"""Options that may name a local file, without their sections."""
COMPLETE_WITH = {"target": "name_or_path", "data": "source", "drafter": "kind", "eval": "suites"}
"""A section with this key is complete: it replaces the default choice of its group. A section with a
kind of drafter is put on top of the packaged choice of that name."""


@dataclass(kw_only=True)
class RecipeFile:
    """Content of a recipe's file, with the line of each key."""

    path: Path
    values: dict[str, Any]
    defaults: list[Any]
    """Hydra's defaults list: other recipes first, then the choices of groups."""
    lines: dict[str, int]
    """The line of each key, by its full name."""

    def where(self, name: str) -> str:
        """Return the file's path, and the line of a key if it is known."""
        return f"{self.path}, line {self.lines[name]}" if name in self.lines else str(self.path)

    def drop(self, name: str) -> Any:
        """Remove and return a wrong value, so that the other problems can be found."""
        container: Any = self.values
        *parents, last = (int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", name))
        for part in parents:
            container = container[part]
        value = container.pop(last)
        if isinstance(container, dict) and not container and parents:
            self.drop(".".join(map(str, parents)))
        return value

    def register(self, name: str) -> str:
        """Make the recipe known to Hydra as conf=NAME."""
        node = OmegaConf.create({"defaults": self.defaults, **self.values})
        ConfigStore.instance().store(group="conf", name=name, node=node, package="_global_")
        return name


def find_recipe_file(name: str) -> Path | None:
    """Return the file of conf=NAME, with or without its suffix; None if NAME is no file."""
    path = Path(name).expanduser()
    if not path.name:  # such as `.`
        return None
    candidates = [path] if path.suffix in SUFFIXES else [path.with_name(path.name + suffix) for suffix in SUFFIXES]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def read_recipe_file(path: Path, below: Sequence[str] = ()) -> tuple[RecipeFile, list[str]]:
    """Read a recipe's file. Returns its correct part, and a line for each problem.

    `below` has the names of the recipes below it (conf=[BELOW,FILE]). Raises ValueError if the file
    is not YAML, or not a mapping.
    """
    # 1. Parse the YAML, with the line of each key.
    values, lines = _parse(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a recipe; it must be a mapping of options, such as `train: {{steps: 20}}`")

    # 2. Collect the problems, and remove the wrong values.
    defaults = values.pop("defaults", None) or []
    recipe = RecipeFile(path=path, values=values, defaults=[], lines=lines)
    problems = _wrong_sections(recipe)
    problems += _take_defaults(recipe, defaults if isinstance(defaults, list) else [defaults], below)
    for name, message in unknown_keys({key: value for key, value in values.items() if key != "hydra"}).items():
        problems.append(f"{recipe.where(name)}: {message}")
        if not name.endswith(".kind"):
            recipe.drop(name)
    problems += _misplaced_paths(recipe)
    values.setdefault("name", path.stem)
    return recipe, problems


def _parse(path: Path) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML file, and the line of each key.

    Raises ValueError for a file that isn't YAML, or is far larger than a recipe: a few anchors can
    stand for more values than memory holds, or contain themselves.
    """
    if (num_bytes := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{path} has {num_bytes} bytes, and a recipe at most {MAX_BYTES}; give a recipe's file")
    try:
        text = path.read_text(encoding="utf-8")
        lines = dict(islice(_lines(yaml.compose(text, Loader=yaml.SafeLoader)), MAX_VALUES + 1))
        if len(lines) > MAX_VALUES:
            raise ValueError(f"{path} has more than {MAX_VALUES} values, anchors written out; leave out what isn't an option")
        return OmegaConf.to_container(OmegaConf.create(text)) if lines else None, lines
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file ({error})") from error
    except (RecursionError, OmegaConfBaseException) as error:
        raise ValueError(
            f"{path} is nested too deeply, or has an unclosed ${{...}}; options are at most 5 levels deep"
        ) from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise ValueError(f"{where}: this is not YAML: {problem}") from error


def _wrong_sections(recipe: RecipeFile) -> list[str]:
    """Remove the sections that aren't mappings. Returns a line for each."""
    problems = []
    for name in [name for name in recipe.values if name in {*sections(), "drafter", "variants"}]:
        value = recipe.values[name]
        if not isinstance(value, dict) and value is not None and not str(value).startswith("${"):
            problems.append(f"{recipe.where(name)}: {name} is {value!r}; it must be a mapping such as {{NAME: VALUE}}")
            recipe.drop(name)
    return problems


def _take_defaults(recipe: RecipeFile, entries: list[Any], below: Sequence[str]) -> list[str]:
    """Fill in the recipe's defaults list, in Hydra's order. Returns a line per wrong entry."""
    # 1. Sort the entries: recipes to build on, and choices of groups.
    others: list[Any] = []
    overrides: dict[str, Any] = {}
    problems = []
    for entry in entries:
        pairs = entry.items() if isinstance(entry, dict) else [("conf", entry)]
        for key, value in pairs:
            group = str(key).removeprefix("override ").lstrip("/")
            if group == "conf" and value == "_self_":
                others.append(value)
            elif group not in GROUPS:
                problems.append(f"{recipe.where('defaults')}: there is no group {group!r}; the groups are {', '.join(GROUPS)}")
            elif value is not None and (problem := unknown_choice(group, value)):
                problems.append(f"{recipe.where('defaults')}: {problem}")
            elif group == "conf":
                others.append(value)
            else:
                overrides[f"override /{group}"] = value

    # 2. A complete section of the recipe replaces the choice of its group.
    below = [*below, *(name for name in others if name != "_self_")]
    for group in _complete_sections(recipe.values, below):
        overrides.setdefault(f"override /{group}", _base(group, recipe.values[group]))
    if "_self_" not in others:
        others.append("_self_")
    recipe.defaults = [*others, *({key: value} for key, value in overrides.items())]
    return problems


def _complete_sections(values: Mapping[str, Any], below: Sequence[str]) -> Iterator[str]:
    """Yield the groups whose choice is replaced by a section of the recipe.

    On top of another recipe, a section only changes that recipe's section, unless its kind of
    drafter differs.
    """
    known = packaged_recipes()
    kinds = [known[name].drafter.removesuffix("_demo") for name in below if name in known]
    for group, key in COMPLETE_WITH.items():
        section = values.get(group)
        name = section.get(key) if isinstance(section, dict) else None
        if name is not None and (not below or (group == "drafter" and name not in kinds)):
            yield group


def _base(group: str, section: Mapping[str, Any]) -> str | None:
    """Return the packaged choice below a complete section; None if there is none.

    Only a drafter has one, that of its kind, unless its options are those of another drafter.
    """
    kind = section.get("kind")
    is_new = section.get("start_from") is None and section.get("path") is None
    return kind if group == "drafter" and is_new and kind in choices("drafter") else None


def find_near_file(name: str) -> Path | None:
    """Return the YAML file whose path is almost `name`, such as my.yaml for my.yam."""
    path = Path(name).expanduser()
    files = {file.name: file for suffix in SUFFIXES for file in path.parent.glob(f"*{suffix}")} if path.parent.is_dir() else {}
    close = get_close_matches(path.name, list(files), 1, 0.8)
    return files[close[0]] if close else None


def unknown_choice(group: str, name: Any) -> str | None:
    """Return the message for an unknown choice GROUP=NAME; None if the choice exists."""
    known = list(choices(group))
    if name in known:
        return None
    there_are = f"there are: {', '.join(known)}"
    if group == "conf" and str(name).endswith(SUFFIXES) and not find_near_file(str(name)):
        path = Path(str(name)).expanduser().absolute()
        return f"{group}={name}: there is no file {path}. The recipes are: {', '.join(known)}"
    meant = closest(str(name), known)
    if group == "conf" and (path := Path(str(name)).expanduser()).is_dir():
        return f"{group}={name}: this is a folder; name a recipe's YAML file, such as {path / 'NAME.yaml'}"
    if group == "conf" and (near := find_near_file(str(name))):
        return f"{group}={name}: there is no such file; did you mean {near}?"
    what = "recipe" if group == "conf" else "choice"
    return f"{group}={name}: there is no such {what}; {f'did you mean {group}={meant}? T' if meant else 't'}{there_are[1:]}"


def _lines(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the full name and the line of each key below a node of YAML."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            yield name, key.start_mark.line + 1
            yield from _lines(value, f"{name}.")
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield f"{prefix.removesuffix('.')}[{index}]", value.start_mark.line + 1
            yield from _lines(value, f"{prefix.removesuffix('.')}[{index}].")


def _misplaced_paths(recipe: RecipeFile) -> list[str]:
    """Return a line for each path that exists beside the file, not in the working directory."""
    problems = []
    for name, value in _leaves(recipe.values):
        if not isinstance(value, str) or name.rpartition(".")[2] not in PATH_OPTIONS or "${" in value:
            continue
        if not Path(value).expanduser().exists() and (beside := recipe.path.parent / value).exists():
            problems.append(
                f"{recipe.where(name)}: {name}={value} is beside the recipe, but paths start in the working directory; "
                f"write {beside.resolve()}"
            )
    return problems


def _leaves(values: Mapping[str, Any] | list[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    pairs = values.items() if isinstance(values, Mapping) else ((f"[{index}]", value) for index, value in enumerate(values))
    for key, value in pairs:
        name = f"{prefix.removesuffix('.')}{key}" if isinstance(values, list) else f"{prefix}{key}"
        if isinstance(value, Mapping | list):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value
