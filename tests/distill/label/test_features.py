"""Stored states of the target: their values, their sizes in bytes, and errors."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from outrider.data.config import STATE_DTYPES, DataConfig
from outrider.data.manifest import Manifest
from outrider.data.shards import read_shard
from outrider.data.states import LARGEST
from outrider.data.types import UNKNOWN, DistilledExample
from outrider.distill.config import DistillConfig
from outrider.distill.label import features as features_module
from outrider.distill.label import run as run_module
from outrider.distill.label.continuations import label_continuations
from outrider.distill.label.features import TextFeatures, bytes_per_token, start_host_copies, start_storing
from outrider.distill.label.run import distill, load_examples
from outrider.models.llm.hf_target import HFTarget

HORIZON, TOP = 4, 6
ALL = DistillConfig(
    horizon=HORIZON, features="last_hidden", feature_layers=[1, 0], top_logprobs=TOP, shard_examples=3, batch_tokens=128
)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Write conversations of two answers; the longer ones are cut in the middle of an answer."""
    turns = [("user", "How many?"), ("assistant", "one two three"), ("user", "And then?"), ("assistant", "four five six " * 3)]
    records = [
        {"id": f"chat-{index}", "messages": [{"role": role, "content": text * (1 + index % 3)} for role, text in turns]}
        for index in range(7)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(source="messages", path=str(path), max_length=70)


def run(config: DistillConfig, data: DataConfig, target: HFTarget, output_dir: Path) -> Manifest:
    return distill(config, data, target, output_dir, Accelerator(cpu=True))


def examples_in(folder: Path, manifest: Manifest) -> list[DistilledExample]:
    return [example for shard in manifest.shards for example in read_shard(folder, shard)]


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_stored_states_and_likeliest_tokens_are_those_of_the_target(dtype, target, data, tmp_path):
    manifest = run(replace(ALL, features_dtype=dtype), data, target, tmp_path / "distill")
    assert (manifest.features, manifest.feature_layers, manifest.features_dtype) == ("last_hidden", [0, 1], dtype)
    assert manifest.top_logprobs == TOP
    examples = examples_in(tmp_path / "distill", manifest)
    assert len(examples) == 7
    for example in examples:
        ids = example.example.input_ids[None]
        hidden_states, features = target.hidden_states(ids, (0, 1))
        assert features is not None
        expected = (hidden_states[0], *features[0].split(target.hidden_size, -1))
        for stored, states in zip((example.hidden_states, example.layers[0], example.layers[1]), expected, strict=True):
            assert stored is not None
            step = states.abs().amax(1, keepdim=True) / LARGEST[dtype] if dtype in LARGEST else 0 * states
            bound = torch.maximum(states.abs() / 2**4, step) if dtype != "bfloat16" else states.abs() / 2**8
            assert ((stored.decode().float() - states).abs() <= bound + 1e-5).all()
        assert example.top is not None
        known = example.top.tokens[:, 0] != UNKNOWN
        assert known[example.example.wanted].all()
        values, tokens = target.model(ids).logits[0].log_softmax(-1)[known].topk(TOP)
        assert torch.equal(example.top.tokens[known], tokens.int())
        torch.testing.assert_close(example.top.log_probs[known].float(), values, rtol=2**-10, atol=1e-4)


def test_likeliest_tokens_are_stored_for_all_positions_that_training_reads(target: HFTarget) -> None:
    """Labels that follow a cut text reach positions after the last labelled one."""
    prompt = torch.tensor([[5, 60, 70, 80]])
    # tokens that the target generates
    ids = target.model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=-1)
    num_tokens = ids.shape[1]
    wanted = (torch.arange(num_tokens) >= prompt.shape[1] - 1) & (torch.arange(num_tokens) < num_tokens - 1)
    wanted[8:11] = False  # a question in between
    continuations, features, _ = label_continuations(
        target, ids, torch.ones_like(ids, dtype=torch.bool), wanted[None], horizon=HORIZON, top_k=TOP
    )
    assert features.top_tokens is not None
    assert features.top_log_probs is not None
    known, asked_for = features.top_tokens[0, :, 0] != UNKNOWN, set()
    for position in wanted.nonzero()[:, 0].tolist():
        label = continuations[0, position].tolist()
        for depth in range(1, HORIZON):
            at = position + depth
            if at < num_tokens and ids[0, position + 1 : at + 1].tolist() == label[:depth] and label[depth] != UNKNOWN:
                asked_for.add(at)
    assert {8, 9, 10, num_tokens - 1} <= asked_for
    assert known[sorted(asked_for)].all()
    assert known[wanted].all()
    assert not known[: prompt.shape[1] - 1].any(), "nothing is stored of the prompt"
    values, tokens = target.model(ids).logits[0].log_softmax(-1).topk(TOP)
    assert torch.equal(features.top_tokens[0, known], tokens[known])
    torch.testing.assert_close(features.top_log_probs[0, known], values[known], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        *({"features_dtype": dtype} for dtype in STATE_DTYPES),
        {"features": "none", "top_logprobs": None},
        {"features": "none", "feature_layers": [], "top_logprobs": None},
    ],
    ids=str,
)
def test_bytes_per_token_equals_the_size_of_the_files(options, target, data, tmp_path):
    config = replace(ALL, **options)
    manifest = run(config, data, target, tmp_path / "distill")
    tensors = [load_file(tmp_path / "distill" / shard.file) for shard in manifest.shards]
    num_bytes = sum(tensor.nbytes for shard in tensors for name, tensor in shard.items() if name != "offsets")
    labelled = sum(len(shard.get("top_tokens", ())) for shard in tensors) / manifest.num_tokens
    assert num_bytes == pytest.approx(manifest.num_tokens * bytes_per_token(config, target.hidden_size, labelled=labelled))
    assert bytes_per_token(ALL, target.hidden_size) > bytes_per_token(ALL, target.hidden_size, labelled=0.5)


def test_labels_do_not_depend_on_what_is_stored(target: HFTarget, data: DataConfig, tmp_path: Path) -> None:
    everything = examples_in(tmp_path / "all", run(ALL, data, target, tmp_path / "all"))
    nothing = examples_in(tmp_path / "none", run(DistillConfig(horizon=HORIZON), data, target, tmp_path / "none"))
    assert len(everything) == len(nothing) == 7
    for ours, theirs in zip(everything, nothing, strict=True):
        assert torch.equal(ours.continuations, theirs.continuations)
        assert (theirs.hidden_states, dict(theirs.layers), theirs.top) == (None, {}, None)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"feature_layers": [1]}, r"feature_layers .was \[0, 1\], is \[1\]"),
        ({"top_logprobs": None}, "top_logprobs .was 6, is None"),
    ],
)
def test_shards_that_store_something_else_are_not_mixed_in(change, difference, target, data, tmp_path):
    first = run(ALL, data, target, tmp_path / "distill")
    with pytest.raises(ValueError, match=f"another run.*{difference}"):
        run(replace(ALL, **change), data, target, tmp_path / "distill")
    assert run(replace(ALL, feature_layers=[0, 1]), data, target, tmp_path / "distill") == first, "the order is no difference"


def test_states_that_the_target_lacks_are_an_error_before_labelling(target, data, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "label_continuations", lambda *args, **kwargs: pytest.fail("labelled"))
    with pytest.raises(ValueError, match="feature_layers has 2, 9, and the target .* has the layers 0 to 1"):
        run(replace(ALL, feature_layers=[0, 2, 9]), data, target, tmp_path / "distill")
    with pytest.raises(ValueError, match="top_logprobs is 301, and the target .* has 300 tokens"):
        run(replace(ALL, top_logprobs=301), data, target, tmp_path / "distill")
    monkeypatch.setattr(target.model, "forward", capped(target.model.forward))
    with pytest.raises(ValueError, match=r"caps or scales its logits.*leave distill\.top_logprobs out"):
        run(ALL, data, target, tmp_path / "distill")
    # `outrider run` asks this before an engine answers for hours.
    with pytest.raises(ValueError, match=r"caps or scales its logits.*leave distill\.label_temperature out"):
        features_module.require_features(DistillConfig(label_temperature=0.7), target)
    assert not (tmp_path / "distill").exists()


def capped(forward: Any) -> Any:
    """Wrap a model's forward pass so that it caps its logits."""

    def run_capped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = 3 * torch.tanh(output.logits / 3)
        return output

    return run_capped


def test_a_too_small_disk_or_memory_is_an_error_before_labelling(target, data, tmp_path, monkeypatch):
    folder = tmp_path / "distill"
    examples, _ = load_examples(data, target)
    num_tokens = sum(len(example.input_ids) for example in examples)
    free = int(num_tokens * bytes_per_token(ALL, target.hidden_size, labelled=0.3))
    usage = namedtuple("Usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free if path.exists() else pytest.fail("no such folder")))
    assert features_module.shutil is shutil
    run(replace(ALL, features_dtype="int8"), data, target, folder)
    # Shards that exist need no further disk space.
    run(replace(ALL, features_dtype="int8"), data, target, folder)
    with pytest.raises(ValueError, match=rf"the shards take about .*\({num_tokens} tokens.*MB left; store less"):
        run(ALL, data, target, tmp_path / "other")
    monkeypatch.undo()
    monkeypatch.setattr(features_module, "available_memory", lambda: free // 100)
    with pytest.raises(ValueError, match=r"two shards are in memory .* or lower distill.shard_examples="):
        run(ALL, data, target, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("damaged", ["hidden_states", "layers"])
def test_nan_in_hidden_states_is_an_error_that_names_the_text(damaged: str, target: HFTarget, data: DataConfig) -> None:
    example = load_examples(data, target)[0][3]
    num_tokens = len(example.input_ids)
    states = torch.zeros(1, num_tokens + 2, target.hidden_size)
    broken = states.clone()
    broken[0, num_tokens:] = torch.nan  # padding may hold anything
    features = TextFeatures(hidden_states=broken, layers={0: broken, 1: broken}, top_tokens=None, top_log_probs=None)
    continuations = torch.full((1, num_tokens + 2, HORIZON), UNKNOWN)
    (stored,) = start_storing(ALL, [example], continuations, features)()
    assert stored.hidden_states is not None
    bad = broken.clone()
    bad[0, 1, 1] = torch.nan
    features = replace(features, **{damaged: bad if damaged == "hidden_states" else {0: broken, 1: bad}})
    with pytest.raises(ValueError, match=f"example '{example.id}': the target's hidden states are not all numbers"):
        start_storing(ALL, [example], continuations, features)()


def test_tensors_of_a_cpu_are_returned_as_they_are() -> None:
    tensors = {"values": torch.arange(6).view(2, 3), "scales": torch.ones(2)}
    host = start_host_copies(tensors)()
    assert host.keys() == tensors.keys()
    assert all(host[name] is tensor for name, tensor in tensors.items())
