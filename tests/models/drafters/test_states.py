"""Drafter states: rows can be selected, and several answers can be decoded in turns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from outrider.models.decoding import DraftTree, Prompts, RowSeeds, Sampling, TargetOutput
from outrider.models.decoding.tree import accepted_path
from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters import DRAFTERS, TRAINING_FREE, build_drafter, load_drafter, parse_drafter
from outrider.models.drafters.graphed import GraphedCachedDrafter, graphed
from outrider.models.drafters.merge_sources import MergedState, MergedText
from outrider.models.drafters.merged import MergedConfig, MergedDrafter
from outrider.models.drafters.merging import MergedRow
from outrider.models.drafters.training_free import FreeState
from outrider.models.llm.hf_target import HFTarget

from ..recorder import ReplayingRecorder

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]
CHOICES = (1, 2, 3)
ROOM = 60

# Small options of each registered kind, and of variants that draft in another way. A kind without
# an entry has its defaults. Weights that start as the target's would make the caches have no influence.
SMALL: dict[str, dict[str, Any]] = {
    "block": {"init": "random"},
    "draft_model": {"num_layers": 1, "length": 3},
    "eagle": {"depth": 3, "top_k": 3, "tree_nodes": 8, "init": "random"},
    "eagle3": {"depth": 3, "top_k": 3, "tree_nodes": 8, "init": "random"},
    "medusa": {"tree_nodes": 8},
    "mtp": {"depth": 3, "top_k": 3, "tree_nodes": 8, "init": "random"},
    "redrafter": {"beam_width": 3, "beam_length": 3},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "draft_tree": {"kind": "draft_model", "num_layers": 1, "length": 3, "top_k": 3, "tree_nodes": 6},
}
FREE: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"tree_nodes": 4},
    "recycling": {"tree_nodes": 8},
    "suffix": {"tree_nodes": 8},
}
MERGES = {"merged": ["draft_tree", "prompt_lookup"]}
RECORDED = {f"recorded {kind}": kind for kind in ("redrafter", "eagle")}
KINDS = {kind: {"kind": kind, **SMALL.get(kind, {})} for kind in DRAFTERS} | VARIANTS


def build(name: str, target: HFTarget) -> Any:
    if name in FREE:
        return load_drafter(name, target, **FREE[name])
    return build_drafter(parse_drafter(KINDS[name]), target).to(target.dtype).eval()


@pytest.fixture(params=[*DRAFTERS, *VARIANTS, *FREE, *MERGES, *RECORDED])
def drafter(request, target) -> Any:
    torch.manual_seed(0)
    if request.param in MERGES:
        sources = {name: build(name, target) for name in MERGES[request.param]}
        return MergedDrafter(sources, MergedConfig(tree_nodes=9, pace="fixed"))
    built = build(RECORDED.get(request.param, request.param), target)
    if request.param not in RECORDED:
        return built
    replayed = graphed(built, ReplayingRecorder())
    assert replayed is not built
    return replayed


@dataclass(frozen=True)
class Point:
    """Texts up to the bonus token, and the drafter's state after them."""

    texts: tuple[tuple[int, ...], ...]
    state: Any


def read(target: HFTarget, drafter: Any, texts: Sequence[Sequence[int]], tree: DraftTree | None = None) -> TargetOutput:
    """Return the target's output for texts, or for a tree after them.

    The target has one KV cache, which several answers in turns can't share: prefill again each time.
    """
    prompts = Prompts.of([torch.tensor(text if tree is None else text[:-1]) for text in texts])
    options = {"max_new_tokens": ROOM, "max_nodes": drafter.max_nodes, "feature_layers": drafter.feature_layers}
    output = target.prefill(prompts, **options)
    return output if tree is None else target.verify(torch.tensor([text[-1] for text in texts]), tree)


def start(target: HFTarget, drafter: Any, rows: Sequence[int] = range(len(PROMPTS))) -> Point:
    texts = [PROMPTS[row] for row in rows]
    output = read(target, drafter, texts)
    if isinstance(drafter, MergedDrafter):  # what it learned from other texts is no part of a state
        drafter.merge.counts.clear()
    state = drafter.init_state(Prompts.of([torch.tensor(text) for text in texts]), output, max_new_tokens=ROOM)
    return Point(tuple((*PROMPTS[row], 30 + row) for row in rows), state)


def propose(drafter: Any, point: Point) -> tuple[DraftTree, Any]:
    last_token = torch.tensor([text[-1] for text in point.texts])
    seeds = RowSeeds([sum(text) for text in point.texts], sampling=Sampling(temperature=0.8))
    return drafter.propose(point.state, last_token, generator=seeds)


def accept(target: HFTarget, drafter: Any, point: Point, tree: DraftTree, drafted: Any, choice: int) -> Point:
    """Accept the path to some node of each row (or to none), and continue after it.

    `choice` decides which node.
    """
    paths, texts = [], []
    for row, text in enumerate(point.texts):
        num_real = int((tree.tokens[row] != NO_NODE).sum())
        end = (len(text) + 5 * choice + 2 * row) % (num_real + 1) - 1
        path = [node for node in reversed(tree.lineage[row, end].tolist()) if node != NO_NODE] if end >= 0 else []
        paths.append(path)
        texts.append((*text, *tree.tokens[row, path].tolist(), 50 + 7 * choice + row))
    accepted = accepted_path(tree, paths)
    output = read(target, drafter, point.texts, tree)
    return Point(tuple(texts), drafter.advance(drafted, tree, accepted, output))


def step(target: HFTarget, drafter: Any, point: Point, choice: int) -> Point:
    return accept(target, drafter, point, *propose(drafter, point), choice)


def run(target: HFTarget, drafter: Any, point: Point) -> Point:
    for choice in CHOICES:
        point = step(target, drafter, point, choice)
    return point


def test_every_training_free_drafter_is_tested_here():
    assert FREE.keys() == TRAINING_FREE.keys()


@pytest.mark.quick_cases(8)
@torch.inference_mode()
def test_selected_rows_continue_as_a_batch_of_these_rows_does(drafter, target):
    for rows in ([0, 2], [1, 2], [1, 2, 2]):
        if len(rows) > 2 and isinstance(drafter, MergedDrafter):
            continue  # copies share what it learns of their text, and here they go different ways
        part = start(target, drafter)
        part = replace(part, texts=tuple(part.texts[row] for row in rows), state=drafter.select(part.state, rows))
        part = run(target, drafter, part)
        assert part.texts == run(target, drafter, start(target, drafter, rows)).texts


@pytest.mark.parametrize("drafter", ["block", "draft_model", "draft_tree", "eagle", "eagle3", "recorded eagle"], indirect=True)
@torch.inference_mode()
def test_a_spoiled_cache_changes_the_drafts(drafter, target):
    """If it didn't, the other tests would pass for a drafter that mixes up the rows of its cache."""
    expected = run(target, drafter, start(target, drafter)).texts
    point = start(target, drafter)
    for buffer in point.state.cache._buffers:
        buffer.normal_()
    assert run(target, drafter, point).texts != expected


@torch.inference_mode()
def test_copies_of_a_row_read_its_text_once(target):
    drafter = load_drafter("suffix", target)
    part = start(target, drafter)
    part = replace(part, texts=tuple(part.texts[row] for row in (1, 2, 2)), state=drafter.select(part.state, (1, 2, 2)))
    part = run(target, drafter, part)
    assert [tuple(store.text) for store in part.state.stores[:2]] == [text[:-1] for text in part.texts[:2]]


@pytest.mark.parametrize("drafter", ["merged"], indirect=True)
@torch.inference_mode()
def test_copies_of_a_row_teach_a_merge_once(drafter, target):
    learned = []
    for rows in ([1, 2], [1, 2, 2]):
        part = start(target, drafter)
        part = replace(part, texts=tuple(part.texts[row] for row in rows), state=drafter.select(part.state, rows))
        run(target, drafter, part)
        learned.append({**drafter.merge.counts})
    assert learned[0] == learned[1] != {}


def test_copies_of_a_row_follow_its_last_token_once(target):
    drafter = load_drafter("suffix+recycling", target, pace="fixed")
    key = 7
    row = MergedRow([5], [NO_NODE], [0.5], [1], [1], {NO_NODE: [(0.5, 5, 1, [key], [])]}, [[]])
    text = MergedText(counts={}, walks=((row, NO_NODE),))
    states = tuple(FreeState((part.new_store(),) * 2) for part in drafter.merge.sources)
    state = MergedState(states=states, texts=(text, text), num_accepted=(0, 0))
    drafter.merge.open(state, torch.tensor([5, 5]), [5, 5])
    assert drafter.merge.counts == {key: (1, 1)}
    assert text.walks == ((row, 0),), "it is at the node of this token"


@pytest.mark.quick_cases(8)
@torch.inference_mode()
def test_two_answers_of_one_drafter_can_be_decoded_in_turns(drafter, target):
    """A draft model once kept its texts in itself, so that a second answer was an error."""
    if isinstance(drafter, GraphedCachedDrafter):
        pytest.skip("its states share memory of a fixed address")
    points = [start(target, drafter), start(target, drafter)]
    for choice in CHOICES:
        points = [step(target, drafter, point, choice) for point in points]
    assert points[0].texts == points[1].texts == run(target, drafter, start(target, drafter)).texts
