"""The decode loop. Plain decoding is this loop with a drafter that proposes nothing."""

import time
from collections.abc import Collection, Iterator
from typing import Any

import torch
from jaxtyping import Int

from ..interfaces import AcceptanceRule, Drafter, Target
from .tree import DraftTree, empty_tree
from .types import Acceptance, PhaseSeconds, Step


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter[Any],
    rule: AcceptanceRule,
    prompt: Int[torch.Tensor, "batch seq"],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
    timed: bool = False,
) -> Iterator[Step]:
    """Decode one prompt, step by step, until a stop token (emitted, then the end) or `max_new_tokens`.

    The tokens are exactly those that plain decoding with the same rule would emit: a stop token or the limit inside an
    accepted path cuts the path there. `timed` takes the seconds of each phase; it synchronises an accelerator after each, so
    leave it off where the whole is being timed. Raises ValueError for a prompt that is empty, not a batch of one, or too long
    for the target.
    """
    if prompt.shape[0] != 1 or prompt.shape[1] == 0:
        raise ValueError(f"prompt is {tuple(prompt.shape)}; decoding takes one prompt of at least one token, [1, seq]")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    lap = Stopwatch(prompt.device) if timed else None

    prefill = target.prefill(prompt, max_new_tokens=max_new_tokens, max_nodes=drafter.max_nodes)
    state = drafter.init_state(prompt, prefill)
    tree = empty_tree(1, prompt.device)
    acceptance = rule(tree, prefill, generator=generator)
    emitted, done = cut(read_tokens(tree, acceptance), max_new_tokens, stop_ids)
    num_emitted = len(emitted)
    yield Step(tokens=emitted, num_accepted=0, num_nodes=0, is_prefill=True)

    while not done:
        if lap:
            lap()
        last_token = acceptance.bonus_token
        tree = drafter.propose(state, last_token, generator=generator)
        draft_seconds = lap() if lap else 0.0
        output = target.verify(last_token, tree)
        verify_seconds = lap() if lap else 0.0
        acceptance = rule(tree, output, generator=generator)
        target.commit(tree, acceptance)
        state = drafter.advance(state, tree, acceptance, output)
        tokens = read_tokens(tree, acceptance)
        seconds = PhaseSeconds(draft=draft_seconds, verify=verify_seconds, accept=lap()) if lap else None

        emitted, done = cut(tokens, max_new_tokens - num_emitted, stop_ids)
        num_emitted += len(emitted)
        yield Step(tokens=emitted, num_accepted=len(tokens) - 1, num_nodes=tree.num_nodes, is_prefill=False, seconds=seconds)


def read_tokens(tree: DraftTree, acceptance: Acceptance) -> list[int]:
    """The step's new tokens, draft tokens then the bonus token, on the host: row 0, in one transfer."""
    drafted = tree.tokens.gather(1, acceptance.path.clamp(min=0)) if tree.num_nodes else acceptance.path
    values = torch.cat([acceptance.num_accepted[:, None], acceptance.bonus_token[:, None], drafted], dim=1)[0].tolist()
    return [*values[2 : 2 + values[0]], values[1]]


def cut(tokens: list[int], room: int, stop_ids: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """The tokens up to the limit or the first stop token (which is kept), and whether decoding ends there."""
    for index, token in enumerate(tokens[:room]):
        if token in stop_ids:
            return tuple(tokens[: index + 1]), True
    return tuple(tokens[:room]), len(tokens) >= room


class Stopwatch:
    """Seconds since the last call, measured when the device has finished its work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = time.perf_counter()

    def __call__(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        last, self.last = self.last, time.perf_counter()
        return self.last - last
