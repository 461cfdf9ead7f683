"""Files of answers as text, in the formats of the suites' judges.

They let others verify that the answers are equal. There is one file for each method, the baseline
included, in a folder for each suite, temperature and batch size. A file has the method's first
answer to each turn.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...data.files import atomic_write_text, write_json
from ...data.suites import Prompt, PromptSet
from ..records.records import EvalRecord, GroupKey, digest_of, group_name

logger = logging.getLogger(__name__)

LONGEST_NAME = 120
"""Longest file name in characters; file systems allow 255 bytes."""
NOT_IN_FILE_NAMES = re.compile(r"[^\w.=-]+")


def write_answers(
    records: Iterable[EvalRecord], suites: Sequence[PromptSet], tokenizer: PreTrainedTokenizerBase, directory: Path, time: float
) -> None:
    """Write the answers to `directory/GROUP/METHOD.json(l)`.

    `time` is when the answers were generated, in seconds since 1970. A prompt with a skipped turn
    is left out, since judges expect all turns.
    """
    # 1. Select the first answer of each method to each turn.
    firsts = [record for record in records if record.repeat == 0 and not record.profiled]
    by_key = {record.key: record for record in firsts}
    prompts = {suite.name: suite.prompts for suite in suites}
    names = file_names(dict.fromkeys(record.method for record in firsts))

    # 2. Write a file for each group and method.
    groups = dict.fromkeys(record.group_key for record in firsts)
    for group in groups:
        suffix, answer_of = FORMATS.get(group[0], (".jsonl", plain_answer))
        for method in dict.fromkeys(record.method for record in firsts if record.group_key == group):
            name = names[method]
            answered = [
                answer_of(prompt, [_text(record, tokenizer) for record in turns], name, time)
                for prompt in prompts[group[0]]
                if (turns := _turns(by_key, group, prompt, method))
            ]
            path = directory / group_name(group) / f"{name}{suffix}"
            if suffix == ".jsonl":
                atomic_write_text(path, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in answered))
            else:
                write_json(path, answered)
            if num_missing := len(prompts[group[0]]) - len(answered):
                logger.warning("%s lacks %d prompts with turns that were too long", path, num_missing)


def mt_bench_answer(prompt: Prompt, answers: list[str], name: str, time: float) -> dict[str, Any]:
    """Return a line of a model_answer file for FastChat's llm_judge, which identifies models by the names of their files."""
    return {
        "question_id": int(prompt.id) if prompt.id.isdecimal() else prompt.id,
        "answer_id": digest_of([name, prompt.id, answers]),
        "model_id": name,
        "choices": [{"index": 0, "turns": answers}],
        "tstamp": time,
    }


def alpaca_eval_answer(prompt: Prompt, answers: list[str], name: str, _: float) -> dict[str, Any]:
    """Return an item of a file for alpaca_eval's `--model_outputs`."""
    return {"instruction": prompt.turns[0], "output": answers[0], "generator": name, "dataset": prompt.category}


def plain_answer(prompt: Prompt, answers: list[str], name: str, _: float) -> dict[str, Any]:
    """Return a line of a prompt's turns and their answers."""
    turns = {"turns": list(prompt.turns), "answers": answers}
    return {"id": prompt.id, "category": prompt.category, **turns, "generator": name}


FORMATS: dict[str, tuple[str, Callable[[Prompt, list[str], str, float], dict[str, Any]]]] = {
    "mt_bench": (".jsonl", mt_bench_answer),
    "alpaca_eval": (".json", alpaca_eval_answer),
}
"""Suffix and format of a suite's files; other suites have plain files."""


def file_names(methods: Iterable[str]) -> dict[str, str]:
    """Choose a distinct file name for each method, valid on every file system."""
    names: dict[str, str] = {}
    for method in methods:
        name = plain = NOT_IN_FILE_NAMES.sub("_", method).strip("._")[:LONGEST_NAME] or "method"
        number = 1
        while name.lower() in {taken.lower() for taken in names.values()}:
            number += 1
            name = f"{plain}-{number}"
        names[method] = name
    return names


def _turns(by_key: Mapping[Any, EvalRecord], group: GroupKey, prompt: Prompt, method: str) -> list[EvalRecord]:
    """Look up the records of all turns of a prompt; empty if one is missing."""
    suite, temperature, batch_size = group
    keys = [(suite, prompt.id, turn, temperature, method, 0, False, batch_size) for turn in range(len(prompt.turns))]
    return [by_key[key] for key in keys] if all(key in by_key for key in keys) else []


def _text(record: EvalRecord, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(record.token_ids, skip_special_tokens=True))
