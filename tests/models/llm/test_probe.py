"""The probe of a target: it accepts the rounding of narrow types, and no wrong structure."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.decoding import Prompts
from outrider.models.llm import tree_reader
from outrider.models.llm.hf_target import HFTarget
from outrider.train.batches import require_packing
from tests.tiny_models import IDENTITY

NUM_SPECIAL = 15
"""The first token ids, which are hardly trained."""
SEED = 1


def read(target: HFTarget) -> None:
    """Decode the first token, which probes the target."""
    target.prefill(Prompts.of(torch.tensor([[30, 31, 32]])), max_new_tokens=4, max_nodes=4)


def make_target(dtype: torch.dtype, noise: float = 0.0, special_noise: float = 0.0, noisy_tokens: int = 0) -> HFTarget:
    """Return a random target of strong attention.

    Its input embeddings have a relative noise in each pass, as if this type rounded so coarsely. The
    first token ids have tiny embeddings and another noise. Passes of fewer than `noisy_tokens` have none.
    """
    torch.manual_seed(SEED)
    sizes = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    embeddings = model.get_input_embeddings()
    embeddings.weight.data[:NUM_SPECIAL] *= 1e-3

    def add_noise(_: torch.nn.Module, inputs: tuple[torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        if inputs[0].numel() < noisy_tokens:
            return states
        size = torch.where(inputs[0] < NUM_SPECIAL, special_noise, noise)[..., None]
        return states * (1 + size * torch.randn(states.shape)).to(states.dtype)

    embeddings.register_forward_hook(add_noise)
    return HFTarget(model.to(dtype).eval(), None, IDENTITY)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_coarse_rounding_of_a_narrow_type_is_accepted(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding changes the logits of a real chat model's special tokens by 0.5 in bfloat16."""
    target = make_target(torch.bfloat16, noise, special_noise=0.5)
    measure = Mock(wraps=target._decoding_error)
    monkeypatch.setattr(target, "_decoding_error", measure)
    read(target)
    require_packing(target)
    assert measure.called or not noise, "no error was compared with that of plain decoding"


def test_another_kernel_for_batches_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors with AMX round a lone short text just as its tokens alone, and a batch in another way."""
    target = make_target(torch.bfloat16, 0.02, noisy_tokens=32)
    read(target)
    require_packing(target)
    target._trees.kinds = {}  # as before the first probe
    monkeypatch.setattr(HFTarget, "num_copies", 1)
    with pytest.raises(ValueError, match="reads a draft tree differently"):
        read(target)


def test_special_tokens_would_have_failed_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFTarget, "probe_ids", torch.arange(15))
    with pytest.raises(ValueError, match="reads a draft tree differently"):
        read(make_target(torch.bfloat16, special_noise=0.5))


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 0.02), (torch.bfloat16, 0.5)])
def test_no_rounding_of_the_type_is_that_coarse(dtype: torch.dtype, noise: float) -> None:
    with pytest.raises(ValueError, match="reads a draft tree differently"):
        read(make_target(dtype, noise))


def all_earlier_nodes(lineage: torch.Tensor) -> torch.Tensor:
    """Let each node see all nodes before it, as in causal attention."""
    num_nodes = lineage.shape[1]
    before = torch.arange(num_nodes)[:, None] - torch.arange(num_nodes)
    return before.clamp(min=-1).expand(len(lineage), -1, -1)


def no_ancestors(lineage: torch.Tensor) -> torch.Tensor:
    """Let each node see no other node."""
    return lineage[..., :1]


def by_column(lineage: torch.Tensor) -> torch.Tensor:
    """Count positions by the node's number, not by its depth."""
    return torch.arange(1, 1 + lineage.shape[1]).expand(lineage.shape[:2])


def at_the_root(lineage: torch.Tensor) -> torch.Tensor:
    """Give all nodes the position of the last token."""
    return torch.zeros(lineage.shape[:2], dtype=torch.long)


MISTAKES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "siblings": all_earlier_nodes,
    "ancestors": no_ancestors,
    "columns": by_column,
    "root": at_the_root,
}


@pytest.fixture(params=MISTAKES)
def mistaken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = MISTAKES[request.param]
    if mistake in (by_column, at_the_root):
        monkeypatch.setattr(tree_reader, "depths", mistake)
    else:
        sound = tree_reader.masks_by_kind
        monkeypatch.setattr(tree_reader, "masks_by_kind", lambda kinds, lineage, *rest: sound(kinds, mistake(lineage), *rest))


@pytest.mark.usefixtures("mistaken")
@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.bfloat16, 0.02)])
def test_a_wrong_mask_or_position_is_refused(dtype: torch.dtype, noise: float) -> None:
    with pytest.raises(ValueError, match="reads a draft tree differently"):
        read(make_target(dtype, noise, special_noise=0.5))
