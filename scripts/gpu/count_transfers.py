"""Counts of what labelling stores and training reads: waits, kernels, and bytes between host and device.

`count_kernels.py` adds them to its record. Bytes are those of the tensors that are copied. The
hidden size is `WIDTH`, and texts have different lengths (`LENGTHS`), so padding shows.

- `storing`: a batch of labelling, from the target's states to examples in memory. Kernels run on
  the device before the copies. `host_reads` are waits of the thread that labels, `waits_behind`
  those of the thread behind it.
- `reading`: the stored states of a micro-batch. `padded_bytes` are those of a copy that is decoded
  and padded before it is moved.
- `trained_head`: casts and additions of a whole head in a loss under autocast, by the number of
  chunks; and the number of chunks of a large loss, by device.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from host_reads import Transfers
from kernel_counter import REST, Counted
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.data.choices import STATE_DTYPES
from outrider.data.packing import padded
from outrider.data.states import BatchStates, encode_states, joined
from outrider.data.types import Example
from outrider.distill.config import DistillConfig
from outrider.distill.label import features
from outrider.distill.label.features import TextFeatures, start_storing
from outrider.models.drafters import objective
from outrider.models.drafters.chunks import MAX_CHUNK, max_chunk
from outrider.models.drafters.objective import LabelRows, against_label, per_label_loss

LENGTHS = (512, 384, 256, 128)
WIDTH, LAYERS, HORIZON, TOP = 64, (2, 16, 29), 5, 8
VOCAB, NUM_LABELS = 384, 1024
CHUNKS = (1, 2, 4, 8)
LARGE_LABELS, LARGE_VOCAB = 8192, 128_256
"""Labels of a micro-batch (2,048 positions, four depths), and the vocabulary of an 8B model."""
CARD_GIB = 80


def count_transfers() -> dict[str, Any]:
    """Return all counts of this module."""
    return {
        "storing": [storing(dtype) for dtype in STATE_DTYPES],
        "reading": [reading(dtype) for dtype in STATE_DTYPES],
        "trained_head": [trained_head(num_chunks) for num_chunks in CHUNKS],
        "chunks_of_a_large_loss": large_loss_chunks(),
    }


def storing(dtype: str) -> dict[str, Any]:
    """Count what it takes to store a batch with four states and top tokens of each token."""
    # 1. A batch as the target leaves it on the device, in bfloat16.
    batch, seq = len(LENGTHS), max(LENGTHS)
    config = DistillConfig(
        horizon=HORIZON, features="last_hidden", feature_layers=list(LAYERS), features_dtype=dtype, top_logprobs=TOP
    )
    states = [torch.randn(batch, seq, WIDTH, dtype=torch.bfloat16) for _ in range(1 + len(LAYERS))]
    computed = TextFeatures(
        hidden_states=states[0],
        layers=dict(zip(LAYERS, states[1:], strict=True)),
        top_tokens=torch.zeros(batch, seq, TOP, dtype=torch.long),
        top_log_probs=torch.zeros(batch, seq, TOP),
    )
    examples = [
        Example(id=str(length), input_ids=torch.zeros(length, dtype=torch.long), loss_mask=torch.ones(length, dtype=torch.bool))
        for length in LENGTHS
    ]
    continuations = torch.zeros(batch, seq, HORIZON, dtype=torch.long)
    # 2. Store it. The copies are counted in place of being made.
    counted, copied = Counted(), Counter[str]()

    def count_copies(tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
        copied["bytes"] += sum(tensor.nbytes for tensor in tensors.values())

        def wait() -> dict[str, torch.Tensor]:
            copied["waits"] += 1
            return dict(tensors)

        return wait

    with patch.object(features, "start_host_copies", count_copies), counted, Transfers(counted.read):
        finish = start_storing(config, examples, continuations, computed)
    assert len(finish()) == batch
    return {
        "dtype": dtype,
        "texts": batch,
        "kernels": counted.kernels[REST],
        "host_reads": counted.host_reads.total(),
        "waits_behind": copied["waits"],
        "bytes": copied["bytes"],
    }


def reading(dtype: str) -> dict[str, Any]:
    """Count the bytes and kernels of a micro-batch's stored layers."""
    layout = padded(LENGTHS)
    layers = [joined([encode_states(torch.randn(length, WIDTH), dtype) for length in LENGTHS]) for _ in LAYERS]
    stored = BatchStates(index=layout.index(), layers=tuple(layers))
    moved: list[torch.Tensor] = []
    counted = Counted()

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor)
        return tensor

    on_device = stored.moved(move)
    with counted, Transfers(counted.read):
        decoded = on_device.padded(on_device.layers, layout.shape)
    assert decoded is not None
    return {
        "dtype": dtype,
        "bytes": sum(tensor.nbytes for tensor in moved),
        "padded_bytes": decoded.nbytes,
        "kernels": counted.kernels[REST],
        "host_reads": counted.host_reads.total(),
    }


class HeadOperators(TorchDispatchMode):
    """Counts operators with a result of a head's shape."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.counts = shape, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.shape == self.shape:
            self.counts[function.overloadpacket._qualified_op_name] += 1
        return output


def trained_head(num_chunks: int) -> dict[str, int]:
    """Count a trained head's casts and the additions of its gradient, in a loss and its backward pass."""
    head, inside = nn.Linear(WIDTH, VOCAB, bias=False), torch.ones(NUM_LABELS, dtype=torch.bool)
    states = torch.randn(NUM_LABELS, WIDTH, requires_grad=True)
    rows = LabelRows(torch.zeros(NUM_LABELS, dtype=torch.long), inside, None, (states,))
    size = NUM_LABELS // num_chunks * VOCAB
    assert NUM_LABELS // num_chunks != VOCAB, "a chunk's states must have another shape than the head"
    with patch.object(objective, "max_chunk", lambda device: size), HeadOperators((VOCAB, WIDTH)) as operators:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = per_label_loss(functools.partial(against_label, head), rows, VOCAB)
        loss.cross_entropy.sum().backward()
    return {"chunks": num_chunks, "casts": operators.counts["aten::_to_copy"], "additions": operators.counts["aten::add"]}


def large_loss_chunks() -> dict[str, int]:
    """Return the number of chunks of LARGE_LABELS labels, on a CPU and on a card of CARD_GIB."""
    card = SimpleNamespace(total_memory=CARD_GIB * 2**30)
    with patch.object(torch.cuda, "get_device_properties", lambda device: card):
        on_card = max_chunk(torch.device("cuda"))
    sizes = {"cpu": MAX_CHUNK, f"card of {CARD_GIB} GiB": on_card}
    return {name: math.ceil(LARGE_LABELS / (size // LARGE_VOCAB)) for name, size in sizes.items()}


def print_transfers(report: Mapping[str, Any]) -> None:
    print(f"\nStoring a batch of {len(LENGTHS)} texts\n{'type':<16}{'kernels':>8}{'host reads':>12}{'behind':>8}{'bytes':>12}")
    for row in report["storing"]:
        print(f"{row['dtype']:<16}{row['kernels']:>8}{row['host_reads']:>12}{row['waits_behind']:>8}{row['bytes']:>12,}")
    print(f"\nReading stored states\n{'type':<16}{'kernels':>8}{'host reads':>12}{'bytes':>12}{'padded':>12}")
    for row in report["reading"]:
        print(f"{row['dtype']:<16}{row['kernels']:>8}{row['host_reads']:>12}{row['bytes']:>12,}{row['padded_bytes']:>12,}")
    print(f"\nA trained head in a loss\n{'chunks':<16}{'casts':>8}{'additions':>12}")
    for row in report["trained_head"]:
        print(f"{row['chunks']:<16}{row['casts']:>8}{row['additions']:>12}")
    print(f"{LARGE_LABELS:,} labels of {LARGE_VOCAB:,} tokens: chunks {report['chunks_of_a_large_loss']}")
