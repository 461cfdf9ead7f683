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
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import nn
from torch.nn.functional import pad

from ...data.types import DrafterBatch
from ..decoding.acceptance import last_entry
from ..decoding.prompts import Prompts
from ..decoding.sampling import Randomness, Sampling, draw, warp
from ..decoding.tree import DraftTree, chain_tree
from ..decoding.types import NO_NODE, Acceptance, TargetOutput
from ..target.hf_target import HFTarget
from ..target.tree_attention import attention_kinds, hidden_score, require_tree_attention
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


class DraftModel(TrainableDrafter):
    """Drafts with a model of its own. Its state is the last token but one of each row.

    The model's KV cache is its own, as a target's is, and is kept inside. It holds each text without its last two tokens:
    whichever of them the model has read already, each step begins by reading both. So it takes `length` passes to draft so many
    tokens deep.
    """

    Config = DraftModelConfig

    def __init__(self, config: DraftModelConfig, reader: HFTarget) -> None:
        super().__init__()
        require_tree_attention(reader.model)
        self.config = config
        self.model = reader.model
        self.reader = reader
        self._kinds = attention_kinds(reader.model)
        self._last_token: Int[torch.Tensor, " batch"]  # of the step that is under way, as is the entry of each of its nodes
        self._entries: Int[torch.Tensor, "batch node"]
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

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> Int[torch.Tensor, " batch"]:
        if max(prompts.lengths) >= self.reader.context_length:
            raise ValueError(
                f"a prompt of {max(prompts.lengths)} tokens leaves no room for an answer in the draft model's context window "
                f"of {self.reader.context_length} tokens; shorten the prompt, or choose a draft model with a longer one"
            )
        room = self.config.length * self.config.top_k
        self.reader.prefill(prompts, max_new_tokens=max_new_tokens, max_nodes=room)
        self._own_prefill = self.reader.num_prefills
        self.reader.rewind(torch.ones_like(prompts.input_ids[:, 0]), [1] * len(prompts.lengths))
        return prompts.last(prompts.input_ids)

    def propose(
        self,
        state: Int[torch.Tensor, " batch"],
        last_token: Int[torch.Tensor, " batch"],
        *,
        generator: Randomness = None,
    ) -> DraftTree:
        if self.reader.num_prefills != self._own_prefill:
            raise RuntimeError("the draft model has begun another answer meanwhile; give each `generate` one of its own")
        self._last_token = last_token
        # Both tokens are the text's own: read as a chain of one behind the first, which is kept.
        logits = self.reader.verify(state, chain_tree(last_token[:, None])).logits[:, 1:]
        self.reader.keep(None, torch.ones_like(last_token), [1] * len(last_token))
        if self.config.temperature:
            return self._draw(logits, last_token, generator)
        search = self._search(logits, last_token)
        chosen = likeliest_nodes(search, self.max_nodes)
        # Node n of the tree is the n-th of those chosen; entry 0 is the last token.
        self._entries = 1 + chosen.long().sort(dim=1, descending=True, stable=True).indices[:, : self.max_nodes]
        return pack(search, chosen, min(self.max_nodes, search.tokens.shape[1]))

    def _search(self, logits: Float[torch.Tensor, "batch 1 vocab"], last_token: Int[torch.Tensor, " batch"]) -> SearchTree:
        """The likeliest continuations, depth by depth; all nodes but the last depth's have been read."""
        width, length = self.config.top_k, self.config.length
        scores = torch.zeros(logits.shape[:2], device=logits.device)  # log-probability of each path
        nodes = torch.full_like(last_token, NO_NODE)[:, None]  # at the end of each path
        tokens, parents, all_scores = (nodes[:, :0], nodes[:, :0], scores[:, :0])
        sizes: list[int] = []
        while True:
            new, path, scores = likeliest_successors(logits.float(), scores, width)
            tokens, parents = torch.cat([tokens, new], dim=1), torch.cat([parents, nodes.gather(1, path)], dim=1)
            all_scores = torch.cat([all_scores, scores], dim=1)
            nodes = torch.arange(sum(sizes), sum(sizes) + new.shape[1], device=new.device).expand_as(new)
            sizes.append(new.shape[1])
            if len(sizes) == length:
                return SearchTree(tokens=tokens, parents=parents, scores=all_scores, level_sizes=tuple(sizes))
            tree = DraftTree(tokens=tokens, parents=parents, max_depth=len(sizes))
            logits = self.reader.verify(last_token, tree, num_read=1 + sum(sizes[:-1])).logits

    def _draw(
        self, logits: Float[torch.Tensor, "batch 1 vocab"], last_token: Int[torch.Tensor, " batch"], generator: Randomness
    ) -> DraftTree:
        """A chain drawn from the model's own distribution."""
        sampling = Sampling(temperature=self.config.temperature)
        probs, tokens = [warp(logits, sampling)], [draw(warp(logits, sampling)[:, 0], generator)]
        while len(tokens) < self.max_nodes:
            chain = chain_tree(torch.stack(tokens, dim=1))
            probs.append(warp(self.reader.verify(last_token, chain, num_read=len(tokens)).logits, sampling))
            tokens.append(draw(probs[-1][:, 0], generator))
        chain = chain_tree(torch.stack(tokens, dim=1))
        self._entries = torch.arange(1, len(tokens) + 1, device=last_token.device).expand_as(chain.tokens)
        drawn_from = pad(torch.cat(probs, dim=1), (0, 0, 0, 1))  # the last node has no children
        return replace(chain, child_probs=drawn_from, max_children=1)

    def advance(
        self,
        state: Int[torch.Tensor, " batch"],
        tree: DraftTree,
        acceptance: Acceptance,
        output: TargetOutput,
        num_accepted: Sequence[int],
    ) -> Int[torch.Tensor, " batch"]:
        # Kept is what comes before the last two tokens of the new text: the last token and the accepted nodes but one.
        kept = pad(self._entries.gather(1, acceptance.path.clamp(min=0)), (1, 0))[:, : max(num_accepted)]
        self.reader.keep(kept if any(num_accepted) else None, acceptance.num_accepted, num_accepted)
        entries = torch.cat([self._last_token[:, None], tree.tokens], dim=1)
        return entries.gather(1, last_entry(acceptance)[:, None])[:, 0]

    def select(self, state: Int[torch.Tensor, " batch"], rows: Sequence[int]) -> Int[torch.Tensor, " kept"]:
        self.reader.select(rows)
        return state[rows]

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
