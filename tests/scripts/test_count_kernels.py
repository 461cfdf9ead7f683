"""Bounds on the kernels of a decode step, so that added kernels are noticed on a CPU."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
MOST_KERNELS_PER_LAYER = 45
"""Bound for the target's pass over a draft tree, in eager PyTorch."""
MOST_LAUNCHES_OF_A_DRAFT = 3
"""The replay, and the copies of its inputs: one for whole numbers, one for states."""
MOST_LAUNCHES_OF_THE_REST = 5
"""The rule's replay and the copy of its decision, the commit's inputs and replay, and the path's states."""
MOST_NEW_BYTES = 16384
"""Bound for tensors allocated outside of replays: the decision, and the states of the accepted path.
The tree's states and logits are 25,000 and 50,000 bytes here."""


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("count_kernels")
    with module.cuda_paths():
        yield module
    module.narrow.cache_clear()


def test_a_layer_of_the_target_launches_a_bounded_number_of_kernels(counting: Any) -> None:
    for kind in ("plain", "redrafter 4x5"):
        few, many = (counting.decode_step(kind, layers, graphs=False)["kernels"]["verify"] for layers in (1, 3))
        per_layer = (many - few) / 2
        assert 20 < per_layer <= MOST_KERNELS_PER_LAYER, (kind, per_layer)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
def test_a_decode_step_of_each_kind_has_one_host_read(counting: Any, graphs: bool) -> None:
    """ReDrafter needs a second one if it removes the padding of its tree, a merge one for its search."""
    reads = {kind: counting.decode_step(kind, 1, graphs=graphs)["host_reads"] for kind in counting.KINDS}
    trimmed = {kind for kind, (options, _) in counting.KINDS.items() if options == counting.REDRAFTER}
    merged = {kind for kind in counting.KINDS if "+ suffix" in kind}
    assert len(reads) >= 10
    assert reads == {kind: 2 if kind in trimmed | merged else 1 for kind in counting.KINDS}


def test_with_graphs_the_target_is_one_launch_and_copies_of_inputs(counting: Any) -> None:
    eager, graphed = (counting.decode_step("redrafter, padded", 2, graphs=graphs) for graphs in (False, True))
    assert graphed["replays"] == 4, "the drafter's, the target's, the rule's and the commit's"
    assert graphed["launches"]["verify"] == 2 < eager["launches"]["verify"]
    # Copies of the inputs and of the logits come on top.
    assert eager["kernels"]["verify"] <= graphed["kernels"]["verify"] <= eager["kernels"]["verify"] + 8


RECORDED = ["redrafter 4x5", "redrafter, padded", "medusa", "eagle-1", "eagle-3", "block", "block, bilinear", "draft model"]


@pytest.mark.parametrize("kind", RECORDED)
def test_a_recorded_step_is_few_launches(counting: Any, kind: str) -> None:
    row = counting.decode_step(kind, 1, graphs=True)
    assert row["replays"] == 4, "the drafter's, the target's, the rule's and the commit's"
    assert row["launches"]["propose"] <= MOST_LAUNCHES_OF_A_DRAFT < row["kernels"]["propose"]
    assert row["launches"]["verify"] <= 2
    assert row["launches"]["rest"] <= MOST_LAUNCHES_OF_THE_REST < row["kernels"]["rest"]
    assert row["new_tensors"] <= 2, "the decision, and the states of the accepted path"
    assert 0 < row["new_bytes"] <= MOST_NEW_BYTES
    # One of each. ReDrafter's tree has several sizes.
    assert row["recordings"] == 4 or kind == "redrafter 4x5"


@pytest.mark.parametrize("kind", ["redrafter + suffix", "eagle-3 + suffix"])
def test_a_merge_replays_the_searches_of_its_trained_sources(counting: Any, kind: str) -> None:
    row = counting.decode_step(kind, 1, graphs=True)
    assert row["replays"] == 4
    assert row["host_reads"] == 2, "the step's decision, and the search"
    # The search's inputs and its replay, and the tree, which comes from the host.
    assert row["launches"]["propose"] <= 1 + MOST_LAUNCHES_OF_A_DRAFT < row["kernels"]["propose"]
    # The tree is new at each step, so the rule's inputs are copied.
    assert row["launches"]["rest"] <= 1 + MOST_LAUNCHES_OF_THE_REST


def test_a_training_free_drafter_sends_its_tree_and_reads_nothing_again(counting: Any) -> None:
    row = counting.decode_step("suffix", 1, graphs=True)
    assert row["launches"]["propose"] == 1
    assert row["new_tensors"] == 2, "the tree, and the decision"
    assert row["host_reads"] == 1
    assert row["replays"] == 3


def test_recorded_sampling_launches_no_more_than_greedy_decisions(counting: Any) -> None:
    greedy, sampled = (counting.decode_step(kind, 1, graphs=True) for kind in ("redrafter 4x5", "redrafter, top-p"))
    assert sampled["launches"]["rest"] <= greedy["launches"]["rest"] + 2, "the seeds come from the host, as one more input"


def test_labelling_calls_one_kernel_for_each_segment_and_layer(counting: Any) -> None:
    few, many = (counting.labelling(layers)["each_further_token"] for layers in (1, 3))
    num_segments = counting.LABELLED.batch * counting.LABELLED.seq // counting.SEGMENT_QUERIES
    # A copy of the query, the kernel, the copy of its log-sum-exp; and what a layer computes besides.
    assert (many - few) / 2 <= 3 * num_segments + MOST_KERNELS_PER_LAYER


def test_labelling_reads_each_further_token_but_the_last_once(counting: Any) -> None:
    # Besides these, the texts, if they are on the device, and the first tokens.
    assert counting.labelling(1)["host_reads"] == 2 + counting.HORIZON - 2


COPIES_IN_A_LOSS = {
    "redrafter": 0,
    "medusa": 1,  # the order of the labels by head
    "eagle": 5,  # of its trained depth, of the positions where untrained depths are measured, of both losses
    "eagle3": 1,  # the labels that have a teacher
    "block": 0,
    "draft_model": 0,
}


MOST_KERNELS_OF_TRAINING = {
    "redrafter": (85, 95),
    "medusa": (85, 90),
    "eagle": (480, 140),
    "eagle3": (400, 600),
    "block": (235, 310),
    "draft_model": (190, 240),
}
"""Bounds for a loss and its backward pass. They don't depend on the target's layers."""


def test_training_counts_every_phase_and_never_waits(counting: Any) -> None:
    for kind in counting.TRAINED_KINDS:
        row = counting.training_step(kind, 3)
        assert (row["kernels"]["target"] == 0) == (kind == "draft_model"), "a draft model reads no states of the target"
        assert min(row["kernels"]["loss"], row["kernels"]["backward"]) > 50
        assert sum(row["host_reads"].values()) == 0, kind
        actual = row["kernels"]["loss"], row["kernels"]["backward"]
        assert all(count <= most for count, most in zip(actual, MOST_KERNELS_OF_TRAINING[kind], strict=True)), (kind, actual)
        # The batch's four tensors, and the index tensors together.
        assert (row["copies_to_device"]["target"], row["copies_to_device"]["backward"]) == (5, 0), kind
        assert row["copies_to_device"]["loss"] == COPIES_IN_A_LOSS[kind], kind


def test_views_and_allocations_are_no_kernels_and_a_sort_is_several(counting: Any) -> None:
    counted, values = counting.Counted(), torch.arange(6.0)

    def kernels(work: Any) -> int:
        counted.reset()
        with counted:
            work()
        return counted.kernels.total()

    assert kernels(lambda: values.view(2, 3).T[1:]) == 0
    assert kernels(lambda: torch.empty_like(values)) == 0
    assert kernels(lambda: values[:0] + 1) == 0
    assert kernels(lambda: values.add_(1)) == 1
    assert kernels(lambda: values.view(2, 3).T.reshape(6)) == 1
    assert kernels(lambda: values.sort()) == counting.KERNELS["aten::sort"]
    with torch.inference_mode():
        assert kernels(lambda: torch.nn.functional.linear(values[None], torch.ones(2, 6))) == 2, "the weights and the product"


def test_every_host_read_is_counted_once(counting: Any) -> None:
    counted, values = counting.Counted(), torch.arange(6)
    reads = {
        "tolist": lambda: values.tolist(),
        "item": lambda: values[0].item(),
        "array": lambda: (values + 1).cpu().numpy(),
        "bool": lambda: bool(values.any()),
        "int": lambda: int(values.max()),
        "nonzero": lambda: values.nonzero(),
        "mask": lambda: values[values > 2],
        "fill": lambda: values.index_put_((values > 2,), torch.tensor(1)),
    }
    counts = {}
    for name, read in reads.items():
        counted.reset()
        with counted, counting.Transfers(counted.read):
            read()
        counts[name] = counted.host_reads.total()
    assert counts == {**dict.fromkeys(reads, 1), "fill": 0}
