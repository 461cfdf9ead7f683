"""A batch of prompts of different lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch.nn.utils.rnn import pad_sequence


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
        """Build a batch from a tensor of equally long rows, or a sequence of vectors of any
        lengths."""
        if isinstance(prompts, torch.Tensor):
            return cls(input_ids=prompts, lengths=(prompts.shape[1],) * len(prompts))
        if not prompts:
            raise ValueError("there is no prompt to decode; give at least one")
        return cls(input_ids=pad_sequence(list(prompts), batch_first=True), lengths=tuple(len(prompt) for prompt in prompts))

    def last(self, values: Shaped[torch.Tensor, "batch seq *rest"]) -> Shaped[torch.Tensor, "batch *rest"]:
        """Return the values (ids, hidden states) at each row's last real token."""
        row = torch.arange(len(self.lengths), device=values.device)
        return values[row, torch.tensor(self.lengths, device=values.device) - 1]
