"""Memory of training: no tensor of all labels times the vocabulary, and few activations."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.types import UNKNOWN, DrafterBatch
from outrider.models.drafters import DRAFTERS, build_drafter, parse_drafter, scoring
from outrider.models.drafters.base import TrainableDrafter
from outrider.models.drafters.losses import LossKind
from outrider.models.drafters.objective import Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.train.batches import states_of_texts

from ...tiny_models import IDENTITY
from ..largest import Largest

# The vocabulary is by far the largest dimension, so that a tensor of all labels (or positions)
# times the vocabulary stands out.
VOCAB, REDUCED, HIDDEN, HORIZON, SEQ = 2048, 1024, 16, 4, 32
CHUNK = 8 * VOCAB
OPTIONS: dict[str, dict[str, Any]] = {
    "redrafter": {"exit_width": HIDDEN},
    "redrafter-reduced": {"kind": "redrafter", "exit_width": HIDDEN, "draft_vocab_size": REDUCED},
    "medusa": {"num_heads": 3},
    "mtp": {"init": "random"},
    "medusa-shared": {"kind": "medusa", "num_heads": 3, "share_head": True},
    "eagle": {},
    "eagle3": {"feature_layers": [0, 1]},
    "eagle3-reduced": {"kind": "eagle3", "feature_layers": [0, 1], "draft_vocab_size": REDUCED},
    "block": {"feature_layers": [0, 1], "block": 3},
    "block-reduced": {"kind": "block", "feature_layers": [0, 1], "block": 3, "draft_vocab_size": REDUCED},
    "draft_model": {"num_layers": 1},
}
WITH_LAYERS = ["block", "eagle", "eagle3", "mtp", "draft_model"]


@pytest.fixture(scope="module")
def wide_target(tiny_tokenizer: PreTrainedTokenizerFast) -> HFTarget:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    identity = replace(IDENTITY, hidden_size=HIDDEN, vocab_size=VOCAB)
    return HFTarget(model, tiny_tokenizer, identity)


def make(name: str, target: HFTarget) -> TrainableDrafter:
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": name, **OPTIONS[name]}), target).train()
    drafter.choose_draft_vocabulary(torch.arange(VOCAB))
    return drafter


def make_batch(target: HFTarget, drafter: TrainableDrafter) -> DrafterBatch:
    """Make two texts with a label at nearly every position, and all states of the target.

    About half of the continuations repeat the text.
    """
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(VOCAB, (2, SEQ), generator=generator)
    ahead = torch.stack([input_ids.roll(-1 - depth, 1) for depth in range(HORIZON)], dim=2)
    strays = torch.rand(ahead.shape, generator=generator) < 0.2
    batch = DrafterBatch(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids, dtype=torch.bool),
        positions=torch.arange(SEQ).expand(2, -1) < SEQ - HORIZON,
        continuations=torch.where(strays, 7, ahead),
        top_tokens=torch.randint(VOCAB, (2, SEQ, 8), generator=generator),
        top_log_probs=torch.full((2, SEQ, 8), 0.01).log(),
    )
    with Largest() as largest:
        hidden_states, features = states_of_texts(target, batch, last=True, layers=drafter.feature_layers)
    assert largest.size < input_ids.numel() * VOCAB / 4, "the target's pass makes no logits"
    return replace(batch, hidden_states=hidden_states, features=features)


def test_every_kind_is_here() -> None:
    assert {options.get("kind", name) for name, options in OPTIONS.items()} == DRAFTERS.keys()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "kind" in OPTIONS[name] else []) for name in sorted(OPTIONS)]
)
def test_no_tensor_holds_all_labels_times_the_vocabulary(name, wide_target, monkeypatch):
    """This holds for every loss and teacher."""
    monkeypatch.setattr(scoring, "max_chunk", lambda device: CHUNK)
    drafter = make(name, wide_target)
    batch = make_batch(wide_target, drafter)
    num_positions = int(batch.positions.sum())
    assert int((batch.continuations[batch.positions] != UNKNOWN).sum()) > 8 * CHUNK // VOCAB
    allowed = max(CHUNK, *(parameter.numel() for parameter in drafter.parameters()), wide_target.head.weight.numel())
    assert allowed < num_positions * REDUCED, "a tensor of positions times the smaller vocabulary would be found"
    objectives = [Objective(loss=loss, head=wide_target.head) for loss in LossKind]
    for objective in (*objectives, Objective(loss=LossKind.kl_acceptance, teacher="top_k")):
        with Largest() as largest:
            drafter.loss(batch, objective).sums.sum().backward()
        assert largest.size <= allowed, objective.loss
    drafter.eval()
    with Largest() as largest, torch.no_grad():
        drafter.loss(batch, objectives[0])
    assert largest.size <= allowed, "when it is only measured"


def saved_bytes(drafter: TrainableDrafter, batch: DrafterBatch) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Measure the bytes that autograd saves for the backward pass, without weights.

    Also returns the loss by depth, and the gradients.
    """
    torch.manual_seed(5)  # for EAGLE's noise
    weight_pointers = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weight_pointers:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    drafter.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sums = drafter.loss(batch, Objective()).sums
    total = sum(kept.values())
    sums.sum().backward()
    return total, sums.detach(), [parameter.grad.clone() for parameter in drafter.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", WITH_LAYERS)
def test_recomputed_activations_give_the_same_bits_in_less_memory(
    name: str, wide_target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that the logits don't hide the layers
    monkeypatch.setattr(scoring, "max_chunk", lambda device: CHUNK)
    drafter = make(name, wide_target)
    batch = make_batch(wide_target, drafter)
    kept, sums, gradients = saved_bytes(drafter, batch)
    drafter.checkpoint_activations()
    kept_less, same_sums, same_gradients = saved_bytes(drafter, batch)
    assert kept_less < 0.7 * kept
    assert torch.equal(sums, same_sums)
    assert len(gradients) == len(same_gradients) >= 8
    assert all(torch.equal(*pair) for pair in zip(gradients, same_gradients, strict=True))


def test_every_kind_supports_activation_checkpointing(wide_target: HFTarget) -> None:
    for name in OPTIONS:
        make(name, wide_target).checkpoint_activations()
