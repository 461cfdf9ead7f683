"""Choices of options that data files record. Importing this module loads no torch."""

from typing import Literal

Split = Literal["target_train", "target_heldout", "distill", "eval"]
"""Parts of Python's standard library as a data set (see `stdlib`)."""
FEATURES = ("none", "last_hidden")
"""Hidden states that shards may hold: none, or the target's last hidden states."""
STATE_DTYPES = ("bfloat16", "float8_e4m3fn", "int8")
"""Types of stored hidden states (see `states`)."""
LABELS = ("distilled", "text")
"""Labels that a drafter may learn: the target's continuations, or the text's next tokens."""
TEACHER_TEMPERATURE = (
    "distill.label_temperature is {:g}, and train.loss compares with the target's distribution at temperature 1: set "
    "train.loss=cross_entropy, or distil with distill.label_temperature 1 or 0 into another output directory"
)
"""Error of a loss whose two sources have different temperatures."""
