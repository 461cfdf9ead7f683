"""Files of answers as text, in the formats of the suites' judges.

They let others verify that the answers are equal. There is one file for each method, the baseline
included, in a folder for each suite, temperature and batch size. A file has the method's first
answer to each turn.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...data.files import atomic_write_text
from ...data.suites import Prompt, PromptSet
from ..records.names import BASELINE
from ..records.records import EvalRecord, GroupKey, digest_of, group_name

logger = logging.getLogger(__name__)

LONGEST_NAME = 120
"""Longest file name in characters; file systems allow 255 bytes."""
NOT_IN_FILE_NAMES = re.compile(r"[^\w.=-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAnswers:
    """A prompt with the answers to all its turns."""

    prompt: Prompt
    answers: list[str]


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
        suffix, to_text = FORMATS.get(group[0], (".jsonl", plain_answers))
        for method in dict.fromkeys(record.method for record in firsts if record.group_key == group):
            name = names[method]
            answered = [
                PromptAnswers(prompt=prompt, answers=[_text(record, tokenizer) for record in turns])
                for prompt in prompts[group[0]]
                if (turns := _turns(by_key, group, prompt, method))
            ]
            if group[0] == "mt_bench" and method == BASELINE and not _has_fastchats_ids(prompts[group[0]]):
                logger.info(
                    "the answers to mt_bench have the question numbers of the Hub's data set; for FastChat's judge, evaluate "
                    "FastChat's question.jsonl: --suite '{name: mt_bench, path: question.jsonl}'"
                )
            path = directory / group_name(group) / f"{name}{suffix}"
            atomic_write_text(path, to_text(answered, name, time))
            if num_missing := len(prompts[group[0]]) - len(answered):
                logger.warning("%s lacks %d prompts with turns that were too long", path, num_missing)


def mt_bench_answers(answered: Sequence[PromptAnswers], name: str, time: float) -> str:
    """Format a model_answer file for FastChat's llm_judge.

    FastChat identifies models by the names of their files.
    """
    return _json_lines(
        {
            "question_id": int(item.prompt.id) if item.prompt.id.isdecimal() else item.prompt.id,
            "answer_id": digest_of([name, item.prompt.id, item.answers]),
            "model_id": name,
            "choices": [{"index": 0, "turns": item.answers}],
            "tstamp": time,
        }
        for item in answered
    )


def alpaca_eval_answers(answered: Sequence[PromptAnswers], name: str, time: float) -> str:
    """Format a file for alpaca_eval's `--model_outputs`."""
    outputs = [
        {
            "instruction": item.prompt.turns[0],
            "output": item.answers[0],
            "generator": name,
            "dataset": item.prompt.category,
        }
        for item in answered
    ]
    return json.dumps(outputs, indent=2, ensure_ascii=False) + "\n"


def plain_answers(answered: Sequence[PromptAnswers], name: str, time: float) -> str:
    """Format a line for each prompt, with its turns and their answers."""
    return _json_lines(
        {
            "id": item.prompt.id,
            "category": item.prompt.category,
            "turns": list(item.prompt.turns),
            "answers": item.answers,
            "generator": name,
        }
        for item in answered
    )


FORMATS: dict[str, tuple[str, Callable[[Sequence[PromptAnswers], str, float], str]]] = {
    "mt_bench": (".jsonl", mt_bench_answers),
    "alpaca_eval": (".json", alpaca_eval_answers),
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


def _has_fastchats_ids(prompts: Sequence[Prompt]) -> bool:
    """Check whether the questions are numbered as in FastChat's file, from 81 to 160."""
    return all(prompt.id.isdecimal() and 81 <= int(prompt.id) <= 160 for prompt in prompts)


def _turns(by_key: Mapping[Any, EvalRecord], group: GroupKey, prompt: Prompt, method: str) -> list[EvalRecord]:
    """Look up the records of all turns of a prompt; empty if one is missing."""
    suite, temperature, batch_size = group
    keys = [(suite, prompt.id, turn, temperature, method, 0, False, batch_size) for turn in range(len(prompt.turns))]
    return [by_key[key] for key in keys] if all(key in by_key for key in keys) else []


def _text(record: EvalRecord, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(record.token_ids, skip_special_tokens=True))


def _json_lines(values: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
