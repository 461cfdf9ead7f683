"""Tiny targets within memory budgets: all or some of their layers are read in each pass."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from outrider.models.llm import streamed_loading
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.models.llm.memory_plan import GIB, NUM_SLOTS
from outrider.models.llm.streamed_loading import build_without_weights
from outrider.models.llm.weight_stream import WeightStream

CPU = torch.device("cpu")
BUDGET_TOKENS = 1024


def budget_bytes(config: TargetConfig, num_staying: int, *, head_streams: bool = False) -> int:
    """Return the least budget with which so many layers stay, or are kept as stored.

    The layers must be equally large.
    """
    # 1. Bytes in the files and in the type of the computation, by unit.
    skeleton = build_without_weights(config)
    model, units = skeleton.model, [module for _, module in skeleton.units()]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = [module for module in units if head_streams or module is not model.get_output_embeddings()]

    def stored(module: nn.Module) -> int:
        return sum(skeleton.source(names[id(parameter)], parameter).num_bytes for parameter in module.parameters())

    # 2. The parts of the plan.
    ends = computed(model) - sum(map(computed, layers))
    slots = NUM_SLOTS * max(map(computed, layers))
    staying = sum(min(computed(module), stored(module)) for module in layers[:num_staying])
    return ends + slots + staying + streamed_loading._token_bytes(model) * config.budget_tokens


def computed(module: nn.Module) -> int:
    """Return the bytes of a module's parameters in the type of the computation."""
    return sum(parameter.nbytes for parameter in module.parameters())


def load_streamed(
    folder: Path,
    *,
    num_staying: int = 0,
    dtype: str = "float32",
    head_streams: bool = False,
    needs_tokenizer: bool = False,
    **options: Any,
) -> HFTarget:
    """Load a target with a budget in which so many layers stay. The reader's buffers count as 0.

    Real ones are larger than a tiny model.
    """
    values = {"budget_tokens": BUDGET_TOKENS, "fast_linears": False, **options}
    config = TargetConfig(name_or_path=str(folder), dtype=dtype, **values)
    with patch.object(streamed_loading, "staging_bytes", return_value=0):
        config.memory_budget_gib = budget_bytes(config, num_staying, head_streams=head_streams) / GIB
        target = load_target(config, CPU, needs_tokenizer=needs_tokenizer)
    assert target.stream is not None
    return target


def load_in_memory(folder: Path, *, dtype: str = "float32", needs_tokenizer: bool = False) -> HFTarget:
    """Load the whole target, with linear layers as transformers computes them."""
    config = TargetConfig(name_or_path=str(folder), dtype=dtype, fast_linears=False)
    return load_target(config, CPU, needs_tokenizer=needs_tokenizer)


def stream_of(target: HFTarget) -> WeightStream:
    """Return a target's stream."""
    assert target.stream is not None
    return target.stream


def layers_of(target: HFTarget) -> Sequence[nn.Module]:
    """Return the units that aren't resident."""
    return [unit.module for unit in stream_of(target).units]


def reader_threads() -> list[threading.Thread]:
    """Return the threads of all weight readers of this process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("outrider-weights")]


def open_files(folder: Path) -> list[Path]:
    """Return the files of a folder that this process has open."""

    def links() -> Iterator[Path]:
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                yield link.readlink()

    return [path for path in links() if path.parent == folder.resolve()]
