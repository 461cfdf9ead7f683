"""`outrider data`: folders of distilled data."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look after distilled data.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """What holds for every command; the help that users see is the application's."""


@app.command("verify")
def verify_command(
    directory: Annotated[Path, typer.Argument(help="What the stage distill wrote: a folder of shards, or of answers.")],
    target: Annotated[str | None, typer.Option(help="Also: is this the target (a directory or a Hub id) they are of?")] = None,
) -> None:
    """Read every byte of a folder and tell all that is wrong with it. Exits with 1 where anything is."""
    # They load torch.
    from ..data.manifest import MANIFEST_FILE, TargetIdentity
    from ..data.shards import label_store
    from ..distill.regenerate.answers import answer_store, is_answers

    if not directory.is_dir():
        raise ValueError(f"{directory} is {'no folder' if directory.exists() else 'not there'}; name one that distill wrote")
    stages = [each for each in ("distill", "answers") if (directory / each / MANIFEST_FILE).exists()]
    if stages and not (directory / MANIFEST_FILE).exists():
        raise ValueError(f"{directory} is a run's folder; verify {' and '.join(str(directory / each) for each in stages)}")
    identity: TargetIdentity
    if is_answers(directory):
        answers, problems = answer_store(directory).find_damage()
        identity, num_tokens = answers.target, sum(entry.counts.num_tokens for entry in answers.shards)
        num_answers = sum(entry.counts.num_answers for entry in answers.shards)
        summary = f"{len(answers.shards)} shards are whole: {num_answers} answers of {num_tokens} tokens"
    else:
        manifest, problems = label_store(directory).find_damage()
        identity, num_bytes = manifest.target, sum(shard.num_bytes for shard in manifest.shards)
        summary = (
            f"{len(manifest.shards)} shards are whole: {sum(len(shard.ids) for shard in manifest.shards)} examples, "
            f"{manifest.num_tokens} tokens, {manifest.num_labels} labelled positions of horizon {manifest.horizon}, "
            f"{num_bytes / 1e6:.1f} MB"
        )
    if target is not None:
        from ..models.target.loading import load_target

        if changes := identity.differences(load_target(target).identity):
            problems.append(
                f"they are of the target {identity.name!r} (revision {identity.revision}) and not of {target}; differing: "
                f"{'; '.join(changes)}"
            )
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{summary}, of the target {identity.name}")
