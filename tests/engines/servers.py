"""Running engines: vLLM and llama.cpp, each with an exported drafter."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

ENGINES = Path(__file__).parents[2] / "build" / "engines"
VLLM_PYTHON = Path(os.environ.get("OUTRIDER_VLLM_PYTHON", ENGINES / "vllm" / "bin" / "python"))
LLAMA_CPP = Path(os.environ.get("OUTRIDER_LLAMA_CPP", ENGINES / "llama.cpp"))
"""The source of llama.cpp, with its converter, and its program in build/bin."""
LLAMA_SERVER = LLAMA_CPP / "build" / "bin" / "llama-server"
CONVERTER = Path(__file__).parent / "convert_demo_target.py"
VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).parents[2] / "build" / "types"),  # outrider, for its proposer
}
PROPOSER = "outrider.models.export.vllm_proposer.Proposer"
START_SECONDS = 300.0


def missing(path: Path) -> pytest.MarkDecorator:
    """Return a mark that skips a test if an engine isn't there."""
    return pytest.mark.skipif(not path.exists(), reason=f"no {path}: run make engines")


@contextmanager
def vllm(target: Path, method: str, drafter: Path, length: int, log: Path, *, processes: int = 1) -> Iterator[str]:
    """Serve a target and a drafter with vLLM in float32; `processes` divide the target. Yield the address."""
    model = PROPOSER if method == "custom_class" else str(drafter)
    speculative = json.dumps({"method": method, "model": model, "num_speculative_tokens": length})
    command = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", 1024, "--max-num-seqs", 4, "--no-enable-prefix-caching"]
    command += ["--additional-config", json.dumps({"outrider_drafter": str(drafter)}), "--tensor-parallel-size", processes]
    with _running([*command, "--speculative-config", speculative], "/v1/models", log, VLLM_VARIABLES) as url:
        yield url


def version_of(url: str, *, is_vllm: bool) -> str:
    """Return a server's version."""
    reply = httpx.get(f"{url}/{'version' if is_vllm else 'props'}", timeout=30, trust_env=False).json()
    return str(reply["version" if is_vllm else "build_info"])


@contextmanager
def llama_cpp(target: Path, kind: str, drafter: Path, length: int, log: Path) -> Iterator[str]:
    """Serve GGUF files with llama.cpp, with a cache in float32; yield the address."""
    caches = [word for cache in ("-ctk", "-ctv", "-ctkd", "-ctvd") for word in (cache, "f32")]
    drafting = ["-md", drafter, "--spec-type", kind, "--spec-draft-n-max", str(length), "--spec-draft-p-min", "0"]
    command = [LLAMA_SERVER, "-m", target, *drafting, *caches, "-fa", "off"]
    with _running([*command, "-t", "1", "-np", "1", "-c", "1024", "--metrics"], "/health", log, {}) as url:
        yield url


@contextmanager
def _running(command: list[object], path: str, log: Path, variables: dict[str, str]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, environment = f"http://127.0.0.1:{port}", {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in (*command, "--host", "127.0.0.1", "--port", port)]
    with (
        log.open("w") as output,
        subprocess.Popen(
            words, stdout=output, stderr=output, env=environment, cwd=log.parent, start_new_session=True
        ) as process,
    ):
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(url + path):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(
                        f"the engine doesn't start; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-15:])
                    )
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # vLLM's engine and workers are processes of their own


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def converted(folder: Path, output: Path) -> Path:
    """Convert the demo's target to a GGUF file in float32."""
    if not output.exists():
        command = [sys.executable, CONVERTER, folder, "--outtype", "f32", "--outfile", output]
        subprocess.run(command, check=True, env={**os.environ, "OUTRIDER_LLAMA_CPP": str(LLAMA_CPP)}, capture_output=True)
    return output
