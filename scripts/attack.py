"""Attack outrider: damaged files, hostile drafters, templates, data, values, Hub replies, architectures.

    python scripts/attack.py                            # every kind, about 20 minutes on two cores
    python scripts/attack.py --kinds files hub          # some kinds
    python scripts/attack.py --only config.json         # cases with this text in their names
    python scripts/attack.py --record benchmarks/attacks

Each case runs in a forked process with limits on time and memory. It held if the command ended with
one clear message or with the right result. The outcomes are kept in OUTPUT/outcomes.jsonl: the same
command resumes, and runs only the cases that have none.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# Set these before the imports below: the libraries read them at import time. A process that forks
# must have one thread.
os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}

import torch
from attacks import architectures, data, drafters, files, hub, recipes, templates
from attacks.cases import Case
from attacks.lab import finished_run
from attacks.processes import Outcome, run_cases
from attacks.report import summarise, write_report

from outrider.eval.measure.environment import describe_environment

KINDS = {
    "files": files,
    "drafters": drafters,
    "templates": templates,
    "data": data,
    "recipes": recipes,
    "hub": hub,
    "architectures": architectures,
}
OUTCOMES = "outcomes.jsonl"


def main() -> None:
    """Run the cases without an outcome, and write the table and the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/attacks"), help="folder of the work and the outcomes")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of attacks")
    parser.add_argument("--only", default="", help="text that a case's name must have")
    parser.add_argument("--most", type=int, help="most cases of each kind, spread evenly over its list")
    parser.add_argument("--limit-seconds", type=float, default=10.0, help="time after which a case hangs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="cases that run at a time")
    parser.add_argument("--record", type=Path, help="folder for the record and the table too, such as benchmarks/attacks")
    options = parser.parse_args()
    if options.record and (options.only or options.most is not None or set(options.kinds) != set(KINDS)):
        parser.error("a record has all cases of every kind; leave out --only, --most and --kinds, or --record")

    torch.set_num_threads(1)
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    outcomes = attack(options, folder)
    environment = asdict(describe_environment(torch.device("cpu")))
    record = {**summarise(outcomes), "session_seconds": round(time.monotonic() - started, 1), "environment": environment}
    for destination in filter(None, (folder, options.record)):
        write_report(record, destination)
    print((folder / "table.md").read_text())
    sys.exit(1 if any(row["broke"] for row in record["rows"]) else 0)


def attack(options: argparse.Namespace, folder: Path) -> list[Outcome]:
    """Run the chosen cases, and return the outcomes of all cases of the chosen kinds."""
    finished_run(folder / "lab")
    path = folder / OUTCOMES
    lines = path.read_text().splitlines() if path.exists() else []
    known = [Outcome(**json.loads(line)) for line in lines]
    done = {(outcome.kind, outcome.name) for outcome in known}
    with path.open("a") as results:
        for kind in options.kinds:
            cases = [case for case in KINDS[kind].make_cases(folder / kind, folder / "lab") if options.only in case.name]
            cases = [case for case in spread(cases, options.most) if (kind, case.name) not in done]
            print(f"{kind}: {len(cases)} cases to run", file=sys.stderr, flush=True)
            limits = {"limit_seconds": options.limit_seconds, "num_processes": options.processes}
            for outcome in run_cases(cases, folder / "work", **limits):
                results.write(json.dumps(asdict(outcome)) + "\n")
                results.flush()
                known.append(outcome)
    return [outcome for outcome in known if outcome.kind in options.kinds]


def spread(cases: Sequence[Case], most: int | None) -> list[Case]:
    """Return at most so many cases, at equal distances in the list."""
    if most is None or len(cases) <= most:
        return list(cases)
    return [cases[index * len(cases) // most] for index in range(most)]


if __name__ == "__main__":
    main()
