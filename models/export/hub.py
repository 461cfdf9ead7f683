"""Upload of drafters to the Hub, and download, through huggingface_hub.

The token is that of HF_TOKEN or `hf auth`. A push deletes or replaces files only on request: it
raises ValueError if the branch holds other files than the folder. The new commit has the inspected
commit as its parent, or isn't made at all.
"""

import hashlib
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import httpx

from ...data.files import replacing_directory, sha256_file
from ..drafters.saved.download import telling_hub_errors
from .bundle import FOLDER, LICENCE_FILE, REQUIREMENTS_FILE
from .package import ALLOWED, package_files, require_new

logger = logging.getLogger(__name__)

KEPT_FILES = frozenset({".gitattributes"})
"""Files that the Hub adds to every repository."""
MAIN = "main"
MOST_NAMED = 8
"""Largest number of files in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """Result of a push."""

    url: str
    commit: str
    private: bool
    """Whether the repository is private. A push doesn't change this for an existing one."""
    added: list[str]
    """Files that are new or changed. It is empty if the branch held all of them already; then there
    is no commit."""
    deleted: list[str]


def push(
    folder: Path, repo: str, *, public: bool = False, revision: str | None = None, overwrite: bool = False, message: str = ""
) -> Pushed:
    """Upload a folder (see `package_files`) to a branch of a repository.

    A missing repository or branch is created; a new repository is private unless `public`. With
    `overwrite`, and on a new branch, the branch then holds these files alone.

    Raises ValueError for a folder with files that must not be shared, for a branch with different
    files, and if the Hub rejects the upload or can't be reached.
    """
    # 1. Create the repository and the branch if they are missing.
    files, api, branch = package_files(folder), HfApi(), revision or MAIN
    with telling_hub_errors(repo), _unwrapped():
        try:
            api.model_info(repo)
        except RepositoryNotFoundError:  # also for one without access: then the Hub refuses to create it
            api.create_repo(repo, private=not public, exist_ok=True)
        fresh = False
        try:
            info = api.model_info(repo, revision=branch)
        except RevisionNotFoundError:
            api.create_branch(repo, branch=branch)
            info, fresh = api.model_info(repo, revision=branch), True
        assert info.sha is not None

        # 2. Compare the branch with the folder.
        remote = _files_of(api, repo, info.sha)
        changed = [name for name, path in files.items() if name not in remote or not _is_same(path, remote[name])]
        extra = sorted(remote.keys() - files.keys())
        if not fresh and not overwrite and (differing := sorted((set(changed) & remote.keys()) | set(extra))):
            more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
            raise ValueError(
                f"the branch {branch} of {repo} holds other files than {folder}: {', '.join(differing[:MOST_NAMED])}{more}. "
                "Push to a new branch (--revision NAME), or replace these files (--overwrite; the history keeps them)"
            )

        # 3. Commit the changes.
        private = bool(info.private)
        commit = info.sha
        if changed or extra:
            operations: list[CommitOperationAdd | CommitOperationDelete] = [
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=files[name]) for name in changed),
                *(CommitOperationDelete(path_in_repo=name) for name in extra),
            ]
            try:
                created = api.create_commit(
                    repo, operations, commit_message=message or "Upload drafter", revision=branch, parent_commit=info.sha
                )
            except BaseException:
                if fresh:  # its copies of main's files would make the next push fail
                    _remove(api, repo, branch)
                raise
            commit = created.oid
            _require_there(api, repo, commit, files)
        return Pushed(url=f"{api.endpoint}/{repo}/tree/{branch}", commit=commit, private=private, added=changed, deleted=extra)


def pull(repo: str, output: Path, revision: str | None = None) -> str:
    """Download a drafter's folder atomically, with its code, which isn't run.

    Returns the commit. Raises ValueError for an output folder that isn't empty, and if the
    repository holds no drafter or can't be read.
    """
    require_new(output)
    patterns = [*ALLOWED, "*.safetensors", *(f"{FOLDER}/{name}" for name in ("*.py", LICENCE_FILE, REQUIREMENTS_FILE))]
    with telling_hub_errors(repo, revision), replacing_directory(output) as folder:
        commit = HfApi().model_info(repo, revision=revision).sha
        assert commit is not None
        snapshot_download(repo, revision=commit, local_dir=folder, allow_patterns=patterns, ignore_patterns=["*/*.safetensors"])
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # huggingface_hub's records of the download
        package_files(folder, called=f"{repo} at commit {commit}")
    return commit


def _remove(api: HfApi, repo: str, branch: str) -> None:
    """Delete a branch that a failed push has created, if possible.

    Errors are only logged, since the failure of the push matters more.
    """
    try:
        api.delete_branch(repo, branch=branch)
    except (HfHubHTTPError, httpx.TransportError, OfflineModeIsEnabled):
        logger.warning(
            "the branch %s of %s, created for this push, couldn't be deleted and holds the files of %s: push there with "
            "--overwrite",
            *(branch, repo, MAIN),
        )


def _files_of(api: HfApi, repo: str, commit: str) -> dict[str, RepoFile]:
    tree = api.list_repo_tree(repo, revision=commit, recursive=True)
    return {file.path: file for file in tree if isinstance(file, RepoFile) and file.path not in KEPT_FILES}


def _require_there(api: HfApi, repo: str, commit: str, files: dict[str, Path]) -> None:
    """Raise ValueError if a commit lacks a file, or has a different one.

    The Hub leaves out the files that a repository's .gitignore lists. A file may also change during
    its upload.
    """
    remote = _files_of(api, repo, commit)
    if wrong := [name for name, path in files.items() if name not in remote or not _is_same(path, remote[name])]:
        raise ValueError(
            f"commit {commit} of {repo} was made, but these files differ from the local ones: {', '.join(wrong[:MOST_NAMED])}. "
            "They changed during the upload, or the repository's .gitignore lists them; correct that, and push again with "
            "--overwrite"
        )


def _is_same(path: Path, remote: RepoFile) -> bool:
    """Check whether the Hub's file has the same content.

    The Hub reports SHA-256 for large files, and git's digest for others.
    """
    if path.stat().st_size != remote.size:
        return False
    if remote.lfs is not None:
        return sha256_file(path) == remote.lfs.sha256
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == remote.blob_id


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Unwrap the errors that huggingface_hub wraps in an upload's threads."""
    try:
        yield
    except RuntimeError as error:
        raise (error.__cause__ or error) from None
