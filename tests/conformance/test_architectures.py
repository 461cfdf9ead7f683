"""Tree decoding with transformers' architectures: tokens of full forwards, or an error."""

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from outrider.data.types import DrafterBatch
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.oracle import OracleDrafter
from outrider.models.llm.hf_target import HFTarget
from outrider.train.batches import states_of_texts

from ..decoded import texts_of
from ..tiny_models import IDENTITY

VOCAB = 100
WINDOW = 6
"""Sliding window, shorter than every prompt and answer so that it matters."""
NUM_NEW = 10
PROMPTS = [list(range(3, 12)), [50, 51, 52, 53, 54, 55, 56], [97, 3, 14, 15, 92, 65, 35, 89, 79, 32, 38]]

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GQA = {**SMALL, "num_key_value_heads": 2}
ALTERNATING = {
    **GQA,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Architecture, configuration, attention implementations that can read a tree.
BOTH = ("sdpa", "eager")
CASES = {
    "llama-gqa": ("Llama", GQA, BOTH),
    "llama-mha-tied": ("Llama", {**SMALL, "tie_word_embeddings": True}, BOTH),
    "llama-rope-scaling": ("Llama", {**GQA, "rope_parameters": LLAMA3_ROPE}, BOTH),
    "mistral-full": ("Mistral", {**GQA, "sliding_window": None}, BOTH),
    "mistral-window": ("Mistral", {**GQA, "sliding_window": WINDOW}, BOTH),
    "qwen2": ("Qwen2", GQA, BOTH),
    "qwen2-mixed-window": (
        "Qwen2",
        {**GQA, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        BOTH,
    ),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 8}, BOTH),
    "gemma": ("Gemma", {**GQA, "head_dim": 8}, BOTH),
    "gemma2": ("Gemma2", {**ALTERNATING, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, ("eager",)),
    "gemma3": ("Gemma3", ALTERNATING, BOTH),
    "phi3": ("Phi3", {**GQA, "sliding_window": None}, BOTH),
    "phi3-window": ("Phi3", {**GQA, "sliding_window": WINDOW}, BOTH),
    "olmo2": ("Olmo2", GQA, BOTH),
    "gpt-neox": ("GPTNeoX", SMALL, BOTH),
    "opt": ("OPT", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}, BOTH),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}, BOTH),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2}, BOTH),
    "qwen3-moe": ("Qwen3Moe", {**GQA, **MOE, "head_dim": 8, "num_experts": 4}, BOTH),
    "granite": ("Granite", {**GQA, "logits_scaling": 2.0}, BOTH),
    "cohere": ("Cohere", {**GQA, "logit_scale": 0.5}, BOTH),
    "starcoder2-window": ("Starcoder2", {**GQA, "sliding_window": WINDOW}, BOTH),
}


QUICK_EAGER = {"gemma2", "mistral-window"}
"""Cases that are quick tests with eager attention; all others are slow tests."""
EVERY_CASE = [
    pytest.param(case, kind, marks=[] if kind == "sdpa" or case in QUICK_EAGER else pytest.mark.slow)
    for case, (_, _, kinds) in CASES.items()
    for kind in kinds
]


def make_model(architecture: str, options: dict[str, object], attention: str) -> PreTrainedModel:
    suffix = "TextConfig" if architecture == "Gemma3" else "Config"
    config = getattr(transformers, architecture + suffix)(**options)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    suffix = "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"
    return randomise(getattr(transformers, architecture + suffix)(config), attention)


def randomise(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Set weights so large that every parameter changes the output."""
    torch.manual_seed(0)
    model = model.double().eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.3)
    model.set_attn_implementation(attention)
    if "Experts" in repr(model):
        model.set_experts_implementation("eager")  # the others can't compute in float64
    return model


def adapt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> HFTarget:
    identity = replace(IDENTITY, hidden_size=32, vocab_size=VOCAB)
    return HFTarget(model, tokenizer, identity)


def full_forwards(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Decode greedily without cache, mask, or any code of ours."""
    text = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(NUM_NEW):
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return text[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("case", "attention"), EVERY_CASE)
def test_batches_of_trees_give_the_tokens_of_full_forwards(case, attention, tiny_tokenizer):
    architecture, options, _ = CASES[case]
    model = make_model(architecture, options, attention)
    expected = [full_forwards(model, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 1, "the model answers all prompts alike"
    adapter = adapt(model, tiny_tokenizer)
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    for drafter in (NullDrafter(), OracleDrafter(expected, [0, 1, 0], VOCAB), OracleDrafter(expected, [2, 3, 2], VOCAB)):
        steps = list(generate(adapter, drafter, GreedyAcceptance(), prompts, max_new_tokens=NUM_NEW))
        assert texts_of(steps, len(prompts)) == expected
        has_accepted = any(any(step.num_accepted) for step in steps)
        assert has_accepted == isinstance(drafter, OracleDrafter), "the oracle's drafts weren't the model's tokens"


@pytest.mark.parametrize(("case", "attention"), EVERY_CASE)
def test_states_of_padded_rows_equal_those_of_each_text_alone(case, attention, tiny_tokenizer):
    """Some windows are shorter than the padding: there, masked eager attention gives NaN."""
    architecture, options, _ = CASES[case]
    adapter = adapt(make_model(architecture, options, attention), tiny_tokenizer)
    texts = [torch.tensor(tokens) for tokens in (PROMPTS[0] * 2, PROMPTS[1], PROMPTS[2])]
    input_ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    real = torch.arange(input_ids.shape[1]) < torch.tensor([[len(text)] for text in texts])
    batch = DrafterBatch(
        input_ids=input_ids,
        attention_mask=real,
        positions=torch.zeros_like(real),
        continuations=torch.zeros(*real.shape, 2, dtype=torch.long),
    )
    last, features = states_of_texts(adapter, batch, last=True, layers=(1,))
    for row, text in enumerate(texts):
        with torch.no_grad():
            alone, inputs = adapter.read_texts((1,), input_ids=text[None])
        # eager attention computes its weights in float32
        for padded, expected in ((last, alone), (features, inputs)):
            torch.testing.assert_close(padded[row, : len(text)], expected[0], rtol=1e-3, atol=1e-4)


class OwnPositions(LlamaForCausalLM):
    """Model that ignores position ids; its configuration doesn't show this."""

    def forward(self, input_ids, position_ids=None, **options):
        return super().forward(input_ids, **options)


def refused_model(case: str) -> PreTrainedModel:
    if case == "alibi":
        return make_model("Bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 1, "n_head": 4}, "eager")
    if case == "softcap":
        model = make_model("Gemma2", ALTERNATING, "eager")
        model.config._attn_implementation = "sdpa"  # transformers today raises when it is set
        return model
    if case == "longrope":
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        return make_model("Llama", {**GQA, "rope_parameters": {**rope, "original_max_position_embeddings": 20}}, "eager")
    if case == "columns":
        options = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 16}
        return make_model("GPTNeo", {**options, "attention_types": [[["global", "local"], 1]]}, "eager")
    if case == "column numbers":
        return make_model("Doge", {**GQA, "keep_window_size": 8}, "eager")
    if case == "encoder-decoder":
        sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
        return make_model("Bart", {"vocab_size": VOCAB, **sizes}, "eager")
    if case == "damaged":
        model = make_model("Llama", GQA, "eager")
        model.model.norm.weight.data[0] = float("nan")
        return model
    return randomise(OwnPositions(LlamaConfig(**GQA)), "eager")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("alibi", "ALiBi"),
        ("softcap", "set target.attn_implementation to eager"),
        ("longrope", "chooses its rotary frequencies \\(longrope\\)"),
        ("columns", "cuts windows by cache column"),
        ("own positions", "reads a draft tree differently from plain texts"),
        ("column numbers", "cache columns that it reads by their number"),
        ("encoder-decoder", "own code in transformers failed"),
        ("damaged", "are not all numbers"),
    ],
)
def test_models_that_read_trees_wrongly_are_an_error(case, message, tiny_tokenizer):
    adapter = adapt(refused_model(case), tiny_tokenizer)
    with pytest.raises(ValueError, match=message):
        list(generate(adapter, NullDrafter(), GreedyAcceptance(), torch.tensor([PROMPTS[0]]), max_new_tokens=4))


@pytest.mark.parametrize("case", ["opt", "gpt2"])
def test_no_tree_reads_past_the_end_of_learned_positions(case, tiny_tokenizer):
    architecture, options, _ = CASES[case]
    length = "n_positions" if case == "gpt2" else "max_position_embeddings"
    model = make_model(architecture, {**options, length: len(PROMPTS[0]) + 8}, "sdpa")
    adapter = adapt(model, tiny_tokenizer)
    prompts = [torch.tensor(prompt) for prompt in PROMPTS[:2]]
    answers = {}
    for drafter in (NullDrafter(), None):
        drafter = drafter or OracleDrafter(answers[NullDrafter], [3, 2], VOCAB)
        steps = generate(adapter, drafter, GreedyAcceptance(), prompts, max_new_tokens=40)
        answers[type(drafter)] = texts_of(steps, len(prompts))
    assert [len(tokens) for tokens in answers[NullDrafter]] == [8, 10], "the window is full"
    assert answers[OracleDrafter] == answers[NullDrafter]
