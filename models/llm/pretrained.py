"""Loading of a language model by transformers, with all of its weights, and what its errors mean."""

import logging
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from ...data.hub import use_hub, why_offline
from ..bounded_build import CANT_BE_BUILT, bounded_build, stored_size
from .config import TargetConfig
from .weight_files import with_index

logger = logging.getLogger(__name__)


def auto_class(described: Any) -> Any:
    """Return transformers' class that builds a model from its configuration.

    Some models exist only as image-text models: they read texts like any other model.
    """
    is_image_text = type(described) in AutoModelForImageTextToText._model_mapping
    is_causal = type(described) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if is_image_text and not is_causal else AutoModelForCausalLM


def attention_of(described: Any, wanted: str) -> str:
    """Return the attention implementation of a model: eager, if it has no other and sdpa is wanted.

    Code from the Hub decides for itself.
    """
    mapping = auto_class(described)._model_mapping
    if wanted == "sdpa" and type(described) in mapping and not mapping[type(described)]._supports_sdpa:
        logger.info("%s has no sdpa attention in transformers; it is loaded with eager attention", described.model_type)
        return "eager"
    return wanted


def load_pretrained(name_or_path: str, called: str, **options: Any) -> PreTrainedModel:
    """Load a model by transformers with these options. `called` is its name in errors.

    Raises ValueError for a model that can't be built, and for weights that are damaged or incomplete.
    """
    with (
        loading_errors(called, name_or_path),
        bounded_build(name_or_path, *stored_size(Path(name_or_path))),
        with_index(name_or_path) as folder,
    ):
        named = {name: options[name] for name in ("revision", "trust_remote_code", "local_files_only") if name in options}
        described = AutoConfig.from_pretrained(folder, **named)
        if (wanted := options.get("attn_implementation")) is not None:
            options["attn_implementation"] = attention_of(described, wanted)
        loaded: Any = auto_class(described).from_pretrained(folder, output_loading_info=True, **options)
    model: PreTrainedModel = loaded[0]
    require_complete(called, sorted(loaded[1]["missing_keys"]))
    record_tie(model)
    model.config._name_or_path = name_or_path  # not the folder of links, which is gone
    return model


def read_config(config: TargetConfig) -> Any:
    """Read a target's configuration. Raises ValueError if there is none."""
    with loading_errors(f"the target {config.name_or_path!r}", config.name_or_path):
        return AutoConfig.from_pretrained(
            config.name_or_path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )


@contextmanager
def loading_errors(called: str, name_or_path: str) -> Iterator[None]:
    """Raise errors of the libraries in the block as ValueErrors that name the model and a remedy."""
    try:
        yield
    except (OSError, ImportError, SafetensorError, pickle.UnpicklingError, *CANT_BE_BUILT) as error:
        why, remedy = f"{error!s:.500}", "Do config.json, tokenizer and weights belong together, and is the download complete?"
        if not Path(name_or_path).is_dir():
            remedy = "Is it a Hub id that you can reach? Check the name, or log in (`hf auth login`)"
            if not use_hub():
                why = f"there is no such directory, nor is all of it in the cache, and {why_offline()}"
                remedy = f"Download it where there is a network (`hf download {name_or_path}`), or give a local directory"
        raise ValueError(f"{called} can't be loaded: {why}. {remedy}") from error


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
