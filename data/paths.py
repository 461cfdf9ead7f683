"""Local files and folders of options, checked together before any long work."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .drafter_names import MODEL_PREFIX

FILE_SUFFIXES = (".json", ".jsonl", ".jinja", ".parquet", ".gz", ".txt", ".yaml")


TEMPLATES = Path(__file__).parent / "templates"
"""Chat templates that ship with outrider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPath:
    """The value of an option, and a description of valid values."""

    option: str
    value: str
    expected: str
    """For example "a directory with config.json, or a Hub id (owner/name)"."""
    is_local: bool = False
    """Whether it can only be a local path, whatever it looks like."""

    @property
    def is_missing(self) -> bool:
        """Whether it is a local path, and nothing is there."""
        return (self.is_local or looks_like_path(self.value)) and not Path(self.value).exists()


def looks_like_path(value: str) -> bool:
    """Return whether a value is a local path, not an id of the Hub.

    An id has at most one slash. For example ./model, ~/model, a/b/c and data.jsonl are paths;
    owner/name and gpt2 may be on the Hub.
    """
    is_relative = value in (".", "..") or value.startswith(("./", "../"))
    return is_relative or value.startswith(("/", "~")) or value.endswith(FILE_SUFFIXES) or value.count("/") > 1


def built_in_templates() -> list[str]:
    """Return the names of the chat templates that ship with outrider."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def require_paths(paths: Iterable[NamedPath]) -> None:
    """Raise one ValueError that lists all missing local paths; doesn't use the network."""
    missing = [path for path in paths if path.is_missing]
    if not missing:
        return
    lines = [f"  - {path.option} is {path.value!r}; give {path.expected}" for path in missing]
    noun = "path doesn't exist" if len(missing) == 1 else "paths don't exist"
    raise ValueError("\n".join([f"{len(missing)} {noun} (looked up from {Path.cwd()}):", *lines]))


def expand_home(value: Any) -> Any:
    """Return the value with the home directory for `~` at the start of every text in it.

    A shell expands it only at the beginning of a word, so not in data.path=~/chats.jsonl.
    """
    if isinstance(value, str) and value.startswith(MODEL_PREFIX):
        return f"{MODEL_PREFIX}{expand_home(value.removeprefix(MODEL_PREFIX))}"
    if isinstance(value, str):
        return str(Path(value).expanduser()) if value == "~" or value.startswith("~/") else value
    if isinstance(value, Mapping):
        return {key: expand_home(item) for key, item in value.items()}
    return [expand_home(item) for item in value] if isinstance(value, list) else value
