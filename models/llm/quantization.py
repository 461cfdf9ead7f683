"""Targets in few bits, quantised by transformers: checks of options and packages."""

import inspect
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = {
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
}
"""Packages that each method needs; each is imported and installed under the same name."""


DEFAULTS: dict[str, dict[str, Any]] = {
    "torchao": {"method": "torchao", "type": "Int8WeightOnlyConfig"},
    "bitsandbytes": {"method": "bitsandbytes", "load_in_4bit": True},
}
"""Options that the name of a method alone stands for."""


def check_method(options: Any) -> Any:
    """Return options with a known `method`, or None; the name of a method stands for its usual options.

    Raises ValueError for other options.
    """
    if isinstance(options, str) and options in DEFAULTS:
        return DEFAULTS[options]
    method = options.get("method") if isinstance(options, Mapping) else None
    if options is not None and method not in PACKAGES:
        raise ValueError(
            f"the quantization {options} needs a method of {', '.join(PACKAGES)}, as in "
            "{method: bitsandbytes, load_in_4bit: true} or {method: torchao, type: Int8WeightOnlyConfig}"
        )
    return options


def require_packages(method: str) -> None:
    """Raise ValueError, with the command to install them, if packages of a method are missing."""
    missing = [name for name in PACKAGES.get(method, ()) if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"a target quantised by {method} needs packages that aren't installed: pip install {' '.join(missing)}"
        )


def stored_method(name_or_path: str) -> str | None:
    """Return the method by which a directory's weights are quantised, or None.

    None if they aren't quantised or `name_or_path` is no directory.
    """
    path = Path(name_or_path) / "config.json"
    if not path.is_file():
        return None
    stored = json.loads(path.read_text()).get("quantization_config")
    # Old files lack the key.
    return None if stored is None else str(stored.get("quant_method", "bitsandbytes"))


def describe(options: Mapping[str, Any] | None) -> str:
    """Return the options as one line of JSON, for a target's identity; empty without options."""
    return "" if options is None else json.dumps(dict(options), sort_keys=True)


def make_config(options: Mapping[str, Any]) -> Any:
    """Build transformers' quantisation configuration from options.

    Apart from `method`, the options are those of transformers. For torchao the options are a
    `type`, the name of a configuration class of `torchao.quantization`, and the options of that
    class. Raises ValueError for unknown options and missing packages.
    """
    check_method(options)
    require_packages(options["method"])
    # Imports optional packages.
    from transformers import AwqConfig, BitsAndBytesConfig, GPTQConfig, TorchAoConfig

    method_options = {name: value for name, value in options.items() if name != "method"}
    if options["method"] != "torchao":
        classes: dict[str, Any] = {"bitsandbytes": BitsAndBytesConfig, "gptq": GPTQConfig, "awq": AwqConfig}
        return _make(classes[options["method"]], method_options)
    import torchao.quantization

    name = method_options.pop("type", None)
    kind = getattr(torchao.quantization, str(name), None)
    if not str(name).endswith("Config") or kind is None:
        raise ValueError(
            f"target.quantization.type is {name!r}; name a configuration of torchao.quantization, such as Int8WeightOnlyConfig"
        )
    return TorchAoConfig(_make(kind, method_options))


def _make(kind: Any, options: Mapping[str, Any]) -> Any:
    known = [name for name in inspect.signature(kind).parameters if name != "kwargs"]
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(f"target.quantization has {', '.join(unknown)}; {kind.__name__} takes {', '.join(known)}")
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"target.quantization: {kind.__name__} doesn't accept {dict(options)}: {error}") from error
