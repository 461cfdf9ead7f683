"""What EAGLE-1, -2 and -3 share: one decoder layer that goes on where the target's features end, and the trees it drafts.

Entry t of a text pairs the embedding of token t + 1 with the target's feature at token t; the layer's output there predicts
token t + 2 and stands in for the feature at t + 1, which the target hasn't computed yet (arXiv 2401.15077, section 3.1).

    token after entry      c_0        c_1        c_2            c_0: chosen by the target, c_1..: drafted
    entry             (c_0, f_i)  (c_1, g_0)  (c_2, g_1)        f: the target's feature, g: the layer's own output
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass as options
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache

from ...data.fields import OPTIONS, PositiveInt, one_of
from ...data.types import DrafterBatch
from ..decoding.prompts import Prompts
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import AcceptedPath, TargetOutput
from ..target.hf_target import HFTarget
from ..target.tree_cache import CacheSnapshot
from .base import TrainableDrafter
from .beams import MAX_SEARCH_NODES, pack_likeliest
from .branches.attention import Entries, KeysAndValues
from .branches.layout import Branches
from .decoder_layer import check_form, make_layer, make_rotary
from .feature_search import FeatureState, completed, read_committed, read_prompts, search
from .objective import Labels
from .vocabulary import DraftVocabulary


@options(kw_only=True, config=OPTIONS)
class TreeOptions:
    """The layer's form, and the shape of the draft tree, all of which may be changed when a drafter is loaded."""

    layer: Annotated[dict[str, Any], AfterValidator(check_form)] | None = None
    """The decoder layer where it isn't of the target's own kind: `model_type` (llama, qwen2 or qwen3) and what differs from the
    target's configuration, under transformers' names. Serving engines draft with Llama's layers, whatever the target's are."""
    tree: Annotated[str, one_of("dynamic", "static")] = "dynamic"
    """`dynamic`: grow where the drafter is surest (EAGLE-2, arXiv 2406.16858, section 4); `static`: the same ranks always
    (EAGLE-1)."""
    depth: PositiveInt = 6
    """Draft tokens on the longest path."""
    top_k: PositiveInt = 8
    """Nodes expanded at each depth, and children of each."""
    tree_nodes: PositiveInt = 48
    """Nodes of the tree: so many of the likeliest that the search met."""

    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"tree", "depth", "top_k", "tree_nodes"})

    def __post_init__(self) -> None:
        if self.depth * self.top_k**2 > MAX_SEARCH_NODES:
            raise ValueError(
                f"depth is {self.depth} and top_k {self.top_k}; a search of more than {MAX_SEARCH_NODES} nodes is a mistake: "
                "lower one of them"
            )


@runtime_checkable
class KeyValues(Protocol):
    """What the layer's attention asks of a cache."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take up keys and values [batch, kv_head, entry, head_dim], and give back all that are read now."""


class FeatureDrafter(TrainableDrafter):
    """One decoder layer over pairs of embedding and feature. Subclasses say how the pair goes in and how tokens come out."""

    config: TreeOptions
    vocab_size: int
    layer: Any
    """A decoder layer of the target's kind."""
    _keep_activations: bool = True

    def __init__(self, target: HFTarget, *, input_width: int, form: dict[str, Any] | None) -> None:
        """The layer's attention reads vectors of `input_width`."""
        super().__init__()
        self.vocab_size = target.vocab_size
        self.layer = make_layer(target, input_width, form)
        self.own_rotary = None if form is None else make_rotary(target, form)
        # The target's parts are read, not owned: in a tuple, they are neither saved nor trained with the drafter.
        self._target_parts = target.embed_tokens, None if form else target.model.get_decoder().rotary_emb

    @abstractmethod
    def target_features(self, source: TargetOutput | DrafterBatch) -> Float[torch.Tensor, "batch seq feature"]:
        """The features that the drafter reads of what the target computed. Raises ValueError where they are missing."""

    @abstractmethod
    def fuse(self, features: Float[torch.Tensor, "*batch feature"]) -> Float[torch.Tensor, "*batch hidden"]:
        """The target's features as the layer's own outputs are: what it is fed at the first depth."""

    @abstractmethod
    def layer_inputs(
        self, embeddings: Float[torch.Tensor, "batch seq hidden"], hidden: Float[torch.Tensor, "batch seq hidden"]
    ) -> tuple[Float[torch.Tensor, "batch seq _"], Float[torch.Tensor, "batch seq hidden"]]:
        """What the attention reads of the pairs, and what its output is added to."""

    @abstractmethod
    def logits(self, outputs: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch draft_vocab"]:
        """Logits of the next token, of the layer's outputs."""

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that the head's outputs stand for."""
        return DraftVocabulary(size=self.vocab_size)

    def embed(self, tokens: Int[torch.Tensor, "*batch"]) -> Float[torch.Tensor, "*batch hidden"]:
        """The target's embeddings, in the drafter's own dtype."""
        embeddings: torch.Tensor = self._target_parts[0](tokens)
        return embeddings.to(next(self.parameters()).dtype)

    def read(
        self,
        tokens: Int[torch.Tensor, "batch seq"],
        hidden: Float[torch.Tensor, "batch seq hidden"],
        positions: Int[torch.Tensor, "rows seq"],
        cache: KeyValues,
        mask: Bool[torch.Tensor, "batch 1 seq key"] | None,
        **options: Any,
    ) -> Float[torch.Tensor, "batch seq hidden"]:
        """The layer's outputs at these entries, whose keys and values the cache takes up.

        `mask` says which of the cache's entries each sees. Without one, that is all: of a text before the branches that hang
        from it, one layer needs no more.
        """
        attended, residual = self.layer_inputs(self.embed(tokens), hidden)
        rotary: Any = self.own_rotary or self._target_parts[1]
        attention, _ = self.layer.self_attn(
            attended,
            position_embeddings=rotary(attended, positions),
            attention_mask=mask,
            past_key_values=cache,
            **options,
        )
        if mask is None:
            return hidden
        hidden = residual + attention
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))

    # --- training

    def unroll(
        self, batch: DrafterBatch, labels: Labels, features: Float[torch.Tensor, "batch seq feature"]
    ) -> Float[torch.Tensor, "position depth hidden"]:
        """The layer's outputs at every position and depth, as decoding has them: only the first depth is fed features, the
        others the outputs before them (EAGLE-3's training-time test, arXiv 2503.01840, section 3.2).

        The paper unrolls along the text; here the tokens are the target's own continuations.
        """
        branches, cache, hidden = Branches.of(batch), DynamicCache(), self.fuse(features)
        next_tokens = pad(batch.input_ids[:, 1:], (0, 1))  # that of a text's last token is read by no branch
        self.read(next_tokens, hidden, batch.position_ids, cache, None)
        if not len(labels.given):  # nothing is asked of these texts; yet the loss must have a gradient, of nothing
            nothing = torch.cat([each.flatten()[:0] for each in self.parameters() if each.requires_grad])
            return hidden.new_zeros(0, *labels.given.shape[1:], hidden.shape[-1]) + nothing.sum()
        of_text: Any = cache.layers[0]
        text = of_text.keys, of_text.values
        seen = branches.text_mask(with_own_column=False)
        hidden = branches.spread(hidden[batch.positions])
        own: list[KeysAndValues] = []
        outputs = []
        for depth, tokens in enumerate(labels.given.clamp(min=0).unbind(1)):
            step = self._go_deeper if self._keep_activations else partial(checkpoint, self._go_deeper, use_reentrant=False)
            given, positions = branches.spread(tokens), branches.positions + depth
            hidden, keys, values = step(given, hidden, positions, seen, text, tuple(own))
            own.append((keys, values))
            outputs.append(branches.collect(hidden))
        return torch.stack(outputs, dim=1)

    def _go_deeper(
        self,
        tokens: Int[torch.Tensor, "batch branch"],
        hidden: Float[torch.Tensor, "batch branch hidden"],
        positions: Int[torch.Tensor, "batch branch"],
        seen: Bool[torch.Tensor, "batch 1 branch seq"],
        text: KeysAndValues,
        own: tuple[KeysAndValues, ...],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The outputs at the branches' entries of one depth, and their keys and values."""
        entries = Entries(text, own)
        outputs = self.read(tokens, hidden, positions, entries, seen, entries=entries)
        return outputs, *entries.own[-1]

    def checkpoint_activations(self) -> None:
        self._keep_activations = False

    # --- decoding

    @property
    def max_nodes(self) -> int:
        width = min(self.config.top_k, self.vocabulary.num_outputs)
        sizes = [width]
        for _ in range(self.config.depth - 1):
            sizes.append(width * min(self.config.top_k, sizes[-1]))
        return min(self.config.tree_nodes, sum(sizes))

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> FeatureState:
        return read_prompts(self, prompts, self.target_features(prefill), max_new_tokens=max_new_tokens)

    def propose(
        self, state: FeatureState, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, CacheSnapshot]:
        """Draft the likeliest `tree_nodes` nodes of a search that starts at the last committed token."""
        cache = state.text.writable()
        tree_of_search = search(self, cache, read_committed(self, cache, state, last_token))
        return pack_likeliest(tree_of_search, self.config.tree_nodes), cache.snapshot()

    def advance(self, drafted: CacheSnapshot, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> FeatureState:
        return completed(drafted, tree.tokens, accepted, self.target_features(output))

    def select(self, state: FeatureState, rows: Sequence[int]) -> FeatureState:
        return state.select(rows)
