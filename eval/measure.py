"""Timing of plain decoding and of drafters, interleaved, through the same loop."""

import hashlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.chat import encode_prompt
from ..data.prompts import Prompt, PromptSet
from ..data.types import Turn
from ..models.decoding.loop import generate
from ..models.decoding.sampling import RowSeeds
from ..models.decoding.tree import tree_tokens
from ..models.decoding.types import PhaseSeconds, Step
from ..models.hf_target import HFTarget
from ..models.interfaces import AcceptanceRule, Drafter, Target
from .config import EvalConfig
from .environment import Environment, differences, digest_of
from .records import BASELINE, EvalRecord, RecordFile, TreeTokens

WARMUP_NEW_TOKENS = 32

T = TypeVar("T")

Pass = tuple[PromptSet, Sequence[Prompt], int, bool]
"""Suite, those of its prompts to answer, repeat, profiled: every method goes through them once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to decode: a drafter in one setting. The baseline's drafter proposes nothing."""

    name: str
    drafter: Drafter[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The steps of one run of the decode loop, and the seconds until the first token and from there to the last."""

    steps: list[Step]
    prefill_seconds: float
    decode_seconds: float

    @property
    def token_ids(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens[0]]

    @property
    def accepted_histogram(self) -> list[int]:
        """Entry k counts the verify steps that accepted k draft tokens."""
        accepted = [step.num_accepted[0] for step in self.steps if not step.is_prefill]
        return [accepted.count(length) for length in range(max(accepted, default=-1) + 1)]

    @property
    def phase_seconds(self) -> PhaseSeconds:
        """Summed over the verify steps; these must have been timed."""
        phases = [step.seconds for step in self.steps if step.seconds is not None]
        assert len(phases) == sum(not step.is_prefill for step in self.steps)
        return PhaseSeconds(
            draft=sum(phase.draft for phase in phases),
            verify=sum(phase.verify for phase in phases),
            accept=sum(phase.accept for phase in phases),
        )

    @property
    def tree_tokens(self) -> TreeTokens:
        """Of each verify step; these must have been timed."""
        counts = [tree_tokens(*step.links) for step in self.steps if step.links is not None]
        return TreeTokens(shared=[int(shared[0]) for shared, _ in counts], separate=[int(paths[0]) for _, paths in counts])


def time_generation(
    target: Target,
    drafter: Drafter[Any],
    rule: AcceptanceRule,
    prompt: Int[torch.Tensor, "1 seq"],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    seed: int = 0,
    timed: bool = False,
) -> Generation:
    """Decode one prompt and take its wall time. What a rule leaves to chance is decided by `seed`.

    `timed` takes the phases too, which slows an accelerator down.
    """
    _synchronize(prompt.device)
    start = time.perf_counter()
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, "timed": timed}
    stream = generate(target, drafter, rule, prompt, generator=RowSeeds([seed]), **options)
    first_step = next(stream)  # its token has been read by the host, so an accelerator has finished
    first_token = time.perf_counter()
    steps = [first_step, *stream]
    _synchronize(prompt.device)
    end = time.perf_counter()
    return Generation(steps=steps, prefill_seconds=first_token - start, decode_seconds=end - first_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTurn:
    """A turn of a prompt as the target reads it, earlier turns and their answers at the temperature included.

    `input_ids` is None where it, or an earlier turn, leaves no room for an answer in the target's context window.
    """

    suite: PromptSet
    prompt: Prompt
    turn: int
    temperature: float
    input_ids: Int[torch.Tensor, "1 seq"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What stays the same while a run measures, and the file that its records go to.

    `rules` by temperature. `methods` includes the baseline, whose first answer to a turn at a temperature is part of the next
    turn's prompt for every method there: so a lossy method can't change what it is asked.
    """

    target: HFTarget
    tokenizer: PreTrainedTokenizerBase
    rules: Mapping[float, AcceptanceRule]
    methods: Sequence[Method]
    config: EvalConfig
    context_length: int
    """Tokens, prompt and answer together, that the target and all drafters can read."""
    file: RecordFile
    config_digest: str
    environment: Environment
    recorded_environment: Environment
    """Where the run was begun; new records are made nowhere else."""

    def measure(self, suites: Sequence[PromptSet]) -> Counter[tuple[str, float]]:
        """Measure whatever the records lack; returns, by suite and temperature, how many turns were skipped as too long."""
        passes: list[Pass] = [
            (suite, suite.prompts, repeat, False) for repeat in range(self.config.repeats) for suite in suites
        ]
        passes += [(suite, evenly_spaced(suite.prompts, self.config.profile_prompts), 0, True) for suite in suites]
        num_turns = sum(len(prompt.turns) for _, prompts, _, _ in passes for prompt in prompts)
        skipped: set[tuple[str, str, int, float]] = set()
        warm = False
        with tqdm(total=num_turns * len(self.rules) * len(self.methods), desc="eval", unit="answer") as progress:
            for turn, method, repeat, profiled in self._plan(passes):
                place = (turn.suite.name, turn.prompt.id, turn.turn, turn.temperature)
                if turn.input_ids is None:
                    skipped.add(place)
                elif (*place, method.name, repeat, profiled) not in self.file.records:
                    warm = warm or self._prepare(turn.suite)
                    self.file.append(self._record(turn, turn.input_ids, method, repeat, profiled))
                progress.update()
        return Counter((suite, temperature) for suite, _, _, temperature in skipped)

    def _plan(self, passes: Iterable[Pass]) -> Iterator[tuple[PromptTurn, Method, int, bool]]:
        """Every turn at every temperature with every method, interleaved; the order of the methods moves on by one from prompt
        to prompt.

        Lazy: a second turn is built when the baseline has answered the first.
        """
        for suite, prompts, repeat, profiled in passes:
            for index, prompt in enumerate(prompts):
                first = (index + repeat) % len(self.methods)
                turns = (turn for temperature in self.rules for turn in self.prompt_turns(suite, prompt, temperature))
                for turn in turns:
                    for method in (*self.methods[first:], *self.methods[:first]):
                        yield turn, method, repeat, profiled

    def prompt_turns(self, suite: PromptSet, prompt: Prompt, temperature: float) -> Iterator[PromptTurn]:
        """The turns of a prompt. The baseline must have answered one at this temperature before the next is asked for."""
        messages: list[Turn] = []
        fits = True
        for index, text in enumerate(prompt.turns):
            messages.append(Turn(role="user", content=text))
            input_ids = encode_prompt(messages, self.tokenizer).to(self.target.device) if fits else None
            fits = input_ids is not None and self._has_room(input_ids, suite, prompt)
            input_ids = input_ids if fits else None
            yield PromptTurn(suite=suite, prompt=prompt, turn=index, temperature=temperature, input_ids=input_ids)
            if fits and index + 1 < len(prompt.turns):
                answer = self.file.records[(suite.name, prompt.id, index, temperature, BASELINE, 0, False)].token_ids
                messages.append(Turn(role="assistant", content=self._text(answer)))

    def _text(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)  # one answer, not a batch of them
        return text

    def _has_room(self, input_ids: Int[torch.Tensor, "1 seq"], suite: PromptSet, prompt: Prompt) -> bool:
        num_tokens = input_ids.shape[1] + self.config.max_new_tokens
        fits = num_tokens <= self.context_length
        if not fits and self.config.too_long == "error":
            raise ValueError(
                f"prompt {prompt.id!r} of {suite.name} leaves no room: {input_ids.shape[1]} tokens and "
                f"{self.config.max_new_tokens} new ones exceed the context window of "
                f"{self.context_length} tokens; lower max_new_tokens, or set too_long to skip"
            )
        return fits

    def _prepare(self, suite: PromptSet) -> bool:
        """Before the first measurement: check the place, and let every method answer the first prompts.

        So no measurement pays for first-use costs. Returns True.
        """
        if changes := differences(asdict(self.recorded_environment), asdict(self.environment)):
            raise ValueError(
                f"{self.file.path} was begun in another environment, which differs in {'; '.join(changes)}. Times of both "
                "can't be compared: finish the run where it was begun, or give another output directory"
            )
        num_tokens = min(self.config.max_new_tokens, WARMUP_NEW_TOKENS)
        for temperature in self.rules:
            first_turns = (next(self.prompt_turns(suite, prompt, temperature)) for prompt in suite.prompts)
            fitting = ((turn, turn.input_ids) for turn in first_turns if turn.input_ids is not None)
            for turn, input_ids in islice(fitting, self.config.warmup_prompts):
                for method in self.methods:
                    self._time(turn, input_ids, method, num_tokens)
        return True

    def _time(
        self,
        turn: PromptTurn,
        input_ids: Int[torch.Tensor, "1 seq"],
        method: Method,
        max_new_tokens: int,
        timed: bool = False,
    ) -> Generation:
        return time_generation(
            self.target,
            method.drafter,
            self.rules[turn.temperature],
            input_ids,
            max_new_tokens=max_new_tokens,
            stop_ids=self.target.stop_ids,
            seed=answer_seed(self.config.seed, turn.suite.name, turn.prompt.id, turn.turn),
            timed=timed,
        )

    def _record(
        self, turn: PromptTurn, input_ids: Int[torch.Tensor, "1 seq"], method: Method, repeat: int, profiled: bool
    ) -> EvalRecord:
        generation = self._time(turn, input_ids, method, self.config.max_new_tokens, timed=profiled)
        token_ids = generation.token_ids
        return EvalRecord(
            suite=turn.suite.name,
            prompt_set_revision=turn.suite.revision,
            prompt_id=turn.prompt.id,
            category=turn.prompt.category,
            turn=turn.turn,
            temperature=turn.temperature,
            method=method.name,
            repeat=repeat,
            profiled=profiled,
            context_from=BASELINE if turn.turn else None,
            prompt_sha256=hashlib.sha256(str(input_ids[0].tolist()).encode()).hexdigest(),
            num_prompt_tokens=input_ids.shape[1],
            token_ids=token_ids,
            accepted_histogram=generation.accepted_histogram,
            num_verify_tokens=len(token_ids) - 1,
            num_draft_tokens=sum(step.num_nodes for step in generation.steps),
            drawn=any(step.drawn for step in generation.steps),
            # Where nothing is drafted, every rule draws from the target's distribution.
            lossless_rule=method.name == BASELINE or self.rules[turn.temperature].lossless,
            truncated=token_ids[-1] not in self.target.stop_ids,
            prefill_seconds=generation.prefill_seconds,
            decode_seconds=generation.decode_seconds,
            phase_seconds=generation.phase_seconds if profiled else None,
            environment_digest=self.environment.digest,
            config_digest=self.config_digest,
            seed=self.config.seed,
            tree_tokens=generation.tree_tokens if profiled else None,
        )


def answer_seed(seed: int, suite: str, prompt_id: str, turn: int) -> int:
    """The seed of an answer: the same for every method, repeat and temperature.

    So methods whose trees are functions of the text must sample the very tokens of the baseline (see `RowSeeds`), and
    temperatures differ by what they do, not by luck.
    """
    return int(digest_of([seed, suite, prompt_id, turn]), 16)


def evenly_spaced(items: Sequence[T], num: int) -> list[T]:
    """Up to `num` of the items, spread over all of them, so that every category has a chance."""
    num = min(num, len(items))
    return [items[index * len(items) // num] for index in range(num)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
