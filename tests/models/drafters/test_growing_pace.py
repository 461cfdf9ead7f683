"""How long a growing model drafts, on chains whose best length is known."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import pytest
import torch

from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters import load_drafter
from outrider.models.drafters.growing_draft import GrowingRow, GrowingText
from outrider.models.drafters.merge_sources import MergedState, MergedText
from outrider.models.drafters.merged import MergedConfig, MergedDrafter, PacedStep, expected_tokens, learn_gains
from outrider.models.llm.tree_cache import TreeCache

MAX_NODES = 400
RIGHT, WRONG = 0, 1


class Clock:
    """Clock that only drafts and passes move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Chain:
    """A model that gives each node one child: it is right as often as `acceptances` says."""

    clock: Clock
    acceptances: Callable[[random.Random], float]
    draft_seconds: Callable[[int], float]
    confidence: float | None
    """How sure it is; None: as it is right."""
    feature_layers: tuple[int, ...] = ()
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    step: int = 0

    def start(self) -> GrowingText:
        self.truth: list[bool] = []
        cache = TreeCache(1, 1, 1, torch.device("cpu"))
        return GrowingText(cache=cache, rows=[GrowingRow(tokens=[RIGHT])])

    def open(self, state: GrowingText, last_tokens: list[int], generator: Any) -> None: ...

    def room(self, state: GrowingText) -> int:
        return MAX_NODES - len(self.truth)

    def read(self, state: GrowingText, reads: list[list[int]], generator: Any) -> None:
        ((node,),) = reads
        tree = state.rows[0].tree
        assert node == len(tree) - 1, "a chain has one unread node"
        if node != NO_NODE:
            tree.mark_read(node, len(tree))
        state.is_rooted = True
        acceptance = self.acceptances(self.rng)
        self.truth.append(self.rng.random() < acceptance)
        tree.add(node, [RIGHT], [self.confidence or acceptance])
        self.clock.now += self.draft_seconds(self.step)


@dataclass
class Run:
    """What was drafted and decoded."""

    tokens: int = 0
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@pytest.fixture
def decode(target) -> Callable[..., Run]:
    """Return a function that decodes with chains in virtual time, as `propose` and `advance` do."""

    def decode(
        acceptances: Callable[[random.Random], float],
        pass_seconds: Callable[[int], float],
        *,
        steps: int = 500,
        draft_seconds: Callable[[int], float] = lambda step: 1.0,
        confidence: float | None = None,
    ) -> Run:
        clock, run = Clock(), Run()
        drafter = MergedDrafter({"any": load_drafter("suffix", target)}, MergedConfig(tree_nodes=MAX_NODES), clock=clock)
        chain = Chain(clock, acceptances, draft_seconds, confidence)
        drafter.merge.sources, drafter.merge.models, drafter._groups = (chain,), [0], [[0]]
        pacer, text, num_accepted = drafter._pacer(1), MergedText(counts={}), 0
        for step in range(steps):
            chain.step, started = step, clock()
            state = MergedState(states=(chain.start(),), texts=(text,), num_accepted=(num_accepted,))
            draft = drafter.merge.open(state, torch.tensor([RIGHT]), [RIGHT])
            paced = PacedStep(pacer=pacer, started=started)
            num_nodes = min(drafter._paced(draft, paced), len(chain.truth))
            verified_at = clock()
            clock.now += float(pass_seconds(num_nodes))
            (row,) = draft.rows
            num_accepted = [*chain.truth[:num_nodes], False].index(False)
            tokens = [
                *[RIGHT] * num_accepted,
                RIGHT if num_accepted < len(chain.truth) and chain.truth[num_accepted] else WRONG,
            ]
            text.walks = ((row, NO_NODE),)
            text.follow(tokens)
            expected = expected_tokens(draft.rows)[num_nodes]
            pacer.add_step(num_nodes, 1.0 + num_accepted, expected, verified_at - started, clock() - verified_at)
            learn_gains(pacer, paced.asked, [tokens], [num_accepted])
            if step >= 50:
                run.tokens += len(tokens)
                run.seconds += clock() - started
                run.lengths.append(len(chain.truth))
        return run

    return decode


def best_length(acceptance: float, ratio: float) -> tuple[int, float]:
    """Return the length of a chain that has most tokens per second, and these: closed form."""
    rates = {n: (1 - acceptance ** (n + 1)) / (1 - acceptance) / (n + ratio) for n in range(300)}
    return max(rates.items(), key=lambda item: item[1])


def easy_and_hard(rng: random.Random) -> float:
    return 0.95 if rng.random() < 0.8 else 0.2


@pytest.mark.parametrize(("acceptance", "ratio"), [(0.3, 2), (0.3, 200), (0.6, 37), (0.8, 10), (0.8, 200), (0.95, 2)])
def test_chains_of_constant_acceptance_have_the_best_length(decode, acceptance, ratio):
    length, rate = best_length(acceptance, ratio)
    run = decode(lambda rng: acceptance, lambda n: ratio)
    assert mean(run.lengths) == pytest.approx(length, abs=1 + 0.1 * length)
    assert run.rate >= 0.93 * rate, "the noise of the drawn tokens is 4 %"


@pytest.mark.parametrize("ratio", [3, 37, 200])
def test_tokens_of_unequal_difficulty_gain_over_the_best_fixed_length(decode, ratio):
    _, rate = best_length(0.8 * 0.95 + 0.2 * 0.2, ratio)
    assert decode(easy_and_hard, lambda n: ratio).rate >= 0.95 * rate


def test_more_is_drafted_for_an_expensive_pass(decode):
    cheap, dear = (decode(easy_and_hard, lambda n, r=ratio: r, steps=200) for ratio in (3, 1000))
    assert mean(dear.lengths) > 3 * mean(cheap.lengths)


def test_nodes_that_cost_as_much_as_a_pass_are_not_verified(decode):
    """At 80 % acceptance a chain pays if nodes are free, and hardly if each takes half a pass."""
    free = decode(lambda rng: 0.8, lambda n: 10.0)
    dear = decode(lambda rng: 0.8, lambda n: 10.0 + 5.0 * n)
    assert mean(free.lengths) > 4
    assert mean(dear.lengths) < 2


def test_drafting_stops_where_it_never_pays(decode):
    """The drafter claims 90 % and is never right."""
    assert mean(decode(lambda rng: 0.0, lambda n: 2.0, confidence=0.9).lengths) < 0.2


def test_a_slow_first_pass_does_not_end_drafting(decode):
    """Kernels are loaded in the first pass, which then takes a thousand times as long."""
    slow = decode(lambda rng: 0.8, lambda n: 10.0, draft_seconds=lambda step: 1.0 + 999.0 * (step == 0))
    assert mean(slow.lengths) > 3
    stalls = decode(lambda rng: 0.8, lambda n: 10.0, draft_seconds=lambda step: 1 + 999 * (step < 4))
    assert mean(stalls.lengths[-200:]) > 3
