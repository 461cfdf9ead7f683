"""What EAGLE-1, -2 and -3 share: one decoder layer that goes on where the target's features end, and the trees it drafts.

Entry t of a text pairs the embedding of token t + 1 with the target's feature at token t; the layer's output there predicts
token t + 2 and stands in for the feature at t + 1, which the target hasn't computed yet (arXiv 2401.15077, section 3.1).

    token after entry      c_0        c_1        c_2            c_0: chosen by the target, c_1..: drafted
    entry             (c_0, f_i)  (c_1, g_0)  (c_2, g_1)        f: the target's feature, g: the layer's own output
"""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...data.types import DrafterBatch
from ..decoding.prompts import Prompts
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE, Acceptance, TargetOutput
from ..hf_target import HFTarget
from ..hidden_states import decoder_layers
from ..interfaces import TrainableDrafter
from ..quantization import require_plain_weights
from ..tree_attention import IMPLEMENTATION as GROUPED_HEADS
from ..tree_attention import visible_columns
from ..tree_cache import TreeCache
from .beams import MAX_SEARCH_NODES, SearchTree, pack_likeliest
from .branches import Branches
from .objective import DraftVocabulary, Labels

EXPECTED_NEW_TOKENS = 256
"""Room that the layer's cache has behind a prompt at first; it grows."""

STATIC_FIRST_HIT = 0.6
"""Static trees take the r-th likeliest child (from 0) to be right with probability STATIC_FIRST_HIT / (r + 1)^2. With four
children and 26 nodes that makes a tree like that of EAGLE-1 (arXiv 2401.15077, appendix): deep below the likeliest, bushy near
the root."""


@dataclass(kw_only=True)
class TreeOptions:
    """Shape of the draft tree. All of it may be changed when a drafter is loaded."""

    tree: str = "dynamic"
    """`dynamic`: grow where the drafter is surest (EAGLE-2, arXiv 2406.16858, section 4); `static`: the same ranks always
    (EAGLE-1)."""
    depth: int = 6
    """Draft tokens on the longest path."""
    top_k: int = 8
    """Nodes expanded at each depth, and children of each."""
    tree_nodes: int = 48
    """Nodes of the tree: so many of the likeliest that the search met."""

    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"tree", "depth", "top_k", "tree_nodes"})

    def __post_init__(self) -> None:
        if self.tree not in ("dynamic", "static"):
            raise ValueError(f"drafter.tree is {self.tree!r}; it must be dynamic or static")
        for name in ("depth", "top_k", "tree_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter.{name} is {getattr(self, name)}; it must be at least 1")
        if self.depth * self.top_k**2 > MAX_SEARCH_NODES:
            raise ValueError(
                f"drafter.depth is {self.depth} and drafter.top_k {self.top_k}; a search of more than {MAX_SEARCH_NODES} nodes "
                "is a mistake: lower one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureState:
    """What the drafter knows of each text: keys and values of the entries read so far, in a cache that `propose` and `select`
    write to, and the entries that the target has completed since, but for the last one's token.

    Row b has `num_accepted[b] + 1` of those entries: `features[b, :num_accepted[b] + 1]`, and the tokens that go with all but
    the last.
    """

    cache: TreeCache
    tokens: Int[torch.Tensor, "batch accepted"]
    features: Float[torch.Tensor, "batch entry feature"]
    num_accepted: Int[torch.Tensor, " batch"]
    host_num_accepted: tuple[int, ...]


class FeatureDrafter(TrainableDrafter):
    """One decoder layer over pairs of embedding and feature. Subclasses say how the pair goes in and how tokens come out."""

    recordable = False  # each step reads another number of entries, and its cache grows
    config: TreeOptions
    vocab_size: int
    layer: Any
    """A decoder layer of the target's kind."""

    def __init__(self, target: HFTarget, *, input_width: int) -> None:
        """The layer's attention reads vectors of `input_width`."""
        super().__init__()
        self.vocab_size = target.vocab_size
        self.layer = make_layer(target, input_width)
        # The target's parts are read, not owned: in a tuple, they are neither saved nor trained with the drafter.
        self._target_parts = target.embed_tokens, target.model.get_decoder().rotary_emb

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
        cache: Cache,
        mask: Bool[torch.Tensor, "batch 1 seq key"] | None,
    ) -> Float[torch.Tensor, "batch seq hidden"]:
        """The layer's outputs at these entries, whose keys and values the cache takes up.

        Without a mask, that is all: of a text before the branches that hang from it, one layer needs no more.
        """
        attended, residual = self.layer_inputs(self.embed(tokens), hidden)
        attention, _ = self.layer.self_attn(
            attended,
            position_embeddings=self._target_parts[1](attended, positions),
            attention_mask=mask,
            past_key_values=cache,
        )
        if mask is None:
            return hidden
        hidden = residual + attention
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))

    # --- training

    def unroll(
        self, batch: DrafterBatch, labels: Labels, features: Float[torch.Tensor, "batch seq feature"], *, trained_depths: int
    ) -> Float[torch.Tensor, "position depth hidden"]:
        """The layer's outputs at every position and depth, as decoding has them: only the first depth is fed features, the
        others the outputs before them (EAGLE-3's training-time test, arXiv 2503.01840, section 3.2).

        The paper unrolls along the text; here the tokens are the target's own continuations. Depths from `trained_depths` on
        are computed without gradient.
        """
        branches, cache, hidden = Branches.of(batch), DynamicCache(), self.fuse(features)
        next_tokens = pad(batch.input_ids[:, 1:], (0, 1))
        self.read(next_tokens, hidden, torch.arange(next_tokens.shape[1], device=hidden.device)[None], cache, None)
        hidden = branches.spread(hidden[batch.positions])
        outputs = []
        for depth, tokens in enumerate(labels.given.clamp(min=0).unbind(1)):
            with torch.set_grad_enabled(torch.is_grad_enabled() and depth < trained_depths):
                mask = branches.mask(depth, with_own_column=False)
                hidden = self.read(branches.spread(tokens), hidden, branches.columns + depth, cache, mask)
            outputs.append(branches.collect(hidden))
        return torch.stack(outputs, dim=1)

    # --- decoding

    @property
    def max_nodes(self) -> int:
        width = min(self.config.top_k, self.vocabulary.num_outputs)
        sizes = [width]
        for _ in range(self.config.depth - 1):
            sizes.append(width * min(self.config.top_k, sizes[-1]))
        return min(self.config.tree_nodes, sum(sizes))

    def init_state(self, prompts: Prompts, prefill: TargetOutput) -> FeatureState:
        """Reads all entries of the prompts but the last, whose token is the target's first answer."""
        features = self.target_features(prefill)
        batch, num_tokens = prompts.input_ids.shape
        room = EXPECTED_NEW_TOKENS + self.config.depth * self.config.top_k
        cache = TreeCache(1, batch, num_tokens + room, features.device)
        if num_tokens > 1:
            cache.begin_prefill(num_tokens - 1)
            positions = torch.arange(num_tokens - 1, device=features.device)[None]
            self.read(prompts.input_ids[:, 1:], self.fuse(features[:, :-1]), positions, cache, None)
        counts = [length - 1 for length in prompts.lengths]
        cache.commit(None, torch.tensor(counts, device=features.device))
        cache.note(counts)
        return FeatureState(
            cache=cache,
            tokens=prompts.input_ids[:, :0],
            features=prompts.last(features)[:, None],
            num_accepted=torch.zeros(batch, dtype=torch.long, device=features.device),
            host_num_accepted=(0,) * batch,
        )

    def propose(
        self, state: FeatureState, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> DraftTree:
        """The likeliest `tree_nodes` nodes of a search that starts at the last committed token."""
        return pack_likeliest(self._search(state.cache, self._read_committed(state, last_token)), self.config.tree_nodes)

    def advance(
        self,
        state: FeatureState,
        tree: DraftTree,
        acceptance: Acceptance,
        output: TargetOutput,
        num_accepted: Sequence[int],
    ) -> FeatureState:
        path = acceptance.path[:, : max(num_accepted)].clamp(min=0)  # [batch, accepted]
        entries = pad(path + 1, (1, 0))[..., None]
        features = self.target_features(output)
        return FeatureState(
            cache=state.cache,
            tokens=tree.tokens.gather(1, path).clamp(min=0),
            features=features.gather(1, entries.expand(-1, -1, features.shape[-1])),
            num_accepted=acceptance.num_accepted,
            host_num_accepted=tuple(num_accepted),
        )

    def select(self, state: FeatureState, rows: Sequence[int]) -> FeatureState:
        state.cache.select(rows)
        return FeatureState(
            cache=state.cache,
            tokens=state.tokens[rows],
            features=state.features[rows],
            num_accepted=state.num_accepted[rows],
            host_num_accepted=tuple(state.host_num_accepted[row] for row in rows),
        )

    def _read_committed(
        self, state: FeatureState, last_token: Int[torch.Tensor, " batch"]
    ) -> Float[torch.Tensor, "batch hidden"]:
        """Read the entries that the target has completed, with its own features, and return the output at the last one."""
        cache, last = state.cache, state.num_accepted[:, None]
        tokens = pad(state.tokens, (0, 1)).scatter(1, last, last_token[:, None])
        num_entries = tokens.shape[1]
        cache.begin_pass(num_entries)
        cache.locate()
        steps = torch.arange(num_entries, device=tokens.device)
        related = (steps <= steps[:, None]).expand(len(tokens), -1, -1)
        mask = visible_columns(related, cache.lengths, cache.extent)[:, None]
        outputs = self.read(tokens, self.fuse(state.features), cache.lengths[:, None] + steps, cache, mask)
        cache.commit(None, state.num_accepted + 1)
        cache.note([count + 1 for count in state.host_num_accepted])
        return outputs.gather(1, last[..., None].expand(-1, -1, outputs.shape[-1]))[:, 0]

    def _search(self, cache: TreeCache, output: Float[torch.Tensor, "batch hidden"]) -> SearchTree:
        """All children of the nodes that were expanded: at each depth the `top_k` likeliest paths (arXiv 2406.16858, section
        4.1)."""
        hidden, scores = output[:, None], torch.zeros(len(output), 1, device=output.device)  # of the nodes to expand
        node = torch.full_like(scores, NO_NODE, dtype=torch.long)  # their numbers
        related = torch.zeros(*node.shape, 0, dtype=torch.bool, device=output.device)  # entries read that each follows, or is
        levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        num_nodes = 0
        for depth in range(self.config.depth):
            tokens, log_probs = self._children(hidden)  # [batch, node, child]
            width = tokens.shape[2]
            tokens, candidates = tokens.flatten(1), (scores[..., None] + log_probs).flatten(1)
            levels.append((tokens, node.repeat_interleave(width, dim=1), candidates))
            if depth + 1 == self.config.depth:
                break
            # A sort and not `topk`: among equals the first, on every device.
            chosen = candidates.sort(dim=1, descending=True, stable=True).indices[:, : self.config.top_k]
            parent = (chosen // width)[..., None]
            own = torch.eye(chosen.shape[1], dtype=torch.bool, device=chosen.device).expand(len(chosen), -1, -1)
            offset = related.shape[2]
            related = torch.cat([related.gather(1, parent.expand(-1, -1, offset)), own], dim=2)
            scores, node = candidates.gather(1, chosen), num_nodes + chosen
            num_nodes += tokens.shape[1]
            cache.begin_pass(chosen.shape[1], offset=offset)
            cache.locate()
            hidden = self.read(
                tokens.gather(1, chosen),
                hidden.gather(1, parent.expand(-1, -1, hidden.shape[-1])),
                (cache.lengths + depth)[:, None].expand_as(chosen),
                cache,
                visible_columns(related, cache.lengths, cache.extent)[:, None],
            )
        tokens, parents, all_scores = (torch.cat(values, dim=1) for values in zip(*levels, strict=True))
        sizes = tuple(level[0].shape[1] for level in levels)
        return SearchTree(tokens=tokens, parents=parents, scores=all_scores, level_sizes=sizes)

    def _children(
        self, outputs: Float[torch.Tensor, "batch node hidden"]
    ) -> tuple[Int[torch.Tensor, "batch node child"], Float[torch.Tensor, "batch node child"]]:
        """The likeliest tokens after each node, and their log-probabilities, which are never above 0."""
        logits = self.logits(outputs).float()
        top, chosen = logits.topk(min(self.config.top_k, logits.shape[-1]), dim=-1)
        tokens = chosen if self.vocabulary.tokens is None else self.vocabulary.tokens[chosen]
        if self.config.tree == "static":
            rank = torch.arange(1, top.shape[-1] + 1, device=top.device)
            return tokens, (STATIC_FIRST_HIT / rank**2).log().expand_as(top)
        return tokens, top - logits.logsumexp(-1, keepdim=True)


# --- the decoder layer

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""Exactly these: another norm would have its place, which isn't known."""
PROJECTIONS = {
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}


def make_layer(target: HFTarget, input_width: int) -> Any:
    """A fresh layer of the target's own kind, whose attention reads vectors of `input_width`.

    Raises ValueError where the target's layers are built differently.
    """
    layers = decoder_layers(target.model)
    names = {name for name, _ in layers[0].named_modules()} if layers else set()
    if {name for name in names if name and "." not in name} != LAYER_PARTS or not names >= PROJECTIONS:
        raise ValueError(
            f"the decoder layers of {type(target.model).__name__} aren't built of attention (q, k, v and o projections), a "
            "gated MLP and a norm before each, so this drafter can't take over their form; choose the drafter redrafter"
        )
    norms_have_weights = {"input_layernorm.weight", "post_attention_layernorm.weight"} <= {
        name for name, _ in layers[0].named_parameters()
    }
    if not norms_have_weights or getattr(target.model.config.get_text_config(), "residual_multiplier", 1.0) != 1.0:
        raise ValueError(
            f"the decoder layers of {type(target.model).__name__} scale their residual stream, or have norms without weights, "
            "which this drafter's layer doesn't; choose the drafter redrafter"
        )
    if "rotary_emb" not in dict(target.model.get_decoder().named_children()):
        raise ValueError(
            f"{type(target.model).__name__} has no rotary embeddings, which this drafter's layer needs; choose the drafter "
            "redrafter"
        )
    config: Any = copy.deepcopy(target.model.config.get_text_config())
    config._attn_implementation = IMPLEMENTATION
    make: Any = type(layers[0])
    layer = make(config, layer_idx=0)
    for projection in ("q_proj", "k_proj", "v_proj"):
        old = getattr(layer.self_attn, projection)
        setattr(layer.self_attn, projection, nn.Linear(input_width, old.out_features, bias=old.bias is not None))
    return layer


@torch.no_grad()
def start_from_target(layer: Any, fc: nn.Linear, target: HFTarget) -> None:
    """Let the layer begin as the target's last one, but add nothing yet, and `fc` let through the last of its inputs as it is.

    So the first outputs are the features themselves, at every depth: EAGLE-1's layer, which has no norm at its input, would
    blow them up otherwise. Where the attention reads a pair, both halves begin with the target's weights: either is a vector of
    its residual stream.
    """
    require_plain_weights(decoder_layers(target.model)[-1], "set drafter.init=random")
    source = dict(decoder_layers(target.model)[-1].named_parameters())
    for name, parameter in layer.named_parameters():
        weight = source[name]
        parameter.copy_(weight if weight.shape == parameter.shape else torch.cat([weight, weight], dim=1))
    for parameter in (*layer.self_attn.o_proj.parameters(), *layer.mlp.down_proj.parameters(), *fc.parameters()):
        parameter.zero_()
    fc.weight[:, -fc.out_features :].fill_diagonal_(1.0)


IMPLEMENTATION = "outrider_drafter"


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. Without a mask only keys and values are wanted, and the cache has them already."""
    if attention_mask is None:
        return torch.zeros_like(query).transpose(1, 2), None
    return ALL_ATTENTION_FUNCTIONS[GROUPED_HEADS](module, query, key, value, attention_mask, **kwargs)


# Masks are always given under this name, so it needs no mask function.
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)
