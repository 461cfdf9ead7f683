"""A target in stages: what its measurements depend on, and the loop of pipelined methods."""

from collections.abc import Iterator
from typing import Any

from ...models.decoding.pipelined import generate_pipelined
from ...models.decoding.protocols import Drafter
from ...models.decoding.speculation import ExpectedSpeculation
from ...models.decoding.types import Step
from ...models.target.hf_target import HFTarget
from .timing import Loop


def recorded_stages(target: HFTarget) -> dict[str, Any]:
    """Return the stages that speeds depend on; nothing for a target in one process."""
    layers = getattr(target, "stage_layers", None)
    return {} if layers is None else {"stage_layers": list(layers)}


def pipelined_loop(drafter: Drafter[Any, Any], micro_batch: int) -> Loop:
    """Build the loop in which a drafter drafts while the target's stages read.

    What it learns about the costs holds for all texts. Raises ValueError for a drafter that can't
    draft while the target reads.
    """
    from ...models.drafters.streaming import streaming_drafter

    streaming, speculation = streaming_drafter(drafter), ExpectedSpeculation(micro_batch=micro_batch)

    def decode(target: Any, _: Any, rule: Any, prompts: Any, **options: Any) -> Iterator[Step]:
        return generate_pipelined(target, streaming, rule, prompts, speculation=speculation, **options)

    return decode
