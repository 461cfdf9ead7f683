"""Hidden states of texts that vLLM has read, in place of passes of the target here.

vLLM writes the states of a request to a file (its speculative method `extract_hidden_states`, and a connector that
saves them; from 0.18 on). State i is the input of layer i, and the last one is the last layer's output before the
final norm, which is computed here. The file system must be one that both programs see. A text that the target wrote
greedily is its own label; at the few tokens where rounding in the engine chose another one, the label ends.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from ....models.llm.hf_target import HFTarget
from ....models.llm.hidden_states import decoder_layers, decoder_of
from ...config import DistillConfig
from .openai import CompletionsServer, ServedStatesReply, open_servers
from .states_files import drop_states, states_file, take_states

logger = logging.getLogger(__name__)

MOST_ERROR, MOST_NARROW_ERROR = 1e-4, 0.05
"""Largest relative errors of a token's states that two programs' rounding explains, in float32 and in narrower types."""
START = (
    "start vLLM with --no-enable-prefix-caching --speculative-config and --kv-transfer-config as "
    "docs/how-to/regenerate.md shows"
)


@dataclass(frozen=True, kw_only=True)
class ServedStates:
    """Servers that write the states of texts into `folder`; texts are divided among them."""

    servers: Sequence[tuple[CompletionsServer, str]]
    """Each with its name of the target."""
    folder: Path
    target: HFTarget
    layers: tuple[int, ...]
    """Layers whose inputs are read besides the last states."""
    turns: Iterator[int] = field(default_factory=count)
    """Counts the texts, so that the servers take turns also between batches."""

    def require_same_states(self) -> None:
        """Read a short text by each server and by the target here.

        Raises ValueError if a server's states are those of another model or of other layers.
        """
        if not hasattr(decoder_of(self.target.model), "norm"):
            raise ValueError(
                f"{type(self.target.model).__name__} has no final norm where Llama has it, so its last states can't be "
                "computed here"
            )
        text = self.target.probe_ids
        last, inputs = self.target.hidden_states(text[None], self.layers)
        here = [last] if inputs is None else [last, *inputs.split(last.shape[-1], dim=-1)]
        for place in self.servers:
            url, (states, layers) = place[0].url, replace(self, servers=[place]).read([text.cpu()])
            is_precise = self.target.is_precise and all(values.dtype == torch.float32 for values in layers.values())
            for name, mine, theirs in zip(("last", *self.layers), here, (states, *layers.values()), strict=True):
                error = float(((theirs.float() - mine.float()).norm(dim=-1) / mine.float().norm(dim=-1)).max())
                if not error <= (MOST_ERROR if is_precise else MOST_NARROW_ERROR):
                    raise ValueError(
                        f"{url} gives states of layer {name} that differ from the target's by {error:.2g}: it serves another "
                        f"model, or other layers than {self._wanted}; {START}"
                    )
                logger.info("%s: states of layer %s differ from the target's here by %.1e", url, name, error)

    def read(
        self, texts: Sequence[Int[torch.Tensor, " _"]]
    ) -> tuple[Float[torch.Tensor, "text seq hidden"], dict[int, Float[torch.Tensor, "text seq hidden"]]]:
        """Return the last hidden states of texts and the inputs of `layers`, right-padded, on the target's device.

        Raises ValueError for a file that isn't the text's, and ConnectionError for a server that doesn't come back.
        """
        asked = []
        for text in texts:
            server, model = self.servers[next(self.turns) % len(self.servers)]
            body: dict[str, Any] = {"model": model, "prompt": text.tolist(), "max_tokens": 1, "temperature": 0.0}
            asked.append((server.url, text, server.submit(server.ask("completions", ServedStatesReply, body))))
        try:
            states = [self._of_file(url, reply.result(), text) for url, text, reply in asked]
        finally:
            for url, _, reply in asked:
                # After an error: the files that no one will read are memory.
                if not reply.cancel() and reply.done() and reply.exception() is None:
                    with suppress(ValueError, OSError):
                        drop_states(url, reply.result().kv_transfer_params, self.folder)
        padded = pad_sequence(states, batch_first=True).to(self.target.device)
        *inputs, last = padded.unbind(2)
        norm = decoder_of(self.target.model).norm
        with torch.inference_mode():
            return norm(last.to(self.target.dtype)), dict(zip(self.layers, inputs, strict=True))

    @property
    def _wanted(self) -> list[int]:
        return [*self.layers, len(decoder_layers(self.target.model))]

    def _of_file(self, url: str, reply: ServedStatesReply, text: torch.Tensor) -> Float[torch.Tensor, "seq layer hidden"]:
        """Read a text's states, and delete their file."""
        if reply.kv_transfer_params is None:
            raise ValueError(f"{url} gives no hidden states; {START}")
        path = states_file(url, reply.kv_transfer_params, self.folder)
        try:
            tensors = take_states(path, load_file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} of {url} can't be read ({error}); is its disk full?") from error
        states, tokens = tensors.get("hidden_states"), tensors.get("token_ids")
        shape = (len(text), len(self._wanted), self.target.hidden_size)
        if states is None or tokens is None or tokens[: len(text)].tolist() != text.tolist():
            raise ValueError(f"{path} of {url} isn't of the text that was sent; {START}")
        if states.dim() != 3 or len(states) < len(text) or states[: len(text)].shape != shape:
            raise ValueError(
                f"{path} of {url} has states of the shape {tuple(states.shape)}, and those of the layers {self._wanted} of "
                f"this text are {shape}; {START}"
            )
        return states[: len(text)].clone()


def open_states(config: DistillConfig, target: HFTarget, stack: ExitStack) -> ServedStates:
    """Connect to the servers that read texts, until the stack ends.

    Raises ValueError if a server isn't available, or if its states aren't the target's.
    """
    assert config.base_url is not None  # DistillConfig has checked both
    assert config.states_dir is not None
    served = ServedStates(
        servers=stack.enter_context(open_servers(config.base_url, target.identity.name)),
        folder=Path(config.states_dir),
        target=target,
        layers=tuple(sorted(config.feature_layers)),
    )
    served.require_same_states()
    return served
