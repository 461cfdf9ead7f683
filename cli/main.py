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
from .launch import own_arguments
from .reference import options_command, recipes_command
from .report import report_command
from .tune import tune_command


class Commands(TyperGroup):
    """Command group with our message after Ctrl-C, where click would only print "Aborted".

    The help of its commands is plain: rich's tables cut long names of options at 80 columns.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command with plain help."""
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None:
            command.rich_markup_mode = None
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        with user_errors(in_command_words):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Train drafters for speculative decoding, and measure them. To start: outrider run demo, or "
    "outrider init my.yaml --target DIR_OR_ID --data FILE",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
START, DISTIL = "Start", "Distil and train (a recipe runs all four stages)"
EVALUATE, EXPORT = "Evaluate", "Export"
app.command("init", rich_help_panel=START)(init_command)
app.command("recipes", rich_help_panel=START)(recipes_command)
app.command("options", rich_help_panel=START)(options_command)


@app.command(
    "run",
    rich_help_panel=DISTIL,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def run_command(context: typer.Context) -> None:
    """Run a recipe (outrider run demo train.steps=20) or your own file (outrider run my.yaml)."""
    from .compose import main as run_recipe  # loads Hydra and the schema

    sys.argv = ["outrider run", *context.args]
    run_recipe()


app.add_typer(data_app, name="data", rich_help_panel=DISTIL)
app.command("eval", rich_help_panel=EVALUATE)(eval_command)
app.command("certify", rich_help_panel=EVALUATE)(certify_command)
app.command("tune", rich_help_panel=EVALUATE)(tune_command)
app.command("report", rich_help_panel=EVALUATE)(report_command)
app.command("export", rich_help_panel=EXPORT)(export_command)
app.command("import", rich_help_panel=EXPORT)(import_command)
app.command("package", rich_help_panel=EXPORT)(package_command)
app.command("push", rich_help_panel=EXPORT)(push_command)
app.command("pull", rich_help_panel=EXPORT)(pull_command)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"outrider {version('outrider')}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Declare the options before the command. Users see the application's help, not this text."""


def main() -> None:
    """Run a command. A user's mistake is printed as one message."""
    with user_errors():
        app(own_arguments(sys.argv[1:]))
