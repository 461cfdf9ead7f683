"""The proposer for vLLM, with a runner of ours in vLLM's place: the drafts are those of the drafter itself."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outrider.models.decoding import GreedyAcceptance
from outrider.models.decoding.loop import generate
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
        def __init__(self, drafter: Any, texts: dict[str, list[int]] | None = None) -> None:
            texts = texts or {}
            self.drafter, self.input_batch = drafter, SimpleNamespace(req_ids=[*texts])
            self.num_tokens = np.array([len(text) for text in texts.values()], dtype=np.int32)
            self.token_ids = np.zeros((len(texts), 99), dtype=np.int32)
            for row, text in zip(self.token_ids, texts.values(), strict=True):
                row[: len(text)] = text

        def propose_draft_token_ids(
            self, tokens: list[list[int]], sample_hidden_states: torch.Tensor, spec_decode_metadata: Any = None
        ) -> list[list[int]]:
            return self.drafter.propose(tokens, self.num_tokens, self.token_ids, slot_mappings=None)

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


def config(folder: Path | str | None, length: int = 3) -> Any:
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


class Compared:
    """A merge of outrider that also drafts by the proposer, from what vLLM would show it."""

    def __init__(self, drafter: Any, proposer: Any, runner: type[Any]) -> None:
        self.drafter, self.proposer, self.runner = drafter, proposer, runner
        self.num_texts, self.chains, self.num_accepted = 0, list[tuple[list[int], list[int]]](), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def init_state(self, prompts: Any, prefill: Any, **options: Any) -> Any:
        self.text, self.new, self.num_drafts = prompts.input_ids[0].tolist(), None, 0
        self.num_texts += 1
        return self.drafter.init_state(prompts, prefill, **options)

    def propose(self, state: Any, last_token: torch.Tensor, **options: Any) -> Any:
        new = self.new or last_token.tolist()
        self.text += new
        hidden = next((part for part in state.sources if isinstance(part, torch.Tensor)), torch.zeros(1, 1))
        # A request before it, whose prompt isn't read yet; its place and other rows of states are noise.
        states = torch.randn(2 + self.num_drafts, hidden.shape[1])
        states[len(new)] = hidden[0]
        runner = self.runner(self.proposer, {"waits": [1, 2], f"text {self.num_texts}": self.text})
        drafts = runner.propose_draft_token_ids([[], new], states, SimpleNamespace(num_draft_tokens=[0, self.num_drafts]))
        tree, drafted = self.drafter.propose(state, last_token, **options)
        assert drafts[0] == []
        self.chains.append((drafts[1], tree.tokens[0].tolist()))
        self.num_drafts = tree.num_nodes
        return tree, drafted

    def advance(self, drafted: Any, tree: Any, accepted: Any, output: Any) -> Any:
        self.new = list(accepted.new_tokens[0])
        self.num_accepted += len(self.new) - 1
        return self.drafter.advance(drafted, tree, accepted, output)


@pytest.mark.parametrize("name", ["suffix", "{}+suffix", "prompt_lookup+{}+suffix"])
def test_a_merge_drafts_the_chains_that_it_drafts_here(name, target, runner, tmp_path):
    """Text after text: what one teaches the calibration, the next one's drafts show."""
    name = name.format(folder := saved(KINDS[0], target, tmp_path / "drafter"))
    proposer = vllm_proposer.Proposer(config(name))
    proposer.load_model(model_of(target))
    options = {"redrafter": vllm_proposer.CHAINS["redrafter"](3)} if str(folder) in name else {}
    drafter = Compared(load_drafter(name, target, pace="fixed", chain=True, tree_nodes=3, **options), proposer, runner)
    for prompt in ([5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9, 3, 9, 9], [5, 6, 7, 5]):
        list(generate(target, drafter, GreedyAcceptance(), [torch.tensor(prompt)], max_new_tokens=40))
    assert len(drafter.chains) > 30
    assert drafter.num_accepted, "the texts repeat themselves"
    assert all(there == here for there, here in drafter.chains)
    assert {len(there) for there, _ in drafter.chains} <= {0, 1, 2, 3}
    assert len(proposer.requests) == 1, "requests that have ended are forgotten"


def test_other_proposers_of_vllm_are_left_alone(target: HFTarget, runner: type[Any], tmp_path: Path) -> None:
    vllm_proposer.Proposer(config(saved(KINDS[0], target, tmp_path / "drafter")))
    other = SimpleNamespace(propose=lambda tokens, *_, **__: tokens)
    assert runner(other).propose_draft_token_ids([[5]], torch.zeros(1, 8)) == [[5]]


def test_what_does_not_fit_is_refused(target: HFTarget, runner: type[Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the drafter: --additional-config"):
        vllm_proposer.Proposer(config(None))
    shared = saved({"kind": "medusa", "num_heads": 3, "share_head": True}, target, tmp_path / "shared")
    with pytest.raises(ValueError, match="and redrafter or medusa that has its own heads"):
        vllm_proposer.Proposer(config(shared))
    with pytest.raises(
        ValueError, match="recycling is of the kind recycling, and this proposer drafts with suffix, prompt_lookup"
    ):
        vllm_proposer.Proposer(config("recycling"))
    two = [saved(KINDS[0], target, tmp_path / name) for name in ("one", "two")]
    with pytest.raises(ValueError, match="two trained drafters, and this proposer takes one"):
        vllm_proposer.Proposer(config(f"{two[0]}+suffix+{two[1]}"))
    proposer = vllm_proposer.Proposer(config(saved(KINDS[0], target, tmp_path / "drafter")))
    with pytest.raises(ValueError, match="serve its own target"):
        proposer.load_model(model_of(target, vocab_size=7))


def test_another_vllm_is_refused(target: HFTarget, runner: Any, tmp_path: Path) -> None:
    runner.propose_draft_token_ids = lambda self, tokens: tokens
    with pytest.raises(
        RuntimeError, match="has no sample_hidden_states and no spec_decode_metadata; the proposer was written for"
    ):
        vllm_proposer.Proposer(config(saved(KINDS[0], target, tmp_path / "drafter")))
