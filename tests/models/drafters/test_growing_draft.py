"""A draft model's growing tree: answers stay the target's, and the cache is that of a fresh read."""

import itertools
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.models.decoding import GreedyAcceptance, Prompts, RowSeeds, Sampling, SpeculativeSampling, generate
from outrider.models.decoding.growing_tree import UNREAD, GrowingTree
from outrider.models.decoding.pacing import MAX_READS, NUM_TRIALS
from outrider.models.decoding.tree import accepted_path, empty_tree
from outrider.models.decoding.types import NO_NODE, TargetOutput
from outrider.models.drafters import NullDrafter, growing_draft, load_drafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.growing_draft import MAX_CHILDREN, MAX_ENTRIES, GrowingModel
from outrider.models.drafters.merge_sources import MergedDraft
from outrider.models.drafters.merged import MergedConfig, MergedDrafter
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.drafters.suffix import Suffix, SuffixConfig
from outrider.models.drafters.training_free import Candidates
from outrider.models.llm.hf_target import HFTarget

from ...decoded import texts_of
from ...rules.enumerate_rules import EXACT, ScriptedChance, total_variation
from ..paths import path_to
from .tiny_texts import PROMPT, TEMPERATURE, VOCAB, code, joint, make_tiny

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]
ONE, ALL = PROMPTS[:1], PROMPTS
NOTHING = TargetOutput(logits=torch.zeros(1, 1, 1), hidden_states=torch.zeros(1, 1, 1))
"""An output that a draft model doesn't read."""
FREE = {"prompt_lookup": {"tree_nodes": 4}, "suffix": {"tree_nodes": 6}, "recycling": {"tree_nodes": 6}}


class Steady(MergedDrafter):
    """Merge that knows no time: a model has read `num_reads` nodes of each row before the tree is verified."""

    def grown(self, num_reads: Any = 12, width: int = 3, num_nodes: int = 5) -> "Steady":
        self.num_reads, self.width, self.num_nodes = num_reads, width, num_nodes
        return self

    def _paced(self, draft: MergedDraft, step: Any) -> int:
        merge = self.merge
        for index in [*merge.free, *merge.searching]:
            merge.ask(draft, index)
        merge.rank(draft)
        for index in merge.models:
            rows = draft.state.states[index].rows
            limits = [self.num_reads] * len(rows) if isinstance(self.num_reads, int) else self.num_reads
            while any(reads := merge.unread(draft, index)):
                reads = [
                    nodes[: self.width + place] if num_read(row.tree) < limits[place] else []
                    for place, (nodes, row) in enumerate(zip(reads, rows, strict=True))
                ]
                if not any(reads):
                    break
                merge.read(draft, index, reads)
                merge.rank(draft)
        return self.num_nodes


def num_read(tree: GrowingTree) -> int:
    return sum(entry != UNREAD for entry in tree.cache_entries)


def growing(reader: HFTarget, *names: str, kind: type[MergedDrafter] = MergedDrafter, tree_nodes: int = 12) -> Any:
    """Return a merge of a draft model that grows, and of training-free drafters."""
    sources: dict[str, Any] = {"draft_model": DraftModel(DraftModelConfig(), reader)}
    sources |= {name: load_drafter(name, reader, **FREE[name]) for name in names}
    return kind(sources, MergedConfig(tree_nodes=tree_nodes))


def steady(reader: HFTarget, *names: str, tree_nodes: int = 30, **options: Any) -> Any:
    return growing(reader, *names, kind=Steady, tree_nodes=tree_nodes).grown(**options)


@pytest.fixture
def kept(monkeypatch) -> list[int]:
    """Count the nodes that keep their keys and values, in each step whose tree is re-rooted."""
    counts: list[int] = []
    reroot = GrowingModel._reroot

    def counted(self, state) -> None:
        reroot(self, state)
        counts.append(len(state.rows[0].order) if state.is_rooted else -1)

    monkeypatch.setattr(GrowingModel, "_reroot", counted)
    return counts


@pytest.fixture
def waits(monkeypatch) -> Callable[..., list[bool]]:
    """Return a function that makes passes wait: their calls of `meanwhile`, and the seconds."""

    def install(num_calls: int, seconds: float = 1e6) -> list[bool]:
        results: list[bool] = []
        verify = HFTarget.verify

        def waiting(self, last_token, tree, *, meanwhile=None):
            before = tree.tokens.clone(), tree.parents.clone()
            results.extend(meanwhile is not None and meanwhile(seconds) for _ in range(num_calls))
            assert torch.equal(tree.tokens, before[0]), "the tree that is verified has changed"
            assert torch.equal(tree.parents, before[1])
            return verify(self, last_token, tree)

        monkeypatch.setattr(HFTarget, "verify", waiting)
        return results

    return install


def decode(target, drafter, rows, rule=None, num_new=24, **options: Any) -> tuple[list[list[int]], list[Any]]:
    steps = list(
        generate(target, drafter, rule or GreedyAcceptance(), list(map(torch.tensor, rows)), max_new_tokens=num_new, **options)
    )
    answers = texts_of(steps, len(rows))
    return answers, steps


def accepted_of(steps: list[Any]) -> int:
    return sum(count for step in steps[1:] for count in step.num_accepted)


# --- answers


@pytest.mark.parametrize("policy", [growing, steady], ids=["expected", "steady"])
def test_answers_of_waiting_passes_are_those_of_plain_decoding(target, twin, waits, policy):
    plain, _ = decode(target, NullDrafter(), ALL, num_new=16)
    sampling = SpeculativeSampling(sampling=Sampling(temperature=1.3, top_p=0.95))
    seeds = RowSeeds(range(len(ALL)))
    sampled, _ = decode(target, NullDrafter(), ALL, sampling, num_new=16, generator=seeds)
    waits(5)
    drafter = policy(twin, tree_nodes=8)
    assert decode(target, drafter, ALL, num_new=16)[0] == plain
    assert decode(target, drafter, ALL, sampling, num_new=16, generator=seeds)[0] == sampled


@pytest.mark.parametrize("rows", [ONE, ALL], ids=["one row", "three rows"])
def test_a_growing_tree_foresees_the_draws(target, monkeypatch, rows):
    """A model that knows the target's probabilities knows what it will draw, also from one step to the next."""
    reader = HFTarget(deepcopy(target.model), target.tokenizer, target.identity)
    rule, seeds = SpeculativeSampling(sampling=Sampling(temperature=1.0)), RowSeeds(range(len(rows)))
    plain, _ = decode(target, NullDrafter(), rows, rule, generator=seeds)
    accepted = []
    for _ in range(2):
        answers, steps = decode(target, steady(reader, num_reads=6, width=2), rows, rule, generator=seeds)
        assert answers == plain
        accepted.append(accepted_of(steps) / sum(len(step.rows) for step in steps[1:]))
        monkeypatch.setattr(growing_draft, "foreseen", lambda logits, *_: logits)
    assert accepted[0] > 2
    assert accepted[0] > 1.5 * accepted[1]


def test_answers_do_not_depend_on_the_clock(target, twin, waits):
    """Seconds decide how large trees are and when they are verified, not what is accepted."""
    waits(3, 0.5)
    chance = random.Random(0)
    seconds = [0.0]

    def clock() -> float:
        seconds[0] += chance.choice([0.0, 1e-6, 0.01, 1.0])
        return seconds[0]

    plain, _ = decode(target, NullDrafter(), ALL)
    drafter = growing(twin)
    drafter.clock = clock
    for rows, expected in ((ONE, plain[:1]), (PROMPTS[1:], plain[1:])):
        assert decode(target, drafter, rows)[0] == expected


# --- re-rooted trees, against fresh reads


class Watched:
    """Drafter that checks a model's trees, node by node, against full forward passes over each path.

    It also checks that the target accepts the longest path of the verified tree that is in its answer.
    """

    def __init__(self, drafter: Steady, plain: list[list[int]]) -> None:
        self.drafter, self.plain = drafter, plain
        self.model = drafter.sources["draft_model"].model
        self.max_nodes, self.feature_layers = drafter.max_nodes, drafter.feature_layers
        self.texts: list[list[int]] = []
        self.num_checked = self.num_foreign = 0
        self.expected: list[int] = []
        """Accepted draft tokens of each step of the first row."""

    def init_state(self, prompts, prefill, *, max_new_tokens):
        self.texts = [row[:length] for row, length in zip(prompts.input_ids.tolist(), prompts.lengths, strict=True)]
        self.num_prompt = [*prompts.lengths]
        return self.drafter.init_state(prompts, prefill, max_new_tokens=max_new_tokens)

    def propose(self, state, last_token, *, generator=None):
        tree, drafted = self.drafter.propose(state, last_token)
        self.last = last_token.tolist()
        answer = self.plain[0][len(self.texts[0]) + 1 - self.num_prompt[0] :]
        self.expected.append(drafted.draft.rows[0].num_followed(answer, self.drafter.num_nodes))
        return tree, drafted

    def meanwhile(self, drafted):
        return self.drafter.meanwhile(drafted)

    def advance(self, drafted, tree, accepted, output):
        (index,) = drafted.draft.grown
        for row, last, text in zip(drafted.draft.state.states[index].rows, self.last, self.texts, strict=True):
            self.check(row.tree, [*text, last])
        for text, last, tokens in zip(self.texts, self.last, accepted.tokens, strict=True):
            text += [last, *tokens]
        return self.drafter.advance(drafted, tree, accepted, output)

    def select(self, state, rows):
        self.texts = [self.texts[row] for row in rows]
        self.num_prompt = [self.num_prompt[row] for row in rows]
        self.plain = [self.plain[row] for row in rows]
        return self.drafter.select(state, rows)

    def check(self, tree: GrowingTree, text: list[int]) -> None:
        for node in [NO_NODE, *(node for node, entry in enumerate(tree.cache_entries) if entry != UNREAD)]:
            path = path_to(tree, node)
            own = [child for child in tree.children(node) if tree.estimates[child] > 0.0]
            self.num_foreign += len(tree.children(node)) - len(own)
            probs = self.model(torch.tensor([[*text, *path]])).logits[0, -1].softmax(-1)
            likeliest = probs.topk(MAX_CHILDREN)
            assert own
            assert [tree.tokens[child] for child in own] == likeliest.indices.tolist()[: len(own)]
            # Scores are computed in float32.
            scores = [tree.estimates[child] for child in own]
            assert scores == pytest.approx(likeliest.values.tolist()[: len(own)], rel=1e-5)
            self.num_checked += 1


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("names", [(), ("suffix", "recycling")], ids=["alone", "merged"])
def test_keys_and_values_of_a_re_rooted_tree_are_those_of_a_fresh_read(target, twin, waits, kept, names):
    waits(2)
    plain, _ = decode(target, NullDrafter(), ONE, num_new=40)
    watched = Watched(steady(twin, *names), plain)
    answers, steps = decode(target, watched, ONE, num_new=40)
    assert answers == plain
    # The last path may go on behind the answer's end.
    assert [step.num_accepted[0] for step in steps[1:-1]] == watched.expected[:-1], "acceptance is that of a fresh tree"
    assert watched.num_checked > 50
    assert (watched.num_foreign > 0) == bool(names), "the model reads what only others have proposed"
    assert sum(count > 0 for count in kept) >= 3, "trees were re-rooted with some of their nodes"
    assert -1 in kept, "and some were dropped"
    assert accepted_of(steps) > len(steps)


def test_rows_of_a_batch_read_different_numbers_of_nodes(target, twin, waits, kept):
    """Their trees are padded in the draft model's cache; a padded entry must be seen by no node."""
    results = waits(2)
    plain, _ = decode(target, NullDrafter(), ALL)
    watched = Watched(steady(twin, num_reads=(2, 7, 4), width=1), plain)
    stop_ids = {plain[1][6]}  # rows leave the batch
    expected = [text[: text.index(plain[1][6]) + 1] if plain[1][6] in text else text for text in plain]
    answers, steps = decode(target, watched, ALL, stop_ids=stop_ids)
    assert answers == expected
    assert len({len(step.rows) for step in steps}) > 1, "rows left the batch"
    assert watched.num_checked > 50
    num_single = sum(len(step.rows) == 1 for step in steps[1:])
    assert sum(results) == 2 * num_single
    assert bool(kept) == (num_single > 1)


def test_one_row_that_is_left_of_a_batch_re_roots_its_trees(target, twin, kept):
    plain, _ = decode(target, NullDrafter(), ALL, num_new=40)
    answers, _ = decode(target, steady(twin), ALL, num_new=[6, 7, 40])
    assert answers == [plain[0][:6], plain[1][:7], plain[2]]
    assert len(kept) > 5
    assert max(kept) >= 0, "a tree was re-rooted"


# --- drafting during the pass


def test_a_tree_grows_during_the_pass_and_saves_later_draft_passes(target, twin, waits):
    """Each step drafts to the same size: what was read during the pass isn't read afterwards."""

    def num_passes(num_calls: int, monkeypatch) -> tuple[int, int]:
        with monkeypatch.context() as patched:
            count = [0, 0]
            read, grow_on = GrowingModel.read, Steady._grow_on

            def counted(*arguments):
                count[0] += 1
                return read(*arguments)

            def counted_meanwhile(self, draft, seconds):
                before = count[0]
                result = grow_on(self, draft, seconds)
                count[1] += count[0] - before
                return result

            patched.setattr(GrowingModel, "read", counted)
            patched.setattr(Steady, "_grow_on", counted_meanwhile)
            waits(num_calls)
            decode(target, steady(twin, num_reads=9), ONE, num_new=40)
            return count[0] - count[1], count[1]

    with pytest.MonkeyPatch.context() as monkeypatch:
        without, none = num_passes(0, monkeypatch)
        with_waits, meanwhile = num_passes(3, monkeypatch)
    assert none == 0
    assert meanwhile > 0
    assert with_waits < without


def test_a_draft_pass_that_does_not_fit_the_wait_is_not_begun(target, twin, waits):
    results = waits(4, seconds=1e-9)
    decode(target, growing(twin), ONE)
    assert results
    assert not any(results), "the first pass has shown what one takes"


@pytest.mark.slow
def test_a_tree_grows_to_its_bound_and_no_further(target, twin, waits):
    """It must not fill the memory in a pass that takes minutes."""
    plain, _ = decode(target, NullDrafter(), ONE, num_new=3)
    results = waits(200)
    drafter = steady(twin, tree_nodes=2000)
    capacities = set()
    grow_on = drafter._grow_on

    def watched(draft, seconds):
        capacities.add(draft.state.states[0].cache.capacity)
        return grow_on(draft, seconds)

    drafter._grow_on = watched
    answers, _ = decode(target, drafter, ONE, num_new=3)
    assert answers == plain
    assert results[0]
    assert not results[199]
    assert len(capacities) == 1, "the cache has room from the beginning"
    assert MAX_ENTRIES // 3 < 200


def test_the_root_may_be_read_during_the_pass(target, twin, waits):
    """A policy that never finds drafting worth its time still drafts while it costs nothing."""
    plain, _ = decode(target, NullDrafter(), ONE, num_new=40)
    answers, steps = decode(target, steady(twin, num_reads=-1), ONE, num_new=40)
    assert answers == plain
    assert accepted_of(steps) == 0
    waits(4)
    answers, steps = decode(target, steady(twin, num_reads=-1), ONE, num_new=40)
    assert answers == plain
    assert accepted_of(steps) > 0


def test_a_drafter_that_never_drafts_reads_its_text_now_and_then(target, twin, monkeypatch):
    monkeypatch.setattr("outrider.models.drafters.growing_draft.MAX_UNREAD", 6)
    num_unread = []
    open_ = GrowingModel.open

    def watched(self, state, *arguments):
        num_unread.append(max(len(row.tokens) for row in state.rows))
        open_(self, state, *arguments)

    monkeypatch.setattr(GrowingModel, "open", watched)
    assert decode(target, steady(twin, num_reads=-1), ALL)[0] == decode(target, NullDrafter(), ALL)[0]
    assert max(num_unread) == 6
    assert len(num_unread) > 10


# --- merges


@pytest.mark.parametrize("rows", [ALL, ONE], ids=["3 rows", "1 row"])
def test_a_merges_growing_tree_survives_steps_and_grows_meanwhile(target, twin, waits, kept, rows):
    """The tree that is verified is another one; re-rooting goes by tokens."""
    results = waits(2)
    plain, _ = decode(target, NullDrafter(), rows, num_new=40)
    drafter, ticks = growing(twin, "suffix", "recycling", tree_nodes=10), itertools.count(0.0)
    drafter.clock = ticks.__next__  # drafts are worth their time on any machine
    answers, steps = decode(target, drafter, rows, num_new=40)
    assert answers == plain
    assert accepted_of(steps) > len(steps) / 2
    if len(rows) == 1:
        assert any(results)
        assert max(kept) > 0


@torch.inference_mode()
def test_a_growing_tree_that_is_not_asked_keeps_its_nodes(target, twin, kept):
    """A merge doesn't ask a draft model in steps in which it isn't worth its time."""
    drafter, state = started(target, steady(twin))
    _, drafted = drafter.propose(state, torch.tensor([30]))
    tree = state.states[0].rows[0].tree
    deepest = max(range(len(tree)), key=lambda node: tree.depths[node] if tree.cache_entries[node] != UNREAD else 0)
    path = path_to(tree, deepest)
    assert len(path) >= 2
    # The text follows the tree's deepest path in steps that read nothing, and whose drafts are all rejected.
    drafter.num_reads = -1
    for token in path:
        verified, accepted = nothing_accepted(token)
        state = drafter.advance(drafted, verified, accepted, NOTHING)
        _, drafted = drafter.propose(state, torch.tensor([token]))
    assert len(kept) == len(path)
    assert min(kept) >= 0, "the tree has followed all tokens"


def started(target, drafter: Any) -> tuple[Any, Any]:
    """Return a drafter, and its state after a prompt."""
    prompts = Prompts.of([torch.tensor(PROMPTS[0])])
    prefill = target.prefill(prompts, max_new_tokens=60, max_nodes=12)
    return drafter, drafter.init_state(prompts, prefill, max_new_tokens=60)


def nothing_accepted(token: int) -> tuple[Any, Any]:
    tree = empty_tree(1, torch.device("cpu"))
    return tree, replace(accepted_path(tree, [[]]), next_tokens=(token,))


# --- pacing


def test_the_first_steps_read_the_root_only(target, twin):
    """So that the cost of a small tree is known before a large one is drafted."""
    drafter, sizes = growing(twin), []
    read = GrowingModel.read
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GrowingModel, "read", lambda self, state, reads, *_: (sizes.append(reads), read(self, state, reads))[1])
        decode(target, drafter, ONE, num_new=NUM_TRIALS)
    assert sizes == [[[NO_NODE]]] * len(sizes)
    assert sizes


def test_a_pass_reads_at_most_so_many_nodes_and_parents_first(target, twin, monkeypatch):
    read, most = GrowingModel.read, 0

    def watched(self, state, reads, *_):
        nonlocal most
        for row, nodes in zip(state.rows, reads, strict=True):
            assert len(nodes) <= MAX_READS
            most = max(most, len(nodes))
            for node in nodes:
                parent = NO_NODE if node == NO_NODE else row.tree.parents[node]
                assert parent == NO_NODE or row.tree.cache_entries[parent] != UNREAD
        return read(self, state, reads)

    monkeypatch.setattr(GrowingModel, "read", watched)
    for rows in (ONE, ALL):
        drafter, ticks = growing(twin, "suffix", tree_nodes=60), itertools.count(0.0)
        drafter.clock = ticks.__next__  # every pass takes as long
        decode(target, drafter, rows, num_new=60)
    assert most > 1


class Counting(Suffix):
    """Proposes the numbers that follow the last token."""

    def candidates_of(self, store: Any, tokens: Any) -> Candidates:
        return Candidates(tokens=[tokens[-1] + 1, tokens[-1] + 2], parents=[NO_NODE, 0], scores=[0.9, 0.9], bins=[0, 0])


@torch.inference_mode()
def test_a_node_of_another_source_that_was_read_below_an_earlier_root_costs_no_pass(target, twin):
    sources = {"draft_model": DraftModel(DraftModelConfig(), twin), "suffix": Counting(SuffixConfig())}
    drafter, state = started(target, Steady(sources, MergedConfig(tree_nodes=60)).grown(num_reads=40))
    merge = drafter.merge
    _, drafted = drafter.propose(state, torch.tensor([200]))
    tree = state.states[0].rows[0].tree
    first, second = tree.follow([201, 202])
    assert tree.estimates[first] == tree.estimates[second] == 0.0, "only the other source has proposed them"
    assert tree.cache_entries[first] != UNREAD != tree.cache_entries[second], "the model has read them"
    # The text goes on with the first one. The second one and what the model expects after it stay.
    state = drafter.advance(drafted, *nothing_accepted(201), NOTHING)
    draft = merge.open(state, torch.tensor([201]), [201])
    merge.ask(draft, 1)
    merge.rank(draft)
    (row,) = draft.rows
    node = row.child(NO_NODE, 202)
    assert node in merge.unread(draft, 0, 60)[0]
    assert not merge.read(draft, 0, [[node]]), "no pass"
    merge.rank(draft)
    (row,) = draft.rows
    node = row.child(NO_NODE, 202)
    assert node not in merge.unread(draft, 0, 60)[0]
    assert any(origins == 1 for origins, parent in zip(row.origins, row.parents, strict=True) if parent == node)


# --- refusals


def test_recorded_passes_do_not_grow(target):
    reader = HFTarget(target.model, target.tokenizer, target.identity, cuda_graphs=True)
    assert growing(reader).merge.searching == [0]


@torch.inference_mode()
def test_damaged_weights_are_an_error(target, twin):
    drafter, state = started(target, growing(twin))
    twin.model.lm_head.weight = torch.nn.Parameter(torch.full_like(twin.model.lm_head.weight, float("nan")))
    with pytest.raises(ValueError, match="NaN"):
        drafter.propose(state, torch.tensor([30]))


# --- certificate


@torch.inference_mode()
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "tree_nodes"), [("steady", 1), pytest.param("expected", 2, marks=pytest.mark.long)])
def test_all_outcomes_of_steps_with_a_re_rooted_tree_sum_to_the_targets_distribution(target, policy, tree_nodes, kept):
    """Whole texts, with every outcome of every draw, a clock that jumps, and passes that wait."""
    large, small = make_tiny(target, seed=0), make_tiny(target, seed=1)
    length = 3
    acceptance = SpeculativeSampling(sampling=Sampling(temperature=TEMPERATURE))
    actual, num_outcomes, accepted = torch.zeros(VOCAB**length, dtype=torch.float64), 0, set()
    script: list[int] | None = []
    while script is not None:
        # The clock and what the drafter learns begin anew, so that equal draws have equal trees.
        time_and_waits = random.Random(1)
        drafter = growing(small, tree_nodes=tree_nodes)
        if policy == "steady":
            drafter = steady(small, num_reads=4, width=2, num_nodes=tree_nodes)
        drafter.clock = lambda: time_and_waits.choice([0.0, 0.1, 1.0])  # noqa: B023
        chance = ScriptedChance(script, 1)
        emitted: list[int] = []
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(large, "verify", waiting(large.verify, time_and_waits))
            steps = generate(large, drafter, acceptance, [torch.tensor(PROMPT)], max_new_tokens=length, generator=chance)
            for step in steps:
                accepted |= set(step.num_accepted)
                emitted += step.tokens[0]
        actual[int(code(torch.tensor([emitted])))] += float(chance.weight)
        num_outcomes += 1
        script = chance.next_script()
    assert num_outcomes >= VOCAB**length
    assert accepted >= {0, 1}
    assert policy == "expected" or max(kept) > 0
    assert total_variation(actual, joint(large.model, length)) < EXACT


def waiting(verify, chance: random.Random) -> Any:
    def waiting_verify(last_token, tree, *, meanwhile):
        for _ in range(chance.randrange(3)):
            meanwhile(1e6)
        return verify(last_token, tree)

    return waiting_verify
