"""Drafter states as values: a state can propose repeatedly, and its forks are independent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from outrider.models.decoding import DraftTree, GreedyAcceptance, Prompts, TargetOutput, generate
from outrider.models.decoding.tree import accepted_path
from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters import DRAFTERS, TRAINING_FREE, NullDrafter, build_drafter, make_training_free, parse_drafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.graphed import GraphedCachedDrafter, graphed
from outrider.models.drafters.merged import MergedConfig, MergedDrafter
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.drafters.oracle import OracleDrafter
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.tree_cache import TreeCache

from ..recorder import ReplayingRecorder

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]
STEPS = 3
ROOM = 60

# Small options of each registered kind, and of variants that draft in another way. A kind without
# an entry has its defaults.
SMALL: dict[str, dict[str, Any]] = {
    "draft_model": {"num_layers": 1, "length": 3},
    "eagle": {"depth": 3, "top_k": 3, "tree_nodes": 8},
    "eagle3": {"depth": 3, "top_k": 3, "tree_nodes": 8},
    "medusa": {"tree_nodes": 8},
    "redrafter": {"beam_width": 3, "beam_length": 3},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "draft_tree": {"kind": "draft_model", "num_layers": 1, "length": 3, "top_k": 3, "tree_nodes": 6},
    "draft_drawn": {"kind": "draft_model", "num_layers": 1, "length": 3, "temperature": 1.0},
}
FREE: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"tree_nodes": 4},
    "recycling": {"tree_nodes": 8},
    "suffix": {"tree_nodes": 8},
}
MERGES: dict[str, list[str]] = {
    "merged": ["redrafter", "prompt_lookup"],
    "merged draft model": ["draft_tree", "prompt_lookup"],
    "merged eagles": ["eagle3", "eagle"],
    "merged training-free": ["recycling", "suffix"],
}
RECORDED = {f"recorded {kind}": kind for kind in ("redrafter", "eagle", "eagle3", "block")}
KINDS = {kind: {"kind": kind, **SMALL.get(kind, {})} for kind in DRAFTERS} | VARIANTS


def build(name: str, target: HFTarget) -> Any:
    if name in FREE:
        return make_training_free(name, FREE[name], target)
    return build_drafter(parse_drafter(KINDS[name]), target).to(target.dtype).eval()


QUICK = ["redrafter", "block", "eagle3", "draft_tree", "recycling", "suffix", "merged", "recorded eagle"]


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in (*KINDS, *FREE, *MERGES, "null", "oracle", *RECORDED)
    ]
)
def drafter(request, target) -> Any:
    torch.manual_seed(0)
    if request.param == "null":
        return NullDrafter()
    if request.param == "oracle":
        return OracleDrafter([[*range(20, 90)]] * len(PROMPTS), [1, 2, 3], target.vocab_size)
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
    """Texts up to the bonus token, the drafter's state after them, and all proposed trees."""

    texts: tuple[tuple[int, ...], ...]
    state: Any
    trees: tuple[Any, ...] = ()


def shape(tree: DraftTree) -> tuple[list[list[int]], list[list[int]]]:
    return tree.tokens.tolist(), tree.parents.tolist()


def read(target: HFTarget, drafter: Any, texts: Sequence[Sequence[int]], tree: DraftTree | None = None) -> TargetOutput:
    """Return the target's output for texts, or for a tree after them.

    The target can't be forked, so this prefills again each time.
    """
    prompts = Prompts.of([torch.tensor(text if tree is None else text[:-1]) for text in texts])
    options = {"max_new_tokens": ROOM, "max_nodes": drafter.max_nodes, "feature_layers": drafter.feature_layers}
    output = target.prefill(prompts, **options)
    return output if tree is None else target.verify(torch.tensor([text[-1] for text in texts]), tree)


def start(target: HFTarget, drafter: Any) -> Point:
    output = read(target, drafter, PROMPTS)
    prompts = Prompts.of([torch.tensor(prompt) for prompt in PROMPTS])
    state = drafter.init_state(prompts, output, max_new_tokens=ROOM)
    return Point(tuple((*prompt, 30 + row) for row, prompt in enumerate(PROMPTS)), state)


def propose(drafter: Any, point: Point) -> tuple[DraftTree, Any]:
    last_token = torch.tensor([text[-1] for text in point.texts])
    seed = sum(map(sum, point.texts))
    return drafter.propose(point.state, last_token, generator=torch.Generator().manual_seed(seed))


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
    return Point(tuple(texts), drafter.advance(drafted, tree, accepted, output), (*point.trees, shape(tree)))


def step(target: HFTarget, drafter: Any, point: Point, choice: int) -> Point:
    return accept(target, drafter, point, *propose(drafter, point), choice)


def run(target: HFTarget, drafter: Any, choices: Sequence[int]) -> Point:
    """Run the steps of `choices` without a fork."""
    point = start(target, drafter)
    for choice in choices:
        point = step(target, drafter, point, choice)
    return point


def selected(drafter: Any, point: Point, rows: list[int]) -> Point:
    return replace(point, texts=tuple(point.texts[row] for row in rows), state=drafter.select(point.state, rows))


def same(actual: Point, expected: Point) -> bool:
    return (actual.texts, actual.trees) == (expected.texts, expected.trees)


def test_every_training_free_drafter_is_tested_here():
    assert FREE.keys() == TRAINING_FREE.keys()


@torch.inference_mode()
def test_a_state_proposes_the_same_tree_again_and_again(drafter, target):
    expected = run(target, drafter, [1, 2, 3])
    point = start(target, drafter)
    for choice in (1, 2, 3):
        proposals = [propose(drafter, point) for _ in range(3)]
        assert len({str(shape(tree)) for tree, _ in proposals}) == 1
        point = accept(target, drafter, point, *proposals[choice - 1], choice)
    assert same(point, expected), "each of the proposals can be advanced"


@torch.inference_mode()
def test_forks_along_two_acceptances_continue_as_unforked_runs_do(drafter, target):
    expected = {branch: run(target, drafter, [1, *[branch] * STEPS]) for branch in (2, 3)}
    point = step(target, drafter, start(target, drafter), 1)
    tree, drafted = propose(drafter, point)
    # a recorded drafter overwrites its trees
    tree = replace(tree, tokens=tree.tokens.clone(), parents=tree.parents.clone())
    forks = {branch: accept(target, drafter, point, tree, drafted, branch) for branch in (2, 3)}
    for _ in range(STEPS - 1):
        forks = {branch: step(target, drafter, fork, branch) for branch, fork in forks.items()}
    assert all(same(forks[branch], expected[branch]) for branch in (2, 3))
    if drafter.max_nodes:
        assert len({fork.texts for fork in forks.values()}) == 2


@torch.inference_mode()
def test_an_old_state_can_be_continued_again(drafter, target):
    kept = step(target, drafter, start(target, drafter), 1)
    first = kept
    for choice in (2, 3, 4):
        first = step(target, drafter, first, choice)
    again = kept
    for choice in (2, 3, 4):
        again = step(target, drafter, again, choice)
    assert same(again, first)


def require_states_in_own_memory(drafter: Any) -> None:
    if isinstance(drafter, GraphedCachedDrafter):
        pytest.skip("its states share memory of a fixed address; that this is an error, test_cuda_graphs tests")


@torch.inference_mode()
def test_selected_rows_and_all_rows_continue_side_by_side(drafter, target):
    require_states_in_own_memory(drafter)
    whole = run(target, drafter, [1, 2, 3])
    for rows in ([0, 2], [1, 2, 2]):
        alone = selected(drafter, run(target, drafter, [1]), rows)
        for choice in (2, 3):
            alone = step(target, drafter, alone, choice)
        every = run(target, drafter, [1])
        part = selected(drafter, every, rows)
        for choice in (2, 3):
            fork = step(target, drafter, part, 7)
            every, part = step(target, drafter, every, choice), step(target, drafter, part, choice)
            assert len(fork.texts) == len(rows)
        assert same(every, whole), "the state before is still good"
        assert same(part, alone), "a fork of the selected rows changes nothing"


@torch.inference_mode()
def test_two_answers_of_one_drafter_can_be_decoded_in_turns(drafter, target):
    """A draft model once kept its texts in itself, so that a second answer was an error."""
    require_states_in_own_memory(drafter)
    points = [start(target, drafter), start(target, drafter)]
    for choice in (1, 2, 3):
        points = [step(target, drafter, point, choice) for point in points]
    assert same(points[0], points[1])
    assert same(points[0], run(target, drafter, [1, 2, 3]))


def test_decoding_without_forks_copies_no_cache(drafter, target, monkeypatch):
    def refuse(*args: Any) -> Any:
        raise AssertionError("a copy of a KV cache in plain decoding")

    monkeypatch.setattr(TreeCache, "copy_rows", refuse)
    steps = list(generate(target, drafter, GreedyAcceptance(), torch.tensor(PROMPTS[:1]), max_new_tokens=12))
    assert len(steps) > 3


# --- memory at fixed addresses


@pytest.fixture
def recorded(target) -> DraftModel:
    reader = HFTarget(target.model, target.tokenizer, target.identity, cuda_graphs=True, recorder=ReplayingRecorder())
    return DraftModel(DraftModelConfig(length=3, top_k=2), reader)


@torch.inference_mode()
def test_forks_of_a_recorded_draft_model_are_independent(target, recorded):
    plain = DraftModel(DraftModelConfig(length=3, top_k=2), HFTarget(target.model, target.tokenizer, target.identity))
    expected = {branch: run(target, plain, [1, *[branch] * STEPS]) for branch in (2, 3)}
    point = step(target, recorded, start(target, recorded), 1)
    forks = {branch: step(target, recorded, point, branch) for branch in (2, 3)}
    for _ in range(STEPS - 1):
        forks = {branch: step(target, recorded, fork, branch) for branch, fork in forks.items()}
    assert all(same(forks[branch], expected[branch]) for branch in (2, 3))
    assert recorded.reader._graphs._recorded, "one of them was replayed"


@torch.inference_mode()
@pytest.mark.parametrize("taken_by", ["a batch", "fewer rows"])
def test_a_state_whose_memory_was_reused_is_an_error(target, recorded, taken_by):
    """Such a state would read another text's keys and values."""
    point = step(target, recorded, start(target, recorded), 1)
    taker = selected(recorded, point, [0, 2]) if taken_by == "fewer rows" else start(target, recorded)
    with pytest.raises(RuntimeError, match="taken over"):
        propose(recorded, point)
    step(target, recorded, taker, 2)
