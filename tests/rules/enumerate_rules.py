"""Checks of whether an acceptance rule is lossless.

One check enumerates every outcome of a step on toy models, another tests samples of it. A single
step is enough. Let J be the target's joint distribution of the next `depth + 1` tokens. A step
emits some of them. Complete every emission with the target's own conditional probabilities. If the
result is J for every text before the step, then any number of steps gives J too, by induction: the
next step starts from a text that was sampled from J.

`step_distributions` accepts any rule that takes its decisions
from the `generator`, with any number of calls of `sampling.draw` and `sampling.flip`. A rule
without such calls has one outcome.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from outrider.models.decoding.protocols import AcceptanceRule
from outrider.models.decoding.sampling import Sampling, draw, warp
from outrider.models.decoding.types import Acceptance, TargetOutput

from .toy_models import (
    Tables,
    TreeShape,
    adversarial_drafters,
    after_nodes,
    all_tokens,
    drawn_tokens,
    joint,
    make_trees,
    random_tables,
)

EXACT = 1e-12
"""Largest total variation that float64's rounding explains."""


def total_variation(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Compute half the sum of all differences: the largest difference in any event's
    probability."""
    return float((actual - expected).abs().sum() / 2)


class ScriptedChance:
    """Randomness that replays one outcome of all decisions and records its probability.

    The outcome is the same in every row; the probability is per row. The script sets the first
    decisions. All later decisions take the first option.
    """

    def __init__(self, script: Sequence[int], batch: int) -> None:
        self._script = script
        self._decisions: list[tuple[int, int]] = []  # chosen option, number of options
        self.weight = torch.ones(batch, dtype=torch.float64)

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        shape = probs.shape[1:-1]
        tokens = torch.tensor(self._decide(probs.shape[-1], shape.numel())).view(shape).expand(probs.shape[:-1])
        chosen = probs.gather(-1, tokens[..., None])[..., 0] / probs.sum(-1)
        self.weight = self.weight * chosen.reshape(len(probs), -1).prod(1)
        return tokens

    def flip(self, probs: torch.Tensor) -> torch.Tensor:
        shape = probs.shape[1:]
        coins = torch.tensor(self._decide(2, shape.numel())).bool().view(shape).expand(probs.shape)
        self.weight = self.weight * torch.where(coins, probs, 1 - probs).reshape(len(probs), -1).prod(1)
        return coins

    def next_script(self) -> list[int] | None:
        """Return the first decisions of the next outcome; None after the last outcome.

        The last decision that has a next option takes it, and the decisions after it are dropped.
        """
        script = list(self._decisions)
        while script and script[-1][0] == script[-1][1] - 1:
            script.pop()
        return [*(option for option, _ in script[:-1]), script[-1][0] + 1] if script else None

    def _decide(self, num_options: int, times: int) -> list[int]:
        start = len(self._decisions)
        decided = [*self._script[start : start + times], *[0] * times][:times]
        self._decisions += [(option, num_options) for option in decided]
        return decided


def step_distributions(
    rule: AcceptanceRule,
    sampling: Sampling,
    shapes: Sequence[TreeShape],
    target: Tables,
    drafter: Tables,
    *,
    draft_sampling: Sampling | None = None,
) -> list[Float[torch.Tensor, "..."]]:
    """Compute the exact joint distribution of the next depth + 1 tokens, for each shape.

    The first tokens come from one step with `rule`. All trees of all shapes that the drafter can
    draw (with `draft_sampling`, by default the target's) are rows of one batch, and the smaller
    trees are padded. Every outcome of the rule's decisions is played on all rows.
    """
    # 1. Enumerate the trees as one batch.
    tokens, drawn = zip(*(all_tokens(shape, drafter, draft_sampling or sampling) for shape in shapes), strict=True)
    tree = make_trees(shapes, tokens, drafter, draft_sampling or sampling)
    output = _target_output(target, shapes, tokens, tree.num_nodes)
    vocab, sizes = output.logits.shape[-1], [len(rows) for rows in drawn]
    emitted = [[torch.zeros(vocab**size, dtype=torch.float64) for size in range(shape.depth + 2)] for shape in shapes]

    # 2. Play every outcome of the rule's decisions.
    script: list[int] | None = []
    while script is not None:
        chance = ScriptedChance(script, sum(sizes))
        acceptance = rule(tree, output, generator=chance)
        weight, end = torch.cat(drawn) * chance.weight, 0
        for counts, size in zip(emitted, sizes, strict=True):
            rows = list(range(end, end := end + size))
            add_emissions(counts, tree.tokens[rows], acceptance.select(rows), weight[rows], vocab)
        script = chance.next_script()
    return [
        complete_emissions(counts, target, sampling, shape.depth + 1) for counts, shape in zip(emitted, shapes, strict=True)
    ]


def sampled_tokens(
    rule: AcceptanceRule,
    sampling: Sampling,
    shape: TreeShape,
    target: Tables,
    drafter: Tables,
    *,
    num_samples: int,
    generator: torch.Generator,
) -> Int[torch.Tensor, "sample length"]:
    """Sample the next depth + 1 tokens `num_samples` times with the real sampler.

    Trees, acceptance and bonus tokens are all random.
    """
    drawn = drawn_tokens(shape, drafter, sampling, num_samples, generator)
    tree = make_trees([shape], [drawn], drafter, sampling)
    acceptance = rule(tree, _target_output(target, [shape], [drawn], tree.num_nodes), generator=generator)
    length = shape.depth + 1
    tokens = torch.zeros(num_samples, length, dtype=torch.long)
    for position in range(length):
        drafted = tree.tokens.gather(1, acceptance.path.clamp(min=0))[:, min(position, shape.depth - 1)]
        prefix = tuple(tokens[:, earlier] for earlier in range(position))
        completed = draw(warp(target[position][prefix].expand(num_samples, -1), sampling), generator)
        kept = torch.where(acceptance.num_accepted == position, acceptance.bonus_token, completed)
        tokens[:, position] = torch.where(position < acceptance.num_accepted, drafted, kept)
    return tokens


def sequence_counts(tokens: Int[torch.Tensor, "sample length"], vocab: int) -> Int[torch.Tensor, " cell"]:
    """Count how often each text occurs, in the order of a flattened `joint`."""
    powers = vocab ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return torch.bincount((tokens * powers).sum(1), minlength=math.prod([vocab] * tokens.shape[1]))


def _target_output(target: Tables, shapes: Sequence[TreeShape], tokens: Sequence[torch.Tensor], num_nodes: int) -> TargetOutput:
    logits = torch.cat([after_nodes(target, shape, rows, num_nodes) for shape, rows in zip(shapes, tokens, strict=True)])
    return TargetOutput(logits=logits, hidden_states=logits[..., :0])


def add_emissions(
    emitted: Sequence[torch.Tensor], tokens: torch.Tensor, acceptance: Acceptance, weight: torch.Tensor, vocab: int
) -> None:
    """Add the probabilities of the emissions of a step: `emitted[n]` is by texts of n tokens."""
    drafted = tokens.gather(1, acceptance.path.clamp(min=0))
    for size in range(1, len(emitted)):
        rows = acceptance.num_accepted == size - 1
        new = torch.cat([drafted[rows, : size - 1], acceptance.bonus_token[rows, None]], dim=1)
        powers = vocab ** torch.arange(size - 1, -1, -1)
        emitted[size].index_add_(0, (new * powers).sum(1), weight[rows])


def complete_emissions(emitted: Sequence[torch.Tensor], target: Tables, sampling: Sampling, length: int) -> torch.Tensor:
    """Complete all emissions to `length` tokens with the target's own probabilities."""
    vocab = target[0].shape[-1]
    result = torch.zeros([vocab] * length, dtype=torch.float64)
    for size in range(1, length + 1):
        prefix = emitted[size].view([vocab] * size)
        rest = torch.ones([], dtype=torch.float64)
        for table in target[size:length]:
            rest = rest[..., None] * warp(table, sampling) if rest.ndim else warp(table, sampling)
        result += prefix.view([vocab] * size + [1] * (length - size)) * rest
    return result


# --- all shapes, drawings and samplings


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
DRAWINGS = ("beam", "distinct", "independent")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCheck:
    """One exact enumeration: the rule's step compared with the target's joint distribution."""

    shape: str
    drawing: str
    sampling: str
    drafter: str
    vocab: int
    padded: bool
    """Whether these were the rows with the first half of the shape's nodes, padded to the size of
    the others."""
    total_variation: float


def check_rule(
    make_rule: Callable[[Sampling], AcceptanceRule],
    *,
    vocab: int = 3,
    seed: int = 0,
    shapes: Sequence[str] = tuple(SHAPES),
    drawings: Sequence[str] = DRAWINGS,
    samplings: Sequence[str] = tuple(SAMPLINGS),
    target_sampling: Sampling | None = None,
) -> Iterator[RuleCheck]:
    """Enumerate a rule on all shapes, ways of drawing, sampling parameters and drafters.

    A rule is lossless if all results are below `EXACT`. Rows of whole trees and of half trees share
    each batch. `target_sampling` is for a rule that samples from the target with other parameters
    than the drafter's.
    """
    target = random_tables(vocab, 6, seed)
    drafters = adversarial_drafters(target, seed + 1)
    for shape_name, drawing in itertools.product(shapes, drawings):
        whole = TreeShape(parents=SHAPES[shape_name], drawing=drawing)
        for sampling_name, (drafter_name, drafter) in itertools.product(samplings, drafters.items()):
            # One batch has the whole trees and the half trees.
            draft_sampling = SAMPLINGS[sampling_name]
            sampling = target_sampling or draft_sampling
            rule, pair = make_rule(sampling), (whole, whole.half)
            distributions = step_distributions(rule, sampling, pair, target, drafter, draft_sampling=draft_sampling)
            for shape, distribution in zip(pair, distributions, strict=True):
                yield RuleCheck(
                    shape=shape_name,
                    drawing=drawing,
                    sampling=sampling_name,
                    drafter=drafter_name,
                    vocab=vocab,
                    padded=shape is not whole,
                    total_variation=total_variation(distribution, joint(target, sampling, shape.depth + 1)),
                )
