"""The losslessness certificate of a target with drafters, on real prompts."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...data.chat import encode_prompt
from ...data.fields import differences
from ...data.files import read_dataclass, write_json
from ...data.suites import PromptSet
from ...data.types import Turn
from ...models.decoding.acceptance import GreedyAcceptance, SpeculativeSampling
from ...models.decoding.loop import generate
from ...models.decoding.pipelined import generate_pipelined
from ...models.decoding.protocols import AcceptanceRule, Drafter
from ...models.decoding.sampling import RowSeeds, Sampling, warp
from ...models.decoding.types import Step
from ...models.drafters import NullDrafter
from ...models.drafters.oracle import OracleDrafter, StreamingOracle
from ...models.export.certificate_file import CertificateLine
from ...models.llm.graphed_rule import rule_beside
from ...models.llm.hf_target import HFTarget
from ..measure.audit import audit
from ..measure.pipelined import recorded_stages
from ..measure.timing import Loop
from ..measure.turns import Method
from ..results.lossless import is_exact
from .gtest import g_test

logger = logging.getLogger(__name__)

Check = Callable[[], CertificateLine]
"""A comparison, which returns its line of the certificate."""

FALSE_ALARM_RATE = 1e-6
"""Probability that one G-test rejects a sound sampler."""
NUM_TEXTS, TEXTS_PER_PROMPT, SAMPLED_TOKENS = 1024, 512, 4
"""Extent of the sampling test of a target with each drafter. Few prompts have fewer texts."""
SAMPLED_BATCH_SIZE, NUM_SAMPLED_PROMPTS = 64, 4
SAMPLED_PROMPT_TOKENS = 16
"""Last tokens of a prompt that are read in the sampling test, where hundreds of rows repeat them."""
TEXTS_PER_CELL = 16
"""Sampled texts for each cell of the G-tests."""
BATCH_SIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """Content of the file that keeps the lines of a certificate until it is finished."""

    request: dict[str, Any]
    """What the lines depend on."""
    lines: list[CertificateLine]


def unfinished_file(certificate: Path) -> Path:
    """Return the file that keeps the lines of this certificate until it is finished."""
    return certificate.with_name(f"{certificate.name}.unfinished")


@torch.inference_mode()
def run_checks(checks: Sequence[Check], path: Path, request: Mapping[str, Any]) -> list[CertificateLine]:
    """Run the checks in order, and keep each line in the file `path`.

    Lines that the file already has are not computed again if they are of the same request. A
    KeyboardInterrupt is raised again, with the number of comparisons that are kept.
    """
    wanted: dict[str, Any] = json.loads(json.dumps(request))
    lines = _kept_lines(path, wanted)
    try:
        for check in tqdm(checks[len(lines) :], desc="certify", unit="check", initial=len(lines), total=len(checks)):
            lines.append(check())
            write_json(path, asdict(Unfinished(request=wanted, lines=lines)))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(lines)} of {len(checks)} comparisons are kept in {path}.") from None
    return lines


def _kept_lines(path: Path, request: dict[str, Any]) -> list[CertificateLine]:
    """Read the lines of an interrupted run; none if it had another request."""
    if not path.is_file():
        return []
    unfinished = read_dataclass(Unfinished, path)
    if changes := differences(unfinished.request, request):
        logger.info("%s is replaced: it differs in %s", path, "; ".join(changes.values()))
        return []
    return unfinished.lines


def decoding_checks(
    target: HFTarget,
    methods: Sequence[Method],
    tokenizer: PreTrainedTokenizerBase,
    suites: Sequence[PromptSet],
    *,
    max_new_tokens: int,
) -> list[Check]:
    """List the checks of each method's answers against plain decoding's, and of its samples.

    Greedy answers are compared alone and in batches; with a target in stages, alone, and also those
    of an oracle in the pipelined loop. In float32 and
    float64 the greedy tokens must be equal. In narrower types, plain decoding reads the same text,
    and every token must be its arg-max or lie within twice the noise that the order of computation
    causes (see `Audit`).
    """
    # 1. Encode the prompts that fit.
    prompts = [
        encode_prompt([Turn(role="user", content=prompt.turns[0])], tokenizer).to(target.device)
        for suite in suites
        for prompt in suite.prompts
    ]
    room = target.context_length - max(max_new_tokens, SAMPLED_TOKENS)
    prompts = [prompt for prompt in prompts if prompt.shape[1] <= room]
    if not prompts:
        raise ValueError(f"no prompt fits the target's context window of {target.context_length} tokens; lower max_new_tokens")

    # 2. The checks of the target, then those of each method.
    most_rows = 1 if recorded_stages(target) else BATCH_SIZE
    checks: list[Check] = [partial(_certify_oracle, target, prompts, max_new_tokens, most_rows)]
    if recorded_stages(target):
        checks.append(partial(_certify_pipelined_oracle, target, prompts, max_new_tokens))
    for method in methods:
        label = f"{method.name}, {_decoded_in(target)}"
        checks += [
            partial(_certify_greedy, label, target, method, prompts, max_new_tokens, batch_size)
            for batch_size in sorted({1, most_rows})
        ]
        checks.append(partial(_certify_sampling, label, target, method, prompts[:NUM_SAMPLED_PROMPTS]))
    return checks


def _certify_greedy(
    label: str,
    target: HFTarget,
    method: Method,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    batch_size: int,
) -> CertificateLine:
    num_accepted, answers, rule = 0, [], rule_beside(target, GreedyAcceptance())
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        steps = list(_greedy(target, method.drafter, batch, max_new_tokens, rule=rule, loop=method.loop))
        num_accepted += sum(step.num_drafted for step in steps)
        answers += _answers(steps, len(batch))
    return _compare(f"{label}, greedy{_together(batch_size)}", target, prompts, answers, num_accepted, max_new_tokens)


def _certify_oracle(target: HFTarget, prompts: Sequence[torch.Tensor], max_new_tokens: int, batch_size: int) -> CertificateLine:
    """Certify trees that contain the right answer, in batches.

    Their accepted paths are long, however good the real drafters are.
    """
    num_accepted, answers, rule = 0, [], rule_beside(target, GreedyAcceptance())
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        plain = [_answers(_greedy(target, NullDrafter(), [prompt], max_new_tokens), 1)[0] for prompt in batch]
        # Each row's drafts are right up to a different depth.
        depths = [OracleDrafter.DEPTH - row % OracleDrafter.DEPTH for row in range(start, start + len(batch))]
        oracle = OracleDrafter(plain, depths, target.vocab_size)
        steps = list(_greedy(target, oracle, batch, max_new_tokens, rule=rule))
        num_accepted += sum(step.num_drafted for step in steps)
        answers += _answers(steps, len(batch))
    label = f"an oracle drafter (drafts the right answers), {_decoded_in(target)}, greedy{_together(batch_size)}"
    return _compare(label, target, prompts, answers, num_accepted, max_new_tokens)


def _certify_pipelined_oracle(target: HFTarget, prompts: Sequence[torch.Tensor], max_new_tokens: int) -> CertificateLine:
    """Certify adoptions, mismatches and cancellations, however good the real drafters are."""
    num_accepted, answers = 0, []
    for index, prompt in enumerate(prompts):
        (plain,) = _answers(_greedy(target, NullDrafter(), [prompt], max_new_tokens), 1)
        oracle = StreamingOracle(plain, 1 + index % StreamingOracle.MAX_DEPTH, target.vocab_size)
        steps = list(_greedy(target, oracle, [prompt], max_new_tokens, loop=generate_pipelined))
        num_accepted += sum(step.num_drafted for step in steps)
        answers += _answers(steps, 1)
    label = f"an oracle drafter, pipelined, {_decoded_in(target)}, greedy"
    return _compare(label, target, prompts, answers, num_accepted, max_new_tokens)


def _compare(
    label: str,
    target: HFTarget,
    prompts: Sequence[torch.Tensor],
    answers: Sequence[list[int]],
    num_accepted: int,
    max_new_tokens: int,
) -> CertificateLine:
    exact = is_exact(str(target.dtype))
    num_bad, worst = 0, 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        if exact:
            num_bad += answer != _answers(_greedy(target, NullDrafter(), [prompt], max_new_tokens), 1)[0]
        else:
            margin = audit(target, prompt, answer, max_new_tokens=max_new_tokens)
            num_bad += not margin.within_noise
            worst = max(worst, margin.deficit / margin.noise if margin.noise else margin.deficit)
    return CertificateLine(
        subject=f"{label}: {sum(map(len, answers))} tokens, {num_accepted} of them accepted drafts",
        method="the tokens of plain decoding" if exact else "every token the arg-max, within twice the noise",
        num_cases=len(prompts),
        result=f"{num_bad} answers differ" if exact else f"{num_bad} answers beyond the noise; worst deficit {worst:.2g} of it",
        passed=not num_bad,
    )


def _certify_sampling(label: str, target: HFTarget, method: Method, prompts: Sequence[torch.Tensor]) -> CertificateLine:
    """Test the first tokens of many samples against the target's probabilities.

    The probabilities come from one plain forward pass. A token's quantile is the sum of all
    probabilities greater than its own, plus a random share of its own. If the tokens are sampled
    from the target's distributions, then their quantiles are uniform and independent for any texts
    (Rosenblatt's transform). Each pair of neighbouring tokens has a G-test over all texts.
    """
    # 1. Sample texts, and compute the quantile of each token.
    sampling, generator = Sampling(), torch.Generator().manual_seed(0)
    rule = rule_beside(target, SpeculativeSampling(sampling=sampling))
    prompts = [prompt[:, -SAMPLED_PROMPT_TOKENS:] for prompt in prompts]
    num_texts = min(NUM_TEXTS, TEXTS_PER_PROMPT * len(prompts))
    quantiles, num_accepted, size = [], 0, _batch_size(target, method.drafter, prompts)
    for first_seed in tqdm(range(0, num_texts, size), desc="certify samples", unit="batch", leave=False):
        texts = prompts[first_seed // size % len(prompts)].expand(size, -1)
        seeds = RowSeeds(range(first_seed, first_seed + size))
        steps = list(method.loop(target, method.drafter, rule, texts, max_new_tokens=SAMPLED_TOKENS, generator=seeds))
        num_accepted += sum(step.num_drafted for step in steps)
        tokens = torch.tensor(_answers(steps, len(texts)), device=texts.device)
        both = torch.cat([texts, tokens], dim=1)
        probs = warp(target.plain_logits(both, SAMPLED_TOKENS + 1)[:, :-1], sampling).cpu()
        of_tokens = probs.gather(2, tokens[..., None].cpu())
        share = torch.rand(tokens.shape, generator=generator)
        greater, equal = probs * (probs > of_tokens), probs * (probs == of_tokens)
        quantiles.append(greater.sum(-1) + share * equal.sum(-1))

    # 2. Test each pair of neighbours.
    num_places = math.isqrt(num_texts // TEXTS_PER_CELL)  # of one token; a pair has the square
    cell = (torch.cat(quantiles) * num_places).long().clamp(max=num_places - 1)  # [text, token]
    pairs = (cell[:, :-1] * num_places + cell[:, 1:]).unbind(1)
    even = torch.full((num_places**2,), num_places**-2, dtype=torch.float64)
    values = [g_test(pair.bincount(minlength=len(even)), even) for pair in pairs]
    return CertificateLine(
        subject=f"{label}, sampled: {cell.numel()} tokens, {num_accepted} of them accepted drafts",
        method=f"G-tests of {len(cell)} texts",
        num_cases=len(values),
        result=f"p at least {min(values):.2g}",
        passed=all(value > FALSE_ALARM_RATE for value in values),
        false_alarm_rate=len(values) * FALSE_ALARM_RATE,
    )


def passes(lines: Sequence[CertificateLine]) -> bool:
    """Check that every line holds."""
    return all(line.passed for line in lines)


def false_alarm_rate(lines: Sequence[CertificateLine]) -> float:
    """Compute a bound on the probability of a negative verdict if everything is sound.

    It is the sum over all tests (Bonferroni).
    """
    return sum(line.false_alarm_rate for line in lines)


def write_certificate(lines: Sequence[CertificateLine], subject: dict[str, Any], path: Path) -> None:
    """Write the certificate as JSON.

    It has the verdict, its false-alarm rate, the certified subject, and every line.
    """
    verdict = {"passed": passes(lines), "false_alarm_rate": false_alarm_rate(lines)}
    write_json(path, {**verdict, **subject, "lines": [asdict(line) for line in lines]})


def certificate_table(lines: Sequence[CertificateLine]) -> Table:
    """Format the certificate for a terminal."""
    table = Table("What", "How", "Cases", "Result", "Verdict")
    for line in lines:
        verdict = "[green]pass[/]" if line.passed else "[bold red]FAIL[/]"
        table.add_row(line.subject, line.method, str(line.num_cases), line.result, verdict)
    return table


def _decoded_in(target: HFTarget) -> str:
    """Describe the target's type, and its form unless it is the plain one."""
    dtype = str(target.dtype).removeprefix("torch.")
    return dtype if target.form == "eager" else f"{dtype} {target.form}"


def _together(batch_size: int) -> str:
    return "" if batch_size == 1 else f", {batch_size} prompts at a time"


def _greedy(
    target: HFTarget,
    drafter: Any,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    *,
    rule: AcceptanceRule | None = None,
    loop: Loop = generate,
) -> Iterator[Step]:
    rows = [prompt[0] for prompt in prompts]
    return loop(target, drafter, rule or GreedyAcceptance(), rows, max_new_tokens=max_new_tokens, stop_ids=target.stop_ids)


def _batch_size(target: HFTarget, drafter: Drafter[Any, Any], prompts: Sequence[torch.Tensor]) -> int:
    """Return the rows of sampled batches: a power of two for which a memory budget has room.

    A target in stages decodes one row.
    """
    size = 1 if recorded_stages(target) else SAMPLED_BATCH_SIZE
    if target.budget_tokens is not None:
        tokens = max(prompt.shape[1] for prompt in prompts) + SAMPLED_TOKENS + 1 + drafter.max_nodes
        while size > 1 and size * tokens > target.budget_tokens:
            size //= 2
    return size


def _answers(steps: Iterable[Step], num_rows: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in range(num_rows)]
    for step in steps:
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            answers[row] += tokens
    return answers
