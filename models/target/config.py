"""Which target to load, and how."""

from dataclasses import field
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, one_of
from .quantization import check_method

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(kw_only=True, config=OPTIONS)
class TargetConfig:
    """The frozen target model."""

    name_or_path: str
    """Hub id, or a directory with `config.json`, weights and tokenizer."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; None is the default branch."""
    dtype: Annotated[str, one_of(*DTYPES)] = "auto"
    """Compute type of the weights; `auto` keeps the one they are stored in. On a CPU use float32: bfloat16 is emulated there.
    """
    attn_implementation: Annotated[str, one_of("sdpa", "eager")] = "sdpa"
    """transformers' attention function; it must honour a 4-D mask (sdpa or eager)."""
    compiled: bool = False
    """Run the passes over draft trees through `torch.compile`: minutes at the start, faster steps."""
    cuda_graphs: bool = False
    """Replay those passes as CUDA graphs: a step then costs the card's time and not Python's. Needs a CUDA device."""
    device: str | None = None
    """For example `cuda:1`; None takes the launcher's device, else the first accelerator, else the CPU."""
    # A mapping; Hydra can't put one where the type says that there may be none.
    quantization: Annotated[Any, AfterValidator(check_method)] = None
    """Quantise the weights while they are loaded: a `method` (bitsandbytes, torchao, gptq or awq) and transformers' options of
    it, such as {method: bitsandbytes, load_in_4bit: true} or {method: torchao, type: Int8WeightOnlyConfig}. Weights that are
    stored quantised need nothing here. A quantised target is another target: distil with it what a drafter for it learns."""
    tensor_parallel: bool = False
    """Hold one copy of the target in slices over all processes of the launch, for one that doesn't fit on one device (see
    `tensor_parallel`). Distils and trains; evaluation runs in one process, and needs the whole of it."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the weights. Off unless you have read that code."""

    tokenizer_options: dict[str, Any] = field(default_factory=dict)
    """Passed on to the tokenizer's `from_pretrained`, for old checkpoints that need one: `{legacy: true}`, say."""

    def __post_init__(self) -> None:
        clashing = [name for name in ("compiled", "cuda_graphs", "device", "quantization") if getattr(self, name)]
        if self.tensor_parallel and clashing:
            raise ValueError(f"tensor_parallel doesn't go together with {' and '.join(clashing)}; leave one out")
