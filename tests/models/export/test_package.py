"""Packages for the Hub: complete, loadable, and without files that must not be shared."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from outrider.data.files import read_json, write_json
from outrider.models.drafters.options import RedrafterConfig
from outrider.models.drafters.saved.parts import packaged_parts, parse_drafter_name
from outrider.models.export.custom_generate import find_parts
from outrider.models.export.package import make_package, package_files


@pytest.fixture
def folder(package_dirs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(package_dirs["redrafter"], tmp_path / "package"))


def test_a_package_holds_the_documented_files(folder):
    names = set(package_files(folder))
    tops = {name for name in names if "/" not in name}
    assert tops == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert {"custom_generate/generate.py", "custom_generate/requirements.txt"} < names
    assert GenerationConfig.from_pretrained(folder).do_sample is False


def assert_generates_the_models_text(package: Path, model: PreTrainedModel) -> None:
    options = {"input_ids": torch.tensor([[1, 70, 71, 72, 70, 71]]), "max_new_tokens": 12}
    tokens = model.generate(**options, custom_generate=str(package), trust_remote_code=True)
    assert torch.equal(tokens, model.generate(**options))


def test_a_package_of_a_merge_decodes_with_all_parts(drafter_dirs, model, tmp_path):
    """One file names the training-free parts. The trained drafter can still be loaded alone."""
    make_package(parse_drafter_name(f"{drafter_dirs['redrafter']}+prompt_lookup"), tmp_path / "package", "# Merged\n")
    assert read_json(tmp_path / "package" / "merge.json") == {"training_free": ["prompt_lookup"]}
    assert packaged_parts(tmp_path / "package").kind == "redrafter+prompt_lookup"
    assert parse_drafter_name(tmp_path / "package").kind == "redrafter"
    for name in (str(tmp_path / "package"), tmp_path / "package"):
        assert find_parts(name, {}).kind == "redrafter+prompt_lookup", "generate(drafter=...) is given the package"
    assert_generates_the_models_text(tmp_path / "package", model)
    write_json(tmp_path / "package" / "merge.json", {"training_free": ["lookahead"]})
    with pytest.raises(ValueError, match="names lookahead, and there are prompt_lookup"):
        package_files(tmp_path / "package")


def test_a_package_of_training_free_drafters_needs_no_weights(model, tmp_path):
    make_package(parse_drafter_name("prompt_lookup"), tmp_path / "package", "# Prompt lookup\n")
    tops = {name for name in package_files(tmp_path / "package") if "/" not in name}
    assert tops == {"README.md", "generation_config.json", "merge.json"}
    assert find_parts(str(tmp_path / "package"), {}).kind == "prompt_lookup"
    with pytest.raises(ValueError, match="did you mean prompt_lookup"):
        find_parts("prompt_lokup", {})
    assert_generates_the_models_text(tmp_path / "package", model)


def test_a_package_has_the_weights_of_one_drafter(drafter_dirs, tmp_path):
    parts = parse_drafter_name(f"{drafter_dirs['redrafter']}+{drafter_dirs['medusa']}")
    with pytest.raises(ValueError, match="has 2 trained drafters, and a package holds the weights of one"):
        make_package(parts, tmp_path / "package", "# Two\n")
    assert not (tmp_path / "package").exists()


def test_a_package_holds_no_path_of_the_machine(folder, drafter_dirs):
    for name, path in package_files(folder).items():
        assert str(drafter_dirs["redrafter"].parent).encode() not in path.read_bytes(), name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("optimizer.safetensors", "a state of training"),
        ("Optimizer_State.safetensors", "a state of training"),
        ("trainer_state.json", "a state of training"),
        ("pytorch_model.bin", "a pickle"),
        ("optimizer.pt", "a state of training"),
        (".env", "hidden"),
        (".cache/token", "hidden"),
        ("checkpoints/model.safetensors", "an unknown folder"),
        ("custom_generate/weights.bin", "not code"),
        ("custom_generate/.secret.py", "hidden"),
        ("notes.txt", "unknown"),
    ],
)
def test_a_file_that_must_not_be_shared_is_an_error_that_names_it(folder, name, why):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"secret")
    with pytest.raises(ValueError, match=f"must not be shared: .*{why}.*Move them out"):
        package_files(folder)


@pytest.mark.parametrize("name", ["model2.safetensors", "custom_generate/mine.py"])
def test_weights_and_code_outside_of_the_drafter_are_an_error(folder, name):
    other = folder / ("model.safetensors" if name.endswith(".safetensors") else "custom_generate/absent.py")
    shutil.copyfile(other, folder / name)
    with pytest.raises(ValueError, match=f"holds files of something else: {name}. Move them out"):
        package_files(folder)


@pytest.mark.parametrize(("text", "why"), [("[]", "config.json"), ("{}", "format_version"), ("[" * 200_000, "not a JSON file")])
def test_an_unreadable_drafter_is_an_error(folder, text, why):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"holds no readable drafter: .*{why}"):
        package_files(folder)


def test_links_are_an_error_even_to_allowed_files(folder, tmp_path):
    shutil.move(folder / "README.md", tmp_path / "README.md")
    (folder / "README.md").symlink_to(tmp_path / "README.md")
    with pytest.raises(ValueError, match=r"README.md \(a link\)"):
        package_files(folder)
    (folder / "README.md").unlink()
    shutil.move(folder / "custom_generate", tmp_path / "code")
    (folder / "custom_generate").symlink_to(tmp_path / "code")
    with pytest.raises(ValueError, match=r"custom_generate \(a link\)"):
        package_files(folder)


def test_a_folder_without_a_drafter_is_refused(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no drafter"):
        package_files(folder)
    with pytest.raises(ValueError, match="is missing"):
        package_files(tmp_path / "nothing")


def test_a_failure_leaves_no_partial_folder(drafter_dirs, tmp_path):
    drafter = Path(shutil.copytree(drafter_dirs["redrafter"], tmp_path / "drafter"))
    weights = (drafter / "model.safetensors").read_bytes()
    (drafter / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        make_package(drafter, tmp_path / "out" / "package", "# Card\n")
    (tmp_path / "notes.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"notes\.json: .*lines: is missing"):
        make_package(drafter_dirs["redrafter"], tmp_path / "out" / "package", "# Card\n", tmp_path / "notes.json")
    assert not list((tmp_path / "out").iterdir() if (tmp_path / "out").exists() else [])


def test_a_package_is_not_written_into_a_folder_with_files(drafter_dirs, folder):
    with pytest.raises(ValueError, match="exists already"):
        make_package(drafter_dirs["medusa"], folder, "# Card\n")


def test_a_package_with_other_weights_is_an_error(folder):
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-4] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"holds no readable drafter: .*model\.safetensors was altered or damaged"):
        package_files(folder)


@pytest.mark.parametrize("section", ["drafter", "target"])
def test_a_drafter_whose_configuration_was_altered_is_not_packaged(section, drafter_dirs, folder, tmp_path):
    """No target is there to build it for."""
    drafter = Path(shutil.copytree(drafter_dirs["redrafter"], tmp_path / "drafter"))
    saved = json.loads((drafter / "config.json").read_text())
    altered = [
        {**saved, section: {**saved[section], name: not value if isinstance(value, bool) else value + 1}}
        for name, value in saved[section].items()
        if isinstance(value, int) and name not in RedrafterConfig.RUNTIME_FIELDS
    ]
    assert len(altered) >= 2
    for path, write in (
        (drafter, lambda: make_package(drafter, tmp_path / "out", "# Card\n")),
        (folder, lambda: package_files(folder)),
    ):
        for content in altered:
            (path / "config.json").write_text(json.dumps(content))
            with pytest.raises(ValueError, match=r"config\.json was altered: .*Copy or download it again"):
                write()
    assert not (tmp_path / "out").exists()
    (drafter / "config.json").write_text(json.dumps({**saved, "drafter": {**saved["drafter"], "beam_width": 3}}))
    make_package(drafter, tmp_path / "out", "# Card\n")


def test_a_package_with_facts_of_no_training_is_an_error(folder):
    (folder / "training.json").write_text('{"steps": 5}')
    with pytest.raises(ValueError, match=r"holds no readable drafter: .*training\.json: seconds: is missing"):
        package_files(folder)
