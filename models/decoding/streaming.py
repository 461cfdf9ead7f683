"""Steps as text, while they are decoded."""

from collections.abc import Iterable

import torch
from transformers.generation.streamers import BaseStreamer

from .types import Step


def stream_text(steps: Iterable[Step], streamer: BaseStreamer) -> list[int]:
    """Hand one prompt's tokens to a streamer of transformers (`TextStreamer`, say) as they come; returns them all.

    Raises ValueError for a batch of several prompts: its texts would mix. A streamer that skips a prompt would skip the first
    tokens instead, since the steps don't hold the prompt; leave its `skip_prompt` off.
    """
    answer: list[int] = []
    for step in steps:
        if step.rows != (0,):
            raise ValueError(f"a streamer takes one text, and this step has rows {step.rows}; stream one prompt at a time")
        streamer.put(torch.tensor(step.tokens[0]))
        answer += step.tokens[0]
    streamer.end()
    return answer
