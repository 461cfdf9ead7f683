"""Acceptance rules: which path of a draft tree the target keeps, and the bonus token after it."""

import torch
from jaxtyping import Int

from .tree import DraftTree
from .types import NO_NODE, Acceptance, TargetOutput


class GreedyAcceptance:
    """Keep the longest path on which every draft token is the target's own arg-max: the text of greedy decoding, token for
    token.
    """

    lossless = True

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: torch.Generator | None = None) -> Acceptance:
        return follow_choices(tree, output.logits.argmax(-1))


def follow_choices(tree: DraftTree, choices: Int[torch.Tensor, "batch entry"]) -> Acceptance:
    """Walk down from the last committed token as long as a child is the token that the target chose.

    `choices[b, 0]` is the target's choice after the last committed token, `choices[b, n + 1]` the one after node n. Where equal
    siblings match, the deepest path wins; among equally deep ones the first.
    """
    # A node is accepted where it and all its ancestors are what the target chose after their parents.
    matches = tree.tokens == choices.gather(1, tree.parents + 1)  # [batch, node]
    padded = torch.nn.functional.pad(matches, (1, 0), value=True)  # entry 0 answers for "no node"
    accepted = padded.gather(1, (tree.lineage + 1).flatten(1)).view_as(tree.lineage).all(-1)
    accepted_depth = tree.depths * accepted
    # One column for "nothing accepted" keeps the empty tree from being a special case.
    num_accepted, best = torch.nn.functional.pad(accepted_depth, (1, 0)).max(1)  # best: entry of the deepest accepted node
    path = _path_to(tree, best, num_accepted)
    return Acceptance(path=path, num_accepted=num_accepted, bonus_token=choices.gather(1, best[:, None])[:, 0])


def last_entry(acceptance: Acceptance) -> Int[torch.Tensor, " batch"]:
    """Index, among the target's entries, of the last accepted token: 0 where no draft token was accepted."""
    last = torch.nn.functional.pad(acceptance.path, (1, 0), value=NO_NODE).gather(1, acceptance.num_accepted[:, None])
    return last[:, 0] + 1


def _path_to(
    tree: DraftTree, entry: Int[torch.Tensor, " batch"], depth: Int[torch.Tensor, " batch"]
) -> Int[torch.Tensor, "batch depth"]:
    """The path from the root to the node of `entry` (entry 0: no node), padded with NO_NODE."""
    lineage = torch.nn.functional.pad(tree.lineage, (0, 0, 1, 0), value=NO_NODE)
    upward = lineage.gather(1, entry[:, None, None].expand(-1, 1, tree.max_depth))[:, 0]  # [batch, depth]
    steps = torch.arange(tree.max_depth, device=upward.device)
    downward = upward.gather(1, (depth[:, None] - 1 - steps).clamp(min=0))
    return torch.where(steps < depth[:, None], downward, NO_NODE)
