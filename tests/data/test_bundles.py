"""Arrays that cross to a device in one copy."""

import numpy as np
import torch

from outrider.data.bundles import Bundle, move_to

ARRAYS = {
    "mask": np.array([[True, False], [False, True], [True, True]]),
    "wide": np.arange(6).reshape(2, 3).T,  # not contiguous
    "none": np.empty((0, 3), np.int64),
    "narrow": np.array([1.5, 2.5], np.float32),
    "no_mask": np.empty((4, 0), bool),
}


def test_arrays_come_back_with_their_types_and_shapes_after_one_copy() -> None:
    copied: list[torch.Tensor] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        return tensor.clone()

    tensors = Bundle.of(ARRAYS).moved(move).tensors()
    assert set(tensors) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert tensors[name].dtype == torch.from_numpy(np.ascontiguousarray(array)).dtype
        assert tensors[name].tolist() == array.tolist()
    assert [tensor.nbytes for tensor in copied] == [sum(array.nbytes for array in ARRAYS.values())]


def test_a_bundle_may_be_empty() -> None:
    bundle = Bundle.of({"none": ARRAYS["none"]}).moved(move_to(torch.device("cpu")))
    assert bundle.tensors()["none"].shape == (0, 3)
