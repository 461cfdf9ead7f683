"""Bounds on waits and bytes of what labelling stores and training reads."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from outrider.data.states import state_bytes

SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
INDEX_BYTES = 8


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("count_transfers")


def test_storing_a_batch_never_waits_and_the_thread_behind_waits_once(transfers: Any) -> None:
    for dtype in transfers.STATE_DTYPES:
        row = transfers.storing(dtype)
        assert (row["host_reads"], row["waits_behind"]) == (0, 1)
        others = 8 * transfers.HORIZON + (8 + 4) * transfers.TOP + 1  # labels, top tokens, whether states are finite
        states = (1 + len(transfers.LAYERS)) * state_bytes(transfers.WIDTH, dtype)
        assert row["bytes"] == sum(transfers.LENGTHS) * (states + others), "without padding"


def test_stored_states_cross_in_the_stored_type_without_padding_and_a_wait(transfers: Any) -> None:
    for dtype in transfers.STATE_DTYPES:
        row = transfers.reading(dtype)
        layers = len(transfers.LAYERS) * state_bytes(transfers.WIDTH, dtype)
        assert row["bytes"] == sum(transfers.LENGTHS) * (layers + INDEX_BYTES) < row["padded_bytes"]
        assert row["host_reads"] == 0


def test_a_trained_head_is_cast_once_and_a_card_has_fewer_chunks(transfers: Any) -> None:
    assert {transfers.trained_head(num_chunks)["casts"] for num_chunks in transfers.CHUNKS} == {2}
    on_cpu, on_card = transfers.large_loss_chunks().values()
    assert on_card * 4 == on_cpu
