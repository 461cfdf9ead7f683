"""Drafters by their name on the Hub: `user/repository`, or `user/repository@revision`."""

import json
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
from huggingface_hub.utils import httpx  # its HTTP client, which isn't always the package httpx

from ....data.files import finish_replacing, read_json
from ....data.hub import bound_requests, use_hub, why_offline
from ....data.paths import MODEL_PREFIX
from .folder import CONFIG_FILE, HUB_ID, MERGE_FILE, TRAINING_FILE, WEIGHTS_FILE
from .low_rank import is_low_rank, whole_drafter

READ_FILES = (CONFIG_FILE, WEIGHTS_FILE, TRAINING_FILE, MERGE_FILE)
"""Files that loading a drafter downloads: JSON and safetensors, no code."""
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.jinja", "merges.txt", "vocab.txt")
"""Files of a causal LM that are downloaded: configuration, tokenizer and weights, no code."""
NOT_MODEL_FILES = ("*/*", "consolidated*")
"""Files that repositories have besides: in subfolders, and weights in another form."""

REMEDIES = {
    401: "the Hub doesn't know who you are: log in with `hf auth login`, or set HF_TOKEN to a valid token",
    403: "your token may not do this: create one with write access to this repository (huggingface.co/settings/tokens)",
    404: "there is no such repository, or it is private and your token has no access: check the name, or `hf auth login`",
    409: "the repository exists already in another form, or is being changed: try again, or choose another name",
    412: "the branch has changed since the command read it: run the command again",
    429: "too many requests to the Hub: try again in some minutes",
}

NOT_THE_HUBS = (
    *(json.JSONDecodeError, RecursionError),  # no JSON, or nested without end
    *(TypeError, LookupError, AttributeError, AssertionError),  # JSON of another form
    *(httpx.TooManyRedirects, httpx.DecodingError, httpx.InvalidURL),
)
"""Errors of huggingface_hub for replies that no Hub sends."""


def resolve_drafter(name_or_path: str | Path, revision: str | None = None, **hub_options: Any) -> Path:
    """Return the folder of a drafter: an existing directory, or a download of a Hub repository.

    Downloads contain config, weights and training facts, but no code; huggingface_hub caches them.
    `hub_options` are those of `snapshot_download`, such as a `token`. A low-rank change is merged into its
    base, and the folder is that of the whole drafter. Raises ValueError if the Hub has no such drafter or
    can't be reached.
    """
    folder = resolve_folder(name_or_path, READ_FILES, revision, **hub_options)
    if not is_low_rank(folder):
        return folder
    return whole_drafter(folder, lambda base: resolve_folder(base, READ_FILES, **hub_options))


def resolve_model(name_or_path: str, **hub_options: Any) -> Path:
    """Return the folder of a causal LM, from a directory or a download without code.

    Raises ValueError if there is none, if it holds a drafter, and for weights that are missing or
    not in safetensors.
    """
    called = f"the draft model {name_or_path}"
    remedy = f"give a model of transformers: {MODEL_PREFIX}DIR or {MODEL_PREFIX}user/name"
    if not Path(name_or_path).is_dir() and HUB_ID.fullmatch(name_or_path) is None:
        raise ValueError(f"{called} is neither a folder nor a name on the Hub (user/name); {remedy}")
    folder = resolve_folder(name_or_path, MODEL_FILES, ignore_patterns=list(NOT_MODEL_FILES), **hub_options)
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{called} has no {CONFIG_FILE}; {remedy}")
    config = read_json(folder / CONFIG_FILE)
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(
            f"{called} isn't a model of transformers: its {CONFIG_FILE} has no model_type. If it is the folder of a trained "
            f"drafter, name it without {MODEL_PREFIX}"
        )
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{called} has no weights in safetensors, and others, such as pickles, can run code, so they aren't read; "
            "convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR)"
        )
    return folder


def resolve_folder(name_or_path: str | Path, patterns: Sequence[str], revision: str | None = None, **hub_options: Any) -> Path:
    """Return an existing directory, or download a repository's files that match `patterns`."""
    path = Path(name_or_path)
    finish_replacing(path)
    if path.is_dir() or HUB_ID.fullmatch(str(name_or_path)) is None or str(name_or_path).startswith("."):
        return path  # the caller that reads the path reports a missing folder
    use_hub()
    repo, _, at = str(name_or_path).partition("@")
    revision = at or revision  # a revision in the name belongs to the drafter
    try:
        with telling_hub_errors(repo, revision):
            return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns), **hub_options))
    except ValueError as error:
        raise ValueError(f"there is no local folder {name_or_path}, and as a name on the Hub: {error}") from error


@contextmanager
def telling_hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turn errors of the Hub and the network into ValueErrors with a remedy.

    Messages name the repository, and contain no token."""
    at = f"{repo}@{revision}" if revision else repo
    bound_requests()
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is not the name of a repository; give user/name ({_first_line(error)})") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"{at} isn't in the cache, and {why_offline()}: check the network (and HF_HUB_OFFLINE and HF_ENDPOINT, and whether "
            "a proxy answers in its place), and run the command again, or give a local folder"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{repo} has no branch, tag or commit {revision}; check the name of the revision") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        answer = f"the Hub answers: {_without_secrets(error.server_message or _first_line(error))}"
        raise ValueError(f"{at}: HTTP {status}: {REMEDIES.get(status, answer)}") from error
    except UnicodeEncodeError:  # `from None`, because the cause contains the token
        raise ValueError(
            f"{at}: the token has characters that no token has: copy it again (HF_TOKEN, or `hf auth login`)"
        ) from None
    except NOT_THE_HUBS as error:
        raise ValueError(
            f"{at}: the reply isn't one of a Hub ({type(error).__name__}: {_without_secrets(_first_line(error)):.200}): check "
            "HF_ENDPOINT, and whether a proxy answers in its place"
        ) from error
    except (httpx.TransportError, ConnectionError, TimeoutError) as error:
        # hf_xet, which uploads large files, raises ConnectionError with the status in its message.
        status_match = re.search(r"status\D{0,30}\b([45]\d\d)\b", str(error))
        if status_match and not isinstance(error, httpx.TransportError):
            remedy = REMEDIES.get(int(status_match[1]), f"the Hub answers: {_without_secrets(_first_line(error))}")
            raise ValueError(f"{at}: HTTP {status_match[1]}: {remedy}") from None
        raise ValueError(
            f"{at}: the connection to the Hub broke ({type(error).__name__}): check the network (and HF_ENDPOINT), and run the "
            "command again; nothing was changed, or the next run reports what was"
        ) from error


def _without_secrets(text: str) -> str:
    """Remove tokens, and the query of a URL, which may contain a signature."""
    return re.sub(r"hf_\w+|Bearer \S+|\?\S+", "...", text)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
