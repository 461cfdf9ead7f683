"""A target in stages: what its measurements depend on, and the loop of pipelined methods."""

import re
from collections.abc import Iterator
from typing import Any

from ...models.decoding.pipelined import generate_pipelined
from ...models.decoding.protocols import Drafter
from ...models.decoding.speculation import ExpectedSpeculation
from ...models.decoding.types import Step
from ...models.drafters.registry import DRAFTERS
from ...models.drafters.saved.parts import DrafterParts
from ...models.drafters.streaming import REASONS, streaming_drafter
from ...models.llm.hf_target import HFTarget
from ...models.llm.stages.staged_target import StagedTarget
from .timing import Loop


def recorded_stages(target: HFTarget) -> dict[str, Any]:
    """Return the stages that speeds depend on; nothing for a target in one process."""
    return {"stage_layers": list(target.stage_layers)} if isinstance(target, StagedTarget) else {}


def require_streaming(parts: DrafterParts) -> None:
    """Raise ValueError for kinds of drafters that can't draft while the target reads.

    `streaming_drafter` raises it too, after the weights are loaded.
    """
    for part in parts.parts:
        drafter_class = DRAFTERS.get(re.sub(r"_\d+$", "", part.name))  # a second part of a kind has a number
        if drafter_class in REASONS:
            raise ValueError(
                f"{REASONS[drafter_class]}: it can't draft while the target reads. Choose a draft model, a ReDrafter, "
                "training-free drafters or a merge of these, or decode=synchronous"
            )


def pipelined_loop(drafter: Drafter[Any, Any], micro_batch: int) -> Loop:
    """Build the loop in which a drafter drafts while the target's stages read.

    What it learns about the costs holds for all texts. Raises ValueError for a drafter that can't
    draft while the target reads.
    """
    streaming, speculation = streaming_drafter(drafter), ExpectedSpeculation(micro_batch=micro_batch)

    def decode(target: Any, _: Any, rule: Any, prompts: Any, **options: Any) -> Iterator[Step]:
        return generate_pipelined(target, streaming, rule, prompts, speculation=speculation, **options)

    return decode
