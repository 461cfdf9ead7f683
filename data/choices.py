"""Choices of options that files of the data record, for configurations: importing them loads no torch."""

from typing import Literal

Split = Literal["target_train", "target_heldout", "distill", "eval"]
"""Parts of Python's standard library as a data set (see `stdlib`)."""
FEATURES = ("none", "last_hidden")
"""Hidden states that shards may hold: none, or the target's last ones."""
STATE_DTYPES = ("bfloat16", "float8_e4m3fn", "int8")
"""Types that stored hidden states may have (see `states`)."""
LABELS = ("distilled", "text")
"""What a drafter learns from: the target's own continuations, or the text's next tokens."""
