"""Entry of train.py and `outrider run`: compose a recipe with Hydra and run its stages.

This module doesn't import torch, so `--help`, `--cfg job` and a mistyped option get an answer at
once.
"""

import re
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..models.drafters.losses import MIXTURE_EXAMPLE
from .arguments import Request, parse_arguments, run_help
from .config import field_problems, missing_values, problem_report, register, to_run_config
from .describe import GROUPS, Option, choices, sections
from .errors import user_errors
from .keys import unknown_keys
from .launch import launch, require_stages
from .recipe_file import RecipeFile, find_recipe_file, read_recipe_file, unknown_choice

register()
WHOLE_OPTIONS = ("train.loss",)
"""Options whose mappings replace the recipe's, where Hydra would merge both."""
LIST_OPTIONS = ("stages", "export.formats", "eval.suites", "eval.temperatures", "eval.batch_sizes")
"""Options whose lists may be written without brackets."""


def main() -> None:
    """Compose the recipe that the command line names, and run it."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        sys.stdout.write(run_help())
        return
    with user_errors():
        # 1. Hydra's own options (--hydra-help, --multirun): Hydra does everything.
        request = parse_arguments(sys.argv[1:])
        if request.hydra_options:
            overrides, _, problems = _take_files(request.overrides)
            if problems:
                raise ValueError(problem_report(problems))
            sys.argv[1:] = [*overrides, *request.hydra_options]
            _compose_and_run()
            return

        # 2. Compose the recipe, and print it if `--cfg job` is given.
        composed = compose(request)
        if request.show:
            sys.stdout.write(OmegaConf.to_yaml(composed, resolve=request.resolve))
            return
        if not any(_key(override) == "conf" for override in request.overrides):
            raise ValueError(
                f"no recipe is given; name one (outrider run demo) or a YAML file. There are: {', '.join(choices('conf'))}. "
                "`outrider init my.yaml --target DIR_OR_ID --data FILE` writes one for your own model and data"
            )
        config = to_run_config(composed)  # checked before torch is imported

        # 3. Run it, in processes of accelerate if `--launch` is given.
        from .run import require_inputs, run  # imports torch, transformers and all stages

        if request.launch is not None:
            require_inputs(config)  # here, so that a mistake is printed once
            require_stages(request.launch, request.launch_options, config.target)
            launch(request.launch, request.launch_options, ["outrider.train", *request.overrides])
        run(config)


def compose(request: Request) -> DictConfig:
    """Compose a recipe.

    Raises one ValueError with all wrong keys, choices and values, before torch is imported.
    """
    unreadable = {override: problem for override in request.overrides if (problem := _unreadable(override))}
    named, files, problems = _take_files([override for override in request.overrides if override not in unreadable])
    problems += unreadable.values()
    overrides = []
    for override in named:
        group, _, value = override.partition("=")
        is_choice = group in GROUPS and group != "conf" and not value.startswith(("[", "{", "null"))
        if is_choice and (problem := unknown_choice(group, value)):
            problems.append(problem)
        else:
            if group.lstrip("+") in WHOLE_OPTIONS and value.startswith("{"):
                overrides.append(f"++{group.lstrip('+')}=null")
            overrides.append(_forced(override))
    composed, wrong_values = _compose_what_can_be(overrides, files)
    values: Any = OmegaConf.to_container(composed, enum_to_str=True)
    unknown = unknown_keys(values)
    for name, message in unknown.items():
        where = next((f"{file.where(name)}: " for file in files.values() if name in file.lines), "")
        problems.append(f"{where}{message}")
    problems += wrong_values.values()
    problems += [problem for option in WHOLE_OPTIONS if (problem := _lost_value(option, values, request.overrides))]
    if problems:
        missing = missing_values(composed)
        problems += [missing[name] for name in missing if name not in wrong_values]
        if not missing:  # what is wrong with the values that have the right type
            problems += [line for line in _field_problems(composed) if re.split("[=:]", line)[0] not in unknown]
        raise ValueError(problem_report(problems))
    return composed


def _lost_value(option: str, values: dict[str, Any], overrides: list[str]) -> str | None:
    """Return the message for overrides of a mapping's parts that alone make the mapping.

    The recipe's value was a name then, and nobody asked to drop it.
    """
    section, _, name = option.partition(".")
    parts = [_key(override).removeprefix(f"{option}.") for override in overrides if _key(override).startswith(f"{option}.")]
    made = values.get(section, {}).get(name)
    if not parts or not isinstance(made, dict) or set(made) != set(parts):
        return None
    return f"{option}.{parts[0]} leaves nothing else of {option}; give the whole mixture, such as '{option}={MIXTURE_EXAMPLE}'"


def _field_problems(composed: DictConfig) -> list[str]:
    try:
        values: Any = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    except OmegaConfBaseException:  # an interpolation without a value, maybe because of another problem
        return []
    return field_problems(values)


def _take_files(overrides: list[str]) -> tuple[list[str], dict[str, RecipeFile], list[str]]:
    """Read the recipes that are files.

    Returns the overrides with a name in place of each file, the files by these names, and a line
    for each problem.
    """
    # 1. Recipes are in conf=NAME or conf=[NAME,NAME]; other overrides stay.
    recipe_values = [override.partition("=")[2] for override in overrides if override.startswith("conf=")]
    if len(recipe_values) > 1:
        stacked = ",".join(value.strip("[]") for value in recipe_values)
        raise ValueError(
            f"{len(recipe_values)} recipes are on the command line: {', '.join(recipe_values)}. Give one, or "
            f"conf=[{stacked}] to put the later on top of the earlier"
        )
    named: list[str] = []
    files: dict[str, RecipeFile] = {}
    problems: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key != "conf":
            named.append(override)
            continue

        # 2. Read each recipe that is a file, and give it a name for Hydra.
        is_list = value.startswith("[")
        recipes: Any = OverridesParser.create().parse_override(override).value() if is_list else [value]
        chosen: list[str] = []
        for recipe in recipes:
            path = None if recipe in choices("conf") else find_recipe_file(str(recipe))
            if path is not None:
                name = f"file_{len(files)}"
                files[name], wrong = read_recipe_file(path, below=chosen)
                problems += wrong
                chosen.append(name)
            elif problem := unknown_choice("conf", recipe):
                problems.append(problem)
            else:
                chosen.append(str(recipe))
        if chosen:
            named.append(f"conf=[{','.join(chosen)}]" if is_list else f"conf={chosen[0]}")
    return named, files, problems


def _unreadable(override: str) -> str | None:
    """Return the message for an override that Hydra's grammar can't read; None if it can."""
    key, _, value = override.partition("=")
    if key == "conf" and not value.startswith("["):  # a path may have any characters
        return None
    try:
        is_sweep = OverridesParser.create().parse_override(_forced(override)).is_sweep_override()
    except (HydraException, RecursionError):
        opened = value.lstrip().startswith(("[", "{"))
        quoted = "close each bracket and quote" if opened else f"""put a text in quotes: '{key}="{value}"'"""
        return f"{_key(override)} is {value}, which can't be read; {quoted}"
    if is_sweep:
        return f"""{_key(override)} is {value}: several values; write a list as [{value}], a text as '{key}="{value}"'"""
    return None


def _compose_what_can_be(overrides: list[str], files: dict[str, RecipeFile]) -> tuple[DictConfig, dict[str, str]]:
    """Compose without the values that the schema rejects.

    Returns the composed configuration, and a message for each rejected value by its option.
    """
    wrong: dict[str, str] = {}
    while True:
        for label, recipe in files.items():
            recipe.register(label)
        try:
            with hydra.initialize_config_module("outrider.conf", version_base="1.3"):
                return hydra.compose("config", overrides=overrides), wrong
        except (HydraException, OmegaConfBaseException) as error:
            key_line = re.search(r"full_key: (\S+)", f"{error}\n{error.__cause__}")
            name = key_line[1] if key_line else ""
            culprit = next((override for override in overrides if str(error) == f"Error merging override {override}"), None)
            file = next((file for file in files.values() if name in file.lines), None)
            if culprit is not None:
                overrides.remove(culprit)
                key, value = _key(culprit), OverridesParser.create().parse_override(culprit).value()
                wrong |= unknown_keys(_nested(key, value)) or {key: _wrong_value(key, value)}
            elif file is not None and name not in wrong:
                wrong[name] = f"{file.where(name)}: {_wrong_value(name, file.drop(name))}"
            else:
                raise ValueError(_in_our_words(error, files)) from error


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return the configuration that has only this value, such as {train: {steps: 20}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _wrong_value(name: str, value: Any) -> str:
    """Return the message for a value that doesn't have its option's type."""
    options: dict[str, Option] = {option.name: option for section in sections().values() for option in section.options}
    option = options.get(name)
    if option is None:
        return f"{name} is {value!r}; it must be a section of options, such as {name}.OPTION=VALUE"
    rule = f"one of {', '.join(option.choices)}" if option.choices else option.type
    return f"{name} is {value!r}; it must be: {rule} (outrider options {name})"


def _in_our_words(error: Exception, files: dict[str, RecipeFile]) -> str:
    """Return Hydra's message with the user's file names, without advice about internals."""
    if isinstance(error, OverrideParseException):
        return f"{error.override.removeprefix('++')} can't be read: {str(error).splitlines()[0]}"
    text = str(error) if error.__cause__ is None else f"{error} ({str(error.__cause__).splitlines()[0]})"
    for name, file in files.items():
        text = text.replace(f"conf/{name}", str(file.path))
    return text.partition("\nSee https")[0]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _forced(override: str) -> str:
    """Put `++` before an override, so that Hydra accepts an unknown key.

    All unknown keys are then reported at once, after composing. A list of texts needs no brackets,
    which some shells expand: stages=distill,train. `~/` becomes the home directory.
    """
    key, separator, value = override.partition("=")
    key = key.lstrip("+~")
    if override.startswith("~") or key in GROUPS or "@" in key or key.startswith("hydra"):
        return override
    value = re.sub(r"(^|(?<=[\[,:\s]))~(?=/)", str(Path.home()), value)  # Hydra's grammar has no such sign
    if separator and key in LIST_OPTIONS and value and not value.startswith(("[", "{", "$", "null")):
        value = f"[{value}]"
    return f"++{key}{separator}{value}"


@hydra.main(version_base="1.3", config_path="pkg://outrider.conf", config_name="config")
def _compose_and_run(composed: DictConfig) -> None:
    with user_errors():
        config = to_run_config(composed)
        from .run import run  # imports torch, transformers and all stages

        run(config)
