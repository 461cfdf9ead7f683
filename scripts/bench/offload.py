"""Benchmark of a target that is larger than its memory budget, against accelerate's offload to the disk.

    make offload                       # trains the drafter and grows the target, once
    python scripts/bench/offload.py
    python scripts/bench/offload.py --read-rate 200000000 --budget 0.25 --llmcad

Each method decodes in a process of its own, under a cap on its memory. The cap is the sum of four
parts: what the process holds before it loads a weight, its drafter, the budget, and an allowance.
accelerate keeps the same layers in memory as our plan, but in the type of the computation: where that
is wider, its cap is larger. The first answer of each method warms up. Before each answer the script
drops the weights from the page cache. A virtual machine may still read them from its host's memory:
`--read-rate` slows its disk down to the rate of a real one.
"""

import math
import multiprocessing
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import limits
import paper_rules
import torch
import typer
from report import finish
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from turns import Answer, Passes, held_out_prompts, in_turns, rows_of, timed

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, load_drafter
from outrider.models.drafters.saved.folder import WEIGHTS_FILE
from outrider.models.drafters.saved.loading import trained_parts
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target, load_tokenizer

STREAMED, ACCELERATE, LLMCAD = "streamed, plain", "accelerate's offload", "streamed, growing tree by LLMCad's rule"
SETTINGS: dict[str, dict[str, Any]] = {
    "streamed, fixed tree": {"pace": "fixed", "length": 5, "top_k": 8, "tree_nodes": 40},
    "streamed, growing tree": {"pace": "expected", "top_k": 8, "tree_nodes": 256},
    LLMCAD: {"pace": "expected", "top_k": 8, "tree_nodes": 256},
}
METHODS = (STREAMED, ACCELERATE, *SETTINGS)
ALLOWANCE_BYTES = 96 << 20
"""Memory for activations, page tables and Python. accelerate uses what is left of it as page cache."""
TIMING_BYTES = 64 << 20
"""Memory that the timing of a drafter's linear layers takes for a moment."""
PROMPT_TOKENS = 256
WARM_UP_TOKENS = 3
END_SECONDS = 10.0
"""Longest wait for a process that has nothing more to do."""
Folder = Annotated[Path, typer.Option(exists=True, file_okay=False)]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a process needs to decode with its method."""

    method: str
    target: str
    drafter: str
    dtype: str
    budget_bytes: int
    budget_tokens: int
    widening: float
    """Bytes of the weights in the type of the computation, over those of their files."""
    threads: int
    streamed_layers: Sequence[int] = ()
    """Layers that accelerate leaves on the disk."""


def main(
    target: Folder = Path("outputs/grown_demo"),
    drafter: Folder = Path("outputs/offload_demo/drafter"),
    dtype: Annotated[str, typer.Option(help="type of the computation; accelerate keeps its layers in it")] = "bfloat16",
    budget: Annotated[float, typer.Option(min=0, max=1, help="budget, as a share of the weights")] = 0.5,
    read_rate: Annotated[int | None, typer.Option(help="bytes per second that a process may read from the disk")] = None,
    prompts: int = 2,
    new_tokens: int = 48,
    plain_tokens: Annotated[int, typer.Option(help="tokens of an answer without a drafter")] = 6,
    rounds: int = 2,
    llmcad: Annotated[bool, typer.Option(help="measure LLMCad's rule of when to verify, too")] = False,
    threads: int = 2,
    output: Path = Path("outputs/bench/offload.json"),
) -> None:
    """Measure accelerate, plain streaming, a fixed tree and a growing one, in turns."""
    options = dict(locals())
    methods = [method for method in METHODS if llmcad or method != LLMCAD]
    files = sorted(target.glob("*.safetensors"))
    weight_bytes = sum(file.stat().st_size for file in files)
    budget_tokens = PROMPT_TOKENS + new_tokens + 1 + max(setting["tree_nodes"] for setting in SETTINGS.values())
    shared = {"target": str(target), "drafter": str(drafter), "dtype": dtype, "threads": threads}
    widening = getattr(torch, dtype).itemsize * sum(map(parameters_of, files)) / weight_bytes
    spec = partial(Spec, **shared, widening=widening, budget_bytes=round(budget * weight_bytes), budget_tokens=budget_tokens)
    texts = held_out_prompts(load_tokenizer(TargetConfig(name_or_path=str(target))), prompts, PROMPT_TOKENS)
    with ExitStack() as stack:
        # 1. Start a process for each method. accelerate's needs the plan of the first one.
        workers: dict[str, Worker] = {}
        for method in methods:
            layers = workers[STREAMED].plan["streamed_layers"] if method == ACCELERATE else ()
            workers[method] = stack.enter_context(Worker(spec(method=method, streamed_layers=layers), read_rate))

        # 2. Answer in turns, after a short answer of each method that warms up.
        def answer(method: str, prompt: int) -> Answer:
            drop_from_cache(files)
            return workers[method].ask(texts[prompt], new_tokens if method in SETTINGS else plain_tokens)

        for worker in workers.values():
            worker.ask(texts[0], WARM_UP_TOKENS)
        answers = in_turns(methods, prompts, rounds, answer)
    # 3. The table has what each process read and might hold, too.
    rows = rows_of(answers, ACCELERATE, STREAMED)
    for row in rows:
        own = [answer for answer in answers if answer["method"] == row["method"]]
        num_passes = sum(1 + answer["num_steps"] for answer in own)
        row["gb_read_per_pass"] = round(sum(answer["read_bytes"] for answer in own) / num_passes / 1e9, 3)
        row |= workers[row["method"]].facts
    plans = {method: worker.plan for method, worker in workers.items()}
    finish(output, rows, options, weight_bytes=weight_bytes, plans=plans, answers=answers)


class Worker:
    """A process that decodes with one method under limits. It ends with the block."""

    def __init__(self, spec: Spec, read_rate: int | None) -> None:
        self.spec, self.read_rate = spec, read_rate
        self.facts: dict[str, Any] = {}
        """What the table has of its limits."""
        self.plan: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Worker":
        """Start the process, cap its memory when it has imported everything, and wait until it has loaded.

        Raises ValueError if the process has ended.
        """
        with ExitStack() as stack:
            limited = stack.enter_context(limits.prepared(self.read_rate, Path(self.spec.target)))
            context = multiprocessing.get_context("spawn")
            self.connection, end = context.Pipe()
            self.process = context.Process(target=decode_requests, args=(self.spec, end), daemon=True)
            self.process.start()
            stack.callback(self._end)
            assert self.process.pid is not None
            limited.join(self.process.pid)
            end.close()
            baseline = self._receive()["RssAnon" if limited.memory else "VmData"]
            # In 32 bits, with a packed copy.
            drafter = (
                parameters_of(Path(self.spec.drafter) / WEIGHTS_FILE) * 8 + TIMING_BYTES if self.spec.method in SETTINGS else 0
            )
            held = self.spec.budget_bytes * (self.spec.widening if self.spec.method == ACCELERATE else 1)
            cap = round(baseline + drafter + held + ALLOWANCE_BYTES)
            limited.cap(cap)
            self.connection.send(None)
            self.plan = self._receive()
            self.facts = {"gb_of_memory_at_most": round(cap / 1e9, 3), "by": limited.means}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Answer a prompt. Raises ValueError if the process has ended."""
        self.connection.send((prompt, num_tokens))
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            received: dict[str, Any] = self.connection.recv()
        except EOFError:
            self.process.join()
            reason = "was killed, which its cap on memory does" if self.process.exitcode == -9 else "has ended"
            raise ValueError(f"the process of {self.spec.method!r} {reason} (status {self.process.exitcode})") from None
        return received

    def _end(self) -> None:
        self.connection.close()  # which the process notices
        self.process.join(END_SECONDS)
        self.process.kill()
        self.process.join()


def decode_requests(spec: Spec, connection: Connection) -> None:
    """Be the process of a method: load, then answer prompts."""
    torch.set_num_threads(spec.threads)
    # 1. The cap counts what the process holds already, so it comes now.
    connection.send(memory("RssAnon", "VmData"))
    connection.recv()
    decode, facts = accelerate_decoder(spec) if spec.method == ACCELERATE else streamed_decoder(spec)
    connection.send(facts)
    # 2. Answer, until the other end is closed.
    with suppress(EOFError):
        while True:
            prompt, num_tokens = connection.recv()
            before = bytes_read()
            answer = timed(decode(torch.tensor([prompt]), num_tokens))
            connection.send({**answer, "read_bytes": bytes_read() - before})


def streamed_decoder(spec: Spec) -> tuple[Callable[[torch.Tensor, int], Passes], dict[str, Any]]:
    """Load the target within the budget. Return what decodes, and facts of the plan."""
    options = {"memory_budget_gib": spec.budget_bytes / (1 << 30), "budget_tokens": spec.budget_tokens}
    target = load_target(TargetConfig(name_or_path=spec.target, dtype=spec.dtype, device="cpu", **options))
    if target.stream is None:
        raise ValueError("all weights fit into the budget; give a smaller --budget")
    plan = target.stream.plan
    layers = [unit for unit in plan.units if not unit.is_head]
    drafter: Any = NullDrafter()
    if spec.method in SETTINGS:
        drafter = load_drafter(spec.drafter, target, **SETTINGS[spec.method])
        target.choose_linears(*trained_parts(drafter))
    if spec.method == LLMCAD:
        drafter = paper_rules.ConfidenceMerge(drafter.sources, drafter.config)

    def decode(prompt: torch.Tensor, num_tokens: int) -> Passes:
        steps = generate(target, drafter, GreedyAcceptance(), prompt, max_new_tokens=num_tokens)
        return (step.tokens[0] for step in steps)

    streamed = [index for index, unit in enumerate(layers) if unit.place == "streamed"]
    return decode, {"plan": plan.describe(), "streamed_layers": streamed}


def accelerate_decoder(spec: Spec) -> tuple[Callable[[torch.Tensor, int], Passes], dict[str, Any]]:
    """Load a Llama-like model with accelerate's hooks, which read each module's weights from the disk at its turn."""
    config = AutoConfig.from_pretrained(spec.target)
    places = {f"model.layers.{index}": "cpu" for index in range(config.num_hidden_layers)}
    places |= {f"model.layers.{index}": "disk" for index in spec.streamed_layers}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    dtype = getattr(torch, spec.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(spec.target, config=config, dtype=dtype, device_map=places)
    for parameter in model.parameters():
        if not parameter.is_meta:  # a mapped file would be page cache, which no cap counts
            parameter.data = parameter.data.clone()

    @torch.inference_mode()
    def next_token(ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1), output.past_key_values

    def decode(prompt: torch.Tensor, num_tokens: int) -> Passes:
        ids, cache = prompt, None
        for _ in range(num_tokens):
            ids, cache = next_token(ids, cache)
            yield ids[0].tolist()

    return decode, {"plan": f"{len(spec.streamed_layers)} layers on the disk"}


def parameters_of(path: Path) -> int:
    """Return the number of parameters in a file."""
    with safe_open(path, framework="pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def memory(*names: str) -> dict[str, int]:
    """Return the bytes of lines of this process's status."""
    status = Path("/proc/self/status").read_text()
    return {name: int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) << 10 for name in names}


def bytes_read() -> int:
    """Return the bytes that this process has read from disks."""
    return int(Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0])


def drop_from_cache(files: Sequence[Path]) -> None:
    """Drop files from the page cache, so that the next method reads them from their disk."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)  # pages that aren't on the disk yet can't be dropped
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


if __name__ == "__main__":
    typer.run(main)
