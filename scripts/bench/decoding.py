"""Measures decoding on a CPU: plain in its forms, every kind of drafter, and transformers' own methods.

    python scripts/bench/decoding.py
    python scripts/bench/decoding.py --against ../older          # another checkout, in turns
    python scripts/bench/decoding.py --drafter demo=outputs/demo/drafter --batch 4

The prompts are the beginnings of modules of Python's standard library, and answers have no end but
their length. Fresh drafters have random weights, so nothing that they draft is accepted: the
milliseconds of their steps count. A trained drafter's tokens per second count, too.

Every round is a process, and in it all methods take turns. With `--against` each round runs once
with this checkout and once with the other. The table has medians over all repeats, in seconds of the
clock and of the processor: other work on the machine changes the latter less. A step is divided into
the draft, the target's pass, and the rest: acceptance, cache and loop. Ratios are medians of pairs
of the same repeat, with a 95 % interval, and are larger than one where the row's own method or this
checkout is faster.

`over_plain` compares with the fastest plain decoding that was measured, transformers' `generate`
included. `over_against` compares the medians of whole processes: the answers of one process are not
independent of each other.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from report import finish, median, ratio, take_turns

from outrider.eval.measure.environment import describe_environment
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.saved.loading import trained_parts

try:
    from outrider.models.llm.config import TargetConfig
    from outrider.models.llm.loading import load_target
except ModuleNotFoundError:  # another checkout, of the tag `before-halving` or earlier
    from outrider.models.target.config import TargetConfig  # type: ignore[import-not-found, no-redef]
    from outrider.models.target.loading import load_target  # type: ignore[import-not-found, no-redef]

ROOT = Path(__file__).parents[2]
MODULES = ("argparse", "ast", "bisect", "calendar", "cmd", "codecs", "copy", "csv", "difflib", "enum", "fnmatch", "gettext")
"""Modules whose beginnings are prompts."""
SMALL_TREE, LARGE_TREE = {"tree_nodes": 5}, {"tree_nodes": 40}
FRESH: dict[str, dict[str, Any]] = {
    "redrafter 4x3": {"kind": "redrafter", "beam_width": 4, "beam_length": 3, **SMALL_TREE},
    "redrafter 16x5": {"kind": "redrafter", "beam_width": 16, "beam_length": 5, **LARGE_TREE},
    "medusa": {"kind": "medusa", "num_heads": 4, **LARGE_TREE},
    "eagle": {"kind": "eagle"},
    "eagle3": {"kind": "eagle3", "depth": 5, "top_k": 8, **LARGE_TREE},
    "block": {"kind": "block", "block": 4, "width": 16, **LARGE_TREE},
    "draft_model": {"kind": "draft_model", "length": 5, "top_k": 8, **LARGE_TREE},
}
"""Drafters that are made here, with random weights."""
WITHOUT_WEIGHTS = ("suffix", "recycling")
PLAIN, NOT_PACKED, GENERATE, LOOKUP = "plain", "plain, fast_linears: false", "transformers", "transformers, prompt lookup"
PLAINS = (PLAIN, NOT_PACKED, GENERATE)
"""Ways of plain decoding. The fastest of those that run is the baseline."""
MERGED = "redrafter 4x3 + suffix + recycling"
METHODS = [PLAIN, NOT_PACKED, GENERATE, LOOKUP, *FRESH, *WITHOUT_WEIGHTS, MERGED]

PARTS = ("draft", "pass", "rest")
"""Parts of a step, in milliseconds of the processor."""


def main(
    target: Annotated[str, typer.Option(help="Folder or Hub id.")] = str(ROOT / "models" / "demo_target"),
    drafter: Annotated[list[str] | None, typer.Option(help="A trained drafter: NAME=FOLDER. Repeatable.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only this method; `plain` always runs. Repeatable.")] = None,
    against: Annotated[Path | None, typer.Option(help="Another checkout to compare with.")] = None,
    dtype: str = "float32",
    batch: int = 1,
    prompt_tokens: int = 100,
    new_tokens: int = 64,
    threads: int = 1,
    rounds: Annotated[int, typer.Option(help="Processes of each checkout.")] = 5,
    repeats: Annotated[int, typer.Option(help="Timed answers of each method in a process.")] = 3,
    output: Path = Path("outputs/bench/decoding.json"),
    one_round: Annotated[bool, typer.Option("--one-round", hidden=True)] = False,
) -> None:
    """Measure decoding on a CPU."""
    options = dict(locals())
    trained = dict(text.split("=", 1) for text in drafter or [])
    if unknown := set(method or ()) - {*METHODS, *trained}:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; it must be one of {', '.join([*METHODS, *trained])}")
    if one_round:
        torch.set_num_threads(threads)
        wanted = {PLAIN, *(method or [*METHODS, *trained])}
        bench = Bench(target, dtype, batch, prompt_tokens, new_tokens, wanted)
        code = describe_environment(torch.device("cpu")).git_hash
        print(json.dumps({"git_hash": code, "methods": bench.measure(trained, repeats)}))
        return
    # 1. The checkouts in turns, each round in a process of its own.
    checkouts = {"this": ROOT} | ({} if against is None else {"against": against.resolve()})
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    commits: dict[str, str | None] = {}
    for _ in range(rounds):
        for name, checkout in checkouts.items():
            measured = measured_apart(checkout, threads)
            runs[name].append(measured["methods"])
            commits[name] = measured["git_hash"]
    # 2. The table.
    plain = min(runs["this"][0].keys() & {*PLAINS}, key=lambda name: median(seconds_of(runs["this"], name, "wall")))
    rows = [row_of(name, runs, batch * new_tokens, plain) for name in runs["this"][0]]
    finish(output, rows, options, commits=commits, fastest_plain=plain)


def measured_apart(checkout: Path, threads: int) -> dict[str, Any]:
    """Run a round of this command in a new process with the package of a checkout; return its measurements."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "outrider").symlink_to(checkout, target_is_directory=True)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, *sys.argv, "--one-round"]
        result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def seconds_of(runs: list[dict[str, Any]], method: str, kind: str) -> list[float]:
    """Return the seconds of all answers of a method, in the order of the processes."""
    return [value for run in runs for value in run[method][kind]]


def row_of(name: str, runs: dict[str, list[dict[str, Any]]], num_tokens: int, plain: str) -> dict[str, Any]:
    """Return a method's medians over all repeats, its speed over plain decoding, and over the other checkout's."""
    last = runs["this"][-1][name]
    row = {
        "method": name,
        "tokens_per_second": median([num_tokens / value for value in seconds_of(runs["this"], name, "wall")]),
        "tokens_per_step": last["tokens_per_step"],
        "as_plain": last["as_plain"],
    }
    for part in PARTS:
        row[f"{part}_ms"] = median([run[name]["parts"][part] for run in runs["this"]], 3) if last["parts"] else None
    for kind, ending in (("wall", ""), ("processor", "_processor")):
        row[f"over_plain{ending}"] = ratio(seconds_of(runs["this"], plain, kind), seconds_of(runs["this"], name, kind))
        if "against" in runs:
            medians = {checkout: [statistics.median(run[name][kind]) for run in own] for checkout, own in runs.items()}
            row[f"over_against{ending}"] = ratio(medians["against"], medians["this"])
    return row


class Bench:
    """The methods of one process: targets, prompts and drafters."""

    def __init__(self, target: str, dtype: str, batch: int, prompt_tokens: int, new_tokens: int, wanted: set[str]) -> None:
        cpu = torch.device("cpu")
        self.target = load_target(TargetConfig(name_or_path=target, dtype=dtype), cpu)
        self.usual = load_target(TargetConfig(name_or_path=target, dtype=dtype, fast_linears=False), cpu)
        for loaded in (self.target, self.usual):
            loaded.model.generation_config.eos_token_id = None
        self.new_tokens, self.wanted = new_tokens, wanted
        folder = Path(os.__file__).parent
        texts = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES]
        ids = [self.target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
        self.prompts = torch.tensor([ids[row % len(ids)][:prompt_tokens] for row in range(batch)])
        self.answers: dict[str, list[list[int]]] = {}
        self.num_steps: dict[str, int] = {}
        self.seconds: dict[str, Counter[str]] = {}

    def measure(self, trained: dict[str, str], repeats: int) -> dict[str, Any]:
        """Let all methods take turns, and return the seconds of each answer, tokens per step, and parts of a step."""
        with tempfile.TemporaryDirectory() as folder:
            ways = self.ways(trained, Path(folder))
        seconds = take_turns(ways, rounds=repeats)
        return {name: {"wall": each.wall, "processor": each.processor, **self.facts(name)} for name, each in seconds.items()}

    def facts(self, name: str) -> dict[str, Any]:
        """Return what is known of a method's last answers."""
        facts: dict[str, Any] = {"as_plain": self.answers[name] == self.answers[PLAIN], "tokens_per_step": None, "parts": {}}
        if (steps := self.num_steps.get(name)) is not None:
            seconds = self.seconds[name]
            rest = seconds["all"] - seconds["draft"] - seconds["pass"]
            facts["tokens_per_step"] = round((self.new_tokens - 1) / steps, 2)
            facts["parts"] = {
                part: 1e3 * value / steps for part, value in zip(PARTS, (seconds["draft"], seconds["pass"], rest), strict=True)
            }
        return facts

    def ways(self, trained: dict[str, str], folder: Path) -> dict[str, Callable[[], None]]:
        """Return the wanted methods, in the order of the table."""
        ways: dict[str, Callable[[], None]] = {
            PLAIN: partial(self.decode, PLAIN, self.target, NullDrafter()),
            NOT_PACKED: partial(self.decode, NOT_PACKED, self.usual, NullDrafter()),
            GENERATE: partial(self.theirs, GENERATE),
        }
        if len(self.prompts) == 1:  # transformers drafts for one prompt only
            ways[LOOKUP] = partial(self.theirs, LOOKUP, prompt_lookup_num_tokens=10)
        # Fresh drafters are saved and loaded, as a trained one is.
        names = {}
        for number, (name, options) in enumerate(FRESH.items()):
            torch.manual_seed(0)
            names[name] = str(folder / str(number))
            if name in self.wanted or MERGED.startswith(name):
                save_drafter(build_drafter(parse_drafter(options), self.target), Path(names[name]), self.target.identity)
        names |= {name: name for name in WITHOUT_WEIGHTS}
        names |= {MERGED: "+".join([names["redrafter 4x3"], *WITHOUT_WEIGHTS]), **trained}
        parts = []
        for name in self.wanted & names.keys():
            drafter = load_drafter(names[name], self.target, **({"pace": "fixed"} if name == MERGED else {}))
            parts += trained_parts(drafter)
            ways[name] = partial(self.decode, name, self.target, drafter)
        self.target.choose_linears(*parts)
        return {name: ways[name] for name in [*METHODS, *trained] if name in ways and name in self.wanted}

    @torch.inference_mode()
    def decode(self, name: str, target: Any, drafter: Any) -> None:
        """Answer the prompts, and keep the answers and the processor's seconds of each part."""
        seconds = self.seconds[name] = Counter()
        propose, verify = drafter.propose, target.verify
        drafter.propose, target.verify = clocked(propose, seconds, "draft"), clocked(verify, seconds, "pass")
        self.answers[name], self.num_steps[name] = [[] for _ in self.prompts], -1
        for step in generate(target, drafter, GreedyAcceptance(), self.prompts, max_new_tokens=self.new_tokens):
            for row, tokens in zip(step.rows, step.tokens, strict=True):
                self.answers[name][row] += tokens
            if (number := self.num_steps[name]) < 0:  # the prefill
                start = time.process_time()
            self.num_steps[name] = number + 1
        seconds["all"] = time.process_time() - start
        del drafter.propose, target.verify  # those of the class

    def theirs(self, name: str, **options: Any) -> None:
        """Answer the prompts with transformers."""
        output = self.usual.model.generate(
            self.prompts,
            attention_mask=torch.ones_like(self.prompts),
            max_new_tokens=self.new_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        self.answers[name] = output[:, self.prompts.shape[1] :].tolist()


def clocked(function: Callable[..., Any], seconds: Counter[str], part: str) -> Callable[..., Any]:
    """Return a function that adds its processor seconds to a part."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        result = function(*args, **kwargs)
        seconds[part] += time.process_time() - start
        return result

    return call


if __name__ == "__main__":
    typer.run(main)
