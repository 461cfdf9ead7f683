"""The entry of train.py: Hydra composes the recipe that the command line names, and its stages run.

This module imports no torch, so that `--help` and `--cfg job` answer at once.
"""

import sys

import hydra
from omegaconf import DictConfig

from .config import register, to_run_config
from .errors import user_errors

register()


def main() -> None:
    """Compose the recipe that the command line names, and run it. `--plan` is short for plan=true."""
    sys.argv = ["plan=true" if argument == "--plan" else argument for argument in sys.argv]
    _compose_and_run()


@hydra.main(version_base="1.3", config_path="pkg://outrider.conf", config_name="config")
def _compose_and_run(composed: DictConfig) -> None:
    with user_errors():
        from .run import run  # imports torch, transformers and all stages

        run(to_run_config(composed))
