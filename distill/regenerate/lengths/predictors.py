"""The predictors of answer lengths that there are: `none`, `light`, or a sequence-classification model of transformers."""

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from ....data.hub import use_hub
from ....models.target.hf_target import HFTarget
from ..engine import Request
from .buckets import NUM_BUCKETS, LengthPredictor
from .light import LightPredictor

logger = logging.getLogger(__name__)

SEED = 0
"""Of weights and dropout: a predictor is a function of its lessons."""

NEIGHBOUR_SPREAD = 1.0
"""Buckets by which a label is spread over its neighbours: one off is nearly right, and lessons are few."""

DEFAULT_READ_TOKENS = 512
"""Of a prompt, by a model of relative positions (T5, say) whose tokenizer names no limit: it could read on, at a cost."""


def make_predictor(name: str, target: HFTarget) -> LengthPredictor:
    """`none`, `light`, or a directory or Hub id of an encoder for sequence classification.

    Raises ValueError where that can't be loaded.
    """
    if name == "none":
        return UniformPredictor()
    if name == "light":
        return LightPredictor()
    return ClassifierPredictor(name, target.tokenizer, target.device)


class UniformPredictor:
    """Tells no request from another: each gets the same room, of the lengths seen."""

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
        """Nothing is to be learnt."""

    def predict(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request bucket"]:
        return torch.full((len(requests), NUM_BUCKETS), 1 / NUM_BUCKETS)


class ClassifierPredictor:
    """An encoder of transformers with a head for ten classes (DistilBERT, say), fine-tuned on the lengths seen.

    Reads the prompt's text, and known lengths written before it. A head of another size, or none, starts anew.
    """

    epochs = 4
    batch_size = 16
    learning_rate = 5e-5

    def __init__(self, name_or_path: str, target_tokenizer: PreTrainedTokenizerBase, device: torch.device) -> None:
        self.name_or_path = name_or_path
        self.target_tokenizer = target_tokenizer
        self.device = device
        if not Path(name_or_path).is_dir():
            use_hub()
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"distill.predictor is {name_or_path!r}; it must be none, light, or a sequence-classification "
                f"model of transformers, whose tokenizer can't be loaded ({error})"
            ) from error
        self._model = self._fresh()
        self.read_tokens = most_read_tokens(self._model, self.tokenizer)

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(SEED)
            self._model = self._fresh().train()
            labels = soft_labels(buckets).to(self.device)
            optimizer = torch.optim.AdamW(self._model.parameters(), lr=self.learning_rate, weight_decay=0.01)
            for _ in range(self.epochs):
                for rows in torch.randperm(len(requests)).split(self.batch_size):
                    logits = self._model(**self._encode([requests[row] for row in rows.tolist()])).logits
                    loss = nn.functional.cross_entropy(logits.float(), labels[rows.to(self.device)])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            self._model.eval()

    @torch.no_grad()
    def predict(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request bucket"]:
        batches = [requests[start : start + self.batch_size] for start in range(0, len(requests), self.batch_size)]
        return torch.cat([self._model(**self._encode(batch)).logits.float().softmax(1).cpu() for batch in batches])

    def _fresh(self) -> PreTrainedModel:
        """The model as it is stored; what it lacks is the same every time."""
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(SEED)
                model = AutoModelForSequenceClassification.from_pretrained(
                    self.name_or_path,
                    num_labels=NUM_BUCKETS,
                    ignore_mismatched_sizes=True,
                    use_safetensors=True,
                    trust_remote_code=False,
                )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"distill.predictor is {self.name_or_path!r}, which can't be loaded as a sequence-classification model in "
                f"safetensors ({error}); choose none, light, or another model"
            ) from error
        if not any("ForSequenceClassification" in name for name in model.config.architectures or []):
            _warn_of_new_head(self.name_or_path)
        loaded: PreTrainedModel = model.to(self.device).eval()
        return loaded

    def _encode(self, requests: Sequence[Request]) -> dict[str, torch.Tensor]:
        texts = [self.target_tokenizer.decode(request.prompt_ids, skip_special_tokens=True) for request in requests]
        known = [request.num_known_tokens for request in requests]
        texts = [text if length is None else f"{length} {text}" for text, length in zip(texts, known, strict=True)]
        encoded = self.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self.read_tokens,
            split_special_tokens=True,  # a prompt may spell one; T5 and BART refuse a second end of text
            return_tensors="pt",
        )
        return {name: values.to(self.device) for name, values in encoded.items()}


@cache  # a predictor is made anew for every round
def _warn_of_new_head(name_or_path: str) -> None:
    logger.warning(
        "distill.predictor %s is no sequence-classification model: it gets a head that knows nothing yet", name_or_path
    )


def most_read_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens, special ones included, that model and tokenizer take; DEFAULT_READ_TOKENS where neither names a limit.

    A table of positions with a row for padding (RoBERTa's) counts from the row after it, so that the rows up to there are no
    position, though the configuration counts them.
    """
    limits = []
    if tokenizer.model_max_length < VERY_LARGE_INTEGER:  # what tokenizers say that name none
        limits.append(tokenizer.model_max_length)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions > 0:  # XLNet's are -1, of any number
        limits.append(positions)
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding) and table.padding_idx is not None:
            limits.append(table.num_embeddings - table.padding_idx - 1)
    return min(limits, default=DEFAULT_READ_TOKENS)


def soft_labels(buckets: Int[torch.Tensor, " request"]) -> Float[torch.Tensor, "request bucket"]:
    """A bell of NEIGHBOUR_SPREAD buckets around each bucket."""
    distance = (torch.arange(NUM_BUCKETS) - buckets[:, None]) / NEIGHBOUR_SPREAD
    return (-(distance**2) / 2).softmax(1)
