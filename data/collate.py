"""Distilled examples to batches."""

import math

import torch
from jaxtyping import Bool, Int

from .choices import LABELS
from .packing import packed, padded
from .types import TOKENS_ONLY, UNKNOWN, DistilledExample, DrafterBatch, TargetReads


def text_continuations(
    input_ids: Int[torch.Tensor, " seq"], loss_mask: Bool[torch.Tensor, " seq"], horizon: int
) -> Int[torch.Tensor, "seq horizon"]:
    """The text's own next tokens after each position, in place of the target's: ground-truth labels.

    Entry [i, d] is token i + 1 + d where the tokens i + 1 .. i + 1 + d are all the assistant's, else UNKNOWN: a label never
    reaches past the end of the turn.

    Example: ids [5, 6, 7, 8], mask [0, 0, 1, 1], horizon 2 -> [[-1, -1], [7, 8], [8, -1], [-1, -1]].
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
    pad_id: int,
    reads: TargetReads = TOKENS_ONLY,
    packing: bool = False,
) -> DrafterBatch:
    """Put examples into one batch and choose the positions to train on.

    Each has a row of its own, right-padded; with `packing`, rows hold several, one behind the other.

    `labels` is `distilled` (the target's continuations) or `text` (the text's own). The positions are the same at both: those
    that have a distilled label. Of more than `max_positions` in the batch, `generator` (on the CPU) draws that many.
    Past the end of a text stand `pad_id`, UNKNOWN, zeros, and log-probabilities of minus infinity. What of the target is in the
    batch say the `reads`: every example has it.
    """
    assert labels in LABELS, labels
    texts = [example.example for example in examples]
    layout = (packed if packing else padded)([len(text.input_ids) for text in texts])
    positions = [text.wanted & (each.continuations[:, 0] != UNKNOWN) for text, each in zip(texts, examples, strict=True)]
    if labels == "distilled":
        continuations = [example.continuations for example in examples]
    else:
        horizon = examples[0].continuations.shape[1]
        continuations = [text_continuations(text.input_ids, text.loss_mask, horizon) for text in texts]
    hidden_states = [example.hidden_states for example in examples if reads.hidden_states and example.hidden_states is not None]
    tops = [example.top for example in examples if reads.top and example.top is not None]
    assert len(hidden_states) == len(examples) * reads.hidden_states, "every example of a batch has what is read of it"
    assert len(tops) == len(examples) * reads.top, "every example of a batch has what is read of it"
    layers = [torch.cat([example.layers[layer].decode() for layer in reads.layers], 1) for example in examples if reads.layers]
    return DrafterBatch(
        input_ids=layout.place([text.input_ids.long() for text in texts], pad_id),
        attention_mask=layout.place([torch.ones_like(text.loss_mask) for text in texts], False),
        positions=layout.place(_thin(positions, max_positions, generator), False),
        continuations=layout.place([continuation.long() for continuation in continuations], UNKNOWN),
        hidden_states=layout.place([states.decode() for states in hidden_states], 0.0) if hidden_states else None,
        features=layout.place(layers, 0.0) if layers else None,
        top_tokens=layout.place([top.tokens for top in tops], UNKNOWN) if tops else None,
        top_log_probs=layout.place([top.log_probs for top in tops], -math.inf) if tops else None,
        starts=layout.starts() if packing else None,
    )


def _thin(
    positions: list[Bool[torch.Tensor, " _"]], max_positions: int | None, generator: torch.Generator
) -> list[Bool[torch.Tensor, " _"]]:
    """Of all texts together at most `max_positions`, the same ones wherever the texts lie."""
    together = torch.cat(positions)
    chosen = together.nonzero().squeeze(1)
    if max_positions is None or len(chosen) <= max_positions:
        return positions
    kept = chosen[torch.randperm(len(chosen), generator=generator)[:max_positions]]
    thinned = torch.zeros_like(together)
    thinned[kept] = True
    return list(thinned.split([len(each) for each in positions]))
