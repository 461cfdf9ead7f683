"""A fixture for tests that evaluate tiny targets: what takes longer than their evaluation is left out."""

import functools
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from outrider.eval.measure import environment

git_hash = functools.cache(environment._git_hash)


def write_no_plot(figure: Figure, path: Path, **options: Any) -> None:
    path.write_bytes(b"\x89PNG without an image")


@pytest.fixture
def real_plots() -> None:
    """Let a test draw its plots."""


@pytest.fixture(autouse=True)
def cheap_evaluations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe the checkout once for all tests of a process, and draw no plots, except with `real_plots`."""
    monkeypatch.setattr(environment, "_git_hash", git_hash)
    if "real_plots" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", write_no_plot)
