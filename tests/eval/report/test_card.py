"""The model card: it has only figures and facts from this drafter's files."""

import ast
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard
from markdown_it import MarkdownIt

from outrider.data.files import sha256_file
from outrider.eval.config import CardOptions
from outrider.eval.report.card import model_card
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.drafters.registry import DRAFTERS
from outrider.models.drafters.saved.parts import parse_drafter_name
from outrider.models.export.registry import programs_for
from outrider.models.llm.hf_target import HFTarget

from ...commands import invoke
from ..conftest import forge_info


def forge_summary(folder: Path, rows: list[Any]) -> None:
    """Write a summary of other rows, with its digest."""
    (folder / "summary.json").write_text(json.dumps(rows))
    (folder / "facts.json").write_text(json.dumps({"summary_sha256": sha256_file(folder / "summary.json")}))


@pytest.fixture(scope="module")
def evaluation(
    tiny_target_dir: Path, tiny_drafter_dir: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output = tmp_path_factory.mktemp("evaluation") / "eval"
    command = [
        *("--target", str(tiny_target_dir), "--drafter", str(tiny_drafter_dir), "--output", str(output)),
        *("--suite", f"{{name: mt_bench, path: {questions}}}", "--max-new-tokens", "6"),
        *("--profile-prompts", "0", "--setting", "{beam_width: 3}"),
    ]
    result = invoke(["eval", *command])
    assert result.exit_code == 0, result.output
    # A busy machine must not change what the tests expect.
    rows = json.loads((output / "summary.json").read_text())
    forge_summary(output, [{**row, "noisy": False} for row in rows])
    return output


def front_matter(card: str) -> dict[str, Any]:
    _, block, _ = card.split("---\n", 2)
    return dict(yaml.safe_load(block))


def write_certificate(path: Path, **changes: Any) -> Path:
    line = {"subject": "redrafter, float32", "method": "tokens", "num_cases": 3, "result": "0 differ", "passed": True}
    certificate = {"passed": True, "false_alarm_rate": 1e-6, "environment": {}, "target": "tiny", "lines": [line], **changes}
    path.write_text(json.dumps(certificate))
    return path


def test_figures_are_those_of_the_summary(tiny_drafter_dir: Path, evaluation: Path) -> None:
    card = model_card(tiny_drafter_dir, CardOptions(records=[evaluation]))
    rows = {row["method"]: row for row in json.loads((evaluation / "summary.json").read_text())}
    (row,) = [row for method, row in rows.items() if method != "baseline"]
    low, high = row["speedup_ci95"]
    (line,) = [line for line in card.splitlines() if line.startswith("| mt_bench")]
    assert f"| {row['speedup']:.2f}x [{low:.2f}, {high:.2f}] |" in line
    assert f"| {row['tokens_per_step']:.2f}" in line
    assert f"| {row['tokens_per_second']:.1f} ({rows['baseline']['tokens_per_second']:.1f}) |" in line
    assert "| ReDrafter, 3 beams of 3 |" in line
    assert line.endswith("| yes |")
    environment = json.loads((evaluation / "run.json").read_text())["environment"]
    assert f"Measured on {environment['num_threads']} thread of {environment['cpu']}, with the target" in card


def test_an_evaluation_of_other_weights_is_refused(tiny_drafter_dir: Path, evaluation: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_drafter_dir, tmp_path / "other"))
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="measured other weights"):
        model_card(other, CardOptions(records=[evaluation]))


def test_a_note_says_that_trees_depend_on_the_clock(tiny_drafter_dir, evaluation, tmp_path):
    paced, _ = changed_summary(evaluation, tmp_path / "paced", pace="expected")
    assert "depend on the clock" in model_card(tiny_drafter_dir, CardOptions(records=[paced]))
    assert "depend on the clock" not in model_card(tiny_drafter_dir, CardOptions(records=[evaluation]))


def test_a_drafter_that_isnt_lossless_has_no_speedup(tiny_drafter_dir: Path, evaluation: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(evaluation, tmp_path / "broken"))
    rows = json.loads((broken / "summary.json").read_text())
    rows[1] |= {"lossless": False, "lossless_label": "NO: 1 of 2", "speedup": None, "num_mismatched_prompts": 1}
    forge_summary(broken, rows)
    card = model_card(tiny_drafter_dir, CardOptions(records=[broken]))
    assert "| none: not lossless |" in card
    assert "| NO: 1 of 2 |" in card
    assert "The text is still the target's" not in card
    assert "model-index" not in front_matter(card), "the Hub would show the figures of wrong answers"
    assert "The text is still the target's" in model_card(tiny_drafter_dir, CardOptions(records=[evaluation]))


def changed_summary(evaluation: Path, copy: Path, **changes: Any) -> tuple[Path, dict[str, Any]]:
    """Return a copy of the evaluation with other figures of the drafter, and its row."""
    shutil.copytree(evaluation, copy)
    rows = json.loads((copy / "summary.json").read_text())
    rows[1] |= {"speedup": 1.23, "speedup_ci95": [1.11, 1.34], **changes}
    forge_summary(copy, rows)
    return copy, rows[1]


def metrics_of(card: str) -> list[str]:
    (result,) = front_matter(card)["model-index"][0]["results"]
    return [metric["type"] for metric in result["metrics"]]


def test_a_noisy_speed_is_marked_and_isnt_sent_to_the_hub(tiny_drafter_dir: Path, evaluation: Path, tmp_path: Path) -> None:
    noisy, _ = changed_summary(evaluation, tmp_path / "noisy", noisy=True)
    card = model_card(tiny_drafter_dir, CardOptions(records=[noisy]))
    assert "| 1.23x [1.11, 1.34], noisy |" in card
    assert "noisy: more than" in card
    assert metrics_of(card) == ["tokens_per_step"], "the Hub would show the speed without its mark"


# --- the example


def merged_copy(evaluation: Path, copy: Path, alone: float, merged: float) -> Path:
    """Return a copy with the speedups of the drafter alone and of a merge."""
    shutil.copytree(evaluation, copy)
    info, (plain, row) = (json.loads((copy / name).read_text()) for name in ("run.json", "summary.json"))
    (method,) = info["config"]["methods"].values()
    setting = {"tree_nodes": 20, "pace": "fixed"}
    tree = {"tree_nodes": 20, "pace": "fixed", "redrafter": method["config"], "suffix": {}, "recycling": {}}
    merge = {**method, "kind": "redrafter+suffix+recycling", "config": tree, "setting": setting}
    info["config"]["methods"]["merge"] = merge
    forge_info(copy, info)
    forge_summary(copy, [plain, {**row, "speedup": alone}, {**row, "method": "merge", "speedup": merged}])
    return copy


def example(card: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    ast.parse(code)
    return next(line for line in code.splitlines() if "generate(" in line)


def test_the_example_runs_the_fastest_measured_call(tiny_drafter_dir: Path, evaluation: Path, tmp_path: Path) -> None:
    merge = model_card(tiny_drafter_dir, CardOptions(records=[merged_copy(evaluation, tmp_path / "merge", 0.97, 2.24)]))
    arguments = "drafter=drafter + \"+suffix+recycling\", drafter_options={'tree_nodes': 20, 'pace': 'fixed'}"
    assert f"custom_generate=drafter, {arguments}, trust_remote_code=True" in example(merge)
    assert "the fastest of the calls that were measured: 2.24x" in merge
    assert "merged with suffix and recycling, which need no training" in merge
    alone = model_card(tiny_drafter_dir, CardOptions(records=[merged_copy(evaluation, tmp_path / "alone", 1.5, 1.2)]))
    assert "custom_generate=drafter, drafter_options={'beam_width': 3}, trust_remote_code=True" in example(alone)
    parts = parse_drafter_name(f"{tiny_drafter_dir}+suffix+recycling")
    packaged = model_card(parts, CardOptions(records=[tmp_path / "merge"]))
    assert "custom_generate=drafter, drafter_options=" in example(packaged), "the package drafts with these parts anyway"
    alone_again = model_card(parts, CardOptions(records=[tmp_path / "alone"]))
    assert "custom_generate=drafter, drafter=drafter, drafter_options=" in example(alone_again)


def test_the_fastest_call_is_valid_on_every_suite(tiny_drafter_dir: Path, evaluation: Path, tmp_path: Path) -> None:
    """The merge is faster on one suite. What counts is the mean over the suites, of calls without a fault on any."""
    copy = merged_copy(evaluation, tmp_path / "copy", 1.21, 2.5)
    plain, alone, merge = json.loads((copy / "summary.json").read_text())

    def card_with(alone_elsewhere: float, **merge_elsewhere: Any) -> str:
        rows = [plain, {**alone, "speedup": alone_elsewhere}, {**merge, **merge_elsewhere}]
        forge_summary(copy, [plain, alone, merge, *({**row, "suite": "gsm8k"} for row in rows)])
        return model_card(tiny_drafter_dir, CardOptions(records=[copy]))

    both = card_with(1.0, speedup=0.9, noisy=True)
    assert "calls that were measured: 1.50x of plain decoding, on average over 2 suites, noisy. The drafter is merged" in both
    faults: list[dict[str, Any]] = [
        {"out_of_memory": True, "speedup": None},
        {"lossless": False, "lossless_label": "NO", "speedup": None, "num_mismatched_prompts": 1},
    ]
    for fault in faults:
        card = card_with(1.0, **fault)
        assert "1.10x of plain decoding, on average over 2 suites." in card
        assert "drafter_options={'beam_width': 3}" in example(card)
    # One suite with a gain isn't enough.
    assert "**No measured call was faster than plain decoding: 0.98x at best, on average over 2 suites**" in card_with(
        0.8, **faults[0]
    )


def test_a_loss_is_said_in_the_first_line(tiny_drafter_dir: Path, evaluation: Path, tmp_path: Path) -> None:
    lost = model_card(tiny_drafter_dir, CardOptions(records=[merged_copy(evaluation, tmp_path / "lost", 0.97, 0.8)]))
    first = next(line for line in lost.split("# ReDrafter for", 1)[1].splitlines()[1:] if line)
    assert first.startswith("**No measured call was faster than plain decoding: 0.97x at best**")
    assert "custom_generate=drafter, trust_remote_code=True" in example(lost)
    assert "the fastest of the calls" not in lost
    assert "No measured call" not in model_card(tiny_drafter_dir, CardOptions())


def test_a_setting_that_would_be_code_is_an_error(tiny_drafter_dir: Path, evaluation: Path, tmp_path: Path) -> None:
    copy = merged_copy(evaluation, tmp_path / "copy", 0.97, 2.24)
    info = json.loads((copy / "run.json").read_text())
    info["config"]["methods"]["merge"]["setting"] = {"pace": "a\n```\n<b>"}
    forge_info(copy, info)
    with pytest.raises(ValueError, match="pace"):
        model_card(tiny_drafter_dir, CardOptions(records=[copy]))


def test_a_card_claims_nothing_where_memory_ran_out(tiny_drafter_dir: Path, evaluation: Path, tmp_path: Path) -> None:
    short = Path(shutil.copytree(evaluation, tmp_path / "short"))
    plain, drafted = json.loads((short / "summary.json").read_text())
    empty = {**drafted, "batch_size": 64, "out_of_memory": True, "tokens_per_second": None, "speedup": None}
    forge_summary(short, [plain, drafted, {**plain, "batch_size": 64}, empty])
    card = model_card(tiny_drafter_dir, CardOptions(records=[short]))
    assert len([line for line in card.splitlines() if line.startswith("| mt_bench")]) == 1
    assert "batch size 64" not in card
    assert "The text is still the target's" in card, "nothing was wrong"
    forge_summary(short, [{**plain, "batch_size": 64}, empty])
    with pytest.raises(ValueError, match="ran out of memory everywhere in .*; omit this evaluation"):
        model_card(tiny_drafter_dir, CardOptions(records=[short]))


def test_unknown_facts_are_marked_and_left_out_of_the_front_matter(tiny_drafter_dir: Path) -> None:
    card = model_card(tiny_drafter_dir, CardOptions())
    assert "No evaluation is part of this card" in card
    assert "Drafter: not stated" in card
    assert "- Data: unknown\n- Cost: unknown" in card
    assert "## Certificate" not in card
    assert 'target = "path/to/target"  # set this to the directory of the target' in card
    assert '--target "path/to/target"' in card
    assert 'drafter = "."  # the folder of this card' in card
    assert not re.search(r"\b(TARGET|FOLDER)\b", card), "no placeholder"
    known = front_matter(card)
    assert known == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["custom_generate", "speculative-decoding", "outrider", "redrafter"],
    }


def test_names_and_licence_reach_front_matter_and_commands(tiny_drafter_dir: Path) -> None:
    options = CardOptions(licence="apache-2.0", base_model="some/target", repo="some/drafter")
    card = model_card(tiny_drafter_dir, options)
    assert (front_matter(card)["license"], front_matter(card)["base_model"]) == ("apache-2.0", "some/target")
    assert 'drafter = "some/drafter"\n' in card
    assert 'target = "some/target"\n' in card
    assert "Drafter: apache-2.0." in card


def test_the_card_lists_a_certificate_line_by_line(tiny_drafter_dir: Path, tmp_path: Path) -> None:
    weights = sha256_file(tiny_drafter_dir / "model.safetensors")
    path = write_certificate(tmp_path / "certificate.json", drafters={"redrafter": weights})
    card = model_card(tiny_drafter_dir, CardOptions(certificate=path))
    assert "**Lossless.**" in card
    assert "at most 1.0e-06" in card
    assert "| redrafter, float32 | tokens | 3 | 0 differ | pass |" in card
    assert "which drafter's weights" not in card


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"weights_sha256": "00"}, "certifies decoding with another target"), ({"drafters": {"eagle": "00"}}, "other drafters")],
)
def test_a_certificate_of_another_target_or_drafter_is_refused(tiny_drafter_dir, tmp_path, changes, message):
    path = write_certificate(tmp_path / "certificate.json", **changes)
    with pytest.raises(ValueError, match=message):
        model_card(tiny_drafter_dir, CardOptions(certificate=path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lines": []}, r"lines=\[\]: must not be empty"),
        ({"passed": False}, "passed: the verdict contradicts the lines"),
    ],
)
def test_an_empty_or_altered_certificate_is_refused(tiny_drafter_dir, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        model_card(tiny_drafter_dir, CardOptions(certificate=write_certificate(tmp_path / "c.json", **changes)))


def test_the_card_shows_a_failed_certificate_as_failed(tiny_drafter_dir: Path, tmp_path: Path) -> None:
    failed = [{"subject": "redrafter", "method": "tokens", "num_cases": 3, "result": "1 differs", "passed": False}]
    path = write_certificate(tmp_path / "c.json", passed=False, lines=failed)
    card = model_card(tiny_drafter_dir, CardOptions(certificate=path))
    assert "**NOT LOSSLESS.**" in card
    assert "doesn't record the weights of its drafter" in card


DATA: dict[str, Any] = {"source": "stdlib", "path": None, "max_length": 512}


def write_run(folder: Path, trained: Path, drafter: dict[str, Any] | None = None, **data: Any) -> Path:
    """Write the folder of a training run with options of its drafter and of its data."""
    shutil.copytree(trained, folder / "drafter")
    config = {"data": {**DATA, **data}, "drafter": {"kind": "redrafter"} if drafter is None else drafter}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_data_are_those_of_the_run_without_paths_of_its_machine(tiny_drafter_dir: Path, tmp_path: Path) -> None:
    data = {**DATA, "source": "messages", "path": "HuggingFaceH4/ultrachat_200k"}
    run = write_run(tmp_path / "run", tiny_drafter_dir, **data)
    card = model_card(tiny_drafter_dir, CardOptions(run=run))
    assert "- Data: HuggingFaceH4/ultrachat_200k, cut at 512 tokens" in card
    assert "- Loss" not in card, "this configuration has none"
    trained = {"data": data, "drafter": {}, "train": {"loss": "kl"}}
    (run / "config.yaml").write_text(yaml.safe_dump(trained))
    assert "- Loss: `kl`" in model_card(tiny_drafter_dir, CardOptions(run=run))
    private = {"data": {**data, "path": str(tmp_path / "private.jsonl")}, "drafter": {"start_from": str(tmp_path / "old")}}
    (run / "config.yaml").write_text(yaml.safe_dump(private))
    card = model_card(tiny_drafter_dir, CardOptions(run=run))
    assert "- Data: texts in the form `messages`, cut at 512 tokens" in card
    assert "- Started from: the weights of a trained model" in card
    assert str(tmp_path) not in card
    (run / "drafter" / "model.safetensors").write_bytes(b"another")
    with pytest.raises(ValueError, match="other weights than this one"):
        model_card(tiny_drafter_dir, CardOptions(run=run))


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        ({"kind": "redrafter", "start_from": "some/drafter"}, "some/drafter"),
        ({"kind": "draft_model", "path": "some/model"}, "some/model"),
        ({"kind": "draft_model", "path": None}, None),
    ],
)
def test_the_card_names_the_initial_weights_of_the_training(tiny_drafter_dir, tmp_path, drafter, name):
    card = model_card(tiny_drafter_dir, CardOptions(run=write_run(tmp_path, tiny_drafter_dir, drafter)))
    lines = [line for line in card.splitlines() if line.startswith("- Started")]
    assert lines == ([f"- Started from: the weights of {name}, not from random ones"] if name else [])


def test_a_path_that_looks_like_a_hub_name_is_left_out_of_the_card(tiny_drafter_dir, tmp_path, monkeypatch):
    """A run's paths are relative to its working directory, and not to that of packaging."""
    (tmp_path / "private" / "old").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    data = {"source": "sharegpt", "path": "private/chats.jsonl"}
    run = write_run(tmp_path / "outputs" / "demo", tiny_drafter_dir, {"start_from": "private/old"}, **data)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "private" not in model_card(tiny_drafter_dir, CardOptions(run=run))


@pytest.mark.parametrize("options", [{"repo": 'x"); evil("'}, {"base_model": "a/b\n# Mine"}, {"licence": "mit\nmine: 1"}])
def test_options_that_would_inject_text_into_the_card_are_refused(options, tiny_drafter_dir):
    with pytest.raises(ValueError, match="give"):
        model_card(tiny_drafter_dir, CardOptions(**options))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        *(("config.yaml", text, "is not the configuration of a run") for text in ("a: [", "- x", "data: 3", "\x00")),
        ("config.yaml", "[" * 2000, "is not the configuration of a run"),
        ("config.yaml", yaml.safe_dump({"data": {**DATA, "max_length": "<b>"}, "drafter": {}}), r"data\.max_length"),
        ("config.yaml", yaml.safe_dump({"data": {"path": None}, "drafter": {}}), r"data\.source"),
        ("distill/stats.json", '{"process_seconds": "many"}', "process_seconds"),
    ],
)
def test_an_invalid_file_of_a_run_is_named(tiny_drafter_dir: Path, tmp_path: Path, file: str, text: str, message: str) -> None:
    run = write_run(tmp_path / "run", tiny_drafter_dir)
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_text(text)
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        model_card(tiny_drafter_dir, CardOptions(run=run))


def test_the_card_gives_the_cost_of_the_training(tiny_drafter_dir: Path, tmp_path: Path) -> None:
    drafter = Path(shutil.copytree(tiny_drafter_dir, tmp_path / "drafter"))
    facts = {
        "steps": 500,
        "seconds": 1234.5,
        "positions_seen": 10,
        "tokens_seen": 20000,
        "parameters": 1000,
        "hardware": "8 x H",
    }
    (drafter / "training.json").write_text(json.dumps({**facts, "tokens_per_step_estimate": 2.0, "labels": "distilled"}))
    card = model_card(drafter, CardOptions())
    assert "500 steps on the target's own continuations, 20,000 tokens seen, 10 positions trained, 1,234 s on 8 x H" in card
    assert "1,000 parameters" in card


def test_the_hub_reads_the_figures_back(tiny_drafter_dir: Path, evaluation: Path) -> None:
    options = CardOptions(records=[evaluation], base_model="some/target", repo="some/drafter", licence="mit")
    data = ModelCard(model_card(tiny_drafter_dir, options)).data
    row = json.loads((evaluation / "summary.json").read_text())[1]
    assert (data.base_model, data.license, data.model_name) == ("some/target", "mit", "some/drafter")
    results = {result.metric_type: result for result in data.eval_results}
    assert all(isinstance(result, EvalResult) for result in results.values())
    assert {name: result.metric_value for name, result in results.items()} == {
        name: round(row[name], 2) for name in ("tokens_per_step", "speedup")
    }
    assert results["speedup"].metric_name == "Speedup over plain decoding, greedy, ReDrafter, 3 beams of 3"
    assert {(result.task_type, result.dataset_name) for result in results.values()} == {("text-generation", "mt_bench")}


ENGINES_BY_KIND: dict[str, tuple[str, ...]] = {
    "block": (),
    "draft_model": ("--to vllm", "STANDALONE", "assistant_model"),
    "eagle": ("--to vllm", '"method": "eagle"', "--speculative-algorithm EAGLE "),
    "eagle3": ("--to vllm", '"method": "eagle3"', "--speculative-algorithm EAGLE3 "),
    "medusa": ("--to medusa", "medusa.inference.cli", "--to tensorrt-llm"),
    "mtp": (),
    "redrafter": ("--to apple", "recurrent_drafting.cmd.generate"),
}


@pytest.mark.parametrize("kind", sorted(DRAFTERS))
def test_the_code_on_the_card_of_every_kind_can_be_parsed(kind: str, tiny_target: HFTarget, tmp_path: Path) -> None:
    config = {"kind": kind, **{"draft_model": {"num_layers": 1}, "mtp": {"init": "random"}}.get(kind, {})}
    save_drafter(build_drafter(parse_drafter(config), tiny_target), tmp_path / "drafter", tiny_target.identity)
    card = model_card(tmp_path / "drafter", CardOptions())
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    ast.parse(code)
    assert all(text in card for text in ENGINES_BY_KIND[kind])
    assert not re.search(r"\b(TARGET|FOLDER)\b|{{|None", card)
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("layer", "engines"),
    [({"model_type": "llama"}, {"vllm", "sglang"}), ({"model_type": "qwen2"}, {"sglang"}), ({"model_type": "qwen3"}, set())],
)
def test_the_card_has_commands_only_for_engines_that_can_load_the_drafter(layer, engines, tiny_target, tmp_path):
    drafter = build_drafter(parse_drafter({"kind": "eagle", "layer": layer, "init": "random"}), tiny_target)
    save_drafter(drafter, tmp_path / "drafter", tiny_target.identity)
    programs = programs_for(tmp_path / "drafter", tiny_target)
    assert programs & {"vllm", "sglang"} == engines
    card = model_card(tmp_path / "drafter", CardOptions(), programs)
    assert {name for name in ("vllm", "sglang") if f"--to {name}" in card} == engines
    assert ("no serving engine" in card) == (not engines)
    without_target = model_card(tmp_path / "drafter", CardOptions())
    assert ("no serving engine" in without_target) == (not engines), "the names of the weights suffice here"


@pytest.mark.parametrize(
    ("quantization", "code"),
    [
        ({"method": "torchao", "type": "Int8WeightOnlyConfig"}, "TorchAoConfig(Int8WeightOnlyConfig())"),
        ({"method": "bitsandbytes", "load_in_4bit": True}, "BitsAndBytesConfig(load_in_4bit=True)"),
    ],
)
def test_the_card_loads_a_quantised_target(tiny_drafter_dir, tmp_path, quantization, code):
    card = model_card(tiny_drafter_dir, CardOptions(quantization=quantization))
    assert f"quantization_config={code}" in card
    assert f"--quantization '{json.dumps(quantization)}'" in card
    trained = Path(shutil.copytree(tiny_drafter_dir, tmp_path / "trained"))
    config = json.loads((trained / "config.json").read_text())
    config["target"]["quantization"] = json.dumps(quantization)
    (trained / "config.json").write_text(json.dumps(config))
    assert f"quantization_config={code}" in model_card(trained, CardOptions()), "as it was for the training"


@pytest.mark.parametrize(
    ("template", "name"),
    [(None, "the target's own"), ("vicuna_v1.1", "vicuna_v1.1"), ("/home/me/mine.jinja", "mine.jinja")],
)
def test_the_chat_template_of_the_training_is_named(tiny_drafter_dir, tmp_path, template, name):
    run = write_run(tmp_path, tiny_drafter_dir, chat_template=template)
    card = model_card(tiny_drafter_dir, CardOptions(run=run))
    assert f"- Chat template: {name}\n" in card
    assert ("apply_chat_template" in card) == (template is None)


def test_several_sources_and_options_of_the_template_are_named(tiny_drafter_dir, tmp_path):
    sources = [{"source": "messages", "path": "hf:me/chats"}, {"source": "text", "path": str(tmp_path)}, {"source": "stdlib"}]
    options = {"template_options": {"enable_thinking": False, "strftime_now": "1 May"}, "train_on": "last"}
    run = write_run(tmp_path, tiny_drafter_dir, source=None, path=None, sources=sources, **options)
    card = model_card(tiny_drafter_dir, CardOptions(run=run))
    assert "- Data: me/chats, texts in the form `text`, modules of Python's standard library, cut at" in card
    assert '- Chat template: the target\'s own with `{"enable_thinking": false, "strftime_now": "1 May"}`' in card
    assert "add_generation_prompt=True, enable_thinking=False, return_tensors" in card
    assert "- Trained on: the last answer of each text\n" in card


def test_the_card_of_a_merge_names_all_parts_in_its_command(tiny_drafter_dir: Path) -> None:
    card = model_card(parse_drafter_name(f"{tiny_drafter_dir}+suffix"), CardOptions(repo="user/drafter"))
    assert "# ReDrafter + Suffix for" in card
    assert '--drafter "user/drafter+suffix"' in card
    assert "together with suffix (training-free" in card


def test_the_card_of_training_free_drafters_has_code_and_no_figures(tmp_path: Path) -> None:
    parts = parse_drafter_name("prompt_lookup+suffix")
    card = model_card(parts, CardOptions(base_model="user/target", repo="user/drafter"))
    assert "# Prompt lookup + Suffix" in card
    assert "--drafter prompt_lookup+suffix" in card
    with pytest.raises(ValueError, match="has no weights that an evaluation could belong to"):
        model_card(parts, CardOptions(records=[tmp_path]))


NASTY = "<script>alert(1)</script> [x](javascript:y) `z`\n\n# Mine\n---"


def test_texts_of_strangers_are_never_markup(tiny_drafter_dir: Path, evaluation: Path, tmp_path: Path) -> None:
    """Neither those of a drafter and its facts, nor those of its run and its evaluation."""
    drafter = Path(shutil.copytree(tiny_drafter_dir, tmp_path / "drafter"))
    config = json.loads((drafter / "config.json").read_text())
    for name in ("name", "revision", "weights_sha256", "tokenizer_sha256"):
        config["target"][name] = NASTY
    (drafter / "config.json").write_text(json.dumps(config))
    facts: dict[str, Any] = {"steps": 5, "seconds": 1.5, "positions_seen": 1, "tokens_seen": 2, "parameters": 3}
    facts |= {"tokens_per_step_estimate": 2.0, "labels": "text", "hardware": NASTY}
    (drafter / "training.json").write_text(json.dumps(facts))
    measured = Path(shutil.copytree(evaluation, tmp_path / "measured"))
    info = json.loads((measured / "run.json").read_text())
    info["environment"] |= {"cpu": NASTY, "packages": {NASTY: NASTY}}
    forge_info(measured, info)
    run = write_run(tmp_path / "run", tiny_drafter_dir, source=NASTY, chat_template=NASTY, template_options={NASTY: NASTY})
    page = ModelCard(model_card(drafter, CardOptions(records=[measured], run=run))).text
    tokens = [token for outer in MarkdownIt("commonmark").parse(page) for token in (outer, *(outer.children or ()))]
    assert not [token for token in tokens if token.type in ("html_block", "html_inline", "image")]
    links = {token.attrGet("href") for token in tokens if token.type == "link_open"}
    assert links <= {"https://github.com/huggingface/transformers", "#speed"}
    headings = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    assert "Mine" not in headings
    assert len(headings) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "<b>redrafter</b>"}, "there are: "),
        ({"drafter": {"beam_width": "4}'; rm -rf ~ #"}}, "beam_width"),
        ({"target": {"quantization": '{"method": "torchao", "type": "X; import os"}'}}, "which is no name"),
        ({"target": {"quantization": '{"method": "<b>"}'}}, "needs a method of"),
        ({"target": {"quantization": "{"}}, "quantization of the drafter's target can't be read"),
    ],
)
def test_values_that_would_be_code_in_the_card_are_errors(tiny_drafter_dir, tmp_path, change, message):
    drafter = Path(shutil.copytree(tiny_drafter_dir, tmp_path / "drafter"))
    config = json.loads((drafter / "config.json").read_text())
    for name, value in change.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        model_card(drafter, CardOptions())


def test_an_edited_evaluation_reaches_no_card(tiny_drafter_dir: Path, evaluation: Path, tmp_path: Path) -> None:
    edited = Path(shutil.copytree(evaluation, tmp_path / "eval"))
    (edited / "summary.json").write_text((edited / "summary.json").read_text().replace("0.", "1.", 1))
    with pytest.raises(ValueError, match=r"summary.json in .* isn't the one that its evaluation wrote.*Run the evaluation's"):
        model_card(tiny_drafter_dir, CardOptions(records=[edited]))
    (edited / "facts.json").unlink()
    with pytest.raises(ValueError, match=r"summary.json in .* isn't the one that its evaluation wrote"):
        model_card(tiny_drafter_dir, CardOptions(records=[edited]))
