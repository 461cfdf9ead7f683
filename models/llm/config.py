"""Configuration of the target: which model to load, and how."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveFloat
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ...data.fields import OPTIONS, PositiveInt, one_of
from .quantization import check_method

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
    """Hub id, or a directory with `config.json`, weights and tokenizer."""
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
    machine, by a measurement of half a second at the run's start. The drafters and plain decoding get
    the same choice. Packed copies may need the weights' memory a second time."""
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
        placements = ("compiled", "cuda_graphs", "device", "tensor_parallel", "memory_budget_gib", "stage_layers")
        clashing = [name for name in placements if getattr(self, name)]
        if self.device_map is not None and clashing:
            raise ValueError(
                f"device_map is {self.device_map}, which doesn't work together with {' and '.join(clashing)}; leave one out"
            )
        names = ("compiled", "cuda_graphs", "quantization", "tensor_parallel", "memory_budget_gib")
        clashing = [name for name in names if getattr(self, name)]
        if self.stage_layers is not None and clashing:
            raise ValueError(
                f"stage_layers is {self.stage_layers}, which doesn't work together with {' and '.join(clashing)}; leave one out"
            )
        clashing = [name for name in ("compiled", "cuda_graphs", "device", "quantization") if getattr(self, name)]
        if self.tensor_parallel and clashing:
            raise ValueError(f"tensor_parallel doesn't work together with {' and '.join(clashing)}; leave one out")
        clashing = [name for name in ("compiled", "cuda_graphs", "quantization", "tensor_parallel") if getattr(self, name)]
        if self.memory_budget_gib is not None and clashing:
            raise ValueError(
                f"memory_budget_gib is {self.memory_budget_gib}, which doesn't work together with {' and '.join(clashing)}; "
                "leave one out"
            )
