"""Arguments of `generate`: they act as in transformers, or are errors that name them."""

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.models.export.custom_generate import generate
from outrider.models.export.generate_arguments import require_own_arguments, rule_of

from .conftest import BATCH, MASK, PROMPT


def test_a_maximum_length_below_the_prompts_leaves_one_token(model, package):
    criteria = StoppingCriteriaList([MaxLengthCriteria(3)])
    plain = model.generate(input_ids=PROMPT, max_new_tokens=5, stopping_criteria=criteria)
    assert plain.shape[1] == 6
    assert torch.equal(generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=5, stopping_criteria=criteria), plain)


@pytest.fixture
def stop_text(model, tiny_tokenizer) -> str:
    """Return the text of an early token of the answer."""
    free = model.generate(input_ids=PROMPT, max_new_tokens=20)
    return next(text for token in free[0, 6:] if (text := tiny_tokenizer.decode([token])).isascii() and text.isprintable())


@pytest.mark.parametrize("source", ["argument", "generation_config", "model", "model, not generation_config"])
def test_stop_strings_end_where_transformers_ends(model, package, tiny_tokenizer, stop_text, source):
    options: dict[str, Any] = {"input_ids": PROMPT, "tokenizer": tiny_tokenizer, "max_new_tokens": 20}
    if source == "argument":
        options["stop_strings"] = [stop_text]
    elif source == "generation_config":
        options["generation_config"] = GenerationConfig(max_new_tokens=options.pop("max_new_tokens"), stop_strings=[stop_text])
    else:
        model.generation_config.stop_strings = [stop_text]
    if source == "model, not generation_config":
        options["generation_config"] = GenerationConfig(max_new_tokens=options.pop("max_new_tokens"))
    plain = model.generate(**options)
    assert plain.shape[1] < 25
    assert torch.equal(generate(model, drafter=package, **options), plain)
    if source.startswith("model"):
        assert model.generation_config.stop_strings == [stop_text]  # unchanged for the next call


def test_an_argument_overrides_the_models_stop_strings(model, package, tiny_tokenizer, stop_text):
    model.generation_config.stop_strings = [stop_text]
    plain = model.generate(input_ids=PROMPT, max_new_tokens=20, stop_strings=None)
    assert plain.shape[1] == 25
    assert torch.equal(generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=20, stop_strings=None), plain)
    criteria = StoppingCriteriaList([StopStringCriteria(tiny_tokenizer, ["never to be said"])])
    options = {"input_ids": PROMPT, "max_new_tokens": 20, "stopping_criteria": criteria, "tokenizer": tiny_tokenizer}
    assert torch.equal(generate(model, drafter=package, **options), plain)
    with pytest.raises(ValueError, match=r"the model's generation config has stop_strings \[.*give generate the tokenizer"):
        generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=20)


def rule_for(model: PreTrainedModel, *warpers: LogitsProcessor, **options: Any) -> Any:
    """Return the acceptance rule that these warpers give, before transformers' own warpers."""
    seen = {}

    def spy(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        seen["rule"] = rule_of(generation_config, logits_processor)
        return input_ids

    arguments = {"logits_processor": LogitsProcessorList(warpers), "custom_generate": spy, "max_new_tokens": 2, **options}
    model.generate(input_ids=PROMPT, **arguments)
    return seen["rule"]


@pytest.mark.parametrize(
    ("warper", "name"),
    [
        (TopKLogitsWarper(5, filter_value=-3.0), r"TopKLogitsWarper\(filter_value=-3.0\)"),
        (TopPLogitsWarper(0.5, filter_value=-3.0), r"TopPLogitsWarper\(filter_value=-3.0\)"),
        (TopPLogitsWarper(0.5, min_tokens_to_keep=2), r"TopPLogitsWarper\(min_tokens_to_keep=2\)"),
    ],
)
def test_a_warper_with_further_options_is_an_error(model, warper, name):
    with pytest.raises(ValueError, match=f"doesn't support {name}"):
        rule_for(model, warper, do_sample=True)


def test_a_callers_warper_acts_like_the_option(model):
    """This includes top-k's `min_tokens_to_keep`, where it is the greater number."""
    assert rule_for(model, TopKLogitsWarper(5, min_tokens_to_keep=9), do_sample=True, top_k=0).sampling.top_k == 9
    assert rule_for(model, TopPLogitsWarper(0.5), do_sample=True, top_k=0).sampling.top_p == 0.5
    # transformers' own processors act in its order, including its default top_k of 50.
    sampling = rule_for(model, do_sample=True, temperature=0.5, top_p=0.8).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 50, 0.8)
    # Here the caller's warper and the default one would both act.
    with pytest.raises(ValueError, match="TopKLogitsWarper.*each once, in that order"):
        rule_for(model, TopKLogitsWarper(5), do_sample=True)


def test_warpers_change_no_greedy_text(model, package):
    options = {"input_ids": PROMPT, "max_new_tokens": 10, "do_sample": False}
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)])
    plain = model.generate(**options, logits_processor=warpers)
    assert torch.equal(generate(model, drafter=package, **options, logits_processor=warpers), plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"repetition_penalty": 1.2}, r"RepetitionPenaltyLogitsProcessor.*repetition_penalty=1.0"),
        ({"min_new_tokens": 3}, "MinLengthLogitsProcessor"),
        ({"do_sample": True, "min_p": 0.1}, "MinPLogitsWarper"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        ({"prompt_lookup_num_tokens": 3}, "options of assisted generation"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged'"),
        (
            {"generation_config": GenerationConfig(max_new_tokens=5, cache_implementation="paged")},
            "cache_implementation='paged'",
        ),
        ({"position_ids": torch.arange(3, 8)[None]}, "doesn't support position_ids"),
        ({"past_key_values": DynamicCache()}, "doesn't support past_key_values"),  # also an empty one
        ({"synced_gpus": True}, "doesn't support synced_gpus=True"),
        ({"max_new_token": 5}, "'max_new_token'"),
        ({"tokenizer": "gpt2"}, "tokenizer is 'gpt2'; give the model's tokenizer"),
        ({"input_ids": BATCH.flip(1), "attention_mask": MASK.flip(1)}, "pad on the left"),
        ({"drafter_options": {"num_layers": 5}}, "num_layers can't be changed"),
        ({"stop_strings": ["a"]}, "give generate the tokenizer"),
    ],
)
def test_an_unsupported_argument_is_an_error_that_names_it(model, package, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, **{"drafter": package, "input_ids": PROMPT, "max_new_tokens": 5, "eos_token_id": 299, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": 3}, "drafter is 3; give a folder or a name"),
        ({"drafter_options": "3"}, "drafter_options is '3'; give a dictionary"),
        ({"drafter_options": {3: 4}}, r"drafter_options is \{3: 4\}; give a dictionary"),
        ({"seed": -1}, "seed is -1; give an integer from 0"),
        ({"seed": True}, "seed is True; give an integer from 0"),
        ({"seed": 2**70}, "seed is 1180591620717411303424; give an integer from 0"),
        ({"generator": 3}, "generator is 3; give a torch.Generator"),
        ({"fast_linears": "no"}, "fast_linears is 'no'; give True or False"),
    ],
)
def test_wrong_values_of_our_arguments_are_errors_with_value_and_remedy(options, message):
    values = {"drafter": None, "drafter_options": None, "seed": None, "generator": None, "fast_linears": False}
    require_own_arguments(**values)
    with pytest.raises(ValueError, match=message):
        require_own_arguments(**{**values, **options})


@pytest.mark.parametrize("options", [{"cache_implementation": "dynamic"}, {"use_cache": False}, {"logits_to_keep": 1}])
def test_arguments_that_change_no_answer_are_accepted(model, package, options):
    plain = model.generate(input_ids=PROMPT, max_new_tokens=8)
    assert torch.equal(generate(model, drafter=package, input_ids=PROMPT, max_new_tokens=8, **options), plain)
