"""A target over several devices: which device each part gets, and what moves between them.

A CPU is one device. So the moves are tested with a second "device" without memory (meta), and with
the hooks that move the inputs of layers between devices, forced onto one device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.decoding.types import Counts
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.llm import device_map as module
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.device_map import divide_layers, resolve
from outrider.models.llm.hidden_states import CapturedHiddenStates
from outrider.models.llm.loading import load_target
from outrider.models.llm.tree_cache import TreeCache
from outrider.models.machine import parse_device

CPU, META = torch.device("cpu"), torch.device("meta")
GIB = 2**30


@pytest.fixture(scope="module")
def empty() -> LlamaForCausalLM:
    """Return a model of four layers without memory."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes))


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let maps name devices that this machine lacks."""
    monkeypatch.setattr(
        module, "parse_device", lambda name: torch.device("cuda", name) if type(name) is int else torch.device(name)
    )


def test_a_map_covers_the_layers_and_all_modules_beside_them(empty: LlamaForCausalLM, any_device: None) -> None:
    devices = resolve({"": 0, "model.layers.2": 1, "model.layers.3": 1}, empty)
    of_index = {name: device.index for name, device in devices.items()}
    ends = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    assert of_index == {**dict.fromkeys(ends, 0), **{f"model.layers.{layer}": layer // 2 for layer in range(4)}}
    parts = tuple(f"{name}." for name in devices)
    assert all(name.startswith(parts) for name, _ in [*empty.named_parameters(), *empty.named_buffers()]), (
        "a part has no device"
    )


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"model": 0}, "no device for lm_head; add one, or add ''"),
        ({"": 0, "model.layers.9": 1}, "names model.layers.9, which the model doesn't have"),
        ({"": 0, "lm_head": 1}, "has lm_head on cuda:1 and model.embed_tokens on cuda:0"),
        ({"": 0, "model.layers.1": "cpu"}, r"devices of several kinds \(cpu, cuda\).*memory_budget_gib"),
    ],
)
def test_a_map_that_drafters_or_layers_cannot_use_is_an_error(device_map, message, empty, any_device):
    with pytest.raises(ValueError, match=message):
        resolve(device_map, empty)


def test_a_longer_number_is_not_a_prefix_of_a_layer(any_device: None) -> None:
    with torch.device("meta"):
        deep = LlamaForCausalLM(LlamaConfig(num_hidden_layers=12, hidden_size=8, num_attention_heads=1, intermediate_size=8))
    devices = resolve({"": 0, "model.layers.1": 1}, deep)
    assert [name for name, device in devices.items() if device.index == 1] == ["model.layers.1"]


def test_layers_are_divided_in_proportion_to_the_free_memory() -> None:
    assert divide_layers(8, [1, 1]) == [4, 4]
    assert divide_layers(10, [20 * GIB, 80 * GIB]) == [2, 8]
    assert divide_layers(3, [0, 5]) == [0, 3]
    for number in range(1, 40):
        assert sum(divide_layers(number, [3, 5, 7])) == number


def test_auto_leaves_room_for_the_ends_on_the_first_device(empty: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = sum(p.nbytes for p in (empty.lm_head.weight, empty.model.embed_tokens.weight, empty.model.norm.weight))

    class Accelerator:
        """Two devices; the first one has as much room as the second, and the ends."""

        @staticmethod
        def mem_get_info(device: torch.device) -> tuple[int, int]:
            return 10_000 + (ends if device.index == 0 else 0), 0

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Accelerator)
    devices = resolve("auto", empty)
    assert [devices[f"model.layers.{layer}"].index for layer in range(4)] == [0, 0, 1, 1]
    assert devices["lm_head"].index == 0


def test_auto_needs_several_accelerators_and_maps_need_devices_that_exist(empty: LlamaForCausalLM) -> None:
    if torch.accelerator.device_count() < 2:
        with pytest.raises(ValueError, match="divides the target among two or more: leave it out"):
            resolve("auto", empty)
    with pytest.raises(ValueError, match="there is no device 'cuda:99'"):
        resolve({"": "cuda:99"}, empty)
    assert parse_device("cpu") == CPU


@pytest.mark.parametrize(
    "options", [{"compiled": True}, {"cuda_graphs": True}, {"memory_budget_gib": 1}, {"stage_layers": [1]}, {"device": "cpu"}]
)
def test_options_of_another_placement_are_refused_with_a_map(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"device_map is auto, which doesn't work together with {next(iter(options))}"):
        TargetConfig(name_or_path="x", device_map="auto", **options)


def test_a_map_is_auto_or_names_devices() -> None:
    for value in (None, "auto", {"": 0, "model.layers.20": "cuda:1"}):
        assert TargetConfig(name_or_path="x", device_map=value).device_map == value
    for wrong in ("balanced", {}, {"": None}, {1: 0}, [1, 1], 0, {"": True}, {"": 1.5}):
        with pytest.raises(ValueError, match="must be auto, or a mapping of module names to devices"):
            TargetConfig(name_or_path="x", device_map=wrong)


def per_layer(num_layers: int) -> dict[str, str]:
    return {"": "cpu", **{f"model.layers.{layer}": "cpu" for layer in range(num_layers)}}


@pytest.mark.parametrize("device_map", [{"": "cpu"}, per_layer(2)])
def test_a_map_of_one_device_loads_the_same_target(device_map: dict[str, str], tiny_target_dir: Path) -> None:
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device_map=device_map))
    plain = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))
    text = torch.arange(3, 40)[None]
    assert torch.equal(target.plain_logits(text), plain.plain_logits(text))
    assert target.layer_devices == (CPU,) * len(target.model.model.layers)
    assert (target.form, target.fast_linears) == ("eager", False)
    assert target.identity == plain.identity


@pytest.mark.parametrize("kind", ["plain", "redrafter", "eagle3"])
def test_the_hooks_that_move_inputs_change_no_token(kind: str, tiny_target_dir: Path) -> None:
    """The hooks are those of a map over several devices."""
    answers = []
    for is_hooked in (False, True):
        target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float64", device_map={"": "cpu"}))
        torch.manual_seed(0)
        options = {"redrafter": {"beam_width": 3, "beam_length": 2}, "eagle3": {"depth": 2, "init": "random"}}
        drafter = NullDrafter() if kind == "plain" else build_drafter(parse_drafter({"kind": kind, **options[kind]}), target)
        if is_hooked:
            skipped = target.model._skip_keys_device_placement
            devices = per_layer(2) | dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
            del devices[""]
            dispatch_model(target.model, devices, main_device="cpu", force_hooks=True, skip_keys=skipped)
            assert hasattr(target.model.model.layers[1], "_hf_hook")
        prompts = [torch.tensor([1, 70, 71, 72, 2]), torch.tensor([9, 8])]
        steps = list(generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=12))
        answers.append([[t for step in steps if row in step.rows for t in step.tokens[step.rows.index(row)]] for row in (0, 1)])
    assert answers[0] == answers[1]


def test_each_layers_keys_are_on_its_device_and_every_operation_follows() -> None:
    """Two layers on the CPU and one on meta. An index on the wrong device would raise an error."""
    cache = TreeCache(3, 2, 16, CPU, layer_devices=[CPU, META, CPU])

    def write(num_entries: int) -> None:
        for index, device in enumerate((CPU, META, CPU)):
            states = torch.randn(2, 1, num_entries, 4).to(device)
            keys, _ = cache.layers[index].update(states, states)
            assert keys.device == device

    cache.begin_prefill(2, 5)
    write(5)
    assert [(buffer.device, len(buffer)) for buffer in cache._buffers] == [(CPU, 4), (META, 2)], "no slot too many"
    cache.keep(None, Counts.of([5, 3], CPU))
    cache.trim()
    cache.begin_pass(3)  # rows of different lengths: columns are a tensor
    cache.locate()
    write(3)
    cache.keep(torch.tensor([[0, 2], [0, 1]]), Counts.of([2, 1], CPU))
    cache.begin_pass(40)
    assert [buffer.device for buffer in cache._buffers] == [CPU, META], "the cache has grown"
    cache.select([1])
    cache.restart()
    assert cache.lengths.device.device == CPU


def test_features_of_layers_on_other_devices_come_to_the_first_one() -> None:
    captured = CapturedHiddenStates()
    captured.layers = (0, 1)
    captured._inputs = {0: torch.zeros(1, 2, 4, device=META), 1: torch.zeros(1, 2, 4, device=META)}
    captured._hidden_states = torch.zeros(1, 2, 4, device=META)
    assert captured._side_by_side().device == META
    # Tensors on meta can't be copied to a CPU: so the attempt shows where they would go.
    captured._inputs = {0: torch.zeros(1, 2, 4), 1: torch.zeros(1, 2, 4, device=META)}
    captured._hidden_states = torch.zeros(1, 2, 4)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        captured._side_by_side()
