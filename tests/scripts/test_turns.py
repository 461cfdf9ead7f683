"""Benches whose methods take turns: their figures by hand, limits that hold, and whole runs on a tiny target."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

from ..tiny_models import save_tiny_target

MIB = 1 << 20


def save_draft_model(target_dir: Path, folder: Path) -> Path:
    """Save a draft model that begins as the target's first layer."""
    target = load_target(TargetConfig(name_or_path=str(target_dir), dtype="float32", device="cpu", fast_linears=False))
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": "draft_model", "init": "target_layers", "num_layers": 1}), target)
    save_drafter(drafter, folder, target.identity)
    return folder


def test_every_second_round_runs_backwards(script: Any) -> None:
    turns = script("bench/turns")
    answers = turns.in_turns("ab", 2, 2, lambda method, prompt: {"text": f"{method}{prompt}"})
    assert [answer["text"] for answer in answers] == ["a0", "b0", "a1", "b1", "b0", "a0", "b1", "a1"]


def test_an_answer_is_timed_after_its_prefill(script: Any) -> None:
    seconds = iter([7.0, 9.5])
    answer = script("bench/turns").timed(iter([[1], [2, 3], [], [4]]), lambda: next(seconds))
    assert answer.pop("seconds") < 1
    assert answer == {"token_ids": [1, 2, 3, 4], "processor_seconds": 2.5, "num_tokens": 3, "num_steps": 2}


def test_figures_are_sums_over_answers(script: Any) -> None:
    def answer(method: str, prompt: int, seconds: float, text: list[int], steps: int) -> dict[str, Any]:
        counts = {"num_tokens": len(text) - 1, "num_steps": steps}
        return {"method": method, "prompt": prompt, "seconds": seconds, "processor_seconds": 1.0, "token_ids": text, **counts}

    plain = [answer("plain", 0, 4.0, [1, 2, 3], 2), answer("plain", 1, 8.0, [1, 2, 3], 2)]
    drafted = [answer("drafted", 0, 4.0, [1, 2, 3, 4, 5], 2), answer("drafted", 1, 4.0, [1, 2, 9, 9, 9], 2)]
    first, second = script("bench/turns").rows_of([*plain, *drafted], "plain", "plain")
    assert (first["over plain"], first["identical"], first["tokens_per_step"]) == ([1, 1, 1], 2, 1)
    assert (second["seconds_per_token"], second["over plain"]) == (1, [3, 2, 4])
    assert (second["tokens_per_step"], second["identical"], second["answers"]) == (2, 1, 2)
    # An answer that ended at its prefill has no speed.
    ended = [answer(method, 2, 0.0, [1], 0) for method in ("plain", "drafted")]
    assert script("bench/turns").rows_of([*plain, *drafted, *ended], "plain", "plain") == [first, second]
    with pytest.raises(ValueError, match="all answers ended at their prefill"):
        script("bench/turns").rows_of(ended, "plain", "plain")


def allocate(limited: Any, num_bytes: int) -> int:
    """Return the exit status of a process that allocates so many bytes under a cap of 48 MiB above what it has."""
    code = f"input(); text = b'1' * {num_bytes}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        limited.join(process.pid)
        status = Path(f"/proc/{process.pid}/status").read_text()
        limited.cap(48 * MIB + 1024 * int(status.split("VmData:")[1].split()[0]))
        process.communicate("\n")
    return process.returncode


@pytest.mark.parametrize("has_groups", [True, False])
def test_a_process_above_its_cap_ends_and_one_below_it_does_not(has_groups, script, monkeypatch):
    limits = script("bench/limits")
    if not has_groups:
        monkeypatch.setattr(limits, "make_group", lambda *_: None)
    with limits.prepared() as limited:
        assert allocate(limited, MIB) == 0
    with limits.prepared() as limited:
        assert allocate(limited, 256 * MIB) != 0
        assert limited.means.startswith("cgroup") or not limited.groups
    assert not any(group.exists() for group in limited.groups), "they are removed"


def test_reads_from_the_disk_are_slowed(script: Any, tmp_path: Path) -> None:
    path, seconds = tmp_path / "data", 1.0
    path.write_bytes(bytes(16 * MIB))
    code = "import os, sys, time; input(); file = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT); import mmap\n"
    code += "start = time.time(); n = 1\nwhile n: n = os.readv(file, [mmap.mmap(-1, 1 << 20)])\nprint(time.time() - start)"
    with skipping_other_disks(), script("bench/limits").prepared(16 * MIB, path) as limited:
        process = subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        limited.join(process.pid)
        assert float(process.communicate("\n")[0]) > 0.7 * seconds


@contextlib.contextmanager
def skipping_other_disks() -> Iterator[None]:
    try:
        yield
    except ValueError as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_stages_in_processes_write_the_text_of_plain_decoding(script, tiny_target_dir, tmp_path, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, "")  # the bench sets them for its processes; the test's end removes them
    drafter, output = save_draft_model(tiny_target_dir, tmp_path / "drafter"), tmp_path / "pipelining.json"
    sizes = {"prompts": 2, "new_tokens": 12, "rounds": 1, "threads": 1}
    script("bench/pipelining").main(tiny_target_dir, str(drafter), "1,1", **sizes, pipeinfer=2, output=output)
    rows = json.loads(output.read_text())["rows"]
    assert [row["method"] for row in rows] == [
        "plain",
        "synchronous, 4 draft tokens",
        "synchronous, 8 draft tokens",
        "pipelined",
        "pipelined by PipeInfer's rule",
    ]
    assert all(row["identical"] == row["answers"] == 2 for row in rows)


@pytest.mark.slow
def test_a_target_on_the_disk_writes_the_text_of_accelerates_offload(script, tiny_tokenizer, tmp_path):
    options = {"num_hidden_layers": 12, "intermediate_size": 1024, "initializer_range": 0.2}  # a budget holds some layers
    target = save_tiny_target(tmp_path / "target", LlamaForCausalLM, LlamaConfig, tiny_tokenizer, **options)
    drafter, output = save_draft_model(target, tmp_path / "drafter"), tmp_path / "offload.json"
    sizes = {"prompts": 1, "new_tokens": 8, "plain_tokens": 8, "rounds": 1, "threads": 1}
    script("bench/offload").main(target, drafter, "float32", 0.6, None, **sizes, llmcad=True, output=output)
    rows = json.loads(output.read_text())["rows"]
    assert {row["method"] for row in rows} == set(script("bench/offload").METHODS)
    assert all(row["identical"] == row["answers"] == 1 for row in rows)
