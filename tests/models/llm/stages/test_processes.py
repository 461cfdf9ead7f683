"""A target in stages over real processes: its answers, and what happens when a process is lost."""

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.files import sha256_file
from outrider.models.decoding import generate
from outrider.models.decoding.acceptance import GreedyAcceptance
from outrider.models.decoding.loop import NullDrafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target
from outrider.models.llm.stages import exchange, loading
from outrider.models.llm.stages.messages import StageLost

from ....tiny_models import save_tiny_target
from .processes import answer, later, launch, target_options

SLOW = pytest.mark.slow
PROMPT = [40, 41, 42, 43, 44]
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def folder(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("four") / "target"
    options = {"num_hidden_layers": 4, "initializer_range": 0.2}
    return save_tiny_target(directory, LlamaForCausalLM, LlamaConfig, tiny_tokenizer, **options)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[int]:
    """Return the answer of the target in memory."""
    options = {**target_options(folder, []), "stage_layers": None}
    return answer(load_target(TargetConfig(**options)), PROMPT, NUM_TOKENS)


def answer_until_lost(target: Any) -> list[int]:
    """Decode until a stage is lost, and return the tokens until then. `target.lost` is the error."""
    tokens: list[int] = []
    steps = generate(target, NullDrafter(), GreedyAcceptance(), torch.tensor([PROMPT]), max_new_tokens=10_000)
    with pytest.raises(StageLost) as lost:
        tokens.extend(token for step in steps for token in step.tokens[0])
    target.lost = lost.value
    return tokens


def test_processes_answer_like_the_target_in_memory(folder, uninterrupted, monkeypatch):
    with launch(target_options(folder, [1, 2, 1]), monkeypatch) as running:
        target = running.load()
        whole = load_target(TargetConfig(**{**running.options, "stage_layers": None}))
        assert target.identity == whole.identity, "labels of one are labels of the other"
        for _ in range(2):
            assert answer(target, PROMPT, NUM_TOKENS) == uninterrupted
        target.link.close()
        assert running.require_ended() == [0, 0, 0]


@pytest.mark.parametrize("rank", [2, *(pytest.param(rank, marks=SLOW) for rank in (1, 3))])
def test_a_killed_stage_is_named_and_leaves_no_orphan(rank, folder, uninterrupted, monkeypatch):
    options = target_options(folder, [1, 2, 1])
    with launch(options, monkeypatch) as running:
        tokens = kill_at(running, rank, 0.02 * rank)
    # Asked again with the text so far, the answer goes on.
    so_far = tokens[: NUM_TOKENS // 2]
    assert so_far == uninterrupted[: len(so_far)]
    with launch(options, monkeypatch) as running:
        assert so_far + answer(running.load(), PROMPT + so_far, NUM_TOKENS - len(so_far)) == uninterrupted


def kill_at(running: Any, rank: int, seconds: float) -> list[int]:
    """Kill a stage while it decodes; return the tokens until then."""
    target = running.load()
    answer(target, PROMPT, 2)  # the probe is over
    killed: list[float] = []

    def kill() -> None:
        os.kill(running.stages[rank - 1].pid, signal.SIGKILL)
        killed.append(time.monotonic())

    later(seconds, kill)
    tokens = answer_until_lost(target)
    assert time.monotonic() - killed[0] < 2
    layers = ["layer 0", "layers 1 to 2", "layer 3"][rank - 1]
    assert f"stage {rank} of 3 ({layers})" in str(target.lost)
    assert "has ended" in str(target.lost)
    statuses = running.require_ended()
    assert statuses.pop(rank - 1) == -signal.SIGKILL
    assert statuses == [0, 0]
    return tokens


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("count", [20])
def test_a_stage_killed_at_any_moment_is_named(count, folder, uninterrupted, monkeypatch):
    moments = random.Random(count)
    for number in range(count):
        with launch(target_options(folder, [1, 2, 1]), monkeypatch) as running:
            tokens = kill_at(running, 1 + number % 3, moments.uniform(0, 0.5))
            assert tokens[:NUM_TOKENS] == uninterrupted[: len(tokens)]


def test_a_stopped_stage_is_named_after_the_stall_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "STALL_SECONDS", 0.9)
    with launch(target_options(folder, [2, 2]), monkeypatch) as running:
        target = running.load()
        answer(target, PROMPT, 2)
        os.kill(running.stages[0].pid or 0, signal.SIGSTOP)
        start = time.monotonic()
        answer_until_lost(target)
        assert 0.9 <= time.monotonic() - start < 3
        assert "stage 1 of 2 (layers 0 to 1)" in str(target.lost)
        os.kill(running.stages[0].pid or 0, signal.SIGCONT)
        assert running.require_ended() == [1, 0], "the stopped one finds that the head has ended"


@pytest.mark.parametrize(("number", "statuses"), [(signal.SIGKILL, [1, 1]), (signal.SIGINT, [0, 0])])
def test_stages_end_with_the_head(number: int, statuses: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with launch(target_options(folder, [2, 2]), monkeypatch) as running:
        running.start_stages()
        head = running.start_head(PROMPT)
        for process in (head, *running.stages) if number == signal.SIGINT else (head,):
            os.kill(process.pid or 0, number)
        assert running.require_ended() == statuses
        head.join(5)
        assert head.exitcode not in (0, None)


def test_a_stage_that_fails_is_reported_with_its_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with launch(target_options(folder, [2, 2]), monkeypatch) as running:
        with pytest.raises(ValueError, match=r"stage 2 of 2 \(layers 2 to 3\) of process \d+ on .*: .*absent"):
            running.load(stage_2={"name_or_path": str(tmp_path / "absent")})
        assert running.require_ended() == [1, 1]


def other_weights(folder: Path, directory: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return a target of the same sizes."""
    with torch.random.fork_rng():
        save_tiny_target(directory, LlamaForCausalLM, LlamaConfig, tokenizer, num_hidden_layers=4, initializer_range=0.1)
    paths = [path / "model.safetensors" for path in (folder, directory)]
    assert len({path.stat().st_size for path in paths}) == 1
    assert len({sha256_file(path) for path in paths}) == 2
    for name in ("config.json", "generation_config.json"):
        (directory / name).write_text((folder / name).read_text())
    return {"name_or_path": str(directory)}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("weights", r"stage 1 of 2 .* has other weights \(digest \w+\) than the head"),
        pytest.param({"dtype": "float64"}, r"stage 1 .* has float64 target.dtype, and the head has float32", marks=SLOW),
        pytest.param(
            {"attn_implementation": "eager"}, "has eager target.attn_implementation, and the head has sdpa", marks=SLOW
        ),
    ],
)
def test_stages_with_another_model_are_refused_before_weights_are_read(
    other: Any,
    message: str,
    folder: Path,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = other_weights(folder, tmp_path / "other", tiny_tokenizer) if other == "weights" else other
    with launch(target_options(folder, [2, 2]), monkeypatch) as running:
        with pytest.raises(ValueError, match=message):
            running.load(stage_1=changed)
        assert running.require_ended() == [1, 1]


@pytest.mark.parametrize(
    ("stage_layers", "processes", "message"),
    [
        ([2, 2], 1, r"stage_layers is \[2, 2\], which needs 3 processes .* one was launched; .*--num_processes 3"),
        ([2, 2], 4, "needs 3 processes .* 4 were launched"),
        ([2, 3], 3, r"is \[2, 3\], which is 5 layers, and .* has 4; .* for example \[2, 2\]"),
        ([1, 1, 1], 4, r"3 layers, and .* for example \[2, 1, 1\]"),
        ([1, 1, 1, 1, 1], 6, "launch fewer processes"),
    ],
)
def test_a_launch_that_does_not_fit_the_model_is_an_error_before_anything_is_loaded(
    stage_layers: Sequence[int], processes: int, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=message):
        load_target(TargetConfig(**target_options(folder, stage_layers)))


def test_a_stage_that_never_comes_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MEET_SECONDS", 1.5)
    with (
        launch(target_options(folder, [2, 2]), monkeypatch),
        pytest.raises(ValueError, match="not all processes .* have come .*1/3"),
    ):
        load_target(TargetConfig(**target_options(folder, [2, 2])))


@pytest.mark.parametrize("value", [[], [0, 4], [2, -1], "2,2", [2.0, 2], [True, 3], 4])
def test_stage_layers_are_a_list_of_positive_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="stage_layers"):
        TargetConfig(name_or_path="here", stage_layers=value)


@pytest.mark.parametrize(
    "other",
    [
        {"compiled": True},
        {"cuda_graphs": True},
        {"quantization": {"method": "torchao"}},
        {"tensor_parallel": True},
        {"memory_budget_gib": 1.0},
    ],
)
def test_options_that_conflict_with_stages_are_an_error(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"stage_layers is \[2, 2\], which doesn't work together with {next(iter(other))}"):
        TargetConfig(name_or_path="here", stage_layers=[2, 2], **other)
