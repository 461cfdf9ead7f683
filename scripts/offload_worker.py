"""Process of `bench_offload` that decodes with one method: a prompt for each line of its input.

    python scripts/offload_worker.py '{"kind": "stream", ...}'

The first line of its output has facts: the plan, the memory before anything was loaded. Each
further line answers a prompt, with times and counts of what was read. Everything else that it
prints goes to stderr. Kinds are `KINDS`; their options are those that `bench_offload` writes.
"""

import json
import mmap
import os
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import silence  # noqa: F401 - before torch, whose libraries it silences
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers_methods import transformers_method

from outrider.eval.measure.timing import Generation, time_generation
from outrider.models.decoding import GreedyAcceptance
from outrider.models.drafters import NullDrafter, load_drafter
from outrider.models.drafters.saved.folder import WEIGHTS_FILE, read_drafter_config
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

CHUNK_BYTES = 8 << 20
"""Bytes of one read of raw reads."""
PREFIX = "model."
"""What the names of a draft model's tensors begin with, since the drafter holds the model."""


class Stream:
    """Our decode loop, with a memory budget or without, and with a drafter or without."""

    def __init__(self, spec: dict[str, Any]) -> None:
        start = time.perf_counter()
        config = TargetConfig(
            name_or_path=spec["target"],
            dtype=spec["dtype"],
            device="cpu",
            memory_budget_gib=spec["budget_gib"],
            budget_tokens=spec["budget_tokens"],
        )
        self.target = load_target(config)
        if self.target.stream is None:
            copy_weights(self.target.model)
        self.drafter: Any = NullDrafter()
        if spec["drafter"] is not None:
            self.drafter = load_drafter(spec["drafter"], self.target, **spec["setting"])
            if not spec["meanwhile"]:
                self.drafter.meanwhile = lambda drafted: None
        self.facts = {"load_seconds": time.perf_counter() - start, "drafter_bytes": weight_bytes(self.drafter)}
        if self.target.stream is not None:
            plan = self.target.stream.plan
            layers = [unit for unit in plan.units if not unit.is_head]
            self.facts |= {
                "plan": plan.describe(),
                "parts": plan.parts,
                "planned_bytes": plan.planned_bytes,
                "streamed_bytes": plan.streamed_bytes,
                "streamed_layers": [index for index, unit in enumerate(layers) if unit.place == "streamed"],
            }

    def answer(self, prompt: torch.Tensor, max_new_tokens: int) -> dict[str, Any]:
        stream = self.target.stream
        before = None if stream is None else stream.stats
        generation = time_generation(
            self.target,
            self.drafter,
            GreedyAcceptance(),
            [prompt],
            max_new_tokens=max_new_tokens,
            stop_ids=(),
            seeds=[0],
            timed=True,
        )
        counts = None if stream is None or before is None else asdict(stream.stats - before)
        return {**described(generation), "draft_seconds": generation.phase_seconds.draft, "stream": counts}


class Peer:
    """transformers' `generate`, with accelerate's hooks, which load each module's weights from disk."""

    def __init__(self, spec: dict[str, Any]) -> None:
        start = time.perf_counter()
        model = offloaded_model(Path(spec["target"]), spec["streamed_layers"], spec["dtype"])
        assistant = None if spec["drafter"] is None else assistant_model(Path(spec["drafter"]), spec["dtype"])
        options = {} if assistant is None else {"assistant_model": assistant}
        method = transformers_method(spec["kind"], model, **options)
        assert method.decode is not None
        self.decode = method.decode
        self.facts = {"load_seconds": time.perf_counter() - start, "drafter_bytes": weight_bytes(assistant)}

    def answer(self, prompt: torch.Tensor, max_new_tokens: int) -> dict[str, Any]:
        generation = self.decode(None, None, None, [prompt], max_new_tokens=max_new_tokens, stop_ids=())
        return {**described(generation), "draft_seconds": None, "stream": None}


class RawReads:
    """Reads of as many bytes as a pass streams, without the page cache where the file system allows it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.files = sorted(Path(spec["target"]).glob("*.safetensors"), reverse=True)
        self.num_bytes = spec["streamed_bytes"]
        self.buffer = mmap.mmap(-1, CHUNK_BYTES)
        self.facts = {"drafter_bytes": 0}

    def answer(self, prompt: torch.Tensor, max_new_tokens: int) -> dict[str, Any]:
        left, start = self.num_bytes, time.perf_counter()
        while left > 0:
            before = left
            for path in self.files:
                if left > 0:
                    left -= self.read(path, left)
            if left == before:
                raise ValueError(f"no bytes could be read from {self.files[0].parent}; copy the weights again")
        return {"decode_seconds": time.perf_counter() - start, "num_steps": 1, "num_verify_tokens": 0}

    def read(self, path: Path, most: int) -> int:
        """Read a file's start, and return the number of bytes. Its last block may be left out."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # no such reads on this file system
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            num_read = 0
            while num_read < most and (count := os.preadv(file, [self.buffer], num_read)):
                num_read += count
                if count % mmap.PAGESIZE:
                    break
            return num_read
        finally:
            os.close(file)


class Nothing:
    """A process that has only imported everything: the memory that every method needs."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.facts = {"drafter_bytes": 0}

    def answer(self, prompt: torch.Tensor, max_new_tokens: int) -> dict[str, Any]:
        raise ValueError("this kind of worker answers nothing")


KINDS: dict[str, Any] = {"stream": Stream, "peer": Peer, "raw": RawReads, "nothing": Nothing}


def offloaded_model(folder: Path, streamed_layers: Sequence[int], dtype: str) -> PreTrainedModel:
    """Load a Llama-like model whose decoder layers with these indexes stay on disk."""
    config = AutoConfig.from_pretrained(folder)
    places = {f"model.layers.{index}": "cpu" for index in range(config.num_hidden_layers)}
    places |= {f"model.layers.{index}": "disk" for index in streamed_layers}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=getattr(torch, dtype), device_map=places
    )
    model.eval().requires_grad_(False)
    copy_weights(model)
    model.generation_config.eos_token_id = None  # answers have no end, as in our loop without stop_ids
    return model


def copy_weights(model: PreTrainedModel) -> None:
    """Copy weights that are mapped files: their pages would be a page cache that no limit counts."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.clone()


def assistant_model(folder: Path, dtype: str) -> PreTrainedModel:
    """Load the model of a saved draft model, for transformers' assisted generation."""
    architecture = read_drafter_config(folder).drafter["architecture"]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture), dtype=getattr(torch, dtype))
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    missing = model.load_state_dict(tensors, strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"the weights in {folder} don't fit their architecture: {missing}")
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def described(generation: Generation) -> dict[str, Any]:
    """Return the figures of an answer."""
    answer = generation.answer(0)
    steps = [step for step in generation.steps if not step.is_prefill]
    return {
        "token_ids": answer.token_ids,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "processor_seconds": generation.processor_seconds,
        "num_steps": len(steps),
        "num_verify_tokens": sum(len(step.tokens[0]) for step in steps),
        "num_draft_tokens": answer.num_draft_tokens,
        "accepted_histogram": answer.accepted_histogram,
    }


def weight_bytes(module: Any) -> int:
    """Return the bytes of the weights of a drafter or model; 0 for what has none."""
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else ()
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def memory_bytes() -> dict[str, int]:
    """Return the anonymous memory of this process, and its writable mappings, as RLIMIT_DATA counts."""
    status = Path("/proc/self/status").read_text()
    kib = {name: int(value) for name, value in re.findall(r"(RssAnon|VmData):\s+(\d+) kB", status)}
    return {"baseline_bytes": kib["RssAnon"] << 10, "baseline_data_bytes": kib["VmData"] << 10}


def reads_and_faults() -> tuple[int, int]:
    """Return the bytes that this process has read from disks, and its major page faults."""
    text = Path("/proc/self/io").read_text()
    return int(text.split("\nread_bytes: ")[1].split()[0]), resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def main() -> None:
    spec = json.loads(sys.argv[1])
    # 1. Only answers go to the pipe.
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(spec["threads"])
    baseline = memory_bytes()
    # 2. Load.
    worker = KINDS[spec["kind"]](spec)
    print(json.dumps({**baseline, **worker.facts}), file=pipe, flush=True)
    # 3. Answer.
    for line in sys.stdin:
        request = json.loads(line)
        reads, faults = reads_and_faults()
        answer = worker.answer(torch.tensor(request["prompt"]), request["max_new_tokens"])
        later_reads, later_faults = reads_and_faults()
        counts = {"read_bytes": later_reads - reads, "major_faults": later_faults - faults}
        print(json.dumps({**answer, **counts}), file=pipe, flush=True)


if __name__ == "__main__":
    main()
