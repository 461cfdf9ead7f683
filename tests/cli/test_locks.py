"""Commands that write into a run's folder wait for no other process: its lock makes them an error."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from outrider.data.files import locked
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.llm.hf_target import HFTarget

from ..commands import call


@pytest.fixture
def run(tiny_target: HFTarget, tmp_path: Path) -> Path:
    """Make a run's folder with a drafter. Its lock file stays when its commands have ended."""
    folder = tmp_path / "run"
    drafter = build_drafter(parse_drafter({"kind": "medusa", "num_heads": 2}), tiny_target)
    save_drafter(drafter, folder / "drafter", tiny_target.identity)
    with locked(folder):
        pass
    return folder


@pytest.mark.parametrize("command", ["tune", "import", "export", "package", "eval"])
def test_a_command_leaves_a_run_alone_in_which_another_process_is_at_work(command, run, tiny_target_dir, tmp_path):
    prompts, theirs = tmp_path / "prompts.jsonl", tmp_path / "theirs"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    target = ("--target", tiny_target_dir)
    few = ("--suite", prompts, "--max-new-tokens", "4", "--dtype", "float32")
    arguments: dict[str, Callable[[], tuple[str | Path, ...]]] = {
        "tune": lambda: ("tune", *target, "--drafter", run / "drafter", "--output", tmp_path / "tuned", *few),
        "import": lambda: ("import", theirs, *target, "--output", run / "imported"),
        "export": lambda: ("export", run / "drafter", *target, "--to", "medusa", "--output", run / "exported"),
        "package": lambda: ("package", run / "drafter", "--output", run / "package"),
        "eval": lambda: ("eval", *target, "--drafter", run / "drafter", "--output", run / "eval2", *few),
    }
    call("export", run / "drafter", *target, "--to", "medusa", "--output", theirs)
    before = sorted(run.rglob("*"))
    lock: AbstractContextManager[None] = locked(run)
    with lock, pytest.raises(ValueError, match=f"another process is at work in {run}"):
        call(*arguments[command]())
    assert sorted(run.rglob("*")) == before


def test_two_tunings_may_not_write_into_one_folder(run: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    with locked(tmp_path / "tuned"), pytest.raises(ValueError, match=f"at work in {tmp_path / 'tuned'}"):
        call(
            *("tune", "--target", tiny_target_dir, "--drafter", run / "drafter", "--suite", prompts, "--no-write"),
            *("--output", tmp_path / "tuned"),
        )
