"""Configuration of the conversations that a run distils on, and choices that data files record."""

from dataclasses import field
from typing import Annotated, Any, Literal, get_args

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


SELF, TRAFFIC = "self", "openai"
SOURCES = ("messages", "sharegpt", "alpaca", "completion", "openai", "tokens", "text", "stdlib", SELF)
"""The forms of records (see `forms`), Python's standard library, and questions of the target's own."""
MAX_TURNS, QUESTION_TEMPERATURE = 32, 0.8
TRAIN_ON = ("all", "last", "every token")
HUB_PREFIX = "hf:"
OF_SELF = {"count": None, "turns": 1, "prefix": "", "question_temperature": QUESTION_TEMPERATURE}
"""The options of the source `self`, and their defaults."""
OF_DATA_SETS: dict[str, str | None] = dict.fromkeys(("path", "subset", "file", "revision"))
UNREAD = {SELF: OF_DATA_SETS | {"split": "train"}, "stdlib": OF_DATA_SETS}
"""The options that a source without a file or data set doesn't take, and their defaults."""
ONE_SOURCE = dict.fromkeys(("source", "path", "subset", "file", "revision", "weight")) | OF_SELF
"""Options of a single source, which `sources` takes the place of, and their defaults."""


@dataclass(kw_only=True, config=OPTIONS)
class DataSource:
    """Where conversations come from, and their form."""

    source: Annotated[str, one_of(*SOURCES)] | None = None
    """Form of the records. One of `messages` ([{role, content}], as in UltraChat), `sharegpt`
    (conversations: [{from, value}]), `alpaca` (instruction, input, output), `completion` (prompt,
    completion), `openai` (chat requests and replies as servers log them, whose secrets and addresses are
    replaced), `tokens` (input_ids, loss_mask), `text` (text or source code files, or texts that a chat
    template has written), `stdlib` (Python's standard library; needs no path) and `self` (questions that
    the target writes itself, `count` of them; needs no path, but distill.engine)."""

    path: str | None = None
    """A local file, a folder of files, a pattern such as chats/*.jsonl, or a data set id of the Hub
    (owner/name, or hf:owner/name). Files are .json or .jsonl (plain or .gz), or .parquet; for `text`,
    any files."""

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

    weight: Annotated[float, Field(gt=0, lt=MAX_COUNT)] | None = None
    """In `data.sources`: this source's part of the mixture, in proportion to the other weights. None
    takes everything."""

    count: PositiveInt | None = None
    """For `self`: conversations that the target begins. Those that fail a filter are left out."""

    turns: Annotated[int, Field(ge=1, le=MAX_TURNS)] = 1
    """For `self`: questions of each conversation."""

    prefix: str = ""
    """For `self`: the beginning of each question, which chooses its language or its subject."""

    question_temperature: Annotated[float, Field(gt=0, le=2)] = QUESTION_TEMPERATURE
    """For `self`: temperature at which questions are sampled. A higher one gives more different ones, of
    which fewer make sense."""

    def __post_init__(self) -> None:
        raise_problems(self.problems())

    def problems(self) -> list[str]:
        """Return a line for each rule that the options break together."""
        if self.source is None:
            return ["source is missing; give the form of the records"]
        problems = [
            f"{name} is {value!r}, and the source {self.source} takes no {name}; leave it out, or set it to {default or 'null'}"
            for name, default in UNREAD.get(self.source, {}).items()
            if (value := getattr(self, name)) != default
        ]
        if self.source == SELF:
            missing = "count is missing; give the number of conversations that the target begins"
            return problems if self.count else [*problems, missing]
        if idle := [name for name, value in OF_SELF.items() if getattr(self, name) != value]:
            return [f"{', '.join(idle)}: set for the source {SELF} only; leave out, or set source={SELF}"]
        if self.source == "stdlib" and self.split not in get_args(Split):
            problems.append(f"split is {self.split!r}; the splits of stdlib are {', '.join(get_args(Split))}")
        if self.source != "stdlib" and self.path is None:
            problems.append(f"path is missing; the source {self.source} needs a local file or a data set id of the Hub")
        return problems


@dataclass(kw_only=True, config=OPTIONS)
class DataConfig(DataSource):
    """The data of a run: its sources, their forms, and how much of it to use."""

    sources: list[DataSource] = field(default_factory=list)
    """Several sources, in place of `source` and `path`: [{source: messages, path: FILE, weight: 2},
    ...]. With weights the largest mixture is taken that repeats no conversation."""

    limit: PositiveInt | None = None
    """Number of conversations to use, sampled by `seed` from all valid ones; None uses all."""

    max_length: Annotated[int, Field(ge=2, lt=MAX_COUNT)] = 2048
    """Most tokens of an example; longer examples are cut at the end."""

    train_on: Annotated[str, one_of(*TRAIN_ON)] = "all"
    """Which tokens are trained: those of `all` answers, of each conversation's `last` answer, or
    `every token`, the user's included."""

    seed: Seed = 0
    """Seed of the sample for `limit`, and of the cuts of `text` and `stdlib`."""

    overlap_words: PositiveInt | None = 13
    """Decontamination: drop conversations with a prompt that shares this many consecutive words
    with an evaluation prompt of the run. See arXiv 2005.14165, appendix C. None keeps all. With more
    words than prompts have, only equal prompts are dropped."""

    chat_template: str | None = None
    """Chat template in place of the tokenizer's: a .jinja file, or a name of one that ships with
    outrider."""

    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for training, regeneration and evaluation alike, such as
    {enable_thinking: false}. `strftime_now` is the date's text, where a template writes it."""

    prompt_chars: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] = field(default_factory=lambda: [200, 900])
    """Shortest and longest prompt cut from `text` or `stdlib`, in characters: [200, 900]."""

    def __post_init__(self) -> None:
        problems = list[str]()
        shortest, longest = self.prompt_chars
        if shortest > longest:
            problems.append(f"prompt_chars is {self.prompt_chars}; give the shortest prompt first")
        if not self.sources:
            problems += self.problems()
            if self.weight is not None:
                problems.append(f"weight is {self.weight}; it is an option of each of data.sources")
        elif both := [name for name, value in ONE_SOURCE.items() if getattr(self, name) != value]:
            default = ONE_SOURCE[both[0]]
            value = "null" if default is None else repr(default)
            problems.append(f"sources and {', '.join(both)} are set; leave out sources, or set {both[0]} to {value}")
        elif any(one.weight is None for one in self.sources) and any(one.weight for one in self.sources):
            problems.append("sources have weights and none; give a weight to each, or to none")
        if wrong := [name for name in self.template_options if not name.isidentifier()]:
            problems.append(f"template_options has {wrong[0]!r}; names of variables have letters, digits and _")
        raise_problems(problems)

    @property
    def is_private(self) -> bool:
        """Whether texts are logged traffic, of which nothing is shown."""
        return any(source.source == TRAFFIC for source in self.all_sources)

    @property
    def all_sources(self) -> list[DataSource]:
        """The sources: `sources`, or the single one of `source` and `path`."""
        return self.sources or [self]
