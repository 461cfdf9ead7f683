"""The first half hour on a GPU: checks what works, how fast it is, and what is unexpected.

    scripts/gpu/first_half_hour.sh            # everything; 25 minutes at most
    scripts/gpu/first_half_hour.sh --tiny     # on a CPU, in two minutes: tests this script itself

`half_hour_parts.py` defines the parts. A later call skips parts that ended, unless `--again` is
set, so several calls with `--minutes 9.5` do the work of one. The results are in
`first_half_hour.json` and `.md`; those of the tiny form in `first_half_hour_tiny.json` and `.md`.
If nvidia-smi lists a GPU that torch doesn't see, nothing is run.

Verdicts: `ok`; `look`, if a value is unexpected or missing; `failed`, if a part ended with an error,
timed out or left no report. The exit status is 1 if a chosen part failed, 2 if nothing could be run,
and 128 plus the signal's number after a signal. The script imports only the standard library.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facts import commit, nvidia_smi, seen_by_torch, unseen
from half_hour_parts import REPOSITORY, Check, Part, details, parts, report_path
from killed_recipe import ending_with_this_process

GPU, TINY = "gpu", "tiny"
FILES = {GPU: "first_half_hour", TINY: "first_half_hour_tiny"}
"""Names of each form's two files, without suffixes."""
TAIL_LINES, LINE_CHARACTERS = 40, 300
"""Lines of a part's output to keep, and characters of a line."""
OK, LOOK, FAILED = "ok", "look", "failed"
POLL_SECONDS = 0.05
STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

Record = dict[str, Any]
"""Result of a part."""


@dataclass
class Call:
    """State of one call, shared by all parts."""

    form: str
    form_line: str
    """The form, and the reason for it."""
    commit: str | None
    every_part: Sequence[Part]
    scratch: Path
    out: Path
    stop_signal: int | None = None
    """The first signal that requested the end."""
    stopped_part: str | None = None
    """The part that ran at that time."""


def main() -> None:
    args = parse_args()
    chosen = [part for part in parts(args.scratch) if not args.only or part.name.startswith(tuple(args.only))]
    form, form_line = choose_form(args.tiny, [part.name for part in chosen])
    say(form_line)
    scratch = args.scratch / form
    scratch.mkdir(exist_ok=True)
    call = Call(form, form_line, commit(), parts(scratch), scratch, args.out)
    records = read_records(scratch / f"{FILES[form]}.json")
    names = {part.name for part in chosen}
    with noting_signals(call):
        run_parts(call, [part for part in call.every_part if part.name in names], records, args)
        publish(call, records)
    say(f"Written to {args.out / FILES[form]}.json and .md")
    if call.stop_signal is not None:
        say(f"Stopped by {signal.Signals(call.stop_signal).name}")
        sys.exit(128 + call.stop_signal)
    sys.exit(any(records[name]["verdict"] == FAILED for name in names & records.keys()))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out, scratch = Path(os.environ.get("OUT", "gpu_first")), Path("outputs/first_half_hour")
    parser.add_argument("--out", type=Path, default=out, help="folder of the two files; default: $OUT, else gpu_first")
    parser.add_argument("--scratch", type=Path, default=scratch, help="folder of the parts' files, and of earlier results")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU; always used without a GPU")
    parser.add_argument("--only", nargs="+", help="run only parts whose names begin like this")
    parser.add_argument("--again", action="store_true", help="run parts again that have run already")
    parser.add_argument("--minutes", type=float, default=60, help="start no part that may not end in this time")
    # Check the values: parts, minutes and folders.
    args = parser.parse_args()
    known = [part.name for part in parts(args.scratch)]
    for start in args.only or ():
        if not start or not any(name.startswith(start) for name in known):
            parser.error(f"--only {start!r}: must be the start of a part's name; the parts are {', '.join(known)}")
    if not (args.minutes > 0 and math.isfinite(args.minutes)):
        parser.error(f"--minutes {args.minutes:g}: must be a number above 0; without it the limit is 60")
    args.out, args.scratch = args.out.resolve(), args.scratch.resolve()
    for option, folder in (("--out ($OUT)", args.out), ("--scratch", args.scratch)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{option} {folder}: must be a folder, or a path for a new one ({error.strerror}); choose another")
        if not os.access(folder, os.W_OK | os.X_OK):
            parser.error(f"{option} {folder}: must be a writable folder; choose another")
    return args


# --- the form


def choose_form(asks_for_tiny: bool, names: Sequence[str]) -> tuple[str, str]:
    """Return the form, and a line with the form and the reason.

    Exits if torch doesn't see the machine's GPU.
    """
    tiny = "TINY FORM, small shapes on a CPU: no speed is measured. Reason:"
    if asks_for_tiny:
        return TINY, f"{tiny} --tiny is set."
    seen, listed = seen_by_torch(), nvidia_smi()
    if seen["cuda"]:
        return GPU, f"GPU FORM, on {seen['device']}."
    if listed is None:
        return TINY, f"{tiny} torch doesn't see a GPU, and nvidia-smi lists none."
    card = listed.replace("\n", "; ")
    if list(names) == ["facts"]:
        return GPU, f"GPU FORM, facts alone: nvidia-smi lists a GPU that torch doesn't see ({card})."
    print(f"half_hour.py: error: {unseen(card, seen)}", file=sys.stderr)
    sys.exit(2)


# --- running


def run_parts(call: Call, chosen: Sequence[Part], records: dict[str, Record], args: argparse.Namespace) -> None:
    """Run the parts that have not run yet and that fit into the time.

    Each result is added to the records and written to the files.
    """
    ends_at = time.monotonic() + 60 * args.minutes
    for part in chosen:
        command, left_seconds = part.tiny if call.form == TINY else part.command, ends_at - time.monotonic()
        if call.stop_signal is not None:
            return
        if command is None:
            say(f"not part of the tiny form: {part.name}")
        elif part.name in records and not args.again:
            earlier = records[part.name]
            say(f"already run: {part.name}, {earlier['verdict']}{at_commit(earlier, call.commit)} (run again with --again)")
        elif part.limit_seconds > left_seconds:
            say(f"left for another call: {part.name}, which may take {part.limit_seconds} s; {left_seconds:.0f} s are left")
        else:
            say(f"=== {part.name}: at most {part.limit_seconds} s")
            record = run(part, command, call)
            if call.stop_signal is not None:
                call.stopped_part = part.name
                return
            records[part.name] = judged(part, record, tiny=call.form == TINY)
            publish(call, records)  # after each part: what has run is kept
            say(f"=== {part.name}: {record['verdict']}, {record['seconds']:.0f} s")


def at_commit(record: Record, now: str | None) -> str:
    """Describe the commit of an earlier run, if it differs from the present one."""
    earlier = record.get("commit")
    return f", at commit {earlier or 'unknown'}, not {now or 'unknown'}" if earlier != now else ""


@contextlib.contextmanager
def noting_signals(call: Call) -> Iterator[None]:
    """Record the first signal that requests the end, and do nothing else.

    So no write is cut off, and no child process is left behind.
    """

    def note(number: int, frame: object) -> None:
        call.stop_signal = call.stop_signal or number

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        # nohup ignores SIGHUP, so that the script outlives the terminal
        if handler != signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(line: str) -> None:
    """Print a line. If the terminal or the pipe's reader is gone, print nothing more."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(part: Part, command: Sequence[str], call: Call) -> Record:
    """Run a part's command within its time limit, and return the result."""
    # 1. Start it in a new process group, with its output in a log file.
    report_path(call.scratch, part.name).unlink(missing_ok=True)
    log = call.scratch / f"{part.name}.log"
    run_commit = commit()
    started = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **(part.tiny_environment if call.form == TINY else {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A group can be killed with all its children. Linux kills it if this script is killed.
            process_group=0,
            preexec_fn=ending_with_this_process(),  # noqa: PLW1509 - this process has no threads
        )
        # 2. Wait for its end, and kill what is left.
        try:
            timed_out = wait(process, part.limit_seconds, call)
        finally:
            kill_group(process.pid)
        status = process.wait()
    # 3. Read its report.
    report, problem = read_report(call.scratch, part)
    return {
        "command": list(command),
        "commit": run_commit,
        "limit_seconds": part.limit_seconds,
        "exit_status": status,
        "timed_out": timed_out,
        "seconds": time.monotonic() - started,
        "last_lines": last_lines(log),
        "report": report,
        "report_problem": problem,
    }


def wait(process: subprocess.Popen[bytes], limit_seconds: float, call: Call) -> bool:
    """Wait for the end of a part, or for a signal. Return whether the time limit came first."""
    ends_at = time.monotonic() + limit_seconds
    while process.poll() is None and call.stop_signal is None:
        if time.monotonic() >= ends_at:
            return True
        time.sleep(POLL_SECONDS)
    return False


def kill_group(leader: int) -> None:
    """Kill the remaining processes of a part, including children of a process that has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def read_report(scratch: Path, part: Part) -> tuple[Any, str | None]:
    """Return the part's report, and a problem with it, if any."""
    if not part.writes_report:
        return None, None
    path = report_path(scratch, part.name)
    if not path.exists():
        return None, f"it left no {path.name}"
    try:
        # NaN is valid for Python, but not in JSON
        return json.loads(path.read_text(), parse_constant=lambda name: None), None
    except ValueError as error:
        return None, f"{path.name} is no JSON: {error}"


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a part's output; for a progress bar, its last state."""
    with open(log, errors="replace", newline="\n") as file:  # keeps "\r"
        lines = [line.rstrip().rpartition("\r")[2] for line in file]
    return [line[:LINE_CHARACTERS] for line in lines if line][-TAIL_LINES:]


# --- judging


def judged(part: Part, record: Record, *, tiny: bool) -> Record:
    """Return the record with verdict, reason of a failure, and results of all checks."""
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
        return f"it was killed after {record['limit_seconds']} s"
    if record["exit_status"] != 0:
        return f"it ended with exit status {record['exit_status']}"
    return record["report_problem"]


def checked(check: Check, report: Any) -> Record:
    """Compare the measured value of a check with its bounds."""
    try:
        measured = check.value(report)
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        measured = None
    if not isinstance(measured, int | float):
        measured = None
    fits = (
        measured is not None
        and (check.least is None or measured >= check.least)
        and (check.most is None or measured <= check.most)  # both are false for NaN
    )
    return {"says": check.says, "expected": expected(check), "found": measured, "verdict": OK if fits else LOOK}


def expected(check: Check) -> str:
    bounds = [f"at least {check.least:g}"] if check.least is not None else []
    bounds += [f"at most {check.most:g}"] if check.most is not None else []
    return " and ".join(bounds)


# --- writing


def read_records(path: Path) -> dict[str, Record]:
    """Read the records of earlier calls. A truncated file counts as empty."""
    try:
        return dict(json.loads(path.read_text())["parts"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def publish(call: Call, records: dict[str, Record]) -> None:
    """Write both files atomically."""
    ordered = {part.name: records[part.name] for part in call.every_part if part.name in records}
    whole = {"form": call.form, "commit": call.commit, "parts": ordered}
    for folder in (call.scratch, call.out):
        for ending, text in (("json", json.dumps(whole, indent=1)), ("md", page(call, ordered))):
            name = f"{FILES[call.form]}.{ending}"
            temporary = folder / f".{name}.tmp"
            temporary.write_text(text)
            os.replace(temporary, folder / name)


def page(call: Call, records: dict[str, Record]) -> str:
    """Return the readable page."""
    # 1. The form, the machine, and what is special about this call.
    lines = [f"# The first half hour on a GPU: {call.form} form", "", call.form_line, *machine(records)]
    lines += [f"Commit {call.commit or 'unknown'}."]
    for name, record in records.items():
        if record.get("commit") != call.commit:
            lines += ["", f"**Another commit**: {name}{at_commit(record, call.commit)}."]
    if call.stop_signal is not None:
        during = f" while {call.stopped_part} ran; that part counts as not run" if call.stopped_part else ""
        lines += ["", f"**Stopped** by {signal.Signals(call.stop_signal).name}{during}."]
    # 2. A table of all parts, then a section for each.
    lines += ["", "| part | verdict | seconds | limit | commit |", "| --- | --- | ---: | ---: | --- |"]
    for name, record in records.items():
        seconds = f"{record['seconds']:.0f} | {record['limit_seconds']}"
        lines.append(f"| {name} | {record['verdict']} | {seconds} | {record.get('commit') or 'unknown'} |")
    missing = [part.name for part in call.every_part if part.name not in records and (part.tiny or call.form == GPU)]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    for name, record in records.items():
        lines += ["", *section(name, record)]
    return "\n".join(lines) + "\n"


def machine(records: dict[str, Record]) -> list[str]:
    """Describe the machine, from the facts."""
    facts = (records.get("facts") or {}).get("report") or {}
    packages = facts.get("packages") or {}
    if not facts:
        return ["The part facts has left no report."]
    card = [f"{facts.get('device')}, CUDA {facts.get('cuda_version')}, cuDNN {facts.get('cudnn_version')}."]
    software = f"Python {facts.get('python')}, torch {packages.get('torch')}, transformers {packages.get('transformers')}."
    return [*(card if facts.get("cuda") else []), software]


def section(name: str, record: Record) -> list[str]:
    """Return the section of a part: command, checks, and details if it failed or needs a look."""
    command = " ".join(record["command"]).replace(f"{REPOSITORY}/", "")
    lines = [f"## {name}: {record['verdict']}", "", f"`{command}`"]
    if record["checks"]:
        lines += ["", "| what | expected | found | verdict |", "| --- | --- | ---: | --- |"]
    for check in record["checks"]:
        measured = "not measured" if check["found"] is None else f"{check['found']:.4g}"
        lines.append(f"| {check['says']} | {check['expected']} | {measured} | {check['verdict']} |")
    if record["problem"] is not None:
        lines += ["", f"**Failed**: {record['problem']}. Its last lines:", "", "```", *record["last_lines"], "```"]
    elif record["verdict"] == LOOK:
        lines += ["", "The part's report:", "", "```", *(details(record["report"]) or record["last_lines"]), "```"]
    return lines


if __name__ == "__main__":
    main()
