"""Calibration: how often a draft token is accepted, by its source and the source's evidence.

A drafter's own score is no probability of acceptance: a greedy target accepts the drafter's first
token more often than its probability, and training-free drafters only count. So hits and misses are
counted, in cells of (source, depth, bin of the evidence). Where several sources have tokens after
the same text, a second table counts by the sources that propose a token, the sources that propose
any token there, and the bin of the highest single estimate: agreement is strong evidence.

Counts are a function of the text and of the trees. They start from a prior, which may be saved
beside a drafter's weights, in `calibration.json`.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ...data.files import read_dataclass, write_json
from ...data.manifest import TargetIdentity
from ...data.paths import repeated_names

CALIBRATION_FILE = "calibration.json"
FORMAT_VERSION = 1

BIN_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Bounds of the bins of probabilities."""
NUM_BINS = len(BIN_BOUNDS) + 1
MAX_DEPTH = 4
"""Deeper draft tokens are counted as if they were at this depth."""
MAX_SOURCES = 8

SCORE_WEIGHT = 8.0
"""How many observations a source's own score counts for."""
AGREEMENT_WEIGHT = 8.0
"""How many observations the estimate from the single sources counts for, where several sources propose."""
MAX_PRIOR = 30.0
"""Most observations that a cell of a prior counts for, so that a text can correct it."""
MAX_TOTAL = 120.0
"""Cells with more observations are halved, so that the recent text counts most."""

SCORE_BOUNDS = (
    *(1e-5, 1e-4, 4e-4, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.05, 0.08, 0.12),
    *(0.18, 0.25, 0.32, 0.4, 0.48, 0.56, 0.64, 0.72, 0.8, 0.87, 0.92, 0.96),
)
"""Bounds of the bins of one draft model's probabilities: of narrow ranges, also where they are small."""
PRIOR_WEIGHT = 4.0
"""How many observations a draft model's own probability counts for."""
SCORE_MEMORY = 500.0
"""Observations of a cell that are remembered."""
TEXT_MEMORY, TEXT_WEIGHT = 400.0, 20.0
"""Observations that show how hard the text is here, and the hits that it is taken as usual for."""
MAX_ESTIMATE = 0.995
"""No token is sure to be accepted."""

OutcomeCounts = dict[int, tuple[float, float]]
"""Hits and observations of each cell, by its key. A missing cell has none."""
NO_COUNTS = (0.0, 0.0)

BINS_PER_DEPTH = 64
AGREEMENTS = MAX_SOURCES * MAX_DEPTH * BINS_PER_DEPTH
"""First key of the second table."""


def source_key(source: int, depth: int) -> int:
    """Return the key of bin 0 of a source's tokens at a depth; the other bins' keys follow."""
    return (source * MAX_DEPTH + min(depth, MAX_DEPTH) - 1) * BINS_PER_DEPTH


def agreement_key(proposed_by: int, present: int, estimate: float) -> int:
    """Return the key of a cell of the second table. The sources are bitmasks."""
    return AGREEMENTS + ((proposed_by << MAX_SOURCES) + present) * BINS_PER_DEPTH + bisect(BIN_BOUNDS, estimate)


def teach(counts: OutcomeCounts, keys: Sequence[int], was_hit: bool) -> None:
    """Count an observation in each of these cells."""
    for key in keys:
        hits, total = counts.get(key, NO_COUNTS)
        if total >= MAX_TOTAL:
            hits, total = hits / 2, total / 2
        counts[key] = (hits + was_hit, total + 1)


class ScoreCalibration:
    """Calibration of one draft model's probabilities, for all its texts.

    In each cell, the scores are scaled so that they add up to the hits. A step begins after a token
    that the drafter missed, where it is worse than after its own tokens: so depth 1 has cells of its
    own. Ranks and further depths have none: they would only be noisier. What the cells expected of
    the latest tokens is compared with what came, since some texts are harder (benchmarks/pace_study).
    """

    def __init__(self) -> None:
        self._cells = [[[0.0, 0.0] for _ in range(len(SCORE_BOUNDS) + 1)] for _ in range(2)]
        """Hits and sum of scores, by whether the depth is 1, and by bin."""
        self._hits = self._expected = TEXT_WEIGHT

    def estimate(self, depth: int, score: float) -> float:
        """Return the probability that a token is accepted if its parent is."""
        return min(self._usual(depth, score) * self._hits / self._expected, MAX_ESTIMATE)

    def _usual(self, depth: int, score: float) -> float:
        """Return the probability in texts as hard as the average."""
        hits, scores = self._cells[depth == 1][bisect(SCORE_BOUNDS, score)]
        prior = PRIOR_WEIGHT * score
        return min(score * (hits + prior) / (scores + prior), MAX_ESTIMATE) if prior > 0.0 else 0.0

    def start_from(self, cells: Iterable["CalibrationCell"]) -> None:
        """Start from counts that were saved, spread over the bins of scores that theirs covers."""
        bounds, fine = (0.0, *BIN_BOUNDS, 1.0), (0.0, *SCORE_BOUNDS, 1.0)
        middles = [sum(pair) / 2 for pair in pairwise(fine)]
        for cell in cells:
            low, high = bounds[min(cell.bin, NUM_BINS - 1) :][:2]
            covered = [score for score in middles if low <= score < high] or [(low + high) / 2]
            hits, total = _limited(cell.hits, cell.total)
            for score in covered:
                counted = self._cells[cell.depth == 1][bisect(SCORE_BOUNDS, score)]
                counted[:] = counted[0] + hits * score / sum(covered), counted[1] + total * score / len(covered)

    def add(self, depth: int, score: float, was_hit: bool) -> None:
        """Count a token after an accepted one: whether it was the next token of the text."""
        kept = 1.0 - 1.0 / TEXT_MEMORY
        self._hits = TEXT_WEIGHT + kept * (self._hits - TEXT_WEIGHT + was_hit)
        self._expected = TEXT_WEIGHT + kept * (self._expected - TEXT_WEIGHT + self._usual(depth, score))
        cell = self._cells[depth == 1][bisect(SCORE_BOUNDS, score)]
        kept = 1.0 - 1.0 / SCORE_MEMORY
        cell[:] = kept * (cell[0] + was_hit), kept * (cell[1] + score)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationCell:
    """Hits and observations of one source's tokens at a depth, in one bin."""

    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)]
    bin: Annotated[int, Field(ge=0, lt=BINS_PER_DEPTH)]
    hits: Annotated[float, Field(ge=0)]
    total: Annotated[float, Field(gt=0)]

    def __post_init__(self) -> None:
        _require_share(self.hits, self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Hits and observations of tokens that some of several sources propose."""

    proposed_by: list[str]
    present: list[str]
    """The sources that propose any token there."""
    bin: Annotated[int, Field(ge=0, lt=BINS_PER_DEPTH)]
    hits: Annotated[float, Field(ge=0)]
    total: Annotated[float, Field(gt=0)]

    def __post_init__(self) -> None:
        _require_share(self.hits, self.total)
        if not self.proposed_by or not set(self.proposed_by) <= set(self.present):
            raise ValueError(f"proposed_by is {self.proposed_by}, and present is {self.present}; some of those propose a token")
        if twice := repeated_names(self.proposed_by) or repeated_names(self.present):
            raise ValueError(f"{', '.join(twice)} is there twice; a cell has each source once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Counts that were measured before, by the names of the sources."""

    sources: dict[str, list[CalibrationCell]]
    agreements: list[Agreement]

    def counts(self, names: Sequence[str]) -> OutcomeCounts:
        """Return the counts of these sources, as the start of a text's calibration."""
        counts: OutcomeCounts = {}
        for source, name in enumerate(names):
            for cell in self.sources.get(name, []):
                counts[source_key(source, cell.depth) + cell.bin] = _limited(cell.hits, cell.total)
        for agreement in self.agreements:
            if set(agreement.present) <= set(names):
                masks = (_mask(agreement.proposed_by, names) << MAX_SOURCES) + _mask(agreement.present, names)
                counts[AGREEMENTS + masks * BINS_PER_DEPTH + agreement.bin] = _limited(agreement.hits, agreement.total)
        return counts

    @classmethod
    def of(cls, counts: OutcomeCounts, names: Sequence[str]) -> "Prior":
        """Return the prior of measured counts of these sources."""
        sources: dict[str, list[CalibrationCell]] = {name: [] for name in names}
        agreements = []
        for key, (hits, total) in sorted(counts.items()):
            cell, bin_index = divmod(key, BINS_PER_DEPTH)
            if key < AGREEMENTS:
                source, depth = divmod(cell, MAX_DEPTH)
                sources[names[source]].append(CalibrationCell(depth=depth + 1, bin=bin_index, hits=hits, total=total))
            else:
                proposed_by, present = divmod(cell - AGREEMENTS // BINS_PER_DEPTH, 1 << MAX_SOURCES)
                members = {"proposed_by": _names(proposed_by, names), "present": _names(present, names)}
                agreements.append(Agreement(**members, bin=bin_index, hits=hits, total=total))
        return cls(sources=sources, agreements=agreements)

    def updated(self, other: "Prior") -> "Prior":
        """Return this prior with the other's cells in place of those of the same sources."""
        kept = [cell for cell in self.agreements if not set(cell.present) <= other.sources.keys()]
        return Prior(sources={**self.sources, **other.sources}, agreements=[*kept, *other.agreements])


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFile:
    """Content of the file."""

    format_version: int
    target: TargetIdentity
    prior: Prior


def write_prior(directory: Path, target: TargetIdentity, prior: Prior) -> None:
    """Write a prior beside a drafter's weights. It holds for this target only."""
    file = CalibrationFile(format_version=FORMAT_VERSION, target=target, prior=prior)
    write_json(directory / CALIBRATION_FILE, asdict(file))


def read_prior(directory: Path, target: TargetIdentity) -> Prior | None:
    """Read the prior beside a drafter's weights; None without a file.

    Raises ValueError for a damaged file, for another format version, and for a prior of another
    target.
    """
    path = directory / CALIBRATION_FILE
    if not path.is_file():
        return None
    remedy = f"delete {path}; `outrider run` with eval.merge calibrates the drafter again"
    try:
        file = read_dataclass(CalibrationFile, path)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    if file.format_version != FORMAT_VERSION:
        raise ValueError(f"{path} has format {file.format_version}, and this version reads {FORMAT_VERSION}; {remedy}")
    if differences := file.target.differences(target):
        raise ValueError(
            f"{path} was measured with {file.target.name}, and this target is {target.name} ({'; '.join(differences)}); a "
            f"calibration holds for its own target only: {remedy}"
        )
    return file.prior


def _limited(hits: float, total: float) -> tuple[float, float]:
    """Return counts that weigh at most MAX_PRIOR observations."""
    scale = min(1.0, MAX_PRIOR / total)
    return hits * scale, total * scale


def _mask(members: Sequence[str], names: Sequence[str]) -> int:
    return sum(1 << names.index(name) for name in members)


def _names(mask: int, names: Sequence[str]) -> list[str]:
    return [name for source, name in enumerate(names) if mask >> source & 1]


def _require_share(hits: float, total: float) -> None:
    if not hits <= total:
        raise ValueError(f"hits is {hits} of {total}; a cell has at most as many hits as observations")
