"""Processes that die: nothing is lost, doubled or made twice, and no byte differs."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.data.shards import verify_shards
from outrider.models.config import TargetConfig
from outrider.models.hf_target import HFTarget
from outrider.models.target import load_target

from .killed_distill import CONFIG
from .test_run import contents, run, write_conversations

NUM_KILLS = 20
NUM_EXAMPLES = 600


@pytest.fixture
def target(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu"))


def test_processes_killed_twenty_times_make_the_bytes_of_an_undisturbed_run(
    target: HFTarget, tiny_target_dir: Path, tmp_path: Path
) -> None:
    data = write_conversations(tmp_path / "chats.jsonl", NUM_EXAMPLES)
    seed = random.randrange(10**6)
    script = Path(__file__).with_name("killed_distill.py")
    command = [sys.executable, str(script), str(tiny_target_dir), str(data.path), str(tmp_path / "killed")]
    output = subprocess.run(
        [*command, str(NUM_KILLS), str(seed)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert output.returncode == 0, f"seed {seed}: {output.stderr[-2000:]}"
    attempts = json.loads(output.stdout)
    assert len(attempts) == NUM_KILLS
    assert all(attempt["kept"] for attempt in attempts)  # what was finished before a kill isn't made anew
    counts = [attempt["num_finished"] for attempt in attempts]
    assert counts == sorted(counts)
    assert {attempt["num_processes"] for attempt in attempts} >= {1, 2}
    manifest = run(CONFIG, data, target, tmp_path / "whole")
    verify_shards(tmp_path / "killed", manifest)
    assert 0 < counts[-1] < len(manifest.shards), "the kills came before the end"
    ids = [id for shard in manifest.shards for id in shard.ids]
    assert len(ids) == len(set(ids)) > 500
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
