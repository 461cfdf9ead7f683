"""Ends of a command: one message, the exit status, and the command that resumes."""

import logging
import sys
from pathlib import Path

import pytest

from outrider.cli.compose import load_recipe
from outrider.cli.errors import (
    COMMAND_VARIABLE,
    INTERRUPTED,
    NOISY_LOGGERS,
    command_line,
    silence_libraries,
    starts_again,
    user_errors,
)
from outrider.cli.run import describe_kept

from ..conftest import REPOSITORY


def test_ctrl_c_is_one_message_with_the_command_that_resumes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/some/bin/outrider", "run", "conf=demo", "data={limit: 5}"])
    with pytest.raises(SystemExit) as ended, user_errors():
        raise KeyboardInterrupt
    assert ended.value.code == INTERRUPTED == 130
    printed = capsys.readouterr().err
    assert "outrider run conf=demo 'data={limit: 5}'" in printed
    assert "Traceback" not in printed


def test_the_command_that_started_this_one_is_the_one_to_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo` runs accelerate, whose options this process can't know."""
    monkeypatch.setattr(sys, "argv", ["/some/train.py", "conf=demo"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert command_line() == "accelerate launch ... /some/train.py conf=demo"
    monkeypatch.setenv(COMMAND_VARIABLE, "make demo OUTPUT=here")
    assert command_line() == "make demo OUTPUT=here"
    # Only this line of the Makefile sets the variable.
    line = next(line for line in (REPOSITORY / "Makefile").read_text().splitlines() if COMMAND_VARIABLE in line)
    assert f'{COMMAND_VARIABLE}="make demo$(if $(OUTPUT), OUTPUT=$(OUTPUT))$(if $(THREADS), THREADS=$(THREADS))"' in line


def test_ctrl_c_in_a_command_that_cant_resume_starts_again(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["outrider", "tune"])
    with pytest.raises(SystemExit), user_errors(), starts_again("tuning"):
        raise KeyboardInterrupt
    printed = capsys.readouterr().err
    assert "Nothing of the tuning is kept" in printed
    assert "To start again, run the same command: outrider tune" in printed
    with pytest.raises(SystemExit), user_errors():
        raise KeyboardInterrupt("3 of 8 answers are kept in x.")
    assert "3 of 8 answers are kept in x. To resume, run the same command: outrider tune" in capsys.readouterr().err


def test_ctrl_c_is_reported_by_the_first_process_alone(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit), user_errors():
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("debug", ["0", "1"])
def test_other_libraries_are_silent_unless_debugging(monkeypatch: pytest.MonkeyPatch, debug: str) -> None:
    monkeypatch.setenv("OUTRIDER_DEBUG", debug)
    for name in NOISY_LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    silence_libraries()
    levels = {logging.getLogger(name).level for name in NOISY_LOGGERS}
    assert levels == ({logging.ERROR} if debug == "0" else {logging.NOTSET})


def test_finished_work_is_counted_after_ctrl_c(tmp_path: Path) -> None:
    config = load_recipe("demo", f"output_dir={tmp_path}")
    (tmp_path / "distill").mkdir()
    (tmp_path / "distill/manifest.json").touch()
    assert describe_kept(config).endswith(": nothing yet.")
    (tmp_path / "distill/shard-00000.json").touch()
    assert describe_kept(config).endswith(": 1 shard of labels.")
    (tmp_path / "distill/shard-00001.json").touch()
    (tmp_path / "questions/0").mkdir(parents=True)
    (tmp_path / "questions/0/manifest.json").touch()
    (tmp_path / "questions/0/answers-00000.json").touch()
    assert describe_kept(config).endswith(": 1 shard of questions, 2 shards of labels.")


def test_a_strangers_text_cant_change_the_terminal_or_flood_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), user_errors():
        raise ValueError(
            "the Hub answers: \x1b[31mred\x1b]0;title\x07\x9b31m\r, half a pair \ud800, ü 你好\n\tnext " + "x" * 10**6
        )
    printed = capsys.readouterr().err
    assert r"\x1b[31mred\x1b]0;title\x07\x9b31m\r, half a pair \ud800, ü 你好" in printed
    assert "\n\tnext" in printed
    assert set(printed) & set("\x1b\x07\x9b\r\ud800") == set()
    assert len(printed) < 21_000
    assert "more characters)" in printed
