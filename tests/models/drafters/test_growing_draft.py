"""A draft model's growing tree: answers stay the target's, and the cache is that of a fresh read."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from outrider.models.decoding import GreedyAcceptance, Prompts, RowSeeds, Sampling, SpeculativeSampling, generate
from outrider.models.decoding.growing_tree import UNREAD, GrowingTree
from outrider.models.decoding.growth import ConfidenceRule, ExpectedRule
from outrider.models.decoding.tree import accepted_path, empty_tree
from outrider.models.decoding.types import NO_NODE, TargetOutput
from outrider.models.drafters import NullDrafter, make_training_free
from outrider.models.drafters.calibration import BIN_BOUNDS, CalibrationCell, Prior, ScoreCalibration
from outrider.models.drafters.candidates import MAX_CHILDREN
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.growing_draft import MAX_ENTRIES, GrowingDraft, GrowingSearch, GrowingState
from outrider.models.drafters.merged import MergedConfig, MergedDrafter
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.llm.hf_target import HFTarget

from ...decoded import texts_of
from ...rules.enumerate_rules import EXACT, ScriptedChance, total_variation
from .tiny_texts import PROMPT, TEMPERATURE, VOCAB, code, joint, make_tiny

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]
ONE, ALL = PROMPTS[:1], PROMPTS
NOTHING = TargetOutput(logits=torch.zeros(1, 1, 1), hidden_states=torch.zeros(1, 1, 1))
"""An output that a draft model doesn't read."""
PACES = ("confidence", "expected")


class Steady:
    """Rule that knows no time: a tree has `num_reads` read nodes before it is verified."""

    def __init__(self, num_reads: int = 12, width: int = 3, num_nodes: int = 5) -> None:
        self.num_reads, self.width, self.num_nodes = num_reads, width, num_nodes
        self.steps: list[tuple[list[list[int]], list[list[int]]]] = []

    def reads(self, trees: Sequence[GrowingTree]) -> list[list[int]]:
        return [self.spare_reads(tree, 1.0) if num_read(tree) < self.num_reads else [] for tree in trees]

    def spare_reads(self, tree: GrowingTree, seconds: float) -> list[int]:
        return tree.unread(self.width) if len(tree) else [NO_NODE]

    def sends(self, trees: Sequence[GrowingTree]) -> list[list[int]]:
        return [tree.first(self.num_nodes) for tree in trees]

    def add_draft(self, trees: Sequence[GrowingTree], reads: Sequence[Sequence[int]], seconds: float) -> None: ...

    def add_step(
        self,
        trees: Sequence[GrowingTree],
        sent: Sequence[Sequence[int]],
        accepted: Sequence[Sequence[int]],
        draft_seconds: float,
        pass_seconds: float,
    ) -> None:
        self.steps.append(([*map(list, sent)], [*map(list, accepted)]))


def num_read(tree: GrowingTree) -> int:
    return sum(entry != UNREAD for entry in tree.entries)


def growing(
    reader: HFTarget, rule: Any = None, pace: str = "expected", *, calibrated: bool = True, **options: Any
) -> DraftModel:
    drafter = DraftModel(DraftModelConfig(pace=pace, **{"tree_nodes": 12} | options), reader)
    if rule is not None:
        drafter.drafting.rule = lambda batch: rule
    if not calibrated:
        drafter.drafting.calibration.add = lambda *_: None  # so that a state has one tree
    return drafter


@pytest.fixture
def kept(monkeypatch) -> list[int]:
    """Count the nodes that keep their keys and values, in each step whose tree is re-rooted."""
    counts: list[int] = []
    rerooted = GrowingSearch._rerooted

    def counted(self, cache, row) -> GrowingDraft:
        draft = rerooted(self, cache, row)
        counts.append(len(draft.order[0]) if draft.is_rooted else -1)
        return draft

    monkeypatch.setattr(GrowingSearch, "_rerooted", counted)
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


@pytest.mark.parametrize("pace", PACES)
def test_answers_of_waiting_passes_are_those_of_plain_decoding(target, twin, waits, pace):
    rows = ALL
    plain, _ = decode(target, NullDrafter(), rows, num_new=16)
    sampling = SpeculativeSampling(sampling=Sampling(temperature=1.3, top_p=0.95))
    seeds = RowSeeds(range(len(rows)))
    sampled, _ = decode(target, NullDrafter(), rows, sampling, num_new=16, generator=seeds)
    waits(5)
    drafter = growing(twin, pace=pace, tree_nodes=8)
    assert decode(target, drafter, rows, num_new=16)[0] == plain
    assert decode(target, drafter, rows, sampling, num_new=16, generator=seeds)[0] == sampled


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
    drafter.drafting.clock = clock
    for rows, expected in ((ONE, plain[:1]), (PROMPTS[1:], plain[1:])):
        assert decode(target, drafter, rows)[0] == expected


def test_nothing_reads_the_generator(target, twin, waits):
    """Else seeded samples would depend on the drafts, and so on the clock."""

    class Raising:
        def draw(self, probs):
            raise AssertionError("the drafter draws a token")

        def flip(self, probs):
            raise AssertionError("the drafter flips a coin")

    results = waits(2)
    drafter = growing(twin)
    propose = drafter.drafting.propose
    drafter.drafting.propose = lambda state, last_token, generator: propose(state, last_token, Raising())
    answers, _ = decode(target, drafter, ONE)
    assert answers == decode(target, NullDrafter(), ONE)[0]
    assert any(results)


# --- re-rooted trees, against fresh reads


class Watched:
    """Drafter that checks its trees, node by node, against full forward passes over each path.

    It also checks that the target accepts the longest path of the tree that is in its answer.
    """

    def __init__(self, drafter: DraftModel, plain: list[list[int]]) -> None:
        self.drafter, self.plain = drafter, plain
        self.max_nodes, self.feature_layers = drafter.max_nodes, drafter.feature_layers
        self.texts: list[list[int]] = []
        self.num_checked = 0
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
        sent = drafted.trees[0].follow(answer)
        self.expected.append(len([node for node in sent if node in drafted.sent[0]]))
        return tree, drafted

    def meanwhile(self, drafted):
        return self.drafter.meanwhile(drafted)

    def advance(self, drafted, tree, accepted, output):
        for row, last, text in zip(drafted.rows, self.last, self.texts, strict=True):
            self.check(row, [*text, last])
        for text, last, tokens in zip(self.texts, self.last, accepted.tokens, strict=True):
            text += [last, *tokens]
        return self.drafter.advance(drafted, tree, accepted, output)

    def select(self, state, rows):
        self.texts = [self.texts[row] for row in rows]
        self.num_prompt = [self.num_prompt[row] for row in rows]
        self.plain = [self.plain[row] for row in rows]
        return self.drafter.select(state, rows)

    def check(self, row, text: list[int]) -> None:
        for node in [NO_NODE, *(node for node, entry in enumerate(row.tree.entries) if entry != UNREAD)]:
            path: list[int] = []
            above = node
            while above != NO_NODE:
                path.insert(0, row.tree.tokens[above])
                above = row.tree.parents[above]
            children = row.tree.children(node)
            probs = self.drafter.model(torch.tensor([[*text, *path]])).logits[0, -1].softmax(-1)
            likeliest = probs.topk(MAX_CHILDREN)
            assert [row.tree.tokens[child] for child in children] == likeliest.indices.tolist()[: len(children)]
            # Scores are computed in float32.
            assert [row.scores[child] for child in children] == pytest.approx(
                likeliest.values.tolist()[: len(children)], rel=1e-5
            )
            self.num_checked += 1


def test_keys_and_values_of_a_re_rooted_tree_are_those_of_a_fresh_read(target, twin, waits, kept):
    waits(2)
    plain, _ = decode(target, NullDrafter(), ONE, num_new=40)
    watched = Watched(growing(twin, Steady()), plain)
    answers, steps = decode(target, watched, ONE, num_new=40)
    assert answers == plain
    # The last path may go on behind the answer's end.
    assert [step.num_accepted[0] for step in steps[1:-1]] == watched.expected[:-1], "acceptance is that of a fresh tree"
    assert watched.num_checked > 50
    assert sum(count > 0 for count in kept) >= 3, "trees were re-rooted with some of their nodes"
    assert -1 in kept, "and some were dropped"
    assert accepted_of(steps) > len(steps)


def test_rows_of_a_batch_read_different_numbers_of_nodes(target, twin, waits, kept):
    """Their trees are padded in the draft model's cache; a padded entry must be seen by no node."""

    class Uneven(Steady):
        def reads(self, trees):
            limits = (2, 7, 4)
            return [
                self.spare_reads(tree, 1.0)[: 1 + row] if num_read(tree) < limits[row] else [] for row, tree in enumerate(trees)
            ]

    results = waits(2)
    plain, _ = decode(target, NullDrafter(), ALL)
    watched = Watched(growing(twin, Uneven()), plain)
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
    drafter = growing(twin, Steady())
    answers, _ = decode(target, drafter, ALL, num_new=[6, 7, 40])
    assert answers == [plain[0][:6], plain[1][:7], plain[2]]
    assert len(kept) > 5
    assert max(kept) >= 0, "a tree was re-rooted"


# --- drafting during the pass


def test_a_tree_grows_during_the_pass_and_saves_later_draft_passes(target, twin, waits):
    """Each step drafts to the same size: what was read during the pass isn't read afterwards."""

    def num_passes(num_calls: int, monkeypatch) -> tuple[int, int]:
        with monkeypatch.context() as patched:
            count = [0, 0]
            read, draft_on = GrowingSearch._read, GrowingSearch._draft_on

            def counted(self, draft, reads):
                count[0] += 1
                return read(self, draft, reads)

            def counted_meanwhile(self, draft, seconds):
                before = count[0]
                result = draft_on(self, draft, seconds)
                count[1] += count[0] - before
                return result

            patched.setattr(GrowingSearch, "_read", counted)
            patched.setattr(GrowingSearch, "_draft_on", counted_meanwhile)
            waits(num_calls)
            decode(target, growing(twin, Steady(num_reads=9)), ONE, num_new=40)
            return count[0] - count[1], count[1]

    with pytest.MonkeyPatch.context() as monkeypatch:
        without, none = num_passes(0, monkeypatch)
        with_waits, meanwhile = num_passes(3, monkeypatch)
    assert none == 0
    assert meanwhile > 0
    assert with_waits < without


def test_a_draft_pass_that_does_not_fit_the_wait_is_not_begun(target, twin, waits):
    results = waits(4, seconds=1e-9)
    drafter = growing(twin, Steady())
    decode(target, drafter, ONE)
    assert results
    assert not any(results), "the first pass has shown what one takes"


@pytest.mark.slow
def test_a_tree_grows_to_its_bound_and_no_further(target, twin, waits):
    """It must not fill the memory in a pass that takes minutes."""
    plain, _ = decode(target, NullDrafter(), ONE, num_new=4)
    results = waits(200)
    drafter = growing(twin, Steady())
    capacities = set()
    draft_on = drafter.drafting._draft_on

    def watched(draft, seconds):
        capacities.add(draft.text.capacity)
        return draft_on(draft, seconds)

    drafter.drafting._draft_on = watched
    answers, _ = decode(target, drafter, ONE, num_new=4)
    assert answers == plain
    assert results[0]
    assert not results[199]
    assert len(capacities) == 1, "the cache has room from the beginning"
    assert MAX_ENTRIES // 3 < 200


def test_the_root_may_be_read_during_the_pass(target, twin, waits):
    """A rule that never finds drafting worth its time still drafts while it costs nothing."""

    class Lazy(Steady):
        def reads(self, trees):
            return [[] for _ in trees]

    plain, _ = decode(target, NullDrafter(), ONE, num_new=40)
    answers, steps = decode(target, growing(twin, Lazy()), ONE, num_new=40)
    assert answers == plain
    assert accepted_of(steps) == 0
    waits(4)
    answers, steps = decode(target, growing(twin, Lazy()), ONE, num_new=40)
    assert answers == plain
    assert accepted_of(steps) > 0


def test_a_drafter_that_never_drafts_reads_its_text_now_and_then(target, twin, monkeypatch):
    monkeypatch.setattr("outrider.models.drafters.growing_draft.MAX_UNREAD", 6)
    longest = []

    class Never(Steady):
        def reads(self, trees):
            return [[] for _ in trees]

        def add_step(self, *arguments):
            longest.append(1)

    drafter = growing(twin, Never())
    advance = drafter.drafting.advance
    num_unread = []

    def watched(drafted, tree, accepted):
        state = advance(drafted, tree, accepted)
        num_unread.append(max(len(row.tokens) for row in state.rows))
        return state

    drafter.drafting.advance = watched
    assert decode(target, drafter, ALL)[0] == decode(target, NullDrafter(), ALL)[0]
    assert max(num_unread) == 6
    assert len(longest) == len(num_unread) > 10


# --- states as values


@torch.inference_mode()
def start(target, drafter) -> tuple[list[int], GrowingState]:
    prompts = Prompts.of([torch.tensor(PROMPTS[0])])
    prefill = target.prefill(prompts, max_new_tokens=60, max_nodes=12)
    return [*PROMPTS[0], 30], drafter.init_state(prompts, prefill, max_new_tokens=60)


@torch.inference_mode()
def proposal(drafter, state, text: list[int]) -> tuple[list[list[int]], Any, Any]:
    tree, drafted = drafter.propose(state, torch.tensor(text[-1:]))
    lines = tree.lineage[0].tolist()
    return sorted([int(tree.tokens[0, node]) for node in line[::-1] if node != NO_NODE] for line in lines), tree, drafted


@torch.inference_mode()
def step(
    drafter, state, text: list[int], choice: int, *, num_calls: int = 0
) -> tuple[list[list[int]], list[int], GrowingState]:
    """Draft, let the target accept some path, and return the drafts, the new text and state."""
    paths, tree, drafted = proposal(drafter, state, text)
    return paths, *accept(drafter, text, tree, drafted, choice, num_calls=num_calls)


@torch.inference_mode()
def accept(drafter, text, tree, drafted, choice: int, *, num_calls: int = 0) -> tuple[list[int], GrowingState]:
    meanwhile = drafter.meanwhile(drafted)
    for _ in range(num_calls):
        meanwhile(1e6)
    path = [node for node in reversed(tree.lineage[0, choice % tree.num_nodes].tolist()) if node != NO_NODE]
    # The bonus token is mostly a draft as well.
    growing_path = drafted.trees[0].follow(tree.tokens[0, path].tolist())
    children = drafted.trees[0].children(growing_path[-1] if growing_path else NO_NODE)
    bonus = drafted.trees[0].tokens[children[choice % len(children)]] if children else 50 + choice
    accepted = accepted_path(tree, [path])
    return [*text, *tree.tokens[0, path].tolist(), bonus], drafter.advance(drafted, tree, accepted, NOTHING)


def nothing_accepted(drafted) -> tuple[Any, Any]:
    tree = empty_tree(len(drafted.rows), torch.device("cpu"))
    return tree, accepted_path(tree, [[] for _ in drafted.rows])


# --- merges


FREE = {"prompt_lookup": {"tree_nodes": 4}, "suffix": {"tree_nodes": 6}, "recycling": {"tree_nodes": 6}}


def merge(target, drafter, *names: str, pace: str = "fixed", tree_nodes: int = 10) -> MergedDrafter:
    sources = {"draft_model": drafter, **{name: make_training_free(name, FREE[name], target) for name in names}}
    return MergedDrafter(sources, MergedConfig(tree_nodes=tree_nodes, pace=pace))


@pytest.mark.parametrize(("pace", "rows"), [("fixed", ALL), ("expected", ONE)], ids=["3 rows", "1 row"])
def test_a_merges_growing_tree_survives_steps_and_grows_meanwhile(target, twin, waits, kept, pace, rows):
    """The tree that is verified is another one; re-rooting goes by tokens."""
    results = waits(2)
    plain, _ = decode(target, NullDrafter(), rows, num_new=40)
    merged = merge(target, growing(twin, Steady()), "suffix", "recycling", pace=pace)
    answers, steps = decode(target, merged, rows, num_new=40)
    assert answers == plain
    assert accepted_of(steps) > len(steps) / 2
    if len(rows) == 1:
        assert any(results)
        assert max(kept) > 0


def test_a_merge_of_one_growing_tree_sends_what_the_tree_alone_would(target, twin):
    """Its candidates have the draft model's own scores, which the merge calibrates itself."""
    alone, merged = growing(twin, Steady(num_nodes=10)), merge(target, growing(twin, Steady(num_nodes=10)))
    prompts = Prompts.of([torch.tensor(PROMPTS[0])])
    paths = []
    with torch.inference_mode():
        for drafter in (alone, merged):
            prefill = target.prefill(prompts, max_new_tokens=60, max_nodes=12)
            state = drafter.init_state(prompts, prefill, max_new_tokens=60)
            paths.append(proposal(drafter, state, [30])[0])
    assert paths[0] == paths[1]


def test_a_merge_asks_the_second_source_if_the_first_has_nothing_to_do(target, twin, monkeypatch):
    calls = []

    def work(name: str, *, does: bool) -> Callable[[float], bool]:
        return lambda seconds: calls.append((name, seconds)) or does

    merged = merge(target, growing(twin, Steady()), "suffix", "recycling")
    works = [work("first", does=False), None, work("last", does=True)]
    for source, task in zip(merged._sources, works, strict=True):
        monkeypatch.setattr(source, "meanwhile", lambda drafted, task=task: task)
    with torch.inference_mode():
        prompts = Prompts.of([torch.tensor(PROMPTS[0])])
        state = merged.init_state(prompts, target.prefill(prompts, max_new_tokens=9, max_nodes=10), max_new_tokens=9)
        _, drafted = merged.propose(state, torch.tensor([30]))
    meanwhile = merged.meanwhile(drafted)
    assert meanwhile is not None
    assert meanwhile(2.0)
    assert calls == [("first", 2.0), ("last", 2.0)]


def test_a_growing_tree_that_is_skipped_keeps_its_nodes(target, twin, kept):
    """A merge skips a draft model in steps in which it isn't worth its time."""
    drafter = growing(twin, Steady(num_reads=12))
    text, state = start(target, drafter)
    with torch.inference_mode():
        _, drafted = drafter.search(state, torch.tensor(text[-1:]))
        tree = drafted.trees[0]
        deepest = max(range(len(tree)), key=lambda node: tree.depths[node] if tree.entries[node] != UNREAD else 0)
        path: list[int] = []
        while deepest != NO_NODE:
            path.insert(0, tree.tokens[deepest])
            deepest = tree.parents[deepest]
        assert len(path) >= 2
        # The text follows the tree's deepest path: the first token comes in a step that skips it.
        foreign, accepted = nothing_accepted(drafted)
        state = drafter.advance(drafted, foreign, accepted, NOTHING)
        for token in path[:-1]:
            drafted = drafter.skip(state, torch.tensor([token]))
            state = drafter.advance(drafted, foreign, accepted, NOTHING)
        drafter.search(state, torch.tensor(path[-1:]))
    assert len(kept) == 1
    assert kept[0] >= 0, "the tree has followed all skipped tokens"


# --- calibration


@pytest.mark.slow
def test_probabilities_follow_what_the_target_accepts(target, twin):
    """The draft model is far too sure of itself, and q much less so."""
    rule = Steady(num_reads=6, num_nodes=8)
    drafter = growing(twin, rule)
    expected, own, accepted = [], [], []
    add_step = rule.add_step
    advance = drafter.drafting.advance

    def watched(drafted, tree, path):
        (row,) = drafted.rows
        tokens, parents = row.tree.links(drafted.sent[0])
        probs: list[float] = []
        for node, parent in zip(drafted.sent[0], parents, strict=True):
            probs.append(row.scores[node] * (1.0 if parent == NO_NODE else probs[parent]))
        own.append(sum(probs))
        assert len(tokens) == len(probs)
        return advance(drafted, tree, path)

    drafter.drafting.advance = watched

    def remember(trees, sent, paths, *seconds):
        expected.append(sum(trees[0].probs[node] for node in sent[0]))
        accepted.append(len(paths[0]))
        add_step(trees, sent, paths, *seconds)

    rule.add_step = remember
    decode(target, drafter, ONE, num_new=250)
    assert len(expected) > 80
    errors = [abs(sum(values[40:]) - sum(accepted[40:])) / len(accepted[40:]) for values in (expected, own)]
    assert errors[0] < 0.6
    assert errors[0] < errors[1] / 2


def test_each_choice_of_the_target_teaches_once(target, twin, waits, monkeypatch):
    """A node that survives a step teaches when the text has reached its parent, and not again."""
    taught: list[bool] = []
    monkeypatch.setattr(ScoreCalibration, "add", lambda self, depth, score, hit: taught.append(hit))
    waits(2)
    answers, _ = decode(target, growing(twin, Steady(num_reads=20)), ONE, num_new=40)
    assert 0 < sum(taught) <= len(answers[0])
    assert len(taught) <= MAX_CHILDREN * len(answers[0])


def test_a_text_starts_from_the_saved_calibration(target, twin):
    drafter = growing(twin, Steady())
    cells = [CalibrationCell(depth=1, bin=bin_index, hits=0.0, total=30.0) for bin_index in range(1, len(BIN_BOUNDS) + 1)]
    text, state = start(target, drafter)
    _, _, before = proposal(drafter, state, text)
    drafter.drafting.use_prior(Prior(sources={"draft_model": cells, "suffix": []}, agreements=[]))
    text, state = start(target, drafter)
    _, _, after = proposal(drafter, state, text)
    first = [node for node in before.trees[0].children(NO_NODE) if before.rows[0].scores[node] > 0.1]
    assert first
    assert all(after.trees[0].probs[node] < before.trees[0].probs[node] / 2 for node in first)


# --- the rules


def test_each_pace_has_its_rule_and_batches_have_their_own(twin):
    expected, confidence = growing(twin).drafting, growing(twin, pace="confidence").drafting
    assert isinstance(expected.rule(1), ExpectedRule)
    assert isinstance(confidence.rule(1), ConfidenceRule)
    assert expected.rule(3) is expected.rule(4)
    assert expected.rule(1) is not expected.rule(2)


def test_the_rule_learns_the_nodes_that_were_sent_and_accepted(target, twin):
    rule = Steady()
    _, steps = decode(target, growing(twin, rule), ONE, num_new=40)
    assert [len(paths[0]) for _, paths in rule.steps] == [step.num_accepted[0] for step in steps[1:]]
    assert all(set(paths[0]) <= set(sent[0]) for sent, paths in rule.steps)


# --- refusals


def test_a_drawn_chain_does_not_grow():
    with pytest.raises(ValueError, match=r"temperature is 0\.7 and pace expected"):
        DraftModelConfig(temperature=0.7, pace="expected")


def test_an_unknown_pace_is_refused():
    with pytest.raises(ValueError, match="pace"):
        DraftModelConfig(pace="quick")


def test_recorded_passes_do_not_grow(target):
    reader = HFTarget(target.model, target.tokenizer, target.identity, cuda_graphs=True)
    with pytest.raises(ValueError, match=r"pace is expected.*target\.cuda_graphs"):
        DraftModel(DraftModelConfig(pace="expected"), reader)


def test_damaged_weights_are_an_error(target, twin):
    drafter = growing(twin, Steady())
    twin.model.lm_head.weight = torch.nn.Parameter(twin.model.lm_head.weight.clone(), requires_grad=False)
    text, state = start(target, drafter)
    twin.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        proposal(drafter, state, text)


# --- certificate


@torch.inference_mode()
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pace", "tree_nodes"), [("steady", 1), *(pytest.param(pace, 2, marks=pytest.mark.long) for pace in PACES)]
)
def test_all_outcomes_of_steps_with_a_re_rooted_tree_sum_to_the_targets_distribution(target, pace, tree_nodes, kept):
    """Whole texts, with every outcome of every draw, a clock that jumps, and passes that wait."""
    large, small = make_tiny(target, seed=0), make_tiny(target, seed=1)
    length = 3
    rule = SpeculativeSampling(sampling=Sampling(temperature=TEMPERATURE))
    actual, num_outcomes, accepted = torch.zeros(VOCAB**length, dtype=torch.float64), 0, set()
    steady = Steady(num_reads=4, width=2, num_nodes=tree_nodes) if pace == "steady" else None
    drafter = growing(small, steady, pace="expected" if steady else pace, tree_nodes=tree_nodes)
    script: list[int] | None = []
    while script is not None:
        # The clock and what the drafter learns begin anew, so that equal draws have equal trees.
        time_and_waits = random.Random(1)
        drafter.drafting._rules.clear()
        drafter.drafting.calibration = ScoreCalibration()
        drafter.drafting.clock = lambda: time_and_waits.choice([0.0, 0.1, 1.0])  # noqa: B023
        chance = ScriptedChance(script, 1)
        emitted: list[int] = []
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(large, "verify", waiting(large.verify, time_and_waits))
            steps = generate(large, drafter, rule, [torch.tensor(PROMPT)], max_new_tokens=length, generator=chance)
            for step in steps:
                accepted |= set(step.num_accepted)
                emitted += step.tokens[0]
        actual[int(code(torch.tensor([emitted])))] += float(chance.weight)
        num_outcomes += 1
        script = chance.next_script()
    assert num_outcomes >= VOCAB**length
    assert accepted >= {0, 1}
    assert steady is None or max(kept) > 0
    assert total_variation(actual, joint(large.model, length)) < EXACT


def waiting(verify, chance: random.Random) -> Any:
    def waiting_verify(last_token, tree, *, meanwhile):
        for _ in range(chance.randrange(3)):
            meanwhile(1e6)
        return verify(last_token, tree)

    return waiting_verify
