"""An independent draft model: any smaller causal LM with the target's vocabulary (arXiv 2211.17192).

It is trained by distillation on the target's continuations: text and branches are read in one pass, and entry c_d of a branch
predicts c_{d+1}. It drafts

    a chain of its arg-max tokens                          top_k 1
    a tree of its likeliest continuations                  top_k > 1 (EAGLE-2's choice, arXiv 2406.16858, section 4)
    a chain drawn from its own warped distribution q       temperature > 0

The first two are functions of the text, and speculative sampling accepts a child with the probability p(child) that the target
gives it. A drawn token is accepted with probability sum min(p, q) (section 3.3), which is more where q is near p: best draw at
the temperature that the target samples at. Whichever it is, greedy or sampled output is the target's own.
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
from .beams import SearchTree, likeliest_nodes, likeliest_successors, pack
from .branches.layout import Branches
from .objective import Labels, Loss, Objective, score
from .small_models import (
    DraftModelConfig,
    architecture_of,
    build_model,
    first_layers,
    pretrained,
    smaller_architecture,
    weights_digest_at,
)
from .vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TextState:
    """Texts without their last tokens, which `propose` gets."""

    text: CacheSnapshot
    """Keys and values of the texts without their last two tokens."""
    token: Int[torch.Tensor, " batch"]
    """The last token but one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTree:
    """What the model has read when it has drafted a tree."""

    text: CacheSnapshot
    """Keys and values of the texts without their last token; behind them lie the tree's entries."""
    last_token: Int[torch.Tensor, " batch"]
    entries: Int[torch.Tensor, "batch node"]
    """Where the nodes of the tree lie behind the texts: 0 is the last token, others are nodes that the search read."""


class DraftModel(TrainableDrafter):
    """Drafts with a model of its own.

    The model's KV cache holds each text without its last two tokens. Each step begins by reading both, although the model may
    have read the first of them as a draft: so all steps are alike, and drafting `length` tokens deep takes `length` passes.
    """

    Config = DraftModelConfig

    def __init__(self, config: DraftModelConfig, reader: HFTarget) -> None:
        super().__init__()
        require_tree_attention(reader.model)
        self.config = config
        self.model = reader.model
        self.reader = reader
        self._kinds = attention_kinds(reader.model)
        self.register_state_dict_post_hook(_drop_tied)
        self.register_load_state_dict_pre_hook(_restore_tied)

    @classmethod
    def for_target(cls, config: DraftModelConfig, target: HFTarget) -> "DraftModel":
        """Raises ValueError for a model of another tokenizer or vocabulary size, and for sizes that make no model."""
        if config.architecture is None and torch.get_default_device().type == "meta":
            raise ValueError("a saved draft model needs its `architecture`, which tells what its weights are; save it again")
        if config.architecture is None and config.path is not None:
            reader = pretrained(config.path, config.tokenizer_options, target)
        else:
            architecture = smaller_architecture(config, target) if config.architecture is None else config.architecture
            model = build_model(architecture, target)
            reader = HFTarget(
                model, target.tokenizer, target.identity, compiled=target.compiled, cuda_graphs=target.cuda_graphs
            )
        if reader.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {reader.vocab_size} tokens and {target.identity.name} one of "
                f"{target.vocab_size}; use a smaller model of the same family"
            )
        if config.architecture is None:
            if config.init == "target_layers" and config.path is None:
                first_layers(reader.model, target)
            reader.require_plain_head("choose another draft model")
        # No path of this machine belongs into a published checkpoint.
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
        """Read the prompts without their last tokens."""
        if max(prompts.lengths) >= self.reader.context_length:
            raise ValueError(
                f"a prompt of {max(prompts.lengths)} tokens leaves no room for an answer in the draft model's context window "
                f"of {self.reader.context_length} tokens; shorten the prompt, or choose a draft model with a longer one"
            )
        room = self.config.length * self.config.top_k
        self.reader.prefill(prompts, max_new_tokens=max_new_tokens, max_nodes=room)
        cache = self.reader.hand_over_cache()
        cache.rewind(Counts.of([1] * len(prompts.lengths), prompts.input_ids.device))
        return TextState(text=cache.snapshot(), token=prompts.last(prompts.input_ids))

    def propose(
        self, state: TextState, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, DraftedTree]:
        """Draft the likeliest continuations that a search meets, or a chain that is drawn at random."""
        cache = state.text.writable()
        # Both tokens belong to the text: read as a chain of one behind the first, which is kept.
        logits = self.reader.read_tree(cache, state.token, chain_tree(last_token[:, None])).logits[:, 1:]
        cache.keep(None, Counts(torch.ones_like(last_token), (1,) * len(last_token)))
        if self.config.temperature:
            tree = self._draw(cache, logits, last_token, generator)
            entries = torch.arange(1, tree.num_nodes + 1, device=last_token.device).expand_as(tree.tokens)
        else:
            search = self._search(cache, logits, last_token)
            chosen = likeliest_nodes(search, self.max_nodes)
            # Node n of the tree is the n-th of those chosen; entry 0 is the last token.
            entries = 1 + chosen.long().sort(dim=1, descending=True, stable=True).indices[:, : self.max_nodes]
            tree = pack(search, chosen, min(self.max_nodes, search.tokens.shape[1]))
        return tree, DraftedTree(text=cache.snapshot(), last_token=last_token, entries=entries)

    def _search(
        self, cache: TreeCache, logits: Float[torch.Tensor, "batch 1 vocab"], last_token: Int[torch.Tensor, " batch"]
    ) -> SearchTree:
        """Search for the likeliest continuations, depth by depth; all nodes but the last depth's are read."""
        width, length = self.config.top_k, self.config.length
        scores = torch.zeros(logits.shape[:2], device=logits.device)  # log-probability of each path
        nodes = torch.full_like(last_token, NO_NODE)[:, None]  # at the end of each path
        tokens, parents, all_scores = (nodes[:, :0], nodes[:, :0], scores[:, :0])
        sizes: list[int] = []
        while True:
            # 1. Extend each path by its likeliest tokens, and keep the likeliest paths of all.
            new, path, scores = likeliest_successors(logits.float(), scores, width)
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
        """Draw a chain from the model's own distribution."""
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

    def advance(self, drafted: DraftedTree, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> TextState:
        """Keep what comes before the last two tokens of the new text: the last token and the accepted nodes but one."""
        cache, entries = drafted.text.writable(), drafted.entries
        if not drafted.text.is_newest:  # the cache is a copy of the texts alone: read the tree again
            self.reader.read_tree(cache, drafted.last_token, tree)
            entries = torch.arange(1, tree.num_nodes + 1, device=entries.device).expand_as(tree.tokens)
        kept = None
        if num_kept := accepted.nodes.shape[1]:
            kept = pad(entries.gather(1, accepted.nodes.clamp(min=0)), (1, 0))[:, :num_kept]
        cache.keep(kept, accepted.num_accepted)
        tokens = torch.cat([drafted.last_token[:, None], tree.tokens], dim=1)
        return TextState(text=cache.snapshot(), token=tokens.gather(1, last_entry(accepted)[:, None])[:, 0])

    def select(self, state: TextState, rows: Sequence[int]) -> TextState:
        """Return the state of these rows of the batch only."""
        return TextState(text=state.text.select(rows), token=state.token[rows])

    # --- training

    @property
    def reads_hidden_states(self) -> bool:
        return False

    def checkpoint_activations(self) -> None:
        self.model.activation_checkpointing_enable()

    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """The target's continuations behind the batch's positions, teacher-forced, all texts and branches in one pass.

        Memory grows with the square of a row's tokens, its branches' included: `train.max_positions` bounds it.
        """
        labels, branches = Labels.of(batch), Branches.of(batch)
        num_depths, num_branches, seq = labels.tokens.shape[1], branches.columns.shape[1], branches.num_columns
        given = branches.spread(labels.given.clamp(min=0)).transpose(1, 2)  # [batch, depth, branch]
        depth = torch.arange(1, num_depths + 1, device=given.device)[:, None]
        of_branches = (branches.positions[:, None] + depth).flatten(1)
        positions = torch.cat([batch.position_ids.expand(len(given), -1), of_branches], dim=1)
        positions = positions.clamp(max=self.reader.context_length - 1)  # as when it drafts beyond them
        states, _ = self.reader.read_texts(
            input_ids=torch.cat([batch.input_ids, given.flatten(1)], dim=1),
            attention_mask=self._masks(branches.whole_mask(num_depths, with_own_column=True), positions),
            position_ids=positions,
        )
        outputs = states[:, seq:].unflatten(1, (num_depths, num_branches)).transpose(1, 2)
        inputs = branches.collect(outputs)[labels.known]
        vocabulary = DraftVocabulary(size=self.reader.vocab_size)
        return score(self.reader.head, (inputs,), labels, batch, objective, vocabulary=vocabulary)

    def _masks(self, visible: torch.Tensor, positions: Int[torch.Tensor, "batch query"]) -> Any:
        """The additive mask of each kind of layer, as transformers' models take them.

        A window is counted in positions, which start anew with every text of a row; `visible` keeps to the own text anyway.
        """
        back = (positions[:, :, None] - positions[:, None])[:, None]
        seen = {kind: visible if window is None else visible & (back < window) for kind, window in self._kinds.items()}
        dtype = self.reader.dtype
        masks = {
            kind: torch.zeros_like(each, dtype=dtype).masked_fill_(~each, hidden_score(dtype)) for kind, each in seen.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def tied_parameters(module: nn.Module) -> dict[str, str]:
    """Names of parameters that are another's too, such as a head that is the embeddings, and that one's."""
    first: dict[nn.Parameter, str] = {}
    names = {name: first.setdefault(each, name) for name, each in module.named_parameters(remove_duplicate=False)}
    return {name: other for name, other in names.items() if name != other}


def _drop_tied(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """A file holds no tensor twice."""
    for name in tied_parameters(module):
        state_dict.pop(prefix + name, None)


def _restore_tied(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    for name, other in tied_parameters(module).items():
        if prefix + other in state_dict:
            state_dict[prefix + name] = state_dict[prefix + other]
