"""What studies of small trainings share: train a drafter on stored labels, and count its steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from outrider.cli.config import RunConfig
from outrider.data.chat import encode_prompt
from outrider.data.suites import Prompt
from outrider.data.types import Turn
from outrider.distill.label.run import distill
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.run import load_suites
from outrider.models.decoding import GreedyAcceptance, RowSeeds, Sampling, SpeculativeSampling, generate
from outrider.models.llm.hf_target import HFTarget
from outrider.train.run import train

BATCH_SIZE = 6


def trained(config: RunConfig, target: HFTarget, shards: Path, folder: Path) -> Path:
    """Label the texts and train the drafter, where that isn't done; return the drafter's folder."""
    accelerator = Accelerator(cpu=True)
    distill(config.distill, config.data, target, shards, accelerator)
    spec = config.drafter_runs()[0].drafter
    train(config.train, spec, target, shards, folder / "train", folder / "drafter", accelerator)
    return folder / "drafter"


def held_out_prompts(target: HFTarget, *, limit: int, new_tokens: int, others: bool = False) -> list[torch.Tensor]:
    """Return the tokens of held-out prompts that leave room for the answers, shortest first.

    `limit` samples them. With `others`, return as many that this sample leaves out. Raises ValueError
    if it leaves out none.
    """
    prompts = sampled(limit, seed=0)
    if others:
        prompts = [prompt for prompt in sampled(2 * limit, seed=1) if prompt not in prompts][:limit]
    if not prompts:
        raise ValueError(f"--prompts is {limit}, which is every prompt, so no other is left to choose rates with; give fewer")
    turns = [Turn(role="user", content=prompt.turns[0]) for prompt in prompts]
    room = target.context_length - new_tokens
    prompts = [encode_prompt([turn], target.tokenizer)[0][-room:] for turn in turns]
    return sorted(prompts, key=len)


def sampled(limit: int, seed: int) -> list[Prompt]:
    """Return so many prompts of the standard library's suite."""
    (suite,) = load_suites(EvalConfig(suites=[SuiteConfig(name="stdlib", limit=limit)], seed=seed))
    return list(suite.prompts)


def decode(
    target: HFTarget, drafter: Any, prompts: Sequence[torch.Tensor], *, temperature: float, new_tokens: int
) -> list[list[int]]:
    """Answer each prompt; return the tokens and steps of its answer, without the prefill.

    Temperature 0 decodes greedily. Above 0, row seeds make an answer independent of its batch.
    """
    sums = [[0, 0] for _ in prompts]
    rule = SpeculativeSampling(sampling=Sampling(temperature=temperature)) if temperature else GreedyAcceptance()
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = prompts[start : start + BATCH_SIZE]
        seeds = RowSeeds(range(start, start + len(batch)))
        for step in generate(
            target, drafter, rule, batch, max_new_tokens=new_tokens, stop_ids=target.stop_ids, generator=seeds
        ):
            for row, tokens in zip(step.rows, step.tokens, strict=True):
                if not step.is_prefill:
                    sums[start + row][0] += len(tokens)
                    sums[start + row][1] += 1
    return sums
