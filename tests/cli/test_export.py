"""The commands `outrider export` and `outrider import`, from start to end."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.cli.describe import field_docstrings
from outrider.cli.export import UNWANTED, WANTED, ExportOptions
from outrider.models.drafters import build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.saved.folder import record_weights
from outrider.models.export.registry import ENGINES, FORMATS
from outrider.models.llm.hf_target import HFTarget

from ..commands import call


@pytest.fixture
def drafter(tiny_target: HFTarget, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": "medusa", "num_heads": 2}), tiny_target)
    save_drafter(drafter, tmp_path / "drafter", tiny_target.identity)
    return tmp_path / "drafter"


def test_an_exported_drafter_is_imported_unchanged(drafter, tiny_target_dir, tmp_path):
    output = call("export", drafter, "--target", tiny_target_dir, "--to", "medusa", "--output", tmp_path / "theirs")
    assert "in the format medusa" in output
    output = call("import", tmp_path / "theirs", "--target", tiny_target_dir, "--output", tmp_path / "again")
    assert "a drafter of the kind medusa, with 21,312 parameters" in output
    assert f"outrider eval --target {tiny_target_dir} --drafter {tmp_path / 'again'}" in output
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (drafter / name).read_bytes()


def test_an_engine_names_the_format_of_the_drafters_kind(tiny_target, tiny_target_dir, tmp_path):
    names = {("eagle", "vllm"): "eagle1-vllm", ("eagle", "sglang"): "eagle1-sglang", ("draft_model", "vllm"): "transformers"}
    for (kind, engine), name in names.items():
        config = {"kind": kind, **({"num_layers": 1} if kind == "draft_model" else {})}
        save_drafter(build_drafter(parse_drafter(config), tiny_target), tmp_path / kind, tiny_target.identity)
        output = tmp_path / f"{kind}-{engine}"
        arguments = ("export", tmp_path / kind, "--target", tiny_target_dir, "--to", engine, "--output", output)
        assert f"in the format {name}" in call(*arguments)
        assert json.loads((output / "outrider.json").read_text())["format"] == name


def test_the_help_lists_every_format_with_its_kind_and_the_engines():
    help_text = field_docstrings(ExportOptions)["to"]
    for name, format in FORMATS.items():
        assert f"{name} ({format.kind}" in help_text
    assert all(engine in help_text for engine in ENGINES)
    assert {name for served in ENGINES.values() for name in served.values()} <= {*FORMATS}


def test_an_import_needs_no_tokenizer(drafter, tiny_target, tiny_target_dir, tmp_path):
    call("export", drafter, "--target", tiny_target_dir, "--to", "medusa", "--output", tmp_path / "theirs")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (bare / name).write_bytes((tiny_target_dir / name).read_bytes())
    call("import", tmp_path / "theirs", "--target", bare, "--output", tmp_path / "again")
    (tmp_path / "theirs" / "outrider.json").unlink()
    call("import", tmp_path / "theirs", "--target", bare, "--output", tmp_path / "published")
    assert json.loads((tmp_path / "published" / "config.json").read_text())["target"]["tokenizer_sha256"] == ""
    # The drafter fits the complete target too.
    load_drafter(tmp_path / "published", tiny_target)
    with pytest.raises(ValueError, match="target.name_or_path is './nowhere', and there is no such directory"):
        call("import", tmp_path / "theirs", "--target", "./nowhere", "--output", tmp_path / "none")


def test_an_export_can_be_pushed_and_a_pickle_cannot(drafter, tiny_target_dir, tmp_path):
    for name in ("tensorrt-llm", "medusa"):
        call("export", drafter, "--target", tiny_target_dir, "--to", name, "--output", tmp_path / name)
    listed = call("push", tmp_path / "tensorrt-llm", "user/drafter", "--dry-run")
    assert {"config.json", "medusa_lm_head.safetensors", "outrider.json"} <= set(listed.split())
    with pytest.raises(ValueError, match=r"medusa_lm_head.pt \(a pickle"):
        call("push", tmp_path / "medusa", "user/drafter", "--dry-run")


def test_numbers_that_a_narrower_type_cannot_hold_are_refused(drafter, tiny_target_dir, tmp_path):
    weights = load_file(drafter / "model.safetensors")
    weights["blocks.0.0.linear.weight"][0, 0] = 1e6
    save_file(weights, drafter / "model.safetensors")
    record_weights(drafter)
    arguments = ("export", drafter, "--target", tiny_target_dir, "--to", "tensorrt-llm", "--output", tmp_path / "theirs")
    with pytest.raises(ValueError, match="0.0.linear.weight of the drafter doesn't fit into torch.float16"):
        call(*arguments, "--dtype", "float16")
    call(*arguments, "--dtype", "bfloat16")


def test_a_published_folder_is_read_with_options_of_drafting(drafter, tiny_target, tiny_target_dir, tmp_path):
    call("export", drafter, "--target", tiny_target_dir, "--to", "medusa", "--output", tmp_path / "a", "--dtype", "bfloat16")
    (tmp_path / "a" / "outrider.json").unlink()
    options = ["--format", "medusa", "--setting", "{tree_nodes: 3}"]
    call("import", tmp_path / "a", "--target", tiny_target_dir, "--output", tmp_path / "b", *options)
    again = load_drafter(tmp_path / "b", tiny_target)
    assert again.config.tree_nodes == again.max_nodes == 3


def test_mistakes_are_errors_before_anything_is_loaded(drafter, tiny_target_dir, tmp_path, monkeypatch):
    target = ("--target", tiny_target_dir, "--output", tmp_path / "out")
    monkeypatch.setattr("outrider.models.llm.loading.load_target", lambda *arguments: pytest.fail("the target was loaded"))
    for arguments, message in (
        (("export", drafter, *target, "--to", "tgi"), r"the format is 'tgi'; choose one of .*eagle1-vllm \(eagle\)"),
        (
            ("export", drafter, *target, "--to", "vllm"),
            "doesn't serve drafters of the kind medusa, .*eagle3.* as medusa, tensorrt-llm",
        ),
        (("export", drafter, *target, "--to", "medusa", "--dtype", "int8"), 'dtype="int8": must be one of'),
        (("import", drafter, *target, "--output", drafter), "exists already; name a new folder"),
        (("import", "nobody/nothing", *target), "there is no local folder nobody/nothing, and as a name on the Hub"),
        (("import", "no/such/folder", *target), "no/such/folder is neither a local folder nor a name on the Hub"),
        (("import", drafter, *target), "match no known format"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments)
    assert not (tmp_path / "out").exists()


def test_no_executable_file_is_downloaded(drafter, tiny_target_dir, tmp_path, monkeypatch):
    received = {}

    def download(name, **options):
        received.update(options, name=name)
        return os.fspath(tmp_path / "theirs")

    call("export", drafter, "--target", tiny_target_dir, "--to", "medusa", "--output", tmp_path / "theirs")
    monkeypatch.setattr("outrider.models.drafters.saved.download.snapshot_download", download)
    call("import", "org/heads@abc", "--target", tiny_target_dir, "--output", tmp_path / "again")
    assert received == {"name": "org/heads", "revision": "abc", "allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    assert not any(pattern.endswith((".py", "*")) for pattern in WANTED)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["kind"] == "medusa"
