"""Chunks of labels that share a teacher's distribution."""

import numpy as np
import pytest
import torch

from outrider.models.drafters.loss_parts import TextTokens


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_a_chunk_has_the_tokens_of_its_labels_only(size: int) -> None:
    entry = np.array([0, 0, 1, 2, 2, 2, 3, 4, 4])
    whole = TextTokens(tokens=torch.tensor([3, 5, 6, 8, 9]), entry=torch.from_numpy(entry), host_entry=entry)
    assert whole.is_shared
    chunks = whole.split(size)
    assert [chunk.tokens[chunk.entry].tolist() for chunk in chunks] == [
        part.tolist() for part in whole.tokens[whole.entry].split(size)
    ]
    for chunk in chunks:
        assert chunk.host_entry.tolist() == chunk.entry.tolist()
        assert len(chunk.tokens) == len(set(chunk.entry.tolist())), "a token without a label costs the head's logits"
