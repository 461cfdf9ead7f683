"""Evaluation on a GPU: memory bandwidth, out-of-memory errors, and certified decoding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure import environment
from outrider.eval.measure.environment import measure_bandwidth
from outrider.eval.run import evaluate
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.drafters.redrafter import Redrafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target
from outrider.models.machine import is_out_of_memory, release_memory

from ..commands import invoke

pytestmark = pytest.mark.gpu


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"id": str(index), "turns": [f"word {index}"]}) + "\n" for index in range(4)))
    return path


@pytest.fixture
def drafter_dir(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """Save a ReDrafter with random weights and trees of one size."""
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))
    torch.manual_seed(0)
    options = {"kind": "redrafter", "beam_width": 2, "beam_length": 3, "tree_nodes": 4}
    save_drafter(build_drafter(parse_drafter(options), target), tmp_path / "drafter", target.identity)
    return tmp_path / "drafter"


def test_the_measured_bandwidth_does_not_depend_on_the_number_of_launches(device, monkeypatch):
    if device.type == "cpu":
        pytest.skip("a CPU has no events")
    bandwidth = measure_bandwidth(1 << 32, device)
    assert 50 < bandwidth < 20_000
    monkeypatch.setattr(environment, "NUM_QUEUED_READS", 10)
    assert measure_bandwidth(1 << 32, device) == pytest.approx(bandwidth, rel=0.05)


def test_out_of_memory_is_recognized_and_memory_is_released(device: torch.device) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    assert is_out_of_memory(caught.value)
    del caught
    if device.type != "cpu":
        before = torch.accelerator.memory_reserved(device)
        block = torch.empty(1 << 28, dtype=torch.uint8, device=device)
        del block
        release_memory(device)
        assert torch.accelerator.memory_reserved(device) <= before


def test_evaluation_continues_after_a_drafter_runs_out_of_memory(
    device: torch.device,
    tiny_target_dir: Path,
    drafter_dir: Path,
    questions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    propose = Redrafter.propose

    def greedy_propose(self: Redrafter, state: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if len(state) == 2:
            torch.empty(1 << 50, dtype=torch.uint8, device=state.device)
        return propose(self, state, *arguments, **options)

    monkeypatch.setattr(Redrafter, "propose", greedy_propose)
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device=str(device)))
    config = EvalConfig(suites=[SuiteConfig(name="words", path=str(questions))], max_new_tokens=8, batch_sizes=[1, 2])
    rows = evaluate(config, target, target.tokenizer, [drafter_dir], tmp_path / "eval")
    missing = [(row["batch_size"], row["method"]) for row in rows if row["out_of_memory"]]
    assert missing == [(2, "redrafter")]
    assert len(rows) == 4


@pytest.mark.parametrize("form", [["--cuda-graphs"], ["--cuda-graphs", "--compiled"]])
def test_decoding_with_cuda_graphs_is_certified(device, form, tiny_target_dir, drafter_dir, questions, tmp_path):
    if device.type != "cuda":
        pytest.skip("only CUDA has graphs")
    path = tmp_path / "certificate.json"
    arguments = ["--target", str(tiny_target_dir), "--drafter", str(drafter_dir), "--output", str(path)]
    arguments += ["--suite", f"{{name: words, path: {questions}}}", "--max-new-tokens", "16", "--device", str(device)]
    result = invoke(["certify", *arguments, *form])
    assert result.exit_code == 0, result.output
    certificate = json.loads(path.read_text())
    assert certificate["passed"]
    assert certificate["form"] == ("compiled cuda_graphs" if "--compiled" in form else "cuda_graphs")
