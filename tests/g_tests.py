"""G-tests of any distribution, by the statistic of `outrider certify`."""

import torch

from outrider.eval.certify import samples

MIN_EXPECTED = 10.0
"""Cells with fewer expected counts are pooled, because below this number the statistic is not near chi-squared."""


def g_test(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Compute the p-value of these counts under `probs`.

    The rarest cells are pooled until each has at least `MIN_EXPECTED` expected counts. Only `probs` decides which cells
    are pooled. A count where `probs` is 0 gives 0.
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
    return samples.g_test(counts, expected) if len(counts) > 1 else 1.0
