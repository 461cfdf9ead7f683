"""Check that vLLM's model code loads all of our exports and computes equal logits.

vLLM's models of drafters (vllm/model_executor/models) are plain Python over layers that need a GPU.
So this script imports only the models' files, with plain layers in place of vLLM's. vLLM's code
builds the model from a configuration, loads the tensors, and computes everything between the
layers. The package is vLLM's small one for TPUs, whose model files are equal. vLLM needs other
versions than outrider, so two Pythons run this script in turns.

    python3 -m venv vllm-env                                                # torch's CPU build
    vllm-env/bin/pip install torch==2.13.0 transformers==5.8.1 safetensors regex
    pip download --no-deps vllm-tpu==0.32.0 && tar xzf vllm_tpu-0.32.0.tar.gz
    .venv/bin/python scripts/engines/check_vllm.py make /tmp/vllm
    PYTHONPATH=vllm_tpu-0.32.0 vllm-env/bin/python scripts/engines/check_vllm.py compare /tmp/vllm

It prints the largest difference of the logits at each depth, and exits with 1 if a difference is
above rounding errors.
"""

import json
from pathlib import Path
from typing import Any

import engine_targets as shared
import torch

CASES: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3"},
    "eagle3_reduced_vocabulary": {"kind": "eagle3", "draft_vocab_size": 50},
    "eagle3_layer_of_its_own": {"kind": "eagle3", "init": "random", "layer": shared.OWN_LAYER},
    "eagle3_1": shared.EAGLE3_1,
    "speculators_norm_before_fc": {"kind": "eagle3", "norm_before_fc": True, "norm_output": True},
    "speculators": {"kind": "eagle3"},
    "speculators_reduced_vocabulary": {"kind": "eagle3", "draft_vocab_size": 50},
    "eagle1": {"kind": "eagle", "bias": False},
    "eagle1_layer_of_its_own": {"kind": "eagle", "bias": False, "init": "random", "layer": shared.OWN_LAYER},
}
"""Options of the drafter."""
CLASSES = {"eagle": "EagleLlamaForCausalLM", "eagle3": "Eagle3LlamaForCausalLM"}
TARGET_LAYERS = 8


def make(directory: Path) -> bool:
    """Write the target, and a folder for each case with its export and outrider's results."""
    from outrider.models.export import eagle1, eagle3, speculators

    formats = {"eagle1": eagle1.VLLM, "eagle3": eagle3.FORMAT, "speculators": speculators.FORMAT}
    return shared.make_exports(
        directory,
        CASES,
        lambda name: formats[name.partition("_")[0]],
        lambda *pair: shared.usual_results(*pair, shared.chained_logits),
    )


def read_config(path: Path) -> Any:
    """Read a drafter's configuration, and convert that of speculators as vLLM does.

    vLLM's code for that is in transformers_utils/configs/speculators.
    """
    from transformers import LlamaConfig

    values = json.loads((path / "config.json").read_text())
    if "transformer_layer_config" not in values:
        return LlamaConfig.from_pretrained(path)
    config: Any = LlamaConfig(**values["transformer_layer_config"])
    for name in ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        setattr(config, name, values[name])
    return config


def load(path: Path, kind: str) -> Any:
    """Build vLLM's model of an export with its own loader."""
    from engine_models import VllmConfig, fill_with_nan, own_modules, require_taken
    from safetensors.torch import load_file

    vllm_config = VllmConfig.of(read_config(path), target_layers=TARGET_LAYERS, vocab_size=shared.VOCAB)
    (kind_of_model,) = (
        vars(module)[CLASSES[kind]] for module in own_modules("vllm.model_executor.models") if CLASSES[kind] in vars(module)
    )
    model = kind_of_model(vllm_config=vllm_config)
    fill_with_nan(model)
    weights = load_file(path / "model.safetensors")
    model.load_weights(weights.items())
    require_taken(model, weights, shared=["model.embed_tokens.weight"] * ("embed_tokens.weight" not in weights))
    return model.eval()


@torch.no_grad()
def their_logits(model: Any, results: dict[str, Any], tokens: torch.Tensor, kind: str) -> list[torch.Tensor]:
    """Compute `chained_logits` with vLLM's model, which has no batch dimension."""
    # vLLM shares the target's embeddings
    model.model.embed_tokens.weight.data = results["embeddings"]
    hidden = results["features"][0] if kind == "eagle" else model.combine_hidden_states(results["features"][0])
    read_tokens, positions, logits = tokens[0, 1 : shared.NUM_TOKENS + 1], torch.arange(shared.NUM_TOKENS), []
    for token in (*tokens[0, shared.NUM_TOKENS + 1 :].split(1), None):
        outputs, hidden = model(read_tokens, positions, hidden)
        if kind == "eagle":
            logits.append(torch.nn.functional.linear(outputs, results["head"])[None])
        else:  # logits of all the target's tokens, minus infinity outside of the draft vocabulary
            scattered = model.compute_logits(outputs)
            assert torch.equal(scattered.isfinite().all(0).nonzero()[:, 0], results["drafted"])
            logits.append(scattered[None, :, results["drafted"]])
        hidden, read_tokens, positions = hidden[-1:], token, positions[-1:] + 1
    return logits


def compare_exports(directory: Path) -> bool:
    """Load each export, and compare (the Python with vLLM's files)."""
    alike = True
    for name, options in CASES.items():
        results = shared.read_results(directory / name)
        logits = their_logits(load(directory / name, options["kind"]), results, shared.make_tokens(), options["kind"])
        alike &= shared.compare(name, logits, results["logits"])
    return alike


if __name__ == "__main__":
    shared.run(__doc__, {"make": make, "compare": compare_exports})
