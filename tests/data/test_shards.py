from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.data.config import STATE_DTYPES
from outrider.data.fields import differences
from outrider.data.files import read_dataclass, write_json
from outrider.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    LabelTotals,
    Manifest,
    ShardEntry,
    examples_sha256,
)
from outrider.data.shards import label_store, read_shard, verify_shards, write_shard
from outrider.data.states import StoredStates, encode_states
from outrider.data.types import TOKENS_ONLY, UNKNOWN, DistilledExample, Example, TargetReads, TopTokens

from .. import tiny_models

LENGTHS = (7, 4, 12)
IDENTITY = replace(tiny_models.IDENTITY, name="tiny", weights_sha256="aa", tokenizer_sha256="bb", hidden_size=8, vocab_size=300)


def make_examples(hidden: torch.dtype | None = None, prefix: str = "example") -> list[DistilledExample]:
    generator = torch.Generator().manual_seed(0)
    examples = []
    for index, length in enumerate(LENGTHS):
        mask = torch.arange(length) >= 2
        continuations = torch.randint(0, 300, (length, 5), generator=generator)
        continuations[~mask.roll(-1)] = UNKNOWN
        continuations[-1] = UNKNOWN
        examples.append(
            DistilledExample(
                example=Example(
                    id=f"{prefix}/{index}", input_ids=torch.randint(0, 300, (length,), generator=generator), loss_mask=mask
                ),
                continuations=continuations,
                hidden_states=None
                if hidden is None
                else StoredStates(values=torch.randn(length, 8, generator=generator).to(hidden)),
            )
        )
    return examples


def make_manifest(shards: list[ShardEntry], complete: bool = True) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        target=IDENTITY,
        target_dtype="torch.float32",
        horizon=5,
        features="none",
        feature_layers=[],
        features_dtype="bfloat16",
        top_logprobs=None,
        sampling=None,
        data_sha256="cc",
        plan_sha256="dd",
        max_length=64,
        shards=shards,
        complete=complete,
    )


def make_full_examples(dtype: str) -> list[DistilledExample]:
    """Make examples with hidden states, the inputs of layers 4 and 0, and likeliest tokens.

    Only positions with a label have likeliest tokens.
    """
    generator = torch.Generator().manual_seed(1)
    examples = []
    for example in make_examples():
        length = len(example.example.input_ids)
        states = [encode_states(torch.randn(length, 8, generator=generator), dtype) for _ in range(3)]
        unknown = ~example.example.wanted[:, None]
        top = TopTokens(
            tokens=torch.randint(0, 300, (length, 2), generator=generator).masked_fill(unknown, UNKNOWN),
            log_probs=torch.randn(length, 2, generator=generator).half().masked_fill(unknown, -torch.inf),
        )
        examples.append(replace(example, hidden_states=states[0], layers={4: states[1], 0: states[2]}, top=top))
    return examples


def states_of(example: DistilledExample) -> dict[str, StoredStates]:
    states = {"hidden_states": example.hidden_states, **{f"layer {number}": one for number, one in example.layers.items()}}
    return {name: one for name, one in states.items() if one is not None}


EXAMPLES = {
    "tokens": make_examples,
    **{f"states in {dtype}": partial(make_examples, dtype) for dtype in (torch.float32, torch.float16)},
    **{f"all in {dtype}": partial(make_full_examples, dtype) for dtype in STATE_DTYPES},
}


@pytest.mark.parametrize("make", EXAMPLES.values(), ids=EXAMPLES)
def test_a_shard_is_read_back_bit_by_bit(make: Callable[[], list[DistilledExample]], tmp_path: Path) -> None:
    examples = make()
    entry = write_shard(tmp_path, 3, examples)
    assert entry == label_store(tmp_path).read_entry(3)
    assert entry.file == "shard-00003.safetensors"
    assert entry.num_tokens == sum(LENGTHS)
    assert entry.num_labels == sum(int((example.continuations[:, 0] != UNKNOWN).sum()) for example in examples) > 0
    for ours, theirs in zip(examples, read_shard(tmp_path, entry), strict=True):
        assert ours.example.id == theirs.example.id
        assert torch.equal(ours.example.input_ids, theirs.example.input_ids)
        assert torch.equal(ours.example.loss_mask, theirs.example.loss_mask)
        assert torch.equal(ours.continuations, theirs.continuations)
        assert states_of(ours).keys() == states_of(theirs).keys()
        for name, states in states_of(ours).items():
            loaded = states_of(theirs)[name]
            assert loaded.values.dtype == states.values.dtype
            assert torch.equal(loaded.decode(), states.decode())
        assert (ours.top is None) == (theirs.top is None)
        if ours.top is not None and theirs.top is not None:
            assert torch.equal(theirs.top.tokens, ours.top.tokens.int())
            assert torch.equal(theirs.top.log_probs, ours.top.log_probs)


def test_only_requested_parts_of_a_shard_are_in_memory(tmp_path: Path) -> None:
    entry = write_shard(tmp_path, 0, make_full_examples("int8"))
    for reads in (TOKENS_ONLY, TargetReads(hidden_states=True), TargetReads(layers=(4,)), TargetReads(top=True)):
        for example in read_shard(tmp_path, entry, reads):
            assert (example.hidden_states is not None) == reads.hidden_states
            assert tuple(example.layers) == reads.layers
            assert (example.top is not None) == reads.top
            assert len(example.continuations) == len(example.example.input_ids)


def test_likeliest_tokens_are_stored_only_for_labelled_positions(tmp_path: Path) -> None:
    examples = make_full_examples("int8")
    wanted = sum(int(example.example.wanted.sum()) for example in examples)
    path = tmp_path / write_shard(tmp_path, 0, examples).file
    assert load_file(path)["top_tokens"].shape == (wanted, 2)
    assert 0 < wanted < sum(LENGTHS)


def test_a_shard_of_examples_with_different_states_fails_an_assertion(tmp_path: Path) -> None:
    examples = make_full_examples("int8")
    for change in ({"hidden_states": None}, {"layers": {}}, {"top": None}):
        with pytest.raises(AssertionError, match="either"):
            write_shard(tmp_path, 0, [replace(examples[0], **change), *examples[1:]])


def test_the_same_examples_give_the_same_bytes(tmp_path: Path) -> None:
    digests = {write_shard(tmp_path / str(index), 0, make_full_examples("int8")).sha256 for index in range(4)}
    assert len(digests) == 1


def test_the_sidecar_is_written_after_the_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.data.store.write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path, 0, make_examples())
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.safetensors"]
    assert label_store(tmp_path).read_entry(0) is None


def flip_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "problem"), [(flip_one_bit, "was truncated or altered"), (Path.unlink, "is missing")])
def test_a_damaged_shard_is_named_with_its_remedy(damage, problem: str, tmp_path: Path) -> None:
    entries = [write_shard(tmp_path, index, make_examples(prefix=f"shard{index}")) for index in range(2)]
    damage(tmp_path / entries[1].file)
    message = f"shard-00001.safetensors {problem}.*Delete it and shard-00001.json.*recomputes only this shard"
    with pytest.raises(ValueError, match=message):
        read_shard(tmp_path, entries[1])
    with pytest.raises(ValueError, match=message):
        verify_shards(tmp_path, make_manifest(entries))
    assert len(read_shard(tmp_path, entries[0])) == 3


def test_a_manifest_is_read_back(tmp_path: Path) -> None:
    entry = write_shard(tmp_path, 0, make_examples())
    manifest = make_manifest([entry])
    label_store(tmp_path).save(manifest)
    assert label_store(tmp_path).load() == manifest
    assert manifest.num_tokens == entry.num_tokens
    assert manifest.num_labels == entry.num_labels
    verify_shards(tmp_path, manifest)


def test_the_manifest_finds_stored_states_by_layer_number() -> None:
    manifest = replace(make_manifest([]), feature_layers=[2, 4, 7])
    assert manifest.stored(TargetReads(hidden_states=True, layers=(7, 2), top=True)) == TargetReads(layers=(7, 2))
    assert manifest.stored(TargetReads(layers=(2, 3))).layers == ()
    assert replace(manifest, top_logprobs=5).stored(TargetReads(layers=(2,), top=True)) == TargetReads(layers=(2,), top=True)
    with pytest.raises(ValueError, match=r"train\.teacher is top_k.*distil with distill\.top_logprobs"):
        manifest.require_top(TargetReads(top=True))


def test_an_incomplete_distillation_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"manifest.json does not exist.*Run the stage distill"):
        label_store(tmp_path).load()
    with pytest.raises(ValueError, match="not complete; run the stage distill again"):
        verify_shards(tmp_path, make_manifest([], complete=False))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"colour": "red"}, "colour: there is no such key"),
        ({"format_version": 99}, "manifest.json: manifest of format version 99"),
        (
            {"features_dtype": "float4"},
            'features_dtype="float4": must be one of bfloat16, float8_e4m3fn, int8',
        ),
    ],
)
def test_a_manifest_with_wrong_values_is_an_error(change: dict[str, object], problem: str, tmp_path: Path) -> None:
    write_json(tmp_path / MANIFEST_FILE, {**asdict(make_manifest([])), **change})
    with pytest.raises(ValueError, match=problem):
        label_store(tmp_path).load()


def all_keys(values: dict[str, Any]) -> list[str]:
    nested = [f"{key}.{inner}" for key, value in values.items() if isinstance(value, dict) for inner in value]
    return [*values, *nested]


def test_a_manifest_that_lacks_a_key_is_refused(tmp_path: Path) -> None:
    keys = all_keys(asdict(make_manifest([])))
    assert {"format_version", "feature_layers", "features_dtype", "top_logprobs", "target.quantization"} <= set(keys)
    for key in keys:
        values = asdict(make_manifest([]))
        *outer, last = key.split(".")
        del (values[outer[0]] if outer else values)[last]
        write_json(tmp_path / MANIFEST_FILE, values)
        if key == "branches":  # folders that were written before there was a choice have them
            assert label_store(tmp_path).load().branches
            continue
        with pytest.raises(ValueError, match=f"{key}: is missing"):
            label_store(tmp_path).load()


def test_shards_of_another_target_are_an_error_whatever_its_name() -> None:
    manifest = make_manifest([])
    manifest.require_target(replace(IDENTITY, name="the same weights elsewhere", revision="main"))
    with pytest.raises(ValueError, match=r"'tiny'.*differ in weights_sha256 \(was 'aa', is 'dd'\).*distil again"):
        manifest.require_target(replace(IDENTITY, weights_sha256="dd"))
    with pytest.raises(ValueError, match=r"tokenizer_sha256 \(was 'bb', is 'ee'\); vocab_size \(was 300, is 301\)"):
        manifest.require_target(replace(IDENTITY, tokenizer_sha256="ee", vocab_size=301))


def test_the_digest_of_the_data_depends_on_ids_tokens_masks_and_order() -> None:
    first, second, third = (example.example for example in make_examples())
    mask = first.loss_mask.clone()
    mask[0] = True
    ids = first.input_ids.clone()
    ids[0] += 1
    variants = [
        [first, second, third],
        [second, first, third],
        [first, second],
        [replace(first, id="other"), second, third],
        [replace(first, loss_mask=mask), second, third],
        [replace(first, input_ids=ids), second, third],
    ]
    assert len({examples_sha256(variant) for variant in variants}) == len(variants)
    assert examples_sha256(variants[0]) == examples_sha256(iter(variants[0]))


def test_each_value_that_differs_is_named_with_both_values() -> None:
    before = {"same": 1, "kind": "a", "train": {"steps": 10, "seed": 0}, "parts": [1, 2], "gone": {"x": 1}}
    after = {"train": {"steps": 20, "seed": 0}, "kind": "b", "same": 1, "parts": [2, 1], "new": 3}
    assert differences(before, after) == {
        "kind": "kind (was 'a', is 'b')",
        "train.steps": "train.steps (was 10, is 20)",
        "parts": "parts (was [1, 2], is [2, 1])",
        "gone": "gone (was {'x': 1}, is None)",
        "new": "new (was None, is 3)",
    }


def test_an_option_that_is_missing_equals_one_that_is_off() -> None:
    assert differences({"train": {}}, {"train": {"patience": None}, "sharding": None}) == {}


def test_figures_of_large_runs_are_read_back(tmp_path: Path) -> None:
    # Bounds of options must not apply: a target of 8B parameters takes more than 2**31 bytes.
    large = 2**40
    totals = LabelTotals(
        num_examples=large,
        num_text_tokens=large,
        num_positions=large,
        agreement=0.5,
        num_branch_tokens=large,
        process_seconds=1.0,
        positions_per_process_second=1.0,
        peak_memory_bytes=large,
        dropped={"too long": large},
    )
    write_json(tmp_path / "stats.json", asdict(totals))
    assert read_dataclass(LabelTotals, tmp_path / "stats.json") == totals
