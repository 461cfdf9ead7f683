"""Conversations, prompts, shards and batches. Imports no other package of outrider.

Each package calls `require_entry`, a guard for `python -m outrider.PACKAGE.MODULE`: without it, Python
would import the module, do nothing and exit with 0.
"""

import sys

ENTRIES = ("outrider.train", "outrider.cli", "outrider.cli.launch")
"""Packages and modules that `python -m` and `accelerate launch -m` may run."""
COMMANDS = {
    "train": "accelerate launch -m outrider.train conf=RECIPE",
    "distill": "outrider run conf=RECIPE stages=[distill]",
    "eval": "outrider eval --help",
    "data": "outrider data verify --help",
    "models": "outrider --help",
    "cli.run": "outrider run conf=RECIPE",
    "cli.compose": "outrider run conf=RECIPE",
}
"""The command to use instead, by module or by the package that holds it."""


def require_entry() -> None:
    """Exit with an error if Python is about to run a module of outrider that is no entry.

    Packages call this when they are imported. While `python -m` imports the parents of the module
    that it will run, sys.argv[0] is "-m".
    """
    if sys.argv[:1] != ["-m"]:
        return
    flags = [index for index, argument in enumerate(sys.orig_argv) if argument.startswith("-") and argument.endswith("m")]
    module = sys.orig_argv[flags[0] + 1] if flags else ""
    top, _, rest = module.partition(".")
    if top == "outrider" and module.removesuffix(".__main__") not in ENTRIES:
        command = COMMANDS.get(rest, COMMANDS.get(rest.partition(".")[0], "outrider --help"))
        raise SystemExit(f"outrider: error: {module} is no program: running it would do nothing. Use: {command}")


require_entry()
