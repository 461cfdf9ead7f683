"""What answers prompts with the target: the seam between regeneration and whatever runs the model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt that the target is to answer, once."""

    id: str
    prompt_ids: Int[torch.Tensor, " seq"]
    seed: int
    """Of this answer's draws, where it is sampled: they depend on nothing else."""
    num_known_tokens: int | None = None
    """Length of another answer to the same prompt, the data's own, say: it tells more of how long the target's will be than
    the prompt does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The target's answer to the request of the same id."""

    id: str
    tokens: Int[torch.Tensor, " answer"]
    """The stop token, where it stopped, is the last; empty only where it was cut before it said anything."""
    cut: bool
    """Whether the length limit ended it, and not the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long an answer may get."""

    max_new_tokens: int
    max_tokens: int
    """Prompt and answer together: of the context window, and of an example."""

    def room(self, num_prompt_tokens: int) -> int:
        """Tokens that the answer to such a prompt may have; below 1 the prompt can't be answered."""
        return min(self.max_new_tokens, self.max_tokens - num_prompt_tokens)


@runtime_checkable
class Engine(Protocol):
    """Runs the target. Sampling, the stop tokens and the length limit are its own, given when it is made."""

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """An answer to every request, in whatever order they come to an end.

        Where the engine is deterministic, the same requests get the same answers, whatever was asked before.
        """
