"""Code in a drafter's package: it needs only packages that users of transformers have."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports

from outrider.models.export import bundle
from outrider.models.export.bundle import ABSENT, custom_generate_files

REPOSITORY = Path(__file__).parents[3]
ALLOWED = {"pydantic", "pydantic_core", "torch", "transformers", "safetensors", "numpy", "huggingface_hub"}


def test_bundled_code_imports_only_packages_that_users_have(tmp_path: Path) -> None:
    """transformers checks imports inside functions too."""
    files = custom_generate_files()
    visited, foreign = 0, set()
    for name, text in files.items():
        if name.endswith(".py"):
            (tmp_path / name).write_text(text)
            foreign |= {*get_imports(tmp_path / name)} - sys.stdlib_module_names - ALLOWED
            assert {f"{module}.py" for module in get_relative_imports(tmp_path / name)} <= files.keys(), name
            visited += 1
    assert not foreign
    assert visited > 30


def test_get_imports_finds_imports_inside_functions(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("def late():\n    from accelerate import Accelerator\n")
    assert get_imports(tmp_path / "late.py") == ["accelerate"]


def test_bundled_files_import_each_other_from_one_folder() -> None:
    """transformers follows only relative imports of one level."""
    for name, text in custom_generate_files().items():
        for node in ast.walk(ast.parse(text)) if name.endswith(".py") else ():
            if isinstance(node, ast.ImportFrom):
                assert node.level < 2, name
                assert node.level == 0 or (node.module and "." not in node.module), name


def test_transformers_reads_each_bundled_file_once(tmp_path: Path) -> None:
    """At every call it reads a file that generate.py doesn't import once per import path to it."""
    modules = {name: text for name, text in custom_generate_files().items() if name.endswith(".py")}
    for name, text in modules.items():
        (tmp_path / name).write_text(text)
    read = [Path(path).name for path in get_relative_import_files(tmp_path / "generate.py")]
    assert sorted([*read, "generate.py"]) == sorted(modules)


def test_a_folder_without_a_package_hides_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout keeps the compiled files of a package that has become a module."""
    (tmp_path / "models" / "tree" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(bundle, "ROOT", tmp_path)
    assert bundle._path("models.tree") == tmp_path / "models" / "tree.py"


def test_bundled_code_equals_the_library_except_for_imports() -> None:
    changed = 0
    for name, text in custom_generate_files().items():
        header, _, rest = text.partition("\n")
        if source := re.match(r"# (\S+\.py) of outrider", header):
            for ours, theirs in zip((REPOSITORY / source[1]).read_text().splitlines(), rest.splitlines(), strict=True):
                assert ours == theirs or re.match(r"\s*from \.\w+ import", theirs), (name, theirs)
                changed += ours != theirs
    assert changed > 100


def test_training_code_in_the_bundle_raises_when_called() -> None:
    module: dict[str, object] = {}
    exec(ABSENT, module)
    absent = module["__getattr__"]("load_target")  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="load_target is a part of training"):
        absent("somewhere")


def test_the_licence_travels_with_the_code() -> None:
    assert custom_generate_files()["LICENSE"] == (REPOSITORY / "LICENSE").read_text()


def test_the_bundles_requirements_are_the_librarys() -> None:
    lines = custom_generate_files()["requirements.txt"].split()
    assert [re.split("[><=]", line)[0] for line in lines] == ["pydantic", "torch", "transformers"]
    assert set(lines) <= set(requires("outrider") or ())


def distributions_needed_by(*names: str) -> set[str]:
    """Return these distributions and all their installed dependencies."""
    needed, to_visit = set(), list(names)
    while to_visit:
        name = re.match(r"[\w.-]+", to_visit.pop())[0].lower().replace("_", "-")  # type: ignore[index]
        if name in needed:
            continue
        needed.add(name)
        to_visit += [
            requirement for requirement in requires(name) or () if "extra ==" not in requirement and is_installed(requirement)
        ]
    return needed


def is_installed(requirement: str) -> bool:
    try:
        distribution(re.match(r"[\w.-]+", requirement)[0])  # type: ignore[index]
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.slow
def test_plain_transformers_decodes_with_a_package(package_dirs, tiny_target_dir, tmp_path):
    """The environment has only pydantic, torch, transformers and their dependencies.

    The script is the one with which users check their installation. It compares a single prompt and
    a left-padded batch with `model.generate`.
    """
    needed = distributions_needed_by("pydantic", "torch", "transformers")
    assert needed.isdisjoint({"outrider", "jaxtyping", "accelerate", "omegaconf"})
    site = tmp_path / "site"
    site.mkdir()
    for name in needed:
        for top in {file.parts[0] for file in distribution(name).files or ()} - {"..", "__pycache__"}:
            source = Path(str(distribution(name).locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    script = [sys.executable, "-S", str(REPOSITORY / "scripts" / "engines" / "check_transformers.py")]
    options = ["--target", str(tiny_target_dir), "--repeats", "0", "--max-new-tokens", "24"]
    result = subprocess.run(
        [*script, *options, *map(str, package_dirs.values())],
        env={**os.environ, "PYTHONPATH": str(site), "HF_HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    *rows, environment = map(json.loads, result.stdout.splitlines())
    assert environment == {"installed": []}
    assert [(row["folder"], row["batch_size"]) for row in rows] == [(kind, size) for kind in package_dirs for size in (1, 4)]
    assert all(row["equal"] for row in rows)
    # Without accepted tokens the comparison would test nothing.
    assert max(row["tokens_per_step"] for row in rows) > 3
