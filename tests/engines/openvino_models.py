"""OpenVINO GenAI: converted targets and drafters, and its answers."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .servers import ENGINES

PYTHON = Path(os.environ.get("OUTRIDER_OPENVINO_PYTHON", ENGINES / "openvino" / "bin" / "python"))
ANSWERS = Path(__file__).parent / "openvino_answers.py"
VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
MOST_SECONDS = 1800.0
MODE = '<eagle3_mode value="True" />'
"""What optimum-intel writes into the file of an EAGLE-3."""


def converted(model: Path, output: Path) -> Path:
    """Convert a target or a drafter to OpenVINO's files in float32; return their folder."""
    options = ["--task", "text-generation-with-past", "--weight-format", "fp32", "--trust-remote-code"]
    _run([PYTHON.parent / "optimum-cli", "export", "openvino", "-m", model, *options, output])
    return output


def add_map(exported: Path) -> None:
    """Add the map of a whole vocabulary to an exported EAGLE-3, which has none.

    optimum-intel maps draft tokens by uninitialised memory where there is no map.
    """
    tensors = load_file(path := exported / "model.safetensors")
    if "d2t" not in tensors:
        tensors["d2t"] = torch.zeros(len(tensors["lm_head.weight"]), dtype=torch.long)
        save_file(tensors, path, {"format": "pt"})


def choose_layers(folder: Path, feature_layers: Sequence[int]) -> None:
    """Write the target's layers that an EAGLE-3 reads into its converted file.

    GenAI chooses layers for targets of at least ten layers only. It reads the outputs of the layers, where EAGLE-3 reads
    the inputs, so these are the layers before.
    """
    text = (path := folder / "openvino_model.xml").read_text()
    assert text.count(MODE) == 1
    layers = " ".join(str(layer - 1) for layer in feature_layers)
    path.write_text(text.replace(MODE, f'{MODE}<hidden_layers_list value="{layers}" />'))


def answers(folder: Path, request: dict[str, Any]) -> tuple[list[list[int]], list[int], str]:
    """Return GenAI's answers, the steps of each, and its version; openvino_answers.py has the keys of a request."""
    files = folder / "request.json", folder / "answers.json"
    files[0].write_text(json.dumps(request))
    _run([PYTHON, ANSWERS, *files])
    found = json.loads(files[1].read_text())
    return found["answers"], found["steps"], found["version"]


def _run(command: Sequence[object]) -> None:
    environment: dict[str, str] = {**os.environ, **VARIABLES}
    done = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, check=False, timeout=MOST_SECONDS
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-3000:]}"
