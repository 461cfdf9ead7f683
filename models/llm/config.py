"""Configuration of the target: which model to load, and how; and checks of its quantisation."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveFloat
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ...data.fields import OPTIONS, PositiveInt, one_of

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
    """Build transformers' quantisation configuration from a target's options, whose method is known.

    Apart from `method`, the options are those of transformers. For torchao the options are a
    `type`, the name of a configuration class of `torchao.quantization`, and the options of that
    class. Raises ValueError for unknown options and missing packages.
    """
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


AUTO = "auto"


def check_device_map(value: Any) -> Any:
    """Return None, `auto`, or a mapping of module names to devices. Raises an error for other values."""
    if value is None or value == AUTO:
        return value
    is_named = isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value)
    if is_named and all(type(device) is int or isinstance(device, str) for device in value.values()):
        return dict(value)
    raise PydanticCustomError(
        "device_map", "must be auto, or a mapping of module names to devices, such as {'': 0, model.layers.20: 1}"
    )


DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(kw_only=True, config=OPTIONS)
class TargetConfig:
    """The frozen target model."""

    name_or_path: str
    """Hub id, a directory with `config.json`, weights and tokenizer, or a GGUF file: its weights are
    dequantised once, into a cache. `package:REQUIREMENT/FILE.gguf` is a file in an installed Python
    package."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; None is the default branch."""
    dtype: Annotated[str, one_of(*DTYPES)] | None = "auto"
    """Type of the weights and of the computation; `auto` keeps the stored type. None: float32 on a
    CPU, where only it reproduces the same tokens exactly, else as stored."""
    attn_implementation: Annotated[str, one_of("sdpa", "eager")] = "sdpa"
    """Attention function of transformers, sdpa or eager: both support the 4-D masks of draft
    trees."""
    compiled: bool = False
    """Run passes over draft trees through `torch.compile`: minutes at the start, then faster
    steps."""
    cuda_graphs: bool = False
    """Replay passes over draft trees as CUDA graphs: a step then costs no Python time. Needs a CUDA
    device."""
    fast_linears: bool = True
    """On a CPU, while decoding: compute the largest linear layers in the way that is fastest on this
    machine, by a measurement of a second or two at the run's start. The drafters and plain decoding get
    the same choice. Packed copies may need the weights' memory a second time. A single row may be
    computed with PyTorch's oneDNN switched off, for all threads of the process."""
    device: str | None = None
    """For example `cuda:1`. None: the launcher's device, else the first accelerator, else the
    CPU."""
    device_map: Annotated[Any, AfterValidator(check_device_map)] = None
    """Divide the layers over several devices of this process, for a target that doesn't fit on one:
    `auto` divides them among all accelerators by free memory. A mapping names the devices, as in
    transformers: {'': 0, model.layers.20: 1}. Embeddings, norm and head share a device. Evaluation
    supports this; labelling and training have `tensor_parallel`."""
    quantization: Annotated[Any, AfterValidator(check_method)] = None
    """Quantise the weights while loading: a `method` (bitsandbytes, torchao, gptq or awq) and its
    options. The options are those of transformers, such as {method: bitsandbytes, load_in_4bit:
    true} or {method: torchao, type: Int8WeightOnlyConfig}, for which `bitsandbytes` and `torchao`
    alone stand. Leave this out if the stored weights are
    quantised already. A quantised target is a different target: label the training data with it
    too."""
    tensor_parallel: bool = False
    """Slice one copy of the target over all processes of the launch, if it doesn't fit on one
    device. Labelling and training support this (see `tensor_parallel`). Evaluation runs in one
    process, which can hold such a target with `device_map`."""
    memory_budget_gib: PositiveFloat | None = None
    """Most memory for weights, and for keys and values, in GiB. Layers that don't fit are read from
    the safetensors files in every pass, ahead of their turn. None loads all weights."""
    budget_tokens: PositiveInt = 4096
    """Tokens of all rows together, draft trees included, whose keys and values count into
    `memory_budget_gib`. Longer batches are refused."""
    stage_layers: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    """Divide the target over processes of a launch: numbers of layers, one for each stage, such as
    [8, 8, 8, 8] for a model of 32 layers. One more process, the head, has embeddings, norm, output
    embeddings and the drafter. Each process reads its own weights only. Evaluation supports this
    (see `eval.decode`); labelling and training need all layers in one process."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the weights. Turn it on only after you have read that
    code."""

    tokenizer_options: dict[str, Any] = field(default_factory=dict)
    """Options of the tokenizer's `from_pretrained` that old checkpoints need, such as `{legacy:
    true}`."""

    def __post_init__(self) -> None:
        recorded = ("compiled", "cuda_graphs")
        clashes = {
            "device_map": (*recorded, "device", "tensor_parallel", "memory_budget_gib", "stage_layers"),
            "stage_layers": (*recorded, "quantization", "tensor_parallel", "memory_budget_gib"),
            "tensor_parallel": (*recorded, "device", "quantization"),
            "memory_budget_gib": (*recorded, "quantization", "tensor_parallel"),
        }
        for name, others in clashes.items():
            value, clashing = getattr(self, name), [other for other in others if getattr(self, other)]
            if value not in (None, False) and clashing:
                what = name if value is True else f"{name} is {value}, which"
                raise ValueError(f"{what} doesn't work together with {' and '.join(clashing)}; leave one out")
