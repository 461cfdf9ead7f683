"""Search by groups of siblings: the most probable tokens after a node, or tokens drawn at random.

In a **drawn tree** a group has `num_children` tokens, drawn one after another without replacement
from the drafter's warped distribution q after the node. Multi-round sampling tries them in turn
(`SpeculativeSampling`; SpecInfer, arXiv 2305.09781, section 4.3; without replacement, arXiv
2402.14160, section 3.1). That rule is exact only if a group's tokens are such draws, whatever is
known of the tree's shape. So no decision about a group may depend on its own tokens or on tokens
below it.

**Groups are kept or dropped whole, by their parents' scores.** A node's score is the probability
of its path. EAGLE-2 keeps the most probable nodes (arXiv 2406.16858, section 4.2). Here that
would keep likely draws and drop unlikely ones, so the children would no longer be draws from q.
Instead a group counts as its parent, which was drawn before the group was.

Proof that nothing looks ahead. Order all groups by score, and equal ones by depth. Let G be the
group of node v. A path's probability never rises, so all nodes below v have at most the score of v,
and their groups come after G. Tokens of G decide which other nodes of later depths are expanded.
But such a node loses its place only to a node below v, so its score is at most that of v too, and
its group comes after G. So the groups before G don't depend on tokens of G or below. Whether G
is among the first `num_groups` is therefore settled before G is drawn. The tree is the one of
drawing best-first: always draw a group after the most probable node that has none (as in DySpec,
arXiv 2410.11744), until there are enough groups.

Random numbers are drawn in an order that depends on shapes alone, with `RowSeeds` separately for
each row: a row's tree doesn't depend on its batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int

from ..decoding.sampling import Randomness, Sampling, draw_several, warp
from ..decoding.tree import DraftTree, Drawn
from ..decoding.types import NO_NODE
from .beams import SearchTree, take
from .vocabulary import DraftVocabulary


class GroupSearch:
    """Search that expands some nodes of each depth into groups of children.

    Groups are numbered as they are added. All have the same number of children, and the children of
    group g are the nodes from g times this number on.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        # The nodes to expand, and the log-probabilities of their paths: at first the root.
        self._scores = torch.zeros(batch, 1, device=device)
        self._nodes = torch.full_like(self._scores, NO_NODE, dtype=torch.long)
        self._levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._width = 0

    @property
    def depth(self) -> int:
        """Number of depths that have nodes."""
        return len(self._levels)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        return tuple(tokens.shape[1] for tokens, _, _ in self._levels)

    def add(self, tokens: Int[torch.Tensor, "batch node child"], log_probs: Float[torch.Tensor, "batch node child"]) -> None:
        """Add the children of the nodes to expand; log-probabilities are at most 0."""
        self._width = tokens.shape[2]
        parents = self._nodes.repeat_interleave(self._width, dim=1)
        self._levels.append((tokens.flatten(1), parents, (self._scores[..., None] + log_probs).flatten(1)))

    def expand(
        self, count: int
    ) -> tuple[Int[torch.Tensor, "batch chosen"], Int[torch.Tensor, "batch chosen"], Int[torch.Tensor, "batch chosen"]]:
        """Choose the most probable nodes of the last depth, to be expanded next.

        Returns their tokens, their numbers, and the place of each node's parent among the nodes
        that were expanded before.
        """
        tokens, _, candidates = self._levels[-1]
        # A stable sort, unlike `topk`, takes the first of equal scores on every device.
        chosen = candidates.sort(dim=1, descending=True, stable=True).indices[:, :count]
        self._scores = candidates.gather(1, chosen)
        self._nodes = sum(self.level_sizes[:-1]) + chosen
        return tokens.gather(1, chosen), self._nodes, chosen // self._width

    def tree(self) -> SearchTree:
        """Return all nodes."""
        return SearchTree.of(self._levels)


class GroupDrawing:
    """Groups drawn from a drafter's distribution, and the distributions, for one draft tree."""

    def __init__(
        self, *, temperature: float, num_children: int, vocabulary: DraftVocabulary, generator: Randomness = None
    ) -> None:
        self.sampling, self.generator = Sampling(temperature=temperature), generator
        self.num_children, self.vocabulary = num_children, vocabulary
        self._probs: list[torch.Tensor] = []

    def children(
        self, logits: Float[torch.Tensor, "batch node output"]
    ) -> tuple[Int[torch.Tensor, "batch node child"], Float[torch.Tensor, "batch node child"]]:
        """Draw different tokens after each node, and return them with their log-probabilities."""
        probs = warp(logits, self.sampling)
        drawn = draw_several(probs, self.num_children, self.generator)
        log_probs = probs.gather(2, drawn).log().clamp(max=0.0)
        if (tokens := self.vocabulary.tokens) is not None:
            probs = probs.new_zeros(*probs.shape[:2], self.vocabulary.size).index_copy(2, tokens, probs)
            drawn = tokens[drawn]
        self._probs.append(probs)
        return drawn, log_probs

    def drawn(self, search: SearchTree) -> SearchTree:
        """Return the search with the distributions that its groups were drawn from."""
        return replace(search, drawn_from=torch.cat(self._probs, dim=1))


def pack_groups(search: SearchTree, num_nodes: int) -> DraftTree:
    """Return at most `num_nodes` nodes of a drawn search, in whole groups, with their distributions."""
    assert search.drawn_from is not None
    num_children = search.tokens.shape[1] // search.drawn_from.shape[1]
    return tree_of_groups(search, likeliest_groups(search, num_nodes // num_children, num_children), num_children)


def likeliest_groups(search: SearchTree, num_groups: int, num_children: int) -> Int[torch.Tensor, "batch kept"]:
    """Return the groups with the most probable parents, in order; see the module's docstring."""
    parents = search.parents[:, ::num_children]
    scores = search.scores.gather(1, parents.clamp(min=0)).masked_fill(parents == NO_NODE, 0.0)
    # A parent's group comes before its children's and has at least their score, so a stable sort
    # never takes a group without the group of its parent.
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :num_groups].sort(dim=1).values


def tree_of_groups(search: SearchTree, groups: Int[torch.Tensor, "batch kept"], num_children: int) -> DraftTree:
    """Return the tree of some groups, with the distributions that they were drawn from."""
    assert search.drawn_from is not None
    nodes = (groups[..., None] * num_children + torch.arange(num_children, device=groups.device)).flatten(1)
    tree = take(search, nodes)
    vocab_size = search.drawn_from.shape[2]
    columns = (tree.parents[:, ::num_children] + 1)[..., None].expand(-1, -1, vocab_size)
    # Entries without children keep zeros: nothing was drawn there.
    probs = search.drawn_from.new_zeros(len(groups), 1 + tree.num_nodes, vocab_size)
    rows = torch.arange(len(groups), device=groups.device)[:, None]
    probs = probs.scatter(1, columns, search.drawn_from[rows, groups])
    return DraftTree(
        tokens=tree.tokens,
        parents=tree.parents,
        max_depth=tree.max_depth,
        drawn=Drawn(probs=probs, max_children=num_children),
        entries=tree.entries,
        derived=(tree.lineage, tree.depths),
    )


def level_sizes(num_children: int, top_k: int, depth: int) -> Sequence[int]:
    """Return the number of nodes of each depth, where `top_k` nodes of a depth are expanded."""
    sizes = [num_children]
    while len(sizes) < depth:
        sizes.append(num_children * min(top_k, sizes[-1]))
    return sizes
