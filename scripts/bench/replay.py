"""Tokens per step of trained drafters, replayed on the texts that their training held out.

    python scripts/bench/replay.py --target TARGET --shards RUN/distill base_0=RUN/variants/base_0 muon_0=... --output FILE

The texts must be the target's own greedy answers (data.source=self, or a regeneration by an engine at
temperature 0). Then the text is what the target chooses at each position, and decoding can be replayed without
a pass of the target: a step begins at a token, the drafter proposes its tree from the stored states up to
there, and the next step begins after the tokens that the tree shares with the text, and one more. Steps count
at most as many draft tokens as the labels have.

A name is CHANGE_SEED. Each change is compared with the first name's, seed by seed on the same texts; intervals
are bootstraps over texts.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import NUM_DRAWS, finish
from tqdm import tqdm

from outrider.data.collate import collate
from outrider.data.files import read_json
from outrider.data.manifest import Manifest
from outrider.data.shards import label_store, read_shard
from outrider.data.types import UNKNOWN, DrafterBatch
from outrider.models.decoding import Prompts
from outrider.models.decoding.acceptance import follow
from outrider.models.decoding.types import TargetOutput
from outrider.models.drafters import load_drafter
from outrider.models.drafters.base import LastStateDrafter, TrainableDrafter
from outrider.models.drafters.objective import Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.train.batches import target_reads, with_hidden_states
from outrider.train.validation import hold_out

Counts = dict[str, tuple[int, int]]
"""Tokens and steps of each text."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", help="CHANGE_SEED=FOLDER of a trained variant")
    parser.add_argument("--target", required=True)
    parser.add_argument("--shards", type=Path, required=True, help="the labels, in the folder distill of the run")
    parser.add_argument("--setting", default="{}", help="options of drafting, as JSON")
    parser.add_argument("--texts", type=int, default=None, help="so many held-out texts of each seed, the first ones")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="the record, in JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_target(args.target, torch.device("cpu"))
    manifest = label_store(args.shards).load()
    counts: dict[str, dict[str, Counts]] = defaultdict(dict)
    for variant in args.variants:
        name, _, folder = variant.partition("=")
        change, _, seed = name.rpartition("_")
        counts[change][seed] = replay(Path(folder), target, args.shards, manifest, args.texts, json.loads(args.setting))
        print(f"{name}: {tokens_per_step(list(counts[change][seed].values())):.3f} tokens per step", flush=True)
    rows = [row_of(change, seeds, counts[next(iter(counts))]) for change, seeds in counts.items()]
    finish(args.output, rows, vars(args))


def replay(
    folder: Path, target: HFTarget, shards: Path, manifest: Manifest, texts: int | None, setting: dict[str, Any]
) -> Counts:
    """Return tokens and steps of each text that the training of a variant held out."""
    train = read_json(folder / "train" / "summary.json")["run"]["train"]
    room = target.context_length - train["validation_tokens"]
    held_out = hold_out(shards, manifest, train["validation_texts"], seed=train["seed"], max_prompt_tokens=room)
    drafter = load_drafter(folder / "drafter", target, **setting)
    assert isinstance(drafter, TrainableDrafter)
    return {
        f"{shard}/{row}": steps_of(drafter, target, read_batch(drafter, target, shards, manifest, shard, row))
        for shard, row in tqdm([text.location for text in held_out[:texts]], desc=folder.name, unit="text", disable=None)
    }


def read_batch(
    drafter: TrainableDrafter, target: HFTarget, shards: Path, manifest: Manifest, shard: int, row: int
) -> DrafterBatch:
    """Return a text with the states that the drafter reads."""
    reads = target_reads(drafter, Objective())
    examples = list(read_shard(shards, manifest.shards[shard], manifest.stored(reads)))
    batch = collate(
        examples[row : row + 1],
        max_positions=None,
        generator=torch.Generator(),
        labels="distilled",
        reads=manifest.stored(reads),
    )
    return with_hidden_states(batch, target, reads)


def steps_of(drafter: TrainableDrafter, target: HFTarget, batch: DrafterBatch) -> tuple[int, int]:
    """Return the tokens and the steps of a text's labelled positions: those of an answer begin after its prefill."""
    labelled = batch.positions[0].nonzero()[:, 0]
    # A drafter that reads the last state only drafts at all positions together, which is faster than at each step's.
    known = accepted_at(drafter, target, batch, labelled) if isinstance(drafter, LastStateDrafter) else {}
    start = num_tokens = num_steps = 0
    for position in labelled.tolist():
        if position < start:
            continue
        accepted = known[position] if known else accepted_at(drafter, target, batch, torch.tensor([position]))[position]
        num_tokens, num_steps = num_tokens + accepted + 1, num_steps + 1
        start = position + accepted + 1
    return num_tokens, num_steps


@torch.no_grad()
def accepted_at(drafter: TrainableDrafter, target: HFTarget, batch: DrafterBatch, positions: torch.Tensor) -> dict[int, int]:
    """Return how many labels of each position the drafter's tree has, from the first on.

    Several positions need a `LastStateDrafter`.
    """
    # 1. The text that the drafter reads, and the target's states there.
    columns = positions[:, None] if isinstance(drafter, LastStateDrafter) else torch.arange(int(positions[0]) + 1)[None]
    states, features = (
        None if values is None else values[0, columns].to(target.dtype) for values in (batch.hidden_states, batch.features)
    )
    if states is None:  # a draft model reads none
        states = torch.empty(*columns.shape, 0)
    prompts = Prompts(input_ids=batch.input_ids[0, columns], lengths=(columns.shape[1],) * len(positions))
    prefill = TargetOutput(logits=states[:, :1, :0], hidden_states=states, features=features)
    # 2. Its tree after the token that the target has chosen, and the labels that are a path in it.
    chosen, labels = batch.continuations[0, positions].tensor_split([1], dim=1)
    state = drafter.init_state(prompts, prefill, max_new_tokens=labels.shape[1] + 1)
    tree, _ = drafter.propose(state, chosen[:, 0])
    labels = torch.nn.functional.pad(labels, (0, 1), value=UNKNOWN)  # the last is for deeper nodes
    label = labels.gather(1, (tree.depths - 1).clamp(min=0, max=labels.shape[1] - 1))
    _, accepted, _ = follow(tree, (tree.tokens == label) & (label != UNKNOWN))
    return dict(zip(positions.tolist(), accepted.tolist(), strict=True))


def tokens_per_step(counts: list[tuple[int, int]]) -> float:
    """Return the tokens per step of several texts."""
    tokens, steps = zip(*counts, strict=True)
    return sum(tokens) / sum(steps)


def row_of(change: str, seeds: dict[str, Counts], reference: dict[str, Counts]) -> dict[str, Any]:
    """Return a change's figures, and its ratio over the reference on the texts of the seeds that both have."""
    pairs = np.array(list(paired(seeds, reference)))
    draws = np.random.default_rng(0).integers(0, len(pairs), (NUM_DRAWS, len(pairs)))
    tokens, steps, old_tokens, old_steps = pairs[draws].sum(1).T
    low, high = np.quantile(tokens / steps / (old_tokens / old_steps), (0.025, 0.975))
    total, per_step, old, old_per_step = pairs.sum(0)
    return {
        "change": change,
        "tokens per step": round(total / per_step, 3),
        "by seed": [round(tokens_per_step(list(counts.values())), 3) for counts in seeds.values()],
        "over the first": [round(float(value), 3) for value in (total / per_step / (old / old_per_step), low, high)],
        "texts": len(pairs),
        "steps": int(per_step),
    }


def paired(seeds: dict[str, Counts], reference: dict[str, Counts]) -> Iterator[tuple[int, int, int, int]]:
    """Yield each text's tokens and steps, and the reference's."""
    for seed in seeds.keys() & reference.keys():
        for text, counts in seeds[seed].items():
            yield *counts, *reference[seed][text]


if __name__ == "__main__":
    main()
