"""Whether a tokenizer belongs to a model, and texts with tokens that only the tokenizer knows."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MIN_TOKENIZER_SHARE = 0.9
"""Smallest share of the model's vocabulary that its tokenizer covers.

Models pad their vocabulary to round numbers, which adds a few percent at most. Tokens that were added
to a tokenizer, without rows of the model for them, aren't more either.
"""
RIGHT_FILES = "put the right tokenizer files into the directory"


class BoundedTokenizer(PreTrainedTokenizerBase):
    """Tokenizer that raises ValueError for a text with a token that the model doesn't have."""

    model_vocab_size: int

    def __call__(self, text: Any = None, *args: Any, **options: Any) -> BatchEncoding:
        encoded = super().__call__(text, *args, **options)
        ids = encoded["input_ids"]
        rows = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        if rows and not isinstance(rows[0], Sequence):
            rows, text = [rows], [text]
        for index, row in enumerate(rows):
            token, size = max(row, default=0), self.model_vocab_size
            if token >= size:
                shown = text if isinstance(text, str) else text[index]
                raise ValueError(
                    f"the token {self.convert_ids_to_tokens(token)!r} has the id {token}, and the model only has the {size} "
                    f"ids below {size}: leave it out of texts and chat template, use the tokenizer of this model, or give the "
                    f"model a trained row for it (resize_token_embeddings). It is in the text {shown!r:.200}"
                )
        return encoded


def require_own_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, vocab_size: int, stops: Sequence[int]) -> None:
    """Check that a tokenizer is that of the model `name`, which ends its answers with `stops`.

    A tokenizer with fewer tokens than the model is common, because vocabularies are padded. One with
    a few added tokens beyond the model's vocabulary is common, too, and no text may have these: the
    tokenizer becomes a `BoundedTokenizer`. Logs a warning if its end token differs. Raises ValueError
    for another model's tokenizer.
    """
    # 1. Compare the vocabularies.
    num_tokens = len(tokenizer)
    beyond = {index: token for token, index in tokenizer.get_vocab().items() if index >= vocab_size}
    is_larger = num_tokens * MIN_TOKENIZER_SHARE > vocab_size
    if foreign := beyond.keys() if is_larger else beyond.keys() - tokenizer.added_tokens_decoder.keys():
        raise ValueError(
            f"the tokenizer of {name} has {num_tokens} tokens and the model only {vocab_size}: {beyond[min(foreign)]!r} has "
            f"the id {min(foreign)}; this is another model's tokenizer: {RIGHT_FILES}"
        )
    if num_tokens < MIN_TOKENIZER_SHARE * vocab_size:
        raise ValueError(
            f"the tokenizer of {name} has {num_tokens} tokens and the model {vocab_size}, far more than padding explains: this "
            f"is another model's tokenizer; {RIGHT_FILES}"
        )
    # 2. Compare the tokens that end answers.
    ends = f"the model {name} ends its answers with the tokens {tuple(stops)}"
    if unknown := [stop for stop in stops if stop >= vocab_size]:
        raise ValueError(
            f"{ends}, and can't answer with {unknown[0]}: it only has the {vocab_size} ids below {vocab_size}; correct "
            "eos_token_id in generation_config.json"
        )
    if any(stop >= num_tokens for stop in stops):
        raise ValueError(f"{ends}, and its tokenizer has only {num_tokens}: this is another model's tokenizer; {RIGHT_FILES}")
    if stops and (end := tokenizer.eos_token_id) is not None and end not in stops:
        logger.warning(
            "the tokenizer's end token is %d, but answers of the model %s end with %s; are these the tokenizer files of this "
            "model?",
            end,
            name,
            tuple(stops),
        )
    # 3. Let texts with unknown tokens be errors.
    if beyond:
        kind = type(tokenizer)
        # Saved tokenizers have the name of their class.
        tokenizer.__class__ = type(kind.__name__, (BoundedTokenizer, kind), {"model_vocab_size": vocab_size})
        logger.info("the model %s has no rows for %s: texts with these tokens are errors", name, ", ".join(beyond.values()))
