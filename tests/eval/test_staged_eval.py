"""Commands on a target in stages: what they measure, print, record and refuse."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outrider.eval.certify import samples
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.run import evaluate
from outrider.models.drafters.saved.parts import parse_drafter_name
from outrider.models.export.package import read_certificate
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.models.llm.stages.staged_target import StagedTarget

from ..commands import invoke
from ..models.llm.stages.inline import in_stages


@pytest.fixture(scope="module")
def staged(tiny_target_dir: Path) -> StagedTarget:
    """Return the tiny target as a head and two stages of a layer each, all in this process."""
    return in_stages(load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu")), [1, 1])


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f'{{"prompt": "Why {number}?"}}\n' for number in range(3)))
    return path


@pytest.fixture
def command(
    staged: StagedTarget, tiny_target_dir: Path, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Return options of a command whose target is already loaded."""

    def load(config: TargetConfig, **_: Any) -> HFTarget:
        assert config.stage_layers == [1, 1]
        return staged

    monkeypatch.setattr("outrider.models.llm.loading.load_target", load)
    return [
        *("--target", str(tiny_target_dir), "--stage-layers", "1,1", "--max-new-tokens", "12", "--suite", str(suite)),
        *("--drafter", f"draft_model:{tiny_target_dir}", "--output", str(tmp_path / "out")),
    ]


@pytest.mark.slow
def test_three_ways_of_decoding_share_a_table(command: list[str], tmp_path: Path) -> None:
    arguments = [
        "eval",
        *command,
        "--decode",
        "both",
        "--setting",
        "{length: 3, top_k: 1}",
        "--profile-prompts",
        "1",
        "--repeats",
        "1",
    ]
    arguments += ["--baseline", "recycling", "--merge", "suffix"]
    result = invoke(arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["label"] for row in rows] == [
        *("plain decoding", "Recycling, 40 nodes", "Draft model, length 3, top-k 1"),
        "Draft model + Suffix, length 3, top-k 1, 40 nodes, paced",
        *("Recycling, pipelined", "Draft model, pipelined", "Draft model + Suffix, pipelined"),
    ]
    assert all(row["lossless"] for row in rows)
    for row in rows:
        assert (row["stage_layers"], row["roofline"]) == ([1, 1], None)
        assert row["runs"]["num_entries"] >= row["runs"]["num_runs"] > 0
        assert (row["time_split"] is None) == row["pipelined"]
    assert rows[5]["tokens_per_step"] > 1, "the draft model is the target itself"
    assert "2 layers ran in 2 processes (1, 1)" in " ".join(result.output.split())
    # The same command resumes, and other stages are another evaluation.
    records = (tmp_path / "out" / "records.jsonl").read_text()
    assert invoke(arguments).exit_code == 0
    assert (tmp_path / "out" / "records.jsonl").read_text() == records
    info = json.loads((tmp_path / "out" / "run.json").read_text())
    assert info["config"]["target"]["stage_layers"] == [1, 1]
    assert (info["roofline"], info["config"]["methods"]["recycling pipelined"]["decode"]) == (None, "pipelined")


def test_samples_of_a_pipelined_drafter_are_those_of_plain_decoding(staged, tiny_target_dir, suite, tmp_path):
    config = EvalConfig(
        suites=[SuiteConfig(name="mine", path=str(suite), limit=1)],
        decode="pipelined",
        temperatures=[1.0],
        max_new_tokens=12,
        profile_prompts=0,
        repeats=1,
    )
    drafters = [parse_drafter_name(f"draft_model:{tiny_target_dir}"), parse_drafter_name("suffix")]
    rows = evaluate(config, staged, staged.tokenizer, drafters, tmp_path / "out")
    assert [row["lossless_label"] for row in rows] == ["yes"] * 3


@pytest.mark.slow
def test_a_certificate_is_of_the_pipelined_loop(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "TEXTS_PER_PROMPT", 32)
    result = invoke(["certify", *command, "--limit", "2", "--decode", "pipelined"])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out").read_text())
    assert written["stage_layers"] == read_certificate(tmp_path / "out").stage_layers == [1, 1]
    subjects = [line["subject"] for line in written["lines"]]
    assert [", pipelined," in subject for subject in subjects] == [False, True, True, True]
    accepted = [int(re.search(r"(\d+) of them accepted", subject).group(1)) for subject in subjects]  # type: ignore[union-attr]
    assert min(accepted) > 0, "lines without drafts show nothing"
    assert written["passed"]


@pytest.mark.parametrize("name", ["eval", "certify"])
def test_a_loop_without_stages_is_an_error_before_prompts_are_read(tiny_target_dir: Path, name: str) -> None:
    command = [name, "--target", str(tiny_target_dir), "--drafter", "suffix", "--suite", "no_such_suite"]
    message = invoke([*command, "--decode", "pipelined"]).message
    assert "decode is pipelined, which needs a target in stages" in message
