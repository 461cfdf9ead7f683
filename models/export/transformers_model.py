"""A draft model as an ordinary folder of transformers.

It can be the `assistant_model` of assisted generation. The tensors have the model's own names, and
`config.json` is its configuration. The target's tokenizer and a generation configuration lie beside
them. The latter fixes the number of draft tokens to the drafter's, since transformers would vary it
otherwise. Besides our exports, any folder of a causal model of transformers with the target's
tokenizer can be read.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ...data.files import write_json
from ..bounded_build import bounded_build, require_possible_numbers
from ..drafters.draft_model import DraftModel, tied_parameters
from ..drafters.saved.folder import CONFIG_FILE
from ..drafters.small_models import NOT_ARCHITECTURE, architecture_in, build_model, require_same_tokenizer
from ..llm.config import TargetConfig
from ..llm.hf_target import HFTarget
from ..llm.identity import tokenizer_digest
from ..llm.loading import load_tokenizer
from .folders import Folder
from .formats import NOTE_FILE, FolderContents, Format, Reading, Tensors
from .llama import SAME_NUMBER

PREFIX = "model."
"""Prefix of the model's tensors in our own names."""


def write(drafter: DraftModel, target: HFTarget) -> FolderContents:
    """Build the contents of the folder; transformers supports every draft model.

    transformers drafts a chain, and draft trees are only a way of drafting here.
    """
    config = {**architecture_in(drafter.model.config), "architectures": [type(drafter.model).__name__]}
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in drafter.state_dict().items()}
    return FolderContents(config=config, tensors=tensors, write_more=partial(_write_more, drafter, target))


def _write_more(drafter: DraftModel, target: HFTarget, directory: Path) -> None:
    target.tokenizer.save_pretrained(directory)
    stops = list(target.stop_ids)
    pad = target.tokenizer.pad_token_id
    generation = GenerationConfig(
        eos_token_id=stops or None,
        pad_token_id=None if pad is None or pad >= target.vocab_size else pad,
        num_assistant_tokens=drafter.config.length,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    write_json(directory / "generation_config.json", generation.to_diff_dict())


def read(folder: Folder, target: HFTarget) -> Reading:
    """Describe how to read the model of a folder.

    Raises ValueError for a model that transformers doesn't have, or with another tokenizer.
    """
    # 1. Check the configuration and the tokenizer.
    if folder.config.get("vocab_size") != target.vocab_size:
        raise ValueError(
            f"the model in {folder.path} has a vocabulary of {folder.config.get('vocab_size')} tokens, but "
            f"{target.identity.name} has one of {target.vocab_size}. If it has the same tokenizer, decode with "
            f"draft_model:{folder.path}, or train it (drafter.path): both fit its vocabulary. Else use a model of the same "
            "family"
        )
    named = {key: value for key, value in folder.config.items() if key not in (*NOT_ARCHITECTURE, "torch_dtype")}
    require_possible_numbers(named, folder.path / CONFIG_FILE)
    try:
        with bounded_build(folder.path / CONFIG_FILE, len(folder.shapes)), torch.device("meta"):
            model = build_model(named, target)
    except ValueError as error:
        raise ValueError(f"{folder.path / CONFIG_FILE} describes no model: {error}") from error
    if not (folder.path / NOTE_FILE).is_file():  # a note records the tokenizer's digest
        # Pass the checked configuration; otherwise transformers would read the unchecked file
        # again.
        options = {"config": model.config}
        tokenizer = load_tokenizer(TargetConfig(name_or_path=str(folder.path), tokenizer_options=options))
        require_same_tokenizer(str(folder.path), tokenizer_digest(tokenizer), target.identity)

    # 2. Describe the tensors.
    tied = tied_parameters(model)

    def convert(tensors: Tensors, config: Any) -> Tensors:
        for name, twin in tied.items():
            if name in tensors and not torch.allclose(tensors[name].float(), tensors[twin].float(), rtol=SAME_NUMBER):
                raise ValueError(f"{folder.path} has different {name} and {twin}, but its config.json ties them; correct it")
        return {}

    shapes = model.state_dict()
    return Reading(
        options={"architecture": architecture_in(model.config)},
        rename=lambda config: {PREFIX + name: name for name in shapes},
        optional={name: shapes[name] for name in tied},
        convert=convert,
    )


def is_of(folder: Folder) -> bool:
    """Check for embeddings and a model type; other formats are checked first."""
    return any("embed" in name for name in folder.shapes) and "model_type" in folder.config


FORMAT = Format(name="transformers", kind="draft_model", write=write, read=read, is_of=is_of)
