"""The command `outrider eval`: its options, its exit status, and its errors for mistakes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from outrider.eval.measure import methods
from outrider.eval.records.records import RecordFile

from ..commands import invoke
from .test_run import AcceptsAnything


@pytest.fixture
def command(tiny_target_dir: Path, tiny_drafter_dir: Path, questions: Path, tmp_path: Path) -> list[str]:
    return [
        *("--target", str(tiny_target_dir), "--drafter", str(tiny_drafter_dir), "--output", str(tmp_path / "out")),
        *("--suite", f"{{name: mt_bench, path: {questions}}}", "--max-new-tokens", "6"),
        *("--profile-prompts", "1", "--repeats", "1"),
    ]


def test_options_reach_the_stage_and_the_table_is_printed(command: list[str], tmp_path: Path) -> None:
    """A suite is a mapping or a file; a setting is written as in a configuration."""
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": "How?"}\n')
    options = ["--setting", "{beam_width: 1, beam_length: 2}", "--setting", "{tree_nodes: null}", "--batch-size", "2"]
    options += ["--temperature", "0.7", "--suite", str(tmp_path / "mine.jsonl")]
    result = invoke(["eval", *command, *options])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())
    names = ["baseline", "redrafter beam_width=1 beam_length=2", "redrafter tree_nodes=None"]
    assert [(row["suite"], row["method"]) for row in rows] == [
        (suite, name) for suite in ("mt_bench", "mine") for name in names
    ]
    assert {(row["temperature"], row["batch_size"], row["num_prompts"], row["dtype"]) for row in rows} == {
        (0.7, 2, 2, "float32")
    }
    assert "Identical" in result.output
    assert "mt_bench, temperature 0.7, batch size 2" in result.output
    assert str(tmp_path / "out") in result.output.replace("\n", "")


def test_another_chat_template_changes_the_prompts_and_is_another_evaluation(command: list[str], tmp_path: Path) -> None:
    prompts = []
    for name, options in {"own": [], "other": ["--chat-template", "vicuna_v1.1"]}.items():
        result = invoke(["eval", *command, *options, "--output", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        prompts.append(json.loads((tmp_path / name / "records.jsonl").read_text().splitlines()[0])["prompt_sha256"])
    assert prompts[0] != prompts[1]
    result = invoke(["eval", *command, "--output", str(tmp_path / "other")])
    assert "the chat template" in result.message


def test_records_name_the_quantization_of_the_target(command: list[str], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    result = invoke(["eval", *command, "--quantization", "torchao"])
    assert result.exit_code == 0, result.output
    options = json.dumps({"method": "torchao", "type": "Int8WeightOnlyConfig"})
    assert json.loads((tmp_path / "out" / "run.json").read_text())["config"]["target"]["quantization"] == options
    assert {row["quantization"] for row in json.loads((tmp_path / "out" / "summary.json").read_text())} == {options}
    assert "quantised weights" in " ".join(result.output.split())
    result = invoke(["eval", *command])
    assert "differs in target.quantization" in result.message


def test_a_drafter_that_is_not_lossless_fails_the_command(command, monkeypatch, tmp_path):
    monkeypatch.setattr(methods, "GreedyAcceptance", AcceptsAnything)
    result = invoke(["eval", *command])
    assert result.exit_code == 1
    assert "NOT LOSSLESS" in result.output
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["speedup"] for row in rows] == [1.0, None]


def test_mistakes_are_errors_before_the_target_is_loaded(command, tiny_drafter_dir, tmp_path, monkeypatch):
    def too_late(*args: Any, **kwargs: Any) -> None:
        pytest.fail("the target was loaded before the mistake was found")

    monkeypatch.setattr("outrider.models.llm.loading.load_target", too_late)
    empty, half = tmp_path / "empty", tmp_path / "half"
    empty.mkdir()
    half.mkdir()
    shutil.copy(tiny_drafter_dir / "config.json", half)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Why?"}\n\n{"question": "How?"}\n')
    (tmp_path / "torn.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": \n')
    (tmp_path / "mt_bench.jsonl").write_text('{"prompt": "Why?"}\n')
    mistakes = {
        "unknown suite 'mt_bunch'": ["--suite", "mt_bunch"],
        "holds no drafter": ["--drafter", str(empty)],
        "model.safetensors is missing": ["--drafter", str(half)],
        "empty": ["--suite", f"{{name: alpaca_eval, path: {tmp_path / 'empty.jsonl'}}}"],
        "does not exist": ["--suite", f"{{name: alpaca_eval, path: {tmp_path / 'nowhere.jsonl'}}}"],
        "beam_width=0: must be above 0": ["--setting", "{beam_width: 0}"],
        "the drafter redrafter has no option depth": ["--setting", "{depth: 5}"],
        'eval.settings[0]="beam_width": must be a mapping': ["--setting", "beam_width"],
        "close each bracket and quote": ["--setting", "{beam_width: 1"],
        "where 'tree_nodes:0' is one word; put a space after the colon": ["--setting", "{tree_nodes:0}"],
        "bad.jsonl, line 3: not a prompt of bad": ["--suite", str(tmp_path / "bad.jsonl")],
        "torn.jsonl, line 2": ["--suite", str(tmp_path / "torn.jsonl")],
        "2 suites have the name 'mt_bench'": ["--suite", str(tmp_path / "mt_bench.jsonl")],
    }
    for message, arguments in mistakes.items():
        result = invoke(["eval", *command, *arguments])
        assert result.exit_code == 2, (message, result.output)
        assert message in result.message


def test_ctrl_c_counts_the_answers_that_are_kept(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, seen = RecordFile.append, []

    def interrupt(self: RecordFile, *records: Any) -> None:
        append(self, *records)
        seen.extend(records)
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(RecordFile, "append", interrupt)
    with pytest.raises(KeyboardInterrupt, match="2 of [0-9]+ answers are kept in .*records.jsonl"):
        invoke(["eval", *command])
    assert len((tmp_path / "out" / "records.jsonl").read_text().splitlines()) == 2
