"""The script that runs a GPU's first half hour: a part that fails, hangs or writes nonsense costs no other."""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from outrider.cli.config import register, to_run_config

register()
SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
WRITE = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"


@pytest.fixture
def half_hour(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("half_hour")


@pytest.fixture
def table(half_hour: Any) -> Any:
    return importlib.import_module("half_hour_parts")


@pytest.fixture
def call(half_hour: Any, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the script on parts made of Python code, each with the report that the code is given as its argument."""

    def run(codes: dict[str, tuple[str, Any]], *options: str, checks: Any = (), limit: int = 20) -> tuple[dict, str, int]:
        def made(scratch: Path) -> list[Any]:
            return [
                table.Part(
                    name=name,
                    command=("never",),
                    tiny=(sys.executable, "-c", code, str(scratch / f"{name}.json"), report),
                    checks=checks,
                )
                for name, (code, report) in codes.items()
            ]

        monkeypatch.setattr(half_hour, "parts", made)
        monkeypatch.setattr(table, "LIMITS", dict.fromkeys(codes, limit))
        out = ["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch"), "--tiny"]
        monkeypatch.setattr(sys, "argv", ["half_hour.py", *out, *options])
        with pytest.raises(SystemExit) as end:
            half_hour.main()
        folder = tmp_path / "out"
        assert sorted(path.name for path in folder.iterdir()) == ["first_half_hour.json", "first_half_hour.md"]
        whole = json.loads((folder / "first_half_hour.json").read_text())
        return whole["parts"], (folder / "first_half_hour.md").read_text(), int(end.value.code or 0)

    return run


GOOD = (WRITE, '{"speed": 3}')


def test_a_part_that_fails_costs_no_other(call: Any) -> None:
    parts, page, status = call({"bad": ("print('why'); raise SystemExit(3)", ""), "good": GOOD})
    assert {name: part["verdict"] for name, part in parts.items()} == {"bad": "failed", "good": "ok"}
    assert parts["bad"]["exit_status"] == 3
    assert parts["bad"]["last_lines"] == ["why"]
    assert "exit status 3" in page
    assert "\nwhy\n" in page
    assert parts["good"]["report"] == {"speed": 3}
    assert status == 1


def test_a_part_that_hangs_is_killed_with_its_children_and_keeps_what_it_wrote(call: Any, tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = (
        f"{WRITE}\nimport subprocess, time\n"
        f"process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(process.pid))\nprint('begun', flush=True)\ntime.sleep(60)"
    )
    started = time.monotonic()
    parts, page, status = call({"hangs": (code, '{"speed": 1}'), "good": GOOD}, limit=3)
    assert time.monotonic() - started < 30
    assert parts["hangs"]["timed_out"]
    assert parts["hangs"]["verdict"] == "failed"
    assert parts["hangs"]["report"] == {"speed": 1}
    assert parts["hangs"]["last_lines"] == ["begun"]
    assert "killed after its 3 s" in page
    assert parts["good"]["verdict"] == "ok"
    assert status == 1
    assert is_gone(int(child.read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet is a zombie."""
    for _ in range(50):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(("report", "problem"), [('{"speed": ', "is no JSON"), (None, "left no broken.json")])
def test_a_report_that_is_no_json_or_not_there_is_a_failure(call: Any, report: str | None, problem: str) -> None:
    code = WRITE if report is not None else "print('nothing')"
    parts, page, status = call({"broken": (code, report or ""), "good": GOOD})
    assert problem in parts["broken"]["problem"]
    assert problem in page
    assert [part["verdict"] for part in parts.values()] == ["failed", "ok"]
    assert status == 1


def test_what_has_run_is_not_run_again_unless_that_is_asked_for(call: Any, tmp_path: Path) -> None:
    counter = tmp_path / "runs"
    code = f"open({str(counter)!r}, 'a').write('x')\n{WRITE}"
    codes = {"one": (code, "{}"), "two": (code, "{}")}
    _, page, status = call(codes, "--only", "one")
    assert "Not run yet: two." in page
    assert status == 0
    parts, page, _ = call(codes)
    assert list(parts) == ["one", "two"]
    assert "Not run yet" not in page
    assert counter.read_text() == "xx"
    call(codes, "--again", "--only", "two")
    assert counter.read_text() == "xxx"


def test_a_part_that_may_not_end_in_time_is_left_to_the_next_call(call: Any) -> None:
    parts, page, _ = call({"long": GOOD}, "--minutes", "0.1")
    assert parts == {}
    assert "Not run yet: long." in page
    parts, _, _ = call({"long": GOOD}, "--minutes", "1")
    assert parts["long"]["verdict"] == "ok"


def test_a_record_of_earlier_calls_that_was_cut_off_counts_as_none(call: Any, tmp_path: Path) -> None:
    call({"good": GOOD})
    (tmp_path / "scratch" / "tiny" / "first_half_hour.json").write_text('{"parts": {"go')
    parts, _, status = call({"good": GOOD})
    assert parts["good"]["verdict"] == "ok"
    assert status == 0


@pytest.mark.parametrize(
    ("report", "verdict", "found"),
    [
        ({"speed": 5}, "ok", 5),
        ({"speed": 10}, "ok", 10),
        ({"speed": 11}, "look", 11),
        ({"speed": 0.5}, "look", 0.5),
        ({"speed": float("nan")}, "look", None),
        ({}, "look", None),
        ({"speed": "fast"}, "look", None),
        (None, "look", None),
        ([], "look", None),
    ],
)
def test_a_value_out_of_its_bounds_or_not_measured_is_to_be_looked_at(
    half_hour: Any, table: Any, report: Any, verdict: str, found: float | None
) -> None:
    check = table.Check(says="speed", value=lambda value: value["speed"], least=1, most=10)
    judged = half_hour.checked(check, report)
    assert judged["verdict"] == verdict
    if found is not None:
        assert judged["found"] == found
    assert judged["expected"] == "at least 1 and at most 10"


def test_a_number_that_is_none_leaves_the_result_json(call: Any, tmp_path: Path) -> None:
    parts, _, _ = call({"diverged": (WRITE, '{"loss": NaN}')})
    assert parts["diverged"]["report"] == {"loss": None}


def test_the_page_has_what_was_expected_and_found(call: Any, table: Any) -> None:
    checks = (
        table.Check(says="its speed", value=lambda report: report["speed"], least=4),
        table.Check(says="its size", value=lambda report: report["size"], most=4),
        table.Check(says="its name", value=lambda report: "slow", least=1),
        table.Check(says="of a GPU alone", value=lambda report: 0, least=1, only_on_gpu=True),
    )
    parts, page, status = call({"slow": GOOD}, checks=checks)
    assert parts["slow"]["verdict"] == "look"
    assert "| its speed | at least 4 | 3 | look |" in page
    assert "| its size | at most 4 | not measured | look |" in page
    assert "| its name | at least 1 | not measured | look |" in page
    assert "of a GPU alone" not in page
    assert status == 0, "only a failure is an error"


def test_all_limits_together_are_twenty_five_minutes_and_each_fits_a_call_of_ten(table: Any, tmp_path: Path) -> None:
    parts = table.parts(tmp_path)
    assert [part.name for part in parts] == list(table.LIMITS)
    assert sum(table.LIMITS.values()) <= 25 * 60
    assert max(table.LIMITS.values()) <= 9 * 60


def test_the_checks_of_the_speed_read_the_reports_of_the_benchmarks(half_hour: Any, table: Any) -> None:
    def row(form: str, drafter: str, nodes: int, **values: float) -> dict[str, Any]:
        usual = {"milliseconds_per_step": 5.0, "bandwidth_share": 0.8, "break_even": 1.2, "host_reads": 1.0, "batch": 1}
        return {"form": form, "drafter": drafter, "nodes": nodes, "synchronisations": 1.0, **usual, **values}

    forms = [row(form, "nothing", 0) for form in ("eager", "cuda_graph", "compiled_cuda_graph")]
    trees = [row("cuda_graph", "redrafter", 16), row("cuda_graph", "draft_model", 4)]
    report = {"rows": forms + trees, "failed": [{"error": "CUDA out of memory. Tried to allocate 64.00 GiB"}]}
    checks = (*table.DECODE, *table.GRAPHS, *table.FORMS)
    assert {half_hour.checked(check, report)["verdict"] for check in checks} == {"ok"}
    report["failed"].append({"error": "INTERNAL ASSERT"})
    report["rows"][1]["milliseconds_per_step"] = 30.0
    looked_at = [check.says for check in checks if half_hour.checked(check, report)["verdict"] == "look"]
    assert looked_at == ["cases that failed", "plain step in a graph, ms"]


def test_a_profile_is_summed_by_kind_and_its_gaps_are_found(half_hour: Any) -> None:
    profile = importlib.import_module("profile_steps")
    kernels = [
        profile.Kernel("nvjet_hsh_128x64", 0, 60),
        profile.Kernel("fmha_cutlassF_bf16_aligned", 60, 80),
        profile.Kernel("void at::native::vectorized_elementwise_kernel", 100, 110),
        profile.Kernel("Memcpy DtoH", 150, 160),
    ]
    summary = profile.summary(reversed(kernels))
    assert summary["shares"] == {"attention": 0.2, "matrix": 0.6, "copies": 0.1, "other": 0.1}
    assert summary["longest_gaps_microseconds"][:3] == [40, 20, 0]
    assert summary["idle_share"] == 60 / 160
    with pytest.raises(ValueError, match="no kernels"):
        profile.summary([])


def test_the_scripts_take_the_commands_that_only_a_gpu_runs(
    half_hour: Any, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_parsed = 0
    for part in table.parts(tmp_path):
        _, script, *options = part.command
        if Path(script).parent == SCRIPTS:
            monkeypatch.setattr(sys, "argv", [script, *options])
            importlib.import_module(Path(script).stem).parse_args()
            num_parsed += 1
    assert num_parsed == len(table.LIMITS) - 1, "all but the tests"


def test_the_recipes_of_both_forms_are_recipes(table: Any, tmp_path: Path) -> None:
    recipe = next(part for part in table.parts(tmp_path) if part.name == "recipe")
    for command in (recipe.command, recipe.tiny):
        overrides = command[command.index("train.py") + 1 :]
        with initialize_config_module("outrider.conf", version_base="1.3"):
            config = to_run_config(compose("config", overrides=list(overrides)))
        kill_at = int(command[command.index("--kill-at") + 1])
        last_checkpoint = kill_at // config.train.checkpoint_every * config.train.checkpoint_every
        assert 0 < last_checkpoint < kill_at < config.train.steps, "steps are computed twice"
