"""The frozen target: any causal language model of transformers, unmodified."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.manifest import TargetIdentity
from .decoding.tree import DraftTree
from .decoding.types import NO_NODE, Acceptance, TargetOutput
from .tree_cache import TreeCache


class HFTarget:
    """A target behind transformers' public seams: a 4-D attention mask, explicit positions, and a cache of our own.

    Holds the KV cache of one prompt at a time. Make it with `outrider.models.target.load_target`.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, identity: TargetIdentity) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.identity = identity
        self._cache: TreeCache | None = None

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The input embeddings, frozen."""
        embeddings = self.model.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        return embeddings

    @property
    def head(self) -> nn.Linear:
        """The output embeddings: hidden states to logits, frozen."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    @property
    def hidden_size(self) -> int:
        return int(self._text_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self._text_config.vocab_size)

    @property
    def context_length(self) -> int:
        """Tokens, prompt and answer together, that the model has positions for."""
        return int(self._text_config.max_position_embeddings)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, from the model's generation config."""
        generation_config = self.model.generation_config
        eos = generation_config.eos_token_id if generation_config is not None else self._text_config.eos_token_id
        if eos is None:
            return ()
        return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)

    @property
    def _text_config(self) -> Any:
        return self.model.config.get_text_config()

    # --- decoding

    def prefill(self, prompt: Int[torch.Tensor, "batch seq"], *, max_new_tokens: int, max_nodes: int) -> TargetOutput:
        """Start anew with a prompt of equally long rows. Raises ValueError where it doesn't fit the context window."""
        num_tokens = prompt.shape[1] + max_new_tokens
        if num_tokens > self.context_length:
            raise ValueError(
                f"a prompt of {prompt.shape[1]} tokens and {max_new_tokens} new ones exceed the target's context window of "
                f"{self.context_length} tokens; shorten the prompt or lower max_new_tokens"
            )
        require_full_attention(self.model, num_tokens + max_nodes)
        self._cache = TreeCache(self._text_config.num_hidden_layers, capacity=num_tokens + max_nodes)
        positions = torch.arange(prompt.shape[1], device=prompt.device)[None]
        output = self._forward(prompt, positions, None, logits_to_keep=1)
        self._cache.advance(prompt.shape[1])
        return output

    def verify(self, last_token: Int[torch.Tensor, " batch"], tree: DraftTree) -> TargetOutput:
        """One forward over the last committed token and the tree's nodes, each attending to its own path only."""
        committed = self._require_cache().committed
        if tree.num_nodes == 0:
            return self._forward(last_token[:, None], torch.full_like(last_token[:, None], committed), None)
        tokens = torch.cat([last_token[:, None], tree.tokens.clamp(min=0)], dim=1)
        depths = torch.nn.functional.pad(tree.depths, (1, 0))
        # Nodes beyond the context window can never be emitted; they only must not index past a position table.
        positions = (committed + depths).clamp(max=self.context_length - 1)
        return self._forward(tokens, positions, tree_attention_mask(tree, committed, self.dtype))

    def commit(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Keep the last committed token and the accepted path in the KV cache; forget the other nodes. Batch of one."""
        path = [node for node in acceptance.path[0].tolist() if node != NO_NODE]
        cache = self._require_cache()
        if path == list(range(len(path))):  # nothing accepted, or the tree's first nodes: they already lie where they belong
            cache.advance(1 + len(path))
        else:
            cache.keep(torch.tensor([[0, *(node + 1 for node in path)]], device=acceptance.path.device))

    def _require_cache(self) -> TreeCache:
        assert self._cache is not None, "prefill comes before verify and commit"
        return self._cache

    def _forward(
        self,
        tokens: Int[torch.Tensor, "batch query"],
        positions: Int[torch.Tensor, "rows query"],
        mask: Float[torch.Tensor, "batch 1 query key"] | None,
        **kwargs: Any,
    ) -> TargetOutput:
        with CapturedHiddenStates(self.model) as captured:
            output = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self._require_cache(),
                use_cache=True,
                **kwargs,
            )
        return TargetOutput(logits=output.logits, hidden_states=captured.hidden_states)

    # --- training and distillation

    @torch.no_grad()
    def hidden_states(
        self, input_ids: Int[torch.Tensor, "batch seq"], attention_mask: Bool[torch.Tensor, "batch seq"]
    ) -> Float[torch.Tensor, "batch seq hidden"]:
        """Last hidden states, after the final norm, of right-padded texts; neither head nor gradients are computed."""
        output = self.model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden_states: torch.Tensor = output.last_hidden_state
        return hidden_states


class CapturedHiddenStates:
    """Catches what the base model hands to the head, for every position, without asking for all layers' states."""

    hidden_states: torch.Tensor

    def __init__(self, model: PreTrainedModel) -> None:
        self.base_model = model.base_model

    def __enter__(self) -> "CapturedHiddenStates":
        self._hook = self.base_model.register_forward_hook(self._capture)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _capture(self, module: nn.Module, args: Any, output: Any) -> None:
        self.hidden_states = output[0]


def tree_attention_mask(tree: DraftTree, committed: int, dtype: torch.dtype) -> Float[torch.Tensor, "batch 1 query key"]:
    """Additive mask over `committed` cache entries, the last committed token, and the tree's nodes.

    Everybody sees the committed text and the last token; a node sees itself and its ancestors besides. Additive rather than
    boolean: the one form that both the sdpa and the eager attention of transformers take as it is.
    """
    batch, num_nodes = tree.tokens.shape
    mask = torch.zeros(batch, 1, num_nodes + 1, committed + 1 + num_nodes, dtype=dtype, device=tree.tokens.device)
    hidden = torch.nn.functional.pad(~tree.ancestor_mask(), (0, 0, 1, 0), value=True)  # the last token sees no node
    mask[:, 0, :, committed + 1 :].masked_fill_(hidden, torch.finfo(dtype).min)
    return mask


def require_full_attention(model: PreTrainedModel, num_tokens: int) -> None:
    """Raise ValueError where a tree of `num_tokens` in all can't be verified rightly: then, better not at all.

    A 4-D mask replaces the model's own in every layer, so each layer must attend to the whole text, and nothing but the mask
    and the position ids may tell it where a token stands.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if strange := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{name} has layers of type {', '.join(sorted(strange))}; only full attention can read a draft tree")
    if window is not None and window < num_tokens and kinds != {"full_attention"}:
        raise ValueError(
            f"{name} attends to a sliding window of {window} tokens, and {num_tokens} are asked for; "
            "shorten the prompt or the answer so that all of it fits the window"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(f"{name} caps its attention scores, which our tree attention can't reproduce")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise ValueError(f"{name} tells positions by a bias on the attention scores (ALiBi), which ignores position ids")
