"""Draft models: their drafts are their own greedy text, and answers stay the target's."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from outrider.data.types import UNKNOWN, DrafterBatch
from outrider.models.decoding import GreedyAcceptance, Prompts, RowSeeds, Sampling, SpeculativeSampling, generate
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.objective import Objective
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.tree_cache import TreeCache

from ...decoded import texts_of

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]


@pytest.fixture
def small(target) -> HFTarget:
    """Make a model with some of the target's weights, so that its drafts are sometimes right."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**target.model.config.to_dict(), "num_hidden_layers": 1})).double().eval()
    model.load_state_dict(target.model.state_dict(), strict=False)
    return HFTarget(model, target.tokenizer, target.identity)


def test_the_cache_grows_with_a_long_answer(target, monkeypatch):
    drafter = DraftModel(DraftModelConfig(length=2), HFTarget(target.model, target.tokenizer, target.identity))
    begin = drafter.init_state
    monkeypatch.setattr(drafter, "init_state", lambda *args, max_new_tokens: begin(*args, max_new_tokens=2))
    steps = list(generate(target, drafter, GreedyAcceptance(), torch.tensor([PROMPTS[0]]), max_new_tokens=40))
    assert all(step.num_accepted == (2,) for step in steps[1:])


@pytest.mark.parametrize(("length", "top_k"), [(1, 1), (1, 3), (4, 1), (3, 3)])
def test_the_cache_holds_as_many_nodes_as_promised(target, small, monkeypatch, length, top_k):
    """The nodes of the last depth are never read."""
    drafter = DraftModel(DraftModelConfig(length=length, top_k=top_k), small)
    caches, ends = [], []
    read_prompts, begin_pass = drafter.read_prompts, TreeCache.begin_pass

    def noted(self, num_entries, *, offset=0, is_masked=True):
        ends.append((self, offset + num_entries))
        return begin_pass(self, num_entries, offset=offset, is_masked=is_masked)

    monkeypatch.setattr(TreeCache, "begin_pass", noted)
    monkeypatch.setattr(drafter, "read_prompts", lambda *args, **room: caches.append(read_prompts(*args, **room)) or caches[0])
    rule = SpeculativeSampling(sampling=Sampling())
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    list(generate(target, drafter, rule, prompts, max_new_tokens=20, generator=RowSeeds([0, 1, 2])))
    num_columns = [end for cache, end in ends if cache is caches[0]]
    assert len(num_columns) > 5
    assert max(num_columns) == max(1 + drafter.max_entries, 2), "the last token and an unread one at least"


@pytest.mark.parametrize("length", [1, 6])
def test_drafts_may_reach_beyond_a_table_of_positions(target, length):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    config.bos_token_id = config.eos_token_id = None
    model = GPT2LMHeadModel(config).double().eval()
    big, twin = (HFTarget(model, target.tokenizer, target.identity) for _ in range(2))
    prompt = torch.tensor([[5, 6, 7, 8]])
    answers = []
    for drafter in (NullDrafter(), DraftModel(DraftModelConfig(length=length), twin)):
        steps = generate(big, drafter, GreedyAcceptance(), prompt, max_new_tokens=99)
        answers.append([token for step in steps for token in step.tokens[0]])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 28


# --- trees


def slow_tree(model, text: list[int], length: int, top_k: int, num_nodes: int) -> list[tuple[int, ...]]:
    """Find the paths of the likeliest nodes level by level, with a forward pass for each path."""
    beams, met = [((), 0.0)], []
    for _ in range(length):
        successors = []
        for path, score in beams:
            log_probs = model(torch.tensor([[*text, *path]])).logits[0, -1].log_softmax(-1)
            successors += [((*path, token), score + value) for token, value in enumerate(log_probs.tolist())]
        beams = sorted(successors, key=lambda node: -node[1])[:top_k]
        met += beams
    return sorted(path for path, _ in sorted(met, key=lambda node: -node[1])[:num_nodes])


class RecordingTrees(DraftModel):
    """Draft model that checks every tree against `slow_tree`."""

    texts: list[list[int]]
    num_checked = 0

    def propose(self, state, last_token, *, generator=None):
        tree, drafted = super().propose(state, last_token, generator=generator)
        for row, (last, before) in enumerate(zip(last_token.tolist(), state.unread_tokens[:, 0].tolist(), strict=True)):
            text = next(text for text in self.texts if text[-2:] == [before, last])
            paths = [tuple(tree.tokens[row, [n for n in line if n >= 0]].tolist()[::-1]) for line in tree.lineage[row].tolist()]
            expected = slow_tree(self.model, text, self.config.length, self.config.top_k, self.max_nodes)
            assert sorted(paths) == expected
            self.num_checked += 1
        return tree, drafted


@pytest.mark.parametrize(("length", "top_k", "tree_nodes"), [(1, 1, None), (4, 1, None), (3, 3, 5), (4, 2, None)])
def test_trees_hold_the_likeliest_nodes_and_answers_are_the_targets(target, small, length, top_k, tree_nodes):
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    plain = texts_of(generate(target, NullDrafter(), GreedyAcceptance(), prompts, max_new_tokens=14), len(prompts))
    stop = plain[0][5]  # some rows leave sooner than others
    drafter = RecordingTrees(DraftModelConfig(length=length, top_k=top_k, tree_nodes=tree_nodes), small)
    drafter.texts = [list(prompt) for prompt in PROMPTS]
    actual: list[list[int]] = [[] for _ in prompts]
    num_rows, accepted = set(), set()
    for step in generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=14, stop_ids={stop}):
        num_rows.add(len(step.rows))
        accepted |= set(step.num_accepted)
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            actual[row] += tokens
            drafter.texts[row] += tokens
    assert actual == [text[: text.index(stop) + 1] if stop in text else text for text in plain]
    assert len(num_rows) > 1
    assert len(accepted) > 1, "nothing drafted was ever right, so nothing was tested"
    assert drafter.num_checked > 10


def test_trees_of_the_target_itself_are_accepted_to_their_last_depth(target):
    twin = HFTarget(target.model, target.tokenizer, target.identity)
    drafter = DraftModel(DraftModelConfig(length=3, top_k=3), twin)
    steps = list(generate(target, drafter, GreedyAcceptance(), torch.tensor([PROMPTS[0]]), max_new_tokens=21))
    assert [step.num_accepted for step in steps[1:]] == [(3,)] * 5


# --- training


def make_batch(target, rows: list[tuple[list[int], dict[int, list[int]]]]) -> DrafterBatch:
    """Make a batch of texts; each comes with its continuations by position."""
    seq, horizon = max(len(text) for text, _ in rows), len(next(iter(rows[0][1].values())))
    ids, mask = torch.zeros(len(rows), seq, dtype=torch.long), torch.zeros(len(rows), seq, dtype=torch.bool)
    continuations = torch.full((len(rows), seq, horizon), UNKNOWN)
    for row, (text, branches) in enumerate(rows):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), True
        for position, tokens in branches.items():
            continuations[row, position] = torch.tensor(tokens)
    positions = continuations[..., 0] != UNKNOWN
    hidden, _ = target.hidden_states(ids)
    return DrafterBatch(
        input_ids=ids, attention_mask=mask, positions=positions, continuations=continuations, hidden_states=hidden
    )


ROWS = [
    # On the text, twice the same labels; off it at once; off it later.
    ([5, 6, 7, 8, 9, 10, 11], {0: [6, 7, 8, 9], 1: [7, 8, 9, 40], 2: [30, 31, 32, 33], 4: [10, 11, 41, 42]}),
    ([20, 21, 22], {0: [21, 22, UNKNOWN, UNKNOWN], 1: [22, 23, 24, 25], 2: [50, UNKNOWN, UNKNOWN, UNKNOWN]}),
]
NUM_BRANCHES = 2  # of a row at most: two continuations leave the first text before their last tokens, one leaves the second


@pytest.mark.parametrize("family", ["llama", "sliding window", "table of positions"])
def test_loss_and_gradient_equal_those_of_a_forward_pass_over_each_branch(target, small, family, monkeypatch):
    torch.manual_seed(0)
    if family == "sliding window":
        config = MistralConfig(**{**small.model.config.to_dict(), "sliding_window": 4, "model_type": "mistral"})
        small = HFTarget(MistralForCausalLM(config).double().eval(), target.tokenizer, target.identity)
    elif family == "table of positions":
        config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        small = HFTarget(GPT2LMHeadModel(config).double().eval(), target.tokenizer, target.identity)
    drafter = DraftModel(DraftModelConfig(), small)
    widths = []
    read = small.read_texts
    monkeypatch.setattr(small, "read_texts", lambda **texts: widths.append(texts["input_ids"].shape[1]) or read(**texts))
    loss = drafter.loss(make_batch(target, ROWS), Objective())
    loss.sums.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    sums, counts = [torch.zeros(()).double()] * 3, [0] * 3
    for text, branches in ROWS:
        for position, tokens in branches.items():
            for depth in range(3):
                if UNKNOWN in tokens[: depth + 2]:
                    break
                ids = torch.tensor([[*text[: position + 1], *tokens[: depth + 1]]])
                sums[depth] = sums[depth] - small.model(ids).logits[0, -1].log_softmax(-1)[tokens[depth + 1]]
                counts[depth] += 1
    expected = torch.stack(sums)
    expected.sum().backward()
    assert loss.sums.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert loss.counts.tolist() == counts == [6, 5, 5]
    for name, parameter in drafter.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5), name
    assert widths == [7 + 3 * NUM_BRANCHES]


def test_texts_that_are_their_own_continuations_need_no_branch(target, small, monkeypatch):
    read = small.read_texts
    widths = []
    monkeypatch.setattr(small, "read_texts", lambda **texts: widths.append(texts["input_ids"].shape[1]) or read(**texts))
    batch = make_batch(target, [([5, 6, 7, 8, 9], {0: [6, 7, 8], 1: [7, 8, 9], 2: [8, 9, UNKNOWN]})])
    loss = DraftModel(DraftModelConfig(), small).loss(batch, Objective())
    assert widths == [5]
    assert loss.counts.tolist() == [3, 2]


# --- initial weights


def test_the_targets_first_layers_draft_as_the_truncated_target(target):
    drafter = build_drafter(parse_drafter({"kind": "draft_model", "num_layers": 1, "init": "target_layers"}), target)
    assert drafter.model.config.num_hidden_layers == 1
    weights, theirs = drafter.model.state_dict(), target.model.state_dict()
    assert len(weights) == 12
    assert all(torch.equal(weight, theirs[name].float()) for name, weight in weights.items())
    whole = (
        build_drafter(parse_drafter({"kind": "draft_model", "num_layers": 2, "init": "target_layers"}), target).double().eval()
    )
    steps = list(generate(target, whole, GreedyAcceptance(), torch.tensor([PROMPTS[0]]), max_new_tokens=11))
    assert [step.num_accepted for step in steps[1:]] == [(4,)] * 2


def test_sizes_keep_the_targets_proportions(target):
    def sizes(**options):
        config = build_drafter(parse_drafter({"kind": "draft_model", "num_layers": 1, **options}), target).model.config
        return (
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )

    assert sizes() == (32, 64, 4, 2, 8)
    assert sizes(hidden_size=16) == (16, 32, 2, 1, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 3}, "the target has only 2"),
        ({"hidden_size": 31}, "choose a drafter.hidden_size that is a multiple"),
        ({"init": "mine"}, 'init="mine": must be one of random, target_layers'),
        ({"init": "target_layers", "hidden_size": 16}, "so hidden_size can't be chosen"),
        ({"hidden_size": 0, "length": 0}, "drafter.hidden_size=0: must be above 0\ndrafter.length=0"),
        ({"path": "/nowhere/at/all"}, "drafter.path is /nowhere/at/all: .*no such directory"),
        ({"architecture": {"model_type": "no such"}}, "transformers can't build the draft model"),
        ({"architecture": {}}, "transformers can't build the draft model"),
    ],
)
def test_an_impossible_option_of_a_draft_model_is_named(target, options, message):
    with pytest.raises(ValueError, match=message):
        build_drafter(parse_drafter({"kind": "draft_model", **options}), target)


@pytest.fixture
def smaller_dir(target, tmp_path) -> Path:
    """Save a model half as wide as the target, with its tokenizer and a tied head."""
    config = LlamaConfig(
        **{**target.model.config.to_dict(), "hidden_size": 16, "head_dim": 4, "tie_word_embeddings": True, "dtype": "float32"}
    )
    torch.manual_seed(2)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "smaller")
    target.tokenizer.save_pretrained(tmp_path / "smaller")
    return tmp_path / "smaller"


def same_drafts(target, drafter, other) -> bool:
    prompts = Prompts.of(torch.tensor([PROMPTS[0]]))
    with torch.inference_mode():
        prefill = target.prefill(prompts, max_new_tokens=4, max_nodes=4)
        trees = [
            one_drafter.propose(one_drafter.init_state(prompts, prefill, max_new_tokens=8), torch.tensor([5]))[0]
            for one_drafter in (drafter, other)
        ]
    return torch.equal(trees[0].tokens, trees[1].tokens)


@pytest.mark.parametrize("source", ["sizes", "path"])
def test_a_saved_draft_model_loads_without_its_original_model(target, tmp_path, smaller_dir, source):
    options = {"path": str(smaller_dir)} if source == "path" else {"hidden_size": 16, "num_layers": 1}
    drafter = build_drafter(parse_drafter({"kind": "draft_model", **options}), target)
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    save_drafter(drafter, tmp_path / "saved", target.identity)
    assert str(tmp_path) not in (tmp_path / "saved" / "config.json").read_text()
    shutil.rmtree(smaller_dir)
    loaded = load_drafter(tmp_path / "saved", target, length=2)
    assert loaded.config.length == 2
    assert loaded.config.architecture == drafter.config.architecture
    expected = {name: value.double() for name, value in drafter.state_dict().items()}
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert ("model.lm_head.weight" in expected) == (source == "sizes"), "a tied head is saved once"
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32
    again = load_drafter(tmp_path / "saved", target)
    assert same_drafts(target, drafter.double().eval(), again)
    with pytest.raises(ValueError, match="num_layers can't be changed"):
        load_drafter(tmp_path / "saved", target, num_layers=1)


def test_a_saved_draft_model_that_does_not_fit_is_refused(target, tmp_path):
    drafter = build_drafter(parse_drafter({"kind": "draft_model", "num_layers": 1}), target)
    save_drafter(drafter, tmp_path / "saved", target.identity)
    path = tmp_path / "saved" / "config.json"
    original = path.read_text()

    def load_with(**changes):
        config = json.loads(original)
        architecture = config["drafter"]["architecture"]
        config["drafter"]["architecture"] = {**architecture, **changes} if changes else None
        path.write_text(json.dumps(config))
        load_drafter(tmp_path / "saved", target)

    with pytest.raises(ValueError, match="a vocabulary of 199 tokens"):
        load_with(vocab_size=199)
    with pytest.raises(ValueError, match=r"is \(300, 32\), not \(300, 64\)"):
        load_with(hidden_size=64)
    with pytest.raises(ValueError, match="needs its `architecture`"):
        load_with()


def test_a_model_of_another_tokenizer_or_vocabulary_and_pickles_are_refused(target, smaller_dir, tmp_path):
    def build(directory):
        return build_drafter(parse_drafter({"kind": "draft_model", "path": str(directory)}), target)

    build(smaller_dir)
    wide = Path(shutil.copytree(smaller_dir, tmp_path / "wide"))
    config = LlamaConfig(**{**json.loads((wide / "config.json").read_text()), "vocab_size": 334})
    LlamaForCausalLM(config).save_pretrained(wide)
    with pytest.raises(ValueError, match="has 300 tokens and the model 334, far more than padding explains"):
        build(wide)
    strange = json.loads((smaller_dir / "tokenizer.json").read_text())
    strange["normalizer"] = {"type": "Lowercase"}
    lower = Path(shutil.copytree(smaller_dir, tmp_path / "lower"))
    (lower / "tokenizer.json").write_text(json.dumps(strange))
    with pytest.raises(ValueError, match="another tokenizer than tiny_target"):
        build(lower)
    pickled = Path(shutil.copytree(smaller_dir, tmp_path / "pickled"))
    (pickled / "model.safetensors").unlink()
    torch.save(LlamaForCausalLM(LlamaConfig.from_pretrained(pickled)).state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match="can't be loaded"):
        build(pickled)


def test_heads_narrower_than_their_rotary_part_are_an_error_with_the_option(target):
    sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8, "n_positions": 64}
    wide = HFTarget(GPTJForCausalLM(GPTJConfig(**sizes)).eval(), target.tokenizer, target.identity)
    build_drafter(parse_drafter({"kind": "draft_model", "num_layers": 1, "hidden_size": 8}), wide)
    with pytest.raises(ValueError, match=r"GPTJForCausalLM with drafter.hidden_size 4 can't read a text .*choose a"):
        build_drafter(parse_drafter({"kind": "draft_model", "num_layers": 1, "hidden_size": 4}), wide)


def test_a_prompt_too_long_for_the_draft_model_is_an_error_that_names_it(target):
    config = LlamaConfig(**{**target.model.config.to_dict(), "max_position_embeddings": 8, "dtype": "float32"})
    small = HFTarget(LlamaForCausalLM(config).eval(), target.tokenizer, target.identity)
    drafter = DraftModel(DraftModelConfig(length=2), small)
    prompt = torch.tensor([[5] * 8])
    with pytest.raises(ValueError, match="a prompt of 8 tokens leaves no room .* the draft model's context window of 8 tokens"):
        list(generate(target, drafter, GreedyAcceptance(), prompt, max_new_tokens=2))
