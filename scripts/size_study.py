"""Measures drafters at the sizes that matter: one target, grown to several sizes.

    python scripts/size_study.py --plan
    python scripts/size_study.py --sizes 7M 400M --threads 2
    python scripts/size_study.py --drafters small=outputs/demo/drafter:'{beam_width: 4, beam_length: 3, tree_nodes: 5}'

The demo's target is grown by neurons and layers that add nothing (`grow_target.py`). So it costs
as much as a large model, and generates the same text as the demo's; drafters trained for the demo
keep their tokens per step. Each cell (size, type, threads) is an evaluation of plain decoding,
transformers' `generate`, its prompt lookup, and each drafter with a small and a large tree.

The evaluations are in OUTPUT/cells. The same command resumes after a kill, and measures disturbed
answers again. OUTPUT gets the record `size_study.json`, `table.md` and `speedup.png`. Grown targets
are deleted after use. Prompts that leave no room for the answer are skipped.
"""

import argparse
import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import silence  # noqa: F401 - before torch, whose libraries it silences
from drafter_settings import DrafterSetting, parse_drafters, settings_of, unique
from grow_target import DTYPES, Size, Source, copy_drafter, parse_parameters
from script_errors import script_errors
from size_report import count_threads, notes, plot, rows_of, summary
from study_cells import (
    SETTINGS_FILE,
    bandwidth,
    grown,
    has_bf16_matrices,
    is_done,
    require_same_settings,
    seconds_per_step,
    transformers_target,
)
from transformers_methods import LOOKUP, PLAIN, TRANSFORMERS, standard_methods

from outrider.data.files import atomic_write_text, locked, sha256_file, write_json
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure.methods import Settings
from outrider.eval.records.names import RUN_FILE
from outrider.eval.records.run_files import read_info
from outrider.eval.results.finished import read_rows
from outrider.eval.run import cpu_threads, evaluate
from outrider.models.drafters.saved.folder import WEIGHTS_FILE
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

DEFAULT_FOLDERS = ("outputs/compare_demo/variants/*/drafter", "outputs/demo/drafter")
PROFILED_PROMPTS = 2


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A size, a type and a number of threads."""

    label: str
    size: Size
    dtype: str
    threads: int

    def folder(self, output: Path) -> Path:
        return output / "cells" / f"{self.label}-{self.dtype}-{self.threads}"

    @property
    def described(self) -> dict[str, Any]:
        values = {"size": self.label, "dtype": self.dtype, "threads": self.threads}
        return {**values, "layers": self.size.layers, "parameters": self.size.parameters}


def main() -> None:
    with script_errors(kept="cells"):
        run(parse_args())


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("models/demo_target"), help="folder of the model to grow")
    parser.add_argument("--sizes", nargs="+", default=["7M", "100M", "400M", "1.6B"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--drafters",
        nargs="+",
        metavar="NAME=FOLDER[:SETTING]",
        help="default: those of compare_demo and demo; without SETTING a small and a large tree",
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/size_study"))
    parser.add_argument("--plan", action="store_true", help="print the cells and an estimate, and end")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    # 1. Check everything before any long work.
    source = Source.of(args.target)
    for name in ("prompts", "new_tokens", "threads"):
        if min(getattr(args, name) if name == "threads" else [getattr(args, name)]) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least 1")
    drafters = parse_drafters(args.drafters) if args.drafters else default_drafters()
    cells = [
        Cell(label=label, size=source.choose_size(parse_parameters(label)), dtype=dtype, threads=threads)
        for label in args.sizes
        for dtype in args.dtypes
        for threads in args.threads
    ]
    settings = {
        "target": args.target.resolve().name,
        "prompts": args.prompts,
        "new_tokens": args.new_tokens,
        "drafters": [{**drafter.described, "weights": sha256_file(drafter.folder / WEIGHTS_FILE)} for drafter in drafters],
    }
    # 2. The cells that are missing, size by size.
    require_same_settings(args.output, settings)
    missing = [cell for cell in cells if not is_done(cell.folder(args.output), cell.threads)]
    print_plan(cells, missing, len((PLAIN, TRANSFORMERS, LOOKUP)) + len(drafters), args)
    if args.plan:
        return
    with locked(args.output):
        write_json(args.output / SETTINGS_FILE, settings)
        for label in dict.fromkeys(cell.label for cell in missing):
            measure_size([cell for cell in missing if cell.label == label], source, drafters, args)
        # 3. Table, record and plot of all cells.
        write_results(cells, drafters, args.output)


def default_drafters() -> list[DrafterSetting]:
    """Return the drafters of finished demos. Raises ValueError if there are none."""
    folders = [path.parent for pattern in DEFAULT_FOLDERS for path in sorted(Path().glob(f"{pattern}/{WEIGHTS_FILE}"))]
    if not folders:
        raise ValueError(
            f"there is no drafter in {' or '.join(DEFAULT_FOLDERS)}; train one with `outrider run conf=demo` "
            "(minutes) or every kind with `outrider run conf=compare_demo` (under an hour), or give --drafters NAME=FOLDER"
        )
    return unique([drafter for folder in folders for drafter in settings_of(folder.parent.name, folder, None)])


def print_plan(cells: Sequence[Cell], missing: Sequence[Cell], num_methods: int, args: argparse.Namespace) -> None:
    """Print the cells, and an estimate of their time from the memory's bandwidth."""
    # 1. Seconds of each cell: every token reads all weights.
    bandwidths = {threads: bandwidth(threads) for threads in {cell.threads for cell in missing}}
    tokens = num_methods * (args.prompts + PROFILED_PROMPTS) * args.new_tokens
    seconds = {cell: tokens * seconds_per_step(cell.size, cell.dtype, bandwidths[cell.threads]) for cell in missing}
    # 2. The plan.
    noun = "cell" if len(cells) == 1 else "cells"
    print(f"{len(cells)} {noun}, {len(cells) - len(missing)} of them done; {num_methods} methods, {args.prompts} prompts")
    for cell, estimate in seconds.items():
        described = f"{cell.label} ({cell.size.layers} layers), {cell.dtype}, {count_threads(cell.threads)}"
        print(f"  {described}: at least {estimate / 60:.1f} minutes")
    if missing:
        print(f"at least {sum(seconds.values()) / 60:.1f} minutes in all, if the machine stays as busy as it is now")


def measure_size(cells: Sequence[Cell], source: Source, drafters: Sequence[DrafterSetting], args: argparse.Namespace) -> None:
    """Grow the target, measure its cells, and delete the target."""
    with grown(source, cells[0].size, args.output / "targets" / cells[0].label) as folder:
        # EAGLE's layer has the original's sizes, so its configuration must name them.
        copies = [folder / "drafters" / str(number) for number in range(len(drafters))]
        for drafter, copy in zip(drafters, copies, strict=True):
            copy_drafter(drafter.folder, copy, source.config)
        settings = {copy: [drafter.setting] for drafter, copy in zip(drafters, copies, strict=True)}
        for cell in cells:
            measure_cell(cell, folder, settings, args)
            gc.collect()  # the target of the next cell takes this one's memory


def measure_cell(cell: Cell, folder: Path, settings: Settings, args: argparse.Namespace) -> None:
    """Evaluate all methods in a cell."""
    config = EvalConfig(
        suites=[SuiteConfig(name="stdlib", limit=args.prompts)],
        max_new_tokens=args.new_tokens,
        profile_prompts=PROFILED_PROMPTS,
        num_threads=cell.threads,
    )
    with cpu_threads(cell.threads):
        target = load_target(TargetConfig(name_or_path=str(folder), dtype=cell.dtype, device="cpu"))
        others = standard_methods(transformers_target(target, folder, cell.dtype))
        evaluate(config, target, target.tokenizer, list(settings), cell.folder(args.output), settings, others=others)


def write_results(cells: Sequence[Cell], drafters: Sequence[DrafterSetting], output: Path) -> None:
    """Write and print the table with its notes, the record and the plot."""
    # 1. The rows of all cells.
    rows, infos = [], []
    for cell in cells:
        folder = cell.folder(output)
        infos.append(read_info(folder / RUN_FILE))
        keys = infos[-1].config["methods"]
        rows += rows_of(read_rows(folder), cell.described, dict(zip(keys, drafters, strict=True)))
    # 2. The files.
    lines = notes(rows, has_bf16_matrices=has_bf16_matrices())
    text = f"{summary(rows)}\n" + "\n".join(f"- {line}" for line in lines) + "\n"
    report = {
        "rows": rows,
        "notes": lines,
        "environment": asdict(infos[0].environment),
        "cells": [{**cell.described, "linears": info.environment.linears} for cell, info in zip(cells, infos, strict=True)],
    }
    write_json(output / "size_study.json", report)
    atomic_write_text(output / "table.md", text)
    plot(rows, output / "speedup.png")
    print(f"{text}\nWritten to {output}: table.md, speedup.png, size_study.json; each cell's own table is in cells/")
    if any(row["fault"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
