"""The target of the decode loop: a frozen model with a KV cache that draft trees are verified in."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from transformers import PreTrainedModel

from ...data.manifest import TargetIdentity
from ..decoding.prompts import Prompts
from ..decoding.tree import DraftTree, chain_tree, depths
from ..decoding.types import Acceptance, TargetOutput
from .cuda_graphs import GraphedFunction, Recorder, SharedBuffer
from .frozen_model import FrozenModel
from .tree_attention import attention_kinds, grouped_heads, masks_by_kind, require_tree_attention
from .tree_cache import KeptText, TreeCache, extent_step


class HFTarget(FrozenModel):
    """A target behind transformers' public seams: 4-D attention masks, explicit positions, and a
    cache of our own.

    Holds the KV cache of one batch of prompts at a time. Make it with
    `outrider.models.target.loading.load_target`.

    `compiled` runs the model's passes over draft trees through `torch.compile`, `cuda_graphs` replays
    them as CUDA graphs (see `GraphedFunction`); both may be on. Prefills are read as they are: no two
    have the same shape.
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
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, tokenizer, identity, tensor_parallel=tensor_parallel)
        self.num_prefills = 0
        self._cache: TreeCache | None = None
        self._kinds: dict[str, int | None] = {}
        self._feature_layers: tuple[int, ...] = ()
        self.compiled, self.cuda_graphs = compiled, cuda_graphs
        self._read_tree = partial(self._read_tree_with, torch.compile(model) if compiled else model)
        self._logits = SharedBuffer()
        self._graphs = GraphedFunction(self._read_tree_for_replay, recorder) if cuda_graphs else None

    @property
    def form(self) -> str:
        """How passes over draft trees run: a speed depends on it."""
        return " ".join(name for name in ("compiled", "cuda_graphs") if getattr(self, name)) or "eager"

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether each new shape of a pass is compiled or recorded first, so that few shapes are
        worth some padding."""
        return self.compiled or self.cuda_graphs

    @property
    def extent_step(self) -> int:
        """Columns by which the part of the KV cache grows that a pass over a draft tree reads."""
        return extent_step(self.device, is_fixed=self.has_fixed_shapes)

    def prefill(
        self, prompts: Prompts, *, max_new_tokens: int, max_nodes: int, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Start anew with a batch of prompts.

        Raises ValueError where a prompt leaves no room in the context window, or the model can't read draft trees.
        """
        self._require_readable(prompts)
        self._feature_layers = feature_layers
        room = min(max_new_tokens, self.context_length - min(prompts.lengths))
        return self._prefill(prompts, max(prompts.lengths) + room + 1 + max_nodes)

    def resume(self, prompts: Prompts | None, texts: Sequence[KeptText], *, capacity: int) -> TargetOutput | None:
        """Start anew with a batch of prompts, which are read, and behind them of `texts`, which were: see `take`.

        `capacity` is the number of tokens that there is room for in a row. The output is that of the prompts.
        """
        output = None
        if prompts is not None:
            self._require_readable(prompts)
            self._feature_layers = ()
            output = self._prefill(prompts, capacity, num_texts=len(texts))
        else:
            self.num_prefills += 1
            self._empty_cache(len(texts), capacity).host_lengths = []
        self._require_cache().put(texts)
        return output

    def take(self, row: int) -> KeptText:
        """The keys and values of a row's committed tokens, on the host, to be gone on with at another time."""
        return self._require_cache().take(row)

    def _require_readable(self, prompts: Prompts) -> None:
        """Raise ValueError where a prompt leaves no room in the context window, or the model can't read draft trees."""
        if max(prompts.lengths) >= self.context_length:
            raise ValueError(
                f"a prompt of {max(prompts.lengths)} tokens leaves no room for an answer in the target's context window of "
                f"{self.context_length} tokens; shorten the prompt"
            )
        if int(prompts.input_ids.max()) >= self.vocab_size or int(prompts.input_ids.min()) < 0:
            raise ValueError(f"a prompt has token ids beyond the target's {self.vocab_size}: is it another tokenizer's?")
        if not self._kinds:
            require_tree_attention(self.model)
            self._kinds = attention_kinds(self.model)
            try:
                self._probe()
            except (TypeError, AttributeError, LookupError, NotImplementedError, RuntimeError) as error:
                self._kinds, self._cache = {}, None  # asked again, it is probed again
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise ValueError(
                    f"{type(self.model).__name__} can't be driven by 4-D masks, position ids and a cache, which reading draft "
                    f"trees needs ({type(error).__name__}: {error}). Choose another target"
                ) from error
            except BaseException:
                self._kinds, self._cache = {}, None
                raise

    def _prefill(self, prompts: Prompts, capacity: int, *, num_texts: int = 0) -> TargetOutput:
        self.num_prefills += 1
        cache = self._empty_cache(len(prompts.lengths) + num_texts, capacity)
        cache.host_lengths = [0] * len(prompts.lengths)
        cache.begin_prefill(prompts.input_ids.shape[1])
        positions = torch.arange(prompts.input_ids.shape[1], device=self.device)[None]
        # No mask: under causal attention no token sees the padding on its right.
        last = sorted({length - 1 for length in prompts.lengths})
        keep = torch.tensor(last, device=self.device)
        output = self._forward(self.model, prompts.input_ids, positions, None, logits_to_keep=keep)
        row, column = range(len(prompts.lengths)), [last.index(length - 1) for length in prompts.lengths]
        cache.commit(None, torch.tensor(prompts.lengths, device=self.device))
        cache.note(prompts.lengths)
        cache.trim()
        return replace(output, logits=output.logits[row, column][:, None])

    def _empty_cache(self, batch: int, capacity: int) -> TreeCache:
        """The cache that is there, if it is large enough: what was recorded for it stays good."""
        if self._cache is not None and self._cache.fits(batch, capacity):
            self._cache.restart(batch)
        else:
            self._cache = None  # before the next takes its memory
            self._forget_graphs()
            self._cache = TreeCache(
                self._text_config.num_hidden_layers,
                batch,
                capacity,
                self.device,
                extent_step=self.extent_step,
                is_fixed=self.has_fixed_shapes,
            )
        return self._cache

    def verify(self, last_token: Int[torch.Tensor, " batch"], tree: DraftTree, *, num_read: int = 0) -> TargetOutput:
        """One forward over the last committed token and the tree's nodes, each attending to its own path only.

        The first `num_read` of these entries have been read since the last commit, so only the others are, and have outputs:
        so a tree is read while it grows. With CUDA graphs the output is overwritten by the next `verify`.
        """
        cache = self._require_cache()
        is_masked = self._needs_mask(tree.num_nodes)
        if cache.begin_pass(1 + tree.num_nodes - num_read, offset=num_read, is_masked=is_masked):
            self._forget_graphs()
        if self._graphs is None:
            return self._read_tree(last_token, tree.tokens, tree.lineage)
        key = (cache.extent, self._feature_layers, num_read)
        return self._graphs(last_token, tree.tokens, tree.lineage, key=key)

    def _needs_mask(self, num_nodes: int) -> bool:
        """Whether a pass needs a mask. Plain decoding of rows of one length doesn't: kernels
        without a mask are faster."""
        cache = self._require_cache()
        return num_nodes > 0 or not cache.is_even or cache.is_fixed

    def _read_tree_for_replay(self, *inputs: torch.Tensor) -> TargetOutput:
        """Read a tree; the logits lie in memory that all recordings share, since those of a batch's
        trees are large."""
        output = self._read_tree(*inputs)
        return replace(output, logits=self._logits.hold(output.logits))

    def _read_tree_with(
        self,
        model: Any,
        last_token: Int[torch.Tensor, " batch"],
        nodes: Int[torch.Tensor, "batch node"],
        lineage: Int[torch.Tensor, "batch node depth"],
    ) -> TargetOutput:
        """All of `verify` that the device does: what a CUDA graph records."""
        cache = self._require_cache()
        cache.locate()
        num_nodes = nodes.shape[1]
        tokens, positions = last_token[:, None], cache.lengths[:, None]
        if num_nodes:
            tokens = torch.cat([tokens, nodes.clamp(min=0)], dim=1)
            positions = positions + torch.nn.functional.pad(depths(lineage), (1, 0))
        # What lies beyond the context window can never be emitted; it only must not index past a position table.
        positions = positions.clamp(max=self.context_length - 1)
        unread = slice(1 + num_nodes - cache.num_written, None)
        tokens, positions = tokens[:, unread], positions[:, unread]
        if not self._needs_mask(num_nodes):
            return self._forward(model, tokens, positions, None)
        masks = masks_by_kind(self._kinds, lineage, cache.lengths, cache.extent, self.dtype, unread)
        with grouped_heads(self.model):
            return self._forward(model, tokens, positions, masks)

    def commit(self, tree: DraftTree, acceptance: Acceptance, num_accepted: Sequence[int]) -> None:
        """Keep each row's last committed token and accepted path in the KV cache; forget the other nodes.

        `num_accepted` is the acceptance's own, as the host knows it.
        """
        entries = None
        if any(num_accepted):
            path = (acceptance.path + 1).clamp(min=0)[:, : max(num_accepted)]
            entries = torch.nn.functional.pad(path, (1, 0))
        self.keep(entries, acceptance.num_accepted + 1, [count + 1 for count in num_accepted])

    def keep(
        self, entries: Int[torch.Tensor, "batch kept"] | None, counts: Int[torch.Tensor, " batch"], host_counts: Sequence[int]
    ) -> None:
        """Keep each row's first `counts` of these entries (0: the last committed token, n + 1: node n; None: as they lie) in
        the KV cache; forget the others. `host_counts` are the same, as the host knows them."""
        cache = self._require_cache()
        cache.commit(entries, counts)
        cache.note(host_counts)

    def rewind(self, num_tokens: Int[torch.Tensor, " batch"], host_counts: Sequence[int]) -> None:
        """Forget the last committed tokens, so many in each row: as the device and the host know it."""
        self.keep(None, -num_tokens, [-count for count in host_counts])

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch only."""
        self._require_cache().select(rows)

    def release_cache(self) -> None:
        """Give back the memory of keys and values, and of what was recorded for it. The next prefill takes it again.

        What else runs the model meanwhile keeps no layer's inputs alive."""
        self._cache = None
        self._captured.layers = ()
        self._forget_graphs()
        self._logits = SharedBuffer()

    def release_hooks(self) -> None:
        """Take off the model what reads its hidden states; the next pass puts it on again."""
        self._captured.detach()

    def _require_cache(self) -> TreeCache:
        assert self._cache is not None, "prefill comes before verify and commit"
        return self._cache

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()

    def _forward(
        self,
        model: Any,
        tokens: Int[torch.Tensor, "batch query"],
        positions: Int[torch.Tensor, "rows query"],
        masks: Any,
        **kwargs: Any,
    ) -> TargetOutput:
        cache = self._require_cache()
        with self._captured.states_of_pass(self._feature_layers) as states:
            output = model(
                input_ids=tokens,
                attention_mask=masks,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                **kwargs,
            )
        return TargetOutput(logits=output.logits, hidden_states=states.last, features=states.layer_inputs)

    @torch.inference_mode()
    def _probe(self) -> None:
        """Raise ValueError where a little tree gives other logits than its paths do in plain forward passes."""
        text = torch.arange(3, 15, device=self.device) % self.vocab_size
        prompts = Prompts.of([text[:8], text[:5]])
        # Two paths, a b and c, whose nodes lie in the order a c b.
        tokens, parents = torch.tensor([[5, 7, 6]] * 2, device=self.device), torch.tensor([[-1, -1, 0]] * 2, device=self.device)
        tree = DraftTree(tokens=tokens % self.vocab_size, parents=parents, max_depth=2)
        last = text[[8, 9]]
        start = self._prefill(prompts, capacity=24).logits
        first = self._verify_eagerly(last, tree).logits
        path = torch.tensor([[0, 2], [1, -1]], device=self.device)
        accepted = Acceptance(path=path, num_accepted=torch.tensor([2, 1], device=self.device), bonus_token=last)
        self.commit(tree, accepted, [2, 1])
        second = self._verify_eagerly(text[[10, 11]], chain_tree(tree.tokens[:, :1])).logits
        self._cache = None
        rows = [
            (start[0, 0], [*text[:8]]),
            (start[1, 0], [*text[:5]]),
            (first[0, 2], [*text[:9], tree.tokens[0, 1]]),
            (first[1, 3], [*text[:5], text[9], *tree.tokens[0, [0, 2]]]),
            (second[0, 1], [*text[:9], *tree.tokens[0, [0, 2]], text[10], tree.tokens[0, 0]]),
            (second[1, 1], [*text[:5], text[9], tree.tokens[1, 1], text[11], tree.tokens[1, 0]]),
        ]
        if not all(logits.isfinite().all() for logits in (start, first, second)):
            raise ValueError(
                f"the logits of {self.identity.name} are not all numbers: its weights are damaged, or overflow {self.dtype}"
            )
        errors = [self._difference(logits, torch.stack(path_ids)) for logits, path_ids in rows]
        if not all(error < self.rounding for error in errors):  # NaN is below nothing
            raise ValueError(
                f"{type(self.model).__name__} reads a draft tree differently from plain texts (relative error "
                f"{max(errors):.2g} of its logits): something beside masks and position ids tells it where a token stands, so "
                "decoding trees would change its output. Choose another target"
            )

    def _verify_eagerly(self, last_token: Int[torch.Tensor, " batch"], tree: DraftTree) -> TargetOutput:
        """Compiling or recording for the probe's shapes would be for nothing."""
        self._require_cache().begin_pass(1 + tree.num_nodes, is_masked=self._needs_mask(tree.num_nodes))
        return self._read_tree_with(self.model, last_token, tree.tokens, tree.lineage)

    def _difference(self, logits: Float[torch.Tensor, " vocab"], text: Int[torch.Tensor, " seq"]) -> float:
        """Relative, of logits less their mean: what all tokens share hides no error, since softmax doesn't see it."""
        plain = self.model(text[None], use_cache=False).logits[0, -1].float()
        error = logits.float() - plain
        return float((error - error.mean()).norm() / (plain - plain.mean()).norm())
