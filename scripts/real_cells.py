"""Cells of the pipeline bench in real processes, whose stages take the time that they take."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from emulated_cells import prompts_about_code
from emulated_stages import RealClock, in_processes
from grow_target import Source, parse_parameters
from pipeline_conditions import Unpadded
from pipeline_methods import OWN_SETTING, PIPELINED, PLAIN, USUAL_LENGTH, Row, expected, synchronous
from pipeline_play import Decoded, decode, speed_figures
from study_cells import grown
from tqdm import tqdm

from outrider.models.drafters.null import NullDrafter
from outrider.models.drafters.saved.loading import load_drafter
from outrider.models.drafters.streaming import streaming_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

REAL = "real processes, wall clock"
WARM_UP_TOKENS = 8
CHAIN: dict[str, Any] = {"length": USUAL_LENGTH, "top_k": 1, "tree_nodes": None, "temperature": 0.0, "pace": "fixed"}


@contextmanager
def grown_target(source: Path, parameters: str, folder: Path) -> Iterator[HFTarget]:
    """Yield a target of so many parameters, grown in a folder that is deleted afterwards."""
    torch.set_num_threads(1)  # before any pass: stages are forks of this process
    origin = Source.of(source)
    with grown(origin, origin.choose_size(parse_parameters(parameters)), folder) as path:
        yield load_target(TargetConfig(name_or_path=str(path), dtype="float32", device="cpu", fast_linears=False))


def real_rows(target: HFTarget, drafter: Path, condition: Unpadded) -> dict[str, Row]:
    """Decode held-out prompts by each method. Methods alternate, as in emulated stages."""
    prompts, clock = prompts_about_code(target, condition.num_texts), RealClock()
    texts: dict[str, list[Decoded]] = {}
    with in_processes(target, condition.num_stages) as staged:
        chain, tree = load_drafter(drafter, staged, **CHAIN), load_drafter(drafter, staged)
        drafters: dict[str, Any] = {PLAIN: NullDrafter(), synchronous(USUAL_LENGTH): chain, OWN_SETTING: tree}
        drafters[PIPELINED] = streaming_drafter(tree)
        # The first prompt comes twice: once to warm up.
        sizes = [WARM_UP_TOKENS, *[condition.new_tokens] * len(prompts)]
        for prompt, size in tqdm([*zip([prompts[0], *prompts], sizes, strict=True)], desc="prompts", leave=False):
            for name, drafting in drafters.items():
                speculation = expected(clock) if name == PIPELINED else None
                texts.setdefault(name, []).append(decode(staged, drafting, prompt, size, clock, speculation))
    plain = texts[PLAIN][1:]
    rows = {name: real_row(decoded[1:], plain) for name, decoded in texts.items()}
    rows[synchronous(USUAL_LENGTH)]["num_drafts"] = USUAL_LENGTH
    return rows


def real_row(texts: Sequence[Decoded], plain: Sequence[Decoded]) -> Row:
    """Return the figures of a method, and how many of its texts are those of plain decoding."""
    identical = [text.tokens == other.tokens for text, other in zip(texts, plain, strict=True)]
    return {**speed_figures(texts, REAL), "num_identical": sum(identical), "num_texts": len(texts)}
