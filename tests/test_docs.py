"""Commands and code of README and docs/, composed, parsed or run.

So no page shows what doesn't work.
"""

import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.cli.config import RunConfig

from . import doc_commands
from .doc_blocks import REPOSITORY, Block, all_blocks, commands, pages
from .doc_files import write_demo_drafter

LANGUAGES = {"sh", "bash", "python", "yaml", "text", "json"}
"""What a block may be; a directive of MyST has braces."""
BLOCKS = all_blocks()
LEAST = {"sh": 50, "bash": 2, "python": 10}
"""So many blocks of each language are visited at least."""


@pytest.fixture(autouse=True)
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a clone, in which commands may find and write files."""
    for name in (".ci", "conf", "models", "scripts", "train.py"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def test_blocks_of_each_language_are_visited() -> None:
    counts = Counter(block.language for block in BLOCKS)
    assert {language for language in counts if not language.startswith("{")} <= LANGUAGES
    assert {language: counts[language] >= least for language, least in LEAST.items()} == dict.fromkeys(LEAST, True)
    assert {block.page for block in BLOCKS} <= {path.relative_to(REPOSITORY).as_posix() for path in pages()}


@pytest.mark.parametrize("block", of_language("sh", "bash"), ids=lambda block: block.name)
def test_shell_commands_would_start(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    visited = 0
    for command in commands(block.text):
        doc_commands.check(command, monkeypatch)
        visited += 1
    assert visited > 0


@pytest.mark.parametrize("block", of_language("python"), ids=lambda block: block.name)
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.name, "exec")


@pytest.mark.parametrize("page", sorted({block.page for block in of_language("python") if block.is_run}))
def test_python_that_is_marked_runs_on_the_demos_target(page: str, clone: Path) -> None:
    write_demo_drafter(clone / "outputs" / "demo" / "drafter")
    names: dict[str, Any] = {}
    for block in of_language("python"):
        if block.page == page and block.is_run:
            exec(compile(block.text, block.name, "exec"), names)
            assert list(names["steps"]) is not None


@pytest.mark.parametrize(
    ("page", "mark", "least"),
    [
        ("file-formats.md", r"^<!-- from code: record (\S+):(\S+) -->$", 11),
        ("api.md", r"^\.\. auto\w+:: outrider\.(\S+)\.(\w+)$", 31),
    ],
)
def test_pages_made_from_code_name_what_exists(page: str, mark: str, least: int) -> None:
    names = re.findall(mark, (REPOSITORY / "docs" / "reference" / page).read_text(), re.MULTILINE)
    assert len(names) >= least
    for module, name in names:
        assert hasattr(import_module(f"outrider.{module}"), name), f"{module} has no {name}"


@pytest.mark.parametrize("block", of_language("yaml"), ids=lambda block: block.name)
def test_yaml_is_read_and_recipes_compose(block: Block, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = yaml.safe_load(block.text)
    if not isinstance(content, dict) or not content.keys() <= {"base", *RunConfig.__dataclass_fields__}:
        return
    base = "" if "base" in content else "base: demo\n"  # most pages show a part of a recipe
    (clone / "page.yaml").write_text(base + block.text)
    assert doc_commands.run_config(["page.yaml"], monkeypatch) is not None


def test_a_shell_block_is_split_as_a_shell_would() -> None:
    text = "A=1 b 'c # d' \\\n  e   # the target's f\n# g\nh && i > j | k \"l\n m\"\n"
    assert list(commands(text)) == [["b", "c # d", "e"], ["h"], ["i"], ["k", "l\n m"]]


def test_a_docstring_keeps_bold_words_and_code_and_no_other_stars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "_ext"))
    pytest.importorskip("sphinx", reason="the documentation's own packages: pip install '.[docs]'")
    rst_line = import_module("from_code").rst_line
    assert rst_line("**Trees** (`a * b`): c * d, **options") == r"**Trees** (``a * b``): c \* d, \*\*options"
