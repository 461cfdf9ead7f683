"""Configurations of strangers: absurd values are one error within seconds, whatever their keys."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.models.bounded_build import bounded_build, require_possible_numbers, stored_size
from outrider.models.drafters import build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.drafters.small_models import architecture_in, build_model
from outrider.models.export.registry import export_drafter, import_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
BART = {
    "model_type": "bart",
    "d_model": 32,
    "max_position_embeddings": 64,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
VISION = {**SMALL, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
NESTED = {"model_type": "gemma3", "text_config": {**SMALL, "head_dim": 8}, "vision_config": VISION}
ABSURD = (10**6, 10**12, 10**30, 0, -1, "", None, [], {"a": {}}, True, float("nan"), 1e300)
MOST_SECONDS = 10


def save_model(target: HFTarget, folder: Path, architecture: dict[str, Any]) -> Path:
    """Save an untrained draft model of another architecture."""
    tokens = {"vocab_size": target.vocab_size, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 3}
    whole = architecture | tokens
    if "text_config" in architecture:
        whole = architecture | {"text_config": architecture["text_config"] | tokens}
    model = build_model(whole, target)
    reader = HFTarget(model, target.tokenizer, target.identity)
    save_drafter(DraftModel(DraftModelConfig(architecture=architecture_in(model.config)), reader), folder, target.identity)
    return folder


def saved(target: HFTarget, folder: Path, options: dict[str, Any]) -> Path:
    drafter = build_drafter(parse_drafter(options), target)
    if drafter.wants_token_counts:
        drafter.choose_draft_vocabulary(torch.arange(target.vocab_size))
    save_drafter(drafter, folder, target.identity)
    return folder


def changed(values: Any, absurd: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield a copy of JSON values for each of its keys, with an absurd value there."""
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        yield (*keys, key), values | {key: absurd}
        for name, inner in changed(value, absurd, (*keys, key)):
            yield name, values | {key: inner}


def require_answers(path: Path, load: Any, absurd: tuple[Any, ...], expected: int) -> None:
    """Check that every change of a JSON file loads, or is one ValueError, in time."""
    original, num_visited = json.loads(path.read_text()), 0
    for value in absurd:
        for name, values in changed(deepcopy(original), value):
            path.write_text(json.dumps(values))
            start, num_visited = time.monotonic(), num_visited + 1
            with suppress(ValueError):
                load()
            assert time.monotonic() - start < MOST_SECONDS, (name, value)
    path.write_text(json.dumps(original))
    load()
    assert num_visited >= expected * len(absurd)


@pytest.mark.parametrize("options", [{"kind": "redrafter"}, {"kind": "medusa"}, {"kind": "eagle3"}], ids=lambda o: o["kind"])
def test_no_value_of_a_drafters_config_hangs_or_gives_a_traceback(target, tmp_path, options):
    folder = saved(target, tmp_path / "a", options)
    require_answers(folder / "config.json", lambda: load_drafter(folder, target), (10**6, 10**12, "", {"a": {}}), 20)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's and transformers', of values such as empty tensors
@pytest.mark.parametrize("architecture", [GPT2, BART, NESTED], ids=lambda shape: shape["model_type"])
def test_no_value_of_a_draft_models_config_hangs_or_gives_a_traceback(target, tmp_path, architecture):
    folder = save_model(target, tmp_path / "a", architecture)
    require_answers(folder / "config.json", lambda: load_drafter(folder, target), ABSURD, 40)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        (GPT2, ["n_layer"]),
        (BART, ["decoder_layers"]),
        (NESTED, ["text_config", "num_hidden_layers"]),
        (NESTED, ["vision_config", "num_hidden_layers"]),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else ".".join(value),
)
@pytest.mark.parametrize("count", [10**6, 10**12])
def test_a_million_layers_are_an_error_before_they_are_built(target, tmp_path, architecture, keys, count):
    path = save_model(target, tmp_path / "a", architecture) / "config.json"
    config = json.loads(path.read_text())
    shape = config["drafter"]["architecture"]
    for key in keys[:-1]:
        shape = shape[key]
    assert shape.pop("layer_types", None) is None or keys[0] == "text_config"
    shape[keys[-1]] = count
    path.write_text(json.dumps(config))
    start = time.monotonic()
    with pytest.raises(
        ValueError, match="modules and parameters (, and its weights have|than can be built)|which can't be built"
    ):
        load_drafter(tmp_path / "a", target)
    assert time.monotonic() - start < MOST_SECONDS


@pytest.mark.parametrize(
    ("options", "name", "key"),
    [
        ({"kind": "medusa"}, "medusa", ("drafter", "num_heads")),
        ({"kind": "draft_model"}, "transformers", ("drafter", "architecture", "num_hidden_layers")),
    ],
)
def test_the_note_beside_an_export_is_bounded_as_well(target, tmp_path, options, name, key):
    export_drafter(saved(target, tmp_path / "a", options), target, name, tmp_path / "b")
    note = json.loads((tmp_path / "b" / "outrider.json").read_text())
    inner = note
    for part in key[:-1]:
        inner = inner[part]
    inner[key[-1]] = 10**6
    (tmp_path / "b" / "outrider.json").write_text(json.dumps(note))
    with pytest.raises(ValueError, match="modules and parameters"):
        import_drafter(tmp_path / "b", target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**6}, "modules and parameters"),
        ({"num_hidden_layers": 10**12}, "modules and parameters"),
        ({"num_attention_heads": 10**12}, "The hidden size .* is not a multiple of the number of attention heads"),
        ({"head_dim": 10**10}, "a much larger model|bytes of masks"),
        ({"hidden_size": 10**6}, "a much larger model than that of its weights"),
        ({"rms_norm_eps": float("nan")}, "which is no number"),
        ({"vocab_size": 0}, "can't be"),
        ({"rope_parameters": {"rope_type": []}}, "can't be"),
        ({"quantization_config": 3}, "not the configuration of a model"),
    ],
    ids=str,
)
def test_a_target_and_a_model_that_drafts_are_bounded_by_their_weights(target, tiny_target_dir, tmp_path, change, message):
    folder = tmp_path / "model"
    shutil.copytree(tiny_target_dir, folder)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        load_target(TargetConfig(name_or_path=str(folder)), torch.device("cpu"))
    with pytest.raises(ValueError, match=f"{message}|can't be|is quantised|has a vocabulary of"):
        load_drafter(f"draft_model:{folder}", target)
    assert time.monotonic() - start < 2 * MOST_SECONDS


def test_large_numbers_from_which_nothing_is_built_are_no_error(target, tiny_target_dir, tmp_path):
    rope = {"rope_theta": 10**11, "original_max_position_embeddings": 10**9}
    require_possible_numbers({"rope_scaling": rope, "limit": [0.0, float("inf")]}, tmp_path)
    require_possible_numbers({"text_config": {"vocab_size_per_layer_input": 262_144}}, tmp_path)  # Gemma 3n and Gemma 4
    folder = tmp_path / "model"
    shutil.copytree(tiny_target_dir, folder)
    facts = {"num_training_tokens": 10**13, "model_max_length": 10**30, "training": {"flops": 10**26}}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | facts))
    loaded = load_target(TargetConfig(name_or_path=str(folder)), torch.device("cpu"))
    assert loaded.model.config.num_training_tokens == 10**13
    load_drafter(f"draft_model:{folder}", target)


def test_a_count_of_many_digits_is_no_number_in_a_message(tmp_path):
    with pytest.raises(ValueError, match=r"has layers a number of 333 bits, which describes more modules"):
        require_possible_numbers({"a": [{"layers": 10**100}]}, tmp_path)


def test_masks_of_an_absurd_context_are_an_error_before_memory_is_taken(tmp_path):
    with pytest.raises(ValueError, match="bytes of masks"), bounded_build("a", 100), torch.device("meta"):
        torch.nn.Module().register_buffer("mask", torch.ones(10**5, 10**5))


def test_ordinary_models_are_within_their_bounds(tiny_target_dir):
    """The bound counts what loading registers, which is several times the number of tensors."""
    num_tensors, num_bytes = stored_size(tiny_target_dir)
    assert num_tensors == 21
    with bounded_build("a", 0, num_bytes):
        AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    torch.nn.Linear(2, 2)  # the hooks are gone
    with pytest.raises(ValueError, match="more than 1000"), bounded_build("a", 0):
        torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(10**6))


def test_layers_are_counted_before_transformers_works_for_each(tmp_path):
    """Gemma 3's configuration took many seconds for a million."""
    with pytest.raises(ValueError, match="num_hidden_layers 1000000, which describes more modules and parameters"):
        require_possible_numbers({"text_config": {"num_hidden_layers": 10**6}}, tmp_path)
