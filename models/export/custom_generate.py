"""What `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)` runs: `custom_generate/generate.py` of a drafter's
folder is this module.

transformers does all that it does for its own loop: it checks and completes the options, expands the prompts, prepares logits
processors and stopping criteria. Then comes the decode loop of `loop` in place of its own, with the drafter. The answer is the
same: token for token where it is greedy, in distribution where it is sampled.
"""

import copy
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput, GenerationConfig
from transformers.generation.logits_process import (
    LogitNormalization,
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

from ..decoding.acceptance import GreedyAcceptance, SpeculativeSampling
from ..decoding.loop import generate as decode
from ..decoding.sampling import Randomness, RowSeeds, Sampling
from ..decoding.types import Step
from ..digests import config_digest, tokenizer_digest, weights_digest
from ..drafters.checkpoint import load_drafter
from ..drafters.draft_model import DraftModel
from ..drafters.files import CONFIG_FILE, WEIGHTS_FILE, read_drafter_config
from ..drafters.hub import resolve_drafter
from ..hf_target import HFTarget
from ..interfaces import AcceptanceRule
from ..packing import packed_linears

logger = logging.getLogger(__name__)

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
"""Of the arguments of `generate`, those that say where this code comes from; the weights come from there too."""
FILES = (CONFIG_FILE, WEIGHTS_FILE)
BOUND = "_outrider_bound_drafter"
"""Attribute of the model that keeps its drafter from one call to the next."""
PLAIN_MODES = ("greedy_search", "sample")
WANTED_OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")
OWN_KWARGS = frozenset({"attention_mask", "cache_position", "logits_to_keep", "past_key_values", "position_ids", "use_cache"})
"""Arguments of a model's forward that transformers prepares for its own loop."""
PLAIN_DECODING = "or call generate without custom_generate"


def generate(
    model: PreTrainedModel,
    *,
    drafter: str | None = None,
    drafter_options: dict[str, Any] | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    pack_weights: bool = False,
    **kwargs: Any,
) -> Any:
    """`model.generate`, by speculative decoding; takes its arguments and returns what it returns.

    `drafter` is the folder or the Hub id of the drafter; unless given, that of this code. `drafter_options` change how it
    drafts, such as `{"beam_width": 8}`. With `seed`, row r of a batch is sampled by seed + r: alone or among others, with any
    drafter or none, it is the same text; with `generator`, all rows draw from that; else from torch's global one.
    `pack_weights` packs linear layers on a CPU for few rows (see `packed_linears`): faster, with other rounding, and the
    weights' memory once more.

    Raises ValueError for a drafter of another model's sizes or tokenizer, and for options that can't be honoured.
    """
    _require_consistent(kwargs, seed, generator)
    hub_options = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
    folder = find_folder(drafter, hub_options)
    streamer, tokenizer = kwargs.get("streamer"), kwargs.get("tokenizer")
    _take_stop_strings(kwargs)
    target, bound = bind(model, folder, drafter_options or {}, tokenizer)

    # transformers reads this function's arguments: those of its own loop.
    def run(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Sequence[LogitsProcessor],
        stopping_criteria: Sequence[StoppingCriteria],
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        require_supported(generation_config, model_kwargs)
        prompts = unpad(input_ids, model_kwargs.get("attention_mask"))
        rule = rule_of(generation_config, logits_processor)
        limit, stop_ids, criteria = split_criteria(stopping_criteria, input_ids.shape[1])
        randomness: Randomness = generator if seed is None else RowSeeds([seed + row for row in range(len(prompts))])
        with packed_linears(model, bound) if pack_weights else nullcontext():
            steps = decode(
                target,
                bound,
                rule,
                [prompt.to(target.device) for prompt in prompts],
                max_new_tokens=limit,
                stop_ids=stop_ids,
                generator=randomness,
            )
            answers = collect(steps, input_ids, criteria, streamer)
        pad_token = getattr(generation_config, "_pad_token_tensor", None)
        sequences = append(input_ids, answers, 0 if pad_token is None else int(pad_token))
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast("torch.LongTensor", sequences))
        return sequences

    try:
        prepare: Any = GenerationMixin.generate
        return prepare(model, custom_generate=run, **kwargs)
    finally:
        target.release_cache()
        if isinstance(bound, DraftModel):
            bound.reader.release_cache()


# --- the drafter


def find_folder(drafter: str | None, hub_options: dict[str, Any]) -> Path:
    """Where the drafter lies: where it is said to, else where the running code came from, at the same revision."""
    source, options = drafter or _source_of_call(), dict(hub_options)
    commit = Path(__file__).parents[1].name
    if drafter is None and not Path(source).is_dir() and re.fullmatch("[0-9a-f]{40}", commit):
        options["revision"] = commit  # transformers keeps code from the Hub in a folder of its commit's name
    return resolve_drafter(source, **{name: value for name, value in options.items() if name != "proxies"})


def _source_of_call() -> str:
    """What `generate` was given as `custom_generate`. transformers copies this code elsewhere, and doesn't hand that on."""
    frame = sys._getframe(1)
    while frame is not None:
        source = frame.f_locals.get("custom_generate")
        if isinstance(source, str):
            return source
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError("generate can't tell where its drafter lies; give drafter=FOLDER, or drafter='user/repository'")


def bind(model: PreTrainedModel, folder: Path, options: dict[str, Any], tokenizer: Any = None) -> tuple[HFTarget, Any]:
    """The model as a target, and the folder's drafter for it. They are kept for the next call, as long as nothing changes.

    Raises ValueError where the drafter was made for another width, vocabulary or (where it is given) tokenizer. What would only
    make it a worse drafter, such as other weights of the same shape, is a warning.
    """
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise ValueError(f"the model lies on several devices, which drafting can't follow; load it on one, {PLAIN_DECODING}")
    implementation = model.config.get_text_config()._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"the model's attention is {implementation}, which takes no mask of a draft tree; load it with "
            f"attn_implementation='sdpa', {PLAIN_DECODING}"
        )
    files = [(path := folder / name).is_file() and (path.stat().st_mtime_ns, path.stat().st_size) for name in FILES]
    embeddings = model.get_input_embeddings()
    key = (str(folder), files, copy.deepcopy(options), id(tokenizer), id(embeddings), model.device, model.dtype, implementation)
    kept = vars(model).get(BOUND)
    if kept is not None and kept[0] == key:
        return kept[1], kept[2]
    saved = read_drafter_config(folder)
    config = model.config.get_text_config()
    identity = replace(saved.target, name=type(model).__name__, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    if tokenizer is not None:
        identity = replace(identity, tokenizer_sha256=tokenizer_digest(tokenizer))
    target = HFTarget(model, tokenizer, identity)
    with torch.random.fork_rng():  # weights are drawn before they are read, which must not change what is sampled
        drafter = load_drafter(folder, target, **options)
    _warn_of_other_weights(model, saved.target.config_sha256, saved.target.weights_sha256, saved.target.name)
    vars(model)[BOUND] = (key, target, drafter)
    return target, drafter


def _warn_of_other_weights(model: PreTrainedModel, config_sha256: str, weights_sha256: str, trained_for: str) -> None:
    """Both digests can be told in no time only where the drafter's target was of the same sort: a directory, or the Hub's."""
    source = str(getattr(model, "name_or_path", ""))
    if Path(source).is_dir():
        other = config_sha256 not in ("", config_digest(source))
    else:
        commit = getattr(model.config, "_commit_hash", None)
        other = config_sha256 == "" and commit is not None and weights_digest(source, commit) != weights_sha256
    if other:
        logger.warning(
            "the drafter was trained for %s, and the model is %s of another revision or configuration: its answers stay its "
            "own, but fewer drafts may be accepted",
            trained_for,
            source,
        )


# --- what generate was asked for


def _require_consistent(kwargs: dict[str, Any], seed: int | None, generator: torch.Generator | None) -> None:
    if seed is not None and generator is not None:
        raise ValueError("generate was given a seed and a generator; give one of them")
    if kwargs.get("assistant_model") is not None:
        raise ValueError(f"generate was given an assistant_model and a drafter; leave one out, {PLAIN_DECODING}")


def _take_stop_strings(kwargs: dict[str, Any]) -> None:
    """Make a stopping criterion of stop strings: transformers doesn't hand the tokenizer on to make one itself."""
    config, strings = kwargs.get("generation_config"), kwargs.pop("stop_strings", None)
    if strings is None and config is not None and config.stop_strings is not None:
        strings = config.stop_strings
        kwargs["generation_config"] = config = GenerationConfig(**{**config.to_dict(), "stop_strings": None})
    if strings is None:
        return
    if kwargs.get("tokenizer") is None:
        raise ValueError("stop_strings are matched in the decoded text; give generate the tokenizer too")
    criterion = StopStringCriteria(stop_strings=strings, tokenizer=kwargs["tokenizer"])
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])


def require_supported(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raise ValueError for what a drafter can't do, naming all of it."""
    problems = []
    if config.num_beams is not None and config.num_beams > 1:
        problems.append(f"num_beams={config.num_beams}")
    elif (mode := config.get_generation_mode().value) not in PLAIN_MODES:
        problems.append(f"options of {mode.replace('_', ' ')}")
    problems += [f"{name}=True" for name in WANTED_OUTPUTS if getattr(config, name, None)]
    if config.cache_implementation is not None:
        problems.append(f"cache_implementation={config.cache_implementation!r}")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        problems.append("past_key_values that hold a text")
    others = sorted(name for name, value in model_kwargs.items() if value is not None and name not in OWN_KWARGS)
    problems += [name for name in others if name not in WANTED_OUTPUTS]
    if problems:
        raise ValueError(f"speculative decoding can't honour {', '.join(problems)}: leave that out, {PLAIN_DECODING}")


def rule_of(config: GenerationConfig, processors: Sequence[LogitsProcessor]) -> AcceptanceRule:
    """How drafts are accepted. Raises ValueError for other logits processors than temperature, top-k, top-p, in that order."""
    values: dict[str, Any] = {}
    known = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
    order = list(known.values())
    for processor in processors:
        if type(processor) is LogitNormalization:
            continue  # changes no distribution
        name = known.get(type(processor))
        if name is None or not config.do_sample or any(order.index(name) <= order.index(earlier) for earlier in values):
            raise ValueError(
                f"speculative decoding can't honour {type(processor).__name__}: of what changes the distribution it knows "
                "temperature, top_k and top_p. Set the option that it comes from to what changes nothing "
                f"(repetition_penalty=1.0, min_new_tokens=0), {PLAIN_DECODING}"
            )
        values[name] = getattr(processor, name)
    return SpeculativeSampling(sampling=Sampling(**values)) if config.do_sample else GreedyAcceptance()


def split_criteria(
    criteria: Sequence[StoppingCriteria], prompt_length: int
) -> tuple[int, tuple[int, ...], list[StoppingCriteria]]:
    """The token limit, the stop tokens, and all other criteria. `prompt_length` counts padding, as `max_length` does."""
    limits, stop_ids, others = [], set[int](), []
    for criterion in criteria:
        if isinstance(criterion, MaxLengthCriteria):
            limits.append(criterion.max_length - prompt_length)
        elif isinstance(criterion, EosTokenCriteria):
            stop_ids |= set(criterion.eos_token_id.flatten().tolist())
        else:
            others.append(criterion)
    if not limits:
        raise ValueError("generate was given no length; give max_new_tokens")
    return min(limits), tuple(sorted(stop_ids)), others


def unpad(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[torch.Tensor]:
    """The tokens of each prompt. Raises ValueError for padding anywhere but on the left."""
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


# --- the answers


def collect(
    steps: Iterator[Step], input_ids: torch.Tensor, criteria: Sequence[StoppingCriteria], streamer: Any = None
) -> list[list[int]]:
    """Each row's answer. Further stopping criteria are asked after each token, as if it had come alone; rows that they end are
    decoded on until all have ended, and cut."""
    num_rows = len(input_ids)
    if streamer is not None and num_rows > 1:
        raise ValueError(f"a streamer takes one text, and there are {num_rows} prompts; give one")
    answers: list[list[int]] = [[] for _ in range(num_rows)]
    running = set(range(num_rows))
    ends = _asker(input_ids, criteria)
    for step in steps:
        for row, tokens, finish in zip(step.rows, step.tokens, step.finishes, strict=True):
            for token in tokens if row in running else ():
                answers[row].append(token)
                if streamer is not None:
                    streamer.put(torch.tensor([token]))
                if ends(row, answers[row]):
                    running.discard(row)
                    break
            if finish is not None:
                running.discard(row)
        if not running:
            break
    if streamer is not None:
        streamer.end()
    return answers


def _asker(input_ids: torch.Tensor, criteria: Sequence[StoppingCriteria]) -> Callable[[int, list[int]], bool]:
    """Whether one of the criteria ends a row's text after such an answer."""

    def ends(row: int, answer: list[int]) -> bool:
        text = torch.cat([input_ids[row], input_ids.new_tensor(answer)])[None]
        return any(bool(torch.as_tensor(criterion(text, None)).any()) for criterion in criteria)

    return ends if criteria else lambda row, answer: False


def append(input_ids: torch.Tensor, answers: Sequence[Sequence[int]], pad_token: int) -> torch.Tensor:
    """The prompts as they were given, each with its answer, padded on the right."""
    longest = max(map(len, answers))
    rows = [[*answer, *[pad_token] * (longest - len(answer))] for answer in answers]
    return torch.cat([input_ids, input_ids.new_tensor(rows)], dim=1)
