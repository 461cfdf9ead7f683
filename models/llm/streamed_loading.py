"""Loading of a model within a memory budget.

transformers builds the model and decides which tensor of the files belongs to which parameter. It
gets stand-ins instead of the tensors: each has the right shape and type, and takes one element of
memory. The stand-in that a parameter has received names its tensor. So no weights are loaded before
the plan is made, and then only by the weight reader, past the page cache. The digest that identifies
the target reads all files once more (`identity`).
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from ..bounded_build import bounded_build
from ..machine import available_memory
from .config import TargetConfig
from .hidden_states import decoder_layers, layer_configs
from .memory_plan import GIB, Unit, WeightPlace, plan_memory
from .pretrained import attention_of, auto_class, loading_errors, read_config, record_tie, require_complete
from .recurrent_states import find_mixers
from .tree_attention import keeps_keys
from .weight_files import INDEX_FILE, PAGE, SINGLE_FILE, WINDOW_BYTES, StoredTensor, first_equal, read_folder, read_header
from .weight_reader import Loading, WeightFiles, WeightReader, Weights, changed, staging_bytes
from .weight_stream import StreamedUnit, WeightStream

logger = logging.getLogger(__name__)

MAX_HOST_SHARE = 0.5
"""Largest share of the host's free memory for layers that don't fit on an accelerator."""


def stored_weights(config: TargetConfig) -> dict[str, StoredTensor]:
    """Return the tensors of the target's files. Raises ValueError if they can't be streamed."""
    folder = Path(config.name_or_path)
    if not folder.is_dir():
        # Needs the network, and only for names on the Hub.
        from huggingface_hub import snapshot_download

        patterns = ["model*.safetensors", "mtp*.safetensors", INDEX_FILE]
        with loading_errors(f"the target {config.name_or_path!r}", config.name_or_path):
            folder = Path(snapshot_download(config.name_or_path, revision=config.revision, allow_patterns=patterns))
    return read_folder(folder)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model whose parameters are stand-ins for tensors in files."""

    model: PreTrainedModel
    missing: list[str]
    """Parameters that the files lack."""
    by_storage: dict[int, StoredTensor]
    """Stored tensors by the addresses of their stand-ins."""
    stand_ins: Mapping[str, torch.Tensor]
    """The stand-ins, whose addresses no other tensor may get."""

    def source(self, name: str, tensor: torch.Tensor) -> StoredTensor:
        """Return the stored tensor of a parameter. Raises ValueError if it was converted."""
        source = self.by_storage.get(tensor.untyped_storage().data_ptr())
        if source is None or source.shape != tensor.shape:
            raise ValueError(
                f"transformers computes {name} from stored tensors of another form (experts of a mixture are an example), and "
                "target.memory_budget_gib and target.stage_layers read stored tensors as they are; leave them out, or save the "
                "model once where it fits into memory, by save_pretrained(FOLDER, save_original_format=False)"
            )
        return source

    def stored_buffer(self, buffer: torch.Tensor) -> StoredTensor | None:
        """Return the stored tensor of a buffer; None if the model computes it."""
        return self.by_storage.get(buffer.untyped_storage().data_ptr())

    def units(self) -> list[tuple[str, nn.Module]]:
        """Return the names and modules whose weights may come and go: layers, and an untied head.

        Raises ValueError if the model has no list of layers, or if layers share weights.
        """
        layers, head = decoder_layers(self.model), self.model.get_output_embeddings()
        embeddings = {id(parameter) for parameter in self.model.get_input_embeddings().parameters()}
        units = [*layers, *([] if head is None or id(head.weight) in embeddings else [head])]
        uses = Counter(id(parameter) for unit in units for parameter in {*unit.parameters()})
        if not layers or max(uses.values()) > 1:
            why = "its layers share weights" if layers else "it has no list of layers"
            raise ValueError(
                f"{type(self.model).__name__} can't be read in parts: {why}; leave target.memory_budget_gib and "
                "target.stage_layers out"
            )
        names = {id(module): name for name, module in self.model.named_modules()}
        return [(names[id(unit)], unit) for unit in units]


def build_without_weights(config: TargetConfig) -> Skeleton:
    """Build the model with a stand-in for each stored tensor.

    Raises ValueError for stored weights that are quantised, incomplete, or can't be read in parts.
    """
    stored = stored_weights(config)
    called, described = f"the target {config.name_or_path!r}", read_config(config)
    with loading_errors(called, config.name_or_path):
        skeleton = _build(config, described, stored)
    require_complete(called, skeleton.missing)
    record_tie(skeleton.model)
    return skeleton


def _build(config: TargetConfig, described: Any, stored: Mapping[str, StoredTensor]) -> Skeleton:
    # 1. The model's class and type. The class is known once the model was built, without memory.
    if getattr(described, "quantization_config", None) is not None:
        raise ValueError(
            "its weights are quantised, and target.memory_budget_gib and target.stage_layers can't read those in parts; leave "
            "them out, or take the model's weights in 16 bits"
        )
    if file := getattr(described, "transformers_weights", None):
        raise ValueError(
            f"its config.json names the file {file} (transformers_weights), and target.memory_budget_gib and "
            f"target.stage_layers read {SINGLE_FILE} or {INDEX_FILE}: rename the file, and delete the key"
        )
    attention = attention_of(described, config.attn_implementation)
    options: dict[str, Any] = {"dtype": _dtype(config, described, stored), "attn_implementation": attention}
    with bounded_build(config.name_or_path, len(stored)), torch.device("meta"):
        empty: Any = auto_class(described).from_config(described, trust_remote_code=config.trust_remote_code, **options)
    # 2. The model with stand-ins. transformers ties a stored head to stored embeddings only if their
    # values are equal, so the stand-ins of such tensors are equal where the tensors are.
    tied_shapes = {empty.get_parameter(name).shape for name in empty.all_tied_weights_keys}
    tied = [tensor for tensor in stored.values() if tensor.shape in tied_shapes]
    values = first_equal(tied) if len(tied) > 1 else {}
    stand_ins = {
        name: torch.tensor(
            values.get(name, 0), dtype=options["dtype"] if tensor.dtype.is_floating_point else tensor.dtype
        ).expand(tensor.shape)
        for name, tensor in stored.items()
    }
    model, info = type(empty).from_pretrained(None, config=described, state_dict=stand_ins, output_loading_info=True, **options)
    with suppress(OSError):  # not all models have this file
        model.generation_config = GenerationConfig.from_pretrained(config.name_or_path, revision=config.revision or "main")
    by_storage = {tensor.untyped_storage().data_ptr(): stored[name] for name, tensor in stand_ins.items()}
    return Skeleton(model, sorted(info["missing_keys"]), by_storage, stand_ins)


def place_weights(skeleton: Skeleton, config: TargetConfig, device: torch.device) -> WeightStream | None:
    """Load the weights that stay, and start a stream of the others; None if all stay.

    Raises ValueError, before anything is read, for a model that can't be streamed and for a budget
    that is too small.
    """
    assert config.memory_budget_gib is not None
    # 1. Find all sources, and make the plan.
    model, modules = skeleton.model, skeleton.units()
    parameters = dict(model.named_parameters())
    sources = {id(parameter): skeleton.source(name, parameter) for name, parameter in parameters.items()}
    small = {id(parameter) for mixer in find_mixers(model) for parameter in mixer.small_parameters}  # read between passes, too
    units = [
        (name, module, tuple(parameter for parameter in module.parameters() if id(parameter) not in small))
        for name, module in modules
    ]
    in_units = {id(parameter) for *_, contained in units for parameter in contained}
    ends = [parameter for parameter in parameters.values() if id(parameter) not in in_units]
    planned = [_planned(contained, sources, is_head=module is model.get_output_embeddings()) for _, module, contained in units]
    # A window that holds a whole small unit is large enough; it may begin within a page.
    window_bytes = min(WINDOW_BYTES, PAGE * (2 + max(unit.stored_bytes for unit in planned) // PAGE))
    plan = plan_memory(
        planned,
        budget_bytes=int(config.memory_budget_gib * GIB),
        ends_bytes=sum(parameter.nbytes for parameter in ends),
        token_bytes=_token_bytes(model),
        budget_tokens=config.budget_tokens,
        staging_bytes=staging_bytes(window_bytes),
        host_bytes=None if device.type == "cpu" else int(MAX_HOST_SHARE * (available_memory() or 0)),
    )
    _warn_of_experts(model)
    # 2. Load what stays.
    loader = _Loader.of(skeleton, sources, device, window_bytes)
    loader.place("embeddings and norms", ends)
    streamed: list[StreamedUnit] = []
    for (name, module, contained), unit in zip(units, plan.units, strict=True):
        if unit.place is WeightPlace.RESIDENT:
            loader.place(name, contained)
        else:
            weights = loader.weights(name, contained, is_kept=unit.place is WeightPlace.KEPT)
            streamed.append(StreamedUnit(module, contained, weights))
    # 3. Start the stream. Reading its first units measures the rate.
    if not streamed:
        loader.reader.close()
        logger.info("%s: %s", config.name_or_path, plan.describe())
        return None
    stream = WeightStream(streamed, loader.reader, plan, device)
    stream.wait_until_ahead()
    logger.info("%s: %s", config.name_or_path, plan.describe(stream.bytes_per_second))
    return stream


def load_parts(skeleton: Skeleton, parts: Mapping[str, nn.Module], device: torch.device) -> None:
    """Load the weights of some modules by their names, and all buffers.

    All other parameters become zeros that take one element of memory. Raises ValueError for weights
    that can't be read in parts.
    """
    # 1. Find the sources of what is loaded.
    parameters = dict(skeleton.model.named_parameters())
    loaded = {id(parameter) for part in parts.values() for parameter in part.parameters()}
    sources = {
        id(parameter): skeleton.source(name, parameter) for name, parameter in parameters.items() if id(parameter) in loaded
    }
    # 2. Load it.
    loader = _Loader.of(skeleton, sources, device, WINDOW_BYTES)
    for name, part in parts.items():
        loader.place(name, [*part.parameters()])
    loader.reader.close()
    # 3. Free everything else.
    for parameter in parameters.values():
        if id(parameter) not in loaded:
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)


def require_same_headers(stored: Iterable[StoredTensor]) -> None:
    """Raise ValueError if a file's header changed since it was read, for example while it downloads."""
    headers: dict[Path, dict[str, StoredTensor]] = {}
    for tensor in stored:
        if tensor.path not in headers:
            headers[tensor.path] = read_header(tensor.path)
        if headers[tensor.path].get(tensor.name) != tensor:
            raise changed(tensor.path, f"{tensor.name} is no longer where it was")


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loading of what stays in memory."""

    reader: WeightReader
    sources: Mapping[int, StoredTensor]
    """Stored tensors by the ids of their parameters."""
    device: torch.device
    window_bytes: int

    @classmethod
    def of(cls, skeleton: Skeleton, sources: Mapping[int, StoredTensor], device: torch.device, window_bytes: int) -> "_Loader":
        """Open the files of these sources and of all stored buffers, and load the buffers."""
        stored = [*sources.values(), *filter(None, map(skeleton.stored_buffer, skeleton.model.buffers()))]
        reader = WeightReader(WeightFiles({tensor.path for tensor in stored}), device, window_bytes)
        require_same_headers(stored)  # of the files that are open now
        loader = cls(reader, sources, device, window_bytes)
        loader.place_buffers(skeleton)
        return loader

    def place(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        """Load parameters in their types."""
        tensors = [torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device) for parameter in parameters]
        self._fill(self.weights(name, parameters), tensors)
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.data = tensor

    def weights(self, name: str, parameters: Sequence[nn.Parameter], *, is_kept: bool = False) -> Weights:
        """Return the weights of parameters: where they are in files, or copies in host memory."""
        weights = Weights.in_files(name, [self.sources[id(parameter)] for parameter in parameters], self.window_bytes)
        if not is_kept:
            return weights
        is_pinned = self.device.type == "cuda"
        kept = [torch.empty(stored.shape, dtype=stored.dtype, pin_memory=is_pinned) for stored in weights.stored]
        self._fill(weights, kept)
        return weights.keeping(kept)

    def place_buffers(self, skeleton: Skeleton) -> None:
        """Load the buffers that are stored, and move the others."""
        for module_name, module in skeleton.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if source := skeleton.stored_buffer(buffer):
                    placed = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
                    self._fill(Weights.in_files(f"{module_name}.{name}", [source], self.window_bytes), [placed])
                else:
                    placed = buffer.to(self.device)
                module._buffers[name] = placed

    def _fill(self, weights: Weights, tensors: Sequence[torch.Tensor]) -> None:
        self.reader.load(Loading(weights, tensors)).future.result()


def _planned(parameters: Sequence[nn.Parameter], sources: Mapping[int, StoredTensor], *, is_head: bool) -> Unit:
    return Unit(
        stored_bytes=sum(sources[id(parameter)].num_bytes for parameter in parameters),
        computed_bytes=sum(parameter.nbytes for parameter in parameters),
        is_head=is_head,
    )


def _token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of one token's keys and values."""
    numbers = 0
    for config in compress(layer_configs(model), keeps_keys(model)):
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        latent = getattr(config, "kv_lora_rank", None)  # of latent attention, whose cache has no heads
        numbers += latent + config.qk_rope_head_dim if latent else 2 * heads * head_dim
    return int(numbers * model.dtype.itemsize)


def _warn_of_experts(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        logger.warning(
            "%s is a mixture of experts: each pass reads all experts, though a token needs few of them, and drafts gain little",
            type(model).__name__,
        )


def _dtype(config: TargetConfig, described: Any, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """Return the type of the computation, as transformers chooses it."""
    if config.dtype is not None and config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    in_order = sorted(stored.values(), key=lambda tensor: (tensor.path, tensor.name))
    dtypes = [described.dtype, *(tensor.dtype for tensor in in_order if tensor.dtype.is_floating_point)]
    return next(dtype for dtype in dtypes if dtype is not None)
