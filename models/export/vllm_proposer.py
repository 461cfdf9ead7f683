"""ReDrafter and Medusa as a proposer that vLLM loads by name, in an environment that has both packages.

    vllm serve TARGET --additional-config '{"outrider_drafter": "outputs/my/drafter"}' --speculative-config '{
      "method": "custom_class", "model": "outrider.models.export.vllm_proposer.Proposer", "num_speculative_tokens": 4}'

It drafts chains. A chain is a function of the text, so vLLM's acceptance is exact at every temperature.
vLLM gives a proposer the tokens alone, and these drafters read the target's last hidden states. So
a proposer extends the method that calls it; the names that this needs are checked.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import nn

from ...data.manifest import TargetIdentity
from ..drafters.saved.build import drafter_of_weights, saved_spec
from ..drafters.saved.folder import read_drafter_config
from ..llm.hf_target import HFTarget

OPTION = "outrider_drafter"
"""The key of vLLM's `additional_config` with the drafter's folder."""
NEEDED = ("sample_hidden_states", "spec_decode_metadata")
"""Parameters of vLLM's method that are read."""
CHAINS: dict[str, Callable[[int], dict[str, Any]]] = {
    "redrafter": lambda length: {"beam_width": 1, "beam_length": length, "tree_nodes": length},
    "medusa": lambda length: {"tree_paths": [[0] * depth for depth in range(1, length + 1)]},
}
"""Drafting options of a chain, by the kinds whose state is the last hidden state alone."""


class ServedTarget(HFTarget):
    """The target in vLLM, as far as building a drafter reads it.

    The head is none of vLLM's, which may be divided among processes: the drafter's saved weights replace it.
    """

    embed_tokens: Any = None
    head: Any = None
    hidden_size, vocab_size, has_fixed_shapes, device = 0, 0, False, torch.device("cpu")

    def __init__(self, embed_tokens: Any, identity: TargetIdentity) -> None:
        self.embed_tokens, self.identity = embed_tokens, identity
        self.hidden_size, self.vocab_size = identity.hidden_size, identity.vocab_size
        self.head = nn.Linear(self.hidden_size, self.vocab_size, bias=False)


class Proposer:
    """Drafts a chain after each request's last token."""

    def __init__(self, vllm_config: Any) -> None:
        folder = (vllm_config.additional_config or {}).get(OPTION)
        if folder is None:
            raise ValueError(f"give the drafter's folder: --additional-config '{{\"{OPTION}\": FOLDER}}'")
        _give_states_to_proposers()
        self.folder, self.length = Path(folder), vllm_config.speculative_config.num_speculative_tokens
        self.saved, self.dtype = read_drafter_config(self.folder), vllm_config.model_config.dtype
        if self.saved.kind not in CHAINS or self.saved.drafter.get("share_head"):
            kinds = " or ".join(CHAINS)
            raise ValueError(
                f"{folder} is of the kind {self.saved.kind}, and this proposer drafts with {kinds} that has its own heads: "
                "vLLM loads other kinds from exports (outrider export --to vllm)"
            )
        self.receive(torch.empty(0, 0), None)

    def load_model(self, target_model: Any) -> None:
        """Load the drafter beside the target's embeddings."""
        embed_tokens, trained_for = target_model.model.embed_tokens, self.saved.target
        width, vocab_size = embed_tokens.weight.shape[1], embed_tokens.org_vocab_size
        if (width, vocab_size) != (trained_for.hidden_size, trained_for.vocab_size):
            raise ValueError(
                f"{self.folder} was trained for {trained_for.name} with width {trained_for.hidden_size} and "
                f"{trained_for.vocab_size} tokens, and the served target has {width} and {vocab_size}; serve its own target"
            )
        spec = saved_spec(self.saved, CHAINS[self.saved.kind](self.length))
        if self.saved.kind == "redrafter":  # its head was saved, and vLLM may divide the target's among processes
            spec = replace(spec, config=replace(spec.config, head_init="random"))
        target = ServedTarget(embed_tokens, trained_for)
        drafter = drafter_of_weights(spec, self.folder, target).eval().requires_grad_(False)
        for parameter in drafter.parameters():
            parameter.data = parameter.data.to(self.dtype)
        self.drafter: Any = drafter.to(embed_tokens.weight.device)

    def receive(self, states: Float[torch.Tensor, "row hidden"], num_drafts: list[int] | None) -> None:
        """Take the last hidden states of a step: a row for each request's last token and each of its draft tokens."""
        self._states, self._num_drafts = states, num_drafts

    @torch.inference_mode()
    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Return draft tokens for each request; none for one whose prompt isn't read yet."""
        num_rows = [1 + (self._num_drafts[row] if self._num_drafts else 0) for row in range(len(sampled_token_ids))]
        if sum(num_rows) != len(self._states):
            raise RuntimeError(
                f"vLLM gave {len(self._states)} states for {sum(num_rows)} tokens; is it another version than 0.32?"
            )
        live = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if live:
            # The last accepted token is the last but one of a request's new tokens; its state predicted the last.
            rows = [sum(num_rows[:row]) + len(sampled_token_ids[row]) - 1 for row in live]
            device = self._states.device
            last = torch.tensor([sampled_token_ids[row][-1] for row in live], device=device)
            tree, _ = self.drafter.propose(self._states[torch.tensor(rows, device=device)], last)
            for row, tokens in zip(live, tree.tokens.tolist(), strict=True):
                drafts[row] = tokens
        return drafts


@cache
def _give_states_to_proposers() -> None:
    """Let vLLM's runner give its hidden states to a proposer of ours. Raises RuntimeError for another vLLM."""
    runner: Any = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    original = runner.propose_draft_token_ids
    signature = inspect.signature(original)
    if missing := [name for name in NEEDED if name not in signature.parameters]:
        raise RuntimeError(
            f"this vLLM's propose_draft_token_ids has no {' and no '.join(missing)}; the proposer was written for vLLM 0.32"
        )

    def propose_draft_token_ids(self: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(self.drafter, Proposer):
            given = signature.bind(self, *arguments, **named).arguments
            metadata = given.get("spec_decode_metadata")
            self.drafter.receive(given["sample_hidden_states"], None if metadata is None else metadata.num_draft_tokens)
        return original(self, *arguments, **named)

    runner.propose_draft_token_ids = propose_draft_token_ids
