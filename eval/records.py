"""One line per measured generation: everything that tables, plots and a resumed run need."""

import dataclasses
import errno
import json
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ..data.files import naming_full_disk, parse_dataclass
from ..models.decoding.types import PhaseSeconds
from .names import BASELINE as BASELINE

logger = logging.getLogger(__name__)

RecordKey = tuple[str, str, int, float, str, int, bool]
"""Suite, prompt id, turn, temperature, method, repeat, profiled: one generation of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTokens:
    """Draft tokens of each verify step, padding left out: what merging shared prefixes saves (see `tree_tokens`)."""

    separate: list[int]
    """Were every path of the tree read by itself."""
    shared: list[int]
    """As the tree has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """One generation: a prompt's turn, answered by a method, once.

    `accepted_histogram[k]` counts the verify steps that accepted k draft tokens (before a cut at a stop token or at the limit).
    The prefill is no verify step and its token is not among `num_verify_tokens`, so tokens per step is
    `num_verify_tokens / num_steps`, bonus tokens included.
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
    context_from: str | None
    """The method whose answers to the earlier turns, at the same temperature, stand in this prompt; None for a first turn."""
    prompt_sha256: str
    """Digest of the prompt's token ids."""
    num_prompt_tokens: int
    token_ids: list[int]
    """All tokens of the answer, the prefill's and a final stop token included."""
    accepted_histogram: list[int]
    num_verify_tokens: int
    num_draft_tokens: int
    """Draft tokens that the target read, over all steps."""
    drawn: bool
    """Whether the drafter drew them at random."""
    lossless_rule: bool
    """Whether the rule that accepts them leaves the target's distribution as it is."""
    truncated: bool
    """Ended by the token limit, not by a stop token."""
    prefill_seconds: float
    """Until the first token."""
    decode_seconds: float
    """From the first token to the last."""
    phase_seconds: PhaseSeconds | None
    """Summed over the verify steps; None unless profiled."""
    environment_digest: str
    config_digest: str
    seed: int
    tree_tokens: TreeTokens | None = None
    """None unless profiled, and in records made before it was measured."""

    def __post_init__(self) -> None:
        if not self.token_ids or self.num_verify_tokens != len(self.token_ids) - 1:
            raise ValueError(
                f"{len(self.token_ids)} tokens, of which {self.num_verify_tokens} by verify steps; the prefill emits one"
            )
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 or a positive number")
        if min((self.turn, self.repeat, self.num_draft_tokens, *self.accepted_histogram, *self.token_ids)) < 0:
            raise ValueError("a count, an index or a token id is negative")
        if self.num_steps > self.num_verify_tokens:
            raise ValueError(f"{self.num_steps} verify steps emitted {self.num_verify_tokens} tokens; each emits at least one")
        if self.prefill_seconds <= 0 or self.decode_seconds < 0:
            raise ValueError(f"took {self.prefill_seconds} s and {self.decode_seconds} s; seconds are positive")
        if self.profiled != (self.phase_seconds is not None):
            raise ValueError("phase_seconds must be there exactly when profiled")
        if self.tree_tokens is not None and {len(self.tree_tokens.separate), len(self.tree_tokens.shared)} != {self.num_steps}:
            raise ValueError(f"tree_tokens must have an entry for each of the {self.num_steps} verify steps")

    @property
    def key(self) -> RecordKey:
        return (self.suite, self.prompt_id, self.turn, self.temperature, self.method, self.repeat, self.profiled)

    @property
    def is_other_sample(self) -> bool:
        """Whether it is another sample than the baseline's by design.

        Random drafts decide with other coins what is emitted, and a rule that isn't lossless emits something else.
        """
        return self.temperature > 0 and (self.drawn or not self.lossless_rule)

    @property
    def num_steps(self) -> int:
        """Verify steps."""
        return sum(self.accepted_histogram)

    @property
    def seconds(self) -> float:
        """The whole generation, prefill included."""
        return self.prefill_seconds + self.decode_seconds

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


class RecordFile:
    """The records of a run: a JSON-lines file that grows line by line and survives being killed.

    A last line without its newline was torn by a kill: it is dropped, and its generation done again. Any other line that cannot
    be read is a ValueError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = _read(path)
        # Unbuffered: what a full disk refused is not tried again when the file is closed.
        self._file = path.open("ab", buffering=0)

    def append(self, record: EvalRecord) -> None:
        with naming_full_disk(self.path, "The records before this one are kept"):
            line = (record.to_json() + "\n").encode()
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, "only a part of the record was written")
            os.fsync(self._file.fileno())
        self.records[record.key] = record

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()


def _read(path: Path) -> dict[RecordKey, EvalRecord]:
    if not path.exists():
        return {}
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        logger.warning("%s: dropping the last line, torn when the run was killed", path)
        os.truncate(path, len(whole) + len(newline))
    records: dict[RecordKey, EvalRecord] = {}
    for number, line in enumerate(whole.split(b"\n") if newline else [], start=1):
        try:
            record = parse_dataclass(EvalRecord, json.loads(line), path)
            if record.key in records:
                raise ValueError("the same generation as an earlier line")
        except ValueError as error:  # malformed JSON and UTF-8 are ValueErrors too
            raise ValueError(f"{path}, line {number}: {error}; delete the line, and the run makes the record again") from error
        records[record.key] = record
    return records
