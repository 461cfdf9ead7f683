"""Weights are those that transformers takes from a folder's files, in every way of loading."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.models.drafters import build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.small_models import weights_digest_at
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target, load_tokenizer
from outrider.models.llm.pretrained import read_config
from outrider.models.llm.stages.loading import digest
from outrider.models.llm.stages.slices import EndSlice
from outrider.models.llm.streamed_loading import build_without_weights, stored_weights

from ...tiny_models import save_tiny_target

CPU = torch.device("cpu")
TEXT = torch.tensor([[5, 70, 9, 71]])
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def config(folder: Path, **options: Any) -> TargetConfig:
    return TargetConfig(name_or_path=str(folder), fast_linears=False, **options)


@pytest.fixture
def folder(tiny_tokenizer: Any, tmp_path: Path) -> Path:
    sizes = {"num_hidden_layers": 2, "initializer_range": 0.3}
    return save_tiny_target(tmp_path / "target", LlamaForCausalLM, LlamaConfig, tiny_tokenizer, **sizes)


def change_head(folder: Path, stored: str, *, ties: bool) -> None:
    """Store a head of one kind, under a configuration that ties it or not."""
    weights, values = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    if stored == "equal":
        weights[HEAD] = weights[EMBEDDINGS].clone()
    elif stored != "different":
        del weights[HEAD if stored == "no head" else EMBEDDINGS]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": ties}))


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("stored", ["no head", "equal", "different", "no embeddings"])
def test_the_head_is_the_one_that_transformers_uses(folder: Path, stored: str, ties: bool) -> None:
    """transformers ties a head only if the file lacks it or its values are those of the embeddings."""
    change_head(folder, stored, ties=ties)
    if not ties and stored.startswith("no "):
        for options in ({}, {"memory_budget_gib": 1.0}):
            with pytest.raises(ValueError, match=f"lack 1 tensors.*{HEAD if stored == 'no head' else EMBEDDINGS}"):
                load_target(config(folder, **options), CPU)
        return
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = model(TEXT).logits
    for options in ({}, {"memory_budget_gib": 1.0}):
        target = load_target(config(folder, **options), CPU)
        assert torch.equal(target.model(TEXT).logits, expected)
        is_tied = target.head.weight is target.embed_tokens.weight
        assert is_tied == (ties and stored != "different") == target.model.config.tie_word_embeddings
    # A process of a target in stages loads embeddings and head in this way.
    ends = EndSlice.load(build_without_weights(config(folder)), CPU).model
    assert torch.equal(ends.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert torch.equal(ends.get_output_embeddings().weight, model.get_output_embeddings().weight)


def test_weights_under_another_name_are_not_mistaken_for_those_of_the_usual_name(folder: Path) -> None:
    weights, values = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    save_file({**weights, HEAD: -weights[HEAD]}, folder / "other.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**values, "transformers_weights": "other.safetensors"}))
    assert torch.equal(load_target(config(folder), CPU).head.weight, -weights[HEAD])
    with pytest.raises(ValueError, match=r"names the file other.safetensors \(transformers_weights\).*rename the file"):
        load_target(config(folder, memory_budget_gib=1.0), CPU)


@pytest.mark.parametrize("source", ["path", "target_layers"])
def test_a_draft_model_with_such_a_head_is_saved_and_loaded_with_it(folder: Path, tmp_path: Path, source: str) -> None:
    change_head(folder, "different", ties=True)
    target = load_target(config(folder), CPU)
    options = {"path": str(folder)} if source == "path" else {"num_layers": 2, "init": "target_layers"}
    drafter = build_drafter(parse_drafter({"kind": "draft_model", **options}), target)
    save_drafter(drafter, tmp_path / "saved", target.identity)
    for built in (drafter, load_drafter(tmp_path / "saved", target)):
        assert torch.equal(built.reader.model(TEXT).logits, target.model(TEXT).logits)


def test_a_quantised_target_keeps_such_a_head(folder: Path) -> None:
    pytest.importorskip("torchao")  # pip install 'outrider[quantization]'
    change_head(folder, "different", ties=True)
    int8 = load_target(config(folder, quantization={"method": "torchao", "type": "Int8WeightOnlyConfig"}), CPU)
    assert torch.equal(int8.head.weight, load_file(folder / "model.safetensors")[HEAD])


@pytest.mark.parametrize(
    "load", [load_tokenizer, stored_weights, read_config, digest, lambda config: weights_digest_at(config.name_or_path)]
)
def test_a_name_of_the_hub_that_is_not_there_is_an_error_with_the_name_and_a_remedy(load: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"nobody/nothing.*in the cache, and .*HF_HUB_OFFLINE.*`hf download nobody/nothing`"):
        load(config(Path("nobody/nothing")))


def test_shards_without_an_index_are_loaded_if_all_are_there(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    (folder / "model.safetensors.index.json").unlink()
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    plain, streamed = (load_target(config(folder, **options), CPU) for options in ({}, {"memory_budget_gib": 1.0}))
    drafter = load_drafter(f"draft_model:{folder}", plain)
    for loaded in (plain, streamed, drafter.reader):
        assert torch.equal(loaded.model(TEXT).logits, model(TEXT).logits)
    shards[1].unlink()
    for options in ({}, {"memory_budget_gib": 1.0}):
        with pytest.raises(ValueError, match=f"no model.safetensors.index.json, and {shards[1].name} is missing"):
            load_target(config(folder, **options), CPU)
    with pytest.raises(ValueError, match=f"{shards[1].name} is missing"):
        load_drafter(f"draft_model:{folder}", plain)
