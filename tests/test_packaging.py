"""Contents of the wheel: the whole library under one name, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
NOT_BUILT_FROM = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "outputs", "tests", "wandb")


def packages() -> dict[str, str]:
    """Map the import name of each top-level package to its folder."""
    table: dict[str, str] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    return table


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZipFile]:
    # Build from a copy: setuptools leaves built files in the source folder and packs them the next
    # time, even when they are stale.
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPOSITORY, folder / "source", ignore=NOT_BUILT_FROM)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--wheel-dir", folder, folder / "source"], check=True, timeout=120, stdin=subprocess.DEVNULL)
    (path,) = folder.glob("*.whl")
    with ZipFile(path) as archive:
        yield archive


def test_every_module_of_the_tree_is_in_the_wheel(wheel: ZipFile) -> None:
    names = set(wheel.namelist())
    visited = 0
    for package, folder in packages().items():
        for path in (REPOSITORY / folder).rglob("*.py"):
            assert f"{package.replace('.', '/')}/{path.relative_to(REPOSITORY / folder).as_posix()}" in names
            visited += 1
    assert visited > 30


def test_recipes_templates_and_the_demo_target_are_in_the_wheel(wheel: ZipFile) -> None:
    names = set(wheel.namelist())
    data = [
        *(REPOSITORY / "conf").rglob("*.yaml"),
        REPOSITORY / "data" / "suites.yaml",
        *(REPOSITORY / "data" / "templates").iterdir(),
        *(REPOSITORY / "eval" / "templates").iterdir(),
        *(REPOSITORY / "models" / "demo_target").glob("*"),
    ]
    missing = [path for path in data if f"outrider/{path.relative_to(REPOSITORY).as_posix()}" not in names]
    assert not missing
    assert len(data) > 10


def test_outrider_is_the_only_top_level_name_in_the_wheel(wheel: ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"outrider"}
    assert "outrider/__init__.py" not in wheel.namelist()


def test_the_licence_and_the_command_are_in_the_wheel(wheel: ZipFile) -> None:
    names = wheel.namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "outrider = outrider.cli.main:main" in wheel.read(entry_points).decode()


@pytest.mark.slow
def test_a_recipe_composes_from_the_wheel_alone(wheel: ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    script = (
        "import outrider.conf\nfrom outrider.cli.main import main\n"
        f"assert outrider.conf.__file__.startswith({str(tmp_path)!r}), outrider.conf.__file__\nmain()"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "run", "conf=demo", "--show"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert f"name_or_path: {tmp_path / 'site/outrider/models/demo_target'}" in result.stdout, result.stderr


def test_lint_checks_every_package() -> None:
    (line,) = [line for line in (REPOSITORY / "Makefile").read_text().splitlines() if line.startswith("PACKAGES := ")]
    assert sorted(line.removeprefix("PACKAGES := ").split()) == sorted(packages().values())
    assert {package.removeprefix("outrider.") for package in packages()} == set(packages().values())


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return table


def test_the_page_on_a_package_index_has_no_relative_links(wheel: ZipFile) -> None:
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    description = message_from_bytes(wheel.read(metadata)).get_payload()
    assert isinstance(description, str)
    assert description.startswith("# outrider")
    links = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", description)
    assert len(links) > 3
    assert [link for pair in links for link in pair if link and not link.startswith(("https://", "#"))] == []


def test_version_and_citation_agree() -> None:
    version = project()["version"]
    released = re.findall(r"^## \[(\d[^\]]*)\] - (\d{4}-\d\d-\d\d)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert (version, citation["date-released"]) == released[0]
    assert citation["version"] == version
    assert citation["license"] == project()["license"]


def test_the_citation_has_what_its_format_requires() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    for work in (citation, *citation["references"]):
        assert {"title", "type", "authors"} <= work.keys()
        assert all("name" in author or {"family-names", "given-names"} <= author.keys() for author in work["authors"])
    assert any("2403.09919" in work["doi"] for work in citation["references"])
