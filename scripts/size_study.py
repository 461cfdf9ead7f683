"""Measures drafters at the sizes that matter: one target, grown to several sizes.

    python scripts/size_study.py --plan
    python scripts/size_study.py --sizes 7M 400M --threads 2
    python scripts/size_study.py --drafters small=outputs/demo/drafter:'{beam_width: 4, beam_length: 3, tree_nodes: 5}'

The demo's target is grown by neurons and layers that add nothing (`grow_target.py`). So it costs
what a large model costs, and says what the demo says; drafters trained for the demo keep their
tokens per step. Each cell (size, type, threads) measures plain decoding, transformers' `generate`,
its prompt lookup, and each drafter with a small and a large tree, prompt by prompt in turns.

A finished cell is a file in OUTPUT/cells. The same command continues after a kill. OUTPUT gets the
record `size_study.json`, `table.md` and `speedup.png`. Grown targets are deleted after use.
"""

import argparse
import contextlib
import functools
import gc
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from grow_target import DTYPES, Size, Source, copy_drafter, grow, parse_parameters, require_room
from size_methods import DrafterSetting, count_threads, measure_cell
from size_report import notes, plot, rows_of, summary, table

from outrider.data.differences import differences
from outrider.data.files import atomic_write_text, locked, read_json, sha256_file, write_json
from outrider.eval.measure.environment import describe_environment
from outrider.models.drafters.saved.build import saved_spec
from outrider.models.drafters.saved.folder import WEIGHTS_FILE, read_drafter_config

CPU = torch.device("cpu")
DEFAULT_FOLDERS = ("outputs/compare_demo/variants/*/drafter", "outputs/demo/drafter")
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "redrafter": [
        {"beam_width": 4, "beam_length": 3, "tree_nodes": 5},
        {"beam_width": 16, "beam_length": 5, "tree_nodes": 40},
    ],
    "medusa": [{"tree_nodes": 5}, {"tree_nodes": 40}],
    "eagle": [{"depth": 3, "top_k": 2, "tree_nodes": 5}, {"depth": 5, "top_k": 8, "tree_nodes": 40}],
    "eagle3": [{"depth": 3, "top_k": 2, "tree_nodes": 5}, {"depth": 5, "top_k": 8, "tree_nodes": 40}],
    "draft_model": [{"length": 3, "top_k": 2, "tree_nodes": 5}, {"length": 5, "top_k": 8, "tree_nodes": 40}],
}
"""A small and a large tree for each kind of drafter."""
ROWS = 64
"""Rows of the product that estimates how long a prompt takes to read."""
SAMPLE_BYTES, SAMPLE_WIDTH = 1 << 27, 256
SECONDS_PER_LAYER = 5e-4
"""Rough time of a layer beside its weights, in the estimate."""
PROMPT_TOKENS = 96
"""Rough length of a prompt, in the estimate."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A size, a type and a number of threads."""

    label: str
    size: Size
    dtype: str
    threads: int

    def file(self, output: Path) -> Path:
        return output / "cells" / f"{self.label}-{self.dtype}-{self.threads}.json"


def main() -> None:
    try:
        run(parse_args())
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("interrupted; finished cells are kept, and the same command continues") from None


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
    missing = [cell for cell in cells if not is_done(cell, args.output, settings)]
    print_plan(cells, missing, len(drafters), args)
    if args.plan:
        return
    with locked(args.output):
        for label in dict.fromkeys(cell.label for cell in missing):
            measure_size([cell for cell in missing if cell.label == label], source, drafters, settings, args)
        # 3. Table, record and plot of all cells.
        write_results([read_json(cell.file(args.output)) for cell in cells], args.output)


def parse_drafters(items: Sequence[str]) -> list[DrafterSetting]:
    """Parse NAME=FOLDER[:SETTING]. Raises ValueError for what isn't a drafter or its option."""
    drafters = []
    for item in items:
        name, separator, rest = item.partition("=")
        folder, _, text = rest.partition(":")
        if not (separator and name and folder):
            raise ValueError(f"--drafters has {item!r}; give NAME=FOLDER or NAME=FOLDER:'{{tree_nodes: 5}}'")
        try:
            setting = yaml.safe_load(text) if text else None
        except yaml.YAMLError as error:
            raise ValueError(
                f"the setting in --drafters {item!r} is no YAML ({error}); give one like '{{tree_nodes: 5}}'"
            ) from error
        if setting is not None and not isinstance(setting, Mapping):
            raise ValueError(f"the setting in --drafters {item!r} is no mapping; give one like '{{tree_nodes: 5}}'")
        drafters += settings_of(name, Path(folder), None if setting is None else dict(setting))
    return unique(drafters)


def default_drafters() -> list[DrafterSetting]:
    """Return the drafters of finished demos. Raises ValueError if there are none."""
    folders = [path.parent for pattern in DEFAULT_FOLDERS for path in sorted(Path().glob(f"{pattern}/{WEIGHTS_FILE}"))]
    if not folders:
        raise ValueError(
            f"there is no drafter in {' or '.join(DEFAULT_FOLDERS)}; train one with `outrider run conf=demo` "
            "(minutes) or every kind with `outrider run conf=compare_demo` (under an hour), or give --drafters NAME=FOLDER"
        )
    return unique([drafter for folder in folders for drafter in settings_of(folder.parent.name, folder, None)])


def settings_of(name: str, folder: Path, setting: dict[str, Any] | None) -> list[DrafterSetting]:
    """Return a drafter in a setting, or with a small and a large tree. Raises ValueError."""
    saved = read_drafter_config(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"{folder / WEIGHTS_FILE} is missing; give the `drafter/` folder of a finished training")
    drafters = []
    for options in SETTINGS.get(saved.kind, [{}]) if setting is None else [setting]:
        saved_spec(saved, options)
        words = (
            f"{options['tree_nodes']} nodes"
            if options.get("tree_nodes")
            else yaml.safe_dump(options, default_flow_style=True).strip()
        )
        drafters.append(DrafterSetting(name=f"{name}, {words}", kind=saved.kind, folder=folder, setting=options))
    return drafters


def unique(drafters: list[DrafterSetting]) -> list[DrafterSetting]:
    """Raise ValueError if two drafters have one name."""
    names = [drafter.name for drafter in drafters]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two --drafters are called {repeated[0]!r}; give them different names")
    return drafters


def is_done(cell: Cell, output: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether a cell is measured. Raises ValueError if it was with other settings."""
    path = cell.file(output)
    if not path.is_file():
        return False
    recorded = read_json(path)
    environment = asdict(describe_environment(CPU))
    changes = differences(
        {"settings": recorded["settings"], "environment": {**recorded["environment"], "num_threads": 0}},
        {"settings": dict(settings), "environment": {**environment, "num_threads": 0}},
    )
    if changes:
        raise ValueError(
            f"{path} was measured differently: {'; '.join(changes.values())}. Give another --output, or delete that folder"
        )
    return True


def print_plan(cells: Sequence[Cell], missing: Sequence[Cell], num_drafters: int, args: argparse.Namespace) -> None:
    """Print the cells and an estimate of their time, from products of matrices on this machine."""
    # 1. Seconds of each cell: steps over one row, and prompts over many rows.
    passes = (3 + num_drafters) * args.prompts
    seconds = {}
    for cell in missing:
        step = seconds_of_pass(cell, 1) + cell.size.layers * SECONDS_PER_LAYER
        seconds[cell] = passes * (args.new_tokens * step + seconds_of_pass(cell, ROWS) * PROMPT_TOKENS / ROWS)
    # 2. The plan.
    print(
        f"{len(cells)} cells, of which {len(cells) - len(missing)} are done; {3 + num_drafters} methods, {args.prompts} prompts"
    )
    for cell, estimate in seconds.items():
        place = f"{cell.label} ({cell.size.layers} layers), {cell.dtype}, {count_threads(cell.threads)}"
        print(f"  {place}: about {estimate / 60:.1f} minutes")
    print(f"about {sum(seconds.values()) / 60:.0f} minutes in all, if the machine stays as busy as it is now")


def seconds_of_pass(cell: Cell, rows: int) -> float:
    """Estimate the time of a pass over all weights."""
    return cell.size.parameters * DTYPES[cell.dtype].itemsize * seconds_per_byte(cell.dtype, cell.threads, rows)


@functools.cache
def seconds_per_byte(dtype: str, threads: int, rows: int) -> float:
    """Time the product of a large weight matrix with some rows; the fastest of three counts."""
    torch.set_num_threads(threads)
    kind = DTYPES[dtype]
    weight = torch.ones(SAMPLE_BYTES // kind.itemsize // SAMPLE_WIDTH, SAMPLE_WIDTH, dtype=kind)
    inputs = torch.ones(rows, SAMPLE_WIDTH, dtype=kind)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        F.linear(inputs, weight)
        best = min(best, time.perf_counter() - start)
    return best / weight.nbytes


def measure_size(
    cells: Sequence[Cell],
    source: Source,
    drafters: Sequence[DrafterSetting],
    settings: Mapping[str, Any],
    args: argparse.Namespace,
) -> None:
    """Grow the target, measure its cells, write each one's record, and delete the target."""
    with grown(cells[0], source, args.output) as folder:
        # EAGLE's layer has the original's sizes, so its configuration must name them.
        fitted = []
        for number, drafter in enumerate(drafters):
            copy = folder / "drafters" / str(number)
            copy_drafter(drafter.folder, copy, source.config)
            fitted.append(replace(drafter, folder=copy))
        for cell in cells:
            counts = {"num_prompts": args.prompts, "new_tokens": args.new_tokens}
            measured = measure_cell(folder, fitted, dtype=cell.dtype, threads=cell.threads, **counts)
            environment = asdict(describe_environment(CPU))
            record = {
                "size": cell.label,
                "layers": cell.size.layers,
                "settings": settings,
                "environment": environment,
                **measured,
            }
            write_json(cell.file(args.output), record)
            gc.collect()  # the target of the next cell takes this one's memory
            print(table(rows_of(record)))


@contextlib.contextmanager
def grown(cell: Cell, source: Source, output: Path) -> Iterator[Path]:
    """Yield a grown target in 16 bits, which loads in any type, and delete it afterwards."""
    folder = output / "targets" / cell.label
    require_room(folder, cell.size.parameters * DTYPES["bfloat16"].itemsize)
    try:
        grow(source, folder, cell.size, dtype="bfloat16", overwrite=True)
        yield folder
    finally:
        shutil.rmtree(output / "targets", ignore_errors=True)


def write_results(records: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Write and print the table with its notes, the record and the plot."""
    rows = [row for record in records for row in rows_of(record)]
    lines = notes(rows, has_bf16_matrices=has_bf16_matrices())
    short = f"{summary(rows)}\n" + "\n".join(f"- {line}" for line in lines) + "\n"
    report = {
        "rows": rows,
        "notes": lines,
        "environment": records[0]["environment"],
        "cells": [without_texts(r) for r in records],
    }
    write_json(output / "size_study.json", report)
    atomic_write_text(output / "table.md", f"{short}\n{table(rows)}")
    plot(rows, output / "speedup.png")
    print(f"{short}\nWritten to {output}: table.md, speedup.png, size_study.json")
    if any(row["unexplained"] for row in rows):
        raise SystemExit(1)


def without_texts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell's record with the number of tokens in place of the tokens, which the cell's file has."""
    answers = {
        name: [
            [
                {**{key: answer[key] for key in answer if key != "token_ids"}, "num_tokens": len(answer["token_ids"])}
                for answer in tries
            ]
            for tries in rounds
        ]
        for name, rounds in record["answers"].items()
    }
    return {**record, "answers": answers}


def has_bf16_matrices() -> bool:
    """Return whether the processor has bf16 matrix instructions (AMX)."""
    with contextlib.suppress(OSError):
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    return False


if __name__ == "__main__":
    main()
