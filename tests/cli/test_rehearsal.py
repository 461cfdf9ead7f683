"""Rehearsals: what a target and a drafter can't do together is an error before any long work."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator

from outrider.cli import rehearsal
from outrider.cli.compose import load_recipe
from outrider.cli.config import DrafterRun
from outrider.cli.rehearsal import rehearse
from outrider.cli.run import training_labels
from outrider.data.manifest import Manifest
from outrider.distill.config import DistillConfig
from outrider.models.drafters import parse_drafter
from outrider.models.drafters.redrafter import Redrafter
from outrider.models.drafters.saved.folder import WEIGHTS_FILE
from outrider.models.llm.hf_target import HFTarget
from outrider.train import setup
from outrider.train.config import TrainConfig

from ..tiny_models import IDENTITY
from .conftest import run_here

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FULL = {"layer_types": ["full_attention"] * 2}
LLAMA_4_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 4,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "moe_layers": [1]}
PER_LAYER = {"activation_sparsity_pattern": [0.0] * 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100}
ALTUP = {"num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2}
CODEGEN = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_ctx": 64, "rotary_dim": 4, "vocab_size": 100}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Ministral3": ("Ministral3Config", {**SIZES, "rope_parameters": LLAMA_4_ROPE}),
    "MiMoV2Flash": ("MiMoV2FlashConfig", {**SIZES, **FULL, "v_head_dim": 8, "mlp_layer_types": ["dense"] * 2}),
    "Llama4": ("Llama4TextConfig", {**SIZES, **FULL, **EXPERTS, "intermediate_size_mlp": 48, "no_rope_layers": [1, 1]}),
    "Gemma3n": ("Gemma3nTextConfig", {**SIZES, **FULL, **PER_LAYER, **ALTUP}),
    "CodeGen": ("CodeGenConfig", CODEGEN),
}


def target_of(architecture: str) -> HFTarget:
    config_class, options = ARCHITECTURES[architecture]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{architecture}ForCausalLM")(getattr(transformers, config_class)(**options))
    return HFTarget(model.eval().requires_grad_(False), None, IDENTITY)


def run_of(kind: str, folder: Path, **options: Any) -> DrafterRun:
    train = TrainConfig(steps=1, validation_texts=0)
    spec = parse_drafter({"kind": kind, **options})
    return DrafterRun(train=train, drafter=spec, settings=[{}], train_dir=folder / "train", drafter_dir=folder / "drafter")


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [
        ("Ministral3", ["eagle", "eagle3", "draft_model"]),
        ("MiMoV2Flash", ["eagle", "eagle3"]),
        ("Llama4", ["redrafter", "draft_model"]),
        ("Gemma3n", ["draft_model"]),
    ],
)
def test_architectures_that_need_more_than_hidden_states_train_and_draft(architecture, kinds, tmp_path, accelerator):
    """Their layers read position ids, or rotary embeddings by type.

    Llama 4 names its decoder wrongly, and Gemma 3n has a width for each layer.
    """
    target = target_of(architecture)
    assert rehearse([run_of(kind, tmp_path) for kind in kinds], DistillConfig(), target, accelerator) == 64
    assert target._cache is None, "the rehearsal's cache was kept"


@pytest.mark.parametrize(
    ("architecture", "kind", "words"),
    [
        ("Gemma3n", "eagle", "layers of Gemma3nForCausalLM don't consist of .*choose another drafter"),
        ("Llama4", "eagle3", "layers of Llama4ForCausalLM don't consist of .*choose another drafter"),
        ("CodeGen", "medusa", "bypass transformers' AttentionInterface or Cache"),
    ],
)
def test_what_an_architecture_cannot_do_is_one_message(architecture, kind, words, tmp_path, accelerator):
    with pytest.raises(ValueError, match=words):
        rehearse([run_of(kind, tmp_path)], DistillConfig(), target_of(architecture), accelerator)


def test_a_rehearsal_says_what_it_tries(tmp_path, accelerator, caplog):
    caplog.set_level("INFO", "outrider")
    rehearse([run_of("redrafter", tmp_path)], DistillConfig(), target_of("Ministral3"), accelerator)
    assert "trying the recipe on 19 tokens: labels, and the training and drafts of redrafter" in caplog.text


# --- a whole run


@pytest.fixture
def options(overrides: list[str]) -> list[str]:
    few = ["data.limit=4", "train={steps: 1, warmup_steps: 0, validation_texts: 0}", "stages=[distill,train,eval]"]
    return [*overrides, *few, "eval={max_new_tokens: 8, profile_prompts: 0}"]


@pytest.mark.parametrize("place", ["loss", "propose"])
def test_a_drafter_that_cannot_train_or_draft_is_refused_before_the_distillation(place, options, tmp_path, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise TypeError("forward() missing 1 required argument: 'position_ids'")

    monkeypatch.setattr(Redrafter, place, fail)
    words = r"LlamaForCausalLM and the drafter redrafter don't work together \(TypeError: .*'position_ids'\); choose another"
    with pytest.raises(ValueError, match=words):
        run_here(*options)
    assert not (tmp_path / "run" / "distill").exists()


@pytest.mark.parametrize(
    ("override", "words", "plan"),
    [
        ("eval.max_new_tokens=1020", "no prompt of mt_bench fits the context window of 1024 tokens", "plan=true"),
        ("train={validation_texts: 1, validation_tokens: 1024}", "train.validation_tokens is 1024", "plan=false"),
    ],
)
def test_answers_beyond_the_context_are_refused_before_the_distillation(override, words, plan, options, tmp_path):
    with pytest.raises(ValueError, match=words):
        run_here(*options, override, plan)
    assert not (tmp_path / "run" / "distill").exists()


def test_fewer_held_out_texts_than_processes_are_refused_before_the_target_is_loaded(options, monkeypatch):
    class TwoProcesses(Accelerator):
        num_processes = property(lambda self: 2)

    monkeypatch.setattr("outrider.cli.run.make_accelerator", lambda _: TwoProcesses(cpu=True))
    monkeypatch.setattr("outrider.cli.run.require_supported_launch", lambda _: None)
    monkeypatch.setattr("outrider.cli.run.load_target", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match="fewer than the 2 processes"):
        run_here(*options, "train.validation_texts=1")


@pytest.mark.slow
def test_labels_and_drafters_of_an_earlier_run_are_not_rehearsed_again(options, tmp_path, monkeypatch, accelerator):
    run_here(*options, "stages=[distill]")
    config = load_recipe(*options, "stages=[train]")
    labels = training_labels(config)
    assert isinstance(labels, Manifest)
    monkeypatch.setattr(rehearsal, "label_shard", None)
    target = target_of("Ministral3")
    (drafter,) = config.drafter_runs()
    # Packed texts are read again only where the finished labels lack states.
    packed = [replace(drafter, train=replace(drafter.train, packing=True))]

    def refuse(target: HFTarget) -> None:
        raise ValueError("packing refused")

    for module in (rehearsal, setup):
        monkeypatch.setattr(module, "require_packing", refuse)
    rehearse(packed, replace(labels, features="last_hidden"), target, accelerator)
    with pytest.raises(ValueError, match="packing refused"):
        rehearse(packed, replace(labels, features="none"), target, accelerator)
    drafter.drafter_dir.mkdir()
    (drafter.drafter_dir / WEIGHTS_FILE).touch()
    monkeypatch.setattr(rehearsal, "make_examples", None)
    rehearse([drafter], labels, target, accelerator)


def test_memory_that_runs_out_stays_its_own_error() -> None:
    target = target_of("CodeGen")
    with pytest.raises(RuntimeError, match="can't allocate memory"), rehearsal.works_together(target, "eagle"):
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError), rehearsal.works_together(target, "eagle"):
        raise torch.OutOfMemoryError("no memory")
