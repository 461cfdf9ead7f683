"""The proposer for vLLM, with a runner of ours in vLLM's place: the drafts are those of the drafter itself."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outrider.models.drafters import build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.export import vllm_proposer
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

KINDS = [{"kind": "redrafter"}, {"kind": "redrafter", "draft_vocab_size": 20}, {"kind": "medusa", "num_heads": 3}]


@pytest.fixture
def target(tiny_target_dir: Path) -> HFTarget:
    return load_target(str(tiny_target_dir), torch.device("cpu"))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """A runner that calls its drafter as vLLM's does, in the modules' place."""

    class GPUModelRunner:
        def __init__(self, drafter: Any) -> None:
            self.drafter = drafter

        def propose_draft_token_ids(
            self, tokens: list[list[int]], sample_hidden_states: torch.Tensor, spec_decode_metadata: Any = None
        ) -> list[list[int]]:
            return self.drafter.propose(tokens, None, None, slot_mappings=None)

    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_model_runner"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    vllm_proposer._give_states_to_proposers.cache_clear()
    return GPUModelRunner


def saved(options: dict[str, Any], target: HFTarget, folder: Path) -> Path:
    torch.manual_seed(1)
    drafter = build_drafter(parse_drafter(options), target)
    if options.get("draft_vocab_size"):
        drafter.choose_draft_vocabulary(torch.arange(target.vocab_size))
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.3)
    save_drafter(drafter, folder, target.identity)
    return folder


def config(folder: Path | None, length: int = 3) -> Any:
    return SimpleNamespace(
        additional_config=None if folder is None else {vllm_proposer.OPTION: str(folder)},
        speculative_config=SimpleNamespace(num_speculative_tokens=length),
        model_config=SimpleNamespace(dtype=torch.float32),
    )


def model_of(target: HFTarget, vocab_size: int | None = None) -> Any:
    """The served model, as far as the proposer reads it."""
    embed_tokens = target.embed_tokens
    embed_tokens.org_vocab_size = vocab_size or target.vocab_size  # type: ignore[assignment]
    return SimpleNamespace(model=SimpleNamespace(embed_tokens=embed_tokens))


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_batch_gets_the_drafters_own_chains(options, target, runner, tmp_path):
    folder = saved(options, target, tmp_path / "drafter")
    proposer = vllm_proposer.Proposer(config(folder))
    proposer.load_model(model_of(target))
    drafter: Any = load_drafter(folder, target, **vllm_proposer.CHAINS[options["kind"]](3))
    # Three requests: one accepted two of three drafts, one isn't ready, one had none.
    states = torch.randn(4 + 1 + 1, target.hidden_size)
    sampled = [[5, 6, 7], [], [9]]
    drafts = runner(proposer).propose_draft_token_ids(sampled, states, SimpleNamespace(num_draft_tokens=[3, 0, 0]))
    expected = drafter.propose(states[[2, 5]], torch.tensor([7, 9]))[0].tokens.tolist()
    assert drafts == [expected[0], [], expected[1]]
    assert {len(chain) for chain in expected} == {3}
    assert (
        runner(proposer).propose_draft_token_ids([[5]], states[:1])
        == drafter.propose(states[:1], torch.tensor([5]))[0].tokens.tolist()
    )
    assert runner(proposer).propose_draft_token_ids([[]], states[:1]) == [[]]
    with pytest.raises(RuntimeError, match="gave 6 states for 1 tokens"):
        runner(proposer).propose_draft_token_ids([[5]], states)


def test_other_proposers_of_vllm_are_left_alone(target: HFTarget, runner: type[Any], tmp_path: Path) -> None:
    vllm_proposer.Proposer(config(saved(KINDS[0], target, tmp_path / "drafter")))
    other = SimpleNamespace(propose=lambda tokens, *_, **__: tokens)
    assert runner(other).propose_draft_token_ids([[5]], torch.zeros(1, 8)) == [[5]]


def test_what_does_not_fit_is_refused(target: HFTarget, runner: type[Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the drafter's folder: --additional-config"):
        vllm_proposer.Proposer(config(None))
    shared = saved({"kind": "medusa", "num_heads": 3, "share_head": True}, target, tmp_path / "shared")
    with pytest.raises(ValueError, match="drafts with redrafter or medusa that has its own heads"):
        vllm_proposer.Proposer(config(shared))
    proposer = vllm_proposer.Proposer(config(saved(KINDS[0], target, tmp_path / "drafter")))
    with pytest.raises(ValueError, match="serve its own target"):
        proposer.load_model(model_of(target, vocab_size=7))


def test_another_vllm_is_refused(target: HFTarget, runner: Any, tmp_path: Path) -> None:
    runner.propose_draft_token_ids = lambda self, tokens: tokens
    with pytest.raises(
        RuntimeError, match="has no sample_hidden_states and no spec_decode_metadata; the proposer was written for"
    ):
        vllm_proposer.Proposer(config(saved(KINDS[0], target, tmp_path / "drafter")))
