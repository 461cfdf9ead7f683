"""Entry point of `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`.

`custom_generate/` in a drafter's folder holds this module and the modules that it imports.
transformers prepares everything as for its own loop: it checks and completes the options, expands
the prompts, and prepares logits processors and stopping criteria. Then `loop`, the decode loop with
the drafter, replaces transformers' own loop. The answer is the same: token for token if greedy, in
distribution if sampled.
"""

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationConfig
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria

from ...data.paths import folders_of
from ..decoding.loop import generate as decode
from ..decoding.sampling import RowSeeds
from ..decoding.types import Step
from ..drafters.saved.download import resolve_drafter
from ..drafters.saved.loading import trained_parts
from ..drafters.saved.parts import DrafterParts, packaged_parts, parse_drafter_name
from ..llm.linears import packed_where_faster
from .bound_drafters import Bound, bind, drafters_of, require_usable
from .generate_arguments import (
    require_honoured,
    require_own_arguments,
    require_supported,
    rule_of,
    split_criteria,
    take_stop_strings,
    unpad,
)

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
"""Arguments of `generate` that select the source of this code. The weights come from the same
source."""


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    *,
    drafter: str | Path | None = None,
    drafter_options: Mapping[str, Any] | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    fast_linears: bool = False,
    **kwargs: Any,
) -> Any:
    """Run `model.generate` with speculative decoding; arguments and result are the same.

    `drafter` is the folder or the Hub id of the drafter, a training-free drafter such as "suffix",
    or several of these joined by "+"; by default it is the drafter that this code came with.
    `drafter_options` change how it drafts, such as `{"beam_width": 8}`. With
    `seed`, row r of a batch is sampled with seed + r. Its text is then the same alone or in a
    batch, and with any drafter or none. Without it, the seeds are drawn from `generator`, by
    default from torch's global one. `fast_linears` computes linear layers on a CPU in faster
    ways (see `packed_where_faster`). This rounds differently, and may need twice the memory of the
    weights. The first such call of a process times the ways for a second or two.

    Raises ValueError for a drafter of a model with other sizes or another tokenizer, and for
    options that speculative decoding can't follow. Raises RuntimeError if the model is already
    decoding with a drafter.
    """
    # 1. Check the arguments, and find the drafter.
    kwargs |= {} if inputs is None else {"inputs": inputs}
    require_own_arguments(drafter, drafter_options, seed, generator, fast_linears)
    require_honoured(kwargs)
    hub_options = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
    parts = find_parts(drafter, hub_options)
    streamer, tokenizer = kwargs.get("streamer"), kwargs.get("tokenizer")
    prepared_model = take_stop_strings(model, kwargs)

    def seeds_of(num_rows: int) -> RowSeeds:
        return RowSeeds.drawn(num_rows, generator) if seed is None else RowSeeds([int(seed) + row for row in range(num_rows)])

    # 2. Load the drafter, and let transformers prepare and call the decode loop.
    with drafters_of(model) as drafters, _uncompiled():
        require_usable(model)
        bound = bind(model, drafters, parts, dict(drafter_options or {}), tokenizer)
        packed = packed_where_faster(model, *trained_parts(bound.drafter)) if fast_linears else nullcontext()
        prepare: Any = GenerationMixin.generate
        try:
            return prepare(prepared_model, custom_generate=_loop(bound, seeds_of, packed, streamer), **kwargs)
        finally:
            bound.release()


def _uncompiled() -> AbstractContextManager[Any]:
    """Run the original code of a compiled model.

    Compiled code can't call the hooks that read hidden states. And each size of a draft tree would
    need another compilation.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _loop(
    bound: Bound, seeds_of: Callable[[int], RowSeeds], packed: AbstractContextManager[Any], streamer: Any
) -> Callable[..., Any]:
    """Build the function that transformers calls in place of its own loop, after its
    preparation."""

    # transformers inspects these parameters; they must be those of its own loop.
    def run(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Sequence[LogitsProcessor],
        stopping_criteria: Sequence[StoppingCriteria],
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        # 1. Translate the options of transformers into ours.
        require_supported(generation_config, model_kwargs)
        prompts = unpad(input_ids, model_kwargs.get("attention_mask"))
        rule = rule_of(generation_config, logits_processor)
        limit, stop_ids, criteria = split_criteria(stopping_criteria, input_ids.shape[1])
        pad_token = getattr(generation_config, "_pad_token_tensor", None)

        # 2. Decode, and arrange the tokens as transformers does.
        with packed:
            steps = decode(
                bound.target,
                bound.drafter,
                rule,
                [prompt.to(bound.target.device) for prompt in prompts],
                max_new_tokens=limit,
                stop_ids=stop_ids,
                generator=seeds_of(len(prompts)) if rule.is_random else None,
            )
            columns = collect(
                steps,
                input_ids,
                criteria,
                pad_token=0 if pad_token is None else int(pad_token),
                pads_ended_rows=any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria),
                streamer=streamer,
            )
        sequences = torch.cat([input_ids, input_ids.new_tensor(columns).T], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast("torch.LongTensor", sequences))
        return sequences

    return run


# --- location of the drafter


def find_parts(drafter: str | Path | None, hub_options: dict[str, Any]) -> DrafterParts:
    """Find the drafter: the argument `drafter`, or the source of the running code.

    In the second case the revision is the code's.
    """
    source, options = str(drafter or _source_of_call()), dict(hub_options)
    commit = Path(__file__).parents[1].name
    if drafter is not None:
        options.pop("revision", None)  # the code's revision; a drafter's revision is part of its name, user/name@revision
    elif not Path(source).is_dir() and re.fullmatch("[0-9a-f]{40}", commit):
        options["revision"] = commit  # transformers keeps code from the Hub in a folder that is named after the commit
    options.pop("proxies", None)
    if drafter is not None and folders_of(drafter) != [source]:
        return parse_drafter_name(drafter, **options)
    folder = resolve_drafter(source, **options)
    if drafter is not None and not folder.is_dir():
        return parse_drafter_name(drafter, **options)  # its error says what a drafter's name may be
    return packaged_parts(folder)  # with all parts of a package


def _source_of_call() -> str:
    """Find the value of `generate`'s argument `custom_generate`.

    transformers copies this code elsewhere and doesn't pass the value on, so the call stack is
    searched for it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        source = frame.f_locals.get("custom_generate")
        if isinstance(source, str):
            return source
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError("generate can't find its drafter; give drafter=FOLDER, or drafter='user/repository'")


# --- the answers


def collect(
    steps: Iterator[Step],
    input_ids: torch.Tensor,
    criteria: Sequence[StoppingCriteria],
    *,
    pad_token: int,
    pads_ended_rows: bool,
    streamer: Any = None,
) -> list[list[int]]:
    """Collect new tokens as transformers' loop would: one column per position, with all rows.

    A step emits several tokens, and rows progress at different speeds. A position is processed when
    all rows have reached it. Then the stopping criteria get the whole batch with the text up to
    that position, and end the rows that they select.

    As in transformers, ended rows are padded with `pad_token` if `pads_ended_rows` (which holds if
    there is a stop token). Otherwise they get the tokens that follow. A row that a criterion has
    ended is still decoded until all rows have ended.
    """
    # 1. Start with empty queues of tokens.
    num_rows = len(input_ids)
    if streamer is not None and num_rows > 1:
        raise ValueError(f"a streamer takes one text, but there are {num_rows} prompts; give one prompt, or no streamer")
    ends = _row_ends(input_ids, criteria)
    waiting: list[deque[int]] = [deque() for _ in range(num_rows)]
    decoded, ended = [False] * num_rows, [False] * num_rows
    columns: list[list[int]] = []

    # 2. Queue the tokens of each step, and process the positions that all rows have reached.
    for step in steps:
        for row, tokens, finish in zip(step.rows, step.tokens, step.finishes, strict=True):
            waiting[row].extend(tokens)
            decoded[row] = finish is not None
        while not all(ended) and all(
            waiting[row] or decoded[row] or (ended[row] and pads_ended_rows) for row in range(num_rows)
        ):
            is_padded = [not queue or (ended[row] and pads_ended_rows) for row, queue in enumerate(waiting)]
            columns.append([pad_token if is_padded[row] else queue.popleft() for row, queue in enumerate(waiting)])
            for row, is_end in enumerate(ends(columns[-1])):
                ended[row] = ended[row] or is_end or (decoded[row] and not waiting[row])
            if streamer is not None:
                streamer.put(torch.tensor(columns[-1]))
        if all(ended):
            break
    if streamer is not None:
        streamer.end()
    return columns


def _row_ends(input_ids: torch.Tensor, criteria: Sequence[StoppingCriteria]) -> Callable[[list[int]], list[bool]]:
    """Build the function that takes a column of next tokens and decides which rows end."""
    text, all_criteria = input_ids, StoppingCriteriaList(criteria)

    def ends(column: list[int]) -> list[bool]:
        nonlocal text
        text = torch.cat([text, text.new_tensor(column)[:, None]], dim=1)
        answer = all_criteria(text, None)
        if answer.numel() != len(column):
            names = ", ".join(type(criterion).__name__ for criterion in criteria)
            raise ValueError(
                f"the stopping criteria ({names}) return {tuple(answer.shape)} values for {len(column)} rows; let each return "
                "one bool per row, [batch]"
            )
        return [bool(value) for value in answer.flatten().tolist()]

    return ends if criteria else lambda column: [False] * len(column)
