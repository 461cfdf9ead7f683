"""Linear layers in other layouts: equal outputs, the choice between them, and its record."""

import copy
import itertools
import math
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outrider.models import machine
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter
from outrider.models.llm import linears
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.linears import (
    Choice,
    FastestForRows,
    Shape,
    Times,
    choose,
    choose_linears,
    packed_where_faster,
    plain_linears,
    timed,
)
from outrider.models.llm.loading import load_target

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
NEVER = (float("inf"),) * 3


def native(seconds: float) -> tuple[float, float, float]:
    return (seconds, *NEVER[1:])


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch):
    """Let every layer use one way, as if it had been measured to be the fastest."""

    def use(choice: Choice) -> None:
        slow, fast = (99.0,) * 3, (1.0,) * 3
        one, several = {None: (9.0, 9.0), 1: (0.5, 0.5), 2: (9.0, 0.5)}[choice.packed_from]
        packed = (one, several, 0.5 if choice.packs_many else 999.0)
        native = (0.6 if choice.native_row else 999.0, *NEVER[1:])
        measured = Times(slow if choice.columns_first else fast, fast if choice.columns_first else slow, packed, native)
        monkeypatch.setattr(linears, "MIN_ELEMENTS", 1)
        monkeypatch.setattr(linears, "timed", lambda *_: measured)

    return use


# --- the choice


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (Times((1, 8, 60), NEVER, NEVER), Choice()),
        (Times((1.3, 8, 60), (1, 8, 60), NEVER), Choice(columns_first=True)),
        (Times((1.3, 8, 60), (1, 99, 60), NEVER), Choice(columns_first=True)),  # plain decoding comes first
        (Times((1.1, 8, 60), (1, 8, 60), NEVER), Choice()),  # too little
        (Times((1, 8, 60), NEVER, (2, 4, 60)), Choice(packed_from=2)),
        (Times((1, 8, 60), NEVER, (0.5, 4, 60)), Choice(packed_from=1)),
        (Times((1, 8, 60), NEVER, (0.5, 7.5, 60)), Choice()),  # no second copy for plain decoding alone
        (Times((1.3, 8, 60), (1, 5, 60), (0.95, 4, 60)), Choice(columns_first=True, packed_from=2)),
        (Times((1.3, 8, 60), (1, 4.3, 60), (0.5, 4, 60)), Choice(columns_first=True)),
        (Times((1, 8, 60), NEVER, (2, 4, 50)), Choice(packed_from=2, packs_many=True)),
        (Times((1, 8, 60), NEVER, (0.5, 4, 59)), Choice(packed_from=1)),
        (Times((1, 8, 60), NEVER, (0.5, 7.5, 20)), Choice()),  # nor for prompts alone
        (Times((1, 8, 60), NEVER, NEVER, native(0.8)), Choice(native_row=True)),
        (Times((1, 8, 60), NEVER, NEVER, native(0.95)), Choice()),  # too little
        (Times((1, 8, 60), NEVER, (0.8, 4, 60), native(0.7)), Choice(packed_from=2, native_row=True)),
        (Times((1, 8, 60), NEVER, (0.6, 4, 60), native(0.7)), Choice(packed_from=1, native_row=True)),
        (Times((1.2, 8, 60), (1, 8, 60), NEVER, native(1.095)), Choice(columns_first=True)),  # no gain hides another
        (Times((1.3, 8, 60), (1, 8, 60), NEVER, native(0.9)), Choice(native_row=True)),  # plain decoding comes first
        (Times((1.3, 8, 60), (0.8, 8, 60), NEVER, native(0.9)), Choice(columns_first=True)),
    ],
)
def test_the_fastest_way_is_chosen(measured: Times, expected: Choice):
    assert choose(measured) == expected


def test_the_memory_order_stays_where_weights_may_not_change():
    assert choose(Times((1, 8, 60), (0.5, 1, 60), (9, 4, 60)), in_place=False) == Choice(packed_from=2)


# --- the layers


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "choice",
    [Choice(columns_first=True), Choice(packed_from=1), Choice(True, 2), Choice(False, 1, True), Choice(False, 2, False, True)],
)
def test_each_way_computes_the_same(fastest, choice: Choice, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    if choice.packed_from is not None:
        try:
            linears.pack(torch.ones(8, 8, dtype=dtype))
        except RuntimeError as error:
            pytest.skip(f"this machine packs no {dtype}: {error}")
    fastest(choice)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 40, bias=False)).to(dtype).requires_grad_(False)
    weights = [weight.clone() for weight in model.parameters()]
    plain = [model(torch.ones(1, rows, 48, dtype=dtype)) for rows in (1, 2, 3, 5, 17)]
    recorded = choose_linears(model)
    assert set(recorded.values()) == {str(choice)}
    plain_linears(model)
    monkeypatch.setattr(linears, "timed", lambda *_: pytest.fail("timed again"))
    assert choose_linears(model, recorded=recorded) == recorded
    assert all(torch.equal(weight, before) for weight, before in zip(model.parameters(), weights, strict=True))
    assert isinstance(vars(model[0]).get("forward"), FastestForRows) == (choice.packed_from is not None or choice.native_row)
    assert model[0].weight.is_contiguous() == (not choice.columns_first)
    for rows, expected in zip((1, 2, 3, 5, 17), plain, strict=True):
        for context in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
            with context:
                torch.testing.assert_close(
                    model(torch.ones(1, rows, 48, dtype=dtype)),
                    expected,
                    **({} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}),
                )
    plain_linears(model)
    assert model[0].weight.is_contiguous()
    assert "forward" not in vars(model[0])


@needs_onednn
def test_packed_kernels_run_for_the_chosen_rows_in_inference_only(fastest, monkeypatch: pytest.MonkeyPatch):
    fastest(Choice(packed_from=2))
    monkeypatch.setattr(linears, "MOST_PACKED_ROWS", 4)
    layer = nn.Linear(8, 8).requires_grad_(False)
    choose_linears(layer)
    calls: list[int] = []
    monkeypatch.setattr(linears, "packed_linear", lambda x, *_: calls.append(x.shape[-2]) or x)
    with torch.inference_mode():
        for rows in range(1, 7):
            layer(torch.ones(1, rows, 8))
        layer(torch.ones(2, 3, 8))  # six rows
    assert calls == [2, 3, 4]
    layer = nn.Linear(8, 8).requires_grad_(False)
    fastest(Choice(packed_from=2, packs_many=True))
    assert choose_linears(layer) == {"8x8 float32": "rows first, packed from 2 rows on"}
    with torch.inference_mode():
        for rows in (1, 2, 5, 99):
            layer(torch.ones(1, rows, 8))
    assert calls[3:] == [2, 5, 99]
    del calls[3:]
    with torch.no_grad():
        layer(torch.ones(1, 3, 8))
    x = torch.ones(1, 3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert calls == [2, 3, 4]


@needs_onednn
def test_one_row_is_native_in_inference_only(fastest, monkeypatch: pytest.MonkeyPatch):
    fastest(Choice(native_row=True))
    layer = nn.Linear(8, 8).requires_grad_(False)
    assert choose_linears(layer) == {"8x8 float32": "rows first, one row native"}
    switches: list[bool] = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *inputs: switches.append(torch.backends.mkldnn.enabled) or linear(*inputs))
    with torch.inference_mode():
        layer(torch.ones(1, 1, 8))
        layer(torch.ones(1, 2, 8))
        with pytest.raises(RuntimeError):
            layer(torch.ones(8, 1))
    with torch.no_grad():
        layer(torch.ones(1, 1, 8))
    assert switches == [False, True, False, True]
    assert torch.backends.mkldnn.enabled


@needs_onednn
def test_one_row_is_native_where_packed_copies_have_no_memory(fastest, monkeypatch: pytest.MonkeyPatch):
    fastest(Choice(packed_from=1, native_row=True))
    monkeypatch.setattr(linears, "available_memory", lambda: 100)
    layer = nn.Linear(8, 8).requires_grad_(False)
    assert choose_linears(layer) == {"8x8 float32": "rows first, one row native"}


@needs_onednn
def test_threads_leave_onednn_on(fastest, monkeypatch: pytest.MonkeyPatch):
    fastest(Choice(native_row=True))
    layer = nn.Linear(8, 8).requires_grad_(False)
    choose_linears(layer)
    begun, overlapping = threading.Event(), threading.Event()

    def multiply(x: torch.Tensor, *_: Any) -> torch.Tensor:
        # The late product begins inside the early one, and ends after it.
        if threading.current_thread() is early:
            begun.set()
            overlapping.wait(5)
        else:
            overlapping.set()
            early.join(5)
        return x

    @torch.inference_mode()
    def call() -> None:
        layer(torch.ones(1, 1, 8))

    monkeypatch.setattr(F, "linear", multiply)
    early, late = threading.Thread(target=call), threading.Thread(target=call)
    early.start()
    begun.wait(5)
    late.start()
    for thread in (early, late):
        thread.join(5)
    assert torch.backends.mkldnn.enabled


@needs_onednn
def test_changed_weights_are_packed_again(fastest):
    fastest(Choice(packed_from=1))
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    choose_linears(layer)
    x = torch.ones(1, 1, 8)
    for change in (lambda: layer.weight.mul_(2), lambda: setattr(layer.weight, "data", layer.weight.data + 1)):
        with torch.inference_mode():
            layer(x)
        change()
        with torch.inference_mode():
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight))


@needs_onednn
def test_copies_of_a_layer_pack_their_own_weights(fastest):
    fastest(Choice(packed_from=1))
    model = nn.Sequential(nn.Linear(8, 8, bias=False)).requires_grad_(False)
    choose_linears(model)
    x = torch.ones(1, 1, 8)
    with torch.inference_mode():
        model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(copied[0])["forward"].linear is copied[0]
        copied[0].weight.zero_()
        with torch.inference_mode():
            assert not copied(x).any()
            assert model(x).any()
    assert set(model.state_dict()) == {"0.weight"}


def test_weights_of_embeddings_keep_their_rows_together(fastest):
    fastest(Choice(True, 1))
    model = nn.Module()
    model.embed, model.head, model.other = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False), nn.Linear(8, 8)
    model.head.weight = model.embed.weight
    described = choose_linears(model.requires_grad_(False))
    assert model.embed.weight.is_contiguous()
    assert not model.other.weight.is_contiguous()
    # The shared weight's choice is between rows first and packed, not the one of its columns.
    packed = "packed from 1 to 64 rows"
    assert described == {
        "16x8 float32 (shared with embeddings)": f"rows first, {packed}",
        "8x8 float32": f"columns first, {packed}",
    }


def test_other_layers_are_left_alone(fastest):
    fastest(Choice(True, 1))
    with torch.inference_mode():
        born_in_inference = nn.Linear(8, 8)
    trained = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8).double(), nn.Linear(8, 8).half(), Scaled(8, 8), nn.Conv1d(1, 1, 1)).requires_grad_(
        False
    )
    assert choose_linears(model, born_in_inference, trained) == {}
    assert all("forward" not in vars(layer) for layer in (*model, born_in_inference, trained))


def test_without_memory_for_copies_there_are_none(fastest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    fastest(Choice(True, 1))
    monkeypatch.setattr(linears, "available_memory", lambda: 100)
    layer = nn.Linear(8, 8).requires_grad_(False)
    assert choose_linears(layer) == {"8x8 float32": "columns first"}
    assert "forward" not in vars(layer)
    assert "free memory" in caplog.text


def test_a_context_changes_nothing_afterwards(fastest):
    fastest(Choice(True, 1))
    layer, chosen = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8).requires_grad_(False)
    choose_linears(chosen)

    def fail() -> None:
        with packed_where_faster(nn.Sequential(layer, chosen), layer):
            assert "forward" in vars(layer)
            assert layer.weight.is_contiguous()
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert ["forward" in vars(each) for each in (layer, chosen)] == [False, True]


# --- a target


@needs_onednn
@pytest.mark.parametrize(
    "choice", [Choice(columns_first=True), Choice(packed_from=1), Choice(True, 2), Choice(native_row=True)]
)
def test_a_targets_text_is_the_same_in_each_way(fastest, choice: Choice, tiny_target_dir: Path):
    prompt = torch.arange(3, 12)[None]

    def answer(fast_linears: bool) -> list[int]:
        target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", fast_linears=fast_linears))
        target.choose_linears()
        assert bool(target.linears) == fast_linears
        steps = generate(target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=12)
        return [token for step in steps for token in step.tokens[0]]

    plainly = answer(False)
    fastest(choice)
    assert answer(True) == plainly


# --- timing


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(linears, "SECONDS_PER_SHAPE", 0.0)
    timed.cache_clear()
    yield
    timed.cache_clear()


SHAPE = Shape(64, 32, torch.float32)


def test_a_shape_is_timed_once_for_each_number_of_threads(quick: None, monkeypatch: pytest.MonkeyPatch):
    state = torch.get_rng_state()
    measured = timed(SHAPE, 1)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers moved"
    assert all(seconds > 0 for way in measured for seconds in way)
    assert [math.isfinite(seconds) for seconds in measured.native] == [True, False, False]
    monkeypatch.setattr(linears, "_timed", lambda *_: "again")
    assert timed(SHAPE, 1) is measured
    assert timed(SHAPE, 2) == timed(SHAPE, 1, 1 << 10) == "again"


def test_the_shapes_with_the_most_weights_are_timed(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(linears, "NUM_SHAPES", 2)
    monkeypatch.setattr(linears, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(linears, "timed", lambda shape, *_: asked.append(shape[:2]) or Times((1, 1, 1), (1, 1, 1), NEVER))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9), *(nn.Linear(8, 4) for _ in range(3))).requires_grad_(False)
    assert choose_linears(model) == {"4x8 float32": "rows first", "9x8 float32": "rows first"}
    assert asked == [(4, 8), (9, 8)]


def test_a_machine_without_packed_kernels_times_the_rest(quick: None, monkeypatch: pytest.MonkeyPatch):
    def refuse(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for this type")

    monkeypatch.setattr(linears, "pack", refuse)
    measured = timed(SHAPE, 1)
    assert measured.packed == NEVER
    assert choose(measured).packed_from is None
    monkeypatch.setattr(linears, "MIN_ELEMENTS", 1)
    layer = nn.Linear(8, 8).requires_grad_(False)
    # The run has no layer of the second shape, nor of the third type.
    recorded = dict.fromkeys(("8x8 float32", "9x9 float32", "8x8 bfloat16"), str(Choice(True, 2)))
    assert choose_linears(layer, recorded=recorded) == {"8x8 float32": "columns first"}
    assert choose_linears(layer.to("meta"), recorded=recorded) == {}, "not on a CPU"


@pytest.mark.parametrize("clock", [lambda: 1.0, itertools.count(0, -1).__next__], ids=["stands still", "runs backwards"])
def test_a_useless_clock_ends_the_timing(quick: None, monkeypatch: pytest.MonkeyPatch, clock: Any):
    monkeypatch.setattr(time, "perf_counter", clock)
    assert str(choose(timed(SHAPE, 1))).startswith(("rows first", "columns first"))


@needs_onednn
def test_a_model_as_transformers_loads_it_is_packed_in_a_block(fastest):
    fastest(Choice(packed_from=1))
    layer = nn.Linear(8, 8)  # its weights ask for gradients
    with packed_where_faster(layer):
        assert isinstance(vars(layer)["forward"], FastestForRows)


@needs_onednn
def test_a_users_compiled_code_sees_a_plain_layer(fastest):
    fastest(Choice(packed_from=1))
    layer = nn.Linear(8, 8).requires_grad_(False)
    choose_linears(layer)
    x = torch.ones(1, 2, 8)
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


def test_free_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert machine.available_memory() is None or machine.available_memory() > 1000
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    assert machine.available_memory() == 1000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("7000")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("6500")
    assert machine.available_memory() == 500
