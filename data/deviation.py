"""Median and robust deviation of values, of which a few may be outliers."""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

NORMAL_MEDIAN_DEVIATION = NormalDist().inv_cdf(0.75)
"""Median absolute deviation of a normal distribution with standard deviation 1."""


def median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and a robust standard deviation, which outliers hardly change.

    The deviation is the scaled median absolute deviation. For normally distributed values it
    estimates their standard deviation. Values that include NaN give NaN.
    """
    array = np.asarray(values)
    median = np.median(array)
    return float(median), float(np.median(np.abs(array - median)) / NORMAL_MEDIAN_DEVIATION)
