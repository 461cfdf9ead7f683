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
            self.drafter, self.requests = drafter, texts
            self.input_batch = SimpleNamespace(req_ids=[*texts], num_computed_tokens_cpu=[])
            self.use_aux_hidden_state_outputs = False
            self.num_tokens = np.array([len(text) for text in texts.values()], dtype=np.int32)
            self.token_ids = np.zeros((len(texts), 99), dtype=np.int32)
            for row, text in zip(self.token_ids, texts.values(), strict=True):
                row[: len(text)] = text

        def load_model(self, model: Any) -> None:
            self.drafter.load_model(model)
            self._setup_eagle3_aux_hidden_state_outputs()

        def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
            return None

        def _input_fits_in_drafter(self, metadata: Any) -> bool:
            return False

        def propose_draft_token_ids(
            self,
            sampled_token_ids: list[list[int]],
            sample_hidden_states: torch.Tensor,
            spec_decode_metadata: Any = None,
            scheduler_output: Any = None,
            aux_hidden_states: list[torch.Tensor] | None = None,
        ) -> list[list[int]]:
            return self.drafter.propose(sampled_token_ids, self.num_tokens, self.token_ids, slot_mappings=None)

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


def config(folder: Path | str | None, length: int = 3, hf_config: Any = None) -> Any:
    return SimpleNamespace(
        additional_config=None if folder is None else {vllm_proposer.OPTION: str(folder)},
        speculative_config=SimpleNamespace(num_speculative_tokens=length),
        model_config=SimpleNamespace(dtype=torch.float32, hf_config=hf_config),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def model_of(target: HFTarget, vocab_size: int | None = None) -> Any:
    """The served model, as far as the proposer reads it."""
    embed_tokens = target.embed_tokens
    embed_tokens.org_vocab_size = vocab_size or target.vocab_size  # type: ignore[assignment]
    return SimpleNamespace(
        model=SimpleNamespace(embed_tokens=embed_tokens),
        lm_head=target.head,
        set_aux_hidden_state_layers=lambda layers: None,
    )


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_batch_gets_the_drafters_own_chains(options, target, runner, tmp_path):
    folder = saved(options, target, tmp_path / "drafter")
    proposer = vllm_proposer.Proposer(config(folder))
    proposer.load_model(model_of(target))
    drafter: Any = load_drafter(folder, target, **vllm_proposer.CHAINS[options["kind"]](3))
    # Three requests: one accepted two of three drafts, one isn't ready, one had none.
    states = torch.randn(4 + 1 + 1, target.hidden_size)
    sampled = [[5, 6, 7], [], [9]]
    served = runner(proposer, {"a": [1, 5, 6, 7], "b": [3], "c": [9]})
    drafts = served.propose_draft_token_ids(sampled, states, SimpleNamespace(num_draft_tokens=[3, 0, 0]))
    expected = drafter.propose(states[[2, 5]], torch.tensor([7, 9]))[0].tokens.tolist()
    assert drafts == [expected[0], [], expected[1]]
    assert {len(chain) for chain in expected} == {3}
    served = runner(proposer, {"a": [5]})
    expected = drafter.propose(states[:1], torch.tensor([5]))[0].tokens.tolist()
    assert served.propose_draft_token_ids([[5]], states[:1]) == expected
    assert served.propose_draft_token_ids([[]], states[:1]) == [[]]
    with pytest.raises(RuntimeError, match="gave 6 states for 1 tokens"):
        served.propose_draft_token_ids([[5]], states)


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
        hidden = next((part for part in state.states if isinstance(part, torch.Tensor)), torch.zeros(1, 1))
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


BLOCKS = [
    {"kind": "block", "block": 3},
    {"kind": "block", "block": 2, "draft_vocab_size": 20, "num_layers": 2},
    {"kind": "block", "block": 3, "correction": "markov", "rank": 4, "layer": {"model_type": "qwen3"}, "init": "random"},
]


class Engine:
    """An engine like vLLM, without a cache: greedy chains, prompts in pieces, requests that wait or are read again."""

    def __init__(self, target: HFTarget, runner: type[Any], proposer: Any, piece: int) -> None:
        self.target, self.proposer, self.piece = target, proposer, piece
        self.runner = runner(proposer)
        self.runner.load_model(model_of(target))
        self.texts: dict[str, list[int]] = {}
        self.read: dict[str, int] = {}
        self.drafts: dict[str, list[int]] = {}
        self.chains: dict[str, list[list[int]]] = {}
        self.num_accepted = 0

    def add(self, name: str, prompt: list[int]) -> None:
        self.texts[name], self.read[name], self.drafts[name], self.chains[name] = [*prompt], 0, [], []

    def preempt(self, name: str) -> None:
        self.read[name], self.drafts[name] = 0, []

    def step(self, *names: str) -> None:
        layers = self.proposer.trained.feature_layers
        scheduled, sampled, features, starts = {}, [], [], [self.read[name] for name in names]
        for name in names:
            text, start = self.texts[name], self.read[name]
            tokens = [*text, *self.drafts[name]][: start + self.piece]
            self.drafts[name] = tokens[len(text) :]
            logits = self.target.plain_logits(torch.tensor([tokens]))[0]
            _, inputs = self.target.hidden_states(torch.tensor([tokens]), layers)
            scheduled[name] = len(tokens) - start
            features.append(inputs[0, start:])
            new = []
            if len(tokens) >= len(text):
                choices = logits[len(text) - 1 :].argmax(-1).tolist()
                num_accepted = 0
                while num_accepted < len(self.drafts[name]) and self.drafts[name][num_accepted] == choices[num_accepted]:
                    num_accepted += 1
                new, self.num_accepted = choices[: num_accepted + 1], self.num_accepted + num_accepted
            self.read[name] = len(text) + len(new) - 1 if new else len(tokens)
            sampled.append(new)
            text += new
        drafts = self._propose(names, starts, scheduled, sampled, torch.cat(features))
        for name, new, chain in zip(names, sampled, drafts, strict=True):
            self.drafts[name] = chain
            if new:
                self.chains[name].append(chain)

    def _propose(
        self,
        names: tuple[str, ...],
        starts: list[int],
        scheduled: dict[str, int],
        sampled: list[list[int]],
        features: torch.Tensor,
    ) -> list[list[int]]:
        runner = type(self.runner)(self.proposer, {name: self.texts[name] for name in names})
        runner.requests, runner.input_batch.num_computed_tokens_cpu = self.texts, starts
        num_drafts = [len(self.drafts[name]) for name in names]
        states = torch.zeros(sum(num_drafts) + len(names), self.target.hidden_size)
        drafts: list[list[int]] = runner.propose_draft_token_ids(
            sampled,
            states,
            SimpleNamespace(num_draft_tokens=num_drafts),
            SimpleNamespace(num_scheduled_tokens=scheduled),
            [
                *torch.cat([features, torch.randn(2, features.shape[1])]).chunk(
                    len(self.proposer.trained.feature_layers), dim=-1
                )
            ],
        )
        return drafts


def own_chains(drafter: Any, target: HFTarget, prompt: list[int], num_new: int) -> list[list[int]]:
    """Return the chains that a drafter drafts here."""
    chains, propose = [], drafter.propose

    def recorded(*arguments: Any, **options: Any) -> Any:
        tree, drafted = propose(*arguments, **options)
        chains.append(tree.tokens[0].tolist())
        return tree, drafted

    drafter.propose = recorded
    list(generate(target, drafter, GreedyAcceptance(), [torch.tensor(prompt)], max_new_tokens=num_new))
    drafter.propose = propose
    return chains


@pytest.mark.parametrize("options", BLOCKS, ids=str)
def test_a_block_drafter_follows_requests_in_pieces_and_with_others(options, target, runner, tmp_path):
    folder = saved(options, target, tmp_path / "drafter")
    length = options["block"]
    proposer = vllm_proposer.Proposer(config(folder, length, target.model.config))
    engine = Engine(target, runner, proposer, piece=5)
    assert engine.runner.use_aux_hidden_state_outputs
    assert engine.runner._input_fits_in_drafter(object()), "the end of one request is no reason to skip all"
    prompts = {"a": [5, 6, 7, 5, 6, 7, 5, 6, 9, 1, 2, 3], "b": [9, 4], "c": [3, 3, 8, 1, 7, 7]}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    for number in range(24):
        engine.step(*(name for place, name in enumerate("abc") if number % 3 != place or number > 12))
        if number == 8:  # what "b" has so far is a new prompt then
            prompts["read again"] = [*engine.texts["b"]]
            engine.preempt("b")
            engine.chains |= {"read again": [], "b": engine.chains["b"]}
            engine.chains["b"], before = engine.chains["read again"], engine.chains["b"]
    engine.chains |= {"read again": engine.chains["b"], "b": before}
    drafter = load_drafter(folder, target, **vllm_proposer.CHAINS["block"](length))
    for name, chains in engine.chains.items():
        assert len(chains) > 3
        assert chains == own_chains(drafter, target, prompts[name], 60)[: len(chains)]
        assert {len(chain) for chain in chains} == {length}


def test_a_merge_with_a_block_drafter_drafts_the_chains_that_it_drafts_here(target, runner, tmp_path):
    name = f"{saved(BLOCKS[0], target, tmp_path / 'drafter')}+suffix"
    proposer = vllm_proposer.Proposer(config(name, 3, target.model.config))
    engine = Engine(target, runner, proposer, piece=5)
    options = {**vllm_proposer.CHAINS["block"](3), "pace": "fixed", "chain": True, "tree_nodes": 3}
    drafter: Any = load_drafter(name, target, **options)
    for request, prompt in {"a": [5, 6, 7, 5, 6, 7, 5, 6], "b": [9, 9, 9, 3, 9, 9]}.items():
        engine.add(request, prompt)
        for _ in range(30):
            engine.step(request)
        del engine.texts[request]
        num_new = len(engine.chains[request])
        assert engine.chains[request] == own_chains(drafter, target, prompt, 99)[:num_new]
    assert engine.num_accepted, "the texts repeat themselves"


def test_a_request_of_which_vllm_read_tokens_unseen_gets_no_drafts(target, runner, tmp_path, caplog):
    proposer = vllm_proposer.Proposer(config(saved(BLOCKS[0], target, tmp_path / "drafter"), 3, target.model.config))
    engine = Engine(target, runner, proposer, piece=5)
    engine.add("a", [5, 6, 7, 5, 6, 7, 5, 6])
    engine.add("b", [9, 4])
    engine.step("a", "b")
    engine.read["a"] = 6
    for _ in range(3):
        engine.step("a", "b")
    assert engine.chains["a"] == [[]] * 3
    assert [len(chain) for chain in engine.chains["b"]] == [3] * 4
    assert caplog.text.count("request a gets no drafts") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda vllm, model: setattr(vllm.cache_config, "enable_prefix_caching", True),
            "serve with --no-enable-prefix-caching",
        ),
        (lambda vllm, model: delattr(model, "set_aux_hidden_state_layers"), "has no EAGLE-3 interface"),
        (
            lambda vllm, model: setattr(vllm.parallel_config, "tensor_parallel_size", 2),
            "train the drafter with drafter.draft_vocab",
        ),
    ],
)
def test_a_block_drafter_that_would_get_no_layers_is_refused(change, message, target, runner, tmp_path):
    options = config(saved(BLOCKS[0], target, tmp_path / "drafter"), 3, target.model.config)
    model = model_of(target)
    change(options, model)
    with pytest.raises(ValueError, match=message):
        vllm_proposer.Proposer(options).load_model(model)


def test_other_proposers_of_vllm_are_left_alone(target: HFTarget, runner: type[Any], tmp_path: Path) -> None:
    vllm_proposer.Proposer(config(saved(KINDS[0], target, tmp_path / "drafter")))
    other = SimpleNamespace(propose=lambda tokens, *_, **__: tokens)
    assert runner(other).propose_draft_token_ids([[5]], torch.zeros(1, 8)) == [[5]]


def test_what_does_not_fit_is_refused(target: HFTarget, runner: type[Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the drafter: --additional-config"):
        vllm_proposer.Proposer(config(None))
    shared = saved({"kind": "medusa", "num_heads": 3, "share_head": True}, target, tmp_path / "shared")
    with pytest.raises(ValueError, match="and redrafter or medusa or block that has its own heads"):
        vllm_proposer.Proposer(config(shared))
    with pytest.raises(
        ValueError, match="recycling is of the kind recycling, and this proposer drafts with suffix, prompt_lookup"
    ):
        vllm_proposer.Proposer(config("recycling"))
    two = [saved(KINDS[0], target, tmp_path / name) for name in ("one", "two")]
    with pytest.raises(ValueError, match="two trained drafters, and this proposer takes one"):
        vllm_proposer.Proposer(config(f"{two[0]}+suffix+{two[1]}"))
    proposer = vllm_proposer.Proposer(config(saved(KINDS[0], target, tmp_path / "drafter")))
    with pytest.raises(ValueError, match="doesn't fit the served target: vocab_size"):
        proposer.load_model(model_of(target, vocab_size=7))


def test_another_vllm_is_refused(target: HFTarget, runner: Any, tmp_path: Path) -> None:
    runner.propose_draft_token_ids = lambda self, tokens: tokens
    with pytest.raises(RuntimeError, match="no aux_hidden_states and no spec_decode_metadata; the proposer was written for"):
        vllm_proposer.Proposer(config(saved(KINDS[0], target, tmp_path / "drafter")))
    del runner._input_fits_in_drafter
    with pytest.raises(RuntimeError, match="model runner has no _input_fits_in_drafter; the proposer was written for"):
        vllm_proposer.Proposer(config(saved(KINDS[0], target, tmp_path / "another")))


def test_a_request_that_waits_keeps_what_a_merge_has_learned_of_it(target, runner, tmp_path):
    name = f"{saved(BLOCKS[0], target, tmp_path / 'drafter')}+suffix"
    proposer = vllm_proposer.Proposer(config(name, 3, target.model.config))
    engine = Engine(target, runner, proposer, piece=9)
    for request, prompt in {"a": [5, 6, 7, 5, 6], "b": [9, 9, 3]}.items():
        engine.add(request, prompt)
    engine.step("a", "b")
    kept = proposer.requests["a"]
    engine.preempt("a")
    engine.step("b")
    for _ in range(3):
        engine.step("a", "b")
    assert proposer.requests["a"] is kept
    del engine.texts["a"]
    engine.step("b")
    assert [*proposer.requests] == ["b"]


def test_targets_whose_embeddings_or_layers_vllm_gives_otherwise_are_refused(target, runner, tmp_path):
    """Gemma scales its embeddings outside of them, and vLLM gives layers in ascending order: drafts would be silently worse."""
    proposer = vllm_proposer.Proposer(config(saved(KINDS[0], target, tmp_path / "drafter")))
    for inner in (SimpleNamespace(embed_tokens=target.embed_tokens, normalizer=16.0), SimpleNamespace(language_model=None)):
        with pytest.raises(ValueError, match="SimpleNamespace scales them, or has them elsewhere"):
            proposer.load_model(SimpleNamespace(model=inner))
    folder = saved({**BLOCKS[0], "feature_layers": [1, 0]}, target, tmp_path / "block")
    with pytest.raises(ValueError, match=r"in the order \[1, 0\], but vLLM in ascending order"):
        vllm_proposer.Proposer(config(folder, BLOCKS[0]["block"], target.model.config)).load_model(model_of(target))
