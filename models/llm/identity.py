"""Digests that identify a model and its tokenizer: equal digests mean equal answers."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ...data.files import drop_from_cache, sha256_file

IRRELEVANT_KEYS = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Keys of a configuration that may differ between two copies of one model.

The compute type is recorded elsewhere.
"""
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of the vocabulary and of the rules by which a text is tokenised."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{index}\t{token}\n".encode())
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        steps = {name: rules[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor")}
        digest.update(json.dumps(steps, sort_keys=True).encode())
    return digest.hexdigest()


def weights_digest(name_or_path: str, commit: str | None, *, keeps_cache: bool = True) -> str:
    """Return the SHA-256 of a directory's weight files, or of name and commit on the Hub.

    The files of a commit on the Hub never change. Without `keeps_cache` the files don't stay in the
    system's page cache, which a memory budget doesn't count.
    """
    directory = Path(name_or_path)
    if not directory.is_dir():
        return hashlib.sha256(f"{name_or_path}@{commit}".encode()).hexdigest()
    digest = hashlib.sha256()
    for path in sorted(path for pattern in WEIGHT_PATTERNS for path in directory.glob(pattern)):
        digest.update(f"{path.name}:{sha256_file(path)}\n".encode())
        if not keeps_cache:
            drop_from_cache(path)
    return digest.hexdigest()


def config_digest(name_or_path: str) -> str:
    """Return the SHA-256 of a directory's model and generation configuration.

    Keys that depend on the writer are left out. Empty for the Hub, where the weights' digest
    contains the commit.
    """
    directory = Path(name_or_path)
    if not directory.is_dir():
        return ""
    content = [
        _without(json.loads(path.read_text()), IRRELEVANT_KEYS) if (path := directory / name).is_file() else {}
        for name in ("config.json", "generation_config.json")
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _without(value: Any, keys: frozenset[str]) -> Any:
    """Return a JSON value without these keys, at all levels."""
    if isinstance(value, list):
        return [_without(item, keys) for item in value]
    if isinstance(value, dict):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    return value
