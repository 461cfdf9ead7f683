"""A trace of one answer of each method, in place of a measurement."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.trace import trace_problems, write_trace
from outrider.models.llm.hf_target import HFTarget

from ..commands import invoke

CONFIG = EvalConfig(suites=[SuiteConfig(name="mt_bench")], max_new_tokens=4, settings=[{"beam_width": 1}])


def test_each_method_and_its_phases_have_a_name_in_the_trace(
    tiny_target: HFTarget, tiny_drafter_dir: Path, questions: Path, tmp_path: Path
) -> None:
    config = replace(CONFIG, suites=[SuiteConfig(name="mt_bench", path=str(questions))])
    path = tmp_path / "traces" / "one.json.gz"
    assert write_trace(config, tiny_target, [tiny_drafter_dir], path) == ["baseline", "redrafter beam_width=1"]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    blocks = {name: [event for event in events if event.get("name") == name] for name in ("draft", "verify", "prefill")}
    methods = {
        name: next(event for event in events if event.get("name") == name) for name in ("baseline", "redrafter beam_width=1")
    }
    assert len(blocks["prefill"]) == 2, "one answer of each method, without the warm-up"
    assert len(blocks["draft"]) == len(blocks["verify"]) >= 3
    last = methods["redrafter beam_width=1"]
    inside = [block for block in blocks["draft"] if last["ts"] <= block["ts"] <= last["ts"] + last["dur"]]
    assert inside
    assert any(event.get("name") == "aten::linear" for event in events)
    assert [file.name for file in path.parent.iterdir()] == ["one.json.gz"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 2}, "eval.repeats is 2, and a trace times nothing"),
        ({"batch_sizes": [1, 4]}, r"--batch-size is \[1, 4\], and a trace times nothing"),
        ({"temperatures": [0.0, 1.0]}, "--temperature is"),
        ({"memory_bandwidth_gbs": 10.0}, "eval.memory_bandwidth_gbs is 10.0"),
    ],
)
def test_options_of_a_measurement_are_refused_with_a_trace(changes: dict[str, Any], message: str) -> None:
    (problem,) = trace_problems(replace(CONFIG, **changes), Path("a.json"), in_stages=False)
    assert problem.startswith(message.replace("\\", ""))
    assert "leave " in problem


def test_a_trace_of_stages_and_a_file_of_another_kind_are_refused() -> None:
    problems = trace_problems(CONFIG, Path("trace.txt"), in_stages=True)
    assert problems[0] == "trace is trace.txt; name a file that ends with .json or .json.gz"
    assert "the target is in stages" in problems[1]
    assert trace_problems(CONFIG, Path("a.json"), in_stages=False) == []


def test_the_command_writes_a_trace_and_no_records(
    tiny_target_dir: Path, tiny_drafter_dir: Path, questions: Path, tmp_path: Path
) -> None:
    command = ["--target", str(tiny_target_dir), "--drafter", str(tiny_drafter_dir), "--output", str(tmp_path / "out")]
    command += ["--suite", f"{{name: mt_bench, path: {questions}}}", "--max-new-tokens", "3"]
    result = invoke(["eval", *command, "--trace", str(tmp_path / "trace.json")])
    assert result.exit_code == 0, result.output
    assert "Its times are no timings" in result.output
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert not (tmp_path / "out").exists()
    result = invoke(["eval", *command, "--trace", str(tmp_path / "other.json"), "--repeats", "2"])
    assert "eval.repeats is 2" in result.message
    assert not (tmp_path / "other.json").exists()
