"""Loading a target from a directory or the Hub. Errors are raised before any long work."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...data.hub import use_hub
from ...data.manifest import TargetIdentity
from ...data.paths import looks_like_path
from ..bounded_build import require_possible_numbers
from ..machine import is_emulated, parse_device, turn_off_cudnn_attention
from .config import TargetConfig, describe, make_config, require_packages, stored_method
from .device_map import devices_of_layers, resolve
from .gguf_files import with_folder
from .hf_target import HFTarget
from .identity import WEIGHT_PATTERNS, config_digest, tokenizer_digest, weights_digest
from .own_tokenizer import require_own_tokenizer
from .pretrained import auto_class, load_pretrained, loading_errors, read_config
from .stages.loading import Head, head_or_stage, stage_ranges
from .stages.staged_target import StagedTarget
from .streamed_loading import build_without_weights, place_weights
from .tensor_parallel import make_sharding, require_whole_ends
from .weight_files import shards_without_index

logger = logging.getLogger(__name__)

TOKENIZER_PATTERNS = ("tokenizer.json", "*.model", "*vocab*", "*.tiktoken", "tekken.json", "tokenization_*.py")
"""File names of tokenizers. For a directory without them, transformers builds an empty tokenizer."""


def load_target(
    config: TargetConfig | str,
    device: torch.device | None = None,
    *,
    safetensors_only: bool = False,
    needs_tokenizer: bool = True,
) -> HFTarget:
    """Load the frozen target of a configuration, or of a directory, GGUF file or Hub id.

    The device is `config.device`, else `device`, else the first accelerator, else the CPU; a
    `device_map` names several. With
    `safetensors_only` no pickled weights are read. Without `needs_tokenizer` a target that has no
    tokenizer is loaded too; its identity then has no digest of a tokenizer. On CUDA this turns off
    cuDNN's attention for the whole process (see `turn_off_cudnn_attention`).

    With `stage_layers` this returns the head's target in the launch's first process. The others are
    stages: they serve the head, and then end with SystemExit.

    Raises ValueError if the directory is incomplete or its tokenizer belongs to another model.
    """
    config = with_folder(TargetConfig(name_or_path=config) if isinstance(config, str) else config)
    device = parse_device(config.device) if config.device else device or default_device()
    if config.dtype is None:
        config = replace(config, dtype="float32" if device.type == "cpu" else "auto")
    # 1. A process that is a stage of the target ends here. The tokenizer takes a second, so its errors
    # come before the weights are loaded.
    head = None if config.stage_layers is None else head_or_stage(config, device)
    tokenizer = _load_tokenizer(config, needs_tokenizer)
    if config.cuda_graphs and device.type != "cuda":
        raise ValueError(f"target.cuda_graphs is on, and the target goes to {device}; choose a CUDA device, or turn it off")
    # 2. Load the model, frozen.
    target = _load_whole(config, tokenizer, device, safetensors_only) if head is None else _load_staged(config, tokenizer, head)
    target.tokenizer_options = config.tokenizer_options
    turn_off_cudnn_attention(target.device)
    if is_emulated(target.dtype, target.device):
        logger.warning(
            "this processor has no instructions for %s: draft trees, batches and labels take up to several times as long as in "
            "float32 (target.dtype=float32)",
            str(target.dtype).removeprefix("torch."),
        )
    # 3. Check that the tokenizer belongs to the model.
    if tokenizer is not None:
        require_own_tokenizer(tokenizer, target.identity.name, target.vocab_size, target.stop_ids)
    return target


def require_divisible(config: TargetConfig, num_processes: int) -> None:
    """Raise ValueError for a target that so many processes couldn't load in stages.

    Reads no weights: it is for the process that launches them, so that a mistake is printed once.
    """
    config = with_folder(config)
    _load_tokenizer(config, needs_tokenizer=True)
    stage_ranges(config, num_processes)
    build_without_weights(config)


def _load_whole(config: TargetConfig, tokenizer: Any, device: torch.device, safetensors_only: bool) -> HFTarget:
    """Load a target whose layers are all in this process, or all but those beyond a memory budget."""
    if config.memory_budget_gib is None:
        model, stream = _load_model(config, device, safetensors_only), None
    else:
        skeleton = build_without_weights(config)
        model, stream = skeleton.model, place_weights(skeleton, config, device)
    layer_devices = () if config.device_map is None else devices_of_layers(model)
    digest = weights_digest(
        config.name_or_path, getattr(model.config, "_commit_hash", None), keeps_cache=config.memory_budget_gib is None
    )
    return HFTarget(
        model.eval().requires_grad_(False),
        tokenizer,
        _identify(config, model.config, tokenizer, digest),
        compiled=config.compiled,
        cuda_graphs=config.cuda_graphs,
        tensor_parallel=config.tensor_parallel,
        # Packed copies of all weights would be outside the budget. A stream leaves the model out.
        fast_linears=config.fast_linears and (config.memory_budget_gib is None or stream is not None),
        stream=stream,
        budget_tokens=None if config.memory_budget_gib is None else config.budget_tokens,
        layer_devices=layer_devices,
    )


def _load_staged(config: TargetConfig, tokenizer: Any, head: Head) -> StagedTarget:
    """Load the head's part of a target in stages, while the stages load theirs."""
    assert config.stage_layers is not None
    ends, link = head.load()
    ends.model.eval().requires_grad_(False)
    identity = _identify(config, ends.model.config, tokenizer, head.weights_sha256)
    return StagedTarget(ends, tokenizer, identity, link, stage_layers=config.stage_layers, fast_linears=config.fast_linears)


def _identify(
    config: TargetConfig, described: Any, tokenizer: PreTrainedTokenizerBase | None, weights_sha256: str
) -> TargetIdentity:
    """Return the digests of the target: labels and checkpoints record them."""
    return TargetIdentity(
        name=_public_name(config.name_or_path),
        revision=config.revision,
        weights_sha256=weights_sha256,
        config_sha256=config_digest(config.name_or_path),
        quantization=describe(config.quantization),
        tokenizer_sha256="" if tokenizer is None else tokenizer_digest(tokenizer),
        hidden_size=described.get_text_config().hidden_size,
        vocab_size=described.get_text_config().vocab_size,
    )


def identify_without_weights(config: TargetConfig, tokenizer: PreTrainedTokenizerBase) -> TargetIdentity:
    """Return the digests of a target whose weights aren't read; theirs is empty."""
    config = with_folder(config)
    return _identify(config, read_config(config), tokenizer, "")


def ends_without_weights(config: TargetConfig) -> tuple[tuple[int, ...], int]:
    """Return the tokens that end an answer, and the size of the vocabulary, of a target whose weights aren't read."""
    config = with_folder(config)
    described = read_config(config).get_text_config()
    try:
        eos = GenerationConfig.from_pretrained(config.name_or_path, revision=config.revision or "main").eos_token_id
    except OSError:
        eos = described.eos_token_id
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),), described.vocab_size


def _load_tokenizer(config: TargetConfig, needs_tokenizer: bool) -> PreTrainedTokenizerBase | None:
    """Load the target's tokenizer; return None if it is absent and not needed. A damaged one isn't absent."""
    try:
        return load_tokenizer(config)
    except ValueError:
        _check_directory(config.name_or_path)
        if needs_tokenizer or _has_tokenizer(Path(config.name_or_path)):
            raise
        logger.info("%s has no tokenizer: nothing checks that a drafter was trained with the same one", config.name_or_path)
        return None


def _has_tokenizer(directory: Path) -> bool:
    return any(any(directory.glob(pattern)) for pattern in TOKENIZER_PATTERNS)


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer. Raises ValueError if there is none."""
    # 1. Check a local directory; a name needs the Hub.
    config = with_folder(config)
    _check_directory(config.name_or_path)
    directory = Path(config.name_or_path)
    if not directory.is_dir():
        use_hub()
    elif not _has_tokenizer(directory):
        raise ValueError(
            f"{directory} has no tokenizer files ({' or '.join(TOKENIZER_PATTERNS[:2])}); copy the files of the model's "
            "tokenizer into it (tokenizer.json, tokenizer_config.json)"
        )
    # 2. Load the tokenizer.
    # transformers reads the model's configuration, too.
    with loading_errors(f"the tokenizer of {config.name_or_path!r}", config.name_or_path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            config.name_or_path,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            **config.tokenizer_options,
        )
    return tokenizer


def _load_model(config: TargetConfig, device: torch.device, safetensors_only: bool) -> PreTrainedModel:
    # 1. Decide how to load: quantised weights go straight to their device, since some can't be
    # moved.
    dtype = "auto" if config.dtype is None or config.dtype == "auto" else getattr(torch, config.dtype)
    stored = stored_method(config.name_or_path)
    if stored is not None:
        require_packages(stored)
    placement: dict[str, Any] = {}
    if config.quantization is not None:
        placement = {"quantization_config": make_config(config.quantization)}
    if placement or stored:
        placement["device_map"] = {"": device}
    if config.device_map is not None:
        empty = _build_empty(config)
        placement["device_map"] = resolve(config.device_map, empty)
    if config.tensor_parallel:
        placement = {"distributed_config": make_sharding(config)}
    # 2. Load the weights.
    model = load_pretrained(
        config.name_or_path,
        f"the target {config.name_or_path!r}",
        revision=config.revision,
        dtype=dtype,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
        use_safetensors=True if safetensors_only else None,
        **placement,
    )
    if config.tensor_parallel:
        require_whole_ends(model)
    if not placement:
        model.to(device=device)  # type: ignore[call-arg]  # transformers wraps `to` in a way that hides its signature
    return model


def _build_empty(config: TargetConfig) -> PreTrainedModel:
    """Build the model without memory for its weights, to read its structure."""
    described, name = read_config(config), config.name_or_path
    with loading_errors(f"the target {name!r}", name), torch.device("meta"):
        empty: PreTrainedModel = auto_class(described).from_config(described, trust_remote_code=config.trust_remote_code)
    return empty


def _check_directory(name_or_path: str) -> None:
    directory = Path(name_or_path)
    if not directory.is_dir():
        if looks_like_path(name_or_path):
            raise ValueError(
                f"target.name_or_path is {name_or_path!r}, and there is no such directory; give an existing one, or a Hub id"
            )
        return
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json, so it isn't a transformers model directory")
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{directory / 'config.json'} is not a JSON file ({error}); complete the download") from error
    if not isinstance(config, dict) or not isinstance(config.get("quantization_config", {}), dict | None):
        raise ValueError(f"{directory / 'config.json'} is not the configuration of a model; complete the download")
    require_possible_numbers(config, directory / "config.json")
    if not any(any(directory.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise ValueError(f"{directory} has no weights ({' or '.join(WEIGHT_PATTERNS)}); complete the download")
    shards_without_index(directory)


def _public_name(name_or_path: str) -> str:
    """Return the Hub id, or a directory's last name.

    Published checkpoints must not contain local paths.
    """
    path = Path(name_or_path)
    return path.resolve().name if path.is_dir() else name_or_path


def default_device() -> torch.device:
    """Return the first available accelerator, else the CPU.

    PyTorch's CUDA build names CUDA even on a machine without a GPU, so availability is checked.
    """
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
