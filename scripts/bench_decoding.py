"""Benchmark of the decode loop: its overhead, and its speed against transformers.

    python scripts/bench_decoding.py --target models/demo_target --threads 2

1. A step with a 16-node tree takes turns with the bare forward pass over the same tokens, mask and
   cache. The longest path of the tree (5 tokens) is accepted.
2. Plain decoding and a chain of drafts, in batches, take turns with transformers' `generate` and
   its assisted generation with the same draft model. The draft model is the first layers of the
   target, so that no second download is needed. Assisted generation rejects batches. Decoding is
   greedy, without stop tokens. The script ends with an error if our answers differ.

The medians are written as JSON.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.data.chat import encode_prompt
from outrider.data.files import write_json
from outrider.data.suites import load_suite
from outrider.data.types import Turn
from outrider.eval.measure.environment import describe_environment
from outrider.models.decoding import DraftTree, GreedyAcceptance, Prompts, generate
from outrider.models.decoding.reading import read_acceptance
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.models.llm.tree_attention import grouped_heads, masks_by_kind

TREE = (-1, -1, -1, -1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 10, 14)
"""Parents of 16 nodes, five deep."""
PATH = (0, 4, 10, 14, 15)
"""The longest path of the tree."""
OVERHEAD_WARMUP = 20


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    target = load_target(TargetConfig(name_or_path=args.target, dtype=args.dtype))
    draft = first_layers(args, target)
    for model in (target.model, draft.model):
        model.generation_config.eos_token_id = None
    prompts = [
        encode_prompt([Turn(role="user", content=prompt.turns[0])], target.tokenizer)[0].to(target.device)
        for prompt in load_suite("stdlib", None, max(args.batches)).prompts
    ]
    report = {
        "target": target.identity.name,
        "dtype": args.dtype,
        "draft_layers": args.draft_layers,
        "draft_length": args.draft_length,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "overhead": measure_overhead(target, prompts[0], args.overhead_steps),
        "decoding": [measure_decoding(target, draft, prompts, batch, args) for batch in args.batches],
        "environment": dataclasses.asdict(describe_environment(target.device)),
    }
    write_json(args.output, report)
    print_report(report)
    print(f"Written to {args.output}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/demo_target", help="directory or Hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--overhead-steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/decoding.json"))
    return parser.parse_args()


def first_layers(args: argparse.Namespace, target: HFTarget) -> HFTarget:
    """Return the target's first layers with its embeddings, norm and head."""
    small = load_target(TargetConfig(name_or_path=args.target, dtype=args.dtype))
    small.model.base_model.layers = small.model.base_model.layers[: args.draft_layers]
    small.model.config.num_hidden_layers = args.draft_layers
    return HFTarget(small.model, small.tokenizer, small.identity)


@torch.inference_mode()
def measure_overhead(target: HFTarget, prompt: torch.Tensor, num_steps: int) -> dict[str, float]:
    """Measure a whole step with a tree of 16 nodes, and the forward pass inside it."""
    rule = GreedyAcceptance()
    generator = torch.Generator(target.device).manual_seed(0)
    output = target.prefill(Prompts.of(prompt[None]), max_new_tokens=num_steps, max_nodes=len(TREE))
    last_token = output.logits[:, -1].argmax(-1)
    parents = torch.tensor([TREE], device=target.device)
    steps = generate(target, NullDrafter(), rule, prompt[None], max_new_tokens=2 + len(PATH))
    answer = [token for one_step in steps for token in one_step.tokens[0]]
    target.prefill(Prompts.of(prompt[None]), max_new_tokens=num_steps, max_nodes=len(TREE))

    def step(tokens: torch.Tensor) -> float:
        start = clock(target)
        tree = DraftTree(tokens=tokens, parents=parents, max_depth=5)
        output = target.verify(last_token, tree)
        accepted = read_acceptance(tree, output, rule(tree, output)).accepted
        assert accepted.num_accepted.host == (len(PATH),)
        target.commit(tree, accepted)
        seconds = clock(target) - start
        # Remove the tokens, so that the next step has the same cache.
        target.rewind(accepted.num_accepted + 1)
        return seconds

    def forward(tokens: torch.Tensor) -> float:
        tree = DraftTree(tokens=tokens, parents=parents, max_depth=5)
        cache = target._require_cache()
        cache.begin_pass(1 + len(TREE))
        cache.locate()
        lengths = cache.lengths.device
        mask = masks_by_kind(target._trees.kinds, tree.lineage, lengths, cache.extent, target.dtype)
        inputs = torch.cat([last_token[:, None], tokens], dim=1)
        positions = lengths[:, None] + torch.nn.functional.pad(tree.depths, (1, 0))
        start = clock(target)
        with grouped_heads(target.model):
            target.model(inputs, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        return clock(target) - start

    whole, bare = [], []
    for number in range(num_steps + OVERHEAD_WARMUP):
        tokens = torch.randint(target.vocab_size, parents.shape, device=target.device, generator=generator)
        tokens[0, list(PATH)] = torch.tensor(answer[1 : 1 + len(PATH)], device=target.device)
        # Alternate the order: the second one finds the weights in the processor's cache.
        first, second = (step, forward) if number % 2 else (forward, step)
        times = {first: first(tokens), second: second(tokens)}
        if number >= OVERHEAD_WARMUP:
            whole.append(times[step])
            bare.append(times[forward])
    return {
        "step_seconds": statistics.median(whole),
        "forward_seconds": statistics.median(bare),
        "ratio_of_medians": statistics.median(whole) / statistics.median(bare),
        "median_of_paired_ratios": statistics.median(a / b for a, b in zip(whole, bare, strict=True)),
    }


Way = Callable[[], list[list[int]]]


def measure_decoding(
    target: HFTarget, draft: HFTarget, prompts: list[torch.Tensor], batch: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure tokens per second of each method to decode a batch, in turns."""
    rows, num_tokens = prompts[:batch], args.new_tokens
    drafter = DraftModel(DraftModelConfig(length=args.draft_length), draft)
    draft.model.generation_config.num_assistant_tokens = args.draft_length
    draft.model.generation_config.num_assistant_tokens_schedule = "constant"
    draft.model.generation_config.assistant_confidence_threshold = 0.0
    ways: dict[str, Way] = {
        "plain": lambda: decode_ours(target, NullDrafter(), rows, num_tokens),
        "transformers": lambda: decode_theirs(target, rows, num_tokens),
        "chain": lambda: decode_ours(target, drafter, rows, num_tokens),
        "assisted": lambda: decode_theirs(target, rows, num_tokens, assistant_model=draft.model),
    }
    refused = None
    if batch > 1:
        try:
            ways["assisted"]()
        except ValueError as error:
            refused = str(error)
            del ways["assisted"]
    seconds, differing = take_turns(target, ways, args.rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "batch": batch,
        "tokens_per_second": {name: batch * num_tokens / median for name, median in medians.items()},
        "chain_against_assisted": medians["assisted"] / medians["chain"] if "assisted" in medians else None,
        "plain_against_transformers": medians["transformers"] / medians["plain"],
        "assisted_refused": refused,
        "answers_unlike_plain": differing,
    }


def decode_ours(target: HFTarget, drafter: Any, rows: list[torch.Tensor], num_tokens: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in rows]
    for step in generate(target, drafter, GreedyAcceptance(), rows, max_new_tokens=num_tokens):
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            answers[row] += tokens
    return answers


def decode_theirs(target: HFTarget, rows: list[torch.Tensor], num_tokens: int, **options: Any) -> list[list[int]]:
    """Decode with transformers, with padding on the left."""
    longest = max(map(len, rows))
    padded = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(longest, device=row.device) >= longest - len(row) for row in rows]).long()
    output = target.model.generate(
        padded, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, **options
    )
    answers: list[list[int]] = output[:, longest:].tolist()
    return answers


def take_turns(target: HFTarget, ways: dict[str, Way], num_rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Measure the seconds of each method by round.

    Also counts the answers that differ from those of plain decoding. The first round is a warm-up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    differing: dict[str, int] = {}
    for round_number in range(num_rounds + 1):
        answers = {}
        for name, way in ways.items():
            start = clock(target)
            answers[name] = way()
            if round_number:
                seconds[name].append(clock(target) - start)
        differing = {name: sum(a != b for a, b in zip(answers[name], answers["plain"], strict=True)) for name in ways}
        if differing["chain"]:
            raise SystemExit(
                f"{differing['chain']} of {len(answers['chain'])} answers of the chain differ from plain decoding's"
            )
    return seconds, differing


def clock(target: HFTarget) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def print_report(report: dict[str, Any]) -> None:
    overhead = report["overhead"]
    print(
        f"A step with 16 nodes: {1e3 * overhead['step_seconds']:.2f} ms, the bare forward pass "
        f"{1e3 * overhead['forward_seconds']:.2f} ms: {overhead['ratio_of_medians']:.3f} times (medians), "
        f"{overhead['median_of_paired_ratios']:.3f} (pairs)"
    )
    for row in report["decoding"]:
        speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in row["tokens_per_second"].items())
        print(f"batch {row['batch']}: tokens/s {speeds}; chain against assisted {row['chain_against_assisted']}")


if __name__ == "__main__":
    main()
