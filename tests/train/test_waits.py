"""Where labelling and training wait for an accelerator, and what is copied between it and the host."""

from collections.abc import Callable, Mapping

import pytest
import torch

from outrider.data.config import STATE_DTYPES
from outrider.data.states import state_bytes
from outrider.data.types import DrafterBatch, Example
from outrider.distill.config import DistillConfig
from outrider.distill.label import features
from outrider.distill.label.features import TextFeatures, start_storing
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters.losses import LossKind
from outrider.models.drafters.objective import Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.train.batches import target_reads, with_hidden_states

from ..host_reads import HostReads, ScalarReads

LOSSES = {"redrafter": "cross_entropy", "medusa": "cross_entropy", "eagle": "kl", "eagle3": "kl"} | {
    "block": "cross_entropy",
    "draft_model": "cross_entropy",
}
"""Losses of the recipes, by drafter."""
NUM_READS = {"redrafter": 2, "medusa": 4, "block": 3, "draft_model": 5, "eagle3": 5, "eagle": 7}
"""Reads of the numbers of labels and of branches, of the labels of Medusa's heads (twice), and of the
tokens with a teacher. EAGLE also counts its untrained depths, a draft model the continuations that leave their
text and the labels that differ."""
LENGTHS, WIDTH, LAYERS, HORIZON = (24, 16, 8), 64, (2, 16, 29), 5
TOP_TOKENS, INDEX_BYTES = 8, 8


@pytest.mark.parametrize("kind", LOSSES)
def test_a_micro_batch_waits_for_numbers_of_labels_only(kind: str, target: HFTarget) -> None:
    drafter = build_drafter(parse_drafter({"kind": kind}), target).train()
    objective = Objective(loss=LossKind(LOSSES[kind]), head=target.head if LOSSES[kind] == "kl" else None)
    texts = torch.randint(target.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    positions = (torch.arange(24) < 24 - HORIZON).expand(2, -1).clone()
    batch = DrafterBatch(
        input_ids=texts,
        attention_mask=torch.ones_like(positions),
        positions=positions,
        continuations=torch.stack([texts.roll(-depth, 1) for depth in range(1, HORIZON + 1)], dim=2),
    ).to(texts.device)
    with HostReads() as reads, ScalarReads() as scalars:
        batch = with_hidden_states(batch, target, target_reads(drafter, objective))
    assert (reads.names, scalars.count) == ([], 0)
    with HostReads() as reads:
        loss = drafter.loss(batch, objective)
    assert len(reads.names) == NUM_READS[kind], reads.names
    assert set(reads.names) <= {"nonzero", "__int__", "tolist", "bincount", "unique", "unique_consecutive"}
    with HostReads() as reads, ScalarReads() as scalars:
        loss.sums.sum().backward()
    assert (reads.names, scalars.count) == ([], 0), "one chunk isn't computed again"
    assert any(weight.grad is not None for weight in drafter.parameters())


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_storing_a_batch_never_waits_and_copies_no_padding(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # 1. A batch as the target leaves it on the device, in bfloat16.
    batch, seq = len(LENGTHS), max(LENGTHS)
    stored = {"features": "last_hidden", "feature_layers": list(LAYERS), "features_dtype": dtype, "top_logprobs": TOP_TOKENS}
    states = [torch.randn(batch, seq, WIDTH, dtype=torch.bfloat16) for _ in range(1 + len(LAYERS))]
    computed = TextFeatures(
        hidden_states=states[0],
        layers=dict(zip(LAYERS, states[1:], strict=True)),
        top_tokens=torch.zeros(batch, seq, TOP_TOKENS, dtype=torch.long),
        top_log_probs=torch.zeros(batch, seq, TOP_TOKENS),
    )
    examples = [
        Example(id=str(length), input_ids=torch.zeros(length, dtype=torch.long), loss_mask=torch.ones(length, dtype=torch.bool))
        for length in LENGTHS
    ]
    copied: list[torch.Tensor] = []

    def start(tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
        copied.extend(tensors.values())
        return lambda: dict(tensors)

    # 2. Its copies begin without a wait, and hold each token's values alone.
    monkeypatch.setattr(features, "start_host_copies", start)
    labels = torch.zeros(batch, seq, HORIZON, dtype=torch.long)
    with HostReads() as reads, ScalarReads() as scalars:
        finish = start_storing(DistillConfig(horizon=HORIZON, **stored), examples, labels, computed)
    assert (reads.names, scalars.count) == ([], 0)
    assert len(finish()) == batch
    others = 8 * HORIZON + (8 + 4) * TOP_TOKENS + 1  # labels, top tokens, whether states are finite
    token_bytes = (1 + len(LAYERS)) * state_bytes(WIDTH, dtype) + others
    assert sum(tensor.nbytes for tensor in copied) == sum(LENGTHS) * token_bytes
