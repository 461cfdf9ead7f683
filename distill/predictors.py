"""The predictors of answer lengths that there are: `light`, `embedding`, or a sequence-classification model of transformers."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from ..models.hf_target import HFTarget
from .engine import Request
from .lengths import NUM_BUCKETS, LengthPredictor

SEED = 0
"""Of weights and dropout: a predictor is a function of its lessons."""

NEIGHBOUR_SPREAD = 1.0
"""Buckets by which a label is spread over its neighbours: one off is nearly right, and lessons are few."""

BENDS = (-0.7, 0.0, 0.7)
"""Deviations from the mean at which what is made of a length may bend."""

DEFAULT_READ_TOKENS = 512
"""Of a prompt, by a model of relative positions (T5, say) whose tokenizer names no limit: it could read on, at a cost."""


def make_predictor(name: str, target: HFTarget) -> LengthPredictor:
    """`light`, `embedding`, or a directory or Hub id of an encoder for sequence classification.

    Raises ValueError where that can't be loaded.
    """
    if name == "light":
        return LightPredictor(target.vocab_size)
    if name == "embedding":
        return EmbeddingPredictor(target)
    return ClassifierPredictor(name, target.tokenizer, target.device)


def _fit(
    optimizer: torch.optim.Optimizer,
    predict: Callable[[], Float[torch.Tensor, "request bucket"]],
    labels: Float[torch.Tensor, "request bucket"],
    epochs: int,
) -> None:
    """Learn all lessons at once, `epochs` times: there are thousands at most."""
    for _ in range(epochs):
        loss = nn.functional.cross_entropy(predict(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class LightPredictor:
    """A bag of the prompt's hashed tokens and pairs of tokens, beside what is known of lengths, under a small network.

    It learns in a second on a CPU, and knows of a language what its lessons say.
    """

    num_slots = 4096
    dim = 32
    hidden = 64
    epochs = 30
    learning_rate = 5e-3

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._bag: nn.EmbeddingBag | None = None
        self._head: LengthHead | None = None

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(SEED)
            self._bag = nn.EmbeddingBag(self.num_slots, self.dim, mode="mean")
            self._head = LengthHead(self.dim, self.hidden, known_lengths(requests))
            slots, starts = self._hash(requests)
            lengths, labels = known_lengths(requests), soft_labels(buckets)
            parameters = [*self._bag.parameters(), *self._head.parameters()]
            optimizer = torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=0.01)
            bag, head = self._bag, self._head
            _fit(optimizer, lambda: head(bag(slots, starts), lengths), labels, self.epochs)
            head.eval()

    @torch.no_grad()
    def predict(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request bucket"]:
        assert self._bag is not None, "learn comes before predict"
        assert self._head is not None
        return self._head(self._bag(*self._hash(requests)), known_lengths(requests)).softmax(1)

    def _hash(self, requests: Sequence[Request]) -> tuple[Int[torch.Tensor, " token"], Int[torch.Tensor, " request"]]:
        """The slots of all requests' tokens and pairs, end to end, and where each request's begin."""
        bags = []
        for request in requests:
            ids = request.prompt_ids.long().cpu()
            pairs = (1 + ids[:-1]) * self.vocab_size + ids[1:]
            bags.append((torch.cat([ids, pairs]) * 2654435761 >> 16) % self.num_slots)  # Knuth's multiplicative hashing
        starts = torch.tensor([0, *(len(bag) for bag in bags[:-1])]).cumsum(0)
        return torch.cat(bags), starts


class EmbeddingPredictor:
    """A small network on the target's own last hidden states of the prompt: the last token's beside the mean of all.

    Costs a prefill of every prompt, which decoding does once more, and none for prompts that it has read before.
    """

    hidden = 64
    epochs = 60
    learning_rate = 2e-3
    batch_tokens = 8192

    def __init__(self, target: HFTarget) -> None:
        self.target = target
        self._head: LengthHead | None = None
        self._read: dict[str, Float[torch.Tensor, " feature"]] = {}

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
        states = self._states(requests)
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(SEED)
            states, labels, lengths = states.clone(), soft_labels(buckets), known_lengths(requests)
            head = self._head = LengthHead(states.shape[1], self.hidden, lengths)
            optimizer = torch.optim.AdamW(head.parameters(), lr=self.learning_rate, weight_decay=0.1)
            _fit(optimizer, lambda: head(states, lengths), labels, self.epochs)
            head.eval()

    @torch.no_grad()
    def predict(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request bucket"]:
        assert self._head is not None, "learn comes before predict"
        return self._head(self._states(requests), known_lengths(requests)).softmax(1)

    @torch.no_grad()
    def _states(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request feature"]:
        """Of unit variance each, so that no target's scale matters."""
        new = [request for request in requests if request.id not in self._read]
        new.sort(key=lambda request: (len(request.prompt_ids), request.id))
        while new:
            size = max(1, self.batch_tokens // len(new[-1].prompt_ids))
            batch, new = new[-size:], new[:-size]
            ids = pad_sequence([request.prompt_ids.long() for request in batch], batch_first=True).to(self.target.device)
            lengths = torch.tensor([len(request.prompt_ids) for request in batch], device=ids.device)
            mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            states = self.target.hidden_states(ids, mask)[0].float()
            mean = (states * mask[:, :, None]).sum(1) / lengths[:, None]
            last = states[torch.arange(len(batch), device=ids.device), lengths - 1]
            for request, *features in zip(batch, last, mean, strict=True):
                parts = [nn.functional.layer_norm(part, part.shape) for part in features]
                self._read[request.id] = torch.cat(parts).cpu()
        return torch.stack([self._read[request.id] for request in requests])


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
                f"distill.predictor is {name_or_path!r}; it must be light, embedding, or a sequence-classification model of "
                f"transformers, whose tokenizer can't be loaded ({error})"
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
                f"safetensors ({error}); choose light, embedding, or another model"
            ) from error
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


class LengthHead(nn.Module):
    """Two layers on features of a prompt and known lengths: [request, feature], [request, length] -> [request, bucket]."""

    def __init__(self, num_features: int, hidden: int, lengths: Float[torch.Tensor, "request length"]) -> None:
        super().__init__()
        self.mean, self.deviation = lengths.mean(0), lengths.std(0, correction=0).clamp(min=1e-3)
        self.inner = nn.Linear(num_features + lengths.shape[1] * (1 + len(BENDS)), hidden)
        self.outer = nn.Linear(hidden, NUM_BUCKETS)
        self.dropout = nn.Dropout(0.5)

    def forward(
        self, features: Float[torch.Tensor, "request feature"], lengths: Float[torch.Tensor, "request length"]
    ) -> Float[torch.Tensor, "request bucket"]:
        scaled = (lengths - self.mean) / self.deviation
        bent = torch.cat([scaled, *((scaled - bend).relu() for bend in BENDS)], dim=1)
        inner = self.inner(torch.cat([self.dropout(features), bent], dim=1)).relu()
        logits: torch.Tensor = self.outer(self.dropout(inner))
        return logits


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
