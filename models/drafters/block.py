"""The block drafter: all draft tokens of a step in one pass, corrected from token to token.

    c_t = norm(W f_t)               context: the fused features of several target layers at token t
    x_0 = e(y_0) + m_0, x_k = m_k   slots; y_0 is the token that the target has just chosen
    h   = norm(layers(x))           slots read all context before y_0, and all slots of their block
    q(y_{k+1} | y_0 .. y_k)         from h_k, and a correction by the tokens before: `corrections`

DFlash (arXiv 2602.06036) projects fused features to keys and values of every layer, and computes
all slots in one pass. DSpark and Domino add a correction by the tokens before. Beyond these papers,
the drafter searches for a tree, the correction may be ReDrafter's recurrence, slots start with the
latest context (`inject`), and training has a block at every labelled position of a text.

Decoding with its trees is exact, greedily and sampled (`SpeculativeSampling`).
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache

from ...data.types import DrafterBatch
from ..decoding.sampling import Randomness, RowSeeds, Sampling, foreseen, sharpness
from ..llm.hf_target import HFTarget
from ..llm.hidden_states import decoder_layers, decoder_of
from ..llm.tree_attention import visible_columns
from ..llm.tree_cache import TreeCache
from .beams import SearchTree, beam_search
from .branches import Branches, Masks, Slots
from .cached_drafter import CachedText
from .corrections import Markov, Recurrent, lattice_search
from .decoder_layer import LayerDrafter, make_layer, start_from_target
from .fused_layers import FusedLayers, spread_feature_layers
from .labels import Labels
from .objective import Loss, Objective
from .options import BlockConfig
from .scoring import score
from .vocabulary import ReducedVocabulary

SLOT_STD = 0.02
"""Standard deviation of the slots' vectors before training, where slots read nothing else."""


class Block(FusedLayers, ReducedVocabulary, LayerDrafter):
    """The block drafter."""

    Config = BlockConfig
    DEPTH_OPTION = "depth"
    config: BlockConfig
    layers: Any

    def __init__(self, config: BlockConfig, target: HFTarget) -> None:
        super().__init__()
        width, num_target_layers = target.hidden_size, len(decoder_layers(target.model))
        if config.num_layers > num_target_layers:
            raise ValueError(f"drafter.num_layers is {config.num_layers}; the target has only {num_target_layers}")
        self.choose_feature_layers(config.feature_layers or spread_feature_layers(num_target_layers), num_target_layers)
        if config.mask_token_id is not None and config.mask_token_id >= target.vocab_size:
            raise ValueError(f"drafter.mask_token_id is {config.mask_token_id}; the target has {target.vocab_size} tokens")
        num_outputs = self.add_draft_vocabulary(config.draft_vocab_size, target.vocab_size)
        self.config, self.num_slots = config, config.num_slots or config.block
        # 1. The layers. Only a target whose layers can be copied has rotary embeddings for sure.
        self.layers = nn.ModuleList(make_layer(target, width, config.layer) for _ in range(config.num_layers))
        for index in range(config.num_layers):
            self.layers[index].self_attn.layer_idx = index
        self.share(target, config.layer)
        self._target_head = (target.head,)  # a reference only: in a tuple, it is neither saved nor trained
        # 2. The context and the slots.
        self.fc = nn.Linear(len(self.feature_layers) * width, width, bias=False)
        template = self.layers[0].input_layernorm
        self.hidden_norm, self.norm = copy.deepcopy(template), copy.deepcopy(template)
        if config.mask_token_id is None:
            self.slots = nn.Parameter(torch.zeros(self.num_slots, width))
            if not config.inject:  # zeros would enter a norm, whose gradient is enormous there
                nn.init.normal_(self.slots, std=SLOT_STD)
        # 3. The correction, and a head of a draft vocabulary.
        is_recurrent = config.correction == "rnn"
        self.correction: Recurrent | Markov = (
            Recurrent(width) if is_recurrent else Markov(target.vocab_size, num_outputs, config.rank)
        )
        if self.config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(width, num_outputs, bias=False)

    @classmethod
    def for_target(cls, config: BlockConfig, target: HFTarget) -> "Block":
        drafter = cls(config, target)
        if config.init == "target":
            for layer in drafter.layers:
                start_from_target(layer, drafter.fc, target)
            with torch.no_grad():
                drafter.norm.weight.copy_(decoder_of(target.model).norm.weight)
            if config.draft_vocab_size is not None:
                drafter.start_head(drafter.lm_head, target.head)
        return drafter

    @classmethod
    def require_horizon(cls, config: BlockConfig, horizon: int) -> None:
        super().require_horizon(config, horizon)
        num_slots, option = config.num_slots or config.block, "block" if config.num_slots is None else "num_slots"
        if horizon <= num_slots:
            raise ValueError(
                f"drafter.{option} is {num_slots} and distill.horizon {horizon}, and labels of {horizon} tokens train only "
                f"{horizon - 1} slots; lower {option} to that, or distil with distill.horizon of at least {num_slots + 1}"
            )

    # --- the network

    def head(self, outputs: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch output"]:
        """Return logits without a correction, by the drafter's own head or the target's."""
        head: nn.Linear = self.lm_head if self.config.draft_vocab_size is not None else self._target_head[0]
        logits: torch.Tensor = head(outputs.to(head.weight.dtype))
        return logits

    def context(self, features: Float[torch.Tensor, "*batch feature"]) -> Float[torch.Tensor, "*batch hidden"]:
        """Fuse the target's features of each token."""
        fused: torch.Tensor = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        return fused

    def slot_inputs(
        self, first_token: Int[torch.Tensor, " row"], latest: Float[torch.Tensor, "row hidden"]
    ) -> Float[torch.Tensor, "row slot hidden"]:
        """Return the slots' inputs, from the token y_0 and the context at the token before it."""
        first, mask_token = self.embed(first_token)[:, None], self.config.mask_token_id
        other = torch.zeros_like(first) if mask_token is None else self.embed(torch.full_like(first_token, mask_token))[:, None]
        inputs = torch.cat([first, other.expand(-1, self.num_slots - 1, -1)], dim=1)
        if mask_token is None:
            inputs = inputs + self.slots
        return inputs + latest[:, None] if self.config.inject else inputs

    def write_context(
        self, context: Float[torch.Tensor, "batch seq hidden"], positions: Int[torch.Tensor, "rows seq"], cache: Any
    ) -> None:
        """Add the keys and values of tokens to all layers' cache. Nothing else of a token is read."""
        rotations = self.rotation(context, positions)
        for index in range(self.config.num_layers):
            self.layers[index].self_attn(
                context,
                position_embeddings=rotations,
                position_ids=positions,
                attention_mask=None,
                past_key_values=cache,
            )

    def read_slots(
        self,
        inputs: Float[torch.Tensor, "batch slot hidden"],
        positions: Int[torch.Tensor, "rows query"],
        mask: Bool[torch.Tensor, "batch 1 _ key"],
        cache_of: Callable[[int], Any],
        *,
        context: Float[torch.Tensor, "batch seq hidden"] | None = None,
    ) -> Float[torch.Tensor, "batch slot hidden"]:
        """Return the outputs of slots. `cache_of` returns the cache that a layer reads and writes.

        With `context` the pass also writes the keys and values of so many tokens, whose queries
        come before those of the slots.
        """
        rotations, hidden = self.rotation(inputs, positions), inputs
        for index in range(self.config.num_layers):
            step = partial(self._layer_outputs, index, positions=positions, cache_of=cache_of, context=context)
            if not self._keep_activations:
                step = partial(checkpoint, step, use_reentrant=False)
            hidden = step(hidden, rotations, mask)
        outputs: torch.Tensor = self.norm(hidden)
        return outputs

    def _layer_outputs(
        self,
        index: int,
        hidden: torch.Tensor,
        rotations: Any,
        mask: torch.Tensor,
        *,
        positions: torch.Tensor,
        cache_of: Callable[[int], Any],
        context: torch.Tensor | None,
    ) -> torch.Tensor:
        layer, cache = self.layers[index], cache_of(index)
        entries = layer.input_layernorm(hidden)
        if context is not None:
            entries = torch.cat([context, entries], dim=1)
        attention, _ = layer.self_attn(
            entries,
            position_embeddings=rotations,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            entries=cache if isinstance(cache, Slots) else None,
        )
        hidden = hidden + attention[:, -hidden.shape[1] :]
        outputs: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return outputs

    def of_tokens(
        self, outputs: Float[torch.Tensor, "row slot hidden"], num_tokens: int
    ) -> Float[torch.Tensor, "row token hidden"]:
        """Return the output that serves each draft token: its slot's, or else the last slot's."""
        last = outputs[:, -1:].expand(-1, max(0, num_tokens - self.num_slots), -1)
        return torch.cat([outputs, last], dim=1)[:, :num_tokens]

    # --- the search: see `RecurrentDrafter`

    def first_state(self, embedding: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.correction, Recurrent)
        return self.correction.first_state(embedding)

    def next_state(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.correction, Recurrent)
        return self.correction.next_state(state, embedding)

    def logits(
        self, hidden: Float[torch.Tensor, "*batch hidden"], state: Float[torch.Tensor, "*batch state"]
    ) -> Float[torch.Tensor, "*batch output"]:
        """Return logits of the next token from a slot's output and the correction's state."""
        return self.correction.logits(hidden, state, self.head)

    # --- training

    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """Return the objective of all slots, teacher-forced, weighted by powers of LOSS_DECAY."""
        labels = Labels.of(batch)
        self.require_horizon(self.config, labels.tokens.shape[1] + 1)
        labels = labels.first(self.config.block)
        tokens = labels.inputs
        hidden = self.of_tokens(self.read_blocks(batch, labels), tokens.shape[1])
        states = self.correction.states(tokens, self.embed)
        loss = score(self.logits, (hidden, states), labels, batch, objective, vocabulary=self.vocabulary)
        return loss.decayed(objective)

    def read_blocks(self, batch: DrafterBatch, labels: Labels) -> Float[torch.Tensor, "position slot hidden"]:
        """Return the outputs of a block after each labelled position, computed as in decoding."""
        # 1. Keys and values of the texts.
        features, num_slots = self.target_features(batch), self.num_slots
        branches, cache, context = Branches.of(batch, labels.positions), DynamicCache(), self.context(features)
        self.write_context(context, batch.position_ids, cache)
        # 2. Without labels, return an empty tensor whose gradient reaches every parameter that the
        # correction doesn't use.
        if not len(labels.positions):
            own = [parameter for name, parameter in self.named_parameters() if not name.startswith("correction.")]
            empty = torch.cat([parameter.flatten()[:0] for parameter in own if parameter.requires_grad])
            return context.new_zeros(0, num_slots, context.shape[-1]) + empty.sum()
        # 3. All blocks in one pass: slot k of branch n is query k * branches + n.
        slot_inputs = self.slot_inputs(labels.inputs[:, 0], labels.at_positions(context))  # [position, slot, hidden]
        inputs = branches.spread(slot_inputs)
        slot, masks = torch.arange(num_slots, device=inputs.device), Masks()
        layers: Any = cache.layers
        positions = branches.positions[:, None] + 1 + slot[:, None]  # [batch, slot, branch]
        outputs = self.read_slots(
            inputs.transpose(1, 2).flatten(1, 2),
            positions.flatten(1),
            branches.text_mask(with_own_column=True).repeat(1, 1, num_slots, 1),
            lambda index: Slots((layers[index].keys, layers[index].values), num_slots, masks),
        )
        return branches.collect(outputs.unflatten(1, (num_slots, -1)).transpose(1, 2))

    def has_unused_parameters(self, horizon: int) -> bool:
        """Return whether the recurrence gets no gradient: the first draft token doesn't use it."""
        return self.config.correction == "rnn" and min(self.config.block, horizon - 1) == 1

    # --- decoding

    @property
    def max_nodes(self) -> int:
        num_outputs = self.vocabulary.num_outputs
        steps = num_outputs if self.config.correction == "rnn" else min(self.config.candidates, num_outputs)
        sizes = [min(self.config.width, steps)]
        for _ in range(self.config.search_depth - 1):
            sizes.append(min(self.config.width, sizes[-1] * steps))
        return min(self.config.tree_nodes, sum(sizes))

    def write(self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, cache: TreeCache) -> None:
        self.write_context(self.context(features), positions, cache)

    def search_after(self, state: CachedText, last_token: Int[torch.Tensor, " batch"], generator: Randomness) -> SearchTree:
        outputs = self._draft_pass(state, last_token)
        return self.search_slots(self.of_tokens(outputs, self.config.search_depth), last_token, generator)

    def _draft_pass(
        self, state: CachedText, last_token: Int[torch.Tensor, " batch"]
    ) -> Float[torch.Tensor, "batch slot hidden"]:
        """Read the unread tokens of each row and a block after them, and return the block's outputs.

        One pass reads both: a draft's time is mostly that of starting operations and of reading
        weights. The cache keeps the tokens, and nothing of the block.

            row 0   a b c|d e f + +         unread d e f, then the slots
            row 1   k l|m . . + +           unread m: no query sees the padding
        """
        # 1. The unread tokens, and the inputs of the slots.
        assert state.unread_features is not None
        cache, num_entries, unread = state.cache, state.unread_features.shape[1], state.num_unread.device
        context = self.context(state.unread_features)
        last = (unread - 1)[:, None, None].expand(-1, -1, context.shape[-1])
        inputs = self.slot_inputs(last_token, context.gather(1, last)[:, 0])
        # 2. The pass. All its queries see the same columns. Slots have the positions after the row's tokens.
        size = num_entries + inputs.shape[1]
        cache.begin_pass(size)
        cache.locate()
        entry, lengths = torch.arange(size, device=context.device), cache.lengths.device
        is_slot = entry >= num_entries
        visible = visible_columns((is_slot | (entry < unread[:, None]))[:, None], lengths, cache.extent)[:, None]
        positions = lengths[:, None] + torch.where(is_slot, entry - num_entries + unread[:, None], entry)
        outputs = self.read_slots(inputs, positions, visible.expand(-1, -1, size, -1), lambda _: cache, context=context)
        cache.keep(None, state.num_unread)
        return outputs

    def search_slots(
        self,
        hidden: Float[torch.Tensor, "batch slot hidden"],
        last_token: Int[torch.Tensor, " batch"],
        generator: Randomness = None,
    ) -> SearchTree:
        """Search for the most probable paths through the slots."""
        if isinstance(self.correction, Recurrent):
            return beam_search(self, hidden, last_token, width=self.config.width, generator=generator)
        if isinstance(generator, RowSeeds) and generator.sampling is not None:
            # Limits hold for the corrected logits, which come later.
            generator = generator.shown(Sampling(temperature=generator.sampling.temperature))
        logits = foreseen(self.head(hidden), range(hidden.shape[1]), generator, self.vocabulary.target_tokens)
        limits = {"width": self.config.width, "num_candidates": self.config.candidates}
        return lattice_search(self.correction, logits, last_token, self.vocabulary, scale=sharpness(generator), **limits)

    @property
    def num_cache_layers(self) -> int:
        return self.config.num_layers

    @property
    def draft_entries(self) -> int:
        return self.config.search_depth + 1

    @property
    def draft_columns(self) -> int:
        return self.draft_entries + self.num_slots
