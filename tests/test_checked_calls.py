"""The checks of annotations at run time: they catch a wrong shape, and cover the calls that they promise."""

import torch
from jaxtyping import TypeCheckError

from outrider.models.decoding.tree import chain_tree

from .checked_calls import EVERY


def test_a_wrong_shape_given_to_the_library_is_an_error() -> None:
    errors = set()
    for _ in range(EVERY):
        try:
            chain_tree(torch.zeros(3, dtype=torch.long))
        except (TypeCheckError, IndexError, ValueError, RuntimeError) as error:
            errors.add(type(error))
    assert TypeCheckError in errors
