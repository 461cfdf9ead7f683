"""Measures labelling and training on a GPU: tokens per second, memory, and matrix rate.

    python scripts/gpu/train_bench.py --output "$OUT/train.json"
    python scripts/gpu/train_bench.py --shape tiny --output /tmp/train.json

The first takes up to 10 minutes (Llama-3.1-8B's shape, bf16); the second, seconds on any machine.

Weights are random, so no download is needed. Measured by length and number of texts:
- `distill`: labelling every position with the target's next `--horizon` tokens
  (`label_continuations`). The amount of work depends on how often the target agrees with the text.
  So the random target chooses its next token by the last token alone: the outputs of its layers are
  scaled down, at the same cost. Texts are generated that it agrees with at `--agreement` of the
  positions; the record has the measured share.
- `redrafter`, `medusa`, `eagle3`: a training step as in the recipes for such a target
  (`TRAININGS`): the target's pass for the states that the drafter reads, loss, gradients, clipping,
  AdamW. The drafter's weights are in float32, with bf16 autocast if the target is in bf16.
  `target_seconds` is the time of the target's pass alone, which stored states would save.

Tokens per second are tokens of text. Steps are timed one by one between synchronisations, after
warm-up steps; medians are reported. `matrix_share` is the number of necessary operations by formula
(`train_flops.py`), divided by the time and by the rate of large matrix products on the same GPU in
the same run. Peak memory is that of CUDA's allocator; None elsewhere.

Cases beyond the time are listed as skipped, and those that run out of memory with their error.
"""

import argparse
import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import train_flops
from random_target import LLAMA_8B, TINY, clock, matrix_rate, open_device, random_llama, target_of, weight_bytes
from tqdm import tqdm

from outrider.data.files import write_json
from outrider.data.types import DrafterBatch
from outrider.distill.label.continuations import label_continuations
from outrider.eval.measure.environment import describe_environment
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters.losses import LossKind
from outrider.models.drafters.objective import Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.train.batches import target_reads, with_hidden_states

SHAPES = {"llama8b": LLAMA_8B, "tiny": TINY}
DISTILL = "distill"
ADDED_BY_LAYERS = 1e-5
"""Factor of a layer's outputs, so that the target's next token depends only on the last token."""
MAX_LOGITS = 2**26
"""Most logits in memory while the target's next tokens are tabulated."""
LEAST_ROUNDS = 3
"""Fewest rounds of a case, even if the time ends during it."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A drafter and its training in the recipe.

    `draft_vocab_share` is the share of the target's tokens that are drafted.
    """

    options: dict[str, Any]
    loss: str
    max_positions: int
    draft_vocab_share: float | None = None


TRAININGS = {
    # exit_width is the target's hidden size, see `build`
    "redrafter": Training({"num_blocks": 2}, "cross_entropy", 4096, 0.25),
    "medusa": Training({"num_heads": 4}, "cross_entropy", 4096),
    "eagle3": Training({}, "kl", 2048, 0.25),
}
KINDS = (DISTILL, *TRAININGS)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of work on `batch` texts of `seq` tokens."""

    kind: str
    seq: int
    batch: int

    @property
    def num_tokens(self) -> int:
        return self.seq * self.batch


Measure = Callable[[Case], dict[str, Any]]


def main() -> None:
    args = parse_args()
    started = time.perf_counter()
    device = open_device(args.device, cudnn_attention=args.cudnn_attention)
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    rate = matrix_rate(device, dtype)
    target = simple_target(args.shape, dtype, device)
    report: dict[str, Any] = {
        "shape": args.shape,
        "dtype": str(dtype).removeprefix("torch."),
        "horizon": args.horizon,
        "cudnn_attention": args.cudnn_attention,
        "target_bytes": weight_bytes(target.model),
        "matrix_operations_per_second": rate,
        "rows": [],
        "skipped": [],
        "failed": [],
        "environment": dataclasses.asdict(describe_environment(device)),
    }
    with tqdm(total=len(args.kinds) * len(args.lengths) * len(args.batches), unit="case") as progress:
        for index, kind in enumerate(args.kinds):
            now = time.perf_counter()
            # An equal share of the remaining time for each remaining kind.
            deadline = now + (started + 60 * args.minutes - now) / (len(args.kinds) - index)
            for name, record in run_kind(kind, target, args, deadline):
                if name == "rows":
                    record["matrix_share"] = record["operations"] / record["seconds"] / rate
                report[name].append(record)
                report["seconds"] = time.perf_counter() - started
                write_json(args.output, report)  # after each case, so that results are kept
                progress.update()
    print_report(report)
    print(f"Written to {args.output}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama8b")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096], help="tokens of a text")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16], help="texts at a time")
    parser.add_argument("--horizon", type=int, default=5, help="tokens labelled after each position")
    parser.add_argument("--agreement", type=float, default=0.5, help="share of positions where the target agrees with the text")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of a case")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=9, help="start no case that would end later")
    parser.add_argument("--dtype", default=None, help="default: bfloat16, on a CPU float32")
    parser.add_argument("--device", default=None)
    parser.add_argument("--cudnn-attention", action="store_true", help="let PyTorch choose cuDNN's kernels for attention too")
    parser.add_argument("--output", type=Path, default=Path("train_bench.json"))
    args = parser.parse_args()
    if min(args.lengths) <= args.horizon:
        parser.error(f"--lengths has {min(args.lengths)}; texts must be longer than the horizon, which is {args.horizon}")
    if args.steps < 1 or args.warm_up < 1:
        parser.error(f"--steps is {args.steps} and --warm-up {args.warm_up}; both must be at least 1")
    return args


def run_kind(kind: str, target: HFTarget, args: argparse.Namespace, deadline: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run all cases of a kind, the smallest first.

    Yields the name of each case's list in the report, and its record.
    """
    todo = sorted(
        (Case(kind, seq, batch) for seq, batch in itertools.product(args.lengths, args.batches)),
        key=lambda case: (case.num_tokens, case.seq),
    )
    measure: Measure | None = None
    expected = 0.0  # seconds of a case per token, from the previous case
    for case in todo:
        if time.perf_counter() + expected * case.num_tokens > deadline:
            yield "skipped", dataclasses.asdict(case)
            continue
        try:
            measure = measure or make_measure(kind, target, args, deadline)
            row = measure(case)
            expected = (row["seconds"] + row.get("target_seconds", 0)) * (args.warm_up + args.steps) / case.num_tokens
            yield "rows", dataclasses.asdict(case) | row
        except (RuntimeError, ValueError) as error:
            text = "out of memory: " if isinstance(error, torch.OutOfMemoryError) else ""
            yield "failed", dataclasses.asdict(case) | {"error": text + str(error)[:300]}
        free_memory(target.device)
    del measure
    free_memory(target.device)


def make_measure(kind: str, target: HFTarget, args: argparse.Namespace, deadline: float) -> Measure:
    """Return the function that measures a case.

    All cases of a kind share its models and optimizers.
    """
    if kind == DISTILL:
        return Labelling(target, args, deadline)
    return TrainingStep(TRAININGS[kind], kind, target, args, deadline)


# --- distillation


class Labelling:
    """Labels every position of a batch."""

    def __init__(self, target: HFTarget, args: argparse.Namespace, deadline: float) -> None:
        self.target, self.args, self.deadline = target, args, deadline
        self.next_tokens = next_tokens(target)

    def __call__(self, case: Case) -> dict[str, Any]:
        texts = written_texts(self.next_tokens, case, self.args.agreement).to(self.target.device)
        everywhere = torch.ones_like(texts, dtype=torch.bool)
        stats: Any = None

        def label() -> None:
            nonlocal stats
            _, _, stats = label_continuations(self.target, texts, everywhere, everywhere, horizon=self.args.horizon)

        measured = timed(label, self.target.device, self.args, self.deadline)
        assert stats.num_positions == case.num_tokens, "all positions are labelled"
        operations = train_flops.labelling(self.target.model.config, case.batch, case.seq, stats.num_branch_tokens)
        return measured | {
            "tokens_per_second": case.num_tokens / measured["seconds"],
            "agreement": stats.num_agreeing / stats.num_positions,
            "num_branch_tokens": stats.num_branch_tokens,
            "operations": operations.total,
        }


def simple_target(shape: str, dtype: torch.dtype, device: torch.device) -> HFTarget:
    """Build a random target whose next token depends on the last token alone."""
    model = random_llama(SHAPES[shape], dtype, device)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(ADDED_BY_LAYERS)
            layer.mlp.down_proj.weight.mul_(ADDED_BY_LAYERS)
    return target_of(model)


@torch.no_grad()
def next_tokens(target: HFTarget) -> torch.Tensor:
    """Return the target's next token after each token [vocab], ignoring its layers; on the CPU."""
    norm, embeddings = target.model.get_decoder().norm, target.embed_tokens.weight
    rows = max(1, MAX_LOGITS // target.vocab_size)
    return torch.cat([target.head(norm(chunk)).argmax(-1) for chunk in embeddings.split(rows)]).cpu()


def written_texts(following: torch.Tensor, case: Case, agreement: float) -> torch.Tensor:
    """Generate random texts [batch, seq].

    With probability `agreement` a token is the one that `following` predicts from the previous
    token.
    """
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(len(following), (case.batch, case.seq), generator=generator)
    agrees = torch.rand(texts.shape, generator=generator) < agreement
    for column in range(1, case.seq):
        texts[:, column] = torch.where(agrees[:, column], following[texts[:, column - 1]], texts[:, column])
    return texts


# --- training


class TrainingStep:
    """Measures steps of a drafter's training."""

    def __init__(self, training: Training, kind: str, target: HFTarget, args: argparse.Namespace, deadline: float) -> None:
        self.kind, self.training, self.target, self.args, self.deadline = kind, training, target, args, deadline
        self.drafter = build(kind, training, target)
        head = target.head if training.loss != "cross_entropy" else None
        self.objective = Objective(loss=LossKind(training.loss), head=head)
        self.reads = target_reads(self.drafter, self.objective)
        parameters = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def __call__(self, case: Case) -> dict[str, Any]:
        # 1. A step, as training does it.
        target, device = self.target, self.target.device
        batch = random_batch(case, target.vocab_size, self.args.horizon, self.training.max_positions)
        norms: list[float] = []

        def step() -> None:
            filled = with_hidden_states(batch, target, self.reads)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=target.dtype == torch.bfloat16):
                loss = self.drafter.loss(filled, self.objective)
            (loss.sums.sum() / loss.counts.sum()).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0).item())
            self.optimizer.step()
            self.optimizer.zero_grad()

        # 2. Time it, check that it learns, and time the target's pass alone.
        try:
            measured = timed(step, device, self.args, self.deadline)
        finally:
            self.optimizer.zero_grad()  # frees the gradients of a step that ran out of memory
        if not all(math.isfinite(norm) and norm > 0 for norm in norms):
            raise RuntimeError(f"nothing was learned: the gradient norms are {norms}")
        alone = timed(lambda: with_hidden_states(batch, target, self.reads), device, self.args, self.deadline)
        num_positions = int(batch.positions.sum())
        return measured | {
            "target_seconds": alone["seconds"],
            "tokens_per_second": case.num_tokens / measured["seconds"],
            "positions": num_positions,
            "positions_per_second": num_positions / measured["seconds"],
            "parameters": sum(parameter.numel() for parameter in self.drafter.parameters()),
            "operations": self.operations(case, num_positions).total,
        }

    def operations(self, case: Case, positions: int) -> train_flops.Operations:
        """Count the operations of a step: the target's layers that it runs, and the drafter."""
        config, depths = self.target.model.config, self.args.horizon - 1
        num_layers = config.num_hidden_layers if self.reads.hidden_states else max(self.reads.layers)
        target_pass = train_flops.target_pass(config, case.batch, case.seq, num_layers)
        if self.kind == "eagle3":
            shape = {"batch": case.batch, "seq": case.seq, "positions": positions, "depths": depths}
            return target_pass.plus(train_flops.eagle3(self.drafter, config, **shape))
        count = {"redrafter": train_flops.redrafter, "medusa": train_flops.medusa}[self.kind]
        return target_pass.plus(count(self.drafter, positions=positions, depths=depths))


def build(kind: str, training: Training, target: HFTarget) -> Any:
    """Build the recipe's drafter in float32, on the device.

    Initialising billions of parameters elsewhere would take long.
    """
    options = {"kind": kind, **training.options}
    if kind == "redrafter":
        options["exit_width"] = target.hidden_size
    if training.draft_vocab_share is not None:
        options["draft_vocab_size"] = int(training.draft_vocab_share * target.vocab_size)
    with target.device:
        drafter = build_drafter(parse_drafter(options), target).train()
        drafter.choose_draft_vocabulary(torch.arange(target.vocab_size))
    return drafter


def random_batch(case: Case, vocab_size: int, horizon: int, max_positions: int) -> DrafterBatch:
    """Return random texts with labels at the same number of positions each, evenly spread."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(vocab_size, (case.batch, case.seq), generator=generator)
    count = min(case.seq - horizon, max(1, max_positions // case.batch))
    positions = torch.zeros_like(texts, dtype=torch.bool)
    positions[:, torch.linspace(0, case.seq - horizon - 1, count).long()] = True
    # The continuations follow the text, so all labels have a teacher; off the text there is none.
    continuations = torch.stack([texts.roll(-depth, 1) for depth in range(1, horizon + 1)], dim=2)
    values = {"input_ids": texts, "attention_mask": torch.ones_like(positions), "positions": positions}
    return DrafterBatch(**values, continuations=continuations).to(texts.device)


# --- measuring


def timed(work: Callable[[], Any], device: torch.device, args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Measure median and quartiles of the seconds of `work`, and its peak memory.

    There are up to `args.steps` rounds.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(args.warm_up):
        work()
    seconds: list[float] = []
    for _ in range(args.steps):
        start = clock(device)
        work()
        seconds.append(clock(device) - start)
        if time.perf_counter() > deadline and len(seconds) >= LEAST_ROUNDS:
            break
    return {
        "seconds": statistics.median(seconds),
        "quartiles": statistics.quantiles(seconds, n=4) if len(seconds) > 1 else None,
        "rounds": len(seconds),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def print_report(report: dict[str, Any]) -> None:
    print(f"large matrix products: {report['matrix_operations_per_second'] / 1e12:.3g} T/s, {report['dtype']}")
    print("| work | tokens | texts | s | tokens/s | target's share | peak GiB | share of the matrix rate |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in report["rows"]:
        peak, alone = row["peak_memory_bytes"], row.get("target_seconds")
        memory = "-" if peak is None else f"{peak / 2**30:.1f}"
        share = "-" if alone is None else f"{alone / row['seconds']:.0%}"
        print(
            f"| {row['kind']} | {row['seq']} | {row['batch']} | {row['seconds']:.3f} | {row['tokens_per_second']:,.0f} "
            f"| {share} | {memory} | {row['matrix_share']:.0%} |"
        )
    print(f"{report['seconds']:.0f} s; skipped {len(report['skipped'])}, failed {len(report['failed'])}")
    for row in report["failed"]:
        print(f"failed: {row}")


if __name__ == "__main__":
    main()
