"""Calibration of merged drafters, between the training and the evaluation of a run."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import torch
from jaxtyping import Int
from tqdm import tqdm

from ..data.manifest import MANIFEST_FILE, Manifest
from ..data.shards import label_store, read_shard
from ..data.types import TOKENS_ONLY
from ..models.decoding.acceptance import GreedyAcceptance
from ..models.decoding.loop import generate
from ..models.decoding.protocols import Target
from ..models.decoding.tree import DraftTree
from ..models.decoding.types import AcceptedPath, TargetOutput
from ..models.drafters import load_drafter
from ..models.drafters.calibration import Prior, read_prior, write_prior
from ..models.drafters.merged import MergedConfig, MergedDraft, MergedDrafter, MergedState, Source
from ..models.drafters.saved.parts import parse_drafter_name
from ..models.llm.hf_target import HFTarget
from .config import RunConfig

log = logging.getLogger(__name__)

NUM_PROMPTS = 12
NEW_TOKENS = 64
"""Prompts, and most tokens of each answer. They take seconds on the demo; decoding corrects the rest."""


def calibrate(config: RunConfig, target: HFTarget, folder: Path) -> None:
    """Write the prior of each drafter that is evaluated in a merge, unless it has one.

    The prompts come from the labelled texts, which contain none of the evaluation's
    (`data.overlap_words`). Without these texts decoding starts uncalibrated.
    """
    shards, new_tokens = folder / "distill", min(NEW_TOKENS, config.eval.max_new_tokens)
    if not config.eval.merge or not (shards / MANIFEST_FILE).is_file():
        return
    for run in config.drafter_runs():
        # 1. Skip a drafter with a prior for all parts of its merge.
        parts = parse_drafter_name(run.drafter_dir).merged_with(config.eval.merge)
        prior = read_prior(run.drafter_dir, target.identity)
        if prior is not None and {part.name for part in parts.parts} <= prior.sources.keys():
            continue
        # 2. Decode answers to prompts of the training data.
        drafter = load_drafter(parts, target)
        assert isinstance(drafter, MergedDrafter)
        longest = min(target.context_length, drafter.context_length or target.context_length) - new_tokens
        prompts = list(islice(_prompts(shards, label_store(shards).load(), longest), NUM_PROMPTS))
        on_device = (prompt.to(target.device) for prompt in tqdm(prompts, desc="calibrate", unit="answer"))
        measured = measure_prior(target, drafter.sources, on_device, max_new_tokens=new_tokens)
        # 3. Write what was counted.
        write_prior(run.drafter_dir, target.identity, measured if prior is None else prior.updated(measured))
        log.info("%s is calibrated for drafting together with %s", run.drafter_dir, ", ".join(config.eval.merge))


def _prompts(shards: Path, manifest: Manifest, longest: int) -> Iterator[Int[torch.Tensor, " prompt"]]:
    """Yield the prompts before the first answers of the labelled texts."""
    for entry in manifest.shards:
        for distilled in read_shard(shards, entry, TOKENS_ONLY):
            wanted = distilled.example.wanted.nonzero()
            if len(wanted) and int(wanted[0]) < longest:
                yield distilled.example.input_ids[: int(wanted[0]) + 1]


class _Accumulating(MergedDrafter):
    """Merged drafter whose calibration continues from text to text."""

    def advance(self, drafted: MergedDraft, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> MergedState:
        state = super().advance(drafted, tree, accepted, output)
        self.prior_counts = state.counts[0]
        return state


def measure_prior(
    target: Target,
    sources: Mapping[str, Source],
    prompts: Iterable[Int[torch.Tensor, " _"]],
    *,
    max_new_tokens: int = 128,
    tree_nodes: int = 64,
) -> Prior:
    """Decode answers to the prompts greedily, and return how often each source was right.

    A few dozen answers suffice. The prompts should be like those of later texts, but none of those
    that speeds are reported on.
    """
    drafter = _Accumulating(sources, MergedConfig(tree_nodes=tree_nodes, pace="fixed"))
    for prompt in prompts:
        for _ in generate(target, drafter, GreedyAcceptance(), [prompt], max_new_tokens=max_new_tokens):
            pass
    return Prior.of(drafter.prior_counts, list(sources))
