"""Faults of streamed targets: damaged folders, changed files, forks, errors in hooks, wrong uses."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter
from outrider.models.llm import streamed_loading
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.models.llm.memory_plan import GIB
from outrider.models.llm.weight_files import read_folder

from ...conformance.test_architectures import GQA, make_model
from ...streamed_targets import (
    CPU,
    budget_bytes,
    layers_of,
    load_in_memory,
    load_streamed,
    open_files,
    reader_threads,
    stream_of,
)

TEXT = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
NUM_LAYERS = 6
INDEX = "model.safetensors.index.json"
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Save a target in several files."""
    folder = tmp_path_factory.mktemp("saved")
    make_model("Llama", {**GQA, "num_hidden_layers": NUM_LAYERS}, "sdpa").float().save_pretrained(folder, max_shard_size="50KB")
    assert (folder / INDEX).is_file()
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """Return a copy that the test may change."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(scope="module")
def expected(saved) -> torch.Tensor:
    """Return the logits of the target in memory."""
    return logits(load_in_memory(saved))


@torch.no_grad()
def logits(target: HFTarget) -> torch.Tensor:
    return target.model(TEXT).logits


def answer(target: HFTarget) -> list[int]:
    steps = generate(target, NullDrafter(), GreedyAcceptance(), [TEXT[0]], max_new_tokens=6)
    return [token for step in steps for token in step.tokens[0]]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


# --- folders


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"model.norm.weight": 3}}', '{"weight_map": null}'],
)
def test_a_damaged_index_is_named(folder, index):
    (folder / INDEX).write_text(index)
    with pytest.raises(ValueError, match=r"(?s)index.json can't be read: .*Is the download complete"):
        load_streamed(folder)


def test_an_index_that_names_a_missing_file_is_an_error(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "nope.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names nope.safetensors, which is missing; complete the download"):
        load_streamed(folder)


def test_the_same_files_are_read_as_by_transformers(folder):
    """A folder may have a single file and an index, or a tensor in two files."""
    # 1. Two files have the norm.
    last = max(folder.glob("*.safetensors"))
    save_file({**load_file(last), "model.norm.weight": torch.full((32,), 3.0)}, last, metadata={"format": "pt"})
    of_last = logits(load_in_memory(folder))
    assert torch.equal(logits(load_streamed(folder)), of_last)
    # 2. A single file is there, too.
    whole = {**tensors_of(folder), "model.norm.weight": torch.full((32,), 5.0)}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    of_single = logits(load_in_memory(folder))
    assert not torch.equal(of_single, of_last)
    assert torch.equal(logits(load_streamed(folder)), of_single)


def write_oddly(path: Path, tensors: dict[str, torch.Tensor], rng: random.Random) -> None:
    """Write tensors in random order and types, at odd positions; the format allows all of it."""
    header: dict[str, Any] = {}
    data = b""
    for name in rng.sample(sorted(tensors), len(tensors)):
        padding = rng.choice([0, 0, 1, 3, 5000])
        header[f"{name}.padding"] = {"dtype": "U8", "shape": [padding], "data_offsets": [len(data), len(data) + padding]}
        data += bytes(padding)
        dtype = next(key for key, value in TYPES.items() if value == tensors[name].dtype)
        content = tensors[name].contiguous().view(torch.uint8).numpy().tobytes()
        end = len(data) + len(content)
        header[name] = {"dtype": dtype, "shape": [*tensors[name].shape], "data_offsets": [len(data), end]}
        data += content
    encoded = json.dumps(header).encode() + b" " * rng.randrange(8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


@pytest.mark.parametrize("seed", range(3))
def test_types_may_differ_by_tensor_and_positions_may_be_odd(folder, seed, monkeypatch):
    rng = random.Random(seed)
    # 1. Store each tensor in a random type.
    tensors = {name: tensor.to(TYPES[rng.choice([*TYPES])]) for name, tensor in sorted(tensors_of(folder).items())}
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    write_oddly(folder / "model.safetensors", tensors, rng)
    # 2. The whole model with the same numbers.
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder, attn_implementation="sdpa")).float().eval()
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    with torch.no_grad():
        whole = model(TEXT).logits
    # 3. Windows of a page or two divide tensors and elements at odd places.
    monkeypatch.setattr(streamed_loading, "WINDOW_BYTES", rng.choice([8192, 12288]))
    target = load_streamed(folder)
    for _ in range(2):
        assert torch.equal(logits(target), whole)


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(saved, expected, tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(saved.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    target = load_streamed(snapshot)
    assert torch.equal(logits(target), expected)
    # another revision is downloaded, and the link goes to another blob
    link = next(path for path in snapshot.iterdir() if path.suffix == ".safetensors")
    shutil.copy(link.resolve(), blobs / "new")
    link.unlink()
    link.symlink_to(Path("../../blobs/new"))
    with pytest.raises(ValueError, match=rf"the weights changed while they were being read: .*{link.name}"):
        _ = logits(target), logits(target)


# --- budgets


@pytest.mark.parametrize("seed", range(2))
def test_any_budget_gives_the_same_logits_and_reads_what_it_plans(saved, expected, seed, monkeypatch):
    rng = random.Random(seed)
    config = TargetConfig(name_or_path=str(saved), dtype="float32", fast_linears=False, budget_tokens=rng.randint(100, 3000))
    monkeypatch.setattr(streamed_loading, "staging_bytes", lambda window_bytes: 0)  # larger than the tiny model
    least = budget_bytes(config, 0, head_streams=True)
    room = budget_bytes(config, NUM_LAYERS - 2) - least
    with pytest.raises(ValueError, match="this model needs at least"):
        load_target(replace(config, memory_budget_gib=(least - 1) / GIB), CPU, needs_tokenizer=False)
    num_streamed = 0
    for share in (0.0, 0.99, *(rng.random() for _ in range(2))):
        target = load_target(replace(config, memory_budget_gib=(least + share * room) / GIB), CPU, needs_tokenizer=False)
        plan, before = stream_of(target).plan, stream_of(target).stats
        assert plan.planned_bytes <= plan.budget_bytes <= least + share * room
        for _ in range(3):
            assert torch.equal(logits(target), expected)
        stream_of(target).wait_until_ahead()
        stats = stream_of(target).stats - before
        assert stats.passes == 3
        assert stats.bytes_read == pytest.approx(3 * plan.streamed_bytes, rel=0.4)  # windows begin at pages
        num_streamed += plan.streamed_bytes > 0
    assert num_streamed == 4


def test_a_budget_for_all_weights_bounds_the_keys_and_values_too(saved):
    config = TargetConfig(name_or_path=str(saved), dtype="float32", memory_budget_gib=1.0, budget_tokens=20)
    target = load_target(config, CPU, needs_tokenizer=False)
    assert target.stream is None
    assert len(answer(target)) == 6
    with pytest.raises(ValueError, match="target.budget_tokens is 20"):
        next(generate(target, NullDrafter(), GreedyAcceptance(), [TEXT[0]], max_new_tokens=12))


def test_no_budget_costs_nothing(folder):
    """No hook is registered, no thread started and no file left open."""
    threads = set(reader_threads())
    target = load_in_memory(folder)
    answer(target)
    target.release_hooks()
    assert target.stream is None
    for module in target.model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._state_dict_pre_hooks
    assert set(reader_threads()) <= threads
    assert open_files(folder) == []


# --- passes


def test_passes_of_two_targets_may_be_nested(saved, expected):
    outer, inner = load_streamed(saved), load_streamed(saved, num_staying=2)
    inside: list[torch.Tensor] = []
    hook = layers_of(outer)[2].register_forward_hook(lambda *_: inside.append(logits(inner)))
    assert torch.equal(logits(outer), expected)
    hook.remove()
    assert len(inside) == 1
    assert torch.equal(inside[0], expected)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_an_error_in_a_hook_leaves_the_target_usable(saved, expected, error, register):
    target = load_streamed(saved)

    def raising(*_: Any) -> None:
        raise error

    for index in (0, 3, NUM_LAYERS - 1):
        hook = getattr(layers_of(target)[index], register)(raising)
        with pytest.raises(error):
            logits(target)
        hook.remove()
        assert torch.equal(logits(target), expected)
        assert not any(parameter.numel() for module in layers_of(target) for parameter in module.parameters())


def test_a_target_decodes_after_its_cache_was_released(saved):
    target = load_streamed(saved)
    expected = answer(target)
    next(generate(target, NullDrafter(), GreedyAcceptance(), [TEXT[0]], max_new_tokens=6))
    target.release_cache()
    assert answer(target) == expected


def test_a_file_that_is_written_during_a_pass_ends_this_pass(folder):
    """A check between passes would come after a token that wrong weights have chosen."""
    target = load_streamed(folder)
    logits(target)
    stored = read_folder(folder)["model.layers.4.mlp.down_proj.weight"]

    def overwrite(*_: Any) -> None:
        with stored.path.open("r+b") as file:
            file.seek(stored.offset)
            file.write(b"\x11" * stored.num_bytes)

    time.sleep(0.05)  # file systems count time in steps of some milliseconds
    hook = layers_of(target)[0].register_forward_hook(overwrite)
    with pytest.raises(ValueError, match=rf"weights changed while they were being read: .*{stored.path.name}"):
        logits(target)
    hook.remove()


# --- processes


def test_a_file_that_is_replaced_while_the_target_loads_is_an_error(folder, monkeypatch):
    """The headers are read before the files are opened."""
    opened = streamed_loading.WeightFiles

    def replaced_first(paths: Any) -> Any:
        for path in paths:
            tensors = {name: torch.cat([tensor, tensor]) for name, tensor in load_file(path).items()}
            save_file(tensors, folder / "other.safetensors")
            (folder / "other.safetensors").replace(path)
        return opened(paths)

    monkeypatch.setattr(streamed_loading, "WeightFiles", replaced_first)
    with pytest.raises(ValueError, match="changed while they were being read: .*is no longer where it was"):
        load_streamed(folder)


def in_child(run: Callable[[], object]) -> int:
    """Run in a fork of this process; return 0 if it raised RuntimeError, and its signal if it hung."""
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        try:
            run()
        except RuntimeError:
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_of_the_process_raises_an_error_instead_of_waiting(saved, expected):
    """A fork, as of a data loader's workers, has no threads that read."""
    target = load_streamed(saved)
    assert in_child(lambda: logits(target)) == 0
    assert torch.equal(logits(target), expected)


@pytest.mark.parametrize("save", ["save_pretrained", "state_dict"])
def test_weights_are_not_saved_outside_passes(saved, expected, save, tmp_path):
    target = load_streamed(saved)
    with pytest.raises(ValueError, match=r"model.layers.0 are in memory only during passes.*without a budget"):
        getattr(target.model, save)(*([tmp_path / "copy"] if save == "save_pretrained" else []))
    assert not list(tmp_path.glob("copy/*.safetensors"))
    assert torch.equal(logits(target), expected)


def test_a_stream_that_was_closed_is_an_error(saved):
    target = load_streamed(saved)
    stream_of(target).close()
    with pytest.raises(RuntimeError):
        logits(target)
