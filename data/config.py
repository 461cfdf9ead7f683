"""Which conversations a run distils on."""

from dataclasses import dataclass
from typing import get_args

from .stdlib import Split

SOURCES = ("sharegpt", "messages", "alpaca", "text", "stdlib")


@dataclass(kw_only=True)  # not frozen: OmegaConf would refuse every override
class DataConfig:
    """The data of a run: where it lies, in which form, and how much of it to use."""

    source: str
    """Form of the records: `sharegpt` (conversations: [{from, value}]), `messages` ([{role, content}], as UltraChat), `alpaca`
    (instruction, input, output), `text` (text or source code files) or `stdlib` (Python's own library; needs no path)."""

    path: str | None = None
    """A local file (.json or .jsonl, plain or .gz; .parquet; for `text` any file or directory) or a data set id of the Hub."""

    split: str = "train"
    """Split of a data set of the Hub, or of the standard library (there: distill). Local files have no splits."""

    subset: str | None = None
    """Named configuration of a data set of the Hub."""

    file: str | None = None
    """One file of a data set of the Hub, where it holds several that don't belong together; `split` is left aside then."""

    revision: str | None = None
    """Commit, tag or branch of a data set of the Hub."""

    limit: int | None = None
    """How many conversations to use, drawn at random by `seed` from those that are sound; None uses all."""

    max_length: int = 2048
    """Tokens of an example; what is longer is cut at the end."""

    seed: int = 0
    """Draws the conversations of `limit` and the cuts of `text` and `stdlib`."""

    overlap_words: int | None = 13
    """Leave out conversations one of whose prompts shares so many words in a row with a prompt of the suites that the run
    evaluates on (arXiv 2005.14165, appendix C); None keeps them."""

    chat_template: str | None = None
    """Chat template in place of the tokenizer's own: a .jinja file, or the name of a template that ships with outrider."""

    prompt_chars_min: int = 200
    """Least length in characters of a prompt cut from `text` or `stdlib`."""

    prompt_chars_max: int = 900
    """Greatest length in characters of a prompt cut from `text` or `stdlib`."""

    answer_chars: int = 1500
    """Length in characters of an answer cut from `text` or `stdlib`."""

    def __post_init__(self) -> None:
        problems = self._source_problems()
        for name, off in (("limit", "all conversations"), ("overlap_words", "keeping every prompt")):
            if (value := getattr(self, name)) is not None and value < 1:
                problems.append(f"{name} is {value}; it must be at least 1, or null for {off}")
        if self.seed < 0:
            problems.append(f"seed is {self.seed}; it must be at least 0")
        if self.max_length < 2:
            problems.append(f"max_length is {self.max_length}; it must be at least 2 tokens")
        if not 1 <= self.prompt_chars_min <= self.prompt_chars_max:
            problems.append(
                f"prompt_chars_min is {self.prompt_chars_min} and prompt_chars_max {self.prompt_chars_max}; "
                "the first must be at least 1 and at most the second"
            )
        if self.answer_chars < 1:
            problems.append(f"answer_chars is {self.answer_chars}; it must be at least 1")
        if problems:
            raise ValueError("data configuration: " + "; ".join(problems))

    def _source_problems(self) -> list[str]:
        problems = []
        if self.source not in SOURCES:
            problems.append(f"source is {self.source!r}; it must be one of {', '.join(SOURCES)}")
        if self.source == "stdlib":
            if self.path is not None:
                problems.append(
                    f"path is {self.path!r}, but the source stdlib reads the running Python's own files; leave it out"
                )
            if self.split not in get_args(Split):
                problems.append(f"split is {self.split!r}; the splits of stdlib are {', '.join(get_args(Split))}")
        elif self.path is None:
            problems.append(f"path is missing; the source {self.source} needs a local file or a data set id of the Hub")
        return problems
