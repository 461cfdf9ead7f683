"""The prompt suites that drafters are evaluated on."""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import yaml

from .config import TRAFFIC
from .conversations import Conversation, Turn, has_surrogate
from .forms import FORMS, form_of
from .raw_records import is_local, line_of_record, load_records
from .stdlib import MANUAL_TASK, Cuts, code_conversations, manual_parts
from .traffic import REQUEST_KEYS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: the user's turns. The answers in between are the target's."""

    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that the target may call."""
    solution: str | None = None
    """What an answer is scored by: gsm8k's answer, human_eval's tests. It is no part of the digest."""

    def messages(self, text: str) -> list[Turn]:
        """Return a conversation that begins with this question: the system prompt, if any, and the text."""
        system = [] if self.system is None else [Turn(role="system", content=self.system)]
        return [*system, Turn(role="user", content=text)]

    @property
    def facts(self) -> list[Any]:
        """What identifies the prompt in a digest."""
        beside = [self.system, list(self.tools)] if self.system is not None or self.tools else []
        return [self.id, self.category, self.turns, *beside]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """A named set of prompts; `revision` is their digest."""

    name: str
    revision: str
    prompts: tuple[Prompt, ...]
    source: str | None = None
    """The data set of the Hub that they were read from, as ID or ID@COMMIT; None elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A published set of prompts: its size and its location. `suites.yaml` lists them."""

    num_prompts: int
    hub_id: str | None = None
    """None if it isn't on the Hub. Then it ships with outrider as `file`, or is at `download`."""
    download: str | None = None
    """URL of its file."""
    subset: str | None = None
    split: str = "train"
    file: str | None = None
    """One file of the data set, in place of a split; or the file beside this module."""
    revision: str | None = None
    """The data set's commit; None if none is known to be the right one."""


def load_suite(name: str, path: str | None = None, limit: int | None = None, seed: int = 0) -> PromptSet:
    """Load the prompts of a suite, from `path` or from its published location.

    `path` is a local file; for `stdlib` it is another library's folder. Any other name is a name
    for the prompts or conversations in the file at `path` (see `_parse_own`). `limit` samples that
    many prompts by `seed`, in the suite's order. Raises ValueError if the
    suite is unknown, or if the file can't be read or isn't the suite's.
    """
    # 1. Check the name.
    if not SUITE_NAME.fullmatch(name):
        raise ValueError(f"a suite's name is {name!r}; use letters, digits, '.', '_' and '-' (rename its file)")
    if name not in SUITE_NAMES and path is None:
        hint = "".join(f"; did you mean {close}?" for close in get_close_matches(name, SUITE_NAMES, 1)) or "."
        raise ValueError(
            f"unknown suite {name!r}{hint} The suites are {', '.join(SUITE_NAMES)}. For prompts of your own give their file "
            f"({name}.jsonl)"
        )
    suite = SUITES.get(name)
    on_hub = suite is not None and suite.hub_id is not None if path is None else name != "stdlib" and not is_local(path)
    # 2. Read the prompts, and sample.
    hub_id, revision = (suite.hub_id, suite.revision) if suite and path is None else (path, None)
    if name == "manual" and path is None:
        parts = manual_parts()
        prompts = [Prompt(id=id, category=size, turns=(f"{MANUAL_TASK}\n\n{text}",)) for id, size, text in parts]
    else:
        prompts = _stdlib_prompts(path) if name == "stdlib" else _read_prompts(name, path, revision)
    if limit is not None and limit < len(prompts):
        prompts = [prompts[index] for index in sorted(Random(seed).sample(range(len(prompts)), limit))]
    # 3. Identify them by a digest.
    source = "@".join(filter(None, (hub_id, revision))) if on_hub else None
    text = json.dumps([prompt.facts for prompt in prompts])
    return PromptSet(name=name, revision=hashlib.sha256(text.encode()).hexdigest(), prompts=tuple(prompts), source=source)


def _parse_mt_bench(record: Any, index: int) -> Prompt | None:
    # FastChat's file has question_id and turns, its copy on the Hub prompt_id and prompt.
    turns = record.get("turns", record.get("prompt"))
    if not isinstance(turns, list) or len(turns) != 2:
        return None
    return _prompt(record.get("question_id", record.get("prompt_id")), record.get("category"), turns)


def _parse_human_eval(record: Any, index: int) -> Prompt | None:
    # In other sets of programming problems the task id is a number.
    if not isinstance(record.get("task_id"), str):
        return None
    is_scored = isinstance(record.get("test"), str) and str(record.get("entry_point")).isidentifier()
    solution = f"{record['test']}\ncheck({record['entry_point']})" if is_scored else None
    return _prompt(record["task_id"], "code", [record.get("prompt")], solution)


def _parse_gsm8k(record: Any, index: int) -> Prompt | None:
    # The answer distinguishes it from other files of questions.
    answer = record.get("answer")
    return _prompt(index, "math", [record.get("question")], answer) if _all_texts([answer]) else None


OWN_ID_KEYS, OWN_QUESTIONS = ("id", "question_id", "prompt_id"), ("prompt", "turns")
MOST_NOTES = 10
"""Most notes about a file that are logged."""
OWN_FORMS = (
    '{"prompt": TEXT}, {"turns": [TEXT, ...]}, {"messages": [{"role": ..., "content": ...}]}, '
    '{"conversations": [{"from": ..., "value": ...}]} or logged requests, each with an id (a text or a whole number), a '
    "category, a system prompt and tools if it has them"
)


def _parse_own(record: Any, index: int, notes: Counter[str]) -> Prompt | None:
    """Parse a user's prompt, or a conversation in a form of the data (see `forms`); the user's turns are the prompt."""
    rest = {key: value for key, value in record.items() if key not in (*OWN_ID_KEYS, "category")}
    # 1. The user's turns alone, or the conversation that they are in.
    keys = [] if "messages" in record or "conversations" in record else [key for key in OWN_QUESTIONS if key in rest]
    if keys:
        asked = rest.pop(keys[0])
        asked = [asked] if keys[0] == "prompt" else asked
        if keys[1:] or not isinstance(asked, list) or not _all_texts(asked):
            return None
        rest["messages"] = [{"role": "user", "content": text} for text in asked]
        conversation = FORMS["messages"].parse(rest, notes)
        own = None if isinstance(conversation, str) else (system_of(conversation), asked)
    else:
        form = _form(rest)
        conversation = FORMS[form].parse(rest, notes)
        own = None if isinstance(conversation, str) else asked_in(conversation)
    if own is None or isinstance(conversation, str):
        return None
    # 2. The prompt. A log's own ids may be private.
    ids = [index] if conversation.is_private else [record[key] for key in OWN_ID_KEYS if record.get(key) is not None]
    id = (ids or [index])[0]
    prompt = _prompt(id, record.get("category") or "prompt", own[1])
    return None if prompt is None else replace(prompt, system=own[0], tools=conversation.tools)


def _form(record: Any) -> str:
    """Return the form of a record with a conversation. A logged request may lack its reply."""
    is_logged = isinstance(record, dict) and any(key in record for key in (*REQUEST_KEYS, "body"))
    return TRAFFIC if is_logged else form_of([record]) or "messages"


def system_of(conversation: Conversation) -> str | None:
    """Return the system message that a conversation begins with."""
    first = conversation.turns[0] if conversation.turns else None
    return first.content if first is not None and first.role == "system" else None


def asked_in(conversation: Conversation) -> tuple[str | None, list[str]] | None:
    """Return the system message and the user's turns; None unless user and assistant take turns."""
    system = system_of(conversation)
    turns = conversation.turns[system is not None :]
    if not turns or any(turn.role != ("assistant" if index % 2 else "user") for index, turn in enumerate(turns)):
        return None
    return system, [turn.content for turn in turns[::2]]


def _prompt(id: Any, category: Any, turns: Any, solution: str | None = None) -> Prompt | None:
    """Build a prompt from a record's values; None if they are invalid."""
    is_id = type(id) is int or (isinstance(id, str) and bool(id.strip()))
    if isinstance(turns, list) and turns and _all_texts([*turns, category]) and is_id:
        return Prompt(id=str(id), category=category, turns=tuple(turns), solution=solution)
    return None


PARSERS: dict[str, Callable[[Any, int], Prompt | None]] = {
    "mt_bench": _parse_mt_bench,
    "alpaca_eval": lambda record, index: _prompt(record.get("id", index), record.get("dataset"), [record.get("instruction")]),
    "spec_bench": lambda record, _: _prompt(record.get("question_id"), record.get("category"), record.get("turns")),
    "human_eval": _parse_human_eval,
    "gsm8k": _parse_gsm8k,
}
"""Parsers of the published suites' records."""
SUITES_FILE = Path(__file__).parent / "suites.yaml"
SUITES = {name: Suite(**facts) for name, facts in yaml.safe_load(SUITES_FILE.read_text(encoding="utf-8")).items()}
SUITE_NAMES = (*SUITES, "manual", "stdlib")
SUITE_NAME = re.compile(r"\w[\w.-]*")


def _read_prompts(name: str, path: str | None, revision: str | None) -> list[Prompt]:
    """Read the prompts of a published suite, or of a user's file."""
    suite = SUITES.get(name)
    location, records = _records(name, path, revision)
    prompts, notes = list[Prompt](), Counter[str]()
    parse = PARSERS.get(name, partial(_parse_own, notes=notes))
    for index, record in enumerate(records):
        prompt = parse(record, index) if isinstance(record, dict) else None
        if has_surrogate(json.dumps(record if prompt is None else prompt.facts, ensure_ascii=False)):
            raise ValueError(f"{location}, {_where(path, index)}: half a surrogate pair isn't valid Unicode; correct the text")
        if prompt is None:
            remedy = "Give the suite's published file" if suite else _remedy(record, index, path)
            shown = "a logged request" if _form(record) == TRAFFIC else f"{record!r:.100}"  # it may be private
            raise ValueError(f"{location}, {_where(path, index)}: not a prompt of {name}: {shown}. {remedy}")
        prompts.append(prompt)
    for note, count in notes.most_common(MOST_NOTES):
        logger.warning("%s: %d records with %s", location, count, note)
    repeated = [id for id, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if repeated:
        raise ValueError(f"{location} holds two prompts with the id {repeated[0]!r}; ids must differ. Remove one of them")
    if suite and len(prompts) != suite.num_prompts:
        logger.warning("%s holds %d prompts where %s has %d", location, len(prompts), name, suite.num_prompts)
    return prompts


def _remedy(record: Any, index: int, path: str | None) -> str:
    """Return what a user does with a file of other records than prompts of one's own."""
    known = (name for name, parse in PARSERS.items() if isinstance(record, dict) and parse(record, index) is not None)
    if (name := next(known, None)) is not None:
        return f"It is a record of {name}: eval.suites=[{{name: {name}, path: {path}}}] reads this file"
    return f"Records are {OWN_FORMS}; a user speaks first, in turns"


def _where(path: str | None, index: int) -> str:
    """Describe the place of a record in its file."""
    line = line_of_record(Path(path), index) if path is not None and is_local(path) else None
    return f"record {index + 1}" if line is None else f"line {line}"


def _records(name: str, path: str | None, revision: str | None) -> tuple[str, Iterator[Any]]:
    """Return the location of a suite's records, and the records."""
    if path is not None:
        return path, load_records(path, revision=revision)
    suite = SUITES[name]
    if suite.hub_id is None and suite.file is not None:
        return suite.file, load_records(str(SUITES_FILE.with_name(suite.file)))
    if suite.hub_id is None:
        raise ValueError(f"{name} isn't on the Hub: download {suite.download}")
    return suite.hub_id, load_records(suite.hub_id, split=suite.split, subset=suite.subset, file=suite.file, revision=revision)


def _stdlib_prompts(path: str | None) -> list[Prompt]:
    # The seed of the cuts is fixed, so a run's seed doesn't change the suite.
    conversations = code_conversations("eval", Cuts(seed=0), Path(path) if path else None)
    return [
        Prompt(id=conversation.id, category=_module(conversation.id), turns=(conversation.turns[0].content,))
        for conversation in conversations
    ]


def _module(id: str) -> str:
    """Return the top-level module in a conversation's id (`stdlib/json/decoder.py:12`)."""
    return id.split(":")[0].split("/")[1].removesuffix(".py")


def _all_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) and value.strip() for value in values)
