"""Benchmark of training against a straightforward loop, at equal loss in every step.

    python scripts/bench_training.py                                  # on the demo's own texts
    # on chats of mixed lengths
    python scripts/bench_training.py --data CHAT.jsonl.gz --output benchmarks/training_chat.json

The straightforward loop is the usual code. It pads texts to the maximum length, runs the target in
every step with logits and gradients, computes the drafter's logits at all positions, and masks the
loss at the end. Ours has three arms. The target's states come from the shards (`stored`), are
recomputed in every step (`made anew`), or are recomputed on packed rows (`packed`). All arms have
the same texts, labels, positions and initial weights. They take turns on every step, and their
losses are compared. Labels are computed once, in --folder. A step is forward, backward, clipping
and AdamW. The record has wall-clock time, and processor time, which other processes disturb less.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_module
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from outrider.cli.config import RunConfig, register, to_run_config
from outrider.data.files import write_json
from outrider.data.manifest import Manifest
from outrider.data.packing import packed, padded
from outrider.data.types import TOKENS_ONLY, UNKNOWN, DrafterBatch
from outrider.distill.label.run import distill, load_examples
from outrider.eval.measure.environment import describe_environment
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters.objective import Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.train.batches import BatchStream, target_reads, with_hidden_states

KINDS = ("redrafter", "medusa", "eagle", "eagle3")
ARMS = ("straightforward", "stored", "made anew", "packed")
LAYERS = [2, 4, 7]
TOLERANCE = 1e-3
"""Relative difference of float32 losses that rounding explains after some optimizer steps."""

Logits = list[Float[torch.Tensor, "batch seq vocab"]]


# --- the straightforward loop


def plain_loss(drafter: Any, kind: str, model: Any, batch: DrafterBatch) -> torch.Tensor:
    """Compute the loss over all depths, from logits at all positions of the padded batch."""
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), output_hidden_states=True)
    states = [state.detach() for state in output.hidden_states]
    tokens_read = batch.continuations[..., :-1].clamp(min=0)
    labels = torch.where(batch.positions[..., None], batch.continuations, UNKNOWN)
    labels = labels.masked_fill((labels == UNKNOWN).cummax(-1).values, UNKNOWN)[..., 1:]
    if kind == "eagle3":
        features = torch.cat([states[layer] for layer in LAYERS], dim=-1)
        outputs = plain_unroll(drafter, features, batch, tokens_read, labels.shape[-1])
        return plain_sum([drafter.logits(output_of_depth) for output_of_depth in outputs], labels, drafter.config.loss_decay)
    hidden = states[-1]
    if kind == "eagle":
        (outputs,) = plain_unroll(drafter, hidden, batch, tokens_read, 1)
        tokens = plain_cross_entropy(drafter.logits(outputs), labels[..., 0])
        on_text = (
            (labels[..., 0] != UNKNOWN)
            & (tokens_read[..., 0] == batch.input_ids.roll(-1, 1))
            & batch.attention_mask.roll(-1, 1)
        )
        distance = F.smooth_l1_loss(outputs, hidden.roll(-1, 1), reduction="none").mean(-1)
        config = drafter.config
        return config.classification_weight * tokens + config.regression_weight * (distance * on_text).sum()
    logits = plain_redrafter(drafter, hidden, tokens_read) if kind == "redrafter" else plain_medusa(drafter, hidden)
    return plain_sum(logits, labels, 1.0 if kind == "redrafter" else drafter.config.head_decay)


def plain_sum(logits: Logits, labels: Int[torch.Tensor, "batch seq depth"], decay: float) -> torch.Tensor:
    losses = [
        decay**depth * plain_cross_entropy(logits_of_depth, labels[..., depth]) for depth, logits_of_depth in enumerate(logits)
    ]
    return torch.stack(losses).sum()


def plain_cross_entropy(logits: Float[torch.Tensor, "batch seq vocab"], labels: Int[torch.Tensor, "batch seq"]) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=UNKNOWN, reduction="sum")


def plain_redrafter(drafter: Any, hidden: torch.Tensor, tokens_read: torch.Tensor) -> Logits:
    embeddings = drafter.embed(tokens_read)
    state = drafter.first_state(embeddings[:, :, 0])
    logits = [drafter.logits(hidden, state)]
    for depth in range(1, tokens_read.shape[-1]):
        state = drafter.next_state(state, embeddings[:, :, depth])
        logits.append(drafter.logits(hidden, state))
    return logits


def plain_medusa(drafter: Any, hidden: torch.Tensor) -> Logits:
    logits = drafter.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
    return list(logits.unbind(2))


def plain_unroll(
    drafter: Any, features: torch.Tensor, batch: DrafterBatch, tokens_read: torch.Tensor, num_depths: int
) -> list[Float[torch.Tensor, "batch seq hidden"]]:
    """Run EAGLE's layer at all positions and depths, with attention written out.

    A position attends to the text before it and to its own branch.
    """
    attention = drafter.layer.self_attn
    rotary: Any = drafter.own_rotary or drafter._target_parts[1]
    hidden, seq = drafter.fuse(features), tokens_read.shape[1]
    columns = torch.arange(seq)
    before = columns < columns[:, None]

    def project(tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attended, residual = drafter.layer_inputs(drafter.token_inputs(drafter.embed(tokens)), hidden)
        query, key, value = (
            getattr(attention, name)(attended).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary(attended, positions[None]))
        groups = attention.num_key_value_groups
        return residual, query, repeat_kv(key, groups), repeat_kv(value, groups)

    _, _, text_key, text_value = project(batch.input_ids.roll(-1, 1), hidden, columns)
    branch_entries: list[tuple[torch.Tensor, torch.Tensor]] = []
    outputs = []
    for depth in range(num_depths):
        residual, query, key, value = project(tokens_read[..., depth], hidden, columns + depth)
        branch_entries.append((key, value))
        scores = (query @ text_key.transpose(2, 3) * attention.scaling).masked_fill(~before, -torch.inf)
        branch_scores = [(query * entry_key).sum(-1, keepdim=True) * attention.scaling for entry_key, _ in branch_entries]
        weights = torch.cat([scores, *branch_scores], dim=-1).softmax(-1)
        seen = weights[..., :seq] @ text_value
        for index, (_, entry_value) in enumerate(branch_entries):
            seen = seen + weights[..., seq + index, None] * entry_value
        hidden = residual + attention.o_proj(seen.transpose(1, 2).flatten(2))
        hidden = hidden + drafter.layer.mlp(drafter.layer.post_attention_layernorm(hidden))
        outputs.append(hidden)
    return outputs


def pad_to(batch: DrafterBatch, length: int) -> DrafterBatch:
    """Return the same batch with more padding."""
    fill = {"input_ids": 0, "attention_mask": False, "positions": False, "continuations": UNKNOWN}
    values = {}
    for name, padding in fill.items():
        value = getattr(batch, name)
        wide = value.new_full((value.shape[0], length, *value.shape[2:]), padding)
        wide[:, : value.shape[1]] = value
        values[name] = wide
    return DrafterBatch(**values)


# --- the arms


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One method of training: the summed loss of a step, the drafter and its optimizer."""

    loss: Callable[[int], torch.Tensor]
    drafter: Any
    optimizer: torch.optim.Optimizer

    def step(self, index: int, num_labels: int) -> tuple[float, float, float]:
        """Run a step; return the mean loss, wall-clock seconds and processor seconds."""
        clock, processor = time.perf_counter(), time.process_time()
        loss = self.loss(index) / num_labels
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()), time.perf_counter() - clock, time.process_time() - processor


def make_arms(args: argparse.Namespace, kind: str, config: RunConfig, manifest: Manifest, target: HFTarget) -> dict[str, Arm]:
    torch.manual_seed(0)
    first = build_drafter(parse_drafter(config.drafter), target).train()
    objective, reads = Objective(), target_reads(first, Objective())
    # the default after `from_pretrained`
    unfrozen = copy.deepcopy(target.model).requires_grad_(True)

    def stream(stored: bool, packing: bool) -> BatchStream:
        options = replace(config.train, packing=packing)
        held = reads if stored else TOKENS_ONLY
        return BatchStream(folder(args), manifest, options, rank=0, num_processes=1, reads=held)

    streams = {"stored": stream(True, False), "made anew": stream(False, False), "packed": stream(False, True)}
    arms = {}
    for name in args.arms:
        drafter = build_drafter(parse_drafter(config.drafter), target).train()
        drafter.load_state_dict(first.state_dict())
        if name == "straightforward":

            def loss(index: int, drafter: Any = drafter) -> torch.Tensor:
                (batch,) = streams["made anew"].batches(index)
                return plain_loss(drafter, kind, unfrozen, pad_to(batch, config.data.max_length))
        else:

            def loss(index: int, drafter: Any = drafter, name: str = name) -> torch.Tensor:
                (batch,) = streams[name].batches(index)
                return drafter.loss(with_hidden_states(batch, target, reads), objective).sums.sum()

        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)
        arms[name] = Arm(loss=loss, drafter=drafter, optimizer=optimizer)
    return arms


def run_case(
    args: argparse.Namespace, kind: str, positions: int | None, manifest: Manifest, target: HFTarget
) -> dict[str, Any]:
    """Measure median rates of every arm, in turns.

    Raises RuntimeError if their losses differ.
    """
    config = recipe(args, kind, positions)
    arms = make_arms(args, kind, config, manifest, target)
    stream = BatchStream(folder(args), manifest, config.train, rank=0, num_processes=1)
    losses: dict[str, list[float]] = {name: [] for name in arms}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    sizes = []
    for index in range(args.steps + 1):
        (batch,) = stream.batches(index)
        sizes.append((int(batch.attention_mask.sum()), int(batch.positions.sum())))
        num_labels = int((batch.continuations[batch.positions][:, 1:] != UNKNOWN).sum())
        for name, arm in arms.items():
            loss, clock, processor = arm.step(index, num_labels)
            losses[name].append(loss)
            seconds[name].append((clock, processor))
    expected, *others = losses.values()
    differences = [abs(actual - loss) / loss for other in others for actual, loss in zip(other, expected, strict=True)]
    if max(differences, default=0) > TOLERANCE:
        raise RuntimeError(f"{kind}: the losses differ by up to {max(differences):.2g} of them: {losses}")
    # The first step is a warm-up.
    rates = {name: rates_of(sizes[1:], arm_seconds[1:]) for name, arm_seconds in seconds.items()}
    return {"kind": kind, "max_positions": positions, "losses": losses, "rates": rates}


def rates_of(sizes: Sequence[tuple[int, int]], seconds: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return medians of the rates over steps."""
    rates = {}
    for what, index in (("tokens", 0), ("positions", 1)):
        for by, which in (("second", 0), ("processor_second", 1)):
            rates[f"{what}_per_{by}"] = median(size[index] / took[which] for size, took in zip(sizes, seconds, strict=True))
    return rates | {"seconds_per_step": median(took[0] for took in seconds)}


# --- data


def folder(args: argparse.Namespace) -> Path:
    path: Path = args.folder / ("stdlib" if args.data is None else "chat")
    return path


def recipe(args: argparse.Namespace, kind: str, positions: int | None, *, own_length: bool = False) -> RunConfig:
    """Return the demo's configuration with this kind of drafter.

    Texts have at most --max-length tokens, or the recipe's maximum if `own_length`.
    """
    overrides = [
        f"drafter={kind}_demo",
        "num_threads=1",
        f"train={{steps: 1000, warmup_steps: 1, batch_size: {args.batch_size}, num_threads: {args.threads}}}",
        f"train.max_positions={'null' if positions is None else positions}",
        f"distill={{features: last_hidden, feature_layers: {LAYERS}, horizon: 5, shard_examples: {args.texts}}}",
    ]
    if kind == "eagle":
        # random noise would make the arms' losses differ
        overrides.append("drafter.feature_noise=0.0")
    if args.data is not None:
        overrides += ["data=sharegpt", f"data.path={args.data}", "data.file=null", "data.chat_template=vicuna_v1.1"]
    overrides += [f"data.limit={args.texts}"] + [f"data.max_length={args.max_length}"] * (not own_length)
    with initialize_config_module("outrider.conf", version_base="1.3"):
        return to_run_config(compose("config", overrides=overrides))


def padding_shares(args: argparse.Namespace, target: HFTarget) -> dict[str, dict[str, float]]:
    """Compute the share of padding in a batch by batch size, for --padding-texts texts."""
    config = recipe(args, KINDS[0], None, own_length=True)
    examples, _ = load_examples(replace(config.data, limit=args.padding_texts), target.tokenizer)
    lengths = [len(example.input_ids) for example in examples]
    Random(0).shuffle(lengths)
    shares: dict[str, dict[str, float]] = {}
    for size in (size for size in (2, 4, 8, 16) if size <= len(lengths)):
        batches = [lengths[start : start + size] for start in range(0, len(lengths) - size + 1, size)]
        real = sum(map(sum, batches))
        spent = {
            "to the maximum": len(batches) * size * config.data.max_length,
            "to the longest": sum(math.prod(padded(batch).shape) for batch in batches),
            "packed": sum(math.prod(packed(batch).shape) for batch in batches),
        }
        shares[str(size)] = {name: 1 - real / tokens for name, tokens in spent.items()}
    return shares


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    register()
    config = recipe(args, KINDS[0], None)
    target = load_target(config.target, torch.device("cpu"))
    manifest = distill(config.distill, config.data, target, folder(args), Accelerator(cpu=True))
    cases = [run_case(args, kind, positions, manifest, target) for kind in args.kinds for positions in args.positions]
    shares = padding_shares(args, target)
    report = {
        "cases": cases,
        "padding": shares,
        "settings": {field: str(value) if isinstance(value, Path) else value for field, value in vars(args).items()},
        "environment": asdict(describe_environment(torch.device("cpu"))),
    }
    write_json(args.output, report)
    print_tables(cases, shares, args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None, help="a file of conversations in ShareGPT form; else the demo's own texts")
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--max-length", type=int, default=512, help="tokens that the straightforward loop pads to")
    parser.add_argument("--padding-texts", type=int, default=400, help="texts for the shares of padding")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="methods; losses are compared with the first one's"
    )
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument(
        "--positions",
        type=positions_of,
        nargs="+",
        default=[256, None],
        help="positions trained per step; `all` is every labelled one",
    )
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after one step of warm-up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("outputs/bench_training"), help="the labels go there")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/training.json"))
    return parser.parse_args()


def positions_of(text: str) -> int | None:
    return None if text == "all" else int(text)


def print_tables(cases: Sequence[dict[str, Any]], shares: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    console = Console()
    rate = "tokens_per_processor_second"
    table = Table(title=f"Tokens of text per second of the processor, {args.threads} thread(s), medians of {args.steps} steps")
    for column in ("drafter", "positions", *args.arms):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for case in cases:
        base = case["rates"][args.arms[0]][rate]
        cells = [f"{rates[rate]:,.0f} ({rates[rate] / base:.2f}x)" for rates in case["rates"].values()]
        table.add_row(case["kind"], str(case["max_positions"] or "all"), *cells)
    console.print(table)
    table = Table(title="Share of padding in a batch")
    for column in ("texts", *next(iter(shares.values()))):
        table.add_column(column, justify="right")
    for size, row in shares.items():
        table.add_row(size, *(f"{share:.2f}" for share in row.values()))
    console.print(table)
    console.print(f"Written to {args.output}")


if __name__ == "__main__":
    main()
