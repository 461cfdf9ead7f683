"""A draft model as an ordinary folder of transformers.

The `assistant_model` of assisted generation. The tensors are the model's own, under its own names;
`config.json` is its configuration. Beside them lie the target's tokenizer and a generation
configuration with as many draft tokens as the drafter drafts, always (transformers would change
their number as it goes). Any folder of a causal model of transformers with the target's tokenizer
is read back, not only what was exported.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from ...data.files import write_json
from ..drafters.draft_model import DraftModel, tied_parameters
from ..drafters.saved.folder import CONFIG_FILE
from ..drafters.small_models import NOT_ARCHITECTURE, architecture_of, build_model, require_same_tokenizer
from ..target.config import TargetConfig
from ..target.hf_target import HFTarget
from ..target.identity import tokenizer_digest
from ..target.loading import load_tokenizer
from .folders import Folder, to_json
from .formats import NOTE_FILE, FolderContents, Format, Reading, Tensors
from .llama import SAME_NUMBER

PREFIX = "model."
"""Our names of the model's tensors begin so."""
FORMER_KEYS = frozenset(
    {
        "finetuning_task",
        "gradient_checkpointing",
        "max_sequence_length",
        "n_ctx",
        "prefix",
        "pretraining_tp",
        "task_specific_params",
        "tf_legacy_loss",
        "torchscript",
        "use_bfloat16",
    }
)
"""Keys of configurations that older versions of transformers wrote. None of them says what a model
computes."""


def write(drafter: DraftModel, target: HFTarget) -> FolderContents:
    """There is nothing that transformers has no place for.

    Trees are a way of drafting, and there a chain is drafted.
    """
    config = {**to_json(architecture_of(drafter.model)), "architectures": [type(drafter.model).__name__]}
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in drafter.state_dict().items()}
    return FolderContents(config=config, tensors=tensors, write_more=partial(_write_more, drafter, target))


def _write_more(drafter: DraftModel, target: HFTarget, directory: Path) -> None:
    target.tokenizer.save_pretrained(directory)
    stops = list(target.stop_ids)
    generation = GenerationConfig(
        eos_token_id=stops or None,
        pad_token_id=target.tokenizer.pad_token_id,
        num_assistant_tokens=drafter.config.length,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    write_json(directory / "generation_config.json", to_json(generation.to_diff_dict()))


def read(folder: Folder, target: HFTarget) -> Reading:
    """Return the model of a folder.

    Raises ValueError for one that transformers doesn't have, or that reads other tokens.
    """
    if folder.config.get("vocab_size") != target.vocab_size:
        raise ValueError(
            f"the model in {folder.path} has a vocabulary of {folder.config.get('vocab_size')} tokens and "
            f"{target.identity.name} one of {target.vocab_size}; use a smaller model of the same family"
        )
    named = {key: value for key, value in folder.config.items() if key not in (*NOT_ARCHITECTURE, "torch_dtype")}
    try:
        with torch.device("meta"):
            model = build_model(named, target)
    except ValueError as error:
        raise ValueError(f"{folder.path / CONFIG_FILE} describes no model: {error}") from error
    _require_known_keys(named, model.config, folder.path / CONFIG_FILE)
    if not (folder.path / NOTE_FILE).is_file():  # its digest was written down
        # With the checked configuration: transformers would read the stranger's again.
        options = {"config": model.config}
        tokenizer = load_tokenizer(TargetConfig(name_or_path=str(folder.path), tokenizer_options=options))
        require_same_tokenizer(str(folder.path), tokenizer_digest(tokenizer), target)
    tied = tied_parameters(model)

    def convert(tensors: Tensors, config: Any) -> Tensors:
        for name, twin in tied.items():
            if name in tensors and not torch.allclose(tensors[name].float(), tensors[twin].float(), rtol=SAME_NUMBER):
                raise ValueError(f"{folder.path} has {name} and {twin} that differ, and its config.json says that they are one")
        return {}

    shapes = model.state_dict()
    return Reading(
        options={"architecture": architecture_of(model)},
        rename=lambda config: {PREFIX + name: name for name in shapes},
        optional={name: shapes[name] for name in tied},
        convert=convert,
    )


def _require_known_keys(given: Mapping[str, Any], config: PreTrainedConfig, path: Path) -> None:
    """Raise ValueError for a key that this kind of model doesn't have.

    Switches that are off are allowed. What a configuration doesn't know, it keeps all the same;
    what it knows under an older name, as `rope_theta`, it doesn't.
    """
    kind = type(config)
    known = FORMER_KEYS.union(
        inspect.signature(kind).parameters, kind.attribute_map, PreTrainedConfig().to_dict(), ["model_type"]
    )
    on = {name for name, value in given.items() if value not in (None, False) and hasattr(config, name)}
    if unknown := sorted(on - known):
        raise ValueError(
            f"{path} has {', '.join(unknown)}, which transformers' {kind.__name__} doesn't know, so the model here may be "
            "another than the one that was trained; take out what says nothing of what the model computes"
        )


def is_of(folder: Folder) -> bool:
    """Told by being nothing else: a causal model with embeddings and several layers' names."""
    return any("embed" in name for name in folder.shapes) and "model_type" in folder.config


FORMAT = Format(name="transformers", kind="draft_model", write=write, read=read, is_of=is_of)
