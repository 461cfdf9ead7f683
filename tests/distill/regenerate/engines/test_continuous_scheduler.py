"""Continuous batching that admits requests by predicted length.

Answers stay equal, long requests come first, and reservations are kept.
"""

import pytest
import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from outrider.distill.regenerate.engine import Limits, Request
from outrider.distill.regenerate.engines.continuous import ContinuousEngine
from outrider.distill.regenerate.engines.continuous_scheduler import LengthAwareScheduler, num_written
from outrider.distill.regenerate.lengths.buckets import LEARN_FIRST, NUM_BUCKETS, Buckets, Experience, Predicted
from outrider.distill.regenerate.lengths.light import LightPredictor
from outrider.models.decoding import Sampling
from outrider.models.llm.hf_target import HFTarget

GREEDY = Sampling(temperature=0.0)


class ByFirstToken:
    """Predictor that returns the prompt's first token as the bucket."""

    def learn(self, requests: list[Request], buckets: torch.Tensor) -> None:
        pass

    def predict(self, requests: list[Request]) -> torch.Tensor:
        return torch.eye(NUM_BUCKETS)[[int(request.prompt_ids[0]) for request in requests]]


class FreeEntries(PagedAttentionCache):
    """Cache of which only the number of free entries is used."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.max_tokens_read = 1000

    def compute_free_capacity(self, relative: bool = True) -> float:
        return self.free / self.max_tokens_read

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        pass


BUCKETS = {"short": 0, "brief": 1, "one": 2, "next": 4, "running": 5, "middle": 5, "long": 9}


def make_scheduler(free: int) -> LengthAwareScheduler:
    """Make a scheduler whose buckets end at 10, 20 ... 100 tokens.

    It reserves the start of the predicted bucket and half of the bucket's width.
    """
    requests = [Request(id=name, prompt_ids=torch.full((5,), bucket), seed=0) for name, bucket in BUCKETS.items()]
    scheduler = LengthAwareScheduler(FreeEntries(free), 0.0, 8, experience=Experience(ByFirstToken), requests=requests)
    scheduler._predicted = Predicted(ByFirstToken(), requests, share=0.5, unknown=30)
    scheduler._predicted.buckets = Buckets.of(range(1, 101))
    return scheduler


def ask(scheduler: LengthAwareScheduler, name: str) -> RequestState:
    state = RequestState(request_id=name, initial_tokens=[BUCKETS[name]] * 5, max_new_tokens=120)
    scheduler.add_waiting_request(state)
    return state


def admitted(scheduler: LengthAwareScheduler) -> list[str]:
    return [state.request_id for state in scheduler._get_waiting_candidates()]


def test_the_longest_go_first_and_shorter_ones_that_fit_overtake() -> None:
    scheduler = make_scheduler(free=150)
    for name in ("short", "long", "middle", "brief"):
        ask(scheduler, name)
    # They need about 100, 21 and 11 entries. `middle` needs 61 and doesn't fit any more.
    assert admitted(scheduler) == ["long", "brief", "short"]


def test_a_running_request_keeps_its_reservation() -> None:
    scheduler = make_scheduler(free=100)
    running = ask(scheduler, "running")
    assert admitted(scheduler) == ["running"]
    scheduler.waiting_requests.pop("running")
    scheduler.waiting_requests_order.clear()
    scheduler.active_requests["running"] = running
    running.remaining_prefill_tokens, running.status = [], RequestStatus.DECODING
    needed = scheduler.num_needed(running)
    ask(scheduler, "next")
    assert scheduler.num_needed(running) == needed > 50
    assert admitted(scheduler) == []
    running.generated_tokens = [7] * 40
    assert scheduler.num_needed(running) == needed - 40
    assert admitted(scheduler) == ["next"]


def test_an_exceeded_reservation_is_doubled_up_to_the_limit() -> None:
    scheduler = make_scheduler(free=1000)
    state = ask(scheduler, "one")
    scheduler._get_waiting_candidates()
    promised = scheduler.num_needed(state) - 5
    state.remaining_prefill_tokens = []
    state.generated_tokens = [7] * promised
    assert scheduler.num_needed(state) == promised
    state.generated_tokens = [7] * 110
    assert scheduler.num_needed(state) == 10


def test_one_request_runs_even_if_none_fits() -> None:
    scheduler = make_scheduler(free=3)
    ask(scheduler, "short")
    ask(scheduler, "long")
    assert admitted(scheduler) == ["long"]


def test_unfinished_answers_count_as_longer_when_lengths_are_learnt() -> None:
    """The first answers to end are short ones.

    Without the others, all lengths would seem short.
    """
    observed: list[tuple[dict[int, int], dict[int, int]]] = []
    scheduler = make_scheduler(free=1000)
    running = {name: ask(scheduler, name) for name in ("short", "long")}
    for name, state in running.items():
        scheduler.active_requests[name] = state
        state.generated_tokens = [7] * 6
    assert scheduler._predicted is not None
    scheduler._predicted.observe = lambda lengths, unfinished: observed.append((dict(lengths), unfinished)) or False  # type: ignore[method-assign,func-returns-value]
    scheduler.finish_request("short")
    assert observed == [({0: 6}, {6: 6})]


def test_tokens_read_again_after_offloading_count_as_written() -> None:
    state = RequestState(request_id="one", initial_tokens=[1] * 5, max_new_tokens=20)
    state.generated_tokens = [7] * 6
    again = state.create_equivalent_initial_request()
    again.generated_tokens = [7] * 2
    assert num_written(again) == 8


@pytest.mark.parametrize("max_requests", [3, pytest.param(16, marks=pytest.mark.slow)])
def test_answers_are_those_of_first_come_first_served(
    target: HFTarget, requests: list[Request], limits: Limits, max_requests: int
) -> None:
    many = [Request(id=f"{r.id}/{copy}", prompt_ids=r.prompt_ids, seed=r.seed) for copy in range(4) for r in requests]
    schedulers: list[LengthAwareScheduler] = []

    def make(*args: object, **kwargs: object) -> LengthAwareScheduler:
        make_predictor = LightPredictor
        schedulers.append(LengthAwareScheduler(*args, **kwargs, experience=Experience(make_predictor)))  # type: ignore[arg-type]
        return schedulers[-1]

    answers = []
    for scheduler in (None, make):
        engine = ContinuousEngine(
            target, sampling=GREEDY, limits=limits, max_requests_per_batch=max_requests, scheduler=scheduler
        )
        answers.append({answer.id: answer.tokens.tolist() for answer in engine.answer(many)})
    assert answers[0] == answers[1]
    assert len(answers[1]) == len(many) > LEARN_FIRST
    assert len(schedulers) == 1
