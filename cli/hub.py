"""`outrider package`, `push` and `pull`: share drafters on the Hub."""

import tempfile
from pathlib import Path
from typing import ClassVar

from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS
from ..eval.config import CardOptions


@dataclass(kw_only=True, config=OPTIONS)
class PackageOptions(CardOptions):
    """Options of `outrider package`."""

    drafter: str
    """A drafter's directory: the `drafter/` folder of a run; or DIR+suffix+recycling."""
    output: Path
    """The folder to write."""

    POSITIONAL: ClassVar = ("drafter",)


def package_command(options: PackageOptions) -> None:
    """Write a drafter's folder for the Hub.

    The folder has the drafter, a model card, and code to decode with plain transformers. Nothing
    is uploaded: `outrider push` does that.
    """
    from ..data.files import guarded
    from ..eval.report.card import model_card
    from ..models.drafters.saved.parts import parse_drafter_name
    from ..models.export.package import make_package, package_files

    # 1. Write the card from the evaluations and the run.
    parts, output = parse_drafter_name(options.drafter), options.output
    card = model_card(parts, options)

    # 2. Write the folder, and list it.
    with guarded(output):
        make_package(parts, output, card, options.certificate)
    _print_files(package_files(output))
    _print_names_left_open(card)
    print(f'model.generate(..., custom_generate="{output}", trust_remote_code=True) decodes with it')


@dataclass(kw_only=True, config=OPTIONS)
class PushOptions:
    """Options of `outrider push`."""

    folder: Path
    """Folder of `outrider package`, or a drafter's directory."""
    repo: str
    """The repository on the Hub: user/name. Created if missing."""
    public: bool = False
    """Create the repository as public. Default: private."""
    revision: str | None = None
    """The branch, created if missing. null: main."""
    overwrite: bool = False
    """Replace the branch's files."""
    dry_run: bool = False
    """Only list the files to upload, without network."""
    message: str = ""
    """Message of the commit."""

    POSITIONAL: ClassVar = ("folder", "repo")


def push_command(options: PushOptions) -> None:
    """Upload a drafter to the Hub.

    A drafter's directory is packaged first, as `outrider package` does without options. Log in with
    `hf auth login`, or set HF_TOKEN.
    """
    from huggingface_hub.utils import validate_repo_id

    from ..models.drafters.saved.download import telling_hub_errors
    from ..models.drafters.saved.folder import HUB_ID
    from ..models.drafters.saved.low_rank import require_shared_base
    from ..models.export.package import CERTIFICATE_FILE, README_FILE, package_files, read_certificate

    folder, repo, revision, public = options.folder, options.repo, options.revision, options.public
    require_shared_base(folder)
    if HUB_ID.fullmatch(repo) is None or "@" in repo:
        raise ValueError(f"{repo!r} is not the name of a repository; give user/name")
    with telling_hub_errors(repo):
        validate_repo_id(repo)

    # 1. List the files. An export is pushed as it is, unless it has a pickle.
    with tempfile.TemporaryDirectory() as temporary:
        package = _package(folder, Path(temporary) / "package", repo) if _is_bare_drafter(folder) else folder
        files = package_files(package)
        _print_files(files)
        card = files.get(README_FILE)
        if card is not None:
            _print_names_left_open(card.read_text(encoding="utf-8"))
        if CERTIFICATE_FILE in files and not read_certificate(files[CERTIFICATE_FILE]).passed:
            print(f"{CERTIFICATE_FILE}: decoding with this drafter is NOT LOSSLESS")
        visibility = "public" if public else "private"
        if options.dry_run:
            print(f"dry run: nothing was uploaded to {repo} ({visibility} if it is created, branch {revision or 'main'})")
            return
        from ..models.export.hub import push

        # 2. Upload, and report the difference.
        pushed = push(package, repo, public=public, revision=revision, overwrite=options.overwrite, message=options.message)
    if not pushed.added and not pushed.deleted:
        visibility = "private" if pushed.private else "public"
        print(f"{pushed.url} ({visibility}) has all these files already, at commit {pushed.commit}")
    else:
        deleted = f", {len(pushed.deleted)} deleted" if pushed.deleted else ""
        print(f"{len(pushed.added)} files uploaded{deleted}: {pushed.url}, commit {pushed.commit}")
    if public and pushed.private:
        print("the repository existed before, and stays private; change that in its settings on the Hub")


@dataclass(kw_only=True, config=OPTIONS)
class PullOptions:
    """Options of `outrider pull`."""

    repo: str
    """The repository on the Hub: user/name."""
    output: Path
    """The folder to write."""
    revision: str | None = None
    """Branch, tag or commit. null: main."""

    POSITIONAL: ClassVar = ("repo",)


def pull_command(options: PullOptions) -> None:
    """Download a drafter's folder from the Hub. Its code is downloaded too, but not run.

    To evaluate a drafter, no pull is needed: `outrider eval --drafter user/name` downloads the
    files that it reads.
    """
    from ..data.files import guarded
    from ..models.export.hub import pull

    with guarded(options.output):
        commit = pull(options.repo, options.output, options.revision)
    print(f"{options.output}: {options.repo} at commit {commit}")


def _is_bare_drafter(folder: Path) -> bool:
    from ..models.drafters.saved.folder import read_drafter_config
    from ..models.export.package import is_package

    try:
        return not is_package(folder) and bool(read_drafter_config(folder))
    except ValueError:
        return False


def _package(drafter: Path, output: Path, repo: str) -> Path:
    """Write the Hub folder of a drafter's directory, and print the files that are left out."""
    from ..eval.report.card import model_card
    from ..models.drafters.saved.download import READ_FILES
    from ..models.export.package import make_package

    make_package(drafter, output, model_card(drafter, CardOptions(repo=repo)))
    if left_out := sorted(path.name for path in drafter.iterdir() if path.name not in READ_FILES):
        print(
            f"left out: {', '.join(left_out)}. `outrider package` takes a certificate, and writes a README.md that you may "
            "change before you push its folder"
        )
    return output


def _print_names_left_open(card: str) -> None:
    from ..models.export.package import names_left_open

    for line in names_left_open(card):
        print(line)


def _print_files(files: dict[str, Path]) -> None:
    for name, path in files.items():
        print(f"{path.stat().st_size:>13,}  {name}")
    print(f"{sum(path.stat().st_size for path in files.values()):>13,}  bytes in {len(files)} files")
