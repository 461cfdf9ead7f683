"""Trees that grow while the target reads parts of them: after every step they are those of the text."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import cycle
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
    generate,
)
from outrider.models.decoding.growing_tree import UNREAD, GrowingTree
from outrider.models.decoding.pipelined import generate_pipelined
from outrider.models.decoding.protocols import AsyncTarget
from outrider.models.decoding.reading import read_acceptance, token_names
from outrider.models.decoding.speculation import ExpectedSpeculation
from outrider.models.decoding.tree import tree_of
from outrider.models.decoding.types import NO_NODE, Counts
from outrider.models.decoding.window import DraftRun, PassAnswer
from outrider.models.drafters import NullDrafter, build_drafter, growing_draft, load_drafter, parse_drafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.merged import MergedConfig, MergedDrafter
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.drafters.recycling import MASKS, after
from outrider.models.drafters.registry import TRAINING_FREE
from outrider.models.drafters.streaming_merge import LEAST_PROB, MAX_NODES, streaming_drafter
from outrider.models.drafters.suffix import Suffix, SuffixConfig
from outrider.models.drafters.training_free import Candidates
from outrider.models.llm.hf_target import HFTarget

from ...decoded import answers_of, texts_of
from ..paths import path_to

PROMPT = [1, 70, 71, 72, 2, 70, 71, 72, 5, 6, 70, 71]
NUM_NEW = 40
SMALL: dict[str, dict[str, Any]] = {
    "eagle": {"depth": 3, "top_k": 3, "tree_nodes": 8},
    "eagle3": {"depth": 3, "top_k": 3, "tree_nodes": 8},
    "medusa": {"tree_nodes": 8},
    "redrafter": {"beam_width": 6, "beam_length": 5, "tree_nodes": 8},
}
MERGES = {
    "model + free": ("draft_model", "suffix", "recycling"),
    "free": ("prompt_lookup", "suffix", "recycling"),
    "models": ("redrafter", "draft_model"),
}
UNTRAINED = ("redrafter", "medusa", "eagle")
KINDS = ["draft_model", "redrafter", "medusa", "eagle", *sorted(TRAINING_FREE), *MERGES]


def draft_model(twin: HFTarget, **options: Any) -> DraftModel:
    return DraftModel(DraftModelConfig(**options), twin)


def build(kind: str, target: HFTarget, twin: HFTarget) -> Any:
    if kind in MERGES:
        sources = {name: build(name, target, twin) for name in MERGES[kind]}
        return MergedDrafter(sources, MergedConfig())
    if kind in TRAINING_FREE:
        return load_drafter(kind, target)
    if kind == "draft_model":
        return draft_model(twin)
    torch.manual_seed(0)
    return build_drafter(parse_drafter({"kind": kind, **SMALL[kind]}), target).to(target.dtype).eval()


def plain_answer(target: HFTarget, num_new: int = NUM_NEW) -> list[int]:
    return answers_of(target, NullDrafter(), [PROMPT], num_new)[0]


@dataclass
class Moment:
    """What a streaming drafter has drafted when its text has grown to this."""

    text: list[int]
    """All committed tokens; the last is the tree's root."""
    state: Any
    tree: GrowingTree
    num_accepted: int


@torch.inference_mode()
def stream(
    target: HFTarget, drafter: Any, num_new: int = NUM_NEW, seed: int = 0, most_grows: int = 6, num_nodes: int = 8
) -> Iterator[Moment]:
    """Decode step by step with some draft passes in each, and yield before each step of the target."""
    chance = random.Random(seed)
    prompts = Prompts.of([torch.tensor(PROMPT)])
    output = target.prefill(prompts, max_new_tokens=num_new, max_nodes=64)
    text = [*PROMPT, int(output.logits[0, 0].argmax())]
    state = drafter.begin(prompts, output, text[-1], max_new_tokens=num_new)
    num_accepted = 0
    while len(text) < len(PROMPT) + num_new:
        for _ in range(chance.randint(0, most_grows)):
            drafter.grow(state)
        tree = drafter.tree(state)
        yield Moment(text=[*text], state=state, tree=tree, num_accepted=num_accepted)
        likeliest = range(min(num_nodes, len(tree)))  # they come first
        drafts = tree_of([tree.links(likeliest)], target.device)
        output = target.verify(torch.tensor(text[-1:]), drafts)
        accepted = read_acceptance(drafts, output, GreedyAcceptance()(drafts, output), token_names([0], [text]))
        (new,) = accepted.new_tokens
        target.commit(drafts, accepted)
        entries = [0, *[node + 1 for node in accepted.host_nodes[0]]]
        kept = TargetOutput(logits=output.logits[:, entries], hidden_states=output.hidden_states[:, entries])
        state = drafter.follow(state, new, kept)
        text += new
        num_accepted += len(new) - 1
    yield Moment(text=[*text], state=state, tree=drafter.tree(state), num_accepted=num_accepted)


def links(tree: GrowingTree) -> dict[tuple[int, ...], float]:
    """Return the probability of each node, by its path."""
    return {tuple(path_to(tree, node)): tree.probs[node] for node in range(len(tree))}


@torch.inference_mode()
def fresh(drafter: Any, target: HFTarget, text: list[int]) -> Any:
    """Return the state of a text that the drafter sees for the first time."""
    prompts = Prompts.of([torch.tensor(text[:-1])])
    output = target.prefill(prompts, max_new_tokens=8, max_nodes=8)
    return drafter.begin(prompts, output, text[-1], max_new_tokens=8)


# --- all kinds


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("kind", KINDS)
def test_trees_have_probabilities_that_fall_and_no_equal_siblings(target, twin, kind):
    plain = plain_answer(target)
    drafter = streaming_drafter(build(kind, target, twin))
    num_nodes, moments = 0, list(stream(target, drafter, NUM_NEW + 20))
    for moment in moments:
        tree = moment.tree
        assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree), "siblings differ"
        for node, parent in enumerate(tree.parents):
            assert parent < node
            assert 0.0 < tree.probs[node] <= (1.0 if parent == NO_NODE else tree.probs[parent])
            assert 0 <= tree.tokens[node] < target.vocab_size
        num_nodes += len(tree)
    assert num_nodes > 50
    assert moments[-1].text[len(PROMPT) :][:NUM_NEW] == plain
    assert moments[-1].num_accepted > 0 or kind in UNTRAINED


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_that_is_not_followed_stops_growing(target, twin, kind):
    """It would fill any memory while the target is slow."""
    drafter = streaming_drafter(build(kind, target, twin))
    state = next(moment.state for moment in stream(target, drafter) if len(moment.tree))
    sizes = [len(drafter.tree(state))]
    while drafter.grow(state):
        sizes.append(len(drafter.tree(state)))
        assert len(sizes) < 600
    assert 0 < sizes[-1] < 4096
    assert not drafter.grow(state)
    assert len(drafter.tree(state)) == sizes[-1]


def test_nothing_is_drafted_without_a_drafter(target):
    drafter = streaming_drafter(NullDrafter())
    moments = list(stream(target, drafter, num_new=6))
    assert not any(len(moment.tree) or drafter.grow(moment.state) for moment in moments)
    assert moments[-1].text[len(PROMPT) :] == plain_answer(target, 6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "model" in kind])
def test_a_grow_costs_one_draft_pass_and_a_follow_none(target, twin, monkeypatch, kind):
    passes, drafter = [0], streaming_drafter(build(kind, target, twin))
    read_tree = twin.read_tree
    monkeypatch.setattr(twin, "read_tree", lambda *args, **options: (passes.append(1), read_tree(*args, **options))[1])

    def counted(name: str) -> tuple[Callable[..., Any], list[int]]:
        method, counts = getattr(drafter, name), []

        def call(*args: Any) -> Any:
            before = sum(passes)
            result = method(*args)
            counts.append(sum(passes) - before)
            return result

        return call, counts

    grow, grown = counted("grow")
    follow, followed = counted("follow")
    monkeypatch.setattr(drafter, "grow", grow)
    monkeypatch.setattr(drafter, "follow", follow)
    assert list(stream(target, drafter))
    assert max(grown) == 1
    assert sum(grown) > 20
    assert set(followed) == {0}


# --- draft models


@pytest.mark.parametrize("kind", ["draft_model", pytest.param("model + free", marks=pytest.mark.slow)])
def test_keys_and_values_of_the_tree_are_those_of_a_fresh_read(target, twin, monkeypatch, kind):
    """The logits of every node that is read are those of its whole text."""
    likeliest, logits = growing_draft.likeliest_children, []
    monkeypatch.setattr(growing_draft, "likeliest_children", lambda values: (logits.append(values[0]), likeliest(values))[1])
    read, num_read, num_kept = growing_draft.GrowingModel.read, 0, 0
    pending: list[list[list[int]]] = []

    def watched(self, state, reads, *_):
        pending.append([path_to(state.rows[0].tree, node) for node in reads[0]])
        return read(self, state, reads)

    monkeypatch.setattr(growing_draft.GrowingModel, "read", watched)
    drafter = streaming_drafter(build(kind, target, twin))
    for moment in stream(target, drafter, num_nodes=1):
        for paths, values in zip(pending, logits, strict=True):
            for path, actual in zip(paths, values, strict=True):
                expected = twin.model(torch.tensor([[*moment.text, *path]])).logits[0, -1]
                torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
                num_read += 1
        # Nodes that the last step has left have children already.
        num_kept += sum(entry != UNREAD for entry in models_tree(moment.state).cache_entries)
        num_kept -= sum(bool(path) for paths in pending for path in paths)
        pending.clear()
        logits.clear()
    assert num_read > 50
    assert num_kept > 10, "nodes outlive a step"


def models_tree(state: Any) -> GrowingTree:
    """Return the tree of the draft model, which is the first source."""
    return state.draft.state.states[0].rows[0].tree


def test_what_the_synchronous_drafter_has_learned_is_used(target, twin):
    merge = build("model + free", target, twin)
    assert streaming_drafter(merge).merge.counts is merge.merge.counts


# --- ReDrafter and training-free drafters: functions of the text


@pytest.mark.parametrize("kind", ["prompt_lookup", "suffix"])
def test_the_tree_after_a_step_is_a_fresh_tree_of_the_same_text(target, twin, kind):
    drafter, num_nodes = streaming_drafter(build(kind, target, twin)), 0
    for moment in stream(target, drafter, most_grows=0):
        other = fresh(drafter, target, moment.text)
        other.draft.state.texts[0].counts = moment.state.draft.state.texts[0].counts
        drafter._merge(other)
        for _ in range(4):
            assert drafter.grow(moment.state) == drafter.grow(other)
            actual, expected = drafter.tree(moment.state), drafter.tree(other)
            assert links(actual) == pytest.approx(links(expected), rel=1e-5)
        num_nodes += len(actual)
    assert num_nodes > 50


def test_a_redrafter_searches_from_the_state_before_the_last_token(target, twin):
    """Several tokens are committed at a time. The state is that of the last accepted one."""
    drafter = streaming_drafter(build("redrafter", target, twin))
    state = fresh(drafter, target, PROMPT)
    hidden = torch.randn(1, 3, target.hidden_size)
    state = drafter.follow(state, [5, 6, 7], TargetOutput(logits=torch.zeros(1, 3, target.vocab_size), hidden_states=hidden))
    assert torch.equal(state.draft.state.states[0], hidden[:, 2])
    assert drafter.grow(state)
    assert not drafter.grow(state), "one search below a root"


def test_recycling_learns_the_logits_of_every_committed_entry(target, twin):
    """As it does step by step: the latest entry of a context has its successors."""
    recycling = load_drafter("recycling", target)
    drafter = streaming_drafter(recycling)
    *_, last = stream(target, drafter)
    store = last.state.draft.state.states[0].stores[0]
    logits = target.model(torch.tensor([last.text])).logits[0]
    rows: dict[int, list[int]] = {}
    context = 0
    for place, token in enumerate(last.text[:-1]):
        context = after(context, token)
        if place >= len(PROMPT):
            rows |= dict.fromkeys(
                (context & mask for mask in MASKS), logits[place].topk(recycling.config.top_k).indices.tolist()
            )
    assert len(rows) > NUM_NEW
    assert {key: store.rows[key] for key in rows} == rows


def test_candidates_below_a_path_are_those_of_the_text_with_the_path(target):
    """Only what the path itself repeats isn't found."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2]
    for drafter in (load_drafter("prompt_lookup", target), Suffix(SuffixConfig())):
        store, longer = drafter.new_store(), drafter.new_store()
        store.add(text[:-1])
        longer.add([*text, 3, 4])
        below = drafter.candidates_of(store, [text[-1], 3, 4, 5])
        assert below == drafter.candidates_of(longer, [5])
        assert list(below.tokens[:8]) == [6, 7, 8, 9, 10, 11, 12, 1]


# --- merges


class Counting(Suffix):
    """Proposes two tokens below every path: numbers that follow the path's last one."""

    def __init__(self) -> None:
        super().__init__(SuffixConfig())
        self.asked: list[list[int]] = []

    def candidates_of(self, store: Any, tokens: Sequence[int]) -> Candidates:
        self.asked.append([*tokens])
        first = (tokens[-1] + 1) % 300
        return Candidates(tokens=[first, (first + 1) % 300], parents=[NO_NODE, 0], scores=[0.9, 0.9], bins=[0, 0])


def test_the_likeliest_leaf_is_extended_by_every_source(target, twin):
    first, second = Counting(), Counting()
    drafter = streaming_drafter(
        MergedDrafter({"draft_model": draft_model(twin), "suffix": first, "suffix_2": second}, MergedConfig())
    )
    state = next(stream(target, drafter, most_grows=0)).state
    (root,) = state.draft.last_tokens
    num_leaves = 0
    for _ in range(6):
        (row,) = state.draft.rows
        leaves = [node for node in range(len(row.tokens)) if not row.children[node]]
        assert drafter.grow(state)
        if leaves:
            assert first.asked[-1] == [root, *path_to(state.tree, state.tree.follow(first.asked[-1][1:])[-1])]
            assert first.asked[-1][1:] == path_to(row, leaves[0]), "the likeliest leaf"
            num_leaves += 1
        assert first.asked == second.asked
    assert num_leaves > 2
    # The chain of numbers is one path, although two sources propose it, and goes on below its end.
    tree, (row,) = state.tree, state.draft.rows
    chain = tree.follow([(root + n) % 300 for n in range(1, 20)])
    assert len(chain) >= 4
    assert all(row.origins[node] & 0b110 == 0b110 for node in chain)
    # The draft model has read nodes that only the others proposed, and proposes tokens below them.
    model_tree = models_tree(state)
    foreign = [
        node for node, entry in enumerate(model_tree.cache_entries) if entry != UNREAD and model_tree.estimates[node] == 0.0
    ]
    assert foreign
    for node in foreign:
        path = path_to(model_tree, node)
        merged = tree.follow(path)[-1]
        assert row.tokens[merged] == path[-1]
        assert any(source.source == 0 and number == node for source, number in row.places[merged])
        assert row.children[merged], "the model's tokens hang from a path of others"


def test_equal_prefixes_of_sources_are_one_node(target, twin):
    sources = {name: build(name, target, twin) for name in ("draft_model", "prompt_lookup", "suffix")}
    drafter, shared = streaming_drafter(MergedDrafter(sources, MergedConfig())), 0
    for moment in stream(target, drafter):
        assert len(moment.tree) == len(links(moment.tree)) <= MAX_NODES
        assert all(prob >= LEAST_PROB for prob in moment.tree.probs)
        shared += sum(origin & (origin - 1) != 0 for origin in moment.state.draft.rows[0].origins)
    assert shared > 20


def test_a_merge_learns_from_every_committed_token(target, twin):
    drafter = streaming_drafter(build("model + free", target, twin))
    moments = stream(target, drafter)
    totals = [sum(total for _, total in moment.state.draft.state.texts[0].counts.values()) for moment in moments]
    assert totals[0] == 0
    assert totals[-1] > 100
    assert sum(total for _, total in drafter.merge.counts.values()) == totals[-1], "the next text starts from these"


# --- refusals


def test_drafters_that_read_inner_layers_are_refused(target, twin):
    drafter = build("eagle3", target, twin)
    with pytest.raises(ValueError, match="^Eagle3 reads what enters inner layers.*without feature layers.*step by step"):
        streaming_drafter(drafter)
    merged = MergedDrafter({"eagle3": drafter, "suffix": load_drafter("suffix", target)}, MergedConfig())
    with pytest.raises(ValueError, match="^eagle3 reads"):
        streaming_drafter(merged)


def test_a_model_whose_passes_are_recorded_searches(target, twin, monkeypatch):
    monkeypatch.setattr(twin, "cuda_graphs", True)
    assert streaming_drafter(draft_model(twin)).merge.searching == [0]


# --- pipelined


class LateTarget(AsyncTarget):
    """A target in memory whose answers to runs are received late, whenever a seed says so."""

    max_runs = 5
    has_fixed_shapes = False

    def __init__(self, target: HFTarget, seed: int) -> None:
        self.target, self.chance = target, random.Random(seed)
        self.answers: deque[PassAnswer] = deque()
        self.window: list[int] = []
        self.num_late = self.num_cancelled = 0

    @property
    def context_length(self) -> int:
        return self.target.context_length

    @property
    def num_prefills(self) -> int:
        return self.target.num_prefills

    def prefill(self, prompts: Prompts, **options: Any) -> TargetOutput:
        output = self.target.prefill(prompts, **options)
        self.cache = self.target.hand_over_cache()
        self.answers.clear()
        self.window = []
        return output

    def submit(self, run: DraftRun) -> None:
        if run.keep is not None:
            self.cache.keep(torch.tensor([run.keep.entries]), Counts.of([run.keep.num_committed], self.target.device))
            self.window = [self.window[entry] for entry in run.keep.entries[run.keep.num_committed :]]
        self.window += run.tokens
        root, *tokens = self.window
        tree = tree_of([(tokens, run.parents)], self.target.device)
        output = self.target.read_tree(self.cache, torch.tensor([root]), tree, num_read=run.num_read)
        self.answers.append(PassAnswer(number=run.number, output=output))
        self.num_late += len(self.answers) > 1

    def has_answer(self) -> bool:
        return bool(self.answers) and self.chance.random() < 0.3

    def receive(self) -> PassAnswer:
        return self.answers.popleft()

    def cancel(self, numbers: Sequence[int]) -> None:
        self.num_cancelled += len(numbers)
        answers = [replace(answer, output=None) if answer.number in numbers else answer for answer in self.answers]
        self.answers = deque(answers)


RULES = {"greedy": GreedyAcceptance(), "sampled": SpeculativeSampling(sampling=Sampling(temperature=0.8))}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(("kind", "rule"), [*zip(["null", *KINDS], cycle(RULES), strict=False)])
def test_pipelined_tokens_are_those_of_plain_decoding(target, twin, kind, rule):
    prompts, counts = [PROMPT, [9, 8]], [24, 12]
    options = [{"generator": RowSeeds([seed])} if rule == "sampled" else {} for seed in (5, 6)]
    drafter = streaming_drafter(NullDrafter() if kind == "null" else build(kind, target, twin))
    late = LateTarget(target, seed=5)
    for prompt, num_new, seeds in zip(prompts, counts, options, strict=True):
        ids = [torch.tensor(prompt)]
        plain = list(generate(target, NullDrafter(), RULES[rule], ids, max_new_tokens=num_new, **seeds))
        policy = ExpectedSpeculation(micro_batch=2, least_prob=0.0, clock=lambda: 0.0)
        steps = list(generate_pipelined(late, drafter, RULES[rule], ids, max_new_tokens=num_new, speculation=policy, **seeds))
        assert texts_of(steps, 1) == texts_of(plain, 1)
    if kind not in UNTRAINED:  # those are unsure
        assert (late.num_late > 0) == (kind != "null"), "several runs were under way"
        assert (late.num_cancelled > 0) == (kind != "null")


def test_a_pipeline_foresees_the_draws(target, monkeypatch):
    """A model that knows the target's probabilities knows what it will draw: little of its drafts is cancelled."""
    reader = HFTarget(deepcopy(target.model), target.tokenizer, target.identity)
    rule, seeds, ids = SpeculativeSampling(sampling=Sampling(temperature=1.0)), RowSeeds([5]), [torch.tensor(PROMPT)]
    plain = list(generate(target, NullDrafter(), rule, ids, max_new_tokens=24, generator=seeds))
    cancelled = []
    for _ in range(2):
        late = LateTarget(target, seed=5)
        policy = ExpectedSpeculation(micro_batch=2, least_prob=0.0, clock=lambda: 0.0)
        options: dict[str, Any] = {"max_new_tokens": 24, "speculation": policy, "generator": seeds}
        steps = list(generate_pipelined(late, streaming_drafter(draft_model(reader)), rule, ids, **options))
        assert texts_of(steps, 1) == texts_of(plain, 1)
        cancelled.append(late.num_cancelled)
        monkeypatch.setattr(growing_draft, "foreseen", lambda logits, *_: logits)
    assert cancelled[0] < 0.5 * cancelled[1]
