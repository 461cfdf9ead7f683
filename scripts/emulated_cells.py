"""Cells of the pipeline bench in real processes with emulated stages, beside the simulator's figures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from emulated_stages import EMULATED, RealClock, in_processes
from grow_target import Source
from pipeline_conditions import Condition
from pipeline_language import Recorded
from pipeline_methods import PIPELINED, PLAIN, USUAL_LENGTH, Row, expected, synchronous
from pipeline_play import Decoded, Outcome, decode, make_drafter, play, speed_figures
from study_cells import grown

from outrider.data.chat import encode_prompt
from outrider.data.suites import load_suite
from outrider.data.types import Turn
from outrider.models.decoding.acceptance import GreedyAcceptance
from outrider.models.decoding.loop import generate
from outrider.models.drafters.null import NullDrafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

LAYERS = 16
"""Layers of a grown target: the longest pipeline has as many stages."""
BEYOND = 64
"""Tokens that are recorded after the end of each answer: drafters guess them."""
PROMPT_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and the target's answer."""

    prompt: list[int]
    answer: list[int]


def make_target(source: Path, folder: Path, num_stages: int) -> HFTarget:
    """Return the target, grown if it has fewer layers than there are stages, with the same text.

    Few layers leave the processors to the processes.
    """
    torch.set_num_threads(1)  # before any pass: stages are forks of this process
    options = {"dtype": "float32", "device": "cpu", "fast_linears": False}
    origin = Source.of(source)
    if origin.size.layers >= num_stages:
        return load_target(TargetConfig(name_or_path=str(source), **options))
    with grown(origin, origin.grown_size(LAYERS, origin.size.intermediate), folder) as path:
        return load_target(TargetConfig(name_or_path=str(path), **options))


def record_texts(target: HFTarget, num_texts: int, new_tokens: int) -> list[Text]:
    """Let the whole target answer prompts about code."""
    texts = []
    for ids in prompts_about_code(target, num_texts):
        steps = generate(target, NullDrafter(), GreedyAcceptance(), ids[None], max_new_tokens=new_tokens + BEYOND)
        texts.append(Text(prompt=ids.tolist(), answer=[token for step in steps for token in step.tokens[0]]))
    target.release_cache()
    return texts


def prompts_about_code(target: HFTarget, num_texts: int) -> list[torch.Tensor]:
    """Return the ends of held-out prompts, as tokens."""
    prompts = load_suite("stdlib", limit=num_texts).prompts
    texts = ([Turn(role="user", content=prompt.turns[0])] for prompt in prompts)
    return [encode_prompt(turns, target.tokenizer)[0][-PROMPT_TOKENS:] for turns in texts]


def emulated_rows(target: HFTarget, condition: Condition, best_length: int, texts: Sequence[Text]) -> dict[str, Row]:
    """Decode texts by each method in processes, and the same texts in virtual time.

    Methods alternate, so that a slow moment of the machine costs all of them.
    """
    lengths = {PLAIN: 0, synchronous(USUAL_LENGTH): USUAL_LENGTH, synchronous(best_length): best_length, PIPELINED: None}
    guesses = {"claimed": condition.claimed}
    languages = [Recorded(text.prompt, text.answer, seed, condition.acceptance, **guesses) for seed, text in enumerate(texts)]
    # 1. Real processes.
    real: dict[str, list[Decoded]] = {name: [] for name in lengths}
    clock = RealClock()
    with in_processes(target, condition.costs.num_stages, condition.costs) as staged:
        for text, language in zip(texts, languages, strict=True):
            for name, length in lengths.items():
                drafter = make_drafter(clock, condition.costs, language, length)
                speculation = expected(clock) if length is None else None
                real[name].append(decode(staged, drafter, text.prompt, condition.new_tokens, clock, speculation))
    # 2. The simulator, with the seconds that the head took for an answer: embeddings, head and loop.
    head_seconds = median(text.head_seconds / len(text.times) for text in real[PLAIN])
    timed = replace(condition, costs=replace(condition.costs, head_seconds=head_seconds))
    virtual = {
        name: [
            play(
                timed,
                0,
                num_drafts=length,
                speculation=expected if length is None else None,
                language=language,
                prompt=text.prompt,
            )
            for text, language in zip(texts, languages, strict=True)
        ]
        for name, length in lengths.items()
    }
    rows = {name: emulated_row(real[name], virtual[name], texts, length) for name, length in lengths.items()}
    return {name: {**row, "head_seconds": head_seconds} for name, row in rows.items()}


def emulated_row(real: Sequence[Decoded], virtual: Sequence[Outcome], texts: Sequence[Text], length: int | None) -> Row:
    """Return the figures of a method, beside those of the simulator."""
    row = speed_figures(real, EMULATED)
    simulated = speed_figures([text.decoded for text in virtual], "virtual time")
    identical = [answer.tokens == text.answer[: len(answer.tokens)] for answer, text in zip(real, texts, strict=True)]
    return {
        **row,
        **({"num_drafts": length} if length else {}),
        "num_identical": sum(identical),
        "num_texts": len(texts),
        "simulated": simulated,
        "over_simulated": row["tokens_per_second"] / simulated["tokens_per_second"],
    }
