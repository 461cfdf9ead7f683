"""Parts of a measurement: methods, and the turns of prompts that each method answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int

from ...data.chat import encode_prompt
from ...data.suites import Prompt, PromptSet
from ...data.types import Turn
from ...models.decoding.loop import generate
from ...models.decoding.protocols import Drafter
from ...models.drafters.draft_model import DraftModel
from ...models.drafters.merged import MergedDrafter
from ..config import EvalConfig
from ..records.records import RecordKey, digest_of
from .timing import Loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A drafter in one setting.

    The baseline's drafter proposes nothing.
    """

    name: str
    label: str
    """The name for readers (`EvalRecord.label`)."""
    drafter: Drafter[Any, Any]
    loop: Loop = generate
    """The decode loop: the pipelined one, or the one that waits for the target."""

    @property
    def has_phases(self) -> bool:
        """Whether drafting, verifying and accepting take turns, so that each can be timed."""
        return self.loop is generate

    @property
    def sources(self) -> tuple[str, ...]:
        """The drafter's sources; empty unless it is merged, and in a pipelined loop."""
        return tuple(self.drafter.sources) if isinstance(self.drafter, MergedDrafter) and self.loop is generate else ()

    @property
    def pace(self) -> str | None:
        """The drafter's pace; None unless it is merged or grows one tree, and the loop waits."""
        if self.loop is not generate:
            return None
        if isinstance(self.drafter, MergedDrafter):
            return self.drafter.config.pace
        config = self.drafter.config if isinstance(self.drafter, DraftModel) else None
        return config.pace if config is not None and config.pace != "fixed" else None


def count_by_source(origins: Mapping[int, int], sources: Sequence[str], num_accepted: int) -> dict[str, int] | None:
    """Count accepted draft tokens by source, or by the sources that proposed the token together.

    The names of several sources are joined by "+". A source whose drafts were never accepted alone
    counts 0. Returns None for a drafter that isn't merged. All drafts of a merge of one source are
    that source's.
    """
    if not sources:
        return None
    if len(sources) == 1:
        return {sources[0]: num_accepted}
    counts = {1 << bit: 0 for bit in range(len(sources))} | dict(sorted(origins.items()))
    return {"+".join(name for bit, name in enumerate(sources) if origin >> bit & 1): count for origin, count in counts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTurn:
    """A turn of a prompt as the target reads it: earlier turns and their answers included.

    The earlier answers are those of plain decoding at this temperature and batch size. `input_ids`
    is None where this turn or an earlier one leaves no room for an answer in the context window.
    """

    suite: PromptSet
    prompt: Prompt
    turn: int
    temperature: float
    batch_size: int
    input_ids: Int[torch.Tensor, "1 seq"] | None

    def key(self, method: str, *, repeat: int = 0, profiled: bool = False) -> RecordKey:
        """Build the key of a method's answer to this turn."""
        return (self.suite.name, self.prompt.id, self.turn, self.temperature, method, repeat, profiled, self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBatch:
    """A batch of turns that are decoded together, in the order of the suite.

    It holds the same turn of up to `batch_size` prompts. `index` counts the groups of prompts of a
    pass; all turns of a group have the same index. A prompt leaves its group when it has no further
    turn, or no room for one.
    """

    index: int
    turns: Sequence[PromptTurn]
    input_ids: Sequence[Int[torch.Tensor, " _"]]


def has_room(num_tokens: int, suite: PromptSet, prompt: Prompt, config: EvalConfig, context_length: int) -> bool:
    """Return whether a prompt of `num_tokens` leaves room for an answer in the context window.

    Raises ValueError if it doesn't and `config.too_long` is "error".
    """
    fits = num_tokens + config.max_new_tokens <= context_length
    if not fits and config.too_long == "error":
        raise ValueError(
            f"prompt {prompt.id!r} of {suite.name} leaves no room: {num_tokens} tokens and {config.max_new_tokens} new ones "
            f"exceed the context window of {context_length} tokens; lower max_new_tokens, or set too_long to skip"
        )
    return fits


def require_room(config: EvalConfig, suites: Sequence[PromptSet], tokenizer: Any, context_length: int) -> None:
    """Raise ValueError, before any decoding, if no prompt leaves room for an answer."""
    fitting = []
    for suite in suites:
        for prompt in suite.prompts:
            num_tokens = encode_prompt([Turn(role="user", content=prompt.turns[0])], tokenizer).shape[1]
            fitting.append(has_room(num_tokens, suite, prompt, config, context_length))
    if not any(fitting):
        raise no_prompt_fits(suites, config.max_new_tokens, context_length)


def no_prompt_fits(suites: Sequence[PromptSet], max_new_tokens: int, context_length: int) -> ValueError:
    """Return the error for an evaluation that would measure nothing."""
    return ValueError(
        f"no prompt of {', '.join(suite.name for suite in suites)} fits the context window of {context_length} tokens together "
        f"with {max_new_tokens} new ones; lower max_new_tokens"
    )


def answer_seed(seed: int, suite: str, prompt_id: str, turn: int) -> int:
    """Compute the seed of an answer.

    The seed is the same for every method, repeat, temperature and batch size. So a method whose
    trees depend only on the text must sample exactly the baseline's tokens (see `RowSeeds`). And
    the difference between two temperatures doesn't come from the seed.
    """
    return int(digest_of([seed, suite, prompt_id, turn]), 16)
