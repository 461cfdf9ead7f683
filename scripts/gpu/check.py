"""Checks a GPU within ten minutes: the tests with the mark `gpu`, decoding, labelling and training.

    python scripts/gpu/check.py               # results in $OUT, else in gpu_check/
    python scripts/gpu/check.py --tiny        # on a CPU: does the script itself work?

Each part is a process with a time limit, so one that hangs doesn't stop the others. The results are
`check.json`, and the JSON file and the output of each part. `check.json` also compares the decoding
of all parts with the fastest plain decoding of any part. The exit status is 1 if a part failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratios import add_ratios

SCRIPTS, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TESTS = ("-m", "pytest", "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider")
PARTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tests": (200, (*TESTS, "--maxfail=20", "tests/gpu")),
    "decode_eager": (70, ("decode.py", "--form", "eager", "--batch", "1", "8")),
    "decode_graphs": (70, ("decode.py", "--form", "graphs", "--batch", "1", "8")),
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check a GPU within ten minutes.")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU")
    is_tiny = parser.parse_args(arguments).tiny
    folder = Path(os.environ.get("OUT", "gpu_check")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **({"OUTRIDER_TEST_DEVICE": "cpu"} if is_tiny else {})}
    results: dict[str, Any] = {}
    for name, (limit, command) in (TINY if is_tiny else PARTS).items():
        print(f"=== {name}, at most {limit} s", flush=True)
        results[name] = run_part(name, command, limit, folder, environment)
        rows = decoding_rows(results)
        (folder / "check.json").write_text(json.dumps({"parts": results, "decoding": rows}, indent=2) + "\n")
    for row in rows:
        ratios = ", ".join(f"{ratio} {row[ratio]:.2f}" for ratio in ("break_even", "speedup") if row[ratio] is not None)
        print(f"{row['form']}, batch {row['batch']}, {row['method']}: {row['milliseconds']:.2f} ms, {ratios}")
    for name, result in results.items():
        print(f"{name}: {result['status']}, {result['seconds']:.0f} s")
    print(f"Written to {folder}")
    return int(any(result["status"] != "ok" for result in results.values()))


def run_part(name: str, command: tuple[str, ...], limit: int, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run a part, show its output, and return how it ended with what it wrote."""
    report, log, start = folder / f"{name}.json", folder / f"{name}.log", time.perf_counter()
    report.unlink(missing_ok=True)
    if command[0] != "-m":
        command = (str(SCRIPTS / command[0]), *command[1:], "--output", str(report))
    with log.open("w") as output:
        streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, start_new_session=True, **streams)
        try:
            code = process.wait(limit)
            status = "ok" if code == 0 else f"failed with exit status {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit} s"
        finally:
            if process.poll() is None:  # with the processes that it has started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    written = json.loads(report.read_text()) if report.is_file() else None
    if status == "ok" and written is not None and written["failed"]:
        status = f"{len(written['failed'])} cases failed"
    print(log.read_text()[-6000:], flush=True)
    return {"status": status, "seconds": time.perf_counter() - start, "report": written}


def decoding_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of all parts that decode, with ratios over the fastest plain decoding of any part."""
    reports = [result["report"] for name, result in results.items() if name.startswith("decode")]
    rows = [dict(row) for report in reports if report is not None for row in report["rows"]]
    add_ratios(rows)
    return rows


if __name__ == "__main__":
    sys.exit(main())
