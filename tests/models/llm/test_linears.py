"""Linear layers in other layouts: equal outputs, the choice between them, and the machine's file."""

import copy
import itertools
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outrider.models import machine
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter
from outrider.models.llm import linear_speeds as speeds
from outrider.models.llm import linears
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.linear_speeds import Shape, Times
from outrider.models.llm.linears import (
    Choice,
    PackedForSomeRows,
    choose,
    choose_linears,
    packed_where_faster,
    plain_linears,
)
from outrider.models.llm.loading import load_target

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
NEVER = (float("inf"),) * 3


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def times(rows_first: Any, columns_first: Any = NEVER, packed: Any = NEVER) -> Times:
    ways = {"rows_first": rows_first, "columns_first": columns_first, "packed": packed}
    return Times(rows=(1, 2, 4), **{way: tuple(map(float, seconds)) for way, seconds in ways.items()})


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch):
    """Let every layer use one way, as if it had been measured to be the fastest."""

    def use(choice: Choice) -> None:
        slow, fast = (99.0, 99.0, 99.0), (1.0, 1.0, 1.0)
        within = choice.packed_rows or (0, 0)
        packed = tuple(0.5 if within[0] <= rows <= within[1] else 9.0 for rows in (1, 2, 4))
        measured = times(slow if choice.columns_first else fast, fast if choice.columns_first else slow, packed)
        monkeypatch.setattr(linears, "MIN_ELEMENTS", 1)
        monkeypatch.setattr(linears, "linear_speeds", lambda shapes: dict.fromkeys(shapes, measured))

    return use


# --- the choice


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (times((1, 2, 4)), Choice()),
        (times((1, 2, 4), (1, 1.5, 3)), Choice(columns_first=True)),
        (times((1, 2, 4), (1, 1.97, 3.9)), Choice()),  # too little
        (times((1, 2, 4), (1.1, 1.5, 3)), Choice()),  # plain decoding comes first
        (times((1.1, 2, 4), (1, 3, 9)), Choice(columns_first=True)),
        (times((1, 2, 4), NEVER, (1.2, 1.2, 1.3)), Choice(packed_rows=(2, 4))),
        (times((1, 2, 4), NEVER, (1.2, 1.8, 3.6)), Choice()),  # too little for a second copy
        (times((1, 2, 4), NEVER, (0.9, 1.8, 3.6)), Choice(packed_rows=(1, 4))),
        (times((1, 2, 4), NEVER, (2, 1.9, 2)), Choice(packed_rows=(3, 4))),  # between measured numbers of rows
        (times((1, 2, 4), NEVER, (0.5, 0.6, 1.3)), Choice(packed_rows=(1, 4))),
        (times((1, 2, 4), NEVER, (0.5, 2, 5)), Choice(packed_rows=(1, 1))),
        (times((1, 2, 4), NEVER, (0.5, 3, 2)), Choice(packed_rows=(1, 4))),  # 2 rows were disturbed
        (times((1, 2, 4), NEVER, (0.9, 9, 2)), Choice(packed_rows=(1, 1))),  # too much for chance
        (times((1, 2, 4), (1, 1.3, 1.3), (1.2, 1.1, 4)), Choice(columns_first=True, packed_rows=(2, 2))),
        (times((1, 2, 4), (0.9, 3, 5), (1.2, 1.2, 1.2)), Choice(columns_first=True, packed_rows=(2, 4))),
    ],
)
def test_the_fastest_way_is_chosen_by_number_of_rows(measured: Times, expected: Choice):
    assert choose(measured) == expected


def test_the_memory_order_stays_where_weights_may_not_change():
    assert choose(times((1, 2, 4), (0.5, 0.5, 0.5), (9, 1, 9)), in_place=False) == Choice(packed_rows=(2, 2))


# --- the layers


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choice", [Choice(columns_first=True), Choice(packed_rows=(1, 4)), Choice(True, (2, 4))])
def test_each_way_computes_the_same(fastest, choice: Choice, dtype: torch.dtype):
    if choice.packed_rows is not None:
        try:
            speeds.pack(torch.ones(8, 8, dtype=dtype))
        except RuntimeError as error:
            pytest.skip(f"this machine packs no {dtype}: {error}")
    fastest(choice)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 40, bias=False)).to(dtype).requires_grad_(False)
    weights = [weight.clone() for weight in model.parameters()]
    plain = [model(torch.ones(1, rows, 48, dtype=dtype)) for rows in (1, 2, 3, 5, 17)]
    assert str(choice) in choose_linears(model)
    assert all(torch.equal(weight, before) for weight, before in zip(model.parameters(), weights, strict=True))
    assert isinstance(vars(model[0]).get("forward"), PackedForSomeRows) == (choice.packed_rows is not None)
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
    fastest(Choice(packed_rows=(2, 4)))
    layer = nn.Linear(8, 8).requires_grad_(False)
    choose_linears(layer)
    calls: list[int] = []
    monkeypatch.setattr(linears, "packed_linear", lambda x, *_: calls.append(x.shape[-2]) or x)
    with torch.inference_mode():
        for rows in range(1, 7):
            layer(torch.ones(1, rows, 8))
        layer(torch.ones(2, 3, 8))  # six rows
    assert calls == [2, 3, 4]
    with torch.no_grad():
        layer(torch.ones(1, 3, 8))
    x = torch.ones(1, 3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert calls == [2, 3, 4]


@needs_onednn
def test_changed_weights_are_packed_again(fastest):
    fastest(Choice(packed_rows=(1, 4)))
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
    fastest(Choice(packed_rows=(1, 4)))
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
    fastest(Choice(True, (1, 1)))
    model = nn.Module()
    model.embed, model.head, model.other = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False), nn.Linear(8, 8)
    model.head.weight = model.embed.weight
    described = choose_linears(model.requires_grad_(False))
    assert model.embed.weight.is_contiguous()
    assert not model.other.weight.is_contiguous()
    # The shared weight's choice is between rows first and packed, not the one of its columns.
    assert (
        described
        == "16x8 (shared with embeddings): rows first, packed for 1 to 4 rows; 8x8: columns first, packed for 1 to 1 rows"
    )


def test_other_layers_are_left_alone(fastest):
    fastest(Choice(True, (1, 4)))
    with torch.inference_mode():
        born_in_inference = nn.Linear(8, 8)
    trained = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8).double(), nn.Linear(8, 8).half(), Scaled(8, 8), nn.Conv1d(1, 1, 1)).requires_grad_(
        False
    )
    assert choose_linears(model, born_in_inference, trained) == ""
    assert all("forward" not in vars(layer) for layer in (*model, born_in_inference, trained))


def test_without_memory_for_copies_there_are_none(fastest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    fastest(Choice(True, (1, 4)))
    monkeypatch.setattr(linears, "available_memory", lambda: 100)
    layer = nn.Linear(8, 8).requires_grad_(False)
    assert choose_linears(layer) == "8x8: columns first"
    assert "forward" not in vars(layer)
    assert "free memory" in caplog.text


def test_a_context_changes_nothing_afterwards(fastest):
    fastest(Choice(True, (1, 4)))
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
@pytest.mark.parametrize("choice", [Choice(columns_first=True), Choice(packed_rows=(1, 4)), Choice(True, (2, 4))])
def test_a_targets_text_is_the_same_in_each_way(fastest, choice: Choice, tiny_target_dir: Path):
    prompt = torch.arange(3, 12)[None]

    def answer(fast_linears: bool) -> list[int]:
        target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", fast_linears=fast_linears))
        assert bool(target.linears) == fast_linears
        steps = generate(target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=12)
        return [token for step in steps for token in step.tokens[0]]

    plainly = answer(False)
    fastest(choice)
    assert answer(True) == plainly


# --- the machine's file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speeds, "MAX_SECONDS", 0.01)
    return tmp_path / "cache"


SHAPE = Shape(64, 32, torch.float32)


def test_speeds_are_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch):
    state = torch.get_rng_state()
    measured = speeds.linear_speeds([SHAPE])[SHAPE]
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers moved"
    assert measured.rows[:4] == (1, 2, 4, 8)
    monkeypatch.setattr(speeds, "_measure", None)
    assert speeds.linear_speeds([SHAPE]) == {SHAPE: measured}
    (path,) = cache.iterdir()
    assert json.loads(path.read_text())["machine"]["cpu"] == machine.cpu_model()


def test_another_number_of_threads_is_another_measurement(cache: Path, monkeypatch: pytest.MonkeyPatch):
    speeds.linear_speeds([SHAPE])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    speeds.linear_speeds([SHAPE])
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(("name", "value"), [("FORMAT", 1), ("ROWS", (1, 2, 4, 8))])
def test_versions_keep_their_files_apart(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: Any
):
    """One of them wrote again what the other had measured, each time with a warning."""
    measured = speeds.linear_speeds([SHAPE])
    with monkeypatch.context() as another_version:
        another_version.setattr(speeds, name, value)
        speeds.linear_speeds([SHAPE])
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(speeds, "_measure", None)
    assert speeds.linear_speeds([SHAPE]) == measured
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "[" * 100_000,
        lambda text: text.replace('"cpu": "', '"cpu": "another '),
        lambda text: text.replace('"rows": [\n', '"rows": [7,\n'),
        lambda text: text.replace('"rows_first"', '"rows_second"'),
        lambda text: text.replace('"columns_first": [', '"columns_first": [-1.0, '),
    ],
    ids=["truncated", "deep", "another machine", "lengths", "names", "negative"],
)
def test_a_useless_file_is_written_again(cache: Path, damage: Any):
    speeds.linear_speeds([SHAPE])
    (path,) = cache.iterdir()
    good = path.read_text()
    path.write_text(damage(good))
    assert SHAPE in speeds.linear_speeds([SHAPE])
    assert json.loads(path.read_text())["machine"] == json.loads(good)["machine"]
    assert list(json.loads(path.read_text())["times"]) == ["64x32 float32"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(speeds, "MAX_SECONDS", 0.01)
    assert SHAPE in speeds.linear_speeds([SHAPE])


def test_a_machine_without_packed_kernels_measures_the_rest(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for this type")

    monkeypatch.setattr(speeds, "pack", refuse)
    measured = speeds.linear_speeds([SHAPE])[SHAPE]
    assert set(measured.packed) == {float("inf")}
    assert choose(measured).packed_rows is None
    monkeypatch.setattr(speeds, "_measure", None)
    assert speeds.linear_speeds([SHAPE])[SHAPE] == measured, "infinity isn't kept"


@pytest.mark.parametrize("clock", [lambda: 1.0, itertools.count(0, -1).__next__], ids=["stands still", "runs backwards"])
def test_a_useless_clock_changes_no_layer(cache: Path, monkeypatch: pytest.MonkeyPatch, clock: Any):
    monkeypatch.setattr(linears, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(speeds, "MAX_ROUNDS", 3)
    layer = nn.Linear(8, 8).requires_grad_(False)
    monkeypatch.setattr(time, "perf_counter", clock)
    assert choose_linears(layer) == ""


def test_a_machine_too_slow_for_many_rows_measures_few(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speeds, "MAX_SECONDS", 0.0)
    measured = speeds.linear_speeds([SHAPE])[SHAPE]
    assert measured.rows == (1, 2, 4, 8)


@pytest.mark.parametrize(
    "rows", ['[1, "2", 4, 8]', "[1, null, 4, 8]", "[1, 4, 2, 8]", "[1, -2, 4, 8]", "[true, 2, 4, 8]", "[1, [2], 4, 8]"]
)
def test_wrong_numbers_of_rows_in_the_file_are_measured_again(cache: Path, rows: str):
    speeds.linear_speeds([SHAPE])
    (path,) = cache.iterdir()
    content = json.loads(path.read_text())
    content["times"] = {"64x32 float32": {"rows": json.loads(rows), **{way: [1.0] * 4 for way in speeds.WAYS}}}
    path.write_text(json.dumps(content))
    assert speeds.linear_speeds([SHAPE])[SHAPE].rows[:4] == (1, 2, 4, 8)
    assert json.loads(path.read_text())["times"]["64x32 float32"]["rows"][:4] == [1, 2, 4, 8]


def test_a_user_without_a_home_measures_without_a_file(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(speeds, "MAX_SECONDS", 0.01)
    assert SHAPE in speeds.linear_speeds([SHAPE])


def test_a_processor_of_the_same_name_with_other_instructions_has_another_file(cache: Path, monkeypatch: pytest.MonkeyPatch):
    speeds.linear_speeds([SHAPE])
    monkeypatch.setattr(speeds, "cpu_details", lambda: "flags: none")
    speeds.linear_speeds([SHAPE])
    assert len(list(cache.iterdir())) == 2


@needs_onednn
def test_a_model_as_transformers_loads_it_is_packed_in_a_block(fastest):
    fastest(Choice(packed_rows=(1, 4)))
    layer = nn.Linear(8, 8)  # its weights ask for gradients
    with packed_where_faster(layer):
        assert isinstance(vars(layer)["forward"], PackedForSomeRows)


@needs_onednn
def test_a_users_compiled_code_sees_a_plain_layer(fastest):
    fastest(Choice(packed_rows=(1, 4)))
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
