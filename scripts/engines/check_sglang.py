"""Check that SGLang's model code loads our exports, and compare its logits with ours.

SGLang's models of drafters (python/sglang/srt/models) are plain Python over layers that want a GPU.
So this imports the models' own files alone, with plain layers in place of SGLang's: what a
configuration makes, which tensor goes where, and for EAGLE-3 everything between the layers, is
SGLang's. It runs in turns, as SGLang wants other versions than outrider does.

    python3 -m venv sglang-env                                              # torch's CPU build
    sglang-env/bin/pip install torch==2.13.0 transformers==5.8.1 safetensors
    sglang-env/bin/pip install --no-deps sglang==0.5.23
    .venv/bin/python scripts/engines/check_sglang.py make /tmp/sglang
    sglang-env/bin/python scripts/engines/check_sglang.py compare /tmp/sglang

Prints the largest difference of the logits at each depth, and exits with 1 where one is above
rounding.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine_targets import (
    NUM_TOKENS,
    SCALED_ROPE,
    VOCAB,
    chained_logits,
    compare,
    make_drafter,
    make_target,
    make_tokens,
    read_features,
    run,
)

EAGLE3: dict[str, dict[str, Any]] = {
    "whole_vocabulary": {},
    "reduced_vocabulary": {"draft_vocab_size": 50},
    "layer_of_its_own": {
        "init": "random",
        "layer": {
            "model_type": "llama",
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "intermediate_size": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        },
    },
}
"""Options of the drafter."""
EAGLE1 = {"eagle1_without_bias": {"bias": False}, "eagle1_with_bias": {"bias": True}}
RESULTS_FILE = "results.pt"


def make(directory: Path) -> bool:
    """Make the target, and a folder for each case with its export and our results."""
    from outrider.models.export import eagle1, eagle3
    from outrider.models.export.formats import write_folder

    target, tokens = make_target(directory / "target", SCALED_ROPE), make_tokens()
    for name, options in EAGLE3.items():
        drafter = make_drafter(target, kind="eagle3", **options)
        write_folder(eagle3.FORMAT, drafter, directory / name, target)
        said = {"features": read_features(drafter, target, tokens), "logits": chained_logits(drafter, target, tokens)}
        said["drafted"] = torch.arange(VOCAB) if drafter.vocabulary.tokens is None else drafter.vocabulary.tokens
        said["embeddings"] = target.embed_tokens.weight.clone()
        torch.save(said, directory / name / RESULTS_FILE)
    for name, options in EAGLE1.items():
        write_folder(eagle1.SGLANG, make_drafter(target, kind="eagle", **options), directory / name, target)
    print(f"{len(EAGLE3) + len(EAGLE1)} exports are in {directory}")
    return True


def load(path: Path) -> Any:
    """SGLang's model of an export, of its configuration and by its own loader; embeddings and an
    EAGLE-1's head are left out.

    SGLang passes over what it doesn't know and leaves what is missing as it was: here either is an
    error.
    """
    from engine_models import fill_with_nan, own_modules, require_taken
    from safetensors.torch import load_file
    from transformers import LlamaConfig

    classes = {each.__name__: each for module in own_modules("sglang.srt.models") for each in module.EntryClass}
    config = LlamaConfig.from_pretrained(path)
    model = classes[config.architectures[0]](config)
    fill_with_nan(model)
    weights = load_file(path / "model.safetensors")
    model.load_weights(weights.items())
    require_taken(model, weights, shared=["model.embed_tokens.weight"] + ["lm_head.weight"] * ("lm_head.weight" not in weights))
    return model.eval()


@torch.no_grad()
def their_logits(model: Any, features: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """As `chained_logits`, by SGLang's model of an EAGLE-3 drafter, which reads texts without a
    dimension of the batch.
    """
    batch = SimpleNamespace(
        mm_input_embeds=None,
        forward_mode=SimpleNamespace(is_extend=lambda: False, is_decode=lambda: False),
        spec_info=SimpleNamespace(hidden_states=features[0]),
    )
    given, places, logits = tokens[0, 1 : NUM_TOKENS + 1], torch.arange(NUM_TOKENS), []
    for token in (*tokens[0, NUM_TOKENS + 1 :].split(1), None):
        outputs, (hidden,) = model.model(given, places, batch)
        logits.append(torch.nn.functional.linear(outputs, model.lm_head.weight)[None])
        batch.spec_info.hidden_states = hidden[-1:]
        given, places = token, places[-1:] + 1
    return logits


def compare_exports(directory: Path) -> bool:
    """Load each export in the Python that has SGLang, and compare."""
    alike = True
    for name in EAGLE1:
        load(directory / name)
        print(f"{name}: taken whole")
    for name in EAGLE3:
        said = torch.load(directory / name / RESULTS_FILE, weights_only=True)
        model = load(directory / name)
        drafted = torch.arange(VOCAB) if model.get_hot_token_id() is None else model.get_hot_token_id()
        assert drafted.tolist() == said["drafted"].tolist()
        model.model.embed_tokens.weight.data = said["embeddings"]  # as SGLang shares the target's
        alike &= compare(name, their_logits(model, said["features"], make_tokens()), said["logits"])
    return alike


if __name__ == "__main__":
    run(__doc__, {"make": make, "compare": compare_exports})
