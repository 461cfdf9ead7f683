"""Steps with fixed shapes, compiled or recorded and replayed, against plain steps."""

from contextlib import contextmanager, nullcontext
from itertools import count, cycle
from types import SimpleNamespace

import pytest
import torch

from outrider.models.decoding import (
    GreedyAcceptance,
    Prompts,
    RowSeeds,
    Sampling,
    SpeculativeSampling,
    TypicalAcceptance,
    empty_tree,
    generate,
)
from outrider.models.decoding.loop import kept_places
from outrider.models.decoding.tree import accepted_path
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter
from outrider.models.drafters import graphed as graphed_drafters
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.graphed import GraphedCachedDrafter
from outrider.models.drafters.merged import MergedConfig, MergedDrafter
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.llm import cuda_graphs as graphs
from outrider.models.llm import tree_cache
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.cuda_graphs import CudaGraphRecorder, GraphedFunction
from outrider.models.llm.graphed_rule import GraphedRule
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ...decoded import texts_of
from ..recorder import PoolRecorder, ReplayingRecorder, ScratchRecorder

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47], [70, 71]]
STEP = 8
"""Number of columns by which the read part of the cache grows, several times per answer."""


@pytest.fixture
def redrafter(target):
    return trained_of(target, "redrafter")


def answers(target, drafter, rows=PROMPTS, max_new_tokens=20) -> list[list[int]]:
    prompts = [torch.tensor(row) for row in rows]
    limits = {"max_new_tokens": max_new_tokens, "stop_ids": {STOP}}
    return texts_of(generate(target, drafter, GreedyAcceptance(), prompts, **limits), len(rows))


STOP = 45


@pytest.fixture
def recorder() -> ReplayingRecorder:
    return ReplayingRecorder()


@pytest.fixture
def graphed(target, recorder, monkeypatch) -> HFTarget:
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", STEP)
    return HFTarget(target.model, target.tokenizer, target.identity, cuda_graphs=True, recorder=recorder)


CACHED = {
    "eagle": {"kind": "eagle", "init": "random", "depth": 3, "top_k": 3, "tree_nodes": 8},
    "eagle3": {"kind": "eagle3", "init": "random", "feature_layers": [0, 1], "depth": 3, "top_k": 3, "tree_nodes": 8},
    "block": {"kind": "block", "init": "random", "feature_layers": [0, 1], "block": 4, "width": 3, "tree_nodes": 8},
    "block, lattice": {
        "kind": "block",
        "init": "random",
        "feature_layers": [0, 1],
        "block": 4,
        "correction": "markov",
        "rank": 4,
    },
    "block, one slot": {"kind": "block", "init": "random", "feature_layers": [0, 1], "block": 4, "num_slots": 1, "width": 3},
    "draft model": {"kind": "draft_model", "num_layers": 1, "length": 3},
    "draft model, tree": {"kind": "draft_model", "num_layers": 1, "length": 3, "top_k": 3, "tree_nodes": 7},
}
"""Drafters with a KV cache of their own. Weights that start as the target's would give it no influence."""


UNCACHED = {
    "redrafter": {"kind": "redrafter", "beam_width": 3, "beam_length": 3, "tree_nodes": 6},
    "redrafter, the paper's tree": {"kind": "redrafter", "beam_width": 3, "beam_length": 3},
    "medusa": {"kind": "medusa", "num_heads": 3, "tree_nodes": 6},
}


def trained_of(target, name, **options):
    torch.manual_seed(0)
    return (
        build_drafter(parse_drafter((CACHED | UNCACHED)[name] | options), target).to(target.dtype).eval().requires_grad_(False)
    )


def steps(target, drafter, rows=PROMPTS, max_new_tokens=20) -> list[object]:
    """Return all steps: what was accepted depends on the drafts."""
    prompts = [torch.tensor(row) for row in rows]
    limits = {"max_new_tokens": max_new_tokens, "stop_ids": {STOP}}
    return [
        (step.rows, step.tokens, step.num_accepted, step.num_nodes)
        for step in generate(target, drafter, GreedyAcceptance(), prompts, **limits)
    ]


@pytest.mark.parametrize("name", ["eagle", "block, lattice", "draft model, tree"])
def test_a_replayed_drafter_with_a_cache_drafts_what_a_plain_one_does(target, monkeypatch, name):
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", STEP)
    recorder, drafter = PoolRecorder(), trained_of(target, name)
    replayed = graphed_drafters.graphed(drafter, recorder)
    assert isinstance(replayed, GraphedCachedDrafter)
    proposals = {}
    for proposer in (drafter, replayed):
        proposals[proposer] = [tree_of(proposer, target, rows) for rows in (PROMPTS, PROMPTS[:1], PROMPTS[::-1], [[7]])]
    assert proposals[drafter] == proposals[replayed]
    num_replays = recorder.num_replays
    assert num_replays == 4 * 6
    assert steps(target, replayed) == steps(target, drafter)
    assert recorder.num_replays > num_replays


def tree_of(drafter, target, rows, max_new_tokens=60, *, is_spoiled=False) -> list[object]:
    """Return the trees of six steps in which different paths are accepted, also after a spoiled cache."""
    texts = [torch.tensor(row) for row in rows]
    prompts, last = Prompts.of(texts), torch.arange(len(rows)) + 30
    layers = drafter.feature_layers
    prefill = target.prefill(prompts, max_new_tokens=60, max_nodes=drafter.max_nodes, feature_layers=layers)
    state, trees = drafter.init_state(prompts, prefill, max_new_tokens=max_new_tokens), []
    for buffer in state.cache._buffers if is_spoiled else ():
        buffer.normal_()
    for index in range(6):
        tree, drafted = drafter.propose(state, last)
        trees.append((tree.tokens.tolist(), tree.parents.tolist()))
        output = target.verify(last, tree)
        nodes = [(3 * index + 2 * row) % tree.num_nodes for row in range(len(rows))]
        paths = [[node for node in reversed(tree.lineage[row, node].tolist()) if node >= 0] for row, node in enumerate(nodes)]
        accepted = accepted_path(tree, [path if index % 3 else [] for path in paths])
        target.commit(tree, accepted)
        state, last = drafter.advance(drafted, tree, accepted, output), (last * 5 + 7) % 90
    return trees


@pytest.mark.parametrize("name", CACHED)
def test_a_spoiled_cache_changes_the_trees(target, name):
    """If it didn't, a recording that reads the wrong columns would draft the same trees."""
    drafter = trained_of(target, name)
    with torch.inference_mode():
        assert tree_of(drafter, target, PROMPTS, is_spoiled=True) != tree_of(drafter, target, PROMPTS)


SOURCES = {
    "redrafter, suffix": (["redrafter"], ["suffix"]),
    "medusa, suffix": (["medusa"], ["suffix"]),
    "eagle3, prompt lookup": (["eagle3"], ["prompt_lookup"]),
    "draft model, block, recycling": (["draft model", "block"], ["recycling"]),
}
"""The trained and the training-free drafters of merges."""


def merge_of(target, names, **options):
    trained, free = SOURCES[names]
    sources = {name: trained_of(target, name) for name in trained}
    sources |= {name: load_drafter(name, target) for name in free}
    return MergedDrafter(sources, MergedConfig(**{"tree_nodes": 9, "pace": "fixed", **options}), few_sizes=True)


@pytest.mark.parametrize("names", ["redrafter, suffix", "draft model, block, recycling"])
def test_a_merge_that_skips_sources_decodes_the_same_text_with_replays(target, monkeypatch, names):
    """A skipped source has more unread entries than a recording reads."""
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", STEP)
    expected = answers(target, NullDrafter(), max_new_tokens=40)
    ticks = count()
    recorder, merge = ReplayingRecorder(), merge_of(target, names, pace="expected")
    merge.clock = lambda: next(ticks) ** 2 % 7 / 100 + next(ticks)
    assert answers(target, graphed_drafters.graphed(merge, recorder), max_new_tokens=40) == expected
    assert recorder.num_replays > 0


RULES = {
    "greedy": GreedyAcceptance(),
    "sampled": SpeculativeSampling(sampling=Sampling(temperature=0.8)),
    "typical": TypicalAcceptance(sampling=Sampling(temperature=0.8)),
}


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("name", "rule"), [*zip([*UNCACHED, *CACHED, *SOURCES], cycle(RULES), strict=False)])
def test_with_everything_recorded_the_steps_are_those_of_nothing_recorded(target, monkeypatch, name, rule):
    """The rule reads recorded trees and logits in place, so what overwrites them early would show."""
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", STEP)
    monkeypatch.setattr(graphs, "CudaGraphRecorder", ScratchRecorder)
    whole = HFTarget(target.model, target.tokenizer, target.identity, cuda_graphs=True)
    drafter = merge_of(target, name) if name in SOURCES else trained_of(target, name)

    def figures(*pieces):
        for rows in (PROMPTS, PROMPTS[:1], PROMPTS):
            seeds = {"generator": RowSeeds(range(len(rows))), "max_new_tokens": 20}
            for step in generate(*pieces, [torch.tensor(row) for row in rows], **seeds):
                yield step.rows, step.tokens, step.num_accepted

    recorded = [*figures(whole, graphed_drafters.graphed(drafter), GraphedRule(RULES[rule]))]
    if isinstance(drafter, MergedDrafter):  # both begin with what no text has taught
        drafter.merge.counts.clear()
    assert recorded == [*figures(target, drafter, RULES[rule])]
    assert whole._graphs.recorder.num_replays > 10
    assert whole._graphs.recorder.num_overwritten > 0


def test_one_recording_serves_all_steps_until_the_cache_shows_more_columns(target, monkeypatch):
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", 64)
    replayed = graphed_drafters.graphed(trained_of(target, "eagle3"), ReplayingRecorder())
    tree_of(replayed, target, PROMPTS[:1])
    assert len(replayed._draft) == 1
    cache = replayed._cache
    tree_of(replayed, target, PROMPTS[2:3])
    assert (len(replayed._draft), replayed._cache) == (1, cache), "the next batch that fits was recorded again"
    tree_of(replayed, target, PROMPTS[:2])
    assert replayed._cache is not cache, "two rows were drafted in the memory of one"


def test_recordings_are_dropped_when_a_second_cache_grows(target, monkeypatch):
    """The number of moves is counted by each cache from 0."""
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", STEP)
    drafter = trained_of(target, "draft model, tree")
    replayed = graphed_drafters.graphed(drafter, ReplayingRecorder())
    for rows in (PROMPTS[:1], PROMPTS[:2], [[33, 34, 35, 36, 37], [50, 51, 52]]):
        trees = [tree_of(proposer, target, rows, max_new_tokens=1) for proposer in (replayed, drafter)]
        assert replayed._cache.num_moves == 1
        assert trees[0] == trees[1]


@pytest.mark.parametrize("rows", [PROMPTS, [[5] * 200] * 5])
def test_a_state_that_a_later_batch_has_ended_is_an_error(target, rows):
    """Its cache now has another text, also if the later batch was too large for the same memory."""
    replayed = graphed_drafters.graphed(trained_of(target, "eagle"), ReplayingRecorder())
    states = []
    for texts in (PROMPTS, rows):
        prompts = Prompts.of([torch.tensor(text) for text in texts])
        states.append(replayed.init_state(prompts, target.prefill(prompts, max_new_tokens=9, max_nodes=8), max_new_tokens=9))
    with torch.inference_mode():
        replayed.propose(states[1], torch.arange(len(rows)))
        for draft in (replayed.propose, replayed.search):
            with pytest.raises(AssertionError, match="a later init_state has ended this state"):
                draft(states[0], torch.arange(len(PROMPTS)))


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "tree_nodes": 5}])
def test_a_draft_model_replays_its_own_passes(target, recorder, monkeypatch, options):
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", STEP)
    config = DraftModelConfig(length=3, **options)
    drafter = DraftModel(config, HFTarget(target.model, target.tokenizer, target.identity))
    replaying = DraftModel(
        config, HFTarget(target.model, target.tokenizer, target.identity, cuda_graphs=True, recorder=recorder)
    )
    for rows in (PROMPTS, PROMPTS[:1]):
        assert answers(target, replaying, rows) == answers(target, drafter, rows) == answers(target, NullDrafter(), rows)
    assert recorder.num_replays > 20


def test_cuda_graphs_without_cuda_are_an_error_before_loading(tiny_target_dir):
    with pytest.raises(ValueError, match="choose a CUDA device, or turn it off"):
        load_target(TargetConfig(name_or_path=str(tiny_target_dir), cuda_graphs=True, device="cpu"))


def test_a_recording_serves_every_later_prompt_of_such_shapes(graphed, redrafter):
    answers(graphed, redrafter)
    num_recorded = len(graphed._graphs)
    assert num_recorded >= 3, "the read part of the cache grew"
    answers(graphed, redrafter, PROMPTS[::-1])
    assert len(graphed._graphs) == num_recorded


def test_a_cache_that_moves_drops_the_recordings(target, graphed):
    short = answers(graphed, NullDrafter(), max_new_tokens=4)
    long = answers(graphed, NullDrafter(), max_new_tokens=30)
    assert [tokens[:4] for tokens in long] == short
    assert long == answers(target, NullDrafter(), max_new_tokens=30)


def test_recordings_are_dropped_when_the_cache_is_released(target, graphed, redrafter):
    expected = answers(target, redrafter)
    assert answers(graphed, redrafter) == expected
    assert len(graphed._graphs) > 0
    graphed.release_cache()
    assert len(graphed._graphs) == 0, "they would keep its memory"
    assert answers(graphed, redrafter) == expected


def test_recordings_are_dropped_when_the_cache_grows_in_the_middle_of_an_answer(target, graphed):
    prompt = torch.tensor([PROMPTS[0]])
    tokens = torch.tensor(answers(target, NullDrafter(), PROMPTS[:1], max_new_tokens=30)[0])[None]
    nothing = empty_tree(1, prompt.device)
    logits = {}
    for one_target in (target, graphed):
        logits[one_target] = [one_target.prefill(Prompts.of(prompt), max_new_tokens=2, max_nodes=0).logits[0, -1]]
        for index in range(tokens.shape[1] - 1):  # far more tokens than the prefill reserved
            logits[one_target].append(one_target.verify(tokens[:, index], nothing).logits[0, -1].clone())
            one_target.commit(nothing, accepted_path(nothing, [[]]))
    for actual, expected in zip(logits[graphed], logits[target], strict=True):
        torch.testing.assert_close(actual, expected)


def test_nan_of_an_earlier_prompt_in_the_cache_changes_nothing(target):
    """Masked values must be finite too: NaN times 0 is NaN."""
    expected = answers(target, NullDrafter())
    for buffer in target._cache._buffers:
        buffer.fill_(float("nan"))
    assert answers(target, NullDrafter()) == expected


def test_the_least_recently_used_recording_is_dropped_first(monkeypatch):
    """If the oldest recording were dropped, recordings used in turns would never be reused."""
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 2)
    lengths = []
    double = GraphedFunction(lambda x: lengths.append(len(x)) or 2 * x, ReplayingRecorder())
    for length in (1, 2, 1, 3, 1, 3):
        assert double(torch.ones(length)).tolist() == [2.0] * length
    assert lengths == [1, 2, 3]
    assert len(double) == 2


@pytest.mark.parametrize("num_rows", range(1, 8))
def test_a_batch_of_fixed_shapes_shrinks_by_halves(num_rows):
    positions = list(range(1, 1 + num_rows))
    assert kept_places(positions, 8, few_sizes=False) == positions
    kept = kept_places(positions, 8, few_sizes=True)
    assert kept[:num_rows] == positions
    assert set(kept[num_rows:]) <= {positions[-1]}
    assert len(kept) in (1, 2, 4, 8)
    assert len(kept) < 2 * num_rows
    assert kept_places(positions, num_rows, few_sizes=True) == positions, "a batch never grows"


@pytest.mark.parametrize("kind", ["nothing", "redrafter", "draft_model"])
def test_rows_leaving_a_batch_of_fixed_shapes_make_few_recordings(target, graphed, redrafter, kind):
    small = HFTarget(target.model, target.tokenizer, target.identity)
    drafters = {"nothing": NullDrafter(), "redrafter": redrafter, "draft_model": DraftModel(DraftModelConfig(length=2), small)}
    prompts = [torch.tensor([70 + row, 9, 8]) for row in range(6)]
    texts = {}
    sizes = set()
    for one_target in (target, graphed):
        steps, limits = [], [19, 4, 11, 7, 16, 5]
        seeds = {"generator": RowSeeds(range(6)), "max_new_tokens": limits}
        for step in generate(one_target, drafters[kind], SpeculativeSampling(sampling=Sampling()), prompts, **seeds):
            steps.append(step)
            sizes.add(one_target._cache.batch)
        texts[one_target] = texts_of(steps, len(prompts))
    assert texts[graphed] == texts[target]
    assert [len(text) for text in texts[graphed]] == limits
    recorded = {shapes[1][0] for shapes in graphed._graphs._recorded}
    assert recorded == {6, 4, 2, 1}
    assert sizes >= {3, 5}, "a plain target's batch has any size"


def test_recordings_share_the_memory_of_their_logits(graphed, redrafter):
    answers(graphed, redrafter)
    logits = [output.logits for _, _, output in graphed._graphs._recorded.values()]
    assert len(logits) > 3
    assert len({tensor.untyped_storage().data_ptr() for tensor in logits}) < len(logits) / 2


def test_a_commit_does_not_overwrite_what_the_drafter_reads_after_it(target, redrafter, monkeypatch):
    """Longer texts are recorded after the first commit, whose scratch memory may then hold their states."""
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", STEP)
    monkeypatch.setattr(graphs, "CudaGraphRecorder", ScratchRecorder)
    graphed = HFTarget(target.model, target.tokenizer, target.identity, cuda_graphs=True)
    for rows in (PROMPTS, PROMPTS):
        assert tree_of(redrafter, graphed, rows) == tree_of(redrafter, target, rows)
    assert len(graphed._graphs) > 1
    assert graphed._graphs.recorder.num_overwritten > 0


@pytest.mark.slow
def test_a_compiled_target_decodes_the_tokens_of_a_plain_one(target, redrafter, monkeypatch):
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", STEP)
    num_traced = 0

    def count(graph, inputs):
        nonlocal num_traced
        num_traced += 1
        return graph

    compile_whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_whole(model, fullgraph=True, backend=count))
    compiled = HFTarget(target.model, target.tokenizer, target.identity, compiled=True)
    for drafter in (NullDrafter(), redrafter):
        assert answers(compiled, drafter) == answers(target, drafter)
    assert 0 < num_traced <= 6, "few shapes, few compilations"


class FakeCuda:
    """Replacement for the functions of `torch.cuda` that a recorder calls.

    A capture runs its function, or fails when it ends.
    """

    def __init__(self, monkeypatch) -> None:
        self.stream = "the first stream"
        self.pools: list[object] = []
        self.captured_into: list[object] = []
        self.failure: BaseException | None = None
        side = SimpleNamespace(wait_stream=lambda other: None)
        main = SimpleNamespace(wait_stream=lambda other: None)
        for name, replacement in {
            "graph_pool_handle": self.new_pool,
            "current_stream": lambda: main,
            "Stream": lambda: side,
            "stream": lambda stream: nullcontext(),
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": self.capture,
        }.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        self.main = main

    def new_pool(self) -> object:
        self.pools.append(object())
        return self.pools[-1]

    @contextmanager
    def capture(self, graph, pool):
        self.captured_into.append(pool)
        before, self.stream = self.stream, "the capture's stream"
        yield
        if self.failure is not None:
            raise self.failure  # PyTorch too raises before it leaves its stream
        self.stream = before


def test_dropped_recordings_drop_their_memory_pool(monkeypatch):
    """PyTorch asserts that no recording uses a pool without graphs but with live tensors."""
    cuda = FakeCuda(monkeypatch)
    double = GraphedFunction(lambda x: 2 * x, CudaGraphRecorder())
    double(torch.ones(1)), double(torch.ones(2))
    assert len(cuda.pools) == 1, "graphs that live together share their memory"
    double.forget()
    double(torch.ones(1))
    assert cuda.captured_into == [cuda.pools[0], cuda.pools[0], cuda.pools[1]]


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), ValueError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    ],
    ids=["reads a number", "out of memory"],
)
def test_a_capture_that_fails_leaves_its_stream_and_its_pool(monkeypatch, failure, raised):
    """Otherwise all later work would go to a stream without synchronization."""
    cuda = FakeCuda(monkeypatch)
    recorder = CudaGraphRecorder()
    cuda.failure = failure
    with pytest.raises(raised):
        recorder(lambda: torch.ones(1))
    assert cuda.stream is cuda.main
    cuda.failure = None
    recorder(lambda: torch.ones(1))
    assert cuda.captured_into == cuda.pools
    assert len(cuda.pools) == 2
