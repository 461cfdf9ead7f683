"""Measures a target larger than memory, beside transformers with accelerate's offload to disk.

    python scripts/bench_offload.py --plan
    python scripts/bench_offload.py --small outputs/compare_demo/variants/draft_model/drafter
    python scripts/bench_offload.py --tiny --output /tmp/try

The demo's target is grown (`grow_target.py`), so it costs what a large model costs and says what
the demo says. Each method is a process of its own in a cgroup: its memory is capped at what it
holds before it loads weights, its drafter, the budget and an allowance. The methods of a cell take
turns, prompt by prompt. Between two turns the weights are dropped from the page cache. Cells:

- two disks: reads slowed to `--rate` (the paper's regime: a pass is loading), and the disk as it is;
- budgets of 1/4, 1/2 and 3/4 of the weights; all methods at 1/4, three at the others.

Rows: `offload_cells`. Figures: times of decoding only, without the prefill; intervals are a
bootstrap over prompts. A copy of the drafter is grown until a streamed pass costs about RATIO draft
passes on the slowed disk, as in the paper; the drafter as it is costs less.

`--drafter` is a draft model of about 80 % agreement with the target, the paper's pair. One was trained
on the demo's target for 250 steps, with the recipe demo and these options:

    drafter=draft_model_demo drafter.num_layers=6 mixed_precision=bf16
    data.limit=4000 data.answer_chars=400 distill.mode=regenerate distill.engine=batch
    distill.max_new_tokens=160 distill.horizon=2 distill.shard_examples=200
    train.loss=kl train.learning_rate=5e-4 train.max_positions=4096 train.steps=250

It chooses 79.1 % of the target's greedy tokens, over 3,099 tokens of 30 held-out prompts; with 7 layers,
3e-4 and 120 steps 88.3 %; the draft model of compare_demo 51.1 %.

OUTPUT gets the record `offload.json`, `table.md` with the marks, and `offload.png`. The same command
resumes after a kill. Where reads can't be slowed (no cgroups), these cells are left out. A virtual
machine doesn't see its host's cache, so the disk as it is may be the host's memory: the slowed
cells and the bytes per token carry the claims.
"""

import argparse
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import silence  # noqa: F401 - before torch, whose libraries it silences
from grow_drafter import drafter_source, grow_drafter
from grow_target import DTYPES, Size, Source, parse_parameters
from limits import Limits, parse_bytes, unavailable
from offload_cells import (
    AS_IS,
    CLOSE,
    DRAFTERS,
    FIXED,
    GROWN,
    LETTERS,
    PLAIN,
    SETTINGS,
    SHARES,
    SMALL,
    THROTTLED,
    Cell,
    Method,
    cells_of,
)
from offload_figures import ANSWERS_FILE, WORKERS_FILE, faults_of, rows_of
from offload_report import judge, notes, plot, tables
from offload_run import (
    Facts,
    Worker,
    WorkerError,
    append_line,
    cached_share,
    cap_for,
    drop_cache,
    means_rlimit,
    read_lines,
    started,
)
from script_errors import script_errors
from study_cells import CPU, SETTINGS_FILE, grown, require_same_settings
from tqdm import tqdm

from outrider.data.chat import encode_prompt
from outrider.data.files import atomic_write_text, locked, read_json, sha256_file, write_json
from outrider.data.types import Turn
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure.environment import describe_environment
from outrider.eval.run import cpu_threads, load_suites
from outrider.models.drafters.saved.folder import WEIGHTS_FILE
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_tokenizer

RECORD_FILE, COSTS_FILE = "offload.json", "drafters.json"
BASELINE = "nothing"
"""Key of the worker that has only imported everything."""
DRAFTER = "outputs/offload_demo/drafter"
RATIO = 37
"""Draft passes that a streamed pass costs, beside the grown drafter (LLMCad, table 1)."""
ALLOWANCE_BYTES = 80 << 20
"""Memory of a worker beside its baseline, its drafter, the budget and activations: page tables, Python.

The peers use what is left of it as page cache, so more of it would spare them reads."""
ACTIVATION_BYTES = 16
"""Memory of activations per token of the longest prompt and neuron of an MLP: four values of 32 bits."""
GIB = 1 << 30
COST_NEW_TOKENS = 24
CANDIDATES = 16
"""How many times more prompts are read than chosen: long ones leave too little room."""
FIRST_GROWTH = 8
"""How many times larger the drafter is whose cost is measured to choose the grown one's size."""
TINY: dict[str, Any] = {"size": "64M", "new_tokens": 8, "plain_tokens": 3, "threads": 1, "shares": [0.5]}
TINY["rate"] = "2G"
"""Options of `--tiny`."""


def main() -> None:
    with script_errors(kept="answers"):
        run(parse_args())


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("models/demo_target"), help="folder of the model to grow")
    parser.add_argument("--drafter", type=Path, default=Path(DRAFTER), help="folder of a draft_model of the target")
    parser.add_argument("--small", type=Path, help="another draft_model, such as compare_demo's")
    parser.add_argument("--free", nargs="*", default=["suffix", "recycling"], help="drafters without training to merge")
    parser.add_argument("--size", default="1B", help="parameters of the grown target")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="type of the computation; weights have 16 bits")
    parser.add_argument("--rate", default="600M", help="bytes per second of the slowed disk")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--plain-tokens", type=int, default=6, help="tokens of methods without a drafter")
    parser.add_argument("--budget-tokens", type=int, default=1024, help="tokens whose keys and values the budget holds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--disks", nargs="+", choices=(THROTTLED, AS_IS), default=[THROTTLED, AS_IS])
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="budgets as shares of the weights")
    parser.add_argument("--methods", nargs="+", choices=LETTERS, default=list(LETTERS), help="rows; (c) is always one")
    parser.add_argument("--tiny", action="store_true", help="a tiny target in seconds, to try the script")
    parser.add_argument("--output", type=Path, default=Path("outputs/offload"))
    parser.add_argument("--plan", action="store_true", help="print the cells and an estimate, and end")
    args = parser.parse_args(arguments)
    for name, value in TINY.items() if args.tiny else ():
        if getattr(args, name) == parser.get_default(name):
            setattr(args, name, value)
    return args


def run(args: argparse.Namespace) -> None:
    # 1. Check everything before any long work.
    source, folders = Source.of(args.target), drafter_folders(args)
    size = source.choose_size(parse_parameters(args.size))
    for name, least in (("prompts", 1), ("new_tokens", 2), ("plain_tokens", 2), ("threads", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least {least}")
    prompts = prompts_of(args)
    disks, reason = usable_disks(args)
    drafters = [name for name in DRAFTERS if name == GROWN or name in folders]
    cells = cells_of(disks, args.shares, drafters, args.free, {PLAIN, *args.methods})
    settings = settings_of(args, folders)
    require_same_settings(args.output, settings)
    allowance = ALLOWANCE_BYTES + ACTIVATION_BYTES * max(map(len, prompts)) * size.intermediate
    # 2. The cells.
    if reason:
        print(reason)
    print_plan(cells, size, len(prompts), args)
    if args.plan:
        return
    with locked(args.output), cpu_threads(args.threads):
        write_json(args.output / SETTINGS_FILE, settings)
        if any(missing(cell, len(prompts), args.output) for cell in cells):
            with grown(source, size, args.output / "models" / "llm") as target:
                drafter_costs(folders, size, args)
                folders[GROWN] = args.output / "grown_drafter"
                for cell in cells:
                    measure_cell(cell, target, folders, prompts, allowance, args)
        # 3. Record, tables and plot.
        write_results(cells, size, allowance, [reason] if reason else [], args)


def drafter_folders(args: argparse.Namespace) -> dict[str, Path]:
    """Return the trained drafters by name. Raises ValueError if one is missing or no draft model."""
    folders = {CLOSE: args.drafter, **({SMALL: args.small} if args.small else {})}
    for folder in folders.values():
        drafter_source(folder)
    return folders


def prompts_of(args: argparse.Namespace) -> list[list[int]]:
    """Return the ids of the prompts that leave room in the budget for the answer and a tree.

    Raises ValueError if there are too few.
    """
    tokenizer = load_tokenizer(TargetConfig(name_or_path=str(args.target)))
    (suite,) = load_suites(EvalConfig(suites=[SuiteConfig(name="stdlib", limit=CANDIDATES * args.prompts)]))
    room = args.budget_tokens - args.new_tokens - max(setting["tree_nodes"] for setting in SETTINGS.values())
    ids = [encode_prompt([Turn(role="user", content=prompt.turns[0])], tokenizer)[0].tolist() for prompt in suite.prompts]
    fitting = [prompt for prompt in ids if len(prompt) <= room][: args.prompts]
    if len(fitting) < args.prompts:
        raise ValueError(f"only {len(fitting)} prompts leave room within --budget-tokens {args.budget_tokens}; give more")
    return fitting


def usable_disks(args: argparse.Namespace) -> tuple[list[str], str]:
    """Return the disks that can be measured, and why one can't."""
    args.output.mkdir(parents=True, exist_ok=True)
    limits = Limits(memory_bytes=GIB, reads_per_second=parse_bytes(args.rate), disk_of=args.output)
    if THROTTLED in args.disks and (reason := unavailable(limits)):
        return [disk for disk in args.disks if disk != THROTTLED], f"No slowed disk: {reason}."
    return args.disks, ""


def settings_of(args: argparse.Namespace, folders: dict[str, Path]) -> dict[str, Any]:
    """Describe what all cells share, without paths, so that a folder may move."""
    names = ("size", "dtype", "rate", "prompts", "new_tokens", "plain_tokens", "budget_tokens", "threads", "free")
    return {
        "target": args.target.resolve().name,
        "drafters": {name: sha256_file(folder / WEIGHTS_FILE) for name, folder in folders.items()},
        "settings": SETTINGS,
        **{name: getattr(args, name) for name in names},
    }


def print_plan(cells: Sequence[Cell], size: Size, num_prompts: int, args: argparse.Namespace) -> None:
    """Print the cells, and how long the reads of the slowed ones take."""
    num_bytes = size.parameters * DTYPES["bfloat16"].itemsize
    print(f"a target of {num_bytes / 1e9:.2f} GB, {len(cells)} cells, {num_prompts} prompts")
    for cell in cells:
        to_do = missing(cell, num_prompts, args.output)
        rate = f" at {args.rate}B/s a pass reads {(1 - cell.share) * num_bytes / parse_bytes(args.rate):.1f} s or more"
        print(f"  {cell.name}: {len(to_do)} answers by {len(cell.methods)} methods" + (rate if cell.disk == THROTTLED else ""))


def missing(cell: Cell, num_prompts: int, output: Path) -> list[tuple[int, Method]]:
    """Return the answers that a cell lacks, in the order of the turns."""
    done = {(answer["prompt"], answer["method"]) for answer in read_lines(cell.folder(output) / ANSWERS_FILE)}
    turns = [(prompt, method) for prompt in range(num_prompts) for method in cell.methods]
    return [(prompt, method) for prompt, method in turns if (prompt, method.key) not in done]


def drafter_costs(folders: dict[str, Path], size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds of each drafter's pass, and grow one to the wanted ratio of costs."""
    path = args.output / COSTS_FILE
    if path.exists() and (args.output / "grown_drafter").exists():
        costs: dict[str, Any] = read_json(path)
        return costs
    costs = {name: cost_of(folder, args) for name, folder in folders.items()}
    # A second size gives the seconds per parameter, and with them the size that takes as long as wanted.
    source, first = drafter_source(folders[CLOSE]), costs[CLOSE]
    costs[GROWN] = grown_cost(FIRST_GROWTH * first["parameters"], folders[CLOSE], args)
    slope = (costs[GROWN]["seconds"] - first["seconds"]) / (costs[GROWN]["parameters"] - first["parameters"])
    pass_seconds = (1 - args.shares[0]) * size.parameters * DTYPES["bfloat16"].itemsize / parse_bytes(args.rate)
    if slope > 0 and not args.tiny:
        wanted = first["parameters"] + (pass_seconds / RATIO - first["seconds"]) / slope
        costs[GROWN] = grown_cost(max(source.size.parameters, round(wanted)), folders[CLOSE], args)
    write_json(path, costs)
    return costs


def grown_cost(parameters: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Grow a drafter to so many parameters, and measure its cost."""
    output = args.output / "grown_drafter"
    shutil.rmtree(output, ignore_errors=True)
    grow_drafter(folder, output, drafter_source(folder).choose_size(parameters))
    return cost_of(output, args)


def cost_of(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds of a draft pass beside the small target, which a fixed tree needs `length` of."""
    setting = SETTINGS[FIXED]
    shared = {"target": str(args.target), "dtype": args.dtype, "threads": args.threads, "budget_gib": None}
    spec = {**shared, "kind": "stream", "budget_tokens": args.budget_tokens, "drafter": str(folder), "setting": setting}
    with started({**spec, "meanwhile": False}, Limits(), args.output / "logs" / "cost.log") as worker:
        worker.ready()
        prompt = list(range(5, 40))
        answers = [worker.ask({"prompt": prompt, "max_new_tokens": COST_NEW_TOKENS}) for _ in range(3)]
    seconds = min(answer["draft_seconds"] / answer["num_steps"] for answer in answers)
    return {"seconds": seconds / setting["length"], "parameters": drafter_source(folder).size.parameters}


def measure_cell(
    cell: Cell,
    target: Path,
    folders: dict[str, Path],
    prompts: Sequence[list[int]],
    allowance: int,
    args: argparse.Namespace,
) -> None:
    """Let the methods of a cell answer the prompts that it lacks, in turns."""
    if not (turns := missing(cell, len(prompts), args.output)):
        return
    folder, files = cell.folder(args.output), sorted(target.glob("*.safetensors"))
    facts = Facts(folder / WORKERS_FILE)
    with ExitStack() as stack:
        # 1. Start all methods. The first one streams without a drafter: the peers keep the layers that its
        # plan keeps. The others load beside each other.
        first, *others = sorted(dict.fromkeys(method for _, method in turns), key=lambda method: method.letter != PLAIN)
        workers: dict[str, Worker] = {}
        for methods in ([first], others):
            options = [worker_options(cell, method, target, folders, facts, allowance, args) for method in methods]
            logs = [folder / "logs" / f"{method.key}.log" for method in methods]
            loading = [stack.enter_context(started(*option, log)) for option, log in zip(options, logs, strict=True)]
            for method, worker, (_, limits) in zip(methods, loading, options, strict=True):
                if facts.keep(method.key, worker, limits):
                    workers[method.key] = worker
            if "streamed_bytes" not in facts.values[PLAIN]:
                raise ValueError(f"{first.title} can't be measured with a budget of {cell.share:.0%}; give other --shares")
        # 2. Take turns. After each, look at what is left in the page cache, and drop it.
        for prompt, method in tqdm(turns, desc=cell.name, unit="answer"):
            if method.key not in workers:
                continue
            drop_cache(files)
            # The layers that the peers keep are mapped files, which stay.
            share_before = cached_share(files)
            worker, num_tokens = workers[method.key], args.new_tokens if method.drafts else args.plain_tokens
            try:
                answer = worker.ask({"prompt": prompts[prompt], "max_new_tokens": num_tokens})
            except WorkerError as error:
                facts.fail(method.key, error)
                del workers[method.key]
                continue
            counts = {"prompt": prompt, "method": method.key, "cached_share": cached_share(files) - share_before}
            append_line(folder / ANSWERS_FILE, {**counts, **answer})
            facts.add(method.key, worker.memory(facts.values[method.key]["cap_bytes"]))


def worker_options(
    cell: Cell, method: Method, target: Path, folders: dict[str, Path], facts: Facts, allowance: int, args: argparse.Namespace
) -> tuple[dict[str, Any], Limits]:
    """Return the options of a method's worker, and its limits.

    `allowance` is the memory beside its baseline, its drafter and the budget.
    """
    budget = round(cell.share * sum(file.stat().st_size for file in target.glob("*.safetensors")))
    shared = {"target": str(target), "dtype": args.dtype, "threads": args.threads}
    shared |= {"budget_gib": budget / GIB, "budget_tokens": args.budget_tokens}
    if BASELINE not in facts.values:
        with started({"kind": "nothing", **shared}, Limits(), facts.path.parent / "logs" / f"{BASELINE}.log") as nothing:
            facts.add(BASELINE, nothing.ready().memory(None))
    spec = method.spec(folders, shared, facts.values.get(PLAIN, {}))
    rate, cap = parse_bytes(args.rate) if cell.disk == THROTTLED else None, None
    if spec["budget_gib"] is not None:
        parts = {**facts.values[BASELINE], "drafter_bytes": drafter_bytes(method, folders, args.dtype)}
        cap = cap_for(parts, budget, allowance, by_rlimit=rate is None and means_rlimit())
    return spec, Limits(memory_bytes=cap, reads_per_second=rate, disk_of=target)


def drafter_bytes(method: Method, folders: dict[str, Path], dtype: str) -> int:
    """Return the bytes that loading a method's drafter takes; 0 without one.

    Ours are built in 32 bits, and then cast.
    """
    itemsize = DTYPES[dtype if method.is_peer else "float32"].itemsize
    return drafter_source(folders[method.drafter]).size.parameters * itemsize if method.drafts else 0


def write_results(cells: Sequence[Cell], size: Size, allowance: int, doubts: Sequence[str], args: argparse.Namespace) -> None:
    """Write and print tables, marks, record and plot."""
    costs = read_json(args.output / COSTS_FILE)
    rows = [row for cell in cells for row in rows_of(cell, args.output)]
    faults = [fault for cell in cells for fault in faults_of(cell, args.output)]
    marks = judge(rows, faults, costs, allowance)
    lines = [*doubts, *notes(rows, faults, costs, args.rate), *(mark["text"] for mark in marks)]
    made = tables(rows, costs)
    text = f"{made}\n" + "\n".join(f"- {line}" for line in lines) + "\n"
    report = {
        "rows": rows,
        "tables": made,
        "marks": marks,
        "notes": lines,
        "drafters": costs,
        "target": asdict(size),
        "settings": read_json(args.output / SETTINGS_FILE),
        "environment": asdict(describe_environment(CPU)),
    }
    write_json(args.output / RECORD_FILE, report)
    atomic_write_text(args.output / "table.md", text)
    plot(rows, args.output / "offload.png")
    print(f"{text}\nWritten to {args.output}: table.md, {RECORD_FILE}, offload.png")


if __name__ == "__main__":
    main()
