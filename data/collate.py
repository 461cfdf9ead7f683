"""Collation of labelled examples into batches: one text per row, or several to save padding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import torch
from jaxtyping import Bool, Int, Shaped

from .states import BatchStates, joined
from .types import TOKENS_ONLY, UNKNOWN, DistilledExample, DrafterBatch, TargetReads

ATTENTION_COLUMNS = 4096
"""Row length at which attention costs as much as the rest of a model: about six times its hidden
size.

Packing weighs this cost: attention with a block mask is mostly computed across the whole row."""


PAD_ID = 0
"""Token of padding. Any one works: the attention mask hides it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Positions of texts: text n starts at row `rows[n]`, column `columns[n]`.

    Padding follows the last text of a row.
    """

    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns of the batch."""
        ends = [column + length for column, length in zip(self.columns, self.lengths, strict=True)]
        return max(self.rows) + 1, max(ends)

    def place(
        self, texts: Sequence[Shaped[torch.Tensor, "_ *rest"]], padding: int | float
    ) -> Shaped[torch.Tensor, "batch seq *rest"]:
        """Return one tensor with the values of all texts, token by token."""
        placed = texts[0].new_full((*self.shape, *texts[0].shape[1:]), padding)
        for row, column, text in zip(self.rows, self.columns, texts, strict=True):
            placed[row, column : column + len(text)] = text
        return placed

    def index(self) -> Int[torch.Tensor, " token"]:
        """Return the index of each text's tokens, text after text, among all batch x seq tokens."""
        width = self.shape[1]
        places = zip(self.rows, self.columns, self.lengths, strict=True)
        return torch.cat([row * width + column + torch.arange(length) for row, column, length in places])

    def starts(self) -> Int[torch.Tensor, "batch seq"]:
        """Return the start column of each token's text; padding counts as one more text."""
        num_rows, _ = self.shape
        used = torch.zeros(num_rows, dtype=torch.long)
        used.index_add_(0, torch.tensor(self.rows), torch.tensor(self.lengths))
        starts = used[:, None].repeat(1, self.shape[1])
        for row, column, length in zip(self.rows, self.columns, self.lengths, strict=True):
            starts[row, column : column + length] = column
        return starts


def padded(lengths: Sequence[int]) -> Layout:
    """Return the layout with one text per row, in order."""
    return Layout(lengths=tuple(lengths), rows=tuple(range(len(lengths))), columns=(0,) * len(lengths))


def packed(lengths: Sequence[int]) -> Layout:
    """Return the packed layout of least cost.

    Each text, the longest first, goes to the row that is shortest so far.

    Example: lengths 300, 2000, 500, 1500 -> two rows, of 2000 + 300 and of 1500 + 500.
    """
    layouts = [_balanced(lengths, num_rows) for num_rows in range(len(lengths), 0, -1)]
    return min(layouts, key=_cost)


def _balanced(lengths: Sequence[int], num_rows: int) -> Layout:
    used = [(0, row) for row in range(num_rows)]  # a heap: the shortest row first, and of equal ones the first
    rows, columns = [0] * len(lengths), [0] * len(lengths)
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        columns[text], rows[text] = used[0]
        heapreplace(used, (columns[text] + lengths[text], rows[text]))
    return Layout(lengths=tuple(lengths), rows=tuple(rows), columns=tuple(columns))


def _cost(layout: Layout) -> int:
    num_rows, width = layout.shape
    return num_rows * width * (ATTENTION_COLUMNS + width)


def text_continuations(
    input_ids: Int[torch.Tensor, " seq"], loss_mask: Bool[torch.Tensor, " seq"], horizon: int
) -> Int[torch.Tensor, "seq horizon"]:
    """Return the text's next tokens after each position, as labels in place of the target's.

    Entry [i, d] is token i + 1 + d if the tokens i + 1 .. i + 1 + d are all the assistant's, else
    UNKNOWN. So a label never extends past the end of its turn.

    Example: ids [5, 6, 7, 8], mask [0, 0, 1, 1], horizon 2 -> [[-1, -1], [7, 8], [8, -1], [-1,
    -1]].
    """
    num_tokens = len(input_ids)
    ahead = torch.arange(num_tokens)[:, None] + 1 + torch.arange(horizon)  # [seq, horizon]
    inside = ahead < num_tokens
    ahead = ahead.clamp(max=num_tokens - 1)
    known = (loss_mask[ahead] & inside).cumprod(dim=1).bool()
    return torch.where(known, input_ids[ahead], UNKNOWN)


def collate(
    examples: list[DistilledExample],
    *,
    max_positions: int | None,
    generator: torch.Generator,
    labels: str,
    reads: TargetReads = TOKENS_ONLY,
    packing: bool = False,
) -> DrafterBatch:
    """Collate examples into one batch, and choose the positions to train on.

    Each example has a row of its own, right-padded. With `packing`, rows hold several examples.

    `labels` is `distilled` (the target's continuations) or `text` (the text's next tokens). Both
    use the same positions: those with a distilled label. If the batch has more than
    `max_positions`, `generator` (on the CPU) samples that many of them. Padding is PAD_ID,
    UNKNOWN, zeros, and log-probabilities of minus infinity. `reads` selects the tensors of the
    target in the batch; every example must have them. States stay in the stored type until
    `DrafterBatch.decoded`.
    """
    # 1. Labels, and the positions that have one.
    texts = [example.example for example in examples]
    layout = (packed if packing else padded)([len(text.input_ids) for text in texts])
    positions = [text.wanted & (example.continuations[:, 0] != UNKNOWN) for text, example in zip(texts, examples, strict=True)]
    if labels == "distilled":
        continuations = [example.continuations for example in examples]
    else:
        horizon = examples[0].continuations.shape[1]
        continuations = [text_continuations(text.input_ids, text.loss_mask, horizon) for text in texts]
    # 2. Tensors of the target.
    tops = [example.top for example in examples if reads.top and example.top is not None]
    assert len(tops) == len(examples) * reads.top, "every example must have the tensors that are read"
    # 3. One tensor of each, padded.
    return DrafterBatch(
        input_ids=layout.place([text.input_ids.long() for text in texts], PAD_ID),
        attention_mask=layout.place([torch.ones_like(text.loss_mask) for text in texts], False),
        positions=layout.place(_thin(positions, max_positions, generator), False),
        continuations=layout.place([continuation.long() for continuation in continuations], UNKNOWN),
        stored=_stored_states(examples, layout, reads),
        top_tokens=layout.place([top.tokens for top in tops], UNKNOWN) if tops else None,
        top_log_probs=layout.place([top.log_probs for top in tops], -math.inf) if tops else None,
        starts=layout.starts() if packing else None,
    )


def _stored_states(examples: list[DistilledExample], layout: Layout, reads: TargetReads) -> BatchStates | None:
    """Join the examples' states that are read; None if none are."""
    last = [example.hidden_states for example in examples if reads.hidden_states and example.hidden_states is not None]
    assert len(last) == len(examples) * reads.hidden_states, "every example must have the tensors that are read"
    layers = tuple(joined([example.layers[layer] for example in examples]) for layer in reads.layers)
    if not last and not layers:
        return None
    return BatchStates(index=layout.index(), hidden_states=joined(last) if last else None, layers=layers)


def _thin(
    positions: list[Bool[torch.Tensor, " _"]], max_positions: int | None, generator: torch.Generator
) -> list[Bool[torch.Tensor, " _"]]:
    """Keep at most `max_positions` of all texts together, whatever the layout."""
    together = torch.cat(positions)
    chosen = together.nonzero().squeeze(1)
    if max_positions is None or len(chosen) <= max_positions:
        return positions
    kept = chosen[torch.randperm(len(chosen), generator=generator)[:max_positions]]
    thinned = torch.zeros_like(together)
    thinned[kept] = True
    return list(thinned.split([len(text_positions) for text_positions in positions]))
