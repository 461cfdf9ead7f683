"""Compare EAGLE-3 drafters with SpecForge, whichever of the two wrote them.

SpecForge (github.com/sgl-project/SpecForge) trains drafters for SGLang, and is of the same project.
It wants other versions than outrider does, so this runs in turns: outrider's Python makes a target,
drafters, their exports and what they say; a Python that has SpecForge loads the exports and
compares, and then writes drafters with SpecForge's own exporters; outrider's Python imports those
and compares.

    python3 -m venv specforge-env                                           # torch's CPU build
    specforge-env/bin/pip install torch==2.13.0 transformers==5.8.1 numpy safetensors
    specforge-env/bin/pip install --no-deps specforge==0.2.0
    .venv/bin/python scripts/engines/check_specforge.py make /tmp/specforge
    specforge-env/bin/python scripts/engines/check_specforge.py compare /tmp/specforge
    .venv/bin/python scripts/engines/check_specforge.py import /tmp/specforge

Prints the largest difference of the logits at each depth, and exits with 1 where one is above
rounding.
"""

import json
from pathlib import Path
from typing import Any

import torch
from engine_targets import (
    DEPTHS,
    HIDDEN,
    NUM_TOKENS,
    SCALED_ROPE,
    VOCAB,
    compare,
    load_target,
    make_drafter,
    make_target,
    make_tokens,
    randomise,
    read_features,
    run,
    unrolled_logits,
)

OURS: dict[str, dict[str, Any]] = {
    "whole_vocabulary": {},
    "reduced_vocabulary": {"draft_vocab_size": 50},
    "layer_of_its_own": {
        "init": "random",
        "layer": {
            "model_type": "llama",
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        },
    },
}
"""Options of the drafter."""
THEIRS = {"of_sglangs_exporter": 50, "of_the_hubs_exporter": VOCAB}
"""Tokens that are drafted."""
RESULTS_FILE = "results.pt"


def make(directory: Path) -> bool:
    """Make the target, and a folder for each case with its export and our results."""
    from outrider.models.export.eagle3 import FORMAT
    from outrider.models.export.formats import write_folder

    target, tokens = make_target(directory / "target", SCALED_ROPE), make_tokens()
    for name, options in OURS.items():
        drafter = make_drafter(target, kind="eagle3", **options)
        write_folder(FORMAT, drafter, directory / name, target)
        said = {"features": read_features(drafter, target, tokens), "logits": unrolled_logits(drafter, target, tokens)}
        said["drafted"] = torch.arange(VOCAB) if drafter.vocabulary.tokens is None else drafter.vocabulary.tokens
        torch.save(said, directory / name / RESULTS_FILE)
    print(f"{len(OURS)} exports are in {directory}")
    return True


def load(path: Path, target: Path) -> Any:
    """A drafter as SpecForge makes one of a configuration and weights, which takes the embeddings
    from the target.

    Nothing else may be missing or unknown. (`AutoDraftModel.from_pretrained` leaves the rotary
    tables without numbers in transformers 5.)
    """
    from safetensors.torch import load_file
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    model = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(path / "config.json")), torch_dtype=torch.float32)
    missing, unknown = model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    # of the whole vocabulary the maps are left out
    assert set(missing) <= {"embed_tokens.weight", "d2t", "t2d"}, missing
    assert not unknown, unknown
    model.load_embedding(str(target))
    return model.eval()


@torch.no_grad()
def their_logits(model: Any, features: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """As `unrolled_logits`, by SpecForge's model, which takes the text's tokens shifted by the
    depth.
    """
    tokens = tokens[:, : NUM_TOKENS + 1]
    hidden, positions = model.project_hidden_states(features), torch.arange(NUM_TOKENS)[None]
    attended = torch.ones(1, NUM_TOKENS, dtype=torch.bool)
    mask = model.prepare_decoder_attention_mask(attended, hidden, 1, NUM_TOKENS, 0)
    cache: list[list[torch.Tensor]] = [[], []]
    given, logits = tokens[:, 1:], []
    for depth in range(DEPTHS):
        hidden = model.backbone(model.embed_input_ids(given), hidden, cache, mask, positions)
        logits.append(model.compute_logits(hidden))
        given = torch.cat([tokens[:, 2 + depth :], tokens.new_zeros(1, 1 + depth)], dim=1)
    return logits


def compare_and_write(directory: Path) -> bool:
    """SpecForge's Python: load each export and compare; then write drafters of its own."""
    alike, tokens, target = True, make_tokens(), directory / "target"
    for name in OURS:
        said = torch.load(directory / name / RESULTS_FILE, weights_only=True)
        model = load(directory / name, target)
        assert (torch.arange(len(model.d2t)) + model.d2t).tolist() == said["drafted"].tolist()
        assert model.t2d.nonzero()[:, 0].tolist() == said["drafted"].tolist()
        alike &= compare(name, their_logits(model, said["features"], tokens), said["logits"])
    features = torch.load(directory / "whole_vocabulary" / RESULTS_FILE, weights_only=True)["features"]
    for name, draft_vocab_size in THEIRS.items():
        drafted = write(directory / name, draft_vocab_size, target)
        said = {"logits": their_logits(load(directory / name, target), features, tokens), "drafted": drafted}
        torch.save(said, directory / name / RESULTS_FILE)
    return alike


def write(path: Path, draft_vocab_size: int, target: Path) -> torch.Tensor:
    """A drafter by SpecForge's own exporters, of a configuration with the keys of its own for Qwen3
    (configs/qwen3-32b-eagle3.json); the tokens that it drafts.
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
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 40,
        "max_position_embeddings": 2 * NUM_TOKENS,
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
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab_size,
    }
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(4)
    model = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(path / "config.json")))
    randomise(model)
    drafted = torch.randperm(VOCAB)[:draft_vocab_size].sort().values
    model.d2t.copy_(drafted - torch.arange(draft_vocab_size))
    model.t2d.copy_(torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, drafted, True))
    weights = {name: each for name, each in model.state_dict().items() if "embed" not in name}
    state = path.with_name(f"{path.name}-training.pt")
    torch.save({"draft_state_dict": weights, "strategy": "eagle3"}, state)
    if draft_vocab_size < VOCAB:
        export_to_sglang(str(state), str(path / "config.json"), str(path))
    else:
        export_to_hf(str(state), str(path / "config.json"), str(path), embedding_source=str(target))
    return drafted


def import_theirs(directory: Path) -> bool:
    """outrider's Python: import each drafter that SpecForge wrote, and compare."""
    from outrider.models.export.registry import format_of, import_drafter

    alike, tokens, target = True, make_tokens(), load_target(directory / "target")
    for name in THEIRS:
        assert format_of(directory / name).name == "eagle3"
        said = torch.load(directory / name / RESULTS_FILE, weights_only=True)
        drafter = import_drafter(directory / name, target).float()
        tokens_of_outputs = torch.arange(VOCAB) if drafter.vocabulary.tokens is None else drafter.vocabulary.tokens
        assert tokens_of_outputs.tolist() == said["drafted"].tolist()
        alike &= compare(name, unrolled_logits(drafter, target, tokens), said["logits"])
    return alike


if __name__ == "__main__":
    run(__doc__, {"make": make, "compare": compare_and_write, "import": import_theirs})
