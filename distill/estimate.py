"""What a distillation will take, told before it runs: its work is counted, its speed measured on a sample."""

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
from ..models.target.hf_target import HFTarget
from ..models.target.tensor_parallel import agreed
from .config import DistillConfig
from .label.features import free_bytes, num_bytes
from .label.run import LabellingStats, label_shard, length_batches
from .plan import plan_shards, total
from .regenerate.engines.registry import open_engine
from .regenerate.run import answer_conversations, answer_limits, count_turns

TIME = "time, h:mm:ss"

MEASURED_CONVERSATIONS = 64
"""Conversations answered together while measuring, as far as the engine likes to."""

MEASURED_SECONDS = 10.0
"""Labelling that the estimate rests on. A first batch, which finds caches cold and kernels unchosen, isn't counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One distillation's work: counted, but for what depends on the target's answers, which a sample of texts has told."""

    num_examples: int
    num_shards: int
    num_tokens: int
    num_positions: int
    dropped: Counter[str]
    sample: LabellingStats
    """Of the texts that were labelled to measure the speed."""
    num_forward_tokens: float
    """Tokens that the target reads: the texts', and those of the branches that leave them."""
    num_passes: int
    """Forward passes, at most: one prefill a batch, and one for every further token of the horizon."""
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
    sample = _measure(config, target, examples)
    shards = plan_shards(examples, config.shard_examples)
    lengths = [[len(example.input_ids) for example in shard] for shard in shards]
    num_tokens, num_positions = sum(map(sum, lengths)), sum(int(example.wanted.sum()) for example in examples)
    # The process with the most shards is the last to finish.
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
    """What it takes to have the target answer all conversations, from its answers to a sample of them."""

    num_conversations: int
    num_turns: int
    dropped: Counter[str]
    num_sampled: int
    """Answers that the estimate rests on."""
    tokens_per_answer: float
    num_answer_tokens: float
    """Of all answers; turns that will be dropped have none."""
    cut_share: float
    tokens_per_second: float
    """In each process."""
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
    """Have the target answer some conversations, to tell how long all take; and as many examples as there will be, made of
    those answers again and again, for `estimate`."""
    limits, drawn = answer_limits(config, data, target), Random(0).sample(conversations, len(conversations))
    examples: list[Example] = []
    num_conversations = num_answers = num_cut = num_tokens = 0
    portion = min(config.shard_examples, MEASURED_CONVERSATIONS)
    with open_engine(config, target, limits) as engine, tqdm(disable=True) as progress:
        started = time.perf_counter()
        for start in range(0, len(drawn), portion):
            sample = drawn[start : start + portion]
            answered, counts = answer_conversations(sample, target, engine, limits=limits, seed=config.seed, progress=progress)
            num_conversations += len(sample)
            num_answers, num_cut = num_answers + counts.num_answers, num_cut + counts.num_cut
            num_tokens += counts.num_tokens
            examples += [each.to_example() for each in answered]
            if _is_enough(target, time.perf_counter() - started):
                break
        seconds = time.perf_counter() - started
    if not examples:
        raise ValueError(f"the target gave none of {num_conversations} conversations an answer that can be used")
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
        # The process with the most shards is the last to finish.
        seconds=seconds / num_conversations * min(len(conversations), share),
    )
    return estimated, [examples[index % len(examples)] for index in range(round(len(examples) * scale))]


def regeneration_table(estimate: RegenerationEstimate) -> Table:
    """The estimate as a table to print."""
    return make_table(
        "regeneration",
        {
            "conversations": f"{estimate.num_conversations:,} with {estimate.num_turns:,} answers",
            "dropped": describe_drops(estimate.dropped),
            "tokens of answers": f"about {estimate.num_answer_tokens:,.0f}, in as many forwards at most, beside those of "
            "the prompts",
            "length": f"{estimate.tokens_per_answer:.0f} tokens an answer, {100 * estimate.cut_share:.0f} % cut by the limit "
            f"(a sample of {estimate.num_sampled:,})",
            "speed": f"{estimate.tokens_per_second:,.0f} tokens of answers a second, {_measured(estimate.num_processes)}",
            TIME: format_time(estimate.seconds),
        },
    )


def estimate_table(estimate: Estimate) -> Table:
    """The estimate as a table to print."""
    sample, speed = estimate.sample, estimate.sample.num_text_tokens / estimate.sample.seconds
    return make_table(
        "labels",
        {
            "examples": f"{estimate.num_examples:,} in {estimate.num_shards:,} shards",
            "dropped": describe_drops(estimate.dropped),
            "tokens of text": f"{estimate.num_tokens:,}, of which {estimate.num_positions:,} positions are to be labelled",
            "agreement": f"{100 * sample.agreement:.1f} % of the positions (a sample of {sample.num_text_tokens:,} tokens)",
            "forwards": f"{estimate.num_forward_tokens:,.0f} tokens, {estimate.num_forward_tokens / estimate.num_tokens:.2f} "
            f"per token of text, in at most {estimate.num_passes:,} passes",
            "speed": f"{speed:,.0f} tokens of text a second, {_measured(estimate.num_processes)}",
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
    """Label texts drawn at random until there are enough."""
    drawn = Random(0).sample(range(len(examples)), len(examples))
    # Batches as they will be: so many texts as fill several, of all lengths.
    mean = sum(len(example.input_ids) for example in examples) / len(examples)
    portion = min(config.shard_examples, max(1, round(config.batch_tokens / mean)))
    with tqdm(disable=True) as progress:
        label_shard(config, target, [examples[index] for index in drawn[:1]], progress)
        labelled: list[LabellingStats] = []
        for start in range(0, len(drawn), portion):
            sample = [examples[index] for index in drawn[start : start + portion]]
            labelled.append(label_shard(config, target, sample, progress)[1])
            if _is_enough(target, sum(stats.seconds for stats in labelled)):
                break
    return total(LabellingStats, labelled)
