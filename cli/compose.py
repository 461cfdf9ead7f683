"""Composition of a recipe: a packaged one by Hydra, then the user's file, then the command line.

This module doesn't import torch, so a mistyped option gets an answer at once.
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..data.paths import expand_home
from .build import build, field_problems, problem_report
from .command_line import CommandLine, merged, read_command_line
from .config import RECIPE_COMMANDS, ForecastOptions, RunConfig, RunOptions
from .describe import GROUPS, choices, recipe_sections, sections_of
from .errors import user_errors
from .help import command_help
from .launch import launch, require_stages

SUFFIXES = (".yaml", ".yml")
DEMO_TARGET = Path(__file__).parents[1] / "models" / "demo_target"


def main() -> None:
    """Run the recipe that the command line of train.py names."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(command_help("run", show_all="--all" in sys.argv), end="")
        return
    with user_errors():
        run_command(sys.argv[1:])


def run_command(arguments: Sequence[str]) -> None:
    """Compose a recipe, and run it, in processes of accelerate if `--launch` is given."""
    # 1. Compose the recipe, and print it if that is asked for.
    line = read_run_line(arguments)
    composed = compose_named(line)
    if line.values.get("show"):
        print(OmegaConf.to_yaml(OmegaConf.create(composed.values)), end="")
        composed.require_options()
        return
    config, plan = composed.config(), line.values.get("plan", False)  # checked before torch is imported

    # 2. Run it.
    from .run import require_inputs, run  # imports torch, transformers and all stages

    if line.launch is not None:
        require_inputs(config, plan=plan)  # here, so that a mistake is printed once
        require_stages(line.launch, line.launch_options, config.target)
        launch(line.launch, line.launch_options, ["outrider.train", *line.own])
    run(config, plan=plan)


def forecast_command(arguments: Sequence[str]) -> None:
    """Compose a recipe, and forecast what its drafters will be worth."""
    line = read_run_line(arguments, ForecastOptions)
    config = compose_named(line).config()
    from .forecast import forecast  # imports torch, transformers and the stages

    forecast(config, line.values.get("minutes", ForecastOptions.minutes))


def compose_named(line: CommandLine) -> "Composed":
    """Compose the recipe of a command line. Raises ValueError if none is named."""
    if not line.values["conf"]:
        if line.problems:  # a mistyped option may have taken the recipe's name
            raise ValueError(problem_report(line.problems))
        raise ValueError(
            f"no recipe is given; name one (outrider run demo) or a YAML file. There are: {', '.join(choices('conf'))}. "
            "`outrider init my.yaml --target DIR_OR_ID --data FILE` writes one for your own model and data"
        )
    return compose(line)


def read_run_line(arguments: Sequence[str], command: type = RunOptions) -> CommandLine:
    """Sort the arguments of `outrider run`, or of another command on recipes. Words are recipes: `demo` is conf=demo.

    Raises ValueError for wrong values of the command's own options.
    """
    line = read_command_line(arguments, recipe_sections(command), launches=command is RunOptions, groups=GROUPS[:-1])
    own = {option.name: line.values[option.name] for option in sections_of(command)[""].options if option.name in line.values}
    if problems := field_problems(command, own):
        raise ValueError(problem_report([*line.problems, *problems]))
    words = [word for text in line.words for word in text.strip("[]").split(",")]
    line.values["conf"] = [*line.values.get("conf", []), *words]
    return line


def load_recipe(*arguments: str) -> RunConfig:
    """Return the configuration that `outrider run` would run with these arguments."""
    return compose(read_run_line(arguments)).config()


@dataclass(frozen=True)
class Composed:
    """A composed recipe."""

    values: dict[str, Any]
    """Its options, of which some may be wrong or missing."""
    mistakes: list[str]
    """Problems of the user's arguments and files besides wrong values, such as an unknown recipe."""

    def config(self) -> RunConfig:
        """Return the configuration. Raises one ValueError with all problems, each under its option's full name."""
        if self.mistakes:
            self.require_options()
        return build(RunConfig, self.values, self.missing())

    def require_options(self) -> None:
        """Raise the ValueError of `config` without what needs torch, or files of this machine."""
        problems = field_problems(RunConfig, self.values)
        if self.mistakes:  # where a recipe doesn't exist, its options would be reported as missing
            problems = [line for line in problems if " is missing; give " not in line and '="???"' not in line]
        if problems := [*(self.mistakes or self.missing()), *problems]:
            raise ValueError(problem_report(problems))

    def missing(self) -> list[str]:
        """Return a line for each option that a packaged file leaves to the user (`???`)."""
        return [f"{name} is missing; give {name}=VALUE" for name in sorted(OmegaConf.missing_keys(self.values))]


def compose(line: CommandLine) -> Composed:
    """Compose a recipe from its layers: packaged recipes and choices, then files, then the command line."""
    # 1. Sort the layers.
    own = {option.name for command in RECIPE_COMMANDS.values() for option in sections_of(command)[""].options}
    layers = Layers(problems=list(line.problems))
    for recipe in line.values["conf"]:
        layers.add_recipe(recipe)
    chosen = {group: line.values[group] for group in GROUPS[:-1] if isinstance(line.values.get(group), str)}
    layers.add(dict(chosen))
    layers.add(line.nested(without=[*chosen, *own]), replaced={"variants"} & line.values.keys())

    # 2. Put them on top of each other.
    values = packaged(layers)
    for layer in layers.values:
        values = on_top(values, layer)
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:  # an interpolation without a value, maybe because of another problem
        text = f"{error.full_key}: {str(error.msg or error).splitlines()[0]}"
        raise ValueError(problem_report(layers.problems or [text])) from None
    return Composed(resolved, layers.problems)


def packaged(layers: "Layers") -> dict[str, Any]:
    """Compose the packaged recipes and choices by Hydra."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    OmegaConf.register_new_resolver("demo_target", lambda: str(DEMO_TARGET), replace=True)
    overrides = [*(f"{group}={name}" for group, name in layers.chosen.items()), f"conf=[{','.join(layers.packaged)}]"]
    with initialize_config_module("outrider.conf", version_base="1.3"):
        values: Any = OmegaConf.to_container(hydra_compose("config", overrides=overrides))
    return dict(values)


@dataclass
class Layers:
    """The parts of a recipe, from the lowest to the highest."""

    packaged: list[str] = field(default_factory=list)
    """Recipes that ship with outrider."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Packaged choices by group: {"drafter": "medusa"}."""
    values: list[dict[str, Any]] = field(default_factory=list)
    """Contents of files and of the command line."""
    problems: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    """Files that are read."""

    def add_recipe(self, name: str) -> None:
        """Add a packaged recipe, or a file with what its `base` names below it: recipes and choices."""
        path = None if name in choices("conf") else find_recipe_file(name)
        if path is None:
            if problem := unknown_choice("conf", name):
                self.problems.append(problem)
            elif self.values:
                self.problems.append(f"conf has {name} after a file; name recipes that ship with outrider first")
            else:
                self.packaged.append(name)
            return
        if path in self.files:
            self.problems.append(f"{path} is built on itself; change its base")
            return
        self.files.append(path)
        values = read_recipe_file(path)
        base = values.pop("base", None)
        for below in [] if base is None else base if isinstance(base, list) else [base]:
            group, is_choice, choice = str(below).partition("=")
            if not isinstance(below, str) or (is_choice and group not in GROUPS[:-1]):
                self.problems.append(
                    f"{path}: base={json.dumps(below, default=str)}: must be a recipe, a file, or a choice of "
                    f"{', '.join(GROUPS[:-1])} (drafter=eagle3), or a list of them; other options stand beside base"
                )
            elif is_choice:
                self.add({group: choice})
            else:
                self.add_recipe(group)
        self.add({"name": path.stem, **values}, replaced={"variants"} & values.keys())

    def add(self, values: dict[str, Any], replaced: Collection[str] = ()) -> None:
        """Add values. A name in place of a section is a packaged choice: {"drafter": "medusa"}.

        Nothing below stays of the sections that are `replaced`; others are merged.
        """
        self.values.append(dict.fromkeys(replaced))
        for group in GROUPS[:-1]:
            if isinstance(name := values.get(group), str):
                del values[group]
                if problem := unknown_choice(group, name):
                    self.problems.append(problem)
                else:
                    self.chosen[group] = name
        self.values.append(values)


def on_top(below: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Put values on top of a configuration.

    A drafter of another kind inherits no options of the one below.
    """
    below = dict(below)
    drafter = values.get("drafter")
    kind = drafter.get("kind") if isinstance(drafter, Mapping) else None
    if kind is not None and isinstance(below.get("drafter"), Mapping) and kind != below["drafter"].get("kind"):
        below["drafter"] = {}
    return merged(below, values)


def find_recipe_file(name: str) -> Path | None:
    """Return the file of a recipe, named with or without its suffix; None if there is none."""
    path = Path(expand_home(name))
    candidates = [path] if path.suffix in SUFFIXES else [path.parent / f"{path.name}{suffix}" for suffix in SUFFIXES]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def read_recipe_file(path: Path) -> dict[str, Any]:
    """Read a recipe's file. Raises ValueError for a file that isn't a mapping in YAML."""
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, RecursionError, OSError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{path}{f', line {mark.line + 1}' if mark else ''}: this is not YAML: {problem}") from error
    if not isinstance(values, dict) or not values:
        raise ValueError(f"{path} is not a recipe; it must be a mapping of options, such as `train: {{steps: 20}}`")
    return {str(key): value for key, value in values.items()}


def unknown_choice(group: str, name: str) -> str | None:
    """Return the message for an unknown choice GROUP=NAME; None if the choice exists."""
    known = list(choices(group))
    if name in known:
        return None
    path = Path(expand_home(name))
    close = get_close_matches(name, known, 1) or (_near_files(path) if group == "conf" else [])
    meant = f"did you mean {group}={close[0]}? T" if close else "t"
    what = f"there is no file {path.absolute()}" if path.suffix in SUFFIXES else "there is no such choice"
    return f"{group}={name}: {what}; {meant}here are: {', '.join(known)}"


def _near_files(path: Path) -> list[str]:
    """Return the YAML file whose name is almost that of a path, such as my.yaml for my.yam."""
    names = [file.name for suffix in SUFFIXES for file in path.parent.glob(f"*{suffix}")] if path.parent.is_dir() else []
    return [str(path.parent / name) for name in get_close_matches(path.name, names, 1, 0.8)]
