"""The progress bar of answers and labels."""

import pytest

from outrider.distill.plan import progress_bar


def test_every_answer_of_a_batch_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(100, 20, "answer", hide=False) as bar:
        for size in (64, 1, 1):  # a large step must not hide the small ones after it
            bar.update(size)
            assert f"{bar.n:.1f}/100" in capsys.readouterr().err
    capsys.readouterr()
    with progress_bar(100, 20, "answer", hide=True) as bar:
        bar.update(1)
    assert not capsys.readouterr().err
