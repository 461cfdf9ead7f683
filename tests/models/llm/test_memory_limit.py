"""A streamed target lives within its budget, in a process whose memory is capped for real."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"
GIB, MIB = 1 << 30, 1 << 20
ALLOWANCE_BYTES = 64 * MIB
"""Memory beside baseline and budget: activations, tensors of Python, page tables."""
DECODE = """
import re, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

folder, budget = sys.argv[1:]
torch.ones(64, 64) @ torch.ones(64, 64)
print(memory("RssAnon"), memory("VmData"), flush=True)
sys.stdin.readline()  # the cap is set meanwhile
config = TargetConfig(name_or_path=folder, device="cpu", memory_budget_gib=float(budget), budget_tokens=256, fast_linears=False)
target = load_target(config, needs_tokenizer=False)
tokens = [token for step in generate(target, NullDrafter(), GreedyAcceptance(), [torch.arange(5, 40)], max_new_tokens=4)
          for token in step.tokens[0]]
print(target.stream.plan.planned_bytes, target.stream.plan.streamed_bytes, *tokens, flush=True)
"""
"""Program that decodes with a streamed target, after its memory has been capped."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random target of about 150 MB in 16 bits, of which a layer is a small part."""
    folder = tmp_path_factory.mktemp("large")
    sizes: dict[str, Any] = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 24}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="50MB")
    return folder


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("limits")


@contextmanager
def decoding(limits: Any, folder: Path, budget_bytes: float) -> Iterator[tuple[Any, Any, list[int]]]:
    """Start the program without a cap; yield its limits, itself, and what it holds before it loads."""
    command = [sys.executable, "-c", DECODE, str(folder), str(budget_bytes / GIB)]
    with (
        limits.prepared() as limiter,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        limiter.join(process.pid)
        assert process.stdout is not None
        yield limiter, process, [int(number) for number in process.stdout.readline().split()]
        process.kill()


def outcome(limiter: Any, process: Any, beside_baseline: int, baseline: list[int]) -> tuple[int, list[int]]:
    """Set the cap, let the program run to its end; return its status and its numbers."""
    limiter.cap(baseline[limiter.memory is None] + beside_baseline)
    process.stdin.write("\n")
    process.stdin.flush()
    numbers = [int(number) for number in process.stdout.read().split()]
    return process.wait(), numbers


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.slow
def test_a_streamed_target_survives_a_cap_at_its_budget(limits: Any, large: Path) -> None:
    budget = weight_bytes(large) // 4
    with decoding(limits, large, budget) as (limiter, process, baseline):
        code, numbers = outcome(limiter, process, budget + ALLOWANCE_BYTES, baseline)
        assert code == 0, process.stderr.read()[-2000:]
    planned, streamed, *tokens = numbers
    assert planned <= budget
    assert 0 < streamed < weight_bytes(large)
    assert len(tokens) == 4
