"""ReDrafter, Medusa, block drafters, lookups in the text, and merges of these, as a proposer that vLLM loads by name.

    vllm serve TARGET --additional-config '{"outrider_drafter": "outputs/my/drafter+suffix"}' --speculative-config '{
      "method": "custom_class", "model": "outrider.models.export.vllm_proposer.Proposer", "num_speculative_tokens": 4}'

It runs in an environment that has both packages, and drafts chains: those of the drafter, or of its merge with
`pace: fixed` and `chain`. A chain is a function of the texts so far, so vLLM's acceptance is exact at every temperature.
vLLM gives a proposer the tokens alone, and trained drafters read the target's hidden states. So a
proposer extends the methods of the runner that calls it; the names that this needs are checked.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from ..decoding.types import NO_NODE
from ..drafters.cached_drafter import CachedDrafter, CachedText
from ..drafters.calibration import start_of_text
from ..drafters.merge_sources import MergedState, MergedText, MergeSources, Source
from ..drafters.merging import MergedRow
from ..drafters.registry import TRAINING_FREE
from ..drafters.saved.build import drafter_of_weights, saved_spec
from ..drafters.saved.folder import read_drafter_config, require_fitting_target
from ..drafters.saved.parts import DrafterPart, parse_drafter_name
from ..drafters.training_free import FreeState, TrainingFreeDrafter
from .llama import order_problems
from .vllm_texts import ServedTarget, ServedTexts, steps_of

OPTION = "outrider_drafter"
"""The key of vLLM's `additional_config` with the drafter's name: its folder, `suffix`, or several joined by +."""
CHANGED = ("_setup_eagle3_aux_hidden_state_outputs", "_input_fits_in_drafter", "propose_draft_token_ids")
"""Methods of vLLM's model runner that are wrapped."""
NEEDED = ("scheduler_output", "sampled_token_ids", "sample_hidden_states", "aux_hidden_states", "spec_decode_metadata")
"""Parameters of vLLM's method that are read."""
CHAINS: dict[str, Callable[[int], dict[str, Any]]] = {
    "redrafter": lambda length: {"beam_width": 1, "beam_length": length, "tree_nodes": length},
    "medusa": lambda length: {"tree_paths": [[0] * depth for depth in range(1, length + 1)]},
    "block": lambda length: {"depth": length, "width": 1, "tree_nodes": length},
}
"""Drafting options of a chain, by kind."""
READ_LAYERS = ("block",)
"""Kinds that read several layers of the target, at all tokens."""
LOOKUPS = ("suffix", "prompt_lookup")
"""Drafters that read the text alone. Recycling reads the target's logits, which vLLM doesn't keep."""


DrafterState = Float[torch.Tensor, "batch hidden"] | CachedText
"""A trained drafter's state: the target's last hidden states, or the text of one request."""


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


def _embeddings(target_model: Any) -> Any:
    """Return the target's embeddings. Raises ValueError for a model that scales them, or has them elsewhere."""
    inner = getattr(target_model, "model", None)
    # Gemma has a normalizer beside them.
    if inner is None or not hasattr(inner, "embed_tokens") or hasattr(inner, "normalizer"):
        raise ValueError(
            f"a trained drafter reads the target's embeddings, and vLLM's {type(target_model).__name__} scales them, or has "
            "them elsewhere; serve suffix+recycling, or export the drafter"
        )
    return inner.embed_tokens


class Proposer:
    """Drafts a chain after each request's last token."""

    def __init__(self, vllm_config: Any) -> None:
        name = (vllm_config.additional_config or {}).get(OPTION)
        if name is None:
            raise ValueError(f"give the drafter: --additional-config '{{\"{OPTION}\": FOLDER}}'")
        _give_states_to_proposers()
        self.parts, self.length = parse_drafter_name(name).parts, vllm_config.speculative_config.num_speculative_tokens
        self.dtype, self.vllm_config = vllm_config.model_config.dtype, vllm_config
        for part in self.parts:
            if _drafting_kind(part) in READ_LAYERS and vllm_config.cache_config.enable_prefix_caching:
                raise ValueError(
                    f"{part.folder} reads layers of the target at all tokens of a request, and vLLM doesn't compute those that "
                    "it finds in its prefix cache; serve with --no-enable-prefix-caching"
                )
        if sum(part.folder is not None for part in self.parts) > 1:
            raise ValueError(f"{OPTION} is {name}, with two trained drafters, and this proposer takes one")
        self.trained: Any = None
        self.texts: ServedTexts | None = None
        self.merge: MergeSources | None = None
        self.requests: dict[str, Request] = {}
        self.receive(torch.empty(0, 0), None, (), {})

    def load_model(self, target_model: Any) -> None:
        """Load the drafter beside the target's embeddings."""
        sources: dict[str, Source] = {}
        for part in self.parts:
            if part.folder is None:
                sources[part.name] = TRAINING_FREE[part.name](part.config({}))
            else:
                sources[part.name] = self.trained = self._load(part.folder, target_model)
        if isinstance(self.trained, CachedDrafter):
            self.texts = ServedTexts(self.trained, _embeddings(target_model).weight.device)
            target_model.set_aux_hidden_state_layers(self.trained.feature_layers)
        if [*sources.values()] != [self.trained]:
            self.merge = MergeSources(sources, max_nodes=self.length, grows=False, is_chain=True)

    def _load(self, folder: Path, target_model: Any) -> Any:
        saved, embed_tokens = read_drafter_config(folder), _embeddings(target_model)
        trained_for = saved.target
        sizes = {"hidden_size": embed_tokens.weight.shape[1], "vocab_size": embed_tokens.org_vocab_size}
        require_fitting_target(folder, trained_for, replace(trained_for, name="the served target", **sizes))
        spec = saved_spec(saved, CHAINS[saved.kind](self.length))
        if saved.kind == "redrafter":  # its head was saved, and vLLM may divide the target's among processes
            spec = replace(spec, config=replace(spec.config, head_init="random"))
        target = ServedTarget(embed_tokens, trained_for)
        if saved.kind in READ_LAYERS:
            if not hasattr(target_model, "set_aux_hidden_state_layers"):
                raise ValueError(
                    f"{folder} reads layers of the target, and vLLM's {type(target_model).__name__} doesn't give them (it has "
                    "no EAGLE-3 interface); serve a redrafter"
                )
            head = None if spec.config.draft_vocab_size is not None else self._head(folder, target_model)
            target = ServedTarget(embed_tokens, trained_for, config=self.vllm_config.model_config.hf_config, head=head)
        drafter = drafter_of_weights(spec, folder, saved, target).eval().requires_grad_(False)
        if problems := order_problems(drafter.feature_layers):
            raise ValueError(f"{folder} can't be served: {problems[0]}")
        return drafter.to(device=embed_tokens.weight.device, dtype=self.dtype)

    def _head(self, folder: Path, target_model: Any) -> Float[torch.Tensor, "row hidden"]:
        """Return the weights of the target's output layer. Raises ValueError if this process has only a part of them."""
        head = getattr(getattr(target_model, "lm_head", None), "weight", None)
        if self.vllm_config.parallel_config.tensor_parallel_size > 1 or head is None or not head.is_floating_point():
            raise ValueError(
                f"{folder} has no output layer of its own, and the target's is divided or quantised here; train the drafter "
                "with drafter.draft_vocab_size"
            )
        return head

    def receive(
        self,
        states: Float[torch.Tensor, "row hidden"],
        num_drafts: list[int] | None,
        names: Sequence[str],
        alive: Mapping[str, Any],
    ) -> None:
        """Take the last hidden states of a step, the names of its requests, and those of all that aren't done.

        There is a row for each request's last token and each of its draft tokens.
        """
        self._states, self._num_drafts, self._names, self._alive = states, num_drafts, names, alive

    @torch.inference_mode()
    def propose(self, sampled_token_ids: list[list[int]], num_tokens: Any, token_ids: Any, **_: Any) -> list[list[int]]:
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
            texts = {self._names[row]: token_ids[row, : num_tokens[row]] for row in live}
            if self.texts is None:
                chains = self._chains(texts, states, last)
            else:  # each request has a cache of its own
                chains = []
                for row, (name, tokens) in enumerate(texts.items()):
                    state = self.texts.state(name, tokens)
                    chains += [[]] if state is None else self._chains({name: tokens}, state, last[row : row + 1])
            for row, chain in zip(live, chains, strict=True):
                drafts[row] = chain
        return drafts

    def _chains(
        self, texts: dict[str, Int[np.ndarray, " _"]], state: DrafterState, last: Int[torch.Tensor, " batch"]
    ) -> list[list[int]]:
        """Return chains after each text, by the drafter alone or by its merge."""
        if self.merge is None:
            chains: list[list[int]] = self.trained.propose(state, last)[0].tokens.tolist()
            return chains
        return self._merged(self.merge, texts, state, last)

    def _merged(
        self,
        merge: MergeSources,
        texts: dict[str, Int[np.ndarray, " _"]],
        trained_state: DrafterState,
        last: Int[torch.Tensor, " batch"],
    ) -> list[list[int]]:
        """Return the chains of the merge after each text."""
        # 1. The requests that are left, with their texts so far.
        lookups = [part for part in merge.sources if isinstance(part, TrainingFreeDrafter)]
        self.requests = {name: request for name, request in self.requests.items() if name in self._alive}
        for name, tokens in texts.items():
            if name not in self.requests or self.requests[name].num_tokens >= len(tokens):  # or a new one of this name
                stores = [part.new_store() for part in lookups]
                self.requests[name] = Request(MergedText(counts=start_of_text(merge.counts)), stores)
            self.requests[name].read(tokens, merge.counts)
        requests = [self.requests[name] for name in texts]
        # 2. One step of the merge.
        free = [FreeState(tuple(request.stores[number] for request in requests)) for number in range(len(lookups))]
        state = MergedState(
            states=tuple(trained_state if part is self.trained else free.pop(0) for part in merge.sources),
            texts=tuple(request.text for request in requests),
            num_accepted=(0,) * len(requests),
        )
        draft = merge.open(state, last, last.tolist())
        for index in range(len(merge.sources)):
            merge.ask(draft, index)
        merge.rank(draft)
        for request, row in zip(requests, draft.rows, strict=True):
            request.drafted = row
        return [row.tokens for row in draft.rows]


def _drafting_kind(part: DrafterPart) -> str:
    """Return a part's kind. Raises ValueError if this proposer can't draft with it."""
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
    return kind


@cache
def _give_states_to_proposers() -> None:
    """Let vLLM's runner give its hidden states to a proposer of ours. Raises RuntimeError for another vLLM."""
    runner: Any = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    if absent := [name for name in CHANGED if not hasattr(runner, name)]:
        raise RuntimeError(f"this vLLM's model runner has no {' and no '.join(absent)}; the proposer was written for vLLM 0.32")
    set_up, fits, original = (getattr(runner, name) for name in CHANGED)
    signature = inspect.signature(original)
    if missing := [name for name in NEEDED if name not in signature.parameters]:
        raise RuntimeError(
            f"this vLLM's propose_draft_token_ids has no {' and no '.join(missing)}; the proposer was written for vLLM 0.32"
        )

    def set_up_layers(self: Any) -> None:  # the last that the loading of the target does
        set_up(self)
        if isinstance(getattr(self, "drafter", None), Proposer) and self.drafter.texts is not None:
            self.use_aux_hidden_state_outputs = True

    def fits_in_drafter(self: Any, metadata: Any) -> bool:
        # One request at the end of the context window would hide a step of all others from the proposer.
        return fits(self, metadata) or (metadata is not None and isinstance(getattr(self, "drafter", None), Proposer))

    def propose_draft_token_ids(self: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(getattr(self, "drafter", None), Proposer):
            given = signature.bind(self, *arguments, **named).arguments
            metadata, names = given.get("spec_decode_metadata"), self.input_batch.req_ids
            num_drafts = None if metadata is None else metadata.num_draft_tokens
            self.drafter.receive(given["sample_hidden_states"], num_drafts, names, self.requests)
            if self.drafter.texts is not None:
                scheduled, sampled = given["scheduler_output"].num_scheduled_tokens, given["sampled_token_ids"]
                starts = self.input_batch.num_computed_tokens_cpu
                steps = steps_of(names, starts, scheduled, num_drafts or [0] * len(names), sampled)
                num_tokens = sum(num_read for _, num_read, _ in steps.values())
                features = torch.cat([layer[:num_tokens] for layer in given["aux_hidden_states"]], dim=-1)
                self.drafter.texts.receive(features, steps, self.requests)
        return original(self, *arguments, **named)

    runner._setup_eagle3_aux_hidden_state_outputs, runner._input_fits_in_drafter = set_up_layers, fits_in_drafter
    runner.propose_draft_token_ids = propose_draft_token_ids
