"""Which formats will hold a drafter, before it is trained."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from outrider.cli.export_stage import describe_unexportable
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.export.registry import refusals_after_training
from outrider.models.llm.hf_target import HFTarget

from ...conftest import REPOSITORY


def shipped(kind: str, **changes: Any) -> dict[str, Any]:
    """The options of `drafter=KIND`, with changes."""
    options: Any = OmegaConf.to_container(OmegaConf.load(REPOSITORY / "conf" / "drafter" / f"{kind}.yaml"))
    return {**options, **changes}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["eagle3", "redrafter", "medusa", "draft_model"])
def test_a_kinds_defaults_fit_every_one_of_its_formats(family: str, kind: str, make_target: Callable[..., HFTarget]) -> None:
    target = make_target(family)
    before = target.head.weight.clone()
    refusals = refusals_after_training(build_drafter(parse_drafter(shipped(kind)), target), target)
    assert refusals
    assert set(refusals.values()) == {None}
    assert describe_unexportable(refusals) is None
    assert torch.equal(target.head.weight, before), "the target's own weights stay"


@pytest.mark.parametrize(
    ("options", "rule", "remedy"),
    [
        (shipped("eagle3", layer=None), "its layer is qwen3's", "drafter.layer={model_type: llama}"),
        (shipped("redrafter", initial_state="embedding"), "initial_state is embedding", "initial_state=zero"),
        (shipped("redrafter", draft_vocab_size=64), "it drafts 64 tokens only", "draft_vocab_size=null"),
        (shipped("medusa", head_rank=4), "share an output layer of rank 4", "head_rank=null"),
    ],
)
def test_a_drafter_that_no_format_can_hold_is_described_with_the_remedy(options, rule, remedy, make_target):
    target = make_target("qwen3")
    refusals = refusals_after_training(build_drafter(parse_drafter(options), target), target)
    warning = describe_unexportable(refusals)
    assert warning is not None
    for part in (rule, remedy):
        assert part in warning
    assert "can't be written as" not in warning
    assert describe_unexportable({**refusals, "one that can": None}) is None


class Scaled(torch.nn.Embedding):
    """Embeddings that are more than a table, as those of Gemma 3."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(input)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "block_dspark"])
def test_drafters_of_a_target_that_scales_its_embeddings_have_no_format(kind, make_target, monkeypatch):
    """Engines look tokens up in the target's table, and would draft from other vectors."""
    target = make_target("llama")
    options = {"kind": kind, "init": "random"}
    if kind == "block_dspark":
        form = {"layer": {"model_type": "qwen3"}, "correction": "markov", "inject": False, "mask_token_id": 0}
        options = {"kind": "block", "init": "random", **form}
    drafter = build_drafter(parse_drafter(options), target)
    assert set(refusals_after_training(drafter, target).values()) == {None}
    monkeypatch.setattr(target.embed_tokens, "__class__", Scaled)
    refusals = refusals_after_training(drafter, target)
    assert len(refusals) > 1
    assert all("Scaled computes more than a look-up" in str(refusal) for refusal in refusals.values())
