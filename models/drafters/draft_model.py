"""An independent draft model: a smaller causal LM with the target's vocabulary.

Paper: arXiv 2211.17192. The model is trained by distillation on the target's continuations. Text
and branches are read in one pass, and entry c_d of a branch predicts c_{d+1}. It drafts one of:

    a chain of its arg-max tokens                          top_k 1
    a tree of its most probable continuations              top_k > 1 (as EAGLE-2, arXiv 2406.16858)
    a chain or tree drawn from its warped distribution q   temperature > 0, see `group_search`

The first two are functions of the text. Speculative sampling accepts their children with the
target's probability p(child). A drawn token is accepted with probability sum min(p, q) (section
3.3), which is higher if q is close to p: so draw at the temperature at which the target samples. In
all cases the output follows the target's distribution exactly, greedy or sampled.

With `pace: expected`, one tree grows from step to step: see `growing_draft`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import nn

from ...data.types import DrafterBatch
from ..decoding.protocols import Meanwhile
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import AcceptedPath, Counts, Prompts, TargetOutput, to_width
from ..llm.hf_target import HFTarget
from ..llm.tree_attention import attention_kinds, hidden_score, require_tree_attention
from ..llm.tree_cache import TreeCache
from ..machine import is_out_of_memory
from .base import CachedDrafter
from .beams import SearchTree
from .branches import Branches
from .fixed_draft import DraftTextState, FixedSearch, UnreadTree
from .growing_draft import GrowingSearch
from .labels import Labels
from .objective import Loss, Objective, score
from .small_models import (
    DraftModelConfig,
    architecture_of,
    build_model,
    first_layers,
    fit_vocabulary,
    pretrained,
    require_common_vocabulary,
    smaller_architecture,
)
from .vocabulary import DraftVocabulary


class DraftModel(CachedDrafter):
    """Drafter with a model and a KV cache of its own. Its `pace` chooses how it drafts."""

    Config = DraftModelConfig

    def __init__(self, config: DraftModelConfig, reader: HFTarget) -> None:
        super().__init__()
        require_tree_attention(reader.model)
        self.config = config
        self.model = reader.model
        self.reader = reader
        self.vocab_size = reader.vocab_size
        self.drafting = FixedSearch(reader, config) if config.pace == "fixed" else GrowingSearch(reader, config)
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
        return cls(replace(config, architecture=architecture_of(reader.model), path=None), reader)

    @property
    def context_length(self) -> int:
        return self.reader.context_length

    @property
    def max_nodes(self) -> int:
        return self.drafting.max_nodes

    # --- decoding

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> Any:
        """Prefill the prompts, then drop their last tokens from the cache."""
        self._require_room(prompts)
        self.reader.prefill(prompts, max_new_tokens=max_new_tokens, max_nodes=self.drafting.max_entries)
        return self._after(prompts, self.reader.hand_over_cache())

    def begin(self, cache: TreeCache, prompts: Prompts, prefill: TargetOutput) -> Any:
        self._require_room(prompts)
        self.reader.read_prompts(prompts, cache)
        return self._after(prompts, cache)

    def _after(self, prompts: Prompts, cache: TreeCache) -> Any:
        """Return the state after prompts that the cache holds."""
        cache.rewind(Counts.of([1] * len(prompts.lengths), prompts.input_ids.device))
        return self.drafting.begin(cache, prompts.last(prompts.input_ids))

    def _require_room(self, prompts: Prompts) -> None:
        if max(prompts.lengths) >= self.reader.context_length:
            raise ValueError(
                f"a prompt of {max(prompts.lengths)} tokens leaves no room for an answer in the draft model's context window "
                f"of {self.reader.context_length} tokens; shorten the prompt, or choose a draft model with a longer one"
            )

    def propose(
        self, state: Any, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, Any]:
        return self.drafting.propose(state, last_token, generator)

    def search(self, state: Any, last_token: Int[torch.Tensor, " batch"]) -> tuple[SearchTree, Any]:
        return self.drafting.search(state, last_token)

    def skip(self, state: Any, last_token: Int[torch.Tensor, " batch"]) -> Any:
        return self.drafting.skip(state, last_token)

    def meanwhile(self, drafted: Any) -> Meanwhile | None:
        return self.drafting.meanwhile(drafted)

    def follow(self, drafted: Any, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> Any:
        return self.drafting.advance(drafted, tree, accepted)

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        return self.drafting.select(state, rows)

    # --- decoding in a recording: see `CachedDrafter`

    @property
    def can_be_recorded(self) -> bool:
        return isinstance(self.drafting, FixedSearch) and not self.config.temperature

    @property
    def num_cache_layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def draft_entries(self) -> int:
        return 1 + self.config.length  # the last token, and an accepted path

    @property
    def draft_columns(self) -> int:
        return 1 + self.draft_entries + self.drafting.max_entries

    def draft_inputs(self, state: DraftTextState) -> tuple[torch.Tensor, ...]:
        return (to_width(state.tokens, self.draft_entries),)

    def search_in(
        self, cache: TreeCache, last_token: Int[torch.Tensor, " batch"], num_unread: Counts, *inputs: torch.Tensor
    ) -> SearchTree:
        assert isinstance(self.drafting, FixedSearch)
        return self.drafting.search_in(cache, last_token, num_unread, *inputs)

    def drafted_in(self, text: TreeCache, last_token: Int[torch.Tensor, " batch"]) -> UnreadTree:
        return UnreadTree(text=text, last_token=last_token)

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
            attention_mask=self._masks(branches.whole_mask(num_depths), positions),
            position_ids=positions,
        )
        # 3. Score the branches' outputs.
        outputs = states[:, seq:].unflatten(1, (num_depths, num_branches)).transpose(1, 2)
        inputs = branches.collect(outputs)
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
