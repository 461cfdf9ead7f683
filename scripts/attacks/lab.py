"""The undamaged run that attacks start from: the whole pipeline, as small as it can be."""

import contextlib
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .cases import outrider

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write a line.", "Write it again."]},
    {"question_id": 82, "category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]},
]
NUM_STEPS = 3
TARGET = Path(__file__).parents[2] / "models" / "demo_target"
WARM_PACKAGES = {
    "PIL", "accelerate", "datasets", "deepspeed", "hydra", "huggingface_hub", "jinja2", "matplotlib", "omegaconf", "outrider",
    "pandas", "pydantic", "rich", "safetensors", "sklearn", "torch", "transformers", "typer", "yaml",
}  # fmt: skip
"""Packages whose modules are imported before processes are forked."""


def run_options(folder: Path) -> list[str]:
    """Return the options of a tiny run of the demo's target, whose prompts lie in `folder`."""
    return [
        "num_threads=1",
        "data={limit: 5, max_length: 96, prompt_chars_min: 20, prompt_chars_max: 40}",
        "distill={mode: regenerate, max_new_tokens: 24, horizon: 3, shard_examples: 3}",
        "drafter={exit_width: 16, num_blocks: 1, head_init: random}",
        f"train={{steps: {NUM_STEPS}, warmup_steps: 1, batch_size: 2, max_positions: 32}}",
        "train={validation_texts: 2, validation_tokens: 8}",
        f"eval.suites=[{{name: mt_bench, path: {folder / 'questions.jsonl'}}}]",
        "eval={max_new_tokens: 12, profile_prompts: 1, memory_bandwidth_gbs: 10.0, baselines: [prompt_lookup], merge: []}",
        "eval.settings=[{beam_width: 2, beam_length: 3}]",
    ]


def finished_run(folder: Path) -> Path:
    """Return the folder of the finished tiny run, which is made at the first call.

    Its modules are then imported here too, so that forked processes start warm.
    """
    finished, modules = folder / "run", folder / "modules.json"
    if not modules.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        in_child(partial(_run_and_list, folder, modules), folder)
    for name in json.loads(modules.read_text()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return finished


def _run_and_list(folder: Path, modules: Path) -> None:
    """Make the run, and list the modules that it has imported."""
    run(folder / "run", folder)
    names = [name for name in list(sys.modules) if name.split(".")[0] in WARM_PACKAGES]
    modules.write_text(json.dumps(names))


def run(output_dir: Path, folder: Path, *changes: str) -> None:
    """Run the tiny recipe into `output_dir`, with the prompts in `folder`."""
    outrider("run", "demo", *run_options(folder), f"output_dir={output_dir}", *changes)


def in_child(work: Callable[[], None], folder: Path) -> None:
    """Do the work in a forked process, so that this one starts no thread; it prints into `folder`.

    Raises RuntimeError where it fails.
    """
    log = folder / "log"
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            work()
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError(f"the undamaged run failed: {log.read_text()[-2000:]}")
