"""The decode loop of a target in stages: drafting and verification at the same time.

After PipeInfer (arXiv 2407.11798). A synchronous step drafts a tree, then waits until all stages
have read it, one after the other. Here small runs of draft tokens enter the first stage while
earlier ones are further on, and each builds on those before (section IV-B: continuous speculation).

    stage 1   a  b  cd e        A mismatch: the runs behind are cancelled, and the right token
    stage 2      a  b  cd e     enters alone, at once.
    stage 3         a  b  cd

`window` explains why the tokens are those of plain decoding. What is sent, and when, is the
decision of a `Speculation`.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from ..phases import PhaseSeconds
from .acceptance import GreedyAcceptance, SpeculativeSampling
from .loop import Stopwatch, make_step, require_same_batch, shown_draws
from .protocols import AcceptanceRule, AsyncTarget, State, StreamingDrafter
from .reading import read_acceptance, token_names
from .sampling import Randomness, RowSeeds
from .speculation import ExpectedSpeculation, Speculation
from .stopping import Stopping
from .tree import DraftTree, empty_tree, tree_of
from .types import Prompts, Step, TargetOutput
from .window import Window

VerifiedRun = tuple[int, DraftTree, TargetOutput]
"""The number of an answered run, its live part as a tree below the root, and that part's output."""


@torch.inference_mode()
def generate_pipelined(
    target: AsyncTarget,
    drafter: StreamingDrafter[Any],
    rule: AcceptanceRule,
    prompts: Int[torch.Tensor, "batch seq"] | Sequence[Int[torch.Tensor, " _"]],
    *,
    max_new_tokens: int | Sequence[int],
    speculation: Speculation | None = None,
    stop_ids: Collection[int] = (),
    stop_strings: Collection[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    generator: Randomness = None,
    timed: bool = False,
) -> Iterator[Step]:
    """Answer one prompt, step by step, with the tokens of `generate`.

    A step has the tokens of one answered run. A step's draft seconds are those of drafting and
    sending, its verify seconds those of waiting. A `speculation` that is passed again knows the
    costs from the start.

    Raises ValueError for several prompts, for rules whose choices depend on the clock, and for what
    `generate` refuses.
    """
    batch = Prompts.of(prompts)
    require_one_text(batch, rule)
    generator = shown_draws(rule, generator, 1)
    speculation = speculation or ExpectedSpeculation()
    stopping = Stopping(batch.lengths, max_new_tokens, target.context_length, stop_ids, stop_strings, tokenizer)
    lap = Stopwatch(batch.input_ids.device, is_on=timed)
    # 1. Prefill. The first token enters the first stage alone, at once.
    tree = empty_tree(1, batch.input_ids.device)
    output = target.prefill(batch, max_new_tokens=max(stopping.max_new_tokens), max_nodes=speculation.max_nodes)
    num_prefills = target.num_prefills
    where = token_names(range(1), stopping.answers)
    accepted = read_acceptance(tree, output, rule(tree, output, generator=generator), where)
    step = make_step(range(1), accepted, stopping, tree, is_prefill=True)
    if isinstance(generator, RowSeeds):
        generator = generator.after([1], [0])
    window = Window(root=accepted.new_tokens[0][-1])
    if step.unfinished:
        submit(target, speculation, window)
        room = min(max(stopping.max_new_tokens), target.context_length - batch.lengths[0])
        state = drafter.begin(batch, output, window.root, max_new_tokens=room, generator=generator)
    yield step

    draft_seconds = verify_seconds = 0.0
    while step.unfinished:
        require_same_batch(target, num_prefills)
        # 2. Draft and send runs until an answer waits.
        lap()
        draft_on(target, drafter, state, speculation, window, max_depth=stopping.left(0) - 1)
        draft_seconds += lap()
        # 3. Take the oldest run's answer.
        answer = take_answer(target, speculation, window)
        verify_seconds += lap()
        if answer is None:
            continue
        # 4. Accept a path. Cancel the runs that it kills, and send the bonus token if it is new.
        number, tree, output = answer
        accepted = read_acceptance(tree, output, rule(tree, output, generator=generator), where)
        (tokens,) = accepted.new_tokens
        speculation.add_answer(number, len(tokens))
        dead = window.follow(tokens)
        seconds = PhaseSeconds(draft=draft_seconds, verify=verify_seconds, accept=lap()) if timed else None
        step = make_step(range(1), accepted, stopping, tree, is_adopted=window.is_root_sent, seconds=seconds)
        draft_seconds = verify_seconds = 0.0
        target.cancel(dead if step.unfinished else [*dead, *window.runs])
        if isinstance(generator, RowSeeds):
            generator = generator.after([len(tokens)], [0])
        if step.unfinished:
            if not window.is_root_sent:
                submit(target, speculation, window)
            entries = [0, *(node + 1 for node in accepted.host_nodes[0])]
            state = drafter.follow(state, tokens, entries_of(output, entries), generator)
        yield step


def require_one_text(prompts: Prompts, rule: AcceptanceRule) -> None:
    """Raise ValueError for several prompts, or if the time of an answer could change a token."""
    if len(prompts.lengths) > 1:
        raise ValueError(
            f"a batch has {len(prompts.lengths)} prompts, and pipelined speculation answers one at a time: decode them one "
            "by one, or all at once with the synchronous loop"
        )
    if not isinstance(rule, GreedyAcceptance | SpeculativeSampling):
        raise ValueError(
            f"{type(rule).__name__} would choose tokens by the clock in pipelined speculation: use GreedyAcceptance or "
            "SpeculativeSampling"
        )


def submit(
    target: AsyncTarget, speculation: Speculation, window: Window, drafts: Any = None, nodes: Sequence[int] = ()
) -> None:
    """Send the next run: the root if it is new, and these nodes of the drafter's tree."""
    run = window.send(drafts, nodes)
    target.submit(run)
    speculation.add_run(run)


def draft_on(
    target: AsyncTarget,
    drafter: StreamingDrafter[State],
    state: State,
    speculation: Speculation,
    window: Window,
    *,
    max_depth: int,
) -> None:
    """Draft and send runs until an answer waits, or nothing more is worth it.

    A node deeper than `max_depth` could only add tokens after the answer's end.
    """
    has_more = True
    while not target.has_answer():
        nodes: Sequence[int] | None = ()
        if len(window.runs) < target.max_runs:
            drafts = drafter.tree(state)
            nodes = speculation.choose(window, drafts, max_depth=max_depth, has_more=has_more)
        if nodes:
            submit(target, speculation, window, drafts, nodes)
        elif has_more and nodes is not None:
            has_more = drafter.grow(state)
        else:
            break


def take_answer(target: AsyncTarget, speculation: Speculation, window: Window) -> VerifiedRun | None:
    """Wait for the oldest run's answer: its number, and its live part with the output.

    It has the root. None if all its entries are dead.
    """
    answer = target.receive()
    known = window.learn(answer.number)
    if known is None:
        speculation.add_answer(answer.number, 0)
        return None
    assert answer.output is not None, "a run with a live entry was cancelled"
    tree = tree_of([(known.tokens, known.parents)], answer.output.logits.device)
    return answer.number, tree, entries_of(answer.output, known.rows)


def entries_of(output: TargetOutput, entries: Sequence[int]) -> TargetOutput:
    """Return the output of some entries only."""
    if len(entries) == output.logits.shape[1]:
        return output
    return TargetOutput(logits=output.logits[:, entries], hidden_states=output.hidden_states[:, entries])
