"""Check that the speculators library computes outrider's logits from an export.

The library needs other versions than outrider, so two Pythons run this script. outrider's Python
makes a small target, EAGLE-3 drafters for it, their exports and logits. A Python with the library
loads the exports and compares.

    python3 -m venv speculators-env                                         # torch's CPU build, and no torchvision
    speculators-env/bin/pip install torch==2.13.0 'transformers<=5.19.0' safetensors pydantic pydantic-settings loguru openai \
        datasets psutil aiohttp
    speculators-env/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    .venv/bin/python scripts/engines/check_speculators.py make /tmp/export
    speculators-env/bin/python scripts/engines/check_speculators.py compare /tmp/export

It prints the largest difference of the logits at each depth, and exits with 1 if a difference is
above TOLERANCE.
"""

from pathlib import Path
from typing import Any

import engine_targets as shared
import torch

CASES = {
    **shared.EAGLE3_CASES,
    "other_layers_of_the_target": {"kind": "eagle3", "feature_layers": [1, 4, 6]},
    "eagle3_1": shared.EAGLE3_1,
    "one_norm_of_all_features": {"kind": "eagle3", "norm_before_fc": True, "norm_output": True},
}


def make(directory: Path) -> bool:
    """Write the target, and a folder for each case with its export and outrider's results."""
    from outrider.models.export.eagle3 import SPECULATORS

    made = shared.make_exports(
        directory, CASES, lambda _: SPECULATORS, lambda *pair: shared.usual_results(*pair, shared.unrolled_logits)
    )
    for name in CASES:
        shared.point_to_target(directory / name / "config.json", directory / "target")
    return made


@torch.no_grad()
def compare_exports(directory: Path) -> bool:
    """Load each export with the library and compare; return whether all are equal."""
    from speculators import SpeculatorModel

    alike = True
    for name in CASES:
        results = shared.read_results(directory / name)
        model: Any = SpeculatorModel.from_pretrained(directory / name)
        model = model.float().eval()
        logits: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda module, inputs, output, logits=logits: logits.append(output))
        model(
            hidden_states=results["features"],
            input_ids=shared.make_tokens()[:, 1 : shared.NUM_TOKENS + 1],
            document_ids=torch.zeros(1, shared.NUM_TOKENS, dtype=torch.long),
            ttt_steps=shared.DEPTHS,
        )
        # Tokens beyond the text are zeros in both programs.
        alike &= shared.compare(name, logits, results["logits"])
    return alike


if __name__ == "__main__":
    shared.run(__doc__, {"make": make, "compare": compare_exports})
