"""The first half hour on a GPU, by itself: what works, how fast it is, and where that differs from what is expected.

    scripts/gpu/first_half_hour.sh            # everything; 25 minutes at most
    scripts/gpu/first_half_hour.sh --tiny     # on a CPU, in two minutes: does this script work?

The parts are those of `half_hour_parts.py`. Each is a process of its own with a time limit, so one that fails or hangs costs
no other. A later call does not run a part again, whatever came of it, unless `--again` is given. So a machine on which a
command may last ten minutes is used in several calls, each with `--minutes 9.5`. The results:

- `first_half_hour.json`: of each part the command, exit status, seconds, last lines, its own report, and the verdict;
- `first_half_hour.md`: the same for a reader: what was expected, what was found.

Verdicts: `ok`; `look` where something is not as expected, or wasn't measured; `failed` where a part ended with an error, ran
out of time or left no report. The exit status is 1 where a part failed.

Nothing but Python's own library is imported here: a machine that lacks packages still gets its report.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from half_hour_parts import REPOSITORY, Check, Part, parts, report_path

JSON_FILE, PAGE_FILE = "first_half_hour.json", "first_half_hour.md"
TAIL_LINES, LINE_CHARACTERS = 40, 300
"""Of a part's output that are kept."""
OK, LOOK, FAILED = "ok", "look", "failed"
HAS_CUDA = "import torch; raise SystemExit(not torch.cuda.is_available())"

Record = dict[str, Any]
"""What came of a part."""


def main() -> None:
    args = parse_args()
    tiny = args.tiny or not has_cuda()
    scratch = args.scratch / ("tiny" if tiny else "gpu")
    scratch.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts(scratch) if not args.only or part.name.startswith(tuple(args.only))]
    records = read_records(scratch / JSON_FILE)
    ends_at = time.monotonic() + 60 * args.minutes
    for part in chosen:
        command = part.tiny if tiny else part.command
        has_run = part.name in records and not args.again
        if command is None or has_run or time.monotonic() + part.limit_seconds > ends_at:
            continue
        print(f"=== {part.name}: at most {part.limit_seconds} s", flush=True)
        record = run(part, command, scratch, part.tiny_environment if tiny else {})
        records[part.name] = judged(part, record, tiny=tiny)
        print(f"=== {part.name}: {record['verdict']}, {record['seconds']:.0f} s", flush=True)
        publish(records, parts(scratch), tiny, (scratch, args.out))  # each time: what has run is kept
    publish(records, parts(scratch), tiny, (scratch, args.out))
    print(f"Written to {args.out / JSON_FILE} and {args.out / PAGE_FILE}")
    sys.exit(any(record["verdict"] == FAILED for record in records.values()))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out, scratch = Path(os.environ.get("OUT", "gpu_first")), Path("outputs/first_half_hour")
    parser.add_argument("--out", type=Path, default=out, help="where the two files go: $OUT unless given, else gpu_first")
    parser.add_argument("--scratch", type=Path, default=scratch, help="what the parts write, and what has run")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU; without CUDA always")
    parser.add_argument("--only", nargs="+", help="the parts whose names begin so")
    parser.add_argument("--again", action="store_true", help="run parts that have run")
    parser.add_argument("--minutes", type=float, default=60, help="begin no part that may not end within them")
    args = parser.parse_args()
    args.out, args.scratch = args.out.resolve(), args.scratch.resolve()
    return args


def has_cuda() -> bool:
    return subprocess.run([sys.executable, "-c", HAS_CUDA], capture_output=True, check=False).returncode == 0


# --- running


def run(part: Part, command: Sequence[str], scratch: Path, environment: dict[str, str]) -> Record:
    """Run a part's command, for as long as it may take, and collect what it left."""
    report_path(scratch, part.name).unlink(missing_ok=True)
    log = scratch / f"{part.name}.log"
    started = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # and no session of its own, so that it ends with ours
        )
        try:
            status = process.wait(part.limit_seconds)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            kill_group(process.pid)
        if timed_out:
            status = process.wait()
    report, problem = read_report(scratch, part)
    return {
        "command": list(command),
        "limit_seconds": part.limit_seconds,
        "exit_status": status,
        "timed_out": timed_out,
        "seconds": time.monotonic() - started,
        "last_lines": last_lines(log),
        "report": report,
        "report_problem": problem,
    }


def kill_group(leader: int) -> None:
    """Kill whatever is left of a part: of a process that has ended, its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def read_report(scratch: Path, part: Part) -> tuple[Any, str | None]:
    """The part's report, and what is wrong with it."""
    if not part.writes_report:
        return None, None
    path = report_path(scratch, part.name)
    if not path.exists():
        return None, f"it left no {path.name}"
    try:
        return json.loads(path.read_text(), parse_constant=lambda name: None), None  # NaN is Python's, and no JSON
    except ValueError as error:
        return None, f"{path.name} is no JSON: {error}"


def last_lines(log: Path) -> list[str]:
    """The end of a part's output; of a progress bar, which goes back to the line's beginning, its last state."""
    with open(log, errors="replace", newline="\n") as file:  # so that "\r" stays
        lines = [line.rstrip().rpartition("\r")[2] for line in file]
    return [line[:LINE_CHARACTERS] for line in lines if line][-TAIL_LINES:]


# --- judging


def judged(part: Part, record: Record, *, tiny: bool) -> Record:
    """The record with its verdict, the reason where it failed, and what came of each check."""
    checks = [check for check in part.checks if not (tiny and check.only_on_gpu)]
    subject = record["report"] if part.writes_report else "\n".join(record["last_lines"])
    record["checks"] = [checked(check, subject) for check in checks]
    record["problem"] = problem_of(record)
    if record["problem"] is not None:
        record["verdict"] = FAILED
    else:
        record["verdict"] = LOOK if any(check["verdict"] == LOOK for check in record["checks"]) else OK
    return record


def problem_of(record: Record) -> str | None:
    if record["timed_out"]:
        return f"it was killed after its {record['limit_seconds']} s"
    if record["exit_status"] != 0:
        return f"it ended with exit status {record['exit_status']}"
    return record["report_problem"]


def checked(check: Check, report: Any) -> Record:
    """What was expected, what was found, and whether they agree."""
    try:
        found = check.value(report)
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        found = None
    if not isinstance(found, int | float):
        found = None
    fits = (
        found is not None
        and (check.least is None or found >= check.least)
        and (check.most is None or found <= check.most)  # NaN is neither above nor below
    )
    return {"says": check.says, "expected": expected(check), "found": found, "verdict": OK if fits else LOOK}


def expected(check: Check) -> str:
    bounds = [f"at least {check.least:g}"] if check.least is not None else []
    bounds += [f"at most {check.most:g}"] if check.most is not None else []
    return " and ".join(bounds)


# --- writing


def read_records(path: Path) -> dict[str, Record]:
    """What earlier calls have run. A file that was cut off counts as none."""
    try:
        return dict(json.loads(path.read_text())["parts"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def publish(records: dict[str, Record], every_part: Sequence[Part], tiny: bool, folders: Sequence[Path]) -> None:
    """Write both files, each whole or not at all."""
    ordered = {part.name: records[part.name] for part in every_part if part.name in records}
    whole = {"form": "tiny" if tiny else "gpu", "parts": ordered}
    missing = [part.name for part in every_part if part.name not in records and (part.tiny or not tiny)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in ((JSON_FILE, json.dumps(whole, indent=1)), (PAGE_FILE, page(whole, missing))):
            temporary = folder / f".{name}.tmp"
            temporary.write_text(text)
            os.replace(temporary, folder / name)


def page(whole: Record, missing: Sequence[str]) -> str:
    """The readable form."""
    records: dict[str, Record] = whole["parts"]
    facts = (records.get("facts") or {}).get("report") or {}
    packages = facts.get("packages") or {}
    lines = [
        "# The first half hour on a GPU",
        "",
        "The tiny form: small shapes on a CPU. It says whether this script works, and nothing about speed."
        if whole["form"] == "tiny"
        else f"{facts.get('device')}, CUDA {facts.get('cuda_version')}, cuDNN {facts.get('cudnn_version')}.",
        f"Python {facts.get('python')}, torch {packages.get('torch')}, transformers {packages.get('transformers')}.",
        "",
        "| part | verdict | seconds | limit |",
        "| --- | --- | ---: | ---: |",
    ]
    for name, record in records.items():
        lines.append(f"| {name} | {record['verdict']} | {record['seconds']:.0f} | {record['limit_seconds']} |")
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    for name, record in records.items():
        lines += ["", *section(name, record)]
    return "\n".join(lines) + "\n"


def section(name: str, record: Record) -> list[str]:
    """A part: its command, what was expected and found, and where it failed, why."""
    command = " ".join(record["command"]).replace(f"{REPOSITORY}/", "")
    lines = [f"## {name}: {record['verdict']}", "", f"`{command}`"]
    if record["checks"]:
        lines += ["", "| what | expected | found | verdict |", "| --- | --- | ---: | --- |"]
    for check in record["checks"]:
        found = "not measured" if check["found"] is None else f"{check['found']:.4g}"
        lines.append(f"| {check['says']} | {check['expected']} | {found} | {check['verdict']} |")
    if record["problem"] is not None:
        lines += ["", f"**Failed**: {record['problem']}. Its last lines:", "", "```", *record["last_lines"], "```"]
    return lines


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the part that is running is killed too
    main()
