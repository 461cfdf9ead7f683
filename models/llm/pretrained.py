"""Loading of a causal LM by transformers, with all of its weights, and what its errors mean."""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..bounded_build import CANT_BE_BUILT, bounded_build, stored_size
from .weight_files import with_index


def load_pretrained(name_or_path: str, called: str, **options: Any) -> PreTrainedModel:
    """Load a model by transformers with these options. `called` is its name in errors.

    Raises ValueError for a model that can't be built, and for weights that are damaged or incomplete.
    """
    with (
        loading_errors(called),
        bounded_build(name_or_path, *stored_size(Path(name_or_path))),
        with_index(name_or_path) as folder,
    ):
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    model: PreTrainedModel = loaded[0]
    require_complete(called, sorted(loaded[1]["missing_keys"]))
    record_tie(model)
    return model


@contextmanager
def loading_errors(called: str) -> Iterator[None]:
    """Raise errors of the libraries in the block as ValueErrors that name the model."""
    try:
        yield
    except (OSError, ImportError, SafetensorError, pickle.UnpicklingError, *CANT_BE_BUILT) as error:
        raise ValueError(
            f"{called} can't be loaded: {error!s:.500}. Do config.json and the weights belong together, and is the download "
            "complete?"
        ) from error


def require_complete(called: str, missing: Sequence[str]) -> None:
    """Raise ValueError if weights are missing: transformers would initialise them at random."""
    if missing:
        raise ValueError(
            f"the weights of {called} lack {len(missing)} tensors that the model needs (the first: {missing[0]}); they would "
            "be random: complete the download, or point to the right directory"
        )


def record_tie(model: PreTrainedModel) -> None:
    """Correct the configuration of a model whose file has a head of its own, though it ties the head.

    transformers then uses the file's head. Models that are built from the configuration must do so, too.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and getattr(head, "weight", None) is not embeddings.weight:
        for config in (model.config, model.config.get_text_config()):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
