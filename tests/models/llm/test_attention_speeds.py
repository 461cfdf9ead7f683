"""The choice of a number of parts: measured once by shape, before decoding, and kept.

A fake clock decides which number of parts is fastest.
"""

import itertools
import json
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.decoding import GreedyAcceptance, Prompts, TargetOutput, empty_tree, generate
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.llm import attention_speeds, tree_attention, tree_reader
from outrider.models.llm.attention_speeds import NUM_ROUNDS, choose
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.split_attention import PARTS

from ..recorder import PoolRecorder
from . import efficient_attention

STEP, NUM_LAYERS = 256, 2
"""Extents in these tests, and the fewest keys that are split; layers of the target."""
LONG, ROOM = [7 * number % 300 for number in range(STEP - 8)], 24
"""A prompt whose answer grows beyond STEP columns."""
PROMPTS = [LONG, LONG[5:60], LONG[:200]]


class FakeClock:
    """Clock that moves when attention is computed, by seconds that a test sets for each form."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = dict.fromkeys(PARTS, 1.0)
        self.parts: list[int] = []
        """Numbers of parts of all calls of attention."""

    def called(self, num_parts: int) -> None:
        if not torch.compiler.is_compiling():
            self.parts.append(num_parts)
            self.now += self.seconds[num_parts]


class Process:
    """This process as it uses a GPU: its clock, and its file of times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.clock, self.folder = FakeClock(), folder
        self.measured: list[tuple[int, int, int]] = []
        """Rows, queries and keys of each measurement."""
        self.monkeypatch = monkeypatch
        monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
        monkeypatch.setattr(attention_speeds, "on_cuda", lambda tensor: True)
        monkeypatch.setattr(attention_speeds, "MIN_KEYS", STEP)
        monkeypatch.setattr(attention_speeds, "CudaGraphRecorder", PoolRecorder)
        monkeypatch.setattr(tree_attention, "has_grouped_kernel", lambda device: False)
        monkeypatch.setattr(tree_reader, "extent_step", lambda device, *, is_fixed: STEP)
        monkeypatch.setattr(time, "perf_counter", lambda: self.clock.now)
        split, folded, measure = tree_attention.attend_split, tree_attention.attend_folded, attention_speeds.measure

        def counted_split(query: Any, key: Any, value: Any, mask: Any, scale: Any) -> torch.Tensor:
            self.clock.called(mask.shape[1])
            return split(query, key, value, mask, scale)

        def counted_folded(*args: Any) -> torch.Tensor:
            self.clock.called(1)
            return folded(*args)

        def counted_measure(states: Any, **options: Any) -> Any:
            batch, _, num_keys, _ = states[0][0].shape
            self.measured.append((batch, options["num_queries"], num_keys))
            return measure(states, **options)

        monkeypatch.setattr(tree_attention, "attend_split", counted_split)
        monkeypatch.setattr(tree_attention, "attend_folded", counted_folded)
        monkeypatch.setattr(attention_speeds, "measure", counted_measure)
        self.start_again()

    def start_again(self) -> None:
        """Forget what a new process doesn't know."""
        self.monkeypatch.setattr(attention_speeds, "_CHOSEN", {})
        self.measured.clear()

    def let_win(self, num_parts: int) -> None:
        self.clock.seconds = {**dict.fromkeys(PARTS, 1.0), num_parts: 0.5}

    @property
    def chosen(self) -> dict[tuple[int, int, int], int]:
        return {shape[2:]: num_parts for shape, num_parts in attention_speeds._CHOSEN.items()}

    @property
    def path(self) -> Path:
        (path,) = self.folder.iterdir()
        return path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Process]:
    with efficient_attention.on_cpu():
        yield Process(monkeypatch, tmp_path / "cache")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    options = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=64, tie_word_embeddings=False, **options)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def make_target(target: HFTarget, model: LlamaForCausalLM) -> Any:
    return lambda **form: HFTarget(model, target.tokenizer, target.identity, **form)


def redrafter(target: HFTarget) -> Any:
    torch.manual_seed(1)
    options = {"kind": "redrafter", "beam_width": 3, "beam_length": 3, "tree_padding": "full"}
    return build_drafter(parse_drafter(options), target).eval().requires_grad_(False)


def answers(target: HFTarget, drafter: Any, rows: Any = PROMPTS) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in rows]
    prompts = [torch.tensor(row) for row in rows]
    for step in generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=ROOM):
        for row, new in zip(step.rows, step.tokens, strict=True):
            tokens[row] += new
    return tokens


# --- the choice


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 0.9, 0.5, 0.4, 0.6), 16),
        ((1.0, 1.0, 0.97, 1.0, 1.0), 1),  # may be chance
        ((1.0, 2.0, 3.0, 4.0, 5.0), 1),
        ((1.0, 0.5, 0.5, 0.5, 0.5), 4),
        ((math.inf,) * 5, 1),  # the clock stood still
    ],
)
def test_parts_are_chosen_if_they_are_clearly_faster(seconds: tuple[float, ...], expected: int) -> None:
    assert choose(dict(zip(PARTS, seconds, strict=True))) == expected


@pytest.mark.parametrize("num_parts", PARTS)
def test_passes_use_the_number_of_parts_that_was_fastest(gpu: Process, make_target: Any, num_parts: int) -> None:
    gpu.let_win(num_parts)
    target = make_target()
    answers(target, NullDrafter())  # the first prefill probes the model with a tree
    gpu.clock.parts.clear()
    gpu.measured.clear()
    answers(target, NullDrafter())
    assert set(gpu.clock.parts) == {num_parts}
    assert not gpu.measured


def test_each_number_of_parts_is_timed_over_all_layers(gpu: Process, make_target: Any) -> None:
    gpu.clock.seconds = {1: 7.0, 4: 5.0, 8: 3.0, 16: 4.0, 32: 6.0}
    answers(make_target(), NullDrafter(), PROMPTS[:2])
    times = json.loads(gpu.path.read_text())["times"]
    assert len(times) == len(gpu.measured) > 0
    assert all(seconds == {"1": 14.0, "4": 10.0, "8": 6.0, "16": 8.0, "32": 12.0} for seconds in times.values())
    assert gpu.clock.parts.count(32) == NUM_LAYERS * (1 + NUM_ROUNDS) * len(times), "no pass used it"


def test_all_lengths_are_chosen_before_the_first_pass(gpu: Process, make_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the kernel could change in the middle of a text, and a measured answer would wait."""
    target = make_target()
    prompts, nothing = torch.tensor([LONG, LONG]), empty_tree(2, torch.device("cpu"))
    output = TargetOutput(logits=torch.zeros(2, 1, 1), hidden_states=torch.zeros(2, 1, 1))
    monkeypatch.setattr(type(target), "_read_tree", lambda *args: output)
    target._trees.kinds = {"full_attention": None}  # no probe
    target.prefill(Prompts.of(list(prompts)), max_new_tokens=4 * STEP, max_nodes=0)
    target._trees.begin(target._cache, num_nodes=0)
    assert not gpu.measured, "equally long rows need no mask, so no parts"
    target.prefill(Prompts.of([prompts[0], prompts[1, 5:]]), max_new_tokens=4 * STEP, max_nodes=0)
    assert target.verify(prompts[:, 0], nothing) is output
    assert gpu.measured == [(2, 1, STEP), (2, 1, 2 * STEP), (2, 1, 4 * STEP)]


def test_queries_and_rows_have_choices_of_their_own(gpu: Process, make_target: Any) -> None:
    target = make_target()
    answers(target, NullDrafter(), PROMPTS[:2])
    probed = gpu.measured.copy()
    for rows in (PROMPTS[:2], PROMPTS[:1], PROMPTS):
        answers(target, redrafter(target), rows)
    queries = 16  # the last token and nine nodes, rounded up
    new = gpu.measured[len(probed) :]
    assert {shape for shape in new if shape[2] == STEP} >= {(rows, queries, STEP) for rows in (1, 2, 3)}
    assert len(gpu.measured) == len(set(gpu.measured)), "a shape was measured twice"


def test_a_choice_never_changes_in_a_process(gpu: Process, make_target: Any) -> None:
    """Plain decoding of another target, later, must use the kernels of the first one."""
    gpu.let_win(8)
    answers(make_target(), NullDrafter())
    chosen = gpu.chosen
    assert set(chosen.values()) == {8}
    gpu.let_win(4)
    gpu.path.unlink()
    gpu.clock.parts.clear()
    answers(make_target(), NullDrafter())
    assert gpu.chosen == chosen
    assert set(gpu.clock.parts) == {8}


# --- the text


@pytest.mark.parametrize(
    ("form", "num_parts"),
    [
        *itertools.product(["eager", "cuda_graphs"], [1, 16]),
        pytest.param("compiled", 16, marks=pytest.mark.slow),
        pytest.param("compiled", 1, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_the_text_is_the_same_in_every_form(
    model: LlamaForCausalLM,
    request: pytest.FixtureRequest,
    make_target: Any,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    num_parts: int,
) -> None:
    expected = answers(make_target(), NullDrafter())
    gpu: Process = request.getfixturevalue("gpu")
    monkeypatch.setattr(attention_speeds, "choose", lambda seconds: num_parts)  # a replay doesn't move the clock
    options: dict[str, Any] = {
        "eager": {},
        "cuda_graphs": {"cuda_graphs": True, "recorder": PoolRecorder()},
        "compiled": {"compiled": True},
    }[form]
    # Compile without a backend of kernels. A graph break is an error, and so are too many graphs.
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True, backend="aot_eager"))
    parts_of_passes: set[int] = set()
    masks_by_kind = tree_reader.masks_by_kind

    def counted_masks(*args: Any) -> Any:
        parts_of_passes.add(args[-1])
        return masks_by_kind(*args)

    monkeypatch.setattr(tree_reader, "masks_by_kind", counted_masks)
    target = make_target(**options)
    for drafter in (NullDrafter(), redrafter(target)):
        assert answers(target, drafter) == expected
        assert answers(target, drafter, PROMPTS[:1]) == expected[:1]
    assert set(gpu.chosen.values()) == parts_of_passes == {num_parts}


# --- where nothing is chosen


def test_a_cpu_measures_nothing(make_target: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(attention_speeds, "MIN_KEYS", 1)
    monkeypatch.setattr(attention_speeds, "measure", None)
    monkeypatch.setattr(tree_attention, "attend_split", None)
    assert answers(make_target(), NullDrafter())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [{"MAX_BATCH": 1}, {"MIN_KEYS": 4 * STEP}], ids=str)
def test_many_rows_and_short_texts_are_not_split(
    gpu: Process, make_target: Any, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    for name, value in limit.items():
        monkeypatch.setattr(attention_speeds, name, value)
    gpu.let_win(8)
    answers(make_target(), NullDrafter(), PROMPTS[:2])
    assert not [shape for shape in gpu.measured if shape[0] > 1]
    assert gpu.clock.parts.count(8) == NUM_LAYERS * (1 + NUM_ROUNDS) * len(gpu.measured), "a pass used it"


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("_supports_attention_backend", False), ("dtype", torch.bfloat16)],
    ids=["own code", "another type"],
)
def test_layers_that_may_not_read_a_split_mask_get_none(
    gpu: Process, make_target: Any, monkeypatch: pytest.MonkeyPatch, attribute: str, value: Any
) -> None:
    """A model with attention code of its own would add the mask to the scores of all keys."""
    target = make_target()
    monkeypatch.setattr(type(target.model), attribute, value)
    splits = attention_speeds.KeySplits(target.model, is_recorded=False)
    cache = prefilled(target)
    splits.prepare(cache)
    assert splits.num_parts(cache) == 1
    assert not gpu.measured


def prefilled(target: HFTarget) -> Any:
    """Return a cache of two rows of different lengths, with a pass prepared."""
    target._trees.kinds = {"full_attention": None}  # no probe
    target.prefill(Prompts.of([torch.tensor(LONG), torch.tensor(LONG[5:])]), max_new_tokens=ROOM, max_nodes=0)
    cache = target._require_cache()
    cache.begin_pass(1)
    return cache


def test_eager_attention_is_not_split(gpu: Process, make_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    cache = prefilled(target)
    monkeypatch.setattr(target.model.config, "_attn_implementation", "eager")
    splits = attention_speeds.KeySplits(target.model, is_recorded=False)
    splits.prepare(cache)
    assert splits.num_parts(cache) == 1
    assert not gpu.measured


def test_an_extent_that_parts_do_not_divide_is_not_split(gpu: Process, make_target: Any) -> None:
    gpu.let_win(32)
    target = make_target()
    cache = prefilled(target)
    target._trees._splits.prepare(cache)
    assert target._trees._splits.num_parts(cache) == 32
    cache.extent = STEP + 8
    assert target._trees._splits.num_parts(cache) == 1


def test_texts_that_return_before_any_prompt_are_read_whole(gpu: Process, make_target: Any) -> None:
    """The layers of such a target have no keys to measure with."""
    gpu.let_win(8)
    first, second = make_target(), make_target()
    prefilled(first)
    texts = [first.take(0), first.take(1)]
    last, nothing = torch.tensor([1, 2]), empty_tree(2, torch.device("cpu"))
    expected = first.verify(last, nothing).logits
    second._trees.kinds = first._trees.kinds
    second.resume(None, texts, capacity=STEP)
    gpu.clock.parts.clear()
    torch.testing.assert_close(second.verify(last, nothing).logits, expected, rtol=1e-4, atol=1e-4)
    assert gpu.clock.parts == [1] * NUM_LAYERS


# --- recordings


def test_what_is_recorded_is_measured_in_recordings(gpu: Process, make_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of an eager measurement would count against parts, which have more kernels."""
    recorders: list[PoolRecorder] = []

    def make_recorder() -> PoolRecorder:
        recorders.append(PoolRecorder())
        return recorders[-1]

    monkeypatch.setattr(attention_speeds, "CudaGraphRecorder", make_recorder)
    answers(make_target(cuda_graphs=True, recorder=PoolRecorder()), NullDrafter(), PROMPTS[:1])
    assert len(recorders) == len(PARTS) * len(gpu.measured) > 0
    assert {recorder.num_replays for recorder in recorders} == {1 + NUM_ROUNDS}
    recorded, recorders[:] = gpu.measured.copy(), []
    answers(make_target(), NullDrafter(), PROMPTS[:2])
    assert not recorders
    assert len(gpu.measured) > len(recorded)


# --- the machine's file


def test_a_later_process_reads_the_times(gpu: Process, make_target: Any) -> None:
    gpu.let_win(8)
    answers(make_target(), NullDrafter())
    chosen = gpu.chosen
    gpu.start_again()
    gpu.let_win(4)
    answers(make_target(), NullDrafter())
    assert not gpu.measured
    assert gpu.chosen == chosen
    assert set(chosen.values()) == {8}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: text.replace('"device": "', '"device": "another '),
        lambda text: text.replace('"16": ', '"17": '),
        lambda text: text.replace('"16": ', '"16": -'),
        lambda text: text.replace('"16": ', '"16": NaN, "x": '),
    ],
    ids=["truncated", "another GPU", "other parts", "negative", "no number"],
)
def test_a_useless_file_is_written_again(gpu: Process, make_target: Any, damage: Any) -> None:
    gpu.let_win(8)
    answers(make_target(), NullDrafter(), PROMPTS[:2])
    good = gpu.path.read_text()
    damaged = damage(good)
    assert damaged != good
    gpu.path.write_text(damaged)
    gpu.start_again()
    answers(make_target(), NullDrafter(), PROMPTS[:2])
    assert gpu.measured
    assert json.loads(gpu.path.read_text())["times"] == json.loads(good)["times"]


@pytest.mark.parametrize("clock", [lambda: 1.0, itertools.count(0, -1).__next__], ids=["stands still", "runs backwards"])
def test_a_useless_clock_splits_nothing(gpu: Process, make_target: Any, monkeypatch: pytest.MonkeyPatch, clock: Any) -> None:
    monkeypatch.setattr(time, "perf_counter", clock)
    answers(make_target(), NullDrafter(), PROMPTS[:2])
    assert set(gpu.chosen.values()) == {1}
    assert json.loads(gpu.path.read_text())["times"] == {}, "a later process can measure"
