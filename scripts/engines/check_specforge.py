"""Check that SpecForge and outrider compute equal logits of EAGLE-3 drafters.

SpecForge (github.com/sgl-project/SpecForge) belongs to SGLang's project and trains drafters for it.
It needs other versions of torch and transformers than outrider. So this script runs in two virtual
environments, in this order:

1. outrider's environment makes a target, drafters, their exports and logits.
2. SpecForge's environment loads the exports, compares, and writes drafters with SpecForge's
   exporters.
3. outrider's environment imports these and compares.

    python3 -m venv specforge-env                                           # torch's CPU build
    specforge-env/bin/pip install torch==2.13.0 transformers==5.8.1 numpy safetensors
    specforge-env/bin/pip install --no-deps specforge==0.2.0
    .venv/bin/python scripts/engines/check_specforge.py make /tmp/specforge
    specforge-env/bin/python scripts/engines/check_specforge.py compare /tmp/specforge
    .venv/bin/python scripts/engines/check_specforge.py import /tmp/specforge

It prints the largest difference of the logits at each depth, and exits with 1 if a difference is
above rounding errors.
"""

import json
from pathlib import Path
from typing import Any

import engine_targets as shared
import torch

THEIRS = {"of_sglangs_exporter": 50, "of_the_hubs_exporter": shared.VOCAB}
"""Sizes of the draft vocabulary by case."""


def make(directory: Path) -> bool:
    """Write the target, and a folder for each case with its export and outrider's results."""
    from outrider.models.export.eagle3 import FORMAT

    return shared.make_exports(
        directory, shared.EAGLE3_CASES, lambda _: FORMAT, lambda *pair: shared.usual_results(*pair, shared.unrolled_logits)
    )


def load(path: Path, target: Path) -> Any:
    """Load a drafter with SpecForge, from a configuration and weights.

    The embeddings are the target's; no other tensor may be missing or unknown. With transformers 5,
    `AutoDraftModel.from_pretrained` leaves the rotary tables uninitialized, so it is not used.
    """
    from safetensors.torch import load_file
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    model = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(path / "config.json")), torch_dtype=torch.float32)
    missing, unknown = model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    # a drafter of the whole vocabulary has no maps
    assert set(missing) <= {"embed_tokens.weight", "d2t", "t2d"}, missing
    assert not unknown, unknown
    model.load_embedding(str(target))
    return model.eval()


@torch.no_grad()
def their_logits(model: Any, features: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Compute `unrolled_logits` with SpecForge, which reads tokens shifted by the depth."""
    tokens = tokens[:, : shared.NUM_TOKENS + 1]
    hidden, positions = model.project_hidden_states(features), torch.arange(shared.NUM_TOKENS)[None]
    attended = torch.ones(1, shared.NUM_TOKENS, dtype=torch.bool)
    mask = model.prepare_decoder_attention_mask(attended, hidden, 1, shared.NUM_TOKENS, 0)
    cache: list[list[torch.Tensor]] = [[], []]
    read_tokens, logits = tokens[:, 1:], []
    for depth in range(shared.DEPTHS):
        hidden = model.backbone(model.embed_input_ids(read_tokens), hidden, cache, mask, positions)
        logits.append(model.compute_logits(hidden))
        read_tokens = torch.cat([tokens[:, 2 + depth :], tokens.new_zeros(1, 1 + depth)], dim=1)
    return logits


def compare_and_write(directory: Path) -> bool:
    """Load and compare each export, then write SpecForge's own drafters (SpecForge's Python)."""
    alike, tokens, target = True, shared.make_tokens(), directory / "target"
    for name in shared.EAGLE3_CASES:
        results = shared.read_results(directory / name)
        model = load(directory / name, target)
        assert (torch.arange(len(model.d2t)) + model.d2t).tolist() == results["drafted"].tolist()
        assert model.t2d.nonzero()[:, 0].tolist() == results["drafted"].tolist()
        alike &= shared.compare(name, their_logits(model, results["features"], tokens), results["logits"])
    features = shared.read_results(directory / "whole_vocabulary")["features"]
    for name, draft_vocab_size in THEIRS.items():
        drafted = write(directory / name, draft_vocab_size, target)
        results = {"logits": their_logits(load(directory / name, target), features, tokens), "drafted": drafted}
        torch.save(results, directory / name / shared.RESULTS_FILE)
    return alike


def write(path: Path, draft_vocab_size: int, target: Path) -> torch.Tensor:
    """Write a drafter with SpecForge's exporters; return the tokens of its draft vocabulary.

    Its configuration has the keys of SpecForge's one for Qwen3 (configs/qwen3-32b-eagle3.json).
    """
    from specforge.export.to_hf import export_to_hf
    from specforge.export.to_sglang import export_to_sglang
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    path.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": shared.HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 40,
        "max_position_embeddings": 2 * shared.NUM_TOKENS,
        "max_window_layers": 64,
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shared.VOCAB,
        "draft_vocab_size": draft_vocab_size,
    }
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(4)
    model = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(path / "config.json")))
    shared.randomise(model)
    drafted = torch.randperm(shared.VOCAB)[:draft_vocab_size].sort().values
    model.d2t.copy_(drafted - torch.arange(draft_vocab_size))
    model.t2d.copy_(torch.zeros(shared.VOCAB, dtype=torch.bool).index_fill(0, drafted, True))
    weights = {name: tensor for name, tensor in model.state_dict().items() if "embed" not in name}
    state = path.with_name(f"{path.name}-training.pt")
    torch.save({"draft_state_dict": weights, "strategy": "eagle3"}, state)
    if draft_vocab_size < shared.VOCAB:
        export_to_sglang(str(state), str(path / "config.json"), str(path))
    else:
        export_to_hf(str(state), str(path / "config.json"), str(path), embedding_source=str(target))
    return drafted


def import_theirs(directory: Path) -> bool:
    """Import each drafter that SpecForge wrote, and compare (outrider's Python)."""
    from outrider.models.export.registry import format_of, import_drafter

    alike, tokens, target = True, shared.make_tokens(), shared.load_target(directory / "target")
    for name in THEIRS:
        assert format_of(directory / name).name == "eagle3"
        results = shared.read_results(directory / name)
        drafter = import_drafter(directory / name, target).float()
        tokens_of_outputs = torch.arange(shared.VOCAB) if drafter.vocabulary.tokens is None else drafter.vocabulary.tokens
        assert tokens_of_outputs.tolist() == results["drafted"].tolist()
        alike &= shared.compare(name, shared.unrolled_logits(drafter, target, tokens), results["logits"])
    return alike


if __name__ == "__main__":
    shared.run(__doc__, {"make": make, "compare": compare_and_write, "import": import_theirs})
