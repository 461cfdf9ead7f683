"""Arguments of `generate`, translated into the library's terms.

Unsupported arguments raise ValueError with their names.
"""

import copy
import os
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerationConfig
from transformers.generation.logits_process import (
    LogitNormalization,
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

from ..decoding.acceptance import GreedyAcceptance, SpeculativeSampling
from ..decoding.protocols import AcceptanceRule
from ..decoding.sampling import Sampling
from .bound_drafters import PLAIN

MAX_SEED = 2**63 - 1
PLAIN_MODES = ("greedy_search", "sample")
PLAIN_CACHES = (None, "dynamic")
WANTED_OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")
OWN_KWARGS = frozenset({"attention_mask", "cache_position", "logits_to_keep", "past_key_values", "position_ids", "use_cache"})
"""Arguments of a model's forward pass that transformers prepares for its own loop, or that don't
change the answer."""
GIVEN_KWARGS = ("cache_position", "past_key_values", "position_ids")
"""Those that would be ignored if the caller sets them, so that setting them raises ValueError."""


def require_own_arguments(drafter: Any, drafter_options: Any, seed: Any, generator: Any, fast_linears: Any) -> None:
    """Raise ValueError for invalid values of the arguments that this `generate` adds."""
    if drafter is not None and (not isinstance(drafter, str | os.PathLike) or not os.fspath(drafter)):
        raise ValueError(f"drafter is {drafter!r}; give a folder or a name on the Hub, or leave it out")
    if drafter_options is not None and not (
        isinstance(drafter_options, Mapping) and all(isinstance(name, str) for name in drafter_options)
    ):
        raise ValueError(f"drafter_options is {drafter_options!r}; give a dictionary of options, such as {{'beam_width': 8}}")
    if seed is not None and (not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) <= MAX_SEED):
        raise ValueError(f"seed is {seed!r}; give an integer from 0 to {MAX_SEED}, or leave it out")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator is {generator!r}; give a torch.Generator, or leave it out")
    if seed is not None and generator is not None:
        raise ValueError("generate was given a seed and a generator; give one of them")
    if not isinstance(fast_linears, bool):
        raise ValueError(f"fast_linears is {fast_linears!r}; give True or False")


def require_honoured(kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of `generate` that transformers doesn't pass to its loop
    unchanged."""
    if kwargs.get("assistant_model") is not None:
        raise ValueError(f"generate was given an assistant_model and a drafter; leave one out, {PLAIN}")
    if not isinstance(tokenizer := kwargs.get("tokenizer"), PreTrainedTokenizerBase | None):
        raise ValueError(f"tokenizer is {tokenizer!r}; give the model's tokenizer, as AutoTokenizer loads it, or leave it out")
    unsupported = [name for name in GIVEN_KWARGS if kwargs.get(name) is not None]
    unsupported += ["synced_gpus=True"] if kwargs.get("synced_gpus") else []
    if (cache := kwargs.get("cache_implementation")) not in PLAIN_CACHES:
        unsupported.append(f"cache_implementation={cache!r}")
    _raise_unsupported(unsupported)


def _raise_unsupported(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError(f"speculative decoding doesn't support {', '.join(problems)}: leave that out, {PLAIN}")


def take_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> PreTrainedModel:
    """Turn stop strings from any source into a stopping criterion.

    transformers doesn't pass the tokenizer to custom loops, so they can't do this. Returns the
    model for transformers' preparation, whose generation config has no stop strings. Raises
    ValueError if there is no tokenizer.
    """
    # 1. Take the strings from the source with the highest priority: arguments, then config, then model.
    strings, source = None, "generate's arguments"
    if (model_config := model.generation_config) is not None and model_config.stop_strings is not None:
        strings, source = model_config.stop_strings, "the model's generation config"
        model = copy.copy(model)  # shares the weights; transformers only reads its options
        model.generation_config = _without_stop_strings(model_config)
    if (config := kwargs.get("generation_config")) is not None and config.stop_strings is not None:
        strings, source = config.stop_strings, "the generation_config"
        kwargs["generation_config"] = _without_stop_strings(config)
    if "stop_strings" in kwargs:
        strings, source = kwargs.pop("stop_strings"), "generate's arguments"

    # 2. Make the criterion.
    criteria = list(kwargs.get("stopping_criteria") or ())
    if strings is None or any(type(item) is StopStringCriteria for item in criteria):  # the caller's criterion wins
        return model
    if kwargs.get("tokenizer") is None:
        raise ValueError(
            f"{source} has stop_strings {strings!r}, which are matched in the decoded text: give generate the tokenizer too "
            "(tokenizer=tokenizer), or stop_strings=None"
        )
    criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=kwargs["tokenizer"]))
    kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
    return model


def _without_stop_strings(config: GenerationConfig) -> GenerationConfig:
    config = copy.copy(config)
    config.stop_strings = None
    return config


def require_supported(config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for options that a drafter doesn't support, with all of them.

    Both arguments are as transformers passes them to its loops.
    """
    problems = []
    if config.num_beams is not None and config.num_beams > 1:
        problems.append(f"num_beams={config.num_beams}")
    elif (mode := config.get_generation_mode().value) not in PLAIN_MODES:
        problems.append(f"options of {mode.replace('_', ' ')}")
    problems += [f"{name}=True" for name in WANTED_OUTPUTS if getattr(config, name, None)]
    if config.cache_implementation not in PLAIN_CACHES:
        problems.append(f"cache_implementation={config.cache_implementation!r}")
    others = sorted(name for name, value in model_kwargs.items() if value is not None and name not in OWN_KWARGS)
    _raise_unsupported([*problems, *(name for name in others if name not in WANTED_OUTPUTS)])


def rule_of(config: GenerationConfig, processors: Sequence[LogitsProcessor]) -> AcceptanceRule:
    """Choose the acceptance rule.

    Raises ValueError for other logits processors than temperature, top-k and top-p, in that order.
    """
    values: dict[str, Any] = {}
    known = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
    order = list(known.values())
    for processor in processors:
        if type(processor) is LogitNormalization:
            continue  # changes no distribution
        name = known.get(type(processor))
        if name is None or any(order.index(name) <= order.index(earlier) for earlier in values):
            raise ValueError(
                f"speculative decoding doesn't support {type(processor).__name__}. It supports temperature, top_k and top_p, "
                "each once, in that order. Turn off the option that adds this processor (such as repetition_penalty=1.0, "
                f"min_new_tokens=0), {PLAIN}"
            )
        _raise_unsupported(_other_fields(processor))
        values[name] = getattr(processor, name)
    # Temperature, top-k and top-p don't change the likeliest token, so greedy decoding ignores them.
    return SpeculativeSampling(sampling=Sampling(**values)) if config.do_sample else GreedyAcceptance()


def _other_fields(processor: LogitsProcessor) -> list[str]:
    """List the fields of a warper with unsupported values.

    transformers' TopKLogitsWarper merges its two fields into one, so `min_tokens_to_keep` is
    checked for top-p only.
    """
    plain = {"filter_value": -float("inf")} | ({"min_tokens_to_keep": 1} if type(processor) is TopPLogitsWarper else {})
    fields = {name: getattr(processor, name, value) for name, value in plain.items()}
    return [f"{type(processor).__name__}({name}={value})" for name, value in fields.items() if value != plain[name]]


def split_criteria(
    criteria: Sequence[StoppingCriteria], prompt_length: int
) -> tuple[int, tuple[int, ...], list[StoppingCriteria]]:
    """Split the criteria into the token limit, the stop tokens, and all others.

    `prompt_length` includes padding, as `max_length` does.
    """
    limits, stop_ids, others = [], set[int](), []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            limits.append(criterion.max_length - prompt_length)
        elif type(criterion) is EosTokenCriteria:
            stop_ids |= set(criterion.eos_token_id.flatten().tolist())
        else:
            others.append(criterion)
    if not limits:
        raise ValueError("generate was given no length; give max_new_tokens")
    return max(1, min(limits)), tuple(sorted(stop_ids)), others


def unpad(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Remove the padding of each prompt.

    Raises ValueError for padding anywhere but on the left.
    """
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(
            f"speculative decoding needs the prompts' input_ids [batch, token], but has {tuple(input_ids.shape)}; "
            "give tokens, since embeddings aren't supported"
        )
    if attention_mask is None:
        return list(input_ids)
    real = attention_mask.bool()
    if real.shape != input_ids.shape or not bool((real[:, 1:] >= real[:, :-1]).all()) or not bool(real[:, -1].all()):
        raise ValueError(
            f"the attention_mask {tuple(attention_mask.shape)} of input_ids {tuple(input_ids.shape)} must be 1 from each "
            "prompt's first token to the end of its row: pad on the left (padding_side='left')"
        )
    return [row[mask] for row, mask in zip(input_ids, real, strict=True)]
