"""Compare heads with Medusa's own code, whichever of the two wrote them.

Its package on PyPI, medusa-llm 0.1 (github.com/FasterDecoding/Medusa), wants older versions of
other packages, so this runs in turns: outrider's Python makes a target, a drafter, its export and
what it says; a Python that has Medusa loads the export with its own `MedusaModel.from_pretrained`
and compares, and then writes heads as its training does; outrider's Python imports those and
compares.

    python3 -m venv medusa-env                                              # torch's CPU build
    medusa-env/bin/pip install torch==2.13.0 'transformers==4.36.2' 'accelerate==0.21.0' 'numpy<2' safetensors
    medusa-env/bin/pip install --no-deps medusa-llm==0.1
    .venv/bin/python scripts/engines/check_medusa.py make /tmp/medusa
    medusa-env/bin/python scripts/engines/check_medusa.py compare /tmp/medusa
    .venv/bin/python scripts/engines/check_medusa.py import /tmp/medusa

Prints the largest difference of each head's logits, and exits with 1 where one is above rounding.
"""

import json
from pathlib import Path
from typing import Any

import torch
from engine_targets import NUM_TOKENS, VOCAB, compare, load_target, make_drafter, make_target, make_tokens, randomise, run

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
"""Of the target: this version of Medusa reads no other base of it."""
OURS = "ours"
THEIRS = {"as_published": (3, 1), "two_blocks": (2, 2), "one_head": (1, 1)}
"""Heads and blocks."""
RESULTS_FILE = "results.pt"


def make(directory: Path) -> bool:
    """Make the target, and a folder with the export and our results."""
    from outrider.models.export.formats import write_folder
    from outrider.models.export.medusa import REFERENCE

    target = make_target(directory / "target", ROPE)
    drafter = make_drafter(target, kind="medusa", num_heads=3)
    write_folder(REFERENCE, drafter, directory / OURS, target)
    # Medusa loads the target by this name: here it is no repository of the Hub's.
    rename_target(directory / OURS / "config.json", directory / "target")
    torch.save(our_logits(drafter, target), directory / OURS / RESULTS_FILE)
    print(f"the export is in {directory / OURS}")
    return True


def rename_target(config: Path, target: Path) -> None:
    said = json.loads(config.read_text())
    assert said["base_model_name_or_path"] == target.name
    config.write_text(json.dumps(said | {"base_model_name_or_path": str(target.resolve())}))


@torch.no_grad()
def our_logits(drafter: Any, target: Any) -> list[torch.Tensor]:
    """Return the logits of each head at each token of a text: [NUM_TOKENS, VOCAB]."""
    text = make_tokens()[:, :NUM_TOKENS]
    hidden, _ = target.hidden_states(text)
    logits: torch.Tensor = drafter.logits(hidden[0])
    return list(logits.unbind(1))


@torch.no_grad()
def compare_and_write(directory: Path) -> bool:
    """Medusa's Python: load the export and compare; then write heads of its own."""
    from medusa.model.medusa_model import MedusaModel

    def logits(name: str) -> list[torch.Tensor]:
        model = MedusaModel.from_pretrained(str(directory / name)).eval()
        found = model(make_tokens()[:, :NUM_TOKENS])
        assert found.shape[1:] == (1, NUM_TOKENS, VOCAB)
        return [each[0] for each in found]

    expected = torch.load(directory / OURS / RESULTS_FILE, weights_only=True)
    alike = compare(OURS, logits(OURS), expected)
    for name, (num_heads, num_layers) in THEIRS.items():
        write(directory / name, num_heads, num_layers, directory / "target")
        torch.save(logits(name), directory / name / RESULTS_FILE)
    return alike


def write(path: Path, num_heads: int, num_layers: int, target: Path) -> None:
    """Heads as Medusa's training (medusa/train/train.py) writes them.

    All blocks of a head are one module there.
    """
    from medusa.model.medusa_model import MedusaConfig, MedusaModel
    from transformers import LlamaForCausalLM

    sizes = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "base_model_name_or_path": str(target.resolve())}
    model = MedusaModel(LlamaForCausalLM.from_pretrained(target), **sizes)
    torch.manual_seed(3)
    randomise(model.medusa_head)
    MedusaConfig(**sizes).save_pretrained(path)
    torch.save(model.medusa_head.state_dict(), path / "medusa_lm_head.pt")


def import_theirs(directory: Path) -> bool:
    """outrider's Python: import the heads that Medusa wrote, and compare."""
    from outrider.models.export.registry import format_of, import_drafter

    alike, target = True, load_target(directory / "target")
    for name, sizes in THEIRS.items():
        assert format_of(directory / name).name == "medusa"
        drafter = import_drafter(directory / name, target)
        assert (drafter.config.num_heads, drafter.config.num_layers) == sizes
        expected = torch.load(directory / name / RESULTS_FILE, weights_only=True)
        alike &= compare(name, our_logits(drafter, target), expected)
    return alike


if __name__ == "__main__":
    run(__doc__, {"make": make, "compare": compare_and_write, "import": import_theirs})
