"""Measures pipelined speculation against plain and synchronous decoding of a target in stages.

    python scripts/bench_pipeline.py --plan                # list what is to be done
    python scripts/bench_pipeline.py --parts virtual       # the simulator only: the machine's load changes nothing
    python scripts/bench_pipeline.py                       # all parts; the others need a quiet machine

Parts, and the clock of their figures:

- costs: wall clock. What further entries cost in a pass of a grown target on this machine.
- virtual: virtual time. Sweeps and ablations, and the head's own processor time.
- emulated: wall clock of real processes, whose stages sleep until their emulated time.
- real: wall clock of real processes of a grown target, with the draft model of `--drafter`.

Every cell is a file in OUTPUT/cells, and the same command continues after a kill. OUTPUT gets the record
`pipeline.json`, `table.md` with the marks, and the plots `sweeps.png` and `gantt.png`. Delete
OUTPUT/cells/virtual after a change of the policy.
"""

import argparse
import json
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import silence  # noqa: F401 - before torch, whose libraries it silences
from pipeline_conditions import MARK_ACCEPTANCES, USUAL, Condition, Unpadded, anchors, conditions, usual
from pipeline_costs import measure_costs
from pipeline_marks import ablation_marks, agreement_marks, head_mark, speed_marks
from pipeline_methods import USUAL_LENGTH, Row, ablation_rows, best_synchronous, expected, main_rows, synchronous
from pipeline_play import play
from pipeline_plots import plot_gantt, plot_sweeps
from pipeline_report import (
    Cells,
    ablation_table,
    agreement,
    agreement_table,
    details_table,
    formula_table,
    paper_table,
    real_table,
    speed_table,
    sweep_tables,
)
from script_errors import script_errors
from study_cells import CPU
from tqdm import tqdm

from outrider.data.files import atomic_write_text, locked, read_json, sha256_file, write_json
from outrider.eval.measure.environment import describe_environment
from outrider.models.drafters.saved.folder import WEIGHTS_FILE, read_drafter_config

RECORD_FILE = "pipeline.json"
COSTS, VIRTUAL, EMULATED, REAL = PARTS = ("costs", "virtual", "emulated", "real")
ABLATION = "ablation"
LEAST = {"texts": 1, "new_tokens": 2, "workers": 1, "rounds": 1, "real_texts": 1, "real_tokens": 2}
"""Least values of options. The time of the first token doesn't count, so a text has another one."""
GANTT_FIRST, GANTT_LAST, GANTT_SEED = 60, 80, 1
"""Tokens of a text that are drawn, after the policy has learned the costs."""
WIDTH = 80
"""Columns of a line in table.md."""
STAGE_COUNTS = sorted({2, min(max((os.cpu_count() or 1) - 1, 2), 8)})
"""Stages of the part real: 2, and as many as there are cores beside the head's."""
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A cell: a condition with its part."""

    name: str
    condition: Any
    """A `Condition`, or `Unpadded` in the part real."""
    part: str = VIRTUAL
    is_ablation: bool = False

    def path(self, output: Path) -> Path:
        return output / "cells" / self.part / f"{self.name.replace(' ', '_').replace(',', '')}.json"

    def rows(self, output: Path) -> dict[str, Row] | None:
        """Return the rows of the cell's file; None without a file of this condition."""
        if not (path := self.path(output)).is_file():
            return None
        cell = read_json(path)
        is_same = cell["condition"] == json.loads(json.dumps(asdict(self.condition)))
        return cell["rows"] if is_same else None

    def save(self, rows: Mapping[str, Row], output: Path) -> None:
        path = self.path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"name": self.name, "condition": asdict(self.condition), "rows": rows})


def main() -> None:
    with script_errors(kept="cells"):
        run(parse_args())


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--texts", type=int, default=8, help="texts of each condition in virtual time")
    parser.add_argument("--new-tokens", type=int, default=256, help="their tokens")
    parser.add_argument("--target", type=Path, default=Path("models/demo_target"), help="folder of the target that grows")
    parser.add_argument("--parameters", default="400M", help="parameters of the grown target: costs, and real")
    parser.add_argument("--rounds", type=int, default=15, help="passes of each size")
    parser.add_argument("--drafter", type=Path, help="folder of a draft model for the part real")
    parser.add_argument("--real-texts", type=int, default=3, help="texts of each condition in processes")
    parser.add_argument("--real-tokens", type=int, default=64, help="their tokens")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="conditions to decode: their first words; default: all")
    parser.add_argument("--workers", type=int, default=2, help="processes for virtual time")
    parser.add_argument("--plan", action="store_true", help="print what is to be done, and end")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_pipeline"))
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    # 1. Check everything before any long work.
    for name, least in LEAST.items():
        if (value := getattr(args, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give at least {least}")
    if args.drafter:
        kind = read_drafter_config(args.drafter).kind
        if kind != "draft_model":
            raise ValueError(f"--drafter {args.drafter} is a {kind}; the part real needs a draft model: give its folder")
    chosen(all_jobs(args, factors=(1.0, 1.0)), args)
    with locked(args.output):
        # 2. The costs come first: conditions depend on them.
        if COSTS in args.parts and not args.plan:
            run_costs(args)
        factors = read_json(costs_path(args))["factors"] if costs_path(args).is_file() else ()
        jobs = all_jobs(args, factors)
        missing = [job for job in chosen(jobs, args) if job.rows(args.output) is None]
        print(f"costs: {'done' if costs_path(args).is_file() else 'not measured'}")
        for part in sorted({job.part for job in jobs}, key=PARTS.index):
            of_part = [job for job in jobs if job.part == part]
            print(f"{part}: {len(of_part)} cells, {sum(job.rows(args.output) is not None for job in of_part)} of them done")
        if REAL in args.parts and not args.drafter:
            print("real: nothing new is measured; give --drafter DIR, the folder of a draft model of the target")
        if args.plan:
            return
        # 3. Virtual time, which needs no quiet machine, then processes.
        run_virtual([job for job in missing if job.part == VIRTUAL], args)
        run_emulated([job for job in missing if job.part == EMULATED], args)
        run_real([job for job in missing if job.part == REAL], args)
        # 4. Tables, marks and plots of all cells that are done.
        write_results(jobs, args)


def chosen(jobs: Sequence[Job], args: argparse.Namespace) -> list[Job]:
    """Return the jobs of `--parts` and `--only`. Raises ValueError for a name that no cell begins with."""
    jobs = [job for job in jobs if job.part in args.parts]
    for name in args.only or ():
        if not any(begins(job.name, name) for job in jobs):
            names = ", ".join(dict.fromkeys(repr(job.name) for job in jobs)) or "none"
            raise ValueError(f"--only names {name!r}, and no cell of these parts begins with these words; there are: {names}")
    return [job for job in jobs if not args.only or any(begins(job.name, name) for name in args.only)]


def begins(name: str, words: str) -> bool:
    """Return whether a name begins with these words, as a whole."""
    return name == words or name.startswith((f"{words} ", f"{words},"))


def costs_path(args: argparse.Namespace) -> Path:
    path: Path = args.output / "cells" / "costs.json"
    return path


def run_costs(args: argparse.Namespace) -> None:
    """Measure what further entries cost, unless it is measured."""
    path = costs_path(args)
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tqdm(total=args.rounds + 1, desc="costs", bar_format=BAR) as progress:
        folder = args.output / "targets" / args.parameters
        costs = measure_costs(args.target, args.parameters, folder, rounds=args.rounds, progress=progress.update)
    write_json(path, costs)


def all_jobs(args: argparse.Namespace, factors: Sequence[float]) -> list[Job]:
    """Return all cells. `factors` are the measured costs of more entries, if they are measured."""
    virtual = [Job(name=name, condition=condition) for name, condition in conditions(factors)]
    virtual += [
        Job(name=f"{ABLATION} {acceptance:g}", condition=Condition(acceptance=acceptance), is_ablation=True)
        for acceptance in MARK_ACCEPTANCES
    ]
    emulated = [Job(name=name, condition=condition, part=EMULATED) for name, condition in anchors(factors)]
    sizes = {VIRTUAL: (args.texts, args.new_tokens), EMULATED: (args.real_texts, args.real_tokens)}
    jobs = []
    for job in (*virtual, *emulated):
        num_texts, new_tokens = sizes[job.part]
        jobs.append(replace(job, condition=replace(job.condition, num_texts=num_texts, new_tokens=new_tokens)))
    return [*jobs, *real_jobs(args)]


def real_jobs(args: argparse.Namespace) -> list[Job]:
    """Return the cells of the part real; without a drafter those that are done."""
    if not args.drafter:
        cells = [read_json(path) for path in sorted((args.output / "cells" / REAL).glob("*.json"))]
        return [Job(name=cell["name"], condition=Unpadded(**cell["condition"]), part=REAL) for cell in cells]
    facts = {
        "target": f"{args.parameters} parameters grown from {args.target.resolve().name}",
        "drafter": sha256_file(args.drafter / WEIGHTS_FILE),
        "num_texts": args.real_texts,
        "new_tokens": args.real_tokens,
    }
    return [
        Job(name=f"{REAL} {count} stages", condition=Unpadded(num_stages=count, **facts), part=REAL) for count in STAGE_COUNTS
    ]


def run_virtual(jobs: Sequence[Job], args: argparse.Namespace) -> None:
    """Decode the cells in processes, each with one thread."""
    if not jobs:
        return
    with ExitStack() as stack:
        rows: Iterable[dict[str, Row]] = map(rows_of, jobs)
        if args.workers > 1:
            spawn = get_context("spawn")
            pool = ProcessPoolExecutor(args.workers, mp_context=spawn, initializer=use_one_thread)
            rows = stack.enter_context(pool).map(rows_of, jobs)
        for job, of_job in tqdm(zip(jobs, rows, strict=True), total=len(jobs), desc="virtual time", bar_format=BAR):
            job.save(of_job, args.output)


def run_emulated(jobs: Sequence[Job], args: argparse.Namespace) -> None:
    """Decode the cells in real processes, one cell after the other."""
    if not jobs:
        return
    from emulated_cells import emulated_rows, make_target, record_texts  # they load the code of stages

    folder = args.output / "targets" / "stages"
    texts = record_texts(make_target(args.target, folder, 1), args.real_texts, args.real_tokens)
    for job in tqdm(jobs, desc="emulated stages", bar_format=BAR):
        target = make_target(args.target, folder, job.condition.costs.num_stages)
        job.save(emulated_rows(target, job.condition, best_length(job, args), texts), args.output)


def run_real(jobs: Sequence[Job], args: argparse.Namespace) -> None:
    """Decode in real processes by each method, one cell after the other."""
    if not jobs:
        return
    from real_cells import grown_target, real_rows  # they load the code of stages

    with grown_target(args.target, args.parameters, args.output / "targets" / REAL / args.parameters) as target:
        for job in tqdm(jobs, desc="real processes", bar_format=BAR):
            job.save(real_rows(target, args.drafter, job.condition), args.output)


def best_length(job: Job, args: argparse.Namespace) -> int:
    """Return the best number of draft tokens in virtual time; the usual one where that isn't decoded."""
    rows = Job(name=job.name, condition=job.condition).path(args.output)
    return int(best_synchronous(read_json(rows)["rows"])["num_drafts"]) if rows.is_file() else USUAL_LENGTH


def use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def rows_of(job: Job) -> dict[str, Row]:
    return ablation_rows(job.condition) if job.is_ablation else main_rows(job.condition)


def write_results(jobs: Sequence[Job], args: argparse.Namespace) -> None:
    """Write and print tables, marks, record and plots."""
    # 1. The cells by their parts.
    done = {job: rows for job in jobs if (rows := job.rows(args.output)) is not None}
    cells: Cells = {job.name: rows for job, rows in done.items() if job.part == VIRTUAL and not job.is_ablation}
    ablations: Cells = {job.name.removeprefix(f"{ABLATION} "): rows for job, rows in done.items() if job.is_ablation}
    emulated: Cells = {job.name: rows for job, rows in done.items() if job.part == EMULATED}
    real = {job.condition: rows for job, rows in done.items() if job.part == REAL}
    # 2. Tables and marks.
    tables, points = [usual()] if cells or emulated or ablations else [], agreement(emulated)
    marks = [*speed_marks(cells), *speed_marks(emulated), *ablation_marks(ablations), *agreement_marks(points)]
    if cells:
        tables += [*sweep_tables(cells), details_table(cells), paper_table(cells)]
        formula = {job.name: (job.condition, cells[job.name]) for job in done if job.name in cells and job.part == VIRTUAL}
        tables.append(formula_table({name: cell for name, cell in formula.items() if name.startswith("acceptance ")}))
        marks.append(head_mark(cells))
    if ablations:
        tables.append(ablation_table(ablations))
    if emulated:
        tables += [speed_table("condition", emulated), agreement_table(points)]
    if real:
        tables.append(real_table(real))
    # 3. The files.
    notes = [textwrap.fill(f"- {mark['text']}", WIDTH, subsequent_indent="  ") for mark in marks]
    text = "\n\n".join([*tables, "\n".join(notes)]) + "\n"
    report = {
        "cells": [
            {"name": job.name, "part": job.part, "condition": asdict(job.condition), "rows": shortened(rows)}
            for job, rows in done.items()
        ],
        "points": points,
        "marks": marks,
        "tables": "\n\n".join(tables),
        "notes": [mark["text"] for mark in marks],
        "costs": read_json(costs_path(args)) if costs_path(args).is_file() else None,
        "environment": asdict(describe_environment(CPU)),
    }
    atomic_write_text(args.output / "table.md", text)
    write_json(args.output / RECORD_FILE, report)
    written = ["table.md", RECORD_FILE, *draw(cells, points, args)]
    print(f"{text}\nWritten to {args.output}: {', '.join(written)}")


def shortened(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows with all figures of the methods in tables, and the speed of the others."""
    lengths = {USUAL_LENGTH, *([best_synchronous(rows)["num_drafts"]] if synchronous(USUAL_LENGTH) in rows else [])}
    return {
        name: row if row.get("num_drafts") in {None, *lengths} else {"tokens_per_second": row["tokens_per_second"]}
        for name, row in rows.items()
    }


def draw(cells: Cells, points: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> Iterator[str]:
    """Draw the plots, and yield their names."""
    if all(any(name.startswith(f"{sweep} ") for name in cells) for sweep in ("acceptance", "stages", "hop")):
        plot_sweeps(cells, points, args.output / "sweeps.png")
        yield "sweeps.png"
    if cells:
        condition = Condition(acceptance=USUAL, new_tokens=96)
        texts = {
            f"synchronous, K = {USUAL_LENGTH}": play(condition, GANTT_SEED, num_drafts=USUAL_LENGTH),
            "pipelined": play(condition, GANTT_SEED, speculation=expected),
        }
        plot_gantt(texts, args.output / "gantt.png", first=GANTT_FIRST, last=GANTT_LAST)
        yield "gantt.png"


if __name__ == "__main__":
    main()
