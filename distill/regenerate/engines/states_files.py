"""Files into which vLLM writes the hidden states of a request."""

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

T = TypeVar("T")


class Transfer(BaseModel):
    """What vLLM says of a request's hidden states."""

    hidden_states_path: str


def states_file(url: str, transfer: Transfer, folder: Path) -> Path:
    """Return the file into which a server has written hidden states, which may call its folder otherwise.

    Raises ValueError if it isn't in `folder`: a server may name any file of this machine, and what is read is deleted.
    """
    path = folder / Path(transfer.hidden_states_path).name
    if not (path.is_file() or lock_of(path).is_file()):
        raise ValueError(
            f"{url} has written states to {transfer.hidden_states_path!r}, which isn't in distill.states_dir={folder}"
        )
    return path


def lock_of(path: Path) -> Path:
    """Return the file that the server locks while it writes."""
    return path.with_name(f"{path.name}.lock")


def take_states(path: Path, read: Callable[[Path], T]) -> T:
    """Wait until a file of hidden states is written, return what `read` returns, and delete the file."""
    lock = lock_of(path)
    if lock.exists():
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)
    result = read(path)
    path.unlink(missing_ok=True)
    lock.unlink(missing_ok=True)
    return result


def drop_states(url: str, transfer: Transfer | None, folder: Path) -> None:
    """Delete the states of a request that a server has written, if there are any. Raises ValueError as `states_file` does."""
    if transfer is not None:
        take_states(states_file(url, transfer, folder), lambda path: None)
