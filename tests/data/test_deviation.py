import statistics

import pytest

from outrider.data.deviation import median_and_deviation


def test_outliers_hardly_change_the_estimated_standard_deviation() -> None:
    values = [statistics.NormalDist(3, 0.5).inv_cdf((index + 0.5) / 1000) for index in range(1000)]
    assert median_and_deviation(values) == pytest.approx((3, 0.5), rel=1e-3)
    assert median_and_deviation([*values, *[1e9] * 20]) == pytest.approx((3, 0.5), rel=0.05)
