"""Texts of a measurement: the turns of prompts, in batches, each with the baseline's earlier answers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import torch
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from ...data.chat import encode_prompt
from ...data.conversations import Turn
from ...data.suites import Prompt, PromptSet
from ..config import EvalConfig
from ..records.records import BASELINE, EvalRecord, RecordKey, digest_of


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


def require_room(config: EvalConfig, suites: Sequence[PromptSet], tokenizer: Any, context_length: int) -> None:
    """Raise ValueError, before any decoding, if no prompt leaves room for an answer."""
    lengths = (
        encode_prompt(prompt.messages(prompt.turns[0]), tokenizer, prompt.tools).shape[1]
        for suite in suites
        for prompt in suite.prompts
    )
    if not any(length + config.max_new_tokens <= context_length for length in lengths):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Texts that all methods of a run answer.

    The baseline's first answer to a turn becomes part of the next turn's prompt for every method.
    So a lossy method can't change its own prompts.
    """

    tokenizer: PreTrainedTokenizerBase
    config: EvalConfig
    device: torch.device
    context_length: int
    """Tokens, prompt and answer together, that the target and all drafters can read."""
    records: Mapping[RecordKey, EvalRecord]
    """The records so far: the baseline's answers are read from them."""

    def fitting(self, suite: PromptSet, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts whose first turn leaves room for an answer."""
        for prompt in prompts:
            first = next(self.prompt_turns(suite, prompt, temperature=0.0, batch_size=1))  # the same wherever it is read
            if first.input_ids is not None:
                yield prompt

    def groups(self, suite: PromptSet, prompts: Iterable[Prompt], size: int) -> Iterator[list[Prompt]]:
        """Yield groups of `size` prompts that have room for an answer.

        The last group may be smaller.
        """
        fitting = self.fitting(suite, prompts)
        while group := list(islice(fitting, size)):
            yield group

    def batches(
        self, suite: PromptSet, group: Sequence[Prompt], index: int, temperature: float, size: int
    ) -> Iterator[TurnBatch]:
        """Yield a group's first turns, its second turns, and so on."""
        rows = [self.prompt_turns(suite, prompt, temperature, size) for prompt in group]
        for together in zip_longest(*rows):
            remaining = [(turn, turn.input_ids[0]) for turn in together if turn is not None and turn.input_ids is not None]
            if remaining:
                turns, input_ids = zip(*remaining, strict=True)
                yield TurnBatch(index=index, turns=turns, input_ids=input_ids)

    def prompt_turns(self, suite: PromptSet, prompt: Prompt, temperature: float, batch_size: int) -> Iterator[PromptTurn]:
        """Yield the turns of a prompt.

        The caller must record the baseline's answer to a turn at this temperature and batch size
        before it requests the next turn.
        """
        messages: list[Turn] = []
        fits = True
        for index, text in enumerate(prompt.turns):
            messages += [Turn(role="user", content=text)] if index else prompt.messages(text)
            input_ids = encode_prompt(messages, self.tokenizer, prompt.tools).to(self.device) if fits else None
            fits = input_ids is not None and input_ids.shape[1] + self.config.max_new_tokens <= self.context_length
            turn = PromptTurn(
                suite=suite,
                prompt=prompt,
                turn=index,
                temperature=temperature,
                batch_size=batch_size,
                input_ids=input_ids if fits else None,
            )
            yield turn
            if fits and index + 1 < len(prompt.turns):
                answer = self.records[turn.key(BASELINE)].token_ids
                messages.append(Turn(role="assistant", content=self._text(answer)))

    def _text(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)  # one answer, not a batch of them
        return text
