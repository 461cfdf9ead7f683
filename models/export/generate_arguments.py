"""What `generate` was asked for, in the library's own terms, or refused by name."""

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
"""Arguments of a model's forward that transformers prepares for its own loop, or that change no
answer."""
GIVEN_KWARGS = ("cache_position", "past_key_values", "position_ids")
"""Of these, what a caller gives would be ignored."""


def require_own_arguments(drafter: Any, drafter_options: Any, seed: Any, generator: Any, pack_weights: Any) -> None:
    """Raise ValueError for wrong values of the arguments that this `generate` adds."""
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
    if not isinstance(pack_weights, bool):
        raise ValueError(f"pack_weights is {pack_weights!r}; give True or False")


def require_honoured(kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of `generate` that don't reach its loop unchanged."""
    if kwargs.get("assistant_model") is not None:
        raise ValueError(f"generate was given an assistant_model and a drafter; leave one out, {PLAIN}")
    if not isinstance(tokenizer := kwargs.get("tokenizer"), PreTrainedTokenizerBase | None):
        raise ValueError(f"tokenizer is {tokenizer!r}; give the model's tokenizer, as AutoTokenizer loads it, or leave it out")
    given = [name for name in GIVEN_KWARGS if kwargs.get(name) is not None]
    given += ["synced_gpus=True"] if kwargs.get("synced_gpus") else []
    if (cache := kwargs.get("cache_implementation")) not in PLAIN_CACHES:
        given.append(f"cache_implementation={cache!r}")
    _refuse(given)


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError(f"speculative decoding can't honour {', '.join(problems)}: leave that out, {PLAIN}")


def take_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> PreTrainedModel:
    """Make a stopping criterion of stop strings, wherever they are told.

    Transformers doesn't hand the tokenizer on to make one itself. Returns the model to prepare
    with, which tells of none. Raises ValueError where there is no tokenizer.
    """
    strings, told_by = None, "generate's arguments"
    if (own := model.generation_config) is not None and own.stop_strings is not None:
        strings, told_by = own.stop_strings, "the model's generation config"
        model = copy.copy(model)  # its weights are the same; it is only asked what is to be done
        model.generation_config = _without_stop_strings(own)
    if (config := kwargs.get("generation_config")) is not None and config.stop_strings is not None:
        strings, told_by = config.stop_strings, "the generation_config"
        kwargs["generation_config"] = _without_stop_strings(config)
    if "stop_strings" in kwargs:
        strings, told_by = kwargs.pop("stop_strings"), "generate's arguments"
    criteria = list(kwargs.get("stopping_criteria") or ())
    if strings is None or any(type(each) is StopStringCriteria for each in criteria):  # the caller's own come first
        return model
    if kwargs.get("tokenizer") is None:
        raise ValueError(
            f"{told_by} has stop_strings {strings!r}, which are matched in the decoded text: give generate the tokenizer too "
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
    """Raise ValueError for what a drafter can't do, naming all of it.

    Both are as transformers hands them to its loops.
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
    _refuse([*problems, *(name for name in others if name not in WANTED_OUTPUTS)])


def rule_of(config: GenerationConfig, processors: Sequence[LogitsProcessor]) -> AcceptanceRule:
    """Return how drafts are accepted.

    Raises ValueError for other logits processors than temperature, top-k, top-p, in that order.
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
                f"speculative decoding can't honour {type(processor).__name__}: of what changes the distribution it knows "
                "temperature, top_k and top_p, each once, in that order. Set the option that it comes from to what changes "
                f"nothing (repetition_penalty=1.0, min_new_tokens=0), {PLAIN}"
            )
        _refuse(_other_fields(processor))
        values[name] = getattr(processor, name)
    # None of the three changes which token is likeliest.
    return SpeculativeSampling(sampling=Sampling(**values)) if config.do_sample else GreedyAcceptance()


def _other_fields(processor: LogitsProcessor) -> list[str]:
    """Return a caller's warper without the library's part. transformers' TopKLogitsWarper has made
    one number of both of its own.
    """
    plain = {"filter_value": -float("inf")} | ({"min_tokens_to_keep": 1} if type(processor) is TopPLogitsWarper else {})
    fields = {name: getattr(processor, name, value) for name, value in plain.items()}
    return [f"{type(processor).__name__}({name}={value})" for name, value in fields.items() if value != plain[name]]


def split_criteria(
    criteria: Sequence[StoppingCriteria], prompt_length: int
) -> tuple[int, tuple[int, ...], list[StoppingCriteria]]:
    """Return the token limit, the stop tokens, and all other criteria.

    `prompt_length` counts padding, as `max_length` does.
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
    """Return the tokens of each prompt.

    Raises ValueError for padding anywhere but on the left.
    """
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(
            f"speculative decoding needs the prompts' input_ids [batch, token], and has {tuple(input_ids.shape)}; "
            "embeddings in their place can't be drafted for"
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
