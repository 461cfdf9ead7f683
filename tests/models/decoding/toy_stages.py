"""A target in stages without weights: what a stage holds of an entry is a hash of all that it read.

One wrong column, one message out of order or one missed entry changes the hash, and so the tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from random import Random

import torch

from outrider.models.decoding.protocols import Meanwhile
from outrider.models.decoding.tree import DraftTree
from outrider.models.decoding.types import AcceptedPath, Prompts, TargetOutput
from outrider.models.decoding.window import DraftRun, Keep, PassAnswer, run_numbers

from .schedules import NO_FAULTS, Faults, Scheduler

VOCAB = 6
SALT = 17


@dataclass(kw_only=True)
class Work:
    """A run between two stages. `states` is None where a stage before has skipped it."""

    run: DraftRun
    states: list[int] | None


@dataclass
class ToyStage:
    """A stage: the hash of its text, and a column for each entry of the window."""

    number: int
    text: int = 0
    length: int = 0
    window: list[int] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    handled: list[int] = field(default_factory=list)
    """The numbers of the runs so far."""
    num_adopted: int = 0
    """How often entries have stayed below a new root."""

    def handle(self, work: Work) -> Work:
        run = work.run
        self.handled.append(run.number)
        self.keep(run.keep)
        assert len(self.window) == run.num_read, "the stage's window differs from the head's"
        if work.states is None or self.is_skipped(run):
            self.window += [hash((-1, run.number, row)) for row in range(len(run.tokens))]
            return replace(work, states=None)
        return replace(work, states=[self.read(run, run.num_read + row, state) for row, state in enumerate(work.states)])

    def is_skipped(self, run: DraftRun) -> bool:
        return run.number in self.cancelled

    def keep(self, keep: Keep | None) -> None:
        if keep is not None:
            columns = [self.window[entry] for entry in keep.entries]
            self.text = reduce(_append, columns[: keep.num_committed], self.text)
            self.length += keep.num_committed
            self.num_adopted += len(keep.entries) > keep.num_committed
            self.window = columns[keep.num_committed :]

    def read(self, run: DraftRun, entry: int, state: int) -> int:
        """Read an entry: it sees the columns above it, and its position."""
        path = []
        above = entry
        while above:
            above = run.parents[above - 1] + 1
            path.append(self.window[above])
        text = reduce(_append, reversed(path), self.text)
        column = hash((self.number, state, text, self.length + len(path)))
        self.window.append(column)
        return column


def _append(text: int, column: int) -> int:
    return hash((text, column))


def _scores(rng: Random) -> list[float]:
    return [rng.random() for _ in range(VOCAB)]


class ToyTarget:
    """An asynchronous target of toy stages."""

    context_length = 64
    has_fixed_shapes = False

    def __init__(self, num_stages: int, seed: int, faults: Faults = NO_FAULTS) -> None:
        self.num_stages, self.seed, self.faults = num_stages, seed, faults
        self.num_prefills = 0
        self.max_runs = num_stages + 1
        self.num_skipped = 0
        self.begin()

    def begin(self) -> None:
        self.stages = [self.new_stage(number) for number in range(self.num_stages)]
        self.inboxes: list[deque[Work]] = [deque() for _ in range(self.num_stages + 1)]
        cancelled = [stage.cancelled for stage in self.stages]
        self.scheduler = Scheduler(self.seed, self.faults, self.inboxes, cancelled, self.advance)
        self._keep: Keep | None = None

    def new_stage(self, number: int) -> ToyStage:
        return ToyStage(number)

    def advance(self, stage: int) -> None:
        work = self.stages[stage].handle(self.inboxes[stage].popleft())
        self.num_skipped += work.states is None
        self.inboxes[stage + 1].append(work)

    # --- as an asynchronous target

    def submit(self, run: DraftRun) -> None:
        self.inboxes[0].append(Work(run=run, states=[hash((SALT, token)) for token in run.tokens]))
        self.scheduler.move_some()

    def has_answer(self) -> bool:
        self.scheduler.move_some()
        return bool(self.inboxes[-1])

    def receive(self) -> PassAnswer:
        self.scheduler.wait()
        work = self.inboxes[-1].popleft()
        self.scheduler.deliver_late(work.run.number)
        return PassAnswer(number=work.run.number, output=None if work.states is None else self.output(work.states))

    def cancel(self, numbers: Sequence[int]) -> None:
        self.scheduler.cancel(numbers)

    # --- as a target of the synchronous loop

    def prefill(
        self, prompts: Prompts, *, max_new_tokens: int, max_nodes: int, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        self.num_prefills += 1
        self.begin()
        tokens = prompts.input_ids[0].tolist()
        run = DraftRun(
            number=next(run_numbers), keep=None, tokens=tuple(tokens), parents=(*range(-1, len(tokens) - 2),), num_read=0
        )
        work = Work(run=run, states=[hash((SALT, token)) for token in tokens])
        for stage in self.stages:
            work = stage.handle(work)
            stage.keep(Keep(entries=tuple(range(len(tokens))), num_committed=len(tokens)))
        assert work.states is not None
        return self.output(work.states[-1:])

    def verify(self, last_token: torch.Tensor, tree: DraftTree, *, meanwhile: Meanwhile | None = None) -> TargetOutput:
        tokens, parents = (int(last_token), *tree.tokens[0].tolist()), tuple(tree.parents[0].tolist())
        self.submit(DraftRun(number=next(run_numbers), keep=self._keep, tokens=tokens, parents=parents, num_read=0))
        output = self.receive().output
        assert output is not None
        return output

    def commit(self, tree: DraftTree, accepted: AcceptedPath) -> None:
        path = (0, *(node + 1 for node in accepted.host_nodes[0]))
        self._keep = Keep(entries=path, num_committed=len(path))

    def select(self, rows: Sequence[int]) -> None:
        raise NotImplementedError

    def output(self, states: Sequence[int]) -> TargetOutput:
        """Return logits that are a function of what the last stage holds."""
        logits = torch.tensor([_scores(Random(state)) for state in states], dtype=torch.float64)
        return TargetOutput(logits=3 * logits[None], hidden_states=logits[None])
