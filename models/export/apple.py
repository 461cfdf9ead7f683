"""Apple's directory format of a ReDrafter: `config.json` and `model.safetensors` under other names.

    rnn_u.{weight,bias}              U and b: what multiplies the state, and the bias       recurrence.weight, input.bias
    rnn_w.weight                     W: what multiplies the embedding                       input.weight
    input_proj.{weight,bias}         only where exit_dim isn't twice hidden_size            projection.{weight,bias}
    lm_head.{i}.linear.{weight,bias}                                                        blocks.{i}.linear.{weight,bias}
    lm_head.{num_draft_layers}.weight                                                       head.weight

s_0 = 0, s_t = SiLU(W e_t + U s_{t-1} + b): a drafter with `initial_state: zero`. Names and formula are those of
`recurrent_drafting/modeling_drafter.py` in github.com/apple/ml-recurrent-drafter. Tensors are the same numbers in both layouts.
The folder says nothing of the target that it was trained for but its sizes, so whoever reads one answers for the rest.
"""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ...data.files import atomic_write_bytes, read_json, write_json
from ..hf_target import HFTarget
from ..interfaces import TrainableDrafter
from .files import CONFIG_FILE, WEIGHTS_FILE, read_weights
from .redrafter import Redrafter, RedrafterConfig
from .registry import kind_of, parse_runtime_config

MODEL_TYPE = "recurrent_drafting_drafter"
SIZES = ("num_draft_layers", "hidden_size", "exit_dim")
OTHER_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "model_type",
        "num_lookback_tokens",
        "torch_dtype",
        "transformers_version",
        "vocab_size",
    }
)
"""What a `config.json` may say besides. Only `vocab_size` tells something about the weights."""


def to_apple(drafter: TrainableDrafter, directory: Path) -> None:
    """Write a ReDrafter as a folder in Apple's format.

    Raises ValueError for what the format has no place for, and for a folder that holds a drafter of another format.
    """
    if not isinstance(drafter, Redrafter):
        raise ValueError(f"a drafter of the kind {kind_of(drafter)} can't be written in Apple's format; a ReDrafter can")
    config = drafter.config
    problems = []
    if config.rnn and config.initial_state != "zero":
        problems.append(f"its initial_state is {config.initial_state}, and there s_0 is zero (train with initial_state=zero)")
    if config.head_rank is not None:
        problems.append(f"its head has rank {config.head_rank}, and there the head is one matrix")
    if config.draft_vocab_size is not None:
        problems.append(f"it drafts {config.draft_vocab_size} tokens only, and there the head has all of the target's")
    if problems:
        raise ValueError(f"the drafter can't be written in Apple's format: {'; '.join(problems)}")
    if (directory / CONFIG_FILE).is_file():
        try:
            _read_config(directory)
        except ValueError as error:
            raise ValueError(f"{directory} holds something else already; write into another folder ({error})") from error
    names = _names(config)
    tensors = {names[name]: each.detach().cpu().contiguous() for name, each in drafter.state_dict().items()}
    description = {
        "model_type": MODEL_TYPE,
        "vocab_size": drafter.vocab_size,
        "hidden_size": drafter.hidden_size,
        "exit_dim": drafter.exit_width,
        "num_draft_layers": config.num_blocks,
        "rnn": config.rnn,
    }
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(directory / WEIGHTS_FILE, safetensors.torch.save(tensors, metadata={"format": "pt"}))
    write_json(directory / CONFIG_FILE, description)


def from_apple(directory: Path, target: HFTarget, **runtime_options: Any) -> Redrafter:
    """The ReDrafter of a folder in Apple's format, for `target`, in its device and dtype, ready to draft.

    `runtime_options` are its beams', whose length there counts the token that the target has chosen, and here doesn't. Save it
    with `save_drafter`. Raises ValueError for options that would change the weights, and for a folder of another target's
    sizes, with pickled weights, or with a key or tensor missing, unknown or of a wrong shape.
    """
    directory = Path(directory)
    found = _read_config(directory)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    wrong = [f"{name} is {found[name]}, the target's {size}" for name, size in sizes.items() if found.get(name, size) != size]
    if wrong:
        raise ValueError(f"the drafter in {directory} doesn't fit {target.identity.name}: {'; '.join(wrong)}")
    shape = {"rnn": found["rnn"], "num_blocks": found["num_draft_layers"], "exit_width": found["exit_dim"]}
    _, config = parse_runtime_config({"kind": "redrafter", "initial_state": "zero", **shape}, runtime_options)
    try:
        with torch.device("meta"):  # shapes only: a config of absurd sizes must not take the memory for them
            shapes = Redrafter.for_target(config, target).state_dict()
    except RuntimeError as error:
        raise ValueError(f"a drafter of the sizes in {directory / CONFIG_FILE} can't be made ({error})") from error
    names = _names(config)
    tensors = read_weights(directory / WEIGHTS_FILE, {names[name]: shape for name, shape in shapes.items()})
    drafter = Redrafter.for_target(config, target)
    drafter.load_state_dict({name: tensors[theirs] for name, theirs in names.items() if name in shapes})
    return drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{directory} holds no drafter: it has no {CONFIG_FILE}")
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a configuration but a {type(found).__name__}")
    problems = [f"no {name}" for name in (*SIZES, "rnn") if name not in found]
    problems += [f"an unknown key {name}" for name in sorted(found.keys() - {*SIZES, "rnn"} - OTHER_KEYS)]
    problems += [f"{name} {found[name]!r}" for name in SIZES if name in found and type(found[name]) is not int]
    problems += [f"rnn {found['rnn']!r}"] if type(found.get("rnn", True)) is not bool else []
    problems += [f"model_type {found['model_type']!r}"] if found.get("model_type", MODEL_TYPE) != MODEL_TYPE else []
    if problems:
        raise ValueError(f"{path} is none of Apple's ReDrafter: it has {', '.join(problems)}")
    if not (directory / WEIGHTS_FILE).is_file():
        others = ", ".join(sorted(each.name for each in directory.iterdir() if each.name != CONFIG_FILE)) or "nothing"
        raise ValueError(
            f"{directory} has no {WEIGHTS_FILE} beside its {CONFIG_FILE}, but {others}; pickled weights are not read, since "
            "reading them runs their code: convert them to safetensors where you trust them"
        )
    return found


def _names(config: RedrafterConfig) -> dict[str, str]:
    """Apple's name of each of our tensors."""
    names = {"head.weight": f"lm_head.{config.num_blocks}.weight"}
    for kind in ("weight", "bias"):
        names[f"projection.{kind}"] = f"input_proj.{kind}"
        names |= {f"blocks.{i}.linear.{kind}": f"lm_head.{i}.linear.{kind}" for i in range(config.num_blocks)}
    if config.rnn:
        names |= {"recurrence.weight": "rnn_u.weight", "input.bias": "rnn_u.bias", "input.weight": "rnn_w.weight"}
    return names
