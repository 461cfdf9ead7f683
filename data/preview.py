"""One example as text with the trained parts marked, which shows a wrong chat template."""

from itertools import groupby

from transformers import PreTrainedTokenizerBase

from .types import Example

MARKS = ("[[", "]]")
"""Marks around the trained parts, if there is no colour."""
GREEN, NO_COLOUR = "\x1b[32m", "\x1b[0m"
MAX_PARTS = 6
MAX_CHARACTERS, LEAST_CUT = 240, 60
"""Characters that are shown of a longer part, its start and its end, where this leaves out at least
LEAST_CUT."""
VISIBLE = str.maketrans({"\n": "\u21b5\n", "\t": "\u2192"} | {chr(code): "\ufffd" for code in range(32) if code not in (9, 10)})


def preview(example: Example, tokenizer: PreTrainedTokenizerBase, *, coloured: bool = False) -> str:
    """Render the first parts of an example. Trained parts are in [[ ]], or green.

    Line breaks are shown as \u21b5 at the end of a line, tabs as \u2192, and spaces at a part's
    ends as \u00b7.
    """
    start, end = (GREEN, NO_COLOUR) if coloured else MARKS
    tokens = zip(example.input_ids.tolist(), example.loss_mask.tolist(), strict=True)
    parts = [(trained, [id for id, _ in group]) for trained, group in groupby(tokens, key=lambda token: token[1])]
    texts = []
    for trained, ids in parts[:MAX_PARTS]:
        decoded = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        text = _shorten(decoded)
        texts.append(f"{start}{text}{end}" if trained else text)
    if len(parts) > MAX_PARTS:
        texts.append(f" ... and {len(parts) - MAX_PARTS} more parts")
    return "".join(texts)


def _shorten(text: str) -> str:
    """Make white space visible, and cut the middle out of a long text."""
    inner = text.strip(" ")
    leading, trailing = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    if len(inner) >= MAX_CHARACTERS + LEAST_CUT:
        half = MAX_CHARACTERS // 2
        inner = f"{inner[:half]} ... ({len(inner) - 2 * half} characters) ... {inner[-half:]}"
    dots = ("\u00b7" * leading, "\u00b7" * trailing if inner else "")
    return f"{dots[0]}{inner.translate(VISIBLE)}{dots[1]}"
