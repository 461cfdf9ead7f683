"""Checks of whether an acceptance rule is lossless.

One check enumerates every outcome of a step on toy models, another tests samples of it. A single
step is enough. Let J be the target's joint distribution of the next `depth + 1` tokens. A step
emits some of them. Complete every emission with the target's own conditional probabilities. If the
result is J for every text before the step and for every tree, then any number of steps gives J too, by
induction: the next step starts from a text that was sampled from J.

`step_distributions` accepts any rule that takes its decisions from the `generator`, with any number of calls of
`sampling.choose`. A rule without such calls has one outcome.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from outrider.models.decoding.protocols import AcceptanceRule
from outrider.models.decoding.sampling import Randomness, Sampling, warp
from outrider.models.decoding.types import TargetOutput

from .toy_models import Tables, TreeShape, after_nodes, all_tokens, joint, make_trees, random_tables

EXACT = 1e-12
"""Largest total variation that float64's rounding explains."""


def total_variation(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Compute half the sum of all differences: the largest difference in any event's
    probability."""
    return float((actual - expected).abs().sum() / 2)


class ScriptedChance:
    """Randomness that replays one outcome of all choices and records its probability.

    The outcome is the same in every row; the probability is per row. The script sets the first
    choices. All later ones take the first token.
    """

    def __init__(self, script: Sequence[int], batch: int) -> None:
        self._script = script
        self._choices: list[tuple[int, int]] = []  # chosen token, number of tokens
        self.weight = torch.ones(batch, dtype=torch.float64)

    def choose(self, probs: torch.Tensor, depths: torch.Tensor, max_depth: int) -> torch.Tensor:
        batch, num_entries, vocab = probs.shape
        start = len(self._choices)
        chosen = [*self._script[start : start + num_entries], *[0] * num_entries][:num_entries]
        self._choices += [(token, vocab) for token in chosen]
        tokens = torch.tensor(chosen).expand(batch, -1)
        self.weight = self.weight * (probs.gather(-1, tokens[..., None])[..., 0] / probs.sum(-1)).prod(1)
        return tokens

    def next_script(self) -> list[int] | None:
        """Return the first choices of the next outcome; None after the last outcome.

        The last choice that has a next token takes it, and the choices after it are dropped.
        """
        script = list(self._choices)
        while script and script[-1][0] == script[-1][1] - 1:
            script.pop()
        return [*(token for token, _ in script[:-1]), script[-1][0] + 1] if script else None


def step_distributions(
    rule: AcceptanceRule, sampling: Sampling, shapes: Sequence[TreeShape], target: Tables
) -> list[Float[torch.Tensor, "tree text"]]:
    """Compute the exact joint distribution of the next depth + 1 tokens, for each tree of each shape.

    The first tokens come from one step with `rule`. All trees of all shapes are rows of one batch, and the smaller
    trees are padded. Every outcome of the rule's choices is played on all rows.
    """
    # 1. Enumerate the trees as one batch.
    vocab = target[0].shape[-1]
    tokens = [all_tokens(shape, vocab) for shape in shapes]
    tree = make_trees(shapes, tokens)
    output = _target_output(target, shapes, tokens, tree.num_nodes)
    num_rows, depth = len(tree.tokens), tree.max_depth
    emitted = [torch.zeros(num_rows, vocab**size, dtype=torch.float64) for size in range(depth + 2)]

    # 2. Play every outcome of the rule's choices.
    script: list[int] | None = []
    while script is not None:
        chance = ScriptedChance(script, num_rows)
        acceptance = rule(tree, output, generator=chance)
        drafted = tree.tokens.gather(1, acceptance.path.clamp(min=0))
        for size in range(1, depth + 2):
            rows = (acceptance.num_accepted == size - 1).nonzero()[:, 0]
            new = torch.cat([drafted[rows, : size - 1], acceptance.bonus_token[rows, None]], dim=1)
            emitted[size][rows, (new * vocab ** torch.arange(size - 1, -1, -1)).sum(1)] += chance.weight[rows]
        script = chance.next_script()

    # 3. Complete each emission with the target's own probabilities.
    found, end = [], 0
    for shape, rows in zip(shapes, tokens, strict=True):
        parts = [counts[end : end + len(rows)] for counts in emitted]
        end += len(rows)
        assert all(not part.any() for part in parts[shape.depth + 2 :]), "more tokens than a path has"
        result = torch.zeros(len(rows), vocab ** (shape.depth + 1), dtype=torch.float64)
        for size in range(1, shape.depth + 2):
            text = parts[size]
            for table in target[size : shape.depth + 1]:
                after = warp(table, sampling).reshape(-1, vocab)
                text = (text[..., None] * after).flatten(1)
            result += text
        found.append(result)
    return found


def sampled_tokens(
    rule: AcceptanceRule, sampling: Sampling, shape: TreeShape, target: Tables, tokens: torch.Tensor, generator: Randomness
) -> Int[torch.Tensor, "sample length"]:
    """Sample the next depth + 1 tokens with the real sampler, once for each row of a tree's `tokens`."""
    num_samples, length = len(tokens), shape.depth + 1
    tree = make_trees([shape], [tokens])
    acceptance = rule(tree, _target_output(target, [shape], [tokens], tree.num_nodes), generator=generator)
    found = torch.zeros(num_samples, length, dtype=torch.long)
    for position in range(length):
        drafted = tree.tokens.gather(1, acceptance.path.clamp(min=0))[:, min(position, shape.depth - 1)]
        prefix = tuple(found[:, earlier] for earlier in range(position))
        probs = warp(target[position][prefix].expand(num_samples, -1), sampling)
        completed = torch.multinomial(probs, 1)[:, 0]
        kept = torch.where(acceptance.num_accepted == position, acceptance.bonus_token, completed)
        found[:, position] = torch.where(position < acceptance.num_accepted, drafted, kept)
    return found


def sequence_counts(tokens: Int[torch.Tensor, "sample length"], vocab: int) -> Int[torch.Tensor, " cell"]:
    """Count how often each text occurs, in the order of a flattened `joint`."""
    powers = vocab ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return torch.bincount((tokens * powers).sum(1), minlength=math.prod([vocab] * tokens.shape[1]))


def _target_output(target: Tables, shapes: Sequence[TreeShape], tokens: Sequence[torch.Tensor], num_nodes: int) -> TargetOutput:
    logits = torch.cat([after_nodes(target, shape, rows, num_nodes) for shape, rows in zip(shapes, tokens, strict=True)])
    return TargetOutput(logits=logits, hidden_states=logits[..., :0])


# --- all shapes and samplings


SHAPES = {
    "one token": (-1,),
    "chain of 3": (-1, 0, 1),
    "chain of 4": (-1, 0, 1, 2),
    "3 siblings": (-1, -1, -1),
    "2 x 2": (-1, -1, 0, 0),
    "uneven": (-1, 0, -1, 0, 1),
    "late branch": (-1, -1, 1),
}
SAMPLINGS = {
    "temperature 1": Sampling(),
    "temperature 0.5": Sampling(temperature=0.5),
    "top-k 2": Sampling(top_k=2),
    "top-p 0.8": Sampling(temperature=1.3, top_p=0.8),
    "greedy": Sampling(temperature=0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCheck:
    """One exact enumeration: the steps with all trees of a shape compared with the target's joint distribution."""

    shape: str
    sampling: str
    padded: bool
    """Whether these were the rows with the first half of the shape's nodes, padded to the size of
    the others."""
    num_trees: int
    total_variation: float
    """The largest of all trees."""


def check_rule(
    make_rule: Callable[[Sampling], AcceptanceRule],
    *,
    vocab: int = 3,
    shapes: Sequence[str] = tuple(SHAPES),
    samplings: Sequence[str] = tuple(SAMPLINGS),
) -> Iterator[RuleCheck]:
    """Enumerate a rule on all trees of all shapes, and all sampling parameters.

    A rule is lossless if all results are below `EXACT`. Rows of whole trees and of half trees share
    each batch.
    """
    target = random_tables(vocab, 6, seed=0)
    for shape_name, sampling_name in itertools.product(shapes, samplings):
        whole, sampling = TreeShape(SHAPES[shape_name]), SAMPLINGS[sampling_name]
        pair = whole, whole.half
        distributions = step_distributions(make_rule(sampling), sampling, pair, target)
        for shape, distribution in zip(pair, distributions, strict=True):
            expected = joint(target, sampling, shape.depth + 1).flatten()
            yield RuleCheck(
                shape=shape_name,
                sampling=sampling_name,
                padded=shape is not whole,
                num_trees=len(distribution),
                total_variation=float((distribution - expected).abs().sum(1).max() / 2),
            )
