"""Acceptance rules: they choose the accepted path of a draft tree, and the bonus token.

Every rule has the same two halves. The first half decides for each node alone whether the node is
accepted if its parent is. The second half, `follow`, walks down the accepted nodes. All nodes are
decided at once on the device, so no rule makes the host wait; but on a CPU `follow_on_host` decides
only the nodes on the way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch.nn.functional import pad

from .reading import acceptance_of
from .sampling import MIN_PRECISION, Randomness, RowSeeds, Sampling, choose, warp
from .tree import DraftTree, host_row
from .types import NO_NODE, Acceptance, TargetOutput

MANY_ROWS, FEW_TOKENS = 16, 4096
"""More rows of a smaller vocabulary are decided together: on the host each row takes a dozen operations, however small."""
Pick = Callable[[int, int, Float[torch.Tensor, " vocab"]], tuple[int, bool]]
"""Chooses a row's token at a depth below its last committed token; also returns whether the logits there are numbers."""


class GreedyAcceptance:
    """Greedy rule: keep the longest path on which every draft token is the target's arg-max.

    The tokens are exactly those of greedy decoding.
    """

    lossless, is_random = True, False

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance:
        if decides_on_host(output) and (tree.num_nodes or is_quick_on_host(output)):
            return follow_on_host(tree, output.logits, likeliest)
        peaks, choices = output.logits.max(-1)
        return follow_choices(tree, choices, peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSampling:
    """Sample from the target's warped distribution p exactly, whatever the drafter proposes.

    A token is drawn from p after every node. The walk continues as long as the drawn token is a child of
    the current node.

    Proof of exactness: each emitted token is a draw from p given the text before it, independent of
    all other draws. The tree is a function of the text alone; it only decides after how many draws
    the walk ends. One of the children is accepted with probability sum p(child). No exact rule for
    such trees accepts more. A tree may also be a function of the numbers of `RowSeeds` (see `foreseen`): each
    draw is a function of p, the seed and the place, whatever the tree is, so the text is plain decoding's.
    """

    lossless: ClassVar[bool] = True
    is_random: ClassVar[bool] = True
    sampling: Sampling

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance:
        # A recorded rule has its seeds on the device alone.
        if isinstance(generator, RowSeeds) and generator.seeds and decides_on_host(output) and is_quick_on_host(output):
            generator.require(len(output.logits))
            draw, sampling = generator.draw, self.sampling
            return follow_on_host(
                tree,
                output.logits,
                lambda row, depth, logits: (draw(row, depth, warp(logits, sampling)), abs(float(logits.numpy().max())) < inf),
            )
        probs = warp(output.logits, self.sampling)
        return follow_choices(tree, choose(probs, pad(tree.depths, (1, 0)), tree.max_depth, generator))


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalAcceptance:
    """Medusa's rule (arXiv 2401.10774, section 2.3.1): accept typical tokens. NOT lossless.

    A token x is accepted where p(x) > min(epsilon, delta * exp(-H(p))). H is the entropy in nats of
    the target's warped distribution p. The longest accepted path wins, and the bonus token is drawn
    from p after it.
    """

    lossless: ClassVar[bool] = False
    is_random: ClassVar[bool] = True
    sampling: Sampling
    epsilon: float = 0.09
    """The paper's threshold."""
    delta: float = 0.3
    """The paper's choice, the square root of epsilon."""

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance:
        probs = warp(output.logits, self.sampling)
        entropy = torch.special.entr(probs).sum(-1)  # [batch, entry]
        threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        path, num_accepted, entry = follow(tree, _at_children(tree, probs) > threshold.gather(1, tree.parents + 1))
        rows = torch.arange(len(probs), device=probs.device)
        last = probs[rows, entry][:, None]
        bonus_token = choose(last, num_accepted[:, None], tree.max_depth, generator)[:, 0]
        return Acceptance(path=path, num_accepted=num_accepted, entry=entry, bonus_token=bonus_token)


# --- the first half: each node alone


def _at_children(tree: DraftTree, probs: Float[torch.Tensor, "batch entry vocab"]) -> Float[torch.Tensor, "batch node"]:
    """Return the probability of each node's token after its parent; 0 for padding."""
    rows = torch.arange(len(probs), device=probs.device)[:, None]
    child_probs = probs[rows, tree.parents + 1, tree.tokens.clamp(min=0)]
    return torch.where(tree.tokens == NO_NODE, 0.0, child_probs)


# --- the second half: the walk


def follow(
    tree: DraftTree, accepted: Bool[torch.Tensor, "batch node"]
) -> tuple[Int[torch.Tensor, "batch depth"], Int[torch.Tensor, " batch"], Int[torch.Tensor, " batch"]]:
    """Walk down the accepted nodes. The deepest path wins; among equally deep ones, the first.

    Returns `path`, `num_accepted` and `entry` of an `Acceptance`.
    """
    padded = pad(accepted, (1, 0), value=True)  # entry 0 stands for "no node"
    reached = padded.gather(1, (tree.lineage + 1).flatten(1)).view_as(tree.lineage).all(-1)
    reached_depth = tree.depths * reached
    # The extra column stands for "nothing accepted", so the empty tree is no special case.
    num_accepted, entry = pad(reached_depth, (1, 0)).max(1)
    return _path_to(tree, entry, num_accepted), num_accepted, entry


def follow_choices(
    tree: DraftTree, choices: Int[torch.Tensor, "batch entry"], peaks: Float[torch.Tensor, "batch entry"] | None = None
) -> Acceptance:
    """Walk down as long as the token that the target chose is a child.

    `choices[b, 0]` is the target's choice after the last committed token, and `choices[b, n + 1]`
    its choice after node n. The choice after the last node of the path is the bonus token.
    """
    if tree.num_nodes == 0:  # plain decoding, which is the baseline, does nothing that it doesn't need
        nothing = tree.depths.sum(1)
        return Acceptance(path=tree.tokens, num_accepted=nothing, entry=nothing, bonus_token=choices[:, 0], peaks=peaks)
    path, num_accepted, entry = follow(tree, tree.tokens == choices.gather(1, tree.parents + 1))
    bonus_token = choices.gather(1, entry[:, None])[:, 0]
    return Acceptance(path=path, num_accepted=num_accepted, entry=entry, bonus_token=bonus_token, peaks=peaks)


def decides_on_host(output: TargetOutput) -> bool:
    """Return whether `follow_on_host` decides: on a CPU, if the rule isn't recorded, which reads nothing."""
    return output.logits.device.type == "cpu" and not output.is_fixed and len(output.logits) > 0


def is_quick_on_host(output: TargetOutput) -> bool:
    """Return whether deciding row by row takes no longer than deciding all rows together, without a tree."""
    rows, _, vocab_size = output.logits.shape
    return rows <= MANY_ROWS or vocab_size >= FEW_TOKENS


def likeliest(row: int, depth: int, logits: Float[torch.Tensor, " vocab"]) -> tuple[int, bool]:
    """Pick the arg-max. NumPy finds it several times as fast as torch; as in torch, a NaN counts as the largest number."""
    values = logits.numpy()
    token = int(values.argmax())
    return token, bool(abs(values[token]) < inf)


def follow_on_host(tree: DraftTree, logits: Float[torch.Tensor, "batch entry vocab"], pick: Pick) -> Acceptance:
    """Walk down as `follow_choices` does, and choose only after the accepted nodes.

    Also computes `Acceptance.numbers`. On a CPU an operation of torch takes longer than a loop over a small tree, and
    with a large vocabulary choosing after all nodes takes milliseconds.
    """
    logits, precision = logits.detach(), torch.promote_types(logits.dtype, MIN_PRECISION)  # numpy has no bfloat16
    rows, depth = list[list[int]](), tree.max_depth
    for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        path, are_numbers, last = list[int](), list[int](), NO_NODE
        while len(are_numbers) == len(path):
            after = logits[row, last + 1].to(precision)
            bonus, is_number = pick(row, len(path), after)
            are_numbers.append(int(is_number))
            if (last, bonus) in children:
                path.append(last := children[last, bonus])
        numbers = host_row(path, [tokens[node] for node in path], bonus, depth)
        rows.append([*numbers, *are_numbers, *[1] * (depth - len(path))])
    return acceptance_of(torch.tensor(rows, device=logits.device), depth)


def _path_to(
    tree: DraftTree, entry: Int[torch.Tensor, " batch"], depth: Int[torch.Tensor, " batch"]
) -> Int[torch.Tensor, "batch depth"]:
    """Return the path from the root to the node of `entry`, padded with NO_NODE.

    Entry 0 stands for no node: its path is all padding.
    """
    if tree.num_nodes == 0:
        return tree.tokens
    lineage = pad(tree.lineage, (0, 0, 1, 0), value=NO_NODE)  # of entries: that of entry 0 is empty
    upward = lineage.gather(1, entry[:, None, None].expand(-1, 1, tree.max_depth))[:, 0]  # [batch, depth]
    # The path's nodes come first, then NO_NODE. Read backwards from the last node, and around the
    # end, NO_NODE comes last again.
    steps = torch.arange(1, tree.max_depth + 1, device=upward.device)
    return upward.gather(1, (depth[:, None] - steps) % tree.max_depth)
