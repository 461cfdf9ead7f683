"""Loading a target, and errors before any long work."""

import gc
import json
import os
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from outrider.data.answers import AnswerFinder
from outrider.data.chat import encode_prompt
from outrider.data.conversations import Conversation, Turn
from outrider.data.examples import encode_conversations
from outrider.models.decoding import Prompts, chain_tree
from outrider.models.decoding.tree import empty_tree
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.export.formats import write_folder
from outrider.models.export.transformers_model import FORMAT
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.identity import tokenizer_digest
from outrider.models.llm.loading import load_target, load_tokenizer


@pytest.fixture
def copy(tiny_target_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target_dir, tmp_path / "target"))


def config(directory: Path) -> TargetConfig:
    return TargetConfig(name_or_path=str(directory), dtype="float32")


def change(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def resize(folder, vocab_size):
    stored = json.loads((folder / "config.json").read_text())
    LlamaForCausalLM(LlamaConfig(**{**stored, "vocab_size": vocab_size})).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
        (shutil.rmtree, "there is no such directory"),
        (lambda folder: change(folder / "config.json", num_hidden_layers=3), "they would be random"),
        (lambda folder: os.truncate(folder / "model.safetensors", 1000), "can't be loaded"),
        (lambda folder: os.truncate(folder / "config.json", 20), r"config\.json is not a JSON file"),
        (
            lambda folder: change(folder / "config.json", hidden_size=64),
            "can't be loaded.*Do config.json, tokenizer and weights belong together",
        ),
        (lambda folder: resize(folder, 400), "has 300 tokens and the model 400, far more than padding explains"),
    ],
)
def test_what_cannot_be_loaded_is_named(copy, damage, message):
    damage(copy)
    with pytest.raises(ValueError, match=message):
        load_target(config(copy))


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(copy):
    resize(copy, 290)
    with pytest.raises(ValueError, match="has 300 tokens and the model only 290: .* has the id 290; this is another model's"):
        load_target(config(copy))
    resize(copy, 300)
    tokenizer = load_tokenizer(config(copy))
    tokenizer.add_tokens([f"more{index}" for index in range(34)])
    tokenizer.save_pretrained(copy)
    with pytest.raises(ValueError, match="has 334 tokens and the model only 300: 'more0' has the id 300; this is another"):
        load_target(config(copy))


def test_a_token_that_only_the_tokenizer_knows_is_an_error_where_a_text_has_it(copy, tmp_path):
    tokenizer = load_tokenizer(config(copy))
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(copy)
    target = load_target(config(copy))
    assert target.identity == replace(target.identity, tokenizer_sha256=tokenizer_digest(tokenizer))
    said, asked = Turn(role="assistant", content="yes"), Turn(role="user", content="a [PAD] b")
    message = r"the token '\[PAD\]' has the id 300, and the model only has the 300 ids below 300: leave it out.*a \[PAD\] b"
    encode_prompt([replace(asked, content="a")], target.tokenizer)
    with pytest.raises(ValueError, match=message):
        encode_prompt([asked], target.tokenizer)
    texts = [Conversation(id=text, turns=(replace(asked, content=text), said)) for text in ("a", asked.content)]
    assert len(encode_conversations(texts[:1], AnswerFinder(target.tokenizer, [3]), 64)[0]) == 1
    with pytest.raises(ValueError, match=message):
        encode_conversations(texts, AnswerFinder(target.tokenizer, [3]), 64)
    # An exported draft model has the same tokenizer, and transformers pads no batch with the token.
    drafter = build_drafter(parse_drafter({"kind": "draft_model", "num_layers": 1}), target)
    write_folder(FORMAT, drafter, tmp_path / "export", target)
    exported = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert type(exported) is type(tokenizer)
    assert tokenizer_digest(exported) == target.identity.tokenizer_sha256
    assert GenerationConfig.from_pretrained(tmp_path / "export").pad_token_id is None
    # No answer can end with it.
    change(copy / "generation_config.json", eos_token_id=300)
    with pytest.raises(ValueError, match=r"ends its answers with the tokens \(300,\), and can't answer with 300: .*"):
        load_target(config(copy))


def test_a_stop_token_outside_of_the_tokenizer_is_an_error_and_another_a_warning(copy, caplog):
    resize(copy, 310)
    for stop, is_warning in ((299, True), (300, False)):
        change(copy / "generation_config.json", eos_token_id=stop)
        if is_warning:
            load_target(config(copy))
            assert "are these the tokenizer files of this model?" in caplog.text
        else:
            with pytest.raises(ValueError, match="its tokenizer has only 300"):
                load_target(config(copy))


def test_a_missing_tokenizer_is_named(copy):
    for path in copy.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"no tokenizer files \(tokenizer.json"):
        load_tokenizer(config(copy))


def test_a_target_without_tokenizer_files_loads_where_none_is_needed(copy):
    """For a Qwen3 without them, transformers builds a tokenizer of one token."""
    for path in copy.glob("tokenizer*"):
        path.unlink()
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8, eos_token_id=2)).save_pretrained(copy)
    assert load_target(config(copy), needs_tokenizer=False).identity.tokenizer_sha256 == ""
    with pytest.raises(ValueError, match="no tokenizer files"):
        load_target(config(copy))


def test_a_damaged_tokenizer_is_not_an_absent_one(copy):
    """Else a drafter would be saved without the tokenizer's digest, which later loads compare."""
    (copy / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(ValueError, match="tokenizer"):
        load_target(config(copy), needs_tokenizer=False)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="must be one of"):
        TargetConfig(name_or_path="x", dtype="int3")
    with pytest.raises(ValueError, match="(?s)attn_implementation.*sdpa, eager"):
        TargetConfig(name_or_path="x", attn_implementation="flash_attention_2")


def test_identity_follows_the_weights_not_the_path(copy, target, tiny_target_dir):
    assert load_target(config(copy)).identity.weights_sha256 == target.identity.weights_sha256
    assert load_target(config(copy)).identity.name == "target"


def test_hidden_states_feed_the_head(target, prompt):
    hidden, _ = target.hidden_states(prompt)
    logits = target.model.get_output_embeddings()(hidden)
    assert torch.allclose(logits, target.model(prompt).logits)
    padded, _ = target.hidden_states(torch.cat([prompt, prompt[:, :1]], 1))
    assert torch.allclose(padded[:, :5], hidden)


def test_verify_gives_each_node_the_logits_of_its_own_path(target, prompt):
    tree = chain_tree(torch.tensor([[10, 11, 12]]))
    with torch.inference_mode():
        target.prefill(Prompts.of(prompt), max_new_tokens=8, max_nodes=3)
        output = target.verify(torch.tensor([9]), tree)
        expected = target.model(torch.cat([prompt, torch.tensor([[9, 10, 11, 12]])], dim=1)).logits[:, -4:]
    assert torch.allclose(output.logits, expected)


def test_the_head_reads_one_token_of_each_prompt_whatever_their_lengths(target):
    texts = [torch.tensor(ids) for ids in ([1, 70, 71], [9], [40, 41, 42, 43, 44])]
    shapes = []
    hook = target.head.register_forward_hook(lambda head, inputs, logits: shapes.append(logits.shape[:2]))
    output = target.prefill(Prompts.of(texts), max_new_tokens=4, max_nodes=0)
    hook.remove()
    assert shapes == [(3, 1)]
    assert not target.head._forward_pre_hooks
    for logits, text in zip(output.logits[:, 0], texts, strict=True):
        torch.testing.assert_close(logits, target.plain_logits(text[None], 1)[0, 0])


def test_a_head_that_isnt_called_is_read_at_all_lengths(target, monkeypatch):
    """Some models multiply with the head's weights themselves. An error in a pass leaves no hook, either."""
    texts = [torch.tensor(ids) for ids in ([1, 70, 71], [9], [40, 41, 42, 43, 44])]
    expected = target.prefill(Prompts.of(texts), max_new_tokens=4, max_nodes=0).logits
    head = target.head
    monkeypatch.setattr(head, "_call_impl", lambda states: torch.nn.functional.linear(states, head.weight))
    torch.testing.assert_close(target.prefill(Prompts.of(texts), max_new_tokens=4, max_nodes=0).logits, expected)
    monkeypatch.setattr(head, "_call_impl", Mock(side_effect=RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        target.prefill(Prompts.of(texts), max_new_tokens=4, max_nodes=0)
    assert not head._forward_pre_hooks


@pytest.mark.parametrize(
    "release",
    [
        HFTarget.release_cache,
        lambda target: target.prefill(Prompts.of([torch.ones(9).long()] * 2), max_new_tokens=9, max_nodes=0),
    ],
)
def test_an_old_cache_is_freed_at_once(target, release):
    """Caches of gigabytes once waited for Python's garbage collector: a run of hours filled the memory."""
    target.release_cache()  # an error of an earlier test may still hold that one
    target.prefill(Prompts.of([torch.ones(2, dtype=torch.long)]), max_new_tokens=1, max_nodes=0)
    cache = weakref.ref(target._require_cache())
    gc.disable()
    try:
        release(target)
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("device", ["meta", "cuda:77", "nonsense"])
def test_a_device_that_is_not_there_is_named(copy, device):
    with pytest.raises(ValueError, match=f"there is no device '{device}'"):
        load_target(replace(config(copy), device=device))


def test_a_target_that_failed_the_probe_fails_again(target, prompt, monkeypatch):
    again = HFTarget(target.model, target.tokenizer, target.identity)
    monkeypatch.setattr(again, "is_rounding", lambda error: False)
    for _ in range(2):
        with pytest.raises(ValueError, match="reads a draft tree differently"):
            again.prefill(Prompts.of(prompt), max_new_tokens=2, max_nodes=0)


def test_features_are_the_inputs_of_the_requested_layers(target, prompt):
    states = target.model(prompt, output_hidden_states=True).hidden_states
    expected = torch.cat([states[1], states[0]], dim=-1)
    hidden, features = target.hidden_states(prompt, (1, 0))
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(hidden, states[-1])
    output = target.prefill(Prompts.of(prompt), max_new_tokens=4, max_nodes=2, feature_layers=(1, 0))
    torch.testing.assert_close(output.features, expected)
    tree = chain_tree(prompt[:, :2])
    after = target.verify(prompt[:, 0], tree).features
    text = torch.cat([prompt, prompt[:, :1], prompt[:, :2]], dim=1)
    states = target.model(text, output_hidden_states=True).hidden_states
    torch.testing.assert_close(after, torch.cat([states[1], states[0]], dim=-1)[:, -3:])
    assert target.prefill(Prompts.of(prompt), max_new_tokens=4, max_nodes=2).features is None


@torch.inference_mode()
@pytest.mark.parametrize("with_prompt", [True, False])
def test_texts_taken_from_the_cache_can_be_resumed(tiny_target_dir, with_prompt):
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float64"), torch.device("cpu"))
    texts = [torch.arange(5, 12), torch.arange(40, 43), torch.arange(90, 95)]
    target.prefill(Prompts.of(texts), max_new_tokens=4, max_nodes=0)
    kept = [target.take(row) for row in (2, 0)]
    target.release_cache()
    others = [torch.arange(200, 209)] if with_prompt else []
    target.resume(Prompts.of(others) if others else None, kept, capacity=16)
    last = torch.arange(50, 50 + len(others) + 2)
    output = target.verify(last, empty_tree(len(last), torch.device("cpu")))
    for row, text in enumerate([*others, texts[2], texts[0]]):
        plain = target.model(torch.cat([text, last[row : row + 1]])[None]).logits[0, -1]
        torch.testing.assert_close(output.logits[row, 0], plain)
