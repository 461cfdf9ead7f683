"""The decode loop. Plain decoding is this loop with a drafter that proposes nothing."""

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from ..machine import synchronize
from ..phases import PhaseSeconds
from .acceptance import GreedyAcceptance
from .prompts import Prompts
from .protocols import AcceptanceRule, Drafter, Target
from .sampling import Randomness, RowSeeds
from .stopping import Stopping
from .tree import DraftTree, empty_tree
from .types import Acceptance, Step, TargetOutput


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter[Any],
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

    `prompts` are rows of one length, or vectors of any lengths; `max_new_tokens` is one limit, or a
    limit for each of them. The tokens are exactly those that plain decoding with the same rule would
    emit: whatever ends an answer (see `Stopping`) also cuts an accepted path. The host reads from the
    device once per step, for the whole batch (a drafter may read once more, to cut the padding of its
    tree). `stop_strings` need the `tokenizer`.

    With `RowSeeds` as `generator`, what a row samples depends neither on its neighbours nor on the
    drafter; a torch.Generator is shared by all rows. `timed` takes the seconds of each phase; it
    synchronises an accelerator after each, so leave it off where the whole is being timed.

    Raises ValueError for prompts that are empty or fill the context window and for logits that aren't numbers, RuntimeError
    where somebody else uses the target before the answers have ended.
    """
    batch = Prompts.of(prompts)
    limits = [max_new_tokens] * len(batch.lengths) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    stopping = Stopping(
        batch.lengths,
        max_new_tokens=limits,
        context_length=target.context_length,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
    )
    lap = Stopwatch(batch.input_ids.device) if timed else None

    prefill = target.prefill(
        batch, max_new_tokens=max(limits), max_nodes=drafter.max_nodes, feature_layers=drafter.feature_layers
    )
    own_prefill = target.num_prefills
    room = min(max(limits), target.context_length - min(batch.lengths))
    state = drafter.init_state(batch, prefill, max_new_tokens=room)
    tree = empty_tree(len(batch.lengths), batch.input_ids.device)
    acceptance = rule(tree, prefill, generator=generator)
    rows = list(range(len(batch.lengths)))
    step = make_step(rows, read_tokens(tree, prefill, acceptance), stopping, tree, is_prefill=True)
    yield step

    while going := [row for row, finish in zip(step.rows, step.finishes, strict=True) if finish is None]:
        if target.num_prefills != own_prefill:
            raise RuntimeError(
                "the target has begun another answer meanwhile, and it has one KV cache: finish one `generate` before the next "
                "begins, and let a draft model be a target of its own"
            )
        # Copies of a row must decode what it does: by the same random numbers, or by none.
        are_alike = isinstance(generator, RowSeeds) or (isinstance(rule, GreedyAcceptance) and not step.drawn)
        few_sizes = target.has_fixed_shapes and are_alike
        kept = kept_places([step.rows.index(row) for row in going], len(rows), few_sizes=few_sizes)
        if len(going) < len(step.rows):
            rows = [step.rows[place] for place in kept]
            target.select(kept)
            state, acceptance = drafter.select(state, kept), acceptance.select(kept)
        if isinstance(generator, RowSeeds):
            generator = generator.after([count + 1 for count in step.num_accepted], kept)
        if lap:
            lap()
        last_token = acceptance.bonus_token
        tree = drafter.propose(state, last_token, generator=generator)
        draft_seconds = lap() if lap else 0.0
        output = target.verify(last_token, tree)
        verify_seconds = lap() if lap else 0.0
        acceptance = rule(tree, output, generator=generator)
        tokens = read_tokens(tree, output, acceptance)  # here the host waits for the device
        num_accepted = [len(new) - 1 for new in tokens]
        target.commit(tree, acceptance, num_accepted)
        state = drafter.advance(state, tree, acceptance, output, num_accepted)
        seconds = PhaseSeconds(draft=draft_seconds, verify=verify_seconds, accept=lap()) if lap else None
        step = make_step(going, tokens[: len(going)], stopping, tree, seconds=seconds)
        yield step


def kept_places(places: Sequence[int], batch: int, *, few_sizes: bool) -> list[int]:
    """Return which rows of a batch stay in it, given the `places` of those whose answers go on.

    With `few_sizes` the size falls from one power of two to the next, since each other size would
    be compiled or recorded first. The last row is repeated to fill it: its copies decode the same
    text, so they need no more room than the row itself. Nothing reads or counts them.

        5 of 8 go on   0 2 3 6 7   ->   0 2 3 6 7 7 7 7        4 of 8 go on   0 2 3 6   ->   0 2 3 6
    """
    size = min(1 << (len(places) - 1).bit_length(), batch) if few_sizes else len(places)
    return [*places, *[places[-1]] * (size - len(places))]


def read_tokens(tree: DraftTree, output: TargetOutput, acceptance: Acceptance) -> list[list[int]]:
    """Each row's new tokens, draft tokens then the bonus token, on the host, in one transfer.

    Raises ValueError where the target's logits are not numbers: every rule would make some token of them.
    """
    drafted = tree.tokens.gather(1, acceptance.path.clamp(min=0)) if tree.num_nodes else acceptance.path
    # After the last committed token, where drafts have no say: a NaN anywhere in the text makes all logits there NaN.
    first = output.logits[:, 0, 0]
    columns = [acceptance.num_accepted[:, None], acceptance.bonus_token[:, None], (first == first)[:, None], drafted]
    values = torch.cat(columns, dim=1).tolist()
    if bad := [row for row, (_, _, is_number, *_) in enumerate(values) if not is_number]:
        raise ValueError(
            f"the target's logits are not numbers (NaN) in row {bad[0]} of the batch: its weights are damaged, or its type "
            "overflows; load it in another target.dtype"
        )
    return [[*drafted[:num_accepted], bonus] for num_accepted, bonus, _, *drafted in values]


def make_step(
    rows: Sequence[int],
    tokens: Sequence[Sequence[int]],
    stopping: Stopping,
    tree: DraftTree,
    *,
    is_prefill: bool = False,
    seconds: PhaseSeconds | None = None,
) -> Step:
    """The step, its tokens cut where answers end."""
    kept = [stopping.add(row, new) for row, new in zip(rows, tokens, strict=True)]
    return Step(
        rows=tuple(rows),
        tokens=tuple(new for new, _ in kept),
        finishes=tuple(finish for _, finish in kept),
        num_accepted=tuple(len(new) - 1 for new in tokens),
        num_nodes=tree.num_nodes,
        drawn=tree.child_probs is not None,
        is_prefill=is_prefill,
        seconds=seconds,
        # Copies: a recorded drafter overwrites its trees.
        links=(tree.tokens.clone(), tree.parents.clone()) if seconds else None,
    )


class Stopwatch:
    """Seconds since the last call, measured when the device has finished its work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = time.perf_counter()

    def __call__(self) -> float:
        synchronize(self.device)
        last, self.last = self.last, time.perf_counter()
        return self.last - last
