"""Conversations as examples: token ids, and which of them are trained.

All spans are computed on characters. A text is then tokenized once, as a whole. A token belongs to the
assistant if it covers a character of an answer. (transformers' mask fails for an answer whose first
character no token covers, such as a space under a tokenizer that trims its offsets.)
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Int

from .answers import AnswerFinder, Text
from .chat import ChatTemplate, Span
from .conversations import Conversation
from .types import Example

logger = logging.getLogger(__name__)

LARGE_LOSS = 0.1
"""Share of tokens lost to `max_length` above which drafters hardly see the ends of answers."""
BATCH_SIZE = 256
"""Conversations per call of the tokenizer."""
SHOWN_CHARS = 200
"""Most characters of a dropped conversation that a message shows."""

Encoded = tuple[str, Sequence[int], Bool[torch.Tensor, " seq"]]
"""An example's id, its token ids before they are cut, and which of them are trained."""


def encode_conversations(
    conversations: Sequence[Conversation],
    finder: AnswerFinder,
    max_length: int,
    *,
    train_on: str = "all",
) -> tuple[list[Example], Counter[str]]:
    """Encode conversations with a mask of what is trained (`data.train_on`).

    Also counts dropped conversations by reason. The mask includes end tokens; tokens after `max_length`
    are cut. Raises ValueError if the tokenizer lacks a requirement, if its template exceeds the bounds of
    rendering, or if no example is left: a mask of zeros would train on nothing.
    """
    # 1. Write and tokenize the conversations, in batches, and cut them.
    examples, dropped, lost = list[Example](), Counter[str](), list[int]()  # tokens that each example loses
    for start in range(0, len(conversations), BATCH_SIZE):
        batch = conversations[start : start + BATCH_SIZE]
        for id, ids, mask in _encoded(batch, finder, train_on, dropped):
            if not mask.any():
                dropped["no token of the assistant"] += 1
            elif not mask[1:max_length].any():
                dropped[_no_token_within(max_length)] += 1
            else:
                lost.append(max(0, len(ids) - max_length))
                examples.append(Example(id=id, input_ids=torch.tensor(ids[:max_length]), loss_mask=mask[:max_length].clone()))
    # 2. Check that there are examples, and report what is lost.
    if not examples:
        raise _no_examples(len(conversations), dropped, max_length, finder.template)
    _log_losses(finder, lost, sum(len(example.input_ids) for example in examples), max_length)
    return examples, dropped


def _shown(conversation: Conversation) -> str:
    text = " | ".join(f"{turn.role}: {turn.content}" for turn in conversation.turns[-2:])
    return f"{text[:SHOWN_CHARS]!r}"


def _no_examples(num_conversations: int, dropped: Counter[str], max_length: int, template: ChatTemplate) -> ValueError:
    reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common())
    num_cut = dropped[_no_token_within(max_length)]
    if num_cut > num_conversations / 2:
        return ValueError(
            f"data.max_length is {max_length}, and {num_cut} of {num_conversations} conversations have no token of the "
            f"assistant before it, so no example is left; raise data.max_length. Dropped: {reasons}"
        )
    return ValueError(
        f"none of {num_conversations} conversations has a token of the assistant under {template} dropped: {reasons}. Check "
        "the template, above all the text between its generation markers, or set data.chat_template to another"
    )


def _no_token_within(max_length: int) -> str:
    return f"no token of the assistant within max_length {max_length}"


def _log_losses(finder: AnswerFinder, lost: Sequence[int], num_kept: int, max_length: int) -> None:
    """Log what the template leaves out, how many examples are cut at `max_length`, and the share of lost tokens."""
    for note, count in finder.notes.most_common():
        logger.warning("%d x %s", count, note)
    if not finder.has_ends:
        logger.warning(
            "%s writes none of the target's stop tokens (%s) behind some answers, so drafters don't learn how they end",
            *(finder.template, ", ".join(finder.stops) or "there is none"),
        )
    num_cut, share = sum(map(bool, lost)), sum(lost) / max(1, num_kept + sum(lost))
    logger.log(
        logging.WARNING if share > LARGE_LOSS else logging.INFO,
        "%d of %d examples are cut at data.max_length %d, which loses %.1f %% of all tokens%s",
        *(num_cut, len(lost), max_length, 100 * share),
        f": raise data.max_length (the longest has {max_length + max(lost)} tokens)" if share > LARGE_LOSS else "",
    )


def _encoded(
    conversations: Sequence[Conversation], finder: AnswerFinder, train_on: str, dropped: Counter[str]
) -> Iterator[Encoded]:
    """Yield the tokens of conversations and texts, with the mask of what is trained."""
    written = list[tuple[str, Text]]()
    for conversation in conversations:
        if conversation.tokens is not None:
            yield from _of_tokens(conversation.id, *conversation.tokens, len(finder.tokenizer), train_on, dropped)
            continue
        texts = finder.texts(conversation, train_on)
        if isinstance(texts, str):
            if not dropped[texts]:
                shown = "" if conversation.is_private else f": {_shown(conversation)}"
                logger.warning("a dropped conversation, %s: %s%s", conversation.id, texts, shown)
            dropped[texts] += 1
            continue
        # All numbers are written, so that no two ids are equal.
        ids = [conversation.id] if len(texts) == 1 else [f"{conversation.id}#{number}" for number in range(len(texts))]
        written += zip(ids, texts, strict=True)
    if written:
        # The template has written the special tokens. `verbose` would warn of long texts, which are cut later.
        encoded = finder.tokenizer(
            [text.text for _, text in written], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        for (id, text), tokens, offsets in zip(written, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            yield id, tokens, _covered(_tensor(offsets), text.spans)


def _tensor(offsets: Sequence[Span]) -> Int[torch.Tensor, "seq 2"]:
    """Return a tensor of offsets, in a fraction of the time of `torch.tensor`."""
    numbers = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets))
    return torch.from_numpy(numbers.reshape(-1, 2))


def _of_tokens(
    id: str, ids: Sequence[int], trained: bytes, vocab_size: int, train_on: str, dropped: Counter[str]
) -> Iterator[Encoded]:
    """Yield what a record of tokens has."""
    if max(ids, default=0) >= vocab_size:
        dropped[f"token ids outside the tokenizer's {vocab_size} tokens"] += 1
        return
    mask = torch.tensor(list(trained), dtype=torch.bool)
    if train_on == "every token":
        mask[:] = True
    elif train_on == "last":  # what is behind the last token that isn't trained before a trained one
        end = trained.rfind(1) + 1
        mask[: trained.rfind(0, 0, end) + 1] = False
    yield id, ids, mask


def _covered(offsets: Int[torch.Tensor, "seq 2"], spans: Sequence[Span]) -> Bool[torch.Tensor, " seq"]:
    covered = torch.zeros(len(offsets), dtype=torch.bool)
    for start, end in spans:
        covered |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return covered
