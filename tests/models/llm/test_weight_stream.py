"""The order in which a stream loads units, with a reader that the tests drive by hand.

Unit i appends the digit i + 2 to its input. So a unit that computes with another's weights, with
none, or with weights that aren't there yet gives wrong digits.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.models.llm.hidden_states import DeepEnough
from outrider.models.llm.memory_plan import MemoryPlan
from outrider.models.llm.weight_files import StoredTensor
from outrider.models.llm.weight_reader import Loading, WeightReader, Weights
from outrider.models.llm.weight_stream import StreamedUnit, WeightStream
from outrider.models.phases import StreamCounts

PLAN = MemoryPlan(units=(), budget_bytes=0, ends_bytes=0, cache_bytes=0, budget_tokens=9)
CPU = torch.device("cpu")
BYTES_PER_SECOND = 100.0
UNIT_BYTES = 100


class Digit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.shape == (1,), "this unit's weights aren't there"
        return 10 * x + self.weight


class HandReader(WeightReader):
    """A reader without threads and files: it loads when a test says so; unless `by_hand`, when the pass waits."""

    bytes_read, read_seconds, bytes_per_second = 0, 0.0, BYTES_PER_SECOND

    def __init__(self, *, by_hand: bool = False) -> None:
        self.by_hand = by_hand
        self.loadings: list[Loading] = []
        self.errors: dict[str, Exception] = {}
        self.num_finished = 0

    @property
    def order(self) -> list[int]:
        return [int(loading.weights.name) for loading in self.loadings]

    def load(self, loading: Loading) -> Loading:
        loading.bytes_left = UNIT_BYTES
        self.loadings.append(loading)
        if not self.by_hand:
            # The slot is filled as late as possible: when the pass asks for the result.
            ask = loading.future.result
            loading.future.result = lambda timeout=None: (self.finish_until(loading), ask(timeout))[1]  # type: ignore[method-assign]
        return loading

    def finish_until(self, loading: Loading) -> None:
        while not loading.future.done():
            self.finish()

    def finish(self) -> None:
        """Finish the oldest loading, as the reader's threads do."""
        loading = self.loadings[self.num_finished]
        self.num_finished += 1
        loading.bytes_left = 0
        if loading.is_cancelled:
            return
        if (error := self.errors.pop(loading.weights.name, None)) is not None:
            loading.future.set_exception(error)
            return
        loading.tensors[0].fill_(int(loading.weights.name) + 2)
        loading.future.set_result(None)

    def close(self) -> None: ...


class Model(nn.Module):
    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Digit() for _ in range(num_units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def streamed(num_units: int, reader: HandReader, **options) -> tuple[Model, WeightStream]:
    model = Model(num_units)
    units = []
    for index, module in enumerate(model.units):
        weights = Weights.in_files(str(index), [StoredTensor(Path("x"), "w", 0, 2, torch.float16, (1,))])
        units.append(StreamedUnit(module, (module.weight,), weights))
    return model, WeightStream(units, reader, PLAN, CPU, **options)


def digits(num_units: int) -> float:
    return float("1" + "".join(str(index + 2) for index in range(num_units)))


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
@pytest.mark.parametrize("num_units", [1, 2, 3, 5])
@torch.inference_mode()
def test_every_unit_computes_with_its_weights_pass_after_pass(num_slots: int, num_units: int) -> None:
    reader = HandReader()
    model, stream = streamed(num_units, reader, num_slots=num_slots)
    for _ in range(4):
        assert model(torch.ones(1)).item() == digits(num_units)
    assert reader.order == [index % num_units for index in range(4 * num_units + num_slots)]
    assert (stream.stats.passes, stream.stats.restarts) == (4, 0)


def test_a_unit_has_no_weights_between_its_turns() -> None:
    model, _ = streamed(3, HandReader())
    model(torch.ones(1))
    assert [unit.weight.numel() for unit in model.units] == [0, 0, 0]
    assert {unit.weight.dtype for unit in model.units} == {torch.float32}


@pytest.mark.parametrize("ended_by", [DeepEnough, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("inside", [True, False])
def test_a_pass_that_ends_early_is_followed_by_a_right_one(ended_by: type[BaseException], after: int, inside: bool) -> None:
    """A stream that went on in its order would give the next pass other units' weights.

    Forward hooks don't run after KeyboardInterrupt.
    """
    reader = HandReader()
    model, stream = streamed(4, reader)
    model(torch.ones(1))

    def end(*_: object) -> None:
        raise ended_by

    unit = model.units[after]
    hook = unit.register_forward_pre_hook(end) if inside else unit.register_forward_pre_hook(end, prepend=True)
    with pytest.raises(ended_by):
        model(torch.ones(1))
    hook.remove()
    for _ in range(3):
        assert model(torch.ones(1)).item() == digits(4)
    assert all(unit.weight.numel() == 0 for unit in model.units)
    ended_between_passes = (after, inside) in {(0, False), (3, True)}
    assert stream.stats.restarts == int(not ended_between_passes)


def test_a_unit_that_a_pass_skips_is_dropped_without_a_restart_of_the_others() -> None:
    """Passes for hidden states don't compute the head."""
    reader = HandReader()
    model, _ = streamed(3, reader)
    x = torch.ones(1)
    for _ in range(3):
        assert model.units[1](model.units[0](x)).item() == digits(2)
    assert reader.order == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("failing", range(3))
def test_an_error_is_raised_at_the_units_turn_and_the_next_pass_is_right(failing: int) -> None:
    reader = HandReader()
    model, _ = streamed(3, reader)
    reader.errors[str(failing)] = OSError(5, "bytes 0 to 9 can't be read")
    with pytest.raises(OSError, match="bytes 0 to 9 can't be read"):
        model(torch.ones(1))
    assert all(unit.weight.numel() == 0 for unit in model.units)
    assert model(torch.ones(1)).item() == digits(3)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def drafting(clock: Clock, reader: HandReader, spent: float) -> Iterator[Callable[[float], bool]]:
    """Yield work of some seconds that lets the reader finish a unit, and record its arguments."""
    calls: list[float] = []

    def meanwhile(seconds: float) -> bool:
        calls.append(seconds)
        clock.now += spent
        reader.finish()
        return True

    meanwhile.calls = calls  # type: ignore[attr-defined]
    return meanwhile  # type: ignore[return-value]


def test_meanwhile_is_called_only_while_a_pass_waits(clock: Clock) -> None:
    reader = HandReader(by_hand=True)
    model, stream = streamed(2, reader, clock=clock)
    meanwhile = drafting(clock, reader, 0.5)
    with stream.during_waits(meanwhile):
        assert model(torch.ones(1)).item() == digits(2)
    # Both units were ahead; each call finishes one of them.
    assert meanwhile.calls == [2 * UNIT_BYTES / BYTES_PER_SECOND, UNIT_BYTES / BYTES_PER_SECOND]
    assert (stream.stats.drafts, stream.stats.draft_seconds, stream.stats.late_drafts) == (2, 1.0, 0)
    assert stream.stats.wait_seconds == 1.0
    # The next pass's units are there: no wait, no call.
    reader.finish()
    reader.finish()
    with stream.during_waits(meanwhile):
        model.units[0](torch.ones(1))
    assert len(meanwhile.calls) == 2


def test_without_meanwhile_a_pass_just_waits(clock: Clock) -> None:
    reader = HandReader()
    model, stream = streamed(2, reader, clock=clock)
    meanwhile = drafting(clock, reader, 0.5)
    with stream.during_waits(None):
        model(torch.ones(1))
    with stream.during_waits(meanwhile):
        pass
    model(torch.ones(1))  # the block has ended
    assert meanwhile.calls == []


def test_work_that_does_not_fit_a_wait_is_offered_once_in_it(clock: Clock) -> None:
    """Offered again and again, it would take the processor from the reader; a later wait may be longer."""
    reader = HandReader()
    model, stream = streamed(3, reader, clock=clock)
    calls: list[float] = []
    with stream.during_waits(lambda seconds: calls.append(seconds) or False):  # type: ignore[func-returns-value]
        assert model(torch.ones(1)).item() == digits(3)
    assert stream.stats.drafts == 0
    # At the last unit only the rest of this pass counts, not what is read for the next one.
    assert calls == [2.0, 2.0, 1.0]


def test_work_that_takes_longer_than_the_wait_is_counted_as_late(clock: Clock) -> None:
    reader = HandReader(by_hand=True)
    model, stream = streamed(1, reader, clock=clock, num_slots=1)
    with stream.during_waits(drafting(clock, reader, 3.0)):
        model(torch.ones(1))
    assert (stream.stats.late_drafts, stream.stats.late_seconds) == (1, 2.0)


def test_an_error_of_meanwhile_ends_the_pass_and_the_next_one_is_right(clock: Clock) -> None:
    reader = HandReader()
    model, stream = streamed(3, reader, clock=clock)

    def fail(seconds: float) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), stream.during_waits(fail):
        model(torch.ones(1))
    assert model(torch.ones(1)).item() == digits(3)


def test_counts_are_values_whose_difference_is_the_time_between() -> None:
    model, stream = streamed(3, HandReader())
    before = stream.stats
    model(torch.ones(1))
    assert stream.stats - before == StreamCounts(passes=1, wait_seconds=stream.stats.wait_seconds)
    assert before.passes == 0


def test_a_stream_is_collected_with_its_model() -> None:
    """Its threads end when it is collected."""
    model, stream = streamed(3, HandReader())
    gone = weakref.ref(stream)
    del model, stream
    gc.collect()
    assert gone() is None
