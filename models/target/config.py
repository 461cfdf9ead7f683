"""Which target to load, and how."""

from dataclasses import dataclass, field
from typing import Any

from .quantization import check_method

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(kw_only=True)
class TargetConfig:
    """The frozen target model."""

    name_or_path: str
    """Hub id, or a directory with `config.json`, weights and tokenizer."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; None is the default branch."""
    dtype: str = "auto"
    """Compute type of the weights; `auto` keeps the one they are stored in. On a CPU use float32: bfloat16 is emulated there.
    """
    attn_implementation: str = "sdpa"
    """transformers' attention function; it must honour a 4-D mask (sdpa or eager)."""
    compiled: bool = False
    """Run the passes over draft trees through `torch.compile`: minutes at the start, faster steps."""
    cuda_graphs: bool = False
    """Replay those passes as CUDA graphs: a step then costs the card's time and not Python's. Needs a CUDA device."""
    device: str | None = None
    """For example `cuda:1`; None takes the launcher's device, else the first accelerator, else the CPU."""
    quantization: Any = None  # a mapping; Hydra can't put one where the type says that there may be none
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
        if self.dtype not in DTYPES:
            raise ValueError(f"target.dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"target.attn_implementation is {self.attn_implementation!r}; a draft tree needs a 4-D mask: use sdpa or eager"
            )
        if self.tensor_parallel and (
            clashing := [name for name in ("compiled", "cuda_graphs", "device", "quantization") if getattr(self, name)]
        ):
            raise ValueError(
                f"target.tensor_parallel doesn't go together with target.{' and target.'.join(clashing)}; leave one out"
            )
        if self.quantization is not None:
            check_method(self.quantization)
