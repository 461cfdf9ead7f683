"""Answers of `outrider chat`: decoded and streamed, with counts of where each token came from."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..data.chat import encode_prompt
from ..data.conversations import Turn
from ..eval.measure.methods import acceptance_rule, proposer
from ..models.decoding import generate
from ..models.decoding.protocols import AcceptanceRule, Drafter
from ..models.decoding.sampling import RowSeeds
from ..models.decoding.types import Step
from ..models.drafters import NullDrafter, load_drafter
from ..models.drafters.merged import MergedDrafter
from ..models.drafters.saved.loading import common_context_length, trained_parts
from ..models.drafters.saved.parts import DrafterParts
from ..models.llm.hf_target import HFTarget

TARGET = 0
"""Source of the target's own tokens. Bit i of another source is set if the drafter's source i proposed the token."""
WARMUP_TOKENS = 8
Write = Callable[[str, int], None]
"""A function that shows a piece of an answer's text, and takes the source of its last token."""


@dataclass(kw_only=True)
class Answer:
    """An answer, as far as it is decoded."""

    prompt: Int[torch.Tensor, " seq"]
    seed: int
    token_ids: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    """The source of each token."""
    num_steps: int = 0
    """Steps after the prefill."""
    seconds: float = 0.0
    """Seconds of these steps, without the time that showing the text takes."""
    is_stopped: bool = False
    """Whether Ctrl-C ended it."""

    @property
    def tokens_per_second(self) -> float:
        """Speed after the prefill, which yields the first token; 0 for an answer without further tokens."""
        return (len(self.token_ids) - 1) / self.seconds if self.num_steps else 0.0


@dataclass(kw_only=True)
class ChatModel:
    """A target and a drafter that answer conversations, one at a time."""

    target: HFTarget
    drafter: Drafter[Any, Any]
    sources: Sequence[str]
    """Names of the drafter's sources."""
    rule: AcceptanceRule
    context: int
    """Most tokens of a prompt and its answer."""
    max_new_tokens: int
    seed: int

    @classmethod
    def load(
        cls, target: HFTarget, parts: DrafterParts | None, settings: Mapping[str, Any], *, temperature: float, **limits: int
    ) -> "ChatModel":
        """Load the drafter beside a target. `limits` are the other options of answers."""
        rule = acceptance_rule("exact", temperature, target)
        loaded = [] if parts is None else [load_drafter(parts, target, **settings)]
        target.choose_linears(*(part for drafter in loaded for part in trained_parts(drafter)))
        drafter = proposer(loaded[0], target) if loaded else NullDrafter()
        sources = [] if parts is None else [parts.kind]
        if loaded and isinstance(loaded[0], MergedDrafter):
            sources = list(loaded[0].sources)
        context = common_context_length(target, *loaded)
        if target.budget_tokens is not None:
            context = min(context, target.budget_tokens - 1 - drafter.max_nodes)
        return cls(target=target, drafter=drafter, sources=sources, rule=rule, context=context, **limits)

    def warm_up(self, turns: Sequence[Turn]) -> None:
        """Decode a few tokens with the drafter and without, so that the first answer is as fast as others."""
        for drafter in (self.drafter, NullDrafter()) if self.target.stream is None else ():  # a stream would read all weights
            self.decode(Answer(prompt=self.prompt(turns), seed=0), drafter, max_new_tokens=WARMUP_TOKENS)

    def prompt(self, turns: Sequence[Turn]) -> Int[torch.Tensor, " seq"]:
        """Return the ids of a conversation. Raises ValueError if the template rejects it, or without room for an answer."""
        prompt = encode_prompt(turns, self.target.tokenizer)[0]
        if len(prompt) >= self.context:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, and the model reads at most {self.context}, its answer included; "
                "type /new to forget the history, or ask something shorter"
            )
        return prompt.to(self.target.device)

    def answer(self, turns: Sequence[Turn], write: Write, *, stops: bool) -> tuple[Answer, str]:
        """Answer a conversation; return the answer and its text. With `stops`, Ctrl-C only ends the answer."""
        answer = Answer(prompt=self.prompt(turns), seed=self.seed + len(turns))
        most = min(self.max_new_tokens, self.context - len(answer.prompt))
        stream, shown = TextStream(self.target.tokenizer.backend_tokenizer), ""

        def show(token: int, source: int) -> None:
            nonlocal shown
            if piece := stream.add(token):
                shown += piece
                write(piece, source)

        self.decode(answer, self.drafter, max_new_tokens=most, show=show, stops=stops)
        # A character whose last bytes are missing is shown at the end.
        text = str(self.target.tokenizer.decode(answer.token_ids, skip_special_tokens=True))
        if rest := text.removeprefix(shown) if text.startswith(shown) else "":
            write(rest, answer.sources[-1])
        return answer, text

    def decode(
        self,
        answer: Answer,
        drafter: Drafter[Any, Any],
        *,
        max_new_tokens: int,
        show: Callable[[int, int], None] = lambda token, source: None,
        stops: bool = False,
    ) -> Answer:
        """Decode an answer step by step, and show its tokens with their sources."""
        limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": self.target.stop_ids}
        steps = generate(self.target, drafter, self.rule, [answer.prompt], generator=RowSeeds([answer.seed]), **limits)
        with stopped_by_ctrl_c(stops) as pressed:
            while not pressed:
                start = time.perf_counter()
                if (step := next(steps, None)) is None:
                    break
                if not step.is_prefill:
                    answer.seconds += time.perf_counter() - start
                    answer.num_steps += 1
                new = list(zip(step.tokens[0], _sources_of(step), strict=False))
                answer.token_ids += [token for token, _ in new]
                answer.sources += [source for _, source in new]
                for token, source in new:
                    show(token, source)
            answer.is_stopped = bool(pressed)
        return answer

    def name_of(self, source: int) -> str:
        """Return the name of a token's source: the sources that proposed it together are joined by "+"."""
        names = [name for bit, name in enumerate(self.sources) if source >> bit & 1]
        return "+".join(names) if source != TARGET else "target"

    def statistics(self, answer: Answer) -> str:
        """Return the counts and the speed of an answer on one line."""
        count = len(answer.token_ids)
        texts = [f"{count} token{'s' * (count != 1)}"]
        if answer.num_steps:
            texts[0] += f", {(count - 1) / answer.num_steps:.2f} per step, {answer.tokens_per_second:.1f} tokens/s"
        counts = Counter(answer.sources)
        if self.sources and counts:
            texts.append(", ".join(f"{self.name_of(source)} {counts[source] / count:.0%}" for source in sorted(counts)[::-1]))
        if answer.is_stopped:
            texts.append("stopped by Ctrl-C")
        elif answer.token_ids[-1] not in self.target.stop_ids:
            is_full = len(answer.prompt) + count >= self.context
            texts.append("cut: the context is full, /new forgets the history" if is_full else "cut by max_new_tokens")
        return "; ".join(texts)

    def compare(self, answer: Answer, *, stops: bool) -> str:
        """Decode an answer once more without the drafter; return the comparison on one line."""
        plain = Answer(prompt=answer.prompt, seed=answer.seed)
        self.decode(plain, NullDrafter(), max_new_tokens=len(answer.token_ids), stops=stops)
        if plain.is_stopped:
            return "comparison stopped by Ctrl-C"
        if not (answer.num_steps and plain.num_steps):
            return "too short to compare: the prefill yields the first token"
        ratio = answer.tokens_per_second / plain.tokens_per_second
        speeds = f"{ratio:.2f}x as fast as plain decoding ({plain.tokens_per_second:.1f} tokens/s)"
        if self.rule.is_random:
            return f"{speeds}; sampled answers aren't compared token by token"
        if plain.token_ids == answer.token_ids:
            return f"{speeds}; the answer is identical"
        same = [one == other for one, other in zip(plain.token_ids, answer.token_ids, strict=False)]
        return f"{speeds}; the answer is NOT identical from token {[*same, False].index(False) + 1} on"


class TextStream:
    """Text of tokens as they come. A character that is divided among tokens comes with its last one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.stream = tokenizer, DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """Return the text that a token completes."""
        try:
            return self.stream.step(self.tokenizer, token) or ""
        except Exception as error:
            # Bytes that are no UTF-8 may change the text before them. tokenizers has no narrower error.
            if "Invalid prefix" not in str(error):
                raise
            self.stream = DecodeStream(skip_special_tokens=True)
            return self.stream.step(self.tokenizer, token) or ""


def _sources_of(step: Step) -> list[int]:
    """Return the source of each token of a step of one row. Tokens that an answer's end cut off are included."""
    accepted = [1] * step.num_accepted[0] if step.origins is None else list(step.origins[0])
    return [*accepted, TARGET]


@contextmanager
def stopped_by_ctrl_c(stops: bool) -> Iterator[list[int]]:
    """Collect the first Ctrl-C in the block, which would break off a step. The second one raises KeyboardInterrupt."""
    pressed: list[int] = []

    def press(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.getsignal(signal.SIGINT)
    if stops:
        signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
