"""Draft models exported for transformers and its assisted generation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from outrider.models.drafters import load_drafter, save_drafter
from outrider.models.export.formats import write_folder
from outrider.models.export.registry import format_of, import_drafter
from outrider.models.export.transformers_model import FORMAT
from outrider.models.llm.hf_target import HFTarget

from .conftest import PROMPT


def other_model(**options: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **ids, "dtype": "float32", **options}))


def other_folder(folder: Path, target: HFTarget, changes: dict[str, Any] | None = None) -> Path:
    """Save such a model with the target's tokenizer, and these keys in its configuration."""
    other_model().save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | (changes or {})))
    return folder


def test_transformers_loads_an_export_and_assisted_generation_is_lossless(llama, make_drafter, tmp_path):
    drafter = make_drafter("draft_model", llama, init="target_layers", num_layers=3, length=3)
    drafter.model.load_state_dict(
        # the target's weights, so that some drafts are accepted
        {name: llama.model.state_dict()[name] for name in drafter.model.state_dict()}
    )
    write_folder(FORMAT, drafter, tmp_path / "a", llama)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.dtype == torch.float32
    assert all(torch.equal(tensor, drafter.model.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "a").get_vocab() == llama.tokenizer.get_vocab()
    generation = model.generation_config
    assert (generation.num_assistant_tokens, generation.num_assistant_tokens_schedule) == (3, "constant")
    drafted: list[int] = []
    model.register_forward_hook(lambda *arguments: drafted.append(1))
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = llama.model.generate(PROMPT, **options)
    assert expected.shape[1] == PROMPT.shape[1] + 24
    assert not drafted
    assert llama.model.generate(PROMPT, assistant_model=model, **options).tolist() == expected.tolist()
    assert drafted, "nothing was drafted"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("safe", [False, True])
def test_any_causal_model_with_the_targets_tokenizer_is_read(tied, safe, llama, tmp_path):
    model = other_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "a", max_shard_size="10KB")
    if not safe:
        for path in (tmp_path / "a").glob("*.safetensors*"):
            path.unlink()
        torch.save(model.state_dict(), tmp_path / "a" / "pytorch_model.bin")
    llama.tokenizer.save_pretrained(tmp_path / "a")
    assert format_of(tmp_path / "a") is FORMAT
    save_drafter(import_drafter(tmp_path / "a", llama, options={"length": 2}), tmp_path / "ours", llama.identity)
    drafter = load_drafter(tmp_path / "ours", llama)
    assert drafter.config.length == 2
    ours = drafter.model.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in model.state_dict().items())


def test_models_with_other_tokens_are_an_error(llama, tmp_path):
    other_model(vocab_size=301).save_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match="has a vocabulary of 301 tokens, but org/tiny has one of 300"):
        import_drafter(tmp_path / "a", llama)
    tokenizer = other_folder(tmp_path / "b", llama) / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(ValueError, match="has another tokenizer than org/tiny"):
        import_drafter(tmp_path / "b", llama)


def test_a_configuration_of_an_older_transformers_is_read(llama, tmp_path):
    config = json.loads((other_folder(tmp_path / "a", llama) / "config.json").read_text())
    older = {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None, "torch_dtype": "float32"}
    older |= {"use_mrope": False, "n_ctx": 64, "max_length": 20}
    (tmp_path / "a" / "config.json").write_text(json.dumps({**config, **older}))
    import_drafter(tmp_path / "a", llama)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "x"},
        {"num_attention_heads": 0},
        {"model_type": ["llama"]},
        {"model_type": "nonsense"},
        {"pad_token_id": 999999},
        {"num_attention_heads": -1},
        {"rope_parameters": {"rope_type": "nonsense"}},
        {"torch_dtype": [1], "pretraining_tp": []},
        {"hidden_size": 2**40},
        {"model_type": "gpt2", "n_layer": 10**7},
    ],
)
def test_every_error_of_transformers_for_a_hostile_configuration_names_the_folder(llama, tmp_path, changes):
    with pytest.raises(ValueError, match=str(tmp_path / "a")):
        import_drafter(other_folder(tmp_path / "a", llama, changes), llama, name="transformers")
