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
    directory: Annotated[Path, typer.Argument(help="A folder of shards: what the stage distill wrote.")],
    target: Annotated[str | None, typer.Option(help="Also: is this the target (a directory or a Hub id) they are of?")] = None,
) -> None:
    """Read every byte of the shards and tell all that is wrong with them. Exits with 1 where anything is."""
    from ..data.verify import find_damage  # loads torch

    manifest, problems = find_damage(directory)
    if target is not None:
        from ..models.target import load_target

        try:
            manifest.require_target(load_target(target).identity)
        except ValueError as error:
            problems.append(str(error))
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(1)
    num_examples = sum(len(shard.ids) for shard in manifest.shards)
    num_bytes = sum(shard.num_bytes for shard in manifest.shards)
    typer.echo(
        f"{len(manifest.shards)} shards are whole: {num_examples} examples, {manifest.num_tokens} tokens, "
        f"{manifest.num_labels} labelled positions of horizon {manifest.horizon}, {num_bytes / 1e6:.1f} MB, of the target "
        f"{manifest.target.name}"
    )
