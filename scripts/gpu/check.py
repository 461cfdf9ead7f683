"""Checks a GPU within ten minutes: the tests with the mark `gpu`, decoding, labelling and training.

    python scripts/gpu/check.py               # results in $OUT, else in gpu_check/
    python scripts/gpu/check.py --tiny        # on a CPU: does the script itself work?

Each part is a process with a time limit, so one that hangs doesn't stop the others. The results are
`check.json`, and the JSON file and the output of each part. The exit status is 1 if a part failed.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

SCRIPTS, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TESTS = ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider")
PARTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tests": (200, (*TESTS, "--maxfail=20", "tests/gpu")),
    "decode_eager": (70, ("decode.py", "--form", "eager", "--batch", "1", "--batch", "8")),
    "decode_graphs": (70, ("decode.py", "--form", "graphs", "--batch", "1", "--batch", "8")),
    "decode_compiled": (130, ("decode.py", "--form", "compiled graphs")),
    "train": (120, ("train.py",)),
}
"""Seconds that a part may take, and its command. Together they end within ten minutes."""
ON_CPU = ("--shape", "tiny", "--device", "cpu", "--steps", "2", "--warm-up", "1", "--batch", "2")
TINY: dict[str, tuple[int, tuple[str, ...]]] = {
    "tests": (120, (*TESTS, "tests/gpu/test_attention_on_gpu.py")),
    "decode": (120, ("decode.py", *ON_CPU, "--prompt-tokens", "16")),
    "train": (120, ("train.py", *ON_CPU, "--seq", "24")),
}


def main(tiny: Annotated[bool, typer.Option("--tiny", help="Small shapes on a CPU.")] = False) -> None:
    """Check a GPU within ten minutes."""
    folder = Path(os.environ.get("OUT", "gpu_check")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **({"OUTRIDER_TEST_DEVICE": "cpu"} if tiny else {})}
    results: dict[str, Any] = {}
    for name, (limit, command) in (TINY if tiny else PARTS).items():
        print(f"=== {name}, at most {limit} s", flush=True)
        results[name] = run_part(name, command, limit, folder, environment)
        (folder / "check.json").write_text(json.dumps(results, indent=2) + "\n")
    for name, result in results.items():
        print(f"{name}: {result['status']}, {result['seconds']:.0f} s")
    print(f"Written to {folder}")
    raise typer.Exit(int(any(result["status"] != "ok" for result in results.values())))


def run_part(name: str, command: tuple[str, ...], limit: int, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run a part, show its output, and return how it ended with what it wrote."""
    report, log, start = folder / f"{name}.json", folder / f"{name}.log", time.perf_counter()
    report.unlink(missing_ok=True)
    if command[0] != "-m":
        command = (str(SCRIPTS / command[0]), *command[1:], "--output", str(report))
    with log.open("w") as output:
        try:
            options: Any = {"cwd": ROOT, "env": environment, "stdout": output, "stderr": subprocess.STDOUT, "timeout": limit}
            code = subprocess.run([sys.executable, *command], check=False, **options).returncode
            status = "ok" if code == 0 else f"failed with exit status {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit} s"
    written = json.loads(report.read_text()) if report.is_file() else None
    if status == "ok" and written is not None and written["failed"]:
        status = f"{len(written['failed'])} cases failed"
    print(log.read_text()[-6000:], flush=True)
    return {"status": status, "seconds": time.perf_counter() - start, "report": written}


if __name__ == "__main__":
    typer.run(main)
