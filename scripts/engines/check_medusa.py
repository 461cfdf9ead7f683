"""Check that Medusa's code and outrider compute equal logits of Medusa heads.

Medusa's package on PyPI, medusa-llm 0.1 (github.com/FasterDecoding/Medusa), needs older versions of
other packages. So two Pythons run this script in turns. 1. outrider's Python makes a target, a
drafter, its export and logits. 2. A Python with Medusa loads the export with
`MedusaModel.from_pretrained`, compares, and writes heads as Medusa's training does. 3. outrider's
Python imports these and compares.

    python3 -m venv medusa-env                                              # torch's CPU build
    medusa-env/bin/pip install torch==2.13.0 'transformers==4.36.2' 'accelerate==0.21.0' 'numpy<2' safetensors
    medusa-env/bin/pip install --no-deps medusa-llm==0.1
    .venv/bin/python scripts/engines/check_medusa.py make /tmp/medusa
    medusa-env/bin/python scripts/engines/check_medusa.py compare /tmp/medusa
    .venv/bin/python scripts/engines/check_medusa.py import /tmp/medusa

It prints the largest difference of each head's logits, and exits with 1 if a difference is above
rounding errors.
"""

import json
from pathlib import Path
from typing import Any

import engine_targets as shared
import torch

OURS = "ours"
THEIRS = {"as_published": (3, 1), "two_blocks": (2, 2), "one_head": (1, 1)}
"""Numbers of heads and blocks by case."""


def make(directory: Path) -> bool:
    """Write the target, and a folder with the export and outrider's logits."""
    from outrider.models.export.medusa import REFERENCE

    made = shared.make_exports(
        directory, {OURS: {"kind": "medusa", "num_heads": 3}}, lambda _: REFERENCE, our_logits, shared.USUAL_ROPE
    )
    # Medusa loads the target by this name, which here is a folder.
    rename_target(directory / OURS / "config.json", directory / "target")
    return made


def rename_target(config: Path, target: Path) -> None:
    values = json.loads(config.read_text())
    assert values["base_model_name_or_path"] == target.name
    config.write_text(json.dumps(values | {"base_model_name_or_path": str(target.resolve())}))


@torch.no_grad()
def our_logits(drafter: Any, target: Any) -> list[torch.Tensor]:
    """Compute the logits of each head at each token of a text: [NUM_TOKENS, VOCAB]."""
    text = shared.make_tokens()[:, : shared.NUM_TOKENS]
    hidden, _ = target.hidden_states(text)
    logits: torch.Tensor = drafter.logits(hidden[0])
    return list(logits.unbind(1))


@torch.no_grad()
def compare_and_write(directory: Path) -> bool:
    """Load and compare the export, then write Medusa's own heads (Medusa's Python)."""
    from medusa.model.medusa_model import MedusaModel

    def logits(name: str) -> list[torch.Tensor]:
        model = MedusaModel.from_pretrained(str(directory / name)).eval()
        output = model(shared.make_tokens()[:, : shared.NUM_TOKENS])
        assert output.shape[1:] == (1, shared.NUM_TOKENS, shared.VOCAB)
        return [of_head[0] for of_head in output]

    expected = shared.read_results(directory / OURS)
    alike = shared.compare(OURS, logits(OURS), expected)
    for name, (num_heads, num_layers) in THEIRS.items():
        write(directory / name, num_heads, num_layers, directory / "target")
        torch.save(logits(name), directory / name / shared.RESULTS_FILE)
    return alike


def write(path: Path, num_heads: int, num_layers: int, target: Path) -> None:
    """Write heads as Medusa's training does (medusa/train/train.py).

    All blocks of a head are one module there.
    """
    from medusa.model.medusa_model import MedusaConfig, MedusaModel
    from transformers import LlamaForCausalLM

    sizes = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "base_model_name_or_path": str(target.resolve())}
    model = MedusaModel(LlamaForCausalLM.from_pretrained(target), **sizes)
    torch.manual_seed(3)
    shared.randomise(model.medusa_head)
    MedusaConfig(**sizes).save_pretrained(path)
    torch.save(model.medusa_head.state_dict(), path / "medusa_lm_head.pt")


def import_theirs(directory: Path) -> bool:
    """Import the heads that Medusa wrote, and compare (outrider's Python)."""
    from outrider.models.export.registry import format_of

    assert all(format_of(directory / name).name == "medusa" for name in THEIRS)
    return shared.compare_imports(directory, THEIRS, our_logits)


if __name__ == "__main__":
    shared.run(__doc__, {"make": make, "compare": compare_and_write, "import": import_theirs})
