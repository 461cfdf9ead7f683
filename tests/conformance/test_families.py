"""Families of transformers: draft trees, labels and hidden states, against full passes; or one clear error."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from outrider.cli.init_facts import is_recurrent
from outrider.data.types import DrafterBatch
from outrider.distill.label.continuations import label_continuations, require_branch_attention
from outrider.models.decoding import Prompts
from outrider.models.decoding.tree import accepted_path, chain_tree, empty_tree
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.oracle import OracleDrafter
from outrider.models.drafters.saved.build import build_drafter, parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.models.llm.recurrent_states import find_mixers
from outrider.train.batches import states_of_texts

from ..tiny_models import IDENTITY
from .families import ALONG_THE_TEXT, BRANCHES, EXPERTS, LATENT, PROMPTS, REFUSED, VOCAB, decode, make_family

NUM_NEW, HORIZON = 12, 4
NOT_COPIED = [
    *(("bailing_hybrid", kind, "don't consist of attention") for kind in ("eagle", "eagle3")),
    ("laguna", "eagle3", "attention of LagunaDecoderLayer has g_proj beside its usual projections"),
]
QUICK = {"gemma4_text", "gpt_oss", "deepseek_v3", "qwen3_5_text", "falcon_h1", "rwkv"}


def rows(*families: dict[str, object]) -> list[object]:
    names = [name for family in families for name in family]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@cache
def model_of(name: str) -> PreTrainedModel:
    return make_family(name)


def decode_naively(name: str, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Decode greedily without cache, mask, or any code of ours: all texts of one length in one pass."""
    texts, ends = [list(prompt) for prompt in prompts], [len(prompt) + num_new for prompt in prompts]
    for length in range(min(map(len, texts)), max(ends)):
        reading = [text for text, end in zip(texts, ends, strict=True) if len(text) == length < end]
        if reading:
            tokens = model_of(name)(torch.tensor(reading), use_cache=False).logits[:, -1].argmax(-1)
            for text, token in zip(reading, tokens.tolist(), strict=True):
                text.append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@cache
def answers_of(name: str) -> list[list[int]]:
    return decode_naively(name, PROMPTS, NUM_NEW)


@pytest.fixture
def target_of(tiny_tokenizer: PreTrainedTokenizerBase) -> Callable[[str], HFTarget]:
    def make(name: str) -> HFTarget:
        model = model_of(name)
        return HFTarget(model, tiny_tokenizer, replace(IDENTITY, hidden_size=32, vocab_size=VOCAB))

    return make


@pytest.mark.parametrize("name", rows(BRANCHES, ALONG_THE_TEXT))
def test_texts_trees_and_batches_give_the_tokens_of_full_passes(name, target_of):
    target = target_of(name)
    expected = answers_of(name)
    assert decode(target, NullDrafter(), PROMPTS[1:2], NUM_NEW) == (expected[1:2], 0)
    assert decode(target, NullDrafter(), PROMPTS, NUM_NEW) == (expected, 0)
    for right in ([2, 3, 0], [4, 4, 4]):  # rows that accept some, all or none, and rows that accept alike
        answers, num_accepted = decode(target, OracleDrafter(expected, right, VOCAB), PROMPTS, NUM_NEW)
        assert answers == expected
        assert num_accepted > 0


@torch.inference_mode()
@pytest.mark.parametrize("name", rows(BRANCHES, ALONG_THE_TEXT))
def test_texts_that_left_the_batch_resume(name, target_of):
    target = target_of(name)
    expected = torch.tensor(answers_of(name))
    chain = chain_tree(expected[[0, 2], 1:3])
    # 1. Two texts read their prompts and three tokens. Both leave.
    target.prefill(Prompts.of([torch.tensor(PROMPTS[row]) for row in (0, 2)]), max_new_tokens=NUM_NEW, max_nodes=2)
    target.verify(expected[[0, 2], 0], chain)
    target.commit(chain, accepted_path(chain, [[0, 1], [0, 1]]))
    kept = [target.take(1), target.take(0)]
    # 2. They come back beside a new text, and read on.
    target.resume(Prompts.of([torch.tensor(PROMPTS[1])]), kept, capacity=len(PROMPTS[2]) + NUM_NEW)
    order, places = [1, 2, 0], [0, 3, 3]
    for more in range(3):
        at = [place + more for place in places]
        tree = empty_tree(3, torch.device("cpu"))
        output = target.verify(expected[order, at], tree)
        assert output.logits[:, 0].argmax(-1).tolist() == expected[order, [place + 1 for place in at]].tolist()
        target.commit(tree, accepted_path(tree, [[]] * 3))


@pytest.mark.parametrize("name", rows(BRANCHES, ALONG_THE_TEXT))
def test_labels_are_those_of_naive_decoding(name, target_of):
    target = target_of(name)
    # 1. One text that is mostly the target's own, and one of random tokens.
    length, last = 20, 15
    own = [*PROMPTS[0], *answers_of(name)[0]][:length]
    other = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    texts = torch.tensor([own, other])
    wanted = torch.ones(2, length, dtype=torch.bool)
    wanted[1, last:] = False
    # 2. Labels of branches, or along the text.
    has_branches = name in BRANCHES
    if has_branches:
        require_branch_attention(target, length + HORIZON)
    else:
        with pytest.raises(ValueError, match=r"distill.branches=false"):
            require_branch_attention(target, length + HORIZON)
    labels, _, stats = label_continuations(target, texts, wanted, wanted, horizon=HORIZON, branches=has_branches)
    places = wanted.nonzero().tolist()
    expected = decode_naively(name, [texts[row, : column + 1].tolist() for row, column in places], HORIZON)
    lengths = []
    for (row, column), tokens in zip(places, expected, strict=True):
        label = [token for token in labels[row, column].tolist() if token >= 0]
        assert label == tokens[: len(label)]
        lengths.append(len(label))
    assert (stats.num_branch_tokens > 0) == has_branches
    assert min(lengths) == (HORIZON if has_branches else 1)
    assert max(lengths) == HORIZON


@pytest.mark.parametrize("name", rows(BRANCHES, ALONG_THE_TEXT))
def test_states_of_padded_texts_are_those_of_each_alone_and_drafters_read_them(name, target_of):
    target = target_of(name)
    texts = [torch.tensor(tokens) for tokens in (PROMPTS[0] * 2, PROMPTS[1], PROMPTS[2])]
    input_ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    real = torch.arange(input_ids.shape[1]) < torch.tensor([[len(text)] for text in texts])
    continuations = torch.zeros(*real.shape, 2, dtype=torch.long)
    batch = DrafterBatch(
        input_ids=input_ids, attention_mask=real, positions=torch.zeros_like(real), continuations=continuations
    )
    if name == "hy_v4":
        with pytest.raises(ValueError, match="several hidden states of each token"):
            states_of_texts(target, batch, last=True, layers=(1,))
        return
    last, features = states_of_texts(target, batch, last=True, layers=(1,))
    for row, text in enumerate(texts):
        alone, inputs = target.hidden_states(text[None], (1,))
        for padded, expected in ((last, alone), (features, inputs)):
            torch.testing.assert_close(padded[row, : len(text)], expected[0], rtol=1e-3, atol=1e-4)
    spec = parse_drafter({"kind": "eagle3", "init": "random", "layer": {"model_type": "llama"}, "depth": 3, "tree_nodes": 8})
    drafter = build_drafter(spec, target).double().eval()
    num_new = 4  # the features of the prompts, and of a few steps
    assert decode(target, drafter, PROMPTS, num_new)[0] == [tokens[:num_new] for tokens in answers_of(name)]


@pytest.mark.parametrize("name", rows(REFUSED))
def test_families_that_cant_read_trees_are_one_clear_error(name, target_of):
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        decode(target_of(name), NullDrafter(), PROMPTS[:1], NUM_NEW)


@pytest.mark.parametrize(("name", "attention"), [("gpt_oss", "eager"), ("exaone4_5", "sdpa"), ("qwen3_5_text", "sdpa")])
def test_a_folder_is_loaded_with_the_attention_that_its_family_has(name, attention, tmp_path):
    model_of(name).save_pretrained(tmp_path)
    target = load_target(TargetConfig(name_or_path=str(tmp_path), dtype="float32"), torch.device("cpu"), needs_tokenizer=False)
    assert target.model.config.get_text_config()._attn_implementation == attention
    assert type(target.model) is type(model_of(name))


@pytest.mark.parametrize("name", [*BRANCHES, *ALONG_THE_TEXT])
def test_a_configuration_says_whether_a_family_has_recurrent_layers(name, tmp_path):
    model = model_of(name)
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert is_recurrent(config | config.get("text_config", {})) == bool(find_mixers(model))


@pytest.mark.parametrize(("name", "kind", "message"), NOT_COPIED)
def test_layers_that_a_drafter_cant_copy_are_refused_by_name(name, kind, message, target_of):
    """The first layer has a state and the names of attention, or reads its input once more."""
    with pytest.raises(ValueError, match=message):
        build_drafter(parse_drafter({"kind": kind, "init": "random", "depth": 3, "tree_nodes": 8}), target_of(name))


def test_a_hybrid_without_recurrent_layers_is_labelled_with_branches() -> None:
    kinds = {"layer_types": ["full_attention"] * 2, "mamba_n_heads": 8}
    assert not is_recurrent(kinds)
    assert is_recurrent({**kinds, "layer_types": ["mamba", "full_attention"]})
    assert is_recurrent({"mamba_n_heads": 8})


def test_labels_of_a_family_with_a_cache_of_its_own_are_one_clear_error(target_of):
    with pytest.raises(ValueError, match="can't decode branches: its own code in transformers failed with them; set distill"):
        require_branch_attention(target_of("minimax"), 32)


def test_rotary_embeddings_of_complex_numbers_are_one_clear_error(tiny_tokenizer):
    options = EXPERTS | LATENT | {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v2", **options, num_attention_heads=4)).double().eval()
    )
    model.set_experts_implementation("eager")  # the others can't compute in float64
    target = HFTarget(model, tiny_tokenizer, replace(IDENTITY, hidden_size=32, vocab_size=VOCAB))
    drafter = build_drafter(parse_drafter({"kind": "mtp", "init": "random", "depth": 2, "tree_nodes": 4}), target).double()
    with pytest.raises(ValueError, match="DeepseekV2RotaryEmbedding rotates by complex numbers"):
        decode(target, drafter, PROMPTS[:1], NUM_NEW)
