"""Lines of code in a model card.

They load the target, quantised if the drafter was trained for a quantised one.
"""

import json
from collections.abc import Mapping
from typing import Any

CLASSES = {"bitsandbytes": "BitsAndBytesConfig", "gptq": "GPTQConfig", "awq": "AwqConfig"}
"""Configuration class of transformers by method. torchao's configuration wraps a class of
torchao."""


def quantization_code(options: Mapping[str, Any] | None) -> tuple[str, str]:
    """Write the import lines of a quantisation and its argument of `from_pretrained`.

    Both are empty without a quantisation.
    """
    if not options:
        return "", ""
    arguments = {name: value for name, value in options.items() if name not in ("method", "type")}
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    if options["method"] != "torchao":
        name = CLASSES[options["method"]]
        return f"from transformers import {name}\n", f", quantization_config={name}({written})"
    imports = f"from torchao.quantization import {options['type']}\nfrom transformers import TorchAoConfig\n"
    return imports, f", quantization_config=TorchAoConfig({options['type']}({written}))"


def quantization_option(options: Mapping[str, Any] | None) -> str:
    """Write the --quantization option of a command; empty without a quantisation."""
    return f" --quantization '{json.dumps(options)}'" if options else ""
