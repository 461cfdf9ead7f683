"""Seconds that were measured once on this machine, in a file for later processes.

The file lies in the folder OUTRIDER_CACHE, or `~/.cache/outrider`. It is named after the machine: the
hardware, torch's version and all else that the seconds depend on. A file that can't be read, or
that belongs to another machine, is ignored and written again.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...data.files import write_json

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MachineFile:
    """File of the seconds of one kind of work, by shape."""

    name: str
    machine: Mapping[str, Any]
    """All that the seconds depend on: the machine, and what is measured on it."""

    @property
    def path(self) -> Path:
        return _cache_folder() / f"{self.name}-{digest(repr(self.machine))}.json"

    def read(self, parse: Callable[[Any], T]) -> dict[str, T]:
        """Return what the file holds, by shape; `parse` may raise ValueError for a wrong entry."""
        try:
            content = json.loads(self.path.read_text())
            if content["machine"] != self.machine:
                return {}
            return {key: parse(values) for key, values in content["times"].items()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            logger.warning("%s can't be read (%s); the speeds of %s are measured again", self.path, error, self.name)
            return {}

    def write(self, times: Mapping[str, Any]) -> None:
        """Write the file; without it the next process measures again."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {"machine": self.machine, "times": times})
        except OSError as error:
            logger.info("%s can't be written (%s): the next process measures %s again", self.path, error, self.name)


def digest(text: str) -> str:
    """Return a short name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _cache_folder() -> Path:
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return Path(chosen).expanduser()
    try:
        return Path.home() / ".cache" / "outrider"
    except RuntimeError:  # a user without a home: this process measures for itself
        return Path(os.devnull)
