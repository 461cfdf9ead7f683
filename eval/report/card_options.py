"""Checks of the options in a model card, and the names and lines of code in it.

The code loads the target, quantised if the drafter was trained for a quantised one.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...data.manifest import TargetIdentity
from ...models.export.package import UNNAMED, UNNAMED_TARGET
from ...models.llm.config import check_method
from ..results.markdown import Markdown

LOCAL_TARGET = "path/to/target"
"""Path in a card's code that the reader must set."""
PLAIN_WORD = re.compile(r"[\w./:+-]*")
"""Options as words: kinds, names of layers, Hub ids and paths."""
TAGS = ("custom_generate", "speculative-decoding", "outrider")
CLASSES = {"bitsandbytes": "BitsAndBytesConfig", "gptq": "GPTQConfig", "awq": "AwqConfig"}
"""Configuration class of transformers by method. torchao's configuration wraps a class of
torchao."""


def require_plain_options(options: Any, source: Path, name: str = "drafter") -> None:
    """Raise ValueError if option `name` of a drafter, or a part of it, would be code in a card.

    Numbers, plain words and collections of them are safe. (Reading the kind's own types would import
    all model libraries, and a card needs none of them.)
    """
    if isinstance(options, Mapping):
        require_plain_options(list(options), source, name)
        for key, value in options.items():
            require_plain_options(value, source, key)
    elif isinstance(options, list):
        for value in options:
            require_plain_options(value, source, name)
    elif isinstance(options, str) and PLAIN_WORD.fullmatch(options) is None:
        raise ValueError(
            f"{source}: the option {name} is {options[:80]!r}, which is no plain word; a model card would contain it as a part "
            "of a command. Correct the folder's config.json, or copy the drafter again"
        )


def code_names(
    repo: str | None, base_model: str | None, local_name: str, quantization: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Collect the names and lines of the card's code and commands.

    They are checked (`require_names`), so nothing in them is escaped.
    """
    was_named = f"; it was named {local_name} in training" if local_name else ""
    imports, argument = quantization_code(quantization)
    texts = {
        "target_name": base_model or LOCAL_TARGET,
        "target_note": "" if base_model else f"  # {UNNAMED_TARGET}{was_named}",
        "drafter_name": repo or ".",
        "drafter_note": "" if repo else f"  # {UNNAMED}",
        "quantization_imports": imports,
        "quantization_argument": argument,
        "quantization_option": quantization_option(quantization),
    }
    return {name: Markdown(text) for name, text in texts.items()}


def recorded_quantization(target: TargetIdentity) -> dict[str, Any] | None:
    """Return the options with which a drafter's target was quantised; None if it wasn't.

    Raises ValueError for options that aren't those of a quantisation: they would be code.
    """
    if not target.quantization:
        return None
    try:
        options: dict[str, Any] = check_method(json.loads(target.quantization))
    except ValueError as error:
        raise ValueError(
            f"the quantization of the drafter's target can't be read ({error}); restore its config.json"
        ) from error
    return options


def quantization_code(options: Mapping[str, Any] | None) -> tuple[str, str]:
    """Write the import lines of a quantisation and its argument of `from_pretrained`.

    Both are empty without a quantisation.
    """
    if not options:
        return "", ""
    arguments = {name: value for name, value in options.items() if name not in ("method", "type")}
    if unnamed := [name for name in (*arguments, options.get("type", "type")) if not str(name).isidentifier()]:
        raise ValueError(f"the quantization has the option {unnamed[0]!r}, which is no name; give options of transformers")
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    if options["method"] != "torchao":
        name = CLASSES[options["method"]]
        return f"from transformers import {name}\n", f", quantization_config={name}({written})"
    imports = f"from torchao.quantization import {options['type']}\nfrom transformers import TorchAoConfig\n"
    return imports, f", quantization_config=TorchAoConfig({options['type']}({written}))"


def quantization_option(options: Mapping[str, Any] | None) -> str:
    """Write the --quantization option of a command; empty without a quantisation."""
    return f" --quantization {shlex.quote(json.dumps(options))}" if options else ""
