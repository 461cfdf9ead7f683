"""Processes of a target in stages: the test is the head, and forks of a small server are the stages."""

import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.decoding import generate
from outrider.models.decoding.acceptance import GreedyAcceptance
from outrider.models.decoding.loop import NullDrafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ....forks import CONTEXT

PATIENCE = 60.0
"""Seconds until a process that should end counts as an orphan."""


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def launched(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment that a launcher gives a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_stage(environment: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Be the process of a stage."""
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    load_target(TargetConfig(**options))
    raise AssertionError("a stage doesn't return")


def run_head(environment: Mapping[str, str], options: Mapping[str, Any], prompt: Sequence[int], decodes: Event) -> None:
    """Be a head that decodes one text without an end. `decodes` is set after the first answer."""
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    target = load_target(TargetConfig(**options))
    while True:
        answer(target, prompt, 16)
        decodes.set()


class Launch:
    """A launch of a target in stages, in which the test is the head."""

    def __init__(self, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.options = dict(options)
        self.world_size = 1 + len(options["stage_layers"])
        self.port = free_port()
        self.stages: list[BaseProcess] = []
        for name, value in launched(0, self.world_size, self.port).items():
            monkeypatch.setenv(name, value)

    def start_stages(self, **others: Mapping[str, Any]) -> None:
        """Start the stages. `others` are different options of single ones, as `stage_1={...}`."""
        for rank in range(1, self.world_size):
            options = {**self.options, **others.get(f"stage_{rank}", {})}
            stage = CONTEXT.Process(target=run_stage, args=(launched(rank, self.world_size, self.port), options), daemon=True)
            stage.start()
            self.stages.append(stage)

    def load(self, **others: Mapping[str, Any]) -> Any:
        """Start the stages, and return the head's target."""
        self.start_stages(**others)
        return load_target(TargetConfig(**self.options))

    def start_head(self, prompt: Sequence[int]) -> BaseProcess:
        """Start a head in a process of its own, and wait until it decodes."""
        decodes = CONTEXT.Event()
        arguments = (launched(0, self.world_size, self.port), self.options, list(prompt), decodes)
        head = CONTEXT.Process(target=run_head, args=arguments, daemon=True)
        head.start()
        assert decodes.wait(PATIENCE), "the head doesn't decode"
        return head

    def require_ended(self) -> list[int | None]:
        """Wait until all stages have ended, and return their exit statuses."""
        for stage in self.stages:
            stage.join(PATIENCE)
        orphans = [stage for stage in self.stages if stage.is_alive()]
        for stage in orphans:  # it prints where it waits
            os.kill(stage.pid or 0, signal.SIGUSR1)
            stage.join(1)
        assert not orphans, f"stages {[self.stages.index(stage) + 1 for stage in orphans]} are orphans"
        return [stage.exitcode for stage in self.stages]

    def end(self) -> None:
        """Kill what is left."""
        for stage in self.stages:
            if stage.is_alive():
                stage.kill()  # it may have ended by itself meanwhile
                stage.join()


@contextmanager
def launch(options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Yield a launch, and leave nothing of it."""
    before = signal.getsignal(signal.SIGTERM)
    running = Launch(options, monkeypatch)
    try:
        yield running
    finally:
        running.end()
        signal.signal(signal.SIGTERM, before)


def answer(target: HFTarget, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Decode an answer, one token per step."""
    prompts = torch.tensor([list(prompt)])
    steps = generate(target, NullDrafter(), GreedyAcceptance(), prompts, max_new_tokens=num_tokens)
    return [token for step in steps for token in step.tokens[0]]


def later(seconds: float, act: Any, *arguments: Any) -> None:
    """Do something in another thread."""

    def wait() -> None:
        time.sleep(seconds)
        act(*arguments)

    threading.Thread(target=wait, daemon=True).start()


def target_options(directory: Path, stage_layers: Sequence[int], **others: Any) -> dict[str, Any]:
    return {
        "name_or_path": str(directory),
        "stage_layers": list(stage_layers),
        "device": "cpu",
        "dtype": "float32",
        "fast_linears": False,
        **others,
    }
