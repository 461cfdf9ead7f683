"""Command lines: one rule for the options of all commands, made from the configuration's classes."""

import json
import subprocess
import sys
from dataclasses import field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic.dataclasses import dataclass

from outrider.cli.build import build_options
from outrider.cli.command_line import CommandLine, read_command_line
from outrider.cli.commands import COMMANDS
from outrider.cli.compose import read_run_line
from outrider.cli.describe import sections_of
from outrider.cli.help import WIDTH
from outrider.cli.launch import require_gpus
from outrider.cli.options import with_limit
from outrider.data.fields import OPTIONS, PositiveInt
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.models.llm.config import TargetConfig

from ..commands import invoke


@dataclass(kw_only=True, config=OPTIONS)
class Options:
    """Options of a command of these tests."""

    words: str
    drafter: list[str] = field(default_factory=list)
    limit: PositiveInt | None = None
    check: bool = True
    seed: PositiveInt = 1
    launch: str | None = None
    target: TargetConfig
    eval: EvalConfig

    POSITIONAL: ClassVar = ("words",)
    DEFAULTS: ClassVar = {"eval": {"max_new_tokens": 64}}


def read(*arguments: str) -> CommandLine:
    return read_command_line(arguments, sections_of(Options), launches=True)


def options(*arguments: str) -> Options:
    return build_options(Options, ["word", "--target", "x", "--suite", "stdlib", *arguments])[0]


def message(*arguments: str) -> str:
    with pytest.raises(ValueError) as error:
        build_options(Options, arguments)
    return " ".join(str(error.value).split())


# --- the rule


@pytest.mark.parametrize(
    "form",
    [
        ["--max-new-tokens", "64"],
        ["--max-new-tokens=64"],
        ["--max_new_tokens", "64"],
        ["--eval.max-new-tokens", "64"],
        ["eval.max_new_tokens=64"],
        ["max_new_tokens=64"],
        ["+eval.max_new_tokens=64"],
    ],
)
def test_a_flag_and_a_configurations_name_are_the_same_option(form: list[str]) -> None:
    line = read(*form)
    assert line.values == {"eval.max_new_tokens": 64}
    assert (line.problems, line.own) == ([], form)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("--target X", {"target.name_or_path": "X"}),
        ("target=X", {"target.name_or_path": "X"}),
        ("target={name_or_path: X}", {"target": {"name_or_path": "X"}}),
        ("suites=a", {"eval.suites": ["a"]}),
        ("--fast-linears false --compiled true", {"target.fast_linears": False, "target.compiled": True}),
        ("--limit -3", {"limit": -3}),
        ("--drafter a --drafter b,c", {"drafter": ["a", "b", "c"]}),
        ("--suite a --suites b", {"eval.suites": ["a", "b"]}),
        ("--suite [a,{name: b, path: c}]", {"eval.suites": ["a", {"name": "b", "path": "c"}]}),
        ("--batch-size 1,2 --batch-size 4", {"eval.batch_sizes": [1, 2, 4]}),
        ("--batch-size 1,2 eval.batch_sizes=[4] --batch-size 8", {"eval.batch_sizes": [4, 8]}),
        ("eval={seed: 1, repeats: 2} eval={repeats: 4}", {"eval": {"seed": 1, "repeats": 4}}),
        ("--stage-layers 8,8", {"target.stage_layers": [8, 8]}),
        ("--stage-layers null", {"target.stage_layers": None}),
        ("--setting {depth: 5} --setting {depth: 6}", {"eval.settings": [{"depth": 5}, {"depth": 6}]}),
        ("--compiled --no-fast-linears", {"target.compiled": True, "target.fast_linears": False}),
        ("--compiled=false --no-check", {"target.compiled": False, "check": False}),
        ("--revision 1e5", {"target.revision": "1e5"}),
        ("--revision 'a'", {"target.revision": "a"}),
        ("--quantization torchao", {"target.quantization": "torchao"}),
        ("--device-map {'': 0, model.layers.20: 1}", {"target.device_map": {"": 0, "model.layers.20": 1}}),
        ("--seed 3", {"seed": 3}),
        ("--eval.seed 3", {"eval.seed": 3}),
        ("eval.temperatures=1e-1", {"eval.temperatures": [0.1]}),
    ],
)
def test_values_are_read_by_the_type_of_their_field(arguments: str, values: dict[str, Any]) -> None:
    words: list[str] = []
    for word in arguments.split(" "):  # a value in braces is one word
        if words and words[-1].count("{") + words[-1].count("[") > words[-1].count("}") + words[-1].count("]"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    line = read(*words)
    assert (line.values, line.problems) == (values, [])


def test_a_name_of_two_sections_is_asked_for_with_its_section() -> None:
    line = read_run_line(["--max-new-tokens", "3", "max_new_tokens=3", "demo", "--plann"])
    assert line.values["conf"] == ["demo"]
    flag, name, other = line.problems
    assert flag.endswith("several sections; give --distill.max-new-tokens or --eval.max-new-tokens")
    assert name.endswith("several sections; give distill.max_new_tokens or eval.max_new_tokens")
    assert "did you mean --plan?" in other
    assert read_run_line(["demo", "--seed", "3"]).values == {"seed": 3, "conf": ["demo"]}
    assert read_run_line(["demo", "--drafter.beam-width", "3"]).values["drafter.beam_width"] == 3


def test_a_sections_name_chooses_packaged_settings_of_a_run() -> None:
    line = read_run_line(["demo", "--target", "vicuna_7b", "drafter=medusa", "train={steps: 3}"])
    assert (line.values["target"], line.values["drafter"], line.values["train"]) == ("vicuna_7b", "medusa", {"steps": 3})


def test_a_commands_options_are_built_by_the_configurations_classes() -> None:
    built = options("--drafter", "suffix", "--dtype", "float32", "eval.batch_sizes=[2]", "--limit", "3")
    assert (built.words, built.drafter, built.limit) == ("word", ["suffix"], 3)
    assert built.target == TargetConfig(name_or_path="x", dtype="float32")
    assert built.eval == EvalConfig(suites=[SuiteConfig(name="stdlib")], batch_sizes=[2], max_new_tokens=64)


def test_a_limit_is_for_the_suites_without_their_own() -> None:
    config = EvalConfig(suites=[SuiteConfig(name="stdlib"), SuiteConfig(name="gsm8k", limit=3)])
    assert [suite.limit for suite in with_limit(config, 2).suites] == [2, 3]


def test_the_home_directory_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    built = options("--target", "~/model", "--drafter", "draft_model:~/other")
    assert built.target.name_or_path == f"{tmp_path}/model"
    assert built.drafter == [f"draft_model:{tmp_path}/other"]


# --- mistakes


def test_one_error_names_all_mistakes() -> None:
    text = message("--max-new-tokns", "3", "eval.bath_sizes=[1]", "eval.repeats=x", "target.dtype=int3", "a", "b")
    assert text.startswith("7 problem(s)")
    for part in (
        "there is no option --max-new-tokns; did you mean --max-new-tokens?",
        "eval.bath_sizes: there is no such option; did you mean eval.batch_sizes?",
        'eval.repeats="x": must be a whole number',
        'target.dtype="int3": must be one of auto,',
        "target.name_or_path is missing; give target.name_or_path=VALUE",
        "eval.suites is missing; give eval.suites=VALUE",
        "b is one argument too many",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("eval.settings=[{a: 1]", "which can't be read; close each bracket and quote"),
        ("eval.settings={depth:5}", "'depth:5' is one word; put a space after the colon"),
        ("--limit", "--limit needs a value: whole number above 0"),
        ("--launch", "--launch needs a value: a launch file"),
        ("--drafter --limit 3", "--drafter needs a value: list of texts"),
        ("--drafter eval.seed=3", "--drafter needs a value: list of texts"),
        ("-steps 3", "there is no option -steps; did you mean"),
        ("--targt x", "there is no option --targt; did you mean --target?"),
        ("--xyzzy", "there is no option --xyzzy (--help"),
        ("---limit 3", "there is no option ---limit; did you mean --limit?"),
        ("--launch cpu --num_procesess 3", "there is no option --num_procesess; did you mean --num_processes?"),
        ("--launch cpu --limt 3", "there is no option --limt; did you mean --limit?"),
    ],
)
def test_a_value_that_cant_be_read_is_named(argument: str, wrong: str) -> None:
    assert wrong in message("word", *([argument] if "{" in argument else argument.split()))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("eval --target ./no/target --drafter suffix --suite stdlib", "name_or_path is './no/target', and there is no such"),
        ("eval --target ./no/target --drafter suffix --suite stdlib --chat-template t.jinja", "chat_template is 't.jinja'"),
        ("eval --target ./no/target --drafter ./d --suite stdlib", "d holds no drafter"),
        ("certify --target ./no/target --drafter suffix --suite q.jsonl", "'q.jsonl' does not exist"),
        ("tune --target ./no/target --drafter ./d", "d holds no drafter"),
        ("export ./d --target ./no/target --to vllm --output out", "d holds no drafter"),
        ("import ./d/e --target ./no/target --output out", "./d/e is neither a local folder nor a name on the Hub"),
        ("package suffix --output out --certificate c.json", "suffix has no weights"),
        ("report a b", "a has no summary.json"),
    ],
)
def test_a_missing_file_is_one_error_before_any_weights_are_read(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(command.split())
    assert (result.exit_code, message in result.message) == (2, True), result.message


# --- launches


@pytest.mark.parametrize(
    ("arguments", "options", "own"),
    [
        ("--launch one_node --num_processes 4 a.yaml train.steps=1", ["--num_processes", "4"], ["a.yaml", "train.steps=1"]),
        ("demo --launch=cpu --multi_gpu train.steps=1 --plan", ["--multi_gpu"], ["demo", "train.steps=1", "--plan"]),
        ("demo launch=cpu --num-processes 2", ["--num-processes", "2"], ["demo"]),
        ("--launch cpu --num_machines=2 demo --train.steps 3", ["--num_machines=2"], ["demo", "--train.steps", "3"]),
    ],
)
def test_unknown_options_after_a_launch_file_are_accelerates(arguments: str, options: list[str], own: list[str]) -> None:
    line = read_run_line(arguments.split())
    assert line.launch in ("one_node", "cpu")
    assert (line.launch_options, line.own, line.problems) == (options, own, [])


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
def test_a_launch_without_enough_gpus_is_an_error(gpus, file, options, remedy, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)
    if remedy is None:
        require_gpus(file, options)
        return
    with pytest.raises(ValueError, match=remedy):
        require_gpus(file, options)


# --- help, and what is loaded


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_its_options_in_80_columns(command: str) -> None:
    for more in ([], ["--all"]):
        result = invoke([*command.split(), "--help", *more])
        assert result.exit_code == 0
        assert result.output.startswith(f"Usage: outrider {command}")
        assert max(len(line) for line in result.output.splitlines()[1:]) <= WIDTH


def test_version_is_the_installed_one() -> None:
    assert invoke(["--version"]).output == f"outrider {version('outrider')}\n"


def test_the_help_lists_the_usual_options_and_all_on_demand() -> None:
    short, everything = invoke(["eval", "--help"]).output, invoke(["eval", "--help", "--all"]).output
    assert all(name in short for name in ("--drafter", "--target", "--suites", "eval.max_new_tokens"))
    assert "eval.profile_prompts" in everything
    assert "eval.profile_prompts" not in short


@pytest.mark.parametrize(("name", "near"), [("evl", "eval"), ("data verfy", "data verify"), ("packge", "package")])
def test_an_unknown_command_suggests_the_nearest(name: str, near: str) -> None:
    result = invoke(name.split())
    assert (result.exit_code, f"did you mean {near}?" in result.output) == (2, True)


SCRIPT = """
import json, sys
from outrider.cli.main import main
for arguments, status in json.loads(sys.argv[1]):
    sys.argv = ["outrider", *arguments]
    ended = 0
    try: main()
    except SystemExit as end: ended = end.code or 0
    assert ended == status, arguments
    assert not {"torch", "transformers", "pandas"} & set(sys.modules), arguments
"""


def test_help_and_mistakes_load_no_torch(tmp_path: Path) -> None:
    wrong = ["train.lrn=1", "drafter.depht=3", "train.steps=-5", "stages=[distil]"]
    lines = [
        (["--help"], 0),
        (["eval", "--help"], 0),
        (["options", "drafter"], 0),
        (["run", "demo", "--show"], 0),
        (["run", "conf=eagle3_llama3_8b", *wrong], 2),
        (["eval", "--target", "x", "--drafter", "suffix", "--suite", "stdlib", "--max-new-tokns", "3"], 2),
        (["run", "demo", "data.path=./no.jsonl"], 2),
    ]
    command = [sys.executable, "-c", SCRIPT, json.dumps(lines)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []
