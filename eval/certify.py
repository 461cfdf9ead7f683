"""The losslessness certificate: of the acceptance rules exactly, and of a target with a drafter on real prompts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.chat import encode_prompt
from ..data.files import write_json
from ..data.prompts import PromptSet
from ..data.types import Turn
from ..models.decoding.acceptance import GreedyAcceptance, SpeculativeSampling
from ..models.decoding.certificate import (
    DRAWINGS,
    EXACT,
    SAMPLINGS,
    SHAPES,
    TreeShape,
    check_rule,
    g_test,
    joint,
    random_tables,
    sampled_tokens,
    sequence_counts,
)
from ..models.decoding.loop import generate
from ..models.drafters import NullDrafter
from ..models.hf_target import HFTarget
from ..models.interfaces import Drafter
from .lossless import audit, is_exact

FALSE_ALARM_RATE = 1e-6
"""Share of sound samplers that one G-test would call unsound."""
NUM_SAMPLES = 100_000
LARGE_VOCAB, LARGE_SHAPES = 6, ("chain of 4", "3 siblings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the certificate."""

    subject: str
    method: str
    num_cases: int
    result: str
    passed: bool


def certify_rules(*, vocab: int = 3, seed: int = 0) -> list[Line]:
    """Enumerate the rules exactly, and test the sampler as it is. About a minute on a CPU."""
    lines = []
    jobs = [(drawing, vocab, tuple(SHAPES)) for drawing in DRAWINGS]
    jobs += [(drawing, LARGE_VOCAB, LARGE_SHAPES) for drawing in DRAWINGS]
    with tqdm(total=len(jobs) + len(DRAWINGS) * len(SAMPLINGS), desc="certify rules", unit="job") as progress:
        for drawing, size, shapes in jobs:
            samplings = tuple(SAMPLINGS) if size == vocab else ("temperature 1",)
            checks = list(check_rule(_rule, vocab=size, seed=seed, shapes=shapes, drawings=[drawing], samplings=samplings))
            worst = max(check.total_variation for check in checks)
            lines.append(
                Line(
                    subject=f"speculative sampling, {drawing} trees, {size} tokens",
                    method="every outcome enumerated",
                    num_cases=len(checks),
                    result=f"total variation at most {worst:.1e}",
                    passed=all(check.total_variation < EXACT for check in checks),  # NaN is below nothing
                )
            )
            progress.update()
        for drawing in DRAWINGS:
            values = []
            for name in SAMPLINGS:
                values.append(_sampler_p_value(drawing, name, vocab, seed))
                progress.update()
            lines.append(
                Line(
                    subject=f"the sampler, {drawing} trees, {vocab} tokens",
                    method=f"G-test of {NUM_SAMPLES} texts, false alarms {FALSE_ALARM_RATE:.0e}",
                    num_cases=len(values),
                    result=f"p at least {min(values):.2g}",
                    passed=all(value > FALSE_ALARM_RATE for value in values),
                )
            )
    return lines


@torch.inference_mode()
def certify_decoding(
    target: HFTarget,
    drafters: dict[str, Drafter[Any]],
    tokenizer: PreTrainedTokenizerBase,
    suites: Sequence[PromptSet],
    *,
    max_new_tokens: int,
) -> list[Line]:
    """Greedy decoding with each drafter against plain decoding, prompt by prompt.

    In float32 and float64 the tokens must be the same. In narrower types every token must be the arg-max of plain decoding, fed
    with the same text, or lie within twice the noise that the order of computing makes there (see `Audit`).
    """
    exact = is_exact(target.dtype)
    prompts = [
        encode_prompt([Turn(role="user", content=prompt.turns[0])], tokenizer).to(target.device)
        for suite in suites
        for prompt in suite.prompts
    ]
    prompts = [prompt for prompt in prompts if prompt.shape[1] + max_new_tokens <= target.context_length]
    if not prompts:
        raise ValueError(f"no prompt fits the target's context window of {target.context_length} tokens; lower max_new_tokens")
    lines = []
    with tqdm(total=len(prompts) * len(drafters), desc="certify decoding", unit="answer") as progress:
        for name, drafter in drafters.items():
            num_bad, num_tokens, worst = 0, 0, 0.0
            for prompt in prompts:
                answer = _greedy(target, drafter, prompt, max_new_tokens)
                num_tokens += len(answer)
                if exact:
                    num_bad += answer != _greedy(target, NullDrafter(), prompt, max_new_tokens)
                else:
                    margin = audit(target, prompt, answer)
                    num_bad += not margin.within_noise
                    worst = max(worst, margin.deficit / margin.noise if margin.noise else margin.deficit)
                progress.update()
            lines.append(
                Line(
                    subject=f"{name}, {str(target.dtype).removeprefix('torch.')}, {num_tokens} tokens",
                    method="the tokens of plain decoding" if exact else "every token the arg-max, within twice the noise",
                    num_cases=len(prompts),
                    result=f"{num_bad} answers differ" + ("" if exact else f"; worst deficit {worst:.2g} of the noise"),
                    passed=not num_bad,
                )
            )
    return lines


def write_certificate(lines: Sequence[Line], subject: dict[str, Any], path: Path) -> None:
    """The certificate as JSON: verdict, what was certified, and every line."""
    write_json(path, {"passed": all(line.passed for line in lines), **subject, "lines": [asdict(line) for line in lines]})


def certificate_table(lines: Sequence[Line]) -> Table:
    """The certificate for a terminal."""
    table = Table("What", "How", "Cases", "Result", "Verdict")
    for line in lines:
        verdict = "[green]pass[/]" if line.passed else "[bold red]FAIL[/]"
        table.add_row(line.subject, line.method, str(line.num_cases), line.result, verdict)
    return table


def _rule(sampling: Any) -> SpeculativeSampling:
    return SpeculativeSampling(sampling=sampling)


def _sampler_p_value(drawing: str, sampling_name: str, vocab: int, seed: int) -> float:
    sampling = SAMPLINGS[sampling_name]
    target, drafter = random_tables(vocab, 4, seed), random_tables(vocab, 4, seed + 1)
    shape = TreeShape(parents=SHAPES["2 x 2"], drawing=drawing)
    generator = torch.Generator().manual_seed(seed)
    tokens = sampled_tokens(_rule(sampling), sampling, shape, target, drafter, num_samples=NUM_SAMPLES, generator=generator)
    return g_test(sequence_counts(tokens, vocab), joint(target, sampling, shape.depth + 1).flatten())


def _greedy(target: HFTarget, drafter: Drafter[Any], prompt: torch.Tensor, max_new_tokens: int) -> list[int]:
    rule = GreedyAcceptance()
    steps = generate(target, drafter, rule, prompt, max_new_tokens=max_new_tokens, stop_ids=target.stop_ids)
    return [token for step in steps for token in step.tokens[0]]
