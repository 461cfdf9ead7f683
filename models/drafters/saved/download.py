"""Drafters by their name on the Hub: `user/repository`, or `user/repository@revision`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx  # the client that it uses, which isn't always the package of this name

from ....data.files import finish_replacing
from ....data.hub import use_hub
from .folder import CONFIG_FILE, TRAINING_FILE, WEIGHTS_FILE

READ_FILES = (CONFIG_FILE, WEIGHTS_FILE, TRAINING_FILE)
"""What loading a drafter downloads: JSON and safetensors, no code."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)

REMEDIES = {
    401: "the Hub doesn't know who you are: log in with `hf auth login`, or set HF_TOKEN to a token that is still valid",
    403: "your token may not do this: make one with the right to write to this repository (huggingface.co/settings/tokens)",
    404: "there is no such repository, or it is private and your token doesn't see it: check the name, or `hf auth login`",
    409: "the repository is there already in another form, or somebody is changing it: try again, or choose another name",
    412: "the branch has changed since it was looked at: run the command again, which looks anew",
    429: "the Hub asks for patience: try again in some minutes",
}


def resolve_drafter(name_or_path: str | Path, revision: str | None = None, **hub_options: Any) -> Path:
    """The folder of a drafter: a directory as it is, or a download of the repository of this id (config, weights and what its
    training took; no code), which huggingface_hub keeps.

    `hub_options` are those of `snapshot_download`, such as a `token`. Raises ValueError where the Hub has no such drafter, or
    can't be reached.
    """
    return resolve_folder(name_or_path, READ_FILES, revision, **hub_options)


def resolve_folder(name_or_path: str | Path, patterns: Sequence[str], revision: str | None = None, **hub_options: Any) -> Path:
    """A directory as it is, or a download of those files of a repository whose names match: as `resolve_drafter`."""
    path = Path(name_or_path)
    finish_replacing(path)
    if path.is_dir() or HUB_ID.fullmatch(str(name_or_path)) is None or str(name_or_path).startswith("."):
        return path  # the reader of a missing folder raises the error
    use_hub()
    repo, _, at = str(name_or_path).partition("@")
    revision = at or revision  # in the name it is the drafter's for certain
    try:
        with telling_hub_errors(repo, revision):
            return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns), **hub_options))
    except ValueError as error:
        raise ValueError(f"there is no folder {name_or_path} here, and of that name on the Hub: {error}") from error


@contextmanager
def telling_hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turn errors of the Hub and of the way there into ValueErrors that name the repository and the remedy, and no token."""
    at = f"{repo}@{revision}" if revision else repo
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is no name of a repository; give user/name ({_first_line(error)})") from error
    except OfflineModeIsEnabled as error:
        raise ValueError(f"{at} can't be reached, since HF_HUB_OFFLINE is set: unset it, or give a local folder") from error
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{at} isn't in the cache, and the Hub can't be reached: check the network (and HF_HUB_OFFLINE and HF_ENDPOINT), "
            "or give a local folder"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{repo} has no branch, tag or commit {revision}; check the name of the revision") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        answer = f"the Hub answers: {_without_secrets(error.server_message or _first_line(error))}"
        raise ValueError(f"{at}: HTTP {status}: {REMEDIES.get(status, answer)}") from error
    except UnicodeEncodeError:  # not its cause: that holds the token
        raise ValueError(
            f"{at}: the token has characters that no token has: copy it again (HF_TOKEN, or `hf auth login`)"
        ) from None
    except (httpx.TransportError, ConnectionError, TimeoutError) as error:
        # What uploads large files (hf_xet) has no other errors, and tells the status in words.
        found = re.search(r"status\D{0,30}\b([45]\d\d)\b", str(error))
        if found and not isinstance(error, httpx.TransportError):
            remedy = REMEDIES.get(int(found[1]), f"the Hub answers: {_without_secrets(_first_line(error))}")
            raise ValueError(f"{at}: HTTP {found[1]}: {remedy}") from None
        raise ValueError(
            f"{at}: the connection to the Hub broke ({type(error).__name__}): check the network (and HF_ENDPOINT), and run the "
            "command again; nothing was changed, or the next run tells what was"
        ) from error


def _without_secrets(text: str) -> str:
    """Without tokens, and without what follows a URL's path: it may hold a signature."""
    return re.sub(r"hf_\w+|Bearer \S+|\?\S+", "...", text)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
