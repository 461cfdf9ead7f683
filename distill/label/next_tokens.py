"""The target's next token after hidden states: the likeliest, or a sample by the random number of its place in the text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from transformers import PreTrainedModel

from ...data.device import to_device
from ...models.decoding.sampling import Sampling, warp

# Logits held at a time: the head's output [chunk, vocab] has about this many elements. An accelerator reads all of the head's
# weights for each chunk, so its chunks are larger.
LOGIT_ELEMENTS, ACCELERATOR_LOGIT_ELEMENTS = 2**23, 2**27


class TopK(NamedTuple):
    """The likeliest tokens of some positions, in order."""

    log_probs: Float[torch.Tensor, "position top"]
    tokens: Int[torch.Tensor, "position top"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLabels:
    """How continuations are sampled; the tokens don't depend on batch, order or device.

    The uniform number `uniforms[b, j]` chooses token j of text b, in every continuation that
    reaches it: the first token whose cumulated probability exceeds it.
    """

    temperature: float
    uniforms: Float[torch.Tensor, "batch column"]

    @classmethod
    def of(
        cls, ids: Sequence[str], num_columns: int, *, temperature: float, seed: int, device: torch.device
    ) -> "SampledLabels":
        """Draw the numbers of these texts; they depend on the seed, a text's id, and the column."""
        sources = [Random(f"labels/{seed}/{id}") for id in ids]
        uniforms = [[source.random() for _ in range(num_columns)] for source in sources]
        return cls(temperature=temperature, uniforms=to_device(torch.tensor(uniforms, dtype=torch.float64), device))

    def choose(
        self, logits: Float[torch.Tensor, "position vocab"], uniforms: Float[torch.Tensor, " position"]
    ) -> Int[torch.Tensor, " position"]:
        """Return the tokens that these numbers choose."""
        # In float32 the sum over a large vocabulary would be off by more than a rare token's probability.
        cumulated = warp(logits, Sampling(temperature=self.temperature)).double().cumsum(-1)
        chosen = torch.searchsorted(cumulated, uniforms[:, None] * cumulated[:, -1:], right=True)[:, 0]
        return chosen.clamp(max=logits.shape[-1] - 1)


def next_tokens(
    model: PreTrainedModel,
    hidden_states: Float[torch.Tensor, "position hidden"],
    rows: Int[torch.Tensor, " position"],
    columns: Int[torch.Tensor, " position"],
    sampled: SampledLabels | None,
    *,
    top_k: int | None = None,
) -> tuple[Int[torch.Tensor, " position"], TopK | None]:
    """Choose the tokens at `columns` of the texts `rows`, given the hidden states before them.

    Also returns the `top_k` likeliest tokens. They and samples need a plain head (`HFTarget.require_plain_head`).
    """
    chosen, top, first = [], [], 0
    for logits in logit_chunks(model, hidden_states):
        if sampled is None:
            chosen.append(likeliest(logits))
        else:
            taken = slice(first, first := first + len(logits))
            chosen.append(sampled.choose(logits, sampled.uniforms[rows[taken], columns[taken]]))
        if top_k is not None:
            top.append(logits.float().log_softmax(-1).topk(top_k))
    return torch.cat(chosen), TopK(*map(torch.cat, zip(*top, strict=True))) if top else None


def greedy(model: PreTrainedModel, hidden_states: Float[torch.Tensor, "position hidden"]) -> Int[torch.Tensor, " position"]:
    """Return the most probable next token of each position, in chunks to save memory: [position, vocab] never exists.

    Some models scale or soft-cap their logits; both are monotonic, so the arg-max doesn't change.
    """
    return torch.cat([likeliest(logits) for logits in logit_chunks(model, hidden_states)])


def likeliest(logits: Float[torch.Tensor, "position vocab"]) -> Int[torch.Tensor, " position"]:
    """Return the arg-max. On a CPU `max` takes a quarter of the time of `argmax`."""
    return logits.max(-1).indices


def logit_chunks(
    model: PreTrainedModel, hidden_states: Float[torch.Tensor, "position hidden"]
) -> Iterator[Float[torch.Tensor, "chunk vocab"]]:
    """Yield the head's output, a chunk of positions at a time."""
    head = model.get_output_embeddings()
    elements = LOGIT_ELEMENTS if hidden_states.is_cpu else ACCELERATOR_LOGIT_ELEMENTS
    chunk = max(1, elements // model.config.get_text_config().vocab_size)
    return (head(states) for states in hidden_states.split(chunk))
