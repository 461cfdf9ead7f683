"""Bounds of the models that configurations from outside describe.

A few bytes of JSON can ask for a million layers, and building them would take hours, also without
memory for weights. What a configuration may build is bounded by the tensors that its weight files
hold, whatever the names of its keys.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

CANT_BE_BUILT = (
    # Values of wrong types, or contradictory values.
    *(StrictDataclassError, TypeError, ValueError, AttributeError),
    LookupError,  # names that transformers doesn't know, and empty vocabularies
    *(ArithmeticError, AssertionError, RuntimeError),  # impossible sizes of tensors, and recursion
    MemoryError,
)
"""Errors of transformers and torch for a configuration that describes no valid model."""

REMEDY = "correct it, or copy or download it again"
MAX_LAYERS = 10_000
"""Most layers, and largest index of one. transformers' configurations do work for each layer, before
any module is built."""
PARTS_PER_TENSOR, SPARE_PARTS = 16, 1000
"""Most modules, parameters and buffers for each stored tensor, and besides: activations, containers,
tied weights. Stored forms may have fewer tensors than the model (fused ones)."""
ELEMENTS_PER_BYTE, SPARE_ELEMENTS = 16, 1 << 20
"""Most elements of parameters for each stored byte, and besides: weights of 2 bits, counted up to four
times, since loading replaces parameters."""
MAX_PARTS = 200_000
"""Most parts of a model whose number of stored tensors is unknown, as in pickled files."""
MAX_BUFFER_BYTES = 1 << 30
"""Most memory of buffers, such as masks and rotary tables, which weight files don't hold."""


def require_possible_numbers(config: Any, path: Path, name: str = "") -> None:
    """Raise ValueError if a JSON value has NaN, or more layers than a model can have.

    The value was read from `path`; `name` is the key that it belongs to. Other integers may be any:
    `bounded_build` counts what a model is really built of, and the rest is information, such as the
    number of training tokens.
    """
    items = config.items() if isinstance(config, Mapping) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        require_possible_numbers(value, path, key if isinstance(key, str) else name)
    if isinstance(config, float) and math.isnan(config):
        raise ValueError(f"{path} has {name} NaN, which is no number; {REMEDY}")
    # Sizes aren't numbers of layers: Gemma 4 has vocab_size_per_layer_input.
    if isinstance(config, int) and "layer" in name and "size" not in name and abs(config) > MAX_LAYERS:
        shown = config if abs(config) < 10**20 else f"a number of {config.bit_length()} bits"
        raise ValueError(
            f"{path} has {name} {shown}, which describes more modules and parameters than can be built: a model has at most "
            f"{MAX_LAYERS} layers; {REMEDY}"
        )


@contextmanager
def bounded_build(path: Path | str, num_tensors: int | None, num_bytes: int | None = None) -> Iterator[None]:
    """Raise ValueError if the block builds more than the stored weights can fill.

    `path` describes the model. Its weights have `num_tensors` tensors and `num_bytes` bytes; None is
    unknown. Modules are counted while they are built, in the whole process, so that the block ends
    early. Other errors of a block that builds an impossible model become ValueErrors, too.
    """
    limit = MAX_PARTS if num_tensors is None else SPARE_PARTS + PARTS_PER_TENSOR * num_tensors
    num_parts = num_elements = buffer_bytes = 0

    def count_part(module: Any, name: str, part: Any) -> None:
        nonlocal num_parts, num_elements, buffer_bytes
        num_parts += 1
        if num_parts > limit:
            stored = "" if num_tensors is None else f", and its weights have {num_tensors} tensors in all"
            raise ValueError(f"{path} describes a model of more than {limit} modules and parameters{stored}; {REMEDY}")
        if isinstance(part, torch.nn.Parameter):
            num_elements += part.numel()
            if num_bytes is not None and num_elements > SPARE_ELEMENTS + ELEMENTS_PER_BYTE * num_bytes:
                raise ValueError(f"{path} describes a much larger model than that of its weights, {num_bytes} bytes; {REMEDY}")
        elif isinstance(part, torch.Tensor):
            buffer_bytes += part.nbytes
            if buffer_bytes > MAX_BUFFER_BYTES:
                raise ValueError(f"{path} describes a model with more than {MAX_BUFFER_BYTES} bytes of masks; {REMEDY}")

    try:
        with each_part(count_part):
            yield
    except ValueError:
        raise
    except CANT_BE_BUILT as error:
        raise ValueError(
            f"{path} describes a model that can't be built ({type(error).__name__}: {error!s:.500}); {REMEDY}"
        ) from error


@contextmanager
def each_part(check: Callable[[Any, str, Any], None]) -> Iterator[None]:
    """Call `check(module, name, part)` for each module, parameter and buffer that the block builds."""
    with ExitStack() as hooks:
        for register in (
            register_module_buffer_registration_hook,
            register_module_module_registration_hook,
            register_module_parameter_registration_hook,
        ):
            hooks.callback(register(check).remove)
        yield


def stored_size(folder: Path) -> tuple[int | None, int | None]:
    """Return the number of tensors and of bytes of a folder's safetensors files; None without any.

    Only their headers are read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None, None
    num_tensors = 0
    for file in files:
        with safetensors.safe_open(file, framework="pt") as opened:
            num_tensors += len(opened.keys())
    return num_tensors, sum(file.stat().st_size for file in files)
