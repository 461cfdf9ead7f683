"""Script of a GPU's first half hour: a part that fails or hangs does not stop the others."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
    """Return a function that runs the script on parts of Python code.

    The code of a part gets the text of its report as an argument.
    """

    def run(codes: dict[str, tuple[str, Any]], *options: str, checks: Any = (), limit: int = 20) -> tuple[dict, str, int]:
        def make_parts(scratch: Path) -> list[Any]:
            return [
                table.Part(
                    name=name,
                    command=("never",),
                    tiny=(sys.executable, "-c", code, str(scratch / f"{name}.json"), report),
                    checks=checks,
                )
                for name, (code, report) in codes.items()
            ]

        monkeypatch.setattr(half_hour, "parts", make_parts)
        monkeypatch.setattr(table, "LIMITS", dict.fromkeys(codes, limit))
        out = ["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch"), "--tiny"]
        monkeypatch.setattr(sys, "argv", ["half_hour.py", *out, *options])
        with pytest.raises(SystemExit) as end:
            half_hour.main()
        folder = tmp_path / "out"
        assert sorted(path.name for path in folder.iterdir()) == ["first_half_hour_tiny.json", "first_half_hour_tiny.md"]
        whole = json.loads((folder / "first_half_hour_tiny.json").read_text())
        return whole["parts"], (folder / "first_half_hour_tiny.md").read_text(), int(end.value.code or 0)

    return run


GOOD = (WRITE, '{"speed": 3}')


def test_a_failed_part_does_not_stop_the_others(call: Any) -> None:
    parts, page, status = call({"bad": ("print('why'); raise SystemExit(3)", ""), "good": GOOD})
    assert {name: part["verdict"] for name, part in parts.items()} == {"bad": "failed", "good": "ok"}
    assert parts["bad"]["exit_status"] == 3
    assert parts["bad"]["last_lines"] == ["why"]
    assert "exit status 3" in page
    assert "\nwhy\n" in page
    assert parts["good"]["report"] == {"speed": 3}
    assert status == 1


def test_a_part_that_hangs_is_killed_with_its_children_and_keeps_its_report(call: Any, tmp_path: Path) -> None:
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
    assert "killed after 3 s" in page
    assert parts["good"]["verdict"] == "ok"
    assert status == 1
    assert is_gone(int(child.read_text()))


# --- the form: GPU or tiny


@pytest.fixture
def machine(half_hour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the script without --tiny, with a given nvidia-smi.

    The script has the two parts `facts` and `speed`.
    """
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()

    def run(nvidia_smi: str, seen: dict[str, Any] | None, *options: str) -> Any:
        script = tmp_path / "bin" / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        script.chmod(0o755)
        if seen is not None:
            monkeypatch.setattr(half_hour, "seen_by_torch", lambda: seen)
        table = importlib.import_module("half_hour_parts")
        monkeypatch.setattr(table, "LIMITS", {"facts": 20, "speed": 20})
        monkeypatch.setattr(
            half_hour,
            "parts",
            lambda scratch: [
                table.Part(name=name, command=echo(scratch, name, "gpu"), tiny=echo(scratch, name, "tiny"))
                for name in table.LIMITS
            ],
        )
        monkeypatch.setattr(
            sys, "argv", ["half_hour.py", "--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch"), *options]
        )
        with pytest.raises(SystemExit) as end:
            half_hour.main()
        return int(end.value.code or 0), sorted(path.name for path in (tmp_path / "out").iterdir())

    return run


def echo(scratch: Path, name: str, form: str) -> tuple[str, ...]:
    return (sys.executable, "-c", WRITE, str(scratch / f"{name}.json"), json.dumps({"form": form}))


H100 = "echo 'NVIDIA H100, 81559 MiB, 550.54, 1980 MHz'"
UNSEEN = {"cuda": False, "torch": "2.13.0+cpu", "cuda_version": None}


@pytest.mark.parametrize(
    ("seen", "reason", "remedy"),
    [
        (UNSEEN, "torch 2.13.0+cpu is built without CUDA", "install torch built for CUDA"),
        (
            {"cuda": False, "torch": None, "torch_error": "No module"},
            "cannot be imported (No module)",
            "install torch built for CUDA",
        ),
        ({"cuda": False, "torch": "2.13.0", "cuda_version": "13.0", "torch_error": "too old"}, "(too old)", "install a driver"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_an_error_and_no_tiny_run(
    machine: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seen: dict[str, Any],
    reason: str,
    remedy: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine(H100, seen) == (2, [])
    error = capsys.readouterr().err
    for words in ("NVIDIA H100", reason, "torch must see it", f"Remedy: {remedy}", "--tiny"):
        assert words in error


def test_a_gpu_hidden_from_the_real_torch_is_an_error(
    machine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine(H100, None) == (2, [])
    assert "but torch 2." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nvidia_smi", "seen", "options", "first_words", "form"),
    [
        (H100, {"cuda": True, "device": "NVIDIA H100"}, (), "GPU FORM, on NVIDIA H100.", "gpu"),
        (H100, UNSEEN, ("--only", "facts"), "GPU FORM, facts alone", "gpu"),
        (H100, None, ("--tiny",), "TINY FORM, small shapes on a CPU: no speed is measured. Reason: --tiny", "tiny"),
        (
            "echo 'it has failed'; exit 9",
            UNSEEN,
            (),
            "TINY FORM, small shapes on a CPU: no speed is measured. Reason: torch",
            "tiny",
        ),
    ],
)
def test_output_and_page_start_with_the_form_and_its_reason(
    machine: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    nvidia_smi: str,
    seen: Any,
    options: Any,
    first_words: str,
    form: str,
) -> None:
    name = "first_half_hour" if form == "gpu" else "first_half_hour_tiny"
    assert machine(nvidia_smi, seen, *options) == (0, [f"{name}.json", f"{name}.md"])
    assert capsys.readouterr().out.startswith(first_words)
    heading, _, line = (tmp_path / "out" / f"{name}.md").read_text().splitlines()[:3]
    assert heading.endswith(f": {form} form")
    assert line.startswith(first_words)


def test_a_tiny_run_keeps_the_page_of_a_gpu_run(machine: Any, tmp_path: Path) -> None:
    machine(H100, {"cuda": True, "device": "NVIDIA H100"})
    before = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    _, names = machine(H100, None, "--tiny")
    assert len(before) == 2
    assert len(names) == 4
    assert {name: (tmp_path / "out" / name).read_text() for name in before} == before


# --- signals: the script runs in a new process, on a part that starts a child and waits

STOPPED = """
import sys
sys.path.insert(0, {scripts!r})
import half_hour, half_hour_parts
half_hour_parts.LIMITS = dict.fromkeys(("first", "second"), 50)
command = (sys.executable, *{command!r})
half_hour.parts = lambda scratch: [
    half_hour_parts.Part(name=name, command=command, tiny=command, writes_report=False) for name in half_hour_parts.LIMITS
]
half_hour.main()
"""
WAIT = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"


@pytest.fixture
def running(tmp_path: Path) -> Any:
    """Return a function that starts the script, with `killed_recipe.py` as its first part.

    The function returns the script's process, and the process ids of the part and its recipe.
    """
    started: list[Any] = []

    def start() -> tuple[Any, list[int]]:
        child = tmp_path / "child"
        recipe = (sys.executable, "-c", WAIT, str(child))
        options = ("--folder", str(tmp_path / "run"), "--kill-at", "5", "--output", str(tmp_path / "recipe.json"))
        code = STOPPED.format(scripts=str(SCRIPTS), command=(str(SCRIPTS / "killed_recipe.py"), *options, "--", *recipe))
        folders = ("--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch"))
        script = subprocess.Popen(
            [sys.executable, "-c", code, "--tiny", *folders], stdout=subprocess.PIPE, text=True, process_group=0
        )
        started.append(script)
        pid = until(lambda: int(child.read_text()) if child.exists() and child.read_text() else None)
        part = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert part not in (script.pid, os.getpid())
        return script, [part, pid]

    yield start
    for script in started:
        script.kill()
        script.wait()
        script.stdout.close()


def until(condition: Callable[[], Any]) -> Any:
    for _ in range(300):
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("the condition was not met within 15 s")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_first_part_ends_the_part_and_its_recipe_and_leaves_a_page(
    running: Any, tmp_path: Path, number: signal.Signals
) -> None:
    script, processes = running()
    script.stdout.close()  # like a lost terminal: printing fails
    script.send_signal(number)
    assert script.wait(15) == 128 + number
    assert [is_gone(pid) for pid in processes] == [True, True]
    page = (tmp_path / "out" / "first_half_hour_tiny.md").read_text()
    assert f"**Stopped** by {number.name} while first ran" in page
    assert "Not run yet: first, second." in page


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_killed_script_ends_its_part_and_the_recipe(running: Any) -> None:
    script, processes = running()
    script.kill()
    assert [is_gone(pid) for pid in processes] == [True, True]


# --- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--only", "nosuch"), ("'nosuch'", "must be", "facts, tests, recipe")),
        (("--only", "facts", "nosuch"), ("'nosuch'", "must be", "facts, tests, recipe")),
        (("--minutes", "0"), ("--minutes 0", "above 0")),
        (("--minutes", "-3"), ("--minutes -3", "above 0")),
        (("--minutes", "nan"), ("--minutes nan", "above 0")),
        (("--out", "{file}"), ("--out", "{file}", "must be a folder")),
        (("--out", "{file}/below"), ("--out", "{file}/below", "must be a folder")),
        (("--scratch", "{file}"), ("--scratch", "{file}", "must be a folder")),
    ],
)
def test_a_wrong_option_is_an_error_before_anything_runs(
    half_hour: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(half_hour, "run", lambda *_: pytest.fail("a part was run"))
    monkeypatch.setattr(sys, "argv", ["half_hour.py", "--tiny", *(option.format(file=file) for option in options)])
    with pytest.raises(SystemExit) as end:
        half_hour.main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    for word in words:
        assert word.format(file=file) in error
    assert file.read_text() == "kept"


# --- skipped parts, the commit, and the exit status


def test_a_skipped_part_is_named_with_the_option_to_run_it_again(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    call({"one": GOOD})
    capsys.readouterr()
    call({"one": GOOD, "two": GOOD}, "--minutes", "0.1")
    output = capsys.readouterr().out
    assert "already run: one, ok (run again with --again)" in output
    assert "left for another call: two, which may take 20 s; 6 s are left" in output


def test_a_part_of_another_commit_is_marked(
    call: Any, half_hour: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(half_hour, "commit", lambda: "v1-2-gabc")
    parts, page, _ = call({"one": GOOD})
    assert parts["one"]["commit"] == "v1-2-gabc"
    assert "\nCommit v1-2-gabc.\n" in page
    assert "Another commit" not in page
    monkeypatch.setattr(half_hour, "commit", lambda: "v1-3-gdef-dirty")
    parts, page, _ = call({"one": GOOD, "two": GOOD})
    assert [part["commit"] for part in parts.values()] == ["v1-2-gabc", "v1-3-gdef-dirty"]
    assert "\nCommit v1-3-gdef-dirty.\n" in page
    assert "**Another commit**: one, at commit v1-2-gabc, not v1-3-gdef-dirty." in page
    assert page.count("Another commit") == 1
    assert "already run: one, ok, at commit v1-2-gabc, not v1-3-gdef-dirty (run again" in capsys.readouterr().out


def test_the_commit_is_what_git_describes(half_hour: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = importlib.import_module("facts")
    monkeypatch.setattr(facts, "PROJECT", tmp_path / "pyproject.toml")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # commit hooks set these
        monkeypatch.delenv(name, raising=False)
    assert facts.commit() is None
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c")
    (tmp_path / "file").write_text("1")
    for command in (("init", "-q"), ("add", "file"), ("commit", "-qm", "one"), ("tag", "-am", "one", "v1")):
        subprocess.run([*git, *command], check=True)
    assert facts.commit() == "v1"
    (tmp_path / "file").write_text("2")
    assert facts.commit() == "v1-dirty"


def test_only_the_chosen_parts_count_for_the_exit_status(call: Any) -> None:
    codes = {"bad": ("raise SystemExit(3)", ""), "good": GOOD}
    assert call(codes)[2] == 1
    assert call(codes, "--only", "good")[2] == 0
    assert call(codes, "--only", "bad")[2] == 1, "it was chosen, though it is not run again"


def test_the_page_has_details_of_parts_that_need_a_look(call: Any, table: Any) -> None:
    facts = {"packages": {"torch": "2.13"}, "cuda": False, "missing": ["numpy", "hydra-core"], "older": ["tqdm 1.0, needs 4.0"]}
    _, page, _ = call({"facts": (WRITE, json.dumps(facts))}, checks=table.FACTS)
    assert "\nmissing: numpy, hydra-core\nolder: tqdm 1.0, needs 4.0\n" in page
    bench = {"rows": [{"form": "eager", "ms": 1.23456}], "failed": [{"form": "graph", "error": "INTERNAL\nASSERT"}]}
    _, page, _ = call({"bench": (WRITE, json.dumps(bench))}, checks=table.DECODE)
    assert "\nfailed: form graph, error INTERNAL ASSERT\nrows: form eager, ms 1.235\n" in page


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
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


def test_a_finished_part_runs_again_only_with_the_option(call: Any, tmp_path: Path) -> None:
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


def test_a_part_longer_than_the_remaining_time_is_left_to_the_next_call(call: Any) -> None:
    parts, page, _ = call({"long": GOOD}, "--minutes", "0.1")
    assert parts == {}
    assert "Not run yet: long." in page
    parts, _, _ = call({"long": GOOD}, "--minutes", "1")
    assert parts["long"]["verdict"] == "ok"


def test_a_truncated_record_of_earlier_calls_is_ignored(call: Any, tmp_path: Path) -> None:
    call({"good": GOOD})
    (tmp_path / "scratch" / "tiny" / "first_half_hour_tiny.json").write_text('{"parts": {"go')
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
def test_a_value_out_of_bounds_or_not_measured_needs_a_look(
    half_hour: Any, table: Any, report: Any, verdict: str, found: float | None
) -> None:
    check = table.Check(says="speed", value=lambda value: value["speed"], least=1, most=10)
    judged = half_hour.checked(check, report)
    assert judged["verdict"] == verdict
    if found is not None:
        assert judged["found"] == found
    assert judged["expected"] == "at least 1 and at most 10"


def test_nan_in_a_report_keeps_the_result_valid_json(call: Any, tmp_path: Path) -> None:
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


def test_time_limits_sum_to_25_minutes_and_each_is_below_ten(table: Any, tmp_path: Path) -> None:
    parts = table.parts(tmp_path)
    assert [part.name for part in parts] == list(table.LIMITS)
    assert sum(table.LIMITS.values()) <= 25 * 60
    assert max(table.LIMITS.values()) <= 9 * 60


def test_the_checks_of_speed_accept_the_benchmarks_reports(half_hour: Any, table: Any) -> None:
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


def test_a_profile_is_summed_by_kind_with_its_longest_gaps(half_hour: Any) -> None:
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


def test_the_scripts_parse_the_commands_of_the_gpu_form(
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


def test_the_recipe_commands_of_both_forms_compose(table: Any, tmp_path: Path) -> None:
    recipe = next(part for part in table.parts(tmp_path) if part.name == "recipe")
    for command in (recipe.command, recipe.tiny):
        overrides = command[command.index("train.py") + 1 :]
        with initialize_config_module("outrider.conf", version_base="1.3"):
            config = to_run_config(compose("config", overrides=list(overrides)))
        kill_at = int(command[command.index("--kill-at") + 1])
        last_checkpoint = kill_at // config.train.checkpoint_every * config.train.checkpoint_every
        assert 0 < last_checkpoint < kill_at < config.train.steps, "steps are computed twice"
