"""ReDrafter's recurrence, loss, beam search and reduced vocabulary, against slow versions."""

import pytest
import torch
from torch.nn import functional as F

from outrider.data.types import UNKNOWN
from outrider.models.drafters import build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.objective import Objective
from outrider.models.drafters.redrafter import Redrafter

from .test_medusa import make_batch


def make(target, **options) -> Redrafter:
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": "redrafter", **options}), target).double()
    # The blocks start as the identity, which would hide mistakes in them.
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def slow_log_probs(drafter: Redrafter, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Compute the log-probabilities after `tokens`, written out as in the paper.

    The target chose the first token.
    """
    config = drafter.config
    embeddings = [drafter.embed(torch.tensor(token)) for token in tokens]
    u, w, b = drafter.recurrence.weight, drafter.input.weight, drafter.input.bias
    state = embeddings[0] if config.initial_state == "embedding" else F.silu(w @ embeddings[0] + b)
    for embedding in embeddings[1:]:
        state = F.silu(u @ state + w @ embedding + b)
    x = drafter.projection(torch.cat([hidden, state]))
    for block in drafter.blocks:
        x = x + F.silu(block.linear(x))
    return drafter.head(x).log_softmax(-1)


@pytest.mark.parametrize("options", [{}, {"initial_state": "zero"}, {"num_blocks": 0, "exit_width": 24}])
def test_loss_equals_the_formulas_written_out(target, options):
    drafter = make(target, **options)
    texts = [[7, 8, 9, 10], [11, 12, UNKNOWN, UNKNOWN], [13, UNKNOWN, UNKNOWN, UNKNOWN]]
    batch = make_batch(target, texts)
    drafter.requires_grad_(False)
    loss = drafter.loss(batch, Objective())
    sums, counts, hits, joint = [0.0] * 3, [0] * 3, [0] * 3, [0] * 3
    for row, text in enumerate(texts):
        so_far = True
        for depth in range(3):
            if text[depth + 1] == UNKNOWN:
                break
            log_probs = slow_log_probs(drafter, batch.hidden_states[0, row], text[: depth + 1])
            hit = int(log_probs.argmax()) == text[depth + 1]
            so_far = so_far and hit
            sums[depth] -= float(log_probs[text[depth + 1]])
            counts[depth] += 1
            hits[depth] += hit
            joint[depth] += so_far
    assert loss.sums.tolist() == pytest.approx(sums, rel=1e-5)
    assert loss.counts.tolist() == counts == [2, 1, 1]
    assert loss.hits[:, 0].tolist() == hits
    assert loss.joint_hits.tolist() == joint


def test_hits_and_joint_hits_count_what_a_chain_would_accept(target):
    drafter = make(target)
    batch = make_batch(target, [[7, 1, 1, 1]] * 2)
    hidden = batch.hidden_states[0, 0]
    text = [7]
    # Row 0 has the drafter's own tokens. Row 1 differs at the second depth only.
    for _ in range(3):
        text.append(int(slow_log_probs(drafter, hidden, text).argmax()))
    wrong = list(text)
    wrong[2] = (text[2] + 1) % target.vocab_size
    wrong[3] = int(slow_log_probs(drafter, hidden, wrong[:3]).argmax())
    batch.continuations[0, :2] = torch.tensor([text, wrong])
    batch.hidden_states[0, 1] = hidden
    loss = drafter.loss(batch, Objective())
    assert loss.hits[:, 0].tolist() == [2, 1, 2]
    assert loss.joint_hits.tolist() == [2, 1, 1]


def test_counts_of_another_vocabulary_are_refused(target):
    drafter = make(target, draft_vocab_size=3)
    with pytest.raises(ValueError, match="the target has 300 tokens"):
        drafter.choose_draft_vocabulary(torch.zeros(7, dtype=torch.long))
    with pytest.raises(ValueError, match="more than the target's 300 tokens"):
        make(target, draft_vocab_size=301)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_widht": 4}, "no option beam_widht"),
        ({"initial_state": "ones"}, "must be one of embedding, zero"),
        ({"beam_width": 0}, "beam_width=0: must be above 0"),
        ({"beam_width": -1000, "beam_length": -1000}, "drafter.beam_width=-1000: must be above 0\ndrafter.beam_length=-1000"),
        ({"beam_width": 1, "beam_length": 10**6}, "is a mistake; lower one"),
        ({"beam_width": 4096, "beam_length": 2, "tree_nodes": 5000}, "is a mistake; lower one"),
        ({"beam_width": 2.5}, "beam_width=2.5: must be a whole number"),
        ({"num_blocks": -1}, "num_blocks=-1: must be at least 0"),
    ],
)
def test_a_typo_or_an_impossible_option_of_redrafter_is_named(target, options, message):
    with pytest.raises(ValueError, match=message):
        build_drafter(parse_drafter({"kind": "redrafter", **options}), target)


def test_the_papers_widest_search_is_allowed(target):
    assert (
        build_drafter(parse_drafter({"kind": "redrafter", "beam_width": 70, "beam_length": 5}), target).config.beam_width == 70
    )


def test_an_unknown_kind_lists_the_known_ones(target):
    with pytest.raises(ValueError, match="redrafter"):
        build_drafter(parse_drafter({"kind": "medusae"}), target)


def test_loss_with_one_token_labels_is_an_error(target):
    drafter = make(target)
    batch = make_batch(target, [[7]])
    with pytest.raises(ValueError, match=r"distill\.horizon"):
        drafter.loss(batch, Objective())


@pytest.mark.parametrize("size", [None, 5])
def test_started_from_the_targets_head_it_first_gives_the_targets_logits(target, size):
    options = {"exit_width": target.hidden_size, "head_init": "target", "draft_vocab_size": size}
    drafter = build_drafter(parse_drafter({"kind": "redrafter", **options}), target).double()
    drafter.choose_draft_vocabulary(torch.arange(target.vocab_size).flip(0))
    drafted = slice(size)  # the tokens with the largest counts
    hidden = torch.randn(4, target.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    # The weights of the recurrent state are random.
    drafter.projection.weight.data[:, target.hidden_size :] = 0
    assert torch.allclose(drafter.logits(hidden, torch.zeros_like(hidden)), target.head(hidden)[:, drafted])
    drafter.head.weight.data.zero_()
    assert target.head.weight.abs().sum() > 0, "the drafter's head is a copy"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "drafter.exit_width must be the same"),
        ({"head_init": "mine"}, "must be one of random, target"),
    ],
)
def test_a_head_that_cannot_start_from_the_targets_is_refused(target, options, message):
    with pytest.raises(ValueError, match=message):
        build_drafter(parse_drafter({"kind": "redrafter", "head_init": "target", **options}), target)


def test_width_length_and_nodes_of_the_search_are_options_of_loading(target, tmp_path):
    save_drafter(make(target, beam_width=4, beam_length=5), tmp_path, target.identity)
    hidden = torch.randn(2, target.hidden_size, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    sizes = []
    for width, length, nodes in ((1, 3, None), (3, 2, 6), (5, 6, 9)):
        drafter = load_drafter(tmp_path, target, beam_width=width, beam_length=length, tree_nodes=nodes)
        tree, _ = drafter.propose(hidden, torch.tensor([5, 6]))
        assert tree.max_depth == length
        assert tree.num_nodes <= drafter.max_nodes
        sizes.append(tree.num_nodes)
    assert sizes == [3, 6, 9]
