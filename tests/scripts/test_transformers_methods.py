"""Methods of transformers: their steps are the passes of `generate`, their tokens the target's."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.eval.measure.timing import time_generation
from outrider.models.decoding import GreedyAcceptance
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter, save_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("transformers_methods")


@pytest.fixture
def target(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu", fast_linears=False))


def saved(kind: dict[str, Any], target: HFTarget, folder: Path) -> Path:
    torch.manual_seed(0)
    save_drafter(build_drafter(parse_drafter(kind), target), folder, target.identity)
    return folder


def test_steps_are_passes(methods: Any, target: HFTarget, tmp_path: Path) -> None:
    """The prompt repeats itself, so its lookup drafts in the first pass too."""
    prompt = torch.arange(40, 48).repeat(3)
    arguments = (target, NullDrafter(), GreedyAcceptance(), [prompt])
    options: dict[str, Any] = {"max_new_tokens": 12, "stop_ids": (), "seeds": [0]}
    plain = time_generation(*arguments, **options)
    draft_model = saved({"kind": "draft_model", "num_layers": 2}, target, tmp_path)
    for method in (*methods.standard_methods(target), methods.assisted_method(target, draft_model)):
        generation = method.decode(*arguments, **options)
        answer = generation.answer(0)
        assert answer.token_ids == plain.answer(0).token_ids
        assert generation.prefill_seconds > 0
        assert generation.decode_seconds > 0
        assert [step.is_prefill for step in generation.steps[:2]] == [True, False]
        assert all(step.num_nodes >= step.num_accepted[0] for step in generation.steps)
        assert (answer.num_draft_tokens > 0) == (method.name != methods.TRANSFORMERS)
        assert sum(answer.accepted_histogram) == len(generation.steps) - 1
        if method.name == methods.TRANSFORMERS:
            assert answer.accepted_histogram == [11]
        if method.name == methods.ASSISTED:  # the assistant has all layers of the target, so it is always right
            assert answer.accepted_histogram[0] == 0


def test_the_assistant_is_a_draft_model(methods: Any, target: HFTarget, tmp_path: Path) -> None:
    folder = saved({"kind": "redrafter", "beam_width": 2, "beam_length": 3}, target, tmp_path)
    with pytest.raises(ValueError, match=f"{folder} holds no draft_model"):
        methods.assisted_method(target, folder)
