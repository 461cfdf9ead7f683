"""Apple's directory format of a ReDrafter.

It has `config.json` and `model.safetensors` with other names.

    rnn_u.{weight,bias}              U and b: the state's matrix, and the bias              recurrence.weight, input.bias
    rnn_w.weight                     W: the embedding's matrix                              input.weight
    input_proj.{weight,bias}         only where exit_dim isn't twice hidden_size            projection.{weight,bias}
    lm_head.{i}.linear.{weight,bias}                                                        blocks.{i}.linear.{weight,bias}
    lm_head.{num_draft_layers}.weight                                                       head.weight

s_0 = 0, s_t = SiLU(W e_t + U s_{t-1} + b): a drafter with `initial_state: zero`. The key `rnn` is
true; without it the state would be the sum of the embeddings. Names and formula are those of
`recurrent_drafting/modeling_drafter.py` in github.com/apple/ml-recurrent-drafter. Tensors have equal
values in both layouts. `beam_length` there includes the target's last token, here it doesn't; the
folder doesn't contain it.
"""

from typing import Annotated, Any, Literal

from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, NonNegativeInt, PositiveInt, one_of
from ..drafters.options import RedrafterConfig
from ..drafters.redrafter import Redrafter
from ..llm.hf_target import HFTarget
from .folders import Folder
from .formats import FolderContents, Format, Reading
from .llama import raise_unsupported, read_keys, require_sizes

MODEL_TYPE = "recurrent_drafting_drafter"


@dataclass(kw_only=True, config=OPTIONS)
class AppleKeys:
    """Keys of a `config.json`. Without `rnn`, the state would be the sum of the embeddings."""

    num_draft_layers: NonNegativeInt
    hidden_size: PositiveInt
    exit_dim: PositiveInt
    rnn: Literal[True]
    vocab_size: PositiveInt | None = None
    model_type: Annotated[str, one_of(MODEL_TYPE)] | None = None
    num_lookback_tokens: Any = None


def write(drafter: Redrafter, target: HFTarget) -> FolderContents:
    """Build the contents of the folder.

    Raises ValueError for a drafter that the format doesn't support.
    """
    # 1. List all that the format doesn't support.
    config, problems = drafter.config, []
    if config.initial_state != "zero":
        problems.append(
            f"its initial_state is {config.initial_state}, but there s_0 is zero (train with drafter.initial_state=zero)"
        )
    if config.draft_vocab_size is not None:
        problems.append(
            f"it drafts {config.draft_vocab_size} tokens only, but there the head has the target's whole vocabulary (train "
            "with drafter.draft_vocab_size=null)"
        )
    raise_unsupported(problems, FORMAT.name)

    # 2. The configuration and the tensors under Apple's names.
    described = {
        "model_type": MODEL_TYPE,
        "vocab_size": drafter.vocab_size,
        "hidden_size": drafter.hidden_size,
        "exit_dim": drafter.exit_width,
        "num_draft_layers": config.num_blocks,
        "rnn": True,
    }
    names = _names(config)
    return FolderContents(config=described, tensors={names[name]: tensor for name, tensor in drafter.state_dict().items()})


def read(folder: Folder, target: HFTarget) -> Reading:
    """Describe how to read a folder.

    Raises ValueError for a configuration that isn't Apple's, or has other sizes than the target.
    """
    keys = read_keys(AppleKeys, folder.config, folder)
    require_sizes(vars(keys), folder, target)
    options = {"initial_state": "zero", "num_blocks": keys.num_draft_layers, "exit_width": keys.exit_dim}
    return Reading(options=options, rename=_names)


def is_of(folder: Folder) -> bool:
    """Check for the configuration's own keys."""
    return {"num_draft_layers", "exit_dim", "rnn"} <= folder.config.keys()


def _names(config: RedrafterConfig) -> dict[str, str]:
    """Map each of our tensors to its name in Apple's format."""
    names = {"head.weight": f"lm_head.{config.num_blocks}.weight"}
    names |= {"recurrence.weight": "rnn_u.weight", "input.bias": "rnn_u.bias", "input.weight": "rnn_w.weight"}
    for kind in ("weight", "bias"):
        names[f"projection.{kind}"] = f"input_proj.{kind}"
        names |= {f"blocks.{i}.linear.{kind}": f"lm_head.{i}.linear.{kind}" for i in range(config.num_blocks)}
    return names


FORMAT = Format(name="apple", kind="redrafter", write=write, read=read, is_of=is_of)
