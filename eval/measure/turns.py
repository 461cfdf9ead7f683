"""What a measurement consists of.

Methods, and the turns of prompts that each of them answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int

from ...data.suites import Prompt, PromptSet
from ...models.decoding.protocols import Drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to decode: a drafter in one setting.

    The baseline's drafter proposes nothing.
    """

    name: str
    drafter: Drafter[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTurn:
    """A turn of a prompt as the target reads it, earlier turns and their answers included.

    Those of plain decoding at this temperature and batch size. `input_ids` is None where it, or an
    earlier turn, leaves no room for an answer in the target's context window.
    """

    suite: PromptSet
    prompt: Prompt
    turn: int
    temperature: float
    batch_size: int
    input_ids: Int[torch.Tensor, "1 seq"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBatch:
    """Turns that are answered together, in the order of the suite.

    The same turn of up to `batch_size` prompts. `index` counts the groups of prompts of a pass:
    later turns of a group have the same one. A prompt leaves its group where it has no further
    turn, or no room for one.
    """

    index: int
    turns: Sequence[PromptTurn]
    input_ids: Sequence[Int[torch.Tensor, " _"]]
