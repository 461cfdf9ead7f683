"""Data of decoding: prompts, the target's output, acceptance, and emitted tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..phases import PhaseSeconds
from .stopping import Finish

NO_NODE = -1
"""Padding of node indexes: "no such node". As a parent it is the last committed token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """Output of one forward pass of the target.

    From `verify`: entry 0 belongs to the last committed token, entry n + 1 to node n of the tree.
    From `prefill`: `hidden_states` has one entry per prompt token (meaningless on padding), and
    `logits` has only the last prompt token's entry. `hidden_states` are those of the last layer
    after the final norm, the input of the target's head.
    """

    logits: Float[torch.Tensor, "batch entry vocab"]
    hidden_states: Float[torch.Tensor, "batch hidden_entry hidden"]
    features: Float[torch.Tensor, "batch hidden_entry feature"] | None = None
    """The inputs of the requested layers, side by side."""
    is_fixed: bool = False
    """Whether the logits of all outputs of this shape have one address, where passes overwrite them."""


@dataclass(frozen=True, slots=True)
class Counts:
    """One number for each row of a batch, on the device and on the host.

    Both copies travel together. Code on the device must not wait for the host, and the host must
    not read the device to choose shapes.
    """

    device: Int[torch.Tensor, " batch"]
    host: tuple[int, ...]

    @classmethod
    def of(cls, values: Sequence[int], device: torch.device) -> "Counts":
        """Copy the host's numbers to the device."""
        return cls(torch.tensor(values, dtype=torch.long, device=device), tuple(values))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.device + other.device, tuple(map(sum, zip(self.host, other.host, strict=True))))

    def select(self, rows: Sequence[int]) -> "Counts":
        """Return the numbers of these rows only."""
        return Counts(self.device[rows], tuple(self.host[row] for row in rows))


NUM_FIRST = 4
"""Numbers before the path in a row of a decision's numbers: see `AcceptedPath`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedPath:
    """The accepted draft tokens of a step, after the host has read them.

    On the device they are parts of one tensor, so that nothing is computed for those who read them.
    A row of `numbers` has num_accepted, num_read, entry and the bonus token; then the path, its
    entries and its draft tokens, `depth`, `depth` + 1 and `depth` wide; then what only the host reads.
    """

    numbers: Int[torch.Tensor, "batch number"]
    depth: int
    width: int
    """How wide `path` and `drafts` are; at least as wide as the longest row's path."""
    host_nodes: tuple[tuple[int, ...], ...]
    """The nodes of each row's path, without padding."""
    tokens: tuple[tuple[int, ...], ...]
    """The draft tokens of these nodes."""
    next_tokens: tuple[int, ...] | None = None
    """The token after each row's path, with which the next draft begins; None if the host hasn't read
    it."""

    @property
    def path(self) -> Int[torch.Tensor, "batch width"]:
        """The accepted node of each row at each depth, NO_NODE past the end of the row's path."""
        return self.numbers[:, NUM_FIRST : NUM_FIRST + self.width]

    @property
    def entries(self) -> Int[torch.Tensor, "batch entry"]:
        """The target's entries of the last committed token and of the path: 0, then node + 1; 0 past
        the end."""
        first = NUM_FIRST + self.depth
        return self.numbers[:, first : first + self.width + 1]

    @property
    def drafts(self) -> Int[torch.Tensor, "batch width"]:
        """The tokens of the path; arbitrary ones past the end."""
        first = NUM_FIRST + 2 * self.depth + 1
        return self.numbers[:, first : first + self.width]

    @property
    def new_tokens(self) -> list[list[int]]:
        """All tokens that a step adds to each row: the accepted drafts, then the next token."""
        assert self.next_tokens is not None, "the host hasn't read the token after the path"
        return [[*drafts, token] for drafts, token in zip(self.tokens, self.next_tokens, strict=True)]

    @property
    def num_accepted(self) -> Counts:
        """Draft tokens only: a step emits one more token, the bonus token."""
        return Counts(self.numbers[:, 0], tuple(map(len, self.host_nodes)))

    @property
    def num_read(self) -> Counts:
        """Tokens that the target has read for good: the last committed token, and the accepted ones."""
        return Counts(self.numbers[:, 1], tuple(len(path) + 1 for path in self.host_nodes))

    @property
    def entry(self) -> Int[torch.Tensor, " batch"]:
        """The target's entry of each row's last accepted token: 0 if none was accepted."""
        return self.numbers[:, 2]

    def cut(self) -> "AcceptedPath":
        """Return the path only as wide as the longest row's."""
        longest = max(map(len, self.host_nodes))
        return self if longest == self.width else replace(self, width=longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The path of draft tokens that the target accepts, and the bonus token after it.

    `path[b, d]` is the index of the accepted node at depth d, NO_NODE past the end. `num_accepted`
    counts draft tokens only, so a step emits `num_accepted + 1` tokens. `entry` is the target's entry
    of the last accepted token: 0 if none was accepted. All tensors are on the device: a rule doesn't
    wait for the host.
    """

    path: Int[torch.Tensor, "batch depth"]
    num_accepted: Int[torch.Tensor, " batch"]
    entry: Int[torch.Tensor, " batch"]
    bonus_token: Int[torch.Tensor, " batch"]
    peaks: Float[torch.Tensor, "batch entry"] | None = None
    """The largest logit after each entry of the tree, if the rule has computed them."""
    numbers: Int[torch.Tensor, "batch number"] | None = None
    """All numbers of the decision (see `reading.numbers_of`), if they are computed already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Tokens that one iteration of the decode loop emitted, already cut where answers end.

    The first step is the prefill: it emits the target's first token and has `is_prefill` set.
    `rows` are the prompts whose answers were unfinished. The other tuples have one entry for each
    of them.
    """

    rows: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    finishes: tuple[Finish | None, ...]
    """Why the answer ended with this step; None if it hasn't ended."""
    num_accepted: tuple[int, ...]
    """Draft tokens that the target accepted, including those cut off at an answer's end."""
    num_nodes: int
    """Draft tokens per row that the target verified, padding included."""
    is_prefill: bool
    is_adopted: bool = False
    """Whether the last token was under way as a draft (pipelined only). `num_accepted` leaves it
    out."""
    origins: tuple[tuple[int, ...], ...] | None = None
    """The sources of each accepted draft token (`DraftTree.origins`), those cut off at an answer's
    end included; None if the tree has one source."""
    seconds: PhaseSeconds | None = None
    """None unless timed."""

    @property
    def num_drafted(self) -> int:
        """How many tokens of all rows were drafts that the target accepted."""
        return sum(self.num_accepted) + self.is_adopted

    @property
    def unfinished(self) -> list[int]:
        """The indexes in `rows` of the unfinished answers."""
        return [index for index, finish in enumerate(self.finishes) if finish is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Token ids padded on the right, and the number of real tokens in each row.

    `lengths` are on the host, because they decide the size of the KV cache.
    """

    input_ids: Int[torch.Tensor, "batch seq"]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.input_ids):
            raise ValueError(f"{len(self.lengths)} lengths for {len(self.input_ids)} prompts; give one per row")
        if min(self.lengths) < 1 or max(self.lengths) != self.input_ids.shape[1]:
            raise ValueError(
                f"prompts of {', '.join(map(str, self.lengths))} tokens, padded to {self.input_ids.shape[1]}; decoding takes "
                "prompts of at least one token, padded to the longest"
            )

    @classmethod
    def of(cls, prompts: Int[torch.Tensor, "batch seq"] | Sequence[Int[torch.Tensor, " _"]]) -> "Prompts":
        """Build a batch from a tensor of equally long rows, or from vectors of any lengths."""
        if isinstance(prompts, torch.Tensor):
            return cls(input_ids=prompts, lengths=(prompts.shape[1],) * len(prompts))
        if not prompts:
            raise ValueError("there is no prompt to decode; give at least one")
        return cls(input_ids=pad_sequence(list(prompts), batch_first=True), lengths=tuple(len(prompt) for prompt in prompts))

    def last(self, values: Shaped[torch.Tensor, "batch seq *rest"]) -> Shaped[torch.Tensor, "batch *rest"]:
        """Return the values (ids, hidden states) at each row's last real token."""
        row = torch.arange(len(self.lengths), device=values.device)
        return values[row, torch.tensor(self.lengths, device=values.device) - 1]


MAX_UNREAD = 64
"""A drafter that is skipped reads its text after so many tokens, so that the next draft
doesn't have to read a long text at once."""


def to_width(values: Shaped[torch.Tensor, "batch width *item"], width: int) -> Shaped[torch.Tensor, "batch wide *item"]:
    """Return so many values of each row: cut, or padded with zeros."""
    missing = width - values.shape[1]
    return pad(values, (0, 0) * (values.ndim - 2) + (0, missing)) if missing > 0 else values[:, :width]


def append(
    values: Shaped[torch.Tensor, "batch width *item"], counts: Counts, new: Shaped[torch.Tensor, "batch added *item"]
) -> Shaped[torch.Tensor, "batch longer *item"]:
    """Write `new` behind the first `counts` values of each row.

    What follows the new values in a row is arbitrary.
        rows  a b c   counts 3, new x y   ->   a b c x y
              d . .          1      z .        d z . . .
    """
    width, added = max(counts.host), new.shape[1]
    if min(counts.host) == width:
        return torch.cat([values[:, :width], new], dim=1)
    longer = torch.cat([values[:, :width], torch.zeros_like(new)], dim=1)
    columns = counts.device[:, None] + torch.arange(added, device=new.device)
    return longer.scatter(1, columns.view(*columns.shape, *[1] * (new.ndim - 2)).expand_as(new), new)
