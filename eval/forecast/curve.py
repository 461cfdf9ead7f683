"""Learning curves of drafters, continued.

What is accepted of a draft grows with the labels: at first by about the same amount with each doubling of them,
later by less. So a curve is what the largest sample reached, the gain of a doubling there, and the share of it that
each further doubling gains. Three short trainings can't tell that share: it was chosen by earlier, shorter trainings of
the targets that benchmarks/forecast.json records, and stays as it was.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from .measure import Steps

NUM_DRAWS = 2_000
Z_90 = 1.645
"""The normal distribution's bound of 90 %. Student's is larger by about (1 + (z^2 + 1) / 4n) with n degrees of freedom."""
KEPT, KEPT_SPREAD = 0.88, 0.1
"""Share of a doubling's gain that the next doubling gains: mean and standard deviation."""


def resampled(by_part: Sequence[Sequence[Steps]], *, seed: int, of: str = "tokens") -> Float[np.ndarray, "part draw"]:
    """Return tokens (or seconds) per step of each part over resampled prompts, the same ones in all parts.

    Resampled means of few prompts spread too little: their variance is that of n in place of n - 1, and they are normal
    where Student's t is meant (Hesterberg 2015, arXiv 1411.5279, on narrowness bias). So draws are spread by both factors.
    """
    counts = np.array([[(getattr(one, of), one.steps) for one in part] for part in by_part], dtype=float)  # [part, prompt, 2]
    num_prompts = counts.shape[1]
    picked = np.random.default_rng(seed).integers(0, num_prompts, (NUM_DRAWS, num_prompts))
    drawn, whole = _ratios(counts[:, picked].sum(2)), _ratios(counts.sum(1))[:, None]
    degrees = max(1, num_prompts - 1)
    spread = np.sqrt(num_prompts / degrees) * (1 + (Z_90**2 + 1) / (4 * degrees))
    return whole * (drawn / np.where(whole > 0, whole, 1)) ** spread


def _ratios(sums: Float[np.ndarray, "*part 2"]) -> Float[np.ndarray, "*part"]:
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def continued(
    num_labels: Sequence[int], by_part: Sequence[Sequence[Steps]], at: Sequence[float], *, seed: int
) -> Float[np.ndarray, "size draw"]:
    """Continue a curve of tokens per step to numbers of labels: [size, draw].

    `num_labels` are those of each part, ascending. A size below the largest part is on the straight line of the parts.
    """
    # 1. The line through the parts, over doublings of the labels. A drafter doesn't unlearn by more of them.
    measured = resampled(by_part, seed=seed)
    doublings = np.log2(num_labels)
    middle = doublings.mean()
    away = doublings - middle
    slope = np.maximum(away @ (measured - measured.mean(0)) / (away @ away), 0)
    reached = measured.mean(0) + slope * away[-1]
    # 2. Further doublings, each of which gains less than the one before.
    kept = np.random.default_rng(seed + 1).normal(KEPT, KEPT_SPREAD, NUM_DRAWS).clip(0.05, 0.999)
    sizes = np.log2(at) - doublings[-1]
    first = kept ** away[-1]  # the gain of the next doubling, over the line's
    gains = [slope * size if size < 0 else slope * first * (1 - kept**size) / (1 - kept) for size in sizes]
    return np.maximum(reached + np.array(gains), 1.0)
