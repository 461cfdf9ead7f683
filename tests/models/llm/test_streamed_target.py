"""A target within a memory budget: the same text as in memory, and faults that are named."""

import errno
import gc
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from outrider.eval.measure.environment import measure_roofline, weight_bytes
from outrider.models.decoding import GreedyAcceptance, RowSeeds, Sampling, SpeculativeSampling, generate
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.drafters.decoder_layer import require_copyable_weights
from outrider.models.llm import weight_reader
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.hidden_states import decoder_layers
from outrider.models.llm.loading import load_target
from outrider.models.llm.weight_files import INDEX_FILE, PAGE, SINGLE_FILE
from outrider.models.llm.weight_reader import staging_bytes

from ...decoded import texts_of
from ...tiny_models import save_tiny_target

GIB = 2**30
NUM_LAYERS, NUM_TOKENS = 10, 256
TEXTS = [torch.arange(5, 12), torch.arange(40, 43), torch.arange(90, 101), torch.arange(7, 9)]


@pytest.fixture(scope="module")
def directory(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Llama of ten layers in two shards."""
    directory = tmp_path_factory.mktemp("ten") / "target"
    options = {"num_hidden_layers": NUM_LAYERS, "initializer_range": 0.2}
    save_tiny_target(directory, LlamaForCausalLM, LlamaConfig, tiny_tokenizer, **options)
    model = LlamaForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="150KB")
    assert len([*directory.glob("*.safetensors")]) > 1
    return directory


@pytest.fixture(scope="module")
def whole(directory: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(directory), fast_linears=False), torch.device("cpu"))


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


def budget(whole: HFTarget, num_layers: int = 0, *, head_stays: bool = True, tokens: int = NUM_TOKENS) -> float:
    """Return the GiB for two slots and `num_layers` layers more."""
    layer = sum(parameter.nbytes for parameter in decoder_layers(whole.model)[0].parameters())
    everything = sum(parameter.nbytes for parameter in whole.model.parameters())
    ends = everything - NUM_LAYERS * layer - (0 if head_stays else whole.head.weight.nbytes)
    slot = layer if head_stays else max(layer, whole.head.weight.nbytes)
    token = 2 * NUM_LAYERS * 2 * 8 * whole.dtype.itemsize
    staging = staging_bytes(PAGE * (2 + max(layer, whole.head.weight.nbytes) // PAGE))
    return (staging + ends + tokens * token + 2 * slot + num_layers * layer) / GIB


Load = Callable[..., HFTarget]


@pytest.fixture
def load(directory: Path, whole: HFTarget) -> Iterator[Load]:
    """Load the target within a budget for `num_layers` layers; close its stream after the test."""
    targets = []

    def load(num_layers: int = 2, *, path: Path = directory, gib: float | None = None, **options: Any) -> HFTarget:
        gib = budget(whole, num_layers) if gib is None else gib
        sizes = {"memory_budget_gib": gib, "budget_tokens": NUM_TOKENS}
        target = load_target(TargetConfig(name_or_path=str(path), **{**sizes, **options}), torch.device("cpu"))
        targets.append(target)
        return target

    yield load
    for target in targets:
        if target.stream is not None:
            target.stream.close()


def answers(target: HFTarget, texts: list[torch.Tensor], *, sampled: bool = False, num_new: int = 8) -> list[list[int]]:
    rule = SpeculativeSampling(sampling=Sampling(temperature=0.8)) if sampled else GreedyAcceptance()
    generator = RowSeeds([7 + row for row in range(len(texts))]) if sampled else None
    return texts_of(generate(target, NullDrafter(), rule, texts, max_new_tokens=num_new, generator=generator), len(texts))


# --- the same text


def test_a_budget_for_all_weights_streams_nothing(load: Load, whole: HFTarget, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outrider"):
        target = load(100)
    assert target.stream is None
    assert target.form == "eager"
    assert not target.fast_linears  # packed copies would be outside the budget
    assert "10 layers: 10 stay (a pass reads no file)" in caplog.text
    assert answers(target, TEXTS) == answers(whole, TEXTS)


def test_a_stored_buffer_may_be_alone_in_a_file(tiny_tokenizer: Any, load: Load, tmp_path: Path) -> None:
    """Gemma 4 stores a number of each layer that isn't trained."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    shapes = {"hidden_size_per_layer_input": 0, "head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 0}
    folder = save_tiny_target(tmp_path / "gemma", Gemma4ForCausalLM, Gemma4TextConfig, tiny_tokenizer, **layers, **shapes)
    tensors = load_file(folder / SINGLE_FILE)
    buffers = {name: torch.full_like(tensor, 0.7) for name, tensor in tensors.items() if name.endswith("layer_scalar")}
    assert len(buffers) == 4
    (folder / SINGLE_FILE).unlink()
    files = {
        "model-00001-of-00002.safetensors": tensors.keys() - buffers.keys(),
        "model-00002-of-00002.safetensors": buffers.keys(),
    }
    for file, names in files.items():
        save_file({name: buffers.get(name, tensors[name]) for name in names}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    target = load(path=folder, gib=0.00033)
    assert target.stream is not None
    assert {float(buffer) for name, buffer in target.model.named_buffers() if name.endswith("layer_scalar")} == {
        float(torch.tensor(0.7))
    }
    expected = load_target(TargetConfig(name_or_path=str(folder), fast_linears=False), torch.device("cpu"))
    assert answers(target, TEXTS) == answers(expected, TEXTS)


def test_a_pass_that_ends_early_does_not_wait_for_the_layer_where_it_ends(load: Load) -> None:
    target = load(0)
    assert target.stream is not None
    target.layer_inputs((2,), input_ids=TEXTS[0][None])
    assert target.stream._now is None
    assert [turn.index for turn in target.stream._ahead] == [2, 3]


# --- what it costs


def test_a_pass_reads_what_the_plan_says(load: Load) -> None:
    target = load()
    assert target.stream is not None
    answers(target, TEXTS)
    before = target.stream.stats
    answers(target, TEXTS[:1], num_new=11)
    counts = target.stream.stats - before
    assert counts.passes == 11
    assert counts.restarts == 0
    in_windows = [unit.weights.num_bytes for unit in target.stream.units]  # with what lies between tensors
    assert abs(counts.bytes_read - 11 * sum(in_windows)) <= 2 * max(in_windows)  # units ahead at either end
    assert sum(in_windows) < 1.2 * target.stream.plan.streamed_bytes


def test_the_probe_takes_four_passes(load: Load) -> None:
    """Each pass over a large target takes seconds; there were nine."""
    target = load()
    assert target.stream is not None
    answers(target, TEXTS[:1], num_new=1)
    assert target.stream.stats.passes == 4 + 1


def test_the_line_at_load_names_places_bytes_and_seconds(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outrider"):
        load()
    assert "10 layers: 2 stay, 8 stream (" in caplog.text
    assert "GB/s measured)" in caplog.text


def test_the_roofline_of_a_streamed_target_is_the_reading(load: Load, whole: HFTarget) -> None:
    target = load()
    assert target.stream is not None
    roofline = measure_roofline(target)
    assert roofline.streamed
    assert roofline.weight_bytes == target.stream.plan.streamed_bytes
    assert roofline.bandwidth_gbs == pytest.approx(target.stream.bytes_per_second / 1e9, rel=0.5)
    in_memory = measure_roofline(whole)
    assert not in_memory.streamed
    assert in_memory.weight_bytes == weight_bytes(whole.model)
    assert target.weight_bytes < whole.weight_bytes == sum(parameter.nbytes for parameter in whole.model.parameters())
    assert not target.has_fixed_shapes  # nothing is compiled for each shape


# --- what is refused


def test_a_batch_above_the_budgeted_tokens_is_refused_at_prefill(load: Load) -> None:
    target = load()
    with pytest.raises(ValueError, match=r"448 tokens \(4 x 112 .*, and target.budget_tokens is 256"):
        answers(target, TEXTS, num_new=100)
    assert target.stream is not None
    assert target.stream.stats.passes == 0  # before the probe
    assert len(answers(target, TEXTS[:1], num_new=100)[0]) == 100


def test_a_budget_that_is_too_small_is_refused_before_anything_is_read(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reader.os, "preadv", None)
    with pytest.raises(ValueError, match=r"target.memory_budget_gib is 0.0001.* at least 0\.00\d+ GiB \(embeddings and norms"):
        load(gib=0.0001)


@pytest.mark.parametrize("gib", [0, -1])
def test_a_budget_is_positive(gib: float) -> None:
    with pytest.raises(ValueError, match="(?s)memory_budget_gib.*greater than 0"):
        TargetConfig(name_or_path="x", memory_budget_gib=gib)


@pytest.mark.parametrize("options", [{"compiled": True}, {"cuda_graphs": True}, {"tensor_parallel": True}])
def test_what_needs_weights_in_fixed_places_is_refused_with_a_budget(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"memory_budget_gib is 4.0, which doesn't work together with {next(iter(options))}"):
        TargetConfig(name_or_path="x", memory_budget_gib=4.0, **options)


def test_drafters_that_copy_the_targets_layers_are_refused(load: Load) -> None:
    target = load()
    with pytest.raises(ValueError, match=r"target.memory_budget_gib.*set drafter.init=random"):
        build_drafter(parse_drafter({"kind": "draft_model", "init": "target_layers", "num_layers": 1}), target)
    with pytest.raises(ValueError, match=r"can't be copied: set drafter.init=random"):
        require_copyable_weights(target, target.model)


def test_fast_linears_leave_the_target_alone(load: Load) -> None:
    """A packed copy of a streamed weight would be one of nothing, or of another layer."""
    target = load(fast_linears=True)
    drafter = torch.nn.Linear(256, 256).requires_grad_(False)
    target.choose_linears(drafter)
    assert list(target.linears) == ["256x256 float32"]
    assert not any("forward" in vars(module) for module in target.model.modules())


def test_stored_weights_of_another_form_are_refused_and_the_remedy_works(tmp_path, tiny_tokenizer, load, whole, caplog):
    """transformers joins the experts of a mixture when it loads them."""
    options = {"num_hidden_layers": NUM_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2}
    save_tiny_target(tmp_path / "mixture", MixtralForCausalLM, MixtralConfig, tiny_tokenizer, **options)
    with pytest.raises(ValueError, match=r"experts.*leave them out, or save .*save_original_format=False"):
        load(path=tmp_path / "mixture")
    model = MixtralForCausalLM.from_pretrained(tmp_path / "mixture")
    model.save_pretrained(tmp_path / "mixture", save_original_format=False)
    expected = load_target(TargetConfig(name_or_path=str(tmp_path / "mixture"), fast_linears=False), torch.device("cpu"))
    target = load(path=tmp_path / "mixture", gib=budget(expected, 2))
    assert "mixture of experts: each pass reads all experts" in caplog.text
    assert answers(target, TEXTS) == answers(expected, TEXTS)


# --- faults in the middle


def test_a_failed_read_names_the_layer_and_the_next_answer_is_right(load, whole, monkeypatch):
    target, expected = load(0), answers(whole, TEXTS)
    assert answers(target, TEXTS) == expected
    system_read, fails = os.preadv, True

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if fails and offset > 0:
            raise OSError(errno.EIO, "Input/output error")
        return system_read(descriptor, buffers, offset)

    monkeypatch.setattr(weight_reader.os, "preadv", failing)
    for _ in range(2):  # for good
        with pytest.raises(OSError, match=r"model.layers.\d: bytes \d+ to \d+ of .*model-0000\d.*can't be read"):
            answers(target, TEXTS)
    fails = False
    assert answers(target, TEXTS) == expected


def test_threads_and_files_end_with_the_target(load: Load, directory: Path, whole: HFTarget) -> None:
    def names() -> int:
        return sum(thread.name.startswith("outrider-weights") for thread in threading.enumerate())

    before, num_files = names(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    config = TargetConfig(name_or_path=str(directory), memory_budget_gib=budget(whole), budget_tokens=NUM_TOKENS)
    target = load_target(config, torch.device("cpu"))
    assert names() == before + 2
    answers(target, TEXTS)
    del target
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("outrider-weights") and names() > before:
            thread.join(timeout=10)
    assert names() == before
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_files  # noqa: PTH208


def test_the_digest_of_the_weights_leaves_them_out_of_the_page_cache(load, whole, directory, monkeypatch):
    """Else the first pass of a benchmark would read from memory."""
    dropped: list[Path] = []
    monkeypatch.setattr("outrider.models.llm.identity.drop_from_cache", dropped.append)
    assert load().identity == whole.identity
    assert dropped == sorted(directory.glob("*.safetensors"))
