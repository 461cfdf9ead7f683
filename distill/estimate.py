"""Estimate of a distillation before it runs: counted work, and speed measured on a sample."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random

from rich.table import Table
from tqdm import tqdm

from ..data.config import DataConfig
from ..data.sources import describe_drops
from ..data.types import Conversation, Example
from ..models.llm.hf_target import HFTarget
from ..models.llm.tensor_parallel import agreed
from .config import DistillConfig
from .label.features import free_bytes, num_bytes
from .label.run import LabellingStats, label_shard, length_batches
from .plan import plan_shards, total
from .regenerate.engines.registry import open_engine
from .regenerate.run import answer_conversations, answer_limits, count_turns

TIME = "time, h:mm:ss"

MEASURED_CONVERSATIONS = 64
"""Most conversations that are answered together while measuring."""

MEASURED_SECONDS = 10.0
"""Seconds of labelling that the estimate is based on, after one batch of warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Work of one distillation; what depends on the answers comes from a sample."""

    num_examples: int
    num_shards: int
    num_tokens: int
    num_positions: int
    dropped: Counter[str]
    sample: LabellingStats
    """Statistics of the texts that were labelled to measure the speed."""
    num_forward_tokens: float
    """Tokens that the target reads: those of the texts, and those of the branches."""
    num_passes: int
    """Upper bound of forward passes: per batch one prefill, and one pass per further token of the
    horizon."""
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
    """Count the work of labelling `examples`, and measure the speed on a sample."""
    sample = _measure(config, target, examples)
    shards = plan_shards(examples, config.shard_examples)
    lengths = [[len(example.input_ids) for example in shard] for shard in shards]
    num_tokens, num_positions = sum(map(sum, lengths)), sum(int(example.wanted.sum()) for example in examples)
    # The process with the most shards finishes last.
    share = math.ceil(len(shards) / num_processes) / len(shards)
    return Estimate(
        num_examples=len(examples),
        num_shards=len(shards),
        num_tokens=num_tokens,
        num_positions=num_positions,
        dropped=dropped,
        sample=sample,
        num_forward_tokens=num_tokens * (1 + sample.num_branch_tokens / sample.num_text_tokens),
        num_passes=sum(len(list(length_batches(shard, config.batch_tokens))) for shard in lengths) * config.horizon,
        num_processes=num_processes,
        seconds=num_tokens * share * sample.seconds / sample.num_text_tokens,
        num_bytes=num_bytes(config, target, examples),
        free_bytes=free_bytes(folder),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerationEstimate:
    """Work of answering all conversations, estimated from the answers to a sample of them."""

    num_conversations: int
    num_turns: int
    dropped: Counter[str]
    num_sampled: int
    """Number of sampled answers."""
    tokens_per_answer: float
    num_answer_tokens: float
    """Tokens of all answers; turns that will be dropped have none."""
    cut_share: float
    tokens_per_second: float
    """Throughput of each process."""
    num_processes: int
    seconds: float


def estimate_regeneration(
    config: DistillConfig,
    data: DataConfig,
    target: HFTarget,
    conversations: Sequence[Conversation],
    dropped: Counter[str],
    num_processes: int,
) -> tuple[RegenerationEstimate, list[Example]]:
    """Answer a sample of the conversations, to estimate the time for all.

    Also returns examples for `estimate`: as many as there will be, which repeat the sampled
    answers.
    """
    # 1. Answer conversations in random order until enough time has passed.
    limits, conversation_sample = answer_limits(config, data, target), Random(0).sample(conversations, len(conversations))
    examples: list[Example] = []
    num_conversations = num_answers = num_cut = num_tokens = 0
    portion = min(config.shard_examples, MEASURED_CONVERSATIONS)
    with open_engine(config, target, limits) as engine, tqdm(disable=True) as progress:
        started = time.perf_counter()
        for start in range(0, len(conversation_sample), portion):
            sample = conversation_sample[start : start + portion]
            answered, counts = answer_conversations(sample, target, engine, limits=limits, seed=config.seed, progress=progress)
            num_conversations += len(sample)
            num_answers, num_cut = num_answers + counts.num_answers, num_cut + counts.num_cut
            num_tokens += counts.num_tokens
            examples += [answered_example.to_example() for answered_example in answered]
            if _is_enough(target, time.perf_counter() - started):
                break
        seconds = time.perf_counter() - started
    if not examples:
        raise ValueError(f"none of the target's answers to {num_conversations} conversations can be used")
    # 2. Scale up to all conversations.
    scale = len(conversations) / num_conversations
    share = math.ceil(math.ceil(len(conversations) / config.shard_examples) / num_processes) * config.shard_examples
    estimated = RegenerationEstimate(
        num_conversations=len(conversations),
        num_turns=count_turns(conversations),
        dropped=dropped,
        num_sampled=num_answers,
        tokens_per_answer=num_tokens / num_answers,
        num_answer_tokens=num_tokens * scale,
        cut_share=num_cut / num_answers,
        tokens_per_second=num_tokens / seconds,
        num_processes=num_processes,
        # The process with the most shards finishes last.
        seconds=seconds / num_conversations * min(len(conversations), share),
    )
    return estimated, [examples[index % len(examples)] for index in range(round(len(examples) * scale))]


def regeneration_table(estimate: RegenerationEstimate) -> Table:
    """Return the estimate as a table to print."""
    return make_table(
        "regeneration",
        {
            "conversations": f"{estimate.num_conversations:,} with {estimate.num_turns:,} answers",
            "dropped": describe_drops(estimate.dropped),
            "tokens of answers": f"about {estimate.num_answer_tokens:,.0f}, with at most as many forward passes, besides "
            "those of the prompts",
            "length": f"{estimate.tokens_per_answer:.0f} tokens per answer, {100 * estimate.cut_share:.0f} % cut by the limit "
            f"(a sample of {estimate.num_sampled:,})",
            "speed": f"{estimate.tokens_per_second:,.0f} tokens of answers per second, {_measured(estimate.num_processes)}",
            TIME: format_time(estimate.seconds),
        },
    )


def estimate_table(estimate: Estimate) -> Table:
    """Return the estimate as a table to print."""
    sample, speed = estimate.sample, estimate.sample.num_text_tokens / estimate.sample.seconds
    return make_table(
        "labels",
        {
            "examples": f"{estimate.num_examples:,} in {estimate.num_shards:,} shards",
            "dropped": describe_drops(estimate.dropped),
            "tokens of text": f"{estimate.num_tokens:,}, of which {estimate.num_positions:,} positions will be labelled",
            "agreement": f"{100 * sample.agreement:.1f} % of the positions (a sample of {sample.num_text_tokens:,} tokens)",
            "forward passes": f"{estimate.num_forward_tokens:,.0f} tokens, "
            f"{estimate.num_forward_tokens / estimate.num_tokens:.2f} per token of text, in at most "
            f"{estimate.num_passes:,} passes",
            "speed": f"{speed:,.0f} tokens of text per second, {_measured(estimate.num_processes)}",
            TIME: format_time(estimate.seconds),
            "disk": f"{estimate.num_bytes / 1e6:,.1f} MB; {estimate.free_bytes / 1e9:,.1f} GB are free"
            + (" [bold red]NOT ENOUGH[/]" if estimate.num_bytes > estimate.free_bytes else ""),
        },
    )


def make_table(title: str, rows: dict[str, str]) -> Table:
    """Make a table of names and texts, as a plan prints it."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def format_time(seconds: float) -> str:
    """Format an estimated time, such as `about 1:02:03`."""
    return f"about {timedelta(seconds=round(seconds))}"


def _measured(num_processes: int) -> str:
    return "measured" if num_processes == 1 else f"measured, in each of {num_processes} processes"


def _is_enough(target: HFTarget, seconds: float) -> bool:
    enough = seconds > MEASURED_SECONDS
    return agreed(enough, target.device) if target.tensor_parallel else enough


def _measure(config: DistillConfig, target: HFTarget, examples: Sequence[Example]) -> LabellingStats:
    """Label randomly sampled texts for MEASURED_SECONDS, and return the statistics."""
    drawn = Random(0).sample(range(len(examples)), len(examples))
    # 1. Batches like the real ones: several batches of texts of all lengths.
    mean = sum(len(example.input_ids) for example in examples) / len(examples)
    portion = min(config.shard_examples, max(1, round(config.batch_tokens / mean)))
    # 2. Warm up with one text, then measure.
    with tqdm(disable=True) as progress:
        label_shard(config, target, [examples[index] for index in drawn[:1]], progress)
        labelled: list[LabellingStats] = []
        for start in range(0, len(drawn), portion):
            sample = [examples[index] for index in drawn[start : start + portion]]
            labelled.append(label_shard(config, target, sample, progress)[1])
            if _is_enough(target, sum(stats.seconds for stats in labelled)):
                break
    return total(LabellingStats, labelled)
