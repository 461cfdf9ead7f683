"""Measures decode steps on a GPU: plain and with trees; eager, compiled and as CUDA graphs.

    python scripts/gpu/decode_bench.py --output "$OUT/decode.json"
    python scripts/gpu/decode_bench.py --shape tiny --output /tmp/decode.json
    python scripts/gpu/decode_bench.py --grown demo=outputs/demo/drafter

The first command takes under 8 minutes for an 8B-shaped Llama in bf16. The second runs anywhere in
seconds. The third measures a real drafter with its real acceptance (see `grown_bench.py`); the rest
of this page is about random ones.

The target and the drafters have random weights of real sizes, so no download is needed. Every step
does all the work of a real step: the drafter's search, the target's pass over the tree, the
acceptance rule, the cache's commit. Tokens of random drafters would always be rejected, so
acceptance is simulated: `--acceptance` is the probability of each next token on the tree's deepest
path. Trees have fixed shapes (`SHAPES_OF_TREES`: nodes and depth), whatever the search finds.

So the result is milliseconds per step. Tokens per second follow from the simulated acceptance, and
mean nothing for any drafter. `break_even` is meaningful: the tokens per step and row from which on
a tree of that size is faster than the fastest plain decoding of that batch. Steps are timed one by
one, between the reads at their ends. Medians are reported, and

- `phase_milliseconds`: drafting, verifying, accepting. Each phase ends with a synchronisation, so
  their sum exceeds a step's time.
- `bandwidth_share`: the fewest bytes that a step must read (weights of target and drafter, KV
  caches), divided by its time. It is a share of the bandwidth measured in the same run, the better
  one of a copy and a sum of large tensors.
- `host_reads`: values read from the device per step; on CUDA also `synchronisations`, as PyTorch's
  debug mode counts them.
- `compilations`: graphs that `torch.compile` built during the case.

Cases beyond the time budget are listed as skipped, and failed cases with their error: the file is
always written. Some CUDA errors leave the device unusable; the remaining cases are then listed as
skipped, too.
"""

import argparse
import dataclasses
import gc
import itertools
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grown_bench
import torch
from host_reads import patched_reads
from random_target import LLAMA_1B, LLAMA_8B, TINY, memory_bandwidth, open_device, random_llama, target_of, weight_bytes
from tqdm import tqdm
from transformers import LlamaForCausalLM

from outrider.data.files import write_json
from outrider.eval.measure.environment import describe_environment
from outrider.models.decoding import Acceptance, DraftTree, GreedyAcceptance, RowSeeds, TargetOutput, generate
from outrider.models.decoding.acceptance import follow
from outrider.models.decoding.sampling import flip
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.graphed import GraphedDrafter
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.llm.graphed_rule import rule_beside
from outrider.models.llm.hf_target import HFTarget

SHAPES = {"llama8b": (LLAMA_8B, LLAMA_1B), "tiny": (TINY, {**TINY, "num_hidden_layers": 1})}
FORMS = {
    "eager": {},
    "compiled": {"compiled": True},
    "cuda_graph": {"cuda_graphs": True},
    "compiled_cuda_graph": {"compiled": True, "cuda_graphs": True},
}
SHAPES_OF_TREES = {1: (1, 1), 2: (1, 2), 4: (1, 4), 8: (2, 4), 16: (4, 5), 32: (8, 5), 64: (16, 5)}
"""Beam width and length of the search, by number of nodes. The length is the tree's depth."""
DRAFT_LENGTH = 4
COUNTED_STEPS = 4


def main() -> None:
    args = parse_args()
    if args.grown:
        grown_bench.run(args, FORMS)
        return
    started = time.perf_counter()
    device = open_device(args.device, cudnn_attention=args.cudnn_attention)
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    # 1. Random models and the report's head.
    target_shape, draft_shape = SHAPES[args.shape]
    model, draft = (random_llama(shape, dtype, device) for shape in (target_shape, draft_shape))
    bandwidth = memory_bandwidth(device)
    report: dict[str, Any] = {
        "shape": args.shape,
        "dtype": str(dtype).removeprefix("torch."),
        "acceptance": args.acceptance,
        "prompt_tokens": args.prompt_tokens,
        "steps": args.steps,
        "target_bytes": weight_bytes(model),
        "draft_model_bytes": weight_bytes(draft),
        "memory_bytes_per_second": bandwidth,
        "cudnn_attention": args.cudnn_attention,
        "rows": [],
        "skipped": [],
        "failed": [],
        "environment": dataclasses.asdict(describe_environment(device)),
    }
    # Cases called compiled must be compiled.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # 2. Case after case.
    bench = Bench(args, model, draft, bandwidth)
    for case in tqdm(list(cases(args, device)), unit="case"):
        list_name, record = bench.attempt(case, in_time=time.perf_counter() - started < args.budget_seconds)
        report[list_name].append(record)
        add_break_even(report["rows"])
        report["seconds"] = time.perf_counter() - started
        write_json(args.output, report)  # after each case, so that results are kept
    print_report(report)
    print(f"Written to {args.output}")


def compilations() -> int:
    """Count the graphs that torch.compile has built so far in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama8b")
    parser.add_argument("--forms", nargs="+", choices=sorted(FORMS), default=list(FORMS))
    parser.add_argument("--trees", type=int, nargs="+", choices=sorted(SHAPES_OF_TREES), default=sorted(SHAPES_OF_TREES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--budget-seconds", type=float, default=300, help="start no case after this time")
    parser.add_argument("--dtype", default=None, help="default: bfloat16, on a CPU float32")
    parser.add_argument("--device", default=None)
    parser.add_argument("--cudnn-attention", action="store_true", help="let PyTorch choose cuDNN's kernels for attention too")
    parser.add_argument("--output", type=Path, default=Path("decode_bench.json"))
    grown = parser.add_argument_group("a grown target with real drafters")
    grown.add_argument("--grown", nargs="+", metavar="NAME=FOLDER[:SETTING]", help="drafters of --target; turns this on")
    grown.add_argument("--target", type=Path, default=Path("models/demo_target"))
    grown.add_argument("--parameters", default="8B", help="size that the target is grown to")
    grown.add_argument("--prompts", type=int, default=8)
    grown.add_argument("--new-tokens", type=int, default=96)
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to decode. `nodes` is the size of the tree; 0 is plain decoding."""

    form: str
    drafter: str
    batch: int
    nodes: int


def cases(args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Yield all cases, the corners of the grid first.

    If the budget ends early, only cases in between are missing. Compiled forms take longest, and
    come last.
    """
    forms = [form for form in args.forms if device.type == "cuda" or not FORMS[form].get("cuda_graphs")]
    ends = {min(args.batches), max(args.batches)}
    for is_end in (True, False):
        for form in sorted(forms, key=lambda form: "compiled" in form):
            for batch in (batch for batch in args.batches if (batch in ends) == is_end):
                yield Case(form, "nothing", batch, 0)
                yield from (Case(form, "redrafter", batch, nodes) for nodes in args.trees)
                if "compiled" not in form:
                    yield Case(form, "draft_model", batch, DRAFT_LENGTH)


class ShapedDrafter:
    """A drafter with a tree of fixed shape.

    The tree is a path as deep as the search; all other nodes are siblings of its first node.
    """

    def __init__(self, drafter: Any, num_nodes: int, depth: int, device: torch.device) -> None:
        self.drafter, self.depth = drafter, depth
        self.max_nodes, self.feature_layers = num_nodes, ()
        self.tree_sizes = (num_nodes,)
        self.init_state, self.advance, self.select = drafter.init_state, drafter.advance, drafter.select
        self.meanwhile, self.search, self.skip = drafter.meanwhile, drafter.search, drafter.skip
        self.parents = torch.tensor([[*range(-1, depth - 1), *[-1] * (num_nodes - depth)]], device=device)

    def propose(self, state: Any, last_token: torch.Tensor, *, generator: Any = None) -> tuple[DraftTree, None]:
        return self.draft(state, last_token), None

    def trim(self, tree: DraftTree) -> DraftTree:
        return tree

    def draft(self, state: Any, last_token: torch.Tensor) -> DraftTree:
        tree = self.drafter.draft(state, last_token)
        assert tree.num_nodes == self.max_nodes
        parents = self.parents.expand_as(tree.tokens)
        return DraftTree(tokens=tree.tokens.clamp(min=0), parents=parents, max_depth=self.depth)


class SettableAcceptance:
    """Rule for timing: greedy, then a random number of tokens of the deepest path are accepted."""

    lossless, is_random = False, True

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Any = None) -> Acceptance:
        real = GreedyAcceptance()(tree, output)
        if tree.num_nodes == 0:
            return real
        deepest = tree.depths.argmax(1)
        path = tree.lineage.gather(1, deepest[:, None, None].expand(-1, 1, tree.max_depth))[:, 0]
        on_path = (torch.arange(tree.num_nodes, device=path.device)[:, None] == path[:, None, :]).any(-1)
        coins = flip(torch.full(path.shape, self.probability, device=path.device), generator)
        count = coins.long().cumprod(1).sum(1)
        return follow(tree, on_path & (tree.depths <= count[:, None])).accept(real.bonus_token)


class Bench:
    """The models, and one target per form, which keeps its compiled code or recordings."""

    def __init__(self, args: argparse.Namespace, model: Any, draft: Any, bandwidth: float) -> None:
        self.args, self.model, self.draft, self.bandwidth = args, model, draft, bandwidth
        self.targets: dict[str, HFTarget] = {}
        self.device = model.device
        self.stream = torch.cuda.current_stream() if self.device.type == "cuda" else None
        self.is_broken = False
        # Built once, on the device: initialising a billion parameters takes longer than a case.
        with model.device:
            options = {"kind": "redrafter", "head_init": "random", "tree_nodes": 1}
            self.redrafter: Any = (
                build_drafter(parse_drafter(options), target_of(model)).to(model.dtype).eval().requires_grad_(False)
            )

    def forget(self) -> None:
        """Free all memory, for a new start."""
        self.targets.clear()
        torch._dynamo.reset()
        gc.collect()  # a target and its recorded functions refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def attempt(self, case: Case, *, in_time: bool) -> tuple[str, dict[str, Any]]:
        """Measure a case. Return the name of its list in the report, and its record."""
        record = dataclasses.asdict(case)
        if not in_time or self.is_broken:
            return "skipped", record
        try:
            return "rows", record | self.measure(case)
        except (RuntimeError, ValueError) as error:  # out of memory, an operator that can't be captured
            record["error"] = str(error)[:500]
        # The frames that held the case's memory end only here, after the `except` block.
        self.is_broken = not is_usable(self.device, self.stream)
        if not self.is_broken:
            self.forget()
        return "failed", record

    @torch.inference_mode()
    def measure(self, case: Case) -> dict[str, Any]:
        # 1. The target of this form, a drafter and random prompts.
        form = FORMS[case.form]
        if case.form not in self.targets:
            self.forget()  # one form's graphs and compiled code at a time
            self.targets[case.form] = target_of(self.model, **form)
        target = self.targets[case.form]
        drafter, drafter_bytes = self.drafter(case, target)
        vocab, args = target.vocab_size, self.args
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(vocab, (case.batch, args.prompt_tokens), generator=generator).to(target.device)
        rule = rule_beside(target, SettableAcceptance(args.acceptance))
        num_steps = args.warm_up + args.steps
        most = 6  # tokens per step; the same room in every case, so the cache keeps its shape
        compiled_before = compilations()

        def steps(*, timed: bool = False) -> Iterator[Any]:
            limit = most * (2 + max(num_steps, 3 * COUNTED_STEPS))
            seeds = RowSeeds(range(case.batch))
            return generate(target, drafter, rule, prompts, max_new_tokens=limit, timed=timed, generator=seeds)

        # 2. Time steps one by one; then count host reads and time phases in separate runs.
        seconds, accepted = [], []
        clock = time.perf_counter()
        for number, step in enumerate(itertools.islice(steps(), 1 + num_steps)):
            last, clock = clock, time.perf_counter()
            if number > args.warm_up:
                seconds.append(clock - last)
                accepted.append(statistics.mean(step.num_accepted))
        reads, synchronisations = count_reads(steps(), target.device)
        phases = [step.seconds for step in itertools.islice(steps(timed=True), 3, 3 + 2 * COUNTED_STEPS)]
        # 3. The record.
        median, tokens = statistics.median(seconds), case.batch * (1 + statistics.mean(accepted))
        length = args.prompt_tokens + (num_steps / 2) * tokens / case.batch
        cache_bytes = case.batch * length * cache_bytes_per_token(self.model)
        return {
            "milliseconds_per_step": 1e3 * median,
            "quartiles": [1e3 * value for value in statistics.quantiles(seconds, n=4)],
            "tokens_per_step_and_row": tokens / case.batch,
            "tokens_per_second": tokens / median,
            "phase_milliseconds": [
                1e3 * statistics.median(getattr(phase, name) for phase in phases) for name in ("draft", "verify", "accept")
            ],
            "compilations": compilations() - compiled_before,
            "host_reads": reads,
            "synchronisations": synchronisations,
            "bandwidth_share": (weight_bytes(self.model) + drafter_bytes + cache_bytes) / median / self.bandwidth,
        }

    def drafter(self, case: Case, target: HFTarget) -> tuple[Any, float]:
        """Return the drafter, and the bytes of weights and cache that it reads per step."""
        if case.drafter == "nothing":
            return NullDrafter(), 0
        if case.drafter == "draft_model":
            reader = target_of(self.draft, **FORMS[case.form])
            cache_bytes = case.batch * self.args.prompt_tokens * cache_bytes_per_token(self.draft)
            bytes_per_pass = weight_bytes(self.draft) + cache_bytes
            return DraftModel(DraftModelConfig(length=case.nodes), reader), case.nodes * bytes_per_pass
        config, (width, length) = self.redrafter.config, SHAPES_OF_TREES[case.nodes]
        config.beam_width, config.beam_length, config.tree_nodes = width, length, case.nodes
        drafter = ShapedDrafter(self.redrafter, case.nodes, length, target.device)
        weights = sum(parameter.numel() for parameter in self.redrafter.parameters()) * target.dtype.itemsize
        return (GraphedDrafter(drafter) if FORMS[case.form].get("cuda_graphs") else drafter), length * weights


def cache_bytes_per_token(model: LlamaForCausalLM) -> int:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize


def count_reads(steps: Iterator[Any], device: torch.device) -> tuple[float, float | None]:
    """Return host reads per step, and on CUDA synchronisations per step as PyTorch counts them."""
    next(steps)
    next(steps)  # the first steps include one-time work
    with patched_reads() as reads:
        for _ in range(COUNTED_STEPS):
            next(steps)
    num_reads = sum(reads.values()) / COUNTED_STEPS
    if device.type != "cuda":
        return num_reads, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(COUNTED_STEPS):
                next(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    synchronisations = sum("called a synchronizing" in str(warning.message) for warning in caught)
    return num_reads, synchronisations / COUNTED_STEPS


def is_usable(device: torch.device, stream: torch.cuda.Stream | None) -> bool:
    """Return whether the process can continue after an error, in its previous stream.

    A failed capture may have left another stream active. After some errors CUDA rejects all further
    work of a process.
    """
    if stream is None:
        return True
    try:
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize(device)
        return torch.ones(2, device=device).sum().item() == 2
    except RuntimeError:
        return False


def add_break_even(rows: list[dict[str, Any]]) -> None:
    """Add the break-even tokens per step and row of each row.

    This is a step's time divided by that of the fastest plain decoding of the same batch.
    """
    for row in rows:
        same_batch = [
            other["milliseconds_per_step"] for other in rows if other["nodes"] == 0 and other["batch"] == row["batch"]
        ]
        row["break_even"] = row["milliseconds_per_step"] / min(same_batch) if same_batch else None


def print_report(report: dict[str, Any]) -> None:
    print("| form | drafter | batch | nodes | ms/step | break even | tokens/s | reads | bandwidth | draft, verify, accept ms |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for row in report["rows"]:
        print(
            f"| {row['form']} | {row['drafter']} | {row['batch']} | {row['nodes']} | {row['milliseconds_per_step']:.2f} "
            f"| {row['break_even'] or 0:.2f} | {row['tokens_per_second']:.0f} | {row['host_reads']:.0f} "
            f"| {row['bandwidth_share']:.0%} | {', '.join(f'{value:.2f}' for value in row['phase_milliseconds'])} |"
        )
    print(f"{report['seconds']:.0f} s; skipped {len(report['skipped'])}, failed {len(report['failed'])}")
    for row in report["failed"]:
        print(f"failed: {row}")


if __name__ == "__main__":
    main()
