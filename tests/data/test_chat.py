"""The assistant's mask, for templates with and without markers and two tokenizers."""

import copy

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from outrider.data.answers import MAX_TURNS, AnswerFinder
from outrider.data.chat import encode_prompt, use_chat_template
from outrider.data.conversations import Conversation, Turn
from outrider.data.examples import encode_conversations
from outrider.data.types import Example

VICUNA = (
    "{{ bos_token }}{{ 'A chat. ' }}{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
# The generation prompt opens a block that finished turns lack, so it is no prefix of them.
OPENED = CHATML.replace("<|im_start|>assistant\\n' }}{% endif %}", "<|im_start|>assistant\\n<think>\\n' }}{% endif %}")
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Text before and after an answer that the mask includes.
AROUND = {
    VICUNA: (" ", "</s>"),
    CHATML: ("", "<|im_end|>"),
    LLAMA2: (" ", " </s>"),
    MISTRAL: ("", "</s>"),
    MARKED: ("", "<|im_end|>"),
    OPENED: ("", "<|im_end|>"),
}
ANSWERS = ["Hello there.", "def f(x):\n    return x  # 1 ü 你好 🙂", "a", "3 apples\n\n- one", "assistant"]


@pytest.fixture(scope="session")
def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Build a tokenizer like Llama's and Vicuna's.

    A space is a part of the next word, as U+2581, and unknown characters become bytes.
    """
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(
        ["Hello there. def return apples one assistant ASSISTANT USER A chat. [INST] [/INST]"], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def conversation(*texts: str, id: str = "c") -> Conversation:
    roles = ("user", "assistant")
    return Conversation(id=id, turns=tuple(Turn(role=roles[i % 2], content=text) for i, text in enumerate(texts)))


def chat(answers: list[str]) -> Conversation:
    return conversation(*(text for index, answer in enumerate(answers) for text in (f"Question {index}?", answer)))


def runs(example: Example) -> list[list[int]]:
    """List the token ids of every contiguous run of the assistant's tokens."""
    all_runs: list[list[int]] = [[]]
    for token, is_assistant in zip(example.input_ids.tolist(), example.loss_mask.tolist(), strict=True):
        if is_assistant:
            all_runs[-1].append(token)
        elif all_runs[-1]:
            all_runs.append([])
    return [run for run in all_runs if run]


def encode(conversations: list[Conversation], tokenizer: PreTrainedTokenizerFast, max_length: int = 4096) -> list[Example]:
    return encode_conversations(conversations, finder(tokenizer), max_length)[0]


def finder(tokenizer: PreTrainedTokenizerFast) -> AnswerFinder:
    """Return a finder whose target stops at any of the end tokens of these templates."""
    vocabulary = tokenizer.get_vocab()
    return AnswerFinder(tokenizer, [vocabulary[token] for token in ("</s>", "<|im_end|>") if token in vocabulary])


@pytest.mark.parametrize("template", AROUND, ids=["vicuna", "chatml", "llama2", "mistral", "marked", "opened"])
@pytest.mark.parametrize("kind", ["tiny_tokenizer", "sentencepiece_like"])
def test_the_masked_tokens_are_the_answers_and_their_end_tokens(template, kind, request):
    tokenizer = with_template(request.getfixturevalue(kind), template)
    (example,) = encode([chat(ANSWERS)], tokenizer)
    before, after = AROUND[template]
    decoded = [tokenizer.decode(run) for run in runs(example)]
    expected = [before + answer + after for answer in ANSWERS]
    if kind == "sentencepiece_like":  # its decoder removes the first space
        decoded, expected = [text.strip() for text in decoded], [text.strip() for text in expected]
    assert decoded == expected
    text = tokenizer.apply_chat_template(
        [{"role": turn.role, "content": turn.content} for turn in chat(ANSWERS).turns], tokenize=False
    )
    assert example.input_ids.tolist() == tokenizer(text, add_special_tokens=False).input_ids


def test_an_answer_that_begins_with_a_space_is_kept_under_trimmed_offsets(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """transformers' mask ends at the first answer whose first character no token covers."""
    tokenizer = with_template(tiny_tokenizer, MARKED)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    turns = [" Hello", "fine"]
    (example,) = encode([chat(turns)], tokenizer)
    assert [tokenizer.decode(run).strip() for run in runs(example)] == ["Hello<|im_end|>", "fine<|im_end|>"]
    messages = [{"role": turn.role, "content": turn.content} for turn in chat(turns).turns]
    theirs = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    assert sum(theirs["assistant_masks"]) < example.loss_mask.sum()


def test_the_vicuna_template_has_the_prompt_of_its_training(sentencepiece_like: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(sentencepiece_like)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template; set data.chat_template.*vicuna_v1.1"):
        encode([chat(ANSWERS)], tokenizer)
    use_chat_template(tokenizer, "vicuna_v1.1")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Bye"}]
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"<s>{system} USER: Hi ASSISTANT: Yes.</s>USER: Bye ASSISTANT:"
    with_system = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, *messages[:2]], tokenize=False)
    assert with_system == "<s>Be brief. USER: Hi ASSISTANT: Yes.</s>"
    (example,) = encode([chat(ANSWERS)], tokenizer)
    assert [tokenizer.decode(run).strip() for run in runs(example)] == [f"{answer}</s>" for answer in ANSWERS]
    without_markers = tokenizer.chat_template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    tokenizer.chat_template = without_markers
    (located,) = encode([chat(ANSWERS)], tokenizer)
    assert torch.equal(located.loss_mask, example.loss_mask)


def test_a_chat_template_is_a_file_a_name_or_the_tokenizers_own(tiny_tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    use_chat_template(tokenizer, None)
    assert tokenizer.chat_template == tiny_tokenizer.chat_template
    (tmp_path / "own.jinja").write_text(CHATML)
    use_chat_template(tokenizer, str(tmp_path / "own.jinja"))
    assert tokenizer.chat_template == CHATML
    with pytest.raises(ValueError, match=r"data.chat_template is 'vicuna'; give the path .*vicuna_v1.1"):
        use_chat_template(tokenizer, "vicuna")
    with pytest.raises(ValueError, match=r"to turn thinking off, set data.template_options=\{enable_thinking: false\}"):
        use_chat_template(tokenizer, "qwen3_no_thinking")


def test_a_template_without_assistant_tokens_is_an_error(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Training without any label would look like normal training with a loss of 0."""
    empty = MARKED.replace("{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}{{ m.content }}")
    tokenizer = with_template(tiny_tokenizer, empty)
    with pytest.raises(ValueError, match=r"none of 3 conversations has a token.*begins.*3 x no token of the assist"):
        encode([chat(ANSWERS)] * 3, tokenizer)
    tokenizer.chat_template = CHATML.replace("m.content", "m.content | upper")
    with pytest.raises(ValueError, match=r"2 x the chat template changes the answers"):
        encode([chat(ANSWERS)] * 2, tokenizer)


def test_conversations_that_a_template_rejects_or_cuts_are_counted(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(tiny_tokenizer, MISTRAL)
    turns = (Turn(role="user", content="a"), Turn(role="user", content="b"), Turn(role="assistant", content="c"))
    conversations = [
        conversation("Hi", "Yes.", id="good"),
        Conversation(id="two questions", turns=turns),
        conversation("long " * 100, "answer", id="long question"),
        conversation("no answer", id="no answer"),
        conversation("Hi", "long " * 100, "and?", "cut off", id="long answer"),
    ]
    examples, dropped = encode_conversations(conversations, finder(tokenizer), 64)
    assert [example.id for example in examples] == ["good", "long answer"]
    assert len(examples[1].input_ids) == 64
    assert examples[1].loss_mask[-1]
    assert dropped == {
        "rejected by the chat template (roles must alternate)": 1,
        "no token of the assistant within max_length 64": 1,
        "no assistant turn": 1,
    }


def test_an_error_for_examples_that_are_all_cut_names_max_length(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(tiny_tokenizer, CHATML)
    with pytest.raises(ValueError, match=r"data\.max_length is 5.*2 of 2.*raise data\.max_length") as caught:
        encode([conversation("a long question", "Yes.")] * 2, tokenizer, 5)
    assert "template" not in str(caught.value)


def test_turns_after_the_last_answer_are_left_out(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(tiny_tokenizer, CHATML)
    (cut,), (whole,) = encode([conversation("Hi", "Yes.", "And?")], tokenizer), encode([conversation("Hi", "Yes.")], tokenizer)
    assert torch.equal(cut.input_ids, whole.input_ids)


def test_batches_of_conversations_keep_their_order(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("outrider.data.examples.BATCH_SIZE", 3)
    conversations = [conversation(f"Question {index}", f"Answer {index}", id=str(index)) for index in range(8)]
    examples = encode(conversations, tiny_tokenizer)
    assert [example.id for example in examples] == [str(index) for index in range(8)]
    for index, example in enumerate(examples):
        assert [tiny_tokenizer.decode(run) for run in runs(example)] == [f"Answer {index}<|end|>"]


def test_a_conversation_of_very_many_turns_is_dropped_at_once(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Each answer renders the text before it: 50,000 answers took hours."""
    tokenizer = with_template(tiny_tokenizer, CHATML)
    endless = conversation(*["Hi", "Yes."] * 50_000, id="endless")
    examples, dropped = encode_conversations([conversation("Hi", "Yes.", id="good"), endless], finder(tokenizer), 64)
    assert [example.id for example in examples] == ["good"]
    assert dropped == {f"more than {MAX_TURNS} turns": 1}


@pytest.mark.parametrize("template", [VICUNA, LLAMA2], ids=["vicuna", "llama2"])
def test_an_answer_starts_where_its_prompt_ends(template: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Otherwise the drafter would be trained on other positions than it drafts at."""
    tokenizer = with_template(tiny_tokenizer, template)
    turns = chat(ANSWERS).turns
    (example,) = encode([chat(ANSWERS)], tokenizer)
    for last in range(1, len(turns), 2):
        prompt = encode_prompt(turns[:last], tokenizer)
        length = prompt.shape[1]
        assert torch.equal(prompt[0], example.input_ids[:length])
        assert not example.loss_mask[length - 1]
        assert example.loss_mask[length]
