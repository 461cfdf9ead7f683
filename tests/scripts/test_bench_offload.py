"""The bench of streamed targets: figures and marks by hand, the peers' text, and a whole run on a tiny target."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter, save_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

SCRIPTS = Path(__file__).parents[2] / "scripts"
MIB = 1 << 20


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the import of a script by its name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu", fast_linears=False))


@pytest.fixture(scope="module")
def drafter_dir(target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    torch.manual_seed(0)
    options = {"kind": "draft_model", "init": "target_layers", "num_layers": 1}
    save_drafter(build_drafter(parse_drafter(options), target), folder, target.identity)
    return folder


def answer(method: str, prompt: int, seconds: float, tokens: int, steps: int, **others: Any) -> dict[str, Any]:
    values = {"method": method, "prompt": prompt, "decode_seconds": seconds, "num_verify_tokens": tokens, "num_steps": steps}
    counts = {"num_draft_tokens": 0, "read_bytes": 1000 * (steps + 1), "major_faults": 0, "cached_share": 0.0}
    times = {"prefill_seconds": 1.0, "draft_seconds": None, "stream": None, "token_ids": list(range(tokens + 1))}
    return {**values, **counts, **times, **others}


def measured(output: Path, cell: Any) -> None:
    """Write a cell of which (g) is four times as fast as (a), and drafts half in waits."""
    stream = {"passes": 3, "draft_seconds": 0.5, "late_seconds": 0.0}
    streamed = {"draft_seconds": 0.5, "read_bytes": 3000, "stream": stream}
    answers = [
        *(answer("a", prompt, 8.0, 4, 4, cached_share=0.5) for prompt in (0, 1)),
        *(answer("c", prompt, 4.0, 4, 4, stream={"passes": 5}, draft_seconds=0.0) for prompt in (0, 1)),
        *(answer("f-close", prompt, 5.0, 8, 2, **streamed) for prompt in (0, 1)),
        answer("g-close", 0, 3.0, 8, 2, **streamed),
        answer("g-close", 1, 5.0, 8, 2, **streamed | {"token_ids": [7]}),
    ]
    folder = cell.folder(output)
    folder.mkdir(parents=True)
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers) + '{"method": "a", "pro')
    facts = {"cap_bytes": 500 * MIB, "baseline_bytes": 300 * MIB, "drafter_bytes": 0, "parts": {"slots": 100 * MIB}}
    facts |= {"anonymous_bytes": 420 * MIB, "means": "cgroup v1", "streamed_bytes": 1000, "plan": "a plan"}
    (folder / "workers.json").write_text(json.dumps(dict.fromkeys(("a", "c", "f-close", "g-close"), facts)))


@pytest.fixture
def rows(script: Any, tmp_path: Path) -> list[Any]:
    cells = script("offload_cells")
    (cell,) = cells.cells_of([cells.THROTTLED], [0.25], [cells.CLOSE], [], "acfg")
    measured(tmp_path, cell)
    found: list[Any] = script("offload_figures").rows_of(cell, tmp_path)
    return found


def test_figures_are_sums_over_prompts(rows: list[Any]) -> None:
    standard, plain, before, during = rows
    assert [row["key"] for row in rows] == ["a", "c", "f-close", "g-close"]
    assert (standard["seconds_per_token"], plain["seconds_per_token"], during["seconds_per_token"]) == (2.0, 1.0, 0.5)
    assert during["tokens_per_step"] == 4
    assert (standard["bytes_per_pass"], plain["bytes_per_pass"], before["bytes_per_pass"]) == (1000, 1000, 1000)
    assert during["gb_per_token"] == pytest.approx(0.25e-6)
    assert during["over"]["a"]["ratio"] == pytest.approx(4.0)
    low, high = during["over"]["a"]["ci95"]
    assert (low, high) == pytest.approx((2.0 / (5 / 8), 2.0 / (3 / 8)))
    assert (standard["num_identical"], during["num_identical"]) == (2, 1)
    assert (during["draft_seconds"], during["wait_draft_seconds"]) == (0.25, 0.25)


def test_marks_are_judged_and_printed(script: Any, rows: list[Any], tmp_path: Path) -> None:
    report = script("offload_report")
    costs = {"close": {"seconds": 1 / 37, "parameters": 5_000_000}}
    marks = report.judge(rows, [], costs, 128 * MIB)
    by_rule = {mark["rule"].split(": ", 1)[-1].split(" at least")[0]: mark for mark in marks}
    speed = by_rule["(g) + drafting during the pass, close"]
    assert speed["reached"]
    assert speed["figures"].startswith("4.00x [")
    assert by_rule["plain streaming"]["reached"]
    overlap = next(mark for mark in marks if "a pass of 37 drafts" in mark["rule"])
    assert (overlap["reached"], "1.05x" in overlap["rule"]) == (True, True)
    waits = next(mark for mark in marks if "in waits" in mark["rule"])
    assert not waits["reached"]
    assert "NOT reached, 50%" in waits["text"]
    text = next(mark for mark in marks if "the same text" in mark["rule"])
    assert "close 1 of 2" in text["figures"]
    cap = next(mark for mark in marks if "survives a cap" in mark["rule"])
    assert (cap["reached"], "20 MiB" in cap["figures"]) == (True, True)
    table = report.tables(rows, costs)
    assert "| (g) + drafting during the pass | 0.500 s (1.25x of (f)) |" in table
    assert any("a plan" in line for line in report.notes(rows, [], costs, "200M"))
    report.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size


def test_a_killed_method_reaches_no_mark(script: Any, rows: list[Any]) -> None:
    fault = {"disk": "throttled", "share": 0.25, "letter": "g", "title": "(g)", "fault": "a worker was killed for memory"}
    costs = {"close": {"seconds": 1.0, "parameters": 1}}
    marks = script("offload_report").judge(rows[:2], [fault], costs, 128 * MIB)
    cap = next(mark for mark in marks if "survives a cap" in mark["rule"])
    assert not cap["reached"]
    assert "killed for memory" in cap["text"]


def test_the_page_cache_is_counted_and_dropped(script: Any, tmp_path: Path) -> None:
    run, path = script("offload_run"), tmp_path / "data"
    path.write_bytes(bytes(4 * MIB))
    (tmp_path / "empty").touch()
    assert run.cached_share([path, tmp_path / "empty"]) == 1
    run.drop_cache([path])
    assert run.cached_share([path]) in (0, 1)  # a file system in memory keeps its pages


def test_the_peers_write_the_targets_text(script: Any, target: HFTarget, tiny_target_dir: Path, drafter_dir: Path) -> None:
    """accelerate loads a layer from the disk at its turn, and the assistant is the saved draft model."""
    worker = script("offload_worker")
    prompt = torch.arange(40, 60)
    (steps,) = [list(generate(target, NullDrafter(), GreedyAcceptance(), [prompt], max_new_tokens=8))]
    tokens = [token for step in steps for token in step.tokens[0]]
    spec = {"kind": "peer", "target": str(tiny_target_dir), "dtype": "float32", "streamed_layers": [1]}
    for drafter in (None, str(drafter_dir)):
        peer = worker.Peer({**spec, "drafter": drafter})
        assert peer.answer(prompt, 8)["token_ids"] == tokens
        assert (peer.facts["drafter_bytes"] > 0) == (drafter is not None)
    assert worker.offloaded_model(tiny_target_dir, [1], "float32").model.layers[1].mlp.up_proj.weight.is_meta


@pytest.mark.parametrize(
    ("options", "problem"),
    [(["--new-tokens", "1"], "new-tokens is 1"), (["--budget-tokens", "300"], "budget-tokens 300"), (["--rate", "x"], "'x'")],
)
def test_wrong_options_are_refused_before_any_work(
    script: Any, tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path, options: list[str], problem: str
) -> None:
    bench = script("bench_offload")
    arguments = ["--target", str(tiny_target_dir), "--drafter", str(drafter_dir), "--tiny", "--output", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=problem):
        bench.run(bench.parse_args([*arguments, *options]))


@pytest.mark.slow
@pytest.mark.long
def test_a_whole_run_is_recorded_and_resumes(
    script: Any, tiny_target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every process of a run starts Python and torch, which takes most of its time."""
    bench, output = script("bench_offload"), tmp_path / "out"
    arguments = ["--target", str(tiny_target_dir), "--drafter", str(drafter_dir), "--tiny", "--output", str(output)]
    arguments += ["--methods", "raw", "a", "c", "g", "--disks", "disk as it is", "--free"]
    bench.run(bench.parse_args(arguments))
    record = json.loads((output / "offload.json").read_text())
    assert [row["key"] for row in record["rows"]] == ["raw", "a", "c", "g-close"]
    plain, drafting = record["rows"][2:]
    assert plain["num_identical"] == drafting["num_identical"] == 2
    assert plain["facts"]["streamed_bytes"] > 0
    assert "Mark: " in (output / "table.md").read_text()
    assert not (output / "models").exists()
    answers = output / "cells" / "disk-as-it-is-50" / "answers.jsonl"
    lines = answers.read_text().splitlines(keepends=True)
    assert len(lines) == 8
    # A run that was killed while it wrote its last answer measures only that one again.
    answers.write_text("".join(lines[:-1]) + lines[-1][:20])
    capsys.readouterr()
    bench.run(bench.parse_args(arguments))
    assert "1 answers" in capsys.readouterr().out
    assert len(answers.read_text().splitlines()) == 8
    with pytest.raises(ValueError, match="prompts"):
        bench.run(bench.parse_args([*arguments, "--prompts", "1"]))


def test_the_benchmarks_page_shows_the_record(script: Any, rows: list[Any], tmp_path: Path) -> None:
    tables, report = script("benchmarks_page.tables"), script("offload_report")
    costs = {"close": {"seconds": 0.1, "parameters": 1}}
    record = {"tables": report.tables(rows, costs), "notes": report.notes(rows, [], costs, "200M")}
    (tmp_path / "offload.json").write_text(json.dumps(record))
    records = tables.Records(tmp_path)
    made = {name: function(records, "offload.json") for name, function in script("benchmarks_page.printed").PRINTED.items()}
    assert made["printed_tables"].startswith("| throttled, budget 25% of the weights |")
    assert made["printed_notes"].startswith("- Seconds of decoding")
