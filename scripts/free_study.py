"""Measures drafters without training, and merged trees, against trained drafters and transformers.

    python scripts/free_study.py --plan
    python scripts/free_study.py --drafter outputs/demo/drafter --assistant outputs/compare_demo/variants/draft_model/drafter
    python scripts/free_study.py --parts pace --suites stdlib mt_bench=question.jsonl alpaca_eval=alpaca_eval.jsonl

Parts:

- `demo`: every method on held-out code, greedy, a prompt at a time;
- `sampled`: the merged trees at temperature 1; `batch`: four prompts at a time;
- `grown`: the demo's target grown to 400 million parameters (`grow_target.py`), in both types;
- `pace`: drafting by expected gain against fixed numbers of nodes, on each suite.

Each part's evaluations are in OUTPUT/cells. The same command resumes after a kill, and measures
disturbed answers again. OUTPUT gets the record `free_study.json`, `table.md` with the marks, and
plots. A later command may measure other parts: the record has all parts that OUTPUT holds.
"""

import argparse
import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import silence  # noqa: F401 - before torch, whose libraries it silences
from drafter_settings import parse_drafters
from free_cells import BATCH, BATCH_SIZE, PACE, PARTS, Cell, cells_of
from free_figures import fixed_nodes, read_cell
from free_marks import judge
from free_report import notes, plot_all, tables
from grow_target import Source, copy_drafter, parse_parameters
from script_errors import script_errors
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
from transformers_methods import assisted_method, standard_methods

from outrider.data.files import atomic_write_text, locked, sha256_file, write_json
from outrider.eval.measure.turns import Method
from outrider.eval.records.names import RUN_FILE
from outrider.eval.records.run_files import read_info
from outrider.eval.run import cpu_threads, evaluate, load_suites
from outrider.models.drafters.calibration import read_prior, write_prior
from outrider.models.drafters.saved.folder import WEIGHTS_FILE, read_drafter_config
from outrider.models.drafters.saved.parts import DrafterParts, parse_drafter_name
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

RECORD_FILE = "free_study.json"


def main() -> None:
    with script_errors(kept="cells"):
        run(parse_args())


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--target", type=Path, default=Path("models/demo_target"), help="folder of the target")
    parser.add_argument("--drafter", type=Path, default=Path("outputs/demo/drafter"), help="the trained drafter to merge")
    parser.add_argument("--free", nargs="+", default=["suffix", "recycling"], help="drafters without training to merge")
    parser.add_argument("--search", default="{}", help="options of the trained drafter in merged trees, as {beam_width: 8}")
    parser.add_argument("--others", nargs="+", default=[], metavar="NAME=FOLDER[:SETTING]", help="more trained drafters")
    parser.add_argument("--assistant", type=Path, help="folder of a draft_model, for transformers' assisted generation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=30, help="prompts of demo, sampled and batch")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2, help="repeats of the part demo; the other parts have one")
    parser.add_argument("--size", default="400M", help="parameters of the grown target")
    parser.add_argument("--grown-prompts", type=int, default=6)
    parser.add_argument("--suites", nargs="+", default=["stdlib"], metavar="NAME[=FILE]", help="suites of the part pace")
    parser.add_argument("--suite-prompts", type=int, default=12)
    parser.add_argument("--widths", nargs="+", type=int, default=[4, 8, 16], help="fixed nodes to try beside the default")
    parser.add_argument("--output", type=Path, default=Path("outputs/free_study"))
    parser.add_argument("--plan", action="store_true", help="print the cells and an estimate, and end")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    # 1. Check everything before any long work.
    source = Source.of(args.target)
    cells = checked_cells(args)
    # 2. The cells that are missing; a grown target serves all its cells.
    for cell in cells:
        require_same_settings(cell.folder(args.output), settings_of(cell, args))
    missing = [cell for cell in cells if not is_done(cell.folder(args.output), args.threads)]
    print_plan(cells, missing, source, args)
    if args.plan:
        return
    with locked(args.output):
        measure_cells([cell for cell in missing if cell.size is None], args.target, args)
        for size in dict.fromkeys(cell.size for cell in missing if cell.size is not None):
            measure_grown([cell for cell in missing if cell.size == size], source, args)
        # 3. Record, tables and plots of all parts.
        write_results(args)


def checked_cells(args: argparse.Namespace) -> list[Cell]:
    """Return the cells of the parts. Raises ValueError for wrong options."""
    for name in ("prompts", "new_tokens", "repeats", "threads", "grown_prompts", "suite_prompts"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least 1")
    if min(args.widths) < 1:
        raise ValueError(f"--widths has {min(args.widths)}; a tree has at least 1 node")
    parse_parameters(args.size)
    for folder in filter(None, (args.drafter, args.assistant)):
        read_drafter_config(folder)
        if not (folder / WEIGHTS_FILE).is_file():
            raise ValueError(f"{folder / WEIGHTS_FILE} is missing; give the `drafter/` folder of a finished training")
    if args.assistant and (kind := read_drafter_config(args.assistant).kind) != "draft_model":
        raise ValueError(f"--assistant {args.assistant} holds a {kind}; transformers' assisted generation needs a draft_model")
    for part, name in ((BATCH, "prompts"), (PACE, "suite_prompts")):
        if part in args.parts and getattr(args, name) < BATCH_SIZE:
            raise ValueError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; the part {part} has batches of {BATCH_SIZE}"
            )
    cells = cells_of(args, parse_drafters(args.others))
    for cell in cells:
        load_suites(cell.config)
        for arm in cell.arms:
            parse_drafter_name(arm.drafter({})).configs(arm.setting)
    return cells


def settings_of(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Describe what a cell measures, without paths, so that a folder may move."""
    folders = {folder for arm in cell.arms for folder in arm.folders}
    return {
        "target": args.target.resolve().name,
        "methods": [arm.described for arm in cell.arms],
        "weights": sorted(sha256_file(folder / WEIGHTS_FILE) for folder in folders),
        "assistant": sha256_file(args.assistant / WEIGHTS_FILE) if cell.has_transformers and args.assistant else None,
        "config": {name: value for name, value in asdict(cell.config).items() if name != "suites"},
        "suites": [{"name": suite.name, "limit": suite.limit} for suite in cell.config.suites],
        "dtype": cell.dtype,
        "size": cell.size,
    }


def print_plan(cells: Sequence[Cell], missing: Sequence[Cell], source: Source, args: argparse.Namespace) -> None:
    """Print the cells, and an estimate of their time from the memory's bandwidth."""
    print(f"{len(cells)} cells, {len(cells) - len(missing)} of them done")
    total, speed = 0.0, bandwidth(args.threads) if missing else 0.0
    for cell in missing:
        size = source.size if cell.size is None else source.choose_size(parse_parameters(cell.size))
        seconds = cell.num_steps * seconds_per_step(size, cell.dtype, speed)
        total += seconds
        print(f"  {cell.name}: {cell.num_methods} methods, about {seconds / 60:.1f} minutes")
    if missing:
        print(f"about {total / 60:.0f} minutes in all, if the machine stays as busy as it is now")


def measure_grown(cells: Sequence[Cell], source: Source, args: argparse.Namespace) -> None:
    """Grow the target, measure its cells, and delete the target."""
    assert cells[0].size is not None
    size = source.choose_size(parse_parameters(cells[0].size))
    with grown(source, size, args.output / "targets" / cells[0].size) as folder:
        # The copies name the original's sizes, which a layer of EAGLE would take from the target.
        copies: dict[Path, Path] = {}
        for original in dict.fromkeys(path for cell in cells for arm in cell.arms for path in arm.folders):
            copies[original] = folder / "drafters" / str(len(copies))
            copy_drafter(original, copies[original], source.config)
        measure_cells(cells, folder, args, copies)


def measure_cells(
    cells: Sequence[Cell], folder: Path, args: argparse.Namespace, copies: Mapping[Path, Path] | None = None
) -> None:
    """Evaluate all methods in each cell, beside the target in `folder`."""
    for cell in cells:
        with cpu_threads(args.threads):
            target = load_target(TargetConfig(name_or_path=str(folder), dtype=cell.dtype, device="cpu"))
            others = transformers_methods(target, folder, cell, args)
            for original, copy in (copies or {}).items():
                copy_calibration(original, copy, target)
            settings: dict[Path | DrafterParts, list[dict[str, Any]]] = {}
            for arm in cell.arms:
                settings.setdefault(parse_drafter_name(arm.drafter(copies or {})), []).append(arm.setting)
            output = cell.folder(args.output)
            evaluate(cell.config, target, target.tokenizer, list(settings), output, settings, others=others)
            write_json(output / SETTINGS_FILE, settings_of(cell, args))
        del target, others
        gc.collect()  # the target of the next cell takes this one's memory


def copy_calibration(original: Path, copy: Path, target: HFTarget) -> None:
    """Write a drafter's calibration for the grown target too: both generate the same text."""
    if (prior := read_prior(original, read_drafter_config(original).target)) is not None:
        write_prior(copy, target.identity, prior)


def transformers_methods(target: HFTarget, folder: Path, cell: Cell, args: argparse.Namespace) -> list[Method]:
    """Build transformers' methods, which have weights of their own."""
    if not cell.has_transformers:
        return []
    weights = transformers_target(target, folder, cell.dtype)
    assisted = [assisted_method(weights, args.assistant)] if args.assistant else []
    return [*standard_methods(weights), *assisted]


def write_results(args: argparse.Namespace) -> None:
    """Write and print tables, marks, record and plots of all cells that OUTPUT holds."""
    # 1. The figures of all cells.
    folders = [path.parent for path in args.output.glob(f"cells/*/{SETTINGS_FILE}")]
    folders.sort(key=lambda folder: (PARTS.index(folder.name.split("-")[0]), folder.name))
    results = [read_cell(folder) for folder in folders]
    rows = [row for result in results for row in result.rows]
    pairs = [pair for result in results for pair in result.pairs]
    # 2. The files.
    marks = judge(rows, pairs, has_bf16_matrices=has_bf16_matrices())
    lines = [*notes(rows), *(mark["text"] for mark in marks)]
    text = f"{tables(rows, pairs)}\n" + "\n".join(f"- {line}" for line in lines) + "\n"
    report = {
        "rows": rows,
        "pairs": pairs,
        "marks": marks,
        "notes": lines,
        "default_nodes": fixed_nodes(),
        "environment": asdict(read_info(folders[0] / RUN_FILE).environment) if folders else None,
    }
    write_json(args.output / RECORD_FILE, report)
    atomic_write_text(args.output / "table.md", text)
    plots = plot_all(rows, pairs, args.output)
    print(f"{text}\nWritten to {args.output}: table.md, {RECORD_FILE}, {', '.join(plots)}; each cell's own table is in cells/")
    if any(row["fault"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
