"""What a server says of its drafts: in its counters at /metrics, or with each answer."""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest

from pydantic import BaseModel, NonNegativeInt

COUNT = re.compile(r'^\w+:spec_decode_num_(\w+)_total(?:\{(?:[^}]*\bposition="(\d+)")?[^}]*\})?\s+([\d.eE+]+)$', re.MULTILINE)
"""A counter of drafts in the text of /metrics, as vLLM and llama.cpp write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Drafts of some steps."""

    steps: int
    drafted: int
    accepted: int
    by_depth: tuple[int, ...]
    """How often the first draft token was accepted, the second, ...; empty if the server doesn't say, as llama.cpp
    before its first draft."""

    def plus(self, other: "DraftCounts", sign: int = 1) -> "DraftCounts":
        """Return the sum of two counts; with the sign -1, what was counted after `other`."""
        depths = zip_longest(self.by_depth, other.by_depth, fillvalue=0)
        return DraftCounts(
            steps=self.steps + sign * other.steps,
            drafted=self.drafted + sign * other.drafted,
            accepted=self.accepted + sign * other.accepted,
            by_depth=tuple(mine + sign * theirs for mine, theirs in depths),
        )


class Speculative(BaseModel):
    """What vLLM says of a request's drafts (its option --per-request-spec-decode-metrics)."""

    num_spec_steps: NonNegativeInt
    num_draft_tokens: NonNegativeInt
    num_accepted_draft_tokens: NonNegativeInt
    acceptance_histogram: list[NonNegativeInt]


class Metrics(BaseModel):
    """What vLLM says of a request."""

    speculative_decoding: Speculative | None = None


class Timings(BaseModel):
    """What llama.cpp says of an answer's drafts; nothing where it had none."""

    draft_n: NonNegativeInt = 0
    draft_n_accepted: NonNegativeInt = 0


def counted(metrics: str, url: str) -> DraftCounts | None:
    """Return what a server has counted, given the text of its /metrics; None if it doesn't say (llama.cpp: --metrics).

    Raises ValueError for a value that is no count.
    """
    sums: Counter[str] = Counter()
    by_depth: Counter[int] = Counter()
    for name, depth, value in COUNT.findall(metrics):
        try:
            count = round(float(value))
        except (ValueError, OverflowError):
            raise ValueError(f"{url}/metrics has {value} for {name}, which is no count") from None
        if depth:
            by_depth[int(depth)] += count
        else:
            sums[name] += count
    if not {"drafts", "draft_tokens", "accepted_tokens"} <= sums.keys():
        return None
    return DraftCounts(
        steps=sums["drafts"],
        drafted=sums["draft_tokens"],
        accepted=sums["accepted_tokens"],
        by_depth=tuple(by_depth[depth] for depth in sorted(by_depth)),
    )


def told(metrics: Metrics | None, timings: Timings | None, num_tokens: int) -> DraftCounts | None:
    """Return what a server has said of the drafts of an answer of so many tokens; None if it said nothing."""
    if metrics is not None and (said := metrics.speculative_decoding) is not None:
        by_depth = tuple(sum(said.acceptance_histogram[depth:]) for depth in range(1, len(said.acceptance_histogram)))
        accepted, drafted = said.num_accepted_draft_tokens, said.num_draft_tokens
        return DraftCounts(steps=said.num_spec_steps, drafted=drafted, accepted=accepted, by_depth=by_depth)
    if timings is None or not timings.draft_n:
        return None
    # llama.cpp tells neither steps nor depths here. Each step adds one token that no draft has.
    accepted = timings.draft_n_accepted
    return DraftCounts(steps=max(0, num_tokens - 1 - accepted), drafted=timings.draft_n, accepted=accepted, by_depth=())


NO_DRAFTS = DraftCounts(steps=0, drafted=0, accepted=0, by_depth=())
