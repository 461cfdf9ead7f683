"""Composition of a run: packaged recipes, the user's files, and the command line."""

import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from outrider.cli.compose import compose, load_recipe, main, read_run_line, run_command
from outrider.cli.describe import drafter_sections


def composed(*arguments: str) -> DictConfig:
    return OmegaConf.create(compose(read_run_line(arguments)).values)


def problems(*arguments: str) -> str:
    """Return the error message for a wrong command line, with its lines joined."""
    with pytest.raises(ValueError) as error:
        load_recipe(*arguments)
    assert "hydra" not in str(error.value).lower()
    return " ".join(str(error.value).split())


# --- mistakes


@pytest.mark.parametrize(
    ("override", "wrong", "meant"),
    [
        ("train.learning_rat=1e-3", "train.learning_rat", "train.learning_rate"),
        ("stepz=3", "stepz", "train.steps"),
        ("train.warmup=3", "train.warmup", "train.warmup_steps"),
        ("data.steps=3", "data.steps", "train.steps"),
        ("eval.max_new_tokns=3", "eval.max_new_tokns", "eval.max_new_tokens"),
        ("max_new_tokns=3", "max_new_tokns", "distill.max_new_tokens or eval.max_new_tokens"),
        ("data.pth=x", "data.pth", "data.path"),
        ("sede=3", "sede", "seed"),
        ("drafter.beam_widht=3", "drafter.beam_widht", "beam_width"),
        ("eval.suites=[{nam: x}]", "eval.suites[0].nam", "eval.suites[].name"),
        ("variants.a.train.stepz=3", "variants.a.train.stepz", "train.steps"),
        ("variants.a.drafter.beam_widht=3", "variants.a.drafter.beam_widht", "beam_width"),
        ("drafter.kind=redraftr", "drafter.kind", "redrafter"),
        ("conf=dmeo", "conf=dmeo", "conf=demo"),
        ("drafter=eagel3", "drafter=eagel3", "drafter=eagle3"),
        ("conf=[demo,adpat]", "conf=adpat", "conf=adapt"),
        ("eval=caht", "eval=caht", "eval=chat"),
        ("--plann", "--plann", "--plan"),
        ("--lunch", "--lunch", "--launch"),
    ],
)
def test_an_error_suggests_the_nearest_name_for_a_mistyped_one(override: str, wrong: str, meant: str) -> None:
    message = problems(*([] if override.startswith("conf=") else ["demo"]), override)
    assert wrong in message
    assert f"did you mean {meant}?" in message


def test_all_missing_values_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("train: {batch_size: 3}\n")
    message = problems(str(tmp_path / "empty.yaml"))
    for name in ("target.name_or_path", "train.steps", "eval.suites"):
        assert f"{name} is missing; give {name}=VALUE" in message
    assert "drafter is missing" in message
    assert "source is missing; give the form of the records" in message


@pytest.mark.parametrize("kind", ["[]", "7", "{a: 1}"])
def test_a_drafter_kind_that_is_not_text_is_an_error(kind: str) -> None:
    assert "drafter.kind is" in problems("demo", f"drafter.kind={kind}")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.steps=[1", "train.steps is [1, which can't be read"),
        ("train=3", "train=3: must be a mapping"),
        ("variants=[a]", 'variants=["a"]: must be a mapping'),
        ("stages=null", "stages=null: must be a list"),
        ("data.path=${nothing}", "nothing"),
        ("conf=null", "conf=null: must be a list"),
        ("conf=[{a: 1}]", 'conf[0]={"a": 1}: must be a text'),
        ("drafter=[a]", 'drafter=["a"]: must be a mapping'),
        ("train=[1]", "train=[1]: must be a mapping"),
        ("eval.suites.0.limit=3", 'eval.suites={"0": {"limit": 3}}: must be a list'),
        ("show=3", "show=3: must be true or false"),
    ],
)
def test_a_wrong_structure_is_an_error(argument: str, message: str) -> None:
    assert message in problems("demo", argument)


def test_a_warm_up_longer_than_the_training_names_the_remedy() -> None:
    text = problems("demo", "train.steps=2")
    assert "train.warmup_steps is" in text
    assert "set train.warmup_steps=0 or below train.steps" in text


def test_a_run_without_a_recipe_names_the_recipes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider run"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert all(text in message for text in ("demo", "eagle3_llama3_8b", "outrider init"))


def test_show_prints_the_recipe_and_its_problems(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"train\.lrn") as error:
        run_command(["demo", "--show", "train.lrn=1", "train.steps=many", "--plann"])
    assert "3 problem(s)" in str(error.value)
    assert "steps: many" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no option --plam; did you mean --plan\?"):
        run_command(["--plam", "my.yaml"])  # the option takes the recipe for its value


# --- layers


def test_the_command_line_is_above_the_recipe() -> None:
    config = composed("demo", "train.steps=20", "train.seed=3", "drafter=eagle3_demo", "drafter.depth=3", "num_threads=null")
    assert (config.train.steps, config.train.seed) == (20, 3)
    assert (config.drafter.kind, config.drafter.depth) == ("eagle3", 3)
    assert config.num_threads is None
    assert "hydra" not in config


@pytest.mark.parametrize("form", ["{path}", "conf={path}", "conf=[eagle_vicuna7b,{path}]"])
@pytest.mark.parametrize("ending", [".yaml", ""])
def test_a_file_is_a_recipe_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, ending: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text("base: medusa_vicuna7b\neval: stdlib\ntrain: {steps: 200}\n")
    monkeypatch.chdir(tmp_path)
    for path in (f"sub/mine{ending}", str(tmp_path / f"sub/mine{ending}")):
        config = composed(form.format(path=path), "train.batch_size=3")
        assert (config.name, config.train.steps, config.train.batch_size) == ("mine", 200, 3)
        assert config.target.name_or_path == "lmsys/vicuna-7b-v1.3"
        assert (config.drafter.kind, config.eval.suites[0].name) == ("medusa", "stdlib")
        assert config.output_dir == "outputs/mine"


def test_a_file_without_a_base_starts_from_nothing(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("train: {steps: 20, learning_rate: 1e-3}\ntarget: {name_or_path: here}\nseed: 4\n")
    config = composed(str(tmp_path / "plain.yaml"))
    assert (config.train.steps, config.train.learning_rate, config.train.seed) == (20, 1e-3, 4)
    assert (config.target, config.get("drafter")) == ({"name_or_path": "here"}, None)


def test_a_file_is_built_on_another_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: demo\ntrain: {steps: 20, batch_size: 4}\n")
    (tmp_path / "b.yaml").write_text(f"base: {tmp_path / 'a.yaml'}\ntrain: {{steps: 30}}\n")
    config = composed(str(tmp_path / "b.yaml"))
    assert (config.name, config.train.steps, config.train.batch_size, config.train.max_positions) == ("b", 30, 4, 512)
    (tmp_path / "a.yaml").write_text(f"base: {tmp_path / 'b.yaml'}\n")
    assert "is built on itself" in problems(str(tmp_path / "b.yaml"))


def test_a_files_base_may_be_packaged_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: [demo, drafter=eagle3]\ndrafter: {depth: 3}\n")
    (tmp_path / "alone.yaml").write_text("base: drafter=eagle3\ndrafter: {depth: 3}\n")
    for name in ("mine", "alone"):
        drafter = composed(str(tmp_path / f"{name}.yaml")).drafter
        assert (drafter.kind, drafter.depth, drafter.top_k, drafter.layer.model_type) == ("eagle3", 3, 8, "llama")


def test_a_section_on_top_of_a_recipe_changes_it(tmp_path: Path) -> None:
    text = "target: {name_or_path: here}\ndrafter: {kind: medusa, num_heads: 3}\n"
    (tmp_path / "mine.yaml").write_text(f"base: medusa_vicuna7b\n{text}")
    (tmp_path / "top.yaml").write_text(text)
    for arguments in ([str(tmp_path / "mine.yaml")], [f"conf=[medusa_vicuna7b,{tmp_path / 'top.yaml'}]"]):
        config = composed(*arguments)
        assert (config.target.name_or_path, config.target.dtype) == ("here", "bfloat16")
        assert (config.drafter.num_heads, config.drafter.num_layers) == (3, 1)


def test_a_drafter_of_another_kind_inherits_no_options(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("base: demo\ndrafter: {kind: medusa, num_heads: 3}\neval: {settings: [{}]}\n")
    for config in (composed(str(tmp_path / "plain.yaml")), composed("demo", "drafter={kind: medusa, num_heads: 3}")):
        assert config.drafter == {"kind": "medusa", "num_heads": 3}
        assert config.train.steps == 450
    assert {f"drafter.{name}" for name in config.drafter} <= {o.name for o in drafter_sections()["medusa"].options}
    assert "eval.settings" in problems("demo", "drafter.kind=medusa")


def test_a_runs_own_configuration_is_a_recipe(tmp_path: Path) -> None:
    config = composed("demo", "drafter=medusa_demo", f"output_dir={tmp_path}")
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(config))
    again = composed(str(tmp_path / "config.yaml"))
    assert again == config


def test_mistakes_in_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: dmeo\ntrain:\n  steps: many\n  stepz: 3\neval:\n  suites:\n    - {name: stdlib, limt: 3}\n"
        "drafter: medusa_dmeo\nsede: 3\n"
    )
    message = problems(str(path))
    assert "is missing" not in message, "what the mistyped base has"
    for text in (
        "conf=dmeo: there is no such choice; did you mean conf=demo?",
        "drafter=medusa_dmeo: there is no such choice; did you mean drafter=medusa_demo?",
        "train.stepz: there is no such option; did you mean train.steps?",
        'train.steps="many": must be a whole number',
        "eval.suites[0].limt: there is no such option",
        "sede: there is no such option; did you mean seed?",
    ):
        assert text in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "line 1: this is not YAML"),
        ("train: {steps: 3}\n  x: 2", "line 2: this is not YAML"),
        ("- a\n", "is not a recipe"),
        ("", "is not a recipe"),
        ("train: " + "[" * 3000 + "]" * 3000, "is not YAML"),
        ("base: 5", "base=5: must be a recipe, a file, or a choice of target, data, drafter, eval"),
        ("base: true", "base=true: must be a recipe"),
        ("base: {target: demo}", 'base={"target": "demo"}: must be a recipe'),
        ("base: [demo, train.steps=3]", 'base="train.steps=3": must be a recipe'),
        ("base: demo\ntrain: [1]", "train=[1]: must be a mapping"),
    ],
)
def test_a_file_that_is_no_recipe_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert message in problems(str(tmp_path / "bad.yaml"))


def test_a_missing_file_is_named_with_its_full_path_and_a_near_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"there is no file {tmp_path / 'no.yaml'}" in problems("no.yaml")
    (tmp_path / "my.yaml").write_text("base: demo\n")
    assert f"did you mean conf={tmp_path}/my.yaml?" in problems(f"{tmp_path}/my.yml")
    assert "conf=~variants.medusa: there is no such choice" in problems("demo", "~variants.medusa"), "no user of that name"


# --- values


def test_a_list_needs_no_brackets() -> None:
    config = load_recipe(
        "demo", "stages=distill,train", "export.formats=apple", "eval.suites=my.jsonl", "eval.temperatures=0.5"
    )
    assert config.stages == ["distill", "train"]
    assert (config.export.formats, config.eval.temperatures) == (["apple"], [0.5])
    assert config.eval.suites[0].path == "my.jsonl"
    assert load_recipe("demo", "stages=[distill]").stages == ["distill"]


def test_variants_replace_those_of_the_base_and_one_option_changes_one_variant(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: ablation_demo\nvariants: {mine: {train: {seed: 1}}, others: {train: {seed: 2}}}\n")
    assert list(load_recipe(str(recipe)).variants) == ["mine", "others"]
    assert list(load_recipe(str(recipe), "variants={a: {train: {seed: 3}}}").variants) == ["a"]
    runs = load_recipe(str(recipe), "variants.mine.train.seed=5").drafter_runs()
    assert [run.train.seed for run in runs] == [5, 2]
    assert not load_recipe("ablation_demo", "variants={}").variants


def test_one_error_names_all_mistakes_of_a_command_line() -> None:
    wrong = ("train.lrn=1", "seed=x", "train.steps=many", "drafter=eagel3", "data.pth=x", "train.loss=klx", "data.limit=-3")
    message = problems("demo", *wrong)
    assert message.startswith("7 problem(s)")
    for text in ("train.lrn", 'seed="x"', 'train.steps="many"', "drafter=eagel3", "data.pth", "kl_acceptance", "data.limit=-3"):
        assert text in message
    assert "drafter.start_from is missing" in problems("adapt")


def test_the_home_directory_is_expanded_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).touch()
    suites = "eval.suites=[{name: b, path: ~/b.jsonl},~/c.jsonl]"
    config = load_recipe("demo", "data.source=text", "data.path=~/a.jsonl", suites)
    assert config.data.path == f"{tmp_path}/a.jsonl"
    assert [suite.path for suite in config.eval.suites] == [f"{tmp_path}/b.jsonl", f"{tmp_path}/c.jsonl"]
