"""Import of scripts, which are no modules of a package."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that imports a script by its path without the ending: `bench/turns`."""

    def load(name: str) -> Any:
        path = SCRIPTS / name
        monkeypatch.syspath_prepend(str(path.parent))
        return importlib.import_module(path.name)

    return load
