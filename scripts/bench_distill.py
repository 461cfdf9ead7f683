"""Benchmark of distillation, against transformers' `generate` and in units of prefills.

    python scripts/bench_distill.py --target models/demo_target

Three methods take turns on the same texts, and medians over the rounds are reported:

- `prefill`: one plain forward pass of all texts in the same batches, with the arg-max of the head
  at every labelled position.
- `label`: `label_continuations` at every position.
- `generate`: transformers' batched greedy `generate` of the same labels, at a random sample of the
  positions, since all positions would take long. Each has its own left-padded prefix. Prefixes of
  similar length share a batch, so that there is little padding.

The labels of both methods are compared at the sampled positions. A mismatch is printed with the
difference of the two tokens in plain logits: a difference above rounding errors is a bug.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from outrider.data.cuts import Cuts
from outrider.data.files import write_json
from outrider.data.stdlib import code_conversations
from outrider.data.types import UNKNOWN
from outrider.distill.label.continuations import label_continuations, require_branch_attention
from outrider.eval.measure.environment import describe_environment
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

HEAD_CHUNK = 2048


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    target = load_target(TargetConfig(name_or_path=args.target, dtype="float32"))
    require_branch_attention(target, args.seq_len + args.horizon)
    batches = read_texts(target, args).split(max(1, args.batch_tokens // args.seq_len))
    generator = torch.Generator().manual_seed(args.seed)
    seconds: dict[str, list[float]] = {"prefill": [], "label": [], "generate": []}
    mismatches: list[dict[str, Any]] = []
    label(target, batches[:1], args.horizon)  # warm-up of every method
    prefill(target, batches[:1])
    decode(target, [batches[0][0, :9]], args)
    for _ in tqdm(range(args.rounds), unit="round"):
        _, elapsed = timed(target, lambda: prefill(target, batches))
        seconds["prefill"].append(elapsed)
        (labels, agreement), elapsed = timed(target, lambda: label(target, batches, args.horizon))
        seconds["label"].append(elapsed)
        rows, positions = sample_positions(labels, args.sample, generator)
        texts = torch.cat(batches)
        prefixes = [texts[row, : position + 1] for row, position in zip(rows.tolist(), positions.tolist(), strict=True)]
        decoded, elapsed = timed(target, lambda prefixes=prefixes: decode(target, prefixes, args))
        seconds["generate"].append(elapsed)
        mismatches += compare(target, prefixes, labels[rows, positions], decoded)
    report = summarise(args, target, seconds, labels.shape[0] * (labels.shape[1] - 1), agreement, mismatches)
    write_json(args.output, report)
    print_table(report, args.output)
    sys.exit(1 if mismatches else 0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/demo_target", help="directory or Hub id")
    parser.add_argument("--texts", type=int, default=32, help="texts of the standard library, each of --seq-len tokens")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--horizon", type=int, default=5, help="tokens labelled after every position")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of text in one forward pass")
    parser.add_argument("--sample", type=int, default=128, help="positions decoded with generate in every round")
    parser.add_argument("--generate-batch", type=int, default=32, help="prefixes in one batch of generate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's own choice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/distill.json"))
    return parser.parse_args()


def read_texts(target: HFTarget, args: argparse.Namespace) -> torch.Tensor:
    """Pack conversations of the standard library's distillation split into rows [text, seq]."""
    ids: list[int] = []
    for conversation in code_conversations("distill", Cuts(seed=args.seed)):
        messages = [{"role": turn.role, "content": turn.content} for turn in conversation.turns]
        ids += target.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        if len(ids) >= args.texts * args.seq_len:
            break
    num_texts = len(ids) // args.seq_len
    return torch.tensor(ids[: num_texts * args.seq_len], device=target.device).view(num_texts, args.seq_len)[: args.texts]


def timed(target: HFTarget, work: Callable[[], Any]) -> tuple[Any, float]:
    """Run `work`; return its result and its seconds, including queued work of an accelerator."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    started = time.perf_counter()
    result = work()
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return result, time.perf_counter() - started


@torch.inference_mode()
def prefill(target: HFTarget, batches: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Compute the first greedy token after every position but the last of each text."""
    head = target.model.get_output_embeddings()
    tokens = []
    for batch in batches:
        hidden_states = target.model.base_model(input_ids=batch, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        tokens.append(torch.cat([head(states).argmax(-1) for states in hidden_states.split(HEAD_CHUNK)]))
    return tokens


def label(target: HFTarget, batches: tuple[torch.Tensor, ...], horizon: int) -> tuple[torch.Tensor, float]:
    """Label every position but the last of each text: [text, seq, horizon].

    Also returns the agreement rate.
    """
    labels, num_agreeing, num_positions = [], 0, 0
    for batch in batches:
        everywhere = torch.ones_like(batch, dtype=torch.bool)
        wanted = everywhere.clone()
        wanted[:, -1] = False
        continuations, _, stats = label_continuations(target, batch, everywhere, wanted, horizon=horizon)
        labels.append(continuations)
        num_agreeing += stats.num_agreeing
        num_positions += stats.num_positions
    return torch.cat(labels), num_agreeing / num_positions


def sample_positions(labels: torch.Tensor, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample rows and positions of `count` labels, the shortest prefix first."""
    candidates = (labels[:, :, 0] != UNKNOWN).nonzero().cpu()
    chosen = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
    chosen = chosen[chosen[:, 1].argsort()].to(labels.device)
    return chosen[:, 0], chosen[:, 1]


@torch.inference_mode()
def decode(target: HFTarget, prefixes: list[torch.Tensor], args: argparse.Namespace) -> torch.Tensor:
    """Decode greedy continuations [position, horizon] with transformers' generate.

    Tokens after a stop token are UNKNOWN.
    """
    continuations = torch.full((len(prefixes), args.horizon), UNKNOWN, device=target.device)
    stop_ids = torch.tensor(target.stop_ids, dtype=torch.long, device=target.device)
    for start in range(0, len(prefixes), args.generate_batch):
        batch = prefixes[start : start + args.generate_batch]
        input_ids = pad_sequence(batch, batch_first=True, padding_side="left")
        mask = pad_sequence([torch.ones_like(prefix) for prefix in batch], batch_first=True, padding_side="left")
        output = target.model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=args.horizon,
            do_sample=False,
            pad_token_id=target.tokenizer.pad_token_id or 0,
        )
        tokens = output[:, input_ids.shape[1] :]
        stops = torch.isin(tokens, stop_ids)
        tokens = tokens.masked_fill(stops.cumsum(1) - stops.long() > 0, UNKNOWN)
        continuations[start : start + len(batch), : tokens.shape[1]] = tokens
    return continuations


@torch.inference_mode()
def compare(
    target: HFTarget, prefixes: list[torch.Tensor], labels: torch.Tensor, decoded: torch.Tensor
) -> list[dict[str, Any]]:
    """List the first differing tokens of each mismatch, and their difference in plain logits."""
    mismatches = []
    for index in (labels != decoded).any(1).nonzero()[:, 0].tolist():
        depth = int((labels[index] != decoded[index]).nonzero()[0])
        ours, theirs = int(labels[index, depth]), int(decoded[index, depth])
        text = torch.cat([prefixes[index], labels[index, :depth]])[None]
        logits = target.model(text, use_cache=False).logits[0, -1]
        margin = (logits[ours] - logits[theirs]).item()
        mismatches.append(
            {"prefix_tokens": len(prefixes[index]), "depth": depth, "label": ours, "generate": theirs, "margin": margin}
        )
    return mismatches


def summarise(
    args: argparse.Namespace,
    target: HFTarget,
    seconds: dict[str, list[float]],
    num_positions: int,
    agreement: float,
    mismatches: list[dict[str, Any]],
) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    expected = 1 + (1 - agreement) * (args.horizon - 1)
    prefills = statistics.median(ours / plain for ours, plain in zip(seconds["label"], seconds["prefill"], strict=True))
    positions_per_second = num_positions / median["label"]
    generate_per_second = args.sample / median["generate"]
    return {
        "num_positions": num_positions,
        "agreement": agreement,
        "prefill_seconds": median["prefill"],
        "label_seconds": median["label"],
        "positions_per_second": positions_per_second,
        "generate_positions_per_second": generate_per_second,
        "speedup_over_generate": positions_per_second / generate_per_second,
        "prefill_equivalents": prefills,
        "expected_prefill_equivalents": expected,
        "prefill_equivalents_over_expected": prefills / expected,
        "num_compared": args.sample * args.rounds,
        "num_mismatches": len(mismatches),
        "mismatches": mismatches,
        "rounds_seconds": seconds,
        "settings": {**vars(args), "output": str(args.output)},
        "num_parameters": target.model.num_parameters(),
        "environment": asdict(describe_environment(target.device)),
    }


def print_table(report: dict[str, Any], output: Path) -> None:
    table = Table(title=f"{report['num_positions']:,} positions, horizon {report['settings']['horizon']}, medians")
    for column in ("method", "positions/s", "prefills", "mismatches"):
        table.add_column(column, justify="left" if column == "method" else "right")
    prefills = f"{report['prefill_equivalents']:.2f} (expected {report['expected_prefill_equivalents']:.2f})"
    table.add_row("label_continuations", f"{report['positions_per_second']:,.0f}", prefills, "")
    table.add_row(
        f"generate (sample of {report['settings']['sample']})",
        f"{report['generate_positions_per_second']:,.1f}",
        "",
        f"{report['num_mismatches']} of {report['num_compared']}",
    )
    console = Console()
    console.print(table)
    console.print(
        f"{report['speedup_over_generate']:.1f} times as fast as generate; at an agreement of {report['agreement']:.3f} "
        f"{report['prefill_equivalents_over_expected']:.2f} times the expected work. Written to {output}"
    )
    for mismatch in report["mismatches"]:
        console.print(f"mismatch: {mismatch}")


if __name__ == "__main__":
    main()
