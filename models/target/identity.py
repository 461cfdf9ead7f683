"""Which model and which tokenizer: digests that are equal where the answers are."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ...data.files import sha256_file

IRRELEVANT_KEYS = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Of a configuration: what may differ between two copies of one model. The type it computes in is told apart."""
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over the vocabulary and the rules that cut a text into it: what makes the ids of a text."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{index}\t{token}\n".encode())
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        steps = {name: rules[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor")}
        digest.update(json.dumps(steps, sort_keys=True).encode())
    return digest.hexdigest()


def weights_digest(name_or_path: str, commit: str | None) -> str:
    """SHA-256 of the weight files of a directory; of name and commit for the Hub, which never changes a commit's files."""
    directory = Path(name_or_path)
    if not directory.is_dir():
        return hashlib.sha256(f"{name_or_path}@{commit}".encode()).hexdigest()
    digest = hashlib.sha256()
    for path in sorted(path for pattern in WEIGHT_PATTERNS for path in directory.glob(pattern)):
        digest.update(f"{path.name}:{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def config_digest(name_or_path: str) -> str:
    """SHA-256 of what the configuration files of a directory say of the model and its stop tokens, whatever wrote them; empty
    for the Hub, where the weights' digest is the commit's."""
    directory = Path(name_or_path)
    if not directory.is_dir():
        return ""
    content = [
        _without(json.loads(path.read_text()), IRRELEVANT_KEYS) if (path := directory / name).is_file() else {}
        for name in ("config.json", "generation_config.json")
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _without(value: Any, keys: frozenset[str]) -> Any:
    """A JSON value without these keys, wherever they are."""
    if isinstance(value, list):
        return [_without(each, keys) for each in value]
    return {key: _without(each, keys) for key, each in value.items() if key not in keys} if isinstance(value, dict) else value
