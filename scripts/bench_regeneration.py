"""Benchmark of regeneration: tokens per second of each engine, and equal answers.

    python scripts/bench_regeneration.py --drafter outputs/demo/drafter

All engines answer the same prompts of the standard library. They take turns (A B C A B C ...) after
a warm-up on a few prompts. The report has medians over the rounds, and for each engine the median
of its ratio to the plain decoder in the same round. Both are by wall-clock time and by processor
time, which other processes disturb less. Opening an engine is not timed. Answers that differ from
the plain decoder's are counted; in greedy decoding only rounding errors cause them.
"""

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from outrider.data.chat import encode_prompt
from outrider.data.config import DataConfig
from outrider.data.files import write_json
from outrider.data.sources import load_conversations
from outrider.distill.config import DistillConfig
from outrider.distill.regenerate.dialogues import answer_seed, questions
from outrider.distill.regenerate.engine import Request
from outrider.distill.regenerate.engines.registry import open_engine
from outrider.distill.regenerate.run import answer_limits
from outrider.eval.measure.environment import describe_environment
from outrider.models.drafters.saved.loading import read_drafter_config
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

Seconds = tuple[float, float]
"""Wall-clock seconds and processor seconds."""

PLAIN = "decoder"
WARM_UP = 4


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    target = load_target(TargetConfig(name_or_path=args.target, dtype=args.dtype))
    data = DataConfig(
        source="stdlib",
        split="distill",
        limit=args.limit,
        max_length=args.max_length,
        prompt_chars_min=60,
        prompt_chars_max=300,
    )
    requests = first_requests(target, data)
    engines = configurations(args)
    runs: dict[str, list[Seconds]] = {name: [] for name in engines}
    texts: dict[str, dict[str, list[int]]] = {}
    for name in engines:
        answer(engines[name], data, target, requests[:WARM_UP])
    for _ in tqdm(range(args.rounds), unit="round"):
        for name, config in engines.items():
            texts[name], seconds = answer(config, data, target, requests)
            runs[name].append(seconds)
    rows = [summarise(name, runs, texts) for name in engines]
    report = {
        # Paths of drafters and records are private.
        "options": {key: value for key, value in vars(args).items() if key not in ("output", "drafter")},
        "num_requests": len(requests),
        "mean_prompt_tokens": statistics.mean(len(request.prompt_ids) for request in requests),
        "engines": rows,
        "environment": asdict(describe_environment(target.device)),
    }
    write_json(args.output, report)
    print_table(rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/demo_target", help="directory or Hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafter", action="append", default=[], help="directory of a trained drafter; may be repeated")
    parser.add_argument("--setting", type=yaml.safe_load, default={}, help="run-time options of the drafters")
    parser.add_argument(
        "--engine", action="append", default=[PLAIN], help="engine to compare with the decoder; may be repeated"
    )
    parser.add_argument("--limit", type=int, default=100, help="number of prompts")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's own choice")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/regeneration.json"))
    return parser.parse_args()


def configurations(args: argparse.Namespace) -> dict[str, DistillConfig]:
    """Return the configurations of the engines by name, the plain decoder first."""
    common: dict[str, Any] = {
        "mode": "regenerate",
        "max_new_tokens": args.max_new_tokens,
        "decode_batch_size": args.batch_size,
        "temperature": args.temperature,
    }
    # the engine batch has a memory budget instead
    by_memory = {**common, "decode_batch_size": None}
    configs = {name: DistillConfig(engine=name, **(by_memory if name == "batch" else common)) for name in args.engine}
    for folder in args.drafter:
        name = f"decoder with {read_drafter_config(Path(folder)).kind}"
        if name in configs:
            raise SystemExit(f"there are two drafters of one kind, and {name} would stand for both; give one of them")
        configs[name] = DistillConfig(drafter=folder, drafter_settings=args.setting, **common)
    return configs


def first_requests(target: HFTarget, data: DataConfig) -> list[Request]:
    """Make a request from the first question of every conversation."""
    conversations, _ = load_conversations(data)
    return [
        Request(
            id=conversation.id,
            prompt_ids=encode_prompt(questions(conversation.turns)[0], target.tokenizer)[0],
            seed=answer_seed(0, conversation.id, 0),
        )
        for conversation in conversations
    ]


def answer(
    config: DistillConfig, data: DataConfig, target: HFTarget, requests: list[Request]
) -> tuple[dict[str, list[int]], Seconds]:
    """Answer all requests; return the answers by request and the seconds."""
    with open_engine(config, target, answer_limits(config, data, target)) as engine:
        started = time.perf_counter(), time.process_time()
        texts = {answer.id: answer.tokens.tolist() for answer in engine.answer(requests)}
        return texts, (time.perf_counter() - started[0], time.process_time() - started[1])


def summarise(name: str, runs: dict[str, list[Seconds]], texts: dict[str, dict[str, list[int]]]) -> dict[str, Any]:
    """Make an engine's row of the table."""
    num_tokens, plain_tokens = (sum(map(len, texts[engine].values())) for engine in (name, PLAIN))
    row: dict[str, Any] = {
        "engine": name,
        "num_tokens": num_tokens,
        "answers_unlike_plain": sum(texts[name][id] != tokens for id, tokens in texts[PLAIN].items()),
    }
    for index, kind in enumerate(("second", "processor_second")):
        speeds = [num_tokens / seconds[index] for seconds in runs[name]]
        ratios = [speed / (plain_tokens / seconds[index]) for speed, seconds in zip(speeds, runs[PLAIN], strict=True)]
        row |= {f"tokens_per_{kind}": statistics.median(speeds), f"tokens_per_{kind}_by_round": speeds}
        row |= {f"ratio_per_{kind}": statistics.median(ratios), f"ratio_per_{kind}_by_round": ratios}
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table("engine", "tokens/s", "x plain", "tokens/processor s", "x plain", "tokens", "answers unlike plain")
    for row in rows:
        cells = [row["engine"]]
        for kind in ("second", "processor_second"):
            ratios = row[f"ratio_per_{kind}_by_round"]
            cells.append(f"{row[f'tokens_per_{kind}']:.0f}")
            cells.append(f"{row[f'ratio_per_{kind}']:.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
        table.add_row(*cells, str(row["num_tokens"]), str(row["answers_unlike_plain"]))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
