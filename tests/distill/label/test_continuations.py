"""Labels, against naive greedy decoding with a full forward pass per token."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from outrider.data.types import UNKNOWN
from outrider.distill.label import branch_attention, next_tokens
from outrider.distill.label.branch_attention import BranchCache
from outrider.distill.label.continuations import label_continuations, require_branch_attention, require_labels
from outrider.models.llm.hf_target import HFTarget

from ...host_reads import HostReads, ScalarReads
from ...models.llm import test_probe
from ...tiny_models import IDENTITY

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama_gqa": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=1)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
}
MakeTarget = Callable[..., HFTarget]
LENGTHS = (40, 23, 1, 31)


@pytest.fixture
def make_target(tiny_tokenizer: PreTrainedTokenizerFast) -> MakeTarget:
    """Return a function that makes a target from a name of MODELS or from a model."""

    def make(model: str | PreTrainedModel, stop_ids: list[int] | None = None) -> HFTarget:
        if isinstance(model, str):
            torch.manual_seed(1)
            model = MODELS[model]()
        model = model.eval().requires_grad_(False)
        model.generation_config.eos_token_id = stop_ids
        config = model.config
        identity = replace(IDENTITY, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
        return HFTarget(model, tiny_tokenizer, identity)

    return make


@torch.no_grad()
def naive(target: HFTarget, text: torch.Tensor, horizon: int) -> list[int]:
    """Decode the greedy continuation of `text`, with UNKNOWN after a stop token."""
    tokens: list[int] = []
    while len(tokens) < horizon:
        token = int(target.model(torch.cat([text, text.new_tensor(tokens)])[None], use_cache=False).logits[0, -1].argmax())
        tokens.append(token)
        if token in target.stop_ids:
            break
    return tokens + [UNKNOWN] * (horizon - len(tokens))


def self_written_texts(target: HFTarget) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make right-padded texts, their mask, and wanted positions with gaps.

    About half of the tokens are those that the target would generate.
    """
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    attention_mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    for row, length in enumerate(LENGTHS):
        for i in range(length):
            random_token = int(torch.randint(VOCAB, (), generator=generator))
            follow = i > 0 and float(torch.rand((), generator=generator)) < 0.6
            input_ids[row, i] = naive(target, input_ids[row, :i], 1)[0] if follow else random_token
    wanted = attention_mask & (torch.rand(attention_mask.shape, generator=generator) < 0.8)
    wanted[2, 0] = True  # the text of one token
    wanted[1, LENGTHS[1] - 1] = True  # a last token, with no next one to compare
    return input_ids, attention_mask, wanted


def assert_labels_are_naive(target: HFTarget, input_ids: torch.Tensor, wanted: torch.Tensor, labels: torch.Tensor) -> None:
    visited = 0
    for row, i in wanted.nonzero().tolist():
        assert labels[row, i].tolist() == naive(target, input_ids[row, : i + 1], labels.shape[2]), (row, i)
        visited += 1
    assert visited == wanted.sum() > 0
    assert (labels[~wanted] == UNKNOWN).all()


@pytest.mark.parametrize(("architecture", "horizon"), [("llama_gqa", 1), ("llama_gqa", 5), ("qwen2", 5), ("gpt_neox", 5)])
def test_labels_equal_naive_greedy_decoding_with_less_work(make_target: MakeTarget, architecture: str, horizon: int) -> None:
    target = make_target(architecture)
    require_branch_attention(target, 45)
    input_ids, attention_mask, wanted = self_written_texts(target)
    labels, _, stats = label_continuations(target, input_ids, attention_mask, wanted, horizon=horizon)
    assert_labels_are_naive(target, input_ids, wanted, labels)
    agrees = (labels[:, :-1, 0] == input_ids[:, 1:]) & attention_mask[:, 1:] & wanted[:, :-1]
    assert stats.num_agreeing == agrees.sum()
    assert 0.3 < stats.agreement < 0.9
    assert stats.num_positions == wanted.sum()
    assert stats.num_branch_tokens < (horizon - 1) * stats.num_positions or stats.num_branch_tokens == horizon - 1 == 0


def test_branches_end_at_stop_tokens_that_stay_labels(make_target: MakeTarget) -> None:
    plain = make_target("llama")
    input_ids, attention_mask, wanted = self_written_texts(plain)
    labels, _, _ = label_continuations(plain, input_ids, attention_mask, wanted, horizon=5)
    # Two tokens that the target often generates, so that branches stop at every depth.
    stop_ids = labels[labels != UNKNOWN].bincount().topk(2).indices.tolist()
    target = make_target("llama", stop_ids)
    assert target.stop_ids == tuple(stop_ids)
    stopped, _, _ = label_continuations(target, input_ids, attention_mask, wanted, horizon=5)
    assert_labels_are_naive(target, input_ids, wanted, stopped)
    depths = (torch.isin(stopped, torch.tensor(stop_ids))).nonzero()[:, 2].unique()
    assert depths.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("horizon", [2, 5])
def test_labelling_waits_once_for_a_further_token_also_where_branches_end(make_target: MakeTarget, horizon: int) -> None:
    texts = self_written_texts(make_target("llama"))
    labels, _, _ = label_continuations(make_target("llama"), *texts, horizon=5)
    target = make_target("llama", labels[labels != UNKNOWN].bincount().topk(2).indices.tolist())
    with HostReads() as reads, ScalarReads() as scalars:
        label_continuations(target, *texts, horizon=horizon, top_k=3)
    # The texts, the first tokens, and the further tokens except the last one.
    assert [name for name in reads.names if name != "numpy"] == ["cpu"] * (2 + max(0, horizon - 2))
    assert scalars.count == 0


def test_a_branch_is_decoded_no_deeper_than_needed(make_target: MakeTarget) -> None:
    """For a text that the target generated, only tokens after its end must be decoded.

    Each position to the left needs one token less.
    """
    target = make_target("llama")
    start = torch.tensor([5, 9, 11])
    text = torch.cat([start, torch.tensor(naive(target, start, 6))])[None]
    wanted = torch.zeros_like(text, dtype=torch.bool)
    wanted[0, 2:6] = True
    labels, _, stats = label_continuations(target, text, torch.ones_like(wanted), wanted, horizon=4)
    assert_labels_are_naive(target, text, wanted, labels)
    assert stats.agreement == 1
    # Labels of earlier positions reuse the first tokens of positions 5, 6, 7. Position 8 is the
    # last one; only its first token is needed, and the prefill gives it.
    assert stats.num_branch_tokens == 0


def test_no_wanted_position_gives_no_label_and_no_branch(make_target: MakeTarget) -> None:
    target = make_target("qwen2")
    input_ids = torch.arange(6).view(2, 3)
    no_positions = torch.zeros(2, 3, dtype=torch.bool)
    labels, features, stats = label_continuations(target, input_ids, ~no_positions, no_positions, horizon=3, top_k=2)
    assert (labels == UNKNOWN).all()
    assert (features.top_tokens == UNKNOWN).all()
    assert (features.top_log_probs == -torch.inf).all()
    assert stats.num_positions == stats.num_branch_tokens == stats.agreement == 0
    torch.testing.assert_close(features.hidden_states, target.hidden_states(input_ids)[0])


def test_small_segments_chunked_heads_and_plain_operations_change_nothing(make_target, monkeypatch):
    target = make_target("llama_gqa")
    input_ids, attention_mask, wanted = self_written_texts(target)
    labels, features, _ = label_continuations(target, input_ids, attention_mask, wanted, horizon=4, top_k=3)
    monkeypatch.setattr(branch_attention, "SEGMENT_QUERIES", 3)
    monkeypatch.setattr(branch_attention, "has_kernel", lambda query, value: False)
    monkeypatch.setattr(next_tokens, "LOGIT_ELEMENTS", 7 * VOCAB)
    again, features_again, _ = label_continuations(target, input_ids, attention_mask, wanted, horizon=4, top_k=3)
    assert torch.equal(labels, again)
    assert torch.equal(features.top_tokens, features_again.top_tokens)
    torch.testing.assert_close(features.top_log_probs, features_again.top_log_probs)


def test_the_models_attention_is_restored_after_an_error(make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("llama")
    before = target.model.config._attn_implementation

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(branch_attention.BranchCache, "attend", fail)
    text = torch.arange(8)[None]
    everywhere = torch.ones_like(text, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="out of memory"):
        label_continuations(target, text, everywhere, everywhere, horizon=2)
    assert target.model.config._attn_implementation == before == "sdpa"


def test_a_window_that_branches_ignore_is_found(make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=32)
    target = make_target(MistralForCausalLM(config))
    require_branch_attention(target, 45)
    monkeypatch.setattr(BranchCache, "_segments", lambda self, window, step: self.segments)
    with pytest.raises(ValueError, match="decodes branches differently"):
        require_branch_attention(target, 45)


def test_a_target_that_mixes_tokens_outside_of_attention_is_an_error(make_target: MakeTarget) -> None:
    """A layer here mixes neighbouring tokens, as convolutional and recurrent layers do."""
    target = make_target("llama")
    layer = target.model.base_model.layers[1]
    layer.mlp.register_forward_hook(lambda module, inputs, output: output + output.roll(1, dims=1))
    with pytest.raises(ValueError, match="decodes branches differently"):
        require_branch_attention(target, 20)


@pytest.mark.parametrize("fills_the_cache", [True, False])
def test_a_layer_that_bypasses_the_attention_interface_is_refused(make_target: MakeTarget, fills_the_cache: bool) -> None:
    target = make_target("llama")
    attention = target.model.base_model.layers[1].self_attn
    forward = attention.forward

    def bypass(hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        if fills_the_cache and kwargs["past_key_values"] is not None:
            forward(hidden_states, **kwargs)
        return hidden_states, None

    attention.forward = bypass
    with pytest.raises(ValueError, match="AttentionInterface"):
        require_branch_attention(target, 20)


def test_a_target_that_ignores_keyword_arguments_is_an_error(make_target: MakeTarget) -> None:
    target = make_target("llama")
    base = target.model.base_model
    forward = base.forward
    base.forward = lambda *args, branches=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match="keyword arguments"):
        require_branch_attention(target, 20)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_special_tokens_that_were_hardly_trained_are_no_wrong_structure(noise: float) -> None:
    """Rounding changes their states by far more than those of ordinary tokens."""
    require_branch_attention(test_probe.make_target(torch.bfloat16, noise, special_noise=0.5), 32)


@pytest.mark.parametrize("kind", ["alibi", "softcap"])
def test_scores_that_branches_lack_are_an_error_in_a_narrow_type_too(kind: str, make_target: MakeTarget) -> None:
    """There the probe's tolerance is wide, and their effect on a few tokens small."""
    torch.manual_seed(0)
    if kind == "alibi":
        model: Any = MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=300, max_seq_len=256))
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**{**SIZES, "num_hidden_layers": 2}, head_dim=8, attn_logit_softcapping=50.0))
    with pytest.raises(ValueError, match="ALiBi" if kind == "alibi" else "caps its attention scores"):
        require_branch_attention(make_target(model.bfloat16()), 20)


def test_a_model_that_does_more_than_its_head_is_refused_along_the_text_too(make_target: MakeTarget) -> None:
    torch.manual_seed(0)
    config = BertConfig(**{**SIZES, "num_hidden_layers": 2}, is_decoder=True)
    target = make_target(BertLMHeadModel(config))
    for branches in (False, True):
        with pytest.raises(ValueError, match="does more than its output layer .* Choose another target"):
            require_labels(target, 20, 5, branches=branches)
    require_labels(make_target("llama"), 20, 5, branches=False)


def test_an_attention_that_fails_on_branches_is_an_error_with_its_remedy(make_target: MakeTarget) -> None:
    target = make_target("llama")
    attention = target.model.base_model.layers[1].self_attn
    forward = attention.forward

    def fail_on_branches(hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        if kwargs.get("branches") is not None:
            raise TypeError("unsupported operand")
        return forward(hidden_states, **kwargs)

    attention.forward = fail_on_branches
    with pytest.raises(
        ValueError, match="can't decode branches: its own code in transformers failed with them; set distill.branches=false"
    ):
        require_branch_attention(target, 20)
