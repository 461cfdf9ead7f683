"""`outrider package`, `push` and `pull`: share drafters on the Hub."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from .options import parse_quantization, take_paths


def package_command(
    drafter: Annotated[
        str, typer.Argument(help="A drafter's directory: the `drafter/` folder of a run; or DIR+suffix+recycling.")
    ],
    output: Annotated[Path, typer.Option(help="The folder to write.")],
    records: Annotated[
        list[Path] | None, typer.Option(help="Folder of an evaluation; its figures go into the model card. Repeat.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the training run; its data and cost go into the card.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="Certificate that `outrider certify` wrote.")] = None,
    licence: Annotated[
        str | None, typer.Option("--licence", "--license", help="The drafter's licence, by the Hub's name: apache-2.0.")
    ] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the target, if training read it from a directory.")] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="Quantisation of the target in the card's code (as in outrider eval). Default: as in training."),
    ] = None,
    repo: Annotated[str | None, typer.Option(help="Hub id of the drafter, for the card's commands.")] = None,
) -> None:
    """Write a drafter's folder for the Hub.

    The folder has the drafter, a model card, and code to decode with plain transformers. Nothing
    is uploaded: `outrider push` does that.
    """
    paths = take_paths({**locals()}, drafter="DRAFTER")
    drafter, output, records, run, certificate = (
        paths[name] for name in ("drafter", "output", "records", "run", "certificate")
    )
    # 1. Write the card from the evaluations and the run.
    from ..data.files import guarded
    from ..eval.report.card import model_card
    from ..eval.report.card_options import CardOptions
    from ..models.drafters.saved.parts import parse_drafter_name
    from ..models.export.package import make_package, package_files

    parts = parse_drafter_name(drafter)
    options = CardOptions(
        evaluations=records or (),
        run=run,
        certificate=certificate,
        licence=licence,
        base_model=base_model,
        quantization=parse_quantization(quantization),
        repo=repo,
    )
    card = model_card(parts, options)

    # 2. Write the folder, and list it.
    with guarded(output):
        make_package(parts, output, card, certificate)
    _print_files(package_files(output))
    _print_names_left_open(card)
    typer.echo(f'model.generate(..., custom_generate="{output}", trust_remote_code=True) decodes with it')


def push_command(
    folder: Annotated[Path, typer.Argument(help="Folder of `outrider package`, or a drafter's directory.")],
    repo: Annotated[str, typer.Argument(help="The repository on the Hub: user/name. Created if missing.")],
    public: Annotated[bool, typer.Option("--public", help="Create the repository as public. Default: private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch, created if missing. Default: main.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the branch's files.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files to upload, without network.")] = False,
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "",
) -> None:
    """Upload a drafter to the Hub.

    A drafter's directory is packaged first, as `outrider package` does without options. Log in with
    `hf auth login`, or set HF_TOKEN.
    """
    from huggingface_hub.utils import validate_repo_id

    from ..models.drafters.saved.download import HUB_ID, telling_hub_errors
    from ..models.export.certificate_file import read_certificate
    from ..models.export.package import CERTIFICATE_FILE, README_FILE, package_files

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
            typer.echo(f"{CERTIFICATE_FILE}: decoding with this drafter is NOT LOSSLESS")
        visibility = "public" if public else "private"
        if dry_run:
            typer.echo(f"dry run: nothing was uploaded to {repo} ({visibility} if it is created, branch {revision or 'main'})")
            return
        from ..models.export.hub import push

        # 2. Upload, and report the difference.
        pushed = push(package, repo, public=public, revision=revision, overwrite=overwrite, message=message)
    if not pushed.added and not pushed.deleted:
        visibility = "private" if pushed.private else "public"
        typer.echo(f"{pushed.url} ({visibility}) has all these files already, at commit {pushed.commit}")
    else:
        deleted = f", {len(pushed.deleted)} deleted" if pushed.deleted else ""
        typer.echo(f"{len(pushed.added)} files uploaded{deleted}: {pushed.url}, commit {pushed.commit}")
    if public and pushed.private:
        typer.echo("the repository existed before, and stays private; change that in its settings on the Hub")


def pull_command(
    repo: Annotated[str, typer.Argument(help="The repository on the Hub: user/name.")],
    output: Annotated[Path, typer.Option(help="The folder to write.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit. Default: main.")] = None,
) -> None:
    """Download a drafter's folder from the Hub. Its code is downloaded too, but not run.

    To evaluate a drafter, no pull is needed: `outrider eval --drafter user/name` downloads the
    files that it reads.
    """
    from ..data.files import guarded
    from ..models.export.hub import pull

    with guarded(output):
        commit = pull(repo, output, revision)
    typer.echo(f"{output}: {repo} at commit {commit}")


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
    from ..eval.report.card_options import CardOptions
    from ..models.drafters.saved.download import READ_FILES
    from ..models.export.package import make_package

    make_package(drafter, output, model_card(drafter, CardOptions(repo=repo)))
    if left_out := sorted(path.name for path in drafter.iterdir() if path.name not in READ_FILES):
        typer.echo(
            f"left out: {', '.join(left_out)}. `outrider package` takes a certificate, and writes a README.md that you may "
            "change before you push its folder"
        )
    return output


def _print_names_left_open(card: str) -> None:
    from ..models.export.package import names_left_open

    for what, option in names_left_open(card):
        flag = f"--{option.replace('_', '-')}"
        typer.echo(f"the card names {what} by a local folder: `outrider package {flag} user/name` writes its name on the Hub")


def _print_files(files: dict[str, Path]) -> None:
    for name, path in files.items():
        typer.echo(f"{path.stat().st_size:>13,}  {name}")
    typer.echo(f"{sum(path.stat().st_size for path in files.values()):>13,}  bytes in {len(files)} files")
