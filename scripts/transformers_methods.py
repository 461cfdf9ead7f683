"""Methods that decode with transformers' `generate`, for comparison with plain decoding."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.eval.measure.timing import Generation
from outrider.eval.measure.turns import Method
from outrider.models.decoding.types import Step
from outrider.models.drafters import NullDrafter, load_drafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.llm.hf_target import HFTarget

PLAIN, TRANSFORMERS, LOOKUP = "plain", "transformers generate", "transformers prompt lookup"
ASSISTED = "transformers assisted generation"
LOOKUP_TOKENS = 10


class PassTimes:
    """Streamer that records the tokens of each pass of `generate`, and the time after it."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, ...]] = []
        self.seconds: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Record a pass; `generate` also calls this once with the prompt, before the first pass."""
        self.seconds.append(time.perf_counter())
        self.tokens.append(tuple(tokens.flatten().tolist()))

    def end(self) -> None:
        """Do nothing: the last pass is recorded."""


def transformers_method(name: str, model: PreTrainedModel, **options: Any) -> Method:
    """Build a method that decodes one prompt at a time with transformers, greedily.

    `model` decodes, with these `options` of `generate`. Drafts that the first pass accepts are part
    of the prefill.
    """

    def decode(
        _target: Any,
        _drafter: Any,
        _rule: Any,
        prompts: Sequence[torch.Tensor],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int],
        **_: Any,
    ) -> Generation:
        # 1. Decode, and record each pass: tokens read, tokens emitted, time.
        (prompt,) = prompts
        passes, lengths = PassTimes(), []
        hook = model.register_forward_pre_hook(
            lambda _, __, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
        )
        processor_start, start = time.process_time(), time.perf_counter()
        model.generate(
            input_ids=prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=sorted(stop_ids) or None,
            pad_token_id=0,
            streamer=passes,
            **options,
        )
        end, processor_end = time.perf_counter(), time.process_time()
        hook.remove()
        # 2. The steps. A pass reads one token that was emitted before, the first one the prompt.
        steps = [
            Step(
                rows=(0,),
                tokens=(tokens,),
                finishes=(None,),
                num_accepted=(len(tokens) - 1,),
                num_nodes=length - (1 if index else len(prompt)),
                drawn=False,
                is_prefill=index == 0,
            )
            for index, (tokens, length) in enumerate(zip(passes.tokens[1:], lengths, strict=True))
        ]
        return Generation(
            steps=steps,
            prefill_seconds=passes.seconds[1] - start,
            decode_seconds=end - passes.seconds[1],
            processor_seconds=processor_end - processor_start,
        )

    return Method(name=name, drafter=NullDrafter(), decode=decode)


def standard_methods(weights: HFTarget) -> list[Method]:
    """Build the methods that need no other model: `generate`, and its prompt lookup."""
    return [
        transformers_method(TRANSFORMERS, weights.model),
        transformers_method(LOOKUP, weights.model, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    ]


def assisted_method(weights: HFTarget, folder: Path) -> Method:
    """Build assisted generation with the draft model of a drafter's folder as the assistant.

    Its options are transformers' own defaults, so it drafts until a token's probability is below
    the confidence threshold. Raises ValueError for a drafter of another kind.
    """
    drafter = load_drafter(folder, weights)
    if not isinstance(drafter, DraftModel):
        raise ValueError(f"{folder} holds no draft_model; assisted generation needs one, as `outrider run compare_demo` trains")
    return transformers_method(ASSISTED, weights.model, assistant_model=drafter.model)
