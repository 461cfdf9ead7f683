"""Check of training's estimate of tokens per step, by decoding other prompts.

    python scripts/check_estimates.py outputs/compare_demo --output benchmarks/compare_demo/estimates.json

The prompts come from the run's data: conversations that `data.limit` excluded. Training measured
its figure on the texts that `train.validation_texts` held out. The two figures differ only by the
sampled prompts, and the interval accounts for these.
"""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from outrider.data.chat import use_chat_template
from outrider.data.config import DataConfig
from outrider.data.files import read_json, write_json
from outrider.data.shards import label_store
from outrider.distill.label.run import load_examples
from outrider.eval.measure.environment import describe_environment
from outrider.eval.results.stats import bootstrap, ratio
from outrider.models.decoding import GreedyAcceptance, RowSeeds, generate
from outrider.models.decoding.protocols import Drafter
from outrider.models.drafters import load_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

BATCH_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="finished run with train.validation_texts, with or without variants")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--output", type=Path, default=None, help="write a record of the figures")
    args = parser.parse_args()
    config: Any = OmegaConf.to_container(OmegaConf.load(args.folder / "config.yaml"))
    target = load_target(TargetConfig(**config["target"]), torch.device("cpu"))
    use_chat_template(target.tokenizer, config["data"]["chat_template"])
    prompts = unused_prompts(DataConfig(**config["data"]), target, args.folder / "distill", args.prompts)
    figures = []
    for path in tqdm(sorted(args.folder.glob("**/train/summary.json")), unit="drafter"):
        summary, drafter = read_json(path), load_drafter(path.parents[1] / "drafter", target)
        counts = decode(target, cast("Drafter[Any, Any]", drafter), prompts, summary["run"]["train"]["validation_tokens"])
        training = summary["validation"]["validation_tokens_per_step"]
        decoding, interval = bootstrap(counts, ratio, seed=0)
        figures.append({"drafter": path.parents[1].name, "training": training, "decoding": decoding, "interval": interval})
    print(f"| drafter | measured in training | decoding {len(prompts)} other prompts [95 %] | ratio |\n|---|---:|---:|---:|")
    for figure in figures:
        low, high = figure["interval"]
        print(
            f"| {figure['drafter']} | {figure['training']:.2f} | {figure['decoding']:.2f} [{low:.2f}, {high:.2f}] "
            f"| {figure['decoding'] / figure['training']:.3f} |"
        )
    if args.output is not None:
        environment = asdict(describe_environment(torch.device("cpu")))
        write_json(args.output, {"figures": figures, "num_prompts": len(prompts), "environment": environment})


def unused_prompts(data: DataConfig, target: HFTarget, shards_dir: Path, count: int) -> list[torch.Tensor]:
    """Load prompts of conversations that were not distilled.

    Raises ValueError if there are too few.
    """
    used = {id for entry in label_store(shards_dir).load().shards for id in entry.ids}
    examples, _ = load_examples(replace(data, limit=None), target.tokenizer)
    examples = [example for example in examples if example.id not in used]
    Random(data.seed).shuffle(examples)
    starts = [(example, int(example.wanted.nonzero()[0])) for example in examples if example.wanted.any()]
    if len(starts) < count:
        raise ValueError(f"only {len(starts)} conversations were left out by data.limit, {data.limit}; lower --prompts")
    return [example.input_ids[: start + 1].long().to(target.device) for example, start in starts[:count]]


def decode(target: HFTarget, drafter: Drafter[Any, Any], prompts: list[torch.Tensor], max_new_tokens: int) -> np.ndarray:
    """Count tokens and verify steps of each prompt: [prompt, 2], without the prefill."""
    counts = np.zeros((len(prompts), 2), dtype=np.int64)
    for start in range(0, len(prompts), BATCH_SIZE):
        rows = range(start, min(start + BATCH_SIZE, len(prompts)))
        steps = generate(
            target,
            drafter,
            GreedyAcceptance(),
            [prompts[row] for row in rows],
            max_new_tokens=max_new_tokens,
            stop_ids=target.stop_ids,
            generator=RowSeeds(rows),
        )
        for step in steps:
            for row, tokens in zip(step.rows, step.tokens, strict=True):
                counts[rows[row]] += (0, 0) if step.is_prefill else (len(tokens), 1)
    return counts


if __name__ == "__main__":
    main()
