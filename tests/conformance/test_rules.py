"""Enumeration of acceptance rules: sound rules are exact, and every mutant is caught."""

import inspect
import itertools
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from outrider.models.decoding import (
    GreedyAcceptance,
    Prompts,
    RowSeeds,
    Sampling,
    SpeculativeSampling,
    TargetOutput,
    TypicalAcceptance,
    generate,
)
from outrider.models.decoding import acceptance as acceptance_module
from outrider.models.decoding import sampling as sampling_module
from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters import TRAINING_FREE, NullDrafter
from outrider.models.drafters.merged import MergedConfig, MergedDrafter

from ..g_tests import g_test
from ..rules.enumerate_rules import (
    EXACT,
    SAMPLINGS,
    SHAPES,
    RuleCheck,
    ScriptedChance,
    check_rule,
    sampled_tokens,
    sequence_counts,
)
from ..rules.toy_models import TreeShape, after_nodes, all_tokens, beam_tokens, joint, make_trees, random_tables

ALPHA = 1e-6
"""False-alarm rate of a G-test for a sound sampler; the seeds are fixed."""
CAUGHT = 1e-6
"""Total variation that every mutant must exceed, six orders of magnitude above `EXACT`."""


def require_exact(checks: Sequence[RuleCheck]) -> None:
    wrong = [check for check in checks if not check.total_variation < EXACT]  # NaN is wrong, too
    assert not wrong, wrong


@pytest.mark.parametrize(
    "shapes",
    [pytest.param(list(SHAPES), marks=[pytest.mark.slow, pytest.mark.long]), ["late branch", "2 x 2"]],
    ids=["all shapes", "two shapes"],
)
def test_speculative_sampling_is_exact_with_every_tree(shapes):
    checks = list(check_rule(lambda sampling: SpeculativeSampling(sampling=sampling), shapes=shapes))
    assert len(checks) == len(shapes) * len(SAMPLINGS) * 2
    assert sum(check.padded for check in checks) == len(shapes) * len(SAMPLINGS)
    assert {check.num_trees for check in checks if check.shape == "2 x 2" and not check.padded} == {3 * 2 * 3 * 2}
    require_exact(checks)


@pytest.mark.slow
@pytest.mark.long
def test_speculative_sampling_is_exact_with_five_tokens():
    options = {"shapes": ["chain of 4", "3 siblings"], "samplings": ["temperature 1"]}
    require_exact(list(check_rule(lambda sampling: SpeculativeSampling(sampling=sampling), vocab=5, **options)))


@pytest.mark.parametrize("on_device", [False, True])
def test_greedy_acceptance_is_exact_with_every_tree(on_device, mutate):
    rule = mutate(*ON_DEVICE).GreedyAcceptance() if on_device else GreedyAcceptance()
    checks = list(check_rule(lambda sampling: rule, samplings=["greedy"]))
    assert len(checks) == len(SHAPES) * 2
    require_exact(checks)


def test_small_trees_are_padded_to_the_largest_in_the_batch():
    whole = TreeShape(SHAPES["2 x 2"])
    tree = make_trees([whole, whole.half], [all_tokens(shape, 3)[:2] for shape in (whole, whole.half)])
    assert (tree.tokens == NO_NODE).tolist() == [[False] * 4] * 2 + [[False, False, True, True]] * 2
    assert tree.parents.tolist() == [[-1, -1, 0, 0]] * 2 + [[-1, -1, NO_NODE, NO_NODE]] * 2


def test_a_rule_that_samples_needs_random_numbers():
    tree = make_trees([TreeShape((-1,))], [torch.zeros(1, 1, dtype=torch.long)])
    output = TargetOutput(logits=torch.zeros(1, 2, 3), hidden_states=torch.zeros(1, 2, 0))
    for rule in (SpeculativeSampling(sampling=Sampling()), TypicalAcceptance(sampling=Sampling())):
        with pytest.raises(ValueError, match=r"was called with generator=None; give RowSeeds"):
            rule(tree, output)


class Wasteful:
    """Speculative sampling that also requests random numbers that it doesn't use."""

    lossless, is_random = True, True

    def __init__(self, sampling) -> None:
        self.rule = SpeculativeSampling(sampling=sampling)

    def __call__(self, tree, output, *, generator=None):
        even, depths = torch.full((len(tree.tokens), 1, 2), 0.5, dtype=torch.float64), tree.depths[:, :1]
        generator.choose(even, depths, 1)
        acceptance = self.rule(tree, output, generator=generator)
        generator.choose(even, depths, 1)
        return acceptance


def test_unused_random_numbers_of_a_rule_are_enumerated_too():
    require_exact(list(check_rule(Wasteful, shapes=["one token"], samplings=["temperature 1"])))


def test_typical_acceptance_is_not_lossless_and_is_marked_so():
    rule = TypicalAcceptance(sampling=Sampling())
    assert not rule.lossless
    options = {"shapes": ["chain of 3"], "samplings": ["temperature 1"]}
    checks = list(check_rule(lambda sampling: TypicalAcceptance(sampling=sampling), **options))
    assert max(check.total_variation for check in checks) > 0.05


def test_typical_acceptance_equals_its_formula():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    entropy = -(probs * probs.log()).sum()
    threshold = min(0.09, 0.3 * float((-entropy).exp()))
    accepted = (probs > threshold).tolist()
    assert accepted == [True, True, True, False]
    logits = probs.log().expand(4, 2, 4)
    tree = acceptance_module.DraftTree(tokens=torch.arange(4)[:, None], parents=torch.full((4, 1), -1), max_depth=1)
    rule = TypicalAcceptance(sampling=Sampling())
    output = TargetOutput(logits=logits, hidden_states=logits[..., :0])
    assert rule(tree, output, generator=RowSeeds(range(4))).num_accepted.tolist() == [int(value) for value in accepted]


def typical_difference(make_rule: Any, sampling: Sampling, epsilon: float) -> float:
    """Return the largest difference between outcomes of a chain of two, for every tokens, and those of the formula."""
    vocab, target, shape = 5, random_tables(5, 3, seed=0), TreeShape((-1, 0))
    tokens = all_tokens(shape, vocab)
    logits, tree = after_nodes(target, shape, tokens, 2), make_trees([shape], [tokens])
    output, rule = TargetOutput(logits=logits, hidden_states=logits[..., :0]), make_rule(sampling=sampling, epsilon=epsilon)
    found = torch.zeros(len(tokens), 3, vocab, dtype=torch.float64)  # by accepted tokens and bonus token
    script: list[int] | None = []
    while script is not None:
        chance = ScriptedChance(script, len(tokens))
        acceptance = rule(tree, output, generator=chance)
        found[torch.arange(len(tokens)), acceptance.num_accepted, acceptance.bonus_token] += chance.weight
        script = chance.next_script()
    expected = torch.zeros_like(found)
    for row, (first, second) in enumerate(tokens.tolist()):
        entries = [(logits[row, entry] / sampling.temperature).softmax(-1) for entry in range(3)]
        thresholds = [min(epsilon, 0.3 * float((probs * probs.log()).sum().exp())) for probs in entries]
        accepted = int(entries[0][first] > thresholds[0])
        accepted += accepted and int(entries[1][second] > thresholds[1])
        expected[row, accepted] = entries[accepted]
    assert {int(number) for number in expected.sum(2).nonzero()[:, 1]} == {0, 1, 2}, "not every length occurs"
    return float((found - expected).abs().max())


def test_typical_acceptance_follows_its_formula_with_every_chain():
    for epsilon, temperature in ((0.09, 1.0), (0.09, 2.0), (1.0, 0.7)):
        assert typical_difference(TypicalAcceptance, Sampling(temperature=temperature), epsilon) < EXACT


@pytest.mark.parametrize(
    ("shape", "sampling", "num_samples"),
    [
        *[("2 x 2", name, 60_000) for name in ("temperature 1", "top-p 0.8")],
        *[
            pytest.param(*case, 100_000, marks=[pytest.mark.slow, pytest.mark.long])
            for case in itertools.product(SHAPES, SAMPLINGS)
        ],
    ],
)
def test_the_unchanged_sampler_draws_from_the_joint_distribution(shape, sampling, num_samples):
    tree, sampling = TreeShape(SHAPES[shape]), SAMPLINGS[sampling]
    target, drafter = random_tables(3, tree.depth + 1, seed=0), random_tables(3, tree.depth + 1, seed=1)
    tokens = beam_tokens(tree, drafter).expand(num_samples, -1)
    torch.manual_seed(0)
    found = sampled_tokens(SpeculativeSampling(sampling=sampling), sampling, tree, target, tokens, RowSeeds(range(num_samples)))
    counts = sequence_counts(found, 3)
    assert g_test(counts, joint(target, sampling, tree.depth + 1).flatten()) > ALPHA
    if sampling.temperature > 0:  # the most probable tokens of both may be the same
        assert g_test(counts, joint(drafter, sampling, tree.depth + 1).flatten()) < ALPHA, "the test has no power"


# --- the whole loop


class ToyTarget:
    """Toy model with the target's interface; it stores the committed tokens."""

    context_length = 64
    num_prefills = 1
    has_fixed_shapes = False

    def __init__(self, tables) -> None:
        self.tables = tables

    def prefill(self, prompts, *, max_new_tokens, max_nodes, feature_layers=()) -> TargetOutput:
        self.committed = torch.zeros(len(prompts.lengths), 0, dtype=torch.long)
        self.counts = torch.zeros(len(prompts.lengths), dtype=torch.long)
        logits = self.tables[0].expand(len(prompts.lengths), 1, -1)
        return TargetOutput(logits=logits, hidden_states=logits[..., :0])

    def _logits(self, texts: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits after texts; those after texts longer than the tables are unused."""
        known = texts[: len(self.tables) - 1]
        return self.tables[len(known)][tuple(known)]

    def verify(self, last_token, tree, *, meanwhile=None) -> TargetOutput:
        """Compute logits for groups of rows of equal length; the length chooses the table."""
        self.last_token = last_token
        batch, vocab = len(last_token), self.tables[0].shape[-1]
        logits = torch.zeros(batch, 1 + tree.num_nodes, vocab, dtype=torch.float64)
        for count in self.counts.unique().tolist():
            rows = self.counts == count
            base = [*self.committed[rows, :count].T, last_token[rows]]
            logits[rows, 0] = self._logits(base)
            for node, depth in itertools.product(range(tree.num_nodes), range(1, tree.max_depth + 1)):
                alike = tree.depths[rows, node] == depth  # trees of rows may have different shapes
                path = tree.lineage[rows, node, :depth][alike].flip(1)
                tokens = tree.tokens[rows][alike].gather(1, path).T
                here = rows.nonzero().squeeze(1)[alike]
                logits[here, node + 1] = self._logits([*(part[alike] for part in base), *tokens])
        return TargetOutput(logits=logits, hidden_states=logits[..., :0])

    def commit(self, tree, accepted) -> None:
        new = torch.cat([self.last_token[:, None], accepted.cut().drafts], dim=1)
        wide = torch.zeros(len(new), self.committed.shape[1] + new.shape[1], dtype=torch.long)
        wide[:, : self.committed.shape[1]] = self.committed
        wide.scatter_(1, self.counts[:, None] + torch.arange(new.shape[1]), new)
        self.committed, self.counts = wide, self.counts + 1 + torch.tensor(accepted.num_accepted.host)

    def select(self, rows) -> None:
        self.committed, self.counts = self.committed[rows], self.counts[rows]


class ToyDrafter:
    """Drafter of trees of one shape, the likeliest of a toy model that ignores the text."""

    def __init__(self, shape, tables) -> None:
        self.shape, self.tokens = shape, beam_tokens(shape, tables)
        self.max_nodes = len(shape.parents)
        self.feature_layers = ()

    def init_state(self, prompts, prefill, *, max_new_tokens) -> None:
        return None

    def propose(self, state, last_token, *, generator=None):
        return make_trees([self.shape], [self.tokens.expand(len(last_token), -1)]), None

    def meanwhile(self, drafted) -> None:
        return None

    def advance(self, drafted, tree, accepted, output) -> None:
        return None

    def select(self, state, rows) -> None:
        return None


FREE: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"tree_nodes": 2},
    "recycling": {"tree_nodes": 3, "top_k": 2, "depth": 2},
    "suffix": {"tree_nodes": 3},
}
"""Options of training-free drafters, for trees of all shapes."""
MERGED: dict[str, str] = {"merged-expected": "expected", "merged-fixed": "fixed"}
"""The pace of each merge of all training-free drafters."""
LOOPS = ("beam", "nothing", *FREE, *MERGED)
QUICK_LOOPS = ("beam", "merged-expected")
"""These have fewer texts; slow tests have all."""


def loop_drafter(name: str) -> Any:
    if name in MERGED:
        return MergedDrafter({source: loop_drafter(source) for source in FREE}, MergedConfig(tree_nodes=4, pace=MERGED[name]))
    if name in FREE:
        drafter_class: Any = TRAINING_FREE[name]
        return drafter_class(drafter_class.Config(**FREE[name]))
    return NullDrafter() if name == "nothing" else ToyDrafter(TreeShape((-1, -1, 0)), random_tables(3, 3, seed=5))


def test_every_training_free_drafter_is_certified():
    assert FREE.keys() == TRAINING_FREE.keys()


@pytest.mark.parametrize("name", [*FREE, *MERGED])
def test_greedy_texts_with_a_training_free_drafter_or_a_merge_are_those_of_plain_decoding(name):
    def decode(drafter: Any) -> tuple[list[list[int]], int]:
        texts: list[list[int]] = [[] for _ in range(3)]
        target = ToyTarget(random_tables(3, 9, seed=4))
        accepted = 0
        for step in generate(target, drafter, GreedyAcceptance(), torch.arange(3)[:, None], max_new_tokens=9):
            for row, tokens in zip(step.rows, step.tokens, strict=True):
                texts[row] += tokens
            accepted += sum(step.num_accepted)
        return texts, accepted

    plain, _ = decode(NullDrafter())
    texts, accepted = decode(loop_drafter(name))
    assert texts == plain
    assert accepted > 0


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [
        *[(name, 4_000) for name in QUICK_LOOPS],
        *[pytest.param(name, 10_000, marks=[pytest.mark.slow, pytest.mark.long]) for name in LOOPS],
    ],
)
@pytest.mark.parametrize("is_seeded", [True, False], ids=["seeds", "torch's generator"])
def test_whole_texts_of_the_decode_loop_follow_the_joint_distribution(name, num_rows, is_seeded):
    length = 4
    sampling = Sampling(temperature=0.8)
    target = ToyTarget(random_tables(3, length, seed=4))
    drafter = loop_drafter(name)
    texts = torch.zeros(num_rows, length, dtype=torch.long)
    filled = [0] * num_rows
    prompts = Prompts.of(torch.zeros(num_rows, 1, dtype=torch.long))
    torch.manual_seed(1)  # from which the seeds are drawn if none are given
    steps = generate(
        target,
        drafter,
        SpeculativeSampling(sampling=sampling),
        prompts.input_ids,
        max_new_tokens=length,
        generator=RowSeeds(range(num_rows)) if is_seeded else None,
    )
    for step in steps:
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            texts[row, filled[row] : filled[row] + len(tokens)] = torch.tensor(tokens)
            filled[row] += len(tokens)
    assert set(filled) == {length}
    assert g_test(sequence_counts(texts, 3), joint(target.tables, sampling, length).flatten()) > ALPHA
    other = joint(target.tables, Sampling(temperature=0.95), length).flatten()
    assert g_test(sequence_counts(texts, 3), other) < ALPHA, "too few texts: another temperature would pass"


# --- mutants: the sampler with one line changed on purpose

ACCEPTANCE_MUTANTS = {
    "target not warped": ("probs = warp(output.logits, self.sampling)", "probs = output.logits.softmax(-1)"),
    "choice by arg-max": ("choose(probs, pad(tree.depths, (1, 0)), tree.max_depth, generator)", "probs.argmax(-1)"),
    "choice after the node, not its parent": (
        "choices.gather(1, tree.parents + 1)",
        "choices.gather(1, (tree.parents + 2).clamp(max=choices.shape[1] - 1))",
    ),
    "bonus of the entry before": (
        "choices.gather(1, entry[:, None])",
        "choices.gather(1, (entry[:, None] - 1).clamp(min=0))",
    ),
    "walk ends a node early": ("return _path_to(", "num_accepted = (num_accepted - 1).clamp(min=0)\n    return _path_to("),
    "children of refused nodes": (
        "reached = padded.gather(1, (tree.lineage + 1).flatten(1)).view_as(tree.lineage).all(-1)",
        "reached = accepted",
    ),
}
WALK_MUTANTS = (
    "choice after the node, not its parent",
    "bonus of the entry before",
    "walk ends a node early",
    "children of refused nodes",
)
ON_DEVICE = ("if decides_on_host(output) and (tree.num_nodes or is_quick_on_host(output)):", "if False:")
"""Greedy acceptance as on an accelerator."""
GREEDY_MUTANTS = {
    **{name: ACCEPTANCE_MUTANTS[name] for name in WALK_MUTANTS},
    "arg-min": ("output.logits.max(-1)\n", "output.logits.min(-1)\n"),
    "second best": ("output.logits.max(-1)\n", "(part[..., 1] for part in output.logits.topk(2))\n"),
    "any child of the root's choice": (
        "tree.tokens == choices.gather(1, tree.parents + 1)",
        "(tree.tokens == choices.gather(1, tree.parents + 1)) | (tree.parents >= 0)",
    ),
}
HOST_MUTANTS = {
    "choice of the entry before": ("logits[row, last + 1]", "logits[row, max(last, 0)]"),
    "smallest logit": ("values.argmax()", "values.argmin()"),
    "another row": ("logits[row, last + 1]", "logits[0, last + 1]"),
    "parents mixed up": ("children[last, bonus]", "max(children.values())"),
}
TYPICAL_MUTANTS = {
    "bonus after the root": ("probs[rows, entry][:, None]", "probs[rows, 0][:, None]"),
    "bonus not warped": ("probs[rows, entry][:, None]", "output.logits.softmax(-1)[rows, entry][:, None]"),
    "bonus by arg-max": ("choose(last, num_accepted[:, None], tree.max_depth, generator)[:, 0]", "last[:, 0].argmax(-1)"),
    "threshold of the root": ("threshold.gather(1, tree.parents + 1)", "threshold[:, :1]"),
}
WARP_MUTANTS = {
    "top-p keeps one token too many": ("before >= sampling.top_p", "before - ranked >= sampling.top_p"),
    "top-p keeps one token too few": ("before >= sampling.top_p", "before + ranked >= sampling.top_p"),
    "top-p not normalised": ("before >= sampling.top_p, 0.0)", "before >= sampling.top_p, ranked.min() / 2)"),
    "top-p ignored": ("sampling.top_p is not None", "False"),
    "top-k ignored": ("sampling.top_k is not None", "False"),
    "top-k off by one": ("probs.topk(sampling.top_k,", "probs.topk(sampling.top_k - 1,"),
    "temperature upside down": ("keepdim=True)) / sampling.temperature", "keepdim=True)) * sampling.temperature"),
    "temperature ignored": ("keepdim=True)) / sampling.temperature", "keepdim=True))"),
    "temperature after top-p": (
        "keepdim=True)) / sampling.temperature",
        "keepdim=True))",
        "    return probs\n",
        "    probs = probs ** (1 / sampling.temperature)\n    return probs / probs.sum(-1, keepdim=True)\n",
    ),
    "probabilities in the order of their rank": ("scatter_(-1, order, ranked)", "copy_(ranked)"),
}
DRAW_MUTANTS = {
    "the depth before": ("pad(tree.depths, (1, 0))", "(pad(tree.depths, (1, 0)) - 1).clamp(min=0)"),
}
HOST_DRAW_MUTANTS = {
    "one depth": ("pick(row, len(path), after)", "pick(row, 0, after)"),
    "not warped": ("draw(row, depth, warp(logits, sampling))", "draw(row, depth, logits.softmax(-1))"),
    "rows mixed up": ("draw(row, depth, warp", "draw(0, depth, warp"),
    "any node of the right token": (
        "(last, bonus) in children",
        "bonus in tokens and len(path) < depth",
        "children[last, bonus]",
        "tokens.index(bonus)",
    ),
}
HOST_CHANCE_MUTANTS = {
    "arg-max": ("rates[early] / clocks.astype(rates.dtype)", "rates[early]"),
    "uniform clocks": ("-np.log((numbers[early] + 0.5)", "((numbers[early] + 0.5)"),
    "one position": ("self._positions[row] + depth), probs", "depth), probs"),
    "the first by its bound": ("~(bounds < reached)", "bounds == bounds[first]"),
}
CHANCE_MUTANTS = {
    "clocks multiplied": ("(probs / clocks.gather", "(probs * clocks.gather"),
    "uniform clocks": ("exponential(stream_keys(seeds, positions + depths)", "uniform(stream_keys(seeds, positions + depths)"),
    "clocks shared by all rows": (
        "stream_keys(seeds, positions + depths)",
        "stream_keys(seeds[:1], positions[:1] + depths).expand(len(seeds), -1)",
    ),
    "clocks shared by all depths": ("positions + depths", "positions + 0 * depths"),
    "clocks shared by all tokens": (
        "depths), tokens).to(probs.dtype)",
        "depths), torch.zeros(tokens, dtype=torch.long)).to(probs.dtype)",
    ),
}


@pytest.fixture
def mutate() -> Iterator:
    module_names = []

    def run(name: str, source: str) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__package__ = "outrider.models.decoding"
        sys.modules[name] = module
        module_names.append(name)
        exec(compile(source, name, "exec"), module.__dict__)
        return module

    def make(*replacements: str, of: types.ModuleType = acceptance_module) -> types.ModuleType:
        """Run the acceptance rules with lines replaced in their module or in sampling's."""
        source = inspect.getsource(of)
        for old, new in zip(replacements[::2], replacements[1::2], strict=True):
            assert old in source, f"the sampler has no {old!r} any more: update the mutant"
            source = source.replace(old, new)
        if of is acceptance_module:
            return run("outrider.models.decoding.acceptance_mutant", source)
        rules = run("outrider.models.decoding.acceptance_copy", inspect.getsource(acceptance_module))
        mutant = run("outrider.models.decoding.sampling_mutant", source)
        rules.warp, rules.RowSeeds = mutant.warp, mutant.RowSeeds
        return rules

    yield make
    for name in module_names:
        del sys.modules[name]


def assert_caught(make_rule, **options) -> None:
    """Check that a mutant is caught by its distance; a mutant that raises fails the test.

    The first checks are those that catch most mutants.
    """
    checks = check_rule(make_rule, shapes=["late branch", "2 x 2", "3 siblings", "chain of 3"], **options)
    assert any(check.total_variation > CAUGHT for check in checks), "the mutant passes for sound"


@pytest.mark.parametrize("name", ACCEPTANCE_MUTANTS)
def test_every_mutant_of_the_sampler_is_caught(name, mutate):
    module = mutate(*ACCEPTANCE_MUTANTS[name])
    assert_caught(lambda sampling: module.SpeculativeSampling(sampling=sampling), samplings=["temperature 0.5", "top-k 2"])


@pytest.mark.parametrize("name", [*GREEDY_MUTANTS, *HOST_MUTANTS])
def test_every_mutant_of_greedy_acceptance_is_caught(name, mutate):
    module = mutate(*(HOST_MUTANTS[name] if name in HOST_MUTANTS else GREEDY_MUTANTS[name] + ON_DEVICE))
    assert_caught(lambda sampling: module.GreedyAcceptance(), samplings=["greedy"])


@pytest.mark.parametrize("name", TYPICAL_MUTANTS)
def test_every_mutant_of_typical_acceptance_is_caught(name, mutate):
    rule = mutate(*TYPICAL_MUTANTS[name]).TypicalAcceptance
    assert typical_difference(rule, Sampling(temperature=0.7), 1.0) > CAUGHT


@pytest.mark.parametrize("name", WARP_MUTANTS)
def test_every_mutant_of_the_warping_is_caught(name, mutate):
    module = mutate(*WARP_MUTANTS[name], of=sampling_module)
    setting = {"temperature upside down": "temperature 0.5", "temperature ignored": "temperature 0.5"}.get(name)
    setting = setting or ("top-k 2" if name.startswith("top-k") else "top-p 0.8")
    assert_caught(lambda sampling: module.SpeculativeSampling(sampling=sampling), samplings=[setting])


@pytest.mark.parametrize("name", [*DRAW_MUTANTS, *CHANCE_MUTANTS])
def test_every_mutant_of_the_draws_is_caught_by_a_g_test(name, mutate):
    module = mutate(*DRAW_MUTANTS[name]) if name in DRAW_MUTANTS else mutate(*CHANCE_MUTANTS[name], of=sampling_module)
    assert min(sampler_p_values(module)) < ALPHA


@pytest.mark.parametrize("name", [*HOST_DRAW_MUTANTS, *HOST_CHANCE_MUTANTS])
def test_every_mutant_of_the_draws_on_a_cpu_differs_from_the_draws_after_all_nodes(name, mutate):
    is_rule = name in HOST_DRAW_MUTANTS
    module = mutate(*HOST_DRAW_MUTANTS[name]) if is_rule else mutate(*HOST_CHANCE_MUTANTS[name], of=sampling_module)
    assert draws_differ(module)


def draws_differ(rules: Any) -> bool:
    """Return whether a module's draws on the way differ from those after all nodes, which a recorded rule makes."""
    sampling, random, num_rows = Sampling(temperature=0.7), torch.Generator().manual_seed(3), 16
    tree = make_trees([TreeShape((-1, -1, 1, 0))], [torch.tensor([[0, 1, 0, 1]]).expand(num_rows, -1)])
    for _ in range(20):
        logits = torch.randn(num_rows, 5, 3, generator=random)
        output = TargetOutput(logits=logits, hidden_states=torch.zeros(num_rows, 5, 0))
        seeds = torch.randint(2**40, (2, num_rows), generator=random)
        found = rules.SpeculativeSampling(sampling=sampling)(tree, output, generator=rules.RowSeeds(*seeds.tolist()))
        expected = SpeculativeSampling(sampling=sampling)(tree, output, generator=RowSeeds.of_rows(seeds))
        if any(not torch.equal(getattr(found, name), getattr(expected, name)) for name in ("path", "bonus_token")):
            return True
    return False


def test_the_unbroken_sampler_passes_the_same_way(mutate):
    for module in (mutate(), mutate(of=sampling_module)):
        assert not draws_differ(module)
        rule = module.SpeculativeSampling
        require_exact(list(check_rule(lambda sampling, rule=rule: rule(sampling=sampling), shapes=["late branch"])))
        assert min(sampler_p_values(module)) > ALPHA


def sampler_p_values(rules: Any) -> Iterator[float]:
    """Yield p-values of a module's sampler for a chain and two trees, drawing after all nodes."""
    target, drafter, sampling = random_tables(3, 3, seed=0), random_tables(3, 3, seed=1), Sampling(temperature=0.7)
    for parents in ((-1, 0), (-1, -1), (-1, -1, 1)):
        shape, seeds = TreeShape(parents), rules.RowSeeds(range(20_000))
        torch.manual_seed(0)
        tokens = beam_tokens(shape, drafter).expand(20_000, -1)
        found = sampled_tokens(rules.SpeculativeSampling(sampling=sampling), sampling, shape, target, tokens, seeds)
        yield g_test(sequence_counts(found, 3), joint(target, sampling, shape.depth + 1).flatten())
