"""Study of how fast a drafter recovers after its target has been fine-tuned.

    python scripts/adapt_study.py --output benchmarks/adapt_study.json \\
        --plot benchmarks/adapt_study.png

The demo's target writes Python. It is fine-tuned on C++, the headers that come with PyTorch. A
ReDrafter of the original target is then adapted to the fine-tuned target with `conf=adapt_demo`.
Two more drafters start from fresh weights: one has many steps, whose result is the level to reach,
the other as few as the adapted one. A last one is adapted at their peak learning rate. For each
seed, labels and held-out prompts are the same. The figure is tokens per step. After a kill, the
same command resumes.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_module
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from outrider.cli.config import DEMO_TARGET, register
from outrider.data.chat import encode_conversations
from outrider.data.config import DataConfig
from outrider.data.files import read_json, write_json
from outrider.data.shards import label_store
from outrider.data.sources import load_conversations
from outrider.eval.measure.environment import describe_environment
from outrider.models.drafters import load_drafter
from outrider.models.drafters.objective import Objective
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target
from outrider.train.records import METRICS_FILE, read_records
from outrider.train.validation import Validator, hold_out

TRAIN = Path(__file__).parents[1] / "train.py"
HEADERS = ("c10", "torch/csrc", "ATen/core", "ATen/native")
"""Folders of torch/include with hand-written code; much of the rest is generated."""
HEADER_BYTES = (1_000, 60_000)
FINE_TUNING_SHARE = 0.5
SETTING = {"beam_width": 8, "beam_length": 4, "tree_nodes": 16}
SHARES = (0.9, 0.95, 1.0)
"""Shares of a full training's level for which the steps are reported."""
UNADAPTED = "unadapted"


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    texts = split_headers(args.folder / "texts")
    fine_tuned = fine_tune(args.folder / "target", texts["fine_tuning"], texts["drafting"], args)
    drafter = args.drafter or train_original(args.folder / "original", args)
    run = args.folder / "adapted"
    arms = recipes(args, drafter)
    train_all(run, args.folder / "target", texts["drafting"], arms, args)
    figures = [figures_of(run, seed, list(arms)) for seed in args.seeds]
    for figures_of_seed in figures:
        figures_of_seed[UNADAPTED] = unadapted(run, drafter, args.folder / "target", figures_of_seed["seed"], args)
    record = {
        "options": {key: value for key, value in vars(args).items() if key not in ("folder", "output", "plot", "drafter")},
        "arms": arms_for_the_record(arms),
        "fine_tuning": fine_tuned,
        "original_tokens_per_step": None if args.drafter else original_level(args.folder / "original"),
        "figures": figures,
        "environment": asdict(describe_environment(torch.device("cpu"))),
    }
    print(table(figures))
    if args.output is not None:
        write_json(args.output, record)
    if args.plot is not None:
        plot(record, args.plot)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("outputs/adapt_study"), help="targets and runs go there")
    parser.add_argument("--drafter", type=Path, default=None, help="a ReDrafter of the demo's target, in place of a new one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--texts", type=int, default=200, help="texts that a drafter learns from, of either kind")
    parser.add_argument("--steps", type=int, default=200, help="steps of a full training")
    parser.add_argument("--positions", type=int, default=512, help="maximum number of labelled positions in a step")
    parser.add_argument("--fine-tuning-steps", type=int, default=80)
    parser.add_argument("--fine-tuning-rate", type=float, default=5e-4)
    parser.add_argument("--validation-texts", type=int, default=24)
    parser.add_argument("--validation-tokens", type=int, default=48)
    parser.add_argument("--validate-every", type=int, default=20, help="steps between measurements in the full training")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None, help="write a record of the figures")
    parser.add_argument("--plot", type=Path, default=None, help="write the curves as an image")
    return parser.parse_args()


# --- the texts and the fine-tuned target


def split_headers(folder: Path) -> dict[str, Path]:
    """Copy C++ headers to two folders: one for the target, one for the drafters.

    The hash of a file's name decides its folder.
    """
    folders = {name: folder / name for name in ("fine_tuning", "drafting")}
    root = Path(torch.__file__).parent / "include"
    for part in HEADERS:
        for path in sorted((root / part).rglob("*.h")):
            if not HEADER_BYTES[0] <= path.stat().st_size <= HEADER_BYTES[1]:
                continue
            name = path.relative_to(root).as_posix()
            point = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
            copy = folders["fine_tuning" if point < FINE_TUNING_SHARE else "drafting"] / name
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    if not all(folder_of_part.is_dir() for folder_of_part in folders.values()):
        raise ValueError(
            f"there are no C++ headers below {root}, so there is no text to fine-tune on; install torch's own wheel"
        )
    return folders


def fine_tune(directory: Path, texts: Path, others: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune the demo's target on `texts`; return its losses and the seconds.

    The record has the loss on `others` before and after, in nats per token.
    """
    report = directory / "fine_tuning.json"
    if report.exists():
        return dict(read_json(report))
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    model = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    rows, held_out = (token_rows(tokenizer, path, args) for path in (texts, others))
    held_out = held_out[:64]
    before = token_loss(model.eval(), held_out)
    started = time.perf_counter()
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=args.fine_tuning_rate, weight_decay=0.0)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=5, num_training_steps=args.fine_tuning_steps)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    for step in tqdm(range(args.fine_tuning_steps), desc="fine-tune"):
        batch = rows[order[torch.arange(step * 8, step * 8 + 8) % len(rows)]]
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - started
    after = token_loss(model.eval(), held_out)
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)  # the original is saved in bfloat16 too
    tokenizer.save_pretrained(partial)
    steps = {"steps": args.fine_tuning_steps, "tokens": args.fine_tuning_steps * 8 * rows.shape[1], "seconds": seconds}
    write_json(partial / report.name, {**steps, "loss_before": before, "loss_after": after})
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(partial, directory)
    return dict(read_json(report))


def token_rows(tokenizer: Any, path: Path, args: argparse.Namespace) -> torch.Tensor:
    """Tokenize texts as for the drafters' data, packed end to end into rows [row, 256]."""
    data = DataConfig(source="text", path=str(path), max_length=4096, prompt_chars_min=60, prompt_chars_max=300)
    conversations, _ = load_conversations(data)
    examples, _ = encode_conversations(conversations, tokenizer, data.max_length)
    tokens = torch.cat([example.input_ids for example in examples]).long()
    return tokens[: len(tokens) // 256 * 256].view(-1, 256)


@torch.no_grad()
def token_loss(model: Any, rows: torch.Tensor) -> float:
    losses = [
        F.cross_entropy(model(input_ids=chunk).logits[:, :-1].flatten(0, 1), chunk[:, 1:].flatten()) for chunk in rows.split(8)
    ]
    return torch.stack(losses).mean().item()


# --- training


def train_original(folder: Path, args: argparse.Namespace) -> Path:
    """Train a drafter of the original target on the demo's texts; return its folder."""
    train_py(folder, args, "data.seed=0", "train.seed=0", f"train.validation_texts={args.validation_texts}")
    return folder / "drafter"


def original_level(folder: Path) -> float:
    """Read the original drafter's tokens per step on held-out prompts of its target."""
    return float(read_json(folder / "train" / "summary.json")["validation"]["validation_tokens_per_step"])


def recipes(args: argparse.Namespace, drafter: Path) -> dict[str, dict[str, Any]]:
    """Return the changes of each arm to the demo's recipe."""
    register()
    with initialize_config_module("outrider.conf", version_base="1.3"):
        recipe = compose("config", overrides=["conf=adapt_demo"]).train
    schedule = {name: recipe[name] for name in ("steps", "learning_rate", "warmup_steps", "validate_every")}
    short = {name: schedule[name] for name in ("steps", "validate_every")}
    start = {"start_from": drafter}
    return {
        "warm": {"drafter": start, "train": schedule},
        "warm, full rate": {"drafter": start, "train": short},
        "cold, as short": {"train": short},
        "cold": {"train": {"steps": args.steps, "validate_every": args.validate_every}},
    }


def arms_for_the_record(arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: arm["train"] for name, arm in arms.items()}


def train_all(run: Path, target: Path, texts: Path, arms: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    """Distil the fine-tuned target once, and train all drafters on its labels."""
    variants = {
        folder_name(name, seed): {**arm, "train": {**arm["train"], "seed": seed}}
        for seed in args.seeds
        for name, arm in arms.items()
    }
    train_py(
        run,
        args,
        f"target.name_or_path={as_override(target)}",
        "data.source=text",
        f"data.path={as_override(texts)}",
        f"+variants={as_override(variants)}",
        f"train.validation_texts={args.validation_texts}",
    )


def train_py(folder: Path, args: argparse.Namespace, *overrides: str) -> None:
    common = [
        "conf=demo",
        "stages=[distill,train]",
        f"output_dir={as_override(folder)}",
        f"num_threads={args.threads}",
        f"data.limit={args.texts}",
        f"train.steps={args.steps}",
        f"train.max_positions={args.positions}",
        f"train.validation_tokens={args.validation_tokens}",
        "train.log_every=1",  # each measurement needs the number of tokens read so far
        "train.checkpoint_every=50",
        *(f"drafter.{name}={value}" for name, value in SETTING.items()),
    ]
    subprocess.run([sys.executable, str(TRAIN), *common, *overrides], check=True)


def folder_name(arm: str, seed: int) -> str:
    return f"{arm.replace(', ', '_').replace(' ', '_')}_{seed}"


def as_override(value: Any) -> str:
    """Format a dictionary, a path or a plain value for Hydra's command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_override(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, Path):
        return "'" + str(value.resolve()).replace("'", r"\'") + "'"
    return str(value)


# --- the figures


def figures_of(run: Path, seed: int, arms: Sequence[str]) -> dict[str, Any]:
    """Return the curve of each arm, and the points where it reached shares of the full level."""
    curves = {arm: curve(run / "variants" / folder_name(arm, seed) / "train" / METRICS_FILE) for arm in arms}
    level = curves["cold"][-1]["tokens_per_step"]
    reached = {
        arm: {
            f"{share:g}": next((point for point in curves[arm] if point["tokens_per_step"] >= share * level), None)
            for share in SHARES
        }
        for arm in arms
    }
    return {"seed": seed, "level": level, "curves": curves, "reached": reached}


def curve(path: Path) -> list[dict[str, Any]]:
    """Read tokens per step at each measurement, and the tokens and positions trained by then."""
    records = read_records(path)
    seen = {record["step"]: record for record in records if "tokens_seen" in record}
    return [
        {
            "step": record["step"],
            "tokens_per_step": record["validation_tokens_per_step"],
            "text_tokens": seen[record["step"]]["tokens_seen"],
            "positions": seen[record["step"]]["positions_seen"],
        }
        for record in records
        if "validation_tokens_per_step" in record
    ]


def unadapted(run: Path, drafter: Path, target_dir: Path, seed: int, args: argparse.Namespace) -> float:
    """Measure tokens per step of the original drafter with the fine-tuned target.

    The prompts are those of the training runs with this seed.
    """
    target = load_target(TargetConfig(name_or_path=str(target_dir), dtype="float32"), torch.device("cpu"))
    manifest = label_store(run / "distill").load()
    room = target.context_length - args.validation_tokens
    held_out = hold_out(run / "distill", manifest, args.validation_texts, seed=seed, max_prompt_tokens=room)
    validator = Validator(
        held_out,
        target=target,
        objective=Objective(),
        horizon=manifest.horizon,
        max_new_tokens=args.validation_tokens,
        batch_size=16,
        accelerator=Accelerator(cpu=True),
    )
    measured = validator(load_drafter(drafter, target, **SETTING)).tokens_per_step
    assert measured is not None
    return measured


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Make a Markdown table of the steps (and tokens of text) to reach shares of the level."""
    lines = [
        "| start | seed | at once | steps (tokens) to 90 % | to 95 % | to 100 % | at the end, tokens per step |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for figures_of_seed in figures:
        for arm, points in figures_of_seed["reached"].items():
            steps = [
                f"{point['step']} ({point['text_tokens'] / 1000:.0f}k)" if point else "not reached" for point in points.values()
            ]
            at_once = f"{figures_of_seed[UNADAPTED]:.2f}" if arm.startswith("warm") else "-"
            last = figures_of_seed["curves"][arm][-1]
            end = f"{last['tokens_per_step']:.2f} after {last['step']}"
            lines.append(f"| {arm} | {figures_of_seed['seed']} | {at_once} | {' | '.join(steps)} | {end} |")
    return "\n".join(lines)


COLORS = {"warm": "#c1440e", "warm, full rate": "#e8a33d", "cold, as short": "#7a9cc6", "cold": "#1f4e8c"}
LABELS = {
    "warm": "warm: the original target's drafter, conf=adapt_demo",
    "warm, full rate": "warm, at the learning rate of the cold ones",
    "cold, as short": "cold: fresh weights, as few steps",
    "cold": "cold: fresh weights, full training",
}


def plot(record: dict[str, Any], path: Path) -> None:
    """Plot tokens per step over training steps.

    Each seed has a thin line, their mean a thick one, and levels are horizontal lines.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figures = record["figures"]
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    start = mean(figures_of_seed[UNADAPTED] for figures_of_seed in figures)
    for arm, color in COLORS.items():
        curves = [figures_of_seed["curves"][arm] for figures_of_seed in figures]
        steps = [point["step"] for point in curves[0]]
        values = [[point["tokens_per_step"] for point in curve] for curve in curves]
        if arm.startswith("warm"):  # its first point is the unadapted drafter
            steps, values = (
                [0, *steps],
                [[figures_of_seed[UNADAPTED], *line] for figures_of_seed, line in zip(figures, values, strict=True)],
            )
        for line in values:
            axes.plot(steps, line, color=color, linewidth=0.7, alpha=0.5)
        axes.plot(steps, [mean(column) for column in zip(*values, strict=True)], color=color, linewidth=2.2, label=LABELS[arm])
    level = mean(figures_of_seed["level"] for figures_of_seed in figures)
    for value, text in ((level, "full training from fresh weights"), (start, "the unadapted drafter")):
        axes.axhline(value, color="0.4", linewidth=0.9, linestyle="--")
        axes.annotate(
            f"{text}: {value:.2f}",
            (1, value),
            (-2, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="0.25",
        )
    axes.set_xlabel(f"optimizer steps of {record['options']['positions']} labelled positions")
    axes.set_ylabel("tokens per step, decoding held-out prompts")
    axes.set_title("Adapting a ReDrafter after its target was fine-tuned from Python to C++", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center right", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
