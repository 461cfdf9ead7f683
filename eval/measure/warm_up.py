"""Shapes of steps that a warm-up runs, so that nothing is compiled during a measurement."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from ...data.chat import encode_prompt
from ...data.suites import PromptSet
from ...data.types import Turn
from ...models.decoding.protocols import AcceptanceRule, Drafter, SizedDrafter
from ...models.decoding.sampling import Randomness
from ...models.decoding.tree import DraftTree
from ...models.decoding.types import NO_NODE
from ...models.drafters.graphed import GraphedDrafter
from ...models.llm.hf_target import HFTarget
from .memory import within_memory
from .timing import Generation, time_generation

NEW_TOKENS = 2
"""New tokens of a warm-up answer: one of the prefill, and those of the one step that it is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of an evaluation's texts in tokens.

    `shortest` is a prompt without its answer, `longest` is a prompt with its answer.
    """

    shortest: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of one step: a drafter's step after `num_rows` texts of `length` tokens."""

    drafter: Drafter[Any, Any]
    num_rows: int
    length: int
    num_nodes: int
    """Nodes of the tree. `length` is chosen such that the extent is the same for trees of all
    sizes."""

    def needs_as_much_as(self, other: "Shape") -> bool:
        """Check whether this shape needs at least as much memory as another one."""
        return (
            self.drafter is other.drafter
            and self.num_rows >= other.num_rows
            and self.length >= other.length
            and self.num_nodes >= other.num_nodes
        )


def reachable_sizes(batch_size: int, num_prompts: int) -> set[int]:
    """Collect the numbers of rows that batches can have.

    These are a full batch, the last batch, and the sizes that `kept_places` lets a batch shrink to.
    """
    return {batch_size, num_prompts % batch_size or batch_size, *(1 << power for power in range(batch_size.bit_length()))}


def text_lengths(
    suites: Iterable[PromptSet], tokenizer: PreTrainedTokenizerBase, *, max_new_tokens: int, context_length: int
) -> Lengths:
    """Compute the shortest and the longest text of all turns that have room for an answer.

    Answers to earlier turns aren't known yet; they count as `max_new_tokens`. A later turn can be
    longer than this estimate: an answer's text may encode to more tokens than it was decoded from
    (a byte that is no character becomes three).
    """
    shortest, longest = context_length, 0
    for suite in suites:
        for prompt in suite.prompts:
            length = 0
            for index, text in enumerate(prompt.turns):
                length += encode_prompt([Turn(role="user", content=text)], tokenizer).shape[1]
                if index == 0 and length + max_new_tokens > context_length:
                    break  # the prompt is skipped, with all its turns
                shortest = min(shortest, length)
                length += max_new_tokens
                longest = max(longest, min(length, context_length))
    return Lengths(shortest=shortest, longest=longest)


def shapes_of(
    rows: Mapping[Drafter[Any, Any], Collection[int]], lengths: Lengths, *, extent_step: int, context_length: int
) -> list[Shape]:
    """List the shapes of the steps that these drafters take, for given numbers of rows.

    There is one shape for each size of a drafter's trees and each extent of the KV cache that such
    a step reads. The largest come first, so that caches get their final size at once: a cache that
    grows drops its recordings.
    """
    shapes = []
    last = _rounded_up(lengths.longest + 1 + max((drafter.max_nodes for drafter in rows), default=0), extent_step)
    for drafter, sizes in rows.items():
        for num_nodes in tree_sizes(drafter):
            num_read = 1 + num_nodes  # after the text: the target's last token, and the tree
            for extent in range(_rounded_up(lengths.shortest + num_read, extent_step), last + 1, extent_step):
                length = min(extent - num_read, context_length - NEW_TOKENS)
                shape = partial(Shape, drafter=drafter, length=length, num_nodes=num_nodes)
                shapes += [shape(num_rows=num_rows) for num_rows in sizes]
    return sorted(shapes, key=lambda shape: (-shape.num_rows, -shape.length - shape.num_nodes))


def num_recordings(shapes: Iterable[Shape], extent_step: int) -> int:
    """Count the recordings of the target that these shapes make, at least.

    Drafters share a recording if they read the same layers and their trees have one size. (Their
    trees must also have one depth, which isn't known here.)
    """
    return len(
        {
            (
                shape.num_rows,
                shape.num_nodes,
                _rounded_up(shape.length + 1 + shape.num_nodes, extent_step),
                tuple(shape.drafter.feature_layers),
            )
            for shape in shapes
        }
    )


def tree_sizes(drafter: Drafter[Any, Any]) -> Sequence[int]:
    """List the sizes (numbers of nodes) of a drafter's trees.

    By default this is its largest size only.
    """
    return drafter.tree_sizes if isinstance(drafter, SizedDrafter) else (drafter.max_nodes,)


class Resized:
    """A drafter whose trees are cut or padded to one size."""

    def __init__(self, drafter: Drafter[Any, Any], num_nodes: int) -> None:
        self.drafter, self.num_nodes = drafter, num_nodes
        self.max_nodes, self.feature_layers = drafter.max_nodes, drafter.feature_layers
        self.init_state, self.advance, self.select = drafter.init_state, drafter.advance, drafter.select
        self.meanwhile = drafter.meanwhile

    def propose(
        self, state: Any, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, Any]:
        if isinstance(self.drafter, GraphedDrafter):  # of other sizes, the tree has the same address
            return self.drafter.whole_tree(state, last_token).first(self.num_nodes), None
        tree, drafted = self.drafter.propose(state, last_token, generator=generator)
        if tree.num_nodes >= self.num_nodes:
            return tree.first(self.num_nodes), drafted
        missing = self.num_nodes - tree.num_nodes
        tokens, parents = (pad(values, (0, missing), value=NO_NODE) for values in (tree.tokens, tree.parents))
        return DraftTree(tokens=tokens, parents=parents, max_depth=tree.max_depth), drafted


def visit(shapes: Sequence[Shape], text: Int[torch.Tensor, " seq"], target: HFTarget, rule: AcceptanceRule) -> None:
    """Run one step of each shape, after texts that repeat `text`.

    So no step is compiled or recorded in the middle of a measurement. There is one exception. Where
    the prompts of a batch have different numbers of turns, its later turns may start with a number
    of rows that isn't covered. A shape that doesn't fit into memory is left out. That also releases
    all caches, so the warm-up starts again with the other shapes.
    """
    step = partial(_take_step, text, target, rule)
    while shapes:
        large = next((shape for shape in shapes if within_memory(partial(step, shape), target) is None), None)
        if large is None:
            return
        shapes = [shape for shape in shapes if not shape.needs_as_much_as(large)]


def _take_step(text: Int[torch.Tensor, " seq"], target: HFTarget, rule: AcceptanceRule, shape: Shape) -> Generation:
    """Answer a batch of this shape up to its first step."""
    row = text.repeat(-(-shape.length // len(text)))[: shape.length]
    limits: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "stop_ids": ()}
    drafter = Resized(shape.drafter, shape.num_nodes)
    return time_generation(target, drafter, rule, [row] * shape.num_rows, **limits, seeds=range(shape.num_rows))


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
