"""Facts on a target and on data, read for `outrider init` without importing torch."""

import codecs
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from ..data.conversations import NO_ANSWER, Conversation, is_unanswered
from ..data.files import read_json
from ..data.forms import FORMS, form_of
from ..data.hub import use_hub
from ..data.paths import built_in_templates, looks_like_path
from ..data.raw_records import SUFFIXES, SURE_SUFFIXES, line_of_record, load_records, local_files
from ..data.sources import PromptOverlap, describe_drops, has_records
from ..data.suites import Prompt, PromptSet
from ..data.template_options import read_template, template_options

NUM_PROMPTS = 32
"""Maximum number of prompts held out of the data. The other limit is a tenth of the records."""
MAX_LENGTH, CPU_LENGTH = 2048, 512
"""Maximum numbers of tokens of an example: as in the published recipes, and without a GPU."""
NUM_CHECKED = 32
"""Number of first records that are checked. One of them must be usable."""
NUM_COMPARED = 1000
"""First conversations that are compared with the prompts that are held out."""
EQUAL_PROMPTS = 1000
"""Words in a row by which only equal prompts overlap."""
OVERLAP_WORDS, MAX_SHARED = 13, 0.1
"""Usual value of data.overlap_words, and the share of the conversations that it may leave out though
their prompts differ from those held out."""
CHECKED_BYTES = 1 << 16
"""Bytes of a text file that are checked to be text."""
LENGTH_MARGIN = 16
"""Positions that are kept free for the labels after a text."""
READ_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of a target that are read."""

SIZES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers", "layers_block_type", "layer_types"),
    "vocab_size": (),
    "max_position_embeddings": ("n_positions", "max_seq_len", "n_ctx"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": (),
    "head_dim": (),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
}
"""Sizes of a model, each with its names in the configurations of other families: of GPT-2, BLOOM, MPT, Nemotron-H and so on."""
MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys of configurations that count the layers of MTP heads."""
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Kinds of layers without a state. A hybrid that has no others keeps the keys of its family."""
CONVOLVED = "cca_time0"
"""Key of Zaya, whose attention has convolutions."""
RECURRENT_KEYS = (
    *(CONVOLVED, "conv_L_cache", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_attn_config", "mamba_", "ssm_"),
    "state_size",
)
"""Beginnings of keys that only models with recurrent layers have."""


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
    template_options: list[str]
    """Variables that the template reads, for data.template_options."""
    has_accelerator: bool
    has_mtp_head: bool = False
    """Whether its checkpoint has an MTP head, as far as its configuration says."""
    is_recurrent: bool = False
    """Whether it has recurrent layers, as far as its configuration says: their texts are labelled without branches."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of an example for this target, on this machine."""
        return min(MAX_LENGTH if self.has_accelerator else CPU_LENGTH, max(2, self.positions - LENGTH_MARGIN))


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Facts on the data that a recipe depends on."""

    source: str
    path: Path
    num_records: int
    prompts: list[dict[str, Any]]
    """Prompts of the conversations that are held out, as records of a suite; empty if none can be held
    out."""
    overlap_words: int
    """Value of data.overlap_words."""
    left_out: list[str] = field(default_factory=list)
    """What a run will not use: records by reason, and keys of records."""

    @property
    def overlap_reason(self) -> str:
        """What is left out of training, as a comment."""
        if self.overlap_words == EQUAL_PROMPTS:
            return "prompts share an instruction, so only conversations with a prompt of eval are left out"
        return "left out of training: conversations that share so many words in a row with a prompt of eval"


def read_target_facts(target: str, chat_template: str | None) -> TargetFacts:
    """Read the target's sizes and its chat template.

    Raises ValueError if the target doesn't exist, or has no chat template.
    """
    # 1. Read its config.json. A multimodal model has the sizes in text_config.
    name = target
    if Path(target).suffix.lower() == ".gguf" or (Path(target).is_dir() and not Path(target, "config.json").is_file()):
        from ..models.llm.gguf_files import folder_of  # imports torch

        target = folder_of(target)
    folder = _folder_of(target)
    config = _read_json(folder / "config.json")
    if not config:
        raise ValueError(f"target is {target!r}, which has no config.json; give a model's directory or its Hub id")
    config |= config.get("text_config") or {}
    config |= {name: size for name in SIZES if (size := _size(config, name)) is not None}
    missing = [name for name in ("hidden_size", "num_hidden_layers", "vocab_size") if not isinstance(config.get(name), int)]
    if missing or config.get("is_encoder_decoder"):
        what = f"has no {', '.join(missing)}" if missing else "describes an encoder with a decoder"
        raise ValueError(f"the config.json of {target} {what}; it must be that of a causal language model")

    # 2. Describe it for the recipe.
    model_type = str(config.get("model_type", "model"))
    positions = config.get("max_position_embeddings") or 2 * MAX_LENGTH
    template, reason, text = _chat_template(target, folder, chat_template)
    return TargetFacts(
        name_or_path=str(Path(name).resolve()) if Path(name).exists() else name,
        description=f"{model_type}: {config['num_hidden_layers']} layers of width "
        f"{config['hidden_size']}, a vocabulary of {config['vocab_size']}, up to {positions} positions",
        model_type=model_type,
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        positions=positions,
        layer_parameters=_layer_parameters(config),
        unused_token=_unused_token(folder, config["vocab_size"]),
        chat_template=template,
        template_reason=reason,
        template_options=sorted(template_options(text)),
        # By its driver: torch takes seconds to import.
        has_accelerator=bool(shutil.which("nvidia-smi")) or Path("/dev/kfd").exists() or sys.platform == "darwin",
        has_mtp_head=any(config.get(name) for name in MTP_COUNTS),
        is_recurrent=is_recurrent(config),
    )


def _size(config: Mapping[str, Any], name: str) -> int | None:
    """Return a size under any of its names: of sizes by layer the largest, of kinds of layers their number."""
    for known in (name, *SIZES[name]):
        value = config.get(known)
        if isinstance(value, list) and value:
            value = max(value) if all(isinstance(part, int) for part in value) else len(value)
        if isinstance(value, int):
            return value
    return None


def is_recurrent(config: Mapping[str, Any]) -> bool:
    """Return whether a model's configuration says that it has recurrent layers."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds and set(map(str, kinds)) <= ATTENTION_KINDS:
        return CONVOLVED in config
    return any(name.startswith(RECURRENT_KEYS) and bool(value) for name, value in config.items())


def _layer_parameters(config: dict[str, Any]) -> int:
    """Count the weights of a decoder layer: attention and a gated MLP."""
    hidden, heads = config["hidden_size"], config.get("num_attention_heads") or 1
    head_size = config.get("head_dim") or hidden // heads
    kv_size = (config.get("num_key_value_heads") or heads) * head_size
    return hidden * (2 * heads * head_size + 2 * kv_size + 3 * (config.get("intermediate_size") or 4 * hidden))


def _unused_token(folder: Path, vocab_size: int) -> int:
    """Return the first id after the tokenizer's tokens, or its last special token."""
    tokenizer = _read_json(folder / "tokenizer.json")
    vocabulary, added = (tokenizer.get("model") or {}).get("vocab") or [], tokenizer.get("added_tokens") or []
    num_tokens = max([len(vocabulary), *(token["id"] + 1 for token in added)])
    if num_tokens < vocab_size:
        return num_tokens
    return max((token["id"] for token in added if token.get("special")), default=vocab_size - 1)


def _chat_template(target: str, folder: Path, chat_template: str | None) -> tuple[str | None, str, str]:
    """Return the value of data.chat_template, its reason as a comment, and the template's text.

    Raises ValueError if the tokenizer has no template and none is given.
    """
    if chat_template in built_in_templates():
        return chat_template, "a template that ships with outrider", read_template(chat_template)
    if chat_template is not None:
        return str(Path(chat_template).resolve()), "replaces the tokenizer's template", read_template(chat_template)
    file = folder / "chat_template.jinja"
    template = read_template(str(file)) if file.is_file() else _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # of several templates, each with its name
        named = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if isinstance(template, str):
        return None, "null: the tokenizer's template", template
    if "vicuna" in target.lower():
        return "vicuna_v1.1", "the tokenizer has none", read_template("vicuna_v1.1")
    raise ValueError(
        f"the tokenizer of {target} has no chat template; give --chat-template FILE.jinja, or one that ships with "
        f"outrider: {', '.join(built_in_templates())}"
    )


def _folder_of(target: str) -> Path:
    """Return the folder of a target's configuration and tokenizer, which are downloaded if it is on the Hub.

    Raises ValueError if there is no such target.
    """
    if Path(target).is_dir():
        return Path(target)
    if looks_like_path(target):
        raise ValueError(f"target is {target!r}, and there is no such directory; give one with config.json, or a Hub id")
    from huggingface_hub import snapshot_download

    from ..models.drafters.saved.download import telling_hub_errors  # imports torch

    use_hub()
    with telling_hub_errors(target):
        return Path(snapshot_download(target, allow_patterns=[*READ_FILES]))


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no such file."""
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object; copy or download it again")
    return value


def read_data_facts(path: Path, max_chars: int) -> DataFacts:
    """Read the form of the records, count them, and draw prompts to hold out.

    The records are parsed as a run does it. A prompt has at most `max_chars` characters. Raises
    ValueError if the file doesn't exist, or its records have no known form.
    """
    # 1. Check the path. Text files have no prompts.
    files = local_files(str(path))
    if not files:
        raise ValueError(
            f"data is {path}, and there is no such file; give local files. To download a "
            "data set from the Hub: `hf download ID --repo-type dataset`"
        )
    if not any(file.name.lower().endswith(SURE_SUFFIXES) for file in files) and not has_records(str(path)):
        _require_text(path)
        return DataFacts(source="text", path=path.absolute(), num_records=len(files), prompts=[], overlap_words=OVERLAP_WORDS)

    # 2. Read the records once, and sample prompts of one or two user turns.
    records = load_records(str(path))
    first = list(islice(records, NUM_CHECKED))
    source, num_records, distinct = _source_of(first, path), 0, set[int]()
    dropped, notes = Counter[str](), Counter[str]()
    chosen, checked = list[dict[str, Any]](), list[Conversation]()
    random, num_eligible = Random(0), 0
    for record in chain(first, records):
        conversation = FORMS[source].parse(record, notes)
        if isinstance(conversation, str) or is_unanswered(conversation):
            dropped[conversation if isinstance(conversation, str) else NO_ANSWER] += 1
            continue
        num_records += 1
        checked += [conversation] if len(checked) < NUM_COMPARED else []
        prompt = _prompt_of(conversation)
        if not prompt["turns"] or len(json.dumps(prompt)) > max_chars:
            continue
        # Reservoir sampling: each eligible record is equally likely, in one pass.
        distinct.add(hash(prompt["turns"][0]))
        num_eligible += 1
        if len(chosen) < NUM_PROMPTS:
            chosen.append(prompt)
        elif (slot := random.randrange(num_eligible)) < NUM_PROMPTS:
            chosen[slot] = prompt

    if not num_records:
        raise ValueError(
            f"data is {path}, and none of its records can be trained on as {source} ({_place(path)}: "
            f"{describe_drops(dropped)}); repair the records, or give another file"
        )
    # 3. Hold out at most a tenth. Training leaves out each conversation that begins with one of these
    # prompts, so others must remain.
    random.shuffle(chosen)
    held_out = {json.dumps(prompt): prompt for prompt in chosen[: max(1, num_records // 10)]}
    prompts = [*held_out.values()]
    if len(distinct) <= len({prompt["turns"][0] for prompt in prompts}):
        prompts = []
    return DataFacts(
        source=source,
        path=path.absolute(),
        num_records=num_records,
        prompts=prompts,
        overlap_words=_overlap_words(prompts, checked),
        left_out=[f"{count} x {reason}" for reason, count in (dropped + notes).most_common()],
    )


def _prompt_of(conversation: Conversation) -> dict[str, Any]:
    """Return a conversation's first two user turns, with its system prompt and functions."""
    turns = [turn.content for turn in conversation.turns if turn.role == "user"][:2]
    system = [turn.content for turn in conversation.turns if turn.role == "system"]
    return {
        "turns": turns,
        **({"system": system[0]} if system else {}),
        **({"tools": list(conversation.tools)} if conversation.tools else {}),
    }


def _overlap_words(prompts: Sequence[Mapping[str, Any]], conversations: Sequence[Conversation]) -> int:
    """Return the value of data.overlap_words: a larger one if all prompts share an instruction.

    Then the usual one would leave out most of the data.
    """
    suite = PromptSet(
        name="held_out",
        revision="",
        prompts=tuple(Prompt(id="", category="", turns=tuple(prompt["turns"])) for prompt in prompts),
    )
    usual, equal = (PromptOverlap([suite], words) for words in (OVERLAP_WORDS, EQUAL_PROMPTS))
    num_usual, num_equal = (
        sum(overlap.suite_of(conversation) is not None for conversation in conversations) for overlap in (usual, equal)
    )
    return EQUAL_PROMPTS if num_usual - num_equal > MAX_SHARED * len(conversations) else OVERLAP_WORDS


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


def _place(path: Path) -> str:
    """Return the place of a file's first record."""
    line = line_of_record(path, 0) if path.is_file() else None
    return f"{path}{'' if line is None else f', line {line}'}"


def _source_of(records: list[Any], path: Path) -> str:
    """Return the value of data.source for the first records of a file. Raises ValueError if they have no known form."""
    source = form_of(records)
    if source is None:
        record = records[0]
        names = list(record) if isinstance(record, dict) else []
        description = f"the keys {', '.join(names)}" if names else f"no keys: {record!r:.60}"
        raise ValueError(
            f"data is {path}, whose first record has {description} ({_place(path)}); rename the keys to a known form: "
            f"{'; '.join(form.example for form in FORMS.values())}"
        )
    return source
