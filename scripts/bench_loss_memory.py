"""Does the memory of the training loss grow with labels x vocabulary? Peak of `objective.score`, forward and backward.

    python scripts/bench_loss_memory.py

Beside it the same loss of all logits at once, as it is mostly written: `whole`. A trainable head reads the drafter's states,
and for `kl` a frozen one the target's. Counted is what the loss takes on top of weights, states and their gradients, which are
there before; the new gradient of a head that is added to the old one counts. On CUDA that is the allocator's own peak.
Elsewhere it is the resident memory of a process of its own for every case, in which ballast is laid in first until the counter
of its highest point begins to rise: what it rises from there on is the loss. Seconds are the processor's on a CPU.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from outrider.data.files import write_json
from outrider.data.types import DrafterBatch
from outrider.eval.environment import describe_environment
from outrider.models.drafters import objective as objective_module
from outrider.models.drafters.objective import DraftVocabulary, Labels, Objective, score

MIB = 2**20
RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024
LOGITS_HELD = {"cross_entropy": 4, "kl": 6}
"""Tensors of labels x vocabulary that the whole loss is expected to hold at its peak, from which it is skipped."""


def main() -> None:
    args = parse_args()
    if args.case is not None:
        print(json.dumps(measure(json.loads(args.case), torch.device(args.device))))
        return
    torch.set_num_threads(1)  # as every case does: the record names it
    cases = [
        {"loss": loss, "vocab": vocab, "labels": labels, "method": method, "hidden": args.hidden, "max_chunk": args.max_chunk}
        for loss in args.losses
        for vocab in args.vocab_sizes
        for labels in args.labels
        for method in ("chunks", "whole")
    ]
    records = [case | run_case(case, args) for case in tqdm(cases, unit="case")]
    report = {
        "cases": records,
        "settings": {name: value for name, value in vars(args).items() if name not in ("case", "output")},
        "environment": asdict(describe_environment(torch.device(args.device))),
    }
    write_json(args.output, report)
    print_table(records, args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[32_000, 128_000])
    parser.add_argument("--labels", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--losses", nargs="+", choices=list(LOGITS_HELD), default=list(LOGITS_HELD))
    parser.add_argument("--hidden", type=int, default=256, help="width of the heads")
    parser.add_argument("--max-chunk", type=int, default=objective_module.MAX_CHUNK, help="logits that score holds at a time")
    parser.add_argument(
        "--memory-limit-gib", type=float, default=8.0, help="the whole loss is skipped where it would take more"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/loss_memory.json"))
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case, in a process of its own
    return parser.parse_args()


def run_case(case: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Peak and seconds of one case, or why it was skipped."""
    expected_gib = LOGITS_HELD[case["loss"]] * case["labels"] * case["vocab"] * 4 / 2**30
    if case["method"] == "whole" and expected_gib > args.memory_limit_gib:
        return {"skipped": f"would take about {expected_gib:.0f} GiB, more than --memory-limit-gib {args.memory_limit_gib:g}"}
    if args.device.startswith("cuda"):
        return measure(case, torch.device(args.device))
    command = [sys.executable, __file__, "--device", args.device, "--case", json.dumps(case)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{case} failed with exit status {result.returncode}: {result.stderr}")
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured


def measure(case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    objective_module.MAX_CHUNK = case["max_chunk"]
    vocab, labels, hidden = case["vocab"], case["labels"], case["hidden"]
    head = nn.Linear(hidden, vocab, bias=False, device=device)
    target_head = nn.Linear(hidden, vocab, bias=False, device=device).requires_grad_(False)
    states = torch.randn(labels, hidden, device=device, requires_grad=True)
    batch = make_batch(labels, vocab, hidden, device)
    for tensor in (head.weight, states):
        tensor.grad = torch.ones_like(tensor)  # not zeros: those take no memory before they are written
    step = one_step if case["method"] == "chunks" else whole_step
    # A first, small step takes what libraries keep for good.
    step(head, target_head, states[:8].detach().requires_grad_(), make_batch(8, vocab, hidden, device), case["loss"])
    ballast = start_counting(device)
    # One thread: on a CPU its own time tells more than the clock's where others work too.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    before, started = peak_bytes(device), clock()
    step(head, target_head, states, batch, case["loss"])
    peak = peak_bytes(device) - before
    seconds = clock() - started
    del ballast
    return {"peak_mib": peak / MIB, "seconds": seconds}


def make_batch(num_labels: int, vocab: int, hidden: int, device: torch.device) -> DrafterBatch:
    """A text whose continuations are itself, with a label at each of its first `num_labels` tokens."""
    text = torch.randint(vocab, (1, num_labels + 2), device=device)
    positions = torch.ones_like(text, dtype=torch.bool)
    positions[:, num_labels:] = False
    return DrafterBatch(
        input_ids=text,
        attention_mask=torch.ones_like(positions),
        positions=positions,
        continuations=torch.stack([text.roll(-1, 1), text.roll(-2, 1)], dim=2),
        hidden_states=torch.randn(*text.shape, hidden, device=device),
    )


def one_step(head: nn.Linear, target_head: nn.Linear, states: torch.Tensor, batch: DrafterBatch, loss: str) -> None:
    """The training loss, as drafters take it."""
    vocabulary = DraftVocabulary(size=head.out_features)
    labels, objective = Labels.of(batch), Objective(loss=loss, head=target_head)
    score(head, (states,), labels, batch, objective, vocabulary=vocabulary).sums.sum().backward()


def whole_step(head: nn.Linear, target_head: nn.Linear, states: torch.Tensor, batch: DrafterBatch, loss: str) -> None:
    """The same loss of all logits at once."""
    labels = Labels.of(batch)
    logits = head(states)
    if loss == "cross_entropy":
        F.cross_entropy(logits, labels.tokens[:, 0], reduction="sum").backward()
        return
    assert batch.hidden_states is not None
    with torch.no_grad():
        target_probs = target_head(batch.hidden_states.flatten(0, 1)[labels.text_index[:, 0]]).softmax(1)
    F.kl_div(logits.log_softmax(1), target_probs, reduction="sum").backward()


def start_counting(device: torch.device) -> list[bytes]:
    """Begin with a counter that stands at what is in use now; the ballast that it takes to be kept meanwhile."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return []
    ballast: list[bytes] = []
    highest = peak_bytes(device)
    while peak_bytes(device) == highest:
        ballast.append(b"\1" * MIB)
    return ballast


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RUSAGE_UNIT


def print_table(records: list[dict[str, Any]], args: argparse.Namespace) -> None:
    table = Table(title=f"Peak of the loss in MiB (seconds), heads {args.hidden} wide, chunks of {args.max_chunk:,} logits")
    for column in ("loss", "vocabulary", "labels", "in chunks", "whole"):
        table.add_column(column, justify="left" if column == "loss" else "right")
    for chunks, whole in zip(records[::2], records[1::2], strict=True):
        shown = [f"{each['peak_mib']:,.0f} ({each['seconds']:.1f})" if "peak_mib" in each else "-" for each in (chunks, whole)]
        table.add_row(chunks["loss"], f"{chunks['vocab']:,}", f"{chunks['labels']:,}", *shown)
    console = Console()
    console.print(table)
    for record in records:
        if "skipped" in record:
            console.print(f"{record['loss']}, {record['vocab']:,} tokens, {record['labels']:,} labels: {record['skipped']}")
    console.print(f"Written to {args.output}")


if __name__ == "__main__":
    main()
