"""Streaming: the text of steps, printed while they are decoded."""

from collections.abc import Iterable

import torch
from transformers.generation.streamers import BaseStreamer

from .types import Step


def stream_text(steps: Iterable[Step], streamer: BaseStreamer) -> list[int]:
    """Pass one prompt's tokens to a streamer of transformers as they come; return all of them.

    Raises ValueError for a batch of several prompts, whose texts would mix. Leave the streamer's
    `skip_prompt` (of `TextStreamer`, for example) off: the steps don't contain the prompt, so it
    would skip the first tokens of the answer.
    """
    answer: list[int] = []
    for step in steps:
        if step.rows != (0,):
            raise ValueError(f"a streamer takes one text, and this step has rows {step.rows}; stream one prompt at a time")
        streamer.put(torch.tensor(step.tokens[0]))
        answer += step.tokens[0]
    streamer.end()
    return answer
