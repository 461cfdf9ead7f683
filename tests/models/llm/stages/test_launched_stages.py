"""A launch of a head and two stages of the demo's target, against the target in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.data.paths import MODEL_PREFIX
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ....conftest import REPOSITORY
from ....train.launching import launch_script
from .launched_stages import decode
from .processes import target_options

FOLDER = Path(__file__).parent
DRAFT_LAYERS = 2
STAGE_LAYERS = [5, 3]


@pytest.fixture(scope="module")
def whole(demo_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(**{**target_options(demo_target_dir, []), "stage_layers": None}))


@pytest.fixture(scope="module")
def draft_model(demo_target_dir: Path, whole: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save the first layers of the demo's target as a draft model."""
    directory = tmp_path_factory.mktemp("draft")
    model: Any = AutoModelForCausalLM.from_pretrained(demo_target_dir, dtype=torch.float32, num_hidden_layers=DRAFT_LAYERS)
    model.save_pretrained(directory)
    whole.tokenizer.save_pretrained(directory)
    return f"{MODEL_PREFIX}{directory}"


def prompts_of(target: HFTarget, count: int) -> list[list[int]]:
    """Return the beginnings of files of the standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:count]
    assert len(files) == count
    return [target.tokenizer(file.read_text()[:300])["input_ids"] for file in files]


def launched(whole: HFTarget, draft_model: str, folder: Path, target: Path, count: int, num_tokens: int) -> dict[str, Any]:
    """Answer prompts in a launch, and compare the answers with those of the target in memory."""
    output, prompts = folder / "answers.json", prompts_of(whole, count)
    options = target_options(target, STAGE_LAYERS)
    arguments = [json.dumps(options), json.dumps(prompts), str(num_tokens), draft_model, str(output)]
    launch_script(["--config_file", "conf/launch/pipeline_cpu.yaml", str(FOLDER / "launched_stages.py"), *arguments])
    results: dict[str, Any] = json.loads(output.read_text())
    expected = decode(whole, draft_model, prompts, num_tokens, is_staged=False)
    assert all(len(answer) == num_tokens for answer in expected["plain"]["answers"])
    for name, result in results.items():
        plain = expected["plain_sampled" if name.endswith("sampled") else "plain"]
        assert result["answers"] == plain["answers"], name
    assert set(results) == {"plain", "plain_sampled", "synchronous", "pipelined", "pipelined_sampled"}
    return results


@pytest.mark.slow
def test_a_launch_answers_like_the_target_in_memory(whole, draft_model, demo_target_dir, tmp_path):
    launched(whole, draft_model, tmp_path, demo_target_dir, count=2, num_tokens=24)


@pytest.mark.slow
@pytest.mark.long
def test_24_prompts_are_answered_like_the_target_in_memory(whole, draft_model, demo_target_dir, tmp_path):
    launched(whole, draft_model, tmp_path, demo_target_dir, count=24, num_tokens=128)


@pytest.mark.slow
@pytest.mark.long
def test_plain_decoding_is_that_of_pp_size(whole: HFTarget, draft_model: str, demo_target_dir: Path, tmp_path: Path) -> None:
    count, num_tokens, output = 6, 64, tmp_path / "oracle.json"
    arguments = [str(demo_target_dir), json.dumps(prompts_of(whole, count)), str(num_tokens), str(output)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(STAGE_LAYERS))]
    subprocess.run([*command, str(FOLDER / "launched_pp_size.py"), *arguments], check=True, timeout=300, cwd=REPOSITORY)
    oracle = json.loads(output.read_text())
    ours = launched(whole, draft_model, tmp_path, demo_target_dir, count=count, num_tokens=num_tokens)["plain"]
    assert ours["answers"] == oracle["answers"]
