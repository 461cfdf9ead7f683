"""Texts of vLLM's requests for a drafter that reads several layers of the target and keeps a cache of its own.

vLLM gives the layers' inputs of each token once, when it reads the token. So they are kept for each request until the
drafter has read them, and a request of which some were never given gets no drafts.
"""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import AutoModelForCausalLM

from ...data.manifest import TargetIdentity
from ..decoding.types import Counts, Prompts, TargetOutput
from ..drafters.cached_drafter import CachedDrafter, CachedText
from ..llm.hf_target import HFTarget
from ..llm.hidden_states import decoder_of

logger = logging.getLogger(__name__)

ROOM = 256
"""Tokens after a prompt for which the drafter's cache has memory at first; it doubles where they don't suffice."""


class ServedTarget(HFTarget):
    """The target in vLLM, as far as building a drafter reads it.

    `config` is transformers' configuration; None for drafters that need no layers. `head` has vLLM's output layer, or
    None for drafters with heads of their own.
    """

    embed_tokens: Any = None
    head: Any = None
    hidden_size, vocab_size, has_fixed_shapes, device = 0, 0, False, torch.device("cpu")

    def __init__(self, embed_tokens: Any, identity: TargetIdentity, *, config: Any = None, head: Any = None) -> None:
        self.embed_tokens, self.identity = embed_tokens, identity
        self.hidden_size, self.vocab_size = identity.hidden_size, identity.vocab_size
        self.head = nn.Linear(self.hidden_size, self.vocab_size, bias=False, device="meta")
        # Without vLLM's layer, zeros that share one number: the layer of a large model would take gigabytes.
        weight = torch.zeros(()).expand(self.vocab_size, self.hidden_size) if head is None else head[: self.vocab_size]
        self.head.weight = nn.Parameter(weight, requires_grad=False)
        if config is not None:
            with torch.device("meta"):  # layers without weights: a drafter copies their form
                self.model = AutoModelForCausalLM.from_config(deepcopy(config.get_text_config()))
            decoder = decoder_of(self.model)
            if (rotary := getattr(decoder, "rotary_emb", None)) is not None:
                decoder.rotary_emb = type(rotary)(decoder.config).to(embed_tokens.weight.device)


@dataclass(slots=True)
class ServedText:
    """A request without its last token."""

    num_tokens: int = 0
    """Tokens whose features were given."""
    unread: list[Float[torch.Tensor, "token feature"]] = field(default_factory=list)
    """Those that the drafter hasn't read."""
    state: CachedText | None = None


class ServedTexts:
    """The requests that vLLM knows, by their names."""

    def __init__(self, drafter: CachedDrafter, device: torch.device) -> None:
        self.drafter, self.device = drafter, device
        self._texts: dict[str, ServedText] = {}

    def receive(
        self,
        features: Float[torch.Tensor, "token feature"],
        steps: Mapping[str, tuple[int, int, int]],
        alive: Mapping[str, Any],
    ) -> None:
        """Take the features of a step's tokens, request after request.

        `steps` has for each request the tokens that were read before, those of the step, and how many of these are kept:
        the others are rejected drafts. Requests that aren't `alive` are forgotten.
        """
        self._texts = {name: text for name, text in self._texts.items() if name in alive}
        pieces = features.split([num_read for _, num_read, _ in steps.values()])
        for (name, (start, _, num_kept)), piece in zip(steps.items(), pieces, strict=True):
            if start == 0:  # a new request, or one that is read again
                self._texts[name] = ServedText()
            text = self._texts.get(name)
            if text is not None and text.num_tokens != start:
                logger.warning("request %s gets no drafts: vLLM read tokens of it without the proposer", name)
                del self._texts[name]
            elif text is not None:
                text.num_tokens += num_kept
                text.unread.append(piece[:num_kept].clone())  # vLLM writes the next step's there

    def state(self, name: str, tokens: Int[np.ndarray, " seq"]) -> CachedText | None:
        """Return the drafter's state after a request's text, whose last token the target hasn't read.

        The drafter must read it before the next one is asked for. None if it can't follow the request.
        """
        text = self._texts.get(name)
        if text is None or text.num_tokens != len(tokens) - 1:
            return None
        features, text.unread = torch.cat(text.unread)[None], []
        read = torch.tensor(tokens[None, :-1], dtype=torch.long, device=self.device)
        if text.state is None:
            prefill = TargetOutput(logits=features[:, :0], hidden_states=features, features=features)
            text.state = self.drafter.init_state(Prompts.of(read), prefill, max_new_tokens=ROOM)
        else:
            number = Counts.of([features.shape[1]], self.device)
            new = read[:, -features.shape[1] :]
            text.state = replace(text.state, unread_tokens=new, unread_features=features, num_unread=number)
        return text.state


def steps_of(
    names: Sequence[str],
    starts: Sequence[int],
    scheduled: Mapping[str, int],
    num_drafts: Sequence[int],
    sampled: Sequence[Sequence[int]],
) -> dict[str, tuple[int, int, int]]:
    """Return what `ServedTexts.receive` needs of a step: `num_drafts` were verified, and `sampled` tokens are new."""
    steps = {}
    for name, start, drafts, new in zip(names, starts, num_drafts, sampled, strict=False):
        rejected = drafts - len(new) + 1 if new else 0
        steps[name] = int(start), scheduled[name], scheduled[name] - rejected
    return steps
