"""Certificates as `outrider certify` writes them, with strict validation.

Model cards show their content.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ...data.files import read_dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateLine:
    """One line of the certificate."""

    subject: str
    method: str
    num_cases: int
    result: str
    passed: bool
    false_alarm_rate: float = 0.0
    """Bound on the probability that this line fails although everything is sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Content of a certificate.

    Fields with a default are set only if a target was certified too.
    """

    passed: bool
    false_alarm_rate: Annotated[float, Field(ge=0, le=1)]
    environment: dict[str, Any]
    lines: Annotated[list[CertificateLine], Field(min_length=1)]
    target: str | None = None
    weights_sha256: str | None = None
    suites: dict[str, str] = field(default_factory=dict)
    """Digest of the prompts of each suite, by its name."""
    dtype: str | None = None
    quantization: str | None = None
    """Quantisation of the target at load time; empty without."""
    form: str | None = None
    drafters: dict[str, str] = field(default_factory=dict)
    """Digest of each drafter's weights, by the drafter's name."""

    def __post_init__(self) -> None:
        if self.passed != all(line.passed for line in self.lines):
            raise ValueError("passed: the verdict contradicts the lines, so the file was altered; run `outrider certify` again")


def read_certificate(path: Path) -> Certificate:
    """Read a certificate.

    Raises ValueError for any other file.
    """
    return read_dataclass(Certificate, path)
