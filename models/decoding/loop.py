"""The decode loop. Plain decoding is this loop with a drafter that proposes nothing.

The loop reads from the device once per step, for the whole batch. Some drafters read more: ReDrafter
to cut the padding of its default tree, recycling to learn what the target would have chosen, a merge
to choose nodes on the host.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..machine import synchronize
from ..phases import PhaseSeconds
from .acceptance import SpeculativeSampling
from .protocols import AcceptanceRule, Drafter, State, Target
from .reading import read_acceptance, token_names
from .sampling import Randomness, RowSeeds
from .stopping import Stopping
from .tree import DraftTree, empty_tree
from .types import AcceptedPath, Prompts, Step, TargetOutput


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter[Any, Any],
    rule: AcceptanceRule,
    prompts: Int[torch.Tensor, "batch seq"] | Sequence[Int[torch.Tensor, " _"]],
    *,
    max_new_tokens: int | Sequence[int],
    stop_ids: Collection[int] = (),
    stop_strings: Collection[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    generator: Randomness = None,
    timed: bool = False,
) -> Iterator[Step]:
    """Answer a batch of prompts, step by step. A row leaves the batch when its answer ends.

    With a lossless rule the tokens are exactly those of plain decoding. Every stop rule (see `Stopping`) also cuts an
    accepted path. `prompts` are rows of one length (padding would be read as text), or vectors of any lengths, on the
    target's device. `generator` has a seed for each row: its samples depend neither on its neighbours nor on the drafter,
    and the drafter may foresee the draws (see `sampling.foreseen`). By default the seeds are drawn from torch's global
    generator. `timed` measures the seconds of each phase, and synchronises an accelerator after each.

    Raises ValueError for prompts that are empty or fill the context window, and for a token that
    was chosen from logits that aren't numbers (see `reading`); earlier steps stay valid. Raises
    RuntimeError if the target begins another batch before the answers have ended.
    """
    batch = Prompts.of(prompts)
    generator = shown_draws(rule, generator, len(batch.lengths))
    stopping = Stopping(batch.lengths, max_new_tokens, target.context_length, stop_ids, stop_strings, tokenizer)
    lap = Stopwatch(batch.input_ids.device, is_on=timed)
    # 1. Prefill: the target reads the prompts and chooses the first token of each answer.
    tree = empty_tree(len(batch.lengths), batch.input_ids.device)
    state, output, num_prefills = prefill(target, drafter, batch, max(stopping.max_new_tokens))
    rows: Sequence[int] = range(len(batch.lengths))
    acceptance = rule(tree, output, generator=generator)
    accepted = read_acceptance(tree, output, acceptance, token_names(rows, stopping.answers))
    step = make_step(rows, accepted, stopping, tree, is_prefill=True)
    yield step

    while places := step.unfinished:
        require_same_batch(target, num_prefills)
        # 2. Drop the rows whose answers have ended.
        rows = [step.rows[place] for place in places]
        last_token = acceptance.bonus_token  # in the text, but not yet in the target's cache nor in the drafter's state
        kept = kept_places(places, len(last_token), few_sizes=target.has_fixed_shapes)
        if len(places) < len(step.rows):
            target.select(kept)
            state, last_token = drafter.select(state, kept), last_token[kept]
        if isinstance(generator, RowSeeds):
            generator = generator.after([count + 1 for count in step.num_accepted], kept)
        # 3. Draft a tree after the last token.
        lap()  # the caller's time belongs to no phase
        tree, drafted = drafter.propose(state, last_token, generator=generator)
        draft_seconds = lap()
        # 4. Verify all its nodes in one pass of the target. While it waits for weights, the drafter
        # may draft on.
        output = target.verify(last_token, tree, meanwhile=drafter.meanwhile(drafted))
        verify_seconds = lap()
        # 5. Accept a path and commit it. The host waits once, in `read_acceptance`. A path may go on after the end of its
        # answer: `make_step` cuts it, and its row isn't read again.
        acceptance = rule(tree, output, generator=generator)
        accepted = read_acceptance(tree, output, acceptance, token_names(rows, stopping.answers))
        target.commit(tree, accepted)
        state = drafter.advance(drafted, tree, accepted, output)
        seconds = PhaseSeconds(draft=draft_seconds, verify=verify_seconds, accept=lap()) if timed else None
        step = make_step(rows, accepted, stopping, tree, seconds=seconds)
        yield step


def shown_draws(rule: AcceptanceRule, generator: Randomness, num_rows: int) -> Randomness:
    """Return a batch's seeds, drawn if there are none. Drafters may foresee what exact sampling draws (`sampling.foreseen`)."""
    inner: Any = rule
    while hasattr(inner, "rule"):  # a recorded or a watched one
        inner = inner.rule
    if generator is None and rule.is_random:
        generator = RowSeeds.drawn(num_rows)
    if isinstance(generator, RowSeeds) and isinstance(inner, SpeculativeSampling) and inner.sampling.temperature > 0:
        return generator.shown(inner.sampling)
    return generator


def prefill(
    target: Target, drafter: Drafter[State, Any], prompts: Prompts, max_new_tokens: int
) -> tuple[State, TargetOutput, int]:
    """Prefill target and drafter, with room for the answers and for the drafter's trees.

    Returns the drafter's state, the target's output, and the number of this prefill of the target.
    """
    layers = drafter.feature_layers
    output = target.prefill(prompts, max_new_tokens=max_new_tokens, max_nodes=drafter.max_nodes, feature_layers=layers)
    num_prefills = target.num_prefills  # read before the drafter, which must not prefill this target again
    room = min(max_new_tokens, target.context_length - min(prompts.lengths))
    return drafter.init_state(prompts, output, max_new_tokens=room), output, num_prefills


def require_same_batch(target: Target, num_prefills: int) -> None:
    """Raise RuntimeError if the target has begun another batch: it has only one KV cache."""
    if target.num_prefills != num_prefills:
        raise RuntimeError(
            "the target has begun another batch meanwhile, and it has one KV cache: finish one `generate` before the next "
            "begins, and load a draft model as a separate target"
        )


def kept_places(places: Sequence[int], batch: int, *, few_sizes: bool) -> list[int]:
    """Return the places in the batch that the next one is made of, given those of the unfinished answers.

    With `few_sizes` its size is the next power of two, but at most the present size: each further size
    would be compiled or recorded first. The last place is repeated to fill the batch. Its copies decode
    the same text, so they need no more room than the row itself. Their tokens are neither emitted nor
    counted.

        5 of 8 unfinished   0 2 3 6 7   ->   0 2 3 6 7 7 7 7
        5 of 6 unfinished   0 1 2 3 5   ->   0 1 2 3 5 5
    """
    size = min(1 << (len(places) - 1).bit_length(), batch) if few_sizes else len(places)
    return [*places, *[places[-1]] * (size - len(places))]


def make_step(
    rows: Sequence[int],
    accepted: AcceptedPath,
    stopping: Stopping,
    tree: DraftTree,
    *,
    is_prefill: bool = False,
    is_adopted: bool = False,
    seconds: PhaseSeconds | None = None,
) -> Step:
    """Add the new tokens to the answers of these `rows`, cut where these end, and return the step.

    Repeated rows come last and are left out.
    """
    tokens = accepted.new_tokens[: len(rows)]
    cut = [stopping.add(row, new) for row, new in zip(rows, tokens, strict=True)]
    return Step(
        rows=tuple(rows),
        tokens=tuple(new for new, _ in cut),
        finishes=tuple(finish for _, finish in cut),
        num_accepted=tuple(len(new) - 1 for new in tokens),
        num_nodes=tree.num_nodes,
        origins=None if tree.origins is None else _origins_of(tree.origins, accepted.host_nodes[: len(rows)]),
        is_prefill=is_prefill,
        is_adopted=is_adopted,
        seconds=seconds,
    )


def _origins_of(origins: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row[node] for node in path) for row, path in zip(origins, paths, strict=False))


class Stopwatch:
    """Stopwatch of device time: a call returns the seconds since the last call.

    Each call waits until the device has finished its work. A stopwatch that is off returns 0.
    """

    def __init__(self, device: torch.device, *, is_on: bool = True) -> None:
        self.device, self.is_on = device, is_on
        self.last = time.perf_counter()

    def __call__(self) -> float:
        if not self.is_on:
            return 0.0
        synchronize(self.device)
        last, self.last = self.last, time.perf_counter()
        return self.last - last


def stream_text(steps: Iterable[Step], streamer: BaseStreamer) -> list[int]:
    """Pass one prompt's tokens to a streamer of transformers as they come; return all of them.

    Raises ValueError for a batch of several prompts, whose texts would mix. Leave the streamer's
    `skip_prompt` (of `TextStreamer`, for example) off: the steps don't contain the prompt, so it
    would skip the first tokens of the answer.
    """
    answer: list[int] = []
    for step in steps:
        if step.rows != (0,):
            raise ValueError(f"a streamer takes one text, and this step has rows {step.rows}; stream one prompt at a time")
        streamer.put(torch.tensor(step.tokens[0]))
        answer += step.tokens[0]
    streamer.end()
    return answer


class NullDrafter(Drafter[DraftTree, DraftTree]):
    """Proposes an empty tree, so each step emits the one token that the target chooses.

    Its state is this tree.
    """

    max_nodes: ClassVar[int] = 0
    feature_layers: ClassVar[tuple[int, ...]] = ()

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> DraftTree:
        return empty_tree(len(prompts.lengths), prompts.input_ids.device)

    def propose(
        self, state: DraftTree, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, DraftTree]:
        return state, state

    def advance(self, drafted: DraftTree, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> DraftTree:
        return drafted

    def select(self, state: DraftTree, rows: Sequence[int]) -> DraftTree:
        return empty_tree(len(rows), state.tokens.device)
