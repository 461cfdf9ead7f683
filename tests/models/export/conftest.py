"""Fixtures of targets, drafters and packages for tests of exports.

The targets have enough layers for EAGLE-3's features, and the weights of drafters are so large that
each of them matters.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.export.package import make_package
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.identity import tokenizer_digest

from ...eval.conftest import tiny_target
from ...tiny_models import IDENTITY

__all__ = ["tiny_target"]

HIDDEN, VOCAB = 32, 300
PROMPT = torch.tensor([[1, 70, 71, 72, 2]])
BATCH = torch.tensor([[0, 0, 9, 8, 7], [40, 41, 42, 43, 44], [0, 0, 0, 0, 70]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
KINDS: dict[str, dict[str, Any]] = {
    "redrafter": {"beam_width": 3, "beam_length": 3, "exit_width": 32, "head_init": "target"},
    "medusa": {"num_heads": 3},
    "eagle": {},
    "eagle3": {},
    "mtp": {"init": "random"},
    "block": {"num_slots": 1, "tree_nodes": 8},
    # all layers of the target: always right
    "draft_model": {"init": "target_layers", "num_layers": 2},
}


@pytest.fixture(scope="session")
def make_target(tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[..., HFTarget]:
    """Return a function that makes a random target of seven layers in float32."""

    def make(family: str = "llama", **options: Any) -> HFTarget:
        make_config, make_model = FAMILIES[family]
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = make_model(make_config(**{**sizes, **options})).eval().requires_grad_(False)
            for name, parameter in model.named_parameters():
                torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
        identity = replace(
            IDENTITY, name="org/tiny", tokenizer_sha256=tokenizer_digest(tiny_tokenizer), hidden_size=HIDDEN, vocab_size=VOCAB
        )
        return HFTarget(model, tiny_tokenizer, identity)

    return make


@pytest.fixture(scope="session")
def llama(make_target: Callable[..., HFTarget]) -> HFTarget:
    return make_target()


@pytest.fixture(scope="session")
def make_drafter() -> Callable[..., Any]:
    """Return a function that makes a drafter with random weights, as if it were trained."""

    def make(kind: str, target: HFTarget, **options: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            drafter = build_drafter(parse_drafter({"kind": kind, **options}), target)
            for name, parameter in drafter.named_parameters():
                torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
        if drafter.wants_token_counts:
            drafter.choose_draft_vocabulary(torch.arange(VOCAB).remainder(7))
        if kind == "medusa":
            drafter.accuracies.copy_(torch.rand(drafter.accuracies.shape, generator=torch.Generator().manual_seed(2)) / 20)
            drafter.check_weights()
        return drafter.eval().requires_grad_(False)

    return make


@pytest.fixture
def model(tiny_target_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def drafter_dirs(tiny_target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save an untrained drafter of each kind: some of its drafts are right, most are wrong.

    Tests must not change the folders.
    """
    directories = {}
    for kind, options in KINDS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drafter = build_drafter(parse_drafter({"kind": kind, **options}), tiny_target)
        directories[kind] = tmp_path_factory.mktemp(kind) / "drafter"
        save_drafter(drafter, directories[kind], tiny_target.identity)
    return directories


@pytest.fixture(scope="session")
def package_dirs(drafter_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make packages for the Hub of these drafters; tests must not change them."""
    folders = {kind: tmp_path_factory.mktemp("packages") / kind for kind in drafter_dirs}
    for kind, folder in folders.items():
        make_package(drafter_dirs[kind], folder, f"# A {kind}\n")
    return folders


@pytest.fixture
def package(package_dirs: dict[str, Path]) -> str:
    """Return the package whose drafts are all accepted, so that a step yields several tokens."""
    return str(package_dirs["draft_model"])
