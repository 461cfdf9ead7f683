"""Tokens per step by the number of labels, for several seeds: trainings on parts of a recipe's finished labels.

    python scripts/bench/label_curve.py RECIPE --kinds redrafter,eagle3 --parts 0.08,0.33,1 --seeds 0,1 --output FILE

Each training has as many epochs as the recipe. The parts are the same for all kinds; a seed decides the first weights and the
order of the texts. All drafters answer the same prompts of the recipe's suites, greedily, in the first of their settings.
Trained drafters in --work are kept, so that an interrupted run resumes.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from report import finish

from outrider.cli.compose import load_recipe
from outrider.cli.config import RunConfig
from outrider.data.chat import use_chat_template
from outrider.data.shards import label_store, read_shard, write_shard
from outrider.eval.forecast.measure import Steps, decode, draw_prompts
from outrider.eval.results.stats import bootstrap, ratio
from outrider.eval.run import load_suites
from outrider.models.decoding import GreedyAcceptance
from outrider.models.drafters import load_drafter
from outrider.models.llm.loading import load_target
from outrider.train.config import TrainConfig
from outrider.train.processes import make_accelerator
from outrider.train.run import train

TOGETHER = 8
"""Prompts of a batch, whose steps don't depend on each other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe with variants, whose labels are finished")
    parser.add_argument("--kinds", required=True, help="names of variants, separated by commas")
    parser.add_argument("--parts", default="0.08,0.33,1", help="parts of the texts, separated by commas")
    parser.add_argument("--seeds", default="0,1", help="separated by commas")
    parser.add_argument("--prompts", type=int, default=48, help="prompts to decode, in turns from all suites")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--work", type=Path, default=Path("outputs/label_curve"), help="folder of the trainings")
    parser.add_argument("--output", type=Path, required=True, help="the record, in JSON")
    args = parser.parse_args()
    config = load_recipe(args.recipe)
    accelerator = make_accelerator(config.mixed_precision)
    target = load_target(config.target, accelerator.device)
    use_chat_template(target.tokenizer, config.data.chat_template, config.data.template_options)
    longest = target.context_length - args.max_new_tokens
    prompts = draw_prompts(load_suites(config.eval), target, longest, args.prompts, seed=config.seed)
    parts, seeds = (tuple(map(kind, text.split(","))) for kind, text in ((float, args.parts), (int, args.seeds)))
    runs = {run.drafter_dir.parent.name: run for run in config.drafter_runs()}
    rows = []
    for part in parts:
        shards, labels = shards_of(config, part, args.work)
        for kind in args.kinds.split(","):
            for seed in seeds:
                run, folder = runs[kind], args.work / f"{kind}_{labels}_{seed}"
                options = training_of(run.train, part, seed)
                train(options, run.drafter, target, shards, folder / "train", folder / "drafter", accelerator)
                drafter = load_drafter(folder / "drafter", target, **run.settings[0])
                counts = decode(
                    *(target, drafter, GreedyAcceptance(), prompts), max_new_tokens=args.max_new_tokens, batch_size=TOGETHER
                )
                rows.append({"drafter": kind, "labels": labels, "seed": seed, "steps": options.steps, **summary(counts)})
                print(json.dumps(rows[-1]), flush=True)
    options = {"recipe": args.recipe, "prompts": len(prompts), "max_new_tokens": args.max_new_tokens}
    options["settings"] = {kind: runs[kind].settings[0] for kind in args.kinds.split(",")}
    finish(args.output, rows, options)


def shards_of(config: RunConfig, part: float, work: Path) -> tuple[Path, int]:
    """Write shards of a part of the texts, in random order; return their folder and the number of labels."""
    labels = Path(config.output_dir) / "distill"
    manifest = label_store(labels).load()
    folder = work / f"part_{part:g}"
    if not label_store(folder).is_begun:
        texts = [text for entry in manifest.shards for text in read_shard(labels, entry)]
        texts = Random(config.seed).sample(texts, round(part * len(texts)))
        size = config.distill.shard_examples
        starts = range(0, len(texts), size)
        folder.mkdir(parents=True, exist_ok=True)
        entries = [write_shard(folder, index, texts[start : start + size]) for index, start in enumerate(starts)]
        label_store(folder).save(replace(manifest, shards=entries))
    return folder, label_store(folder).load().num_labels


def training_of(config: TrainConfig, part: float, seed: int) -> TrainConfig:
    """Return the options of a training on a part of the texts, for as many epochs."""
    steps = max(2, round(part * config.steps))
    warmup = min(round(part * config.warmup_steps), steps - 1)
    return replace(config, steps=steps, warmup_steps=warmup, seed=seed, validation_texts=0, validate_every=None, patience=None)


def summary(counts: list[Steps]) -> dict[str, Any]:
    """Return tokens per step, with the 95 % interval over prompts."""
    value, interval = bootstrap(np.array([(one.tokens, one.steps) for one in counts]), ratio, seed=0)
    return {"tokens per step": round(value, 3), "95 %": None if interval is None else [round(end, 3) for end in interval]}


if __name__ == "__main__":
    main()
