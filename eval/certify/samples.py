"""Test of sampled answers: whether their tokens have the target's probabilities."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from tqdm import tqdm

from ...models.decoding.acceptance import SpeculativeSampling
from ...models.decoding.protocols import Drafter
from ...models.decoding.sampling import RowSeeds, Sampling, warp
from ...models.export.package import CertificateLine
from ...models.llm.graphed_rule import rule_beside
from ...models.llm.hf_target import HFTarget
from ..measure.environment import recorded_stages
from ..measure.plan import Method
from ..measure.timing import answers_of

FALSE_ALARM_RATE = 1e-6
"""Probability that one G-test rejects a sound sampler."""
NUM_SAMPLED_PROMPTS, TEXTS_PER_PROMPT, SAMPLED_TOKENS = 4, 256, 4
"""Extent of the test of a target with each drafter: prompts at most, texts of each, tokens of a text."""
SAMPLED_PROMPT_TOKENS = 16
"""Last tokens of a prompt that are read, since hundreds of rows repeat them."""
SAMPLED_BATCH_SIZE = 64
TEXTS_PER_CELL = 16
"""Sampled texts for each cell of the G-tests. With fewer than ten the statistic is not near chi-squared."""


def certify_sampling(label: str, target: HFTarget, method: Method, prompts: Sequence[torch.Tensor]) -> CertificateLine:
    """Test the first tokens of many samples against the target's probabilities.

    The probabilities come from one plain forward pass. A token's quantile is the sum of all
    probabilities greater than its own, plus a random share of its own. If the tokens are sampled
    from the target's distributions, then their quantiles are uniform and independent for any texts
    (Rosenblatt's transform). Each pair of neighbouring tokens has a G-test over all texts.
    """
    # 1. Sample texts, and compute the quantile of each token.
    sampling, generator = Sampling(), torch.Generator().manual_seed(0)
    rule = rule_beside(target, SpeculativeSampling(sampling=sampling))
    prompts = [prompt[:, -SAMPLED_PROMPT_TOKENS:] for prompt in prompts[:NUM_SAMPLED_PROMPTS]]
    num_texts = TEXTS_PER_PROMPT * len(prompts)
    quantiles, num_accepted, size = [], 0, _batch_size(target, method.drafter, prompts)
    for first_seed in tqdm(range(0, num_texts, size), desc="certify samples", unit="batch", leave=False):
        texts = prompts[first_seed // size % len(prompts)].expand(size, -1)
        seeds = RowSeeds(range(first_seed, first_seed + size))
        steps = list(method.loop(target, method.drafter, rule, texts, max_new_tokens=SAMPLED_TOKENS, generator=seeds))
        num_accepted += sum(step.num_drafted for step in steps)
        tokens = torch.tensor(answers_of(steps), device=texts.device)
        both = torch.cat([texts, tokens], dim=1)
        probs = warp(target.plain_logits(both, SAMPLED_TOKENS + 1)[:, :-1], sampling).cpu()
        of_tokens = probs.gather(2, tokens[..., None].cpu())
        share = torch.rand(tokens.shape, generator=generator)
        greater, equal = probs * (probs > of_tokens), probs * (probs == of_tokens)
        quantiles.append(greater.sum(-1) + share * equal.sum(-1))

    # 2. Test each pair of neighbours.
    subject = f"{label}, sampled: {num_texts * SAMPLED_TOKENS} tokens, {num_accepted} of them accepted drafts"
    return sampling_line(subject, f"G-tests of {num_texts} texts", torch.cat(quantiles))


def sampling_line(subject: str, method: str, quantiles: Float[torch.Tensor, "text token"]) -> CertificateLine:
    """Test each pair of neighbouring tokens, whose quantiles should be uniform and independent."""
    num_places = math.isqrt(len(quantiles) // TEXTS_PER_CELL)  # of one token; a pair has the square
    cell = (quantiles * num_places).long().clamp(max=num_places - 1)
    pairs = (cell[:, :-1] * num_places + cell[:, 1:]).unbind(1)
    even = torch.full((num_places**2,), len(quantiles) / num_places**2, dtype=torch.float64)
    values = [g_test(pair.bincount(minlength=len(even)).double(), even) for pair in pairs]
    return CertificateLine(
        subject=subject,
        method=method,
        num_cases=len(values),
        result=f"p at least {min(values):.2g}",
        passed=all(value > FALSE_ALARM_RATE for value in values),
        false_alarm_rate=len(values) * FALSE_ALARM_RATE,
    )


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


def g_test(counts: Float[torch.Tensor, " cell"], expected: Float[torch.Tensor, " cell"]) -> float:
    """Compute the p-value of these counts where others are expected, ten or more in each cell.

    A sound sampler has a p-value below `a` with probability `a`. The likelihood-ratio statistic is
    2 sum O ln(O / E), with Williams' correction for few counts. It is chi-squared with one degree
    of freedom less than there are cells.
    """
    freedom, total = len(counts) - 1, counts.sum()
    statistic = 2 * torch.special.xlogy(counts, counts / expected).sum()
    statistic /= 1 + ((total / expected).sum() - 1) / (6 * total * freedom)  # Williams' correction
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))
