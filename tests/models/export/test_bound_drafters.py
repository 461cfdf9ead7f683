"""Drafters that `generate` keeps with a model, and models that cannot have a drafter."""

import copy
import gc
import logging
import pickle
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from outrider.models.export.bound_drafters import ATTRIBUTE, bind, drafters_of
from outrider.models.export.custom_generate import generate

from .conftest import PROMPT


def test_a_model_in_training_mode_is_refused(model, package):
    options = {"drafter": package, "input_ids": PROMPT, "max_new_tokens": 3}
    with pytest.raises(ValueError, match=r"in training mode.*call model.eval\(\)"):
        generate(model.train(), **options)
    model.eval().get_decoder().layers[1].train()
    with pytest.raises(ValueError, match="a part of it, is in training mode"):
        generate(model, **options)
    model.eval().lm_head.train()  # resize_token_embeddings leaves the head in training mode
    generate(model, **options)


def test_autocast_is_refused(model, package):
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=r"leave autocast, and load the model"):
        generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=3)


def test_a_model_that_reads_more_than_tokens_is_refused(model, package):
    """PEFT's prompt tuning puts virtual tokens before the text; they would be dropped silently."""
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: prepare(*args, **kwargs)
    with pytest.raises(ValueError, match="something changes the model's inputs"):
        generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=3)
    model.prepare_inputs_for_generation = prepare  # PEFT leaves this attribute on the model
    generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=3)


def test_wrapped_embeddings_are_refused_by_name(model, package):
    model.set_input_embeddings(torch.nn.Sequential(model.get_input_embeddings()).eval())
    with pytest.raises(ValueError, match=r"a torch.*Sequential in place of an nn.Embedding.*merge_and_unload"):
        generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=3)


def test_a_model_dispatched_to_one_device_decodes_and_an_offloaded_one_is_an_error(model, package):
    plain = model.generate(input_ids=PROMPT, max_new_tokens=8)
    dispatched = dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert torch.equal(generate(dispatched, drafter=package, input_ids=PROMPT, max_new_tokens=8), plain)
    remove_hook_from_module(model, recurse=True)
    with pytest.raises(ValueError, match=r"weights lie on elsewhere \(offloaded\).*load it on one"):
        generate(cpu_offload(model, torch.device("cpu")), drafter=package, input_ids=PROMPT, max_new_tokens=8)


def test_a_call_from_a_second_thread_is_an_error_and_the_first_finishes(model, package):
    waits, may_go_on = Event(), Event()

    class Waits(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            waits.set()
            assert may_go_on.wait(60)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    options = {"drafter": package, "input_ids": PROMPT, "max_new_tokens": 8}
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(lambda: generate(model, **options, stopping_criteria=StoppingCriteriaList([Waits()])))
        assert waits.wait(60)
        try:
            with pytest.raises(RuntimeError, match="in another thread.*one batch"):
                generate(model, **options)
        finally:
            may_go_on.set()
        assert torch.equal(answer.result(60), model.generate(input_ids=PROMPT, max_new_tokens=8))
    assert torch.equal(generate(model, **options), answer.result())


def test_a_nested_call_during_a_tree_pass_is_an_error(model, package):
    """During such a pass the model's attention implementation is ours, not the user's."""
    options, settings = {"drafter": package, "input_ids": PROMPT, "max_new_tokens": 8}, set()

    def call(*_: Any) -> None:
        settings.add(model.config._attn_implementation)
        with pytest.raises(RuntimeError, match="in the call around this one"):
            generate(model, **options)

    with model.lm_head.register_forward_hook(call):
        tokens = generate(model, **options)
    assert len(settings) == 2
    assert torch.equal(tokens, model.generate(input_ids=PROMPT, max_new_tokens=8))


def bound_drafter(model: PreTrainedModel, folder: Path, **options: Any) -> Any:
    with drafters_of(model) as drafters:
        return bind(model, drafters, folder, options).drafter


def test_a_drafter_is_loaded_once_and_reloaded_when_its_folder_changes(model, package_dirs, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(package_dirs["redrafter"], folder)
    first = bound_drafter(model, folder)
    assert bound_drafter(model, folder) is first
    (folder / "model.safetensors").touch()
    assert bound_drafter(model, folder) is not first
    assert len(vars(model)[ATTRIBUTE].by_name) == 1  # an outdated drafter is dropped
    assert bound_drafter(model, folder, beam_width=2).config.beam_width == 2
    assert bound_drafter(model, folder, beam_width=1).config.beam_width == 1


def test_a_model_keeps_at_most_two_drafters(model, package_dirs):
    weights = [
        weakref.ref(bound_drafter(model, package_dirs[kind])) for kind in ("medusa", "redrafter", "eagle", "draft_model")
    ]
    gc.collect()
    assert [reference() is not None for reference in weights] == [False, False, True, True]


def test_drafters_are_freed_with_their_model(package_dirs, tiny_target_dir):
    """The store of drafters must not keep the model alive, and only the model refers to it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir).eval()
    generate(model, drafter=str(package_dirs["eagle3"]), input_ids=PROMPT, max_new_tokens=3)
    gone = [weakref.ref(model), weakref.ref(bound_drafter(model, package_dirs["eagle3"]))]
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def num_hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


class Fails(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        raise LookupError("somebody's mistake")


def test_no_hook_stays_on_the_model_even_after_an_error(model, package_dirs):
    for kind in ("eagle3", "draft_model"):
        generate(model, drafter=str(package_dirs[kind]), input_ids=PROMPT, max_new_tokens=3)
        assert num_hooks(model) == 0
    with pytest.raises(LookupError, match="somebody's mistake"):
        generate(
            model,
            drafter=str(package_dirs["eagle3"]),
            input_ids=PROMPT,
            max_new_tokens=3,
            stopping_criteria=StoppingCriteriaList([Fails()]),
        )
    assert num_hooks(model) == 0
    # The lock must be free: otherwise every later call would fail.
    assert vars(model)[ATTRIBUTE].in_use.acquire(blocking=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_a_copy_of_the_model_has_neither_drafters_nor_hooks(model, package_dirs, duplicate):
    folder = package_dirs["eagle3"]
    tokens = generate(model, drafter=str(folder), input_ids=PROMPT, max_new_tokens=8)
    twin = duplicate(model)
    assert vars(twin)[ATTRIBUTE] is None
    assert num_hooks(twin) == 0
    assert torch.equal(generate(twin, drafter=str(folder), input_ids=PROMPT, max_new_tokens=8), tokens)
    with drafters_of(twin) as drafters:
        assert bind(twin, drafters, folder, {}).target.model is twin


def test_no_cache_or_hidden_state_is_kept_when_generate_returns(model, package_dirs):
    for kind in ("eagle3", "draft_model"):
        generate(model, drafter=str(package_dirs[kind]), input_ids=PROMPT, max_new_tokens=8)
        bound = [*vars(model)[ATTRIBUTE].by_name.values()][-1]
        assert bound.target._cache is None
        model(PROMPT)  # a forward pass outside of generate, for example in training
        assert bound.target._captured._hidden_states is None
        assert kind != "draft_model" or bound.drafter.reader._cache is None
        model(PROMPT)
        assert not bound.target._captured._inputs


def test_a_model_of_another_width_or_vocabulary_is_refused(package_dirs, model, tiny_target_dir):
    model.resize_token_embeddings(310)
    with pytest.raises(ValueError, match="vocab_size: 300 for the drafter, 310 for this target"):
        generate(model, drafter=str(package_dirs["redrafter"]), input_ids=PROMPT, max_new_tokens=5)
    config = AutoModelForCausalLM.from_pretrained(tiny_target_dir).config
    config.hidden_size = 64
    other = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="hidden_size: 32 for the drafter, 64 for this target"):
        generate(other, drafter=str(package_dirs["redrafter"]), input_ids=PROMPT, max_new_tokens=5)


def test_a_given_tokenizer_other_than_the_drafters_is_an_error(package_dirs, model, demo_target_dir):
    tokenizer = AutoTokenizer.from_pretrained(demo_target_dir)
    with pytest.raises(ValueError, match="tokenizer_sha256"):
        generate(model, drafter=str(package_dirs["redrafter"]), input_ids=PROMPT, max_new_tokens=5, tokenizer=tokenizer)


def test_a_target_of_another_configuration_is_a_warning(package_dirs, tiny_target_dir, tmp_path, caplog):
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_dir, folder)
    config = (folder / "config.json").read_text()
    assert '"rms_norm_eps": 1e-06' in config
    (folder / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    other: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    with caplog.at_level(logging.WARNING):
        generate(other, drafter=str(package_dirs["redrafter"]), input_ids=PROMPT, max_new_tokens=5)
    assert "another revision or configuration" in caplog.text


def test_attention_without_masks_is_refused(package_dirs, model):
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        generate(model, drafter=str(package_dirs["redrafter"]), input_ids=PROMPT, max_new_tokens=5)


def test_a_vocabulary_resized_after_binding_is_an_error(model, package_dirs):
    """transformers keeps the module of the embeddings and replaces its weight."""
    folder = package_dirs["redrafter"]
    bound_drafter(model, folder)
    grown = model.config.vocab_size + 8
    model.resize_token_embeddings(grown, mean_resizing=False)
    with pytest.raises(ValueError, match=f"vocab_size: .* {grown} for this target"):
        bound_drafter(model, folder)
