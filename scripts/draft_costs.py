"""Arithmetic of a draft's cost beside a target of eight billion parameters, over context length.

    python scripts/draft_costs.py --record benchmarks/drafter_study

At batch size 1 a pass takes about as long as reading its weights and its KV cache. So the cost of
a draft is the bytes that it reads, as a share of those of one pass of the target over the draft
tree. Nothing is measured here. Tests compare `reads` of each kind with the matrix products that
its drafter computes.

The record `draft_costs.json` has the figures, and `draft_costs.png` draws them over the context.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import silence  # noqa: F401 - before torch, whose libraries it silences
import torch
from free_marks import Mark, mark
from script_errors import script_errors

from outrider.data.files import write_json
from outrider.eval.measure.environment import describe_environment
from outrider.eval.results.plots import COLORS, drawing

RECORD_FILE, PLOT_FILE = "draft_costs.json", "draft_costs.png"
BYTES = 2
"""Bytes of a weight and of a cached value, in 16 bits."""
DEPTH, WIDTH, NODES = 4, 16, 40
"""Draft tokens on the longest path, paths of the search, and nodes of the tree: for all kinds."""
NEW_TOKENS = 3
"""Tokens that the target has accepted since the last draft, which the drafter reads."""
CONTEXTS = tuple(1024 * 2**power for power in range(8))
REDUCED = 32_000
"""Reduced draft vocabulary, of the size that EAGLE-3's release for Llama 3.1 8B has."""
MOST_SHARE = 0.12
"""The block drafter's draft must cost at most this share of a pass."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def attention(self, input_width: int | None = None) -> int:
        """Return the weights of a layer's attention, whose inputs may be wider than the model."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (input_width or self.hidden) * (queries + 2 * keys) + queries * self.hidden

    @property
    def mlp(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def cached(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim


LLAMA_8B = Shape(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256)
LLAMA_1B = Shape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, head_dim=64, vocab=128256)
"""config.json of Llama 3.1 8B, and of Llama 3.2 1B, which is the smallest model of its family."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """Matrices that are read `times` times, each time for as many rows."""

    weights: int
    rows: int
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a draft, or a pass of the target, reads and computes."""

    reads: tuple[Read, ...]
    passes: int
    """Parts of the draft that wait for each other."""
    cached: int = 0
    """Values of the KV cache that are read for each token of the context."""
    attended: int = 0
    """Multiplications of the attention for each token of the context."""

    @property
    def weights(self) -> int:
        return sum(read.weights * read.times for read in self.reads)

    def bytes_read(self, context: int) -> int:
        return BYTES * (self.weights + self.cached * context)

    def flops(self, context: int) -> int:
        """Return two operations per multiplication."""
        return 2 * (sum(read.weights * read.rows * read.times for read in self.reads) + self.attended * context)


def target_pass(shape: Shape, num_tokens: int) -> Cost:
    """Return the cost of a pass: all weights without the embeddings, and the cache of all layers."""
    weights = shape.layers * (shape.attention() + shape.mlp) + shape.vocab * shape.hidden
    return with_attention(
        [Read(weights=weights, rows=num_tokens)], shape, layer_rows=shape.layers * num_tokens, layers=shape.layers
    )


def with_attention(reads: Sequence[Read], shape: Shape, *, layer_rows: int, layers: int, passes: int = 1) -> Cost:
    """Return the cost with attention: `layer_rows` queries, summed over layers and passes.

    `layers` counts how often a layer's whole cache is read. A query's products with all keys and
    values have 2 x heads x head_dim multiplications per token of the context.
    """
    attended = 2 * shape.heads * shape.head_dim * layer_rows
    return Cost(reads=tuple(reads), passes=passes, cached=layers * shape.cached, attended=attended)


def redrafter(
    shape: Shape, *, outputs: int, exit_width: int, depth: int = DEPTH, width: int = WIDTH, num_blocks: int = 2
) -> Cost:
    """Return the cost of ReDrafter (arXiv 2403.09919, section 3.1), whose recurrence starts at zero.

    Each depth reads the recurrence, the blocks and the head. Nothing depends on the context.
    """
    both = 2 * shape.hidden
    layers = num_blocks * exit_width**2 + exit_width * outputs + (0 if exit_width == both else both * exit_width)
    first, later = shape.hidden**2 + layers, 2 * shape.hidden**2 + layers
    return Cost(reads=(Read(weights=first, rows=1), Read(weights=later, rows=width, times=depth - 1)), passes=depth)


def medusa(shape: Shape, *, share_head: bool, depth: int = DEPTH) -> Cost:
    """Return the cost of Medusa (arXiv 2401.10774, section 2.1.1): residual heads, all in one pass."""
    blocks, head = Read(weights=depth * shape.hidden**2, rows=1), shape.vocab * shape.hidden
    heads = Read(weights=head, rows=depth) if share_head else Read(weights=depth * head, rows=1)
    return Cost(reads=(blocks, heads), passes=1)


def eagle3(
    shape: Shape, *, outputs: int, depth: int = DEPTH, width: int = WIDTH, num_features: int = 3, new: int = NEW_TOKENS
) -> Cost:
    """Return the cost of EAGLE-3 (arXiv 2503.01840, section 3.1).

    The layer reads pairs of embedding and feature, and each depth reads its cache of the context.
    """
    fusion = Read(weights=num_features * shape.hidden**2, rows=new)
    layer, head = shape.attention(2 * shape.hidden) + shape.mlp, outputs * shape.hidden
    reads = [fusion, Read(weights=layer, rows=new), Read(weights=head, rows=1)]
    reads.append(Read(weights=layer + head, rows=width, times=depth - 1))
    return with_attention(reads, shape, layer_rows=new + width * (depth - 1), layers=depth, passes=depth)


def block(
    shape: Shape,
    *,
    outputs: int,
    correction: str,
    depth: int = DEPTH,
    width: int = WIDTH,
    num_layers: int = 1,
    num_features: int = 5,
    num_slots: int | None = None,
    rank: int = 256,
    new: int = NEW_TOKENS,
) -> Cost:
    """Return the cost of the block drafter (`models/drafters/block.py`).

    One pass reads the new tokens, of which attention alone is computed, and the slots: one for each
    draft token, unless `num_slots` are fewer. Then the recurrent correction reads its weights and
    the head for each depth. The others read the head once, and the bilinear one its gate for the
    first slot and for all later slots.
    """
    # 1. The fusion of the new tokens' features, and the pass.
    slots = num_slots or depth
    reads = [Read(weights=num_features * shape.hidden**2, rows=new)]
    reads.append(Read(weights=num_layers * shape.attention(), rows=new + slots))
    reads.append(Read(weights=num_layers * shape.mlp, rows=slots))
    # 2. The head and the correction.
    head, square = outputs * shape.hidden, shape.hidden**2
    if correction == "rnn":
        mixed = 3 * square + head  # M1 of twice the width, and M2
        reads += [Read(weights=square + mixed, rows=1), Read(weights=2 * square + mixed, rows=width, times=depth - 1)]
    else:
        reads.append(Read(weights=head, rows=depth))
    if correction == "bilinear":
        reads += [Read(weights=rank * shape.hidden, rows=1), Read(weights=rank * shape.hidden, rows=depth - 1)]
    passes = 1 + depth * (correction == "rnn")
    return with_attention(reads, shape, layer_rows=num_layers * (new + slots), layers=num_layers, passes=passes)


def draft_model(shape: Shape, *, depth: int = DEPTH, width: int = WIDTH, new: int = NEW_TOKENS) -> Cost:
    """Return the cost of a draft model of its own shape: a pass of it for each depth."""
    weights = shape.layers * (shape.attention() + shape.mlp) + shape.vocab * shape.hidden
    reads = [Read(weights=weights, rows=new), Read(weights=weights, rows=width, times=depth - 1)]
    layer_rows = shape.layers * (new + width * (depth - 1))
    return with_attention(reads, shape, layer_rows=layer_rows, layers=shape.layers * depth, passes=depth)


def drafts(shape: Shape, small: Shape) -> dict[str, dict[int, Cost]]:
    """Return the costs of all kinds by the size of the draft vocabulary."""
    sizes = (shape.vocab, REDUCED)
    return {
        "block, bilinear": {size: block(shape, outputs=size, correction="bilinear") for size in sizes},
        "block, recurrent": {size: block(shape, outputs=size, correction="rnn") for size in sizes},
        "block, bilinear, deep": {size: block(shape, outputs=size, correction="bilinear", num_layers=5) for size in sizes},
        "ReDrafter, 2 x width": {size: redrafter(shape, outputs=size, exit_width=2 * shape.hidden) for size in sizes},
        "ReDrafter": {size: redrafter(shape, outputs=size, exit_width=shape.hidden) for size in sizes},
        "EAGLE-3": {size: eagle3(shape, outputs=size) for size in sizes},
        "Medusa": {shape.vocab: medusa(shape, share_head=False)},
        "Medusa, target's head": {shape.vocab: medusa(shape, share_head=True)},
        "draft model of 1B": {shape.vocab: draft_model(small)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("outputs/draft_costs"), help="folder of record and plot")
    args = parser.parse_args()
    with script_errors():
        run(args.record)


def run(folder: Path) -> None:
    """Write the record and the plot, and print the table."""
    rows = rows_of(drafts(LLAMA_8B, LLAMA_1B), target_pass(LLAMA_8B, NODES + 1))
    marks = judge(rows)
    lines = [*notes(), *(mark["text"] for mark in marks)]
    settings = {"depth": DEPTH, "width": WIDTH, "nodes": NODES, "new_tokens": NEW_TOKENS, "bytes_per_value": BYTES}
    shapes = {"target": asdict(LLAMA_8B), "draft_model": asdict(LLAMA_1B)}
    facts = {**settings, **shapes, "environment": asdict(describe_environment(torch.device("cpu")))}
    write_json(folder / RECORD_FILE, {**facts, "rows": rows, "marks": marks, "tables": table(rows), "notes": lines})
    plot(rows, folder / PLOT_FILE)
    print(table(rows) + "\n\n" + "\n".join(f"- {line}" for line in lines))


def rows_of(methods: dict[str, dict[int, Cost]], target: Cost) -> list[dict[str, Any]]:
    """Return a row for each drafter and vocabulary, with its figures at each length of the context."""
    return [
        {
            "drafter": name,
            "outputs": outputs,
            "weights": cost.weights,
            "passes": cost.passes,
            "contexts": [
                {
                    "context": context,
                    "bytes": cost.bytes_read(context),
                    "share": cost.bytes_read(context) / target.bytes_read(context),
                    "flops_share": cost.flops(context) / target.flops(context),
                }
                for context in CONTEXTS
            ],
        }
        for name, by_size in methods.items()
        for outputs, cost in by_size.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the weights of a draft, and its share of a pass at the shortest and longest context.

    The notes explain the columns.
    """
    ends = [f"{context // 1024}k" for context in (CONTEXTS[0], CONTEXTS[-1])]
    columns = ["drafter", "head", "passes", "weights", *(f"at {end}" for end in ends), "more", "flops"]
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    for row in rows:
        first, last = row["contexts"][0], row["contexts"][-1]
        more = (last["bytes"] - first["bytes"]) / 1e9
        cells = [row["drafter"], f"{row['outputs'] // 1000}k", str(row["passes"]), f"{row['weights'] / 1e9:.2f} G"]
        cells += [f"{first['share']:.3f}", f"{last['share']:.3f}", f"{more:.1f} GB", f"{first['flops_share']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def notes() -> list[str]:
    """List what the columns and names of the table mean."""
    short, long = CONTEXTS[0] // 1024, CONTEXTS[-1] // 1024
    return [
        f"Drafts are {DEPTH} tokens deep and {WIDTH} paths wide. The target verifies {NODES} nodes in a pass, at batch size 1.",
        f"At {short}k, at {long}k: bytes read by a draft over those read by the target's pass, with a context of that length.",
        "Weights and KV cache are in 16 bits. Head: the size of the draft vocabulary.",
        f"More: bytes that a draft reads at {long}k more than at {short}k. Flops: share of the operations, at {short}k.",
        "Passes: parts of a draft that wait for each other.",
        "Block drafters have one layer, the deep one has five. ReDrafter-2 reads what the recurrent one reads.",
        "ReDrafter's head is as wide as the target's; in its paper it is twice as wide (2 x width).",
        "Medusa has a head of its own for each depth, or the target's head for all.",
    ]


def judge(rows: Sequence[dict[str, Any]]) -> list[Mark]:
    """Judge the block drafter's cost, and which drafts cost the same at every length."""
    marks = []
    for row in rows:
        if row["drafter"] in ("block, bilinear", "block, recurrent"):
            share = row["contexts"][0]["share"]
            rule = f"{row['drafter']}, head of {row['outputs'] // 1000}k: a draft costs at most {MOST_SHARE} of a pass"
            marks.append(mark(rule, share <= MOST_SHARE, f"{share:.3f}"))
    flat = {row["drafter"] for row in rows if row["contexts"][0]["bytes"] == row["contexts"][-1]["bytes"]}
    reached = flat == {row["drafter"] for row in rows if row["drafter"].startswith(("ReDrafter", "Medusa"))}
    return [
        *marks,
        mark("ReDrafter's and Medusa's drafts alone cost the same at every length", reached, ", ".join(sorted(flat))),
    ]


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the bytes of a draft, and their share of the target's pass, over the context."""
    styles = {LLAMA_8B.vocab: "-", REDUCED: "--"}
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    with drawing(path, 10.4, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        for row in rows:
            index = names.index(row["drafter"])
            marker = "o" if index < len(COLORS) else "s"
            options = {"color": COLORS[index % len(COLORS)], "linestyle": styles[row["outputs"]], "marker": marker}
            label = f"{row['drafter']}, head of {row['outputs'] // 1000}k"
            contexts = [figures["context"] for figures in row["contexts"]]
            left.plot(contexts, [figures["bytes"] / 1e9 for figures in row["contexts"]], markersize=3, **options)
            right.plot(contexts, [figures["share"] for figures in row["contexts"]], markersize=3, label=label, **options)
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_xticks(CONTEXTS, [f"{context // 1024}k" for context in CONTEXTS])
            axes.minorticks_off()
            axes.set_xlabel("tokens of the context")
            axes.spines[["top", "right"]].set_visible(False)
        left.set_yscale("log")
        left.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        left.minorticks_off()
        left.set_title("GB read per draft", loc="left")
        right.set_title("Share of the target's pass at that context", loc="left")
        right.legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0))


if __name__ == "__main__":
    main()
