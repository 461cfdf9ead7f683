"""Facts on a target and on data, read for `outrider init` without importing torch."""

import codecs
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from ..data.hub import use_hub, why_offline
from ..data.paths import built_in_templates, looks_like_path
from ..data.raw_records import ROLES, SUFFIXES, TURN_KEYS, line_of_record, read_records

NUM_PROMPTS = 32
"""Maximum number of prompts held out of the data. The other limit is a tenth of the records."""
MAX_LENGTH = 2048
"""Maximum number of tokens of an example, as in the published recipes."""
NUM_CHECKED = 32
"""Number of first records that are checked. One of them must be usable."""
CHECKED_BYTES = 1 << 16
"""Bytes of a text file that are checked to be text."""
LENGTH_MARGIN = 16
"""Positions that are kept free for the labels after a text."""


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Facts on the target that a recipe depends on."""

    name_or_path: str
    description: str
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    positions: int
    layer_parameters: int
    """Parameters of a decoder layer of Llama's kind and of the target's sizes."""
    unused_token: int
    """A token that no text has, as far as the tokenizer's files show."""
    chat_template: str | None
    """Value of data.chat_template."""
    template_reason: str
    has_accelerator: bool

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of an example for this target."""
        return min(MAX_LENGTH, max(2, self.positions - LENGTH_MARGIN))


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Facts on the data that a recipe depends on."""

    source: str
    path: Path
    num_records: int
    prompts: list[list[str]]
    """User turns of the conversations that are held out; empty if none can be held out."""


def read_target_facts(target: str, chat_template: str | None) -> TargetFacts:
    """Read the target's sizes and its chat template.

    Raises ValueError if the target doesn't exist, or has no chat template.
    """
    # 1. Read its config.json. A multimodal model has the sizes in text_config.
    if looks_like_path(target) and not Path(target).is_dir():
        raise ValueError(f"target is {target!r}, and there is no such directory; give one with config.json, or a Hub id")
    config = _read_json(target, "config.json")
    if config is None:
        raise ValueError(f"target is {target!r}, which has no config.json; give a model's directory or its Hub id")
    config |= config.get("text_config") or {}
    sizes = ("hidden_size", "num_hidden_layers", "vocab_size")
    if missing := [name for name in sizes if not isinstance(config.get(name), int)]:
        raise ValueError(f"the config.json of {target} has no {', '.join(missing)}; it must be that of a causal language model")

    # 2. Describe it for the recipe.
    model_type = str(config.get("model_type", "model"))
    positions = config.get("max_position_embeddings") or 2 * MAX_LENGTH
    template, reason = _chat_template(target, chat_template)
    return TargetFacts(
        name_or_path=str(Path(target).resolve()) if Path(target).is_dir() else target,
        description=f"{model_type}: {config['num_hidden_layers']} layers of width "
        f"{config['hidden_size']}, a vocabulary of {config['vocab_size']}, up to {positions} positions",
        model_type=model_type,
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        positions=positions,
        layer_parameters=_layer_parameters(config),
        unused_token=_unused_token(target, config["vocab_size"]),
        chat_template=template,
        template_reason=reason,
        has_accelerator=_has_accelerator(),
    )


def _layer_parameters(config: dict[str, Any]) -> int:
    """Count the weights of a decoder layer: attention and a gated MLP."""
    hidden, heads = config["hidden_size"], config.get("num_attention_heads") or 1
    head_size = config.get("head_dim") or hidden // heads
    kv_size = (config.get("num_key_value_heads") or heads) * head_size
    return hidden * (2 * heads * head_size + 2 * kv_size + 3 * (config.get("intermediate_size") or 4 * hidden))


def _unused_token(target: str, vocab_size: int) -> int:
    """Return the first id after the tokenizer's tokens, or its last special token."""
    tokenizer = _read_json(target, "tokenizer.json") or {}
    vocabulary, added = (tokenizer.get("model") or {}).get("vocab") or [], tokenizer.get("added_tokens") or []
    num_tokens = max([len(vocabulary), *(token["id"] + 1 for token in added)])
    if num_tokens < vocab_size:
        return num_tokens
    return max((token["id"] for token in added if token.get("special")), default=vocab_size - 1)


def _chat_template(target: str, chat_template: str | None) -> tuple[str | None, str]:
    """Return the value of data.chat_template, and its reason as a comment.

    Raises ValueError if the tokenizer has no template and none is given.
    """
    if chat_template is not None:
        if chat_template in built_in_templates():
            return chat_template, "a template that ships with outrider"
        if not Path(chat_template).is_file():
            names = ", ".join(built_in_templates())
            raise ValueError(f"chat_template is {chat_template!r}; give a .jinja file, or one of {names}")
        return str(Path(chat_template).resolve()), "replaces the tokenizer's template"
    template = _read(target, "chat_template.jinja")
    if template is None:
        tokenizer = _read_json(target, "tokenizer_config.json") or {}
        template = json.dumps(tokenizer["chat_template"]) if tokenizer.get("chat_template") else None
    if template is None and "vicuna" in target.lower():
        return "vicuna_v1.1", "the tokenizer has none"
    if template is None:
        raise ValueError(
            f"the tokenizer of {target} has no chat template; give --chat-template FILE.jinja, or one that ships with "
            f"outrider: {', '.join(built_in_templates())}"
        )
    if "enable_thinking" in template:
        return "qwen3_no_thinking", "thinking is off; null: the tokenizer's template"
    return None, "null: the tokenizer's template"


def _read_json(target: str, name: str) -> dict[str, Any] | None:
    """Read a JSON object from a file of the target; None if there is no such file."""
    text = _read(target, name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the {name} of {target} is not JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"the {name} of {target} is not a JSON object; copy or download it again")
    return value


def _read(target: str, name: str) -> str | None:
    """Read a file of the target from its directory, the Hub's cache or the Hub.

    Returns None if the target has no such file.
    """
    if Path(target).is_dir():
        path = Path(target) / name
        return path.read_text(encoding="utf-8") if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    is_online = use_hub()
    try:
        return Path(hf_hub_download(target, name, local_files_only=not is_online)).read_text(encoding="utf-8")
    except EntryNotFoundError as error:
        if is_online or name != "config.json":
            return None
        raise ValueError(f"target is {target!r}: it is neither a directory nor in the cache, and {why_offline()}") from error
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ValueError(f"target is {target!r}, which is no directory, and the Hub raises: {error}") from error


def _has_accelerator() -> bool:
    """Whether there is a GPU. Looks for its driver, because torch takes seconds to import."""
    return bool(shutil.which("nvidia-smi")) or Path("/dev/kfd").exists() or sys.platform == "darwin"


def read_data_facts(path: Path, max_chars: int) -> DataFacts:
    """Read the form of the records, count them, and draw prompts to hold out.

    A prompt has at most `max_chars` characters. Raises ValueError if the file doesn't exist, or its
    records have no known form.
    """
    # 1. Check the path. Text files have no prompts.
    if not path.exists():
        raise ValueError(
            f"data is {path}, and there is no such file; give a local file. To download a "
            "data set from the Hub: `hf download ID --repo-type dataset`"
        )
    if path.is_dir() or path.suffix not in SUFFIXES:
        _require_text(path)
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        return DataFacts(source="text", path=path.resolve(), num_records=len(files), prompts=[])

    # 2. Read the records once, and sample prompts of one or two user turns.
    records = read_records(path)
    first = list(islice(records, NUM_CHECKED))
    source, num_records, distinct = _source_of(first, path), 0, set[int]()
    chosen: list[list[str]] = []
    random, num_eligible = Random(0), 0
    for record in chain(first, records):
        num_records += 1
        turns = list(_user_turns(record, source))[:2]
        if not turns or not all(turn.strip() for turn in turns) or sum(map(len, turns)) > max_chars:
            continue
        # Reservoir sampling: each eligible record is equally likely, in one pass.
        distinct.add(hash(turns[0]))
        num_eligible += 1
        if len(chosen) < NUM_PROMPTS:
            chosen.append(turns)
        elif (slot := random.randrange(num_eligible)) < NUM_PROMPTS:
            chosen[slot] = turns

    # 3. Hold out at most a tenth. Training leaves out each conversation that begins with one of these
    # prompts, so others must remain.
    random.shuffle(chosen)
    held_out = {tuple(turns): turns for turns in chosen[: max(1, num_records // 10)]}
    is_enough = len(distinct) > len({turns[0] for turns in held_out})
    return DataFacts(
        source=source, path=path.resolve(), num_records=num_records, prompts=[*held_out.values()] if is_enough else []
    )


def _require_text(path: Path) -> None:
    """Raise ValueError for a file that holds no text, or JSON records under the suffix of a text."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        beginning = file.read(CHECKED_BYTES)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(beginning)  # the last character may be cut
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(
            f"data is {path}, which is not UTF-8 text; give conversations ({', '.join(SUFFIXES)}) or text files, or convert it"
        )
    if re.match(r'\s*\[?\s*\{\s*"', text):
        raise ValueError(f"data is {path}, which holds JSON and not text; rename it to {path.stem}.jsonl")


def _source_of(records: list[Any], path: Path) -> str:
    """Return the value of data.source for the first records of a file.

    Raises ValueError if they have no known form, or if none of them can be trained on.
    """
    # 1. The form of the first record that has a known form.
    forms = {"sharegpt": {"conversations"}, "messages": {"messages"}, "alpaca": {"instruction", "output"}, "text": {"text"}}
    keys = [set(record) if isinstance(record, dict) else set() for record in records]
    source = next((form for present in keys for form, wanted in forms.items() if wanted <= present), None)
    line = line_of_record(path, 0)
    location = f"{path}{'' if line is None else f', line {line}'}"
    if source is None:
        record = records[0]
        names = list(record) if isinstance(record, dict) else []
        description = f"the keys {', '.join(names)}" if names else f"no keys: {record!r:.60}"
        raise ValueError(
            f"data is {path}, whose first record has {description} ({location}); rename the keys to a known form: "
            "conversations (ShareGPT), messages, instruction and output (Alpaca), or text"
        )

    # 2. One of them must be usable. The run drops the others, and counts them.
    reasons = [_why_unusable(record, source) for record in records]
    if all(reasons):
        raise ValueError(
            f"data is {path}, and none of its first {len(records)} records can be trained on as {source} "
            f"({location}: {reasons[0]}); repair the records, or give another file"
        )
    return source


def _why_unusable(record: Any, source: str) -> str | None:
    """Return why a record of this form can't be trained on; None if it can."""
    record = record if isinstance(record, dict) else {}
    if source in ("text", "alpaca"):
        keys = ["text"] if source == "text" else ["instruction", "output"]
        bad = [key for key in keys if not isinstance(record.get(key), str)]
        return f"{bad[0]!r} is no text" if bad else None
    key = {"sharegpt": "conversations"}.get(source, source)
    turns = record.get(key)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return f"{key!r} is no list of turns"
    roles = [ROLES.get(str(turn.get(TURN_KEYS[key][0]))) for turn in turns]
    return None if "assistant" in roles else "no assistant turn"


def _user_turns(record: Any, source: str) -> Iterator[str]:
    """Yield the user turns of a record; nothing if it has none that can be read."""
    if not isinstance(record, dict) or source == "text":
        return
    if source == "alpaca":
        parts = [record.get("instruction"), record.get("input")]
        yield "\n\n".join(part for part in parts if isinstance(part, str) and part.strip())
        return
    key = {"sharegpt": "conversations"}.get(source, source)
    role_key, text_key = TURN_KEYS[key]
    for turn in record.get(key) or []:
        if isinstance(turn, dict) and ROLES.get(str(turn.get(role_key))) == "user" and isinstance(turn.get(text_key), str):
            yield turn[text_key]
