"""The stage: conversations in, shards of labelled examples out; skips what is complete, and goes on where it was
interrupted."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.chat import encode_conversations
from ..data.config import DataConfig
from ..data.files import parse_dataclass, read_json, write_json
from ..data.manifest import MANIFEST_FILE, Manifest, ShardEntry, examples_sha256, load_manifest, save_manifest
from ..data.shards import read_entry, verify_shard, write_shard
from ..data.sources import describe_drops, load_conversations
from ..data.types import DistilledExample, Example
from ..models.hf_target import HFTarget
from .config import DistillConfig
from .continuations import label_continuations, require_branch_attention

logger = logging.getLogger(__name__)

STATS_FILE = "stats.json"

SUSPICIOUS_AGREEMENT = 0.15
"""A language model says the next token of a text that is meant for it more often than this."""

GREEDY_AGREEMENT = 0.95
"""And of its own greedy answers it says all but a few, which two engines' rounding explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStats:
    """What labelling one shard took (see `LabelStats`); `seconds` are those of labelling, not of reading and writing."""

    num_text_tokens: int
    num_positions: int
    num_agreeing: int
    num_branch_tokens: int
    seconds: float


def distill(
    config: DistillConfig,
    data: DataConfig,
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: Path,
    accelerator: Accelerator,
    examples: list[Example] | None = None,
) -> Manifest:
    """Label all examples of `data` with the target's own continuations and return the manifest of the shards in `output_dir`.

    `examples` are labelled in place of the data's own: those that the target wrote itself, say (see `regenerate`).
    Shard k is the work of process k modulo their number. Complete shards are kept, so an interrupted run loses at most the
    shard that each process was at. Raises ValueError before any long work where the target can't be distilled, the folder
    holds another run's shards, or one of its shards is damaged.
    """
    examples = load_examples(data, tokenizer) if examples is None else examples
    longest = max(len(example.input_ids) for example in examples)
    require_branch_attention(target, longest + max(config.horizon - 2, 0))
    plan = [examples[start : start + config.shard_examples] for start in range(0, len(examples), config.shard_examples)]
    manifest = Manifest(
        target=target.identity,
        horizon=config.horizon,
        features=config.features,
        data_sha256=examples_sha256(examples),
        max_length=data.max_length,
        shards=[],
        complete=False,
    )
    require_same_run(output_dir, manifest)
    own = range(accelerator.process_index, len(plan), accelerator.num_processes)
    pending = [index for index in own if not _is_complete(output_dir, index, plan[index])]
    accelerator.wait_for_everyone()  # all have looked before anybody writes
    if accelerator.is_main_process and not _is_manifest_complete(output_dir, len(plan)):
        _remove_leftovers(output_dir)
        save_manifest(output_dir, manifest)
    accelerator.wait_for_everyone()
    if pending:
        _label_shards(config, target, plan, own, pending, output_dir, show_progress=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if _is_manifest_complete(output_dir, len(plan)):
            logger.info("distillation in %s is already complete: %d shards, nothing to do", output_dir, len(plan))
        else:
            _finish(output_dir, manifest, len(plan), is_own_greedy=config.mode == "regenerate" and config.temperature == 0)
    accelerator.wait_for_everyone()
    return load_manifest(output_dir)


def load_examples(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """The examples of `data` in their fixed order. What was dropped on the way is logged; none left is a ValueError."""
    conversations, unread = load_conversations(data)
    examples, unfit = encode_conversations(conversations, tokenizer, data.max_length)
    logger.info(
        "%d conversations | %d examples, %d tokens | dropped: %s",
        len(conversations),
        len(examples),
        sum(len(example.input_ids) for example in examples),
        describe_drops(unread + unfit),
    )
    return examples


def require_same_run(output_dir: Path, manifest: Manifest) -> None:
    """Raise ValueError, naming every differing field, where `output_dir` holds shards of another run than `manifest`
    describes."""
    remedy = "Choose another output directory, or delete this one to distil anew"
    if not (output_dir / MANIFEST_FILE).exists():
        if any(output_dir.glob("shard-*")):
            raise ValueError(f"{output_dir} holds shards but no {MANIFEST_FILE}, so nobody knows whose they are. {remedy}")
        return
    found = load_manifest(output_dir)
    differences = [f"target.{difference}" for difference in found.target.differences(manifest.target)]
    differences += [
        f"{name}: {getattr(found, name)}, {getattr(manifest, name)}"
        for name in ("horizon", "features", "data_sha256", "max_length")
        if getattr(found, name) != getattr(manifest, name)
    ]
    if differences:
        raise ValueError(
            f"{output_dir} holds the distillation of another run. Differing (there, here): {'; '.join(differences)}. {remedy}"
        )


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indexes of texts in batches of at most `batch_tokens` tokens, padding included.

    Longest first, so that memory runs out early or never. For example, lengths 2 5 4 1 under 8 tokens give [1], [2, 0], [3]. A
    text longer than `batch_tokens` goes alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    while order:
        size = max(1, batch_tokens // lengths[order[0]])
        yield order[:size]
        order = order[size:]


def label_shard(
    config: DistillConfig, target: HFTarget, examples: Sequence[Example], progress: tqdm
) -> tuple[list[DistilledExample], ShardStats]:
    """The examples of one shard with their labels, in their order. `progress` counts tokens of text."""
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    labelled: dict[int, DistilledExample] = {}
    for batch in length_batches([len(example.input_ids) for example in examples], config.batch_tokens):
        input_ids = pad_sequence([examples[index].input_ids.long() for index in batch], batch_first=True)
        wanted = pad_sequence([examples[index].wanted for index in batch], batch_first=True)
        attention_mask = pad_sequence([torch.ones_like(examples[index].loss_mask) for index in batch], batch_first=True)
        continuations, hidden_states, stats = label_continuations(
            target,
            input_ids.to(target.device),
            attention_mask.to(target.device),
            wanted.to(target.device),
            horizon=config.horizon,
            return_hidden_states=config.features == "last_hidden",
        )
        continuations = continuations.cpu()
        if hidden_states is not None:
            hidden_states = hidden_states.to("cpu", torch.bfloat16)
        for row, index in enumerate(batch):
            num_tokens = len(examples[index].input_ids)
            labelled[index] = DistilledExample(
                example=examples[index],
                continuations=continuations[row, :num_tokens],
                hidden_states=None if hidden_states is None else hidden_states[row, :num_tokens],
            )
        counts.update(asdict(stats))
        progress.update(stats.num_text_tokens)
    shard_stats = ShardStats(**counts, seconds=time.perf_counter() - started)
    return [labelled[index] for index in range(len(examples))], shard_stats


def _label_shards(
    config: DistillConfig,
    target: HFTarget,
    plan: Sequence[Sequence[Example]],
    own: Sequence[int],
    pending: Sequence[int],
    output_dir: Path,
    *,
    show_progress: bool,
) -> None:
    """Label and write this process's pending shards. The progress bar counts the tokens of all its shards, finished ones
    too."""
    num_tokens = {index: sum(len(example.input_ids) for example in plan[index]) for index in own}
    total = sum(num_tokens.values())
    finished = total - sum(num_tokens[index] for index in pending)
    logger.info("%d of %d shards of this process are to be labelled, %d tokens", len(pending), len(own), total - finished)
    with tqdm(
        total=total, initial=finished, unit="tok", unit_scale=True, desc="distill", disable=not show_progress
    ) as progress:
        for index in pending:
            labelled, stats = label_shard(config, target, plan[index], progress)
            # Before the shard, whose sidecar then vouches for both.
            write_json(_stats_path(output_dir, index), asdict(stats))
            write_shard(output_dir, index, labelled)


def _finish(output_dir: Path, manifest: Manifest, num_shards: int, *, is_own_greedy: bool) -> None:
    """Merge all shards' entries into the complete manifest, after what they took into the statistics."""
    entries = [entry for index in range(num_shards) if (entry := read_entry(output_dir, index)) is not None]
    assert len(entries) == num_shards, "every process has finished its shards"
    shards = [_read_stats(output_dir, index) for index in range(num_shards)]
    num_positions = sum(shard.num_positions for shard in shards)
    seconds = sum(shard.seconds for shard in shards)
    statistics = {
        "num_examples": sum(len(entry.ids) for entry in entries),
        "num_text_tokens": sum(shard.num_text_tokens for shard in shards),
        "num_positions": num_positions,
        "agreement": sum(shard.num_agreeing for shard in shards) / max(1, num_positions),
        "num_branch_tokens": sum(shard.num_branch_tokens for shard in shards),
        "process_seconds": seconds,
        "positions_per_process_second": num_positions / seconds,
    }
    write_json(output_dir / STATS_FILE, statistics)
    save_manifest(output_dir, replace(manifest, shards=entries, complete=True))
    logger.info(
        "labelled %d positions of %d examples, %.0f per second and process; the target agrees with %.1f %% of the text",
        num_positions,
        statistics["num_examples"],
        statistics["positions_per_process_second"],
        100 * statistics["agreement"],
    )
    if statistics["agreement"] < SUSPICIOUS_AGREEMENT:
        logger.warning(
            "the target agrees with so little of the text that tokenizer, chat template or data may be another model's: check "
            "them before you train"
        )
    elif is_own_greedy and statistics["agreement"] < GREEDY_AGREEMENT:
        logger.warning(
            "the answers were to be the target's own greedy ones, and it often disagrees: does the engine run another model, "
            "in another precision, or sample? Check it before you train"
        )


def _is_complete(output_dir: Path, index: int, examples: Sequence[Example]) -> bool:
    """Whether shard `index` is there. Raises ValueError where it is damaged or holds other examples than planned."""
    entry: ShardEntry | None = read_entry(output_dir, index)
    if entry is None:
        return False
    if entry.ids != [example.id for example in examples]:
        raise ValueError(
            f"{output_dir / entry.file} holds {len(entry.ids)} examples, and this run plans others for it ({len(examples)}): "
            "distill.shard_examples was changed. Set it back, choose another output directory, or delete this one"
        )
    verify_shard(output_dir, entry)
    try:
        _read_stats(output_dir, index)
    except (ValueError, OSError):
        logger.warning("%s is missing or damaged: the shard is made anew", _stats_path(output_dir, index))
        return False
    return True


def _is_manifest_complete(output_dir: Path, num_shards: int) -> bool:
    """Whether the manifest says complete, and no shard was deleted since (to be made anew)."""
    if not (output_dir / MANIFEST_FILE).exists() or not (manifest := load_manifest(output_dir)).complete:
        return False
    return [read_entry(output_dir, index) for index in range(num_shards)] == manifest.shards


def _remove_leftovers(output_dir: Path) -> None:
    """Delete the half-written files of killed processes."""
    for path in output_dir.glob(".*.tmp"):
        path.unlink()


def _read_stats(output_dir: Path, index: int) -> ShardStats:
    path = _stats_path(output_dir, index)
    return parse_dataclass(ShardStats, read_json(path), path)


def _stats_path(output_dir: Path, index: int) -> Path:
    return output_dir / f"shard-{index:05d}.stats.json"
