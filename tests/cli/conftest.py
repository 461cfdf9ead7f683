"""Fixtures of tests of commands: a tiny random drafter, and the command line of a tiny run."""

import json
from pathlib import Path

import pytest

from outrider.cli import samples
from outrider.cli.compose import compose, read_run_line
from outrider.cli.run import run

from ..eval.conftest import tiny_drafter_dir, tiny_target

__all__ = ["tiny_drafter_dir", "tiny_target"]

NUM_PROMPTS = 4


@pytest.fixture
def overrides(tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command line of a tiny run, whose plan measures briefly. Later values replace these."""
    monkeypatch.setattr(samples, "SECONDS", 0.1)
    questions, turns = tmp_path / "question.jsonl", ["Write a line.", "Write it again."]
    prompts = [{"question_id": i, "category": f"c{i}", "turns": turns} for i in range(NUM_PROMPTS)]
    questions.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return [
        "demo",
        f"output_dir={tmp_path / 'run'}",
        f"target.name_or_path={tiny_target_dir}",
        "num_threads=1",
        "data={limit: 5, max_length: 96, prompt_chars: [20, 40]}",
        "distill={horizon: 3, shard_examples: 2}",
        "drafter={exit_width: 16, num_blocks: 1, head_init: random}",
        "train={steps: 3, warmup_steps: 1, batch_size: 2, max_positions: 32, gradient_accumulation: 1}",
        f"eval.suites=[{{name: mt_bench, path: {questions}}}]",
        "eval={max_new_tokens: 12, profile_prompts: 1}",
        "eval.settings=[{beam_width: 2, beam_length: 3}]",
    ]


def run_here(*overrides: str) -> None:
    line = read_run_line(overrides)
    run(compose(line).config(), plan=line.values.get("plan", False))
