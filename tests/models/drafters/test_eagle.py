"""EAGLE-1, -2 and -3, against a slow and plain version.

The slow version has full attention over one branch at a time, without cache and masks.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from outrider.data.types import UNKNOWN, DrafterBatch
from outrider.models.decoding import GreedyAcceptance, Prompts, generate
from outrider.models.drafters import (
    NullDrafter,
    build_drafter,
    eagle,
    parse_drafter,
    scoring,
)
from outrider.models.drafters.eagle import Eagle
from outrider.models.drafters.eagle3 import Eagle3
from outrider.models.drafters.feature_drafter import FeatureDrafter
from outrider.models.drafters.fused_layers import default_feature_layers
from outrider.models.drafters.labels import Labels
from outrider.models.drafters.objective import LOSS_DECAY, Objective
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.hidden_states import decoder_layers

from ... import tiny_models
from ...conformance.test_architectures import LLAMA3_ROPE
from ...decoded import texts_of

VOCAB, HIDDEN, HORIZON = 90, 32, 4
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Families with biases in attention, norms of queries and keys, other rotary frequencies, and one
# key head for each query head.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}
KINDS = ("eagle", "eagle3")
FORMS: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle"},
    "eagle3": {"kind": "eagle3"},
    "eagle3.1": {"kind": "eagle3", "fc_norm": True, "norm_output": True},
    "one norm of all features": {"kind": "eagle3", "norm_before_fc": True},
}
PROMPTS = [[1, 70, 71, 72, 2], [9], [40, 41, 42, 43, 44, 45, 46, 47], [70, 71]]


def make_target(architecture: str, tokenizer, **options) -> HFTarget:
    config = getattr(transformers, f"{architecture}Config")(**{**SMALL, **options})
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).double().eval().requires_grad_(False)
    return HFTarget(randomise(model), tokenizer, IDENTITY)


IDENTITY = replace(tiny_models.IDENTITY, hidden_size=HIDDEN, vocab_size=VOCAB)


def randomise(module: torch.nn.Module) -> Any:
    """Set weights so large that every parameter changes the output."""
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.2)
    return module


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tiny_tokenizer) -> HFTarget:
    architecture, options = FAMILIES[request.param]
    return make_target(architecture, tiny_tokenizer, **options)


@pytest.fixture(scope="module")
def llama(tiny_tokenizer) -> HFTarget:
    return make_target("Llama", tiny_tokenizer)


def make(kind: str, target: HFTarget, **options) -> Any:
    torch.manual_seed(1)
    return randomise(build_drafter(parse_drafter({"kind": kind, **options}), target).double()).eval()


def make_batch(target: HFTarget, feature_layers: tuple[int, ...] = ()) -> DrafterBatch:
    """Make texts of 12 and 8 tokens.

    Their continuations repeat the text, leave it, or end early.
    """
    input_ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(2))
    input_ids[1, 8:] = 0
    attention_mask = torch.arange(12) < torch.tensor([[12], [8]])
    continuations = torch.full((2, 12, HORIZON), UNKNOWN)
    continuations[0, 4] = torch.tensor([*input_ids[0, 5:7], 50, 51])
    continuations[0, 0] = torch.tensor([52, 53, 54, 55])
    continuations[0, 10] = torch.tensor([int(input_ids[0, 11]), 56, 57, UNKNOWN])
    continuations[1, 3] = input_ids[1, 4:8]
    hidden_states, features = target.hidden_states(input_ids, feature_layers)
    return DrafterBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        positions=continuations[:, :, 0] != UNKNOWN,
        continuations=continuations,
        hidden_states=hidden_states,
        features=features,
    )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def slow_layer(drafter: FeatureDrafter, target: HFTarget, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the layer's outputs [entry, hidden] over one text, written out as in the papers."""
    layer, attention = drafter.layer, drafter.layer.self_attn
    if isinstance(drafter, Eagle):
        x = residual = drafter.fc(torch.cat([embeddings, hidden], dim=-1))
    else:
        x, residual = torch.cat([layer.input_layernorm(embeddings), drafter.hidden_norm(hidden)], dim=-1), hidden
    heads = (len(x), -1, attention.head_dim)
    query, key, value = (getattr(attention, f"{name}_proj")(x).view(heads) for name in "qkv")
    if isinstance(layer, transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer):
        query, key = attention.q_norm(query), attention.k_norm(key)
    cos, sin = target.model.model.rotary_emb(x, torch.arange(len(x))[None])
    query, key = (rotate(heads_of_one, cos[0, :, None], sin[0, :, None]) for heads_of_one in (query, key))
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) / attention.head_dim**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(group, 1)).flatten(1)
    between = residual + attention.o_proj(seen)
    return between + layer.mlp(layer.post_attention_layernorm(between))


def slow_log_probs(drafter: Any, target: HFTarget, text: Sequence[int], branch: Sequence[int]) -> torch.Tensor:
    """Compute the drafter's log-probabilities [depth, output] after each token of `branch`.

    The branch follows `text`. The target chose its first token.
    """
    ids = torch.tensor([text])
    hidden, features = target.hidden_states(ids, drafter.feature_layers)
    inputs = hidden[0] if features is None else drafter.fc(slow_features(drafter, features[0]))
    embeddings = target.embed_tokens(torch.tensor([*text[1:], *branch]))
    for _ in branch:  # recompute all entries for each token
        outputs = slow_layer(drafter, target, embeddings[: len(inputs)], inputs)
        normed = outputs if features is None else rms_norm(outputs, drafter.norm.weight)
        inputs = torch.cat([inputs, (normed if getattr(drafter.config, "norm_output", False) else outputs)[-1:]])
    normed = normed[len(text) - 1 :]
    return (target.head(normed) if features is None else drafter.lm_head(normed)).log_softmax(-1)


def slow_features(drafter: Eagle3, features: torch.Tensor) -> torch.Tensor:
    """Norm the features [entry, feature] of a text, layer by layer or as one vector."""
    if drafter.config.fc_norm:
        parts = features.unflatten(-1, (-1, HIDDEN)).unbind(-2)
        features = torch.cat([rms_norm(part, drafter.fc_norm[index].weight) for index, part in enumerate(parts)], dim=-1)
    return rms_norm(features, drafter.input_norm.weight) if drafter.config.norm_before_fc else features


def rms_norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()


# --- training


@pytest.mark.parametrize("form", FORMS)
def test_training_outputs_equal_those_of_one_branch_at_a_time(form, family):
    drafter = make(target=family, **FORMS[form])
    batch = make_batch(family, drafter.feature_layers)
    labels = Labels.of(batch)
    with torch.no_grad():
        outputs = drafter.unroll(batch, labels, drafter.read_text(batch, drafter.target_features(batch)))
        actual = drafter.logits(outputs).log_softmax(-1)
    num_checked = 0
    for index, (row, column) in enumerate(batch.positions.nonzero().tolist()):
        branch = batch.continuations[row, column].tolist()
        branch = branch[: int(labels.known[index].sum())]  # the last known token is a label only
        expected = slow_log_probs(drafter, family, batch.input_ids[row, : column + 1].tolist(), branch)
        assert torch.allclose(actual[index, : len(branch)], expected, atol=1e-9)
        num_checked += len(branch)
    assert num_checked == 3 + 3 + 2 + 3


@torch.no_grad()
def test_the_loss_of_eagle3_decays_with_depth_and_has_no_part_for_features(llama):
    drafter = make("eagle3", llama)
    batch = make_batch(llama, drafter.feature_layers)
    sums = [0.0] * 3
    for row, column in batch.positions.nonzero().tolist():
        known = [token for token in batch.continuations[row, column].tolist() if token != UNKNOWN]
        log_probs = slow_log_probs(drafter, llama, batch.input_ids[row, : column + 1].tolist(), known[:-1])
        for depth, label in enumerate(known[1:]):
            sums[depth] -= float(log_probs[depth, label]) * LOSS_DECAY**depth
    loss = drafter.loss(batch, Objective())
    assert loss.sums.tolist() == pytest.approx(sums, rel=1e-5)
    assert loss.counts.tolist() == [4, 4, 3]


@torch.no_grad()
def test_eagle_regresses_the_next_feature_while_the_continuation_repeats_the_text(llama, monkeypatch):
    batch = make_batch(llama)
    losses = []
    for weight in (0.0, 1.0, eagle.CLASSIFICATION_WEIGHT):
        monkeypatch.setattr(eagle, "CLASSIFICATION_WEIGHT", weight)
        losses.append(make("eagle", llama).loss(batch, Objective()))
    regression, one, tenth = (loss.sums for loss in losses)
    assert torch.allclose(tenth, regression + 0.1 * (one - regression))
    drafter, labels = make("eagle", llama), Labels.of(batch)
    outputs = drafter.unroll(batch, labels, drafter.read_text(batch, batch.hidden_states))
    expected, num_checked = [0.0] * 3, 0
    for index, (row, column) in enumerate(batch.positions.nonzero().tolist()):
        for depth in range(3):
            text = batch.input_ids[row, column + 1 : column + 2 + depth].tolist()
            if bool(labels.known[index, depth]) and text == batch.continuations[row, column, : depth + 1].tolist():
                error = (outputs[index, depth] - batch.hidden_states[row, column + 1 + depth]).abs()
                expected[depth] += float(torch.where(error < 1, error**2 / 2, error - 0.5).mean())
                num_checked += 1
    assert num_checked == 2 + 1 + 3
    assert regression.tolist() == pytest.approx(expected[:1], rel=1e-6), "deeper depths aren't trained"
    estimate = scoring.score(drafter.logits, (outputs,), labels, batch, Objective(), vocabulary=drafter.vocabulary)
    for loss in losses:
        assert torch.equal(loss.hits, estimate.hits)
        assert torch.equal(loss.joint_hits, estimate.joint_hits)
        assert torch.equal(loss.counts, estimate.counts)


def test_measuring_untrained_depths_reads_no_text_again(llama, monkeypatch):
    drafter, texts = make("eagle", llama).train(), []
    read = drafter.read_text
    monkeypatch.setattr(drafter, "read_text", lambda *args: texts.append(args) or read(*args))
    loss = drafter.loss(make_batch(llama), Objective())
    assert (len(loss.sums), len(loss.counts)) == (1, 3)
    assert len(texts) == 1


def test_features_are_noisy_in_training_only(llama):
    batch = make_batch(llama)
    drafter = make("eagle", llama)
    quiet = drafter.loss(batch, Objective()).sums
    assert torch.equal(drafter.loss(batch, Objective()).sums, quiet)
    drafter.train()
    assert not torch.allclose(drafter.loss(batch, Objective()).sums, quiet)
    drafter.config.feature_noise = 0.0
    assert torch.equal(drafter.loss(batch, Objective()).sums, quiet)


# --- decoding


def answers(target: HFTarget, drafter: Any, prompts: list[list[int]], num_new: int = 20) -> tuple[list[list[int]], int]:
    rows = [torch.tensor(prompt) for prompt in prompts]
    steps = list(generate(target, drafter, GreedyAcceptance(), rows, max_new_tokens=num_new, stop_ids=range(20)))
    return texts_of(steps, len(prompts)), sum(sum(step.num_accepted) for step in steps)


class Watched:
    """Drafter that compares every search with the slow version, text by text."""

    def __init__(self, drafter: FeatureDrafter, target: HFTarget, prompts: list[list[int]]) -> None:
        self.drafter, self.target, self.texts = drafter, target, [list(prompt) for prompt in prompts]
        self.max_nodes, self.feature_layers, self.init_state = drafter.max_nodes, drafter.feature_layers, drafter.init_state
        self.num_checked = 0

    def propose(self, state, last_token, *, generator=None):
        search, drafted = self.drafter.search(state, last_token)
        tree = self.drafter.pack(search)
        for row, last in enumerate(last_token.tolist()):
            expected = slow_search(self.drafter, self.target, self.texts[row], last)
            paths = row_paths(search.tokens[row], search.parents[row])
            assert dict(zip(paths, search.scores[row].tolist(), strict=True)) == pytest.approx(expected, abs=1e-4)
            likeliest = sorted(expected, key=lambda path: -expected[path])[: self.drafter.config.tree_nodes]
            assert set(row_paths(tree.tokens[row], tree.parents[row])) == set(likeliest)
            self.num_checked += 1
        return tree, drafted

    def meanwhile(self, drafted) -> None:
        return None

    def advance(self, drafted, tree, accepted, output):
        for row, text in enumerate(self.texts):
            text.append(self.last[row])
            text += accepted.tokens[row]
        return self.drafter.advance(drafted, tree, accepted, output)

    def select(self, state, rows):
        self.texts = [self.texts[row] for row in rows]
        return self.drafter.select(state, rows)


def row_paths(tokens: torch.Tensor, parents: torch.Tensor) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def slow_search(drafter: Any, target: HFTarget, text: list[int], last: int) -> dict[tuple[int, ...], float]:
    """Compute the scores of all paths that the search visits."""
    config = drafter.config
    expand: dict[tuple[int, ...], float] = {(): 0.0}
    met = {}
    for _ in range(config.depth):
        children = {}
        for path, score in expand.items():
            log_probs = slow_log_probs(drafter, target, text, [last, *path])[-1]
            tokens = log_probs.topk(config.top_k).indices.tolist()
            children.update({(*path, token): score + float(log_probs[token]) for token in tokens})
        met.update(children)
        expand = dict(sorted(children.items(), key=lambda item: -item[1])[: config.top_k])
    return met


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("form", "family"), [("eagle", "llama"), ("eagle3", "qwen3"), ("eagle3.1", "qwen2")], indirect=["family"]
)
def test_decoding_drafts_the_trees_of_a_slow_search(form, family):
    drafter = make(target=family, **FORMS[form], depth=3, top_k=2, tree_nodes=5)
    expected = [answers(family, NullDrafter(), [prompt])[0][0] for prompt in PROMPTS]
    assert len({len(tokens) for tokens in expected}) > 1, "all rows end together"
    watched = Watched(drafter, family, PROMPTS)
    propose = watched.propose

    def remember(state, last_token, **options):
        watched.last = last_token.tolist()
        tree, drafted = propose(state, last_token, **options)
        return with_right_tokens(tree), drafted

    def with_right_tokens(tree):
        """Put the target's next tokens on one path of each row.

        Every row then accepts a different number of tokens.
        """
        tokens = tree.tokens.clone()
        deepest = tree.depths.argmax(1)
        for row, text in enumerate(watched.texts):
            (index,) = [i for i, prompt in enumerate(PROMPTS) if text[: len(prompt)] == prompt]
            answer = expected[index][len(text) + 1 - len(PROMPTS[index]) :]
            nodes = tree.lineage[row, deepest[row]].flip(0)
            for node, token in list(zip(nodes[nodes >= 0].tolist(), answer, strict=False))[: 1 + index % 3]:
                tokens[row, node] = token
        return type(tree)(tokens=tokens, parents=tree.parents, max_depth=tree.max_depth)

    watched.propose = remember
    with torch.no_grad():
        actual, num_accepted = answers(family, watched, PROMPTS)
    assert actual == expected
    assert num_accepted > 0
    assert watched.num_checked >= 8


@pytest.mark.parametrize("vocabulary", [None, 3])
@pytest.mark.parametrize(
    ("depth", "top_k", "tree_nodes"), [(1, 1, 1), (1, 4, 3), (4, 1, 9), (4, 5, 1), (3, 4, 12), (3, 8, 500)]
)
def test_trees_have_at_most_max_nodes_nodes_and_every_node_has_its_parent(vocabulary, depth, top_k, tree_nodes, llama):
    drafter = make("eagle3", llama, depth=depth, top_k=top_k, tree_nodes=tree_nodes, draft_vocab_size=vocabulary)
    drafter.choose_draft_vocabulary(torch.arange(VOCAB))
    with torch.no_grad():
        drafter.lm_head.weight *= 40  # many log-probabilities round to 0
        # two tokens always have equal logits
        drafter.lm_head.weight[-1] = drafter.lm_head.weight[0]
        tree = first_draft(llama, drafter)
    assert tree.num_nodes == drafter.max_nodes <= tree_nodes
    num_checked = 0
    for row in range(len(PROMPTS)):
        paths = row_paths(tree.tokens[row], tree.parents[row])
        assert len(set(paths)) == len(paths) == tree.num_nodes
        assert all(parent < node for node, parent in enumerate(tree.parents[row].tolist()))
        num_checked += 1
    assert num_checked == len(PROMPTS)


def first_draft(target: HFTarget, drafter: Any) -> Any:
    prompts = Prompts.of([torch.tensor(prompt) for prompt in PROMPTS])
    prefill = target.prefill(prompts, max_new_tokens=4, max_nodes=drafter.max_nodes, feature_layers=drafter.feature_layers)
    state = drafter.init_state(prompts, prefill, max_new_tokens=8)
    return drafter.propose(state, prefill.logits[:, -1].argmax(-1))[0]


# --- building, saving, errors


def test_labels_outside_the_reduced_vocabulary_are_misses_and_never_drafted(llama):
    drafter = make("eagle3", llama, draft_vocab_size=40)
    counts = torch.zeros(VOCAB, dtype=torch.long)
    counts[45:85] = 1
    drafter.choose_draft_vocabulary(counts)
    assert drafter.draft_tokens.tolist() == list(range(45, 85))
    assert torch.equal(drafter.lm_head.weight, llama.head.weight[45:85]), "the head begins as the target's"
    batch = make_batch(llama, drafter.feature_layers)
    loss = drafter.loss(batch, Objective())
    labels = Labels.of(batch)
    inside = ((labels.tokens >= 45) & (labels.tokens < 85) & labels.known).sum(0)
    assert loss.counts.tolist() == labels.known.sum(0).tolist(), "accuracy is measured against the full vocabulary"
    assert (inside < loss.counts).any()
    assert (loss.hits[:, -1] <= inside).all()
    with torch.no_grad():
        tokens = first_draft(llama, drafter).tokens
    assert tokens.min() >= 45
    assert tokens.max() < 85
    with pytest.raises(ValueError, match="the target has 90 tokens"):
        drafter.choose_draft_vocabulary(counts[:5])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_drafter_returns_its_input_feature(kind, family):
    drafter = build_drafter(parse_drafter({"kind": kind}), family).double()
    ids = torch.tensor([PROMPTS[2]])
    hidden, features = family.hidden_states(ids, drafter.feature_layers)
    expected = hidden[0] if features is None else features[0, :, -family.hidden_size :]
    fused = hidden[0] if features is None else drafter.fuse(features)[0]
    assert torch.allclose(slow_layer(drafter, family, family.embed_tokens(ids[0]), fused), expected)


@torch.no_grad()
def test_a_fresh_drafter_with_last_layer_weights_gives_the_targets_logits(family):
    drafter = build_drafter(parse_drafter({"kind": "eagle3", "feature_layers": [2, 6]}), family).double()
    last = decoder_layers(family.model)[-1]
    # fresh weights of these two add nothing
    drafter.layer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
    drafter.layer.mlp.down_proj.load_state_dict(last.mlp.down_proj.state_dict())
    # of each pair (embedding, feature), attention reads the feature only
    drafter.layer.self_attn.q_proj.weight[:, :HIDDEN] = 0
    drafter.layer.self_attn.k_proj.weight[:, :HIDDEN] = 0
    drafter.layer.self_attn.v_proj.weight[:, :HIDDEN] = 0
    ids = torch.tensor([PROMPTS[2]])
    _, features = family.hidden_states(ids, drafter.feature_layers)
    outputs = slow_layer(drafter, family, family.embed_tokens(ids[0]), drafter.fuse(features)[0])
    # fresh weights are float32
    assert torch.allclose(drafter.logits(outputs), family.model(ids).logits[0], atol=1e-5)
    random = build_drafter(parse_drafter({"kind": "eagle3", "init": "random"}), family)
    assert not torch.allclose(random.lm_head.weight.double(), family.head.weight, atol=0.01)


@pytest.mark.parametrize(("num_layers", "expected"), [(1, [0]), (2, [0, 1]), (4, [1, 2]), (8, [2, 4, 5]), (32, [2, 16, 29])])
def test_the_default_features_are_an_early_a_middle_and_a_late_layers(num_layers, expected):
    assert default_feature_layers(num_layers) == expected


@pytest.mark.parametrize("kind", [*KINDS, "block"])
@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("OPT", {"word_embed_proj_dim": 32}, "don't consist of attention"),
        ("Olmo2", {}, "don't consist of attention"),
        ("Phi3", {}, "don't consist of attention"),
        ("GPTNeoX", {"num_key_value_heads": None}, "don't consist of attention"),
        (
            "Qwen3Moe",
            {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "don't consist of attention",
        ),
        ("Olmo", {}, "norms without weights"),
        ("Granite", {"residual_multiplier": 0.5}, "scale their residual stream"),
    ],
)
def test_targets_with_unsupported_layers_are_an_error(kind, architecture, options, message, tiny_tokenizer):
    with pytest.raises(ValueError, match=message):
        build_drafter(parse_drafter({"kind": kind}), make_target(architecture, tiny_tokenizer, **options))


def test_eagle_refuses_a_target_that_scales_its_logits(tiny_tokenizer):
    target = make_target("Granite", tiny_tokenizer, logits_scaling=2.0)
    with pytest.raises(ValueError, match="caps or scales its logits"):
        build_drafter(parse_drafter({"kind": "eagle"}), target)
    assert isinstance(build_drafter(parse_drafter({"kind": "eagle3"}), target), Eagle3)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("eagle", {"feature_noise": -0.1}, "feature_noise=-0.1: must be at least 0"),
        ("eagle", {"feature_noise": math.nan}, "feature_noise=NaN: must be a"),
        ("eagle3", {"top_k": 0}, "top_k=0: must be above 0"),
        ("eagle3", {"top_k": 1000}, "is a mistake"),
        ("eagle", {"init": "mine"}, "must be one of random, target"),
        ("eagle3", {"init": "mine"}, "must be one of random, target"),
        ("eagle3", {"draft_vocab_size": 91}, "more than the target's 90 tokens"),
        ("eagle3", {"feature_layers": [1, 1]}, "same value twice"),
        ("eagle3", {"feature_layers": []}, "must not be empty"),
        ("eagle3", {"feature_layers": [7]}, "the layers 0 to 6"),
    ],
)
def test_impossible_options_of_eagle_are_named(kind, options, message, llama):
    with pytest.raises(ValueError, match=message):
        build_drafter(parse_drafter({"kind": kind, **options}), llama)
