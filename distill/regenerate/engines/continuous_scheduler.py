"""Admission by predicted length for transformers' continuous batching, longest first.

First come, first served admits a request as soon as its prompt has room, and offloads requests when
the answers exceed the cache. Here a request is admitted if its prompt and predicted answer fit into
the free cache entries, less those promised to running requests. The longest requests go first, and
shorter ones that fit overtake (first fit). If a request exceeds its promise, the promise is
doubled.
"""

import math
from collections.abc import Sequence
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from ..engine import Request
from ..lengths.buckets import Experience, Predicted

RESERVED_SHARE = 0.5
"""Probability that an answer fits into its promised length. A sum of many is more certain than
each."""

UNKNOWN_SHARE = 0.25
"""Share of the maximum length that is promised before any length is known."""


class LengthAwareScheduler(FIFOScheduler):
    """Scheduler that admits waiting requests by length, after those that decode.

    It learns lengths as requests end. Pass `functools.partial(LengthAwareScheduler,
    experience=...)` to `ContinuousEngine`, which adds the `requests` of a call. `reset` forgets
    the lengths of this call.
    """

    def __init__(
        self,
        cache: PagedAttentionCache,
        safety_margin: float | None,
        max_requests_per_batch: int,
        *,
        experience: Experience,
        requests: Sequence[Request],
    ) -> None:
        self._experience = experience
        self._requests = requests
        self._index = {request.id: index for index, request in enumerate(requests)}
        super().__init__(cache, safety_margin, max_requests_per_batch)

    def reset(self) -> None:
        super().reset()
        self._promised: dict[str, int] = {}
        self._lengths: dict[int, int] = {}
        self._predicted: Predicted | None = None

    def finish_request(self, request_id: str) -> None:
        state = self.active_requests.get(request_id)
        super().finish_request(request_id)
        if state is None or request_id not in self._index:
            return
        self._lengths[self._index[request_id]] = max(1, num_written(state))
        running = [other for other in self.active_requests.values() if other.request_id in self._index]
        written = {self._index[other.request_id]: max(1, num_written(other)) for other in running}
        if self._reservation(state).observe(self._lengths, written):
            for waiting in self.waiting_requests:
                self._promised.pop(waiting, None)

    def num_needed(self, state: RequestState) -> int:
        """Return the cache entries that a request still needs: unread prompt, promised answer."""
        written, limit = num_written(state), state.max_new_tokens or math.inf
        promised = self._promised.get(state.request_id, 1)
        while promised <= written:
            promised *= 2
        left = min(promised, written + limit - state.generated_len()) - written
        return int(len(state.remaining_prefill_tokens) + max(0, left))

    def _get_waiting_candidates(self) -> list[RequestState]:
        """Return the requests that fit, longest first; if nothing runs, at least the first one."""
        waiting = super()._get_waiting_candidates()
        self._promise(waiting)
        waiting.sort(key=lambda state: (not state.is_cpu_offloaded, -self.num_needed(state), self._index[state.request_id]))
        free = self.cache.compute_free_capacity() * self.cache.max_tokens_read
        free -= sum(self.num_needed(state) for state in self.active_requests.values())
        admitted: list[RequestState] = []
        for state in waiting:
            if self.num_needed(state) <= free or not (admitted or self.active_requests):
                admitted.append(state)
                free -= self.num_needed(state)
        return admitted

    def _promise(self, waiting: Sequence[RequestState]) -> None:
        new = [state for state in waiting if state.request_id not in self._promised]
        if new:
            indices = [self._index[state.request_id] for state in new]
            tokens = self._reservation(new[0]).reserve(indices)
            self._promised |= {state.request_id: num for state, num in zip(new, tokens, strict=True)}

    def _reservation(self, state: RequestState) -> Predicted:
        if self._predicted is None:
            unknown = math.ceil(UNKNOWN_SHARE * (state.max_new_tokens or 1))
            predictor, buckets = self._experience.recall()
            self._predicted = Predicted(
                predictor,
                self._requests,
                share=RESERVED_SHARE,
                unknown=unknown,
                lessons=self._experience.lessons,
                buckets=buckets,
            )
        return self._predicted


def num_written(state: Any) -> int:
    """Count the answer's tokens so far.

    This includes tokens that an offloaded request reads again.
    """
    reread = len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
    return reread + state.generated_len()
