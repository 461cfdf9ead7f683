"""A target over two GPUs by layers gives the answers of a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

pytestmark = pytest.mark.gpu

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]
OPTIONS: dict[str, dict[str, Any]] = {
    "redrafter": {"beam_width": 3, "beam_length": 3},
    "eagle": {"depth": 3, "top_k": 3, "tree_nodes": 6, "init": "random"},
    "eagle3": {"depth": 3, "top_k": 3, "tree_nodes": 6, "init": "random"},
    "medusa": {"num_heads": 3, "tree_nodes": 6},
}


def answers(target: HFTarget, kind: str) -> list[list[int]]:
    torch.manual_seed(0)
    drafter = NullDrafter() if kind == "plain" else build_drafter(parse_drafter({"kind": kind, **OPTIONS[kind]}), target)
    prompts = [torch.tensor(ids, device=target.device) for ids in PROMPTS]
    steps = list(generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=24))
    return [
        [token for step in steps if row in step.rows for token in step.tokens[step.rows.index(row)]]
        for row in range(len(PROMPTS))
    ]


@pytest.mark.parametrize("kind", ["plain", *OPTIONS])
@pytest.mark.parametrize("device_map", [{"": 0, "model.layers.1": 1}, {"": 1, "model.layers.0": 0}, "auto"])
def test_answers_over_two_devices_are_those_of_a_cpu(kind: str, device_map: Any, tiny_target_dir: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    divided = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float64", device_map=device_map))
    whole = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float64", device="cpu"))
    assert len({*divided.layer_devices, divided.device}) == 2
    assert divided.form == "over 2 devices"
    assert answers(divided, kind) == answers(whole, "plain")
