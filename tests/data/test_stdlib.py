from pathlib import Path
from typing import get_args

import pytest

from outrider.data.config import Split
from outrider.data.stdlib import OPTIONAL_UNITS, TASK, Cuts, code_conversations, split_of, stdlib_files, stdlib_root

SPLITS: tuple[Split, ...] = get_args(Split)


def unit(path: Path) -> str:
    return path.relative_to(stdlib_root()).parts[0].removesuffix(".py")


def test_no_file_and_no_module_is_in_two_splits() -> None:
    """Training on evaluation text would make the measured results too good."""
    files = {split: stdlib_files(split) for split in SPLITS}
    paths = [path for split in SPLITS for path in files[split]]
    assert len(paths) == len(set(paths)) > 300
    units = [{unit(path) for path in files[split]} for split in SPLITS]
    assert len(set().union(*units)) == sum(map(len, units))
    assert all(len(members) >= 5 for members in units)


def test_the_split_never_changes() -> None:
    """The committed target was trained on one split; another split would leak evaluation files."""
    expected = {"argparse": "target_train", "json": "target_heldout", "re": "distill", "csv": "eval", "test": "target_train"}
    assert {name: split_of(name) for name in expected} == expected
    assert len({split_of(f"module{index}") for index in range(100)}) == len(SPLITS)
    assert {split_of(name) for name in OPTIONAL_UNITS} == {"target_train"}, "some distributions don't have them"


@pytest.mark.parametrize("split", ["target_heldout", "eval"])
def test_cuts_are_deterministic_follow_the_seed_and_end_at_line_ends(split: Split) -> None:
    first, again = list(code_conversations(split, Cuts(seed=0))), list(code_conversations(split, Cuts(seed=0)))
    assert first == again
    assert first != list(code_conversations(split, Cuts(seed=1)))
    assert len(first) > 50
    ids = [conversation.id for conversation in first]
    assert len(set(ids)) == len(ids)
    for conversation in first:
        prompt, answer = conversation.turns
        assert prompt.content.startswith(f"{TASK}\n\n")
        assert prompt.content.endswith("\n")
        name, line = conversation.id.removeprefix("stdlib/").rsplit(":", 1)
        text = (stdlib_root() / name).read_text(encoding="utf-8")
        body = prompt.content.removeprefix(f"{TASK}\n\n") + answer.content
        assert text.split("\n", int(line) - 1)[-1].startswith(body)


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def test_data_tables_installed_packages_and_broken_files_are_excluded(tmp_path: Path) -> None:
    name = next(f"module{index}" for index in range(100) if split_of(f"module{index}") == "eval")
    code = "".join(f"line_{index} = {index}\n" for index in range(100))
    write(tmp_path / name / "good.py", code)
    write(tmp_path / name / "empty.py", "")
    write(tmp_path / name / "note.txt", code)
    write(tmp_path / name / "latin.py", b"# \xe9\n" * 200)
    write(tmp_path / name / "data" / "table.py", code)
    write(tmp_path / name / "__pycache__" / "good.py", code)
    write(tmp_path / "site-packages" / name / "foreign.py", code)
    files = [path.relative_to(tmp_path / name).as_posix() for path in stdlib_files("eval", tmp_path)]
    assert files == ["good.py", "latin.py"]
    conversations = list(code_conversations("eval", Cuts(seed=0, prompt_chars=(100, 100), answer_chars=200), tmp_path))
    assert {conversation.id.split(":")[0] for conversation in conversations} == {f"stdlib/{name}/good.py"}


def test_a_form_feed_inside_a_line_does_not_cut_it(tmp_path: Path) -> None:
    name = next(f"module{index}" for index in range(100) if split_of(f"module{index}") == "eval")
    write(tmp_path / f"{name}.py", "a = 1 \x0c b\n" * 100)
    for conversation in code_conversations("eval", Cuts(seed=0, prompt_chars=(50, 90), answer_chars=50), tmp_path):
        assert all(turn.content.endswith("b\n") for turn in conversation.turns)


def test_an_incomplete_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no source file of split 'eval'"):
        stdlib_files("eval", tmp_path)
