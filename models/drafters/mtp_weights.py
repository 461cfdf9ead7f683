"""MTP heads in checkpoints: where their tensors are, under which names, and how they are read and written.

Transformers drops these tensors when it loads a model. So they are read from the files by name. Source of the
names: the models of vLLM (vllm/model_executor/models/{qwen3_next,deepseek,mimo}_mtp.py).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open

from ...data.fields import first_of
from ..llm.config import TargetConfig
from ..llm.hf_target import HFTarget
from ..llm.streamed_loading import stored_weights
from ..llm.weight_files import StoredTensor, first_equal, read_header

Tensors = dict[str, torch.Tensor]
Stored = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the checkpoints of some families have their MTP head: its first layer, which drafts all depths here."""

    families: str
    prefix: str
    """Beginning of the names of its tensors, after the model's own prefix such as `model.`; {layers} is the number of the
    target's layers."""
    names: Mapping[str, str]
    """Beginnings of their names after the prefix, by the beginnings of our names."""
    hidden_first: bool = False
    """Whether `fc` reads the hidden state before the embedding."""


LAYOUTS = (
    Layout(
        "Qwen3-Next, Qwen3.5",
        "mtp.",
        {
            "fc.": "fc.",
            "enorm.": "pre_fc_norm_embedding.",
            "hnorm.": "pre_fc_norm_hidden.",
            "final_norm.": "norm.",
            "layer.": "layers.0.",
        },
    ),
    Layout(
        "DeepSeek-V3, GLM-4",
        "layers.{layers}.",
        {"fc.": "eh_proj.", "enorm.": "enorm.", "hnorm.": "hnorm.", "final_norm.": "shared_head.norm.", "layer.": ""},
    ),
    Layout(
        "MiMo",
        "mtp_layers.0.",
        {
            "fc.": "input_proj.",
            "enorm.": "token_layernorm.",
            "hnorm.": "hidden_layernorm.",
            "final_norm.": "final_layernorm.",
            "layer.": "",
        },
        hidden_first=True,
    ),
)
OF_THE_TARGET = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
"""Tensors that a head may have and that aren't trained: copies of the target's, and what its configuration says."""
EXPERTS = "layer.mlp.experts."
PARTS_OF_EXPERTS = {f"{EXPERTS}gate_up_proj": ("gate_proj", "up_proj"), f"{EXPERTS}down_proj": ("down_proj",)}
"""Transformers has one tensor for all experts; in files each expert may have its own."""
PACKED = ("qweight", "qzeros", "weight_packed")
"""Last parts of the names of tensors that quantisers pack several numbers into."""
WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SCALES = ("_scale_inv", "_scale")
"""What the names of the scales of 8-bit floats end with."""
SMALLEST_SCALE = 1e-12
"""Of a part that is all zeros."""
Blocks = tuple[int, int] | None
"""Rows and columns of the part of a matrix that shares a scale; None if the configuration names none."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in files, and the parts of ours that it consists of, side by side: [row, column]."""

    name: str
    parts: tuple[torch.Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        return (*first.shape[:1], sum(part.shape[1] for part in self.parts)) if first.ndim == 2 else tuple(first.shape)

    def read(self, values: torch.Tensor) -> None:
        """Copy a tensor of files to its parts."""
        for part, columns in zip(self.parts, values.split([part.shape[-1] for part in self.parts], -1), strict=True):
            part.copy_(columns)

    def written(self) -> torch.Tensor:
        """Return the tensor of files."""
        return torch.cat(self.parts, -1) if len(self.parts) > 1 else self.parts[0]


@dataclass(frozen=True, slots=True)
class Head:
    """The MTP head of a checkpoint, by the names of its tensors."""

    layout: Layout
    prefix: str
    names: frozenset[str]
    """Names of all of its tensors."""

    @classmethod
    def find(cls, names: Collection[str], num_layers: int) -> "Head | None":
        """Find the head of a target with so many layers among the names of its tensors; None if there is none."""
        for layout in LAYOUTS:
            prefix = layout.prefix.format(layers=num_layers)
            pattern = re.compile(rf"(|.*\.){re.escape(prefix + layout.names['fc.'])}weight")
            if first := next((name for name in names if pattern.fullmatch(name)), None):
                whole = first.removesuffix(f"{layout.names['fc.']}weight")
                return cls(layout, whole, frozenset(name for name in names if name.startswith(whole)))
        return None

    def places(self, tensors: Tensors) -> Iterator[Place]:
        """Return the places of our tensors in the files."""
        for name, tensor in tensors.items():
            ours, theirs = next(pair for pair in self.layout.names.items() if name.startswith(pair[0]))
            stored = f"{self.prefix}{theirs}{name.removeprefix(ours)}"
            if name in PARTS_OF_EXPERTS and stored not in self.names:
                parts = PARTS_OF_EXPERTS[name]
                folder = stored.rpartition(".")[0]
                for number, expert in enumerate(tensor):
                    for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                        yield Place(f"{folder}.{number}.{part}.weight", (rows,))
            elif name == "fc.weight" and self.layout.hidden_first:
                yield Place(stored, tuple(reversed(tensor.chunk(2, dim=1))))
            else:
                yield Place(stored, (tensor,))

    def scale_of(self, name: str) -> str | None:
        """Return the name of a tensor's scales; None if it has none."""
        return next((name + ending for ending in SCALES if name + ending in self.names), None)

    def unknown(self, known: Iterable[str]) -> list[str]:
        """List the tensors of this layer that a drafter doesn't have."""
        names = set(known)
        names |= {scale for name in names if (scale := self.scale_of(name))}
        further = self.prefix + self.layout.names["layer."].removesuffix("0.")  # of layers after the first: mtp.layers.
        return sorted(
            name
            for name in self.names - names
            if not name.endswith(OF_THE_TARGET) and not re.match(rf"{re.escape(further)}[1-9]", name)
        )


def own_weights(target: HFTarget) -> Stored:
    """Return the tensors of the target's files. Raises ValueError if they aren't known, or no safetensors files."""
    config = target.model.config
    if not config.name_or_path:
        raise ValueError(f"{target.identity.name} was not loaded from files, so they have no MTP head; set drafter.init=random")
    stored = stored_weights(TargetConfig(name_or_path=config.name_or_path, revision=getattr(config, "_commit_hash", None)))
    return with_other_files(stored, target)


def with_other_files(stored: Stored, target: HFTarget) -> Stored:
    """Return the tensors of a checkpoint; if they have no MTP head, also those of files that its index doesn't name."""
    if _find(stored, target) is not None:
        return stored
    folder = next(iter(stored.values())).path.parent
    others = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in read_header(path).items()}
    return {**others, **stored} if _find(others, target) is not None else stored


def _find(stored: Stored, target: HFTarget) -> Head | None:
    return Head.find(stored, target.model.config.get_text_config().num_hidden_layers)


def find_head(
    stored: Stored,
    target: HFTarget,
    where: str,
    remedy: str = "Set drafter.init=random to train one from random weights, or choose another drafter",
) -> Head:
    """Find the MTP head among tensors of files. Raises ValueError if there is none."""
    head = _find(stored, target)
    if head is None:
        raise ValueError(
            f"{where} has no MTP head: no tensors as in the checkpoints of {'; '.join(layout.families for layout in LAYOUTS)}. "
            f"{remedy}"
        )
    return head


@torch.no_grad()
def read_head(tensors: Tensors, stored: Stored, target: HFTarget) -> None:
    """Fill the tensors of a drafter with an MTP head in files; 8-bit floats are multiplied by their scales.

    Raises ValueError for files without a head, for tensors that are missing, unknown, of another shape, damaged or
    not finite, for other quantised tensors, and for embeddings or an output layer of its own.
    """
    where = str(next(iter(stored.values())).path.parent)
    head = find_head(stored, target, where)
    packed = sorted(name for name in head.names if name.rpartition(".")[2] in PACKED or stored[name].dtype in WHOLE_NUMBERS)
    if packed:
        raise ValueError(
            f"the MTP head in {where} is quantised ({packed[0]}, of {stored[packed[0]].dtype}), and only 8-bit floats are "
            "dequantised. Choose another drafter, or set drafter.init=random"
        )
    # 1. Check all names and shapes by the headers of the files.
    places = list(head.places(tensors))
    blocks = configured_blocks(target)
    problems = [f"missing {place.name}" for place in places if place.name not in stored]
    problems += [f"unknown {name}" for name in head.unknown(place.name for place in places)]
    problems += [problem for place in places if place.name in stored for problem in _problems(place, head, stored, blocks)]
    problems += [f"{name} differs from the target's own" for name in _own_copies(head, stored)]
    if problems:
        raise ValueError(
            f"the MTP head in {where} is not a layer of {type(target.model).__name__} and its norms: "
            f"{first_of(problems, '; ')}. Choose another drafter, or set drafter.init=random"
        )
    # 2. Read the values.
    for place in places:
        values = read_tensor(stored[place.name])
        scale = head.scale_of(place.name)
        place.read(values if scale is None else dequantised(values, read_tensor(stored[scale]), blocks))
    if damaged := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(f"the MTP head in {where} is damaged: {damaged[0]} has numbers that aren't finite; download it again")


def _problems(place: Place, head: Head, stored: Stored, blocks: Blocks) -> Iterator[str]:
    """List what is wrong with a tensor of a head, and with its scales."""
    tensor, scale = stored[place.name], head.scale_of(place.name)
    if tensor.shape != place.shape:
        yield f"{place.name} is {tensor.shape}, not {place.shape}"
    elif (tensor.dtype.itemsize == 1) != (scale is not None):
        yield f"{place.name} has {'no scales' if scale is None else 'scales'}, and is of {tensor.dtype}"
    elif scale is not None:
        by_block = tuple(-(-size // block) for size, block in zip(tensor.shape, blocks, strict=False)) if blocks else None
        rows = tensor.shape[0]
        known = {(), (1,), (rows,), (rows, 1), by_block} if len(tensor.shape) == 2 else {(), (1,)}
        if stored[scale].shape not in known or not stored[scale].dtype.is_floating_point:
            yield (
                f"{scale} is {stored[scale].shape} of {stored[scale].dtype}: neither one scale, nor one for each row or "
                f"each block ({blocks}, by quantization_config.weight_block_size)"
            )


def _own_copies(head: Head, stored: Stored) -> list[str]:
    """List embeddings and an output layer of a head that equal none of the target's."""
    copies = [name for name in sorted(head.names) if name.endswith(OF_THE_TARGET[:2])]
    if not copies:
        return []
    targets = [name for name in stored if name not in head.names and name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    numbers = first_equal(stored[name] for name in (*targets, *copies))
    known = {numbers[name] for name in targets}
    return [name for name in copies if targets and numbers[name] not in known]


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Read the values of a tensor."""
    with safe_open(stored.path, framework="pt") as file:
        values: torch.Tensor = file.get_tensor(stored.name)
    return values


# --- 8-bit floats


def configured_blocks(target: HFTarget) -> Blocks:
    """Return the blocks that the target's `quantization_config` names."""
    config = getattr(target.model.config, "quantization_config", None)
    values = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    size = values.get("weight_block_size")
    return (int(size[0]), int(size[1])) if isinstance(size, list | tuple) and len(size) == 2 else None


def dequantised(values: torch.Tensor, scale: torch.Tensor, blocks: Blocks = None) -> torch.Tensor:
    """Return a matrix [row, column] of 8-bit floats times its scales: one, one for each row, or one for each block."""
    return values.float() * _spread(scale.float(), values.shape, blocks)


def quantised(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, blocks: Blocks = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix [row, column] as 8-bit floats of `dtype`, and its new scales, for the same parts as the earlier `scale`.

    It is the inverse of `dequantised`, but for rounding.
    """
    largest = torch.finfo(dtype).max
    wide = values.float()
    if scale.numel() == 1:
        most = wide.abs().amax()
    elif blocks is None or scale.shape[-1] == 1 or scale.ndim == 1:
        most = wide.abs().amax(1)
    else:
        rows, columns = (count * size for count, size in zip(scale.shape, blocks, strict=True))
        padded = torch.nn.functional.pad(wide.abs(), (0, columns - wide.shape[1], 0, rows - wide.shape[0]))
        most = padded.unflatten(0, (-1, blocks[0])).unflatten(2, (-1, blocks[1])).amax((1, 3))
    new = (most / largest).clamp(min=SMALLEST_SCALE).reshape(scale.shape).to(scale.dtype)
    scaled = wide / _spread(new.float(), values.shape, blocks)
    return scaled.clamp(-largest, largest).to(dtype), new


def _spread(scale: torch.Tensor, shape: torch.Size, blocks: Blocks) -> torch.Tensor:
    """Repeat scales for each of their elements. The last blocks may be smaller."""
    if scale.numel() == 1:
        return scale.reshape(())
    if blocks is None or scale.shape[-1] == 1 or scale.ndim == 1:
        return scale.reshape(-1, 1)
    for dim, (block, size) in enumerate(zip(blocks, shape, strict=True)):
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scale
