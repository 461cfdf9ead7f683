"""The usual value and the usual deviation from it, where a few values may be far off."""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

NORMAL_MEDIAN_DEVIATION = NormalDist().inv_cdf(0.75)
"""Median absolute deviation of a normal distribution whose standard deviation is 1."""


def median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Median and robust standard deviation, which outliers hardly move.

    The deviation is the scaled median absolute deviation: for normally distributed values it
    estimates their standard deviation. Values that include NaN give NaN.
    """
    array = np.asarray(values)
    median = np.median(array)
    return float(median), float(np.median(np.abs(array - median)) / NORMAL_MEDIAN_DEVIATION)
