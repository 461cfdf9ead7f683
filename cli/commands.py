"""The table of commands. Their modules are imported only when they run."""

import typing
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command as `outrider --help` lists it."""

    panel: str
    summary: str
    function: str
    """Module and function. The function's parameter `options` is the command's configuration."""


START, TRAIN, EVALUATE, EXPORT = "Start", "Distil and train (a recipe runs all four stages)", "Evaluate", "Export"
COMMANDS = {
    "init": Command(START, "Write a commented recipe for your target and data.", "init:init_command"),
    "recipes": Command(START, "List the recipes that ship with outrider.", "reference:recipes_command"),
    "options": Command(START, "List the options of recipes.", "reference:options_command"),
    "run": Command(TRAIN, "Run a recipe (outrider run demo train.steps=20) or your own file.", "compose:run_command"),
    "forecast": Command(TRAIN, "Forecast speed and cost of a recipe before it is run.", "compose:forecast_command"),
    "data verify": Command(TRAIN, "Read a folder of distilled data, and print each problem.", "data:verify_command"),
    "data suite": Command(TRAIN, "Draw prompts for evaluations from your conversations.", "data:suite_command"),
    "chat": Command(EVALUATE, "Talk with a target and a drafter in the terminal.", "chat:chat_command"),
    "eval": Command(EVALUATE, "Measure the speedup of drafters against plain decoding.", "eval:eval_command"),
    "certify": Command(EVALUATE, "Certify that decoding is lossless.", "certify:certify_command"),
    "check-server": Command(EVALUATE, "Check a running server's text, drafts and speed.", "check_server:check_server_command"),
    "tune": Command(EVALUATE, "Find a drafter's fastest settings on this machine.", "tune:tune_command"),
    "explain": Command(EVALUATE, "Say why an evaluation's drafts end, and what could be won.", "explain:explain_command"),
    "adopt": Command(EVALUATE, "Put a new drafter in an old one's place, if it is better.", "adopt:adopt_command"),
    "watch": Command(EVALUATE, "Say whether a server's drafts are accepted as before, by its log.", "watch:watch_command"),
    "report": Command(EVALUATE, "Write tables and figures of evaluations.", "eval:report_command"),
    "export": Command(EXPORT, "Write a drafter in a serving engine's format.", "export:export_command"),
    "import": Command(EXPORT, "Convert a published drafter.", "export:import_command"),
    "package": Command(EXPORT, "Write a drafter's folder for the Hub.", "hub:package_command"),
    "push": Command(EXPORT, "Upload a drafter to the Hub.", "hub:push_command"),
    "pull": Command(EXPORT, "Download a drafter from the Hub.", "hub:pull_command"),
}


def function_of(name: str) -> Callable[..., Any]:
    """Return the function of a command. Its module is imported only now."""
    module, _, function = COMMANDS[name].function.partition(":")
    return typing.cast(Callable[..., Any], getattr(import_module(f".{module}", __package__), function))
