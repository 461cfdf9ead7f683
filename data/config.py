"""Which conversations a run distils on."""

from typing import Annotated, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from .choices import Split
from .fields import OPTIONS, PositiveInt, Seed, one_of, raise_problems

SOURCES = ("sharegpt", "messages", "alpaca", "text", "stdlib")


@dataclass(kw_only=True, config=OPTIONS)  # not frozen: OmegaConf would refuse every override
class DataConfig:
    """The data of a run: where it lies, in which form, and how much of it to use."""

    source: Annotated[str, one_of(*SOURCES)]
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

    limit: PositiveInt | None = None
    """How many conversations to use, drawn at random by `seed` from those that are sound; None uses all."""

    max_length: Annotated[int, Field(ge=2)] = 2048
    """Tokens of an example; what is longer is cut at the end."""

    seed: Seed = 0
    """Draws the conversations of `limit` and the cuts of `text` and `stdlib`."""

    overlap_words: PositiveInt | None = 13
    """Leave out conversations one of whose prompts shares so many words in a row with a prompt of the suites that the run
    evaluates on (arXiv 2005.14165, appendix C); None keeps them."""

    chat_template: str | None = None
    """Chat template in place of the tokenizer's own: a .jinja file, or the name of a template that ships with outrider."""

    prompt_chars_min: PositiveInt = 200
    """Least length in characters of a prompt cut from `text` or `stdlib`."""

    prompt_chars_max: PositiveInt = 900
    """Greatest length in characters of a prompt cut from `text` or `stdlib`."""

    answer_chars: PositiveInt = 1500
    """Length in characters of an answer cut from `text` or `stdlib`."""

    def __post_init__(self) -> None:
        problems = []
        if self.prompt_chars_min > self.prompt_chars_max:
            problems.append(
                f"prompt_chars_min is {self.prompt_chars_min}, more than prompt_chars_max, which is {self.prompt_chars_max}"
            )
        if self.source == "stdlib":
            if self.path is not None:
                problems.append(
                    f"path is {self.path!r}, but the source stdlib reads the running Python's own files; leave it out"
                )
            if self.split not in get_args(Split):
                problems.append(f"split is {self.split!r}; the splits of stdlib are {', '.join(get_args(Split))}")
        elif self.path is None:
            problems.append(f"path is missing; the source {self.source} needs a local file or a data set id of the Hub")
        raise_problems(problems)
