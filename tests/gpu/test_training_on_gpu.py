"""Distillation and training on a GPU, against the same on a CPU."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from outrider.data.collate import padded
from outrider.data.config import STATE_DTYPES
from outrider.data.shards import label_store
from outrider.data.states import BatchStates, StoredStates, encode_states, joined
from outrider.data.types import UNKNOWN, DistilledExample, DrafterBatch, Example
from outrider.distill.config import DistillConfig
from outrider.distill.label.continuations import label_continuations, require_branch_attention
from outrider.distill.label.features import TextFeatures, start_storing
from outrider.distill.regenerate.engine import Limits, Request
from outrider.distill.regenerate.engines.batch import BatchEngine
from outrider.distill.regenerate.engines.decoder import DecoderEngine
from outrider.models.decoding import Sampling
from outrider.models.drafters import DRAFTERS, NullDrafter, build_drafter, parse_drafter
from outrider.models.drafters.losses import LossKind
from outrider.models.drafters.objective import Objective
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.train.batches import BatchStream, require_packing, states_of_texts, target_reads, with_hidden_states
from outrider.train.checkpoint import Checkpoints, HostCopy, complete_checkpoints
from outrider.train.config import TrainConfig
from outrider.train.run import train

from ..train.conftest import TRAIN, make_example, write_shards
from ..train.resumed import assert_same_records, assert_same_weights, records

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "redrafter": {"exit_width": 16, "num_blocks": 1},
    "medusa": {"num_heads": 3},
    "eagle": {"feature_noise": 0.0},
    "eagle3": {"feature_layers": [0, 1]},
    "mtp": {"init": "random"},
    "block": {"feature_layers": [0, 1], "block": 3},
    "draft_model": {"init": "target_layers", "num_layers": 1},
}


def test_every_registered_kind_is_trained_here() -> None:
    assert KINDS.keys() == DRAFTERS.keys()


@pytest.fixture(scope="module")
def load(tiny_target_dir: Path) -> Callable[..., HFTarget]:
    """Return a function that loads the target on a device in a dtype.

    The target has four query heads and two key heads.
    """

    def load(device: torch.device, dtype: str = "float32") -> HFTarget:
        return load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype=dtype), device)

    return load


@pytest.fixture(scope="module")
def shards_dir(load: Callable[..., HFTarget], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = load(CPU)
    examples = [make_example(index, target.vocab_size) for index in range(22)]
    return write_shards(tmp_path_factory.mktemp("shards"), target.identity, examples)


@pytest.fixture(params=[False, True], ids=["rows", "packed"])
def batch(request: pytest.FixtureRequest, shards_dir: Path) -> DrafterBatch:
    config = TrainConfig(steps=1, batch_size=6, packing=request.param)
    return BatchStream(shards_dir, label_store(shards_dir).load(), config, rank=0, num_processes=1).batches(0)[0]


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError where the host waits for the GPU."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- distilling


def test_labels_on_a_gpu_equal_those_of_a_cpu(load: Callable[..., HFTarget], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[40], [23], [1], [31]])
    mask = torch.arange(40) < lengths
    ids = torch.randint(3, 300, mask.shape, generator=generator) * mask
    wanted = mask & (torch.rand(mask.shape, generator=generator) < 0.8)
    results = []
    for current_device in (CPU, device):
        tensors = (tensor.to(current_device) for tensor in (ids, mask, wanted))
        results.append(label_continuations(load(current_device), *tensors, horizon=5, feature_layers=(0, 1)))
    (expected, expected_features, expected_stats), (labels, features, stats) = results
    assert torch.equal(labels.cpu(), expected)
    assert (expected != UNKNOWN).any()
    assert stats == expected_stats
    torch.testing.assert_close(features.hidden_states.cpu()[mask], expected_features.hidden_states[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_probes_of_distillation_and_packing_pass(dtype: str, load: Callable[..., HFTarget], device: torch.device) -> None:
    target = load(device, dtype)
    require_branch_attention(target, 64)
    require_packing(target)


def test_batches_by_length_give_the_decoders_answers(load: Callable[..., HFTarget], device: torch.device) -> None:
    """Keys and values of evicted rows move to the host and back."""
    target, limits = load(device), Limits(max_new_tokens=12, max_tokens=60)
    prompts = [torch.arange(3 + index, 9 + 3 * index) for index in range(6)]
    requests = [Request(id=f"r{index}", prompt_ids=prompt, seed=index) for index, prompt in enumerate(prompts)]
    greedy = Sampling(temperature=0.0)
    engines = (
        DecoderEngine(target, NullDrafter(), sampling=greedy, limits=limits),
        BatchEngine(target, sampling=greedy, limits=limits, budget_tokens=100),
    )
    expected, actual = ({answer.id: answer.tokens.tolist() for answer in engine.answer(requests)} for engine in engines)
    assert actual == expected
    assert len(actual) == len(requests)


# --- stored states


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_storing_a_batch_waits_only_where_its_copies_are_awaited(dtype: str, device: torch.device) -> None:
    config = DistillConfig(features="last_hidden", feature_layers=[0, 1], features_dtype=dtype, top_logprobs=2)
    generator, lengths, seq = torch.Generator().manual_seed(0), (9, 5), 9
    examples = [
        Example(id=str(length), input_ids=torch.arange(length), loss_mask=torch.ones(length, dtype=torch.bool))
        for length in lengths
    ]
    states = [torch.randn(len(lengths), seq, 16, generator=generator) for _ in range(3)]
    top = torch.randn(len(lengths), seq, 2, generator=generator)
    continuations = torch.randint(50, (len(lengths), seq, 4), generator=generator)

    def start(device: torch.device) -> Callable[[], list[DistilledExample]]:
        last, *layers = (values.to(device) for values in states)
        features = TextFeatures(
            hidden_states=last,
            layers=dict(enumerate(layers)),
            top_tokens=top.argsort(-1).to(device),
            top_log_probs=top.to(device),
        )
        moved = continuations.to(device)
        with no_waits(device):
            return start_storing(config, examples, moved, features)

    start(device)()  # allocates pinned memory, which may wait
    for actual, expected in zip(start(device)(), start(CPU)(), strict=True):
        assert not any(states.values.is_pinned() for states in states_in(actual))
        assert torch.equal(actual.continuations, expected.continuations)
        for ours, theirs in zip(states_in(actual), states_in(expected), strict=True):
            torch.testing.assert_close(ours.decode(), theirs.decode())


def states_in(example: DistilledExample) -> list[StoredStates]:
    assert example.hidden_states is not None
    return [example.hidden_states, *example.layers.values()]


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_stored_states_are_decoded_on_the_device_without_a_wait(dtype: str, device: torch.device) -> None:
    generator, lengths = torch.Generator().manual_seed(0), (9, 5)
    layers = [[encode_states(torch.randn(length, 16, generator=generator), dtype) for length in lengths] for _ in range(2)]
    layout = padded(lengths)
    stored = BatchStates(index=layout.index(), layers=tuple(joined(parts) for parts in layers))
    on_device = stored.moved(lambda tensor: tensor.to(device))
    with no_waits(device):
        actual = on_device.padded(on_device.layers, layout.shape)
    expected = stored.padded(stored.layers, layout.shape)
    assert actual is not None
    torch.testing.assert_close(actual.cpu(), expected)


# --- a training step


@dataclass(frozen=True)
class Step:
    """Sums and counts of a loss, its gradients, and the weights after a step, on the CPU."""

    sums: torch.Tensor
    counts: torch.Tensor
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def first_step(kind: str, batch: DrafterBatch, target: HFTarget, start: HFTarget, *, autocast: bool) -> Step:
    """Run a step on the device of `target`.

    The drafter's initial weights are sampled on the device of `start`.
    """
    torch.manual_seed(0)
    options = {"kind": kind, **KINDS[kind]}
    weights = build_drafter(parse_drafter(options), start).state_dict()
    drafter = build_drafter(parse_drafter(options), target).train()
    drafter.load_state_dict(weights)
    objective = Objective(loss=LossKind.kl, head=target.head)
    inputs = with_hidden_states(batch, target, target_reads(drafter, objective))
    with torch.autocast(target.device.type, torch.bfloat16, enabled=autocast):
        loss = drafter.loss(inputs, objective)
    trained = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    # The large eps keeps the step proportional to tiny gradients.
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, eps=1e-3, fused=True)
    (loss.sums.sum() / loss.counts.sum()).backward()
    gradients = {name: parameter.grad.cpu() for name, parameter in trained.items() if parameter.grad is not None}
    optimizer.step()
    after = {name: parameter.detach().cpu() for name, parameter in trained.items()}
    return Step(loss.sums.detach().cpu(), loss.counts.cpu(), gradients, after)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_float32_equals_that_of_a_cpu(kind, batch, load, device):
    cpu = load(CPU)
    expected = first_step(kind, batch, cpu, cpu, autocast=False)
    actual = first_step(kind, batch, load(device), cpu, autocast=False)
    torch.testing.assert_close(actual.sums, expected.sums, rtol=1e-4, atol=1e-4)
    assert torch.equal(actual.counts, expected.counts)
    assert actual.gradients.keys() == expected.gradients.keys() == expected.weights.keys()
    for ours, theirs in ((actual.gradients, expected.gradients), (actual.weights, expected.weights)):
        for name, value in theirs.items():
            scale = float(value.abs().max())
            torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4 * max(scale, 1e-3))


@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_bf16_has_nearly_the_loss_of_float32_on_a_cpu(kind, target_dtype, batch, load, device):
    cpu = load(CPU)
    expected = first_step(kind, batch, cpu, cpu, autocast=False)
    actual = first_step(kind, batch, load(device, target_dtype), cpu, autocast=True)
    assert float(actual.sums.sum()) == pytest.approx(float(expected.sums.sum()), rel=0.02)
    assert torch.equal(actual.counts, expected.counts)
    assert all(gradient.isfinite().all() for gradient in actual.gradients.values())
    assert any(gradient.any() for gradient in actual.gradients.values())
    assert all(weight.isfinite().all() for weight in actual.weights.values())


def test_reading_states_needs_no_host_read(shards_dir: Path, load: Callable[..., HFTarget], device: torch.device) -> None:
    config = TrainConfig(steps=1, batch_size=6)
    stream = BatchStream(shards_dir, label_store(shards_dir).load(), config, rank=0, num_processes=1)
    rows, target = stream.batches(0)[0].to(device), load(device)
    expected, _ = states_of_texts(target, rows, last=True, layers=(1,))
    with no_waits(device):
        states, _ = states_of_texts(target, rows, last=True, layers=(1,))
    assert torch.equal(states[rows.attention_mask], expected[rows.attention_mask])


# --- training runs


@pytest.fixture(params=["no", "bf16"])
def accelerator(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Accelerator]:
    """Make an accelerator for the device, independent of those of other tests."""
    shared = [state._shared_state for state in (PartialState, AcceleratorState, GradientState)]
    before = [dict(state) for state in shared]
    for state in shared:
        state.clear()
    yield Accelerator(mixed_precision=request.param, cpu=device.type == "cpu")
    for state, values in zip(shared, before, strict=True):
        state.clear()
        state.update(values)


@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["eagle3", "redrafter"])
def test_training_validates_by_decoding_and_resumes_after_a_kill(
    kind: str,
    target_dtype: str,
    accelerator: Accelerator,
    shards_dir: Path,
    load: Callable[..., HFTarget],
    device: torch.device,
    tmp_path: Path,
) -> None:
    """One case is a float32 EAGLE-3 that drafts for a bf16 target with grouped heads."""
    target = load(device, target_dtype)
    config = TrainConfig(
        **{**TRAIN, "steps": 4, "keep_checkpoints": 4, "validation_texts": 4, "validation_tokens": 8, "validate_every": 2}
    )

    def run(name: str) -> Path:
        folder = tmp_path / name
        train(
            config,
            parse_drafter({"kind": kind, **KINDS[kind]}),
            target,
            shards_dir,
            folder / "train",
            folder / "drafter",
            accelerator,
        )
        return folder

    unbroken = run("unbroken")
    shutil.copytree(unbroken / "train", tmp_path / "killed" / "train")
    checkpoints = complete_checkpoints(tmp_path / "killed" / "train" / "checkpoints")
    assert len(checkpoints) == config.steps
    for later in checkpoints[2:]:
        shutil.rmtree(later)
    killed = run("killed")
    assert [line["validation_tokens_per_step"] >= 1 for line in records(killed) if "validation_loss" in line] == [True, True]
    assert_same_records(records(killed), records(unbroken), device)
    assert_same_weights(*(folder / "drafter" / "model.safetensors" for folder in (killed, unbroken)), device)
    assert torch.get_float32_matmul_precision() == "highest"


# --- checkpoints


@pytest.mark.parametrize("accelerator", ["no"], indirect=True)
def test_a_checkpoint_restores_weights_optimizer_and_random_state(accelerator, device, tmp_path):
    def prepared() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        accelerator.free_memory()
        model = torch.nn.Linear(33, 65, device=device)
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        model(torch.rand(7, 33, device=device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.cat([item.detach().flatten() for item in model.parameters()])

    model, optimizer = prepared()
    with Checkpoints(accelerator, tmp_path, model, optimizer, keep=2) as checkpoints:
        step(model, optimizer)
        # written in the background, while the next step changes the copied tensors
        checkpoints.save(1, {})
        expected = step(model, optimizer)
    model, optimizer = prepared()
    with Checkpoints(accelerator, tmp_path, model, optimizer, keep=2) as checkpoints:
        checkpoints.load(tmp_path / "step-00000001")
        state = optimizer.state_dict()["state"]
        assert {item["step"].device.type for item in state.values()} == {device.type}, "fused AdamW wants it there"
        torch.testing.assert_close(step(model, optimizer), expected)


def test_a_host_copy_is_pinned_and_its_memory_is_used_again(device: torch.device) -> None:
    values = torch.arange(3 * 2**18 + 5, dtype=torch.float32, device=device)
    state = {"weights": values, "narrow": values.bfloat16(), "empty": values[:0], "step": torch.tensor(3.0, device=device)}
    host_copy = HostCopy()
    first = host_copy(state)
    values += 1
    again = host_copy(state)
    for name, value in state.items():
        assert torch.equal(again[name], value.cpu())
        assert again[name].data_ptr() == first[name].data_ptr(), "the memory is used again"
        assert again[name].is_pinned() or device.type != "cuda" or not value.numel()
