"""The prompts that drafters are measured on."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from random import Random
from typing import Any

from .raw_records import is_local, load_records
from .roles import ROLES
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
    source: str | None = None
    """The data set of the Hub that they were read from, as ID@COMMIT where a commit was asked for; None elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A published set of prompts: how its records are read, how many it has, and where on the Hub it lies."""

    parse: Callable[[Any, int], Prompt | None]
    num_prompts: int
    hub_id: str | None
    """None where it isn't on the Hub."""
    download: str | None = None
    """Where its file lies then."""
    subset: str | None = None
    split: str = "train"
    file: str | None = None
    """One file of the data set, in place of a split."""
    revision: str | None = None
    """The data set's commit; None where nobody has said which one is the right one."""


def load_suite(
    name: str, path: str | None = None, limit: int | None = None, seed: int = 0, revision: str | None = None
) -> PromptSet:
    """The prompts of a suite: from `path` (a local file, or for `stdlib` another library's folder), else from its own place.

    Any other name is that of the prompts or conversations in the file at `path` (see `_parse_own`). `limit` draws that many
    prompts by `seed`, kept in the suite's order. `revision` is the data set's on the Hub, in place of the suite's own. Raises
    ValueError where the suite is unknown, or where the file cannot be read or has other records than the suite's.
    """
    if not SUITE_NAME.fullmatch(name):
        raise ValueError(f"a suite's name is {name!r}; files are named after it: use letters, digits, '.', '_' and '-'")
    if name not in SUITE_NAMES and path is None:
        raise ValueError(
            f"unknown suite {name!r}; the suites are {', '.join(SUITE_NAMES)}. Prompts of your own, under any other name, need "
            "the path of their file"
        )
    if limit is not None and limit < 1:
        raise ValueError(f"limit of suite {name!r} is {limit}; it must be at least 1, or null for all prompts")
    on_hub = name in SUITES if path is None else name != "stdlib" and not is_local(path)
    if revision is not None and not on_hub:
        raise ValueError(f"suite {name!r} has the revision {revision!r}, which belongs to the Hub's data; leave it out")
    source = _hub_source(name, path, revision) if on_hub else None
    prompts = _stdlib_prompts(path) if name == "stdlib" else _read_prompts(name, path, revision)
    if limit is not None and limit < len(prompts):
        prompts = [prompts[index] for index in sorted(Random(seed).sample(range(len(prompts)), limit))]
    text = json.dumps([astuple(prompt) for prompt in prompts])
    return PromptSet(name=name, revision=hashlib.sha256(text.encode()).hexdigest(), prompts=tuple(prompts), source=source)


def _parse_mt_bench(record: Any, index: int) -> Prompt | None:
    # FastChat's file says question_id and turns, the Hub's copy of it prompt_id and prompt.
    turns = record.get("turns", record.get("prompt"))
    id, category = record.get("question_id", record.get("prompt_id")), record.get("category")
    if isinstance(turns, list) and len(turns) == 2 and _all_texts([*turns, category]) and _is_id(id):
        return Prompt(id=str(id), category=category, turns=tuple(turns))
    return None


def _parse_spec_bench(record: Any, index: int) -> Prompt | None:
    id, category, turns = (record.get(name) for name in ("question_id", "category", "turns"))
    if isinstance(turns, list) and turns and _all_texts([*turns, category]) and _is_id(id):
        return Prompt(id=str(id), category=category, turns=tuple(turns))
    return None


def _parse_human_eval(record: Any, index: int) -> Prompt | None:
    id, prompt = record.get("task_id"), record.get("prompt")
    return Prompt(id=id, category="code", turns=(prompt,)) if _all_texts([id, prompt]) else None


def _parse_gsm8k(record: Any, index: int) -> Prompt | None:
    question = record.get("question")
    # The answer tells it from other files of questions.
    if _all_texts([question, record.get("answer")]):
        return Prompt(id=str(index), category="math", turns=(question,))
    return None


OWN_FORMS = (
    '{"prompt": TEXT}, {"turns": [TEXT, ...]}, {"messages": [{"role": ..., "content": ...}]} or '
    '{"conversations": [{"from": ..., "value": ...}]}, each with an id (a text or a whole number) and a category if it has them'
)


def _parse_own(record: Any, index: int) -> Prompt | None:
    """A user's own prompt or conversation, of which the user's turns are asked, in `OWN_FORMS`."""
    id = next((record[key] for key in ("id", "question_id", "prompt_id") if record.get(key) is not None), index)
    category = record.get("category") or "prompt"
    turns = _own_turns(record)
    if turns and _all_texts([*turns, category]) and _is_id(id):
        return Prompt(id=str(id), category=category, turns=tuple(turns))
    return None


def _own_turns(record: Any) -> list[Any] | None:
    """What the user says; None where the record has no form that is known, or a system message, which no prompt has."""
    given = [key for key in ("prompt", "turns", "messages", "conversations") if key in record]
    if "prompt" in given and "messages" in given:
        given.remove("prompt")  # UltraChat tells the first message twice
    if len(given) != 1:
        return None
    (key,) = given
    if key == "prompt":
        return [record[key]]
    if key == "turns":
        return list(record[key]) if isinstance(record[key], list) else None
    role_key, text_key = ("role", "content") if key == "messages" else ("from", "value")
    if not isinstance(record[key], list) or not all(isinstance(turn, dict) for turn in record[key]):
        return None
    roles = [ROLES.get(turn.get(role_key)) for turn in record[key]]
    if not roles or any(role != ("assistant" if place % 2 else "user") for place, role in enumerate(roles)):
        return None
    return [turn.get(text_key) for turn in record[key][::2]]


def _parse_alpaca_eval(record: Any, index: int) -> Prompt | None:
    instruction, category, id = record.get("instruction"), record.get("dataset"), record.get("id", index)
    if _all_texts([instruction, category]) and _is_id(id):
        return Prompt(id=str(id), category=category, turns=(instruction,))
    return None


SUITES = {
    "mt_bench": Suite(
        parse=_parse_mt_bench,
        num_prompts=80,
        hub_id="HuggingFaceH4/mt_bench_prompts",
        revision="e3a795c5e9a82ee40611c416b8a7786c73198991",
    ),
    # The data set on the Hub is a script, which datasets no longer runs, beside this file.
    "alpaca_eval": Suite(
        parse=_parse_alpaca_eval,
        num_prompts=805,
        hub_id="tatsu-lab/alpaca_eval",
        file="alpaca_eval.json",
        revision="0cd24d711fe90d0c1aae5bde03fe98ee48ae52f8",
    ),
    "spec_bench": Suite(
        parse=_parse_spec_bench,
        num_prompts=480,
        hub_id=None,
        download="https://github.com/hemingkx/Spec-Bench/blob/main/data/spec_bench/question.jsonl",
    ),
    "human_eval": Suite(
        parse=_parse_human_eval,
        num_prompts=164,
        hub_id="openai/openai_humaneval",
        split="test",
        revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
    ),
    "gsm8k": Suite(
        parse=_parse_gsm8k,
        num_prompts=1319,
        hub_id="openai/gsm8k",
        subset="main",
        split="test",
        revision="740312add88f781978c0658806c59bc2815b9866",
    ),
}
SUITE_NAMES = (*SUITES, "stdlib")
SUITE_NAME = re.compile(r"\w[\w.-]*")


def _read_prompts(name: str, path: str | None, revision: str | None) -> list[Prompt]:
    """The prompts of a published suite, or of a file of the user's own."""
    suite = SUITES.get(name)
    parse = suite.parse if suite else _parse_own
    place, records = _records(name, path, revision)
    prompts = []
    for index, record in enumerate(records):
        prompt = parse(record, index) if isinstance(record, dict) else None
        if prompt is None:
            remedy = "Give the suite's published file" if suite else f"Records are {OWN_FORMS}; a user speaks first, in turns"
            raise ValueError(f"{place}, record {index + 1}: not a prompt of {name}: {record!r:.100}. {remedy}")
        prompts.append(prompt)
    _check_unique(prompts, place)
    if suite and len(prompts) != suite.num_prompts:
        logger.warning("%s holds %d prompts where %s has %d", place, len(prompts), name, suite.num_prompts)
    return prompts


def _hub_source(name: str, path: str | None, revision: str | None) -> str | None:
    """The data set, ID@COMMIT; the ID alone where no commit was asked for."""
    suite = SUITES.get(name)
    if path is not None:
        return "@".join(filter(None, (path, revision)))
    return "@".join(filter(None, (suite.hub_id, revision or suite.revision))) if suite and suite.hub_id else None


def _records(name: str, path: str | None, revision: str | None) -> tuple[str, Iterator[Any]]:
    """Where a suite's records lie, and the records."""
    if path is not None:
        return path, load_records(path, revision=revision)
    suite = SUITES[name]
    if suite.hub_id is None:
        raise ValueError(f"{name} isn't on the Hub: download {suite.download} and give its path (suites: {{path: FILE}})")
    revision = revision or suite.revision
    return suite.hub_id, load_records(suite.hub_id, split=suite.split, subset=suite.subset, file=suite.file, revision=revision)


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


def _is_id(value: Any) -> bool:
    """Whether it is a text or a whole number (which a bool is to Python)."""
    return type(value) is int or (isinstance(value, str) and bool(value.strip()))


def _all_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) and value.strip() for value in values)
