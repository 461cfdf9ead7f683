"""Measures training on a CPU: a step of each kind of drafter, and a straightforward loop beside it.

    python scripts/bench/training.py
    python scripts/bench/training.py --source sharegpt --data CHATS.json --positions all

Each kind trains in several ways, which take turns on every step, with the same texts, labels and
positions. The target's states come from the shards (`stored`), are recomputed in every step
(`recomputed`), or are recomputed on packed rows (`packed`). `straightforward` is the usual code, for
ReDrafter: it pads texts to the maximum length, runs the target with its logits and with gradients,
computes the drafter's logits at all positions, and masks the loss at the end. A step is forward,
backward, clipping and AdamW. The losses of all ways must be equal.

The table has medians of tokens of text per second of the clock and of the processor, which other
work on the machine changes less. `over_recomputed` is the median of the pairs of one step, with a 95 %
interval.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator
from report import finish, median, ratio, take_turns
from torch.nn import functional as F

from outrider.data.config import DataConfig
from outrider.data.manifest import Manifest
from outrider.data.types import TOKENS_ONLY, UNKNOWN, DrafterBatch
from outrider.distill.config import DistillConfig
from outrider.distill.label.run import distill
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters.objective import Objective
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.train.batches import BatchStream, target_reads, with_hidden_states
from outrider.train.config import TrainConfig

KINDS: dict[str, dict[str, Any]] = {
    "redrafter": {},
    "medusa": {"num_heads": 4},
    "eagle": {"feature_noise": 0.0},  # noise would make the losses differ
    "eagle3": {"feature_layers": [2, 4, 7]},
    "block": {"feature_layers": [2, 4, 7], "rank": 64},
}
STRAIGHTFORWARD, STORED, RECOMPUTED, PACKED = "straightforward", "stored", "recomputed", "packed"
HORIZON = 5
TOLERANCE = 1e-3
"""Relative difference of float32 losses that rounding explains after some optimizer steps."""


def main(
    target: str = "models/demo_target",
    source: Annotated[str, typer.Option(help="Format of the texts; stdlib needs no file.")] = "stdlib",
    data: Annotated[Path | None, typer.Option(help="File of the texts.")] = None,
    texts: int = 48,
    max_length: int = 512,
    kind: Annotated[list[str] | None, typer.Option(help=f"{', '.join(KINDS)}; all unless given. Repeatable.")] = None,
    positions: Annotated[str, typer.Option(help="Positions trained in a step: a number, or all.")] = "256",
    batch_size: int = 4,
    steps: Annotated[int, typer.Option(help="Measured steps, after one that warms up.")] = 6,
    threads: int = 1,
    folder: Annotated[Path, typer.Option(help="The labels go there.")] = Path("outputs/bench/training"),
    output: Path = Path("outputs/bench/training.json"),
) -> None:
    """Measure training on a CPU."""
    options = dict(locals())
    if unknown := {*(kind or ())} - KINDS.keys():
        raise typer.BadParameter(f"--kind {', '.join(unknown)}; it must be one of {', '.join(KINDS)}")
    torch.set_num_threads(threads)
    loaded = load_target(TargetConfig(name_or_path=target, dtype="float32"), torch.device("cpu"))
    # 1. Labels, with the states that the kinds read.
    layers = sorted({layer for options in KINDS.values() for layer in options.get("feature_layers", ())})
    labels = DistillConfig(horizon=HORIZON, features="last_hidden", feature_layers=layers, shard_examples=texts)
    split = "distill" if source == "stdlib" else "train"
    records = DataConfig(source=source, path=data and str(data), split=split, limit=texts, max_length=max_length)
    manifest = distill(labels, records, loaded, folder, Accelerator(cpu=True))
    # 2. The kinds one after the other.
    trained = None if positions == "all" else int(positions)
    config = TrainConfig(steps=steps + 1, batch_size=batch_size, max_positions=trained, shuffle_shards=1)
    rows = [
        row for name in kind or KINDS for row in measured(name, Ways(name, loaded, folder, manifest, config, max_length), steps)
    ]
    finish(output, rows, options)


def measured(kind: str, ways: "Ways", steps: int) -> list[dict[str, Any]]:
    """Return a row for each way of a kind. Raises RuntimeError if their losses differ."""
    seconds = take_turns({name: way.step for name, way in ways.ways.items()}, rounds=steps)
    expected = ways.ways[RECOMPUTED].losses
    for name, way in ways.ways.items():
        differences = [abs(actual - loss) / loss for actual, loss in zip(way.losses, expected, strict=True)]
        if max(differences) > TOLERANCE:
            raise RuntimeError(f"{kind}, {name}: its losses differ by up to {max(differences):.2g}: {way.losses}, {expected}")
    num_tokens = ways.ways[RECOMPUTED].num_tokens[1:]
    return [
        {
            "kind": kind,
            "way": name,
            "tokens_per_second": median([size / spent for size, spent in zip(num_tokens, each.wall, strict=True)]),
            "tokens_per_processor_second": median(
                [size / spent for size, spent in zip(num_tokens, each.processor, strict=True)]
            ),
            "over_recomputed": ratio(seconds[RECOMPUTED].wall, each.wall),
            "over_recomputed_processor": ratio(seconds[RECOMPUTED].processor, each.processor),
        }
        for name, each in seconds.items()
    ]


class Ways:
    """The ways to train a kind, each with a drafter of the same first weights."""

    def __init__(
        self, kind: str, target: HFTarget, folder: Path, manifest: Manifest, config: TrainConfig, max_length: int
    ) -> None:
        reads = target_reads(self._drafter(kind, target), Objective())

        def batches(*, stored: bool = False, packing: bool = False) -> BatchStream:
            held = reads if stored else TOKENS_ONLY
            options = replace(config, packing=packing)
            return BatchStream(folder, manifest, options, rank=0, num_processes=1, reads=held)

        def loss(drafter: Any, batch: DrafterBatch) -> torch.Tensor:
            total: torch.Tensor = drafter.loss(with_hidden_states(batch, target, reads), Objective()).sums.sum()
            return total

        streams = {STORED: batches(stored=True), RECOMPUTED: batches(), PACKED: batches(packing=True)}
        self.ways = {name: Way(self._drafter(kind, target), stream, loss) for name, stream in streams.items()}
        if kind == "redrafter":

            def plain_loss(drafter: Any, batch: DrafterBatch) -> torch.Tensor:
                return straightforward_loss(drafter, target, padded(batch, max_length))

            self.ways[STRAIGHTFORWARD] = Way(self._drafter(kind, target), batches(), plain_loss)

    @staticmethod
    def _drafter(kind: str, target: HFTarget) -> Any:
        torch.manual_seed(0)
        return build_drafter(parse_drafter({"kind": kind, **KINDS[kind]}), target).train()


class Way:
    """One way to train: a drafter, its optimizer, its batches, and its losses so far."""

    def __init__(self, drafter: Any, stream: BatchStream, loss: Callable[[Any, DrafterBatch], torch.Tensor]) -> None:
        self.drafter, self.stream, self.loss = drafter, stream, loss
        self.optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)
        self.losses: list[float] = []
        self.num_tokens: list[int] = []

    def step(self) -> None:
        """Train on the next batch."""
        (batch,) = self.stream.batches(len(self.losses))
        num_labels = (batch.continuations[batch.positions][:, 1:] != UNKNOWN).sum()
        loss = self.loss(self.drafter, batch) / num_labels
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.num_tokens.append(int(batch.attention_mask.sum()))


# --- the straightforward loop


def padded(batch: DrafterBatch, length: int) -> DrafterBatch:
    """Return the same batch with more padding."""
    fills = {"input_ids": 0, "attention_mask": False, "positions": False, "continuations": UNKNOWN}
    values = {}
    for name, fill in fills.items():
        value = getattr(batch, name)
        values[name] = value.new_full((value.shape[0], length, *value.shape[2:]), fill)
        values[name][:, : value.shape[1]] = value
    return DrafterBatch(**values)


def straightforward_loss(drafter: Any, target: HFTarget, batch: DrafterBatch) -> torch.Tensor:
    """Compute a ReDrafter's loss over all depths, from its logits at all positions of the padded batch."""
    # 1. The target as `from_pretrained` leaves it, with gradients and logits.
    output = target.model.requires_grad_(True)(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), output_hidden_states=True
    )
    target.model.requires_grad_(False)
    hidden = output.hidden_states[-1].detach()
    # 2. Labels: the first token of a continuation is the target's own, and is read; the others are drafted.
    continuations = batch.continuations.masked_fill(~batch.positions[..., None], UNKNOWN)
    continuations = continuations.masked_fill((continuations == UNKNOWN).cummax(-1).values, UNKNOWN)
    read, labels = continuations[..., :-1].clamp(min=0), continuations[..., 1:]
    # 3. The recurrence, depth by depth.
    embeddings, losses = drafter.embed(read), []
    state = drafter.first_state(embeddings[:, :, 0])
    for depth in range(read.shape[-1]):
        if depth:
            state = drafter.next_state(state, embeddings[:, :, depth])
        logits = drafter.logits(hidden, state)
        losses.append(
            F.cross_entropy(logits.flatten(0, 1), labels[..., depth].flatten(), ignore_index=UNKNOWN, reduction="sum")
        )
    return torch.stack(losses).sum()


if __name__ == "__main__":
    typer.run(main)
