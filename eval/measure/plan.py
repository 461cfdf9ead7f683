"""The plan of a measurement: its texts in batches, and which method decodes which batch, in which order."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product, zip_longest
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from ...data.chat import encode_prompt
from ...data.conversations import Turn
from ...data.suites import Prompt, PromptSet
from ...models.decoding.loop import generate
from ...models.decoding.protocols import Drafter
from ...models.drafters.merged import MergedDrafter
from ...models.llm.hf_target import HFTarget
from ..config import EvalConfig
from ..records.records import BASELINE, EvalRecord, RecordKey, digest_of
from ..records.run_files import Place
from .timing import Loop


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTurn:
    """A turn of a prompt as the target reads it: earlier turns and their answers included.

    The earlier answers are those of plain decoding at this temperature and batch size.
    """

    suite: PromptSet
    prompt: Prompt
    turn: int
    temperature: float
    batch_size: int
    input_ids: Int[torch.Tensor, "1 seq"]

    def key(self, method: str, *, repeat: int = 0, profiled: bool = False) -> RecordKey:
        """Build the key of a method's answer to this turn."""
        return (self.suite.name, self.prompt.id, self.turn, self.temperature, method, repeat, profiled, self.batch_size)


def first_turn_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Int[torch.Tensor, "1 seq"]:
    """Return the ids of a prompt's first turn, as the target reads it."""
    return encode_prompt(prompt.messages(prompt.turns[0]), tokenizer, prompt.tools)


def require_room(config: EvalConfig, suites: Sequence[PromptSet], tokenizer: Any, context_length: int) -> None:
    """Raise ValueError, before any decoding, if no prompt leaves room for an answer."""
    lengths = (first_turn_ids(prompt, tokenizer).shape[1] for suite in suites for prompt in suite.prompts)
    if not any(length + config.max_new_tokens <= context_length for length in lengths):
        raise ValueError(
            f"no prompt of {', '.join(suite.name for suite in suites)} fits the context window of {context_length} tokens "
            f"together with {config.max_new_tokens} new ones; lower max_new_tokens"
        )


def answer_seed(seed: int, suite: str, prompt_id: str, turn: int) -> int:
    """Compute the seed of an answer.

    The seed is the same for every method, repeat, temperature and batch size. So each lossless
    method must sample exactly the baseline's tokens (see `RowSeeds`). And the difference between two
    temperatures doesn't come from the seed.
    """
    return int(digest_of([seed, suite, prompt_id, turn]), 16)


T = TypeVar("T")


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
        """The drafter's pace; None unless it is merged, and the loop waits."""
        return self.drafter.config.pace if isinstance(self.drafter, MergedDrafter) and self.loop is generate else None


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
class Job:
    """A batch of turns that a method decodes once: the same turn of up to `batch_size` prompts, in the order of the suite."""

    group: int
    """Index of the group of prompts in a pass; all turns of a group have the same."""
    turns: Sequence[PromptTurn]
    method: Method
    repeat: int = 0
    profiled: bool = False

    @property
    def input_ids(self) -> list[Int[torch.Tensor, " _"]]:
        """Token ids of each turn."""
        return [turn.input_ids[0] for turn in self.turns]

    def keys_of(self, repeat: int) -> list[RecordKey]:
        """Build the keys of the answers' records in a repeat."""
        return [turn.key(self.method.name, repeat=repeat, profiled=self.profiled) for turn in self.turns]

    @property
    def place(self) -> str:
        """Description of where it decodes, in messages."""
        turn = self.turns[0]
        return f"{turn.suite.name} (temperature {turn.temperature:g}, batch size {turn.batch_size})"

    def cell_of(self, method: Method) -> dict[str, Any]:
        """Return the fields of `MeasuredCell` for a method that decodes here."""
        turn = self.turns[0]
        return {
            "suite": turn.suite.name,
            "prompt_set_revision": turn.suite.revision,
            "prompt_set_source": turn.suite.source,
            "temperature": turn.temperature,
            "batch_size": turn.batch_size,
            "method": method.name,
            "label": method.label,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of all methods over prompts of a suite, in batches of one size."""

    suite: PromptSet
    prompts: Sequence[Prompt]
    batch_size: int
    repeat: int = 0
    profiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a run measures.

    `methods` are by temperature and batch size, plain decoding first. The baseline's first answer to a
    turn becomes part of the next turn's prompt for every method. So a lossy method can't change its
    own prompts.
    """

    suites: Sequence[PromptSet]
    methods: Mapping[Place, Sequence[Method]]
    config: EvalConfig
    target: HFTarget
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    """Tokens, prompt and answer together, that the target and all drafters can read."""
    records: Mapping[RecordKey, EvalRecord]
    """The records so far: the baseline's answers are read from them."""

    def fitting(self, suite: PromptSet, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts whose first turn leaves room for an answer."""
        for prompt in prompts:
            # The first turn is the same wherever it is read.
            if next(self.prompt_turns(suite, prompt, temperature=0.0, batch_size=1), None) is not None:
                yield prompt

    def groups(self, suite: PromptSet, prompts: Iterable[Prompt], size: int) -> Iterator[list[Prompt]]:
        """Yield groups of `size` prompts that have room for an answer.

        The last group may be smaller.
        """
        fitting = self.fitting(suite, prompts)
        while group := list(islice(fitting, size)):
            yield group

    def batches(self, suite: PromptSet, group: Sequence[Prompt], temperature: float, size: int) -> Iterator[list[PromptTurn]]:
        """Yield a group's first turns, its second turns, and so on.

        A prompt leaves its group when it has no further turn, or no room for one.
        """
        for together in zip_longest(*(self.prompt_turns(suite, prompt, temperature, size) for prompt in group)):
            yield [turn for turn in together if turn is not None]

    def prompt_turns(self, suite: PromptSet, prompt: Prompt, temperature: float, batch_size: int) -> Iterator[PromptTurn]:
        """Yield the turns of a prompt, up to the first one that leaves no room for an answer in the context window.

        The caller must record the baseline's answer to a turn at this temperature and batch size
        before it requests the next turn.
        """
        messages: list[Turn] = []
        for index, text in enumerate(prompt.turns):
            messages += [Turn(role="user", content=text)] if index else prompt.messages(text)
            input_ids = encode_prompt(messages, self.tokenizer, prompt.tools).to(self.target.device)
            if input_ids.shape[1] + self.config.max_new_tokens > self.context_length:
                return
            turn = PromptTurn(
                suite=suite,
                prompt=prompt,
                turn=index,
                temperature=temperature,
                batch_size=batch_size,
                input_ids=input_ids,
            )
            yield turn
            if index + 1 < len(prompt.turns):
                answer = self.records[turn.key(BASELINE)].token_ids
                decoded = str(self.tokenizer.decode(answer, skip_special_tokens=True))
                messages.append(Turn(role="assistant", content=decoded))

    @property
    def passes(self) -> list[Pass]:
        """The passes in their order: the repeats, then the profiles.

        Profiles consist of whole batches only, since a smaller batch takes a different time.
        """
        places, num_profiled = list(product(self.suites, self.config.batch_sizes)), self.config.profile_prompts
        timed = [
            Pass(suite=suite, prompts=suite.prompts, batch_size=size, repeat=repeat)
            for repeat in range(self.config.repeats)
            for suite, size in places
        ]
        profiles = []
        for suite, size in places:
            prompts = evenly_spaced(suite.prompts, math.ceil(num_profiled / size) * size)
            profiles.append(Pass(suite=suite, prompts=prompts, batch_size=size, profiled=True))
        return timed + profiles

    @property
    def num_answers(self) -> int:
        """Number of answers, without those of prompts whose first turn is too long."""
        fitting = {
            (suite.name, prompt.id): len(prompt.turns) for suite in self.suites for prompt in self.fitting(suite, suite.prompts)
        }
        return sum(
            fitting.get((one_pass.suite.name, prompt.id), 0) * len(self.taking_part(one_pass, temperature))
            for one_pass in self.passes
            for prompt in one_pass.prompts
            for temperature in self.config.temperatures
        )

    def taking_part(self, one_pass: Pass, temperature: float) -> list[Method]:
        """List the methods of a pass: only phases can be profiled."""
        methods = self.methods[temperature, one_pass.batch_size]
        return [method for method in methods if method.has_phases or not one_pass.profiled]

    def jobs(self, fits: Callable[[Job], bool]) -> Iterator[Job]:
        """Yield every batch at every temperature with every method, interleaved.

        The first method changes from group to group, in rotation. A second turn needs the baseline's
        answer to the first: the caller must record each answer before it goes on. `fits` tells
        whether the method still fits into memory there; where plain decoding doesn't, no method
        decodes.
        """
        for one_pass in self.passes:
            suite, size = one_pass.suite, one_pass.batch_size
            for index, group in enumerate(self.groups(suite, one_pass.prompts, size)):
                for temperature in self.config.temperatures:
                    methods = self.taking_part(one_pass, temperature)
                    first = (index + one_pass.repeat) % len(methods)
                    for turns in self.batches(suite, group, temperature, size):
                        repeat, profiled = one_pass.repeat, one_pass.profiled
                        plain = Job(group=index, turns=turns, method=methods[0], repeat=repeat, profiled=profiled)
                        for method in (*methods[first:], *methods[:first]):
                            if fits(job := replace(plain, method=method)):
                                yield job
                        if not fits(plain):
                            break


def evenly_spaced(items: Sequence[T], num: int) -> list[T]:
    """Select up to `num` items, evenly spaced, so that all categories are represented."""
    num = min(num, len(items))
    return [items[index * len(items) // num] for index in range(num)]
