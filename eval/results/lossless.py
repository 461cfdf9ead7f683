"""Comparison of every answer with plain decoding's.

Where an answer differs, an audit checks whether arithmetic noise is the reason.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from ..records.records import BASELINE, EvalRecord, RecordKey
from ..records.run_files import Audit


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Answer whose tokens differ from the baseline's.

    `position` is the index of the first different token, from 0.
    """

    record: EvalRecord
    position: int
    within_noise: bool = False
    unaudited: bool = False
    """Whether its audit ran out of memory, so that it is unknown whether noise explains the
    mismatch."""


NUM_AUDITED = 3
"""Number of prompts per suite and temperature whose plain answers in batches are audited. The audit
replaces the comparison with answers at batch size 1, if there are none."""


def find_mismatches(records: Iterable[EvalRecord]) -> list[Mismatch]:
    """Compare every record with the baseline's first answer to the same turn.

    Both have the same temperature and batch size. The baseline's repeats and profiled answers are
    compared too. Records that are different samples by design are not compared.

    The baseline's answers in batches are compared with its answers at the smallest batch size, if
    the prompts are equal. This detects a mistake that all methods of a batch share. Raises
    ValueError if the baseline has no answer to a turn, or had another prompt.
    """
    # 1. Index the records by key.
    by_key: dict[RecordKey, EvalRecord] = {record.key: record for record in records}
    smallest = min((record.batch_size for record in by_key.values()), default=1)
    mismatches = []
    for record in by_key.values():
        # 2. Look up the plain answer that it is compared with.
        turn_key = (record.suite, record.prompt_id, record.turn, record.temperature)
        reference = by_key.get((*turn_key, BASELINE, 0, False, record.batch_size))
        if reference is None or reference.prompt_sha256 != record.prompt_sha256:
            raise ValueError(
                f"{record.name} has no baseline record of the same prompt; delete the lines of both, and run the evaluation's "
                "command again"
            )
        if record.method == BASELINE:
            alone = by_key.get((*turn_key, BASELINE, 0, False, smallest))
            reference = alone if alone is not None and alone.prompt_sha256 == record.prompt_sha256 else reference
        # 3. Find the first different token.
        if not record.is_other_sample and record.token_ids != reference.token_ids:
            pairs = zip_longest(record.token_ids, reference.token_ids)
            position = next(index for index, (token, expected) in enumerate(pairs) if token != expected)
            mismatches.append(Mismatch(record=record, position=position))
    return mismatches


def is_exact(dtype: str, temperature: float = 0.0, batch_size: int = 1) -> bool:
    """Check whether decoding must give exactly the baseline's tokens.

    `dtype` is the type's name. This holds neither for sampling nor for batches. In sampling, the
    two best candidates of a token can be closer than rounding, in any precision. In batches, a
    row's last digits depend on the number of other rows, which finish at different steps with
    different methods.
    """
    return dtype.removeprefix("torch.") in ("float32", "float64") and temperature == 0 and batch_size == 1


def to_audit(records: Sequence[EvalRecord], mismatches: Iterable[Mismatch], dtype: str) -> list[EvalRecord]:
    """Select the answers that must be audited.

    These are the mismatches that noise may explain, and a sample of the answers that no other
    answer can confirm.
    """
    doubtful = [mismatch.record for mismatch in mismatches]
    return [
        *(record for record in doubtful if not is_exact(dtype, record.temperature, record.batch_size)),
        *_unchecked_batches(records),
    ]


def _unchecked_batches(records: Sequence[EvalRecord]) -> list[EvalRecord]:
    """Select plain answers to audit, if no prompt was answered at batch size 1.

    They are the answers to NUM_AUDITED prompts of each suite and temperature: the first, the middle
    and the last. So different rows of a batch are audited.
    """
    smallest = min((record.batch_size for record in records), default=1)
    if smallest == 1:
        return []
    groups: dict[tuple[str, float], dict[str, list[EvalRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.is_reference and record.batch_size == smallest and record.num_rows > 1:
            groups[record.suite, record.temperature][record.prompt_id].append(record)
    chosen = []
    for prompts in groups.values():
        names, last = list(prompts), len(prompts) - 1
        indexes = dict.fromkeys(last * number // (NUM_AUDITED - 1) for number in range(NUM_AUDITED))
        chosen += [record for index in indexes for record in prompts[names[index]]]
    return chosen


def judged(
    records: Sequence[EvalRecord], dtype: str, audits: Mapping[str, Audit], unaudited: Collection[str] = ()
) -> list[Mismatch]:
    """List every answer that differs from the target's, with the verdict of its audit.

    `audits` are by `answer_digest`; they decide whether noise explains the difference. An answer of
    `unaudited` counts as a mismatch, because its audit ran out of memory and nothing proves it.
    """
    mismatches = {mismatch.record.key: mismatch for mismatch in find_mismatches(records)}
    for record in to_audit(records, list(mismatches.values()), dtype):
        if record.answer_digest in unaudited:
            position = mismatches[record.key].position if record.key in mismatches else 0
            mismatches[record.key] = Mismatch(record=record, position=position, unaudited=True)
            continue
        audit = audits[record.answer_digest]
        if record.key in mismatches:
            mismatches[record.key] = replace(mismatches[record.key], within_noise=audit.within_noise)
        elif audit.deficit > 0 or not audit.within_noise:
            mismatches[record.key] = Mismatch(record=record, position=audit.position, within_noise=audit.within_noise)
    return list(mismatches.values())


LOSSY = "no, by rule"
"""Text in tables for a rule that doesn't claim to be lossless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Mismatches of a method on a suite at a temperature, counted in prompts.

    `lossy`: its acceptance rule doesn't claim to be lossless. `first` is the first example: an unexplained mismatch if there
    is one.
    """

    num_prompts: int
    num_mismatched: int
    num_within_noise: int
    num_unaudited: int
    """Prompts whose answers have no known error, but were not all audited."""
    lossy: bool
    first: dict[str, Any] | None

    @property
    def broken(self) -> bool:
        return self.num_mismatched > self.num_within_noise

    @property
    def unproven(self) -> bool:
        """Whether the only problem is that audits ran out of memory."""
        return self.broken and self.num_mismatched - self.num_within_noise == self.num_unaudited

    @property
    def label(self) -> str:
        if self.unproven:
            return f"unproven ({self.num_unaudited} of {self.num_prompts} prompts not audited)"
        if self.broken:
            return f"NO ({self.num_mismatched - self.num_within_noise} of {self.num_prompts} prompts)"
        if self.lossy:
            return LOSSY
        if self.num_within_noise:
            return f"within noise ({self.num_within_noise})"
        return "yes"

    def label_beside(self, plain: "Verdict") -> str:
        """Return the label of a method beside plain decoding, which may be wrong itself, or unproven."""
        if not plain.broken:
            return self.label
        verdict, cause = ("unproven", "is unproven") if plain.unproven else ("NO", "is wrong")
        return f"{verdict}: plain decoding {cause} ({self.label} against it)"


def judge(records: Sequence[EvalRecord], mismatches: Sequence[Mismatch]) -> Verdict:
    """Summarize the mismatches of these records, which are those of one method on one suite at one temperature."""
    keys = {record.key for record in records}
    mismatches = [mismatch for mismatch in mismatches if mismatch.record.key in keys]
    mismatched = {mismatch.record.prompt_id for mismatch in mismatches}
    unexplained = [mismatch for mismatch in mismatches if not mismatch.within_noise]
    wrong = [mismatch for mismatch in unexplained if not mismatch.unaudited]
    examples = [
        {"prompt_id": mismatch.record.prompt_id, "turn": mismatch.record.turn, "position": mismatch.position}
        for mismatch in [*wrong, *unexplained, *mismatches]
    ]
    return Verdict(
        num_prompts=len({record.prompt_id for record in records}),
        num_mismatched=len(mismatched),
        num_within_noise=len(mismatched - {mismatch.record.prompt_id for mismatch in unexplained}),
        num_unaudited=len({mismatch.record.prompt_id for mismatch in unexplained} - {item.record.prompt_id for item in wrong}),
        lossy=not all(record.lossless_rule for record in records),
        first=examples[0] if examples else None,
    )
