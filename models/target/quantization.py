"""Targets in few bits, by transformers' own quantisers: what an option asks for, and whether the packages for it are there."""

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
"""What each method is computed by, under the names that are both imported and installed."""


def check_method(options: Any) -> Any:
    """Return options that have a known `method`, or None. Raises ValueError for others."""
    method = options.get("method") if isinstance(options, Mapping) else None
    if options is not None and method not in PACKAGES:
        raise ValueError(
            f"the quantization {options} needs a method of {', '.join(PACKAGES)}, as in "
            "{method: bitsandbytes, load_in_4bit: true} or {method: torchao, type: Int8WeightOnlyConfig}"
        )
    return options


def require_packages(method: str) -> None:
    """Raise ValueError, with the command that installs them, where packages of a method are absent."""
    missing = [name for name in PACKAGES.get(method, ()) if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"a target quantised by {method} needs packages that aren't installed: pip install {' '.join(missing)}"
        )


def stored_method(name_or_path: str) -> str | None:
    """The method that the weights in a directory were quantised by; None where they weren't, or it isn't a directory."""
    path = Path(name_or_path) / "config.json"
    if not path.is_file():
        return None
    stored = json.loads(path.read_text()).get("quantization_config")
    return None if stored is None else str(stored.get("quant_method", "bitsandbytes"))  # which once didn't say so


def describe(options: Mapping[str, Any] | None) -> str:
    """The options in one line, the same for the same options: a part of a target's identity. Empty without any."""
    return "" if options is None else json.dumps(dict(options), sort_keys=True)


def make_config(options: Mapping[str, Any]) -> Any:
    """transformers' configuration of these options, which but for `method` are its own.

    torchao's are a `type`, the name of a configuration of `torchao.quantization`, and that one's options. Raises ValueError for
    options that there aren't, and where packages are absent.
    """
    check_method(options)
    require_packages(options["method"])
    from transformers import AwqConfig, BitsAndBytesConfig, GPTQConfig, TorchAoConfig  # they look for their packages

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
        raise ValueError(f"target.quantization: {kind.__name__} refuses {dict(options)}: {error}") from error
