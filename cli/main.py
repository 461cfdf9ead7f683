"""The command `outrider`."""

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .certify import certify_command
from .data import app as data_app
from .errors import in_command_words, user_errors
from .eval import eval_command
from .export import export_command, import_command
from .hub import package_command, pull_command, push_command
from .init import init_command
from .reference import options_command, recipes_command
from .report import report_command
from .tune import tune_command


class Commands(TyperGroup):
    """The commands, with a message of ours after Ctrl-C: click would print "Aborted" alone."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        with user_errors(in_command_words):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Train drafters for speculative decoding, and measure them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("init")(init_command)
app.command("recipes")(recipes_command)
app.command("options")(options_command)
app.command("eval")(eval_command)
app.command("certify")(certify_command)
app.command("tune")(tune_command)
app.command("report")(report_command)
app.command("export")(export_command)
app.command("import")(import_command)
app.command("package")(package_command)
app.command("push")(push_command)
app.command("pull")(pull_command)
app.add_typer(data_app, name="data")


@app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def run_command(context: typer.Context) -> None:
    """Run a recipe: outrider run conf=demo train.steps=20, or a file of your own: outrider run my.yaml."""
    from .compose import main as run_recipe  # loads torch and transformers

    sys.argv = ["outrider run", *context.args]
    run_recipe()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """What holds for every command; the docstring that users see is the application's."""


def main() -> None:
    """Run a command; a user's mistake is told in one message."""
    with user_errors():
        app()
