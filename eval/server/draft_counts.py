"""A server's counts of its drafts: at /metrics, or with each answer."""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pydantic import BaseModel, NonNegativeInt, ValidationError

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
    before its first draft, and with an answer."""

    def plus(self, other: "DraftCounts", sign: int = 1) -> "DraftCounts":
        """Return the sum of two counts; with the sign -1, what was counted after `other`."""
        depths = zip_longest(self.by_depth, other.by_depth, fillvalue=0)
        return DraftCounts(
            steps=self.steps + sign * other.steps,
            drafted=self.drafted + sign * other.drafted,
            accepted=self.accepted + sign * other.accepted,
            by_depth=tuple(mine + sign * theirs for mine, theirs in depths),
        )


NO_DRAFTS = DraftCounts(steps=0, drafted=0, accepted=0, by_depth=())
"""Of an answer without steps."""


class _Speculative(BaseModel):
    """The drafts of a request, as vLLM counts them (its option --per-request-spec-decode-metrics)."""

    num_spec_steps: NonNegativeInt
    num_draft_tokens: NonNegativeInt
    num_accepted_draft_tokens: NonNegativeInt
    acceptance_histogram: list[NonNegativeInt]


class _Metrics(BaseModel):
    speculative_decoding: _Speculative


class _Timings(BaseModel):
    """The drafts of an answer, as llama.cpp counts them; it leaves them out where there were none."""

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


def drafts_of_reply(metrics: Any, timings: Any, num_tokens: int) -> DraftCounts | None:
    """Return the drafts of a reply of so many tokens, from what vLLM calls its metrics and llama.cpp its timings.

    None if there is neither, or if another server means something else by these names.
    """
    with suppress(ValidationError):
        counts = _Metrics.model_validate(metrics).speculative_decoding
        histogram = counts.acceptance_histogram
        return DraftCounts(
            steps=counts.num_spec_steps,
            drafted=counts.num_draft_tokens,
            accepted=counts.num_accepted_draft_tokens,
            by_depth=tuple(sum(histogram[depth:]) for depth in range(1, len(histogram))),
        )
    with suppress(ValidationError):
        drafts = _Timings.model_validate(timings)
        # There are neither steps nor depths here. Each step writes one token that no draft has; where a stop token ends
        # the answer, drafts behind it count as accepted, so that there are too few steps.
        steps = max(0, num_tokens - 1 - drafts.draft_n_accepted)
        return DraftCounts(steps=steps, drafted=drafts.draft_n, accepted=drafts.draft_n_accepted, by_depth=())
    return None
