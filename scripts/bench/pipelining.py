"""Benchmark of a target in stages: plain decoding, drafting that waits for the stages, and pipelined drafting.

    make pipeline                      # trains the drafter and grows the target, once
    python scripts/bench/pipelining.py
    python scripts/bench/pipelining.py --pipeinfer 2

Each stage is a process of its own on this machine, so all of them share its cores: the table shows
what the processes do together, and not what machines of their own gain. Processor seconds are those
of all processes.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from paper_rules import PaperSpeculation
from report import finish
from turns import Answer, held_out_prompts, in_turns, rows_of, timed

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.decoding.pipelined import generate_pipelined
from outrider.models.decoding.speculation import ExpectedSpeculation
from outrider.models.decoding.types import Step
from outrider.models.drafters import NullDrafter, load_drafter
from outrider.models.drafters.streaming_merge import streaming_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

PLAIN, PIPELINED, PIPEINFER = "plain", "pipelined", "pipelined by PipeInfer's rule"
CHAINS = (4, 8)
"""Draft tokens in each step of the rows that wait for the stages."""
MOST_PROMPT_TOKENS = 128
Folder = Annotated[Path, typer.Option(exists=True, file_okay=False)]


def main(
    target: Folder = Path("outputs/grown_demo"),
    drafter: Annotated[str, typer.Option(help="folder of a draft model")] = "outputs/pipeline_demo/drafter",
    stage_layers: Annotated[str, typer.Option(help="layers of each stage")] = "12,12",
    prompts: int = 4,
    new_tokens: int = 48,
    rounds: int = 2,
    pipeinfer: Annotated[int | None, typer.Option(min=1, help="measure PipeInfer's rule, too, with runs of this size")] = None,
    threads: Annotated[int, typer.Option(help="threads of each process")] = 1,
    output: Path = Path("outputs/bench/pipelining.json"),
) -> None:
    """Measure plain, synchronous and pipelined decoding over the same stages, in turns."""
    options = dict(locals())
    layers = [int(number) for number in stage_layers.split(",")]
    config = TargetConfig(name_or_path=str(target), dtype="float32", device="cpu", stage_layers=layers)
    with in_stages(config, threads) as (staged, processes):
        # 1. The methods. The first answer of each warms up.
        methods: dict[str, Callable[..., Iterator[Step]]] = {PLAIN: partial(generate, staged, NullDrafter())}
        for length in CHAINS:
            chain = load_drafter(drafter, staged, length=length, top_k=1, tree_nodes=length)
            methods[f"synchronous, {length} draft tokens"] = partial(generate, staged, chain)
        streaming = streaming_drafter(load_drafter(drafter, staged))
        methods[PIPELINED] = partial(generate_pipelined, staged, streaming, speculation=ExpectedSpeculation())
        if pipeinfer:
            chains = PaperSpeculation(micro_batch=pipeinfer)
            methods[PIPEINFER] = partial(generate_pipelined, staged, streaming, speculation=chains)
        texts = [torch.tensor([ids]) for ids in held_out_prompts(staged.tokenizer, prompts, MOST_PROMPT_TOKENS)]

        def answer(method: str, prompt: int, num_tokens: int = new_tokens) -> Answer:
            steps = methods[method](rule=GreedyAcceptance(), prompts=texts[prompt], max_new_tokens=num_tokens)
            return timed((step.tokens[0] for step in steps), partial(processor_seconds, processes))

        for method in methods:
            answer(method, 0, num_tokens=8)
        # 2. Measure in turns.
        answers = in_turns([*methods], prompts, rounds, answer)
    finish(output, rows_of(answers, PLAIN, PLAIN), options, answers=answers)


def processor_seconds(processes: Sequence[int]) -> float:
    """Return the processor seconds of this process and of others on this machine, by their ids."""
    ticks = 0
    for number in processes:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # in user and in system mode
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def in_stages(config: TargetConfig, threads: int) -> Iterator[tuple[Any, list[int]]]:
    """Yield a target whose stages are processes, and the ids of these processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    count = 1 + len(config.stage_layers)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "RANK": "0"}
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=be_stage, args=(config, rank, threads), daemon=True) for rank in range(1, count)]
    for process in processes:
        process.start()
    torch.set_num_threads(threads)
    staged: Any = load_target(config)
    staged.choose_linears()
    try:
        yield staged, [process.pid for process in processes if process.pid is not None]
    finally:
        staged.link.close()
        for process in processes:
            process.join(10.0)


def be_stage(config: TargetConfig, rank: int, threads: int) -> None:
    """Serve the head with a stage's layers until it ends."""
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(threads)
    load_target(config)


if __name__ == "__main__":
    typer.run(main)
