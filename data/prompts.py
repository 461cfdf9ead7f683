"""The prompts that drafters are measured on."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from random import Random
from typing import Any

from .records import load_records
from .stdlib import code_conversations

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: what the user says, turn by turn; the answers in between are the target's own."""

    id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """A named set of prompts. `revision` is a digest of the prompts in it: equal revisions mean equal prompts."""

    name: str
    revision: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Where a published set of prompts lies on the Hub, how its records are read, and how many it has."""

    hub_id: str
    hub_file: str | None
    num_prompts: int
    parse: Callable[[Any, int], Prompt | None]


def load_suite(name: str, path: str | None = None, limit: int | None = None, seed: int = 0) -> PromptSet:
    """The prompts of a suite: from `path` (a local file, or for `stdlib` another library's folder), else from its own place.

    `limit` draws that many prompts by `seed`, kept in the suite's order. Raises ValueError where the suite is unknown, or where
    the file cannot be read or has other records than the suite's.
    """
    if name not in SUITE_NAMES:
        raise ValueError(f"unknown suite {name!r}; the suites are {', '.join(SUITE_NAMES)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit of suite {name!r} is {limit}; it must be at least 1, or null for all prompts")
    prompts = _stdlib_prompts(path) if name == "stdlib" else _published_prompts(name, SUITES[name], path)
    if limit is not None and limit < len(prompts):
        prompts = [prompts[index] for index in sorted(Random(seed).sample(range(len(prompts)), limit))]
    text = json.dumps([astuple(prompt) for prompt in prompts])
    return PromptSet(name=name, revision=hashlib.sha256(text.encode()).hexdigest(), prompts=tuple(prompts))


def _parse_mt_bench(record: Any, index: int) -> Prompt | None:
    # FastChat's file says question_id and turns, the Hub's copy of it prompt_id and prompt.
    turns = record.get("turns", record.get("prompt"))
    id, category = record.get("question_id", record.get("prompt_id")), record.get("category")
    if isinstance(turns, list) and len(turns) == 2 and _all_texts([*turns, category]) and isinstance(id, int | str):
        return Prompt(id=str(id), category=category, turns=tuple(turns))
    return None


def _parse_alpaca_eval(record: Any, index: int) -> Prompt | None:
    instruction, category = record.get("instruction"), record.get("dataset")
    if _all_texts([instruction, category]):
        return Prompt(id=str(record.get("id", index)), category=category, turns=(instruction,))
    return None


SUITES = {
    "mt_bench": Suite(hub_id="HuggingFaceH4/mt_bench_prompts", hub_file=None, num_prompts=80, parse=_parse_mt_bench),
    # The data set on the Hub is a script, which datasets no longer runs, beside this file.
    "alpaca_eval": Suite(
        hub_id="tatsu-lab/alpaca_eval", hub_file="alpaca_eval.json", num_prompts=805, parse=_parse_alpaca_eval
    ),
}
SUITE_NAMES = (*SUITES, "stdlib")


def _published_prompts(name: str, suite: Suite, path: str | None) -> list[Prompt]:
    place = path or suite.hub_id
    prompts = []
    for index, record in enumerate(load_records(place, file=None if path else suite.hub_file)):
        prompt = suite.parse(record, index) if isinstance(record, dict) else None
        if prompt is None:
            raise ValueError(
                f"{place}, record {index + 1}: not a prompt of {name}: {record!r:.100}. Give the suite's published file"
            )
        prompts.append(prompt)
    _check_unique(prompts, place)
    if len(prompts) != suite.num_prompts:
        logger.warning("%s holds %d prompts where %s has %d", place, len(prompts), name, suite.num_prompts)
    return prompts


def _stdlib_prompts(path: str | None) -> list[Prompt]:
    # The seed of the cuts is fixed, so that a run's seed does not change the suite.
    conversations = code_conversations("eval", seed=0, root=Path(path) if path else None)
    return [
        Prompt(id=conversation.id, category=_module(conversation.id), turns=(conversation.turns[0].content,))
        for conversation in conversations
    ]


def _module(id: str) -> str:
    """The top-level module that a conversation's id (`stdlib/json/decoder.py:12`) names."""
    return id.split(":")[0].split("/")[1].removesuffix(".py")


def _check_unique(prompts: Iterable[Prompt], place: str) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"{place} holds two prompts with the id {prompt.id!r}; ids must differ. Remove one of them")
        seen.add(prompt.id)


def _all_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) and value.strip() for value in values)
