"""What servers accepted of their drafts, by their logs: tokens per step by week and category.

Requests are the unit. A ratio of sums has a normal interval by the delta method, which needs five sums of a group and
no list of its requests, so a log of any length takes little memory.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import NormalDist
from typing import Any

from ...data.conversations import text_of
from ...data.fields import MAX_COUNT
from ...data.raw_records import line_of_record, read_records
from ...data.traffic import kind_of_request, reply_of, request_of

TIME_KEYS = ("timestamp", "time", "created_at", "created", "start_time", "startTime", "ts")
MILLISECONDS_FROM = 1e11
"""Numbers from here on are times in milliseconds: as seconds they would be in the year 5138."""
NO_COUNTS, NO_TIME = "requests without counts of drafts", "requests without a time, or with one in the future"
BAD_COUNTS = "requests with impossible counts of drafts"
LEAST_REQUESTS = 20
"""Requests of a group on each side below which nothing is concluded from it."""
CONFIDENCE = 0.95
WORD = re.compile(r"[^\W\d_]+")
NUM_WORDS = 64
"""First words of a question by which repeated ones are found."""


def counts_of(reply: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the tokens and the steps of a reply, without the prefill's; None if it doesn't count its drafts.

    vLLM writes them with `--per-request-spec-decode-metrics`, llama.cpp in its `timings`, and SGLang in its `meta_info`.
    Raises ValueError for counts that can't be.
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


def week_of(*bodies: Mapping[str, Any]) -> str | None:
    """Return the ISO week of the first time in a record or its reply, such as 2026-W48; None without one."""
    for value in (body[key] for body in bodies for key in TIME_KEYS if body.get(key)):
        try:
            time = _time(value)
        except (ValueError, TypeError, OverflowError, OSError):
            continue
        if time <= datetime.now(UTC) + timedelta(days=1):
            year, week, _ = time.isocalendar()
            return f"{year:04}-W{week:02}"
    return None


def _time(value: Any) -> datetime:
    """Return the time of a number of seconds or milliseconds, or of a text. Raises ValueError or TypeError for others."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    seconds = float(value)
    return datetime.fromtimestamp(seconds / 1000 if seconds > MILLISECONDS_FROM else seconds, UTC)


def category_of(record: Mapping[str, Any], request: Mapping[str, Any], key: str | None) -> str:
    """Return a request's category: the value of a key of the record, its request or their metadata, or by what it asks for."""
    if key is not None:
        for body in (record, request):
            for place in (body, body.get("metadata")):
                if isinstance(place, Mapping) and isinstance(value := place.get(key), str | int) and value != "":
                    return str(value)
        return "(none)"
    return kind_of_request(bool(request.get("tools") or request.get("functions")), _question(request))


def _question(request: Mapping[str, Any]) -> str:
    """Return the last text of the user."""
    messages = request.get("messages")
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return text_of(message.get("content")) or ""
    return ""


@dataclass(slots=True)
class Sums:
    """Sums over the requests of a group, of tokens t and steps s."""

    count: int = 0
    t: float = 0.0
    s: float = 0.0
    tt: float = 0.0
    ts: float = 0.0
    ss: float = 0.0

    def add(self, tokens: int, steps: int) -> None:
        self.count, self.t, self.s = self.count + 1, self.t + tokens, self.s + steps
        self.tt, self.ts, self.ss = self.tt + tokens**2, self.ts + tokens * steps, self.ss + steps**2

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def ratio(self) -> float:
        """Tokens per step."""
        return self.t / self.s

    @property
    def deviation(self) -> float:
        """Standard deviation of log(tokens per step); infinite for one request."""
        if self.count < 2:
            return math.inf
        r = self.ratio
        return math.sqrt(max(0.0, self.tt - 2 * r * self.ts + r * r * self.ss) * self.count / (self.count - 1)) / self.t

    def interval(self, z: float) -> tuple[float, float]:
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

    def fell(self, least: float) -> bool:
        """Whether tokens per step fell, by the share `least` or more, and not by chance."""
        enough = min(self.last.count, self.before.count) >= LEAST_REQUESTS
        return enough and self.high < 1 and self.ratio <= 1 - least


@dataclass(slots=True)
class Repeated:
    """A question that was asked once or several times, by its words without numbers."""

    file: Path
    index: int
    """Of the first record."""
    sums: Sums = field(default_factory=Sums)

    @property
    def place(self) -> str:
        """The file and line of the first one. Its text may be private."""
        line = line_of_record(self.file, self.index)
        return f"{self.file}:{line}" if line is not None else f"{self.file}, record {self.index + 1}"


@dataclass(slots=True)
class Watch:
    """What the logs say."""

    groups: dict[tuple[str, str], Sums] = field(default_factory=dict)
    """By week and category."""
    questions: dict[bytes, Repeated] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    """What wasn't used."""

    @property
    def weeks(self) -> dict[str, Sums]:
        """The sums of each week, in order."""
        weeks = dict[str, Sums]()
        for (week, _), sums in sorted(self.groups.items()):
            weeks[week] = weeks.get(week, Sums()) + sums
        return weeks

    def changes(self) -> list[Change]:
        """Compare the last week with those before: all requests, and each category that both have."""
        last = max(week for week, _ in self.groups)
        sides: dict[str, tuple[Sums, Sums]] = {}
        for (week, category), sums in sorted(self.groups.items()):
            for group in ("", category):
                now, before = sides.get(group, (Sums(), Sums()))
                sides[group] = (now + sums, before) if week == last else (now, before + sums)
        pairs = [(category, now, before) for category, (now, before) in sides.items() if now.count and before.count]
        z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / max(1, len(pairs)))  # Bonferroni
        found = []
        for category, now, before in pairs:
            ratio, width = now.ratio / before.ratio, z * math.hypot(now.deviation, before.deviation)
            low, high = (ratio * math.exp(sign * width) for sign in (-1, 1))
            found.append(Change(category=category, last=now, before=before, ratio=ratio, low=low, high=high))
        return found

    def costliest(self, number: int) -> list[tuple[Repeated, float]]:
        """Return the questions that cost the most steps beyond those at the mean tokens per step, with their number."""
        mean = sum(self.groups.values(), Sums()).ratio
        beyond = [(question, question.sums.s - question.sums.t / mean) for question in self.questions.values()]
        beyond.sort(key=lambda pair: -pair[1])
        return [pair for pair in beyond[:number] if pair[1] > 0]


def watch(files: Iterable[Path], category: str | None = None) -> Watch:
    """Read logs of chat requests and replies. Raises ValueError if none of them counts its drafts."""
    found = Watch()
    for file in files:
        for index, record in enumerate(read_records(file, found.notes)):
            if not isinstance(record, Mapping):
                found.notes[NO_COUNTS] += 1
                continue
            reply, request = reply_of(record), request_of(record)
            try:
                counts = counts_of(reply)
            except ValueError:
                found.notes[BAD_COUNTS] += 1
                continue
            if counts is None:
                found.notes[NO_COUNTS] += 1
            elif (week := week_of(record, reply)) is None:
                found.notes[NO_TIME] += 1
            else:
                group = (week, category_of(record, request, category))
                found.groups.setdefault(group, Sums()).add(*counts)
                words = WORD.findall(_question(request).lower())[:NUM_WORDS]
                key = hashlib.blake2b(" ".join(words).encode("utf-8", "replace"), digest_size=12).digest()
                found.questions.setdefault(key, Repeated(file, index)).sums.add(*counts)
    if not found.groups:
        described = ", ".join(f"{count} {note}" for note, count in found.notes.most_common())
        raise ValueError(
            f"no request of the log can be counted: {described}. Start the server so that its replies have counts (vLLM: "
            "--per-request-spec-decode-metrics summary; llama.cpp with a drafter always has them), and log a time with each"
        )
    return found
