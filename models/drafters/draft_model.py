"""An independent draft model: a smaller causal LM with the target's vocabulary.

Paper: arXiv 2211.17192. The model is trained by distillation on the target's continuations. Text
and branches are read in one pass, and entry c_d of a branch predicts c_{d+1}. It drafts one of:

    a chain of its arg-max tokens                          top_k 1
    a tree of its most probable continuations              top_k > 1 (as EAGLE-2, arXiv 2406.16858)
    a chain drawn from its own warped distribution q       temperature > 0

The first two are functions of the text. Speculative sampling accepts their children with the
target's probability p(child). A drawn token is accepted with probability sum min(p, q) (section
3.3), which is higher if q is close to p: so draw at the temperature at which the target samples. In
all three cases the output follows the target's distribution exactly, greedy or sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import nn
from torch.nn.functional import pad

from ...data.types import DrafterBatch
from ..decoding.acceptance import last_entry
from ..decoding.prompts import Prompts
from ..decoding.sampling import Randomness, Sampling, draw, warp
from ..decoding.tree import DraftTree, Drawn, chain_tree
from ..decoding.types import NO_NODE, AcceptedPath, Counts, TargetOutput
from ..target.hf_target import HFTarget
from ..target.tree_attention import attention_kinds, hidden_score, require_tree_attention
from ..target.tree_cache import CacheSnapshot, TreeCache
from .base import TrainableDrafter
from .beams import SearchTree, likeliest_nodes, likeliest_successors, take
from .branches.layout import Branches
from .objective import Labels, Loss, Objective, score
from .small_models import (
    DraftModelConfig,
    architecture_of,
    build_model,
    first_layers,
    pretrained,
    require_same_vocabulary,
    smaller_architecture,
    weights_digest_at,
)
from .unread import MAX_UNREAD, append
from .vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TextState:
    """State of a batch of texts without their last tokens, which `propose` gets."""

    text: CacheSnapshot
    """Keys and values of the texts without the unread tokens and the last token."""
    tokens: Int[torch.Tensor, "batch unread"]
    """The unread tokens, at least one."""
    num_unread: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTree:
    """Results of drafting a tree."""

    text: CacheSnapshot
    """Keys and values of the texts without their last token; the tree's entries follow them."""
    last_token: Int[torch.Tensor, " batch"]
    entries: Int[torch.Tensor, "batch node"]
    """Entry of each node in the cache after the text. Entry 0 is the last token."""


class DraftModel(TrainableDrafter):
    """Drafter with a model and a KV cache of its own.

    The KV cache holds each text without its last two tokens. Each step begins by reading both,
    although the model may have read the first of them as a draft token. So all steps are alike, and
    drafting `length` tokens deep takes `length` passes. After steps whose tree other drafters have
    made, there are more unread tokens; the first pass reads them all.
    """

    Config = DraftModelConfig

    def __init__(self, config: DraftModelConfig, reader: HFTarget) -> None:
        super().__init__()
        require_tree_attention(reader.model)
        self.config = config
        self.model = reader.model
        self.reader = reader
        self.vocab_size = reader.vocab_size
        self._kinds = attention_kinds(reader.model)
        self.register_state_dict_post_hook(_drop_tied)
        self.register_load_state_dict_pre_hook(_restore_tied)

    @classmethod
    def for_target(cls, config: DraftModelConfig, target: HFTarget) -> "DraftModel":
        """Build the drafter.

        Raises ValueError if the model has another tokenizer or vocabulary size, or if the sizes are
        invalid.
        """
        # 1. Load a model, or build one from a saved or derived architecture.
        if config.architecture is None and torch.get_default_device().type == "meta":
            raise ValueError("a saved draft model needs its `architecture`, which describes its weights; save it again")
        if config.architecture is None and config.path is not None:
            reader = pretrained(config.path, config.tokenizer_options, target)
        else:
            architecture = smaller_architecture(config, target) if config.architecture is None else config.architecture
            model = build_model(architecture, target)
            reader = HFTarget(
                model, target.tokenizer, target.identity, compiled=target.compiled, cuda_graphs=target.cuda_graphs
            )
        # 2. Check its vocabulary.
        require_same_vocabulary(reader.vocab_size, target)
        # 3. Initialise it from the target's layers, if configured.
        if config.architecture is None:
            if config.init == "target_layers" and config.path is None:
                first_layers(reader.model, target)
            reader.require_plain_head("choose another draft model")
        # 4. Saved configurations contain no local path, since checkpoints are published.
        return cls(replace(config, architecture=architecture_of(reader.model), path=None), reader)

    @classmethod
    def starting_weights(cls, config: DraftModelConfig) -> str | None:
        return None if config.path is None or config.architecture is not None else weights_digest_at(config.path)

    @property
    def context_length(self) -> int:
        return self.reader.context_length

    @property
    def max_nodes(self) -> int:
        most = self.config.length * self.config.top_k
        return most if self.config.tree_nodes is None else min(most, self.config.tree_nodes)

    # --- decoding

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> TextState:
        """Prefill the prompts, then drop their last tokens from the cache."""
        if max(prompts.lengths) >= self.reader.context_length:
            raise ValueError(
                f"a prompt of {max(prompts.lengths)} tokens leaves no room for an answer in the draft model's context window "
                f"of {self.reader.context_length} tokens; shorten the prompt, or choose a draft model with a longer one"
            )
        room = self.config.length * self.config.top_k
        self.reader.prefill(prompts, max_new_tokens=max_new_tokens, max_nodes=room)
        cache = self.reader.hand_over_cache()
        cache.rewind(Counts.of([1] * len(prompts.lengths), prompts.input_ids.device))
        return _unread(cache, prompts.last(prompts.input_ids))

    def propose(
        self, state: TextState, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, DraftedTree]:
        """Draft the most probable continuations of a search, or a chain drawn at random."""
        # 1. Read the last tokens of each text: all but the last are kept, the last starts the tree.
        cache, logits = self._read_unread(state, last_token)
        # 2. Draw a chain, or search.
        if self.config.temperature:
            tree = self._draw(cache, logits, last_token, generator)
            entries = torch.arange(1, tree.num_nodes + 1, device=last_token.device).expand_as(tree.tokens)
        else:
            search = self._search(cache, logits, last_token)
            nodes = likeliest_nodes(search, self.max_nodes)
            tree, entries = take(search, nodes), 1 + nodes  # entry 0 is the last token
        return tree, DraftedTree(text=cache.snapshot(), last_token=last_token, entries=entries)

    def search(self, state: TextState, last_token: Int[torch.Tensor, " batch"]) -> tuple[SearchTree, TextState]:
        cache, logits = self._read_unread(state, last_token)
        return self._search(cache, logits, last_token), _unread(cache, last_token)

    def skip(self, state: TextState, last_token: Int[torch.Tensor, " batch"]) -> TextState:
        """Leave the last token unread as well, unless there are many such tokens."""
        if max(state.num_unread.host) < MAX_UNREAD:
            tokens = append(state.tokens, state.num_unread, last_token[:, None])
            return TextState(text=state.text, tokens=tokens, num_unread=state.num_unread + 1)
        cache, _ = self._read_unread(state, last_token)
        return _unread(cache, last_token)

    def _read_unread(
        self, state: TextState, last_token: Int[torch.Tensor, " batch"]
    ) -> tuple[TreeCache, Float[torch.Tensor, "batch 1 vocab"]]:
        """Read the last tokens, keep all but the last, and return the logits after the last."""
        cache = state.text.writable()
        tokens = append(state.tokens, state.num_unread, last_token[:, None])
        if self.reader.has_fixed_shapes:  # few lengths: each is compiled or recorded
            num_nodes = tokens.shape[1] - 1
            tokens = pad(tokens, (0, (1 << (num_nodes - 1).bit_length()) - num_nodes))
        logits = self.reader.read_tree(cache, tokens[:, 0], chain_tree(tokens[:, 1:])).logits
        last = state.num_unread.device[:, None, None].expand(-1, 1, logits.shape[-1])
        cache.keep(None, state.num_unread)
        return cache, logits.gather(1, last)

    def _search(
        self, cache: TreeCache, logits: Float[torch.Tensor, "batch 1 vocab"], last_token: Int[torch.Tensor, " batch"]
    ) -> SearchTree:
        """Search for the most probable continuations by depth; all but the last depth are read."""
        width, length = self.config.top_k, self.config.length
        scores = torch.zeros(logits.shape[:2], device=logits.device)  # log-probability of each path
        nodes = torch.full_like(last_token, NO_NODE)[:, None]  # at the end of each path
        tokens, parents, all_scores = (nodes[:, :0], nodes[:, :0], scores[:, :0])
        sizes: list[int] = []
        while True:
            # 1. Extend each path by its most probable tokens, and keep the most probable paths.
            new, path, scores = likeliest_successors(logits, scores, width)
            tokens, parents = torch.cat([tokens, new], dim=1), torch.cat([parents, nodes.gather(1, path)], dim=1)
            all_scores = torch.cat([all_scores, scores], dim=1)
            nodes = torch.arange(sum(sizes), sum(sizes) + new.shape[1], device=new.device).expand_as(new)
            sizes.append(new.shape[1])
            if len(sizes) == length:
                return SearchTree(tokens=tokens, parents=parents, scores=all_scores, level_sizes=tuple(sizes))
            # 2. Read the new nodes.
            tree = DraftTree(tokens=tokens, parents=parents, max_depth=len(sizes))
            logits = self.reader.read_tree(cache, last_token, tree, num_read=1 + sum(sizes[:-1])).logits

    def _draw(
        self,
        cache: TreeCache,
        logits: Float[torch.Tensor, "batch 1 vocab"],
        last_token: Int[torch.Tensor, " batch"],
        generator: Randomness,
    ) -> DraftTree:
        """Draw a chain from the model's distribution."""
        sampling = Sampling(temperature=self.config.temperature)
        probs, tokens = [warp(logits, sampling)], [draw(warp(logits, sampling)[:, 0], generator)]
        while len(tokens) < self.max_nodes:
            chain = chain_tree(torch.stack(tokens, dim=1))
            logits = self.reader.read_tree(cache, last_token, chain, num_read=len(tokens)).logits
            probs.append(warp(logits, sampling))
            tokens.append(draw(probs[-1][:, 0], generator))
        chain = chain_tree(torch.stack(tokens, dim=1))
        drawn_from = pad(torch.cat(probs, dim=1), (0, 0, 0, 1))  # the last node has no children
        return replace(chain, drawn=Drawn(probs=drawn_from, max_children=1))

    def advance(
        self, drafted: DraftedTree | TextState, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput
    ) -> TextState:
        """Keep all but the last two tokens of the new text in the cache.

        These are the last token and all accepted nodes except one. Of a tree that isn't its own,
        the drafter keeps nothing: the next draft reads the accepted tokens.
        """
        if isinstance(drafted, TextState):
            accepted_tokens = tree.tokens.gather(1, accepted.nodes.clamp(min=0)).clamp(min=0)
            tokens = append(drafted.tokens, drafted.num_unread, accepted_tokens)
            return TextState(text=drafted.text, tokens=tokens, num_unread=drafted.num_unread + accepted.num_accepted)
        cache, entries = drafted.text.writable(), drafted.entries
        # A cache that isn't the newest is a copy of the texts without the tree: read the tree
        # again.
        if not drafted.text.is_newest:
            self.reader.read_tree(cache, drafted.last_token, tree)
            entries = torch.arange(1, tree.num_nodes + 1, device=entries.device).expand_as(tree.tokens)
        kept = None
        if num_kept := accepted.nodes.shape[1]:
            kept = pad(entries.gather(1, accepted.nodes.clamp(min=0)), (1, 0))[:, :num_kept]
        cache.keep(kept, accepted.num_accepted)
        tokens = torch.cat([drafted.last_token[:, None], tree.tokens], dim=1)
        return _unread(cache, tokens.gather(1, last_entry(accepted)[:, None])[:, 0])

    def select(self, state: TextState, rows: Sequence[int]) -> TextState:
        """Return the state of these rows of the batch only."""
        return TextState(text=state.text.select(rows), tokens=state.tokens[rows], num_unread=state.num_unread.select(rows))

    # --- training

    @property
    def reads_hidden_states(self) -> bool:
        return False

    def checkpoint_activations(self) -> None:
        self.model.activation_checkpointing_enable()

    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """Return the loss of the continuations, teacher-forced, with all branches in one pass.

        Memory grows with the square of the number of tokens in a row, branches included.
        `train.max_positions` bounds it.
        """
        # 1. Append the branches to their texts: tokens, positions and masks.
        labels, branches = Labels.of(batch), Branches.of(batch)
        num_depths, num_branches, seq = labels.tokens.shape[1], branches.columns.shape[1], branches.num_columns
        previous = branches.spread(labels.previous.clamp(min=0)).transpose(1, 2)  # [batch, depth, branch]
        depth = torch.arange(1, num_depths + 1, device=previous.device)[:, None]
        branch_positions = (branches.positions[:, None] + depth).flatten(1)
        positions = torch.cat([batch.position_ids.expand(len(previous), -1), branch_positions], dim=1)
        # Clamp positions, as drafting does past the context window.
        positions = positions.clamp(max=self.reader.context_length - 1)
        # 2. Read texts and branches.
        states, _ = self.reader.read_texts(
            input_ids=torch.cat([batch.input_ids, previous.flatten(1)], dim=1),
            attention_mask=self._masks(branches.whole_mask(num_depths, with_own_column=True), positions),
            position_ids=positions,
        )
        # 3. Score the branches' outputs.
        outputs = states[:, seq:].unflatten(1, (num_depths, num_branches)).transpose(1, 2)
        inputs = branches.collect(outputs)[labels.known]
        vocabulary = DraftVocabulary(size=self.reader.vocab_size)
        return score(self.reader.head, (inputs,), labels, batch, objective, vocabulary=vocabulary)

    def _masks(self, visible: torch.Tensor, positions: Int[torch.Tensor, "batch query"]) -> Any:
        """Return the additive mask of each kind of layer, as transformers' models take them.

        A window is a difference of positions, which start again at 0 for each text of a row. That
        is right because `visible` already hides other texts.
        """
        back = (positions[:, :, None] - positions[:, None])[:, None]
        by_kind = {kind: visible if window is None else visible & (back < window) for kind, window in self._kinds.items()}
        dtype = self.reader.dtype
        masks = {
            kind: torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, hidden_score(dtype)) for kind, seen in by_kind.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _unread(cache: TreeCache, token: Int[torch.Tensor, " batch"]) -> TextState:
    """Return the state of the cache's texts with one unread token each."""
    return TextState(text=cache.snapshot(), tokens=token[:, None], num_unread=Counts(torch.ones_like(token), (1,) * len(token)))


def tied_parameters(module: nn.Module) -> dict[str, str]:
    """Map the name of each tied parameter, such as a head, to the name that it is stored under."""
    first: dict[nn.Parameter, str] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(parameter, name) for name, parameter in parameters}
    return {name: other for name, other in names.items() if name != other}


def _drop_tied(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Drop tied tensors before saving: a file holds no tensor twice."""
    for name in tied_parameters(module):
        state_dict.pop(prefix + name, None)


def _restore_tied(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    for name, other in tied_parameters(module).items():
        if prefix + other in state_dict:
            state_dict[prefix + name] = state_dict[prefix + other]
