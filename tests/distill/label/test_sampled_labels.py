"""Sampled labels, against naive sampling with a full forward pass per token."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from outrider.data.config import DataConfig
from outrider.data.manifest import LabelSampling, Manifest
from outrider.data.shards import label_store, read_shard
from outrider.data.types import UNKNOWN
from outrider.distill.config import DistillConfig
from outrider.distill.label.continuations import label_continuations
from outrider.distill.label.next_tokens import SampledLabels
from outrider.distill.label.run import distill
from outrider.models.decoding.sampling import Sampling, warp
from outrider.models.llm.hf_target import HFTarget

from ...g_tests import g_test

LENGTHS, HORIZON = (30, 17, 1, 24), 4
CPU = torch.device("cpu")


def sampled_labels(ids: list[str], *, temperature: float = 0.8, seed: int = 0) -> SampledLabels:
    return SampledLabels.of(ids, max(LENGTHS) + HORIZON, temperature=temperature, seed=seed, device=CPU)


@torch.no_grad()
def naive(target: HFTarget, text: torch.Tensor, uniforms: torch.Tensor, temperature: float, horizon: int) -> list[int]:
    """Sample the continuation of `text`, token by token."""
    tokens: list[int] = []
    while len(tokens) < horizon:
        place = len(text) + len(tokens)
        logits = target.model(torch.cat([text, text.new_tensor(tokens)])[None], use_cache=False).logits[0, -1]
        cumulated = warp(logits, Sampling(temperature=temperature)).double().cumsum(0)
        tokens.append(int((cumulated <= uniforms[place] * cumulated[-1]).sum()))
        if tokens[-1] in target.stop_ids:
            break
    return tokens + [UNKNOWN] * (horizon - len(tokens))


def self_sampled_texts(target: HFTarget, sampled: SampledLabels) -> tuple[torch.Tensor, torch.Tensor]:
    """Make right-padded texts and their mask; most tokens are those that the labels sample."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        for i in range(length):
            follows = i > 0 and float(torch.rand((), generator=generator)) < 0.6
            token = int(torch.randint(target.vocab_size, (), generator=generator))
            text = input_ids[row, :i]
            input_ids[row, i] = naive(target, text, sampled.uniforms[row], sampled.temperature, 1)[0] if follows else token
    return input_ids, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def test_sampled_labels_equal_naive_sampling_with_less_work(target: HFTarget) -> None:
    sampled = sampled_labels(["a", "b", "c", "d"])
    input_ids, attention_mask = self_sampled_texts(target, sampled)
    wanted = attention_mask & (torch.arange(input_ids.shape[1]) % 5 > 0)
    texts = (target, input_ids, attention_mask, wanted)
    labels, features, stats = label_continuations(*texts, horizon=HORIZON, sampled=sampled, top_k=3)
    assert stats.num_branch_tokens < (HORIZON - 1) * wanted.sum()
    assert stats.agreement > 0.3
    greedy, greedy_features, _ = label_continuations(*texts, horizon=HORIZON, top_k=3)
    assert not torch.equal(greedy, labels)
    assert torch.equal(features.top_tokens[wanted], greedy_features.top_tokens[wanted]), "whatever is sampled"
    assert (features.top_tokens[wanted] >= 0).all()
    visited = 0
    for row, i in wanted.nonzero().tolist():
        expected = naive(target, input_ids[row, : i + 1], sampled.uniforms[row], sampled.temperature, HORIZON)
        assert labels[row, i].tolist() == expected, (row, i)
        visited += 1
    assert visited > 30


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_are_chosen_with_the_targets_probabilities(temperature: float) -> None:
    logits = torch.tensor([2.0, -torch.inf, 0.5, 1.0, -1.0, -torch.inf])
    num_texts = 4000
    sampled = SampledLabels.of([str(text) for text in range(num_texts)], 2, temperature=temperature, seed=0, device=CPU)
    tokens = torch.stack([sampled.choose(logits.expand(num_texts, -1), column) for column in sampled.uniforms.T])
    probs = (logits / temperature).softmax(0).double()
    pairs = (tokens[0] * 6 + tokens[1]).bincount(minlength=36)
    assert g_test(pairs, (probs[:, None] * probs).flatten()) > 1e-4
    assert g_test(pairs, torch.full((36,), 1 / 36, dtype=torch.float64)) < 1e-6


def test_every_place_of_every_example_has_its_own_number() -> None:
    sampled = sampled_labels([f"chat-{index}" for index in range(50)])
    assert len(sampled.uniforms.unique()) == sampled.uniforms.numel()
    assert torch.equal(sampled_labels(["chat-7"]).uniforms[0], sampled.uniforms[7])
    assert not torch.equal(sampled_labels(["chat-7"], seed=1).uniforms[0], sampled.uniforms[7])


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    texts = [" ".join(str((7 * index + number) % 100) for number in range(3 + 2 * index)) for index in range(7)]
    records = [
        {"id": f"chat-{index}", "messages": [{"role": role, "content": text} for role in ("user", "assistant")]}
        for index, text in enumerate(texts)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(source="messages", path=str(tmp_path / "chats.jsonl"), max_length=60)


def labels_of(config: DistillConfig, data: DataConfig, target: HFTarget, folder: Path) -> tuple[Manifest, dict[str, list]]:
    manifest = distill(config, data, target, folder, Accelerator(cpu=True))
    examples = [example for shard in manifest.shards for example in read_shard(folder, shard)]
    return manifest, {example.example.id: example.continuations.tolist() for example in examples}


CONFIG = DistillConfig(horizon=3, label_temperature=0.9, seed=5, shard_examples=3, batch_tokens=128)


def test_sampled_labels_depend_neither_on_batches_nor_on_shards_and_the_manifest_has_the_sampling(target, data, tmp_path):
    manifest, labels = labels_of(CONFIG, data, target, tmp_path / "one")
    assert manifest.sampling == LabelSampling(temperature=0.9, seed=5)
    assert label_store(tmp_path / "one").load() == manifest
    _, others = labels_of(replace(CONFIG, shard_examples=2, batch_tokens=1), data, target, tmp_path / "two")
    assert others == labels
    _, other_seed = labels_of(replace(CONFIG, seed=6), data, target, tmp_path / "three")
    assert other_seed != labels
    greedy, _ = labels_of(replace(CONFIG, label_temperature=0.0), data, target, tmp_path / "four")
    assert greedy.sampling is None


def test_a_resumed_run_samples_the_same_labels_and_never_mixes_temperatures(target, data, tmp_path):
    _, labels = labels_of(CONFIG, data, target, tmp_path / "run")
    for suffix in ("json", "safetensors"):
        (tmp_path / "run" / f"shard-00001.{suffix}").unlink()
    assert labels_of(CONFIG, data, target, tmp_path / "run")[1] == labels
    with pytest.raises(ValueError, match=r"sampling\.temperature \(was 0\.9, is 0\.5\)"):
        labels_of(replace(CONFIG, label_temperature=0.5), data, target, tmp_path / "run")
    with pytest.raises(ValueError, match="sampling"):
        labels_of(replace(CONFIG, label_temperature=0.0), data, target, tmp_path / "run")


def test_a_teacher_of_another_temperature_than_the_labels_is_refused(target, data, tmp_path):
    manifest, _ = labels_of(CONFIG, data, target, tmp_path / "run")
    with pytest.raises(ValueError, match=r"distill\.label_temperature is 0\.9, and train\.loss"):
        manifest.require_teacher_temperature()
    replace(manifest, sampling=LabelSampling(temperature=1.0, seed=0)).require_teacher_temperature()
    replace(manifest, sampling=None).require_teacher_temperature()
