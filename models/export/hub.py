"""Upload of drafters to the Hub, and download, through huggingface_hub.

The token is that of HF_TOKEN or `hf auth`. A push deletes or replaces files only on request: it
raises ValueError if the branch holds other files than the folder. The new commit has the inspected
commit as its parent, or isn't made at all.
"""

import glob
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.hf_api import RepoFile

from ...data.fields import first_of
from ...data.files import replacing_directory, sha256_file
from ..drafters.saved.download import telling_hub_errors
from .bundle import FOLDER, LICENCE_FILE, REQUIREMENTS_FILE
from .package import ALLOWED, package_files, require_new

KEPT_FILES = frozenset({".gitattributes"})
"""Files that the Hub adds to every repository."""
MAIN = "main"


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
        if not api.repo_exists(repo):  # also for one without access: then the Hub refuses to create it
            api.create_repo(repo, private=not public, exist_ok=True)
        if not api.revision_exists(repo, branch):
            api.create_branch(repo, branch=branch)
        main, info = api.model_info(repo), api.model_info(repo, revision=branch)
        assert info.sha is not None

        # 2. Compare the branch with the folder. A branch at main's commit has no content of its own.
        remote = _files_of(api, repo, info.sha)
        changed = [name for name, path in files.items() if name not in remote or not _is_same(path, remote[name])]
        extra = sorted(remote.keys() - files.keys())
        is_new = branch != MAIN and info.sha == main.sha
        if not is_new and not overwrite and (differing := sorted((set(changed) & remote.keys()) | set(extra))):
            raise ValueError(
                f"the branch {branch} of {repo} holds other files than {folder}: {first_of(differing)}. "
                "Push to a new branch (--revision NAME), or replace these files (--overwrite; the history keeps them)"
            )

        # 3. Commit the changes, unless somebody else commits in between.
        commit = info.sha
        if changed or extra:
            commit = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                revision=branch,
                allow_patterns=[glob.escape(name) for name in files],
                delete_patterns="*",
                commit_message=message or "Upload drafter",
                parent_commit=info.sha,
            ).oid
    url = f"{api.endpoint}/{repo}/tree/{branch}"
    return Pushed(url=url, commit=commit, private=bool(info.private), added=changed, deleted=extra)


def pull(repo: str, output: Path, revision: str | None = None) -> str:
    """Download a drafter's folder atomically, with its code, which isn't run.

    Returns the commit. Raises ValueError for an output folder that isn't empty, and if the
    repository holds no drafter or can't be read.
    """
    patterns = [*ALLOWED, "*.safetensors", *(f"{FOLDER}/{name}" for name in ("*.py", LICENCE_FILE, REQUIREMENTS_FILE))]
    with telling_hub_errors(repo, revision), replacing_directory(output) as folder:
        require_new(output)
        commit = HfApi().model_info(repo, revision=revision).sha
        assert commit is not None
        snapshot_download(repo, revision=commit, local_dir=folder, allow_patterns=patterns, ignore_patterns=["*/*.safetensors"])
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # huggingface_hub's records of the download
        package_files(folder, called=f"{repo} at commit {commit}")
    return commit


def _files_of(api: HfApi, repo: str, commit: str) -> dict[str, RepoFile]:
    tree = api.list_repo_tree(repo, revision=commit, recursive=True)
    return {file.path: file for file in tree if isinstance(file, RepoFile) and file.path not in KEPT_FILES}


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
