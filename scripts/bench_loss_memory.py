"""Benchmark of the peak memory of the training loss, forward and backward.

It shows whether the memory of `objective.score` grows with labels x vocabulary.

    python scripts/bench_loss_memory.py

The same loss computed from all logits at once, the usual way, is measured for comparison (`whole`).
A trainable head reads the drafter's states, and for all losses but `cross_entropy` a frozen head
reads the target's. The figure is the memory of the loss in addition to weights, states and their
gradients, which exist before. It includes the new gradient of the head, before it is added to the old one. On CUDA the
figure is the allocator's peak. On other devices it is the resident memory of a new process for each
case. That process first allocates ballast until the counter of its peak memory rises; the increase
from there on is the loss. On a CPU, seconds are processor time.

The last cases are whole steps of an EAGLE drafter at four depths (`step`). Their loss is in chunks
or of all logits at once, and the activations of the layer are kept or recomputed
(train.activation_checkpointing).
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.data.files import write_json
from outrider.data.manifest import TargetIdentity
from outrider.data.types import DrafterBatch
from outrider.eval.measure.environment import describe_environment
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters import objective as objective_module
from outrider.models.drafters.chunks import MAX_CHUNK
from outrider.models.drafters.labels import Labels
from outrider.models.drafters.losses import LossChoice, LossKind
from outrider.models.drafters.objective import Objective, score
from outrider.models.drafters.vocabulary import DraftVocabulary
from outrider.models.llm.hf_target import HFTarget

MIB = 2**20
STEP_DEPTHS = 4
RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024
LOSSES: dict[str, LossChoice] = {
    "cross_entropy": LossKind.cross_entropy,
    "kl": LossKind.kl,
    "tv": LossKind.tv,
    "cross_entropy+tv": {LossKind.cross_entropy: 0.1, LossKind.tv: 0.9},
}
METHODS = ("chunks", "whole")
LOGITS_HELD = {"cross_entropy": 4, "kl": 6, "tv": 6, "cross_entropy+tv": 7, "step": 3}
"""Expected tensors of labels x vocabulary at the peak of the whole loss, to skip large cases."""


def main() -> None:
    args = parse_args()
    if args.case is not None:
        print(json.dumps(measure(json.loads(args.case), torch.device(args.device))))
        return
    torch.set_num_threads(1)  # every case does the same; the record has this number
    cases = [
        {"loss": loss, "vocab": vocab, "labels": labels, "method": method, "hidden": args.hidden, "max_chunk": args.max_chunk}
        for loss in args.losses
        for vocab in args.vocab_sizes
        for labels in args.labels
        for method in METHODS
    ]
    step_cases = [
        {"loss": "step", "vocab": vocab, "labels": args.step_labels, "method": method, "activations": activations}
        | {"hidden": args.step_hidden, "max_chunk": args.max_chunk}
        for vocab in args.vocab_sizes
        for method in args.steps
        for activations in ("kept", "anew")
    ]
    records = [case | run_case(case, args) for case in tqdm([*cases, *step_cases], unit="case")]
    report = {
        "cases": records,
        "settings": {name: value for name, value in vars(args).items() if name not in ("case", "output")},
        "environment": asdict(describe_environment(torch.device(args.device))),
    }
    write_json(args.output, report)
    print_table(records[: len(cases)], args)
    print_steps(records[len(cases) :], args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[32_000, 128_000])
    parser.add_argument("--labels", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--losses", nargs="*", choices=list(LOSSES), default=["cross_entropy", "kl"])
    parser.add_argument("--hidden", type=int, default=256, help="width of the heads")
    parser.add_argument("--max-chunk", type=int, default=MAX_CHUNK, help="logits that score holds at a time")
    parser.add_argument("--steps", nargs="*", choices=METHODS, default=list(METHODS), help="methods of the loss in whole steps")
    parser.add_argument("--step-labels", type=int, default=8192, help="labels of a step, a quarter of them positions")
    parser.add_argument("--step-hidden", type=int, default=1024, help="width of the drafter in whole steps")
    parser.add_argument("--memory-limit-gib", type=float, default=8.0, help="skip cases of the whole loss that would need more")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/loss_memory.json"))
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case, in a new process
    return parser.parse_args()


def run_case(case: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Measure peak and seconds of one case, or return the reason why it is skipped."""
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
    max_chunk = case["max_chunk"] if case["method"] == "chunks" else sys.maxsize
    objective_module.max_chunk = lambda device: max_chunk
    run = make_step(case, device) if case["loss"] == "step" else make_loss(case, device)
    run(8)  # libraries allocate their permanent buffers here
    ballast = start_counting(device)
    # On a CPU, measure the processor time of one thread: other processes disturb it less than
    # wall-clock time.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    before, started = peak_bytes(device), clock()
    run(case["labels"])
    peak = peak_bytes(device) - before
    seconds = clock() - started
    del ballast
    return {"peak_mib": peak / MIB, "seconds": seconds}


def make_loss(case: dict[str, Any], device: torch.device) -> Callable[[int], None]:
    """Return a function that runs the loss of a number of labels, forward and backward.

    All inputs are allocated here, for as many labels as the case has.
    """
    vocab, hidden, method = case["vocab"], case["hidden"], one_step if case["method"] == "chunks" else whole_step
    head = nn.Linear(hidden, vocab, bias=False, device=device)
    target_head = nn.Linear(hidden, vocab, bias=False, device=device).requires_grad_(False)
    inputs = {}
    for labels in (8, case["labels"]):
        states = torch.randn(labels, hidden, device=device, requires_grad=True)
        inputs[labels] = states, make_batch(labels, vocab, hidden, device)
        for tensor in (head.weight, states):
            # Zeros would take no memory before they are written.
            tensor.grad = torch.ones_like(tensor)
    return lambda labels: method(head, target_head, *inputs[labels], case["loss"])


def make_step(case: dict[str, Any], device: torch.device) -> Callable[[int], None]:
    """Return a function that runs a step of an EAGLE drafter, forward and backward.

    The drafter has STEP_DEPTHS depths, and its target has a single layer.
    """
    vocab, hidden = case["vocab"], case["hidden"]
    sizes = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_attention_heads": hidden // 64}
    config = LlamaConfig(vocab_size=vocab, num_hidden_layers=1, num_key_value_heads=hidden // 64, **sizes)
    model = LlamaForCausalLM(config).to(device).eval().requires_grad_(False)
    digests = {"weights_sha256": "", "config_sha256": "", "quantization": "", "tokenizer_sha256": ""}
    identity = TargetIdentity(name="random", revision=None, **digests, hidden_size=hidden, vocab_size=vocab)
    target = HFTarget(model, None, identity)
    drafter = (
        build_drafter(parse_drafter({"kind": "eagle", "unroll": STEP_DEPTHS, "classification_weight": 1.0}), target)
        .to(device)
        .train()
    )
    if case["activations"] == "anew":
        drafter.checkpoint_activations()
    batches = {}
    for labels in (8, case["labels"]):
        batch = make_batch(labels // STEP_DEPTHS + STEP_DEPTHS, vocab, hidden, device)
        ahead = torch.stack([batch.input_ids.roll(-1 - depth, 1) for depth in range(STEP_DEPTHS + 1)], dim=2)
        within = torch.arange(batch.input_ids.shape[1], device=device)[None] < labels // STEP_DEPTHS
        batches[labels] = replace(batch, positions=within, continuations=ahead)
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    return lambda labels: drafter.loss(batches[labels], Objective()).sums.sum().backward()


def make_batch(num_labels: int, vocab: int, hidden: int, device: torch.device) -> DrafterBatch:
    """Make a text with a label at its first `num_labels` tokens; continuations repeat the text."""
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
    """Run the training loss as drafters compute it."""
    vocabulary = DraftVocabulary(size=head.out_features)
    labels, objective = Labels.of(batch), Objective(loss=LOSSES[loss], head=target_head)
    score(head, (states,), labels, batch, objective, vocabulary=vocabulary).sums.sum().backward()


def whole_step(head: nn.Linear, target_head: nn.Linear, states: torch.Tensor, batch: DrafterBatch, loss: str) -> None:
    """Run the same loss from all logits at once."""
    labels = Labels.of(batch)
    logits = head(states)
    if loss == "cross_entropy":
        F.cross_entropy(logits, labels.tokens[:, 0], reduction="sum").backward()
        return
    assert batch.hidden_states is not None
    with torch.no_grad():
        target_probs = target_head(batch.hidden_states.flatten(0, 1)[labels.text_index[:, 0]]).softmax(1)
    log_probs = logits.log_softmax(1)
    if loss == "kl":
        F.kl_div(log_probs, target_probs, reduction="sum").backward()
        return
    total = len(logits) - torch.minimum(log_probs.exp(), target_probs).sum()
    if loss != "tv":
        total = 0.1 * F.nll_loss(log_probs, labels.tokens[:, 0], reduction="sum") + 0.9 * total
    total.backward()


def start_counting(device: torch.device) -> list[bytes]:
    """Set the counter of peak memory to the current use; return the necessary ballast.

    The caller must keep the ballast during the measurement.
    """
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
        shown = [
            f"{record_of_method['peak_mib']:,.0f} ({record_of_method['seconds']:.1f})"
            if "peak_mib" in record_of_method
            else "-"
            for record_of_method in (chunks, whole)
        ]
        table.add_row(chunks["loss"], f"{chunks['vocab']:,}", f"{chunks['labels']:,}", *shown)
    console = Console()
    console.print(table)
    for record in records:
        if "skipped" in record:
            console.print(f"{record['loss']}, {record['vocab']:,} tokens, {record['labels']:,} labels: {record['skipped']}")


def print_steps(records: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    title = (
        f"Peak of a step of EAGLE {args.step_hidden} wide in MiB (seconds), {args.step_labels:,} labels at {STEP_DEPTHS} depths"
    )
    table = Table(title=title)
    for column in ("vocabulary", "loss", "activations kept", "computed anew"):
        table.add_column(column, justify="right")
    for kept, anew in zip(records[::2], records[1::2], strict=True):
        shown = [
            f"{record_of_step['peak_mib']:,.0f} ({record_of_step['seconds']:.1f})" if "peak_mib" in record_of_step else "-"
            for record_of_step in (kept, anew)
        ]
        table.add_row(f"{kept['vocab']:,}", kept["method"], *shown)
    console = Console()
    console.print(table)
    console.print(f"Written to {args.output}")


if __name__ == "__main__":
    main()
