"""Script of the processes of test_launched_stages.py: the head, and the stages of a target.

An error ends the processes.

python launched_stages.py OPTIONS PROMPTS NUM_TOKENS DRAFTER OUTPUT

The head writes each method's answers, and the seconds of decoding, to OUTPUT.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from outrider.models.decoding import generate
from outrider.models.decoding.acceptance import GreedyAcceptance, SpeculativeSampling
from outrider.models.decoding.loop import NullDrafter
from outrider.models.decoding.pipelined import generate_pipelined
from outrider.models.decoding.protocols import AcceptanceRule
from outrider.models.decoding.sampling import RowSeeds, Sampling
from outrider.models.decoding.types import Step
from outrider.models.drafters import load_drafter
from outrider.models.drafters.saved.parts import parse_drafter_name
from outrider.models.drafters.streaming_merge import streaming_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

Decode = Callable[..., Iterator[Step]]
SEED = 3


def methods(target: HFTarget, drafter: str, *, is_staged: bool) -> dict[str, tuple[Decode, Any, AcceptanceRule]]:
    """Return what decodes, by name. A target in memory has no pipelined methods."""
    draft = load_drafter(parse_drafter_name(drafter), target)
    greedy, sampling = GreedyAcceptance(), SpeculativeSampling(sampling=Sampling(temperature=1.0))
    found: dict[str, tuple[Decode, Any, AcceptanceRule]] = {
        "plain": (generate, NullDrafter(), greedy),
        "plain_sampled": (generate, NullDrafter(), sampling),
        "synchronous": (generate, draft, greedy),
    }
    if is_staged:
        found["pipelined"] = (generate_pipelined, streaming_drafter(draft), greedy)
        found["pipelined_sampled"] = (generate_pipelined, streaming_drafter(draft), sampling)
    return found


def decode(target: HFTarget, drafter: str, prompts: list[list[int]], num_tokens: int, *, is_staged: bool) -> dict[str, Any]:
    """Answer all prompts by all methods."""
    results: dict[str, Any] = {}
    for name, (loop, proposer, rule) in methods(target, drafter, is_staged=is_staged).items():
        answers, start = [], time.perf_counter()
        for prompt in prompts:
            seeds = RowSeeds([SEED])
            steps = loop(target, proposer, rule, torch.tensor([prompt]), max_new_tokens=num_tokens, generator=seeds)
            answers.append([token for step in steps for token in step.tokens[0]])
        results[name] = {"answers": answers, "seconds": time.perf_counter() - start}
    return results


def main(options: dict[str, Any], prompts: list[list[int]], num_tokens: int, drafter: str, output: Path) -> None:
    torch.set_num_threads(1)
    target = load_target(TargetConfig(**options))
    output.write_text(json.dumps(decode(target, drafter, prompts, num_tokens, is_staged=True)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
