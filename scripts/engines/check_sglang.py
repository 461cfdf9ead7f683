"""Check that SGLang's model code loads our exports and computes equal EAGLE-3 logits.

SGLang's models of drafters (python/sglang/srt/models) are plain Python over layers that need a GPU.
So this script imports only the models' files, with plain layers in place of SGLang's. SGLang's code
builds the model from a configuration and loads the tensors; for EAGLE-3 it also computes everything
between the layers. SGLang needs other versions than outrider, so two Pythons run this in turns.

    python3 -m venv sglang-env                                              # torch's CPU build
    sglang-env/bin/pip install torch==2.13.0 transformers==5.8.1 safetensors
    sglang-env/bin/pip install --no-deps sglang==0.5.23
    .venv/bin/python scripts/engines/check_sglang.py make /tmp/sglang
    sglang-env/bin/python scripts/engines/check_sglang.py compare /tmp/sglang

It prints the largest difference of the logits at each depth, and exits with 1 if a difference is
above rounding errors.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_targets as shared
import torch

EAGLE3 = {**shared.EAGLE3_CASES, "eagle3_1": shared.EAGLE3_1}
EAGLE1 = {"eagle1_without_bias": {"bias": False}, "eagle1_with_bias": {"bias": True}}


def make(directory: Path) -> bool:
    """Write the target, and a folder for each case with its export and outrider's results."""
    from outrider.models.export import eagle1, eagle3

    cases = EAGLE3 | {name: {"kind": "eagle", **options} for name, options in EAGLE1.items()}
    formats = dict.fromkeys(EAGLE3, eagle3.FORMAT) | dict.fromkeys(EAGLE1, eagle1.SGLANG)
    return shared.make_exports(
        directory, cases, formats.__getitem__, lambda *pair: shared.usual_results(*pair, shared.chained_logits)
    )


def load(path: Path) -> Any:
    """Build SGLang's model of an export with its own loader.

    Embeddings, and the head of an EAGLE-1, are the target's and not loaded. SGLang ignores unknown
    and missing tensors; here both are errors.
    """
    from engine_models import fill_with_nan, own_modules, require_taken
    from safetensors.torch import load_file
    from transformers import LlamaConfig

    classes = {entry.__name__: entry for module in own_modules("sglang.srt.models") for entry in module.EntryClass}
    config = LlamaConfig.from_pretrained(path)
    model = classes[config.architectures[0]](config)
    fill_with_nan(model)
    weights = load_file(path / "model.safetensors")
    model.load_weights(weights.items())
    require_taken(model, weights, shared=["model.embed_tokens.weight"] + ["lm_head.weight"] * ("lm_head.weight" not in weights))
    return model.eval()


@torch.no_grad()
def their_logits(model: Any, features: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Compute `chained_logits` with SGLang's EAGLE-3 model, which has no batch dimension."""
    batch = SimpleNamespace(
        mm_input_embeds=None,
        forward_mode=SimpleNamespace(is_extend=lambda: False, is_decode=lambda: False),
        spec_info=SimpleNamespace(hidden_states=features[0]),
    )
    read_tokens, positions, logits = tokens[0, 1 : shared.NUM_TOKENS + 1], torch.arange(shared.NUM_TOKENS), []
    for token in (*tokens[0, shared.NUM_TOKENS + 1 :].split(1), None):
        outputs, (hidden,) = model.model(read_tokens, positions, batch)
        logits.append(torch.nn.functional.linear(outputs, model.lm_head.weight)[None])
        batch.spec_info.hidden_states = hidden[-1:]
        read_tokens, positions = token, positions[-1:] + 1
    return logits


def compare_exports(directory: Path) -> bool:
    """Load each export, and compare (the Python with SGLang)."""
    alike = True
    for name in EAGLE1:
        load(directory / name)
        print(f"{name}: all tensors loaded")
    for name in EAGLE3:
        results = shared.read_results(directory / name)
        model = load(directory / name)
        drafted = torch.arange(shared.VOCAB) if model.get_hot_token_id() is None else model.get_hot_token_id()
        assert drafted.tolist() == results["drafted"].tolist()
        # SGLang shares the target's embeddings
        model.model.embed_tokens.weight.data = results["embeddings"]
        alike &= shared.compare(name, their_logits(model, results["features"], shared.make_tokens()), results["logits"])
    return alike


if __name__ == "__main__":
    shared.run(__doc__, {"make": make, "compare": compare_exports})
