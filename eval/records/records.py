"""Records of measured answers, one line each: the input of tables, plots and resumed runs."""

import dataclasses
import errno
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from ...data.files import atomic_write_bytes, naming_full_disk, parse_json, sha256_json
from ...models.phases import PhaseSeconds, RunCounts, StreamCounts
from .names import BASELINE as BASELINE

logger = logging.getLogger(__name__)

RecordKey = tuple[str, str, int, float, str, int, bool, int]
"""Suite, prompt id, turn, temperature, method, repeat, profiled, batch size: identifies one answer
of a run."""
BatchKey = tuple[str, str | int, int, float, str, int, bool, int]
"""Like RecordKey with the batch in place of the prompt: identifies answers that were decoded
together."""
Cell = tuple[str, float, int, str]
"""Suite, temperature, batch size and method: identifies a row of the table."""
GroupKey = tuple[str, float, int]
"""Suite, temperature, batch size: methods are compared only within such a group."""


ENDED, NO_DRAFT, FULL, IN_REACH, OUTSIDE, MISSED = ".-frvm"
"""Why a step's draft ended: the answer ended; nothing was drafted, or only by a free source; all was right up to the
search's last level; the search had the right token, and the tree left it out; no drafter's vocabulary has it; no search
had it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """The steps of an answer, for `outrider explain`."""

    prompt_ids: list[int]
    accepted: list[int]
    """Accepted draft tokens of each step."""
    ends: str
    """Why each step's draft ended: a letter for each."""
    probabilities: list[float]
    """The target's probability of the token that it emitted after the draft, at temperature 1."""
    texts: list[str]
    """The text of each token of the answer."""

    def __post_init__(self) -> None:
        if not len(self.accepted) == len(self.ends) == len(self.probabilities):
            raise ValueError("accepted, ends and probabilities must have one entry for each step")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCell:
    """A method on a suite, at a temperature and a batch size: a row of the table."""

    suite: str
    prompt_set_revision: str
    prompt_set_source: str | None
    """The data set of the Hub (ID@COMMIT) that the prompts come from; None for a file or the
    running Python."""
    temperature: float
    """0 is greedy decoding."""
    batch_size: int
    """Prompts decoded together, at most (the setting)."""
    method: str
    """Name of the method within the run; `label` is for readers."""
    label: str
    """The drafter and its setting in words, as tables show them."""

    @property
    def group_key(self) -> GroupKey:
        return (self.suite, self.temperature, self.batch_size)

    @property
    def cell(self) -> Cell:
        return (*self.group_key, self.method)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord(MeasuredCell):
    """One answer: a prompt's turn, answered once by a method.

    Tokens and steps are those of this answer. Seconds are those of its whole batch: the records of
    one `batch_key` share them, so count them once.

    `accepted_histogram[k]` counts the verify steps that accepted k draft tokens (before a cut at a
    stop token or at the limit). The prefill is not a verify step, and `num_verify_tokens` excludes
    its token. So tokens per step is `num_verify_tokens / num_steps`, bonus tokens included.
    """

    prompt_id: str
    category: str
    turn: int
    """0 for a prompt's first turn."""
    repeat: int
    profiled: bool
    """Whether the phase timers were on. Such a record is never used for speed."""
    batch: int
    """Index of the group of prompts that a method decodes together; all turns of a group share
    it."""
    num_rows: int
    """Answers that were decoded together, this one included; fewer than `batch_size` for the last
    prompts of a suite."""
    context_from: str | None
    """The method that answered the earlier turns in this prompt, at the same temperature; None for
    a first turn."""
    prompt_sha256: str
    """Digest of the prompt's token ids."""
    num_prompt_tokens: int
    token_ids: list[int]
    """All tokens of the answer, the prefill's and a final stop token included."""
    accepted_histogram: list[int]
    num_verify_tokens: int
    num_draft_tokens: int
    """Draft tokens that the target read for this row, padding included, over all steps."""
    lossless_rule: bool
    """Whether the acceptance rule preserves the target's distribution."""
    truncated: bool
    """Whether the token limit ended the answer, not a stop token."""
    prefill_seconds: float
    """Seconds until the first token of every row."""
    decode_seconds: float
    """Seconds from the first token to the last of all rows."""
    phase_seconds: PhaseSeconds | None
    """Seconds of each phase, summed over the verify steps; None unless profiled."""
    environment_digest: str
    config_digest: str
    seed: int
    processor_seconds: float | None
    """Processor seconds of all threads of the process, over the batch's whole decoding, prefill
    included; None for a target in stages, whose other processes aren't counted."""
    accepted_by: dict[str, int] | None
    """Accepted draft tokens by source, for a merged drafter: by its name, or by the names of the
    sources that proposed the token together, joined by "+". None for a drafter that isn't merged."""
    pace: str | None
    """The pace of a merged drafter, or of a growing tree. With `expected` the trees depend on the
    clock, so the counts of steps and drafts vary from run to run, while the tokens don't."""
    streaming: StreamCounts | None
    """Counts of the weights that were read; None for a target that is in memory."""
    runs: RunCounts | None
    """Counts of the target's passes; None for a target without stages."""
    tree_tokens: Any = None
    drawn: Any = None
    """What earlier versions recorded; nothing reads it."""
    drafts: Drafts | None = None
    """Every step of the answer, decoded once more; only in profiled answers with a drafter."""

    def __post_init__(self) -> None:
        rules = {
            "all tokens but the prefill's are those of verify steps": self.num_verify_tokens == len(self.token_ids) - 1,
            "each verify step emits a token or more": self.num_steps <= self.num_verify_tokens,
            f"a batch has from 1 to {self.batch_size} rows": 1 <= self.num_rows <= self.batch_size,
            "times are positive": self.prefill_seconds > 0 and self.decode_seconds >= 0,
            "phases are timed exactly when profiled": self.profiled == (self.phase_seconds is not None),
            "accepted_by has all accepted draft tokens": self.accepted_by is None
            or sum(self.accepted_by.values()) == self.num_accepted,
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise ValueError(f"the record contradicts itself: {'; '.join(broken)}")

    @property
    def key(self) -> RecordKey:
        return (
            self.suite,
            self.prompt_id,
            self.turn,
            self.temperature,
            self.method,
            self.repeat,
            self.profiled,
            self.batch_size,
        )

    @property
    def name(self) -> str:
        """The answer's description in messages."""
        at = f"turn {self.turn + 1}, temperature {self.temperature:g}, batch size {self.batch_size}, repeat {self.repeat}"
        at += ", profiled" * self.profiled
        return f"{self.method}'s answer to prompt {self.prompt_id!r} of {self.suite} ({at})"

    @property
    def answer_digest(self) -> str:
        """Digest of key, prompt and answer, so that an audit applies to exactly this answer."""
        return digest_of([self.key, self.prompt_sha256, self.token_ids])

    @property
    def unit(self) -> str | int:
        """The smallest part of a suite that is timed separately.

        This is a prompt, or the batch that contains it.
        """
        return self.prompt_id if self.batch_size == 1 else self.batch

    @property
    def batch_key(self) -> BatchKey:
        """Key that is shared by exactly the answers that were decoded together."""
        _, _, *rest = self.key
        return cast("BatchKey", (self.suite, self.unit, *rest))

    @property
    def is_reference(self) -> bool:
        """Whether all other answers to the same turn are compared with this one."""
        return self.method == BASELINE and self.repeat == 0 and not self.profiled

    @property
    def is_other_sample(self) -> bool:
        """Whether the answer is a different sample than the baseline's by design: its rule isn't lossless."""
        return self.temperature > 0 and not self.lossless_rule

    @property
    def num_steps(self) -> int:
        """Number of verify steps."""
        return sum(self.accepted_histogram)

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft tokens, including those cut off at the answer's end."""
        return sum(length * count for length, count in enumerate(self.accepted_histogram))

    @property
    def seconds(self) -> float:
        """Seconds of the batch's whole decoding, prefill included."""
        return self.prefill_seconds + self.decode_seconds

    def to_json(self) -> str:
        """Format the record as a line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


def digest_of(value: Any) -> str:
    """Compute a short digest of a JSON-like value; the order of keys doesn't matter."""
    return sha256_json(value)[:16]


def group_name(key: GroupKey) -> str:
    """Build the name of a group's files.

    It consists of the suite, a batch size above 1, and a temperature above 0.
    """
    suite, temperature, batch_size = key
    return suite + (f"-b{batch_size}" if batch_size > 1 else "") + (f"-t{temperature:g}" if temperature > 0 else "")


class RecordFile:
    """Records of a run, in a JSON-lines file that grows by a batch at a time.

    The file survives a killed run. A last line without its newline is incomplete, and is dropped. A
    batch with missing records is dropped too, since its answers are measured together. Any other
    line that can't be read raises ValueError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        if torn := content.rpartition(b"\n")[2]:
            logger.warning("%s: dropping the last line, which is incomplete because the run was killed", path)
            os.truncate(path, len(content) - len(torn))
        self.records = read_records(path)
        if num_dropped := content.count(b"\n") - len(self.records):
            logger.warning("%s: dropping %d records of incomplete batches", path, num_dropped)
            atomic_write_bytes(path, _lines(self.records.values()))
        # Unbuffered: after a write to a full disk fails, closing the file doesn't try it again.
        self._file = path.open("ab", buffering=0)

    def append(self, *records: EvalRecord) -> None:
        """Append the records of a batch in one write."""
        with naming_full_disk(self.path, "The records before this one are kept"):
            lines = _lines(records)
            if self._file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, "only a part of the record was written")
            os.fsync(self._file.fileno())
        self.records |= {record.key: record for record in records}

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()


def _lines(records: Iterable[EvalRecord]) -> bytes:
    return "".join(record.to_json() + "\n" for record in records).encode()


def read_records(path: Path) -> dict[RecordKey, EvalRecord]:
    """Read the records of complete lines and batches, without changing the file.

    Raises ValueError as `RecordFile` does.
    """
    records: dict[RecordKey, EvalRecord] = {}
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            record = parse_json(EvalRecord, line, path)
        except ValueError as error:  # malformed JSON and UTF-8 are ValueErrors too
            raise ValueError(f"{path}, line {number}: {error}; delete the line, and the run will measure it again") from error
        records[record.key] = record
    num_rows = Counter(record.batch_key for record in records.values())
    return {key: record for key, record in records.items() if num_rows[record.batch_key] == record.num_rows}
