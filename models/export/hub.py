"""Upload of drafters to the Hub, and download, through huggingface_hub.

The token is that of HF_TOKEN or `hf auth`. A push never takes anything away unasked: where the
branch holds other files than the folder, it is refused. The commit is made on top of the very
commit that was looked at, or not at all.
"""

import hashlib
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import httpx

from ...data.files import replacing_directory, sha256_file
from ..drafters.saved.download import telling_hub_errors
from .bundle import FOLDER, LICENCE_FILE, REQUIREMENTS_FILE
from .package import ALLOWED, package_files, require_new

logger = logging.getLogger(__name__)

KEPT_FILES = frozenset({".gitattributes"})
"""The Hub's own, in every repository."""
MAIN = "main"
MOST_NAMED = 8
"""Files named in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What a push has done."""

    url: str
    commit: str
    private: bool
    """Whether the repository is; one that was there keeps what it was."""
    added: list[str]
    """Files that are new, or were changed. None where the branch held all of them already: then
    nothing was committed."""
    deleted: list[str]


def push(
    folder: Path, repo: str, *, public: bool = False, revision: str | None = None, overwrite: bool = False, message: str = ""
) -> Pushed:
    """Upload a folder (see `package_files`) to a branch of a repository.

    Both are made where they aren't there, the repository private unless `public`. With `overwrite`,
    and on a branch that is new, the branch then holds these files alone.

    Raises ValueError for a folder with anything that isn't to be shared, where files of the branch
    differ, and where the Hub refuses or can't be reached.
    """
    files, api, branch = package_files(folder), HfApi(), revision or MAIN
    with telling_hub_errors(repo), _unwrapped():
        try:
            api.model_info(repo)
        except RepositoryNotFoundError:  # what it says of one that we may not see, too: then making it is refused
            api.create_repo(repo, private=not public, exist_ok=True)
        fresh = False
        try:
            info = api.model_info(repo, revision=branch)
        except RevisionNotFoundError:
            api.create_branch(repo, branch=branch)
            info, fresh = api.model_info(repo, revision=branch), True
        assert info.sha is not None
        there = _files_of(api, repo, info.sha)
        changed = [name for name, path in files.items() if name not in there or not _is_same(path, there[name])]
        extra = sorted(there.keys() - files.keys())
        if not fresh and not overwrite and (differing := sorted((set(changed) & there.keys()) | set(extra))):
            more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
            raise ValueError(
                f"the branch {branch} of {repo} holds other files than {folder}: {', '.join(differing[:MOST_NAMED])}{more}. "
                "Push to a new branch (--revision NAME), or replace what is there (--overwrite; its history keeps it)"
            )
        private = bool(info.private)
        commit = info.sha
        if changed or extra:
            operations: list[CommitOperationAdd | CommitOperationDelete] = [
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=files[name]) for name in changed),
                *(CommitOperationDelete(path_in_repo=name) for name in extra),
            ]
            try:
                made = api.create_commit(
                    repo, operations, commit_message=message or "Upload drafter", revision=branch, parent_commit=info.sha
                )
            except BaseException:
                if fresh:  # with the files of main it would be in the way of the next try
                    _remove(api, repo, branch)
                raise
            commit = made.oid
            _require_there(api, repo, commit, files)
        return Pushed(url=f"{api.endpoint}/{repo}/tree/{branch}", commit=commit, private=private, added=changed, deleted=extra)


def pull(repo: str, output: Path, revision: str | None = None) -> str:
    """Download a drafter's folder, code included, which isn't run; whole or not at all.

    Returns the commit. Raises ValueError for a folder that isn't empty, and where the repository
    holds no drafter or can't be read.
    """
    require_new(output)
    patterns = [*ALLOWED, "*.safetensors", *(f"{FOLDER}/{name}" for name in ("*.py", LICENCE_FILE, REQUIREMENTS_FILE))]
    with telling_hub_errors(repo, revision), replacing_directory(output) as folder:
        commit = HfApi().model_info(repo, revision=revision).sha
        assert commit is not None
        snapshot_download(repo, revision=commit, local_dir=folder, allow_patterns=patterns, ignore_patterns=["*/*.safetensors"])
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # huggingface_hub's notes of the download
        package_files(folder, called=f"{repo} at commit {commit}")
    return commit


def _remove(api: HfApi, repo: str, branch: str) -> None:
    """Take away a branch that a push has made, as far as that can be done.

    The news is why the push failed.
    """
    try:
        api.delete_branch(repo, branch=branch)
    except (HfHubHTTPError, httpx.TransportError):
        logger.warning(
            "the branch %s of %s, made for this push, couldn't be removed, and holds what %s does: push there with --overwrite",
            *(branch, repo, MAIN),
        )


def _files_of(api: HfApi, repo: str, commit: str) -> dict[str, RepoFile]:
    tree = api.list_repo_tree(repo, revision=commit, recursive=True)
    return {each.path: each for each in tree if isinstance(each, RepoFile) and each.path not in KEPT_FILES}


def _require_there(api: HfApi, repo: str, commit: str, files: dict[str, Path]) -> None:
    """Raise ValueError where a commit lacks a file, or has another.

    The Hub leaves out what a repository's .gitignore names, and a file may have been changed while
    it was uploaded.
    """
    there = _files_of(api, repo, commit)
    if wrong := [name for name, path in files.items() if name not in there or not _is_same(path, there[name])]:
        raise ValueError(
            f"commit {commit} of {repo} was made, and hasn't {', '.join(wrong[:MOST_NAMED])} as they are here: a file was "
            "changed during the upload, or the repository's .gitignore names it. Mend that, and push again with --overwrite"
        )


def _is_same(path: Path, remote: RepoFile) -> bool:
    """Return whether the Hub's file has the same content.

    It tells SHA-256 of large files, and git's digest of others.
    """
    if path.stat().st_size != remote.size:
        return False
    if remote.lfs is not None:
        return sha256_file(path) == remote.lfs.sha256
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == remote.blob_id


@contextmanager
def _unwrapped() -> Iterator[None]:
    """huggingface_hub wraps what happens in an upload's threads."""
    try:
        yield
    except RuntimeError as error:
        raise (error.__cause__ or error) from None
