"""Pipelined speculation: whatever the clock does, the tokens are those of plain decoding."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from random import Random
from typing import Any

import pytest
import torch

from outrider.models.decoding import pipelined
from outrider.models.decoding.acceptance import GreedyAcceptance, TypicalAcceptance
from outrider.models.decoding.loop import NullDrafter, generate
from outrider.models.decoding.pipelined import generate_pipelined
from outrider.models.decoding.sampling import Sampling
from outrider.models.decoding.speculation import ExpectedSpeculation
from outrider.models.decoding.stopping import Finish
from outrider.models.decoding.types import Step, TargetOutput
from outrider.models.decoding.window import DraftRun, Keep, Known, PassAnswer, Window

from .schedules import FAULTS, Scheduler
from .streaming_toys import (
    DRAFTERS,
    NUM_TOKENS,
    POLICIES,
    DialledDrafter,
    DialledState,
    RandomSpeculation,
    Schedule,
    options,
    schedules,
)
from .toy_stages import ToyStage, ToyTarget, Work


@cache
def plain(
    prompt: tuple[int, ...], num_stages: int, is_sampled: bool = False, num_tokens: int = 2 * NUM_TOKENS
) -> tuple[int, ...]:
    """Return the answer of plain decoding. Another number of stages is another target."""
    target, ids = ToyTarget(num_stages, 0), torch.tensor([prompt])
    steps = generate(target, NullDrafter(), prompts=ids, max_new_tokens=num_tokens, **options(is_sampled))
    return tuple(token for step in steps for token in step.tokens[0])


def text_of(schedule: Schedule) -> tuple[int, ...]:
    """Return the answer of plain decoding, and more: drafters draft past an answer's end."""
    return plain(schedule.prompt, schedule.num_stages, schedule.is_sampled)


def expected(schedule: Schedule) -> list[int]:
    return [*text_of(schedule)[: schedule.max_new_tokens]]


def decode(schedule: Schedule, target_class: type[ToyTarget] = ToyTarget) -> tuple[list[Step], ToyTarget]:
    seed = schedule.seed
    target = target_class(schedule.num_stages, seed, FAULTS[seed // 7 % len(FAULTS)])
    target.max_runs = 1 + seed // 3 % (2 * target.max_runs)
    drafter = DialledDrafter(text_of(schedule), seed=seed, **DRAFTERS[schedule.drafter])
    steps = generate_pipelined(
        target,
        drafter,
        prompts=torch.tensor([schedule.prompt]),
        max_new_tokens=schedule.max_new_tokens,
        speculation=POLICIES[seed // 3 % len(POLICIES)](seed),
        **options(schedule.is_sampled),
    )
    return list(steps), target


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens[0]]


def check(count: int) -> None:
    """Hold schedules against plain decoding. Every one ends: `receive` fails if nothing can move."""
    visited = num_adopted = num_accepted = num_skipped = num_moves = 0
    for schedule in schedules(count):
        steps, target = decode(schedule)
        assert tokens_of(steps) == expected(schedule), schedule
        for stage in target.stages[1:]:
            assert stage.handled == target.stages[0].handled[: len(stage.handled)], "stages executed different messages"
        visited += 1
        num_moves += target.scheduler.num_moves
        num_skipped += target.num_skipped
        num_adopted += target.stages[0].num_adopted
        num_accepted += sum(step.num_accepted[0] for step in steps)
    assert visited >= count
    # The schedules have what they are about, and the texts differ.
    assert len({text_of(schedule) for schedule in schedules(count)}) > min(count / 2, 150)  # few prompts and rules: 152 in all
    assert num_moves > 10 * count
    assert num_skipped > count
    assert num_adopted > count / 3
    assert num_accepted > count / 8


@pytest.mark.parametrize(
    "count",
    [50, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.long])],
)
def test_no_schedule_changes_a_token_or_deadlocks(count: int):
    check(count)


# --- logits that aren't numbers


class DamagedTarget(ToyTarget):
    """A target whose logits aren't numbers after its prompt's answer has begun."""

    def receive(self) -> PassAnswer:
        answer = super().receive()
        if answer.output is not None:
            answer.output.logits[:] = torch.inf
        return answer


def test_a_root_without_numbers_ends_the_answer_with_an_error():
    for schedule in schedules(10):
        if schedule.max_new_tokens > 1:
            with pytest.raises(ValueError, match="the target's logits are infinite at token 2 of the answer in row 0"):
                decode(schedule, DamagedTarget)


class RecordingTarget(ToyTarget):
    """A target that records what its last stage holds of each entry."""

    def begin(self) -> None:
        super().begin()
        self.states: set[int] = set()

    def output(self, states: Sequence[int]) -> TargetOutput:
        self.states.update(states)
        return super().output(states)


@cache
def states_of_text(prompt: tuple[int, ...], num_stages: int, is_sampled: bool) -> set[int]:
    """Return what the last stage holds of the entries of the text."""
    target = RecordingTarget(num_stages, 0)
    steps = generate(
        target, NullDrafter(), prompts=torch.tensor([prompt]), max_new_tokens=2 * NUM_TOKENS, **options(is_sampled)
    )
    assert sum(len(step.tokens[0]) for step in steps) == 2 * NUM_TOKENS
    return target.states


def test_a_nan_off_the_accepted_path_changes_no_token():
    num_holes = 0
    for schedule in schedules(40):
        text = states_of_text(schedule.prompt, schedule.num_stages, schedule.is_sampled)

        class HoleTarget(ToyTarget):
            def output(self, states: Sequence[int], text: set[int] = text) -> TargetOutput:
                nonlocal num_holes
                output = super().output(states)
                holes = [row for row, state in enumerate(states) if state not in text]
                output.logits[:, holes] = torch.nan
                num_holes += len(holes)
                return output

        steps, _ = decode(schedule, HoleTarget)
        assert tokens_of(steps) == expected(schedule), schedule
    assert num_holes > 100


# --- mutants: what the schedules must catch


class KeepsLate(ToyStage):
    """A stage that reads a run before it drops what the run's keep drops."""

    def handle(self, work: Work) -> Work:
        if work.states is None or self.is_skipped(work.run) or work.run.keep is None:
            return super().handle(work)
        before = [*self.window]
        states = [self.read(work.run, work.run.num_read + row, state) for row, state in enumerate(work.states)]
        self.window = before
        self.keep(work.run.keep)
        self.window += states
        return replace(work, states=states)


class MixesSurvivors(ToyStage):
    """A stage that keeps the entries that stay in another order."""

    def keep(self, keep: Keep | None) -> None:
        super().keep(keep)
        self.window[1:] = self.window[:0:-1]


class IsOneOff(ToyStage):
    """A stage whose positions are one off after an adoption."""

    def keep(self, keep: Keep | None) -> None:
        super().keep(keep)
        if keep is not None and len(keep.entries) > keep.num_committed:
            self.length += 1


class SkipsAll(ToyStage):
    """A stage that skips live runs that come behind a cancelled one."""

    def is_skipped(self, run: DraftRun) -> bool:
        return any(number < run.number for number in self.cancelled)


def target_of(stage: type[ToyStage]) -> type[ToyTarget]:
    class Mutant(ToyTarget):
        def new_stage(self, number: int) -> ToyStage:
            return stage(number)

    return Mutant


class CancelsHalfDead(Window):
    """A window that cancels runs with one live entry."""

    def follow(self, tokens: Sequence[int]) -> list[int]:
        dead = super().follow(tokens)
        return [*dead, *(number for number, nodes in self.runs.items() if -2 in nodes)]


class AdoptsAnywhere(Window):
    """A window that adopts a bonus token that was sent below another parent."""

    def follow(self, tokens: Sequence[int]) -> list[int]:
        if self.tree.rerooted(tokens) is None and tokens[-1] in self.tree.tokens:
            node = self.tree.tokens.index(tokens[-1])
            path = []
            while node != -1:
                path.insert(0, self.tree.tokens[node])
                node = self.tree.parents[node]
            return super().follow(path)
        return super().follow(tokens)


class MatchesByArrival(Window):
    """A window that takes each answer for that to the oldest live run."""

    def learn(self, number: int) -> Known | None:
        return super().learn(next(iter(self.runs), number))


@pytest.mark.parametrize("stage", [KeepsLate, MixesSurvivors, IsOneOff, SkipsAll])
def test_a_broken_stage_is_caught(stage: type[ToyStage]):
    assert is_caught(target_of(stage))


@pytest.mark.parametrize("window", [CancelsHalfDead, AdoptsAnywhere, MatchesByArrival])
def test_a_broken_window_is_caught(window: type[Window], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipelined, "Window", window)
    assert is_caught(ToyTarget)


def is_caught(target: type[ToyTarget]) -> bool:
    """Return whether the first hundreds of schedules show a wrong token or fail."""
    for schedule in schedules(400):
        try:
            steps, _ = decode(schedule, target)
        except (AssertionError, LookupError):
            return True
        if tokens_of(steps) != expected(schedule):
            return True
    return False


# --- ends of answers


def run(target: ToyTarget, drafter: DialledDrafter, prompt: Sequence[int], **options: Any) -> list[Step]:
    return list(generate_pipelined(target, drafter, GreedyAcceptance(), torch.tensor([prompt]), **options))


ORACLE = {"acceptance": 1.0, "confidence": 0.99}
PROMPT = (1, 2, 3)


def oracle(prompt: tuple[int, ...] = PROMPT, num_stages: int = 3) -> DialledDrafter:
    return DialledDrafter(plain(prompt, num_stages), **ORACLE)


@pytest.mark.parametrize("seed", range(12))
def test_a_stop_token_inside_an_adopted_path_ends_the_answer(seed: int):
    text = plain(PROMPT, 3)
    for stop in sorted(set(text)):
        steps = run(ToyTarget(3, seed), oracle(), PROMPT, max_new_tokens=NUM_TOKENS, stop_ids=[stop])
        assert tokens_of(steps) == list(text[: text.index(stop) + 1])
        assert steps[-1].finishes == (Finish.STOP_TOKEN,)


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_new_tokens_inside_an_adopted_path_ends_the_answer_and_nothing_beyond_is_sent(limit: int):
    target = ToyTarget(3, limit)
    sent: list[DraftRun] = []
    submit = target.submit
    target.submit = lambda run: (sent.append(run), submit(run))[1]  # type: ignore[method-assign]
    steps = run(target, oracle(), PROMPT, max_new_tokens=limit)
    assert tokens_of(steps) == list(plain(PROMPT, 3)[:limit])
    assert steps[-1].finishes == (Finish.LENGTH,)
    # The oracle is always right, so each token but the last is sent exactly once.
    assert sum(len(run.tokens) for run in sent) == limit - 1


@pytest.mark.parametrize("seed", range(6))
def test_the_context_window_ends_inside_a_tree(seed: int):
    prompt = tuple(Random(seed).choices(range(6), k=ToyTarget.context_length - 4 - seed))
    text = plain(prompt, 2, num_tokens=ToyTarget.context_length)
    assert len(text) == 4 + seed
    steps = run(ToyTarget(2, seed), DialledDrafter([*text, *[0] * 30], **ORACLE), prompt, max_new_tokens=50)
    assert tokens_of(steps) == list(text)
    assert steps[-1].finishes == (Finish.CONTEXT,)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_an_unfinished_answer_leaves_nothing_to_the_next_one(num_steps: int):
    target = ToyTarget(3, 1)
    steps = generate_pipelined(target, oracle(), GreedyAcceptance(), torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS)
    list(islice(steps, num_steps))
    steps.close()
    other = (4, 4)
    assert tokens_of(run(target, oracle(other), other, max_new_tokens=NUM_TOKENS)) == list(plain(other, 3)[:NUM_TOKENS])


def test_a_target_that_has_begun_another_text_is_not_asked_on():
    target = ToyTarget(3, 1)
    steps = generate_pipelined(target, oracle(), GreedyAcceptance(), torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS)
    next(steps)
    target.prefill(pipelined.Prompts.of(torch.tensor([PROMPT])), max_new_tokens=1, max_nodes=0)
    with pytest.raises(RuntimeError, match="another batch"):
        next(steps)


def test_a_drafter_gets_the_output_of_the_committed_tokens():
    """In a tree the accepted path isn't made of the first nodes."""
    longest = 0

    class Checks(DialledDrafter):
        def follow(self, state: DialledState, tokens: Sequence[int], output: TargetOutput, *options: Any) -> DialledState:
            nonlocal longest
            longest = max(longest, len(tokens))
            assert output.logits[0].argmax(-1).tolist() == list(tokens)
            return super().follow(state, tokens, output, *options)

    for seed in range(20):
        drafter = Checks(plain(PROMPT, 2), seed=seed, acceptance=0.5, width=3, confidence=0.4)
        policy = ExpectedSpeculation(micro_batch=4, clock=lambda: 0.0)
        run(ToyTarget(2, seed), drafter, PROMPT, max_new_tokens=NUM_TOKENS, speculation=RandomSpeculation(seed))
        run(ToyTarget(2, seed), drafter, PROMPT, max_new_tokens=NUM_TOKENS, speculation=policy)
    assert longest > 1


def test_an_answer_that_waits_is_taken_before_more_is_drafted():
    num_grown = 0

    class Checks(DialledDrafter):
        def grow(self, state: DialledState) -> bool:
            nonlocal num_grown
            num_grown += 1
            assert not target.inboxes[-1], "an answer waits"
            return super().grow(state)

    for seed in range(10):
        target = ToyTarget(2, seed)
        drafter = Checks(plain(PROMPT, 2), acceptance=0.8)
        run(target, drafter, PROMPT, max_new_tokens=NUM_TOKENS, speculation=ExpectedSpeculation(micro_batch=1))
    assert num_grown > 50


def test_the_runs_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Scheduler, "move_some", lambda _: None)  # stages move only when the head waits
    target, most = ToyTarget(3, 0), 0

    class Counts(ExpectedSpeculation):
        def choose(self, window: Window, *args: Any, **kwargs: Any) -> Sequence[int] | None:
            nonlocal most
            nodes = super().choose(window, *args, **kwargs)
            most = max(most, len(window.runs) + bool(nodes))
            assert len(window) + len(nodes or ()) <= self.max_nodes
            return nodes

    run(target, oracle(), PROMPT, max_new_tokens=NUM_TOKENS, speculation=Counts(micro_batch=1))
    assert most == target.max_runs
    target.max_runs, most = 3, 0
    run(target, oracle(), PROMPT, max_new_tokens=NUM_TOKENS, speculation=Counts(micro_batch=2))
    assert most == 3
    run(target, oracle(), PROMPT, max_new_tokens=NUM_TOKENS, speculation=Counts(micro_batch=2, max_nodes=3))


# --- what is refused


def test_several_prompts_are_refused():
    with pytest.raises(ValueError, match="2 prompts.*one at a time"):
        next(
            generate_pipelined(ToyTarget(1, 0), oracle(), GreedyAcceptance(), torch.tensor([PROMPT, PROMPT]), max_new_tokens=4)
        )


def test_a_rule_that_chooses_by_the_clock_is_refused():
    rule = TypicalAcceptance(sampling=Sampling())
    with pytest.raises(ValueError, match="TypicalAcceptance would choose tokens by the clock"):
        next(generate_pipelined(ToyTarget(1, 0), oracle(), rule, torch.tensor([PROMPT]), max_new_tokens=4))


def test_a_micro_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="micro_batch is 0"):
        ExpectedSpeculation(micro_batch=0)


def test_steps_are_timed():
    steps = run(ToyTarget(3, 0), oracle(), PROMPT, max_new_tokens=8, timed=True)
    assert steps[0].seconds is None
    assert all(step.seconds is not None and step.seconds.verify >= 0 for step in steps[1:])
