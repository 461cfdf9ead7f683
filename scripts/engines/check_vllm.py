"""Check that vLLM's model code loads our exports, and compare its logits with ours.

vLLM's models of drafters (vllm/model_executor/models) are plain Python over layers that want a GPU.
So this imports the models' own files alone, with plain layers in place of vLLM's: what a
configuration makes, which tensor goes where, and everything between the layers is vLLM's. vLLM's
package for TPUs is small; its files of models are the same. It runs in turns, as vLLM wants other
versions than outrider does.

    python3 -m venv vllm-env                                                # torch's CPU build
    vllm-env/bin/pip install torch==2.13.0 transformers==5.8.1 safetensors regex
    pip download --no-deps vllm-tpu==0.32.0 && tar xzf vllm_tpu-0.32.0.tar.gz
    .venv/bin/python scripts/engines/check_vllm.py make /tmp/vllm
    PYTHONPATH=vllm_tpu-0.32.0 vllm-env/bin/python scripts/engines/check_vllm.py compare /tmp/vllm

Prints the largest difference of the logits at each depth, and exits with 1 where one is above
rounding.
"""

import json
from pathlib import Path
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

OWN_LAYER = {
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}
CASES: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3"},
    "eagle3_reduced_vocabulary": {"kind": "eagle3", "draft_vocab_size": 50},
    "eagle3_layer_of_its_own": {"kind": "eagle3", "init": "random", "layer": OWN_LAYER},
    "speculators": {"kind": "eagle3"},
    "speculators_reduced_vocabulary": {"kind": "eagle3", "draft_vocab_size": 50},
    "eagle1": {"kind": "eagle", "bias": False},
    "eagle1_layer_of_its_own": {"kind": "eagle", "bias": False, "init": "random", "layer": OWN_LAYER},
}
"""Options of the drafter."""
CLASSES = {"eagle": "EagleLlamaForCausalLM", "eagle3": "Eagle3LlamaForCausalLM"}
RESULTS_FILE, TARGET_LAYERS = "results.pt", 8


def make(directory: Path) -> bool:
    """Make the target, and a folder for each case with its export and our results."""
    from outrider.models.export import eagle1, eagle3, speculators
    from outrider.models.export.formats import write_folder

    formats = {"eagle1": eagle1.VLLM, "eagle3": eagle3.FORMAT, "speculators": speculators.FORMAT}
    target, tokens = make_target(directory / "target", SCALED_ROPE), make_tokens()
    for name, options in CASES.items():
        drafter = make_drafter(target, **options)
        write_folder(formats[name.partition("_")[0]], drafter, directory / name, target)
        said = {"features": read_features(drafter, target, tokens), "logits": chained_logits(drafter, target, tokens)}
        said |= {"embeddings": target.embed_tokens.weight.clone(), "head": target.head.weight.clone()}
        drafted = None if options["kind"] == "eagle" else drafter.vocabulary.tokens
        said["drafted"] = torch.arange(VOCAB) if drafted is None else drafted
        torch.save(said, directory / name / RESULTS_FILE)
    print(f"{len(CASES)} exports are in {directory}")
    return True


def read_config(path: Path) -> Any:
    """A drafter's configuration; of a folder of speculators, what vLLM makes of it
    (transformers_utils/configs/speculators).
    """
    from transformers import LlamaConfig

    said = json.loads((path / "config.json").read_text())
    if "transformer_layer_config" not in said:
        return LlamaConfig.from_pretrained(path)
    config: Any = LlamaConfig(**said["transformer_layer_config"])
    for name in ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        setattr(config, name, said[name])
    return config


def load(path: Path, kind: str) -> Any:
    """vLLM's model of an export, of its configuration and by its own loader."""
    from engine_models import VllmConfig, fill_with_nan, own_modules, require_taken
    from safetensors.torch import load_file

    made = VllmConfig.of(read_config(path), target_layers=TARGET_LAYERS, vocab_size=VOCAB)
    (kind_of_model,) = (
        vars(each)[CLASSES[kind]] for each in own_modules("vllm.model_executor.models") if CLASSES[kind] in vars(each)
    )
    model = kind_of_model(vllm_config=made)
    fill_with_nan(model)
    weights = load_file(path / "model.safetensors")
    model.load_weights(weights.items())
    require_taken(model, weights, shared=["model.embed_tokens.weight"] * ("embed_tokens.weight" not in weights))
    return model.eval()


@torch.no_grad()
def their_logits(model: Any, said: dict[str, Any], tokens: torch.Tensor, kind: str) -> list[torch.Tensor]:
    """Compute what `chained_logits` does, by vLLM's model, which has no batch dimension."""
    model.model.embed_tokens.weight.data = said["embeddings"]  # as vLLM shares the target's
    hidden = said["features"][0] if kind == "eagle" else model.combine_hidden_states(said["features"][0])
    given, places, logits = tokens[0, 1 : NUM_TOKENS + 1], torch.arange(NUM_TOKENS), []
    for token in (*tokens[0, NUM_TOKENS + 1 :].split(1), None):
        outputs, hidden = model(given, places, hidden)
        if kind == "eagle":
            logits.append(torch.nn.functional.linear(outputs, said["head"])[None])
        else:  # over all of the target's tokens, those that aren't drafted at minus infinity
            scattered = model.compute_logits(outputs)
            assert torch.equal(scattered.isfinite().all(0).nonzero()[:, 0], said["drafted"])
            logits.append(scattered[None, :, said["drafted"]])
        hidden, given, places = hidden[-1:], token, places[-1:] + 1
    return logits


def compare_exports(directory: Path) -> bool:
    """Load each export in the Python that has vLLM's files, and compare."""
    alike = True
    for name, options in CASES.items():
        said = torch.load(directory / name / RESULTS_FILE, weights_only=True)
        found = their_logits(load(directory / name, options["kind"]), said, make_tokens(), options["kind"])
        alike &= compare(name, found, said["logits"])
    return alike


if __name__ == "__main__":
    run(__doc__, {"make": make, "compare": compare_exports})
