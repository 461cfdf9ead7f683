"""The regeneration stage: from conversations to examples with the target's answers.

It can resume after a crash, like labelling. Conversations are divided into shards, each written
when it is complete, by any process (see `plan`).
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from tqdm import tqdm

from ...data.answers import AnswerFinder
from ...data.chat import ChatTemplate, require_template
from ...data.config import DataConfig
from ...data.conversations import Conversation
from ...data.files import write_json
from ...data.sources import PromptOverlap, describe_drops, load_conversations
from ...data.store import STATS_SUFFIX, ShardStore, describe_data
from ...data.types import Example
from ...models.drafters.saved.loading import LoadedDrafter, load_drafter, trained_parts
from ...models.llm.hf_target import HFTarget
from ...models.llm.tensor_parallel import Worker
from ...models.machine import peak_memory
from ..config import DistillConfig
from ..plan import plan_sha256, plan_shards, run_shards
from .answers import (
    FORMAT_VERSION,
    AnswerCounts,
    AnsweredExample,
    AnswersEntry,
    AnswersManifest,
    SamplingFacts,
    answer_store,
    conversations_sha256,
    read_answers,
    write_answers,
)
from .dialogues import Dialogue, InTurns, questions
from .engine import Engine, Limits
from .engines.registry import open_engine

logger = logging.getLogger(__name__)

STATS_FILE = "stats.json"
LARGE_CUT_SHARE = 0.2
"""Warn if a greater share of the answers is cut: a drafter then hardly learns how the target
ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweringStats:
    """Engine and time of answering one shard."""

    engine: str
    seconds: float


def regenerate(
    config: DistillConfig,
    data: DataConfig,
    target: HFTarget,
    output_dir: Path,
    accelerator: Accelerator,
    *,
    overlap: PromptOverlap | None = None,
) -> list[Example]:
    """Return examples of the target's answers to all conversations of `data`, in a fixed order.

    `output_dir` keeps the answers. Conversations with an `overlap` with the evaluation are dropped.
    Complete shards are kept: an interrupted run loses at most the current shard of each process,
    and any number of processes may resume it. An example's id is its conversation's id and a
    number.

    Raises ValueError if the folder holds another run's answers or damaged ones, if the engine isn't
    available, and if no answer is left.
    """
    # 1. Load and answer the conversations.
    conversations, unread = load_questions(data, target, overlap)
    logger.info("%d conversations to regenerate | dropped: %s", len(conversations), describe_drops(unread))
    limits, template = answer_limits(config, data, target), ChatTemplate(target.tokenizer)
    manifest = answer_all(
        config,
        data,
        target,
        conversations,
        output_dir,
        accelerator,
        begin=lambda item: Dialogue(
            item, target.tokenizer, template=template, limits=limits, stop_ids=target.stop_ids, seed=config.seed
        ),
        open=lambda drafter, stack: stack.enter_context(open_engine(config, target, limits, drafter)),
        finish=lambda entries: _write_statistics(config, data, target, output_dir, entries, unread),
        unit="answer",
        overlap=overlap,
    )
    # 2. Read the examples.
    examples = [example.to_example() for entry in manifest.shards for example in read_answers(output_dir, entry)]
    if not examples:
        raise ValueError(
            f"none of the target's answers to {len(conversations)} conversations can be used; dropped turns: "
            f"{describe_drops(total_counts(manifest.shards)[1])}. Check data.max_length, the chat template and the target"
        )
    return examples


def answer_all(
    config: DistillConfig,
    data: DataConfig,
    target: HFTarget,
    items: Sequence[Conversation],
    output_dir: Path,
    accelerator: Accelerator,
    *,
    begin: Callable[[Conversation], InTurns],
    open: Callable[[LoadedDrafter | None, ExitStack], Engine],
    unit: str,
    finish: Callable[[list[AnswersEntry]], None] = lambda entries: None,
    overlap: PromptOverlap | None = None,
) -> AnswersManifest:
    """Answer the missing shards of conversations, and return the complete manifest.

    `begin` begins an item's conversation, and `open` opens the engine with the configured drafter.
    Errors as in `run_shards`.
    """
    plan = plan_shards(items, config.shard_examples)
    store = answer_store(output_dir, describe_data(data, target.tokenizer.chat_template, overlap))
    manifest, drafter = begin_answers(config, data, target, plan, store, accelerator)
    # With a server each process sends its own requests.
    worker = Worker.of(accelerator, tensor_parallel=target.tensor_parallel and not config.is_served)

    def make(shards: Mapping[int, Sequence[Conversation]], progress: tqdm) -> None:
        with ExitStack() as stack:
            engine = open(drafter, stack)
            for index, conversations in shards.items():
                # 1. Answer the conversations.
                started = time.perf_counter()
                examples, counts = answer_conversations(list(map(begin, conversations)), engine, progress)
                seconds = time.perf_counter() - started
                progress.set_postfix_str(f"{counts.num_tokens / seconds:.0f} tok/s")
                # 2. Write its statistics, then the shard, whose sidecar marks it as complete.
                if worker.speaks:
                    stats = AnsweringStats(engine=str(config.engine), seconds=seconds)
                    write_json(store.path(index, STATS_SUFFIX), asdict(stats))
                    write_answers(output_dir, index, [item.id for item in conversations], examples, counts)

    manifest = run_shards(
        store,
        manifest,
        plan,
        accelerator,
        worker,
        num_units=lambda items: sum(begin(item).num_turns for item in items),
        make=make,
        finish=finish,
        unit=unit,
    )
    target.plain_linears()  # what follows is then the same whether this process has answered or not
    return manifest


def load_questions(
    data: DataConfig, target: HFTarget, overlap: PromptOverlap | None
) -> tuple[list[Conversation], Counter[str]]:
    """Load the conversations that have turns, and count dropped records by reason."""
    finder = AnswerFinder(target.tokenizer, target.stop_ids)
    conversations, unread = load_conversations(data, overlap, finder.is_rendered, unanswered=True)
    asked = [conversation for conversation in conversations if conversation.turns]
    if num_others := len(conversations) - len(asked):
        unread["texts or tokens that are written already, so nothing can be asked again"] += num_others
    if not asked:
        raise ValueError(
            f"no conversation has questions; dropped: {describe_drops(unread)}. Leave "
            "distill.engine out, and the texts are read as they are; or give conversations"
        )
    return asked, unread


def missing_conversations(
    config: DistillConfig, data: DataConfig, target: HFTarget, conversations: Sequence[Conversation], output_dir: Path
) -> list[Conversation]:
    """Return the unanswered conversations. Raises ValueError if the folder is another run's."""
    plan = plan_shards(conversations, config.shard_examples)
    store = answer_store(output_dir, describe_data(data, target.tokenizer.chat_template))
    linears = store.load().linears if store.is_begun else {}
    store.require_same(describe_answers(config, data, target, plan, linears))
    return store.missing(plan)


def begin_answers(
    config: DistillConfig,
    data: DataConfig,
    target: HFTarget,
    plan: Sequence[Sequence[Conversation]],
    store: ShardStore[AnswersEntry, AnswersManifest],
    accelerator: Accelerator,
) -> tuple[AnswersManifest, LoadedDrafter | None]:
    """Return the manifest of this run, and the drafter that decodes what is missing.

    Target and drafter then decode as in the run's first process. That process chooses how linear
    layers are computed, and marks the folder with its choice. Raises ValueError if the folder has
    shards and no manifest, or if there is no such drafter.
    """
    describe = partial(describe_answers, config, data, target, plan)
    is_first = accelerator.is_main_process and not store.is_begun
    if is_first:
        store.require_same(describe({}))
    # 1. Load the drafter.
    drafter = None
    if config.drafter is not None and store.missing(plan):
        drafter = load_drafter(config.drafter, target, **config.drafter_settings)
    parts = [] if drafter is None else trained_parts(drafter)
    # 2. The first process of a new folder chooses.
    decodes = not config.is_served  # a server computes in its own way
    if is_first:
        if decodes:
            target.choose_linears(*parts)
        store.save(describe(target.linears))
    accelerator.wait_for_everyone()
    # 3. All others take its choice.
    recorded = store.load().linears
    if not decodes or not store.missing(plan):
        return describe(recorded), drafter
    if not is_first:
        target.choose_linears(*parts, recorded=recorded)
    return describe(target.linears), drafter


def answer_limits(config: DistillConfig, data: DataConfig, target: HFTarget) -> Limits:
    """Return limits by which prompt, answer and labels fit into example and context."""
    window = target.context_length - max(config.horizon - 2, 0)
    return Limits(max_new_tokens=config.max_new_tokens, max_tokens=min(data.max_length, window))


def describe_answers(
    config: DistillConfig,
    data: DataConfig,
    target: HFTarget,
    plan: Sequence[Sequence[Conversation]],
    linears: Mapping[str, str],
) -> AnswersManifest:
    """Return the manifest of these answers before any exists: everything that decides them.

    The engine isn't part of it.
    """
    data_sha256 = conversations_sha256(conversation for shard in plan for conversation in shard)
    return AnswersManifest(
        format_version=FORMAT_VERSION,
        target=target.identity,
        target_dtype=str(target.dtype),
        chat_template_sha256=hashlib.sha256(require_template(target.tokenizer).encode()).hexdigest(),
        sampling=SamplingFacts(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed if config.temperature else 0,  # greedy answers sample nothing
            max_new_tokens=config.max_new_tokens,
        ),
        max_tokens=answer_limits(config, data, target).max_tokens,
        linears=dict(linears),
        data_sha256=data_sha256,
        plan_sha256=plan_sha256(plan, data_sha256),
        shards=[],
        complete=False,
    )


def answer_conversations(
    dialogues: Sequence[InTurns], engine: Engine, progress: tqdm
) -> tuple[list[AnsweredExample], AnswerCounts]:
    """Answer the first turns of all conversations, then the second turns, and so on.

    `progress` counts turns.
    """
    # 1. In each round, answer the next turn of all unfinished dialogues.
    begun = progress.n
    while waiting := {request.id: (dialogue, request) for dialogue in dialogues if (request := dialogue.next_request())}:
        for answer in engine.answer([request for _, request in waiting.values()]):
            dialogue, _ = waiting.pop(answer.id)
            before = dialogue.num_done
            dialogue.take(answer)
            progress.update(dialogue.num_done - before)
        if waiting:
            raise RuntimeError(f"the engine {type(engine).__name__} left {len(waiting)} requests unanswered")
    # 2. Count the results; some turns were dropped before they were requested.
    num_turns = sum(dialogue.num_turns for dialogue in dialogues)
    progress.update(begun + num_turns - progress.n)
    examples = [example for dialogue in dialogues for example in dialogue.examples]
    dropped = sum((dialogue.dropped for dialogue in dialogues), Counter[str]())
    spans = [span for example in examples for span in example.answers]
    counts = AnswerCounts(
        num_turns=num_turns,
        num_answers=len(spans),
        num_cut=sum(span.cut for span in spans),
        num_tokens=sum(span.num_tokens for span in spans),
        dropped=dict(sorted(dropped.items())),
    )
    assert counts.num_turns == counts.num_answers + dropped.total()
    return examples, counts


def count_turns(conversations: Sequence[Conversation]) -> int:
    """Count the answers that conversations need."""
    return sum(len(questions(conversation.turns)) for conversation in conversations)


def _write_statistics(
    config: DistillConfig,
    data: DataConfig,
    target: HFTarget,
    output_dir: Path,
    shards: Sequence[AnswersEntry],
    unread: Counter[str],
) -> None:
    """Write the statistics of all shards, and warn if many answers are cut."""
    # 1. Sum over the shards. Shards without statistics have answers, but no seconds.
    num, dropped = total_counts(shards)
    stats = answer_store(output_dir).read_stats(AnsweringStats, len(shards))
    seconds = {index: shard_stats.seconds for index, shard_stats in stats.items()}
    num_timed_tokens = sum(entry.counts.num_tokens for entry in shards if entry.index in seconds)
    cut_share = num["num_cut"] / max(1, num["num_answers"])
    tokens_per_second = num_timed_tokens / max(1e-9, sum(seconds.values()))
    # 2. Write them.
    statistics = {
        "num_conversations": sum(len(entry.conversation_ids) for entry in shards),
        "num_examples": sum(entry.num_examples for entry in shards),
        **num,
        "cut_share": cut_share,
        "dropped_conversations": dict(unread.most_common()),
        "dropped_turns": dict(dropped.most_common()),
        "process_seconds": sum(seconds.values()),
        "tokens_per_process_second": tokens_per_second,
        "peak_memory_bytes": peak_memory(target.device),
    }
    write_json(output_dir / STATS_FILE, statistics)
    # 3. Report them, with warnings.
    logger.info(
        "regenerated %d answers of %d conversations, %d tokens, %.0f per second and process; %.1f %% are cut by the length "
        "limit | dropped turns: %s",
        num["num_answers"],
        statistics["num_conversations"],
        num["num_tokens"],
        tokens_per_second,
        100 * cut_share,
        describe_drops(dropped),
    )
    if cut_share > LARGE_CUT_SHARE:
        logger.warning(
            "many answers are cut by the length limit: raise distill.max_new_tokens (%d) or data.max_length (prompt and answer "
            "together have %d tokens), or check that the target's stop tokens are those of the chat template",
            config.max_new_tokens,
            answer_limits(config, data, target).max_tokens,
        )


def total_counts(shards: Sequence[AnswersEntry]) -> tuple[dict[str, int], Counter[str]]:
    """Sum the counts of shards, and their dropped turns by reason."""
    names = ("num_turns", "num_answers", "num_cut", "num_tokens")
    num = {name: sum(getattr(entry.counts, name) for entry in shards) for name in names}
    return num, sum((Counter(entry.counts.dropped) for entry in shards), Counter[str]())
