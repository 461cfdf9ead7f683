"""What a distillation will take, told before it runs: its work is counted, its speed measured on a sample."""

import math
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.table import Table
from tqdm import tqdm

from ..data.types import Example
from ..models.hf_target import HFTarget
from .config import DistillConfig
from .features import bytes_per_token
from .plan import plan_shards
from .run import label_shard, length_batches

MEASURED_SECONDS = 10.0
"""Labelling that the estimate rests on. A first batch, which finds caches cold and kernels unchosen, isn't counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One distillation's work: counted, but for what depends on the target's answers, which a sample of texts has told."""

    num_examples: int
    num_shards: int
    num_tokens: int
    num_positions: int
    dropped: dict[str, int]
    agreement: float
    """Share of the sample's positions where the target says the text's own next token."""
    num_forward_tokens: float
    """Tokens that the target reads: the texts', and those of the branches that leave them."""
    num_passes: int
    """Forward passes, at most: one prefill a batch, and one for every further token of the horizon."""
    sampled_tokens: int
    tokens_per_second: float
    """Of text, in each process."""
    num_processes: int
    seconds: float
    num_bytes: int
    free_bytes: int


def estimate(
    config: DistillConfig,
    target: HFTarget,
    examples: Sequence[Example],
    dropped: Counter[str],
    folder: Path,
    num_processes: int,
) -> Estimate:
    """Count the work of labelling `examples`, and label a sample for some seconds to tell how long all of it takes."""
    measured, sampled_tokens, seconds = _measure(config, target, examples)
    shards = plan_shards(examples, config.shard_examples)
    lengths = [[len(example.input_ids) for example in shard] for shard in shards]
    num_tokens, num_positions = sum(map(sum, lengths)), sum(int(example.wanted.sum()) for example in examples)
    # The process with the most shards is the last to finish.
    share = math.ceil(len(shards) / num_processes) / len(shards)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return Estimate(
        num_examples=len(examples),
        num_shards=len(shards),
        num_tokens=num_tokens,
        num_positions=num_positions,
        dropped=dict(dropped.most_common()),
        agreement=measured["num_agreeing"] / max(1, measured["num_positions"]),
        num_forward_tokens=num_tokens * (1 + measured["num_branch_tokens"] / sampled_tokens),
        num_passes=sum(len(list(length_batches(shard, config.batch_tokens))) for shard in lengths) * config.horizon,
        sampled_tokens=sampled_tokens,
        tokens_per_second=sampled_tokens / seconds,
        num_processes=num_processes,
        seconds=num_tokens * share * seconds / sampled_tokens,
        num_bytes=int(num_tokens * bytes_per_token(config, target, labelled=num_positions / num_tokens)),
        free_bytes=shutil.disk_usage(existing).free,
    )


def estimate_table(estimate: Estimate) -> Table:
    """The estimate as a table to print."""
    table = Table(title="distillation", show_header=False, title_justify="left")
    rows = {
        "examples": f"{estimate.num_examples:,} in {estimate.num_shards:,} shards",
        "dropped": ", ".join(f"{count:,} x {reason}" for reason, count in estimate.dropped.items()) or "nothing",
        "tokens of text": f"{estimate.num_tokens:,}, of which {estimate.num_positions:,} positions are to be labelled",
        "agreement": f"{100 * estimate.agreement:.1f} % of the positions (a sample of {estimate.sampled_tokens:,} tokens)",
        "forwards": (
            f"{estimate.num_forward_tokens:,.0f} tokens ({estimate.num_forward_tokens / estimate.num_tokens:.2f} per token of "
            f"text) in at most {estimate.num_passes:,} passes"
        ),
        "speed": f"{estimate.tokens_per_second:,.0f} tokens of text a second, measured, in each of {estimate.num_processes} "
        + ("process" if estimate.num_processes == 1 else "processes"),
        "time": f"about {tqdm.format_interval(estimate.seconds)} (hours, minutes, seconds)",
        "disk": f"{estimate.num_bytes / 1e6:,.1f} MB; {estimate.free_bytes / 1e9:,.1f} GB are free"
        + (" [bold red]NOT ENOUGH[/]" if estimate.num_bytes > estimate.free_bytes else ""),
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _measure(config: DistillConfig, target: HFTarget, examples: Sequence[Example]) -> tuple[Counter[str], int, float]:
    """Label texts drawn at random until there are enough: the counts, the tokens of text and the seconds."""
    drawn = Random(0).sample(range(len(examples)), len(examples))
    # Batches as they will be: so many texts as fill several, of all lengths.
    mean = sum(len(example.input_ids) for example in examples) / len(examples)
    portion = min(config.shard_examples, max(1, round(config.batch_tokens / mean)))
    with tqdm(disable=True) as progress:
        label_shard(config, target, [examples[index] for index in drawn[:1]], progress)
        counts: Counter[str] = Counter()
        num_tokens, started = 0, time.perf_counter()
        for start in range(0, len(drawn), portion):
            sample = [examples[index] for index in drawn[start : start + portion]]
            _, stats = label_shard(config, target, sample, progress)
            counts.update(
                num_positions=stats.num_positions, num_agreeing=stats.num_agreeing, num_branch_tokens=stats.num_branch_tokens
            )
            num_tokens += stats.num_text_tokens
            if time.perf_counter() - started > MEASURED_SECONDS:
                break
        return counts, num_tokens, time.perf_counter() - started
