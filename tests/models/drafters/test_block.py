"""The block drafter, against a slow version with full attention over one block at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from outrider.data.types import DrafterBatch
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.block import Block
from outrider.models.drafters.branches import Slots, attend_densely
from outrider.models.drafters.fused_layers import spread_feature_layers
from outrider.models.drafters.labels import Labels
from outrider.models.drafters.objective import Objective
from outrider.models.drafters.options import BlockConfig
from outrider.models.llm.hf_target import HFTarget

from ...decoded import answers_of
from .test_eagle import FAMILIES, PROMPTS, VOCAB, make, make_batch, make_target, rotate

BLOCK = 3
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "one slot": {"num_slots": 1},
    "two layers": {"num_layers": 2, "correction": "markov", "rank": 4},
    "dspark": {"mask_token_id": 5, "inject": False, "correction": "markov", "rank": 4, "layer": {"model_type": "qwen3"}},
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> HFTarget:
    architecture, options = FAMILIES[request.param]
    return make_target(architecture, tiny_tokenizer, **options)


@pytest.fixture(scope="module")
def llama(tiny_tokenizer: Any) -> HFTarget:
    return make_target("Llama", tiny_tokenizer)


def block_drafter(target: HFTarget, **options: Any) -> Block:
    drafter: Block = make("block", target, init="random", block=BLOCK, **options)
    return drafter


def heads(values: torch.Tensor, attention: Any, norm: str) -> torch.Tensor:
    """Return [head, token, head_dim] with the norm of queries or keys, if there is one."""
    values = values.unflatten(-1, (-1, attention.head_dim))
    return (getattr(attention, norm)(values) if hasattr(attention, norm) else values).transpose(0, 1)


def slow_block(drafter: Block, features: torch.Tensor, first_token: int) -> torch.Tensor:
    """Return the slots' outputs [slot, hidden] after a text with these features [token, feature]."""
    context = drafter.context(features)
    hidden = drafter.slot_inputs(torch.tensor([first_token]), context[-1:])[0]
    num_slots = len(hidden)
    positions = torch.arange(len(context) + num_slots)
    cos, sin = (drafter.own_rotary or drafter._target_parts[1])(hidden[None], positions[None])
    for layer in drafter.layers:
        attention: Any = layer.self_attn
        slots = layer.input_layernorm(hidden)
        both = torch.cat([context, slots])
        query = rotate(heads(attention.q_proj(slots), attention, "q_norm"), cos[0, -num_slots:], sin[0, -num_slots:])
        key = rotate(heads(attention.k_proj(both), attention, "k_norm"), cos[0], sin[0])
        value = heads(attention.v_proj(both), attention, "")
        key, value = (part.repeat_interleave(len(query) // len(key), dim=0) for part in (key, value))
        weights = (query @ key.transpose(1, 2) * attention.head_dim**-0.5).softmax(-1)
        hidden = hidden + attention.o_proj((weights @ value).transpose(0, 1).flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return drafter.norm(hidden)


def slow_block_of_tokens(drafter: Block, features: torch.Tensor, first_token: int) -> torch.Tensor:
    """Return the output that serves each draft token, [token, hidden]."""
    outputs = slow_block(drafter, features, first_token)
    return outputs[[min(token, len(outputs) - 1) for token in range(BLOCK)]]


def labelled(batch: DrafterBatch) -> list[tuple[int, int, int]]:
    """List the row, the position and the first continued token of each label."""
    rows = batch.positions.nonzero().tolist()
    return [(row, position, int(batch.continuations[row, position, 0])) for row, position in rows]


@pytest.mark.parametrize("form", sorted(FORMS))
def test_training_reads_each_block_like_the_slow_version(family: HFTarget, form: str) -> None:
    drafter = block_drafter(family, **FORMS[form])
    batch = make_batch(family, drafter.feature_layers)
    labels = labelled(batch)
    assert len(labels) == 4
    outputs = drafter.read_blocks(batch, Labels.of(batch))
    assert batch.features is not None
    for output, (row, position, token) in zip(outputs, labels, strict=True):
        torch.testing.assert_close(output, slow_block(drafter, batch.features[row, : position + 1], token))


def test_packed_texts_are_read_like_separate_ones(llama: HFTarget) -> None:
    drafter = block_drafter(llama)
    batch = make_batch(llama, drafter.feature_layers)
    assert batch.features is not None
    apart = drafter.read_blocks(batch, Labels.of(batch))

    def packed(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[0], values[1, :8]])[None]

    starts = torch.tensor([[0] * 12 + [12] * 8])
    columns = {
        name: packed(getattr(batch, name))
        for name in ("input_ids", "attention_mask", "positions", "continuations", "hidden_states", "features")
    }
    together_batch = DrafterBatch(**columns, starts=starts)
    together = drafter.read_blocks(together_batch, Labels.of(together_batch))
    torch.testing.assert_close(together, apart)


def test_a_block_reads_nothing_after_its_position(llama: HFTarget) -> None:
    drafter = block_drafter(llama)
    batch = make_batch(llama, drafter.feature_layers)
    labels = labelled(batch)
    index, (row, position, _) = next((index, label) for index, label in enumerate(labels) if label[1] == 4)
    before = drafter.read_blocks(batch, Labels.of(batch))
    assert batch.features is not None
    features = batch.features.clone()
    features[row, position + 1 :] += 1.0
    after = drafter.read_blocks(replace(batch, features=features), Labels.of(batch))
    torch.testing.assert_close(after[index], before[index], rtol=0, atol=0)
    assert not torch.equal(after, before), "blocks further on do read it"


@pytest.mark.parametrize("form", sorted(FORMS))
def test_decoding_reads_each_block_like_the_slow_version(llama: HFTarget, form: str) -> None:
    drafter = block_drafter(llama, **FORMS[form], width=4, tree_nodes=6)
    with patch.object(Block, "search_slots", autospec=True, side_effect=Block.search_slots) as searched, torch.inference_mode():
        answers = answers_of(llama, drafter, PROMPTS, 9)
    assert answers == answers_of(llama, NullDrafter(), PROMPTS, 9)
    # The first call has all rows; its texts are the prompts, and the answers' first tokens.
    hidden = searched.call_args_list[0].args[1]
    for row, prompt in enumerate(PROMPTS):
        _, features = llama.hidden_states(torch.tensor([prompt]), drafter.feature_layers)
        assert features is not None
        torch.testing.assert_close(hidden[row], slow_block_of_tokens(drafter, features[0], answers[row][0]))


def test_later_steps_read_accepted_tokens_like_the_slow_version(llama: HFTarget) -> None:
    """Rows accept different numbers of tokens, so a pass reads different numbers of them."""
    drafter = block_drafter(llama, tree_nodes=6)
    texts = [list(prompt) for prompt in PROMPTS]
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    with patch.object(Block, "search_slots", autospec=True, side_effect=Block.search_slots) as searched, torch.inference_mode():
        steps = list(generate(llama, drafter, GreedyAcceptance(), prompts, max_new_tokens=12))
    unread = set()
    for done, step, call in zip(steps[:-1], steps[1:], searched.call_args_list, strict=True):
        for row, tokens in zip(done.rows, done.tokens, strict=True):
            texts[row] += tokens
        unread.add(tuple(len(tokens) for row, tokens in zip(done.rows, done.tokens, strict=True) if row in step.rows))
        for hidden, row in zip(call.args[1], step.rows, strict=True):
            _, features = llama.hidden_states(torch.tensor([texts[row][:-1]]), drafter.feature_layers)
            assert features is not None
            torch.testing.assert_close(hidden, slow_block(drafter, features[0], texts[row][-1]))
    assert any(len(set(counts)) > 1 for counts in unread), "no pass had rows with different numbers of unread tokens"


@pytest.mark.parametrize("correction", ["markov", "rnn"])
def test_a_correction_makes_slots_depend_on_tokens(llama: HFTarget, correction: str) -> None:
    drafter = block_drafter(llama, correction=correction, rank=4)
    hidden = torch.randn(1, BLOCK, llama.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    one, other = (
        drafter.logits(hidden, drafter.correction.states(torch.tensor([[7, token, 9]]), drafter.embed)) for token in (8, 20)
    )
    torch.testing.assert_close(one[:, 0], other[:, 0])
    assert not torch.equal(one[:, 1], other[:, 1])
    assert torch.equal(one[:, 2], other[:, 2]) == (correction == "markov"), "only the recurrence has a memory"


def test_slots_attend_like_one_mask_over_everything() -> None:
    """The way of a GPU and that of a CPU give the same output and the same gradients."""
    torch.manual_seed(0)
    text = [torch.randn(2, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    own = [torch.randn(2, 2, 3 * BLOCK, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    query = torch.randn(2, 4, 3 * BLOCK, 4, dtype=torch.float64, requires_grad=True)
    visible = (torch.arange(7) < torch.tensor([[3], [5], [7]])).expand(2, 1, -1, -1).repeat(1, 1, BLOCK, 1)
    slots = Slots((text[0], text[1]), BLOCK)
    slots.update(own[0], own[1], 0)
    dense = attend_densely(query, (text[0], text[1]), [(own[0], own[1])], visible, 0.5, num_slots=BLOCK)
    split = slots.attend(query, visible, 0.5)
    torch.testing.assert_close(split, dense)
    weights = torch.randn_like(split)
    inputs = [query, *text, *own]
    torch.testing.assert_close(
        torch.autograd.grad((split * weights).sum(), inputs), torch.autograd.grad((dense * weights).sum(), inputs)
    )


def test_a_reduced_vocabulary_starts_with_the_targets_rows(llama: HFTarget) -> None:
    config = BlockConfig(block=BLOCK, draft_vocab_size=20)
    drafter = Block.for_target(config, llama)
    assert drafter.wants_token_counts
    drafter.choose_draft_vocabulary(torch.arange(VOCAB))
    assert drafter.vocabulary.tokens is not None
    assert drafter.vocabulary.tokens.tolist() == list(range(VOCAB - 20, VOCAB))
    torch.testing.assert_close(drafter.lm_head.weight, llama.head.weight[-20:].float())


def test_a_trained_head_starts_as_the_targets(llama: HFTarget) -> None:
    sizes = (None, llama.vocab_size)
    frozen, trained = (Block.for_target(BlockConfig(block=BLOCK, draft_vocab_size=size), llama).double() for size in sizes)
    trained.choose_draft_vocabulary(torch.arange(llama.vocab_size).flip(0))
    trained.load_state_dict(frozen.state_dict(), strict=False)
    hidden = torch.randn(3, llama.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(trained.head(hidden), frozen.head(hidden), rtol=1e-6, atol=1e-6)
    assert set(dict(trained.named_parameters())) - set(dict(frozen.named_parameters())) == {"lm_head.weight"}
    with torch.no_grad():
        trained.lm_head.weight.zero_()
    assert not trained.head(hidden).any()
    assert llama.head.weight.any(), "the target's own head is another tensor"


def test_a_fresh_drafter_passes_the_latest_context_through(llama: HFTarget) -> None:
    drafter = Block.for_target(BlockConfig(block=BLOCK), llama)
    features = torch.randn(1, 5, len(drafter.feature_layers) * llama.hidden_size)
    context = drafter.context(features)
    last_tap = features[..., -llama.hidden_size :]
    torch.testing.assert_close(context, drafter.hidden_norm(last_tap))
    outputs = slow_block(drafter.float(), features[0], 7)
    torch.testing.assert_close(outputs[1], drafter.norm(context[0, -1]))


def test_slots_that_start_with_nothing_else_are_not_zero(llama: HFTarget) -> None:
    """The norm of a zero vector multiplies gradients by the inverse root of its epsilon."""
    torch.manual_seed(0)
    drafter = Block.for_target(BlockConfig(block=BLOCK, inject=False), llama)

    def gradient_norm() -> torch.Tensor:
        drafter.zero_grad()
        drafter.loss(make_batch(llama, drafter.feature_layers), Objective()).sums.sum().backward()
        return torch.stack([weight.grad.norm() for weight in drafter.parameters() if weight.grad is not None]).norm()

    norm = gradient_norm()
    with torch.no_grad():
        drafter.slots.zero_()
    assert norm < gradient_norm() / 5
    assert not Block.for_target(BlockConfig(block=BLOCK), llama).slots.any(), "these start with the context"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": VOCAB}, "mask_token_id is 90; the target has 90 tokens"),
        ({"feature_layers": [9]}, "feature_layers is .9.; the target has the layers 0 to 6"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size is 91"),
    ],
)
def test_options_that_the_target_lacks_are_refused(llama: HFTarget, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Block.for_target(BlockConfig(**options), llama)


def test_labels_that_are_shorter_than_the_block_are_refused() -> None:
    with pytest.raises(ValueError, match="drafter.block is 4 and distill.horizon 4.*at least 5"):
        Block.require_horizon(BlockConfig(), 4)
    Block.require_horizon(BlockConfig(), 5)


def test_one_slot_learns_from_labels_of_any_length(llama: HFTarget) -> None:
    """It may draft deeper than it was trained, since only the correction knows the depth."""
    Block.require_horizon(BlockConfig(num_slots=1), 2)
    with pytest.raises(ValueError, match="drafter.num_slots is 2 and distill.horizon 2.*at least 3"):
        Block.require_horizon(BlockConfig(num_slots=2), 2)
    batch = make_batch(llama, (2, 3, 4))
    horizon = batch.continuations.shape[2]
    drafter = make("block", llama, init="random", block=horizon + 3, num_slots=1, feature_layers=[2, 3, 4]).train()
    loss = drafter.loss(batch, Objective())
    assert len(loss.sums) == horizon - 1
    assert (loss.sums > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 5}, "num_slots is 5, more than the 4 draft tokens of block"),
        ({"depth": 5, "correction": "markov"}, "depth is 5, more than the 4 draft tokens of block, and correction markov"),
    ],
)
def test_slots_that_draft_nothing_sensible_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockConfig(**options)


@pytest.mark.parametrize(("options", "depth"), [({}, 5), ({"num_slots": 1}, 6), ({}, 2), ({"correction": "markov"}, 2)])
def test_trees_are_as_deep_as_depth_says_and_decode_losslessly(llama: HFTarget, options: dict[str, Any], depth: int) -> None:
    drafter = block_drafter(llama, feature_layers=[2, 3, 4], width=4, tree_nodes=4 * depth, depth=depth, **options).eval()
    drafter = drafter.to(llama.dtype)
    deepest = 0
    with patch_propose(drafter) as trees:
        texts = [answers_of(llama, proposer, PROMPTS, 12) for proposer in (drafter, NullDrafter())]
    assert texts[0] == texts[1]
    for tree in trees:
        assert tree.num_nodes <= drafter.max_nodes
        deepest = max(deepest, int(tree.depths.max()))
    assert deepest == depth
    shallow = block_drafter(llama, feature_layers=[2, 3, 4], **options)
    assert set(shallow.state_dict()) == set(drafter.state_dict()), "the depth of the search is no part of the weights"


@contextmanager
def patch_propose(drafter: Block) -> Iterator[list[Any]]:
    """Collect the trees that a drafter proposes."""
    trees: list[Any] = []
    propose = drafter.propose

    def collecting(*arguments: Any, **named: Any) -> Any:
        tree, drafted = propose(*arguments, **named)
        trees.append(tree)
        return tree, drafted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", collecting)
        yield trees


def test_a_search_without_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="width is 600"):
        BlockConfig(width=600)
    with pytest.raises(ValueError, match="candidates is 4096 and block 16; more than 4194304 pairs"):
        BlockConfig(correction="markov", width=1, candidates=4096, block=16)
    BlockConfig(correction="rnn", width=1, candidates=4096, block=16)
    BlockConfig(correction="rnn", candidates=100_000)  # it ranks no candidates
    with pytest.raises(ValueError, match="width is 600 and block 4: a search of more than"):
        BlockConfig(correction="rnn", width=600)
    with pytest.raises(ValueError, match="rank\n  Input should be less than or equal to 8192"):
        BlockConfig(correction="markov", rank=100_000)


def test_feature_layers_are_spread_over_a_deep_target() -> None:
    assert spread_feature_layers(36) == [2, 10, 18, 25, 33]
    assert spread_feature_layers(8) == [2, 4, 5]


@pytest.mark.parametrize("correction", ["rnn", "markov"])
def test_the_tree_is_never_larger_than_the_bound(llama: HFTarget, correction: str) -> None:
    for width, nodes in [(1, 48), (3, 48), (16, 5), (100, 400)]:
        drafter = block_drafter(llama, correction=correction, rank=4, width=width, tree_nodes=nodes)
        sizes = []
        for step in generate(llama, drafter, GreedyAcceptance(), torch.tensor([PROMPTS[0]]), max_new_tokens=4):
            sizes += [] if step.is_prefill else [step.num_nodes]
        assert max(sizes) == drafter.max_nodes <= nodes


def test_more_layers_than_the_target_has_are_an_error_before_they_are_built(llama: HFTarget) -> None:
    with pytest.raises(ValueError, match=r"drafter\.num_layers is 1000000; the target has only \d+"):
        block_drafter(llama, num_layers=1_000_000)
