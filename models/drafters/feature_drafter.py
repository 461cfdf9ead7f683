"""The common part of EAGLE-1, -2 and -3 and MTP heads: one decoder layer over features, its training and search.

Entry t of a text pairs the embedding of token t + 1 with the target's feature at token t. The
layer's output at entry t predicts token t + 2. It also replaces the feature at t + 1, which the
target hasn't computed yet (arXiv 2401.15077, section 3.1).

    predicts      c_1         c_2         c_3
    entry      (c_0, f_t)  (c_1, g_0)  (c_2, g_1)   f: target's feature, g: layer's output before
                                                    c_0: chosen by the target, c_1..: drafted
"""

from abc import abstractmethod
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache

from ...data.types import DrafterBatch
from ..decoding.sampling import Randomness, foreseen
from ..decoding.types import NO_NODE, TargetOutput
from ..llm.hf_target import HFTarget
from ..llm.tree_attention import expanded, visible_columns
from ..llm.tree_cache import TreeCache
from .beams import SearchTree, largest
from .branches import Branches, Entries, KeysAndValues, Masks
from .cached_drafter import CachedText
from .decoder_layer import LayerDrafter, Rotation
from .labels import Labels
from .objective import Loss, Objective
from .scoring import score
from .shared_options import TreeOptions


class TextEntries(NamedTuple):
    """Entries of the tokens of texts: the drafter's input at them, and keys and values."""

    hidden: Float[torch.Tensor, "batch seq hidden"]
    keys: torch.Tensor
    values: torch.Tensor


class FeatureDrafter(LayerDrafter):
    """A drafter with one decoder layer over pairs of embedding and feature.

    Subclasses define the layer's inputs and the logits of its outputs.
    """

    config: TreeOptions
    vocab_size: int
    layer: Any
    """A decoder layer of the target's kind, or of `config.layer`."""

    def __init__(
        self, target: HFTarget, layer: nn.Module, form: dict[str, Any] | None = None, *, kind: str | None = None
    ) -> None:
        """Read pairs with `layer`, which has this form; if the form is None, it is like the target's layers.

        `kind` is the kind of layer whose rotary embeddings it uses; None is the target's first layer's.
        """
        super().__init__()
        self.vocab_size = target.vocab_size
        self.layer = layer
        self.share(target, form, kind)

    @abstractmethod
    def target_features(self, source: TargetOutput | DrafterBatch) -> Float[torch.Tensor, "batch seq feature"]:
        """Return the features that the drafter reads. Raises ValueError if they are missing."""

    @abstractmethod
    def fuse(self, features: Float[torch.Tensor, "*batch feature"]) -> Float[torch.Tensor, "*batch hidden"]:
        """Map the target's features to the layer's output space: its input at the first depth."""

    def token_inputs(self, embeddings: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch hidden"]:
        """Return the part of the attention's input that is made of the embeddings alone."""
        return embeddings

    @abstractmethod
    def layer_inputs(
        self, inputs: Float[torch.Tensor, "batch seq hidden"], hidden: Float[torch.Tensor, "batch seq hidden"]
    ) -> tuple[Float[torch.Tensor, "batch seq _"], Float[torch.Tensor, "batch seq hidden"]]:
        """Return the input of the attention for pairs of `token_inputs` and feature, and the residual it is added to."""

    def layer_outputs(self, outputs: Float[torch.Tensor, "batch seq hidden"]) -> Float[torch.Tensor, "batch seq hidden"]:
        """Map the layer's outputs to those that `logits` and deeper steps read."""
        return outputs

    @abstractmethod
    def logits(self, outputs: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch draft_vocab"]:
        """Return the logits of the next token from the layer's outputs."""

    def read(
        self,
        tokens: Int[torch.Tensor, "batch seq"],
        hidden: Float[torch.Tensor, "batch seq hidden"],
        positions: Int[torch.Tensor, "rows seq"],
        cache: Any,
        mask: Bool[torch.Tensor, "batch 1 seq key"] | None,
    ) -> Float[torch.Tensor, "batch seq hidden"]:
        """Return the layer's outputs at these entries, and add their keys and values to the cache.

        `mask` marks the cache entries that each entry sees. With mask None the method only adds
        keys and values and returns `hidden`: branches read no more than that from their text.
        """
        inputs = self.token_inputs(self.embed(tokens))
        return self._read(inputs, hidden, self.rotation(inputs, positions), positions, cache, mask)

    def _read(
        self,
        inputs: Float[torch.Tensor, "batch seq hidden"],
        hidden: Float[torch.Tensor, "batch seq hidden"],
        rotation: Rotation,
        positions: Int[torch.Tensor, "rows seq"],
        cache: Any,
        mask: Bool[torch.Tensor, "batch 1 seq key"] | None,
        **options: Any,
    ) -> Float[torch.Tensor, "batch seq hidden"]:
        """Do what `read` does, with the `token_inputs` and the rotary embeddings of the entries.

        It runs the parts of the layer, whose own `forward` isn't called.
        """
        attended, residual = self.layer_inputs(inputs, hidden)
        attention, _ = self.layer.self_attn(
            attended,
            position_embeddings=tuple(part.to(attended.dtype) for part in rotation),  # autocast may choose another type
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            **options,
        )
        if mask is None:
            return hidden
        hidden = residual + attention
        return self.layer_outputs(hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden)))

    # --- training

    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """Return the objective at all depths, weighted by powers of LOSS_DECAY (EAGLE-3, arXiv 2503.01840, section 3.2).

        An MTP head is trained alike: it drafts every depth, too.
        """
        labels = Labels.of(batch)
        outputs = self.unroll(batch, labels, self.read_text(batch, self.target_features(batch)))
        return score(self.logits, (outputs,), labels, batch, objective, vocabulary=self.vocabulary).decayed(objective)

    def read_text(self, batch: DrafterBatch, features: Float[torch.Tensor, "batch seq feature"]) -> TextEntries:
        """Return what branches read of their texts. No branch reads the entry of a text's last token."""
        cache, hidden = DynamicCache(), self.fuse(features)
        self.read(pad(batch.input_ids[:, 1:], (0, 1)), hidden, batch.position_ids, cache, None)
        layer: Any = cache.layers[0]
        return TextEntries(hidden, *expanded(self.layer.self_attn, layer.keys, layer.values))

    def unroll(self, batch: DrafterBatch, labels: Labels, text: TextEntries) -> Float[torch.Tensor, "position depth hidden"]:
        """Return the layer's outputs at every position and depth, computed as in decoding.

        Only the first depth reads features. Deeper ones read the outputs of the depth before
        (EAGLE-3's training-time test, arXiv 2503.01840, section 3.2). The paper unrolls along the
        text; here the tokens are the target's continuations.
        """
        # 1. Without labels, return an empty tensor whose gradient reaches every parameter.
        branches, hidden = Branches.of(batch, labels.positions), text.hidden
        if not len(labels.previous):
            empty = torch.cat([parameter.flatten()[:0] for parameter in self.parameters() if parameter.requires_grad])
            return hidden.new_zeros(0, *labels.previous.shape[1:], hidden.shape[-1]) + empty.sum()
        # The text's entry at a branch's own place holds the text's next token, and the branch has one with c_0 there.
        visible = branches.text_mask(with_own_column=False)
        # 2. Tokens and positions of all depths. Their embeddings are computed at once.
        tokens = branches.spread(labels.inputs).transpose(1, 2)  # [batch, depth, branch]
        num_depths = tokens.shape[1]
        positions = branches.positions[:, None] + torch.arange(num_depths, device=tokens.device)[:, None]
        inputs = self.token_inputs(self.embed(tokens))
        cos, sin = (part.unflatten(1, (num_depths, -1)).unbind(1) for part in self.rotation(inputs, positions.flatten(1)))
        # 3. Read the branches depth by depth.
        hidden, masks = branches.spread(labels.at_positions(hidden)), Masks()
        step = self._go_deeper if self._keep_activations else partial(checkpoint, self._go_deeper, use_reentrant=False)
        earlier: list[KeysAndValues] = []
        outputs = []
        for depth, depth_inputs in enumerate(inputs.unbind(1)):
            rotation = cos[depth], sin[depth]
            hidden, keys, values = step(
                depth_inputs, hidden, rotation, positions[:, depth], visible, text[1:], tuple(earlier), masks
            )
            earlier.append((keys, values))
            outputs.append(branches.collect(hidden))
        return torch.stack(outputs, dim=1)

    def _go_deeper(
        self,
        inputs: Float[torch.Tensor, "batch branch hidden"],
        hidden: Float[torch.Tensor, "batch branch hidden"],
        rotation: Rotation,
        positions: Int[torch.Tensor, "batch branch"],
        visible: Bool[torch.Tensor, "batch 1 branch seq"],
        text: KeysAndValues,
        earlier: tuple[KeysAndValues, ...],
        masks: Masks,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the outputs of the branches' entries at one depth, and their keys and values."""
        entries = Entries(text, earlier, masks)
        outputs = self._read(inputs, hidden, rotation, positions, entries, visible, entries=entries)
        return outputs, *entries.branches[-1]

    # --- decoding

    @property
    def max_nodes(self) -> int:
        sizes = [self._num_children]
        while len(sizes) < self.config.depth:
            sizes.append(self._num_children * min(self.config.top_k, sizes[-1]))
        return min(self.config.tree_nodes, sum(sizes))

    @property
    def _num_children(self) -> int:
        return min(self.config.top_k, self.vocabulary.num_outputs)

    def write(self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, cache: TreeCache) -> None:
        self.read(tokens, self.fuse(features), positions, cache, None)

    def search_after(self, state: CachedText, last_token: Int[torch.Tensor, " batch"], generator: Randomness) -> SearchTree:
        """Read the new entries, then search."""
        return self._search(state.cache, self._read_unread(state, last_token), generator)

    def _read_unread(self, state: CachedText, last_token: Int[torch.Tensor, " batch"]) -> Float[torch.Tensor, "batch hidden"]:
        """Read an entry for each unread token, and return the output of each row's last one."""
        # 1. An entry pairs a token's feature with the token after it. After the last unread token comes
        # `last_token`.
        cache, tokens = state.cache, state.with_last(last_token)[:, 1:]
        assert state.unread_features is not None
        num_entries = tokens.shape[1]
        # 2. Read them.
        cache.begin_pass(num_entries)
        cache.locate()
        lengths = cache.lengths.device
        steps = torch.arange(num_entries, device=tokens.device)
        related = (steps <= steps[:, None]).expand(len(tokens), -1, -1)
        mask = visible_columns(related, lengths, cache.extent)[:, None]
        outputs = self.read(tokens, self.fuse(state.unread_features), lengths[:, None] + steps, cache, mask)
        cache.keep(None, state.num_unread)
        last = (state.num_unread.device - 1)[:, None, None].expand(-1, -1, outputs.shape[-1])
        return outputs.gather(1, last)[:, 0]

    def _search(self, cache: TreeCache, output: Float[torch.Tensor, "batch hidden"], generator: Randomness) -> SearchTree:
        """Search for the most probable paths, and return all children of expanded nodes.

        At each depth the `top_k` most probable nodes are expanded (arXiv 2406.16858, section 4.1).
        `output` is the layer's output at the entry of the last token. The nodes' entries aren't kept:
        `advance` makes accepted tokens unread, to be read with the target's features.
        """
        lengths, hidden = cache.lengths.device, output[:, None]
        # The nodes to expand, and the log-probabilities of their paths: at first the root.
        scores = torch.zeros(len(output), 1, device=output.device)
        nodes, num_nodes = torch.full_like(scores, NO_NODE, dtype=torch.long), 0
        levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        # For each of them, which of the entries read so far are the node itself or its ancestors.
        related = torch.zeros(len(output), 1, 0, dtype=torch.bool, device=output.device)
        while True:
            # 1. The children of each node, in its order.
            tokens, log_probs = self._likeliest_children(hidden, len(levels), generator)
            num_children, scores = tokens.shape[2], (scores[..., None] + log_probs).flatten(1)
            tokens = tokens.flatten(1)
            levels.append((tokens, nodes.repeat_interleave(num_children, dim=1), scores))
            if len(levels) == self.config.depth:
                return SearchTree.of(levels)
            # 2. The most probable paths of this depth. A stable sort, unlike `topk`, takes the first of equal scores on
            # every device.
            chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.config.top_k]
            nodes, num_nodes = num_nodes + chosen, num_nodes + tokens.shape[1]
            tokens, scores, parent = tokens.gather(1, chosen), scores.gather(1, chosen), chosen // num_children
            itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
            offset = related.shape[2]
            related = torch.cat([related.gather(1, parent[..., None].expand(-1, -1, offset)), itself], dim=2)
            # 3. Read these nodes.
            cache.begin_pass(tokens.shape[1], offset=offset)
            cache.locate()
            hidden = self.read(
                tokens,
                hidden.gather(1, parent[..., None].expand(-1, -1, hidden.shape[-1])),
                (lengths + len(levels) - 1)[:, None].expand_as(tokens),
                cache,
                visible_columns(related, lengths, cache.extent)[:, None],
            )

    def _likeliest_children(
        self, outputs: Float[torch.Tensor, "batch node hidden"], depth: int, generator: Randomness
    ) -> tuple[Int[torch.Tensor, "batch node child"], Float[torch.Tensor, "batch node child"]]:
        """Return the most probable tokens after each node, and their log-probabilities (at most 0)."""
        logits = foreseen(self.logits(outputs), range(depth, depth + 1), generator, self.vocabulary.target_tokens)
        log_probs, chosen = largest(logits.log_softmax(-1, dtype=torch.float32), self._num_children)
        return self.vocabulary.target_tokens(chosen), log_probs

    @property
    def num_cache_layers(self) -> int:
        return 1

    @property
    def draft_entries(self) -> int:
        return self.config.depth + 1

    @property
    def draft_columns(self) -> int:
        return self.draft_entries + (self.config.depth - 1) * self.config.top_k


class StateDrafter(FeatureDrafter):
    """A drafter whose features are the target's last hidden states, and whose outputs approximate them.

    The target's head computes the logits.
    """

    def __init__(self, target: HFTarget, layer: nn.Module, form: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(target, layer, form, **options)
        # A reference only: in a tuple, it is neither saved nor trained with the drafter.
        self._head = (target.head,)
        # This may run on the meta device to find shapes; the target has a real device all the same.
        with torch.device(target.device):
            target.require_plain_head()

    def target_features(self, source: TargetOutput | DrafterBatch) -> Float[torch.Tensor, "batch seq hidden"]:
        return self.hidden_states_of(source)

    def fuse(self, features: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch hidden"]:
        return features.to(next(self.parameters()).dtype)

    def logits(self, outputs: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch vocab"]:
        head = self._head[0]
        logits: torch.Tensor = head(outputs.to(head.weight.dtype))
        return logits
