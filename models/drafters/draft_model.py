"""An independent draft model: a smaller causal LM with the target's vocabulary.

Paper: arXiv 2211.17192. The model is trained by distillation on the target's continuations. Training
reads texts, and branches where a continuation leaves its text, in one pass; entry c_d of a branch predicts
c_{d+1}. It drafts the likeliest `top_k` nodes of each depth, a chain with top_k 1. Where the paper draws
tokens from q and accepts them by a ratio, these foresee the target's draws (see `foreseen`), which accepts
more and keeps plain decoding's text.

In a paced merge, also of this drafter alone, a tree grows from step to step: see `growing_draft`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import nn

from ...data.types import DrafterBatch
from ..decoding.sampling import Randomness, foreseen
from ..decoding.tree import DraftTree, chain_tree
from ..decoding.types import NO_NODE, Counts, Prompts, TargetOutput
from ..llm.hf_target import HFTarget
from ..llm.recurrent_states import find_mixers
from ..llm.tree_attention import attention_kinds, hidden_score, require_tree_attention
from ..llm.tree_cache import TreeCache
from ..machine import is_out_of_memory
from .beams import SearchTree, likeliest_successors
from .branches import Branches
from .cached_drafter import CachedDrafter, CachedText
from .growing_draft import GrowingModel
from .labels import Labels
from .objective import Loss, Objective
from .scoring import score
from .small_models import (
    DraftModelConfig,
    architecture_in,
    build_model,
    first_layers,
    fit_vocabulary,
    pretrained,
    require_common_vocabulary,
    smaller_architecture,
)


class DraftModel(CachedDrafter):
    """Drafter with a model and a KV cache of its own."""

    Config = DraftModelConfig

    def __init__(self, config: DraftModelConfig, reader: HFTarget) -> None:
        super().__init__()
        require_tree_attention(reader.model)
        if find_mixers(reader.model):
            raise ValueError(
                f"the draft model {type(reader.model).__name__} has recurrent layers, which can't read a tree while it grows; "
                "choose one without (drafter.path), or another drafter"
            )
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

        Raises ValueError if the model has another tokenizer or vocabulary, or if the sizes are
        invalid.
        """
        # 1. Load a model, or build one from a saved or derived architecture.
        if config.architecture is None and torch.get_default_device().type == "meta":
            raise ValueError("a saved draft model needs its `architecture`, which describes its weights; save it again")
        if config.architecture is None and config.path is not None:
            reader = pretrained(config.path, target)
        else:
            architecture = smaller_architecture(config, target) if config.architecture is None else config.architecture
            model = build_model(architecture, target)
            reader = HFTarget(
                model, target.tokenizer, target.identity, compiled=target.compiled, cuda_graphs=target.cuda_graphs
            )
        # 2. Fit its vocabulary, which may be padded differently.
        require_common_vocabulary(reader.vocab_size, target)
        fit_vocabulary(reader.model, target.vocab_size)
        # 3. Initialise it from the target's layers, if configured.
        if config.architecture is None:
            if config.init == "target_layers" and config.path is None:
                first_layers(reader.model, target)
            _require_readable_texts(reader, config)
        # 4. Saved configurations contain no local path, since checkpoints are published.
        return cls(replace(config, architecture=architecture_in(reader.model.config), path=None), reader)

    @property
    def context_length(self) -> int:
        return self.reader.context_length

    @property
    def max_nodes(self) -> int:
        num_nodes = self.config.length * self.config.top_k
        return num_nodes if self.config.tree_nodes is None else min(num_nodes, self.config.tree_nodes)

    @property
    def max_entries(self) -> int:
        """Most nodes that the cache holds besides the text: those of the last depth are never read."""
        return (self.config.length - 1) * self.config.top_k

    # --- decoding

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> CachedText:
        return _state_after(prompts, self.read_prompts(prompts, max_new_tokens=max_new_tokens, max_nodes=self.max_entries))

    def begin(self, cache: TreeCache, prompts: Prompts, prefill: TargetOutput) -> CachedText:
        self._require_room(prompts)
        self.reader.read_prompts(prompts, cache)
        _drop_last(cache, prompts)
        return _state_after(prompts, cache)

    def read_prompts(self, prompts: Prompts, *, max_new_tokens: int, max_nodes: int) -> TreeCache:
        """Return a cache of the prompts without their last tokens, with room for answers and trees.

        It is the model's own cache, for which its passes may be compiled or recorded.
        """
        self._require_room(prompts)
        self.reader.prefill(prompts, max_new_tokens=max_new_tokens, max_nodes=max_nodes)
        cache = self.reader.hand_over_cache()
        _drop_last(cache, prompts)
        return cache

    def growing(self) -> GrowingModel | None:
        """Return the model for growing trees, whose passes have many shapes."""
        return None if self.reader.has_fixed_shapes else GrowingModel(self.reader, self.read_prompts)

    def _require_room(self, prompts: Prompts) -> None:
        if max(prompts.lengths) >= self.reader.context_length:
            raise ValueError(
                f"a prompt of {max(prompts.lengths)} tokens leaves no room for an answer in the draft model's context window "
                f"of {self.reader.context_length} tokens; shorten the prompt, or choose a draft model with a longer one"
            )

    def search_after(self, state: CachedText, last_token: Int[torch.Tensor, " batch"], generator: Randomness) -> SearchTree:
        # 1. Read the unread tokens, which stay, and the last one, which the tree begins with.
        cache, tokens = state.cache, state.with_last(last_token)
        logits = self.reader.read_tree(cache, tokens[:, 0], chain_tree(tokens[:, 1:])).logits
        logits = logits.gather(1, state.num_unread.device[:, None, None].expand(-1, 1, logits.shape[-1]))
        cache.keep(None, state.num_unread)

        def read(tree: DraftTree, num_read: int) -> Float[torch.Tensor, "batch node vocab"]:
            return self.reader.read_tree(cache, last_token, tree, num_read=num_read).logits

        # 2. Search.
        return search_tree(logits, read, width=self.config.top_k, depth=self.config.length, generator=generator)

    def read_width(self, num_unread: int) -> int:
        """Return one of few widths if the model's own passes are compiled or recorded."""
        return 1 << (num_unread - 1).bit_length() if self.reader.has_fixed_shapes else num_unread

    @property
    def num_cache_layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def draft_entries(self) -> int:
        return self.config.length + 1

    @property
    def draft_columns(self) -> int:
        return 1 + self.draft_entries + self.max_entries

    # --- training

    @property
    def reads_hidden_states(self) -> bool:
        return False

    def checkpoint_activations(self) -> None:
        self.model.activation_checkpointing_enable()

    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """Return the loss of the continuations, teacher-forced, with all branches in one pass.

        Where a continuation is the text itself, the text's own entries are read in its place: a text that
        the target wrote greedily needs hardly a branch. Memory grows with the square of the number of
        tokens in a row, branches included. `train.max_positions` bounds it.
        """
        # 1. Append branches to their texts where a continuation leaves the text: tokens, positions and masks.
        labels = Labels.of(batch)
        leaving = (labels.known & ~labels.on_text).any(1).nonzero().squeeze(1)
        branches = Branches.of(batch, labels.positions[leaving])
        num_depths, num_branches, seq = labels.tokens.shape[1], branches.columns.shape[1], branches.num_columns
        previous = branches.spread(labels.inputs[leaving]).transpose(1, 2)  # [batch, depth, branch]
        depth = torch.arange(1, num_depths + 1, device=previous.device)[:, None]
        branch_positions = (branches.positions[:, None] + depth).flatten(1)
        positions = torch.cat([batch.position_ids.expand(len(previous), -1), branch_positions], dim=1)
        # Clamp positions, as drafting does past the context window.
        positions = positions.clamp(max=self.reader.context_length - 1)
        # 2. Read texts and branches.
        states, _ = self.reader.read_texts(
            input_ids=torch.cat([batch.input_ids, previous.flatten(1)], dim=1),
            attention_mask=self._masks(branches.whole_mask(num_depths), positions),
            position_ids=positions,
        )
        # 3. Score the outputs of the entries that the labels follow.
        index = torch.arange(positions.numel(), device=positions.device).view_as(positions)
        entries = index[:, :seq].flatten()[labels.text_index]
        of_branches = branches.collect(index[:, seq:].unflatten(1, (num_depths, num_branches)).transpose(1, 2))
        entries[leaving] = entries[leaving].where(labels.on_text[leaving], of_branches)
        inputs = (states.flatten(0, 1),)
        return score(self.reader.head, inputs, labels, batch, objective, vocabulary=self.vocabulary, entries=entries)

    def _masks(self, visible: torch.Tensor, positions: Int[torch.Tensor, "batch query"]) -> Any:
        """Return the additive mask of each kind of layer, as transformers' models take them.

        A window is a difference of positions, which start again at 0 for each text of a row. That
        is right because `visible` already hides other texts.
        """
        by_kind = dict.fromkeys(self._kinds, visible)
        windows = {kind: window for kind, window in self._kinds.items() if window is not None}
        if windows:
            back = (positions[:, :, None] - positions[:, None])[:, None]  # [batch, 1, query, query], only for windows
            by_kind |= {kind: visible & (back < window) for kind, window in windows.items()}
        dtype = self.reader.dtype
        masks = {
            kind: torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, hidden_score(dtype)) for kind, seen in by_kind.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def search_tree(
    logits: Float[torch.Tensor, "batch 1 vocab"],
    read: Callable[[DraftTree, int], torch.Tensor],
    *,
    width: int,
    depth: int,
    generator: Randomness = None,
) -> SearchTree:
    """Search for the `width` most probable continuations of each depth; all but the last are read.

    `logits` are those after the last committed token. `read(tree, num_read)` reads the entries from
    `num_read` on, of the nodes so far, and returns their logits: entry 0 is the last token, and entry
    n + 1 is node n.
    """
    scores = torch.zeros(logits.shape[:2], device=logits.device)  # log-probability of each path
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    first = NO_NODE  # the first of the nodes at the ends of the paths; the others follow it
    while True:
        # 1. Extend each path by its most probable tokens, and keep the most probable paths.
        logits = foreseen(logits, range(len(levels), len(levels) + 1), generator)
        tokens, path, next_scores = likeliest_successors(logits, scores, width)
        levels.append((tokens, path + first, next_scores))
        first, scores = first + scores.shape[1], next_scores
        search = SearchTree.of(levels)
        if len(levels) == depth:
            entries = torch.arange(1, search.tokens.shape[1] + 1, device=tokens.device).expand_as(search.tokens)
            return replace(search, cache_entries=entries)
        # 2. Read the new nodes.
        logits = read(DraftTree(tokens=search.tokens, parents=search.parents, max_depth=len(levels)), 1 + first)


def _drop_last(cache: TreeCache, prompts: Prompts) -> None:
    """Drop the prompts' last tokens from a cache."""
    cache.keep(None, Counts.of([-1] * len(prompts.lengths), prompts.input_ids.device))


def _state_after(prompts: Prompts, cache: TreeCache) -> CachedText:
    """Return the state after prompts, whose last tokens the cache lacks."""
    ones = Counts.of([1] * len(prompts.lengths), prompts.input_ids.device)
    tokens = prompts.last(prompts.input_ids)[:, None]
    return CachedText(cache=cache, unread_tokens=tokens, unread_features=None, num_unread=ones)


def _require_readable_texts(reader: HFTarget, config: DraftModelConfig) -> None:
    """Raise ValueError if the model can't read a text, as with heads narrower than their rotary part."""
    try:
        reader.require_plain_head("choose another draft model")
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"{type(reader.model).__name__} with drafter.hidden_size {config.hidden_size or reader.hidden_size} can't read a "
            f"text ({error}); choose a drafter.hidden_size for which its heads are as wide as the target's"
        ) from error


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
