"""Chunks of labels that share a teacher's distribution."""

import numpy as np
import pytest
import torch
from torch import nn

from outrider.models.drafters import objective as objective_module
from outrider.models.drafters.labels import Labels
from outrider.models.drafters.loss_parts import LossParts, TextTokens
from outrider.models.drafters.losses import LossKind
from outrider.models.drafters.objective import Objective, score
from outrider.models.drafters.vocabulary import DraftVocabulary

from .test_objective import VOCAB, drafter_rows, make_batch


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


@pytest.mark.parametrize("kind", ["kl", "kl_acceptance"])
def test_chunks_do_not_change_a_loss_against_a_teacher(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    batch = make_batch()
    assert batch.hidden_states is not None
    width = batch.hidden_states.shape[-1]
    labels, head, target_head = Labels.of(batch), nn.Linear(width, VOCAB), nn.Linear(width, VOCAB)
    parts = LossParts.of(labels, lambda index: np.ones_like(index, dtype=bool), None)
    assert parts.taught is not None
    assert parts.taught.text is not None
    assert parts.taught.text.is_shared, "some labels must follow the same token of the text"
    results = []
    for rows in (1000, 3, 2):
        monkeypatch.setattr(objective_module, "max_chunk", lambda device, rows=rows: rows * VOCAB)
        inputs = drafter_rows(labels)
        objective = Objective(loss=LossKind(kind), head=target_head)
        loss = score(head, (inputs,), labels, batch, objective, vocabulary=DraftVocabulary(size=VOCAB))
        (gradient,) = torch.autograd.grad(loss.sums.sum(), [head.weight])
        results.append((loss.sums.detach(), gradient))
    for sums, gradient in results[1:]:
        torch.testing.assert_close(sums, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])
