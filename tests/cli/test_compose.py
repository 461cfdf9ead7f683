"""Command lines of a run: arguments, the user's recipe files, and error messages."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from outrider.cli import keys
from outrider.cli.arguments import parse_arguments
from outrider.cli.compose import LIST_OPTIONS, compose, main
from outrider.cli.config import RunConfig, to_run_config
from outrider.cli.describe import drafter_sections, sections


def composed(*arguments: str) -> DictConfig:
    return compose(parse_arguments(list(arguments)))


def problems(*arguments: str) -> str:
    """Return the error message for a wrong command line, with its lines joined."""
    with pytest.raises(ValueError) as error:
        composed(*arguments)
    assert "hydra" not in str(error.value).lower()
    return " ".join(str(error.value).split())


# --- mistakes on the command line


@pytest.mark.parametrize(
    ("override", "wrong", "meant"),
    [
        ("train.lr=1e-3", "train.lr", "train.learning_rate"),
        ("+train.lr=1e-3", "train.lr", "train.learning_rate"),
        ("++train.lr=1e-3", "train.lr", "train.learning_rate"),
        ("+trian.steps=2", "trian.steps", "train.steps"),
        ("lr=1", "lr", "train.learning_rate"),
        ("max_seq_length=9", "max_seq_length", "data.max_length"),
        ("output=x", "output", "output_dir"),
        ("per_device_train_batch_size=1", "per_device_train_batch_size", "train.batch_size"),
        ("steps=3", "steps", "train.steps"),
        ("data.pth=x", "data.pth", "data.path"),
        ("drafter.beam_widht=3", "drafter.beam_widht", "drafter.beam_width"),
        ("eval.settings=[{beam_widht: 3}]", "eval.settings[0].beam_widht", "beam_width"),
        ("eval.suites=[{nam: x}]", "eval.suites[0].nam", "eval.suites[].name"),
        ("variants.a.train.stepz=3", "variants.a.train.stepz", "train.steps"),
        ("variants.a.drafter.beam_widht=3", "variants.a.drafter.beam_widht", "variants.a.drafter.beam_width"),
        ("drafter.kind=redraftr", "drafter.kind", "redrafter"),
        ("conf=dmeo", "conf=dmeo", "conf=demo"),
        ("drafter=eagel3", "drafter=eagel3", "drafter=eagle3"),
        ("conf=[demo,adpat]", "conf=adpat", "conf=adapt"),
        ("eval=caht", "eval=caht", "eval=chat"),
    ],
)
def test_an_error_suggests_the_nearest_name_for_a_mistyped_one(override: str, wrong: str, meant: str) -> None:
    message = problems(override)
    assert wrong in message
    assert f"did you mean {meant}?" in message
    assert "+train" not in message


def test_options_are_listed_where_a_name_is_wrong() -> None:
    assert "outrider options train)" in problems("train.lr=1")
    assert "outrider options redrafter)" in problems("drafter.beam_widht=1")


def test_an_epochs_option_is_refused_with_the_options_that_set_the_length() -> None:
    message = problems("train.epochs=3")
    assert "train.steps" in message
    assert "train.gradient_accumulation" in message


def test_one_error_names_all_mistakes_of_the_command_line() -> None:
    message = problems("train.lr=1", "seed=x", "train.steps=many", "drafter=eagel3", "data.pth=x", "train.loss=klx")
    assert message.startswith("6 problem(s)")
    for text in ("train.lr", "seed is 'x'", "train.steps is 'many'", "drafter=eagel3", "data.pth", "kl_acceptance"):
        assert text in message
    assert "drafter.start_from: Missing mandatory value" in problems("conf=adapt", "train.lr=3")


@pytest.mark.parametrize("kind", ["[]", "7", "{a: 1}"])
def test_a_drafter_kind_that_is_not_text_is_an_error(kind: str) -> None:
    assert "drafter.kind is" in problems(f"drafter.kind={kind}")


def test_the_error_for_another_drafter_kind_names_the_options_to_change_too() -> None:
    assert "drafter=medusa" in problems("drafter.kind=medusa")
    assert "eval.settings=[{}]" in problems("conf=redrafter_vicuna7b", "drafter=medusa")


@pytest.mark.parametrize("override", ["train.steps=[1", "train.steps=1,2", "~train.nothing", "train=3"])
def test_a_failed_composition_raises_our_config_error(override: str) -> None:
    assert problems(override)


def test_a_value_that_cannot_be_read_is_named_with_its_option() -> None:
    assert "train.steps is [1, which can't be read" in problems("train.steps=[1")


def test_every_alias_means_an_option() -> None:
    names = {option.name for section in sections().values() for option in section.options}
    names |= {option.name for section in drafter_sections().values() for option in section.options}
    assert set(keys.ALIASES.values()) <= names | {"conf"}
    assert {name.rpartition(".")[2] for name in names} & {*keys.ALIASES, *keys.SENTENCES} == {"base_model"}, "export's"


def test_a_correct_command_line_composes_the_same_config_as_hydra() -> None:
    config = composed("demo", "train.steps=20", "+train.seed=3", "drafter=eagle3_demo", "drafter.depth=3", "num_threads=null")
    assert (config.train.steps, config.train.seed) == (20, 3)
    assert (config.drafter.kind, config.drafter.depth) == ("eagle3", 3)
    assert config.num_threads is None
    assert "hydra" not in config


def test_a_typo_is_reported_without_importing_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom outrider.cli.main import main\nsys.argv = ['outrider', 'run', 'conf=demo', *sys.argv[1:]]\n"
        "try: main()\nfinally: assert 'torch' not in sys.modules"
    )
    began = time.monotonic()
    command = [sys.executable, "-c", script, "train.lr=1", "drafter.beam_widht=3"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2, result.stderr
    assert "train.learning_rate" in result.stderr
    assert "AssertionError" not in result.stderr
    assert time.monotonic() - began < 10


# --- arguments


def test_arguments_may_stand_in_any_order() -> None:
    request = parse_arguments(["--plan", "demo", "--cfg", "job", "train.steps=3", "~train.seed", "+a=b", "--resolve"])
    assert request.overrides == ["plan=true", "conf=demo", "train.steps=3", "~train.seed", "+a=b"]
    assert (request.show, request.resolve, request.launch) == (True, True, None)


@pytest.mark.parametrize(
    ("arguments", "overrides", "options"),
    [
        ("--config-dir a=b conf=demo -c hydra", ["conf=demo"], ["--config-dir", "a=b", "--cfg", "hydra"]),
        ("conf=demo --multirun seed=1,2", ["conf=demo", "seed=1,2"], ["--multirun"]),
        ("--hydra-help", [], ["--hydra-help"]),
    ],
)
def test_hydras_own_options_are_left_to_hydra(arguments: str, overrides: list[str], options: list[str]) -> None:
    request = parse_arguments(arguments.split())
    assert (request.overrides, request.hydra_options) == (overrides, options)


def test_a_run_without_a_recipe_names_the_recipes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider run"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert all(text in message for text in ("demo", "eagle3_llama3_8b", "outrider init"))


def test_help_describes_the_command_and_not_hydra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider run", "--help"])
    main()
    text = capsys.readouterr().out
    assert all(part in text for part in ("RECIPE", "--plan", "--launch", "--cfg job", "outrider options", "one_node"))
    assert max(map(len, text.splitlines())) <= 80


# --- the user's recipe files

MINE = """# @package _global_
defaults:
  - override /eval: stdlib
  - medusa_vicuna7b

train: {steps: 200}
"""


@pytest.mark.parametrize("form", ["{path}", "conf={path}", "conf=[eagle_vicuna7b,{path}]"])
@pytest.mark.parametrize("ending", [".yaml", ""])
def test_a_file_is_a_recipe_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, ending: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    for path in (f"sub/mine{ending}", str(tmp_path / f"sub/mine{ending}")):
        config = composed(form.format(path=path), "train.batch_size=3")
        assert (config.name, config.train.steps, config.train.batch_size) == ("mine", 200, 3)
        assert config.target.name_or_path == "lmsys/vicuna-7b-v1.3"
        assert (config.drafter.kind, config.eval.suites[0].name) == ("medusa", "stdlib")
        assert to_run_config(config).output_dir == "outputs/mine"


def test_a_plain_file_without_header_and_defaults_is_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("train: {steps: 20, learning_rate: 1e-3}\ntarget: {name_or_path: here}\n")
    config = composed(str(tmp_path / "plain.yaml"))
    assert (config.train.steps, config.train.learning_rate, config.target.name_or_path) == (20, 1e-3, "here")
    assert config.drafter.kind == "redrafter"
    assert config.target.dtype == "auto", "the demo's type isn't this target's"


def test_a_section_on_top_of_a_recipe_changes_it(tmp_path: Path) -> None:
    text = "defaults: [medusa_vicuna7b]\ntarget: {name_or_path: here}\ndrafter: {kind: medusa, num_heads: 3}\n"
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "top.yaml").write_text(text.partition("\n")[2])
    for arguments in ([str(tmp_path / "mine.yaml")], [f"conf=[medusa_vicuna7b,{tmp_path / 'top.yaml'}]"]):
        config = composed(*arguments)
        assert (config.target.name_or_path, config.target.dtype) == ("here", "bfloat16")
        assert (config.drafter.num_heads, config.drafter.head_decay) == (3, 0.8)


def test_a_drafter_described_by_its_kind_needs_no_group(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("defaults: [demo]\ndrafter: {kind: medusa, num_heads: 3}\neval: {settings: [{}]}\n")
    config = composed(str(tmp_path / "plain.yaml"))
    assert (config.drafter.kind, config.drafter.num_heads) == ("medusa", 3)
    assert {f"drafter.{name}" for name in config.drafter} <= {o.name for o in drafter_sections()["medusa"].options}
    assert config.train.steps == 500


def test_a_runs_own_configuration_is_a_recipe(tmp_path: Path) -> None:
    config = composed("demo", "drafter=medusa_demo", f"output_dir={tmp_path}")
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(config))
    assert composed(str(tmp_path / "config.yaml")) == config


def test_mistakes_in_a_file_name_it_and_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults: [dmeo, override /drafter: medusa_dmeo]\ntrain:\n  lr: 3\n  steps: many\neval:\n  suites:\n"
        "    - {name: stdlib, limt: 3}\ndrafter:\n  tree_nodez: 3\nsede: 3\n"
    )
    message = problems(str(path))
    for text in (
        f"{path}, line 1: conf=dmeo: there is no such recipe; did you mean conf=demo?",
        f"{path}, line 1: drafter=medusa_dmeo",
        f"{path}, line 3: train.lr: there is no such option; did you mean train.learning_rate?",
        f"{path}, line 4: train.steps is 'many'; it must be: whole number",
        f"{path}, line 7: eval.suites[0].limt",
        f"{path}, line 9: drafter.tree_nodez",
        f"{path}, line 10: sede: there is no such option; did you mean seed?",
    ):
        assert text in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "line 1: this is not YAML"),
        ("train: {steps: 3}\n  x: 2", "line 2: this is not YAML"),
        ("- a\n", "is not a recipe"),
        ("", "is not a recipe"),
        ("steps", "is not a recipe"),
    ],
)
def test_a_file_that_is_no_recipe_is_an_error_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert message in problems(str(tmp_path / "bad.yaml"))


def test_the_error_for_a_missing_file_names_its_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"there is no file {tmp_path / 'no.yaml'}" in problems("no.yaml")


def test_the_error_for_a_path_beside_the_recipe_names_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {source: text, path: words.txt}\n")
    (tmp_path / "words.txt").write_text("words")
    message = problems(str(tmp_path / "mine.yaml"))
    assert "working directory" in message
    assert f"write {tmp_path / 'words.txt'}" in message


@pytest.mark.parametrize(
    ("arguments", "options", "overrides"),
    [
        ("--launch one_node --num_processes 4 mine.yaml a=1", ["--num_processes", "4"], ["conf=mine.yaml", "a=1"]),
        ("demo --launch=cpu --multi_gpu a=1 --plan", ["--multi_gpu"], ["conf=demo", "a=1", "plan=true"]),
        ("--launch cpu --num_machines=2 demo", ["--num_machines=2"], ["conf=demo"]),
    ],
)
def test_options_beside_a_launch_file_are_passed_to_accelerate(
    arguments: str, options: list[str], overrides: list[str]
) -> None:
    request = parse_arguments(arguments.split())
    assert request.launch in ("one_node", "cpu")
    assert (request.launch_options, request.overrides) == (options, overrides)
    assert not request.hydra_options


def test_a_mistake_is_reported_before_a_launch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider run", "--launch", "one_node", "demo", "train.lr=3"])
    with pytest.raises(SystemExit):
        main()
    assert "train.learning_rate" in capsys.readouterr().err


# --- lists, and the base of a drafter's section


def test_a_list_needs_no_brackets() -> None:
    config = composed("demo", "stages=distill,train", "export.formats=apple", "eval.suites=my.jsonl", "eval.temperatures=0.5")
    assert list(config.stages) == ["distill", "train"]
    assert list(config.export.formats) == ["apple"]
    assert list(config.eval.suites) == ["my.jsonl"]
    assert list(config.eval.temperatures) == [0.5]
    assert list(composed("demo", "stages=[distill]").stages) == ["distill"]
    assert "stages" in problems("demo", "stages=null")


def test_the_listed_options_are_those_with_texts_or_numbers() -> None:
    options = {option.name: option.type for section in sections().values() for option in section.options}
    assert all(options[name].startswith("list of") for name in LIST_OPTIONS)


def test_an_option_of_a_suite_needs_no_plus() -> None:
    config = composed("demo", "eval=chat", "eval.suites.0.limit=4", "eval.suites.1.limit=5")
    assert [suite.limit for suite in config.eval.suites] == [4, 5]
    (suite,) = composed("demo", "eval.suites=[{name: gsm8k}]", "eval.suites.0.limit=4").eval.suites
    assert suite.limit == 4


def test_a_kind_in_a_file_has_the_packaged_choice_below_it(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("drafter: {kind: eagle3, depth: 3}\ntrain: {steps: 3}\n")
    drafter = composed(str(recipe)).drafter
    assert OmegaConf.to_container(drafter.layer) == {"model_type": "llama", "hidden_act": "silu"}
    assert (drafter.kind, drafter.depth, drafter.top_k) == ("eagle3", 3, 8)
    recipe.write_text("drafter: {kind: eagle3, layer: null}\ntrain: {steps: 3}\n")
    assert composed(str(recipe)).drafter.layer is None
    recipe.write_text("drafter: {kind: eagle3, start_from: a/b}\ntrain: {steps: 3}\n")
    assert OmegaConf.to_container(composed(str(recipe)).drafter) == {"kind": "eagle3", "start_from": "a/b"}
    assert "drafter=eagle3" in problems("demo", "drafter.kind=eagle3")


def test_the_home_directory_is_expanded_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = composed("demo", "data.path=~/a.jsonl", "eval.suites=[{name: b, path: ~/b.jsonl},~/c.jsonl]")
    assert config.data.path == f"{tmp_path}/a.jsonl"
    assert [config.eval.suites[0].path, config.eval.suites[1]] == [f"{tmp_path}/b.jsonl", f"{tmp_path}/c.jsonl"]


def test_missing_paths_are_an_error_before_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from outrider.cli.compose import main; sys.argv = ['outrider run', 'demo', 'data.path=./no.jsonl']\n"
        "try: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout.split() == ["2", "False"]
    assert "data.path is './no.jsonl'" in result.stderr


def test_a_mixture_of_losses_replaces_the_recipes_and_is_not_merged_with_it(tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.yaml"
    variants = "variants: {a: {train: {loss: {kl: 1, cross_entropy: 2}}}, b: {train: {loss: kl}}, c: {train: {seed: 3}}}"
    recipe.write_text(f"defaults: [demo]\ntrain: {{loss: {{cross_entropy: 0.1, tv: 0.9}}}}\n{variants}\n")

    def run_config(*arguments: str) -> RunConfig:
        return to_run_config(compose(parse_arguments(list(arguments))))

    config = run_config(str(recipe))
    assert config.train.loss == {"cross_entropy": 0.1, "tv": 0.9}
    losses = [{"cross_entropy": 2, "kl": 1}, "kl", {"cross_entropy": 0.1, "tv": 0.9}]
    assert [run.train.loss for run in config.drafter_runs()] == losses
    for override in ("train.loss={kl: 3, tv: 1}", "+train.loss={kl: 3, tv: 1}"):
        assert run_config(str(recipe), override).train.loss == {"kl": 3, "tv": 1}
    assert run_config(str(recipe), "train.loss.tv=2").train.loss == {"cross_entropy": 0.1, "tv": 2}
    with pytest.raises(ValueError, match=r"train\.loss\.tv leaves nothing else of train\.loss; give the whole mixture"):
        run_config("demo", "train.loss.tv=0.5")
    with pytest.raises(ValueError, match=r'variants\.a\.train\.loss=\{"kll": 1\}: has \'kll\', which is no loss'):
        run_config("demo", "++variants={a: {train: {loss: {kll: 1}}}}")
