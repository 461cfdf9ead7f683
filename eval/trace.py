"""A trace of one answer of each method, by torch's profiler, in place of a measurement.

A traced step is slower than a timed one, since the profiler records every operator. So an evaluation
measures or traces, and a trace has no record, no speed and no table.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from ..data.chat import encode_prompt
from ..data.files import replacing
from ..data.types import Turn
from ..models.llm.hf_target import HFTarget
from .config import SYNCHRONOUS, EvalConfig
from .measure.methods import Drafters, TunedSettings, acceptance_rule, load_drafters, method_specs, methods_by_place
from .measure.timing import time_generation
from .measure.turns import Method
from .run import context_length, cpu_threads, load_suites

logger = logging.getLogger(__name__)

SUFFIXES = (".json", ".json.gz")
DRAFTER_MARKS = {"init_state": "drafter: read the prompt", "propose": "draft", "advance": "drafter: advance"}
TARGET_MARKS = {"prefill": "prefill", "verify": "verify", "commit": "commit"}
"""Names that calls of a drafter and of the target have in the trace."""


class Marked:
    """An object whose calls of some methods have a name in the trace."""

    def __init__(self, marked: Any, marks: Mapping[str, str]) -> None:
        self._marked, self._marks = marked, marks

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._marked, name)
        return record_function(self._marks[name])(value) if name in self._marks else value


def trace_problems(config: EvalConfig, path: Path, *, in_stages: bool) -> list[str]:
    """List what a trace can't be combined with."""
    problems = []
    if not path.name.endswith(SUFFIXES):
        problems.append(f"trace is {path}; name a file that ends with {' or '.join(SUFFIXES)}")
    if path.is_dir():
        problems.append(f"trace is {path}, which is a folder; name a file in it")
    options = {
        "eval.repeats": (config.repeats, config.repeats == 1),
        "eval.batch_sizes": (config.batch_sizes, config.batch_sizes == [1]),
        "eval.temperatures": (config.temperatures, len(config.temperatures) == 1),
        "eval.decode": (config.decode, config.decode == SYNCHRONOUS),
        "eval.memory_bandwidth_gbs": (config.memory_bandwidth_gbs, config.memory_bandwidth_gbs is None),
    }
    problems += [
        f"{name} is {value}, and a trace times nothing: it has one answer of each method; leave {name} out, or trace"
        for name, (value, fits) in options.items()
        if not fits
    ]
    if in_stages:
        problems.append("the target is in stages, and a trace has the operators of one process; leave stage_layers out")
    return problems


def write_trace(
    config: EvalConfig, target: HFTarget, drafters: Drafters, path: Path, tuned: TunedSettings | None = None
) -> list[str]:
    """Answer the first prompt that fits once with each method, and write a Chrome trace of it.

    Open the file at ui.perfetto.dev or chrome://tracing. Each method is a block with its name, and
    its phases are blocks in it. Every method answers once before the trace, so that compilation and
    first allocations aren't in it. Returns the names of the methods, in the order of the trace.

    Raises ValueError for invalid input, and if no prompt fits.
    """
    # 1. Load what is traced.
    specs = method_specs(config, drafters, None, tuned)
    with cpu_threads(config.num_threads):
        loaded = load_drafters(specs, target)
        temperature = config.temperatures[0]
        methods = methods_by_place(config, specs, loaded, target)[temperature, 1]
        input_ids = _first_prompt(config, target, context_length(target, loaded.values()))
        # 2. Answer once without the profiler, then with it.
        answers = [_answer(method, config, target, input_ids, temperature) for method in methods]
        for answer in answers:
            answer()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if target.device.type == "cuda" else [])]
        with profile(activities=activities) as profiler:
            for method, answer in zip(methods, answers, strict=True):
                with record_function(method.name):
                    answer()
    # 3. Write the file. The profiler compresses it if the name ends with .gz.
    with replacing(path) as temporary:
        named = temporary.with_name(f"{temporary.name}{''.join(path.suffixes[-2:])}")
        try:
            profiler.export_chrome_trace(str(named))
            named.replace(temporary)
        finally:
            named.unlink(missing_ok=True)
    return [method.name for method in methods]


def _first_prompt(config: EvalConfig, target: HFTarget, most_tokens: int) -> Int[torch.Tensor, " seq"]:
    for suite in load_suites(config):
        for prompt in suite.prompts:
            input_ids = encode_prompt([Turn(role="user", content=prompt.turns[0])], target.tokenizer)[0]
            if len(input_ids) + config.max_new_tokens <= most_tokens:
                logger.info("tracing the answers to prompt %r of %s", prompt.id, suite.name)
                return input_ids.to(target.device)
    raise ValueError(
        f"no prompt leaves room for {config.max_new_tokens} new tokens in a context of {most_tokens}; lower max_new_tokens"
    )


def _answer(
    method: Method, config: EvalConfig, target: HFTarget, input_ids: Int[torch.Tensor, " seq"], temperature: float
) -> Callable[[], Any]:
    """Return a function that answers the prompt with a method, with its phases marked."""
    rule = acceptance_rule(config.acceptance, temperature, target)

    def answer() -> Any:
        return time_generation(
            Marked(target, TARGET_MARKS),
            Marked(method.drafter, DRAFTER_MARKS),
            rule,
            [input_ids],
            max_new_tokens=config.max_new_tokens,
            stop_ids=target.stop_ids,
            seeds=[config.seed],
            loop=method.loop,
        )

    return answer
