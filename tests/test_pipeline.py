"""Runs of all stages, from a recipe to the table, on a tiny target.

The first run starts a process as a user does. The others run in this process.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from outrider.cli.compose import load_recipe
from outrider.cli.run import run
from outrider.data.files import sha256_file

from .cheap_evaluations import cheap_evaluations

__all__ = ["cheap_evaluations"]
REPOSITORY = Path(__file__).parents[1]
ROW_KEYS = {
    "method",
    "suite",
    "temperature",
    "batch_size",
    "num_prompts",
    "tokens_per_step",
    "tokens_per_second",
    "speedup",
    "speedup_ci95",
    "lossless",
}
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write a line.", "Write it again."]},
    {"question_id": 82, "category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]},
]


def forge_summary(folder: Path, rows: list[Any]) -> None:
    """Write a summary of other rows with its digest, as an evaluation would."""
    summary, facts = folder / "summary.json", folder / "facts.json"
    summary.write_text(json.dumps(rows))
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "summary_sha256": sha256_file(summary)}))


@pytest.fixture(autouse=True)
def no_slow_answers() -> None:
    """Let answers be slow, as in the process of the first run: a second run must find the same rows."""


@pytest.fixture(scope="module")
def overrides(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the options of a tiny run in a folder that the tests of this file share."""
    folder = tmp_path_factory.mktemp("pipeline")
    questions = folder / "question.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return [
        f"output_dir={folder / 'run'}",
        f"target.name_or_path={tiny_target_dir}",
        "num_threads=1",
        "data={limit: 5, max_length: 96, prompt_chars: [20, 40]}",
        "distill={horizon: 3, shard_examples: 2}",
        "drafter={exit_width: 16, num_blocks: 1, head_init: random}",
        "train={steps: 3, warmup_steps: 1, batch_size: 2, max_positions: 32, validation_texts: 2, validation_tokens: 8}",
        f"eval.suites=[{{name: mt_bench, path: {questions}}}]",
        "eval={max_new_tokens: 12, profile_prompts: 1}",
        "eval.settings=[{beam_width: 2, beam_length: 3}]",
    ]


@pytest.fixture(scope="module")
def finished(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run `train.py` in a process of its own; return the run's folder and its output."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    result = subprocess.run(
        [sys.executable, REPOSITORY / "train.py", "conf=demo", *overrides],
        cwd=elsewhere,
        env={**os.environ, "OUTRIDER_COMMAND": "make demo"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert list(elsewhere.iterdir()) == []
    return Path(overrides[0].removeprefix("output_dir=")), result.stdout + result.stderr


def run_here(*overrides: str) -> None:
    run(load_recipe(*overrides))


def digests(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def summary(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "eval" / "summary.json").read_text())
    return rows


def test_one_command_distils_trains_and_evaluates(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    promised = [
        "config.yaml",
        "distill/manifest.json",
        "train/metrics.jsonl",
        "drafter/config.json",
        "drafter/model.safetensors",
        "drafter/training.json",
        "eval/records.jsonl",
        "eval/summary.json",
        "eval/table.md",
        "eval/table.csv",
        "eval/answers/mt_bench/baseline.jsonl",
        "eval/mt_bench.png",
        "report.html",
        "package/README.md",
        "package/model.safetensors",
        "package/custom_generate/generate.py",
    ]
    assert [name for name in promised if not (folder / name).is_file()] == []
    assert list(folder.rglob("*.outrider-tmp")) == []
    baseline, *training_free, drafter, merged = summary(folder)
    assert [row["label"] for row in training_free] == [
        "Prompt lookup, 10 nodes",
        "Recycling, 40 nodes",
        "Suffix + Recycling, 40 nodes, paced",
    ]
    assert merged["label"] == "ReDrafter + Suffix + Recycling, 2 beams of 3, 40 nodes, paced"
    assert merged["lossless"] is True
    assert baseline.keys() >= ROW_KEYS
    assert drafter.keys() >= ROW_KEYS
    assert baseline["tokens_per_step"] == 1.0
    assert drafter["lossless"] is True
    assert drafter["num_prompts"] == 2
    assert drafter["training"]["steps"] == 3
    assert drafter["training"]["parameters"] == drafter["parameters"]
    # The headline, the table and its notes, however many they are: the times decide about that.
    table = re.split("^(?:Fastest|Not faster than plain decoding): ", printed, flags=re.MULTILINE)[-1]
    table = table.split("table.md has all notes")[0]
    assert max(map(len, table.splitlines()[1:])) <= 80
    assert re.search(r"^\s*Recycling, 40", table, re.MULTILINE)
    last = printed.split("\nOpen:\n")[1].splitlines()
    assert [line.split()[0] for line in last[:3]] == [
        f"{folder}/{name}" for name in ("eval/table.md", "report.html", "package/README.md")
    ]
    command = "outrider" if shutil.which("outrider") else str(Path(sys.executable).with_name("outrider"))
    assert last[4] == f"  {command} init my.yaml --target DIR_OR_ID --data FILE"
    assert last[6] == "  make chat"
    assert printed.count("the first example, with what is trained on between [[ and ]]") == 1
    assert "ReDrafter" in printed


def test_regeneration_with_a_drafter_gives_the_same_answers_as_without(finished, overrides, tmp_path):
    regenerate = ["stages=[distill]", "distill={engine: decoder, temperature: 1.0, max_new_tokens: 16}"]
    for name, drafter in (("plain", "null"), ("drafted", str(finished[0] / "drafter"))):
        run_here("conf=demo", *overrides, *regenerate, f"distill.drafter={drafter}", f"output_dir={tmp_path / name}")
    plain, drafted = (
        {path: digest for path, digest in digests(tmp_path / name).items() if "stats" not in path and path != "config.yaml"}
        for name in ("plain", "drafted")
    )
    assert plain == drafted
    assert {"answers/manifest.json", "answers/answers-00002.jsonl", "distill/manifest.json"} <= plain.keys()
    manifests = [json.loads((folder / "distill/manifest.json").read_text()) for folder in (finished[0], tmp_path / "plain")]
    assert manifests[0]["data_sha256"] != manifests[1]["data_sha256"]


def test_a_second_run_repeats_nothing(finished: tuple[Path, str], overrides: list[str]) -> None:
    folder, _ = finished
    before = digests(folder)
    run_here("conf=demo", *overrides)
    after = digests(folder)
    assert len(before) > 15
    assert {name for name in before if not name.endswith(".png")} == {name for name in after if not name.endswith(".png")}
    assert [name for name in before if not name.endswith(".png") and before[name] != after[name]] == []


def test_an_edited_model_card_stays_until_it_is_removed(finished, overrides, caplog):
    folder, _ = finished
    card = (folder / "package/README.md").read_text()
    assert "| mt_bench (2) | greedy |" in card
    assert "- Data: modules of Python's standard library, cut at 96 tokens: " in card
    (folder / "package/README.md").write_text("# Mine\n")
    export = [*overrides, "stages=[export]", "export.formats=[apple]", "drafter.initial_state=zero"]
    with caplog.at_level("INFO", "outrider"):
        run_here("conf=demo", *export)
    assert "package has other content than a new folder would have (README.md), and stays" in caplog.text
    assert (folder / "package/README.md").read_text() == "# Mine\n"
    assert (folder / "export/apple/model.safetensors").is_file()
    shutil.rmtree(folder / "package")
    run_here("conf=demo", *export)
    assert (folder / "package/README.md").read_text() == card
    assert not list(folder.glob(".package*"))


def test_a_noisy_speed_is_marked_in_the_card_and_logged(finished, overrides, tmp_path, caplog):
    copy = Path(shutil.copytree(finished[0], tmp_path / "run", ignore=shutil.ignore_patterns("package")))
    rows = json.loads((copy / "eval/summary.json").read_text())
    noisy = {**rows[4], "speedup": 1.23, "speedup_ci95": None, "noisy": True}
    forge_summary(copy / "eval", [rows[0], noisy])
    with caplog.at_level("WARNING", "outrider"):
        run_here("conf=demo", f"output_dir={copy}", *overrides[1:], "stages=[export]")
    assert f"the measurement of {rows[4]['label']} is noisy" in caplog.text
    assert "| 1.23x, noisy |" in (copy / "package/README.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("export.formats=[tgi]", r'export.formats\[0\]="tgi": must be one of .*eagle1-vllm'),
        ("export.formats=[vllm]", "export.formats has vllm, which is for the kind eagle3 or block or eagle or .*redrafter"),
        ("export.formats=[eagle3]", "export.formats has eagle3, which is for the kind eagle3, and the drafter is redrafter"),
        ("export.formats=[apple]", "export.formats has apple, and .*initial_state"),
        ("export.dtype=int8", 'export.dtype="int8"'),
    ],
)
def test_a_drafter_that_cannot_be_exported_is_an_error_before_any_work(overrides, tmp_path, change, message):
    with pytest.raises((ValueError, OSError)) as error:
        run_here("conf=demo", *overrides[1:], f"output_dir={tmp_path / 'new'}", "drafter.initial_state=embedding", change)
    assert re.search(message, " ".join(str(error.value).split()))
    assert not (tmp_path / "new" / "distill").exists()


def test_an_export_that_trained_weights_would_break_is_an_error_before_training(overrides: list[str], tmp_path: Path) -> None:
    """A fresh bias is zero and could be left out of the format; a trained bias could not."""
    others = [option for option in overrides[1:] if not option.startswith(("drafter=", "eval.settings="))]
    eagle = ["drafter=eagle", "drafter.bias=true", "export.formats=[eagle1-vllm]"]
    with pytest.raises(ValueError, match="export.formats has eagle1-vllm, and .* its fc has a bias"):
        run_here("conf=demo", *others, *eagle, f"output_dir={tmp_path / 'new'}")
    assert not (tmp_path / "new" / "distill").exists()


@pytest.mark.parametrize("change", ["train.learning_rate=0.5", "eval.max_new_tokens=5"])
def test_a_run_that_ends_with_an_error_changes_nothing_in_the_folder(finished, overrides, change):
    folder, _ = finished
    before = digests(folder)
    with pytest.raises(ValueError, match="differ|changed|another"):
        run_here("conf=demo", *overrides, change)
    assert digests(folder) == before


def test_a_stage_runs_alone_on_the_files_of_earlier_stages(finished: tuple[Path, str], overrides: list[str]) -> None:
    folder, _ = finished
    before = summary(folder)
    untouched = {
        name: digest for name, digest in digests(folder).items() if name.startswith(("distill/", "train/", "drafter/"))
    }
    shutil.rmtree(folder / "eval")
    run_here("conf=demo", *overrides, "stages=[eval]")
    after = summary(folder)
    assert [row["method"] for row in after] == [row["method"] for row in before]
    # The pace of a merge follows the clock, and so do its tokens per step.
    for old, new in zip(before, after, strict=True):
        assert "+" in old["method"] or old["tokens_per_step"] == new["tokens_per_step"]
    assert untouched == {name: digest for name, digest in digests(folder).items() if name in untouched}


def test_config_yaml_records_the_options_that_each_stage_ran_with(finished: tuple[Path, str], overrides: list[str]) -> None:
    folder, _ = finished
    before = OmegaConf.load(folder / "config.yaml")
    # Changed options of stages that don't run now must not reach the file.
    run_here("conf=demo", *overrides, "stages=[eval]", "train.learning_rate=0.5", "distill.horizon=4")
    after = OmegaConf.load(folder / "config.yaml")
    assert {**after, "stages": None} == {**before, "stages": None}
    assert after.train.learning_rate != 0.5


def test_sizes_that_cannot_be_are_an_error_before_the_rehearsal(overrides, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.cli.run.rehearse", lambda *_: pytest.fail("it was rehearsed"))
    command = ["conf=demo", *overrides[1:], f"output_dir={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match=r"distill\.top_logprobs is 99999999, and the target .* tokens; lower it"):
        run_here(*command, "distill.top_logprobs=99999999")
    with pytest.raises(ValueError, match=r"its largest option is drafter\.exit_width=1000000000: lower it"):
        run_here(*command, "drafter={exit_width: 1000000000, head_init: random}")


@pytest.mark.parametrize("text", ["- a\n- list\n", "a: [", "\x00", "a: " + "[" * 2000])
def test_a_damaged_configuration_is_an_error_before_any_work(overrides: list[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml is not a configuration"):
        run_here("conf=demo", *overrides[1:], f"output_dir={tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(("stage", "missing"), [("train", "manifest.json"), ("eval", "holds no drafter")])
def test_a_stage_without_its_input_is_an_error_that_names_the_file(overrides, tmp_path, stage, missing):
    with pytest.raises(ValueError, match=missing):
        run_here("conf=demo", *overrides[1:], f"output_dir={tmp_path / 'empty'}", f"stages=[{stage}]")
    assert not (tmp_path / "empty").exists()


def test_more_medusa_heads_than_the_horizon_trains_are_an_error(finished: tuple[Path, str], overrides: list[str]) -> None:
    folder, _ = finished
    before = digests(folder)
    medusa = "+variants.heads.drafter={kind: medusa, num_heads: 4}"
    with pytest.raises(ValueError, match=r"num_heads is 4 and distill\.horizon 3"):
        run_here("conf=demo", *overrides, "stages=[train]", "distill.horizon=5", medusa)
    assert digests(folder) == before


@pytest.mark.slow
def test_more_steps_set_what_is_of_the_earlier_drafter_aside(finished, overrides, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    options = [*overrides, f"output_dir={folder}"]
    run_here("conf=demo", *options, "stages=[train,eval]")
    before, package = digests(folder / "eval"), digests(folder / "package")
    with caplog.at_level("WARNING", "outrider"):
        run_here("conf=demo", *options, "stages=[train,eval,export]", "train.steps=4")
    assert f"package has other weights than {folder / 'drafter'}" in caplog.text
    assert digests(folder / "package_earlier_1") == package, "it would be pushed with the earlier weights"
    assert digests(folder / "package")["model.safetensors"] == digests(folder / "drafter")["model.safetensors"]
    assert f"other drafters than {folder / 'drafter'}, or of these before more training: it is now " in caplog.text
    assert str(folder / "eval_earlier_1") in caplog.text
    assert digests(folder / "eval_earlier_1") == before
    assert digests(folder / "eval")["records.jsonl"] != before["records.jsonl"]


@pytest.mark.slow
def test_the_ablation_compares_both_labels_in_one_table(overrides: list[str], tmp_path: Path) -> None:
    run_here("conf=ablation_demo", *overrides[1:], f"output_dir={tmp_path}")
    methods = [row["method"] for row in summary(tmp_path)]
    assert len(methods) == 3
    assert [any(name in method for method in methods[1:]) for name in ("distilled", "text")] == [True, True]
    cards = [(tmp_path / "variants" / name / "package/README.md").read_text() for name in ("distilled", "text")]
    assert ["on the target's own continuations" in card for card in cards] == [True, False]
    assert all("- Data: modules of Python's standard library" in card and "| mt_bench (2) |" in card for card in cards)
    weights = {sha256_file(tmp_path / "variants" / name / "drafter" / "model.safetensors") for name in ("distilled", "text")}
    assert len(weights) == 2
