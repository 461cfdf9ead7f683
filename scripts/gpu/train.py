"""Measures labelling and training on a GPU: texts' tokens and labelled positions a second, memory, and matrix rate.

    python scripts/gpu/train.py
    python scripts/gpu/train.py --shape tiny --device cpu --seq 32      # does the script work?

The target has random weights of the sizes of a Llama of 8 billion parameters, so nothing is
downloaded.

- `labels`: `label_continuations` of every position. A random target never agrees with the text, so
  each position is a branch: the most work that there is.
- Drafters: a step of training as the recipes do it. The target's pass for the states that the
  drafter reads, loss, gradients, clipping and AdamW; float32 weights, and bfloat16 autocast on a
  GPU. `target_seconds` is the target's pass alone, which stored states save.

Times are medians of steps between synchronisations. `matrix_share` is the number of operations of
all matrix products and attentions, as PyTorch counts them, over the time and over the rate of a
large matrix product in the same run. A case that fails, for example because it needs too much
memory, is listed with its error.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from card import FAILURES, SHAPES, Report, clock, free_memory, matrix_rate, open_device, random_llama, target_of
from torch.utils.flop_counter import FlopCounterMode

from outrider.data.types import DrafterBatch
from outrider.distill.label.continuations import label_continuations
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters.losses import LossKind
from outrider.models.drafters.objective import Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.train.batches import target_reads, with_hidden_states

LABELS = "labels"
HORIZON = 5
POSITIONS = 2048
"""Most trained positions of a step."""
DRAFT_VOCAB_SHARE = 0.25
"""Share of the target's vocabulary that is drafted."""
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "redrafter": ("cross_entropy", {"num_blocks": 2}),
    "eagle3": ("kl", {}),
    "block": ("cross_entropy", {}),
}
"""Loss and options of each kind, as in the recipes for such a target."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure labelling and training on a GPU."""
    options = read_options(arguments)
    opened, steps = open_device(options.device), options.steps
    rate, target = matrix_rate(opened), target_of(random_llama(options.shape, opened))
    facts = {"shape": options.shape, "dtype": str(target.dtype), "horizon": HORIZON, "steps": steps, "warm_up": options.warm_up}
    report = Report(options.output, opened, **facts, operations_per_second=rate)
    for kind, length, size in itertools.product(options.work, options.seq, options.batch):
        case = {"work": kind, "seq": length, "batch": size}
        try:
            step, reading, num_positions = make_work(kind, target, length, size)
            values = timed(step, opened, steps, options.warm_up)
            values |= {
                "tokens_per_second": length * size / values["seconds"],
                "positions_per_second": num_positions / values["seconds"],
                "target_seconds": timed(reading, opened, steps, 1)["seconds"] if reading else None,
                "matrix_share": operations(step) / values["seconds"] / rate,
            }
            report.add(case, values)
        except FAILURES as error:
            report.add(case, error)
        step = reading = None
        free_memory(opened)
    report.print()


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    works = (LABELS, *TRAININGS)
    parser = argparse.ArgumentParser(description="Measure labelling and training on a GPU.")
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--work", nargs="+", choices=works, default=works, help="all unless given")
    parser.add_argument("--seq", nargs="+", type=int, default=[2048], help="tokens of a text")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4], help="texts at a time")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--device")
    parser.add_argument("--output", type=Path, default=Path("train.json"))
    return parser.parse_args(arguments)


def make_work(kind: str, target: HFTarget, seq: int, batch: int) -> tuple[Callable[[], Any], Callable[[], Any] | None, int]:
    """Return a step of the work, the target's pass in it, and the number of positions of a step."""
    texts = torch.randint(target.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(0)).to(target.device)
    if kind == LABELS:
        everywhere = torch.ones_like(texts, dtype=torch.bool)
        return lambda: label_continuations(target, texts, everywhere, everywhere, horizon=HORIZON), None, texts.numel()
    # 1. The drafter, on the device: a CPU takes long to make that many random numbers.
    loss_name, options = TRAININGS[kind]
    options = {"kind": kind, **options, "draft_vocab_size": int(DRAFT_VOCAB_SHARE * target.vocab_size)}
    with target.device:
        drafter = build_drafter(parse_drafter(options), target).train()
        drafter.choose_draft_vocabulary(torch.arange(target.vocab_size))
    objective = Objective(loss=LossKind(loss_name), head=None if loss_name == "cross_entropy" else target.head)
    weights = [weight for weight in drafter.parameters() if weight.requires_grad]
    optimizer, reads = torch.optim.AdamW(weights, lr=1e-4, fused=True), target_reads(drafter, objective)
    # 2. A batch, whose labels follow its texts.
    each = min(seq - HORIZON, POSITIONS // batch)
    positions = torch.zeros_like(texts, dtype=torch.bool)
    positions[:, torch.linspace(0, seq - HORIZON - 1, each).long()] = True
    labels = torch.stack([texts.roll(-depth, 1) for depth in range(1, HORIZON + 1)], dim=2)
    values = {"attention_mask": torch.ones_like(positions), "positions": positions, "continuations": labels}
    filled = DrafterBatch(input_ids=texts, **values)

    def reading() -> DrafterBatch:
        return with_hidden_states(filled, target, reads)

    def step() -> None:
        with_states = reading()
        with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            loss = drafter.loss(with_states, objective)
        (loss.sums.sum() / loss.counts.sum()).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()

    return step, reading, int(positions.sum())


def timed(work: Callable[[], Any], device: torch.device, steps: int, warm_up: int) -> dict[str, Any]:
    """Return the median of the work's seconds, and the most memory that it held."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(warm_up + steps):
        start = clock(device)
        work()
        seconds.append(clock(device) - start)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {"seconds": statistics.median(seconds[warm_up:]), "peak_gib": peak}


def operations(work: Callable[[], Any]) -> int:
    """Return the operations of matrix products and attentions."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


if __name__ == "__main__":
    main()
