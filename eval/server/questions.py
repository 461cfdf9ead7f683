"""The questions of a check, a server's answers to them, and whether an answer is right."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from ...data.suites import Prompt
from .client import ANSWER_SECONDS, SILENT_SECONDS, Reply, Server

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
CODE_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
NO_OUTPUT: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
RUN_SECONDS = 10.0
"""Longest run of an answer's program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt's first turn, as token ids."""

    suite: str
    prompt: Prompt
    ids: list[int]


def ask(
    server: Server,
    questions: Sequence[Question],
    *,
    concurrency: int,
    max_new_tokens: int,
    told: Callable[[], object],
    temperatures: Sequence[float] = (),
) -> tuple[list[Reply], float]:
    """Ask a server, `concurrency` questions at a time; return its replies in order, and the seconds of all.

    Calls `told` after each reply. Without `temperatures` all answers are greedy; sampled ones have the index of their
    question as seed.
    """
    started = time.perf_counter()
    waiting, done = SimpleQueue[tuple[int, Question]](), SimpleQueue[tuple[int, Reply | BaseException]]()
    for place in enumerate(questions):
        waiting.put(place)

    def work() -> None:
        with suppress(Empty):
            while True:
                seed, question = waiting.get_nowait()
                try:
                    temperature = temperatures[seed] if temperatures else 0.0
                    reply = server.complete(question.ids, max_tokens=max_new_tokens, temperature=temperature, seed=seed)
                    done.put((seed, reply))
                except BaseException as error:  # noqa: BLE001 - it is raised below
                    done.put((seed, error))
                    return

    # Daemons: a request that a server holds up must not hold up an error, or Ctrl-C.
    for _ in range(min(concurrency, len(questions))):
        Thread(target=work, daemon=True).start()
    replies: dict[int, Reply] = {}
    try:
        while len(replies) < len(questions):
            try:
                seed, reply = done.get(timeout=ANSWER_SECONDS + SILENT_SECONDS)
            except Empty:  # a reply without end or parts, which httpx waits for
                raise ConnectionError(f"{server.url} gave no complete reply within {ANSWER_SECONDS:.0f} s") from None
            if isinstance(reply, BaseException):
                raise reply
            replies[seed] = reply
            told()
    except BaseException:
        with suppress(Empty):
            while True:
                waiting.get_nowait()
        raise
    return [replies[seed] for seed in range(len(questions))], time.perf_counter() - started


def is_right(question: Question, text: str, *, may_run: bool) -> bool | None:
    """Return whether an answer is right; None if the suite says nothing about that.

    gsm8k: the answer's last number is the right one. human_eval: with `may_run` its program is run on this
    machine, in a process of its own, and passes the suite's tests.
    """
    solution = question.prompt.solution
    if question.suite == "gsm8k" and solution:
        numbers, wanted = NUMBER.findall(text), NUMBER.findall(solution)
        return bool(numbers and wanted) and _value(numbers[-1]) == _value(wanted[-1])
    if question.suite == "human_eval" and solution and may_run:
        blocks = CODE_BLOCK.findall(text)
        body = blocks[0] if blocks else text
        program = body if "def " in body else question.prompt.turns[0] + body
        return _runs(f"{program}\n\n{solution}\n")
    return None


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _runs(program: str) -> bool:
    """Run a program in an empty folder, without this process's environment, which may hold keys."""
    command, content = [sys.executable, "-I", "-"], program.encode(errors="replace")
    with TemporaryDirectory() as folder, suppress(subprocess.TimeoutExpired):
        options: dict[str, Any] = {"input": content, "cwd": folder, "env": {}, "timeout": RUN_SECONDS, **NO_OUTPUT}
        return subprocess.run(command, check=False, **options).returncode == 0
    return False
