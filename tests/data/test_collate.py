from collections import Counter
from dataclasses import replace

import pytest
import torch

from outrider.data.collate import PAD_ID, Layout, collate, packed, padded, text_continuations
from outrider.data.config import STATE_DTYPES
from outrider.data.states import StoredStates, encode_states, joined, state_bytes
from outrider.data.types import UNKNOWN, DistilledExample, DrafterBatch, Example, TargetReads, TopTokens

from ..host_reads import HostReads, ScalarReads

INDEX_BYTES = 8


@pytest.mark.parametrize("horizon", [1, 4, 9])
def test_text_labels_equal_a_plain_loop(horizon: int) -> None:
    generator = torch.Generator().manual_seed(horizon)
    for _ in range(20):
        length = int(torch.randint(1, 12, (), generator=generator))
        ids = torch.randint(0, 50, (length,), generator=generator)
        mask = torch.rand(length, generator=generator) < 0.7
        expected = torch.full((length, horizon), UNKNOWN)
        for position in range(length):
            for depth in range(horizon):
                ahead = position + 1 + depth
                if ahead >= length or not mask[ahead]:
                    break
                expected[position, depth] = ids[ahead]
        assert torch.equal(text_continuations(ids, mask, horizon), expected)


def make_example(length: int, hidden: bool = False) -> DistilledExample:
    mask = torch.arange(length) >= 2
    continuations = torch.full((length, 3), UNKNOWN)
    continuations[1 : length - 1] = 7
    continuations[2] = UNKNOWN  # the target stopped here
    return DistilledExample(
        example=Example(id=f"{length}", input_ids=torch.arange(length) + 1, loss_mask=mask),
        continuations=continuations,
        hidden_states=StoredStates(values=torch.full((length, 4), float(length))) if hidden else None,
    )


def run(labels: str, max_positions: int | None = None, seed: int = 0, hidden: bool = False):
    examples = [make_example(5, hidden), make_example(8, hidden)]
    generator = torch.Generator().manual_seed(seed)
    reads = TargetReads(hidden_states=hidden)
    return collate(examples, max_positions=max_positions, generator=generator, labels=labels, reads=reads)


def test_padding_is_on_the_right_and_never_trained_on() -> None:
    batch = run("distilled", hidden=True).decoded()
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, PAD_ID, PAD_ID, PAD_ID], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.attention_mask.sum(1).tolist() == [5, 8]
    assert (batch.continuations[0, 5:] == UNKNOWN).all()
    assert batch.hidden_states is not None
    assert (batch.hidden_states[0, 5:] == 0).all()
    assert (batch.hidden_states[0, :5] == 5).all()
    assert batch.positions.int().tolist() == [[0, 1, 0, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 1, 1, 0]]
    assert run("distilled").hidden_states is None


@pytest.mark.parametrize("max_positions", [None, 1, 4, 100])
def test_both_kinds_of_labels_train_on_the_same_positions(max_positions: int | None) -> None:
    """An ablation of the labels must not change the positions."""
    distilled, text = run("distilled", max_positions), run("text", max_positions)
    assert torch.equal(distilled.positions, text.positions)
    assert not torch.equal(distilled.continuations, text.continuations)
    for batch in (distilled, text):
        assert (batch.continuations[:, :, 0][batch.positions] != UNKNOWN).all()


def test_thinning_keeps_exactly_the_limit_among_labelled_positions_and_follows_the_generator() -> None:
    everything = run("distilled").positions
    seen = set()
    for seed in range(30):
        positions = run("distilled", 3, seed).positions
        assert positions.sum() == 3
        assert (everything | ~positions).all()
        assert torch.equal(positions, run("distilled", 3, seed).positions)
        seen |= {tuple(index) for index in positions.nonzero().tolist()}
    assert len(seen) == everything.sum() == 7


def test_features_of_layers_are_concatenated_in_the_requested_order() -> None:
    def with_states(length: int) -> DistilledExample:
        layers = {
            layer: StoredStates(values=torch.ones(length, 2, dtype=torch.int8), scales=torch.full((length,), float(layer)))
            for layer in (2, 4, 7)
        }
        top = TopTokens(tokens=torch.full((length, 3), 5), log_probs=torch.zeros(length, 3))
        return replace(make_example(length, hidden=True), layers=layers, top=top)

    def batch(reads: TargetReads) -> DrafterBatch:
        examples, generator = [with_states(5), with_states(8)], torch.Generator()
        return collate(examples, max_positions=None, generator=generator, labels="distilled", reads=reads)

    collated = batch(TargetReads(layers=(7, 2), top=True)).decoded()
    assert collated.hidden_states is None, "they are stored but not requested"
    assert collated.features is not None
    assert collated.features[0, 4].tolist() == collated.features[1, 7].tolist() == [7, 7, 2, 2]
    assert not collated.features[0, 5:].any()
    assert collated.top_tokens is not None
    assert collated.top_log_probs is not None
    assert collated.top_tokens[0].unique(dim=0).tolist() == [[UNKNOWN] * 3, [5] * 3]
    assert collated.top_log_probs[0, 5:].exp().sum() == 0
    with pytest.raises(KeyError):
        batch(TargetReads(layers=(3,)))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_states_move_in_the_stored_type_without_padding_and_are_decoded_afterwards(dtype: str, packing: bool) -> None:
    lengths, width, layers = (5, 8, 3), 4, (7, 2)
    examples = []
    for seed, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(seed)
        last, *inputs = (encode_states(torch.randn(length, width, generator=generator), dtype) for _ in range(3))
        stored_layers = dict(zip(layers, inputs, strict=True))
        examples.append(replace(make_example(length), hidden_states=last, layers=stored_layers))
    batch = collate(
        examples,
        max_positions=None,
        generator=torch.Generator(),
        labels="distilled",
        reads=TargetReads(hidden_states=True, layers=layers),
        packing=packing,
    )
    moved: list[torch.Tensor] = []
    assert batch.stored is not None
    batch.stored.moved(lambda tensor: moved.append(tensor) or tensor)
    assert sum(tensor.nbytes for tensor in moved) == sum(lengths) * (3 * state_bytes(width, dtype) + INDEX_BYTES)
    with HostReads() as reads, ScalarReads() as scalars:
        decoded = batch.decoded()
    assert (reads.names, scalars.count) == ([], 0), "an accelerator isn't waited for"
    assert decoded.stored is None
    layout = (packed if packing else padded)(lengths)
    for actual, parts in (
        (decoded.hidden_states, [[example.hidden_states] for example in examples]),
        (decoded.features, [[example.layers[layer] for layer in layers] for example in examples]),
    ):
        expected = [torch.cat([part.decode() for part in of_text if part is not None], 1) for of_text in parts]
        assert actual is not None
        assert torch.equal(actual, layout.place(expected, 0.0))
        assert actual.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)


def test_shards_with_states_of_different_types_are_joined_in_float32() -> None:
    exact, rounded = StoredStates(values=torch.rand(2, 3)), encode_states(torch.rand(4, 3), "int8")
    assert torch.equal(joined([exact, rounded]).values, torch.cat([exact.values, rounded.decode()]))


def padding(layout: Layout) -> float:
    rows, width = layout.shape
    return 1 - sum(layout.lengths) / (rows * width)


def test_packed_rows_by_eye() -> None:
    """The longest text comes first, and each goes into the row that is shortest so far.

    Two rows cost less than one, since attention in a longer row is more expensive.
    """
    layout = packed([300, 2000, 500, 1500])
    assert layout.shape == (2, 2300)
    assert layout.rows == (0, 0, 1, 1)
    assert layout.columns == (2000, 0, 1500, 0)
    assert padding(layout) < 0.07 < 0.4 < padding(padded([300, 2000, 500, 1500]))


def test_values_keep_their_shape_and_starts_separate_texts_and_padding() -> None:
    layout = Layout(lengths=(2, 1, 2), rows=(0, 0, 1), columns=(0, 2, 0))
    values = [torch.full((length, 2), float(length + index)) for index, length in enumerate(layout.lengths)]
    assert layout.place(values, -1.0)[..., 1].tolist() == [[2, 2, 2], [4, 4, -1]]
    assert layout.starts().tolist() == [[0, 0, 2], [0, 0, 2]]


@pytest.mark.parametrize("seed", range(5))
def test_no_text_is_lost_and_none_overlaps_another(seed: int) -> None:
    lengths = torch.randint(1, 3000, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    layout = packed(lengths)
    taken = Counter(
        (row, column + offset)
        for row, column, length in zip(layout.rows, layout.columns, lengths, strict=True)
        for offset in range(length)
    )
    assert len(taken) == sum(lengths)
    assert set(taken.values()) == {1}
    assert padding(layout) <= padding(padded(lengths))


def test_texts_of_one_length_stay_in_rows_of_their_own() -> None:
    """In one row they would only make attention more expensive."""
    layout = packed([512] * 16)
    assert layout.shape == (16, 512)
    assert layout.rows == tuple(range(16)), "of equally short rows the first"
