"""The commands `outrider package`, `push` and `pull`: output and use of the network."""

import shutil
from pathlib import Path

import pytest

from outrider.models.export import hub

from ..commands import invoke


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(hub, "HfApi", touched)
    monkeypatch.setattr("httpx.Client.send", touched)


def test_a_package_is_made_and_listed(tiny_drafter_dir: Path, tmp_path: Path) -> None:
    options = ["--licence", "apache-2.0", "--repo", "me/drafter"]
    result = invoke(["package", str(tiny_drafter_dir), "--output", str(tmp_path / "folder"), *options])
    assert result.exit_code == 0, result.output
    size = (tiny_drafter_dir / "model.safetensors").stat().st_size
    assert f"{size:,}  model.safetensors" in result.output
    assert "custom_generate/generate.py" in result.output
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert 'drafter = "me/drafter"' in card


@pytest.mark.usefixtures("no_network")
def test_a_dry_run_lists_every_file_and_touches_no_network(tiny_drafter_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    invoke(["package", str(tiny_drafter_dir), "--output", str(folder)])
    result = invoke(["push", str(folder), "me/drafter", "--dry-run"])
    assert result.exit_code == 0, result.output
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        assert f"{path.stat().st_size:>13,}  {path.relative_to(folder).as_posix()}\n" in result.output
    assert f"bytes in {len(paths)} files" in result.output
    assert "nothing was uploaded to me/drafter (private if it is created, branch main)" in result.output


@pytest.mark.usefixtures("no_network")
def test_a_push_lists_the_files_that_it_leaves_out_of_a_bare_drafters_folder(tiny_drafter_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_drafter_dir, tmp_path / "drafter"))
    (folder / "README.md").write_text("# Mine\n")
    (folder / "tuned.json").write_text("{}")
    result = invoke(["push", str(folder), "me/drafter", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "left out: README.md, tuned.json." in result.output
    assert "custom_generate/generate.py" in result.output, "a bare drafter is packaged first"
    assert "tuned.json" in {path.name for path in folder.iterdir()}


@pytest.mark.usefixtures("no_network")
def test_a_package_prints_the_options_for_names_missing_from_the_card(tiny_drafter_dir: Path, tmp_path: Path) -> None:
    make = ["package", str(tiny_drafter_dir), "--output"]
    output = invoke([*make, str(tmp_path / "a")]).output
    assert "names the drafter by a local folder: `outrider package --repo user/name`" in output
    assert "names its target by a local folder: `outrider package --base-model user/name`" in output
    named = ["--repo", "me/drafter", "--base-model", "some/target"]
    assert "by a local folder" not in invoke([*make, str(tmp_path / "b"), *named]).output


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "repo",
    ["drafter", "me/drafter/more", "me/drafter@v1", "https://huggingface.co/me/drafter", "me/-x", "me/x..y", "m\u00e9/x"],
)
def test_an_invalid_repository_name_is_refused_before_anything_is_done(tiny_drafter_dir: Path, repo: str) -> None:
    result = invoke(["push", str(tiny_drafter_dir), repo])
    assert result.exit_code == 2
    assert "is not the name of a repository; give user/name" in result.message


def test_no_option_takes_a_token() -> None:
    """Other users of the machine could read a token on a command line."""
    for command in ("push", "pull"):
        assert "token" not in invoke([command, "--help"]).output.replace("The token", "")
