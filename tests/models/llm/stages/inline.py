"""Stages in the head's own process: for tests, and for links that delay or reorder what stages do."""

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate, chain, pairwise

from transformers import PreTrainedModel

from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.stages.messages import Work
from outrider.models.llm.stages.slices import EndSlice, LayerSlice
from outrider.models.llm.stages.stage import Stage
from outrider.models.llm.stages.staged_target import StagedTarget


class InlineLink:
    """A `Link` to stages of this process. They work while the head waits for an answer."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self.inboxes: list[deque[Work]] = [deque() for _ in range(len(stages) + 1)]
        """Messages to each stage, then those to the head."""
        self.cancelled: list[set[int]] = [set() for _ in stages]
        """Numbers of runs that each stage may skip."""

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def send(self, work: Work) -> None:
        self.inboxes[0].append(work)

    def has_answer(self) -> bool:
        return bool(self.inboxes[-1])

    def receive(self) -> Work:
        while not self.inboxes[-1]:
            self.advance(max(index for index in range(self.num_stages) if self.inboxes[index]))
        return self.inboxes[-1].popleft()

    def cancel(self, numbers: Sequence[int]) -> None:
        for numbers_of_stage in self.cancelled:
            numbers_of_stage.update(numbers)

    def advance(self, index: int) -> None:
        """Let a stage handle its oldest message."""
        work = self.inboxes[index].popleft()
        self.inboxes[index + 1].append(self.stages[index].handle(work, self.cancelled[index].__contains__))
        self.cancelled[index].discard(work.number)


def in_stages(target: HFTarget, stage_layers: Sequence[int]) -> StagedTarget:
    """Return a target that is in memory as a target in stages, which has the same weights."""
    target.release_hooks()
    bounds = pairwise(accumulate(stage_layers, initial=0))
    stages = [Stage(LayerSlice.cut(_sharing_weights(target.model), range(*layers))) for layers in bounds]
    ends = EndSlice.cut(_sharing_weights(target.model))
    return StagedTarget(ends, target.tokenizer, target.identity, InlineLink(stages), stage_layers=stage_layers)


def _sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model's modules with the same parameters and buffers."""
    return deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})
