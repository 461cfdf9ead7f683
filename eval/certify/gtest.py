"""The G-test: a test of whether counts were sampled from a distribution."""

import torch
from jaxtyping import Float, Int

MIN_EXPECTED = 10.0
"""Cells with fewer expected counts are pooled, because below this number the statistic is not near
chi-squared."""


def g_test(counts: Int[torch.Tensor, " cell"], probs: Float[torch.Tensor, " cell"]) -> float:
    """Compute the p-value of these counts under `probs`.

    A sound sampler has a p-value below `a` with probability `a`. The likelihood-ratio statistic is
    2 sum O ln(O / E), with Williams' correction for few counts. It is chi-squared with one degree
    of freedom less than there are cells. The rarest cells are pooled until each has at least
    `MIN_EXPECTED` expected counts. Only `probs` decides which cells are pooled. A count where
    `probs` is 0 gives 0.
    """
    # 1. Pool the rarest cells.
    if counts[probs == 0].any():
        return 0.0
    expected, order = (probs * counts.sum()).sort()
    counts = counts[order].double()
    num_rare = int((expected < MIN_EXPECTED).sum())
    while num_rare and num_rare < len(expected) and expected[:num_rare].sum() < MIN_EXPECTED:
        num_rare += 1
    if num_rare:
        expected, counts = (
            torch.cat([values[:num_rare].sum(0, keepdim=True), values[num_rare:]]) for values in (expected, counts)
        )

    # 2. Compare the statistic with chi-squared.
    freedom = len(counts) - 1
    if not freedom:
        return 1.0
    statistic = 2 * torch.special.xlogy(counts, counts / expected).sum()
    total = counts.sum()
    statistic /= 1 + ((total / expected).sum() - 1) / (6 * total * freedom)  # Williams' correction
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))
