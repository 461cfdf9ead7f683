"""Check that EAGLE's code and outrider compute equal logits of EAGLE-1 drafters.

EAGLE's package on PyPI, eagle-llm 1.2.1 (github.com/SafeAILab/EAGLE), needs older versions of other
packages. So two Pythons run this script in turns. 1. outrider's Python makes a target, drafters,
their exports and logits. 2. A Python with EAGLE loads the exports with `EaModel.from_pretrained`,
compares, and writes checkpoints as EAGLE's training does. 3. outrider's Python imports these and
compares.

    python3 -m venv eagle-env                                               # torch's CPU build
    eagle-env/bin/pip install torch==2.13.0 'transformers==4.36.2' 'accelerate==0.21.0' 'numpy<2' safetensors
    eagle-env/bin/pip install --no-deps eagle-llm==1.2.1
    .venv/bin/python scripts/engines/check_eagle.py make /tmp/eagle
    eagle-env/bin/python scripts/engines/check_eagle.py compare /tmp/eagle
    .venv/bin/python scripts/engines/check_eagle.py import /tmp/eagle

It prints the largest difference of the logits at each depth, and exits with 1 if a difference is
above rounding errors.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import engine_targets as shared
import torch

OURS: dict[str, dict[str, Any]] = {
    "eagle1-sglang": {"bias": True},
    "eagle1-vllm": {"bias": False},
}
"""Options of the drafter by format."""
THEIRS: dict[str, dict[str, Any]] = {"as_vicunas": {}, "grouped_heads_without_bias": {"num_key_value_heads": 2, "bias": False}}
"""Further keys of EAGLE's training configurations."""


def make(directory: Path) -> bool:
    """Write the target, and a folder for each case with its export and outrider's logits."""
    from outrider.models.export.eagle1 import SGLANG, VLLM

    cases = {name: {"kind": "eagle", **options} for name, options in OURS.items()}
    formats = {format.name: format for format in (SGLANG, VLLM)}
    return shared.make_exports(
        directory,
        cases,
        formats.__getitem__,
        lambda *pair: shared.chained_logits(*pair, shared.make_tokens()),
        shared.USUAL_ROPE,
    )


def as_released(export: Path, target: Path) -> Path:
    """Copy an export to the form that this version of EAGLE reads.

    It needs pickled weights with the target's embeddings, and the key `bias`. Later versions read
    safetensors, and use the target's embeddings.
    """
    from safetensors.torch import load_file

    released = export.with_name(f"{export.name}-released")
    shutil.copytree(export, released, dirs_exist_ok=True)
    weights = load_file(released / "model.safetensors")
    config = json.loads((released / "config.json").read_text()) | {"bias": "fc.bias" in weights}
    (released / "config.json").write_text(json.dumps(config))
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.embed_tokens.weight"
    weights["embed_tokens.weight"] = load_file(target / index[name])[name]
    torch.save(weights, released / "pytorch_model.bin")
    return released


@torch.no_grad()
def their_logits(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Compute `chained_logits` with EAGLE's own target and layer."""
    text, head, layer = tokens[:, : shared.NUM_TOKENS + 1], model.base_model.lm_head, model.ea_layer
    features = model.base_model.model(text)[0][:, :-1]
    hidden, cache = layer(features, input_ids=text[:, 1:], use_cache=True)
    logits = [head(hidden)]
    for token in tokens[:, shared.NUM_TOKENS + 1 :].split(1, dim=1):
        hidden, cache = layer(hidden[:, -1:], input_ids=token, past_key_values=cache, use_cache=True)
        logits.append(head(hidden))
    return logits


def compare_and_write(directory: Path) -> bool:
    """Load and compare each export, then write EAGLE's own checkpoints (EAGLE's Python)."""
    from eagle.model.ea_model import EaModel

    alike, tokens, target = True, shared.make_tokens(), directory / "target"
    for name in OURS:
        model = EaModel.from_pretrained(
            base_model_path=str(target), ea_model_path=str(as_released(directory / name, target))
        ).eval()
        expected = shared.read_results(directory / name)
        alike &= shared.compare(name, their_logits(model, tokens), expected)
    for name, options in THEIRS.items():
        write(directory / name, options, target)
        model = EaModel.from_pretrained(base_model_path=str(target), ea_model_path=str(directory / name)).eval()
        torch.save(their_logits(model, tokens), directory / name / shared.RESULTS_FILE)
    return alike


def write(path: Path, options: dict[str, Any], target: Path) -> None:
    """Write a checkpoint as EAGLE's training does (eagle/train/main.py).

    Its configuration has the keys of EAGLE's one for Vicuna (train/vicuna_7B_config.json).
    """
    from accelerate import Accelerator
    from eagle.model.cnets import Model
    from eagle.model.configs import EConfig

    path.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": shared.HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 40,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": shared.VOCAB,
        **options,
    }
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    read = EConfig.from_pretrained(path / "config.json")
    model = Model(read, load_emb=True, path=str(target), bias=options.get("bias", True))
    embeddings = model.embed_tokens.weight.clone()
    shared.randomise(model)
    model.embed_tokens.weight.data = embeddings
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(str(path))


def import_theirs(directory: Path) -> bool:
    """Import each checkpoint that EAGLE wrote, and compare (outrider's Python)."""
    from outrider.models.export.registry import format_of

    assert all(format_of(directory / name).kind == "eagle" for name in THEIRS)
    return shared.compare_imports(directory, THEIRS, lambda *pair: shared.chained_logits(*pair, shared.make_tokens()))


if __name__ == "__main__":
    shared.run(__doc__, {"make": make, "compare": compare_and_write, "import": import_theirs})
