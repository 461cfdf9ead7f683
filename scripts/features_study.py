"""Study of stored states of the target: bytes, errors, tokens per step, and step time.

    python scripts/features_study.py --folder outputs/features_study --output benchmarks/features_study.json

The script labels texts once and stores their states in every dtype. It trains the demo's ReDrafter
and EAGLE-3 on each of these and without stored states, for the same steps. It also trains a
ReDrafter with KL, on the target's whole distribution and on its likeliest tokens. Accepted tokens
are measured by decoding held-out prompts. This takes about twenty minutes of one core; finished
parts are skipped.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
from outrider.distill.label.features import TextFeatures, bytes_per_token, start_storing
from outrider.distill.label.run import distill
from outrider.eval.measure.environment import describe_environment
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters.objective import Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.train.batches import BatchStream, target_reads, with_hidden_states
from outrider.train.run import train

LAYERS = [2, 4, 7]
TOPS = (8, 64)
HORIZON = 5
STORED = {
    **{dtype: DistillConfig(features="last_hidden", feature_layers=LAYERS, features_dtype=dtype) for dtype in STATE_DTYPES},
    **{f"top_{k}": DistillConfig(features="last_hidden", top_logprobs=k) for k in TOPS},
}
"""Contents of shards, by the name of their folder."""
TIMED_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training run: its drafter, shards, loss and teacher."""

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
    """Return the demo's configuration with this trial's drafter."""
    overrides = [
        "num_threads=1",
        f"seed={seed}",
        f"data.limit={args.texts}",
        f"drafter={trial.drafter}_demo",
        f"train={{steps: {args.steps}, batch_size: 2, max_positions: {args.positions}, warmup_steps: {args.steps // 10}}}",
        f"train={{loss: {trial.loss}, teacher: {trial.teacher}, num_threads: 1, checkpoint_every: 1000}}",
        "train={validation_texts: 64, validation_tokens: 48}",
        # labels with which every teacher is valid
        f"distill={{features: none, horizon: {HORIZON}, top_logprobs: {TOPS[0]}}}",
    ]
    if trial.drafter == "redrafter":
        overrides.append("drafter={beam_width: 16, beam_length: 5, tree_nodes: 40}")
    with initialize_config_module("outrider.conf", version_base="1.3"):
        return to_run_config(compose("config", overrides=overrides))


def store(args: argparse.Namespace, target: HFTarget) -> dict[str, dict[str, float]]:
    """Label the texts if necessary, and write shards with every choice of states.

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
            stored = []
            for example, states in zip(examples, features, strict=True):
                of_text = with_top(states, STORED[name].top_logprobs)
                stored += start_storing(STORED[name], [example.example], example.continuations[None], of_text)()
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
    """Compute all states of one text that any of the shards has."""
    text = example.example.input_ids[None]
    everywhere = torch.ones_like(text, dtype=torch.bool)
    # Positions after the answer are included, since labels may reach them.
    answer = example.example.wanted[None].cummax(1).values
    # With a horizon of 1 there are no branches: one pass.
    _, features, _ = label_continuations(
        target, text, everywhere, answer, horizon=1, feature_layers=tuple(LAYERS), top_k=max(TOPS)
    )
    return features


def with_top(features: TextFeatures, k: int | None) -> TextFeatures:
    if k is None or features.top_tokens is None or features.top_log_probs is None:
        return replace(features, top_tokens=None, top_log_probs=None)
    return replace(features, top_tokens=features.top_tokens[..., :k], top_log_probs=features.top_log_probs[..., :k])


def state_errors(features: Sequence[TextFeatures]) -> dict[str, dict[str, float]]:
    """Compute the mean over tokens of |stored - state| / |state|, by dtype."""
    states = {"last_hidden": torch.cat([of_text.hidden_states[0] for of_text in features])}
    states |= {f"layer {layer}": torch.cat([of_text.layers[layer][0] for of_text in features]) for layer in LAYERS}
    return {
        dtype: {
            name: float(((encode_states(state, dtype).decode().float() - state).norm(dim=1) / state.norm(dim=1)).mean())
            for name, state in states.items()
        }
        for dtype in STATE_DTYPES
    }


def run_trial(args: argparse.Namespace, target: HFTarget, trial: Trial, seed: int) -> dict[str, Any]:
    """Train if necessary, and read the validation's tokens per step."""
    config = recipe(args, trial, seed)
    folder = args.folder / "trials" / f"{trial.drafter}-{trial.loss}-{trial.teacher}-{trial.shards}-{seed}"
    shards = args.folder / trial.shards
    accelerator = Accelerator(cpu=True)
    train(config.train, parse_drafter(config.drafter), target, shards, folder / "train", folder / "drafter", accelerator)
    summary = read_json(folder / "train" / "summary.json")
    result = {
        **asdict(trial),
        "seed": seed,
        "tokens_per_step": summary["validation"]["validation_tokens_per_step"],
        "validation_loss": summary["validation"]["validation_loss"],
        "seconds": summary["seconds"],
    }
    print(result, flush=True)
    return result


def time_steps(args: argparse.Namespace, target: HFTarget) -> dict[str, float]:
    """Measure median seconds of an EAGLE-3 step on stored and on recomputed states.

    They take turns on the same texts.
    """
    config = recipe(args, Trial(drafter="eagle3", shards="none"))
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter(config.drafter), target).train()
    reads = target_reads(drafter, Objective())
    streams = {}
    for name in ("none", *STATE_DTYPES):
        folder = args.folder / name
        streams[name] = BatchStream(folder, label_store(folder).load(), config.train, rank=0, num_processes=1, reads=reads)
        streams[name].batches(0)  # loads the shards into memory
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
    """Make a Markdown table of bytes per token of text for each choice.

    Labels have HORIZON tokens. There are two widths, and 16 and 8 bits.
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
    """Make a Markdown table of tokens per step of every trial, by seed."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        key = result["drafter"], result["loss"], result["shards"]
        cells.setdefault(key, []).append(f"{result['tokens_per_step']:.3f}")
    lines = ["| drafter | loss | stored | tokens per step, by seed |", "|---|---|---|---:|"]
    return "\n".join([*lines, *(f"| {' | '.join(key)} | {', '.join(values)} |" for key, values in cells.items())])


if __name__ == "__main__":
    main()
