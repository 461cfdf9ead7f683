"""Servers of vLLM that write hidden states to files, for `served_labels.py`."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

import httpx
import typer
from served import PYTHON, ROOT, VARIABLES

START_SECONDS, STOP_SECONDS = 600.0, 30.0
LOG_LINES = 100
"""Shown of the log of a server that doesn't start: several processes of vLLM write it, and the cause comes first."""


def states_options(layers: Sequence[int], folder: str) -> dict[str, str]:
    """Return options of vLLM by which it writes the inputs of layers to files in a folder."""
    drafting = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": drafting}
    transfer = {
        "kv_connector": "CpuStatesConnector",
        "kv_connector_module_path": "cpu_states_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return {"--speculative-config": json.dumps(speculative), "--kv-transfer-config": json.dumps(transfer)}


@contextmanager
def running(options: Mapping[str, Any], count: int, threads: int) -> Iterator[list[str]]:
    """Start servers of vLLM, each with so many threads; yield their addresses when all answer."""
    if not PYTHON.exists():
        raise typer.BadParameter(f"there is no {PYTHON}: run make engines")
    words = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--no-enable-prefix-caching"]
    words += [str(word) for pair in options.items() for word in pair]
    variables = {**VARIABLES, "PYTHONPATH": str(ROOT / "scripts" / "engines"), "OMP_NUM_THREADS": str(threads)}
    with ExitStack() as stack:
        started = {
            port: stack.enter_context(process([*words, "--port", str(port)], {**os.environ, **variables}))
            for port in free_ports(count)
        }
        deadline = time.monotonic() + START_SECONDS
        urls = [f"http://127.0.0.1:{port}/v1" for port in started]
        for url, (server, log) in zip(urls, started.values(), strict=True):
            while not answers(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError("vLLM doesn't start:\n" + "\n".join(log.read().splitlines()[-LOG_LINES:]))
                time.sleep(0.5)
        yield urls


@contextmanager
def process(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Start a program; yield it and its log, and stop it with all its processes."""
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True, text=True) as started,
    ):
        try:
            yield started, log
        finally:
            started.terminate()
            with suppress(subprocess.TimeoutExpired):
                started.wait(STOP_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # vLLM's engine is a process of its own


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that no program uses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def answers(url: str) -> bool:
    """Return whether a server lists its models."""
    try:
        return httpx.get(f"{url}/models", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
