"""Is an acceptance rule lossless? Exactly, by playing every outcome of one step on toy models; and by a test on samples.

One step is enough: let J be the target's joint distribution of the next `depth + 1` tokens. A step emits some of them; complete
every emission with the target's own conditional probabilities. If that gives J for every text before the step, then so does any
number of steps, by induction, since the next step starts from a text that was drawn from J.

Other code can import this: `step_distribution` takes any rule that leaves its decisions to the `generator`: one `sampling.flip`
of a coin per node and one `sampling.draw` per row for drawn trees, one draw per entry for the others.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from ..interfaces import AcceptanceRule
from .sampling import Sampling, draw, draw_several, warp
from .tree import DraftTree
from .types import Acceptance, TargetOutput

EXACT = 1e-12
"""Total variation that float64's rounding may explain."""

Tables = list[Float[torch.Tensor, "..."]]
"""A toy model's logits in float64: entry k, of shape [vocab] * (k + 1), holds those after every text of k tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """Which nodes a tree has (`parents`), and how its tokens come about: `beam` (the likeliest children, a function of the
    text), `distinct` (siblings drawn without replacement) or `independent` (drawn with it)."""

    parents: tuple[int, ...]
    drawing: str

    @property
    def depth(self) -> int:
        return max((len(self.path(node)) for node in range(len(self.parents))), default=0)

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child to `node`."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def siblings(self, node: int) -> list[int]:
        """Elder siblings of `node`."""
        return [other for other in range(node) if self.parents[other] == self.parents[node]]


def random_tables(vocab: int, length: int, seed: int, spread: float = 1.5) -> Tables:
    """A toy model of texts of up to `length` tokens; a larger spread makes it surer of itself."""
    generator = torch.Generator().manual_seed(seed)
    return [spread * torch.randn([vocab] * (size + 1), generator=generator, dtype=torch.float64) for size in range(length)]


def adversarial_drafters(target: Tables, seed: int) -> dict[str, Tables]:
    """Drafters that break careless rules: each is a toy model too."""
    noise = random_tables(target[0].shape[-1], len(target), seed)
    return {
        "unrelated": noise,
        "equal": target,
        "near-tied": [table + 1e-9 * other for table, other in zip(target, noise, strict=True)],
        "uniform": [torch.zeros_like(table) for table in target],
        "confidently wrong": [-6 * table for table in target],
        "too sure": [6 * table for table in target],
    }


def joint(tables: Tables, sampling: Sampling, length: int) -> Float[torch.Tensor, "..."]:
    """The distribution of the first `length` tokens, of shape [vocab] * length."""
    result = torch.ones((), dtype=torch.float64)
    for table in tables[:length]:
        result = result[..., None] * warp(table, sampling)
    return result


def total_variation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Half the sum of all differences: the greatest difference in the probability of any event."""
    return float((found - expected).abs().sum() / 2)


class Replay:
    """Plays one outcome of all decisions, and keeps how likely that was in every row.

    What a rule doesn't ask for is left to fair dice, so that the weights of all outcomes sum to one whatever it asks.
    """

    def __init__(self, outcome: "Outcome", batch: int, vocab: int) -> None:
        self._tokens, self._coins = outcome.tokens, outcome.coins
        fair = vocab ** -len(outcome.tokens) * 2.0 ** -len(outcome.coins)
        self.weight = torch.full((batch,), fair, dtype=torch.float64)

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        """The next tokens of the outcome, the same in every row."""
        shape = probs.shape[1:-1]
        tokens = torch.tensor(self._tokens[: shape.numel()]).view(shape).expand(probs.shape[:-1])
        self._tokens = self._tokens[shape.numel() :]
        chosen = probs.gather(-1, tokens[..., None])[..., 0] / probs.sum(-1)
        self.weight = self.weight * (chosen * probs.shape[-1]).view(len(probs), -1).prod(1)
        return tokens

    def flip(self, probs: torch.Tensor) -> torch.Tensor:
        """The outcome's coins, the same in every row."""
        coins = torch.tensor(self._coins).expand(probs.shape)
        self._coins = ()
        self.weight = self.weight * (2 * torch.where(coins, probs, 1 - probs)).prod(1)
        return coins


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What every draw and every coin says."""

    tokens: tuple[int, ...]
    coins: tuple[bool, ...]


def step_distribution(
    rule: AcceptanceRule, sampling: Sampling, shape: TreeShape, target: Tables, drafter: Tables
) -> Float[torch.Tensor, "..."]:
    """The joint distribution of the next depth + 1 tokens when the first of them come from one step with `rule`, exactly.

    Every tree that the drafter may draw is a row of one batch; every outcome of the rule's decisions is played on all of them.
    """
    tree, drawn = all_trees(shape, drafter, sampling)
    logits = torch.stack([_after_paths(target, shape, tree.tokens, node) for node in range(-1, len(shape.parents))], dim=1)
    output = TargetOutput(logits=logits, hidden_states=logits[..., :0])
    vocab, length = logits.shape[-1], shape.depth + 1
    emitted = [torch.zeros(vocab**size, dtype=torch.float64) for size in range(length + 1)]
    for outcome in _outcomes(tree, vocab):
        chance = Replay(outcome, len(drawn), vocab)
        acceptance = rule(tree, output, generator=chance)
        _add_emissions(emitted, tree, acceptance, drawn * chance.weight, vocab)
    return _complete(emitted, target, sampling, length)


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
    """The next depth + 1 tokens, `num_samples` times, by the sampler as it is: trees, acceptance and bonus drawn at random."""
    tree = drawn_trees(shape, drafter, sampling, num_samples, generator)
    logits = torch.stack([_after_paths(target, shape, tree.tokens, node) for node in range(-1, len(shape.parents))], dim=1)
    acceptance = rule(tree, TargetOutput(logits=logits, hidden_states=logits[..., :0]), generator=generator)
    length = shape.depth + 1
    tokens = torch.zeros(num_samples, length, dtype=torch.long)
    for position in range(length):
        drafted = tree.tokens.gather(1, acceptance.path.clamp(min=0))[:, min(position, shape.depth - 1)]
        prefix = tuple(tokens[:, earlier] for earlier in range(position))
        own = draw(warp(target[position][prefix].expand(num_samples, -1), sampling), generator)
        kept = torch.where(acceptance.num_accepted == position, acceptance.bonus_token, own)
        tokens[:, position] = torch.where(position < acceptance.num_accepted, drafted, kept)
    return tokens


def g_test(counts: Int[torch.Tensor, " cell"], probs: Float[torch.Tensor, " cell"]) -> float:
    """Probability of counts at least as unlikely as these, were `probs` right: below `a` in a share `a` of all sound samplers.

    The likelihood-ratio statistic 2 sum O ln(O / E), chi-squared with as many degrees of freedom as there are possible cells,
    less one. A count where `probs` is 0 gives 0.
    """
    if counts[probs == 0].any():
        return 0.0
    counts, probs = counts[probs > 0], probs[probs > 0]
    expected = probs * counts.sum()
    statistic = 2 * torch.special.xlogy(counts.double(), counts / expected).sum()
    freedom = torch.tensor((len(probs) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if len(probs) > 1 else 1.0


# --- trees


def all_trees(shape: TreeShape, drafter: Tables, sampling: Sampling) -> tuple[DraftTree, Float[torch.Tensor, " tree"]]:
    """Every tree of a shape that a drafter may propose, and how likely each is."""
    vocab = drafter[0].shape[-1]
    if shape.drawing == "beam":
        return _beam_tree(shape, drafter), torch.ones(1, dtype=torch.float64)
    tokens = torch.tensor(list(itertools.product(range(vocab), repeat=len(shape.parents))))
    weight = torch.ones(len(tokens), dtype=torch.float64)
    for node, parent in enumerate(shape.parents):
        probs = warp(_after_paths(drafter, shape, tokens, parent), sampling)
        if shape.drawing == "distinct":
            for elder in shape.siblings(node):
                probs = probs.scatter(1, tokens[:, elder, None], 0.0)
            # With nothing left to draw, a drafter's tree still needs a token there; say the first, of probability 0 in q.
            left = probs.sum(1, keepdim=True)
            probs = torch.where(left > 0, probs / left, torch.eye(vocab, dtype=probs.dtype)[:1])
        weight = weight * probs.gather(1, tokens[:, node, None])[:, 0]
    possible = weight > 0
    return _tree(shape, drafter, sampling, tokens[possible]), weight[possible]


def drawn_trees(
    shape: TreeShape, drafter: Tables, sampling: Sampling, num_samples: int, generator: torch.Generator
) -> DraftTree:
    """Trees as a drafter draws them."""
    if shape.drawing == "beam":
        tree = _beam_tree(shape, drafter)
        return DraftTree(
            tokens=tree.tokens.expand(num_samples, -1), parents=tree.parents.expand(num_samples, -1), max_depth=tree.max_depth
        )
    tokens = torch.zeros(num_samples, len(shape.parents), dtype=torch.long)
    for node, parent in enumerate(shape.parents):
        family = [other for other, its in enumerate(shape.parents) if its == parent]
        if family[0] != node:
            continue  # drawn with the eldest
        probs = warp(_after_paths(drafter, shape, tokens, parent), sampling)
        if shape.drawing == "distinct":
            tokens[:, family] = draw_several(probs, len(family), generator)
        else:
            tokens[:, family] = draw(probs[:, None].expand(-1, len(family), -1), generator)
    return _tree(shape, drafter, sampling, tokens)


def _beam_tree(shape: TreeShape, drafter: Tables) -> DraftTree:
    tokens = torch.zeros(1, len(shape.parents), dtype=torch.long)
    for node, parent in enumerate(shape.parents):
        logits = _after_paths(drafter, shape, tokens, parent)
        tokens[:, node] = logits.sort(dim=-1, descending=True, stable=True).indices[:, len(shape.siblings(node))]
    return DraftTree(tokens=tokens, parents=torch.tensor([shape.parents]), max_depth=shape.depth)


def _tree(shape: TreeShape, drafter: Tables, sampling: Sampling, tokens: Int[torch.Tensor, "tree node"]) -> DraftTree:
    entries = [warp(_after_paths(drafter, shape, tokens, node), sampling) for node in range(-1, len(shape.parents))]
    return DraftTree(
        tokens=tokens,
        parents=torch.tensor([shape.parents]).expand(len(tokens), -1),
        max_depth=shape.depth,
        child_probs=torch.stack(entries, dim=1),
        with_replacement=shape.drawing == "independent",
        max_children=max(len(shape.siblings(node)) + 1 for node in range(len(shape.parents))),
    )


def _after_paths(
    tables: Tables, shape: TreeShape, tokens: Int[torch.Tensor, "tree node"], node: int
) -> Float[torch.Tensor, "tree vocab"]:
    """A toy model's logits after the path to `node` (-1: after the text itself) of every tree."""
    path = shape.path(node)
    if len(path) >= len(tables):
        raise ValueError(f"the toy model knows texts of {len(tables) - 1} tokens, and the tree is {len(path)} deep")
    return tables[len(path)][tuple(tokens[:, earlier] for earlier in path)].expand(len(tokens), -1)


# --- outcomes


def _outcomes(tree: DraftTree, vocab: int) -> Iterator[Outcome]:
    num_nodes = tree.num_nodes
    if tree.child_probs is None:  # such trees get a draw at every entry, and no coin
        for tokens in itertools.product(range(vocab), repeat=num_nodes + 1):
            yield Outcome(tokens=tokens, coins=())
        return
    for coins in itertools.product((False, True), repeat=num_nodes):
        for token in range(vocab):
            yield Outcome(tokens=(token,), coins=coins)


def _add_emissions(
    emitted: Sequence[torch.Tensor], tree: DraftTree, acceptance: Acceptance, weight: torch.Tensor, vocab: int
) -> None:
    drafted = tree.tokens.gather(1, acceptance.path.clamp(min=0)) if tree.num_nodes else acceptance.path
    for size in range(1, len(emitted)):
        rows = acceptance.num_accepted == size - 1
        tokens = torch.cat([drafted[rows, : size - 1], acceptance.bonus_token[rows, None]], dim=1)
        place = vocab ** torch.arange(size - 1, -1, -1)
        emitted[size].index_add_(0, (tokens * place).sum(1), weight[rows])


def _complete(emitted: Sequence[torch.Tensor], target: Tables, sampling: Sampling, length: int) -> torch.Tensor:
    vocab = target[0].shape[-1]
    result = torch.zeros([vocab] * length, dtype=torch.float64)
    for size in range(1, length + 1):
        prefix = emitted[size].view([vocab] * size)
        rest = torch.ones([], dtype=torch.float64)
        for table in target[size:length]:
            rest = rest[..., None] * warp(table, sampling) if rest.ndim else warp(table, sampling)
        result += prefix.view([vocab] * size + [1] * (length - size)) * rest
    return result


# --- the certificate of the rules


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
    """One exact enumeration: the rule's step against the target's joint distribution."""

    shape: str
    drawing: str
    sampling: str
    drafter: str
    vocab: int
    total_variation: float


def check_rule(
    make_rule: Callable[[Sampling], AcceptanceRule],
    *,
    vocab: int = 3,
    seed: int = 0,
    shapes: Sequence[str] = tuple(SHAPES),
    drawings: Sequence[str] = DRAWINGS,
    samplings: Sequence[str] = tuple(SAMPLINGS),
) -> Iterator[RuleCheck]:
    """Enumerate a rule on all shapes, ways of drawing, sampling parameters and drafters. Lossless: all below `EXACT`."""
    target = random_tables(vocab, 6, seed)
    for shape_name, drawing in itertools.product(shapes, drawings):
        shape = TreeShape(parents=SHAPES[shape_name], drawing=drawing)
        for sampling_name, (drafter_name, drafter) in itertools.product(
            samplings, adversarial_drafters(target, seed + 1).items()
        ):
            sampling = SAMPLINGS[sampling_name]
            found = step_distribution(make_rule(sampling), sampling, shape, target, drafter)
            yield RuleCheck(
                shape=shape_name,
                drawing=drawing,
                sampling=sampling_name,
                drafter=drafter_name,
                vocab=vocab,
                total_variation=total_variation(found, joint(target, sampling, shape.depth + 1)),
            )


def sequence_counts(tokens: Int[torch.Tensor, "sample length"], vocab: int) -> Int[torch.Tensor, " cell"]:
    """How often each text occurs, in the order of a flattened `joint`."""
    place = vocab ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return torch.bincount((tokens * place).sum(1), minlength=math.prod([vocab] * tokens.shape[1]))
