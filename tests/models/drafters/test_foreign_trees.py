"""Trained drafters in steps whose trees they share with others, or haven't drafted at all."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.models.decoding import Prompts
from outrider.models.decoding.tree import accepted_path, chain_tree
from outrider.models.drafters import DRAFTERS, NullDrafter, build_drafter, parse_drafter
from outrider.models.drafters.beams import pack
from outrider.models.drafters.medusa import Medusa

from ...decoded import answers_of

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]
# Fresh weights at random: those that start as the target's add nothing to what a drafter reads, so its
# cache would have no influence.
SMALL: dict[str, dict[str, Any]] = {
    "block": {"block": 3, "width": 3, "init": "random"},
    "draft_model": {"num_layers": 1, "length": 3, "top_k": 2},
    "eagle": {"depth": 3, "top_k": 3, "tree_nodes": 8, "init": "random"},
    "eagle3": {"depth": 3, "top_k": 3, "tree_nodes": 8, "init": "random"},
    "medusa": {"tree_nodes": 8},
    "mtp": {"depth": 3, "top_k": 3, "tree_nodes": 8, "init": "random"},
    "redrafter": {"beam_width": 3, "beam_length": 3, "tree_nodes": 8},
}


@pytest.fixture(params=sorted(DRAFTERS))
def drafter(request, target) -> Any:
    torch.manual_seed(0)
    return build_drafter(parse_drafter({"kind": request.param, **SMALL[request.param]}), target).to(target.dtype).eval()


class Foreign:
    """Drafter whose trees are the target's next tokens, some wrong; the inner one follows along.

    It is asked for drafts in every `every`-th step and skipped in the others. `searches` has the
    inner drafter's drafts in the steps in which it was asked.
    """

    def __init__(self, inner: Any, answers: list[list[int]], every: int) -> None:
        self.inner, self.answers, self.every = inner, answers, every
        self.max_nodes, self.feature_layers = 4, inner.feature_layers
        self.searches: list[Any] = []

    def init_state(self, prompts, prefill, *, max_new_tokens):
        return self.inner.init_state(prompts, prefill, max_new_tokens=max_new_tokens), 0, [1] * len(prompts.lengths)

    def propose(self, state, last_token, *, generator=None):
        inner, step, written = state
        if step % self.every == 0:
            search, drafted = self.inner.search(inner, last_token)
            self.searches.append((search.tokens.clone(), search.parents.clone(), search.scores.clone()))
        else:
            drafted = self.inner.skip(inner, last_token)
        rows = [[*answer[done : done + 3], 3, 3, 3, 3][:4] for answer, done in zip(self.answers, written, strict=True)]
        for index, row in enumerate(rows):  # rows accept different numbers
            row[(step + index) % 4] = 299
        return chain_tree(torch.tensor(rows)), (drafted, step, written)

    def meanwhile(self, drafted) -> None:
        return None

    def advance(self, drafted, tree, accepted, output):
        inner, step, written = drafted
        state = self.inner.advance(inner, tree, accepted, output)
        return state, step + 1, [done + 1 + count for done, count in zip(written, accepted.num_accepted.host, strict=True)]

    def select(self, state, rows):
        self.answers = [self.answers[row] for row in rows]
        return self.inner.select(state[0], rows), state[1], [state[2][row] for row in rows]


def test_drafts_after_skipped_steps_and_foreign_trees_are_those_of_the_text(target, drafter):
    """A drafter asked in every third step must draft as one that was asked in every step."""
    plain = answers_of(target, NullDrafter(), PROMPTS, 14)
    always, seldom = Foreign(drafter, plain, 1), Foreign(drafter, plain, 3)
    assert answers_of(target, always, PROMPTS, 14) == plain
    assert answers_of(target, seldom, PROMPTS, 14) == plain
    assert len(seldom.searches) >= 2
    for expected, actual in zip(always.searches[::3], seldom.searches, strict=True):
        assert torch.equal(expected[0], actual[0])
        assert torch.equal(expected[1], actual[1])
        torch.testing.assert_close(expected[2], actual[2])


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3"], indirect=True)
def test_a_drafter_that_is_never_asked_reads_its_text_now_and_then(target, drafter, monkeypatch):
    monkeypatch.setattr("outrider.models.drafters.cached_drafter.MAX_UNREAD", 6)
    plain = answers_of(target, NullDrafter(), PROMPTS, 40)
    always, seldom = Foreign(drafter, plain, 1), Foreign(drafter, plain, 11)
    assert answers_of(target, always, PROMPTS, 40) == answers_of(target, seldom, PROMPTS, 40) == plain
    assert len(seldom.searches) >= 2
    for expected, actual in zip(always.searches[::11], seldom.searches, strict=True):
        assert torch.equal(expected[0], actual[0])


def start(target, drafter) -> tuple[Any, torch.Tensor]:
    """Return a state after the prompts, and tokens that follow them."""
    prompts = Prompts.of([torch.tensor(prompt) for prompt in PROMPTS])
    prefill = target.prefill(prompts, max_new_tokens=20, max_nodes=drafter.max_nodes, feature_layers=drafter.feature_layers)
    return drafter.init_state(prompts, prefill, max_new_tokens=20), torch.tensor([5, 6, 7])


@pytest.mark.parametrize("drafter", ["block", "draft_model", "eagle", "eagle3"], indirect=True)
@torch.inference_mode()
def test_a_spoiled_cache_changes_the_search(target, drafter):
    """If it didn't, the tests above would pass for a drafter that reads the wrong tokens."""
    expected, _ = drafter.search(*start(target, drafter))
    state, last_token = start(target, drafter)
    for buffer in state.cache._buffers:
        buffer.normal_()
    actual, _ = drafter.search(state, last_token)
    assert not torch.equal(expected.tokens, actual.tokens)
    assert not torch.allclose(expected.scores, actual.scores, rtol=1e-3)


@torch.inference_mode()
def test_a_search_has_the_nodes_of_the_proposal_with_falling_scores(target, drafter):
    (search, _), (tree, _) = (draft(*start(target, drafter)) for draft in (drafter.search, drafter.propose))
    num_nodes = search.tokens.shape[1]
    assert sum(search.level_sizes) == num_nodes >= tree.num_nodes
    assert search.scores.isfinite().all()
    above = torch.where(search.parents < 0, 0.0, search.scores.gather(1, search.parents.clamp(min=0)))
    assert (search.scores <= above).all()
    whole = pack(search, torch.ones_like(search.tokens, dtype=torch.bool), num_nodes)
    paths = [
        {tuple(t.tokens[row, [n for n in nodes if n >= 0]].tolist()) for nodes in t.lineage[row].tolist()}
        for t in (whole, tree)
        for row in [0]
    ]
    assert paths[1] <= paths[0]


def test_scores_of_medusa_are_measured_accuracies(target):
    torch.manual_seed(0)
    medusa = build_drafter(parse_drafter({"kind": "medusa", "tree_nodes": 5}), target)
    assert isinstance(medusa, Medusa)
    medusa.accuracies = torch.zeros_like(medusa.accuracies)
    medusa.accuracies[0, :2], medusa.accuracies[1, 0] = torch.tensor([0.5, 0.25]), 0.4
    medusa.check_weights()
    search, _ = medusa.search(torch.randn(1, target.hidden_size), torch.tensor([1]))
    assert search.scores[0, 0].exp().item() == pytest.approx(0.5)
    assert {round(score, 3) for score in search.scores[0].exp().tolist()} >= {0.5, 0.25, 0.2, 0.1}


@torch.inference_mode()
@pytest.mark.parametrize("drafter", ["draft_model"], indirect=True)
@pytest.mark.parametrize("drafts", ["skip", "search"])
def test_entries_of_another_drafters_tree_are_not_believed(target, drafter, drafts):
    """A skipped draft model once kept columns that it hadn't written, and lost its unread tokens."""
    proposal, _ = drafter.propose(*start(target, drafter))
    assert proposal.cache_entries is not None
    searches = []
    for tree in (proposal, replace(proposal, cache_entries=None, derived=None)):
        state, last_token = start(target, drafter)
        drafted = drafter.skip(state, last_token) if drafts == "skip" else drafter.search(state, last_token)[1]
        output = target.verify(last_token, tree)
        path = accepted_path(tree, [tree.lineage[row, 1].flip(0).tolist()[-1:] for row in range(len(PROMPTS))])
        searches.append(drafter.search(drafter.advance(drafted, tree, path, output), last_token)[0])
    assert torch.equal(searches[0].tokens, searches[1].tokens)
    assert torch.equal(searches[0].scores, searches[1].scores)
