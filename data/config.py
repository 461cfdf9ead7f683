"""Configuration of the conversations that a run distils on, and choices that data files record."""

from dataclasses import field
from typing import Annotated, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from .fields import MAX_COUNT, OPTIONS, PositiveInt, Seed, one_of, raise_problems

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


SOURCES = ("sharegpt", "messages", "alpaca", "text", "stdlib")


@dataclass(kw_only=True, config=OPTIONS)
class DataConfig:
    """The data of a run: its source, its format, and how much of it to use."""

    source: Annotated[str, one_of(*SOURCES)]
    """Format of the records. One of `sharegpt` (conversations: [{from, value}]), `messages`
    ([{role, content}], as in UltraChat), `alpaca` (instruction, input, output), `text` (text or
    source code files) and `stdlib` (Python's standard library; needs no path)."""

    path: str | None = None
    """A local file, or a data set id of the Hub. Files are .json or .jsonl (plain or .gz), or
    .parquet; for `text`, any file or directory."""

    split: str = "train"
    """Split of a data set of the Hub, or of the standard library (use `distill`). Local files have
    no splits."""

    subset: str | None = None
    """Configuration name of a data set of the Hub."""

    file: str | None = None
    """One file of a data set of the Hub, if its files have different formats; `split` is then
    ignored."""

    revision: str | None = None
    """Commit, tag or branch of a data set of the Hub."""

    limit: PositiveInt | None = None
    """Number of conversations to use, sampled by `seed` from all valid ones; None uses all."""

    max_length: Annotated[int, Field(ge=2, lt=MAX_COUNT)] = 2048
    """Most tokens of an example; longer examples are cut at the end."""

    seed: Seed = 0
    """Seed of the sample for `limit`, and of the cuts of `text` and `stdlib`."""

    overlap_words: PositiveInt | None = 13
    """Decontamination: drop conversations with a prompt that shares this many consecutive words
    with an evaluation prompt of the run. See arXiv 2005.14165, appendix C. None keeps all."""

    chat_template: str | None = None
    """Chat template in place of the tokenizer's: a .jinja file, or a name of one that ships with
    outrider."""

    prompt_chars: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] = field(default_factory=lambda: [200, 900])
    """Shortest and longest prompt cut from `text` or `stdlib`, in characters: [200, 900]."""

    def __post_init__(self) -> None:
        problems = []
        shortest, longest = self.prompt_chars
        if shortest > longest:
            problems.append(f"prompt_chars is {self.prompt_chars}; give the shortest prompt first")
        if self.source == "stdlib":
            if self.path is not None:
                problems.append(f"path is {self.path!r}, but the source stdlib reads files of the running Python; leave it out")
            if self.split not in get_args(Split):
                problems.append(f"split is {self.split!r}; the splits of stdlib are {', '.join(get_args(Split))}")
        elif self.path is None:
            problems.append(f"path is missing; the source {self.source} needs a local file or a data set id of the Hub")
        raise_problems(problems)
