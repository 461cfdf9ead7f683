"""The entry of train.py: Hydra composes the recipe that the command line names, and its stages run.

This module imports no torch, so that `--help` and `--cfg job` answer at once.
"""

import re
import sys

import hydra
from omegaconf import DictConfig

from .config import register, to_run_config
from .errors import user_errors

PATH_OPTIONS = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun")
"""Options of Hydra whose value may contain `=`."""

register()


def main() -> None:
    """Compose the recipe that the command line names, and run it. `--plan` is short for plan=true."""
    sys.argv = ["plan=true" if argument == "--plan" else argument for argument in sys.argv]
    sys.argv[1:] = overrides_first(sys.argv[1:])
    _compose_and_run()


def overrides_first(arguments: list[str]) -> list[str]:
    """Move overrides before the options: Hydra's parser refuses them after an option such as `--cfg job`."""
    options = {
        index
        for index, argument in enumerate(arguments)
        if argument.startswith("-") or not re.search("^~|=", argument) or (index and arguments[index - 1] in PATH_OPTIONS)
    }
    return [arguments[index] for index in sorted(range(len(arguments)), key=options.__contains__)]


@hydra.main(version_base="1.3", config_path="pkg://outrider.conf", config_name="config")
def _compose_and_run(composed: DictConfig) -> None:
    with user_errors():
        from .run import run  # imports torch, transformers and all stages

        run(to_run_config(composed))
