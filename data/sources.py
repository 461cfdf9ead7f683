"""Conversations from data sets, without evaluation prompts, and a count of dropped records by reason."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from glob import has_magic
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from .config import TRAFFIC, DataConfig, DataSource, Split
from .conversations import NO_ANSWER, Conversation, has_surrogate, is_unanswered
from .forms import FORMS, ID_KEYS, form_of
from .raw_records import NOT_JSON, SUFFIXES, SURE_SUFFIXES, is_local, load_records, local_files, read_records, record_files
from .stdlib import TASK, Cuts, code_conversations, cut_text, read_source
from .suites import PromptSet

logger = logging.getLogger(__name__)

SCRIPTS_WITHOUT_SPACES = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Thai and Lao, kana, Chinese characters, Hangul: each character counts as a word."""
WORD = re.compile(f"[{SCRIPTS_WITHOUT_SPACES}]|[^\\W{SCRIPTS_WITHOUT_SPACES}]+")

Words = tuple[str, ...]


class PromptOverlap:
    """Index of the evaluation prompts' words, to find overlaps with other prompts (arXiv 2005.14165, appendix C).

    Two texts overlap if they share `num_words` consecutive words, ignoring case and punctuation. A
    turn with fewer words overlaps only with a turn of exactly the same words.
    """

    def __init__(self, suites: Iterable[PromptSet], num_words: int) -> None:
        self.num_words = num_words
        self._suites: dict[Words, str] = {}
        self.suites: dict[str, str] = {}
        """Digest of the prompts, by suite."""
        for suite in suites:
            self.suites[suite.name] = suite.revision
            for prompt in suite.prompts:
                for turn in prompt.turns:
                    for words in word_runs(turn, num_words):
                        self._suites.setdefault(words, suite.name)

    def suite_of(self, conversation: Conversation) -> str | None:
        """Return the suite that a prompt of the conversation overlaps with, or None."""
        texts = [turn.content for turn in conversation.turns if turn.role != "assistant"]
        for text in [*texts, *filter(None, [conversation.text])]:
            for words in word_runs(text, self.num_words):
                if words in self._suites:
                    return self._suites[words]
        return None


def word_runs(text: str, num_words: int) -> Iterator[Words]:
    """Yield the runs of `num_words` words, without case and punctuation; of a shorter text all its words."""
    words = WORD.findall(text.lower())
    if words:
        for start in range(max(1, len(words) - num_words + 1)):
            yield tuple(words[start : start + num_words])


def without_overlap(conversations: Sequence[Conversation], overlap: PromptOverlap, dropped: Counter[str]) -> list[Conversation]:
    """Drop conversations that overlap with the evaluation; `dropped` counts them by suite."""
    kept = []
    for conversation in conversations:
        if suite := overlap.suite_of(conversation):
            dropped[f"prompt that {suite} asks too ({overlap.num_words} words in a row)"] += 1
        else:
            kept.append(conversation)
    return kept


PROSE_SUFFIXES = frozenset({"", ".txt", ".md", ".rst"})
PROSE_TASK = "Continue this text."
OTHER_MARKS = re.compile(r"<\|[a-z_]+\|>|\[/?INST\]|<start_of_turn>")
"""Marks of turns that chat templates write."""
SHOWN_FROM = 2.0
"""Seconds of reading from which a bar shows it."""
KEPT = 50_000
"""Conversations that are held until it is known which ones are drawn."""
MOST_NOTES = 20
"""Most kinds of notes, and of reasons, that a message names."""
NUM_CHECKED = 32
"""First records whose form a message names."""

IsRendered = Callable[[str], bool]
"""Tells whether the target's chat template has written a text."""


def load_conversations(
    config: DataConfig,
    overlap: PromptOverlap | None = None,
    is_rendered: IsRendered | None = None,
    *,
    unanswered: bool = False,
) -> tuple[list[Conversation], Counter[str]]:
    """Load the valid conversations of the data, and count dropped records by reason.

    They keep the data's order. Those without an answer are dropped, unless `unanswered` ones are wanted.
    `config.limit` samples that many by `config.seed`; those with an `overlap` with the evaluation are
    then dropped. Ids are unique, and the same in every run. Keys of
    records that aren't used are logged. Raises ValueError if the data can't be read, or if nothing is left.
    """
    # 1. Read and parse. If some conversations are drawn, memory holds at most KEPT of the others.
    dropped, notes = Counter[str](), Counter[str]()
    is_drawn = config.limit is not None or any(source.weight for source in config.all_sources)
    counts, kept = [0] * len(config.all_sources), list[tuple[int, Conversation]]()
    read = _conversations(config, dropped, notes, is_rendered, unanswered)
    for number, conversation in tqdm(read, desc="read", unit="text", delay=SHOWN_FROM, disable=None):
        counts[number] += 1
        if not is_drawn or sum(counts) <= KEPT:
            kept.append((number, conversation))
    if not any(counts):
        raise ValueError(_no_conversation(config, dropped + Counter({NOT_JSON: notes[NOT_JSON]})))
    _log_notes(config, counts, notes)
    # 2. Draw, and read again what memory doesn't hold.
    conversations = [conversation for _, conversation in kept]
    if is_drawn:
        chosen, places = draw(config, counts), Counter[int]()
        again = kept if sum(counts) <= KEPT else _conversations(config, Counter(), Counter(), is_rendered, unanswered)
        conversations = []
        for number, conversation in tqdm(again, desc="draw", unit="text", delay=SHOWN_FROM, disable=None):
            if places[number] in chosen[number]:
                conversations.append(conversation)
            places[number] += 1
    # 3. Decontaminate.
    if overlap is not None:
        if num_tokens := sum(conversation.tokens is not None for conversation in conversations):
            logger.warning("%d rows of tokens can't be compared with the evaluation's prompts (data.overlap_words)", num_tokens)
        conversations = without_overlap(conversations, overlap, dropped)
        if not conversations:
            raise ValueError(
                f"every prompt of {_described(config)} overlaps with the evaluation; dropped: {describe_drops(dropped)}. Train "
                "on other data, evaluate on other suites (eval.suites), or set data.overlap_words: to null, and results "
                "overestimate, or to 1000 if all prompts share an instruction, and only equal prompts are dropped"
            )
    return conversations, dropped


def draw(config: DataConfig, counts: Sequence[int]) -> list[set[int]]:
    """Draw the conversations to use: for each source the indexes among its valid ones.

    Without weights, `limit` is drawn from all of them. With weights, each source gives its part of the
    largest mixture that repeats no conversation, or of `limit`.
    """
    random, weights = Random(config.seed), [source.weight for source in config.all_sources]
    if weights[0] is None:
        total = sum(counts)
        drawn = random.sample(range(total), min(config.limit or total, total))
        starts = [sum(counts[:number]) for number in range(len(counts))]
        return [
            {index - start for index in drawn if start <= index < start + count}
            for start, count in zip(starts, counts, strict=True)
        ]
    if empty := [source.path or source.source for source, count in zip(config.all_sources, counts, strict=True) if not count]:
        raise ValueError(f"data.sources: {', '.join(map(str, empty))} has no usable conversation, so there is no mixture")
    shares = [(weight or 0.0) / sum(weight or 0.0 for weight in weights) for weight in weights]
    largest = min(count / share for count, share in zip(counts, shares, strict=True))
    size = int(min(config.limit or largest, largest) + 1e-9)
    # The rest of the division goes to the largest remainders.
    parts = [int(size * share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda number: parts[number] - size * shares[number])
    for number in by_remainder[: size - sum(parts)]:
        parts[number] += 1
    return [set(random.sample(range(count), min(count, part))) for count, part in zip(counts, parts, strict=True)]


def _log_notes(config: DataConfig, counts: Sequence[int], notes: Counter[str]) -> None:
    """Log what is read of each source, and what of the records isn't used."""
    if config.sources:
        rows = [f"{count} of {source.path or source.source}" for source, count in zip(config.all_sources, counts, strict=True)]
        logger.info("usable conversations: %s", ", ".join(rows))
    for note, count in notes.most_common(MOST_NOTES):
        logger.warning("%d records with %s", count, note)
    if len(notes) > MOST_NOTES:
        logger.warning("and %d further notes, such as: %s", len(notes) - MOST_NOTES, notes.most_common()[-1][0])


def _described(config: DataConfig) -> str:
    return ", ".join(str(source.path or source.source) for source in config.all_sources)


def _no_conversation(config: DataConfig, dropped: Counter[str]) -> str:
    """Return the message for data without a usable conversation."""
    remedy = "Check that data.source names the form of its records"
    for source in config.all_sources:
        if source.source in FORMS and source.path is not None and (source.source != "text" or has_records(source.path)):
            other = form_of(list(islice(_records(source, source.path, Counter()), NUM_CHECKED)))
            if other not in (None, source.source):
                remedy = f"Its records have the form {other!r}: data.source={other}"
    names = ", ".join(repr(source.source) for source in config.all_sources)
    return f"no conversation of {_described(config)} is usable as {names}; dropped: {describe_drops(dropped)}. {remedy}"


def require_data(config: DataConfig) -> None:
    """Read the first record of each source.

    Raises ValueError if the data is missing or unreadable, long before all records are read.
    """
    for source in config.all_sources:
        if source.path is not None and (source.source != "text" or has_records(source.path)):
            next(iter(_records(source, source.path, Counter())), None)


def describe_drops(dropped: Counter[str]) -> str:
    """Describe the counts of dropped records, most frequent first."""
    shown = ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common(MOST_NOTES)) or "nothing"
    rest = sum(count for _, count in dropped.most_common()[MOST_NOTES:])
    return f"{shown}, {rest} x other reasons" if rest else shown


def _conversations(
    config: DataConfig, dropped: Counter[str], notes: Counter[str], is_rendered: IsRendered | None, unanswered: bool
) -> Iterator[tuple[int, Conversation]]:
    """Yield the conversations of all sources, with unique ids, each with the number of its source."""
    ids = set[str]()
    for number, conversation in _of_sources(config, dropped, notes, is_rendered, unanswered):
        id = conversation.id
        while id in ids:  # files of two sources may have the same name
            id = f"{id}@{number}"
        ids.add(id)
        yield number, conversation if id == conversation.id else replace(conversation, id=id)


def _of_sources(
    config: DataConfig, dropped: Counter[str], notes: Counter[str], is_rendered: IsRendered | None, unanswered: bool
) -> Iterator[tuple[int, Conversation]]:
    cuts = Cuts(seed=config.seed, prompt_chars=(config.prompt_chars[0], config.prompt_chars[1]))
    seen = set[str]()
    for number, source in enumerate(config.all_sources):
        if source.source == "stdlib":
            split: Split = source.split  # type: ignore[assignment] # DataSource has checked it
            yield from ((number, conversation) for conversation in code_conversations(split, cuts))
            continue
        assert source.path is not None  # DataSource has checked it
        is_text = source.source == "text"
        if is_text and not has_records(source.path):
            yield from ((number, conversation) for conversation in _files_of_text(source.path, cuts, dropped))
            continue
        for conversation in _parsed(source, source.path, dropped, notes, seen):
            if not unanswered and is_unanswered(conversation):
                dropped[NO_ANSWER] += 1
                continue
            if conversation.text is None or (is_rendered is not None and is_rendered(conversation.text)):
                yield number, conversation
                continue
            if mark := OTHER_MARKS.search(conversation.text):
                notes[f"{mark[0]!r} in the text, a mark that isn't the target's chat template's: read as prose"] += 1
            for piece in _pieces(conversation.text, cuts, conversation.id, PROSE_TASK, dropped):
                yield number, piece


def _parsed(
    source: DataSource, path: str, dropped: Counter[str], notes: Counter[str], seen: set[str]
) -> Iterator[Conversation]:
    """Parse the records of a source."""
    assert source.source is not None  # DataSource has checked it
    parse, place = FORMS[source.source].parse, Path(path)
    name = place.name if place.exists() or not has_magic(path) else place.parent.name or "data"  # of a pattern, its folder's
    for index, record in enumerate(_records(source, path, notes)):
        conversation = parse(record, notes)
        if isinstance(conversation, str):
            dropped[conversation] += 1
        else:
            location = f"{name}:{index}"
            # A log's own ids may be private, and nothing needs them.
            id = location if source.source == TRAFFIC else _unique_id(record, location, seen)
            yield replace(conversation, id=id)


def _records(source: DataSource, path: str, notes: Counter[str]) -> Iterable[Any]:
    """Read the records of a source; `notes` count what can't be read of a log."""
    if is_local(path):
        # A log is written while it is read, or was cut.
        return read_records(record_files(path), notes if source.source == TRAFFIC else None)
    try:
        return load_records(path, split=source.split, subset=source.subset, file=source.file, revision=source.revision)
    except ValueError as error:
        option, local = ("data.path is", "data.path=") if isinstance(source, DataConfig) else ("data.sources has", "path: ")
        raise ValueError(f"{option} {path!r}: {error}. Check the name, or give a local file ({local}FILE)") from error


def _unique_id(record: dict[str, Any], location: str, seen: set[str]) -> str:
    # Some data sets repeat their ids; the location in the file makes them unique.
    record_id = next((record[key] for key in ID_KEYS if isinstance(record.get(key), str | int)), None)
    if isinstance(record_id, str) and has_surrogate(record_id):
        record_id = None
    id = location if record_id is None else str(record_id)
    number = 1
    while id in seen:
        id = f"{record_id}@{location}" if number == 1 and record_id is not None else f"{location}@{number}"
        number += 1
    seen.add(id)
    return id


def _files_of_text(path: str, cuts: Cuts, dropped: Counter[str]) -> Iterator[Conversation]:
    """Cut files of text or source code into conversations."""
    files, root = local_files(path), Path(path)
    if not files:
        raise ValueError(f"the directory {root} holds no file. Give a directory of text or source code files")
    for file in files:
        text = read_source(file)
        if text is None:
            dropped["file is not UTF-8 text"] += 1
        else:
            task = PROSE_TASK if file.suffix in PROSE_SUFFIXES else TASK
            id = file.relative_to(root.parent) if root.exists() else file
            yield from _pieces(text, cuts, id.as_posix(), task, dropped)


def _pieces(text: str, cuts: Cuts, id: str, task: str, dropped: Counter[str]) -> Iterator[Conversation]:
    pieces = list(cut_text(text, cuts, id=id, task=task))
    if not pieces:
        dropped["text too short to be cut into a prompt and an answer"] += 1
    yield from pieces


def has_records(path: str) -> bool:
    """Whether a path is files of records, and not texts or source code.

    Raises ValueError for a folder of both: JSON among source code is text, but conversations beside a
    README are not.
    """
    if not is_local(path):
        return True
    names = [file.name.lower() for file in local_files(path)]
    if names and all(name.endswith(SUFFIXES) for name in names):
        return True
    if sure := [name for name in names if name.endswith(SURE_SUFFIXES)]:
        raise ValueError(f"{path} has texts, and records such as {sure[0]}; give one of them by a pattern: {path}/*.jsonl")
    return False
