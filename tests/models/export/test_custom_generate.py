"""`generate` of a packaged drafter against transformers' own, option by option."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from outrider.models.export.custom_generate import BOUND, bind, generate, rule_of

PROMPT = torch.tensor([[1, 70, 71, 72, 2]])
BATCH = torch.tensor([[0, 0, 9, 8, 7], [40, 41, 42, 43, 44], [0, 0, 0, 0, 70]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
KINDS = ("redrafter", "medusa", "eagle", "eagle3", "draft_model")


@pytest.fixture
def folder(package_dirs: dict[str, Path]) -> str:
    return str(package_dirs["draft_model"])  # whose drafts are accepted: several tokens come at once


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [{"input_ids": PROMPT}, {"input_ids": BATCH, "attention_mask": MASK}], ids=["one", "padded"])
def test_greedy_text_is_that_of_plain_generate(model, package_dirs, kind, inputs):
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    assert torch.equal(generate(model, drafter=str(package_dirs[kind]), **inputs, do_sample=False, max_new_tokens=20), plain)


def test_drafts_are_accepted_in_these_tests(model, folder):
    """Else all of them would hold for a drafter that is never asked."""
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    generate(model, drafter=folder, input_ids=PROMPT, max_new_tokens=2)  # it looks whether the model can read trees
    calls.clear()
    tokens = generate(model, drafter=folder, input_ids=PROMPT, max_new_tokens=20)
    assert tokens.shape[1] == 25
    assert len(calls) < 8


def test_a_row_that_stops_is_padded_as_transformers_pads_it(model, folder):
    """Stop tokens in the middle of an accepted path, other rows going on."""
    free = model.generate(input_ids=BATCH, attention_mask=MASK, max_new_tokens=20)
    stop = int(free[0, 8])  # the first row's fourth new token
    options = {"input_ids": BATCH, "attention_mask": MASK, "eos_token_id": [stop, 299], "pad_token_id": 0, "max_new_tokens": 20}
    plain = model.generate(**options)
    assert (plain == 0).sum() > (BATCH == 0).sum()
    assert torch.equal(generate(model, drafter=folder, **options), plain)


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 11},
        {},  # transformers' own default, of 20 tokens
        {"generation_config": GenerationConfig(max_new_tokens=7, do_sample=False)},
        {"max_new_tokens": 1},
    ],
)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_lengths_are_those_that_were_asked_for(model, folder, options):
    plain = model.generate(input_ids=PROMPT, **options)
    assert torch.equal(generate(model, drafter=folder, input_ids=PROMPT, **options), plain)


def test_a_dictionary_is_returned_where_it_is_asked_for(model, folder):
    output = generate(model, drafter=folder, input_ids=PROMPT, max_new_tokens=5, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(input_ids=PROMPT, max_new_tokens=5))


class StopsAfter(StoppingCriteria):
    """Ends each row with its first token that is divisible by a number."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % self.divisor == 0


def test_stopping_criteria_end_rows_within_an_accepted_path(model, folder):
    options = {"input_ids": BATCH, "attention_mask": MASK, "max_new_tokens": 30, "pad_token_id": 0}
    criteria = StoppingCriteriaList([StopsAfter(4)])
    plain = model.generate(**options, stopping_criteria=criteria)
    assert plain.shape[1] < 35
    assert torch.equal(generate(model, drafter=folder, **options, stopping_criteria=criteria), plain)


def test_stop_strings_end_where_transformers_ends(model, folder, tiny_tokenizer):
    free = model.generate(input_ids=PROMPT, max_new_tokens=20)
    text = next(text for token in free[0, 6:] if (text := tiny_tokenizer.decode([token])).isascii() and text.isprintable())
    options = {"input_ids": PROMPT, "max_new_tokens": 20, "stop_strings": [text], "tokenizer": tiny_tokenizer}
    plain = model.generate(**options)
    assert plain.shape[1] < 25
    assert torch.equal(generate(model, drafter=folder, **options), plain)
    config = {"generation_config": GenerationConfig(max_new_tokens=20, stop_strings=[text]), "tokenizer": tiny_tokenizer}
    assert torch.equal(generate(model, drafter=folder, input_ids=PROMPT, **config), plain)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_what_plain_generate_gives_it(model, folder):
    plain, own = Recorder(), Recorder()
    model.generate(input_ids=PROMPT, max_new_tokens=9, streamer=plain)
    generate(model, drafter=folder, input_ids=PROMPT, max_new_tokens=9, streamer=own)
    assert own.values == plain.values
    assert own.ended


# --- sampling


def test_a_seed_makes_a_text_that_neither_neighbours_nor_drafter_change(model, package_dirs):
    def sample(kind: str, **inputs: Any) -> list[list[int]]:
        options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "max_new_tokens": 12, "seed": 5}
        return generate(model, drafter=str(package_dirs[kind]), **inputs, **options)[:, 5:].tolist()

    batch = sample("draft_model", input_ids=BATCH, attention_mask=MASK)
    assert batch == sample("medusa", input_ids=BATCH, attention_mask=MASK)
    assert sample("draft_model", input_ids=BATCH[:1], attention_mask=MASK[:1]) == batch[:1]
    assert len({tuple(row) for row in batch}) == 3


def test_sampling_repeats_with_the_same_generator_or_global_seed(model, folder):
    options = {"input_ids": PROMPT, "do_sample": True, "max_new_tokens": 12}
    first, second = (generate(model, drafter=folder, **options, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        third = generate(model, drafter=folder, **options)
        del vars(model)[BOUND]  # loading the drafter draws nothing
        torch.manual_seed(3)
        assert torch.equal(generate(model, drafter=folder, **options), third)
    with pytest.raises(ValueError, match="a seed and a generator"):
        generate(model, drafter=folder, **options, seed=1, generator=torch.Generator())


def test_the_distribution_that_is_sampled_is_transformers_own(model):
    """Its processors in their order, among them the top_k of 50 that it has by default."""
    seen = {}

    def spy(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        seen["rule"] = rule_of(generation_config, logits_processor)
        return input_ids

    model.generate(input_ids=PROMPT, max_new_tokens=2, do_sample=True, temperature=0.5, top_p=0.8, custom_generate=spy)
    sampling = seen["rule"].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 50, 0.8)


def test_several_samples_of_a_prompt_are_different(model, folder):
    rows = generate(model, drafter=folder, input_ids=PROMPT, do_sample=True, num_return_sequences=3, max_new_tokens=12, seed=0)
    assert rows.shape[0] == 3
    assert len({tuple(row) for row in rows.tolist()}) == 3


# --- what can't be honoured


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"repetition_penalty": 1.2}, r"RepetitionPenaltyLogitsProcessor.*repetition_penalty=1.0"),
        ({"min_new_tokens": 3}, "MinLengthLogitsProcessor"),
        ({"do_sample": True, "min_p": 0.1}, "MinPLogitsWarper"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        ({"prompt_lookup_num_tokens": 3}, "options of assisted generation"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"input_ids": BATCH.flip(1), "attention_mask": MASK.flip(1)}, "pad on the left"),
        ({"input_ids": BATCH, "attention_mask": MASK, "streamer": Recorder()}, "a streamer takes one text"),
        ({"drafter_options": {"num_layers": 5}}, "num_layers can't be changed"),
        ({"stop_strings": ["a"]}, "give generate the tokenizer"),
    ],
)
def test_what_cant_be_honoured_is_refused_by_name(model, folder, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, drafter=folder, **{"input_ids": PROMPT, "max_new_tokens": 5, "eos_token_id": 299, **options})


def test_a_misspelt_option_is_refused(model, folder):
    with pytest.raises(ValueError, match="max_new_token"):
        generate(model, drafter=folder, input_ids=PROMPT, max_new_token=5)


def test_a_text_in_the_cache_is_refused(model, folder):
    cache = model(PROMPT, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values that hold a text"):
        generate(model, drafter=folder, input_ids=torch.cat([PROMPT, PROMPT], dim=1), past_key_values=cache, max_new_tokens=3)


# --- the drafter and its target


def test_options_of_the_drafter_reach_it(model, package_dirs):
    options = {"input_ids": PROMPT, "max_new_tokens": 8, "drafter_options": {"beam_width": 5, "beam_length": 2}}
    tokens = generate(model, drafter=str(package_dirs["redrafter"]), **options)
    assert torch.equal(tokens, model.generate(input_ids=PROMPT, max_new_tokens=8))
    drafter = vars(model)[BOUND][2]
    assert (drafter.config.beam_width, drafter.config.beam_length) == (5, 2)


def test_a_drafter_is_loaded_once_and_anew_where_its_folder_changes(model, package_dirs, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(package_dirs["redrafter"], folder)
    first, again = bind(model, folder, {}), bind(model, folder, {})
    assert first[1] is again[1]
    (folder / "model.safetensors").touch()
    assert bind(model, folder, {})[1] is not first[1]
    options = {"beam_width": 2}
    assert bind(model, folder, options)[1].config.beam_width == 2
    options["beam_width"] = 1
    assert bind(model, folder, options)[1].config.beam_width == 1


def test_nothing_of_a_text_is_kept_when_generate_returns(model, package_dirs):
    for kind in ("eagle3", "draft_model"):
        generate(model, drafter=str(package_dirs[kind]), input_ids=PROMPT, max_new_tokens=8)
        target, drafter = vars(model)[BOUND][1:]
        assert target._cache is None
        model(PROMPT)  # somebody else's pass, in training say
        assert target._captured._hidden_states is None
        assert kind != "draft_model" or drafter.reader._cache is None
        model(PROMPT)
        assert not target._captured._inputs


def test_a_model_of_another_width_or_vocabulary_is_refused(package_dirs, model, tiny_target_dir):
    model.resize_token_embeddings(310)
    with pytest.raises(ValueError, match="vocab_size: 300 for the drafter, 310 for this target"):
        generate(model, drafter=str(package_dirs["redrafter"]), input_ids=PROMPT, max_new_tokens=5)
    config = AutoModelForCausalLM.from_pretrained(tiny_target_dir).config
    config.hidden_size = 64
    other = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="hidden_size: 32 for the drafter, 64 for this target"):
        generate(other, drafter=str(package_dirs["redrafter"]), input_ids=PROMPT, max_new_tokens=5)


def test_another_tokenizer_is_refused_where_it_is_given(package_dirs, model, demo_target_dir):
    tokenizer = AutoTokenizer.from_pretrained(demo_target_dir)
    with pytest.raises(ValueError, match="tokenizer_sha256"):
        generate(model, drafter=str(package_dirs["redrafter"]), input_ids=PROMPT, max_new_tokens=5, tokenizer=tokenizer)


def test_a_target_of_another_configuration_is_a_warning(package_dirs, tiny_target_dir, tmp_path, caplog):
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_dir, folder)
    config = (folder / "config.json").read_text()
    assert '"rms_norm_eps": 1e-06' in config
    (folder / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    other: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    with caplog.at_level(logging.WARNING):
        generate(other, drafter=str(package_dirs["redrafter"]), input_ids=PROMPT, max_new_tokens=5)
    assert "another revision or configuration" in caplog.text


def test_attention_without_masks_is_refused(package_dirs, model):
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        generate(model, drafter=str(package_dirs["redrafter"]), input_ids=PROMPT, max_new_tokens=5)


def test_code_that_cant_tell_where_its_drafter_lies_asks(model):
    with pytest.raises(ValueError, match="give drafter=FOLDER"):
        generate(model, input_ids=PROMPT, max_new_tokens=5)


def test_packed_weights_change_no_token_here(model, folder):
    tokens = generate(model, drafter=folder, input_ids=PROMPT, max_new_tokens=20, pack_weights=True)
    assert torch.equal(tokens, model.generate(input_ids=PROMPT, max_new_tokens=20))
