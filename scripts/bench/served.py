"""What drafters gain in vLLM: engines with one and without answer the same prompts in turns.

    python scripts/bench/served.py TARGET --drafter DIR=3 --drafter DIR+suffix=4 --drafter ngram=4 \\
        --suite mt_bench=question.jsonl --output FILE

A drafter is a name that outrider's proposer loads, METHOD:FOLDER for an export that vLLM reads by itself (a method of
its own, such as eagle3 or draft_model), or `ngram`, vLLM's own lookup, with the number of tokens that it drafts. Each
has an engine (`vllm_engine.py`, in the environment of `make engines`), and the others wait while one answers. Seconds
are those of a whole call with so many prompts at a time, their prefill included; answers don't end at a stop token.
vLLM also counts drafts behind the last token of an answer, so `tokens_per_step` is up to a hundredth too large.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from report import finish
from turns import Answer, in_turns, rows_of

from outrider.data.chat import encode_prompt
from outrider.data.suites import load_suite
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.gguf_files import folder_of
from outrider.models.llm.loading import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "engines" / "vllm" / "bin" / "python"
WORKER = Path(__file__).with_name("vllm_engine.py")
PROPOSER = "outrider.models.export.vllm_proposer.Proposer"
NGRAM, PLAIN = "ngram", "plain decoding"
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the proposer's
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT / "build" / "types"),
}


def main(
    target: str,
    drafter: Annotated[list[str], typer.Option(help="NAME=LENGTH, may be repeated.")],
    suite: Annotated[list[str], typer.Option(help="NAME=PATH, may be repeated.")],
    output: Annotated[Path, typer.Option(help="The record, in JSON.")],
    dtype: str = "bfloat16",
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each suite.")] = 8,
    most_tokens: Annotated[int, typer.Option(help="Longer prompts lose their beginning.")] = 512,
    max_new_tokens: int = 64,
    rounds: int = 3,
    concurrency: Annotated[str, typer.Option(help="Prompts at a time, a JSON list.")] = "[1, 4, 16]",
) -> None:
    """Serve the target with each drafter and without; write the speeds."""
    if not Path(PYTHON).exists():
        raise typer.BadParameter(f"there is no {PYTHON}: run make engines")
    drafters = {}
    for named in drafter:
        name, _, length = named.rpartition("=")
        label = f"{Path(name).name}, {length} tokens"
        if not name or not length.isdecimal() or label in drafters:
            raise typer.BadParameter(f"--drafter is {named}; give NAME=LENGTH, and drafters whose folders have different names")
        drafters[label] = drafting(name, int(length))
    folder = folder_of(target)
    tokenizer = load_tokenizer(TargetConfig(name_or_path=folder))
    suites = [load_suite(*one.split("=", 1), limit=limit) for one in suite]
    turns = [prompt.messages(prompt.turns[0]) for found in suites for prompt in found.prompts]
    prompts = [encode_prompt(turn, tokenizer)[0][-most_tokens:].tolist() for turn in turns]
    rows = list[dict[str, Any]]()
    with ExitStack() as stack:
        sizes = json.loads(concurrency)
        options = {"model": folder, "dtype": dtype, "max_model_len": most_tokens + max_new_tokens, "max_num_seqs": max(sizes)}
        engines = {PLAIN: stack.enter_context(engine(options))}
        for label, more in drafters.items():
            engines[label] = stack.enter_context(engine(options | more))
        for size in sizes:
            groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]

            def answer(method: str, prompt: int, groups: list[list[list[int]]] = groups) -> Answer:
                return engines[method](groups[prompt], max_new_tokens)

            for method in engines:
                answer(method, 0)  # the first call of a size is slow
            rows += [
                {"at a time": size, **row} for row in rows_of(in_turns([*engines], len(groups), rounds, answer), PLAIN, PLAIN)
            ]
    facts = {"target": target, "dtype": dtype, "prompts": len(prompts), "max_new_tokens": max_new_tokens, "rounds": rounds}
    finish(output, rows, facts)


def drafting(name: str, length: int) -> dict[str, Any]:
    """Return vLLM's options for a drafter."""
    if name == NGRAM:
        return {"speculative_config": {"method": NGRAM, "prompt_lookup_max": 4, "num_speculative_tokens": length}}
    method, _, folder = name.partition(":")
    if folder:
        own = {"method": method, "model": str(Path(folder).absolute()), "num_speculative_tokens": length}
        return {"speculative_config": own}
    path = str(Path(name).absolute()) if Path(name.partition("+")[0]).exists() else name
    proposer = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": length}
    return {"speculative_config": proposer, "additional_config": {"outrider_drafter": path}}


@contextmanager
def engine(options: dict[str, Any]) -> Iterator[Callable[[Sequence[Sequence[int]], int], Answer]]:
    """Start a process of vLLM and wait for it; yield what answers prompts together, with so many tokens each."""
    words = [str(PYTHON), str(WORKER), json.dumps({**options, "enable_prefix_caching": False})]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(words, stderr=log, env={**os.environ, **VARIABLES}, **pipes) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None

        def reply() -> Answer:
            if not (line := process.stdout.readline()):
                log.seek(0)
                raise RuntimeError("vLLM has ended:\n" + "\n".join(log.read().splitlines()[-15:]))
            found: Answer = json.loads(line)
            return found

        def ask(prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
            print(json.dumps({"prompts": prompts, "max_tokens": max_tokens}), file=process.stdin, flush=True)
            return reply()

        reply()  # it can answer now
        yield ask


if __name__ == "__main__":
    typer.run(main)
