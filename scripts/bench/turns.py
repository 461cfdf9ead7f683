"""What the benches of decoding share: prompts, methods that take turns on them, and their figures.

Each method answers each prompt once a round, and every second round runs backwards. So a slow moment
of the machine costs all methods alike.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from report import ratio
from tqdm import tqdm

from outrider.data.chat import encode_prompt
from outrider.data.suites import load_suite

Answer = dict[str, Any]
Passes = Iterator[Sequence[int]]
"""Tokens that each pass of an answer emits, the prefill's first."""


def held_out_prompts(tokenizer: Any, count: int, most_tokens: int) -> list[list[int]]:
    """Return the last tokens of so many prompts of the suite `stdlib`."""
    prompts = load_suite("stdlib", limit=count).prompts
    turns = (prompt.messages(prompt.turns[0]) for prompt in prompts)
    return [encode_prompt(turn, tokenizer)[0][-most_tokens:].tolist() for turn in turns]


def timed(passes: Passes, processor_seconds: Callable[[], float] = time.process_time) -> Answer:
    """Decode an answer. Return its tokens, and the seconds after its prefill, on the wall and of processors."""
    tokens = [*next(passes)]
    num_prefilled = len(tokens)
    start, processor_start = time.perf_counter(), processor_seconds()
    emitted = [new for new in passes if new]
    seconds, processor = time.perf_counter() - start, processor_seconds() - processor_start
    tokens += [token for new in emitted for token in new]
    counts = {"num_tokens": len(tokens) - num_prefilled, "num_steps": len(emitted)}
    return {"token_ids": tokens, "seconds": seconds, "processor_seconds": processor, **counts}


def in_turns(methods: Sequence[str], num_prompts: int, rounds: int, answer: Callable[[str, int], Answer]) -> list[Answer]:
    """Let all methods answer all prompts in turns. Return all answers, each with its method and prompt.

    `answer` decodes with a method a prompt, by its index.
    """
    turns = [
        {"method": method, "prompt": prompt}
        for turn in range(rounds)
        for prompt in range(num_prompts)
        for method in (reversed(methods) if turn % 2 else methods)
    ]
    return [{**turn, **answer(**turn)} for turn in tqdm(turns, unit="answer", disable=None)]


def rows_of(answers: Sequence[Answer], baseline: str, plain: str) -> list[Answer]:
    """Return the figures of each method, with its speed over the baseline's: a median of pairs, and its interval.

    `plain` is the method whose texts the others must begin as; one may be longer than another. A
    prompt with an answer that ended at its prefill has no speed, and is left out. Raises ValueError
    if no prompt is left.
    """
    ended = {answer["prompt"] for answer in answers if not answer["num_tokens"]}
    answers = [answer for answer in answers if answer["prompt"] not in ended]
    if not answers:
        raise ValueError("all answers ended at their prefill; give more --prompts or longer answers")
    by_method: dict[str, list[Answer]] = defaultdict(list)
    for answer in sorted(answers, key=lambda answer: answer["prompt"]):
        by_method[answer["method"]].append(answer)
    texts = {answer["prompt"]: answer["token_ids"] for answer in by_method[plain]}
    seconds = {method: [answer["seconds"] / answer["num_tokens"] for answer in own] for method, own in by_method.items()}
    return [
        {
            "method": method,
            "seconds_per_token": per_token(own, "seconds"),
            "processor_seconds_per_token": per_token(own, "processor_seconds"),
            f"over {baseline}": ratio(seconds[baseline], seconds[method]),
            "tokens_per_step": round(1 / per_token(own, "num_steps"), 2),
            "identical": sum(begins_alike(answer["token_ids"], texts[answer["prompt"]]) for answer in own),
            "answers": len(own),
        }
        for method, own in by_method.items()
    ]


def per_token(answers: Sequence[Answer], figure: str) -> float:
    """Return the sum of a figure over the tokens that were decoded after the prefills."""
    total: float = sum(answer[figure] for answer in answers)
    return round(total / sum(answer["num_tokens"] for answer in answers), 4)


def begins_alike(text: Sequence[int], other: Sequence[int]) -> bool:
    return all(token == its for token, its in zip(text, other, strict=False))
