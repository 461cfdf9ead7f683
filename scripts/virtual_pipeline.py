"""An imaginary target in stages, and imaginary drafters, in virtual time.

`generate` and `generate_pipelined` run on them unchanged. The target's text is a function of all
tokens before, so one token that the loop gets wrong changes the rest of the text. The target keeps
its window as a real one does, and asserts that each run fits it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from pipeline_clock import AnyClock, Costs, Pipeline
from pipeline_language import VOCAB_SIZE, Language

from outrider.models.decoding.growing_tree import GrowingTree
from outrider.models.decoding.prompts import Prompts
from outrider.models.decoding.protocols import Drafter, Meanwhile
from outrider.models.decoding.runs import Answer, Keep, Run, run_numbers
from outrider.models.decoding.sampling import Randomness
from outrider.models.decoding.tree import DraftTree, chain_tree, empty_tree
from outrider.models.decoding.types import NO_NODE, AcceptedPath, TargetOutput

CONTEXT_LENGTH = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the window: the text up to it, the text before it, and the run that reads it."""

    text: int
    above: int
    number: int


class VirtualTarget:
    """Target in virtual time, both synchronous and asynchronous, for one prompt.

    With `sends_twice` a bonus token that is under way is sent once more, alone, as in PipeInfer's code:
    an ablation.
    """

    context_length = CONTEXT_LENGTH
    has_fixed_shapes = False

    def __init__(self, pipeline: Pipeline, language: Language, *, sends_twice: bool = False) -> None:
        self.pipeline, self.language, self.sends_twice = pipeline, language, sends_twice
        self.num_prefills = self.num_entries = 0
        self.text = 0
        """The text in the cache, without the window."""
        self.root = 0
        """The text at the root, if `sends_twice`."""
        self.window: list[Entry] = []
        self.under_way: dict[int, tuple[list[Entry], set[int]]] = {}
        """The new entries of each run, and the runs that read the entries on their paths."""
        self.skipped: set[int] = set()
        self._keep: Keep | None = None

    @property
    def max_runs(self) -> int:
        return self.pipeline.costs.num_stages + 1

    def prefill(
        self, prompts: Prompts, *, max_new_tokens: int, max_nodes: int, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Send the prompt through the stages."""
        assert len(prompts.lengths) == 1
        self.num_prefills += 1
        while self.under_way:  # answers to runs of the text before
            self.receive()
        ids = prompts.input_ids[0, : prompts.lengths[0]].tolist()
        self.text, self.window, self._keep = self.language.begin(ids), [], None
        self.root = self._next(self.text)
        self.pipeline.send(next(run_numbers), len(ids))
        self.pipeline.receive()
        self.pipeline.forget()
        self.num_entries = 0
        output = self._output([self.text])
        return TargetOutput(logits=output.logits, hidden_states=torch.zeros(1, len(ids), 1))

    def verify(
        self, last_token: Int[torch.Tensor, " batch"], tree: DraftTree, *, meanwhile: Meanwhile | None = None
    ) -> TargetOutput:
        """Submit one run, and wait for its answer."""
        tokens = (int(last_token[0]), *tree.tokens[0].tolist())
        run = Run(number=next(run_numbers), keep=self._keep, tokens=tokens, parents=tuple(tree.parents[0].tolist()), num_read=0)
        self._keep = None
        self.submit(run)
        while (answer := self.receive()).number != run.number:
            pass
        assert answer.output is not None
        return answer.output

    def commit(self, tree: DraftTree, accepted: AcceptedPath) -> None:
        entries = (0, *(node + 1 for node in accepted.host_nodes[0]))
        self._keep = Keep(entries=entries, num_committed=len(entries))

    def discard(self) -> None:
        raise NotImplementedError("all of its logits are numbers")

    def select(self, rows: Sequence[int]) -> None:
        assert list(rows) == [0]

    def submit(self, run: Run) -> None:
        """Keep and extend the window, and send the run."""
        # 1. Keep: the committed entries are a path, and the others hang from its end.
        if run.keep is not None:
            kept = [self.window[entry] for entry in run.keep.entries]
            for entry in kept[: run.keep.num_committed]:
                assert entry.above == self.text, "the committed entries aren't a path"
                self.text = entry.text
            self.window = kept[run.keep.num_committed :]
        # 2. The entries that stay are below the parents that the run names.
        assert len(self.window) == run.num_read, f"the window has {len(self.window)} entries, and the run says {run.num_read}"
        above = [NO_NODE, *run.parents]
        for index, entry in enumerate(self.window):
            assert entry.above == (self.text if index == 0 else self.window[above[index] + 1].text), "a wrong parent"
        # 3. The new entries.
        for index, token in enumerate(run.tokens, run.num_read):
            parent = None if index == 0 else self.window[above[index] + 1]
            before = self.text if parent is None else parent.text
            self.window.append(Entry(self.language.after(before, token), before, run.number))
        # 4. The runs whose entries they attend to: all on the way up to the root.
        needed: set[int] = set()
        for index in range(run.num_read, len(self.window)):
            while index > 0:
                index = above[index] + 1
                needed.add(self.window[index].number)
        self.num_entries += len(run.tokens)
        self.under_way[run.number] = self.window[run.num_read :], needed
        self.pipeline.send(run.number, len(run.tokens))

    def has_answer(self) -> bool:
        return self.pipeline.has_answer()

    def receive(self) -> Answer:
        while (message := self.pipeline.receive()).number not in self.under_way:
            pass  # a run that only repeats another one
        entries, needed = self.under_way.pop(message.number)
        if message.is_skipped:
            self.skipped.add(message.number)
            return Answer(number=message.number, output=None)
        self.pipeline.clock.now += self.pipeline.costs.head_seconds
        is_dead = message.number in self.pipeline.cancelled
        assert is_dead or not self.skipped & needed, "an answer depends on a run that was skipped"
        if self.sends_twice and not is_dead and self._is_bonus_under_way(entries):
            self.pipeline.send(next(run_numbers), 1)
        return Answer(number=message.number, output=self._output([entry.text for entry in entries]))

    def _is_bonus_under_way(self, entries: Sequence[Entry]) -> bool:
        """Follow an answer from the root; return whether the new root is in the window."""
        texts = {entry.text for entry in entries}
        assert self.root in texts, "an answer without the root"
        while (after := self._next(self.root)) in texts:
            self.root = after
        self.root = after
        return after in {entry.text for entry in self.window}

    def _next(self, text: int) -> int:
        return self.language.after(text, self.language.choice(text))

    def cancel(self, numbers: Sequence[int]) -> None:
        self.pipeline.cancel(numbers)

    def _output(self, texts: Sequence[int]) -> TargetOutput:
        choices = [self.language.choice(text) for text in texts]
        logits = torch.zeros(1, len(texts), max(VOCAB_SIZE, *choices, 0) + 1)
        logits[0, range(len(texts)), choices] = 1.0
        return TargetOutput(logits=logits, hidden_states=torch.zeros(1, len(texts), 1))


class VirtualDrafter(Drafter[int, int]):
    """Synchronous drafter in virtual time: chains of K tokens. Its state is the text so far."""

    feature_layers = ()

    @property
    def max_nodes(self) -> int:
        return self.num_tokens

    def __init__(self, clock: AnyClock, costs: Costs, language: Language, num_tokens: int) -> None:
        self.clock, self.costs, self.language, self.num_tokens = clock, costs, language, num_tokens

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> int:
        return self.language.begin(prompts.input_ids[0].tolist())

    def propose(
        self, state: int, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, int]:
        text = first = self.language.after(state, int(last_token[0]))
        tokens: list[int] = []
        for _ in range(self.num_tokens):
            tokens.append(self.language.guess(text)[0])
            text = self.language.after(text, tokens[-1])
            self.clock.draft(self.costs.draft_seconds)
        return (chain_tree(torch.tensor([tokens])) if tokens else empty_tree(1, torch.device("cpu"))), first

    def advance(self, drafted: int, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> int:
        return self.language.after_all(drafted, accepted.tokens[0])

    def select(self, state: int, rows: Sequence[int]) -> int:
        return state


@dataclass(slots=True)
class Stream:
    """State of a `VirtualStreamingDrafter`: its tree, and the text at the root and at each node."""

    root: int
    tree: GrowingTree
    texts: list[int]
    is_begun: bool = False
    """Whether the root was read."""


class VirtualStreamingDrafter:
    """Streaming drafter in virtual time: each pass reads the likeliest node and adds its child."""

    def __init__(self, clock: AnyClock, costs: Costs, language: Language) -> None:
        self.clock, self.costs, self.language = clock, costs, language

    def begin(self, prompts: Prompts, prefill: TargetOutput, last_token: int, *, max_new_tokens: int) -> Stream:
        text = self.language.begin(prompts.input_ids[0].tolist())
        return Stream(self.language.after(text, last_token), GrowingTree(), [])

    def tree(self, state: Stream) -> GrowingTree:
        return state.tree

    def grow(self, state: Stream) -> bool:
        self.clock.draft(self.costs.draft_seconds)
        node = NO_NODE
        if state.is_begun:
            (node,) = state.tree.unread(1)
            state.tree.mark_read(node, 1 + node)
        state.is_begun = True
        text = state.root if node == NO_NODE else state.texts[node]
        token, prob = self.language.guess(text)
        state.tree.add(node, [token], [prob])
        state.texts.append(self.language.after(text, token))
        return True

    def follow(self, state: Stream, tokens: Sequence[int], output: TargetOutput) -> Stream:
        root = self.language.after_all(state.root, tokens)
        rerooted = state.tree.rerooted(tokens) if state.is_begun else None
        if rerooted is None:
            return Stream(root, GrowingTree(), [])
        return Stream(root, rerooted.tree, [state.texts[node] for node in rerooted.nodes], is_begun=True)
