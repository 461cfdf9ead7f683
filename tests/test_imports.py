"""Rules for how the library imports itself; import-linter checks the layers (`make lint`)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"cli", "conf", "data", "distill", "eval", "models", "train"}
LIBRARY = sorted(path for folder in PACKAGES for path in (REPOSITORY / folder).rglob("*.py"))


def absolute_imports(path: Path) -> list[str]:
    """List the top-level names that a file imports absolutely."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append((node.module or "").split(".")[0])
    return names


def test_nothing_imports_our_folders_by_their_bare_names() -> None:
    """`import data` makes a second copy of every class in a checkout, and fails in a wheel."""
    users = [path for folder in ("scripts", "tests") for path in (REPOSITORY / folder).rglob("*.py")]
    assert min(len(users), len(LIBRARY)) > 40
    assert [path for path in (*LIBRARY, *users) if not PACKAGES.isdisjoint(absolute_imports(path))] == []
    assert [path for path in LIBRARY if "outrider" in absolute_imports(path)] == [], "the library imports itself relatively"


def test_absolute_imports_finds_bare_imports_inside_functions(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("def late():\n    from data.types import Turn\n    import models.decoding\n")
    assert absolute_imports(path) == ["data", "models"]


@pytest.mark.slow
@pytest.mark.long
def test_every_module_can_be_imported_before_all_others() -> None:
    """A module that can only be imported after others hides a circular import.

    `make lint` finds circles in the text of the modules; this finds those of imports at run time.
    """
    script = """
import sys
from importlib import import_module
for name in sys.argv[1:]:
    for loaded in [each for each in sys.modules if each.partition(".")[0] == "outrider"]:
        del sys.modules[loaded]
    import_module(name)
"""
    modules = ["outrider." + ".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in LIBRARY]
    names = [name.removesuffix(".__init__") for name in modules]
    assert len(names) > 150
    result = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
