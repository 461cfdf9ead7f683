"""Mistakes of a first command line: each error names the option, the value and the remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.arguments import parse_arguments
from outrider.cli.compose import compose
from outrider.cli.config import to_run_config
from outrider.cli.launch import require_gpus
from outrider.cli.reference import options_command, recipes_command


def message(*arguments: str) -> str:
    with pytest.raises(ValueError) as error:
        compose(parse_arguments(list(arguments)))
    return " ".join(str(error.value).split())


@pytest.mark.parametrize("second", ["ablation_demo", "conf=ablation_demo", "conf=[ablation_demo]"])
def test_two_recipes_are_an_error_that_stacks_them(second: str) -> None:
    assert "conf=[demo,ablation_demo]" in message("demo", second)


@pytest.mark.parametrize(
    ("arguments", "wrong", "remedy"),
    [
        ("demo --plann", "--plann", "--plan?"),
        ("demo --lunch cpu", "--lunch", "--launch?"),
        ("demo --num_processes 2", "--num_processes", "give --launch NAME before it"),
        ("demo --num-processes=2", "--num-processes", "give --launch NAME before it"),
        ("demo --xyz", "--xyz", "--plan"),
    ],
)
def test_an_unknown_option_is_named_with_its_remedy(arguments: str, wrong: str, remedy: str) -> None:
    text = message(*arguments.split())
    assert wrong in text
    assert remedy in text


@pytest.mark.parametrize(
    ("gpus", "file", "options", "remedy"),
    [
        (0, "one_node", [], "--launch cpu"),
        (2, "one_node", ["--mixed_precision=no"], "--num_processes 2"),
        (1, "several_nodes", ["--machine_rank", "0"], "there is 1"),
        (1, "cpu", [], "ACCELERATE_USE_CPU=true"),
        (0, "cpu", [], None),
        (0, "one_node_zero", ["--num_processes", "2", "--mixed_precision", "no"], None),
        (2, "one_node", ["--num_processes", "2"], None),
        (0, "one_gpu", [], None),
    ],
)
def test_a_launch_without_enough_gpus_is_an_error(
    gpus: int, file: str, options: list[str], remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)
    if remedy is None:
        require_gpus(file, options)
        return
    with pytest.raises(ValueError, match=remedy):
        require_gpus(file, options)


def test_a_section_that_is_no_mapping_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [demo]\ntrain: 3\nvariants: [a, b]\ndrafter: medusa\n")
    text = message(str(file))
    for part in ("line 2: train is 3", "line 3: variants is ['a', 'b']", "line 4: drafter is 'medusa'"):
        assert part in text


@pytest.mark.parametrize(
    ("override", "wrong", "remedy"),
    [
        ("data.path=a=b c", "data.path is a=b c", """data.path="a=b c\""""),
        ("data.path=it's", "data.path is it's", """data.path="it's\""""),
        ("train.steps=[1", "train.steps is [1", "close each bracket"),
        ("train.steps=1,2", "train.steps is 1,2", "[1,2]"),
        ("conf=[demo", "conf is [demo", "close each bracket"),
    ],
)
def test_a_value_that_cant_be_read_is_named_with_its_quotes(override: str, wrong: str, remedy: str) -> None:
    text = message("demo", override, "train.lr=3") if not override.startswith("conf") else message(override, "train.lr=3")
    assert wrong in text
    assert remedy in text
    assert "train.learning_rate" in text


def test_values_out_of_range_are_named_beside_those_of_a_wrong_type() -> None:
    text = message("demo", "train.steps=abc", "train.batch_size=-1", "data.limit=-3")
    assert text.startswith("3 problem(s)")
    assert all(part in text for part in ("train.steps is 'abc'", "train.batch_size=-1", "data.limit=-3"))


def test_values_out_of_range_are_reported_without_importing_torch() -> None:
    script = (
        "import sys\nfrom outrider.cli.compose import main\nsys.argv[1:] = "
        "['demo', 'train.steps=-5', 'data.limit=0', 'stages=[distil]']\n"
        "try: main()\nfinally: assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2, result.stderr
    assert all(part in result.stderr for part in ("train.steps=-5", "data.limit=0", 'stages[0]="distil"'))


def test_a_near_file_and_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("defaults: [demo]\n")
    assert f"did you mean {tmp_path}/my.yaml?" in message(f"conf={tmp_path}/my.yam")
    assert "this is a folder" in message(f"conf={tmp_path}")
    assert "this is a folder" in message("conf=.")


def test_aliases_and_words_are_understood_by_the_lists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"did you mean train\.learning_rate"):
        options_command("train.lr")
    recipes_command("qwen")
    printed = capsys.readouterr().out
    assert "eagle3_qwen3_8b" in printed
    assert "with another target." in printed
    assert "redrafter_vicuna7b" not in printed


def test_a_warm_up_longer_than_the_training_names_the_remedy() -> None:
    with pytest.raises(ValueError) as error:
        to_run_config(compose(parse_arguments(["demo", "train.steps=2"])))
    text = " ".join(str(error.value).split())
    assert "train.warmup_steps is" in text
    assert "set train.warmup_steps=0 or below train.steps" in text
