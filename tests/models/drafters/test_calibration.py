"""Calibration: a text corrects what earlier texts have shown."""

import pytest

from outrider.models.drafters.calibration import MAX_PRIOR, MAX_TOTAL, source_key, start_of_text, teach


def test_earlier_texts_weigh_no_more_than_a_text_can_correct():
    key, rare = source_key(0, 1), source_key(1, 2)
    earlier = {key: (900.0, 1000.0), rare: (1.0, 2.0)}
    counts = start_of_text(earlier)
    hits, total = counts[key]
    assert total == MAX_PRIOR
    assert hits / total == pytest.approx(0.9)
    assert counts[rare] == (1.0, 2.0)
    for _ in range(200):
        teach(counts, [key], False)
    hits, total = counts[key]
    assert hits / total < 0.1
    assert total <= MAX_TOTAL + 1
    assert earlier[key] == (900.0, 1000.0), "the text has counts of its own"
