"""One line per measured answer: everything that tables, plots and a resumed run need."""

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

from ...data.files import atomic_write_bytes, naming_full_disk, parse_json
from ...models.phases import PhaseSeconds
from .digests import digest_of
from .names import BASELINE as BASELINE

logger = logging.getLogger(__name__)

RecordKey = tuple[str, str, int, float, str, int, bool, int]
"""Suite, prompt id, turn, temperature, method, repeat, profiled, batch size: one answer of a
run."""
BatchKey = tuple[str, str | int, int, float, str, int, bool, int]
"""The same with the batch in the prompt's place: what was decoded together."""
Cell = tuple[str, float, int, str]
"""Suite, temperature, batch size and method: what a row of the table is about."""
GroupKey = tuple[str, float, int]
"""Suite, temperature, batch size: methods are held against each other within these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTokens:
    """Draft tokens of each verify step.

    What merging shared prefixes saves, and what padding costs.
    """

    separate: list[int]
    """Were every path of the tree read by itself, without padding."""
    shared: list[int]
    """As the tree has them, without padding."""
    read: list[int]
    """What the target read for this row, padding included: a row is padded to the largest tree of
    its batch, or to the one shape that trees have in all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """One answer: a prompt's turn, answered by a method, once.

    The tokens and steps are this answer's own. The seconds are those of the batch that it was a row
    of: the records of one `batch_key` share them, so count them once.

    `accepted_histogram[k]` counts the verify steps that accepted k draft tokens (before a cut at a
    stop token or at the limit). The prefill is no verify step and its token is not among
    `num_verify_tokens`, so tokens per step is `num_verify_tokens / num_steps`, bonus tokens
    included.
    """

    suite: str
    prompt_set_revision: str
    prompt_id: str
    category: str
    turn: int
    """0 for a prompt's first turn."""
    temperature: float
    """0 is greedy decoding."""
    method: str
    repeat: int
    profiled: bool
    """Whether the phase timers were on. Such a record never counts for speed."""
    prompt_set_source: str | None
    """The data set of the Hub (ID@COMMIT) that the prompts were read from; None for a file or the
    running Python."""
    batch_size: int
    """Prompts decoded together, at most: the setting."""
    batch: int
    """Counts the groups of prompts that a method goes through in turn; all turns of a group's
    prompts have its number."""
    num_rows: int
    """Answers that were decoded together, this one included: fewer than `batch_size` where prompts
    ran out."""
    context_from: str | None
    """The method whose answers to the earlier turns, at the same temperature, stand in this prompt;
    None for a first turn."""
    prompt_sha256: str
    """Digest of the prompt's token ids."""
    num_prompt_tokens: int
    token_ids: list[int]
    """All tokens of the answer, the prefill's and a final stop token included."""
    accepted_histogram: list[int]
    num_verify_tokens: int
    num_draft_tokens: int
    """Draft tokens that the target read for this row, padding included, over all steps."""
    drawn: bool
    """Whether the drafter drew them at random."""
    lossless_rule: bool
    """Whether the rule that accepts them leaves the target's distribution as it is."""
    truncated: bool
    """Ended by the token limit, not by a stop token."""
    prefill_seconds: float
    """Until the first token of every row."""
    decode_seconds: float
    """From the first token to the last of all rows."""
    phase_seconds: PhaseSeconds | None
    """Summed over the verify steps; None unless profiled."""
    environment_digest: str
    config_digest: str
    seed: int
    tree_tokens: TreeTokens | None
    """None unless profiled."""

    def __post_init__(self) -> None:
        counts = self.tree_tokens or TreeTokens(separate=[], shared=[], read=[])
        rules = {
            "all tokens but the prefill's are those of verify steps": self.num_verify_tokens == len(self.token_ids) - 1,
            "each verify step emits a token or more": self.num_steps <= self.num_verify_tokens,
            f"a batch has from 1 to {self.batch_size} rows": 1 <= self.num_rows <= self.batch_size,
            "phases are timed exactly when profiled": self.profiled == (self.phase_seconds is not None),
            "tree_tokens has an entry for each verify step": self.tree_tokens is None
            or {len(counts.separate), len(counts.shared), len(counts.read)} == {self.num_steps},
            "tree_tokens reads the tree or more, and num_draft_tokens in all": self.tree_tokens is None
            or (all(map(int.__le__, counts.shared, counts.read)) and sum(counts.read) == self.num_draft_tokens),
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
        """What a reader calls it."""
        at = f"turn {self.turn + 1}, temperature {self.temperature:g}, batch size {self.batch_size}, repeat {self.repeat}"
        return f"{self.method}'s answer to prompt {self.prompt_id!r} of {self.suite} ({at}{', profiled' * self.profiled})"

    @property
    def answer_digest(self) -> str:
        """Of the prompt and the answer, so that what was found out about it holds for nothing else."""
        return digest_of([self.key, self.prompt_sha256, self.token_ids])

    @property
    def unit(self) -> str | int:
        """The smallest part of a suite that has times of its own.

        A prompt, or the batch that it is in.
        """
        return self.prompt_id if self.batch_size == 1 else self.batch

    @property
    def batch_key(self) -> BatchKey:
        """What the answers have in common that were decoded together, and with no others."""
        return (self.suite, self.unit, self.turn, self.temperature, self.method, self.repeat, self.profiled, self.batch_size)

    @property
    def group_key(self) -> GroupKey:
        return (self.suite, self.temperature, self.batch_size)

    @property
    def cell(self) -> Cell:
        return (*self.group_key, self.method)

    @property
    def is_reference(self) -> bool:
        """Whether it is the answer that all others to the same turn are compared with."""
        return self.method == BASELINE and self.repeat == 0 and not self.profiled

    @property
    def is_other_sample(self) -> bool:
        """Whether it is another sample than the baseline's by design.

        Random drafts decide with other coins what is emitted, and a rule that isn't lossless emits
        something else.
        """
        return self.temperature > 0 and (self.drawn or not self.lossless_rule)

    @property
    def num_steps(self) -> int:
        """Verify steps."""
        return sum(self.accepted_histogram)

    @property
    def seconds(self) -> float:
        """The batch's whole decoding, prefill included."""
        return self.prefill_seconds + self.decode_seconds

    def to_json(self) -> str:
        """Return a line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


def group_name(key: GroupKey) -> str:
    """Return what the files of a group are named after.

    The suite, a batch size above 1, and a temperature above 0.
    """
    suite, temperature, batch_size = key
    return suite + (f"-b{batch_size}" if batch_size > 1 else "") + (f"-t{temperature:g}" if temperature > 0 else "")


class RecordFile:
    """The records of a run.

    A JSON-lines file that grows batch by batch and survives being killed. A last line without its
    newline was torn by a kill: it is dropped. A batch of which some records are missing is dropped
    too, since its answers are measured together or not at all. Any other line that cannot be read
    is a ValueError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        if torn := content.rpartition(b"\n")[2]:
            logger.warning("%s: dropping the last line, torn when the run was killed", path)
            os.truncate(path, len(content) - len(torn))
        self.records = read_records(path)
        if num_torn := content.count(b"\n") - len(self.records):
            logger.warning("%s: dropping %d records of batches of which others are missing", path, num_torn)
            atomic_write_bytes(path, _lines(self.records.values()))
        # Unbuffered: what a full disk refused is not tried again when the file is closed.
        self._file = path.open("ab", buffering=0)

    def append(self, *records: EvalRecord) -> None:
        """Add the records of a batch, in one piece."""
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
    """Read the records of whole lines and batches; the file is left as it is.

    Raises ValueError as `RecordFile` does.
    """
    records: dict[RecordKey, EvalRecord] = {}
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            record = parse_json(EvalRecord, line, path)
        except ValueError as error:  # malformed JSON and UTF-8 are ValueErrors too
            raise ValueError(f"{path}, line {number}: {error}; delete the line, and the run measures it again") from error
        records[record.key] = record
    num_rows = Counter(record.batch_key for record in records.values())
    return {key: record for key, record in records.items() if num_rows[record.batch_key] == record.num_rows}
