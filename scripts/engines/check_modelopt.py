"""Check that outrider computes the logits of EAGLE-3 drafters of NVIDIA's Model Optimizer.

The Model Optimizer's drafters are published for vLLM, SGLang and TensorRT-LLM. It cannot read
drafters of other programs, so only imports are checked. outrider's Python makes a target. A Python
with the Model Optimizer makes drafters for it and writes them with its exporter. outrider's Python
imports these and compares.

    python3 -m venv modelopt-env                                            # torch's CPU build
    modelopt-env/bin/pip install torch==2.13.0 transformers==5.8.1 nvidia-modelopt==0.47.0 accelerate datasets peft requests
    .venv/bin/python scripts/engines/check_modelopt.py make /tmp/modelopt
    modelopt-env/bin/python scripts/engines/check_modelopt.py write /tmp/modelopt
    .venv/bin/python scripts/engines/check_modelopt.py import /tmp/modelopt

It prints the largest difference of the logits at each depth, and exits with 1 if a difference is
above rounding errors.
"""

from pathlib import Path
from typing import Any

import engine_targets as shared
import torch

ROPE = {"rope_type": "default", "rope_theta": 50000.0}
LAYER = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 40}
YARN = {"rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0, "original_max_position_embeddings": 64}
THEIRS: dict[str, dict[str, Any]] = {
    "whole_vocabulary": {"has_lm_head": True},
    "targets_head": {},
    "reduced_vocabulary": {"draft_vocab_size": 50},
    "longer_context": {"draft_vocab_size": 50, "rope_scaling": YARN},
}
"""Options of the drafter's architecture."""


def make(directory: Path) -> bool:
    """Write the target."""
    shared.make_target(directory / "target", ROPE)
    print(f"the target is in {directory / 'target'}")
    return True


def write(directory: Path) -> bool:
    """Make drafters, and write each with its logits (the Model Optimizer's Python)."""
    import modelopt.torch.speculative as speculative
    from modelopt.torch.export import export_speculative_decoding
    from modelopt.torch.speculative.config import eagle3_default_config
    from transformers import AutoModelForCausalLM

    for name, options in THEIRS.items():
        model: Any = AutoModelForCausalLM.from_pretrained(directory / "target", dtype=torch.float32)
        settings = {
            "eagle_architecture_config": {**eagle3_default_config, **LAYER, **options},
            "eagle_decoder_type": "llama",
            "eagle_use_torch_compile": False,
            # Without this, drafters trained without scaled rotary embeddings are written as if they
            # had them.
            "eagle_export_rope_scaling": {},
        }
        speculative.convert(model, [("eagle", settings)])
        torch.manual_seed(5)
        shared.randomise(model.eagle_module)
        # Its layer applies this norm to the features first, and then `hidden_norm`; engines apply
        # only the second. The results are equal if all weights of the first norm are equal.
        model.eagle_module.layers[0].input_layernorm.weight.data.fill_(1.3)
        if (num_outputs := options.get("draft_vocab_size", shared.VOCAB)) < shared.VOCAB:
            drafted = torch.randperm(shared.VOCAB)[:num_outputs].sort().values
            model.eagle_module.d2t.copy_(drafted - torch.arange(num_outputs))
        export_speculative_decoding(model.eval(), export_dir=directory / name)
        torch.save(their_logits(model, shared.make_tokens()), directory / name / shared.RESULTS_FILE)
    return True


@torch.no_grad()
def their_logits(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Compute `chained_logits` with the Model Optimizer's hooks on the target and its drafter."""
    from transformers.cache_utils import DynamicCache

    drafter, embed = model.eagle_module, model.get_input_embeddings()
    head = getattr(drafter, "lm_head", model.lm_head)
    model.model(tokens[:, : shared.NUM_TOKENS])
    hidden = drafter.fc(model.pop_and_gather_aux_hiddens())
    if not hasattr(drafter, "rotary_emb"):
        drafter._maybe_init_rope(hidden.device)
    cache = DynamicCache()
    causal = torch.ones(shared.NUM_TOKENS, shared.NUM_TOKENS, dtype=torch.bool).tril()[None, None]
    read_tokens, logits, positions = tokens[:, 1 : shared.NUM_TOKENS + 1], [], torch.arange(shared.NUM_TOKENS)[None]
    mask: torch.Tensor | None = causal
    for token in (*tokens[:, shared.NUM_TOKENS + 1 :].split(1, dim=1), None):
        outputs, hidden, cache = drafter(
            hidden, embed(read_tokens), mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        logits.append(head(outputs))
        read_tokens, hidden, mask, positions = token, hidden[:, -1:], None, positions[:, -1:] + 1
    return logits


def import_theirs(directory: Path) -> bool:
    """Import each drafter, and compare (outrider's Python)."""
    from outrider.models.export.registry import format_of

    assert all(format_of(directory / name).name == "eagle3" for name in THEIRS)
    return shared.compare_imports(directory, THEIRS, lambda *pair: shared.chained_logits(*pair, shared.make_tokens()))


if __name__ == "__main__":
    shared.run(__doc__, {"make": make, "write": write, "import": import_theirs})
