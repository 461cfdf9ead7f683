"""The losslessness certificate.

It covers the acceptance rules exactly, and a target with drafters on real prompts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...data.chat import encode_prompt
from ...data.files import write_json
from ...data.suites import PromptSet
from ...data.types import Turn
from ...models.decoding.acceptance import GreedyAcceptance, SpeculativeSampling, TypicalAcceptance
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
from .enumerate_rules import DRAWINGS, EXACT, SAMPLINGS, SHAPES, check_rule, sampled_tokens, sequence_counts
from .gtest import g_test
from .toy_models import TreeShape, joint, random_tables

FALSE_ALARM_RATE = 1e-6
"""Probability that one G-test rejects a sound sampler."""
NUM_SAMPLES = 100_000
NUM_TEXTS, SAMPLED_TOKENS, SAMPLED_BATCH_SIZE, NUM_SAMPLED_PROMPTS = 1024, 4, 64, 4
"""Extent of the sampling test of a target with each drafter."""
NUM_PLACES = 8
"""Number of cells that the quantiles of sampled tokens are counted in."""
BATCH_SIZE = 4
LARGE_VOCAB, LARGE_SHAPES = 6, ("chain of 4", "3 siblings")
GREEDY = Sampling(temperature=0.0)

MakeRule = Callable[[Sampling], AcceptanceRule]


def certify_rules(*, vocab: int = 3, seed: int = 0) -> list[CertificateLine]:
    """Enumerate the rules exactly, and test the real sampler.

    This takes a few minutes on a CPU.
    """
    jobs: list[Callable[[], CertificateLine]] = []
    for drawing in DRAWINGS:
        jobs += [
            partial(_enumerate, "speculative sampling", _rule, drawing, vocab, seed),
            partial(_enumerate, "speculative sampling", _rule, drawing, LARGE_VOCAB, seed),
            partial(_enumerate, "greedy acceptance", _greedy_rule, drawing, vocab, seed, target_sampling=GREEDY),
            partial(_enumerate, "typical acceptance", _typical_rule, drawing, vocab, seed, lossless=False),
            partial(_test_sampler, drawing, vocab, seed),
        ]
    return sorted((job() for job in tqdm(jobs, desc="certify rules", unit="job")), key=lambda line: line.subject)


def _enumerate(
    name: str,
    make_rule: MakeRule,
    drawing: str,
    vocab: int,
    seed: int,
    *,
    lossless: bool = True,
    target_sampling: Sampling | None = None,
) -> CertificateLine:
    """Enumerate one rule on trees with one way of drawing.

    For a rule that doesn't claim to be `lossless`, the line reports its distance from a lossless
    one.
    """
    checks = list(
        check_rule(
            make_rule,
            vocab=vocab,
            seed=seed,
            shapes=LARGE_SHAPES if vocab == LARGE_VOCAB else tuple(SHAPES),
            drawings=[drawing],
            samplings=("temperature 1",) if vocab == LARGE_VOCAB else tuple(SAMPLINGS),
            target_sampling=target_sampling,
        )
    )
    worst = f"total variation at most {max(check.total_variation for check in checks):.1e}"
    return CertificateLine(
        subject=f"{name}, {drawing} trees, {vocab} tokens",
        method="every outcome enumerated",
        num_cases=len(checks),
        result=worst if lossless else f"not lossless: {worst}",
        # NaN fails the comparison.
        passed=all(check.total_variation < EXACT for check in checks) if lossless else None,
    )


def _test_sampler(drawing: str, vocab: int, seed: int) -> CertificateLine:
    values = [_sampler_p_value(shape, drawing, name, vocab, seed) for shape in SHAPES for name in SAMPLINGS]
    return CertificateLine(
        subject=f"the sampler, {drawing} trees, {vocab} tokens",
        method=f"G-tests of {NUM_SAMPLES} texts",
        num_cases=len(values),
        result=f"p at least {min(values):.2g}",
        passed=all(value > FALSE_ALARM_RATE for value in values),
        false_alarm_rate=len(values) * FALSE_ALARM_RATE,
    )


@torch.inference_mode()
def certify_decoding(
    target: HFTarget,
    methods: Sequence[Method],
    tokenizer: PreTrainedTokenizerBase,
    suites: Sequence[PromptSet],
    *,
    max_new_tokens: int,
) -> list[CertificateLine]:
    """Compare each method's answers with plain decoding's, and its samples with the target.

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

    # 2. Certify the target, then each method.
    most_rows = 1 if recorded_stages(target) else BATCH_SIZE
    jobs: list[Callable[[], CertificateLine]] = [partial(_certify_oracle, target, prompts, max_new_tokens, most_rows)]
    if recorded_stages(target):
        jobs.append(partial(_certify_pipelined_oracle, target, prompts, max_new_tokens))
    for method in methods:
        label = f"{method.name}, {_decoded_in(target)}"
        jobs += [
            partial(_certify_greedy, label, target, method, prompts, max_new_tokens, batch_size)
            for batch_size in sorted({1, most_rows})
        ]
        jobs.append(partial(_certify_sampling, label, target, method, prompts[:NUM_SAMPLED_PROMPTS]))
    return [job() for job in tqdm(jobs, desc="certify decoding", unit="job")]


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
    quantiles, num_accepted, size = [], 0, _batch_size(target, method.drafter, prompts)
    for first_seed in tqdm(range(0, NUM_TEXTS, size), desc="certify samples", unit="batch", leave=False):
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
    cell = (torch.cat(quantiles) * NUM_PLACES).long().clamp(max=NUM_PLACES - 1)  # [text, token]
    pairs = (cell[:, :-1] * NUM_PLACES + cell[:, 1:]).unbind(1)
    even = torch.full((NUM_PLACES**2,), NUM_PLACES**-2, dtype=torch.float64)
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
    """Check that every line with a claim holds."""
    return all(line.passed is not False for line in lines)


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
    verdicts = {True: "[green]pass[/]", False: "[bold red]FAIL[/]", None: "none claimed"}
    for line in lines:
        table.add_row(line.subject, line.method, str(line.num_cases), line.result, verdicts[line.passed])
    return table


def _decoded_in(target: HFTarget) -> str:
    """Describe the target's type, and its form unless it is the plain one."""
    dtype = str(target.dtype).removeprefix("torch.")
    return dtype if target.form == "eager" else f"{dtype} {target.form}"


def _together(batch_size: int) -> str:
    return "" if batch_size == 1 else f", {batch_size} prompts at a time"


def _rule(sampling: Sampling) -> AcceptanceRule:
    return SpeculativeSampling(sampling=sampling)


def _greedy_rule(sampling: Sampling) -> AcceptanceRule:
    return GreedyAcceptance()


def _typical_rule(sampling: Sampling) -> AcceptanceRule:
    return TypicalAcceptance(sampling=sampling)


def _sampler_p_value(shape_name: str, drawing: str, sampling_name: str, vocab: int, seed: int) -> float:
    sampling, shape = SAMPLINGS[sampling_name], TreeShape(parents=SHAPES[shape_name], drawing=drawing)
    target, drafter = random_tables(vocab, shape.depth + 1, seed), random_tables(vocab, shape.depth + 1, seed + 1)
    generator = torch.Generator().manual_seed(seed)
    tokens = sampled_tokens(_rule(sampling), sampling, shape, target, drafter, num_samples=NUM_SAMPLES, generator=generator)
    return g_test(sequence_counts(tokens, vocab), joint(target, sampling, shape.depth + 1).flatten())


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
