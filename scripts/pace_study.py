"""Compares rules for when to verify a growing draft tree with the best fixed trees.

    python scripts/pace_study.py --drafter outputs/compare_demo/variants/draft_model/drafter --plan
    python scripts/pace_study.py --drafter DIR --suites stdlib mt_bench=question.jsonl alpaca_eval=alpaca_eval.jsonl

The target answers prompts, and the draft model's likeliest continuations are recorded at each
position of the answers (`pace_traces`). Then decoding is replayed in virtual time (`pace_replay`):
for passes of the target that take 3 to 1000 draft passes, and for a draft model whose probabilities
are distorted to p ** gamma. In each cell the fixed tree is the best of many, chosen in hindsight.

Traces and cells are in OUTPUT. The same command resumes after a kill. OUTPUT gets the record
`pace_study.json`, `table.md` with the marks, and `pace.png`. The machine's load changes nothing. Delete
OUTPUT/cells to replay a rule that has changed.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

import silence  # noqa: F401 - before torch, whose libraries it silences
from pace_replay import MAX_NODES, MAX_READS, Outcome, Text, replay, replay_fixed
from pace_report import CONFIDENCE, EXPECTED, UNCALIBRATED, StudyRow, fixed_row, judge, plot, rule_row, table
from pace_traces import TOP_K, Trace, prompt_ids, trace_answer
from script_errors import script_errors
from study_cells import CPU, SETTINGS_FILE, require_same_settings
from tqdm import tqdm

from outrider.data.files import atomic_write_text, locked, read_json, sha256_file, write_json
from outrider.data.suites import Prompt, PromptSet
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure.environment import describe_environment
from outrider.eval.run import cpu_threads, load_suites
from outrider.models.decoding.growth import ConfidenceRule, ExpectedRule, GrowthRule
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.saved.folder import WEIGHTS_FILE, read_drafter_config
from outrider.models.drafters.saved.loading import load_trained
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

RECORD_FILE = "pace_study.json"
METHODS = (EXPECTED, UNCALIBRATED, CONFIDENCE)
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
CELL_SHARE = 0.02
"""Time of replaying a token in a cell, over that of tracing it: a rough share, for the estimate."""


def main() -> None:
    with script_errors(kept="traces and cells"):
        run(parse_args())


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("models/demo_target"), help="folder of the target")
    parser.add_argument("--drafter", type=Path, required=True, help="folder of a trained draft_model")
    parser.add_argument("--suites", nargs="+", default=["stdlib"], metavar="NAME[=FILE]")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of each suite")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--reads", type=int, default=128, help="continuations that are recorded at each position")
    parser.add_argument("--ratios", nargs="+", type=float, default=[3, 10, 37, 200, 1000], help="draft passes per pass")
    parser.add_argument("--gammas", nargs="+", type=float, default=[1 / 3, 1, 3])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("outputs/pace_study"))
    parser.add_argument("--plan", action="store_true", help="print what is to be done, and end")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    # 1. Check everything before any long work.
    suites, settings = checked(args)
    require_same_settings(args.output, settings)
    traces = {trace_path(args, suite, index): prompt for suite in suites for index, prompt in enumerate(suite.prompts)}
    missing = {path: prompt for path, prompt in traces.items() if not path.is_file()}
    cells = [(ratio, gamma) for ratio in args.ratios for gamma in args.gammas]
    done = [cell for cell in cells if cell_path(args, *cell).is_file()]
    print(f"{len(traces)} traces, {len(traces) - len(missing)} of them done; {len(cells)} cells, {len(done)} of them done")
    if args.plan:
        return
    # 2. Traces, then cells. Weights of the bar are tokens that are traced.
    with locked(args.output):
        args.output.mkdir(parents=True, exist_ok=True)
        write_json(args.output / SETTINGS_FILE, settings)
        most = len(traces) * args.new_tokens * CELL_SHARE
        total = len(missing) * args.new_tokens + most * (1 + len(cells) - len(done))
        with tqdm(total=ceil(total), desc="pace study", bar_format=BAR) as progress, cpu_threads(args.threads):
            make_traces(missing, args, progress)
            rows, tokens = replay_cells(list(traces), args, progress)
            progress.update(progress.total - progress.n)
        write_results(rows, tokens, args)


def checked(args: argparse.Namespace) -> tuple[list[PromptSet], dict[str, Any]]:
    """Return the suites, and what the traces depend on. Raises ValueError for wrong options."""
    # 1. Numbers.
    for name in ("prompts", "new_tokens", "reads", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least 1")
    for name in ("ratios", "gammas"):
        if min(getattr(args, name)) <= 0:
            raise ValueError(f"--{name} has {min(getattr(args, name)):g}; give numbers above 0")
    # 2. The drafter.
    kind = read_drafter_config(args.drafter).kind
    if kind != "draft_model":
        raise ValueError(f"--drafter {args.drafter} holds a {kind}; trees of a draft_model grow")
    weights = args.drafter / WEIGHTS_FILE
    if not weights.is_file():
        raise ValueError(f"{weights} is missing; give the `drafter/` folder of a finished training")
    # 3. The suites.
    names = [item.partition("=") for item in args.suites]
    suites = load_suites(
        EvalConfig(suites=[SuiteConfig(name=name, path=path or None, limit=args.prompts) for name, _, path in names])
    )
    return suites, {
        "target": args.target.resolve().name,
        "drafter": sha256_file(weights),
        "suites": {suite.name: suite.revision for suite in suites},
        "prompts": args.prompts,
        "new_tokens": args.new_tokens,
        "reads": args.reads,
    }


def trace_path(args: argparse.Namespace, suite: PromptSet, index: int) -> Path:
    return args.output / "traces" / f"{suite.name}-{index:03}.npz"


def cell_path(args: argparse.Namespace, ratio: float, gamma: float) -> Path:
    return args.output / "cells" / f"{ratio:g}-{gamma:.6g}.json"


def make_traces(missing: Mapping[Path, Prompt], args: argparse.Namespace, progress: "tqdm[Any]") -> None:
    """Trace the answers to the prompts that lack one."""
    if not missing:
        return
    target = load_target(TargetConfig(name_or_path=str(args.target), dtype="float32", device="cpu"))
    drafter = load_trained(args.drafter, target)
    assert isinstance(drafter, DraftModel)
    for path, prompt in missing.items():
        ids = prompt_ids(prompt, target)
        if len(ids) + args.new_tokens > drafter.context_length:
            raise ValueError(
                f"the prompt {prompt.id} has {len(ids)} tokens, which leaves no room for {args.new_tokens} more in the draft "
                f"model's context window of {drafter.context_length}; lower --new-tokens, or leave its suite out"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        trace_answer(target, drafter.reader, ids, args.new_tokens, args.reads).save(path)
        progress.update(args.new_tokens)


def replay_cells(paths: Sequence[Path], args: argparse.Namespace, progress: "tqdm[Any]") -> tuple[list[StudyRow], list[int]]:
    """Return the rows of all cells, and the tokens of each text."""
    # 1. Fixed trees: gamma changes no order of nodes, and so none of them.
    traces = [Trace.load(path) for path in paths]
    weight = CELL_SHARE * args.new_tokens
    fixed = replay_fixed([Text(trace, 1.0) for trace in traces], lambda tokens: progress.update(weight))
    tokens = [trace.num_tokens for trace in traces]
    best = {ratio: fixed_row(fixed, tokens, ratio) for ratio in args.ratios}
    # 2. The rules.
    rows = list(best.values())
    for gamma in args.gammas:
        texts = [Text(trace, gamma) for trace in traces]
        for ratio in args.ratios:
            path = cell_path(args, ratio, gamma)
            if not path.is_file():
                new = [rule_row(method, gamma, outcome(method, texts, ratio), best[ratio]) for method in METHODS]
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, new)
                progress.update(weight * len(traces))
            rows += read_json(path)
    return rows, tokens


def outcome(method: str, texts: Sequence[Text], ratio: float) -> Outcome:
    """Decode all texts by a new rule."""
    rule: GrowthRule = ConfidenceRule(MAX_NODES) if method == CONFIDENCE else ExpectedRule(MAX_NODES, TOP_K)
    return replay(texts, rule, ratio, calibrated=method == EXPECTED)


def write_results(rows: Sequence[StudyRow], tokens: Sequence[int], args: argparse.Namespace) -> None:
    """Write and print table, marks, record and plot."""
    marks = judge(rows)
    note = f"{len(tokens)} texts of {sum(tokens):,} tokens; at most {MAX_NODES} nodes are verified, and {MAX_READS} read."
    text = f"{table(rows)}\n\n" + "\n".join(f"- {line}" for line in (note, *(mark["text"] for mark in marks))) + "\n"
    report = {
        "rows": [{name: value for name, value in row.items() if name != "seconds"} for row in rows],
        "marks": marks,
        "texts": len(tokens),
        "tokens": sum(tokens),
        "settings": read_json(args.output / SETTINGS_FILE),
        "environment": asdict(describe_environment(CPU)),
    }
    write_json(args.output / RECORD_FILE, report)
    atomic_write_text(args.output / "table.md", text)
    plot(rows, args.output / "pace.png")
    print(f"{text}\nWritten to {args.output}: table.md, {RECORD_FILE}, pace.png")


if __name__ == "__main__":
    main()
