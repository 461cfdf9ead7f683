"""Regeneration by transformers' continuous batching, with a paged KV cache."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from ....models.decoding.sampling import Sampling
from ....models.llm.hf_target import HFTarget
from ..dialogues import answer_seed
from ..engine import Answer, Limits, Request

SCHEDULER_NAME = "outrider"
POLL_SECONDS = 1.0
CPU_PAGE_TOKENS, CPU_BATCH_TOKENS = 32, 256
CPU_REQUESTS_PER_BATCH = 16
"""Number of longest texts that the cache is sized for on a CPU. Elsewhere transformers sizes it by
the free memory."""


@dataclass(frozen=True, slots=True)
class ContinuousEngine:
    """Engine that starts continuous batching for each call, and frees its cache afterwards.

    Greedy answers depend only on rounding. Sampled answers come from one random stream, seeded by
    the requests of the call. So on a CPU the same call gives the same answers, but an answer
    depends on the other requests. `scheduler` builds a scheduler that replaces first come, first
    served. It gets the arguments of the classes in transformers' `continuous_batching.scheduler`,
    and the call's `requests`.
    """

    target: HFTarget
    sampling: Sampling
    limits: Limits
    max_requests_per_batch: int | None = None
    scheduler: Callable[..., Any] | None = None

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Yield an answer to every request, as they end. Raises RuntimeError if a request fails."""
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        model: Any = self.target.model
        with torch.random.fork_rng(devices), self._registered_scheduler(requests) as scheduler_name:
            manager = model.init_continuous_batching(
                generation_config=self._generation_config(),
                continuous_batching_config=self._batching_config(requests, scheduler_name),
            )
            # Add all requests before the start, so that the first batch doesn't depend on timing.
            for request in requests:
                manager.add_request(
                    request.prompt_ids.tolist(),
                    request_id=request.id,
                    max_new_tokens=self.limits.room(len(request.prompt_ids)),
                    eos_token_id=list(self.target.stop_ids),
                )
            manager.start()
            try:
                for _ in requests:
                    yield self._wait(manager)
            finally:
                manager.stop(block=True, hard_stop=True)
                manager.destroy()

    def _wait(self, manager: Any) -> Answer:
        while True:
            result = manager.get_result(timeout=POLL_SECONDS)
            if result is not None and result.error is not None:
                raise RuntimeError(f"continuous batching failed the request {result.request_id!r}: {result.error}")
            if result is not None and result.is_finished():
                # Empty if the length limit left no room.
                tokens: list[int] = result.generated_tokens
                cut = not tokens or tokens[-1] not in self.target.stop_ids
                return Answer(id=result.request_id, tokens=torch.tensor(tokens, dtype=torch.long), cut=cut)
            if result is None and not manager.is_running():
                error = manager.background_thread_status.fatal_error
                raise RuntimeError(f"continuous batching ended before all requests were answered: {error}") from error

    def _generation_config(self) -> GenerationConfig:
        # A fresh configuration: the model's may contain penalties and filters that weren't
        # requested.
        config = GenerationConfig(
            do_sample=self.sampling.temperature > 0,
            eos_token_id=list(self.target.stop_ids),
            max_new_tokens=self.limits.max_new_tokens,
        )
        if config.do_sample:
            config.temperature = self.sampling.temperature
            config.top_k = self.sampling.top_k or 0
            config.top_p = self.sampling.top_p or 1.0
        return config

    def _batching_config(self, requests: Sequence[Request], scheduler_name: str) -> ContinuousBatchingConfig:
        config = ContinuousBatchingConfig(
            seed=answer_seed(0, ",".join(str(request.seed) for request in requests), 0),
            drop_unsupported_processors=False,
            scheduler_type=scheduler_name,
            max_requests_per_batch=self.max_requests_per_batch,
        )
        if self.target.device.type == "cpu":
            rows = self.max_requests_per_batch or CPU_REQUESTS_PER_BATCH
            prompts = [len(request.prompt_ids) for request in requests]
            longest = max(num_tokens + self.limits.room(num_tokens) for num_tokens in prompts)
            config.page_size = CPU_PAGE_TOKENS
            config.num_blocks = rows * (math.ceil(longest / CPU_PAGE_TOKENS) + 1)
            config.max_batch_tokens = max(rows, CPU_BATCH_TOKENS)
        return config

    @contextmanager
    def _registered_scheduler(self, requests: Sequence[Request]) -> Iterator[str]:
        if self.scheduler is None:
            yield "fifo"
            return
        # The configuration takes a scheduler's name, which transformers looks up in this table.
        from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

        table: dict[str, Any] = SCHEDULER_MAPPING
        table[SCHEDULER_NAME] = partial(self.scheduler, requests=requests)
        try:
            yield SCHEDULER_NAME
        finally:
            del table[SCHEDULER_NAME]
