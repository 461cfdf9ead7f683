"""The labelling stage: from conversations to shards of labelled examples.

It skips complete shards, and so resumes after an interruption.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from accelerate import Accelerator
from jaxtyping import Int
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...data.answers import AnswerFinder
from ...data.behind import Behind
from ...data.config import DataConfig
from ...data.conversations import is_unanswered
from ...data.examples import encode_conversations
from ...data.files import read_json, write_json
from ...data.manifest import FORMAT_VERSION, STATS_FILE, LabelSampling, LabelTotals, Manifest, ShardEntry, examples_sha256
from ...data.shards import label_store, write_shard
from ...data.sources import PromptOverlap, describe_drops, load_conversations
from ...data.store import STATS_SUFFIX, describe_data
from ...data.types import DistilledExample, Example
from ...models.llm.hf_target import HFTarget
from ...models.llm.tensor_parallel import Worker
from ...models.machine import peak_memory
from ..config import DistillConfig
from ..plan import plan_sha256, plan_shards, run_shards, total
from ..regenerate.engines.served_states import ServedStates, open_states
from .continuations import LabelStats, label_continuations, require_labels
from .features import TextFeatures, require_features, require_space, start_storing
from .next_tokens import SampledLabels

logger = logging.getLogger(__name__)


SUSPICIOUS_AGREEMENT = 0.15
"""Lower agreement is suspicious.

A language model predicts the next token of a text in its own chat format more often than this."""

LINEARS_FILE = "linears.json"
"""How the first process computed linear layers, by shape."""

GREEDY_AGREEMENT = 0.95
"""Agreement with the target's own greedy answers, up to differences of rounding between two
engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabellingStats(LabelStats):
    """Work of labelling one shard; `seconds` don't include reading and writing."""

    seconds: float


def distill(
    config: DistillConfig,
    data: DataConfig,
    target: HFTarget,
    output_dir: Path,
    accelerator: Accelerator,
    *,
    examples: list[Example] | None = None,
    overlap: PromptOverlap | None = None,
) -> Manifest:
    """Label all examples of `data` with the target's continuations, in shards in `output_dir`.

    `examples` are labelled instead of those of `data`; for example, answers of the target (see
    `regenerate`). Conversations with an `overlap` with the evaluation are dropped and counted.
    Complete shards are kept, and the others divided among the processes (see `run_shards`). An
    interrupted run loses at most the current shard of each process, and a killed one also a shard
    that a thread was writing. It may be resumed with another number of processes.

    Raises ValueError before any long work if the target isn't supported, the folder holds another
    run's shards or a damaged one, or the disk is too small.
    """
    # 1. Load the examples, and check that the target can label them.
    dropped: Counter[str] = Counter()
    if examples is None:
        examples, dropped = load_examples(data, target, overlap)
    longest = max(len(example.input_ids) for example in examples)
    require_labels(target, longest, config.horizon, branches=config.decodes_branches)
    require_features(config, target)
    # 2. Label them, shard by shard.
    plan = plan_shards(examples, config.shard_examples)
    store = label_store(output_dir, describe_data(data, target.tokenizer.chat_template, overlap))
    manifest = describe_labels(config, data, target, plan)
    store.require_same(manifest)
    if store.missing(plan) and not data.is_private:
        text = preview(examples[0], target.tokenizer)
        logger.info("the first example, with what is trained on between %s and %s:\n%s", *MARKS, text)
    require_space(config, target, store.missing(plan), output_dir)
    worker = Worker.of(accelerator, tensor_parallel=target.tensor_parallel)
    with ExitStack() as stack:
        served = open_states(config, target, stack) if config.engine == "vllm" and store.missing(plan) else None
        if served is None and store.missing(plan):
            stack.enter_context(packed_alike(target, output_dir / LINEARS_FILE, accelerator))
        return run_shards(
            store,
            manifest,
            plan,
            accelerator,
            worker,
            num_units=lambda shard: sum(len(example.input_ids) for example in shard),
            make=lambda shards, progress: _label_shards(config, target, shards, output_dir, progress, worker, served),
            finish=lambda entries: _write_statistics(config, target, output_dir, entries, dropped),
            unit="tok",
        )


@contextmanager
def packed_alike(target: HFTarget, path: Path, accelerator: Accelerator) -> Iterator[None]:
    """Read texts with packed copies of linear layers where they were faster in the first process.

    It writes its choice to `path`; later processes take that one. So all shards are rounded alike.
    Raises ValueError if the file is damaged.
    """
    if accelerator.is_main_process and not path.exists():
        with target.packed_where_faster() as chosen:
            write_json(path, chosen)
    accelerator.wait_for_everyone()
    recorded = read_json(path)
    if not isinstance(recorded, dict) or not all(isinstance(way, str) for way in recorded.values()):
        raise ValueError(f"{path} doesn't name ways of linear layers; delete it, and they are timed again")
    with target.packed_where_faster(recorded):
        yield


def describe_labels(config: DistillConfig, data: DataConfig, target: HFTarget, plan: Sequence[Sequence[Example]]) -> Manifest:
    """Return the manifest of these shards, before any exists."""
    data_sha256 = examples_sha256(example for shard in plan for example in shard)
    return Manifest(
        format_version=FORMAT_VERSION,
        target=target.identity,
        target_dtype=str(target.dtype),
        horizon=config.horizon,
        features=config.features,
        feature_layers=sorted(config.feature_layers),
        features_dtype=config.features_dtype,
        top_logprobs=config.top_logprobs,
        sampling=LabelSampling(temperature=config.label_temperature, seed=config.seed) if config.label_temperature else None,
        branches=config.decodes_branches,
        data_sha256=data_sha256,
        plan_sha256=plan_sha256(plan, data_sha256),
        max_length=data.max_length,
        shards=[],
        complete=False,
    )


def missing_examples(
    config: DistillConfig, data: DataConfig, target: HFTarget, examples: Sequence[Example], output_dir: Path
) -> list[Example]:
    """Return the unlabelled examples. Raises ValueError if the folder is another run's."""
    plan = plan_shards(examples, config.shard_examples)
    store = label_store(output_dir, describe_data(data, target.tokenizer.chat_template))
    store.require_same(describe_labels(config, data, target, plan))
    return store.missing(plan)


def load_examples(
    data: DataConfig, target: HFTarget, overlap: PromptOverlap | None = None, *, unanswered: bool = False
) -> tuple[list[Example], Counter[str]]:
    """Load the examples of `data` in a fixed order, and count dropped records by reason.

    With `unanswered`, a conversation that only asks is repeated as its own answer: for a plan, which
    needs texts before there are answers. Also logs the counts. Raises ValueError if no example is left.
    """
    finder = AnswerFinder(target.tokenizer, target.stop_ids)
    conversations, unread = load_conversations(data, overlap, finder.is_rendered, unanswered=unanswered)
    conversations = [
        replace(one, turns=(*one.turns, replace(one.turns[-1], role="assistant"))) if is_unanswered(one) else one
        for one in conversations
    ]
    examples, unfit = encode_conversations(conversations, finder, data.max_length, train_on=data.train_on)
    logger.info(
        "%d conversations | %d examples, %d tokens | dropped: %s",
        len(conversations),
        len(examples),
        sum(len(example.input_ids) for example in examples),
        describe_drops(unread + unfit),
    )
    return examples, unread + unfit


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of text indexes with at most `batch_tokens` tokens, padding included.

    The longest texts come first, so memory runs out at the start or not at all. Example: lengths 2
    5 4 1 with 8 tokens give [1], [2, 0], [3]. A text longer than `batch_tokens` is alone in its
    batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    while order:
        size = max(1, batch_tokens // lengths[order[0]])
        yield order[:size]
        order = order[size:]


def label_shard(
    config: DistillConfig,
    target: HFTarget,
    examples: Sequence[Example],
    progress: tqdm,
    served: ServedStates | None = None,
) -> tuple[list[DistilledExample], LabellingStats]:
    """Return the labelled examples of one shard in order. `progress` counts tokens of text.

    With `served` the states are those of a server, and the texts their own labels.
    A thread moves what a batch stores to memory while the next batch is computed. Raises ValueError
    with an example's id if the target's states of this example aren't finite.
    """
    started = time.perf_counter()
    counts: list[LabelStats] = []
    labelled: dict[int, DistilledExample] = {}
    with Behind("states") as behind:
        for batch in length_batches([len(example.input_ids) for example in examples], config.batch_tokens):
            texts = [examples[index] for index in batch]
            continuations, features, stats = _label_batch(config, target, texts, served)
            behind.start(partial(_keep, labelled, batch, start_storing(config, texts, continuations, features)))
            counts.append(stats)
            progress.update(stats.num_text_tokens)
    shard_stats = LabellingStats(**asdict(total(LabelStats, counts)), seconds=time.perf_counter() - started)
    return [labelled[index] for index in range(len(examples))], shard_stats


def _label_batch(
    config: DistillConfig, target: HFTarget, examples: Sequence[Example], served: ServedStates | None = None
) -> tuple[Int[torch.Tensor, "text seq horizon"], TextFeatures, LabelStats]:
    """Return continuations, features and work of a batch, on the target's device."""
    # 1. Pad the texts.
    input_ids = pad_sequence([example.input_ids.long() for example in examples], batch_first=True)
    wanted = pad_sequence([example.wanted for example in examples], batch_first=True)
    attention_mask = pad_sequence([torch.ones_like(example.loss_mask) for example in examples], batch_first=True)
    # 2. Compute labels and features.
    sampled = None
    if config.label_temperature:
        sampled = SampledLabels.of(
            [example.id for example in examples],
            input_ids.shape[1] + config.horizon,
            temperature=config.label_temperature,
            seed=config.seed,
            device=target.device,
        )
    return label_continuations(
        target,
        input_ids,
        attention_mask,
        wanted,
        horizon=config.horizon,
        feature_layers=tuple(config.feature_layers),
        top_k=config.top_logprobs,
        sampled=sampled,
        read=None if served is None else served.read([example.input_ids for example in examples]),
        branches=config.decodes_branches,
    )


def _keep(
    labelled: dict[int, DistilledExample], indexes: Sequence[int], examples: Callable[[], Sequence[DistilledExample]]
) -> None:
    """Wait for a batch's examples, and add them by their index in the shard."""
    labelled.update(zip(indexes, examples(), strict=True))


def _label_shards(
    config: DistillConfig,
    target: HFTarget,
    shards: Mapping[int, Sequence[Example]],
    output_dir: Path,
    progress: tqdm,
    worker: Worker,
    served: ServedStates | None,
) -> None:
    """Label and write shards. A thread writes a shard while the next one is labelled."""
    with Behind("shards") as behind:
        for index, examples in shards.items():
            labelled, stats = label_shard(config, target, examples, progress, served)
            if worker.speaks:
                behind.start(partial(_write, output_dir, index, labelled, stats))
            del labelled  # at most the shard that is written and the next one are in memory


def _write(output_dir: Path, index: int, labelled: list[DistilledExample], stats: LabellingStats) -> None:
    """Write a shard. Its statistics come first, since its sidecar marks it as complete."""
    write_json(label_store(output_dir).path(index, STATS_SUFFIX), asdict(stats))
    write_shard(output_dir, index, labelled)


def _write_statistics(
    config: DistillConfig, target: HFTarget, output_dir: Path, entries: Sequence[ShardEntry], dropped: Counter[str]
) -> None:
    """Write the statistics of all shards, and warn if the target disagrees with the texts."""
    # 1. Sum over the shards.
    shards = label_store(output_dir).read_stats(LabellingStats, len(entries)).values()
    sums = total(LabellingStats, shards)
    # 2. Write them.
    statistics = LabelTotals(
        num_examples=sum(len(entry.ids) for entry in entries),
        num_text_tokens=sums.num_text_tokens,
        num_positions=sums.num_positions,
        agreement=sums.agreement,
        num_branch_tokens=sums.num_branch_tokens,
        process_seconds=sums.seconds,
        positions_per_process_second=sums.num_positions / max(1e-9, sums.seconds),
        peak_memory_bytes=peak_memory(target.device),
        dropped=dict(dropped.most_common()),
    )
    write_json(output_dir / STATS_FILE, asdict(statistics))
    # 3. Report them, with warnings.
    logger.info(
        "labelled %d positions of %d examples, %.0f per second and process; the target agrees with %.1f %% of the text",
        sums.num_positions,
        statistics.num_examples,
        statistics.positions_per_process_second,
        100 * sums.agreement,
    )
    # Sampled labels agree with the text only as often as two samples of the target do.
    if shards and not config.label_temperature and sums.agreement < SUSPICIOUS_AGREEMENT:
        logger.warning(
            "the target agrees with so little of the text that tokenizer, chat template or data may belong to another model: "
            "check them before you train"
        )
    elif shards and config.is_greedy and sums.agreement < GREEDY_AGREEMENT:
        logger.warning(
            "the answers should be the target's greedy ones, and it often disagrees: does the engine run another model, "
            "in another precision, or sample? Check it before you train"
        )


MARKS = ("[[", "]]")
"""Marks around the trained parts."""
MAX_PARTS = 6
MAX_CHARACTERS, LEAST_CUT = 240, 60
"""Characters that are shown of a longer part, its start and its end, where this leaves out at least
LEAST_CUT."""
VISIBLE = str.maketrans({"\n": "\u21b5\n", "\t": "\u2192"} | {chr(code): "\ufffd" for code in range(32) if code not in (9, 10)})


def preview(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """Render the first parts of an example. Trained parts are in [[ ]], which also show spaces at a part's ends.

    Line breaks are shown as \u21b5 at the end of a line, and tabs as \u2192. The middle of a long part is cut out.
    """
    start, end = MARKS
    tokens = zip(example.input_ids.tolist(), example.loss_mask.tolist(), strict=True)
    parts = [(trained, [id for id, _ in group]) for trained, group in groupby(tokens, key=lambda token: token[1])]
    texts, half = [], MAX_CHARACTERS // 2
    for trained, ids in parts[:MAX_PARTS]:
        text = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if len(text) >= MAX_CHARACTERS + LEAST_CUT:
            text = f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"
        texts.append(f"{start}{text.translate(VISIBLE)}{end}" if trained else text.translate(VISIBLE))
    if len(parts) > MAX_PARTS:
        texts.append(f" ... and {len(parts) - MAX_PARTS} more parts")
    return "".join(texts)
