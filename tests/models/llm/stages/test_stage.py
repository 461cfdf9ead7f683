"""A stage's messages: what is kept, skipped and aborted, and what stays readable."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.models.decoding import Prompts, TargetOutput, chain_tree
from outrider.models.decoding.tree import accepted_path
from outrider.models.decoding.types import NO_NODE
from outrider.models.decoding.window import DraftRun, Keep, PassAnswer, run_numbers
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.models.llm.stages.messages import Work
from outrider.models.llm.stages.staged_target import StagedTarget
from outrider.models.phases import RunCounts

from .inline import InlineLink, in_stages

PROMPT = [1, 70, 71, 72, 2]
ROOT = 9


@pytest.fixture(scope="module")
def whole(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float64"), torch.device("cpu"))


@pytest.fixture
def staged(whole: HFTarget) -> StagedTarget:
    """Return a target in two stages that has read the prompt."""
    target = in_stages(whole, [1, 1])
    target.prefill(Prompts.of(torch.tensor([PROMPT])), max_new_tokens=16, max_nodes=4)
    return target


def link_of(staged: StagedTarget) -> InlineLink:
    assert isinstance(staged.link, InlineLink)
    return staged.link


def run_of(tokens: list[int], parents: list[int], num_read: int, keep: Keep | None = None) -> DraftRun:
    return DraftRun(number=next(run_numbers), keep=keep, tokens=tuple(tokens), parents=tuple(parents), num_read=num_read)


def answer(staged: StagedTarget, run: DraftRun) -> torch.Tensor:
    """Return the logits of a run's new entries."""
    staged.submit(run)
    answered = staged.receive()
    assert answered.number == run.number
    assert answered.output is not None
    return answered.output.logits[0]


def plain(whole: HFTarget, tokens: list[int]) -> torch.Tensor:
    """Return the logits after the prompt and these tokens."""
    with torch.inference_mode():
        return whole.plain_logits(torch.tensor([[*PROMPT, *tokens]]), 1)[0, 0]


def require_logits(whole: HFTarget, actual: torch.Tensor, *texts: list[int]) -> None:
    """Require that entries have the logits after these texts."""
    assert len(actual) == len(texts)
    for logits, tokens in zip(actual, texts, strict=True):
        torch.testing.assert_close(logits, plain(whole, tokens), rtol=1e-9, atol=1e-9)


def test_runs_read_on_behind_those_that_are_under_way(whole: HFTarget, staged: StagedTarget) -> None:
    runs = [run_of([ROOT], [], 0), run_of([20, 30], [NO_NODE, NO_NODE], 1), run_of([21, 31], [NO_NODE, NO_NODE, 0, 1], 3)]
    for run in runs:
        staged.submit(run)
    answers = [staged.receive() for _ in runs]
    assert [one.number for one in answers] == [run.number for run in runs]
    logits = torch.cat([one.output.logits[0] for one in answers if one.output is not None])
    require_logits(whole, logits, [ROOT], [ROOT, 20], [ROOT, 30], [ROOT, 20, 21], [ROOT, 30, 31])


def test_entries_that_are_kept_behind_the_committed_ones_stay_readable(whole: HFTarget, staged: StagedTarget) -> None:
    """The accepted path is 30, 31: entry 4 becomes the root, and its child 5 stays in the window."""
    answer(staged, run_of([ROOT, 20, 30, 21, 31, 32], [NO_NODE, NO_NODE, 0, 1, 3], 0))
    kept = run_of([33, 40], [NO_NODE, 0, NO_NODE], 2, Keep(entries=(0, 2, 4, 5), num_committed=2))
    text = [ROOT, 30, 31]
    require_logits(whole, answer(staged, kept), [*text, 32, 33], [*text, 40])
    # Once more: entry 1 (32) becomes the root, entry 2 (33) its child.
    again = run_of([34], [NO_NODE, 0], 2, Keep(entries=(0, 1, 2), num_committed=1))
    require_logits(whole, answer(staged, again), [*text, 32, 33, 34])


def test_the_order_of_survivors_is_that_of_the_keep(whole: HFTarget, staged: StagedTarget) -> None:
    answer(staged, run_of([ROOT, 20, 21, 22], [NO_NODE, 0, 0], 0))
    # Entry 1 becomes the root; its children 22 and 21 change places.
    swapped = run_of([50], [NO_NODE, NO_NODE, 0], 3, Keep(entries=(0, 1, 3, 2), num_committed=1))
    require_logits(whole, answer(staged, swapped), [ROOT, 20, 22, 50])


def test_a_commit_rides_on_the_next_run(whole: HFTarget, staged: StagedTarget) -> None:
    sent: list[Work] = []
    link, send = link_of(staged), link_of(staged).send
    link.send = lambda work: (sent.append(work), send(work))[1]
    tree = chain_tree(torch.tensor([[20, 21]]))
    staged.verify(torch.tensor([ROOT]), tree)
    staged.commit(tree, accepted_path(tree, [[0]]))
    assert len(sent) == 1
    output = staged.verify(torch.tensor([40]), chain_tree(torch.tensor([[41]])))
    assert [(work.keep, work.num_committed) for work in sent] == [(None, 0), ((0, 1), 2)]
    require_logits(whole, output.logits[0], [ROOT, 20, 40], [ROOT, 20, 40, 41])


Cancel = Callable[[StagedTarget, DraftRun], None]


def cancel_at_once(staged: StagedTarget, run: DraftRun) -> None:
    staged.cancel([run.number])


def cancel_behind_the_first_stage(staged: StagedTarget, run: DraftRun) -> None:
    while link_of(staged).inboxes[0]:
        link_of(staged).advance(0)
    staged.cancel([run.number, run.number])


def cancel_within_the_last_stage(staged: StagedTarget, run: DraftRun) -> None:
    """Cancel after the first look: the stage's pass has begun."""
    stage = link_of(staged).stages[1]
    handle, looks = stage.handle, iter([False])
    stage.handle = lambda work, is_cancelled: handle(
        work, lambda number: next(looks, True) if number == run.number else is_cancelled(number)
    )


@pytest.mark.parametrize("cancel", [cancel_at_once, cancel_behind_the_first_stage, cancel_within_the_last_stage])
def test_an_aborted_run_leaves_only_masked_columns(whole: HFTarget, staged: StagedTarget, cancel: Cancel) -> None:
    """The doomed entries 2 and 3 lie between live ones; the keep of their run still counts."""
    staged.submit(run_of([ROOT, 20], [NO_NODE], 0))
    doomed = run_of([30, 31], [NO_NODE, NO_NODE, 1], 2)
    staged.submit(doomed)
    cancel(staged, doomed)
    live = run_of([21, 22], [NO_NODE, NO_NODE, 1, 0, 3], 4)
    staged.submit(live)
    answers = [staged.receive() for _ in range(3)]
    assert [one.output is None for one in answers] == [False, True, False]
    output = answers[2].output
    assert output is not None
    require_logits(whole, output.logits[0], [ROOT, 20, 21], [ROOT, 20, 21, 22])
    # Entry 1 becomes the root; 21 and 22 (entries 4 and 5) stay.
    kept = run_of([23], [NO_NODE, 0, 1], 3, Keep(entries=(0, 1, 4, 5), num_committed=1))
    require_logits(whole, answer(staged, kept), [ROOT, 20, 21, 22, 23])


def test_runs_are_counted_and_those_without_an_output_too(staged: StagedTarget) -> None:
    before = staged.run_counts
    staged.submit(run_of([ROOT, 20], [NO_NODE], 0))
    skipped = run_of([30, 31, 32], [NO_NODE, NO_NODE, 1, 2], 2)
    staged.submit(skipped)
    staged.cancel([skipped.number])
    assert staged.run_counts - before == RunCounts(num_runs=2, num_entries=5)
    assert [staged.receive().output is None for _ in range(2)] == [False, True]
    counts = staged.run_counts - before
    assert counts == RunCounts(num_runs=2, num_entries=5, num_cancelled=1, num_cancelled_entries=3)
    left = run_of([33], [NO_NODE, NO_NODE, 1, 2, 3], 5)
    staged.submit(left)
    counts = staged.run_counts - before
    staged.prefill(Prompts.of(torch.tensor([[5, 6, 7]])), max_new_tokens=4, max_nodes=0)
    assert staged.run_counts - before == counts, "neither prompts nor runs of the last text count for the next one"


def test_the_keep_of_a_skipped_run_counts(whole: HFTarget, staged: StagedTarget) -> None:
    answer(staged, run_of([ROOT, 20], [NO_NODE], 0))
    skipped = run_of([50], [NO_NODE], 1, Keep(entries=(0, 1), num_committed=1))
    staged.submit(skipped)
    staged.cancel([skipped.number])
    assert staged.receive() == PassAnswer(number=skipped.number, output=None)
    require_logits(whole, answer(staged, run_of([21], [NO_NODE, NO_NODE], 2)), [ROOT, 20, 21])


def test_a_window_larger_than_the_cache_makes_it_grow(whole: HFTarget, staged: StagedTarget) -> None:
    answer(staged, run_of([ROOT], [], 0))
    chain = list(range(20, 60))
    for index, token in enumerate(chain):
        logits = answer(staged, run_of([token], list(range(-1, index)), 1 + index))
    require_logits(whole, logits, [ROOT, *chain])


def test_a_prefill_cancels_what_is_under_way_and_is_never_cancelled_itself(whole, staged, monkeypatch):
    runs = [run_of([ROOT], [], 0), run_of([20], [NO_NODE], 1)]
    for run in runs:
        staged.submit(run)
    cancelled: list[int] = []
    monkeypatch.setattr(staged.link, "cancel", cancelled.extend)
    # A cancellation of its number, however early, changes nothing.
    numbers = iter([next(run_numbers)])
    monkeypatch.setattr("outrider.models.llm.stages.staged_target.run_numbers", numbers)
    for stage in link_of(staged).stages:
        handle = stage.handle
        stage.handle = lambda work, is_cancelled, handle=handle: handle(work, lambda number: True)
    output = staged.prefill(Prompts.of(torch.tensor([[5, 6, 7]])), max_new_tokens=4, max_nodes=0)
    assert cancelled == [run.number for run in runs]
    assert not staged.has_answer()
    with torch.inference_mode():
        expected = whole.plain_logits(torch.tensor([[5, 6, 7]]), 1)
    torch.testing.assert_close(output.logits, expected, rtol=1e-9, atol=1e-9)


def test_every_stage_executes_the_same_messages(staged: StagedTarget) -> None:
    handled: list[list[Work]] = [[], []]
    for stage, works in zip(link_of(staged).stages, handled, strict=True):
        handle = stage.handle
        stage.handle = lambda work, is_cancelled, handle=handle, works=works: (
            works.append(replace(work, hidden=None)),
            handle(work, is_cancelled),
        )[1]
    staged.submit(run_of([ROOT, 20], [NO_NODE], 0))
    doomed = run_of([30], [NO_NODE, NO_NODE], 2)
    staged.submit(doomed)
    staged.cancel([doomed.number])
    staged.submit(run_of([21], [NO_NODE], 1, Keep(entries=(0, 1), num_committed=1)))
    for _ in range(3):
        staged.receive()
    assert handled[0] == handled[1]
    assert len(handled[0]) == 3
    assert link_of(staged).cancelled == [set(), set()], "numbers of cancelled runs pile up"


def test_output_of_a_run_has_hidden_states(staged: StagedTarget) -> None:
    staged.submit(run_of([ROOT, 20], [NO_NODE], 0))
    output = staged.receive().output
    assert isinstance(output, TargetOutput)
    assert output.hidden_states.shape == (1, 2, staged.hidden_size)
    assert torch.equal(staged.head(output.hidden_states), output.logits)


def test_plain_decoding_is_measured_through_the_stages(whole: HFTarget) -> None:
    """The probe of a narrow type compares with it."""
    staged = in_stages(whole, [1, 1])
    with torch.inference_mode():
        steps = torch.stack(staged._decode(staged.probe_ids, 3))
        torch.testing.assert_close(steps, whole.plain_logits(whole.probe_ids[None], 3)[0])
        torch.testing.assert_close(torch.stack(whole._decode(whole.probe_ids, 3)), steps)
    assert staged._decoding_error() < 1e-9
