"""The predictors of answer lengths that there are: `none`, `light`, or a sequence-classification model of transformers."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from ....models.target.hf_target import HFTarget
from ..engine import Request
from .buckets import NUM_BUCKETS, LengthPredictor
from .gaussian import LengthRegression

logger = logging.getLogger(__name__)

SEED = 0
"""Of weights and dropout: a predictor is a function of its lessons."""

NEIGHBOUR_SPREAD = 1.0
"""Buckets by which a label is spread over its neighbours: one off is nearly right, and lessons are few."""

MOST_LESSONS = 2048
"""That `light` learns from, evenly taken of more: each is compared with each."""

MOST_WORDS = 16384
"""Tokens and pairs that `light` knows, the commonest."""

READ_TOKENS = (None, 6)
"""Whole prompts, and their openings: what is asked for mostly comes first (write, list, what, how many)."""

DEFAULT_READ_TOKENS = 512
"""Of a prompt, by a model of relative positions (T5, say) whose tokenizer names no limit: it could read on, at a cost."""


def make_predictor(name: str, target: HFTarget) -> LengthPredictor:
    """`none`, `light`, or a directory or Hub id of an encoder for sequence classification.

    Raises ValueError where that can't be loaded.
    """
    if name == "none":
        return UniformPredictor()
    if name == "light":
        return LightPredictor(target.vocab_size)
    return ClassifierPredictor(name, target.tokenizer, target.device)


class UniformPredictor:
    """Tells no request from another: each gets the same room, of the lengths seen."""

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
        """Nothing is to be learnt."""

    def predict(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request bucket"]:
        return torch.full((len(requests), NUM_BUCKETS), 1 / NUM_BUCKETS)


@dataclass(frozen=True, slots=True)
class Features:
    """What requests are compared by."""

    vectors: list[Float[torch.Tensor, "request _"]]
    """Rows of length 1, or 0 where a request has nothing of that kind: their products are similarities."""
    lengths: Float[torch.Tensor, "request length"]
    """As `known_lengths` has them."""


class LightPredictor:
    """Answers are as long as those of like requests: regression by a Gaussian process (see `gaussian`).

    Requests are alike by their prompts' words (tokens and pairs of neighbours, all of them beside the
    opening ones, rare ones counting more), by their prompts' lengths, and by those of the answers that the
    data has, where they are known. It learns from hundreds of answers in well under a second on a CPU.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._vocabularies: list[Vocabulary] = []
        self._regression: LengthRegression | None = None
        self._lessons: Features | None = None
        self._spreads = (1.0, 1.0)
        """Standard deviations of the two lengths' logarithms."""

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
        taken = torch.linspace(0, len(requests) - 1, min(len(requests), MOST_LESSONS)).long()
        requests = [requests[index] for index in taken.tolist()]
        with torch.inference_mode(False), torch.no_grad():
            lengths = known_lengths(requests)
            answers = lengths[lengths[:, 2] > 0, 1]
            self._spreads = (spread(lengths[:, 0]), spread(answers))
            self._vocabularies = [Vocabulary.of(self._words(requests, count)) for count in READ_TOKENS]
            self._lessons = lessons = Features(self._vectors(requests), lengths)
            similarities, buckets = self._compare(lessons), buckets[taken].clone()
            with torch.enable_grad():
                self._regression = LengthRegression(similarities, buckets)

    @torch.no_grad()
    def predict(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request bucket"]:
        assert self._regression is not None, "learn comes before predict"
        probs = []
        for start in range(0, len(requests), MOST_LESSONS):
            block = requests[start : start + MOST_LESSONS]
            new = Features(self._vectors(block), known_lengths(block))
            own = [rows.square().sum(1) for rows in new.vectors]
            own += [torch.ones(len(block)), new.lengths[:, 2]]
            probs.append(self._regression.predict(self._compare(new), torch.stack(own)))
        return torch.cat(probs)

    def _vectors(self, requests: Sequence[Request]) -> list[Float[torch.Tensor, "request _"]]:
        """Return vectors of the words of whole prompts, and of those of their openings."""
        pairs = zip(self._vocabularies, READ_TOKENS, strict=True)
        return [vocabulary.vectors(self._words(requests, count)) for vocabulary, count in pairs]

    def _words(self, requests: Sequence[Request], count: int | None) -> list[Int[torch.Tensor, " _"]]:
        """A number for each token and each pair among the first `count` tokens."""
        prompts = [request.prompt_ids[:count].long().cpu() for request in requests]
        return [torch.cat([ids, (1 + ids[:-1]) * self.vocab_size + ids[1:]]) for ids in prompts]

    def _compare(self, new: Features) -> Float[torch.Tensor, "kind request lesson"]:
        assert self._lessons is not None
        old = self._lessons
        kinds = [rows @ others.T for rows, others in zip(new.vectors, old.vectors, strict=True)]
        prompts, answers = (
            ((new.lengths[:, None, kind] - old.lengths[None, :, kind]) / self._spreads[kind]).square().mul(-0.5).exp()
            for kind in range(2)
        )
        return torch.stack([*kinds, prompts, answers * new.lengths[:, None, 2] * old.lengths[None, :, 2]])


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words that more than one text has, and how rare they are."""

    words: Int[torch.Tensor, " word"]
    rarities: Float[torch.Tensor, " word"]

    @classmethod
    def of(cls, texts: Sequence[Int[torch.Tensor, " _"]]) -> "Vocabulary":
        words, num_having = torch.cat([text.unique() for text in texts]).unique(return_counts=True)
        most = num_having.argsort(descending=True, stable=True)[:MOST_WORDS]
        kept = most[num_having[most] > 1].sort().values
        return cls(words[kept], (len(texts) / num_having[kept]).log1p())

    def vectors(self, texts: Sequence[Int[torch.Tensor, " _"]]) -> Float[torch.Tensor, "text word"]:
        """Of length 1; 0 where a text has none of the words."""
        vectors = torch.zeros(len(texts), len(self.words))
        for row, text in zip(vectors, texts, strict=True):
            known = text[torch.isin(text, self.words)]
            counts = torch.bincount(torch.searchsorted(self.words, known), minlength=len(self.words))
            row += counts.log1p() * self.rarities
        return nn.functional.normalize(vectors)


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


def known_lengths(requests: Sequence[Request]) -> Float[torch.Tensor, "request length"]:
    """Logarithms of the prompt's length and of the other answer's, and whether there is one."""
    rows = [
        (
            math.log1p(len(request.prompt_ids)),
            math.log1p(request.num_known_tokens or 0),
            float(request.num_known_tokens is not None),
        )
        for request in requests
    ]
    return torch.tensor(rows)


def soft_labels(buckets: Int[torch.Tensor, " request"]) -> Float[torch.Tensor, "request bucket"]:
    """A bell of NEIGHBOUR_SPREAD buckets around each bucket."""
    distance = (torch.arange(NUM_BUCKETS) - buckets[:, None]) / NEIGHBOUR_SPREAD
    return (-(distance**2) / 2).softmax(1)


def spread(values: Float[torch.Tensor, " value"]) -> float:
    """The standard deviation; 1 where there is none to speak of."""
    deviation = float(values.std(correction=0)) if len(values) else 0.0
    return deviation if deviation > 1e-3 else 1.0
