"""Processes of test_tensor_parallel.py, each with a slice of the target."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from outrider.cli import samples
from outrider.data.config import DataConfig
from outrider.data.types import DrafterBatch
from outrider.distill.config import DistillConfig
from outrider.distill.label.run import distill, load_examples
from outrider.distill.regenerate.run import regenerate
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.train.batches import states_of_texts
from outrider.train.processes import make_accelerator

from ...train.forked import ends, fork

CONFIG = DistillConfig(
    engine="decoder", max_new_tokens=12, horizon=4, features="last_hidden", shard_examples=3, batch_tokens=128
)


def text_of_rank(rank: int) -> torch.Tensor:
    """Make a text whose tokens and length depend on the rank."""
    return torch.arange(5 + rank, 40 - 3 * rank)[None] * 7 % 300


def batch_of(text: torch.Tensor) -> DrafterBatch:
    no_positions = torch.zeros_like(text, dtype=torch.bool)
    return DrafterBatch(input_ids=text, attention_mask=~no_positions, positions=no_positions, continuations=text[..., None])


def states(target: HFTarget, rank: int) -> dict[str, torch.Tensor]:
    """Read the target's states as training does, for the text of one process."""
    last, layers = states_of_texts(target, batch_of(text_of_rank(rank)), last=True, layers=(1,))
    _, first = states_of_texts(target, batch_of(text_of_rank(rank)), last=False, layers=(0, 1))
    assert last is not None
    assert layers is not None
    assert first is not None
    return {"last": last, "layers": layers, "first": first}


def make(target: HFTarget, data: DataConfig, folder: Path, accelerator: Accelerator, engine: str = "decoder") -> None:
    config = DistillConfig(**{**vars(CONFIG), "engine": engine})
    examples = regenerate(config, data, target, folder / "answers", accelerator)
    distill(config, data, target, folder / "distill", accelerator, examples=examples)


def in_two_processes(*arguments: Any) -> list[int]:
    """Return the exit codes of two processes that do `main`."""
    return ends(fork(2, lambda: main(*arguments)))


def main(target_dir: Path, data: DataConfig, output: Path) -> None:
    """Write answers/ and distill/ in `output` and in its folder `batch`, and report-RANK.json."""
    accelerator = make_accelerator()
    rank = accelerator.process_index
    whole = load_target(TargetConfig(name_or_path=str(target_dir), device="cpu"))
    shared = load_target(TargetConfig(name_or_path=str(target_dir), tensor_parallel=True))
    assert shared.identity == whole.identity, "labels of one are labels of the other"
    for name, value in states(shared, rank).items():
        torch.testing.assert_close(value, states(whole, rank)[name], rtol=1e-4, atol=1e-5)
    make(shared, data, output, accelerator)
    make(shared, data, output / "batch", accelerator, engine="batch")
    # By its clock one process would stop measuring at once. The main process decides for all.
    samples.SECONDS = -1.0 if rank else 1e9
    examples, _ = load_examples(data, shared)
    work, _ = samples.sample_labels(CONFIG, shared, examples)
    layers = [parameter for name, parameter in shared.model.named_parameters() if "proj" in name]
    report: dict[str, Any] = {
        "slice": sum(parameter.to_local().numel() for parameter in layers),
        "whole": sum(parameter.numel() for parameter in layers),
        "texts": len(examples),
        "sampled_tokens": work.num_text_tokens,
    }
    (output / f"report-{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()
