"""Rendering of a model card, and lines of code in it.

They load the target, quantised if the drafter was trained for a quantised one.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ...data.manifest import TargetIdentity
from ...models.llm.quantization import check_method
from ..results.markdown import Markdown, render

CLASSES = {"bitsandbytes": "BitsAndBytesConfig", "gptq": "GPTQConfig", "awq": "AwqConfig"}
"""Configuration class of transformers by method. torchao's configuration wraps a class of
torchao."""


def render_card(template: str, metadata: ModelCardData, **values: Any) -> str:
    """Render a card with its metadata; every text among the values is escaped (`markdown.render`)."""
    return f"{ModelCard(render(template, card_data=Markdown(metadata.to_yaml()), **values))}\n"


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
