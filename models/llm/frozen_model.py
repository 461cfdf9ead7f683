"""The frozen model that training and labelling read: a causal LM of transformers."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ...data.manifest import TargetIdentity
from ..decoding.types import Prompts
from .hidden_states import CapturedHiddenStates, decoder_layers, features_of, without_head

ROUNDING = 0.001
"""Relative error of logits and states that rounding explains in types like float32."""
MAX_ROUNDING = 0.3
"""Rounding explains no larger relative error in any type."""
ROUNDING_MARGIN = 3
"""Largest ratio of a relative error to that of plain decoding, if rounding explains both.

Wrong masks and positions have ratios of 7 and more in bfloat16."""
NUM_STEPS = 4
"""Tokens that are decoded one by one to measure the error of plain decoding."""

UNLIMITED = 2**31 - 1
"""Context length of a model whose configuration has none."""


class FrozenModel:
    """A model of transformers with its tokenizer, which is read and never trained.

    With `tensor_parallel` each process holds a slice of the model, and all processes must read the
    same texts together. `tokenizer` may be None for decoding, which works on token ids.
    """

    num_copies: ClassVar[int] = 8
    """Rows of the pass that plain decoding is compared with, all of one text.

    With AMX a single short row may use the kernel of single tokens, and then nothing differs."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, identity: TargetIdentity, *, tensor_parallel: bool = False
    ) -> None:
        self.model = model
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.identity = identity
        self.tensor_parallel = tensor_parallel
        self.tokenizer_options: dict[str, Any] = {}
        """Options that the tokenizer was loaded with. A draft model of the same family needs the same."""

    @property
    def _captured(self) -> CapturedHiddenStates:
        return CapturedHiddenStates.of(self.model)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def is_quantized(self) -> bool:
        return bool(getattr(self.model, "is_quantized", False))

    @property
    def is_precise(self) -> bool:
        """Whether it computes in float32 or a more precise type."""
        return torch.finfo(self.dtype).eps <= torch.finfo(torch.float32).eps

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The input embeddings, frozen."""
        embeddings = self.model.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        return embeddings

    @property
    def head(self) -> nn.Linear:
        """The output embeddings: hidden states to logits, frozen.

        Raises ValueError if a memory budget is too small for them to stay.
        """
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        if not head.weight.numel():
            raise ValueError(
                f"the head of {self.identity.name} is read from its file in each pass, and is needed outside passes; raise "
                "target.memory_budget_gib"
            )
        return head

    @property
    def has_layers(self) -> bool:
        """Whether its layers are in this process, all of them."""
        return True

    def layer_template(self) -> nn.Module | None:
        """Return a layer like the first one, to read its structure; None if there is no list of them."""
        return next(iter(decoder_layers(self.model)), None)

    @property
    def hidden_size(self) -> int:
        return int(self._text_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self._text_config.vocab_size)

    @property
    def context_length(self) -> int:
        """Number of positions of the model, for prompt and answer together."""
        return context_length(self.model)

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

    # --- reading texts

    @torch.no_grad()
    def require_plain_head(self, remedy: str = "use train.loss=cross_entropy, and a drafter with a head of its own") -> None:
        """Raise ValueError if the logits are more than the product of hidden states and head."""
        text = self.probe_ids[None]
        all_logits, hidden_states = self._logits_and_states(text)
        logits, plain = all_logits[0, -1].float(), self.head(hidden_states)[0, -1].float()
        if not torch.allclose(logits, plain, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
            raise ValueError(
                f"{type(self.model).__name__} caps or scales its logits, so its distribution can't be computed from hidden "
                f"states and head alone; {remedy}"
            )

    def _logits_and_states(self, input_ids: Int[torch.Tensor, "batch seq"]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, and the last hidden states that they come from."""
        with self._captured.states_of_pass() as states:
            logits: torch.Tensor = self.model(input_ids, use_cache=False).logits
        return logits, states.last

    @torch.no_grad()
    def hidden_states(
        self, input_ids: Int[torch.Tensor, "batch seq"], feature_layers: tuple[int, ...] = ()
    ) -> tuple[Float[torch.Tensor, "batch seq hidden"], Float[torch.Tensor, "batch seq feature"] | None]:
        """Return the last hidden states of right-padded texts, and the inputs of `feature_layers`.

        The states are taken after the final norm; the layers' inputs are side by side. Neither head
        nor gradients are computed. States on padding are meaningless. The model gets no mask: under
        causal attention no token sees the padding on its right.
        """
        return self.read_texts(feature_layers, input_ids=input_ids)

    @torch.no_grad()
    def layer_inputs(self, feature_layers: tuple[int, ...], **inputs: Any) -> Float[torch.Tensor, "batch seq feature"]:
        """Return the inputs of `feature_layers`, side by side. Later layers are not computed."""
        run = partial(without_head(self.model), **inputs, use_cache=False)
        return features_of(self._captured.inputs_of(feature_layers, run))

    def read_texts(
        self, feature_layers: tuple[int, ...] = (), cache: Cache | None = None, **inputs: Any
    ) -> tuple[Float[torch.Tensor, "batch seq hidden"], Float[torch.Tensor, "batch seq feature"] | None]:
        """Return `hidden_states` for any inputs of the model, with gradients if they are on.

        Keys and values are added to `cache`.
        """
        cached = {} if cache is None else {"past_key_values": cache}
        with self._captured.states_of_pass(feature_layers) as states:
            without_head(self.model)(**inputs, **cached, use_cache=cache is not None)
        self._captured.layers = ()  # later passes then don't keep references to layers' inputs
        return states.last, states.layer_inputs

    def plain_logits(
        self, input_ids: Int[torch.Tensor, "batch seq"], num_last: int = 0
    ) -> Float[torch.Tensor, "batch last vocab"]:
        """Return the logits of the last `num_last` tokens of each text (0: of all tokens).

        `num_last` is at most the length of the texts. They are read at once, without draft trees. A target in stages
        forgets its batch.
        """
        # On a CPU, the head's product with a slice of several texts copies the head for each text.
        kept = torch.arange(-num_last, 0, device=self.device) if num_last else 0
        logits: torch.Tensor = self.model(input_ids, use_cache=False, logits_to_keep=kept).logits
        return logits

    @property
    def probe_ids(self) -> Int[torch.Tensor, "15"]:
        """Token ids to probe the model with, spread over its vocabulary, in no order.

        The first and the last ids are often special tokens that were hardly trained. In a narrow
        type, rounding may then change their logits by half.
        """
        return torch.arange(1, 16, device=self.device) * 7 % 16 * self.vocab_size // 16

    def is_rounding(self, error: float) -> bool:
        """Return whether rounding explains a relative error of logits or states.

        In a narrow type, and with quantised weights, this depends on the model. So a larger error
        is compared with the one of plain decoding.
        """
        if error < max(ROUNDING, 2 * torch.finfo(self.dtype).eps):
            return True
        # Quantised activations turn a rounding error into a whole quantisation step.
        if self.is_precise and not self.is_quantized:
            return False
        return error < min(MAX_ROUNDING, ROUNDING_MARGIN * self._decoding_error())  # False for NaN, too

    def _decoding_error(self) -> float:
        """Return the largest relative error of plain decoding against one pass of a batch."""
        text = self.probe_ids
        steps = self._decode(text, NUM_STEPS)
        at_once = self.plain_logits(text.repeat(self.num_copies, 1), NUM_STEPS)[0]
        return relative_error(torch.stack(steps), at_once)

    @torch.no_grad()
    def _decode(self, text: Int[torch.Tensor, " seq"], num_steps: int) -> list[Float[torch.Tensor, " vocab"]]:
        """Return the logits of the last `num_steps` tokens, which are read one by one.

        All is as transformers does it, without masks, positions and a cache of ours.
        """
        cache = DynamicCache(config=self.model.config)
        parts = [text[:-num_steps], *text[-num_steps:].split(1)]
        outputs = [self.model(part[None], past_key_values=cache, use_cache=True, logits_to_keep=1) for part in parts]
        return [output.logits[0, -1] for output in outputs[1:]]

    def _require_plain(self, rows: Sequence[tuple[Float[torch.Tensor, " vocab"], Int[torch.Tensor, " _"]]]) -> None:
        """Raise ValueError if logits differ from those after the same tokens in plain passes."""
        texts = Prompts.of([ids for _, ids in rows])
        plain = texts.last(self.plain_logits(texts.input_ids))
        if not all(logits.isfinite().all() for logits, _ in rows):
            raise ValueError(
                f"the logits of {self.identity.name} are not all numbers: its weights are damaged, or overflow {self.dtype}"
            )
        error = relative_error(torch.stack([logits for logits, _ in rows]), plain)
        if not self.is_rounding(error):
            raise ValueError(
                f"{type(self.model).__name__} reads a draft tree differently from plain texts (relative error {error:.2g} of "
                "its logits): it uses more than masks and position ids, such as states of its own, so decoding with trees "
                "would change its output. Choose another target"
            )


def relative_error(logits: Float[torch.Tensor, "row vocab"], plain: Float[torch.Tensor, "row vocab"]) -> float:
    """Return the largest relative error of logits against those of a plain pass, each less its mean.

    Softmax ignores a constant that is added to all logits, so a difference of means is no error.
    """
    error, plain = logits.float() - plain.float(), plain.float()
    error, plain = error - error.mean(-1, keepdim=True), plain - plain.mean(-1, keepdim=True)
    return float((error.norm(dim=-1) / plain.norm(dim=-1)).max())


def context_length(model: PreTrainedModel) -> int:
    """Return the number of positions that a model has."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or UNLIMITED)
