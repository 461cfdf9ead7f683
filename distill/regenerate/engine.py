"""The protocol of engines: they answer prompts with the target."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt that the target answers once."""

    id: str
    prompt_ids: Int[torch.Tensor, " seq"]
    seed: int
    """Seed of this answer's samples; they depend on nothing else."""
    num_known_tokens: int | None = None
    """Tokens of another answer to this prompt, such as the data's. It predicts the length of the
    target's answer better than the prompt does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The target's answer to the request of the same id."""

    id: str
    tokens: Int[torch.Tensor, " answer"]
    """The last token is the stop token, if the target stopped. Empty only if it was cut before the
    first token."""
    cut: bool
    """Whether the length limit ended it, not the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an answer's length."""

    max_new_tokens: int
    max_tokens: int
    """Most tokens of prompt and answer together: of the context window, and of an example."""

    def room(self, num_prompt_tokens: int) -> int:
        """Return the most tokens of an answer to such a prompt; below 1 it can't be answered."""
        return min(self.max_new_tokens, self.max_tokens - num_prompt_tokens)


@runtime_checkable
class Engine(Protocol):
    """Runs the target. Sampling, stop tokens and length limits are set in its constructor."""

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Yield an answer to every request, in the order in which they end.

        If the engine is deterministic, equal requests get equal answers, whatever it answered
        before.
        """
