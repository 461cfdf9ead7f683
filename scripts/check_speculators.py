"""Does the speculators library say of an export what outrider says of the drafter?

The library wants other versions than outrider does, so this runs twice: with outrider's Python, which makes a small target, an
EAGLE-3 drafter for it, its export, and what the drafter says; and with a Python that has the library, which loads the export
and compares.

    python3 -m venv speculators-env                                         # torch's CPU build, and no torchvision
    speculators-env/bin/pip install torch==2.13.0 'transformers<=5.19.0' safetensors pydantic pydantic-settings loguru openai \
        datasets psutil aiohttp
    speculators-env/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    .venv/bin/python scripts/check_speculators.py make /tmp/export
    speculators-env/bin/python scripts/check_speculators.py compare /tmp/export

Prints the largest difference of the logits at each depth, and exits with 1 where one is above TOLERANCE.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

HIDDEN, VOCAB, DRAFT_VOCAB, NUM_TOKENS, DEPTHS = 32, 120, 50, 128, 3
TOLERANCE = 1e-5
"""Of logits of a size near 1, in float32: the two add in different orders."""
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "whole_vocabulary": {},
    "reduced_vocabulary": {"draft_vocab_size": DRAFT_VOCAB},
    "layer_of_its_own": {
        "init": "random",
        "layer": {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 40},
        "feature_layers": [1, 4, 6],
    },
}
EXPECTED_FILE = "expected.pt"


def make_target(directory: Path) -> Any:
    """A random Llama, saved with a tokenizer, as outrider loads it."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from outrider.models.config import TargetConfig
    from outrider.models.target import load_target

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * NUM_TOKENS,
        rope_parameters=ROPE,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    return load_target(TargetConfig(name_or_path=str(directory), device="cpu", dtype="float32"))


def trained(target: Any, options: dict[str, Any]) -> Any:
    """A drafter whose every number matters, as after training."""
    from outrider.models.drafters import build_drafter

    torch.manual_seed(1)
    drafter = build_drafter({"kind": "eagle3", "depth": DEPTHS, **options}, target)
    for name, parameter in drafter.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    drafter.choose_draft_vocabulary(torch.arange(VOCAB).remainder(7))
    return drafter.eval().requires_grad_(False)


@torch.no_grad()
def our_logits(drafter: Any, target: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The drafter's logits at every position and depth, each depth fed the outputs of the one before: [1, token, output]."""
    from transformers.cache_utils import DynamicCache

    attended = torch.ones_like(tokens, dtype=torch.bool)
    _, features = target.hidden_states(tokens, attended, drafter.feature_layers)
    hidden, cache, steps = drafter.fuse(features[:, :-1]), DynamicCache(), torch.arange(NUM_TOKENS)
    given, logits = tokens[:, 1:], []
    causal, own = (steps <= steps[:, None])[None, None], torch.eye(NUM_TOKENS, dtype=torch.bool)[None, None]
    mask = causal
    for depth in range(DEPTHS):
        # The library counts positions from 1, and at depth d reads the text's tokens shifted by d, with zeros behind them.
        hidden = drafter.read(given, hidden, (steps + 1 + depth)[None], cache, mask)
        logits.append(drafter.logits(hidden))
        given = torch.cat([tokens[:, 2 + depth :], tokens.new_zeros(1, 1 + depth)], dim=1)
        mask = torch.cat([mask, own], dim=-1)
    return logits


def make(directory: Path) -> None:
    """Write the target, and a folder for each case with its export and what outrider says."""
    from outrider.models.export.formats import write_folder
    from outrider.models.export.speculators import FORMAT

    target = make_target(directory / "target")
    tokens = torch.randint(VOCAB, (1, NUM_TOKENS + 1))
    for name, options in CASES.items():
        drafter = trained(target, options)
        write_folder(FORMAT, drafter, directory / name, target)
        config = directory / name / "config.json"
        # The library looks the target up by this name: here it is no repository of the Hub's.
        said = json.loads(config.read_text())
        said["speculators_config"]["verifier"]["name_or_path"] = str((directory / "target").resolve())
        config.write_text(json.dumps(said, indent=2))
        attended = torch.ones_like(tokens, dtype=torch.bool)
        features = target.hidden_states(tokens, attended, drafter.feature_layers)[1]
        expected = {"tokens": tokens, "features": features, "logits": our_logits(drafter, target, tokens)}
        torch.save(expected, directory / name / EXPECTED_FILE)
    print(f"{len(CASES)} exports are in {directory}")


@torch.no_grad()
def compare(directory: Path) -> bool:
    """Load each export with the library and compare; whether all are alike."""
    from speculators import SpeculatorModel

    alike = True
    for name in CASES:
        expected = torch.load(directory / name / EXPECTED_FILE, weights_only=True)
        model: Any = SpeculatorModel.from_pretrained(directory / name)
        model = model.float().eval()
        found: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda module, inputs, output, found=found: found.append(output))
        model(
            hidden_states=expected["features"][:, :-1],
            input_ids=expected["tokens"][:, 1:],
            document_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.long),
            ttt_steps=DEPTHS,
        )
        assert len(found) == len(expected["logits"]) == DEPTHS
        # Tokens that the text hasn't at a depth are zeros on both sides.
        differences = [float((a - b).abs().max()) for a, b in zip(found, expected["logits"], strict=True)]
        size = max(float(each.abs().max()) for each in expected["logits"])
        print(f"{name}: logits up to {size:.1f}; largest difference by depth: {', '.join(f'{d:.1e}' for d in differences)}")
        alike &= max(differences) <= TOLERANCE * size
    return alike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("make", "compare"))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if arguments.step == "make":
        make(arguments.directory)
    elif not compare(arguments.directory):
        sys.exit("the library says something else than outrider")


if __name__ == "__main__":
    main()
