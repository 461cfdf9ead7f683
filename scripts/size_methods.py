"""Measures one cell of the size study: a target in one type with one number of threads.

All methods answer each prompt before the next one, in rotating order. They are plain decoding in
our loop, transformers' `generate` with and without prompt lookup, and each drafter in each setting,
all over the same weights. Our methods are timed by phase; on a CPU this costs microseconds.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tqdm import tqdm

from outrider.data.chat import encode_prompt
from outrider.data.suites import load_suite
from outrider.data.types import Turn
from outrider.eval.measure.audit import audit
from outrider.eval.measure.roofline import weight_bytes
from outrider.eval.measure.timing import time_generation
from outrider.models.decoding import GreedyAcceptance
from outrider.models.decoding.protocols import Drafter
from outrider.models.drafters import NullDrafter, load_drafter
from outrider.models.machine import available_memory
from outrider.models.target.config import TargetConfig
from outrider.models.target.hf_target import HFTarget
from outrider.models.target.loading import load_target

PLAIN, TRANSFORMERS, LOOKUP = "plain", "transformers generate", "transformers prompt lookup"
LOOKUP_TOKENS = 10
WARM_UP_TOKENS = 6
COPIES = 3
"""Free memory, in copies of the weights, above which transformers gets a copy of its own."""
STALL, MAX_ROUNDS = 3.0, 3
"""A prompt is decoded again by all methods if one took so many times its median seconds per token;
it has at most so many rounds."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer with its times. The seconds of the phases are None for transformers."""

    token_ids: list[int]
    seconds: float
    processor_seconds: float
    num_steps: int
    """Passes of the target after the prefill."""
    phases: dict[str, float] | None = None


Decode = Callable[[torch.Tensor, int], Answer]


@dataclass(frozen=True, kw_only=True)
class DrafterSetting:
    """A drafter's folder in one setting, under the name that the table shows."""

    name: str
    kind: str
    folder: Path
    setting: dict[str, Any]

    @property
    def described(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "setting": self.setting}


class Stopwatch:
    """Wall seconds and processor seconds since it was made."""

    def __init__(self) -> None:
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {
            "seconds": time.perf_counter() - self.wall,
            "processor_seconds": time.process_time() - self.processor,
        }


def measure_cell(
    folder: Path, drafters: Sequence[DrafterSetting], *, dtype: str, threads: int, num_prompts: int, new_tokens: int
) -> dict[str, Any]:
    """Return the record of one cell: all tries of all methods on all prompts."""
    # 1. The target. Its linear kernels may depend on the number of threads, so this comes first.
    torch.set_num_threads(threads)
    target = load_target(TargetConfig(name_or_path=str(folder), dtype=dtype, device="cpu"))
    theirs = their_target(target, folder, dtype)
    methods = methods_of(target, theirs, drafters)
    prompts = fitting_prompts(target, num_prompts, new_tokens)
    # 2. A warm-up, then all prompts; prompts with a stall again.
    for decode in methods.values():
        decode(prompts[0], WARM_UP_TOKENS)
    rounds: list[list[dict[str, Answer]]] = [[] for _ in prompts]
    with tqdm(total=len(prompts) * len(methods), desc=f"{dtype}, {count_threads(threads)}", unit="answer") as progress:
        for number in range(MAX_ROUNDS):
            for index in stalled(rounds) if number else range(len(prompts)):
                rounds[index].append({})
                for name in rotated(list(methods), index + number):
                    rounds[index][-1][name] = methods[name](prompts[index], new_tokens)
                    progress.update(number == 0)
    # 3. The record, with the least disturbed round of each prompt, and a check of other texts.
    used = least_disturbed(rounds)
    return {
        "threads": threads,
        "dtype": dtype,
        "parameters": target.model.num_parameters(),
        "weight_bytes": weight_bytes(target.model),
        "linears": target.linears,
        "transformers_shares_weights": theirs is target,
        "prompt_tokens": [prompt.shape[1] for prompt in prompts],
        "used_rounds": [tries.index(chosen) for tries, chosen in zip(rounds, used, strict=True)],
        "unexplained": unexplained(target, prompts, used, new_tokens),
        "answers": {name: [[asdict(answers[name]) for answers in tries] for tries in rounds] for name in methods},
    }


def count_threads(number: int) -> str:
    return f"{number} thread" + "s" * (number > 1)


def fitting_prompts(target: HFTarget, num_prompts: int, new_tokens: int) -> list[torch.Tensor]:
    """Return prompts of the suite stdlib that leave room for the answer. Raises ValueError."""
    texts = [prompt.turns[0] for prompt in load_suite("stdlib").prompts]
    encoded = (
        encode_prompt([Turn(role="user", content=text)], target.tokenizer) for text in Random(0).sample(texts, len(texts))
    )
    fitting = (prompt for prompt in encoded if prompt.shape[1] + new_tokens <= target.context_length)
    prompts = list(itertools.islice(fitting, num_prompts))
    if len(prompts) < num_prompts:
        raise ValueError(
            f"only {len(prompts)} prompts of stdlib leave room for {new_tokens} new tokens, and --prompts is {num_prompts}; "
            "give fewer prompts or tokens"
        )
    return prompts


def their_target(target: HFTarget, folder: Path, dtype: str) -> HFTarget:
    """Load the weights once more for transformers, in the memory order that its users have.

    Where memory is too small for that and for packed copies, transformers shares our weights.
    """
    available = available_memory()
    if available is not None and available < COPIES * weight_bytes(target.model):
        return target
    return load_target(TargetConfig(name_or_path=str(folder), dtype=dtype, device="cpu", fast_linears=False))


def methods_of(target: HFTarget, theirs: HFTarget, drafters: Sequence[DrafterSetting]) -> dict[str, Decode]:
    """Return the methods by name, those without a drafter first."""
    methods: dict[str, Decode] = {
        PLAIN: decoder(target, NullDrafter()),
        TRANSFORMERS: their_decoder(theirs),
        LOOKUP: their_decoder(theirs, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    }
    for drafter in drafters:
        methods[drafter.name] = decoder(target, load_drafter(drafter.folder, target, **drafter.setting))
    return methods


def decoder(target: HFTarget, drafter: Drafter[Any, Any]) -> Decode:
    """Return our decoding with a drafter."""

    def decode(prompt: torch.Tensor, new_tokens: int) -> Answer:
        watch = Stopwatch()
        generation = time_generation(
            target,
            drafter,
            GreedyAcceptance(),
            [prompt[0]],
            max_new_tokens=new_tokens,
            stop_ids=target.stop_ids,
            seeds=[0],
            timed=True,
        )
        times = watch.read()
        phases = asdict(generation.phase_seconds)
        phases["rest"] = generation.decode_seconds - sum(phases.values())
        return Answer(
            token_ids=generation.answer(0).token_ids,
            num_steps=sum(not step.is_prefill for step in generation.steps),
            phases={"prefill": generation.prefill_seconds, **phases},
            **times,
        )

    return decode


def their_decoder(target: HFTarget, **options: Any) -> Decode:
    """Return transformers' greedy decoding with the same weights."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    def decode(prompt: torch.Tensor, new_tokens: int) -> Answer:
        nonlocal passes
        passes = 0
        hook = target.model.register_forward_pre_hook(count)
        watch = Stopwatch()
        output = target.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=sorted(target.stop_ids) or None,
            pad_token_id=0,
            **options,
        )
        token_ids: list[int] = output[0, prompt.shape[1] :].tolist()
        times = watch.read()
        hook.remove()
        return Answer(token_ids=token_ids, num_steps=passes - 1, **times)

    return decode


def rotated(names: list[str], first: int) -> list[str]:
    """Return the names in their order, from another one on."""
    first %= len(names)
    return [*names[first:], *names[:first]]


def stalled(rounds: Sequence[Sequence[Mapping[str, Answer]]]) -> list[int]:
    """Return the prompts at which some method was far slower per token than at its others."""
    used = least_disturbed(rounds)
    medians = {name: statistics.median(map(seconds_per_token, (answers[name] for answers in used))) for name in used[0]}
    return [
        index
        for index, answers in enumerate(used)
        if any(seconds_per_token(answer) > STALL * medians[name] for name, answer in answers.items())
    ]


def least_disturbed(rounds: Sequence[Sequence[Mapping[str, Answer]]]) -> list[Mapping[str, Answer]]:
    """Return the fastest round of each prompt. All methods keep the same one, so pairs stay pairs."""
    return [min(tries, key=lambda answers: sum(answer.seconds for answer in answers.values())) for tries in rounds]


def seconds_per_token(answer: Answer) -> float:
    return answer.seconds / len(answer.token_ids)


def unexplained(
    target: HFTarget, prompts: Sequence[torch.Tensor], used: Sequence[Mapping[str, Answer]], new_tokens: int
) -> dict[str, list[int]]:
    """Return the prompts, by method, whose text differs from plain decoding's beyond rounding."""
    found: dict[str, list[int]] = {}
    for index, (prompt, answers) in enumerate(zip(prompts, used, strict=True)):
        verdicts = {tuple(answers[PLAIN].token_ids): True}
        for name, answer in answers.items():
            key = tuple(answer.token_ids)
            if key not in verdicts:
                verdicts[key] = audit(target, prompt, answer.token_ids, max_new_tokens=new_tokens).within_noise
            if not verdicts[key]:
                found.setdefault(name, []).append(index)
    return found
