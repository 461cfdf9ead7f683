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
FOLDER = "a folder, or its name on the Hub (user/name)"
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


def local_paths(values: Mapping[str, Any]) -> Iterator[NamedPath]:
    """Yield the local files and folders in the configuration of a run or of a command, with their options.

    Skips values of a wrong type: the schema reports them.
    """
    stages = values.get("stages") or STAGES  # a command has none, and reads all that it names
    for option in ("target", "target.name_or_path"):
        yield from _paths(values, option, MODEL)
    for option, expected in ALWAYS_LOCAL.items():
        yield from _paths(values, option, expected, is_local=True)
    for option in ("chat_template", "data.chat_template"):
        if _at(values, option) not in (templates := built_in_templates()):
            yield from _paths(values, option, f"a .jinja file, or one of {', '.join(templates)}", is_local=True)
    if "distill" in stages:
        yield from _data_paths(values)
        for name in _texts(values, "distill.drafter"):
            yield from named_folders("distill.drafter", name)
    if "eval" in stages or ("distill" in stages and _at(values, "data.overlap_words") is not None):
        yield from _suite_paths(values)
    for name in _texts(values, "eval.baselines") if "eval" in stages else ():
        yield from named_models("eval.baselines", name)
    if "train" in stages:
        yield from _drafter_paths(values)
    for name in _texts(values, "folder"):
        yield NamedPath(option="folder", value=name, expected=FOLDER, is_local="/" not in name)


def _suite_paths(values: Mapping[str, Any]) -> Iterator[NamedPath]:
    for index, suite in enumerate(_items(values, "eval.suites")):
        path = suite.get("path") if isinstance(suite, Mapping) else suite
        if isinstance(path, str) and (isinstance(suite, Mapping) or path.endswith(FILE_SUFFIXES)):
            expected = SUITE_PATH if isinstance(suite, Mapping) else SUITE_FILE
            yield NamedPath(option=f"eval.suites[{index}]", value=path, expected=expected)


def _data_paths(values: Mapping[str, Any]) -> Iterator[NamedPath]:
    """Yield the local paths of the data, but patterns, which the run itself looks up."""
    paths = [("data.path", _at(values, "data.path"))]
    for index, source in enumerate(_items(values, "data.sources")):
        paths.append((f"data.sources[{index}].path", _at(source, "path")))
    for option, path in paths:
        if isinstance(path, str) and not path.startswith(HUB_PREFIX) and not has_magic(path):
            yield NamedPath(option=option, value=path, expected=DATA)


def _drafter_paths(values: Mapping[str, Any]) -> Iterator[NamedPath]:
    """Yield the paths of a run's drafters, which are mappings, or in the name of a command's drafter."""
    variants = values.get("variants")
    for option in ("drafter", *(f"variants.{name}.drafter" for name in (variants if isinstance(variants, Mapping) else ()))):
        yield from _paths(values, f"{option}.start_from", DRAFTER)
        yield from _paths(values, f"{option}.path", MODEL)
    for name in _texts(values, "drafter"):
        if "to" in values:  # an export, which is of one trained drafter
            yield NamedPath(option="drafter", value=name, expected=DRAFTER, is_local="/" not in name)
        else:
            yield from named_folders("drafter", name)


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


def _paths(values: Mapping[str, Any], option: str, expected: str, *, is_local: bool = False) -> Iterator[NamedPath]:
    for text in _texts(values, option):
        yield NamedPath(option=option, value=text, expected=expected, is_local=is_local)


def _texts(values: Mapping[str, Any], option: str) -> list[str]:
    """Return the texts of an option: its value, or those of its list."""
    value = _at(values, option)
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _items(values: Mapping[str, Any], option: str) -> list[Any]:
    value = _at(values, option)
    return value if isinstance(value, list) else []


def _at(values: Any, option: str) -> Any:
    """Return the value of an option by its dotted name; None if there is none."""
    for name in option.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values
