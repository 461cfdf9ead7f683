"""Local files and folders in a configuration, to check before torch is loaded."""

from collections.abc import Iterator, Mapping
from glob import has_magic
from pathlib import Path
from typing import Any

from ..data.config import HUB_PREFIX
from ..data.paths import MODEL_PREFIX, TRAINING_FREE_NAMES, NamedPath, built_in_templates, folders_of, models_of, nearest_name
from ..data.raw_records import SUFFIXES as FILE_SUFFIXES
from .config import STAGES

DATA = "an existing file, a folder of files, or a data set id of the Hub (owner/name)"
SUITE_FILE = "an existing file of prompts, or the name of a suite, such as mt_bench"
SUITE_PATH = "an existing file of prompts, or a data set id of the Hub (owner/name)"
MODEL = "a directory with config.json, a GGUF file, or a Hub id (owner/name)"
DRAFTER = "a drafter's folder, or its name on the Hub (user/name)"
ANY_DRAFTER = (
    f"a drafter's folder, its name on the Hub (user/name), {', '.join(TRAINING_FREE_NAMES)}, {MODEL_PREFIX}MODEL, or several "
    "joined by +"
)


ALWAYS_LOCAL = {
    "records": "the folder of an evaluation",
    "run": "the folder of a training run",
    "certificate": "a certificate of `outrider certify`",
    "directories": "the folder of an evaluation",
}
"""Options of commands that name a local file or folder, with their valid values."""


def command_paths(values: Mapping[str, Any]) -> Iterator[NamedPath]:
    """Yield the paths in the configuration of a command, with their options."""
    yield from _path(values, "target", "name_or_path", MODEL)
    if isinstance(target := values.get("target"), str):
        yield NamedPath(option="target", value=target, expected=MODEL)
    yield from _suite_paths(values)
    for name in _list(values, "eval", "baselines"):
        yield from named_models("eval.baselines", str(name))
    for name in _texts(values, "drafter"):
        if "to" in values:  # an export, which is of one trained drafter
            yield NamedPath(option="drafter", value=name, expected=DRAFTER, is_local="/" not in name)
        else:
            yield from named_folders("drafter", name)
    for name in _texts(values, "folder"):
        is_local = "/" not in name
        yield NamedPath(option="folder", value=name, expected="a folder, or its name on the Hub (user/name)", is_local=is_local)
    for name in _texts(values, "chat_template"):
        if name not in (templates := built_in_templates()):
            expected = f"a .jinja file, or one of {', '.join(templates)}"
            yield NamedPath(option="chat_template", value=name, expected=expected, is_local=True)
    for option, expected in ALWAYS_LOCAL.items():
        for name in _texts(values, option):
            yield NamedPath(option=option, value=name, expected=expected, is_local=True)


def no_paths(values: Mapping[str, Any]) -> Iterator[NamedPath]:
    """Yield nothing."""
    yield from ()


def _suite_paths(values: Mapping[str, Any]) -> Iterator[NamedPath]:
    for index, suite in enumerate(_list(values, "eval", "suites")):
        path = suite.get("path") if isinstance(suite, Mapping) else suite
        if isinstance(path, str) and (isinstance(suite, Mapping) or path.endswith(FILE_SUFFIXES)):
            expected = SUITE_PATH if isinstance(suite, Mapping) else SUITE_FILE
            yield NamedPath(option=f"eval.suites[{index}]", value=path, expected=expected)


def _texts(values: Mapping[str, Any], name: str) -> list[str]:
    """Return the value of an option, or the values of a list."""
    value = values.get(name)
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def recipe_paths(values: Mapping[str, Any]) -> Iterator[NamedPath]:
    """Yield the paths that the run's stages read, with their options.

    Skips values of a wrong type: the schema reports them.
    """
    stages = values.get("stages") or STAGES
    yield from _path(values, "target", "name_or_path", MODEL)
    if _get(values, "data", "chat_template") not in (templates := built_in_templates()):
        yield from _path(values, "data", "chat_template", f"a .jinja file, or one of {', '.join(templates)}", is_local=True)
    if "distill" in stages:
        yield from _data_paths(values)
        if isinstance(drafter := _get(values, "distill", "drafter"), str):
            yield from named_folders("distill.drafter", drafter)
    if "eval" in stages or ("distill" in stages and _get(values, "data", "overlap_words") is not None):
        yield from _suite_paths(values)
    for name in _list(values, "eval", "baselines") if "eval" in stages else []:
        yield from named_models("eval.baselines", str(name))
    if "train" in stages:
        yield from _drafter_paths("drafter", values.get("drafter"))
        variants = values.get("variants")
        for name, changes in variants.items() if isinstance(variants, Mapping) else ():
            if isinstance(changes, Mapping):
                yield from _drafter_paths(f"variants.{name}.drafter", changes.get("drafter"))


def _data_paths(values: Mapping[str, Any]) -> Iterator[NamedPath]:
    """Yield the local paths of the data, but patterns, which the run itself looks up."""
    paths = [("data.path", _get(values, "data", "path"))]
    for index, source in enumerate(_list(values, "data", "sources")):
        paths.append((f"data.sources[{index}].path", source.get("path") if isinstance(source, Mapping) else None))
    for option, path in paths:
        if isinstance(path, str) and not path.startswith(HUB_PREFIX) and not has_magic(path):
            yield NamedPath(option=option, value=path, expected=DATA)


def named_folders(option: str, name: str | Path) -> Iterator[NamedPath]:
    """Yield the folders in the name of a drafter (see `data.paths`)."""
    for part in folders_of(name):
        expected = f"{ANY_DRAFTER}{nearest_name(part)}"
        yield NamedPath(option=option, value=part, expected=expected, is_local="/" not in part)
    yield from named_models(option, name)


def named_models(option: str, name: str | Path) -> Iterator[NamedPath]:
    """Yield the models in the name of a drafter that draft as they are."""
    for model in models_of(name):
        yield NamedPath(option=f"{option} {MODEL_PREFIX}", value=model, expected=MODEL, is_local="/" not in model)


def _drafter_paths(option: str, drafter: Any) -> Iterator[NamedPath]:
    if isinstance(drafter, Mapping):
        for name, expected in (("start_from", DRAFTER), ("path", MODEL)):
            if isinstance(drafter.get(name), str):
                yield NamedPath(option=f"{option}.{name}", value=drafter[name], expected=expected)


def _path(values: Mapping[str, Any], section: str, name: str, expected: str, *, is_local: bool = False) -> Iterator[NamedPath]:
    value = _get(values, section, name)
    if isinstance(value, str):
        yield NamedPath(option=f"{section}.{name}", value=value, expected=expected, is_local=is_local)


def _list(values: Mapping[str, Any], section: str, name: str) -> list[Any]:
    value = _get(values, section, name)
    return value if isinstance(value, list) else []


def _get(values: Mapping[str, Any], section: str, name: str) -> Any:
    options = values.get(section)
    return options.get(name) if isinstance(options, Mapping) else None
