"""`outrider init`: write a commented recipe for the user's target and data.

`templates/recipe.yaml` is the recipe of all kinds of drafters, and `templates/kinds.yaml` has the parts that differ. Their
`$names` are filled in here.
"""

import json
import re
import shlex
from pathlib import Path
from string import Template
from textwrap import indent
from typing import TYPE_CHECKING, Any, ClassVar

import yaml
from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS

if TYPE_CHECKING:
    from .init_facts import DataFacts, TargetFacts

TEMPLATES = Path(__file__).with_name("templates")
MOST_LEFT_OUT = 10
"""Most reasons and keys that a line names."""
SUITE = "held_out"
"""Name of the suite of prompts that are held out of the training data."""
FIRST_TRY = (
    "data.limit=20 data.max_length=128 train.steps=10 train.warmup_steps=0 train.global_batch_size=null "
    "eval.repeats=1 eval.max_new_tokens=16"
)
"""Options of a run that takes some minutes, on two cores and with a target of 100 million parameters."""

MAX_SHARE = 0.1
"""Largest share of the target's parameters that one pass of a drafter reads, if its sizes allow it: a
draft of several passes must cost less than the tokens that it saves."""
REDUCED_VOCABULARIES = (32_000, 16_000, 8_000, 4_000)
"""Sizes of a reduced vocabulary. The first one is that of EAGLE-3's release."""
LARGE_VOCABULARY = 64_000
"""From this size, the vocabulary is reduced in any case."""
DEEP_TARGET, BLOCK_LAYERS, BLOCK_SHARE = 24, 5, 0.13
"""Targets of at least DEEP_TARGET layers get a block drafter of five layers, as the released ones have,
if its one pass reads at most BLOCK_SHARE of the target's parameters, as theirs of 8B targets do."""
PUBLISHED_LAYERS, MIN_EAGLE3_LAYERS = 7, 3
"""Fewest layers of a target whose published three layers (2, half, all - 3) differ, and that has
three layers at all."""
HEADS = 4
"""Heads of the Medusa drafter."""
EPOCHS = {"redrafter": 2, "medusa": 2, "draft_model": 2}
"""Epochs of each kind of drafter; others have four, as in EAGLE-3's release."""
LARGE_BATCHES = ("redrafter", "medusa")
"""Kinds whose published recipes have 128 texts per step; others have 16."""
CPU_RECORDS = 1000
"""Without a GPU: records of the data, at most. They take hours."""


@dataclass(kw_only=True, config=OPTIONS)
class InitOptions:
    """Options of `outrider init`."""

    recipe: Path
    """The recipe's file to write, such as my.yaml."""
    target: str
    """The target: a directory or a Hub id."""
    data: Path
    """Training data: conversations (.json, .jsonl, .parquet), a folder of them, or text files."""
    drafter: str = "eagle3"
    """Kind: eagle3, redrafter, block, block_dspark, medusa, eagle, mtp or draft_model."""
    chat_template: str | None = None
    """A .jinja file or a template's name, if the target's tokenizer has no template."""

    POSITIONAL: ClassVar = ("recipe",)


def init_command(options: InitOptions) -> None:
    """Write a commented recipe for your target and data, ready for: outrider run my.yaml"""
    from .init_facts import read_data_facts, read_target_facts  # reads the target's files, maybe from the Hub

    # 1. Check the arguments before anything is read.
    recipe, target, drafter = options.recipe, options.target, options.drafter
    recipe = recipe if recipe.suffix in (".yaml", ".yml") else recipe.with_name(f"{recipe.name}.yaml")
    prompts = recipe.with_name(f"{recipe.stem}.prompts.jsonl")
    if existing := [str(path) for path in (recipe, prompts) if path.exists()]:
        verb = "exists" if len(existing) == 1 else "exist"
        raise ValueError(f"{' and '.join(existing)} {verb}, and init doesn't overwrite files; name another file")
    if drafter not in kinds():
        raise ValueError(f"drafter is {drafter!r}; it must be one of {', '.join(kinds())}")

    # 2. Read the target's sizes and the data: the recipe depends on them.
    target_facts = read_target_facts(target, options.chat_template)
    data_facts = read_data_facts(options.data, max_chars=target_facts.max_length)

    # 3. Write the recipe, and the prompts beside it.
    text = recipe_text(recipe, drafter, target_facts, data_facts, prompts.resolve())
    recipe.parent.mkdir(parents=True, exist_ok=True)
    if data_facts.prompts:
        lines = [json.dumps({"id": f"held_out_{index}", **prompt}) for index, prompt in enumerate(data_facts.prompts)]
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{prompts}: {_count(len(lines), 'prompt')} to evaluate on, from the data; training leaves them out")
    recipe.write_text(text, encoding="utf-8")
    print(f"{recipe}: {drafter} for {target}, on {_count(data_facts.num_records, 'record')} ({data_facts.source})")
    if data_facts.left_out:
        print(f"Left out of the data: {'; '.join(data_facts.left_out[:MOST_LEFT_OUT])}")
    command = f"outrider run {shlex.quote(str(recipe))}"
    print(f"\nNext:\n  {command} --plan    # time, memory and disk\n  {command}")


def kinds() -> list[str]:
    """Return the kinds of drafters that a recipe can be written for."""
    return sorted(_parts())


def _parts() -> dict[str, dict[str, str]]:
    """Return the parts of a recipe that differ, by kind of drafter."""
    parts: dict[str, dict[str, str]] = yaml.safe_load((TEMPLATES / "kinds.yaml").read_text(encoding="utf-8"))
    return parts


def recipe_text(recipe: Path, drafter: str, target: "TargetFacts", data: "DataFacts", prompts: Path) -> str:
    """Return the recipe: the template with the parts of this kind of drafter, filled in."""
    # 1. At least ten steps per epoch, and at least 100 steps.
    limit = None if target.has_accelerator or data.num_records <= CPU_RECORDS else CPU_RECORDS
    num_texts, largest = limit or data.num_records, 128 if drafter in LARGE_BATCHES else 16
    batch = largest if num_texts >= 10 * largest else 8
    epochs = EPOCHS.get(drafter, 4)
    steps = max(100, -(-epochs * num_texts // batch))

    # 2. What follows from the target, the data and the machine.
    reason = f"{'without a GPU; ' if limit else ''}null: the whole data, {_count(data.num_records, 'record')}"
    values = {
        "choice": drafter,
        "target": target.name_or_path,
        "recipe": shlex.quote(recipe.name),
        "name": recipe.stem if re.fullmatch("[A-Za-z_][A-Za-z_0-9-]*", recipe.stem) else _yaml(recipe.stem),
        "first_try": FIRST_TRY,
        "try_output": f"outputs/{recipe.stem}_try",
        "precision": "bf16" if target.has_accelerator else '"no"',
        "description": target.description,
        "target_path": _yaml(target.name_or_path),
        "dtype": "auto" if target.has_accelerator else "float32",
        "dtype_reason": "that of its files" if target.has_accelerator else "a CPU emulates bfloat16; on a GPU: auto",
        "source": data.source,
        "data_path": _yaml(str(data.path)),
        "limit": _yaml(limit),
        "limit_reason": reason,
        "max_length": target.max_length,
        "chat_template": _yaml(target.chat_template),
        "template_reason": target.template_reason,
        "options_reason": f"the template reads {', '.join(target.template_options) or 'none'}",
        "overlap_words": data.overlap_words,
        "branches": _yaml(not target.is_recurrent),
        "branches_reason": "recurrent layers are labelled along the text"
        if target.is_recurrent
        else "labels at every position",
        "overlap_reason": data.overlap_reason,
        "steps": steps,
        "epochs": epochs,
        "batch_size": min(4 if drafter in LARGE_BATCHES else 2, batch),
        "global_batch_size": batch,
        "warmup_steps": min(15, steps // 20),
        "suite": suite_line(data, prompts),
        "max_new_tokens": min(256, target.positions // 4),
    }
    # 3. The parts of this kind, then its sizes.
    parts = _parts()[drafter]
    parts |= {"training": indent(parts["training"], "  "), "settings": indent(parts["settings"], "    ")}
    template = Template((TEMPLATES / "recipe.yaml").read_text(encoding="utf-8")).safe_substitute(parts)
    return Template(template).substitute(values | drafter_sizes(target))


def drafter_sizes(target: "TargetFacts") -> dict[str, Any]:
    """Return the sizes of all kinds of drafters by which one pass reads at most MAX_SHARE of the target."""
    hidden, layer, vocabulary = target.hidden_size, target.layer_parameters, target.vocab_size
    num_parameters = target.num_layers * layer + hidden * vocabulary
    room = MAX_SHARE * num_parameters
    # 1. EAGLE-3 and block drafters: layers, then a head of a reduced vocabulary.
    is_deep = target.num_layers >= DEEP_TARGET and BLOCK_LAYERS * layer < BLOCK_SHARE * num_parameters
    num_layers = BLOCK_LAYERS if is_deep else 1
    reduced = reduced_vocabulary(vocabulary, int(max(0, room - 2 * layer) // hidden))  # EAGLE-3's layer is wider
    layers, reason, formats = eagle3_layers(target.num_layers)
    # 2. A ReDrafter: the head's width. The recurrence and the blocks have matrices of the target's width.
    widths = [width for width in (2 * hidden, hidden, hidden // 2) if width * (vocabulary + 2 * width + 2 * hidden) < room]
    width = widths[0] if widths else max(1, hidden // 4)
    # 3. Medusa: an output layer for each head, the target's, or one of low rank.
    owns, shares = HEADS * (hidden**2 + hidden * vocabulary) < room, HEADS * hidden**2 + hidden * vocabulary < room
    ranks = [rank for rank in (hidden // 2, hidden // 4, hidden // 8) if rank * (hidden + vocabulary) < room]
    return {
        "feature_layers": layers,
        "layers_reason": reason,
        "formats": f"[{', '.join(formats)}]",
        "draft_vocab_size": _yaml(reduced),
        "vocab_reason": "null: the whole vocabulary" if reduced is None else f"the most frequent of {vocabulary} tokens",
        "num_layers": num_layers,
        "mask_token_id": target.unused_token,
        "block_init": "target" if target.model_type == "qwen3" else "random",
        "exit_width": width,
        "width_reason": f"of the head's input, which is read for each of {vocabulary} tokens",
        "heads_reason": "each head has an output layer" if owns else "output layers of its own would cost more than they save",
        "share_head": _yaml(shares and not owns),
        "head_rank": _yaml(None if owns or shares else (ranks or [max(1, hidden // 16)])[0]),
        "medusa_formats": "[medusa]" if owns else "[]",
        "mtp_init": "target" if target.has_mtp_head else "random",
        "mtp_reason": "the head of its own checkpoint" if target.has_mtp_head else "its checkpoint has no such head",
        "mtp_rate": "1e-4 # it is trained already" if target.has_mtp_head else "1e-3",
        "mtp_formats": "[mtp]" if target.has_mtp_head else "[]",
        "model_layers": max([1, *(number for number in range(1, 5) if number * layer + hidden * vocabulary < room)]),
    }


def reduced_vocabulary(vocabulary: int, room: int) -> int | None:
    """Return the size of a draft vocabulary of at most `room` tokens; None if the whole has room."""
    if vocabulary <= min(room, LARGE_VOCABULARY):
        return None
    sizes = [size for size in REDUCED_VOCABULARIES if size < vocabulary]
    return next((size for size in sizes if size <= room), sizes[-1] if sizes else None)


def eagle3_layers(num_layers: int) -> tuple[list[int], str, list[str]]:
    """Return the target's layers to read, the reason, and the formats of such a drafter."""
    published = sorted({min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3)})
    if num_layers >= PUBLISHED_LAYERS:
        return published, "an early, a middle and a late layer, as in the paper", ["eagle3"]
    if num_layers >= MIN_EAGLE3_LAYERS:
        layers = [min(1, num_layers - 3), num_layers // 2, num_layers - 1]
        return layers, "the target is too shallow for the paper's layers; vLLM reads these", ["speculators"]
    return published, "this target is too shallow for serving engines, which need three layers", []


def suite_line(data: "DataFacts", prompts: Path) -> str:
    """Return the suite to evaluate on: held-out prompts, or stdlib if there are none."""
    if data.prompts:
        return f"{{name: {SUITE}, path: {_yaml(str(prompts))}}} # from your data, left out of training"
    return "{name: stdlib, limit: 30} # Python code; better: {name: mine, path: FILE.jsonl} of your own prompts"


def _yaml(value: str | int | bool | None) -> str:
    """Write a value in YAML."""
    return json.dumps(value, ensure_ascii=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
