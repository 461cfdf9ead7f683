"""The policies of `distill.schedule`: shortest texts first, and S3's decreasing first fit.

S3 (arXiv 2306.06000) considers the longest requests first, and reserves the predicted length. This
is right if a batch stays together until its longest row ends. Here an evicted row resumes at no
cost except moving its keys and values. So by default the shortest texts go first, with less room
than they may need. Batches are then as wide as short texts allow. Rows that exceed their room wait
until there are enough of them for a wide batch of longer texts. `scripts/bench_scheduling.py`
compares both policies on real lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine import Request
from .buckets import Experience, Predicted
from .schedule import Order, Policy, Rectangle, Waiting
from .stopwatch import Stopwatch

RESERVED_SHARE = 0.5
"""Probability that an answer fits into its predicted length."""

UNKNOWN_SHARE = 0.25
"""Share of the maximum length that is reserved before any length is known."""


def shortest_text_first(waiting: Sequence[Waiting]) -> list[Waiting]:
    """Sort by the sum of prompt, answer so far and reservation.

    Batches are then wide, with little padding.
    """
    return sorted(waiting, key=lambda row: (row.num_read + row.num_reserved, row.index))


def longest_answer_first(waiting: Sequence[Waiting]) -> list[Waiting]:
    """Sort by decreasing reservation, so that rows of one batch end together.

    With first fit, this is S3's decreasing first fit.
    """
    return sorted(waiting, key=lambda row: (-row.num_reserved, row.index))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What differs between the policies."""

    order: Order
    part: float
    """Share of the predicted length that is reserved at first."""
    least_share: float
    """Share of unfinished rows below which a batch ends, see `Policy.least_share`."""
    held_budgets: int | None
    """Most memory of evicted rows on the host before no new request begins, in KV-memory budgets
    (see `Policy.most_held`)."""

    def policy(self, reservation: Predicted, budget: int) -> Policy:
        """Return the policy for a KV-memory budget in tokens."""
        return Policy(
            reservation=reservation,
            order=self.order,
            memory=Rectangle(),
            may_overtake=True,
            least_share=self.least_share,
            most_held=None if self.held_budgets is None else self.held_budgets * budget,
        )

    def reserve(
        self, experience: Experience, requests: Sequence[Request], *, max_new_tokens: int, learning: Stopwatch
    ) -> Predicted:
        """Return reservations for a call's requests, from `experience` on.

        `learning` counts the seconds of learning and predicting.
        """
        with learning:
            predictor, buckets = experience.recall()
        return Predicted(
            predictor,
            requests,
            share=RESERVED_SHARE,
            part=self.part,
            unknown=max(1, math.ceil(UNKNOWN_SHARE * max_new_tokens)),
            lessons=experience.lessons,
            buckets=buckets,
            learning=learning,
        )


POLICIES = {
    # An answer that needs more than half of its prediction is cheap, since nothing is read again.
    # Unused room makes batches narrow. A greater `least_share` means fewer steps but more
    # evictions, each of which moves a row's keys and values to the host and back.
    "shortest": Schedule(order=shortest_text_first, part=0.5, least_share=0.5, held_budgets=4),
    "s3": Schedule(order=longest_answer_first, part=1.0, least_share=0.0, held_budgets=None),
}
"""The policies by their names in `distill.schedule`."""
