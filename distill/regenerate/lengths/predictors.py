"""The predictors of answer lengths: `none`, `light`, or a sequence-classification model."""

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
from ....models.llm.hf_target import HFTarget
from ..engine import Request
from .buckets import NUM_BUCKETS, LengthPredictor
from .light import LightPredictor

logger = logging.getLogger(__name__)

SEED = 0
"""Seed of weights and dropout, so that a predictor depends only on its training data."""

NEIGHBOUR_SPREAD = 1.0
"""Standard deviation, in buckets, by which a label is spread over neighbouring buckets: there are
few examples, and one bucket off is nearly right."""

DEFAULT_READ_TOKENS = 512
"""Tokens of a prompt that are read if model and tokenizer have no limit (T5, for example)."""


def make_predictor(name: str, target: HFTarget) -> LengthPredictor:
    """Build the predictor `none`, `light`, or an encoder for sequence classification.

    An encoder is a directory or Hub id. Raises ValueError if it can't be loaded.
    """
    if name == "none":
        return UniformPredictor()
    if name == "light":
        return LightPredictor()
    return ClassifierPredictor(name, target.tokenizer, target.device)


class UniformPredictor:
    """Predictor that treats all requests alike: each gets the distribution of known lengths."""

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
        """Do nothing: this predictor doesn't learn."""

    def predict(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request bucket"]:
        return torch.full((len(requests), NUM_BUCKETS), 1 / NUM_BUCKETS)


class ClassifierPredictor:
    """An encoder with a head for ten classes (such as DistilBERT), fine-tuned on known lengths.

    It reads the prompt's text, with a known length in front. A missing head, or one of another
    size, is initialised at random.
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
        """Load the model as stored; missing weights get the same random values every time."""
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
            # A prompt may contain one; T5 and BART fail at a second end-of-text token.
            split_special_tokens=True,
            return_tensors="pt",
        )
        return {name: values.to(self.device) for name, values in encoded.items()}


@cache  # a new predictor is built for every round
def _warn_of_new_head(name_or_path: str) -> None:
    logger.warning("distill.predictor %s is not a sequence-classification model: it gets an untrained head", name_or_path)


def most_read_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens, special ones included, that model and tokenizer accept.

    DEFAULT_READ_TOKENS if neither has a limit. A position table with a row for padding (as in
    RoBERTa) counts from the row after it. The rows up to there are no positions, although the
    configuration counts them.
    """
    limits = []
    if tokenizer.model_max_length < VERY_LARGE_INTEGER:  # the value of tokenizers without a limit
        limits.append(tokenizer.model_max_length)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions > 0:  # XLNet has -1: unlimited
        limits.append(positions)
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding) and table.padding_idx is not None:
            limits.append(table.num_embeddings - table.padding_idx - 1)
    return min(limits, default=DEFAULT_READ_TOKENS)


def soft_labels(buckets: Int[torch.Tensor, " request"]) -> Float[torch.Tensor, "request bucket"]:
    """Spread each label over neighbouring buckets, as a bell curve."""
    distance = (torch.arange(NUM_BUCKETS) - buckets[:, None]) / NEIGHBOUR_SPREAD
    return (-(distance**2) / 2).softmax(1)
