"""Streaming of decoded tokens to transformers' TextStreamer."""

import pytest
import torch
from transformers import TextStreamer

from outrider.models.decoding import GreedyAcceptance, generate, stream_text
from outrider.models.drafters import NullDrafter
from outrider.models.llm.loading import load_target


def test_a_text_streamer_prints_the_answer(target, prompt, capsys):
    steps = generate(target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=12)
    tokens = stream_text(steps, TextStreamer(target.tokenizer))
    assert len(tokens) == 12
    assert capsys.readouterr().out == target.tokenizer.decode(tokens) + "\n"


def test_a_batch_is_refused(target, prompt):
    steps = generate(target, NullDrafter(), GreedyAcceptance(), torch.cat([prompt, prompt]), max_new_tokens=2)
    with pytest.raises(ValueError, match="one prompt at a time"):
        stream_text(steps, TextStreamer(target.tokenizer))


def test_a_target_is_loaded_by_its_name_alone(tiny_target_dir):
    assert load_target(str(tiny_target_dir), torch.device("cpu")).identity.name == tiny_target_dir.name
