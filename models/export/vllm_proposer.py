"""ReDrafter, Medusa, lookups in the text, and merges of these, as a proposer that vLLM loads by name.

    vllm serve TARGET --additional-config '{"outrider_drafter": "outputs/my/drafter+suffix"}' --speculative-config '{
      "method": "custom_class", "model": "outrider.models.export.vllm_proposer.Proposer", "num_speculative_tokens": 4}'

It runs in an environment that has both packages, and drafts chains: those of the drafter, or of its merge with
`pace: fixed` and `chain`. A chain is a function of the texts so far, so vLLM's acceptance is exact at every temperature.
vLLM gives a proposer the tokens alone, and trained drafters read the target's last hidden states. So
a proposer extends the method that calls it; the names that this needs are checked.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn

from ...data.manifest import TargetIdentity
from ..decoding.types import NO_NODE
from ..drafters.calibration import start_of_text
from ..drafters.merge_sources import MergedState, MergedText, MergeSources, Source
from ..drafters.merging import MergedRow
from ..drafters.registry import TRAINING_FREE
from ..drafters.saved.build import drafter_of_weights, saved_spec
from ..drafters.saved.folder import read_drafter_config
from ..drafters.saved.parts import DrafterPart, parse_drafter_name
from ..drafters.training_free import FreeState, TrainingFreeDrafter
from ..llm.hf_target import HFTarget

OPTION = "outrider_drafter"
"""The key of vLLM's `additional_config` with the drafter's name: its folder, `suffix`, or several joined by +."""
NEEDED = ("sample_hidden_states", "spec_decode_metadata")
"""Parameters of vLLM's method that are read."""
CHAINS: dict[str, Callable[[int], dict[str, Any]]] = {
    "redrafter": lambda length: {"beam_width": 1, "beam_length": length, "tree_nodes": length},
    "medusa": lambda length: {"tree_paths": [[0] * depth for depth in range(1, length + 1)]},
}
"""Drafting options of a chain, by the kinds whose state is the last hidden state alone."""
LOOKUPS = ("suffix", "prompt_lookup")
"""Drafters that read the text alone. Recycling reads the target's logits, which vLLM doesn't keep."""


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


@dataclass(slots=True)
class Request:
    """What a merge knows of a request."""

    text: MergedText
    stores: list[Any]
    """The store of each lookup."""
    num_tokens: int = 0
    """Tokens of the request that were read, the last one included."""
    drafted: MergedRow | None = None

    def read(self, tokens: Int[np.ndarray, " seq"], counts: dict[int, tuple[float, float]]) -> None:
        """Read the text so far. The stores and the calibration get its last token with the next draft."""
        new = tokens[max(0, self.num_tokens - 1) :].tolist()
        for store in self.stores:
            store.add(new[:-1])
        if self.drafted is not None:
            self.text.walks = (*self.text.walks, (self.drafted, NO_NODE))
            self.text.follow(new[1:-1], counts)
        self.num_tokens = len(tokens)


class Proposer:
    """Drafts a chain after each request's last token."""

    def __init__(self, vllm_config: Any) -> None:
        name = (vllm_config.additional_config or {}).get(OPTION)
        if name is None:
            raise ValueError(f"give the drafter: --additional-config '{{\"{OPTION}\": FOLDER}}'")
        _give_states_to_proposers()
        self.parts, self.length = parse_drafter_name(name).parts, vllm_config.speculative_config.num_speculative_tokens
        self.dtype = vllm_config.model_config.dtype
        for part in self.parts:
            _require_chains(part)
        if sum(part.folder is not None for part in self.parts) > 1:
            raise ValueError(f"{OPTION} is {name}, with two trained drafters, and this proposer takes one")
        self.trained: Any = None
        self.merge: MergeSources | None = None
        self.requests: dict[str, Request] = {}
        self.receive(torch.empty(0, 0), None, ())

    def load_model(self, target_model: Any) -> None:
        """Load the drafter beside the target's embeddings."""
        sources: dict[str, Source] = {}
        for part in self.parts:
            if part.folder is None:
                sources[part.name] = TRAINING_FREE[part.name](part.config({}))
            else:
                sources[part.name] = self.trained = self._load(part.folder, target_model.model.embed_tokens)
        if [*sources.values()] != [self.trained]:
            self.merge = MergeSources(sources, max_nodes=self.length, grows=False, is_chain=True)

    def _load(self, folder: Path, embed_tokens: Any) -> Any:
        saved = read_drafter_config(folder)
        trained_for = saved.target
        width, vocab_size = embed_tokens.weight.shape[1], embed_tokens.org_vocab_size
        if (width, vocab_size) != (trained_for.hidden_size, trained_for.vocab_size):
            raise ValueError(
                f"{folder} was trained for {trained_for.name} with width {trained_for.hidden_size} and "
                f"{trained_for.vocab_size} tokens, and the served target has {width} and {vocab_size}; serve its own target"
            )
        spec = saved_spec(saved, CHAINS[saved.kind](self.length))
        if saved.kind == "redrafter":  # its head was saved, and vLLM may divide the target's among processes
            spec = replace(spec, config=replace(spec.config, head_init="random"))
        drafter = drafter_of_weights(spec, folder, ServedTarget(embed_tokens, trained_for)).eval().requires_grad_(False)
        for parameter in drafter.parameters():
            parameter.data = parameter.data.to(self.dtype)
        return drafter.to(embed_tokens.weight.device)

    def receive(self, states: Float[torch.Tensor, "row hidden"], num_drafts: list[int] | None, requests: Sequence[str]) -> None:
        """Take the last hidden states of a step, and the names of its requests.

        There is a row for each request's last token and each of its draft tokens.
        """
        self._states, self._num_drafts, self._names = states, num_drafts, requests

    @torch.inference_mode()
    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens: Any = None, token_ids: Any = None, **_: Any
    ) -> list[list[int]]:
        """Return draft tokens for each request; none for one whose prompt isn't read yet.

        `token_ids` has the tokens of each request, of which the first `num_tokens` are its text.
        """
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
            states, last_tokens = self._states[torch.tensor(rows, device=device)], [sampled_token_ids[row][-1] for row in live]
            last = torch.tensor(last_tokens, device=device)
            if self.merge is None:
                chains = self.trained.propose(states, last)[0].tokens.tolist()
            else:
                texts = {self._names[row]: token_ids[row, : num_tokens[row]] for row in live}
                chains = self._merged(self.merge, texts, states, last)
            for row, tokens in zip(live, chains, strict=True):
                drafts[row] = tokens
        return drafts

    def _merged(
        self,
        merge: MergeSources,
        texts: dict[str, Int[np.ndarray, " _"]],
        states: Float[torch.Tensor, "batch hidden"],
        last: Int[torch.Tensor, " batch"],
    ) -> list[list[int]]:
        """Return the chains of the merge after each text."""
        # 1. The requests that are left, with their texts so far.
        lookups = [part for part in merge.parts if isinstance(part, TrainingFreeDrafter)]
        self.requests = {name: self.requests[name] for name in self._names if name in self.requests}
        for name, tokens in texts.items():
            if name not in self.requests or self.requests[name].num_tokens >= len(tokens):  # or a new one of this name
                stores = [part.new_store() for part in lookups]
                self.requests[name] = Request(MergedText(counts=start_of_text(merge.counts)), stores)
            self.requests[name].read(tokens, merge.counts)
        requests = [self.requests[name] for name in texts]
        # 2. One step of the merge.
        free = [FreeState(tuple(request.stores[number] for request in requests)) for number in range(len(lookups))]
        state = MergedState(
            sources=tuple(states if part is self.trained else free.pop(0) for part in merge.parts),
            texts=tuple(request.text for request in requests),
            num_accepted=(0,) * len(requests),
        )
        draft = merge.open(state, last, last.tolist())
        for index in range(len(merge.parts)):
            merge.ask(draft, index)
        merge.rank(draft)
        for request, row in zip(requests, draft.rows, strict=True):
            request.drafted = row
        return [row.tokens for row in draft.rows]


def _require_chains(part: DrafterPart) -> None:
    """Raise ValueError for a part that this proposer can't draft with."""
    if part.folder is None:
        kind, fits = part.name, part.name in LOOKUPS
    else:
        saved = None if part.is_model else read_drafter_config(part.folder)
        kind = "draft_model" if saved is None else saved.kind
        fits = saved is not None and kind in CHAINS and not saved.drafter.get("share_head")
    if not fits:
        raise ValueError(
            f"{part.folder or part.name} is of the kind {kind}, and this proposer drafts with {', '.join(LOOKUPS)}, and "
            f"{' or '.join(CHAINS)} that has its own heads: vLLM loads other kinds from exports (outrider export --to vllm)"
        )


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
            num_drafts = None if metadata is None else metadata.num_draft_tokens
            self.drafter.receive(given["sample_hidden_states"], num_drafts, self.input_batch.req_ids)
        return original(self, *arguments, **named)

    runner.propose_draft_token_ids = propose_draft_token_ids
