"""Measure what storing the target's states costs and saves.

    python scripts/features_study.py --folder outputs/features_study --output benchmarks/features_study.json

Labels once, stores the states of the same texts in every type, and trains the demo's ReDrafter and
EAGLE-3 on each of them, and on none, for the same steps; likewise a ReDrafter by KL, on the
target's whole distribution and on its likeliest tokens. How many tokens decoding then accepts is
measured on held-out prompts. About twenty minutes of one core; what is there isn't made again.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_module

from outrider.cli.config import RunConfig, register, to_run_config
from outrider.data.choices import STATE_DTYPES
from outrider.data.files import read_json, write_json
from outrider.data.manifest import MANIFEST_FILE, Manifest
from outrider.data.shards import label_store, read_shard, write_shard
from outrider.data.states import encode_states
from outrider.data.types import DistilledExample
from outrider.distill.config import DistillConfig
from outrider.distill.label.continuations import label_continuations
from outrider.distill.label.features import TextFeatures, bytes_per_token, stored_example
from outrider.distill.label.run import distill
from outrider.eval.measure.environment import describe_environment
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters.objective import Objective
from outrider.models.target.hf_target import HFTarget
from outrider.models.target.loading import load_target
from outrider.train.batches import BatchStream, target_reads, with_hidden_states
from outrider.train.run import train

LAYERS = [2, 4, 7]
TOPS = (8, 64)
HORIZON = 5
STORED = {
    **{dtype: DistillConfig(features="last_hidden", feature_layers=LAYERS, features_dtype=dtype) for dtype in STATE_DTYPES},
    **{f"top_{k}": DistillConfig(features="last_hidden", top_logprobs=k) for k in TOPS},
}
"""Name of a folder of shards, and what they hold."""
TIMED_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training: which shards it reads, and with what."""

    drafter: str
    shards: str
    loss: str = "cross_entropy"
    teacher: str = "full"


TRIALS = (
    *(Trial(drafter=drafter, shards=shards) for drafter in ("redrafter", "eagle3") for shards in ("none", *STATE_DTYPES)),
    Trial(drafter="redrafter", shards="bfloat16", loss="kl"),
    *(Trial(drafter="redrafter", shards=f"top_{k}", loss="kl", teacher="top_k") for k in TOPS),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("outputs/features_study"), help="shards and drafters go there")
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--positions", type=int, default=192, help="positions per step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, default=None, help="write a record of the figures")
    parser.add_argument("--bytes", action="store_true", help="print the table of bytes per token, and nothing else")
    args = parser.parse_args()
    if args.bytes:
        print(bytes_table())
        return
    torch.set_num_threads(1)
    register()
    target = load_target(recipe(args, Trial(drafter="redrafter", shards="none")).target, torch.device("cpu"))
    errors = store(args, target)
    results = [run_trial(args, target, trial, seed) for trial in TRIALS for seed in args.seeds]
    seconds = time_steps(args, target)
    print(bytes_table(), results_table(results), sep="\n\n")
    print(errors, seconds, sep="\n")
    if args.output is not None:
        record = {
            "texts": args.texts,
            "steps": args.steps,
            "positions_per_step": args.positions,
            "results": results,
            "relative_error": errors,
            "eagle3_step_seconds": seconds,
            "environment": asdict(describe_environment(torch.device("cpu"))),
        }
        write_json(args.output, record)


def recipe(args: argparse.Namespace, trial: Trial, seed: int = 0) -> RunConfig:
    """Return the demo's recipe with this trial's drafter."""
    overrides = [
        "num_threads=1",
        f"seed={seed}",
        f"data.limit={args.texts}",
        f"drafter={trial.drafter}_demo",
        f"train={{steps: {args.steps}, batch_size: 2, max_positions: {args.positions}, warmup_steps: {args.steps // 10}}}",
        f"train={{loss: {trial.loss}, teacher: {trial.teacher}, num_threads: 1, checkpoint_every: 1000}}",
        "train={validation_texts: 64, validation_tokens: 48}",
        # so that every teacher passes as possible
        f"distill={{features: none, horizon: {HORIZON}, top_logprobs: {TOPS[0]}}}",
    ]
    if trial.drafter == "redrafter":
        overrides.append("drafter={beam_width: 16, beam_length: 5, tree_nodes: 40}")
    with initialize_config_module("outrider.conf", version_base="1.3"):
        return to_run_config(compose("config", overrides=overrides))


def store(args: argparse.Namespace, target: HFTarget) -> dict[str, dict[str, float]]:
    """Label the texts once, and write the shards with every choice of states.

    Returns the states' mean relative errors by type and kind, over the first shard.
    """
    config = recipe(args, Trial(drafter="redrafter", shards="none"))
    plain = replace(config.distill, top_logprobs=None)
    manifest = distill(plain, config.data, target, args.folder / "none", Accelerator(cpu=True))
    errors: dict[str, dict[str, float]] = {}
    entries: dict[str, list[Any]] = {name: [] for name in STORED}
    pending = [name for name in STORED if not (args.folder / name / MANIFEST_FILE).exists()]
    for entry in manifest.shards:
        examples = read_shard(args.folder / "none", entry)
        if errors and not pending:
            break
        features = [read_states(target, example) for example in examples]
        errors = errors or state_errors(features)
        for name in pending:
            make = partial(stored_example, STORED[name])
            stored = [
                make(example.example, example.continuations, with_top(each, STORED[name].top_logprobs), 0)
                for example, each in zip(examples, features, strict=True)
            ]
            entries[name].append(write_shard(args.folder / name, entry.index, stored))
    for name in pending:
        label_store(args.folder / name).save(described(manifest, STORED[name], entries[name]))
    return errors


def described(manifest: Manifest, config: DistillConfig, entries: list[Any]) -> Manifest:
    return replace(
        manifest,
        shards=entries,
        features=config.features,
        feature_layers=config.feature_layers,
        features_dtype=config.features_dtype,
        top_logprobs=config.top_logprobs,
    )


def read_states(target: HFTarget, example: DistilledExample) -> TextFeatures:
    """All that any of the shards hold of one text."""
    text = example.example.input_ids[None]
    everywhere = torch.ones_like(text, dtype=torch.bool)
    # and what follows it, where a label may get to
    answer = example.example.wanted[None].cummax(1).values
    # A horizon of 1 branches nowhere: one pass.
    _, features, _ = label_continuations(
        target, text, everywhere, answer, horizon=1, feature_layers=tuple(LAYERS), top_k=max(TOPS)
    )
    return features


def with_top(features: TextFeatures, k: int | None) -> TextFeatures:
    if k is None or features.top_tokens is None or features.top_log_probs is None:
        return replace(features, top_tokens=None, top_log_probs=None)
    return replace(features, top_tokens=features.top_tokens[..., :k], top_log_probs=features.top_log_probs[..., :k])


def state_errors(features: Sequence[TextFeatures]) -> dict[str, dict[str, float]]:
    """Mean over tokens of |stored - state| / |state|, by type."""
    states = {"last_hidden": torch.cat([each.hidden_states[0] for each in features])}
    states |= {f"layer {layer}": torch.cat([each.layers[layer][0] for each in features]) for layer in LAYERS}
    return {
        dtype: {
            name: float(((encode_states(each, dtype).decode().float() - each).norm(dim=1) / each.norm(dim=1)).mean())
            for name, each in states.items()
        }
        for dtype in STATE_DTYPES
    }


def run_trial(args: argparse.Namespace, target: HFTarget, trial: Trial, seed: int) -> dict[str, Any]:
    """Train, unless it was done, and read what decoding accepts."""
    config = recipe(args, trial, seed)
    folder = args.folder / "trials" / f"{trial.drafter}-{trial.loss}-{trial.teacher}-{trial.shards}-{seed}"
    shards = args.folder / trial.shards
    accelerator = Accelerator(cpu=True)
    train(config.train, config.drafter, target, shards, folder / "train", folder / "drafter", accelerator)
    summary = read_json(folder / "train" / "summary.json")
    found = {
        **asdict(trial),
        "seed": seed,
        "tokens_per_step": summary["validation"]["validation_tokens_per_step"],
        "validation_loss": summary["validation"]["validation_loss"],
        "seconds": summary["seconds"],
    }
    print(found, flush=True)
    return found


def time_steps(args: argparse.Namespace, target: HFTarget) -> dict[str, float]:
    """Time EAGLE-3 steps on stored states and on recomputed ones, in turns."""
    config = recipe(args, Trial(drafter="eagle3", shards="none"))
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter(config.drafter), target).train()
    reads = target_reads(drafter, Objective())
    streams = {}
    for name in ("none", *STATE_DTYPES):
        folder = args.folder / name
        streams[name] = BatchStream(folder, label_store(folder).load(), config.train, rank=0, num_processes=1, reads=reads)
        streams[name].batches(0)  # the shards are in memory then
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    for step in range(TIMED_STEPS):
        for name, stream in streams.items():
            started = time.perf_counter()
            for batch in stream.batches(step):
                drafter.loss(with_hidden_states(batch, target, reads), Objective()).sums.sum().backward()
            seconds[name].append(time.perf_counter() - started)
            drafter.zero_grad()
    return {name: median(values[1:]) for name, values in seconds.items()}


def bytes_table() -> str:
    """Markdown: bytes per token of text for each choice, with labels of HORIZON tokens, at two
    widths and in 16 and 8 bits.
    """
    widths = {"256 wide (the demo's)": 256, "4,096 wide": 4096}
    dtypes = {"bfloat16": "bfloat16", "8 bits": "int8"}
    choices: dict[str, dict[str, Any]] = {
        "last hidden states": {"features": "last_hidden"},
        "inputs of three layers": {"feature_layers": LAYERS},
        "both": {"features": "last_hidden", "feature_layers": LAYERS},
    }
    heads = [f"{dtype}, {width}" for width in widths for dtype in dtypes]
    lines = [f"| stored beside the tokens | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]

    def add(name: str, cells: list[float]) -> None:
        lines.append(f"| {name} | {' | '.join(f'{cell:,.0f}' for cell in cells)} |")

    add("labels alone", [bytes_per_token(DistillConfig(horizon=HORIZON), width) for width in widths.values() for _ in dtypes])
    for name, options in choices.items():
        configs = [DistillConfig(horizon=HORIZON, features_dtype=dtype, **options) for dtype in dtypes.values()]
        add(name, [bytes_per_token(config, width) for width in widths.values() for config in configs])
    for k in TOPS:
        config = DistillConfig(horizon=HORIZON, top_logprobs=k)
        add(f"the {k} likeliest tokens", [bytes_per_token(config, width) for width in widths.values() for _ in dtypes])
    return "\n".join(lines)


def results_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: tokens per step of every trial, seed by seed."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        key = result["drafter"], result["loss"], result["shards"]
        cells.setdefault(key, []).append(f"{result['tokens_per_step']:.3f}")
    lines = ["| drafter | loss | stored | tokens per step, by seed |", "|---|---|---|---:|"]
    return "\n".join([*lines, *(f"| {' | '.join(key)} | {', '.join(values)} |" for key, values in cells.items())])


if __name__ == "__main__":
    main()
