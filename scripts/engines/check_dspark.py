"""Check that DeepSpec, speculators and vLLM compute outrider's logits from exports of DSpark.

DeepSpec (github.com/deepseek-ai/DeepSpec) trains the published drafters. The programs need other
versions than outrider, so two Pythons run this script. outrider's Python makes a small target, block
drafters for it, their exports and logits. A Python with the programs loads the exports and compares.
Of vLLM only the model's files are imported, with plain layers in place of its own, which need a GPU.

    python3 -m venv dspark-env                                              # torch's CPU build, and no torchvision
    dspark-env/bin/pip install torch==2.13.0 'transformers<=5.19.0' safetensors pydantic pydantic-settings loguru openai \
        datasets psutil aiohttp
    dspark-env/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    git clone https://github.com/deepseek-ai/DeepSpec && git -C DeepSpec checkout afdfa7c
    .venv/bin/python scripts/engines/check_dspark.py make /tmp/dspark
    pip download --no-deps vllm==0.33.0 && unzip vllm-0.33.0-*.whl 'vllm/*.py' -d vllm-files
    PYTHONPATH=DeepSpec:vllm-files dspark-env/bin/python scripts/engines/check_dspark.py compare /tmp/dspark

It prints the largest difference of the logits of each slot, and exits with 1 if a difference is
above rounding errors.
"""

from pathlib import Path
from typing import Any

import engine_targets as shared
import torch

BLOCK, MASK = 4, 7
CONTEXT = shared.NUM_TOKENS - 2 * BLOCK
"""Number of tokens before the anchor. speculators needs tokens after the block, and ignores them."""
DSPARK = {
    "kind": "block",
    "layer": {"model_type": "qwen3"},
    "init": "random",
    "block": BLOCK,
    "correction": "markov",
    "rank": 8,
    "inject": False,
    "mask_token_id": MASK,
}
QWEN3_LAYER = {**shared.OWN_LAYER, "model_type": "qwen3"}
CASES: dict[str, dict[str, Any]] = {
    "deepspec": {"num_layers": 2},
    "deepspec_layer_of_its_own": {"layer": QWEN3_LAYER, "feature_layers": [0, 4]},
    "speculators": {"num_layers": 2},
    "speculators_reduced_vocabulary": {"draft_vocab_size": 50},
    "speculators_layer_of_its_own": {"layer": QWEN3_LAYER, "feature_layers": [1, 4, 6, 7]},
}


def make(directory: Path) -> bool:
    """Write the target, and a folder for each case with its export and outrider's results."""
    from outrider.models.export import dspark

    formats = {"deepspec": dspark.DEEPSPEC, "speculators": dspark.SPECULATORS}

    def results_of(drafter: Any, target: Any) -> dict[str, Any]:
        results = shared.usual_results(drafter, target, lambda *_: [])
        results["logits"] = chained_logits(drafter, results["features"], shared.make_tokens())
        return results | {"feature_layers": list(drafter.feature_layers)}

    cases = {name: {**DSPARK, **options} for name, options in CASES.items()}
    made = shared.make_exports(directory, cases, lambda name: formats[name.partition("_")[0]], results_of)
    for name in CASES:
        if name.startswith("speculators"):
            shared.point_to_target(directory / name / "config.json", directory / "target")
    return made


@torch.no_grad()
def chained_logits(drafter: Any, features: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Compute the corrected logits of each slot [1, output], after the likeliest tokens before it."""
    from transformers.cache_utils import DynamicCache

    cache, context, anchor = DynamicCache(), drafter.context(features[:, :CONTEXT]), tokens[:, CONTEXT]
    drafter.write_context(context, torch.arange(CONTEXT)[None], cache)
    inputs, positions = drafter.slot_inputs(anchor, context[:, -1]), CONTEXT + torch.arange(BLOCK)[None]
    mask = torch.ones(1, 1, BLOCK, CONTEXT + BLOCK, dtype=torch.bool)
    hidden = drafter.read_slots(inputs, positions, mask, lambda _: cache)
    logits, token = [], anchor
    for slot in hidden.unbind(1):
        logits.append(drafter.logits(slot, drafter.correction.state(token)))
        token = drafter.vocabulary.target_tokens(logits[-1].argmax(-1))
    return logits


@torch.no_grad()
def deepspec_logits(path: Path, results: dict[str, Any], tokens: torch.Tensor) -> list[torch.Tensor]:
    """Compute `chained_logits` with DeepSpec's own model and its drafting."""
    from deepspec.eval.dspark.draft_ops import forward_dspark_draft_block
    from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel
    from transformers import DynamicCache

    model = Qwen3DSparkModel.from_pretrained(path, attn_implementation="eager").float().eval()
    model.embed_tokens.weight.data, model.lm_head.weight.data = results["embeddings"], results["head"]
    draft_input_ids = torch.full((1, BLOCK), int(model.mask_token_id))
    draft_input_ids[:, 0] = tokens[:, CONTEXT]
    hidden = forward_dspark_draft_block(
        model,
        draft_input_ids=draft_input_ids,
        position_ids=torch.arange(CONTEXT + BLOCK)[None],
        past_key_values_draft=DynamicCache(),
        target_hidden_states=results["features"][:, :CONTEXT],
        start=CONTEXT,
        block_size=model.block_size,
    )
    _, logits = model.sample_draft_tokens(
        model.compute_logits(hidden), first_prev_token_ids=tokens[:, CONTEXT], hidden_states=hidden
    )
    return list(logits.unbind(1))


@torch.no_grad()
def speculators_logits(path: Path, results: dict[str, Any], tokens: torch.Tensor) -> list[torch.Tensor]:
    """Compute `chained_logits` with the library's own model, which is for training.

    It has no drafting of its own: the loop over slots here applies its Markov head.
    """
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config: Any = SpeculatorModelConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"  # the default needs a GPU
    model: Any = SpeculatorModel.from_pretrained(path, config=config)
    model = model.float().eval()
    text, features = tokens[:, : shared.NUM_TOKENS], results["features"]
    is_anchor = (torch.arange(shared.NUM_TOKENS) == CONTEXT)[None]
    hidden, base, *_ = model._backbone_forward(
        features, text, is_anchor, torch.zeros_like(features[..., : model.hidden_size]), torch.zeros_like(text), max_anchors=1
    )
    logits, token = [], tokens[:, CONTEXT]
    for slot in range(BLOCK):
        bias = model.markov_head.block_bias(prev_token_ids=token[:, None], hidden_states=hidden[:, slot : slot + 1])
        logits.append(base[:, slot] + bias[:, 0])
        output = logits[-1].argmax(-1)
        token = output if model.d2t is None else output + model.d2t[output]
    return logits


def compare_exports(directory: Path) -> bool:
    """Load each export with its program and compare; return whether all are equal."""
    from vllm_dspark import vllm_logits

    programs = {"deepspec": deepspec_logits, "speculators": speculators_logits}
    alike = True
    for name in CASES:
        results = shared.read_results(directory / name)
        logits = programs[name.partition("_")[0]](directory / name, results, shared.make_tokens())
        alike &= shared.compare(name, logits, results["logits"])
        logits = vllm_logits(directory / name, results, shared.make_tokens(), CONTEXT)
        alike &= shared.compare(f"{name} in vLLM", logits, results["logits"])
    return alike


if __name__ == "__main__":
    shared.run(__doc__, {"make": make, "compare": compare_exports})
