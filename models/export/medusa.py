"""Medusa in the layouts of github.com/FasterDecoding/Medusa, TensorRT-LLM and former vLLM.

    {i}.{j}.linear.{weight,bias}      block j of head i        blocks.{i}.{j}.linear.{weight,bias}
    {i}.{num_layers}.weight [V, H]    head i's output layer     lm_heads.{i}.weight

The first two read `config.json` and these names. The reference (medusa/model/medusa_model.py) reads
`medusa_lm_head.pt`. TensorRT-LLM's examples/medusa/convert_checkpoint.py reads the same file or
`medusa_lm_head.safetensors` (tensorrt_llm/models/llama/convert.py, `load_medusa_hf`). It renames
the tensors to `medusa_heads.{i}.medusa_layers.{j}.linear.*` and `medusa_heads.{i}.lm_head.weight`
in its checkpoint of heads and target. The reference shares one module between all blocks of a head
(it repeats a list of one). So it only supports heads of one block.

We also read TensorRT-LLM's names, and vLLM's `blocks.{i}.layers.{j}.*` and `lm_heads.{i}.weight`.
Heads that share the target's output layer consist of blocks alone, with `version` "2".
"""

import logging
import re
from dataclasses import dataclass
from typing import Any

from ..drafters.medusa import Medusa
from ..drafters.options import MedusaConfig
from ..llm.hf_target import HFTarget
from .folders import Folder
from .formats import FolderContents, Format, Reading
from .llama import GENERAL_KEYS, raise_unsupported, require_sizes

logger = logging.getLogger(__name__)

PICKLE_FILE, SAFETENSORS_FILE = "medusa_lm_head.pt", "medusa_lm_head.safetensors"
SHARED_HEAD_VERSION = "2"
NUM_HEADS, NUM_LAYERS, TARGET = "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"
TENSORRT_NUM_HEADS = "num_medusa_heads"
KEYS = frozenset({NUM_HEADS, NUM_LAYERS, TARGET, TENSORRT_NUM_HEADS, "hidden_size", "vocab_size", "version"})
VLLM_NUM_HEADS, VLLM_NUM_LAYERS = "num_heads", "num_hidden_layers"
VLLM_BIAS, VLLM_VOCAB = "medusa_fc_bias", "truncated_vocab_size"
VLLM_KEYS = frozenset({VLLM_NUM_HEADS, VLLM_NUM_LAYERS, VLLM_BIAS, VLLM_VOCAB, "max_paths", "topk"})
"""Keys of vLLM's configuration; vLLM supported Medusa until mid-2026."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the tensors of a head and its blocks in a layout.

    `head` and `block` are format strings with indexes; a head has `layers` blocks.
    """

    block: str
    head: str

    def pattern(self) -> re.Pattern[str]:
        """Compile the pattern of a block's tensor names."""
        text = re.escape(self.block.format(head="HEAD", block="BLOCK", kind="KIND"))
        for name, pattern in (("HEAD", r"(\d{1,4})"), ("BLOCK", r"(\d{1,4})"), ("KIND", "(?:weight|bias)")):
            text = text.replace(name, pattern)
        return re.compile(text)


REFERENCE_NAMES = Names("{head}.{block}.linear.{kind}", "{head}.{layers}.weight")
LAYOUTS = (
    REFERENCE_NAMES,
    *(
        Names(f"{prefix}.{REFERENCE_NAMES.block}", f"{prefix}.{REFERENCE_NAMES.head}")
        for prefix in ("medusa_head", "medusa_heads")
    ),
    Names("medusa_heads.{head}.medusa_layers.{block}.linear.{kind}", "medusa_heads.{head}.lm_head.weight"),  # TensorRT-LLM's
    Names("blocks.{head}.layers.{block}.{kind}", "lm_heads.{head}.weight"),  # vLLM's
)
"""Layouts that are read. The reference's is also written; some publish it with a prefix."""


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
    return FolderContents(
        config={**layout.config, TENSORRT_NUM_HEADS: drafter.config.num_heads}, tensors=layout.tensors, file=SAFETENSORS_FILE
    )


def _problems(drafter: Medusa) -> list[str]:
    config, problems = drafter.config, []
    if config.heads != "residual":
        problems.append(
            f"its heads are of the kind {config.heads}, but there they are residual (train with drafter.heads=residual)"
        )
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
    tensors = {names[name]: tensor for name, tensor in drafter.state_dict().items() if name in names}
    return FolderContents(config=described, tensors=tensors, file=file)


def _names(config: MedusaConfig, layout: Names = REFERENCE_NAMES) -> dict[str, str]:
    names = {}
    for head in range(config.num_heads):
        names[f"lm_heads.{head}.weight"] = layout.head.format(head=head, layers=config.num_layers)
        for block in range(config.num_layers):
            for kind in ("weight", "bias"):
                names[f"blocks.{head}.{block}.linear.{kind}"] = layout.block.format(head=head, block=block, kind=kind)
    return names


def read(folder: Folder, target: HFTarget) -> Reading:
    """Describe how to read the heads of a folder in any layout.

    The tensors determine the number of heads, since published configurations count them wrong.
    """
    # 1. Check the configuration.
    config = folder.config
    problems = [f"an unknown key {name}" for name in sorted(config.keys() - KEYS - VLLM_KEYS - GENERAL_KEYS)]
    problems += [
        f"{name} {config[name]!r}"
        for name in (NUM_HEADS, TENSORRT_NUM_HEADS, NUM_LAYERS, VLLM_NUM_HEADS, VLLM_NUM_LAYERS)
        if name in config and (type(config[name]) is not int or config[name] < 1)
    ]
    if config.get(VLLM_BIAS, True) is not True:
        problems.append(f"{VLLM_BIAS} {config[VLLM_BIAS]!r}, but blocks here have a bias")
    if config.get(VLLM_VOCAB) not in (None, target.vocab_size):
        problems.append(f"{VLLM_VOCAB} {config[VLLM_VOCAB]!r}, but heads here have the target's whole vocabulary")
    if problems:
        raise ValueError(f"{folder.path / 'config.json'} is not a configuration of Medusa: it has {', '.join(problems)}")
    require_sizes(config, folder, target)

    # 2. Count heads and blocks by the names of the tensors.
    layout, blocks = _blocks(folder)
    num_heads, num_layers = (1 + max((block[axis] for block in blocks), default=-1) for axis in (0, 1))
    if num_heads * num_layers > len(folder.shapes):
        raise ValueError(
            f"{folder.path} has names of {num_heads} heads of {num_layers} blocks, but only {len(folder.shapes)} tensors; "
            "complete the download"
        )
    if not blocks:
        raise ValueError(f"{folder.path} has no heads: there is no 0.0.linear.weight; complete the download")
    for name in (NUM_LAYERS, VLLM_NUM_LAYERS):
        if config.get(name, num_layers) != num_layers:
            raise ValueError(
                f"{folder.path} has {num_layers} blocks in a head, but its config.json has {name} {config[name]}; correct it"
            )
    for name in (NUM_HEADS, TENSORRT_NUM_HEADS, VLLM_NUM_HEADS):
        if config.get(name, num_heads) != num_heads:
            logger.warning("%s has %d heads, but its config.json has %s %d", folder.path, num_heads, name, config[name])

    # 3. The drafter's options.
    heads = [layout.head.format(head=head, layers=num_layers) for head in range(num_heads)]
    shares = str(config.get("version", "1")) == SHARED_HEAD_VERSION or not any(name in folder.shapes for name in heads)
    options: dict[str, Any] = {"num_heads": num_heads, "num_layers": num_layers, "heads": "residual", "share_head": shares}
    return Reading(options=options, rename=lambda config: _names(config, layout))


def _blocks(folder: Folder) -> tuple[Names, list[tuple[int, int]]]:
    """Find the layout, and the (head, block) indexes in its names."""
    for layout in LAYOUTS:
        pattern = layout.pattern()
        matches = [match for name in folder.shapes if (match := pattern.fullmatch(name))]
        if matches:
            return layout, [(int(match[1]), int(match[2])) for match in matches]
    return REFERENCE_NAMES, []


def is_of(folder: Folder) -> bool:
    """Check for names of blocks in any layout."""
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
