"""Medusa in the layouts of github.com/FasterDecoding/Medusa and of TensorRT-LLM's conversion.

    {i}.{j}.linear.{weight,bias}      block j of head i        blocks.{i}.{j}.linear.{weight,bias}
    {i}.{num_layers}.weight [V, H]    head i's output layer     lm_heads.{i}.weight

The first two read `config.json` and these names. The reference (medusa/model/medusa_model.py) reads
`medusa_lm_head.pt`. TensorRT-LLM's examples/medusa/convert_checkpoint.py reads the same file or
`medusa_lm_head.safetensors` (tensorrt_llm/models/llama/convert.py, `load_medusa_hf`). It renames
the tensors to `medusa_heads.{i}.medusa_layers.{j}.linear.*` and `medusa_heads.{i}.lm_head.weight`
in its checkpoint of heads and target. The reference shares one module between all blocks of a head
(it repeats a list of one). So it only supports heads of one block.

Some publish these names with a prefix, which we read, too. Heads that share the target's output
layer consist of blocks alone, with `version` "2".
"""

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from ...data.fields import OPTIONS, PositiveInt
from ..drafters.medusa import Medusa
from ..drafters.options import MedusaConfig
from ..llm.hf_target import HFTarget
from .folders import Folder
from .formats import FolderContents, Format, Reading
from .llama import raise_unsupported, read_keys, require_sizes

logger = logging.getLogger(__name__)

PICKLE_FILE, SAFETENSORS_FILE = "medusa_lm_head.pt", "medusa_lm_head.safetensors"
SHARED_HEAD_VERSION = "2"
NUM_HEADS, NUM_LAYERS, TARGET = "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"
TENSORRT_NUM_HEADS = "num_medusa_heads"
HAS_BIASES = "medusa_fc_bias"
PREFIXES = ("", "medusa_head.", "medusa_heads.")
"""Prefixes of the tensors' names that are read; none is written."""
BLOCK = re.compile(r"(\d{1,4})\.(\d{1,4})\.linear\.(?:weight|bias)")
"""Names of the tensors of block j of head i."""


@dataclass(kw_only=True, config=OPTIONS)
class MedusaKeys:
    """Keys of a `config.json`."""

    medusa_num_heads: PositiveInt | None = None
    medusa_num_layers: PositiveInt | None = None
    num_medusa_heads: PositiveInt | None = None
    base_model_name_or_path: Any = None
    medusa_fc_bias: Any = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    version: Any = None


def write_reference(drafter: Medusa, target: HFTarget) -> FolderContents:
    """Build the contents of a folder in the reference's layout.

    Raises ValueError for heads that the layout doesn't support.
    """
    problems = _problems(drafter)
    if drafter.config.num_layers > 1:
        problems.append(
            f"its heads have {drafter.config.num_layers} blocks each, but the reference supports one block (train with "
            "drafter.num_layers=1, or export for TensorRT-LLM)"
        )
    raise_unsupported(problems, REFERENCE.name)
    return _layout(drafter, target, PICKLE_FILE)


def write_tensorrt(drafter: Medusa, target: HFTarget) -> FolderContents:
    """Build the contents of a folder for TensorRT-LLM's conversion.

    Raises ValueError for heads that the layout doesn't support.
    """
    problems = _problems(drafter)
    if drafter.config.share_head:
        problems.append(
            "its heads share the target's output layer, but there each has a separate one (train with drafter.share_head=false)"
        )
    raise_unsupported(problems, TENSORRT.name)
    layout = _layout(drafter, target, SAFETENSORS_FILE)
    return replace(layout, config={**layout.config, TENSORRT_NUM_HEADS: drafter.config.num_heads})


def _problems(drafter: Medusa) -> list[str]:
    config, problems = drafter.config, []
    if config.head_rank is not None:
        problems.append(
            f"its heads share an output layer of rank {config.head_rank}, but there each has a full one (train with "
            "drafter.head_rank=null)"
        )
    if any(name.startswith("lm_heads.") and name.endswith(".bias") for name, _ in drafter.named_parameters()):
        problems.append("its output layers have biases, but there they have none (train with drafter.share_head=true)")
    return problems


def _layout(drafter: Medusa, target: HFTarget, file: str) -> FolderContents:
    config, names = drafter.config, _names(drafter.config)
    described = {
        "architectures": ["MedusaModel"],
        NUM_HEADS: config.num_heads,
        NUM_LAYERS: config.num_layers,
        TARGET: target.identity.name,
    }
    if config.share_head:
        described["version"] = SHARED_HEAD_VERSION
    else:  # only vLLM (up to 0.32) reads these. Without the last it would drop the biases in silence
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        described |= {"model_type": "medusa", **sizes, HAS_BIASES: True}
    tensors = {names[name]: tensor for name, tensor in drafter.state_dict().items() if name in names}
    return FolderContents(config=described, tensors=tensors, file=file, write_more=partial(_warn, config.share_head))


def _warn(shares_head: bool, directory: Path) -> None:
    """Warn of an engine that would load such a folder without its output layers, in silence."""
    if shares_head:
        logger.warning(
            "%s is not for vLLM: heads that share the target's output layer would have random ones there; for vLLM up to 0.32 "
            "train with drafter.share_head=false",
            directory,
        )


def _names(config: MedusaConfig, prefix: str = "") -> dict[str, str]:
    """Map each tensor of the heads to its name in the layout."""
    names = {}
    for head in range(config.num_heads):
        names[f"lm_heads.{head}.weight"] = f"{prefix}{head}.{config.num_layers}.weight"
        for block in range(config.num_layers):
            for kind in ("weight", "bias"):
                names[f"blocks.{head}.{block}.linear.{kind}"] = f"{prefix}{head}.{block}.linear.{kind}"
    return names


def read(folder: Folder, target: HFTarget) -> Reading:
    """Describe how to read the heads of a folder.

    The tensors determine the number of heads, since published configurations count them wrong.
    """
    # 1. Check the configuration.
    keys = read_keys(MedusaKeys, folder.config, folder)
    require_sizes(vars(keys), folder, target)

    # 2. Count heads and blocks by the names of the tensors.
    prefix, blocks = _blocks(folder)
    num_heads, num_layers = (1 + max((block[axis] for block in blocks), default=-1) for axis in (0, 1))
    if keys.medusa_num_layers not in (None, num_layers):
        raise ValueError(
            f"{folder.path} has {num_layers} blocks in a head, but its config.json has {NUM_LAYERS} {keys.medusa_num_layers}; "
            "correct it"
        )

    # 3. The drafter's options.
    heads = [f"{prefix}{head}.{num_layers}.weight" for head in range(num_heads)]
    shares = str(keys.version) == SHARED_HEAD_VERSION or not any(name in folder.shapes for name in heads)
    options: dict[str, Any] = {"num_heads": num_heads, "num_layers": num_layers, "share_head": shares}
    return Reading(options=options, rename=lambda config: _names(config, prefix))


def _blocks(folder: Folder) -> tuple[str, list[tuple[int, int]]]:
    """Find the prefix, and the (head, block) indexes in the names after it."""
    for prefix in PREFIXES:
        names = [name.removeprefix(prefix) for name in folder.shapes if name.startswith(prefix)]
        if matches := [match for name in names if (match := BLOCK.fullmatch(name))]:
            return prefix, [(int(match[1]), int(match[2])) for match in matches]
    return "", []


def is_of(folder: Folder) -> bool:
    """Check for names of blocks."""
    return bool(_blocks(folder)[1])


FILES = (SAFETENSORS_FILE, PICKLE_FILE, "model.safetensors")
ACCURACIES = frozenset({"accuracies"})
"""Accuracy of each head. It selects the draft tree, which every program selects for itself."""
REFERENCE = Format(
    name="medusa", kind="medusa", write=write_reference, read=read, is_of=is_of, weight_files=FILES, measured=ACCURACIES
)
TENSORRT = Format(
    name="tensorrt-llm", kind="medusa", write=write_tensorrt, read=read, is_of=is_of, weight_files=FILES, measured=ACCURACIES
)
