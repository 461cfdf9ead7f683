"""Decoding on a GPU: every form gives a CPU's tokens, with one host read per step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from outrider.models.decoding import GreedyAcceptance, Prompts, RowSeeds, Sampling, SpeculativeSampling, chain_tree, generate
from outrider.models.decoding.sampling import exponential, stream_keys, uniform
from outrider.models.decoding.types import Counts
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.graphed import graphed
from outrider.models.drafters.merged import MergedConfig, MergedDrafter
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.llm import cuda_graphs as graphs
from outrider.models.llm import tree_cache
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.graphed_rule import GraphedRule
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ..decoded import texts_of
from ..host_reads import HostReads, ScalarReads
from ..models.recorder import ReplayingRecorder

pytestmark = [
    pytest.mark.gpu,
    # PyTorch gives this warning when the mode is set.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]
LIMITS = [24, 9, 17]
"""Numbers of new tokens for each prompt; rows leave the batch one by one."""
STEP = 16
"""Number of columns by which the read part of the cache grows, several times per answer."""
OPTIONS: dict[str, dict[str, Any]] = {
    "redrafter": {"beam_width": 3, "beam_length": 3, "tree_nodes": 6},
    "medusa": {"num_heads": 3, "tree_nodes": 6},
    "eagle": {"depth": 3, "top_k": 3, "tree_nodes": 6},
    "eagle3": {"depth": 3, "top_k": 3, "tree_nodes": 6},
    "block": {"block": 3, "width": 3, "tree_nodes": 6},
    "draft_model": {"length": 3, "init": "target_layers", "num_layers": 1},
}
KINDS = ("plain", *OPTIONS)
MERGED = ("redrafter", "eagle3", "draft_model")
"""The trained sources of the kind `merged`; the suffix drafter is another one."""


@pytest.fixture
def model(tiny_target_dir, device) -> HFTarget:
    """Load the eager target in float32; the other forms share its model."""
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32"), device)


@pytest.fixture
def on_cpu(tiny_target_dir) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32"), torch.device("cpu"))


def grow_in_steps_of(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the step by which the read part of a cache grows, on every device."""
    monkeypatch.setattr(tree_cache, "EXTENT_STEP", columns)
    monkeypatch.setattr(tree_cache, "ACCELERATOR_EXTENT_STEP", columns)


def form_of(target: HFTarget, **form: bool) -> HFTarget:
    """Make another form of the same model.

    On a CPU, recorded operators that run again imitate graphs.
    """
    return HFTarget(target.model, target.tokenizer, target.identity, recorder=recorder_for(target), **form)


def recorder_for(target: HFTarget) -> ReplayingRecorder | None:
    return None if target.device.type == "cuda" else ReplayingRecorder()


def drafter_for(kind: str, target: HFTarget) -> Any:
    """Build a drafter for this target, as evaluation does."""
    if kind == "plain":
        return NullDrafter()
    if kind == "merged":
        sources = {name: network(name, target) for name in MERGED}
        merge = MergedDrafter(
            sources | {"suffix": load_drafter("suffix", target)},
            MergedConfig(tree_nodes=8, pace="fixed"),
            few_sizes=target.has_fixed_shapes,
        )
        return as_replayed(merge, target)
    return as_replayed(network(kind, target), target)


def network(kind: str, target: HFTarget) -> Any:
    """Build a trained drafter, with equal weights on every device."""
    if kind == "draft_model":  # the target itself, so that drafts are accepted
        reader = form_of(target, compiled=target.compiled, cuda_graphs=target.cuda_graphs)
        return DraftModel(DraftModelConfig(length=3), reader)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = build_drafter(parse_drafter({"kind": kind, **OPTIONS[kind]}), whole_cpu_copy(target)).state_dict()
    drafter: Any = build_drafter(parse_drafter({"kind": kind, **OPTIONS[kind]}), target)
    drafter.load_state_dict(weights)
    return drafter.eval().requires_grad_(False)


def as_replayed(drafter: Any, target: HFTarget) -> Any:
    """Return the drafter as it decodes beside this target: replayed if the target is."""
    if not target.cuda_graphs:
        return drafter
    replayed = graphed(drafter, recorder_for(target))
    assert replayed is not drafter
    return replayed


def rule_for(rule: Any, target: HFTarget) -> Any:
    """Return the rule as it decodes beside this target: replayed if the target is."""
    return GraphedRule(rule, recorder_for(target)) if target.cuda_graphs else rule


def whole_cpu_copy(target: HFTarget) -> HFTarget:
    """Copy the target to a CPU, where the drafter's initial weights are sampled."""
    model = type(target.model)(target.model.config)
    model.load_state_dict(target.model.state_dict())
    return HFTarget(model.eval().requires_grad_(False), target.tokenizer, target.identity)


def answers(target: HFTarget, drafter: Any, prompts=PROMPTS, limits=LIMITS, rule=None, seeds=None) -> list[list[int]]:
    rows = [torch.tensor(row, device=target.device) for row in prompts]
    generator = RowSeeds(seeds) if seeds is not None else None
    rule = rule_for(rule or GreedyAcceptance(), target)
    return texts_of(generate(target, drafter, rule, rows, max_new_tokens=limits, generator=generator), len(rows))


# --- the same tokens


@pytest.mark.parametrize("kind", [*KINDS, "merged"])
def test_the_tokens_on_a_gpu_equal_those_of_a_cpu(model, on_cpu, kind):
    drafter = drafter_for(kind, model)
    expected = answers(on_cpu, NullDrafter())
    assert [len(tokens) for tokens in expected] == LIMITS
    assert answers(model, drafter) == expected
    assert answers(model, drafter, PROMPTS[2:], LIMITS[2:]) == expected[2:], "alone"


@pytest.mark.parametrize("kind", [*KINDS, "merged"])
def test_steps_in_graphs_decode_the_tokens_of_eager_steps(model, monkeypatch, kind):
    grow_in_steps_of(STEP, monkeypatch)
    graphed = form_of(model, cuda_graphs=True)
    drafter, eager = drafter_for(kind, graphed), drafter_for(kind, model)
    cases = [
        (PROMPTS, LIMITS),
        (PROMPTS[:1], [60]),  # the cache grows, which drops the recordings
        (PROMPTS[1:2], [6]),  # a shorter prompt in the larger cache
        (PROMPTS[::-1], LIMITS),
    ]
    for prompts, limits in cases:
        assert answers(graphed, drafter, prompts, limits) == answers(model, eager, prompts, limits)


@pytest.mark.filterwarnings("ignore")  # the compiler's advice, on TF32 and on its worker processes
@pytest.mark.parametrize("kind", ["plain", "redrafter"])
def test_compiled_steps_in_graphs_decode_the_tokens_of_eager_steps(model, kind):
    """The test has few shapes, since each is compiled."""
    if model.device.type != "cuda":
        pytest.skip("on a CPU compiling takes minutes; tests/models/llm/test_cuda_graphs.py traces without compiling")
    compiled = form_of(model, compiled=True, cuda_graphs=True)
    drafter, eager = drafter_for(kind, compiled), drafter_for(kind, model)
    try:
        for prompts, limits in ((PROMPTS[:1], [30]), (PROMPTS[2:], [12])):
            assert answers(compiled, drafter, prompts, limits) == answers(model, eager, prompts, limits)
    finally:
        torch._dynamo.reset()


def test_more_shapes_than_the_limit_of_recordings_change_no_token(model, monkeypatch):
    grow_in_steps_of(STEP, monkeypatch)
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 3)
    graphed, expected = form_of(model, cuda_graphs=True), answers(model, NullDrafter())
    drafter = drafter_for("redrafter", graphed)
    for _ in range(2):
        assert answers(graphed, drafter) == expected


def test_a_draft_model_records_again_when_its_cache_has_grown(model, monkeypatch):
    """Its last outputs are still alive, in memory of the graphs of the smaller cache."""
    grow_in_steps_of(8, monkeypatch)
    graphed = form_of(model, cuda_graphs=True)
    for options in ({}, {"top_k": 3, "tree_nodes": 5}):
        recorded = DraftModel(DraftModelConfig(length=3, **options), form_of(model, cuda_graphs=True))
        for limit in (20, 60, 120):
            assert answers(graphed, recorded, PROMPTS[:1], [limit]) == answers(model, NullDrafter(), PROMPTS[:1], [limit])


@pytest.mark.parametrize("kind", ["plain", "redrafter", "eagle3"])
def test_sampled_steps_in_graphs_draw_the_tokens_of_eager_steps(model, kind):
    rule, graphed = SpeculativeSampling(sampling=Sampling(temperature=1.0)), form_of(model, cuda_graphs=True)
    expected = answers(model, drafter_for(kind, model), rule=rule, seeds=[3, 4, 5])
    assert answers(graphed, drafter_for(kind, graphed), rule=rule, seeds=[3, 4, 5]) == expected


def test_random_numbers_of_a_row_are_those_of_a_cpu(model):
    keys = [stream_keys(torch.arange(9, device=device), torch.tensor(7, device=device)) for device in (model.device, "cpu")]
    on_device, on_cpu = (uniform(key, 1000).cpu() for key in keys)
    assert torch.equal(on_device, on_cpu)
    clocks = [exponential(key, 1000).float().cpu() for key in keys]
    torch.testing.assert_close(*clocks, rtol=1e-6, atol=0)


# --- host reads


@contextmanager
def no_wait(device: torch.device) -> Iterator[None]:
    """Raise an error for every operation that makes the host wait for the device."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        with HostReads() as reads, ScalarReads() as scalars:
            yield
        assert not reads.names
        assert not scalars.count


@pytest.mark.parametrize("form", ["eager", "graphs"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_reading_the_tokens_makes_the_host_wait(model, monkeypatch, kind, form, temperature):
    target = form_of(model, cuda_graphs=form == "graphs")
    drafter = drafter_for(kind, target)
    rule = SpeculativeSampling(sampling=Sampling(temperature=temperature)) if temperature else GreedyAcceptance()
    rule = rule_for(rule, target)
    settled, num_calls = False, 0

    def strict(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            if not settled:
                return function(*args, **kwargs)
            num_calls += 1
            with no_wait(target.device):
                return function(*args, **kwargs)

        call.lossless, call.is_random = True, rule.is_random  # acceptance rules have these attributes
        return call

    for owner, name in ((drafter, "propose"), (target, "verify"), (target, "commit"), (drafter, "advance")):
        monkeypatch.setattr(owner, name, strict(getattr(owner, name)))
    rows = [torch.tensor(row, device=target.device) for row in PROMPTS]
    steps = generate(target, drafter, strict(rule), rows, max_new_tokens=60, generator=RowSeeds([3, 4, 5]))
    for number, _ in enumerate(steps):
        settled = number >= 3  # everything that is allocated or recorded once exists by now
        if number == 9:
            break
    assert num_calls >= 25


# --- a model that can't be recorded


def test_after_a_failed_recording_decoding_continues_in_the_same_stream(model):
    if model.device.type != "cuda":
        pytest.skip("only a capture fails and leaves the stream that it ran in")
    expected, stream = answers(model, NullDrafter()), torch.cuda.current_stream()

    def read_a_number(layer: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[0].sum().item()

    hook = model.model.model.layers[0].register_forward_pre_hook(read_a_number)
    graphed = form_of(model, cuda_graphs=True)
    with pytest.raises(ValueError, match="can't be recorded as a CUDA graph"):
        answers(graphed, NullDrafter())
    hook.remove()
    assert torch.cuda.current_stream() == stream
    assert answers(model, NullDrafter()) == expected
    assert answers(form_of(model, cuda_graphs=True), NullDrafter()) == expected, "later recordings work"


# --- sampling by row


@pytest.mark.parametrize("kind", ["plain", "redrafter", "eagle3"])
def test_a_rows_seed_gives_the_same_text_alone_in_a_batch_and_with_trees(model, kind):
    rule, seeds = SpeculativeSampling(sampling=Sampling(temperature=1.2, top_p=0.95)), [11, 12, 13]
    together = answers(model, NullDrafter(), rule=rule, seeds=seeds)
    drafter = drafter_for(kind, model)
    assert answers(model, drafter, rule=rule, seeds=seeds) == together
    for row, seed in enumerate(seeds):
        alone = answers(model, drafter, PROMPTS[row : row + 1], LIMITS[row : row + 1], rule, [seed])
        assert alone == together[row : row + 1]
    assert answers(model, NullDrafter(), rule=rule, seeds=[14, 15, 16]) != together


# --- memory


@torch.inference_mode()
def test_a_row_taken_from_the_cache_equals_the_caches_contents(model):
    """The copy to pinned memory is asynchronous, and must be complete before it is read."""
    prompts = Prompts.of([torch.tensor(row, device=model.device) for row in PROMPTS])
    model.prefill(prompts, max_new_tokens=200, max_nodes=4)
    for token in range(3):
        last = torch.full((3,), token + 5, device=model.device)
        model.verify(last, chain_tree(torch.full((3, 2), token + 9, device=model.device)))
        model._cache.keep(None, Counts.of([3, 1, 2], model.device))
    cache = model._cache
    for row, prompt in enumerate(PROMPTS):
        length = len(prompt) + 3 * [3, 1, 2][row]
        taken = model.take(row).columns
        held = [buffer[:, row, :, :length].cpu().clone() for buffer in cache._buffers]
        assert all(tensor.device.type == "cpu" for tensor in taken)
        assert len(taken) == len(held) > 0
        assert all(torch.equal(mine, expected) for mine, expected in zip(taken, held, strict=True))
        for buffer in cache._buffers:
            buffer[:, row] = 0
        assert all(torch.equal(mine, expected) for mine, expected in zip(taken, held, strict=True)), "a copy"


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_released_cache_frees_all_its_memory(model, cuda_graphs):
    if model.device.type != "cuda":
        pytest.skip("a CPU's memory isn't counted")
    target = form_of(model, cuda_graphs=cuda_graphs)
    answers(target, NullDrafter())  # libraries allocate their own buffers here
    target.release_cache()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for limit in (40, 400):
        answers(target, NullDrafter(), limits=[limit] * 3)
    target.release_cache()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < 2**20
