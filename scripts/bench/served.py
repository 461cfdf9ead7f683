"""What drafters gain in vLLM: servers with one and without answer in turns, several requests at a time.

    python scripts/bench/served.py TARGET --drafter DIR=3 --drafter DIR+suffix=3 --drafter ngram=3 \\
        --suites '[{name: mt_bench, path: question.jsonl}]' --output FILE

A drafter is a name that outrider's proposer loads, or `ngram`, vLLM's own lookup, and how many tokens it drafts.
`outrider check-server` asks both servers; a wrong token fails the bench. vLLM is that of `make engines`.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from report import finish

from outrider.data.files import read_json
from outrider.models.llm.gguf_files import folder_of

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "engines" / "vllm" / "bin" / "python"
PROPOSER = "outrider.models.export.vllm_proposer.Proposer"
NGRAM = "ngram"
START_SECONDS = 600.0
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",  # the server that isn't asked leaves the processors alone
    "PYTHONPATH": str(ROOT / "build" / "types"),
}


def main(
    target: str,
    drafter: Annotated[list[str], typer.Option(help="NAME=LENGTH, may be repeated.")],
    suites: Annotated[str, typer.Option(help="As of outrider eval.")],
    output: Annotated[Path, typer.Option(help="The record, in JSON.")],
    dtype: str = "bfloat16",
    limit: Annotated[int, typer.Option(help="Prompts of each suite.")] = 16,
    max_new_tokens: int = 64,
    concurrency: str = "[1, 4, 16]",
) -> None:
    """Serve the target with each drafter and without; write the speeds."""
    folder, rows = folder_of(target), list[dict[str, Any]]()
    for named in drafter:
        name, _, length = named.rpartition("=")
        with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
            found = Path(work) / "check.json"
            sides = [stack.enter_context(serve(folder, dtype, name, int(length), Path(work) / "with"))]
            sides.append(stack.enter_context(serve(folder, dtype, None, 0, Path(work) / "without")))
            options = {"--without": sides[1], "--target": folder, "--suites": suites, "--limit": limit, "--samples": 0}
            options |= {"--max-new-tokens": max_new_tokens, "--concurrency": concurrency, "--output": found}
            if name != NGRAM:  # then the target here reads the answers, which is faster, and the drafts are compared, too
                options |= {"--drafter": name, "--settings": json.dumps(chain(name, int(length)))}
            words = [str(word) for option in options.items() for word in option]
            code = subprocess.run([sys.executable, "-m", "outrider.cli", "check-server", sides[0], *words], check=False)
            if code.returncode not in (0, 1) or not found.exists():
                raise RuntimeError(f"outrider check-server ended with {code.returncode}")
            rows += rows_of(Path(name).name, int(length), read_json(found))
    options = {"target": target, "dtype": dtype, "limit": limit, "max_new_tokens": max_new_tokens}
    finish(output, rows, options, suites=suites)


def chain(name: str, length: int) -> dict[str, Any]:
    """Return the options of drafting of a chain: of a lookup, a ReDrafter, or one merged with a lookup."""
    trained = {"beam_width": 1, "beam_length": length} if Path(name.partition("+")[0]).exists() else {}
    merged = {"pace": "fixed", "chain": True} if "+" in name else {}
    return {**trained, **merged, "tree_nodes": length}


def rows_of(name: str, length: int, check: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each concurrency of a check. Raises RuntimeError if a token is wrong.

    `speedup` is that of an answer, and `throughput` that of all requests together.
    """
    if not check["passed"]:
        raise RuntimeError(check["verdict"])
    counts = check["drafts"]["server"]["all"]
    return [
        {
            "drafter": name,
            "length": length,
            "at a time": speed["concurrency"],
            "tokens per step": round(1 + counts["accepted"] / counts["steps"], 2),
            "ms/token": round(1e3 * speed["seconds_per_token"], 1),
            "without": round(1e3 * speed["plain_seconds_per_token"], 1),
            "throughput": round(speed["tokens_per_second"] / speed["plain_tokens_per_second"], 2),
            "speedup": [round(number, 2) for number in (speed["speedup"], *(speed["speedup_ci95"] or ()))],
        }
        for speed in check["speeds"]
    ]


@contextmanager
def serve(target: str, dtype: str, drafter: str | None, length: int, log: Path) -> Iterator[str]:
    """Run vLLM until the block ends; yield its address."""
    options = ["--model", target, "--dtype", dtype, "--max-model-len", "1024", "--max-num-seqs", "16"]
    options += ["--no-enable-prefix-caching"]
    if drafter is not None:
        own = {"method": NGRAM, "prompt_lookup_max": 4}
        method = own if drafter == NGRAM else {"method": "custom_class", "model": PROPOSER}
        options += ["--speculative-config", json.dumps({**method, "num_speculative_tokens": length})]
        path = str(Path(drafter).absolute()) if Path(drafter.partition("+")[0]).exists() else drafter
        options += ["--additional-config", json.dumps({"outrider_drafter": path})]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *options, "--host", "127.0.0.1", "--port", str(port)]
    url, environment = f"http://127.0.0.1:{port}", {**os.environ, **VARIABLES}
    with (
        log.open("w") as text,
        subprocess.Popen(words, stdout=text, stderr=text, env=environment, cwd=log.parent) as process,
    ):
        try:
            until = time.monotonic() + START_SECONDS
            while not answers(f"{url}/v1/models"):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("vLLM doesn't start:\n" + "\n".join(log.read_text().splitlines()[-15:]))
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(url: str) -> bool:
    """Return whether a server answers."""
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    typer.run(main)
