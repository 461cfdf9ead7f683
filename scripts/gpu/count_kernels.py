"""Counts, on a CPU, the kernels that a GPU launches in decoding, labelling and training.

    python scripts/gpu/count_kernels.py --output benchmarks/gpu_kernels.json   # takes two minutes

A launch costs the host about 5 us, whatever the kernel does. So a step of many small kernels takes
the host's time, not the GPU's. The number of kernels depends on the number of layers, not on their
widths: the models here are tiny and have as many layers as an 8B model. They run on a CPU in
bfloat16, along the code paths of CUDA (`cuda_paths`).

Every operator that writes memory counts. Views, shapes and allocations launch nothing; `KERNELS`
lists operators that launch several kernels. So the result is an estimate for eager PyTorch; a
compiler would fuse many of these kernels. It serves to compare, and to notice when a change adds
kernels.

- `decoding`: a step in which one draft token is accepted, by phase. With CUDA graphs a replay is
  one launch. `kernels` then counts the kernels inside the graphs, and `launches` counts replays and
  the kernels outside.
- `labelling`: `label_continuations`, that is, the prefill and each further token.
- `training`: a micro-batch, that is, the target's pass, the loss and the backward pass.
  `copies_to_device` and `copied_bytes` are those of tensors that the host has made.
- `transfers`: what labelling stores and training reads (see `count_transfers.py`).
- `host_reads`: how often the host waits for the device (see `host_reads.py`).
- `host_microseconds`: the host's own time for a step in CUDA graphs, without the device's.
- `recordings`: how many graphs were recorded up to the counted step.
- `new_tensors`: allocations outside of replays.
"""

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import efficient_attention
import torch
from count_transfers import count_transfers, print_transfers
from host_reads import DeviceCopies, Transfers
from kernel_counter import KERNELS, REST, Counted, CountingRecorder, SkippingRecorder
from random_target import LLAMA_1B, LLAMA_8B, random_llama, target_of
from train_bench import Case, random_batch

from outrider.data import bundles
from outrider.data.files import write_json
from outrider.distill.label import continuations
from outrider.distill.label.branch_attention import SEGMENT_QUERIES as SEGMENT_QUERIES
from outrider.models.decoding import (
    Acceptance,
    DraftTree,
    GreedyAcceptance,
    RowSeeds,
    Sampling,
    SpeculativeSampling,
    generate,
)
from outrider.models.decoding.types import NO_NODE, Step, TargetOutput
from outrider.models.drafters import NullDrafter, build_drafter, cached_drafter, candidates, make_training_free, parse_drafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.graphed import graphed
from outrider.models.drafters.losses import LossKind
from outrider.models.drafters.merged import MergedConfig, MergedDrafter
from outrider.models.drafters.objective import Objective
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.llm import tree_attention, tree_reader
from outrider.models.llm.graphed_rule import GraphedRule
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.tree_cache import ACCELERATOR_EXTENT_STEP
from outrider.train.batches import target_reads, with_hidden_states

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
NARROW = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
"""Widths of the tiny models, with the head groups of an 8B model."""
PROMPT_TOKENS, SETTLED_STEPS, MAX_NEW = 20, 2, 400
"""Tokens of the prompt; steps before the counted step; room for so many tokens."""
HOST_STEPS = 160
HORIZON = 5
LABELLED = Case("labelling", seq=512, batch=4)
TRAINED = Case("training", seq=64, batch=2)
TRAINED_POSITIONS = 64


def main() -> None:
    args = parse_args()
    started = time.perf_counter()
    with cuda_paths():
        report = {
            "layers": args.layers,
            "kernels_of_operators": KERNELS,
            "host_microseconds": {kind: host_microseconds(kind) for kind in KINDS},
            "decoding": [decode_step(kind, args.layers, graphs=graphs) for kind in KINDS for graphs in (False, True)],
            "labelling": labelling(args.layers),
            "training": [training_step(kind, args.layers) for kind in TRAINED_KINDS],
            "transfers": count_transfers(),
            "torch": torch.__version__,
        }
    report["seconds"] = time.perf_counter() - started
    write_json(args.output, report)
    print_report(report)
    print(f"Written to {args.output}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"], help="of the target")
    parser.add_argument("--output", type=Path, default=Path("gpu_kernels.json"))
    return parser.parse_args()


# --- the paths that CUDA takes


@contextlib.contextmanager
def cuda_paths() -> Iterator[None]:
    """Choose CUDA's code paths on a CPU, inside the block.

    All choices that depend on the device are here.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, on_cuda in (
            (tree_attention, "has_grouped_kernel", lambda device: False),
            (tree_reader, "extent_step", lambda device, is_fixed: ACCELERATOR_EXTENT_STEP),
            (cached_drafter, "extent_step", lambda device, is_fixed: ACCELERATOR_EXTENT_STEP),
        ):
            stack.enter_context(patch.object(owner, name, on_cuda))
        stack.enter_context(efficient_attention.on_cpu())
        yield


# --- decoding

GREEDY = GreedyAcceptance()
REDRAFTER = {"kind": "redrafter", "beam_width": 4, "beam_length": 5}
EAGLE3 = {"kind": "eagle3", "depth": 6, "top_k": 8, "tree_nodes": 48}
KINDS: dict[str, tuple[dict[str, Any] | None, Any]] = {
    "plain": (None, GREEDY),
    "redrafter 4x5": (REDRAFTER, GREEDY),
    "redrafter, padded": ({**REDRAFTER, "tree_padding": "full"}, GREEDY),
    "medusa": ({"kind": "medusa"}, GREEDY),
    "eagle-1": ({"kind": "eagle", "tree": "static"}, GREEDY),
    "eagle-2": ({"kind": "eagle"}, GREEDY),
    "eagle-3": (EAGLE3, GREEDY),
    "block": ({"kind": "block", "block": 7, "width": 16, "tree_nodes": 48}, GREEDY),
    "block, bilinear": ({"kind": "block", "correction": "bilinear", "block": 7, "tree_nodes": 48}, GREEDY),
    "draft model": ({"kind": "draft_model", "length": 4}, GREEDY),
    "suffix": ({"kind": "suffix"}, GREEDY),
    "redrafter + suffix": ({**REDRAFTER, "suffix": True}, GREEDY),
    "eagle-3 + suffix": ({**EAGLE3, "suffix": True}, GREEDY),
    "redrafter, T = 1": (REDRAFTER, SpeculativeSampling(sampling=Sampling(temperature=1.0))),
    "redrafter, top-p": (REDRAFTER, SpeculativeSampling(sampling=Sampling(temperature=1.0, top_p=0.9))),
}
"""Drafters and rules. ReDrafter reads its tree's size on the host, to cut padding, unless it stays
padded. With `suffix` a drafter is merged with the suffix drafter, whose candidates are found on the
host: it reads each search of the other one."""


class OneAccepted:
    """Counts the rule's kernels, then accepts one draft token instead.

    A random drafter's tokens are never accepted.
    """

    lossless = False

    def __init__(self, rule: Any, counted: Counted) -> None:
        self.rule, self.counted, self.is_random = rule, counted, rule.is_random

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Any = None) -> Acceptance:
        decision = self.rule(tree, output, generator=generator)
        if tree.num_nodes == 0:
            return decision
        with self.counted.paused():
            path = torch.full_like(decision.path, NO_NODE)
            path[:, 0] = 0
            one = torch.ones_like(decision.num_accepted)
            return replace(decision, path=path, num_accepted=one, entry=one)


def decode_step(kind: str, layers: int, *, graphs: bool) -> dict[str, Any]:
    """Count the kernels of one step of one row, by phase."""
    counted = Counted()
    recorder = CountingRecorder(counted)
    steps = steps_of(kind, layers, counted, recorder if graphs else None)
    # Decode until no new tree size is recorded; count the last step.
    moves = (patch.object(module, "move_to", counted.move_to) for module in (candidates, bundles))
    with counted, Transfers(counted.read), next(moves), next(moves):
        for _ in range(1 + SETTLED_STEPS):
            next(steps)
        num_recordings = -1
        while num_recordings != recorder.num_recordings:
            num_recordings = recorder.num_recordings
            counted.reset()
            next(steps)
    return {
        "kind": kind,
        "form": "cuda_graphs" if graphs else "eager",
        "kernels": {phase: counted.kernels[phase] for phase in ("propose", "verify", REST)},
        "launches": {phase: counted.launches[phase] for phase in ("propose", "verify", REST)},
        "replays": counted.replays.total(),
        "recordings": recorder.num_recordings,
        "host_reads": counted.host_reads.total(),
        "new_tensors": counted.new_tensors.total(),
        "new_bytes": counted.new_bytes,
    }


def steps_of(kind: str, layers: int, counted: Counted, recorder: Any) -> Iterator[Step]:
    """Decode one row, and count by phase; in CUDA graphs, if there is a recorder of them."""
    options, rule = KINDS[kind]
    form = {} if recorder is None else {"cuda_graphs": True, "recorder": recorder}
    target = target_of(narrow(layers), **form)
    drafter = decoding_drafter(options, target, form)
    drafter.propose = counted.within("propose", drafter.propose)
    target.verify = counted.within("verify", target.verify)
    seeds = RowSeeds([0]) if isinstance(rule, SpeculativeSampling) else None
    # In a prompt of all tokens, the suffix drafter always finds the last one.
    prompt = torch.arange(target.vocab_size if "suffix" in kind else PROMPT_TOKENS)[None]
    decide: Any = OneAccepted(rule, counted)
    decide = decide if recorder is None else GraphedRule(decide, recorder)
    return generate(target, drafter, decide, prompt, max_new_tokens=MAX_NEW, generator=seeds)


def host_microseconds(kind: str) -> float:
    """Return the host's processor time for one step, with replays that do nothing: median of many.

    It is what a GPU may wait for between a step's decision and the next step's replays.
    """
    steps, times = steps_of(kind, 1, Counted(), SkippingRecorder()), []
    for _ in range(HOST_STEPS):
        before = time.process_time()
        next(steps)
        times.append(time.process_time() - before)
    return statistics.median(times[HOST_STEPS // 4 :]) * 1e6


def decoding_drafter(options: dict[str, Any] | None, target: HFTarget, form: dict[str, Any]) -> Any:
    """Build a fresh drafter as evaluation runs it: in CUDA graphs, if the target uses them."""
    if options is None:
        return NullDrafter()
    is_merged, options = "suffix" in options, {name: value for name, value in options.items() if name != "suffix"}
    if options["kind"] == "draft_model":
        reader = target_of(narrow(LLAMA_1B["num_hidden_layers"]), **form)
        drafter: Any = DraftModel(DraftModelConfig(length=options["length"]), reader)
    elif options["kind"] == "suffix":
        drafter = make_training_free("suffix", {}, target)
    else:
        drafter = build_drafter(parse_drafter(options), target).to(DTYPE).eval().requires_grad_(False)
    if is_merged:
        sources = {options["kind"]: drafter, "suffix": make_training_free("suffix", {}, target)}
        drafter = MergedDrafter(sources, MergedConfig(pace="fixed"), few_sizes=bool(form))
    return graphed(drafter, form["recorder"]) if form else drafter


@functools.cache
def narrow(layers: int) -> Any:
    """Build a model with this number of layers and tiny widths.

    Each count builds a new target from it.
    """
    return random_llama({**LLAMA_8B, **NARROW, "num_hidden_layers": layers}, DTYPE, CPU)


# --- labelling and training


def labelling(layers: int) -> dict[str, Any]:
    """Count the kernels of labelling all positions of `LABELLED`.

    A random target never agrees with the text, so every position is a branch.
    """
    counted, target = Counted(), target_of(narrow(layers))
    texts = torch.randint(target.vocab_size, (LABELLED.batch, LABELLED.seq), generator=torch.Generator().manual_seed(0))
    everywhere = torch.ones_like(texts, dtype=torch.bool)
    with (
        patch.object(continuations, "_prefill", counted.within("prefill", continuations._prefill)),
        patch.object(continuations, "_branch_hidden_states", counted.within("token", continuations._branch_hidden_states)),
        counted,
        Transfers(counted.read),
    ):
        continuations.label_continuations(target, texts, everywhere, everywhere, horizon=HORIZON)
    return {
        "texts": LABELLED.batch,
        "tokens_of_a_text": LABELLED.seq,
        "prefill": counted.kernels["prefill"],
        "each_further_token": counted.kernels["token"] // (HORIZON - 1),
        "rest": counted.kernels[REST],
        "host_reads": counted.host_reads.total(),
    }


TRAINED_KINDS = {
    "redrafter": "cross_entropy",
    "medusa": "cross_entropy",
    "eagle": "kl",
    "eagle3": "kl",
    "block": "cross_entropy",
    "draft_model": "cross_entropy",
}
"""Losses of the recipes for an 8B target, by drafter."""


def training_step(kind: str, layers: int) -> dict[str, Any]:
    """Count the kernels of a micro-batch, by phase."""
    counted, target = Counted(), target_of(narrow(layers))
    drafter = build_drafter(parse_drafter({"kind": kind}), target).train()
    loss_name = TRAINED_KINDS[kind]
    objective = Objective(loss=LossKind(loss_name), head=None if loss_name == "cross_entropy" else target.head)
    batch = random_batch(TRAINED, target.vocab_size, HORIZON, TRAINED_POSITIONS)
    reads = target_reads(drafter, objective)
    with counted, Transfers(counted.read), DeviceCopies(counted.copy):
        filled = counted.within("target", with_hidden_states)(batch, target, reads)
        with torch.autocast(CPU.type, dtype=DTYPE):
            loss = counted.within("loss", drafter.loss)(filled, objective)
        counted.within("backward", lambda: loss.sums.sum().backward())()
    return {
        "kind": kind,
        "kernels": {phase: counted.kernels[phase] for phase in ("target", "loss", "backward")},
        "host_reads": {phase: counted.host_reads[phase] for phase in ("target", "loss", "backward")},
        "copies_to_device": {phase: counted.copies[phase] for phase in ("target", "loss", "backward")},
        "copied_bytes": {phase: counted.copied_bytes[phase] for phase in ("target", "loss", "backward")},
    }


# --- printing


def print_report(report: dict[str, Any]) -> None:
    print(f"Decode step, {report['layers']} layers, one row: kernels by phase, and what the host launches")
    print(f"{'drafter':<22}{'form':<12}{'propose':>8}{'verify':>8}{'rest':>6}{'launches':>9}{'replays':>8}{'reads':>6}")
    for row in report["decoding"]:
        kernels = row["kernels"]
        print(
            f"{row['kind']:<22}{row['form']:<12}{kernels['propose']:>8}{kernels['verify']:>8}{kernels['rest']:>6}"
            f"{sum(row['launches'].values()):>9}{row['replays']:>8}{row['host_reads']:>6}"
        )
    print("\nThe host's own time for a step in CUDA graphs, us of one processor:")
    print(", ".join(f"{kind} {time:.0f}" for kind, time in report["host_microseconds"].items()))
    row = report["labelling"]
    print(
        f"\nLabelling {row['texts']} texts of {row['tokens_of_a_text']} tokens: prefill {row['prefill']}, each further token "
        f"{row['each_further_token']},\nrest {row['rest']} kernels; {row['host_reads']} host reads"
    )
    print(f"\nMicro-batch of training\n{'drafter':<22}{'target':>8}{'loss':>8}{'backward':>10}{'host reads':>14}{'copies':>12}")
    for row in report["training"]:
        reads, copies = ("+".join(str(count) for count in row[name].values()) for name in ("host_reads", "copies_to_device"))
        print("{:<22}{:>8}{:>8}{:>10}".format(row["kind"], *row["kernels"].values()) + f"{reads:>14}{copies:>12}")
    print_transfers(report["transfers"])


if __name__ == "__main__":
    main()
