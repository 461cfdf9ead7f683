"""`outrider init`: write a commented recipe for the user's target and data."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS

if TYPE_CHECKING:
    from .init_facts import DataFacts, TargetFacts
    from .init_kinds import KindDefaults

SUITE = "held_out"
"""Name of the suite of prompts that are held out of the training data."""


@dataclass(kw_only=True, config=OPTIONS)
class InitOptions:
    """Options of `outrider init`."""

    recipe: Path
    """The recipe's file to write, such as my.yaml."""
    target: str
    """The target: a directory or a Hub id."""
    data: Path
    """Training data: conversations (.json, .jsonl, .parquet), or text files."""
    drafter: str = "eagle3"
    """Kind: eagle3, redrafter, block, medusa, eagle or draft_model."""
    chat_template: str | None = None
    """A .jinja file or a template's name, if the target's tokenizer has no template."""

    POSITIONAL: ClassVar = ("recipe",)


def init_command(options: InitOptions) -> None:
    """Write a commented recipe for your target and data, ready for: outrider run my.yaml"""
    from .init_facts import read_data_facts, read_target_facts  # reads the target's files, maybe from the Hub
    from .init_kinds import KIND_DEFAULTS

    # 1. Check the arguments before anything is read.
    recipe, target, drafter = options.recipe, options.target, options.drafter
    recipe = recipe if recipe.suffix in (".yaml", ".yml") else recipe.with_name(f"{recipe.name}.yaml")
    prompts = recipe.with_name(f"{recipe.stem}.prompts.jsonl")
    if existing := [str(path) for path in (recipe, prompts) if path.exists()]:
        verb = "exists" if len(existing) == 1 else "exist"
        raise ValueError(f"{' and '.join(existing)} {verb}, and init doesn't overwrite files; name another file")
    if drafter not in KIND_DEFAULTS:
        raise ValueError(f"drafter is {drafter!r}; it must be one of {', '.join(KIND_DEFAULTS)}")

    # 2. Read the target's sizes and the data: the recipe depends on them.
    target_facts = read_target_facts(target, options.chat_template)
    data_facts = read_data_facts(options.data, max_chars=target_facts.max_length)

    # 3. Write the recipe, and the prompts beside it.
    text = recipe_text(recipe, drafter, KIND_DEFAULTS[drafter], target_facts, data_facts, prompts.resolve())
    recipe.parent.mkdir(parents=True, exist_ok=True)
    if data_facts.prompts:
        lines = [json.dumps({"id": f"held_out_{index}", "turns": turns}) for index, turns in enumerate(data_facts.prompts)]
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        count = _count(len(data_facts.prompts), "prompt")
        print(f"{prompts}: {count} to evaluate on, from the data; training leaves them out")
    recipe.write_text(text, encoding="utf-8")
    print(f"{recipe}: {drafter} for {target}, on {_count(data_facts.num_records, 'record')} ({data_facts.source})")
    command = f"outrider run {shlex.quote(str(recipe))}"
    print(f"\nNext:\n  {command} --plan    # time, memory and disk\n  {command}")


def recipe_text(
    recipe: Path, drafter: str, kind: "KindDefaults", target: "TargetFacts", data: "DataFacts", prompts: Path
) -> str:
    """Return the recipe: a YAML file with the reason for each value beside it."""
    from .init_kinds import export_lines  # its module reads the target's files

    # 1. At least ten steps per epoch, and at least 100 steps.
    batch = kind.global_batch_size if data.num_records >= 10 * kind.global_batch_size else 8
    steps = max(100, -(-kind.epochs * data.num_records // batch))

    # 2. The lines, section by section.
    lines = [
        "# @package _global_",
        f"# {kind.title} for {target.name_or_path}. Written by `outrider init`; change what you like.",
        f"#   outrider run {shlex.quote(recipe.name)} --plan     prints the time, memory and disk that it needs",
        f"#   outrider run {shlex.quote(recipe.name)}            runs it; train.steps=20 for a first try",
        "# `outrider options SECTION` explains each option. Paths are relative to the working directory.",
        "defaults:",
        f"  - override /drafter: {drafter} # its other options: outrider options {drafter}",
        "",
        f"name: {recipe.stem} # the results are in outputs/{recipe.stem}",
        *(["mixed_precision: bf16"] if target.has_accelerator else []),
        "",
        f"target: # {target.description}",
        f"  name_or_path: {_quoted(target.name_or_path)}",
        *target.dtype_lines,
        "",
        "data:",
        f"  source: {data.source} # the form of the records",
        f"  path: {_quoted(str(data.path))} # {_count(data.num_records, 'record')}",
        f"  max_length: {target.max_length} # tokens of an example; longer ones are cut",
        f"  chat_template: {_quoted(target.chat_template)} # {target.template_reason}",
        "",
        "distill:",
        f"  horizon: {kind.horizon} # {kind.horizon_reason}",
        "  features: none # training recomputes the target's states; storing them takes disk and saves time",
        "",
        *_section("drafter", kind.drafter_lines(target)),
        "train:",
        f"  steps: {steps} # {kind.epochs} epochs or 100 steps, whichever is more",
        f"  batch_size: {min(kind.batch_size, batch)} # texts at a time on each GPU; lower it if memory runs out",
        f"  global_batch_size: {batch} # texts per step, over all GPUs",
        "  max_positions: 2048 # positions trained at a time; lower it if memory runs out",
        *(f"  {line}" for line in kind.train),
        f"  warmup_steps: {min(15, steps // 20)}",
        "",
        "eval:",
        *_suite_lines(data, prompts),
        f"  max_new_tokens: {min(256, target.positions // 4)}",
        "  settings: # run-time options of the drafter; each is a row of the table",
        *(f"    - {setting}" for setting in kind.settings),
        "",
        *export_lines(drafter, kind, target),
    ]
    return "\n".join(lines) + "\n"


def _section(name: str, lines: list[str]) -> list[str]:
    return [f"{name}:", *(f"  {line}" for line in lines), ""] if lines else []


def _suite_lines(data: "DataFacts", prompts: Path) -> list[str]:
    """Return the suites to evaluate on: held-out prompts, or stdlib if there are none."""
    mt_bench = "    # MT-Bench from a local file (without `path`: from the Hub): - {name: mt_bench, path: FILE}"
    if data.prompts:
        suite = f"    - {{name: {SUITE}, path: {_quoted(str(prompts))}}} # from your data, left out of training"
    else:
        suite = "    - {name: stdlib, limit: 30} # Python code; better: {name: mine, path: FILE.jsonl} of your own prompts"
    return ["  suites:", suite, mt_bench]


def _quoted(value: str | None) -> str:
    """Quote a value for YAML."""
    return json.dumps(value, ensure_ascii=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
