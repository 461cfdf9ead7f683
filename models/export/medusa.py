"""Medusa as github.com/FasterDecoding/Medusa and TensorRT-LLM read it.

    {i}.{j}.linear.{weight,bias}      block j of head i     blocks.{i}.{j}.linear.{weight,bias}
    {i}.{num_layers}.weight [V, H]    head i's own head     lm_heads.{i}.weight

Both read `config.json` and these names: the reference (medusa/model/medusa_model.py) from `medusa_lm_head.pt`, TensorRT-LLM's
examples/medusa/convert_checkpoint.py from that or from `medusa_lm_head.safetensors` (tensorrt_llm/models/llama/convert.py,
`load_medusa_hf`), which renames them to `medusa_heads.{i}.medusa_layers.{j}.linear.*` and `medusa_heads.{i}.lm_head.weight` in
the checkpoint that it makes of them and the target. The reference makes all blocks of a head one module (it repeats a list of
one), so it holds heads of one block only. Heads that share the target's own output layer are blocks alone, with `version` "2".
"""

import logging
import re
from typing import Any

from ..drafters.medusa import Medusa, MedusaConfig
from ..hf_target import HFTarget
from .folders import Folder
from .formats import Format, Layout, Reading
from .llama import GENERAL_KEYS, raise_refusal

logger = logging.getLogger(__name__)

PICKLE_FILE, SAFETENSORS_FILE = "medusa_lm_head.pt", "medusa_lm_head.safetensors"
SHARED_HEAD_VERSION = "2"
NUM_HEADS, NUM_LAYERS, TARGET = "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"
TENSORRT_NUM_HEADS = "num_medusa_heads"
KEYS = frozenset({NUM_HEADS, NUM_LAYERS, TARGET, TENSORRT_NUM_HEADS, "hidden_size", "vocab_size", "version"})
BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(?:weight|bias)$")
PREFIXES = ("medusa_head.", "medusa_heads.")
"""Names that some publish begin so."""


def write_reference(drafter: Medusa, target: HFTarget) -> Layout:
    """The reference's layout. Raises ValueError for heads that it has no place for."""
    problems = _problems(drafter)
    if drafter.config.num_layers > 1:
        problems.append(
            f"its heads have {drafter.config.num_layers} blocks each, and the reference makes one block of them (train with "
            "drafter.num_layers=1, or export for TensorRT-LLM)"
        )
    raise_refusal(problems, REFERENCE.name)
    return _layout(drafter, target, PICKLE_FILE)


def write_tensorrt(drafter: Medusa, target: HFTarget) -> Layout:
    """What TensorRT-LLM's conversion reads beside the target. Raises ValueError for heads that it has no place for."""
    problems = _problems(drafter)
    if drafter.config.share_head:
        problems.append("its heads share the target's output layer, and there each has its own (train with share_head=false)")
    raise_refusal(problems, TENSORRT.name)
    layout = _layout(drafter, target, SAFETENSORS_FILE)
    return Layout(
        config={**layout.config, TENSORRT_NUM_HEADS: drafter.config.num_heads}, tensors=layout.tensors, file=SAFETENSORS_FILE
    )


def _problems(drafter: Medusa) -> list[str]:
    config, problems = drafter.config, []
    if config.heads != "residual":
        problems.append(f"its heads are of the kind {config.heads}, and there they are residual (train with heads=residual)")
    if config.head_rank is not None:
        problems.append(
            f"its heads share one of rank {config.head_rank}, and there each has its own (train with head_rank=null)"
        )
    if any(name.startswith("lm_heads.") and name.endswith(".bias") for name, _ in drafter.named_parameters()):
        problems.append("its output layers have biases, and there they have none (train with share_head=true)")
    return problems


def _layout(drafter: Medusa, target: HFTarget, file: str) -> Layout:
    config, names = drafter.config, _names(drafter.config)
    described = {
        "architectures": ["MedusaModel"],
        NUM_HEADS: config.num_heads,
        NUM_LAYERS: config.num_layers,
        TARGET: target.identity.name,
    }
    if config.share_head:
        described["version"] = SHARED_HEAD_VERSION
    tensors = {names[name]: tensor for name, tensor in drafter.state_dict().items() if name in names}
    return Layout(config=described, tensors=tensors, file=file)


def _names(config: MedusaConfig, prefix: str = "") -> dict[str, str]:
    names = {}
    for head in range(config.num_heads):
        names[f"lm_heads.{head}.weight"] = f"{prefix}{head}.{config.num_layers}.weight"
        for block in range(config.num_layers):
            for kind in ("weight", "bias"):
                names[f"blocks.{head}.{block}.linear.{kind}"] = f"{prefix}{head}.{block}.linear.{kind}"
    return names


def read(folder: Folder, target: HFTarget) -> Reading:
    """The heads of a folder in either layout, as many as its tensors make: published configurations count them wrong."""
    config = folder.config
    problems = [f"an unknown key {name}" for name in sorted(config.keys() - KEYS - GENERAL_KEYS)]
    problems += [
        f"{name} {config[name]!r}"
        for name in (NUM_HEADS, TENSORRT_NUM_HEADS, NUM_LAYERS)
        if name in config and (type(config[name]) is not int or config[name] < 1)
    ]
    if problems:
        raise ValueError(f"{folder.path / 'config.json'} is none of Medusa's: it has {', '.join(problems)}")
    prefix, blocks = _blocks(folder)
    num_heads, num_layers = (1 + max((block[place] for block in blocks), default=-1) for place in (0, 1))
    if num_heads * num_layers > len(folder.shapes):
        raise ValueError(
            f"{folder.path} names {num_heads} heads of {num_layers} blocks, and has {len(folder.shapes)} tensors in all"
        )
    if not blocks:
        raise ValueError(f"{folder.path} holds no heads: there is no 0.0.linear.weight; complete the download")
    if config.get(NUM_LAYERS, num_layers) != num_layers:
        raise ValueError(f"{folder.path} has {num_layers} blocks in a head, and its config.json says {config[NUM_LAYERS]}")
    for name in (NUM_HEADS, TENSORRT_NUM_HEADS):
        if config.get(name, num_heads) != num_heads:
            logger.warning("%s has %d heads, though its config.json says %s %d", folder.path, num_heads, name, config[name])
    options: dict[str, Any] = {"num_heads": num_heads, "num_layers": num_layers, "heads": "residual"}
    options["share_head"] = str(config.get("version", "1")) == SHARED_HEAD_VERSION or not any(
        f"{prefix}{head}.{num_layers}.weight" in folder.shapes for head in range(num_heads)
    )
    return Reading(kind="medusa", options=options, names=lambda config: _names(config, prefix))


def _blocks(folder: Folder) -> tuple[str, list[tuple[int, int]]]:
    """How the names begin, and the (head, block) that they name."""
    prefix = next((each for each in PREFIXES if any(name.startswith(each) for name in folder.shapes)), "")
    matches = [BLOCK.match(name.removeprefix(prefix)) for name in folder.shapes if name.startswith(prefix)]
    return prefix, [(int(match[1]), int(match[2])) for match in matches if match]


def is_of(folder: Folder) -> bool:
    """Told by its blocks."""
    return bool(_blocks(folder)[1])


FILES = (SAFETENSORS_FILE, PICKLE_FILE, "model.safetensors")
ACCURACIES = frozenset({"accuracies"})
"""How often each head is right: it chooses the tree, which every program chooses for itself."""
REFERENCE = Format(
    name="medusa", kind="medusa", write=write_reference, read=read, is_of=is_of, weight_files=FILES, measured=ACCURACIES
)
TENSORRT = Format(
    name="tensorrt-llm", kind="medusa", write=write_tensorrt, read=read, is_of=is_of, weight_files=FILES, measured=ACCURACIES
)
