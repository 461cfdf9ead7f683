"""Detection of answers that end in a loop."""

from outrider.data.loops import LOOP_TOKENS, ends_in_a_loop


def test_loops_are_distinguished_from_repetition_in_a_text() -> None:
    text = list(range(100, 200))
    assert not ends_in_a_loop(text)
    assert ends_in_a_loop(text + [7] * LOOP_TOKENS)
    assert ends_in_a_loop(text + [1, 2, 3, 4, 5, 6, 7, 8] * 8)
    assert ends_in_a_loop([5, 6] * 8)
    assert ends_in_a_loop([5] * 8)
    assert not ends_in_a_loop([5] * 7)  # a short answer may well be "ha ha ha"
    assert not ends_in_a_loop([])
    assert not ends_in_a_loop(text + [7] * (LOOP_TOKENS - 1))  # a table's rule
    assert not ends_in_a_loop([7] * LOOP_TOKENS + text)
    assert not ends_in_a_loop([7] * 20 + text[: LOOP_TOKENS - 20])
    assert not ends_in_a_loop(text + [1, 2, 3, 4, 5, 6, 7, 8, 9] * 20)  # rows of a table
