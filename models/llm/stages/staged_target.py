"""The target in stages, as the head sees it: a target like any other that reads several runs at once.

**Why it is exact.** Every stage handles the same messages in the same order, and what a message
does depends on the stage's cache and the message alone. So after message i the caches of all stages
together are the cache of one process that has handled messages 0 to i with the whole model, and the
logits of an entry are those of `verify` on its path. A run is cancelled only if no later message
keeps one of its entries (see `Window`), so no live entry reads a column that was skipped.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import nn

from ....data.manifest import TargetIdentity
from ...decoding.protocols import Meanwhile
from ...decoding.tree import DraftTree, accepted_path, chain_tree, depths_of, empty_tree
from ...decoding.types import NO_NODE, AcceptedPath, Prompts, TargetOutput
from ...decoding.window import DraftRun, Keep, PassAnswer, run_numbers
from ...phases import RunCounts
from ..frozen_model import context_length
from ..hf_target import HFTarget
from ..tree_cache import TreeCache
from .messages import Link, Work
from .slices import EndSlice, require_sliceable


class StagedTarget(HFTarget):
    """A target whose layers are in other processes; an `AsyncTarget`.

    The head has the embeddings, the final norm and the output embeddings. Only one text at a time
    is decoded. Reading the model itself raises ValueError (see `EndSlice`).
    """

    num_copies = 1  # stages read one row at a time, whatever the batch

    def __init__(
        self,
        ends: EndSlice,
        tokenizer: Any,
        identity: TargetIdentity,
        link: Link,
        *,
        stage_layers: Sequence[int],
        fast_linears: bool = False,
    ) -> None:
        super().__init__(ends.model, tokenizer, identity, fast_linears=fast_linears)
        self.ends, self.link = ends, link
        self.stage_layers = tuple(stage_layers)
        """Number of layers of each stage."""
        self.run_counts = RunCounts()
        """What was read and cancelled so far, without prompts, and without the cancellation of runs
        that were under way when a text ended."""
        self._last_position = context_length(self.model) - 1
        self._length = 0
        """Committed tokens of the text, for the stages that have handled everything that was sent."""
        self._keep: Keep | None = None
        """What `commit` has decided, which the next run carries."""
        self._under_way: deque[int] = deque()
        """Runs that haven't been answered, the oldest first."""
        self._num_entries: dict[int, int] = {}
        """New entries of each of them."""

    @property
    def form(self) -> str:
        return "staged"

    @property
    def has_layers(self) -> bool:
        return False

    def layer_template(self) -> nn.Module:
        """Return a layer like the first one, without memory."""
        with torch.device("meta"):
            layer: nn.Module = self.ends.layer_kind(self.model.config.get_text_config(), layer_idx=0)
        return layer

    def _logits_and_states(self, input_ids: Int[torch.Tensor, "batch seq"]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and hidden states of a pass that leaves the layers out."""
        output = self.ends.leave(self.ends.enter(input_ids, torch.zeros_like(input_ids)))
        return output.logits, output.hidden_states

    @property
    def max_runs(self) -> int:
        return self.link.num_stages + 1

    # --- one run at a time: `Target`

    def prefill(
        self, prompts: Prompts, *, max_new_tokens: int, max_nodes: int, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        if feature_layers:
            raise ValueError(
                f"the drafter reads the inputs of the target's layers {list(feature_layers)}, which are in other "
                "processes (target.stage_layers); choose another drafter, or leave target.stage_layers out"
            )
        if len(prompts.lengths) > 1:
            raise ValueError(
                f"a batch has {len(prompts.lengths)} prompts, and a target in stages decodes one at a time; set "
                "eval.batch_sizes=[1], or leave target.stage_layers out"
            )
        return super().prefill(prompts, max_new_tokens=max_new_tokens, max_nodes=max_nodes)

    def verify(
        self, last_token: Int[torch.Tensor, " batch"], tree: DraftTree, *, meanwhile: Meanwhile | None = None
    ) -> TargetOutput:
        keep, self._keep = self._keep, None
        tokens = [int(last_token), *tree.tokens[0].clamp(min=0).tolist()]
        parents = tuple(tree.parents[0].tolist())
        run = DraftRun(number=next(run_numbers), keep=keep, tokens=tuple(tokens), parents=parents, num_read=0)
        self.submit(run)
        while (answer := self.receive()).number != run.number:
            pass
        assert answer.output is not None, "the run wasn't cancelled"
        return answer.output

    def commit(self, tree: DraftTree, accepted: AcceptedPath) -> None:
        entries = (0, *(node + 1 for node in accepted.host_nodes[0]))
        self._keep = Keep(entries=entries, num_committed=len(entries))

    def select(self, rows: Sequence[int]) -> None:
        assert set(rows) == {0}, "one text is decoded at a time"

    # --- several runs at a time: `AsyncTarget`

    @torch.inference_mode()
    def submit(self, run: DraftRun) -> None:
        if run.keep is not None:
            self._length += run.keep.num_committed
        hidden = self.ends.enter(self._tensor(run.tokens), self._tensor(self._positions(run)))
        work = Work(
            number=run.number,
            keep=None if run.keep is None else run.keep.entries,
            num_committed=0 if run.keep is None else run.keep.num_committed,
            parents=run.parents,
            num_read=run.num_read,
            hidden=hidden,
        )
        self._under_way.append(run.number)
        self._num_entries[run.number] = len(run.tokens)
        self.run_counts += RunCounts(num_runs=1, num_entries=len(run.tokens))
        self.link.send(work)

    def has_answer(self) -> bool:
        return self.link.has_answer()

    @torch.inference_mode()
    def receive(self) -> PassAnswer:
        work = self._receive()
        num_entries = self._num_entries.pop(work.number)
        if work.hidden is None:
            self.run_counts += RunCounts(num_cancelled=1, num_cancelled_entries=num_entries)
            return PassAnswer(number=work.number, output=None)
        return PassAnswer(number=work.number, output=self.ends.leave(work.hidden.to(self.device)))

    def cancel(self, numbers: Sequence[int]) -> None:
        if under_way := [number for number in numbers if number in self._under_way]:
            self.link.cancel(under_way)

    # --- texts

    @torch.inference_mode()
    def plain_logits(
        self, input_ids: Int[torch.Tensor, "batch seq"], num_last: int = 0
    ) -> Float[torch.Tensor, "batch last vocab"]:
        self.num_prefills += 1
        rows = [self._read_text(row[None], len(row)) for row in input_ids]
        return torch.cat([self.ends.leave(row, logits_to_keep=num_last).logits for row in rows])

    def _begin(self, prompts: Prompts, capacity: int) -> TargetOutput:
        self.num_prefills += 1
        hidden = self._read_text(prompts.input_ids, capacity)
        return self.ends.leave(hidden, logits_to_keep=1)

    def _read_text(self, input_ids: Int[torch.Tensor, "1 seq"], capacity: int) -> Float[torch.Tensor, "1 seq hidden"]:
        """Begin a text in all stages, and return the output of the last layer.

        Nothing is under way afterwards: the answers of earlier runs come first, and are dropped.
        """
        self.cancel([*self._under_way])
        self._num_entries.clear()
        number, self._keep, self._length = next(run_numbers), None, input_ids.shape[1]
        positions = torch.arange(self._length, device=self.device)[None]
        hidden = self.ends.enter(input_ids.to(self.device), positions)
        self._under_way.append(number)
        self.link.send(Work(number=number, capacity=capacity, hidden=hidden))
        while (work := self._receive()).number != number:
            pass
        assert work.hidden is not None, "a prefill isn't cancelled"
        return work.hidden.to(self.device)

    def _receive(self) -> Work:
        work = self.link.receive()
        assert work.number == self._under_way[0], "messages keep their order"
        self._under_way.popleft()
        return work

    def _positions(self, run: DraftRun) -> list[int]:
        """Return the positions of a run's new entries: the depth below the committed text."""
        depths = [0, *depths_of(run.parents)]
        # Tokens beyond the context window are never emitted; see `TreeReader.read`.
        return [min(self._length + depth, self._last_position) for depth in depths[run.num_read :]]

    def _tensor(self, values: Sequence[int]) -> Int[torch.Tensor, "1 entry"]:
        return torch.tensor([[*values]], device=self.device)

    @torch.inference_mode()
    def _probe(self) -> None:
        """Raise ValueError if stages can't compute this model, or read trees differently from texts."""
        require_sliceable(self.ends)
        # 1. A prompt, a tree with the paths "a b" and "c" in the order a c b, and a chain after "a b".
        text, drafts = self.probe_ids.split([12, 3])
        tree = DraftTree(tokens=drafts[None], parents=self._tensor([NO_NODE, NO_NODE, 0]), max_depth=2)
        start = self._begin(Prompts.of([text[:8]]), 24).logits[0]
        first = self.verify(text[8:9], tree).logits[0]
        self.commit(tree, accepted_path(tree, [[0, 2]]))
        second = self.verify(text[10:11], chain_tree(drafts[None, :1])).logits[0]
        # 2. The same texts in plain passes through the stages.
        path = torch.cat([text[:9], drafts[[0, 2]]])
        self._require_plain(
            [
                (start[0], text[:8]),
                (first[2], torch.cat([text[:9], drafts[1:2]])),
                (first[3], path),
                (second[1], torch.cat([path, text[10:11], drafts[:1]])),
            ]
        )

    def _decode(self, text: Int[torch.Tensor, " seq"], num_steps: int) -> list[Float[torch.Tensor, " vocab"]]:
        self._begin(Prompts.of(text[None, :-num_steps]), len(text))
        tree, logits = empty_tree(1, self.device), []
        for token in text[-num_steps:].split(1):
            logits.append(self.verify(token, tree).logits[0, 0])
            self.commit(tree, accepted_path(tree, [[]]))
        return logits

    # --- what needs the layers or their cache in this process

    def resume(self, prompts: Prompts | None, texts: Sequence[Any], *, capacity: int) -> TargetOutput | None:
        raise self._needs_layers()

    def release_cache(self) -> None:
        """Do nothing: the stages keep their memory for the next text."""

    def _require_cache(self) -> TreeCache:
        raise self._needs_layers()

    def _needs_layers(self) -> ValueError:
        return ValueError(
            "the target's keys and values are in other processes (target.stage_layers), and this needs them here; leave "
            "target.stage_layers out"
        )
