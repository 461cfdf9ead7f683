"""Drafts that know the target's draws before its probabilities."""

import pytest
import torch

from outrider.models.decoding import Sampling, SpeculativeSampling, TypicalAcceptance, generate
from outrider.models.decoding.sampling import RowSeeds, choose, foreseen, sharpness, warp
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.drafters.corrections import Markov, lattice_search
from outrider.models.drafters.merge_sources import odds_of_draws
from outrider.models.drafters.merging import Proposals, children, odds_of_ring
from outrider.models.drafters.training_free import Candidates
from outrider.models.drafters.vocabulary import DraftVocabulary

from ...decoded import texts_of

VOCAB = 30
PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1.0), Sampling(temperature=1e-30), Sampling(temperature=1.3, top_k=9, top_p=0.9)]
)
def test_a_drafter_with_the_targets_probabilities_is_always_right(target, sampling):
    options = {"kind": "draft_model", "num_layers": 2, "init": "target_layers", "length": 4, "top_k": 1, "tree_nodes": 4}
    twin, rule = build_drafter(parse_drafter(options), target).double().eval(), SpeculativeSampling(sampling=sampling)
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]

    def decode(drafter, generator):
        steps = list(generate(target, drafter, rule, prompts, max_new_tokens=16, generator=generator))
        return texts_of(steps, len(prompts)), [step.num_accepted for step in steps[1:]]

    text, accepted = decode(twin, RowSeeds([5, 6, 7]))
    assert accepted == [(4, 4, 4)] * 3
    assert text == decode(NullDrafter(), RowSeeds([5, 6, 7]))[0]


def test_a_token_of_a_reduced_vocabulary_has_its_own_clock():
    logits, tokens = torch.randn(2, 3, VOCAB), torch.tensor([3, 4, 11, 29])
    seeds = RowSeeds([1, 2], [7, 0], Sampling(temperature=0.8))
    whole = foreseen(logits, range(3), seeds)
    assert torch.allclose(foreseen(logits[..., tokens], range(3), seeds, tokens.__getitem__), whole[..., tokens])
    depths = torch.arange(3).expand(2, -1)
    chosen = choose(warp(logits, Sampling(temperature=0.8)), depths, 2, seeds)
    assert torch.equal(whole.argmax(-1), chosen)
    assert foreseen(logits, range(1), RowSeeds([1, 2])) is logits
    rings = seeds.rings(0, [2, 0], [11, 3])
    clocks = seeds.clocks(logits.double(), torch.arange(3), VOCAB)[0]
    assert rings == pytest.approx([float(clocks[2, 11]), float(clocks[0, 3])])


@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.5}])
def test_tokens_that_a_limit_drops_come_last_in_order(limits):
    logits, sampling = 3 * torch.randn(2, 1, VOCAB), Sampling(temperature=0.7, **limits)
    seeds = RowSeeds([1, 2])
    free = foreseen(logits, range(1), seeds.shown(Sampling(temperature=0.7)))
    scores, is_kept = foreseen(logits, range(1), seeds.shown(sampling)), warp(logits, sampling) > 0
    assert torch.equal(scores[is_kept], free[is_kept])
    for row in range(2):
        kept, dropped = scores[row, 0, is_kept[row, 0]], scores[row, 0, ~is_kept[row, 0]]
        assert kept.min() > dropped.max() > -torch.inf
        assert torch.equal(dropped.argsort(), free[row, 0, ~is_kept[row, 0]].argsort())


def test_a_correction_is_foreseen_as_a_part_of_the_logits():
    torch.manual_seed(0)
    correction, last = Markov(VOCAB, VOCAB, 6), torch.tensor([4, 9, 20])
    torch.nn.init.normal_(correction.markov_w1.weight)
    torch.nn.init.normal_(correction.markov_w2.weight)
    logits = torch.randn(3, 1, VOCAB)
    whole = logits + correction.markov_w2(correction.state(last))[:, None]
    seeds = RowSeeds([1, 2, 3], sampling=Sampling(temperature=0.8))
    drawn = choose(warp(whole, seeds.sampling), torch.zeros(3, 1, dtype=torch.long), 0, seeds)
    options = {"width": 1, "num_candidates": VOCAB, "scale": sharpness(seeds)}
    vocabulary = DraftVocabulary(size=VOCAB)
    search = lattice_search(correction, foreseen(logits, range(1), seeds), last, vocabulary, **options)
    assert torch.equal(search.tokens, drawn)


def test_a_watched_recorded_rule_shows_its_draws(target):
    class Around:
        def __init__(self, rule):
            self.rule, self.lossless, self.is_random = rule, rule.lossless, rule.is_random

        def __call__(self, *arguments, **options):
            return self.rule(*arguments, **options)

    options = {"kind": "draft_model", "num_layers": 2, "init": "target_layers", "length": 3, "top_k": 1, "tree_nodes": 3}
    twin = build_drafter(parse_drafter(options), target).double().eval()
    rule = Around(Around(SpeculativeSampling(sampling=Sampling(temperature=1.0))))
    prompt = [torch.tensor(PROMPTS[0])]
    steps = list(generate(target, twin, rule, prompt, max_new_tokens=13, generator=RowSeeds([1])))
    assert [step.num_accepted for step in steps[1:]] == [(3,)] * 3


def test_typical_acceptance_shows_no_draws(target):
    """A stop would tell something of the clock that chooses the bonus token."""

    class Watched(NullDrafter):
        def propose(self, state, last_token, *, generator=None):
            shown.append(generator.sampling)
            return super().propose(state, last_token, generator=generator)

    prompt = [torch.tensor(PROMPTS[0])]
    for rule in (TypicalAcceptance(sampling=Sampling()), SpeculativeSampling(sampling=Sampling())):
        shown: list[Sampling | None] = []
        list(generate(target, Watched(), rule, prompt, max_new_tokens=3, generator=RowSeeds([1])))
        assert shown == [None if isinstance(rule, TypicalAcceptance) else Sampling()] * 2


def test_without_seeds_samples_follow_torchs_generator(target):
    def sample() -> list[list[int]]:
        steps = generate(target, NullDrafter(), SpeculativeSampling(sampling=Sampling()), prompts, max_new_tokens=12)
        return texts_of(list(steps), len(prompts))

    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = sample(), sample()
        torch.manual_seed(3)
        assert sample() == first != second
    assert len({tuple(text) for text in first}) == len(prompts)


def test_a_later_clock_makes_a_token_less_likely_and_a_cold_target_hardly_cares():
    factors = [odds_of_ring(ring, 1.0) for ring in (1e-9, 0.1, 0.7, 3.0, 40.0)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > 1 > factors[-1] > 0
    assert 0 < odds_of_ring(40.0, 1e4) < odds_of_ring(1e-9, 1e4) < 1e9
    assert [odds_of_ring(ring, 1e-3) for ring in (0.1, 3.0)] == pytest.approx([1.0, 1.0], abs=1e-2)
    candidates = Candidates(tokens=[4, 9, 4], parents=[-1, -1, 0], scores=[0.5] * 3, bins=[0] * 3)
    seeds = RowSeeds([3, 8], [2, 6])
    assert odds_of_draws(seeds, 1, candidates) is None, "nothing is shown"
    shown = seeds.shown(Sampling(temperature=1.0))
    odds = odds_of_draws(shown, 1, candidates)
    assert odds == [odds_of_ring(ring, 1.0) for ring in shown.rings(1, [0, 0, 1], [4, 9, 4])]
    rows = _estimates(candidates, odds)
    assert (rows[4] > rows[9]) == (odds[0] > odds[1])
    even = _estimates(candidates, None)
    assert even[4] == even[9]


def _estimates(candidates, odds):
    return {token: estimate for estimate, token, *_ in children([(Proposals(0, candidates, odds), -1)], 1, {})}
