"""Saved drafters: they load with equal weights; damaged or unknown parts are errors."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from outrider.data.files import write_json
from outrider.models.drafters import build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.merged import MergedDrafter
from outrider.models.drafters.saved.build import require_unaltered, shape_digest
from outrider.models.drafters.saved.download import resolve_drafter
from outrider.models.drafters.saved.folder import (
    TrainingFacts,
    read_drafter_config,
    read_training_facts,
    record_weights,
    write_training_facts,
)
from outrider.models.export.package import is_package, package_files

from ....conftest import REPOSITORY


@pytest.fixture
def saved(target, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": "redrafter", "draft_vocab_size": 8, "exit_width": 24}), target)
    drafter.choose_draft_vocabulary(torch.arange(target.vocab_size))
    save_drafter(drafter, tmp_path / "drafter", target.identity)
    return tmp_path / "drafter"


def test_weights_config_and_vocabulary_come_back(target, saved):
    drafter = load_drafter(saved, target)
    tensors = safetensors.torch.load_file(saved / "model.safetensors")
    assert set(drafter.state_dict()) == set(tensors)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, tensors[name].to(tensor.dtype)), name
    assert drafter.draft_tokens.tolist() == list(range(292, 300))
    assert not drafter.training
    assert not any(p.requires_grad for p in drafter.parameters())
    assert next(drafter.parameters()).dtype == target.dtype


def test_beams_may_change_at_load_time_and_weights_may_not(target, saved):
    assert load_drafter(saved, target, beam_width=7).config.beam_width == 7
    with pytest.raises(ValueError, match="num_blocks can't be changed"):
        load_drafter(saved, target, num_blocks=3)


def test_the_saved_config_holds_no_path_of_the_machine(target, saved):
    assert str(saved.parents[1]) not in (saved / "config.json").read_text()


def kill_between_renames(folder: Path) -> None:
    """Leave the folder as a process does that is killed while it replaces it."""
    folder.rename(folder.with_name(f".{folder.name}.outrider-partial"))
    folder.with_name(f".{folder.name}.outrider-old").mkdir()


def test_options_that_are_gone_are_ignored_in_saved_drafters_unless_they_change_how_they_draft(target, saved):
    config = read_drafter_config(saved)

    def add(**former: Any) -> None:
        options = {**config.drafter, **former}
        digest = shape_digest(config.kind, {name: options[name] for name in options if name != "tree_padding"}, config.target)
        write_json(saved / "config.json", asdict(replace(config, drafter=options, shape_sha256=digest)))

    add(rnn=True, head_rank=None, tree_padding=None)
    assert load_drafter(saved, target).config.exit_width == 24
    assert parse_drafter({"start_from": str(saved)}).config.exit_width == 24
    for name, value in {"rnn": False, "tree_padding": "full"}.items():
        add(**{name: value})
        with pytest.raises(ValueError, match=f"the drafter redrafter has no option {name}"):
            load_drafter(saved, target)


def test_a_draft_model_that_was_saved_with_a_pace_loads_without_it(target, tmp_path):
    folder = tmp_path / "drafter"
    save_drafter(build_drafter(parse_drafter({"kind": "draft_model", "num_layers": 1}), target), folder, target.identity)
    config = read_drafter_config(folder)
    write_json(folder / "config.json", asdict(replace(config, drafter={**config.drafter, "pace": "expected"})))
    assert not hasattr(load_drafter(folder, target).config, "pace")
    assert isinstance(load_drafter(folder, target, pace="expected"), MergedDrafter)


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "eagle3", "mtp"])
def test_a_drafter_that_was_saved_with_a_temperature_loads_if_it_was_0(target, tmp_path, kind):
    options = {"kind": kind, "init": "random"} | ({"num_layers": 1} if kind == "draft_model" else {})
    save_drafter(build_drafter(parse_drafter(options), target), tmp_path / "drafter", target.identity)
    config = read_drafter_config(tmp_path / "drafter")

    def change(temperature: float) -> None:
        changed = replace(config, drafter={**config.drafter, "temperature": temperature})
        write_json(tmp_path / "drafter" / "config.json", asdict(changed))

    change(0.0)
    require_unaltered(tmp_path / "drafter", read_drafter_config(tmp_path / "drafter"))
    assert not hasattr(load_drafter(tmp_path / "drafter", target).config, "temperature")
    change(0.7)
    with pytest.raises(ValueError, match=f"the drafter {kind} has no option temperature"):
        load_drafter(tmp_path / "drafter", target)


def test_the_drafter_that_ships_is_unaltered():
    shipped = REPOSITORY / "models" / "smollm2_redrafter"
    require_unaltered(shipped, read_drafter_config(shipped))


@pytest.mark.parametrize("read", [resolve_drafter, read_drafter_config, package_files, is_package])
def test_a_drafter_is_found_after_a_kill_between_the_renames_of_its_folder(target, saved, read):
    kill_between_renames(saved)
    read(saved)
    assert load_drafter(saved, target).config.exit_width == 24


def test_a_truncated_weight_file_is_an_error(target, saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="damaged"):
        load_drafter(saved, target)
    path.unlink()
    with pytest.raises(ValueError, match="missing"):
        load_drafter(saved, target)


@pytest.mark.parametrize("key", ["format_version", "kind", "drafter", "target"])
def test_every_key_of_the_config_is_required(target, saved, key):
    config = json.loads((saved / "config.json").read_text())
    del config[key]
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{key}: is missing"):
        load_drafter(saved, target)


def test_unknown_keys_are_errors_at_every_level(target, saved):
    original = (saved / "config.json").read_text()
    num_checked = 0
    for level in ((), ("drafter",), ("target",)):
        config = json.loads(original)
        inner = config
        for key in level:
            inner = inner[key]
        inner["surprise"] = 1
        (saved / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="surprise"):
            load_drafter(saved, target)
        num_checked += 1
    assert num_checked == 3


def test_a_drafter_of_another_target_is_refused_with_the_differences(target, saved):
    drafter = load_drafter(saved, target)
    other = replace(target.identity, hidden_size=64, tokenizer_sha256="0" * 64)
    shutil.rmtree(saved)
    save_drafter(drafter, saved, other)
    with pytest.raises(ValueError, match=r"hidden_size: 64 for the drafter, 32 for this target; tokenizer_sha256"):
        load_drafter(saved, target)


def test_a_folder_without_a_drafter_is_an_error_with_the_remedy(target, tmp_path):
    with pytest.raises(ValueError, match="finished training"):
        load_drafter(tmp_path, target)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    value = json.loads(path.read_text())
    value["drafter"] |= changes
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("width", "message"), [(10**5, r"is \(\d+, \d+\), not|can't be built"), (10**12, "exit_width=1000000000000: must be below")]
)
def test_absurd_sizes_are_errors_before_any_memory_is_allocated(target, saved, width, message):
    edit_config(saved, exit_width=width)
    with pytest.raises(ValueError, match=message):
        load_drafter(saved, target)


def test_an_absurd_search_is_refused(target, saved):
    edit_config(saved, beam_width=10**7)
    with pytest.raises(ValueError, match="beam_width is 10000000"):
        load_drafter(saved, target)


def test_options_of_a_wrong_type_are_named(target, saved):
    with pytest.raises(ValueError, match="beam_width"):
        load_drafter(saved, target, beam_width="4")


def edit_tensors(folder: Path, change) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("input.bias"), "missing input.bias"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "unknown extra"),
        (lambda tensors: tensors.update({"input.bias": torch.zeros(3)}), r"input.bias is \(3,\), not \(32,\)"),
        (
            lambda tensors: tensors["recurrence.weight"].fill_(float("nan")),
            "recurrence.weight holds numbers that aren't",
        ),
        (lambda tensors: tensors.update({"input.bias": tensors["input.bias"].int()}), "input.bias is of torch.int32"),
        (lambda tensors: tensors.update(draft_tokens=tensors["draft_tokens"].float()), "draft_tokens is of torch.float32"),
        (lambda tensors: tensors["draft_tokens"].fill_(5), "must be distinct tokens"),
        (lambda tensors: tensors["draft_tokens"].add_(10**6), "must be distinct tokens"),
        (lambda tensors: tensors["draft_tokens"].sub_(300), "must be distinct tokens"),
        (lambda tensors: tensors.update({f"extra.{i}": torch.ones(1) for i in range(90)}), "and 85 more"),
    ],
)
def test_impossible_tensors_of_a_saved_drafter_are_errors(target, saved, change, message):
    edit_tensors(saved, change)
    with pytest.raises(ValueError, match=message):
        load_drafter(saved, target)


def flip_a_bit(path: Path) -> None:
    """Flip the lowest bit of the last number: it stays finite, and nearly equal."""
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_that_leaves_all_numbers_finite_is_an_error(target, saved):
    load_drafter(saved, target)
    flip_a_bit(saved / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors was altered or damaged: .*Copy or download it again"):
        load_drafter(saved, target)
    with pytest.raises(ValueError, match=r"model\.safetensors was altered or damaged"):
        build_drafter(parse_drafter({"start_from": str(saved)}), target)
    record_weights(saved)
    load_drafter(saved, target)


def edit_file(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_sha256": ""}, "was altered or damaged"),
        ({"weights_sha256": None}, "weights_sha256=null: must be a text"),
        ({"weights_sha256": "0" * 64}, "was altered or damaged"),
        ({"format_version": 1}, r"has format 1, and this version of outrider reads format 3"),
    ],
)
def test_a_digest_cannot_be_left_out_by_one_edit(target, saved, changes, message):
    edit_file(saved, **changes)
    with pytest.raises(ValueError, match=message):
        load_drafter(saved, target)


def test_the_facts_of_a_training_are_saved_beside_the_weights(target, saved):
    facts = TrainingFacts(
        steps=5,
        seconds=1.5,
        positions_seen=7,
        tokens_seen=9,
        parameters=11,
        tokens_per_step_estimate=2.0,
        labels="text",
        hardware="one CPU",
    )
    write_training_facts(saved, facts)
    assert read_training_facts(saved) == facts
    load_drafter(saved, target)
