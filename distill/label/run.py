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

from ...data.chat import encode_conversations
from ...data.config import DataConfig
from ...data.decontamination import PromptOverlap
from ...data.files import read_dataclass, write_json
from ...data.manifest import MANIFEST_FILE, Manifest, ShardEntry, examples_sha256, load_manifest, save_manifest
from ...data.shards import forget, is_written, read_entry, verify_shard, write_shard
from ...data.sources import describe_drops, load_conversations
from ...data.types import DistilledExample, Example
from ...models.target.hf_target import HFTarget
from ...models.target.tensor_parallel import Worker
from ..config import DistillConfig
from ..plan import Shards, deal, peak_memory_bytes, pending_shards, plan_sha256, plan_shards
from .continuations import label_continuations, require_branch_attention
from .features import require_features, require_space, stored_example

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
    *,
    examples: list[Example] | None = None,
    overlap: PromptOverlap | None = None,
) -> Manifest:
    """Label all examples of `data` with the target's own continuations and return the manifest of the shards in `output_dir`.

    `examples` are labelled in place of the data's own: those that the target wrote itself, say (see `regenerate`).
    Conversations with an `overlap` are left out, and counted: the evaluation asks their prompts too.
    Complete shards are kept, and the others dealt out among the processes (see `plan`): an interrupted run loses at most the
    shard that each process was at, and may go on with another number of processes. Raises ValueError before any long work where
    the target can't be distilled, the folder holds another run's shards, one of its shards is damaged, or the disk has no room
    for what is to be stored.
    """
    dropped: Counter[str] = Counter()
    if examples is None:
        examples, dropped = load_examples(data, tokenizer, overlap)
    longest = max(len(example.input_ids) for example in examples)
    require_branch_attention(target, longest + max(config.horizon - 2, 0))
    require_features(config, target)
    plan = plan_shards(examples, config.shard_examples)
    manifest = describe_labels(config, data, target, plan)
    require_same_run(output_dir, manifest)
    pending = pending_shards(
        accelerator,
        len(plan),
        check=lambda index: _check_shard(output_dir, index, plan[index]),
        is_written=lambda index: is_written(output_dir, index),
    )
    require_space(config, target, [example for index in pending for example in plan[index]], output_dir)
    if accelerator.is_main_process and not _is_manifest_complete(output_dir, len(plan)):
        _remove_leftovers(output_dir)
        save_manifest(output_dir, manifest)
    accelerator.wait_for_everyone()
    worker = Worker.of(accelerator, tensor_parallel=target.tensor_parallel)
    if own := deal(pending, worker):
        _make_shards(config, target, plan, pending, own, output_dir, accelerator, worker)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if _is_manifest_complete(output_dir, len(plan)):
            logger.info("distillation in %s is already complete: %d shards, nothing to do", output_dir, len(plan))
        else:
            is_own_greedy = config.mode == "regenerate" and config.temperature == 0
            _finish(output_dir, manifest, len(plan), dropped, target.device, is_own_greedy=is_own_greedy)
    accelerator.wait_for_everyone()
    return load_manifest(output_dir)


def describe_labels(config: DistillConfig, data: DataConfig, target: HFTarget, plan: Shards) -> Manifest:
    """What decides these shards, before there is any."""
    data_sha256 = examples_sha256(example for shard in plan for example in shard)
    return Manifest(
        target=target.identity,
        target_dtype=str(target.dtype),
        horizon=config.horizon,
        features=config.features,
        feature_layers=sorted(config.feature_layers),
        features_dtype=config.features_dtype,
        top_logprobs=config.top_logprobs,
        data_sha256=data_sha256,
        plan_sha256=plan_sha256(plan, data_sha256),
        max_length=data.max_length,
        shards=[],
        complete=False,
    )


def missing_examples(
    config: DistillConfig, data: DataConfig, target: HFTarget, examples: Sequence[Example], output_dir: Path
) -> list[Example]:
    """The examples that are still to be labelled. Raises ValueError where the folder holds another run's shards."""
    plan = plan_shards(examples, config.shard_examples)
    require_same_run(output_dir, describe_labels(config, data, target, plan))
    return [example for index, shard in enumerate(plan) if not is_written(output_dir, index) for example in shard]


def load_examples(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, overlap: PromptOverlap | None = None
) -> tuple[list[Example], Counter[str]]:
    """The examples of `data` in their fixed order, and how many records were dropped on the way by reason, which is logged too.
    None left is a ValueError."""
    conversations, unread = load_conversations(data, overlap)
    examples, unfit = encode_conversations(conversations, tokenizer, data.max_length)
    logger.info(
        "%d conversations | %d examples, %d tokens | dropped: %s",
        len(conversations),
        len(examples),
        sum(len(example.input_ids) for example in examples),
        describe_drops(unread + unfit),
    )
    return examples, unread + unfit


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
        for name in (
            "target_dtype",
            "horizon",
            "features",
            "feature_layers",
            "features_dtype",
            "top_logprobs",
            "data_sha256",
            "plan_sha256",
            "max_length",
        )
        if getattr(found, name) != getattr(manifest, name)
    ]
    if found.data_sha256 == manifest.data_sha256 and found.plan_sha256 != manifest.plan_sha256:
        differences.append("the same examples in shards of another size: set distill.shard_examples back")
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
        continuations, features, stats = label_continuations(
            target,
            input_ids.to(target.device),
            attention_mask.to(target.device),
            wanted.to(target.device),
            horizon=config.horizon,
            feature_layers=tuple(config.feature_layers),
            top_k=config.top_logprobs,
        )
        continuations = continuations.cpu()
        for row, index in enumerate(batch):
            labelled[index] = stored_example(config, examples[index], continuations[row], features, row)
        counts.update(asdict(stats))
        progress.update(stats.num_text_tokens)
    shard_stats = ShardStats(**counts, seconds=time.perf_counter() - started)
    return [labelled[index] for index in range(len(examples))], shard_stats


def _make_shards(
    config: DistillConfig,
    target: HFTarget,
    plan: Shards,
    pending: Sequence[int],
    own: Sequence[int],
    output_dir: Path,
    accelerator: Accelerator,
    worker: Worker,
) -> None:
    """Label and write this worker's `own` of the `pending` shards."""
    logger.info("%d of %d shards are to be labelled, %d by this process", len(pending), len(plan), len(own))
    finished = sum(map(_num_tokens, plan)) - sum(_num_tokens(plan[index]) for index in pending)
    finished //= worker.num_workers  # its share of what there was
    with tqdm(
        total=finished + sum(_num_tokens(plan[index]) for index in own),
        initial=finished,
        unit="tok",
        unit_scale=True,
        desc="distill",
        disable=not accelerator.is_main_process,
    ) as progress:
        for index in own:
            labelled, stats = label_shard(config, target, plan[index], progress)
            if worker.speaks:
                # Before the shard, whose sidecar then vouches for both.
                write_json(_stats_path(output_dir, index), asdict(stats))
                write_shard(output_dir, index, labelled)


def _num_tokens(examples: Sequence[Example]) -> int:
    return sum(len(example.input_ids) for example in examples)


def _finish(
    output_dir: Path, manifest: Manifest, num_shards: int, dropped: Counter[str], device: torch.device, *, is_own_greedy: bool
) -> None:
    """Merge all shards' entries into the complete manifest, after what they took into the statistics."""
    entries = [entry for index in range(num_shards) if (entry := read_entry(output_dir, index)) is not None]
    assert len(entries) == num_shards, "every process has finished its shards"
    shards = [_read_stats(output_dir, index) for index in range(num_shards)]
    num_positions = sum(shard.num_positions for shard in shards)
    seconds = sum(shard.seconds for shard in shards)
    agreement = sum(shard.num_agreeing for shard in shards) / max(1, num_positions)
    statistics = {
        "num_examples": sum(len(entry.ids) for entry in entries),
        "num_text_tokens": sum(shard.num_text_tokens for shard in shards),
        "num_positions": num_positions,
        "agreement": agreement,
        "num_branch_tokens": sum(shard.num_branch_tokens for shard in shards),
        "process_seconds": seconds,
        "positions_per_process_second": num_positions / seconds,
        "peak_memory_bytes": peak_memory_bytes(device),
        "dropped": dict(dropped.most_common()),
    }
    write_json(output_dir / STATS_FILE, statistics)
    save_manifest(output_dir, replace(manifest, shards=entries, complete=True))
    logger.info(
        "labelled %d positions of %d examples, %.0f per second and process; the target agrees with %.1f %% of the text",
        num_positions,
        statistics["num_examples"],
        statistics["positions_per_process_second"],
        100 * agreement,
    )
    if agreement < SUSPICIOUS_AGREEMENT:
        logger.warning(
            "the target agrees with so little of the text that tokenizer, chat template or data may be another model's: check "
            "them before you train"
        )
    elif is_own_greedy and agreement < GREEDY_AGREEMENT:
        logger.warning(
            "the answers were to be the target's own greedy ones, and it often disagrees: does the engine run another model, "
            "in another precision, or sample? Check it before you train"
        )


def _check_shard(output_dir: Path, index: int, examples: Sequence[Example]) -> None:
    """Raise ValueError where shard `index` is there, and damaged or of other examples than planned.

    Where only its statistics are lost, it is forgotten, so that it is made anew.
    """
    entry: ShardEntry | None = read_entry(output_dir, index)
    if entry is None:
        return
    if entry.ids != [example.id for example in examples]:
        raise ValueError(
            f"{output_dir / entry.file} holds {len(entry.ids)} examples, and this run plans others for it ({len(examples)}). "
            "Choose another output directory, or delete this one to distil anew"
        )
    verify_shard(output_dir, entry)
    try:
        _read_stats(output_dir, index)
    except (ValueError, OSError):
        logger.warning("%s is missing or damaged: the shard is made anew", _stats_path(output_dir, index))
        forget(output_dir, index)


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
    return read_dataclass(ShardStats, path)


def _stats_path(output_dir: Path, index: int) -> Path:
    return output_dir / f"shard-{index:05d}.stats.json"
