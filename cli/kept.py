"""Finished work in a run's folder, for the message after Ctrl-C."""

from pathlib import Path

from ..data.manifest import MANIFEST_FILE
from ..eval.records.names import RECORDS_FILE
from ..train.checkpoint import latest_checkpoint, step_of
from ..train.results import CHECKPOINTS_DIR
from .config import RunConfig


def describe_kept(config: RunConfig) -> str:
    """Return a sentence on finished shards, last checkpoints, and evaluated answers."""
    folder, parts = Path(config.output_dir), []
    for name, what in (("answers", "answers"), ("distill", "labels")):
        if (folder / name / MANIFEST_FILE).is_file():
            num_shards = len([path for path in (folder / name).glob("*-*.json") if not path.name.endswith(".stats.json")])
            parts += [f"{num_shards} shard{'' if num_shards == 1 else 's'} of {what}"] if num_shards else []
    parts += [
        f"the checkpoint of step {step_of(checkpoint)} of {run.train.steps} ({run.train_dir})"
        for run in config.drafter_runs()
        if (checkpoint := latest_checkpoint(run.train_dir / CHECKPOINTS_DIR)) is not None
    ]
    if (records := folder / "eval" / RECORDS_FILE).is_file():
        with records.open("rb") as file:
            num_answers = sum(1 for _ in file)
        parts += [f"{num_answers} evaluated answer{'' if num_answers == 1 else 's'}"] if num_answers else []
    return f"Kept in {folder}: {', '.join(parts) or 'nothing yet'}."
