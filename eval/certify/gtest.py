"""The G-test: were these counts drawn from that distribution?"""

import torch
from jaxtyping import Float, Int

MIN_EXPECTED = 10.0
"""Cells where fewer counts are expected are pooled: below, the statistic is no longer near
chi-squared."""


def g_test(counts: Int[torch.Tensor, " cell"], probs: Float[torch.Tensor, " cell"]) -> float:
    """Probability of counts at least as unlikely as these, were `probs` right.

    Below `a` in a share `a` of all sound samplers. The likelihood-ratio statistic 2 sum O ln(O /
    E), with Williams' correction for few counts, is chi-squared with as many degrees of freedom as
    there are cells, less one. The rarest cells are pooled until at least `MIN_EXPECTED` counts are
    expected in each; which ones, `probs` alone decides. A count where `probs` is 0 gives 0.
    """
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
    freedom = len(counts) - 1
    if not freedom:
        return 1.0
    statistic = 2 * torch.special.xlogy(counts, counts / expected).sum()
    total = counts.sum()
    statistic /= 1 + ((total / expected).sum() - 1) / (6 * total * freedom)  # Williams' correction
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))
