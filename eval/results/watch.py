"""What servers accepted of their drafts, by their logs: tokens per step by week and category.

The unit is a conversation: its requests repeat each other, so they aren't independent. Requests belong to one
conversation if the words of its first question are the same. Each different one takes about half a kilobyte of memory.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import NormalDist
from typing import Any

from ...data.conversations import text_of
from ...data.fields import MAX_COUNT
from ...data.raw_records import line_of_record, read_records
from ...data.traffic import kind_of_request, reply_of, request_of, without_private

TIME_KEYS = ("timestamp", "time", "created_at", "created", "start_time", "startTime", "ts")
FIRST_SECOND, MILLISECONDS_FROM = 946_684_800, 1e11
"""The year 2000: earlier numbers are no times. Numbers from the second bound on are milliseconds, and a thousand and a
million times as large ones micro- and nanoseconds."""
NO_COUNTS = "requests without counts of drafts"
NO_TIME = "requests without a time (seconds, or as 2026-11-25T12:00:00Z), or with one in the future"
BAD_COUNTS = "requests with impossible counts of drafts"
LEAST_CONVERSATIONS = 20
"""Conversations of a group on each side below which nothing is concluded from it."""
CONFIDENCE = 0.95
WORD = re.compile(r"[^\W\d_]+")
NUMBER = re.compile(r"\d{9,}(?:\.\d*)?")
"""Seconds, or parts of them, as text. Without a sign and with fewer digits it would be a date."""
NUM_WORDS = 64
"""First words of a question by which repeated ones are found."""
CATEGORY_CHARS = 40

Key = tuple[str, str]
"""Week and category."""


def counts_of(reply: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the tokens and the steps of a reply; None if it doesn't count its drafts.

    vLLM writes them with `--per-request-spec-decode-metrics`, SGLang in its `meta_info`, and llama.cpp in its `timings`
    (see `is_undrafted`). The first two don't count the prefill's token. Raises ValueError for counts that can't be.
    """
    metrics, timings, meta = (reply.get(key) for key in ("metrics", "timings", "meta_info"))
    spec = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if isinstance(spec, Mapping):
        steps, accepted = spec.get("num_spec_steps"), spec.get("num_accepted_draft_tokens")
    elif isinstance(timings, Mapping) and timings.get("draft_n") is not None:
        accepted, tokens = timings.get("draft_n_accepted"), timings.get("predicted_n")
        steps = tokens - accepted if isinstance(tokens, int) and isinstance(accepted, int) else None
    elif isinstance(meta, Mapping) and meta.get("spec_verify_ct") is not None:
        steps, tokens = meta["spec_verify_ct"], meta.get("completion_tokens")
        accepted = tokens - steps if isinstance(tokens, int) and isinstance(steps, int) else None
    else:
        return None
    if not all(type(count) is int and 0 <= count < MAX_COUNT for count in (steps, accepted)):
        raise ValueError("counts of drafts are whole numbers from 0 on")
    return (steps + accepted, steps) if steps else None


def is_undrafted(reply: Mapping[str, Any]) -> bool:
    """Whether llama.cpp wrote this reply without a draft: it writes no counts then, with a drafter and without."""
    timings = reply.get("timings")
    if not isinstance(timings, Mapping) or timings.get("draft_n") is not None:
        return False
    tokens = timings.get("predicted_n")
    return type(tokens) is int and 0 < tokens < MAX_COUNT


def week_of(*bodies: Mapping[str, Any]) -> str | None:
    """Return the ISO week, in UTC, of the first time in a record or its reply, such as 2026-W48; None without one."""
    for value in (body[key] for body in bodies for key in TIME_KEYS if body.get(key)):
        try:
            time = _time(value).astimezone(UTC)
        except (ValueError, TypeError, OverflowError, OSError):
            continue
        if time <= datetime.now(UTC) + timedelta(days=1):
            year, week, _ = time.isocalendar()
            return f"{year:04}-W{week:02}"
    return None


def _time(value: Any) -> datetime:
    """Return the time of a number or a text. Raises ValueError or TypeError for another value."""
    if isinstance(value, str) and not NUMBER.fullmatch(value):
        value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    seconds = float(value)
    while seconds >= MILLISECONDS_FROM and math.isfinite(seconds):
        seconds /= 1000
    if seconds < FIRST_SECOND:
        raise ValueError("too early for a time")
    return datetime.fromtimestamp(seconds, UTC)


def category_of(record: Mapping[str, Any], request: Mapping[str, Any], key: str | None) -> str:
    """Return a request's category: the value of a key of the record, its request or their metadata, or by what it asks for."""
    if key is not None:
        for body in (record, request):
            for place in (body, body.get("metadata")):
                if isinstance(place, Mapping) and isinstance(value := place.get(key), str | int) and value != "":
                    text = without_private(str(value), set())[:CATEGORY_CHARS]
                    return "".join(char if char.isprintable() else "?" for char in text)
        return "(none)"
    return kind_of_request(bool(request.get("tools") or request.get("functions")), _question(request, last=True))


def _question(request: Mapping[str, Any], *, last: bool) -> str:
    """Return the first or the last text of the user."""
    messages = request.get("messages")
    messages = messages if isinstance(messages, list) else []
    for message in reversed(messages) if last else messages:
        if isinstance(message, Mapping) and message.get("role") == "user":
            return text_of(message.get("content")) or ""
    return ""


@dataclass(slots=True)
class Conversation:
    """The sums over the requests of a conversation, or of all that begin with the same words."""

    file: int
    index: int
    """Number of the file, and of the first record in it."""
    count: int = 0
    tokens: int = 0
    steps: int = 0

    def add(self, count: int, tokens: int, steps: int) -> None:
        self.count, self.tokens, self.steps = self.count + count, self.tokens + tokens, self.steps + steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Requests of a group, and the tokens per step of its conversations."""

    count: int
    num_conversations: int
    ratio: float
    deviation: float
    """Standard deviation of log(tokens per step), by the delta method; infinite for one conversation."""

    @classmethod
    def of(cls, conversations: Iterable[Conversation]) -> "Sums":
        """Sum over conversations, of which there is at least one."""
        rows = [(one.count, one.tokens, one.steps) for one in conversations]
        number, tokens, steps = len(rows), sum(row[1] for row in rows), sum(row[2] for row in rows)
        ratio = tokens / steps
        squares = sum((t - ratio * s) ** 2 for _, t, s in rows)
        deviation = math.sqrt(squares * number / (number - 1)) / tokens if number > 1 else math.inf
        return cls(count=sum(row[0] for row in rows), num_conversations=number, ratio=ratio, deviation=deviation)

    def interval(self, z: float) -> tuple[float, float]:
        """Return the bounds at so many standard deviations."""
        return self.ratio * math.exp(-z * self.deviation), self.ratio * math.exp(z * self.deviation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Tokens per step of the last week over those of the weeks before."""

    category: str
    """Empty for all requests."""
    last: Sums
    before: Sums
    ratio: float
    low: float
    """Bound of the interval. All changes together are inside theirs with 95 %, so one of many isn't found by chance."""
    high: float

    @property
    def has_enough(self) -> bool:
        """Whether both sides have enough conversations for a conclusion."""
        return min(self.last.num_conversations, self.before.num_conversations) >= LEAST_CONVERSATIONS

    def fell(self, least: float) -> bool:
        """Whether tokens per step fell, by the share `least` or more, and not by chance."""
        return self.has_enough and self.high < 1 and self.ratio <= 1 - least


@dataclass(slots=True)
class Watch:
    """What the logs say."""

    files: list[Path]
    groups: dict[Key, dict[bytes, Conversation]] = field(default_factory=dict)
    """Conversations by the digest of their first question's words."""
    notes: Counter[str] = field(default_factory=Counter)
    """What wasn't used."""

    def add(self, key: Key, question: str, counts: tuple[int, int], file: int, index: int) -> None:
        """Add a request."""
        words = " ".join(WORD.findall(question.lower())[:NUM_WORDS])
        digest = hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=12).digest()
        self.groups.setdefault(key, {}).setdefault(digest, Conversation(file, index)).add(1, *counts)

    def add_all(self, other: "Watch") -> None:
        """Add all requests of another one."""
        for key, conversations in other.groups.items():
            _merge(self.groups.setdefault(key, {}), conversations)

    def sums(self, keys: Iterable[Key]) -> Sums:
        """Return the sums of some groups; a conversation in several of them counts once."""
        return Sums.of(self._conversations(keys).values())

    def weeks(self) -> dict[str, Sums]:
        """Return the sums of each week, in order."""
        weeks = sorted({week for week, _ in self.groups})
        return {week: self.sums([key for key in self.groups if key[0] == week]) for week in weeks}

    def last_week(self) -> str:
        """Return the last week that has enough conversations for a conclusion; without any, the last one."""
        weeks = self.weeks()
        enough = [week for week, sums in weeks.items() if sums.num_conversations >= LEAST_CONVERSATIONS]
        return (enough or [*weeks])[-1]

    def changes(self) -> list[Change]:
        """Compare the last week with those before it: all requests, and each category that both have."""
        week, pairs = self.last_week(), list[tuple[str, Sums, Sums]]()
        for category in ("", *sorted({category for _, category in self.groups})):
            keys = [key for key in self.groups if category in ("", key[1])]
            sides = [key for key in keys if key[0] == week], [key for key in keys if key[0] < week]
            if all(sides):
                pairs.append((category, self.sums(sides[0]), self.sums(sides[1])))
        num_tested = sum(all(side.num_conversations >= LEAST_CONVERSATIONS for side in sides) for _, *sides in pairs)
        z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / max(1, num_tested))  # Bonferroni
        found = []
        for category, now, before in pairs:
            ratio, width = now.ratio / before.ratio, z * math.hypot(now.deviation, before.deviation)
            low, high = ratio * math.exp(-width), ratio * math.exp(width)
            found.append(Change(category=category, last=now, before=before, ratio=ratio, low=low, high=high))
        return found

    def costliest(self, number: int) -> list[Conversation]:
        """Return the questions that cost the most steps beyond those at the mean tokens per step."""
        questions = self._conversations(self.groups).values()
        mean = Sums.of(questions).ratio
        beyond = sorted(questions, key=lambda one: one.tokens / mean - one.steps)
        return [one for one in beyond[:number] if one.steps > one.tokens / mean]

    def place(self, one: Conversation) -> str:
        """Return the file and line of a question's first record. Its text may be private."""
        file = self.files[one.file]
        line = line_of_record(file, one.index)
        return f"{file}:{line}" if line is not None else f"{file}, record {one.index + 1}"

    def _conversations(self, keys: Iterable[Key]) -> dict[bytes, Conversation]:
        merged = dict[bytes, Conversation]()
        for key in keys:
            _merge(merged, self.groups[key])
        return merged


def _merge(into: dict[bytes, Conversation], conversations: Mapping[bytes, Conversation]) -> None:
    for digest, one in conversations.items():
        into.setdefault(digest, Conversation(one.file, one.index)).add(one.count, one.tokens, one.steps)


def watch(files: Iterable[Path], category: str | None = None) -> Watch:
    """Read logs of chat requests and replies. Raises ValueError if none of them counts its drafts."""
    found = Watch(list(dict.fromkeys(files)))
    undrafted, has_drafter = Watch(found.files), False  # llama.cpp's replies without drafts, and whether it ever drafted
    for number, file in enumerate(found.files):
        for index, record in enumerate(read_records([file], found.notes)):
            if not isinstance(record, Mapping):
                found.notes[NO_COUNTS] += 1
                continue
            reply, request = reply_of(record), request_of(record)
            without = is_undrafted(reply)
            try:
                counts = (reply["timings"]["predicted_n"],) * 2 if without else counts_of(reply)
            except ValueError:
                found.notes[BAD_COUNTS] += 1
                continue
            has_drafter = has_drafter or (counts is not None and not without and "timings" in reply)
            if counts is None:
                found.notes[NO_COUNTS] += 1
            elif (week := week_of(record, reply)) is None:
                found.notes[NO_TIME] += 1
            else:
                key = (week, category_of(record, request, category))
                (undrafted if without else found).add(key, _question(request, last=False), counts, number, index)
    if has_drafter:
        found.add_all(undrafted)
    elif undrafted.groups:
        found.notes[NO_COUNTS] += undrafted.sums(undrafted.groups).count
    if not found.groups:
        described = ", ".join(f"{count} {note}" for note, count in found.notes.most_common())
        raise ValueError(
            f"no request of the log can be counted: {described or 'it is empty'}. Start the server so that its replies have "
            "counts (vLLM: --per-request-spec-decode-metrics summary; llama.cpp with a drafter has them), and log a time with "
            "each"
        )
    return found
