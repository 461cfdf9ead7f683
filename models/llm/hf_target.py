"""The target of the decode loop: a frozen model with a KV cache that verifies draft trees."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import PreTrainedModel

from ...data.manifest import TargetIdentity
from ..decoding.protocols import Meanwhile
from ..decoding.tree import DraftTree, accepted_path, chain_tree
from ..decoding.types import AcceptedPath, Prompts, TargetOutput
from ..machine import is_for_users
from .cuda_graphs import GraphedFunction, Recorder, SharedBuffer
from .frozen_model import FrozenModel
from .linears import choose_linears, packed_where_faster, plain_linears
from .tree_cache import KeptText, TreeCache
from .tree_reader import TreeReader, compile_passes
from .weight_stream import WeightStream


class HFTarget(FrozenModel):
    """A target that uses 4-D attention masks, position ids and our own cache in transformers.

    As a `Target` it holds the KV cache of one batch of prompts at a time. A draft model uses an
    `HFTarget` to read its trees, too: it takes the cache (`hand_over_cache`) and passes it to
    `read_tree`. Create instances with `outrider.models.llm.loading.load_target`.

    `compiled` runs the model's passes over draft trees through `torch.compile`. `cuda_graphs`
    replays them as CUDA graphs (see `GraphedFunction`). Both may be on. Prefills run eagerly,
    because nearly every prefill has a new shape. With `fast_linears`, `choose_linears` has an effect.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        identity: TargetIdentity,
        *,
        compiled: bool = False,
        cuda_graphs: bool = False,
        tensor_parallel: bool = False,
        fast_linears: bool = False,
        recorder: Recorder | None = None,
        stream: "WeightStream | None" = None,
        budget_tokens: int | None = None,
        layer_devices: Sequence[torch.device] = (),
    ) -> None:
        super().__init__(model, tokenizer, identity, tensor_parallel=tensor_parallel)
        self.stream = stream
        """Source of the weights that don't stay in memory (`memory_budget_gib`); None if all do."""
        self.budget_tokens = budget_tokens
        """Tokens whose keys and values a memory budget has room for; None without a budget."""
        self.layer_devices = tuple(layer_devices)
        """Device of each layer of a target with a `device_map`; empty without one."""
        self.fast_linears = fast_linears and not (compiled or tensor_parallel or layer_devices)
        self.linears: dict[str, str] = {}
        """How linear layers are computed, by shape; empty if all are computed as transformers does."""
        self.num_prefills = 0
        self._cache: TreeCache | None = None
        self._feature_layers: tuple[int, ...] = ()
        self.compiled, self.cuda_graphs = compiled, cuda_graphs
        self._decoding_model = compile_passes(model) if compiled else model
        self._trees = TreeReader(model, is_fixed=self.has_fixed_shapes, layer_devices=self.layer_devices)
        self._logits = SharedBuffer()
        self._graphs = self._commits = None
        if cuda_graphs:
            self._graphs = GraphedFunction(self._read_tree_for_replay, recorder)
            # Its own recorder, and so its own memory: drafters read a pass's output after the commit.
            self._commits = GraphedFunction(self._keep_path_for_replay, recorder, neutral=_first_entries)

    def choose_linears(self, *drafters: nn.Module, recorded: Mapping[str, str] | None = None) -> None:
        """Choose how linear layers are computed while decoding, with torch's present number of threads.

        `recorded` are the `linears` of the run's first process: they are taken, and nothing is timed.
        """
        if self.fast_linears:
            self.linears = choose_linears(*self._with_linears, *drafters, recorded=recorded)

    def packed_where_faster(self, recorded: Mapping[str, str] | None = None) -> AbstractContextManager[dict[str, str]]:
        """Read texts in the fastest way that changes no weight inside the block.

        Gives the ways by shape. `recorded` are those of a run's first process, as in `choose_linears`.
        """
        modules = self._with_linears if self.fast_linears else []
        return packed_where_faster(*modules, recorded=recorded)

    def plain_linears(self) -> None:
        """Compute linear layers as transformers does."""
        plain_linears(*self._with_linears)
        self.linears = {}

    @property
    def _with_linears(self) -> list[nn.Module]:
        # A copy of streamed weights would be of nothing, and one of resident weights beyond the
        # memory budget.
        return [] if self.stream else [self.model]

    @property
    def form(self) -> str:
        """How passes over draft trees run: compiled, in graphs, streamed, over devices, or eager.

        Speed depends on it.
        """
        names = [name for name in ("compiled", "cuda_graphs") if getattr(self, name)]
        names += ["streamed"] * (self.stream is not None)
        names += [f"over {count} devices"] if (count := len({*self.layer_devices, self.device})) > 1 else []
        return " ".join(names) or "eager"

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that the weights take: with a memory budget, those of its plan."""
        if self.stream is not None:
            return self.stream.plan.planned_bytes - self.stream.plan.cache_bytes
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether each new shape of a pass is compiled or recorded first.

        If so, passes are padded to few different shapes.
        """
        return self.compiled or self.cuda_graphs

    def prefill(
        self, prompts: Prompts, *, max_new_tokens: int, max_nodes: int, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Begin a batch: prefill the prompts, and reserve room for answers and draft trees.

        Raises ValueError if a prompt leaves no room in the context window, if the batch needs more
        keys and values than a memory budget allows, or if the model can't read draft trees.
        """
        room = min(max_new_tokens, self.context_length - min(prompts.lengths))
        capacity = max(prompts.lengths) + room + 1 + max_nodes
        self._require_room(len(prompts.lengths), capacity)
        self._require_readable(prompts)
        self._feature_layers = feature_layers
        return self._begin(prompts, capacity)

    def _begin(self, prompts: Prompts, capacity: int) -> TargetOutput:
        """Read prompts into an empty cache."""
        return self._prefill(prompts, self._empty_cache(len(prompts.lengths), capacity))

    def resume(self, prompts: Prompts | None, texts: Sequence[KeptText], *, capacity: int) -> TargetOutput | None:
        """Begin a batch: prefill `prompts`, then append a row for each of `texts`.

        `take` has saved `texts` earlier. `capacity` is the room in tokens of
        each row. Returns the output of the prompts, or None. Raises ValueError for a target over
        several devices.
        """
        if len({*self.layer_devices}) > 1:
            raise ValueError(
                "a target over several devices (target.device_map) can't resume texts that left the batch; choose another "
                "engine (distill.engine=decoder), or leave device_map out"
            )
        if prompts is not None:
            self._require_readable(prompts)
        self._feature_layers = ()
        self._require_room(len(texts) + (0 if prompts is None else len(prompts.lengths)), capacity)
        cache = self._empty_cache(len(texts) + (0 if prompts is None else len(prompts.lengths)), capacity)
        output = None if prompts is None else self._prefill(prompts, cache)
        cache.put(texts)
        return output

    def take(self, row: int) -> KeptText:
        """Copy what the cache holds of a row's committed tokens to the host, for `resume`."""
        return self._require_cache().take(row)

    def hand_over_cache(self) -> TreeCache:
        """Return the batch's cache, for `read_tree`. The next batch gets another cache.

        A cache of fixed memory stays here as well, because compiled code and recordings write to
        it. The next batch that fits takes it over.
        """
        cache = self._require_cache()
        if not cache.is_fixed:
            self._cache = None
        return cache

    def _require_room(self, batch: int, capacity: int) -> None:
        """Raise ValueError if a memory budget has no room for a batch's keys and values."""
        if self.budget_tokens is not None and batch * capacity > self.budget_tokens:
            raise ValueError(
                f"a batch needs room for {batch * capacity:,} tokens ({batch} x {capacity:,} of prompt, answer and tree), and "
                f"target.budget_tokens is {self.budget_tokens:,}; raise it, or make batches or answers smaller"
            )

    def _require_readable(self, prompts: Prompts) -> None:
        """Raise ValueError if a prompt fills the context window or the model can't read trees."""
        # 1. Check the prompts.
        if max(prompts.lengths) >= self.context_length:
            raise ValueError(
                f"a prompt of {max(prompts.lengths)} tokens leaves no room for an answer in the target's context window of "
                f"{self.context_length} tokens; shorten the prompt"
            )
        ids = prompts.input_ids
        if (wrong := ids[(ids < 0) | (ids >= self.vocab_size)]).numel():
            raise ValueError(
                f"a prompt has the token id {int(wrong[0])}, and the target only those from 0 to {self.vocab_size - 1}: is it "
                "another tokenizer's?"
            )
        # 2. Check the model once: its configuration, then a probe with a small tree.
        if not self._trees.kinds:
            self._trees.require_trees()
            try:
                self._probe()
            except BaseException:
                self._trees.kinds = {}  # the next prefill probes again
                raise

    def read_prompts(self, prompts: Prompts, cache: TreeCache) -> TargetOutput:
        """Read prompts like `prefill`, into the caller's empty cache."""
        self._require_readable(prompts)
        return self._prefill(prompts, cache)

    def _prefill(self, prompts: Prompts, cache: TreeCache) -> TargetOutput:
        # `logits_to_keep` keeps the same positions of every row: the last ones of all lengths. The hook gives the head
        # each row's last position only.
        last = sorted({length - 1 for length in prompts.lengths})
        row, column = range(len(prompts.lengths)), [last.index(length - 1) for length in prompts.lengths]
        kept = len(row), len(last)

        def last_states(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
            return inputs[0][row, column][:, None] if inputs[0].shape[:-1] == kept else None

        run = partial(self._forward, self.model, prompts.input_ids, logits_to_keep=torch.tensor(last, device=self.device))
        with self.model.get_output_embeddings().register_forward_pre_hook(last_states, prepend=True):
            output = self._trees.read_prompts(cache, prompts.lengths, self.device, run)
        logits = output.logits
        return replace(output, logits=logits[row, column][:, None] if logits.shape[1] == kept[1] else logits)

    def _empty_cache(self, batch: int, capacity: int) -> TreeCache:
        """Begin a batch with the present cache if it is large enough: its recordings stay valid."""
        self.num_prefills += 1
        if self._cache is not None and self._cache.fits(batch, capacity):
            self._cache.restart()
        else:
            self._cache = None  # free its memory before the next cache is allocated
            self._forget_graphs()
            self._cache = self._trees.new_cache(batch, capacity, self.device)
        return self._cache

    def verify(
        self, last_token: Int[torch.Tensor, " batch"], tree: DraftTree, *, meanwhile: Meanwhile | None = None
    ) -> TargetOutput:
        """Read the last committed token and the tree's nodes in one pass.

        Each node attends to its own path only. With CUDA graphs the next `verify` overwrites the
        output. `meanwhile` is called while the pass waits for streamed weights; a model in memory
        never calls it.
        """
        if self.stream is None:
            return self.read_tree(self._require_cache(), last_token, tree)
        with self.stream.during_waits(meanwhile):
            return self.read_tree(self._require_cache(), last_token, tree)

    def read_tree(
        self, cache: TreeCache, last_token: Int[torch.Tensor, " batch"], tree: DraftTree, *, num_read: int = 0
    ) -> TargetOutput:
        """Read a tree like `verify`, in the caller's cache.

        The first `num_read` entries (the last token, then the nodes) were read since the cache's
        last `keep`. Only the remaining entries are read and have outputs; so a drafter can read a
        tree while it grows. Recordings are replayed only in the cache that they were recorded with.
        With another cache, passes run without recordings.
        """
        has_moved = self._trees.begin(cache, tree.num_nodes, num_read)
        if self._graphs is None or cache is not self._cache:
            return self._read_tree(self._decoding_model, cache, last_token, tree.tokens, tree.lineage)
        if has_moved:
            self._forget_graphs()
        key = (cache.extent, self._trees.num_parts(cache), self._feature_layers, num_read)
        return self._graphs(last_token, tree.tokens, tree.lineage, key=key)

    def _read_tree_for_replay(self, *inputs: torch.Tensor) -> TargetOutput:
        """Read a tree, with logits in memory that all recordings share, because they are large."""
        output = self._read_tree(self._decoding_model, self._require_cache(), *inputs)
        return replace(output, logits=self._logits.hold(output.logits), is_fixed=True)

    def _read_tree(
        self,
        model: Any,
        cache: TreeCache,
        last_token: Int[torch.Tensor, " batch"],
        nodes: Int[torch.Tensor, "batch node"],
        lineage: Int[torch.Tensor, "batch node depth"],
    ) -> TargetOutput:
        """Run the device's part of a pass, which a CUDA graph can record."""
        tokens = last_token[:, None]
        if nodes.shape[1]:
            tokens = torch.cat([tokens, nodes.clamp(min=0)], dim=1)
        unread = tokens[:, tokens.shape[1] - cache.num_written :]
        return self._trees.read(cache, lineage, partial(self._forward, model, unread))

    def commit(self, tree: DraftTree, accepted: AcceptedPath) -> None:
        """Keep each row's last committed token and accepted path in the KV cache; drop the rest."""
        cache = self._require_cache()
        if self._commits is None or not accepted.path.shape[1]:
            keep_path(cache, accepted)
            return
        # The bound of a tree's depth may exceed its nodes, for which alone the cache has room.
        self._commits(accepted.entries[:, : 1 + tree.num_nodes], accepted.num_read.device)
        cache.count(accepted.num_read.host)

    def _keep_path_for_replay(self, entries: Int[torch.Tensor, "batch entry"], num_read: Int[torch.Tensor, " batch"]) -> None:
        """Do the device's part of `commit` for paths of any length."""
        self._require_cache().keep_on_device(entries, num_read, fixed=True)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        self._require_cache().select(rows)

    def release_cache(self) -> None:
        """Free the KV cache and the recordings that use it. The next prefill allocates them again.

        Later passes of the model then keep no references to layers' inputs.
        """
        self._cache = None
        self._captured.layers = ()
        self._forget_graphs()
        self._logits = SharedBuffer()

    def release_hooks(self) -> None:
        """Remove the hooks that read hidden states; the next pass adds them again."""
        self._captured.detach()

    def _require_cache(self) -> TreeCache:
        assert self._cache is not None, "prefill must come before verify and commit"
        return self._cache

    def _forget_graphs(self) -> None:
        for recordings in (self._graphs, self._commits):
            if recordings is not None:
                recordings.forget()

    def _forward(self, model: Any, tokens: Int[torch.Tensor, "batch query"], **arguments: Any) -> TargetOutput:
        with self._captured.states_of_pass(self._feature_layers) as states:
            output = model(input_ids=tokens, **arguments)
        return TargetOutput(logits=output.logits, hidden_states=states.last, features=states.layer_inputs)

    @torch.inference_mode()
    def _probe(self) -> None:
        """Raise ValueError if small trees can't be read, or if their logits differ from plain passes over the paths."""
        # 1. Two prompts of different lengths, and a tree with the paths "a b" and "c", in the order
        # a c b.
        text, drafts = self.probe_ids.split([12, 3])
        prompts = Prompts.of([text[:8], text[:5]])
        parents = torch.tensor([[-1, -1, 0]] * 2, device=self.device)
        tree = DraftTree(tokens=drafts.repeat(2, 1), parents=parents, max_depth=2)
        last = text[[8, 9]]
        # 2. Read both prompts, the tree, and then a chain after different accepted paths in each
        # row.
        try:
            cache = self._trees.new_cache(2, 24, self.device)
            start = self._prefill(prompts, cache).logits
            first = self._read_eagerly(cache, last, tree)
            keep_path(cache, accepted_path(tree, [[0, 2], [1]]))
            second = self._read_eagerly(cache, text[[10, 11]], chain_tree(tree.tokens[:, :1]))
        except (TypeError, AttributeError, LookupError, RuntimeError, ValueError) as error:
            if is_for_users(error):
                raise
            raise ValueError(
                f"{type(self.model).__name__} can't read draft trees: its own code in transformers failed with the mask, the "
                "positions and the cache of a tree, as layers do that keep states of their own. Choose another target"
            ) from error
        # 3. The same texts, all in one plain pass: compare the logits.
        rows = [
            (start[0, 0], [*text[:8]]),
            (start[1, 0], [*text[:5]]),
            (first[0, 2], [*text[:9], tree.tokens[0, 1]]),
            (first[1, 3], [*text[:5], text[9], *tree.tokens[0, [0, 2]]]),
            (second[0, 1], [*text[:9], *tree.tokens[0, [0, 2]], text[10], tree.tokens[0, 0]]),
            (second[1, 1], [*text[:5], text[9], tree.tokens[1, 1], text[11], tree.tokens[1, 0]]),
        ]
        self._require_plain([(logits, torch.stack(path_ids)) for logits, path_ids in rows])

    def _read_eagerly(
        self, cache: TreeCache, last_token: Int[torch.Tensor, " batch"], tree: DraftTree
    ) -> Float[torch.Tensor, "batch entry vocab"]:
        """Return a tree's logits by the eager model; recordings of the probe aren't needed."""
        self._trees.begin(cache, tree.num_nodes)
        return self._read_tree(self.model, cache, last_token, tree.tokens, tree.lineage).logits


def keep_path(cache: TreeCache, accepted: AcceptedPath) -> None:
    """Keep the last committed token and the accepted path of the tree that was read last."""
    is_moved = any(nodes != tuple(range(len(nodes))) for nodes in accepted.host_nodes)
    cache.keep(accepted.cut().entries if is_moved else None, accepted.num_read)


def _first_entries(
    entries: Int[torch.Tensor, "batch entry"], num_read: Int[torch.Tensor, " batch"]
) -> tuple[Int[torch.Tensor, "batch entry"], Int[torch.Tensor, " batch"]]:
    """Return entries that stay where they are, and counts that keep none of them."""
    return torch.arange(entries.shape[1], device=entries.device).expand_as(entries), torch.zeros_like(num_read)
