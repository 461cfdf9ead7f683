"""Lines of code in a model card.

How its target is loaded, quantised where the drafter was trained for that.
"""

import json
from collections.abc import Mapping
from typing import Any

CLASSES = {"bitsandbytes": "BitsAndBytesConfig", "gptq": "GPTQConfig", "awq": "AwqConfig"}
"""transformers' configuration by method. That of torchao holds one of torchao's own."""


def quantization_code(options: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the import lines of a quantisation and its argument of `from_pretrained`.

    Both empty without one.
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
    """Return the --quantization option of a command; empty without one."""
    return f" --quantization '{json.dumps(options)}'" if options else ""
