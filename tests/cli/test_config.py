"""Recipes, and the errors for mistakes in them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter

from outrider.cli.commands import COMMANDS
from outrider.cli.compose import DEMO_TARGET, Composed, compose, read_run_line
from outrider.cli.config import RunConfig
from outrider.data.files import write_json
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.models.drafters.options import MedusaConfig
from outrider.models.drafters.registry import DrafterSpec
from outrider.models.drafters.saved import build
from outrider.models.drafters.saved.folder import FORMAT_VERSION, DrafterFile
from outrider.train.config import TrainConfig

from ..tiny_models import IDENTITY

CONF = Path(__file__).parents[2] / "conf"
RECIPES = sorted(path.stem for path in (CONF / "conf").glob("*.yaml"))
TRAINED = "trained"
SUBJECT = ("target=demo", "data=stdlib", "eval=stdlib")
"""What `adapt` leaves open beside its drafter."""
DRAFTERS = sorted(path.stem for path in (CONF / "drafter").glob("*.yaml") if path.stem != TRAINED)


@cache
def composed_once(*overrides: str) -> Composed:
    is_recipe = any(override.startswith("conf=") for override in overrides)
    return compose(read_run_line([*([] if is_recipe else ["demo"]), *overrides]))


def composed(*overrides: str) -> DictConfig:
    """Compose a configuration. Many tests compare with the same recipe, so each one is composed once."""
    return OmegaConf.create(composed_once(*overrides).values)


def run_config(*overrides: str) -> RunConfig:
    return composed_once(*overrides).config()


@contextmanager
def raises(message: str) -> Iterator[None]:
    """Expect a `ConfigError` with this message. Line breaks in the message don't matter."""
    with pytest.raises(ValueError) as error:
        yield
    assert re.search(message, " ".join(str(error.value).split())), str(error.value)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Return a drafter folder with two-layer Medusa heads.

    The folder has only the files that a configuration reads.
    """
    saved = DrafterFile(
        format_version=FORMAT_VERSION,
        kind="medusa",
        drafter=asdict(MedusaConfig(num_heads=3, num_layers=2)),
        target=IDENTITY,
        weights_sha256="00",
        shape_sha256="00",
    )
    write_json(tmp_path / "drafter" / "config.json", asdict(saved))
    return tmp_path / "drafter"


def required(recipe: str, trained: Path) -> list[str]:
    """Return the overrides that the user of a recipe must set."""
    return [f"drafter.start_from={trained}", *SUBJECT] if recipe.startswith("adapt") else []


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_what_a_run_writes_of_it_is_a_recipe_again(recipe: str, trained: Path) -> None:
    config = run_config(f"conf={recipe}", *required(recipe, trained))
    folder = "smollm2" if recipe.startswith("smollm2") else recipe  # these share their labels
    assert (config.name, config.output_dir) == (recipe, f"outputs/{folder}")
    values = TypeAdapter(RunConfig).dump_python(config, mode="json")
    assert Composed(values, []).config() == config


def test_the_demo_has_the_packaged_target() -> None:
    assert run_config("conf=demo").target.name_or_path == str(DEMO_TARGET)


def test_the_example_in_the_help_runs() -> None:
    example = re.search(r"outrider run (\w+) (train\.steps=\d+)", COMMANDS["run"].summary)
    assert example is not None
    assert run_config(f"conf={example[1]}", example[2]).train.steps > 0


def test_the_demo_has_the_settings_that_its_documented_figures_were_measured_with() -> None:
    config = run_config("conf=demo")
    assert config.drafter == {
        "kind": "redrafter",
        "initial_state": "zero",
        "num_blocks": 2,
        "exit_width": 256,
        "head_init": "target",
        "draft_vocab_size": None,
        "beam_width": 4,
        "beam_length": 4,
        "tree_nodes": None,
    }
    assert config.train == TrainConfig(
        steps=450,
        batch_size=16,
        max_positions=512,
        learning_rate=8e-3,
        warmup_steps=15,
        weight_decay=0.1,
        checkpoint_every=5,
    )
    assert config.eval == EvalConfig(
        suites=[SuiteConfig(name="stdlib", limit=16)],
        settings=[
            {"beam_width": 4, "beam_length": 3, "tree_nodes": 5},
        ],
        baselines=["prompt_lookup", "recycling", "suffix+recycling"],
        merge=["suffix", "recycling"],
        max_new_tokens=128,
        repeats=1,
    )


@pytest.mark.parametrize(("recipe", "steps"), [("ablation_demo", 250), ("compare_demo", 300)])
def test_recipes_built_on_the_demo_train_as_it_does(recipe: str, steps: int) -> None:
    demo, config = run_config("conf=demo"), run_config(f"conf={recipe}")
    first = config.drafter_runs()[0]
    # options that decoding may change
    fixed = {"beam_width": 4, "beam_length": 4, "tree_nodes": None}
    assert replace(first.drafter.config, **fixed) == replace(demo.drafter_runs()[0].drafter.config, **fixed)
    changed = ("steps", "checkpoint_every", "validation_texts", "max_positions")
    assert replace(first.train, **{name: getattr(demo.train, name) for name in changed}) == demo.train
    assert config.train.steps == steps
    assert demo.eval.settings[0] in first.settings


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_demo_composes_with_every_drafter_of_the_command_line(name: str) -> None:
    config, plain = run_config("conf=demo", f"drafter={name}"), run_config("conf=demo", f"drafter={name.removesuffix('_demo')}")
    assert config.drafter["kind"] == plain.drafter["kind"]
    assert config.name == "demo"
    assert replace(config.train, learning_rate=8e-3) == run_config("conf=demo").train
    if name.endswith("_demo"):
        assert config.eval.settings != [{}]
        assert config.eval.merge
        assert config.drafter.keys() == plain.drafter.keys()
    else:
        assert config.eval.settings == [{}]


def test_every_drafter_has_a_demo() -> None:
    assert {name for name in DRAFTERS if not name.endswith("_demo")} == {
        name.removesuffix("_demo") for name in DRAFTERS if name.endswith("_demo")
    }


@pytest.mark.parametrize(
    ("kind", "learning_rate"),
    [("medusa", 8e-3), ("eagle", 5e-3), ("eagle3", 4e-3), ("block", 4e-3), ("redrafter2", 4e-3), ("draft_model", 2e-3)],
)
def test_a_kinds_demo_trains_and_decodes_as_in_the_comparison(kind: str, learning_rate: float) -> None:
    (demo,) = run_config("conf=demo", f"drafter={kind}_demo").drafter_runs()
    comparison = run_config("conf=compare_demo")
    compared = dict(zip(comparison.variants, comparison.drafter_runs(), strict=True))[kind]
    assert demo.train.learning_rate == compared.train.learning_rate == learning_rate
    assert demo.settings == compared.settings
    # The comparison drafts deeper than it trains, as in the published figures.
    if kind == "eagle3":
        assert compared.drafter.config.depth == 5
        compared = replace(compared, drafter=compared.drafter.with_options({"depth": 4}))
    assert demo.drafter == compared.drafter


@pytest.mark.parametrize("change", ["train.lora_rank=8", "train.change_share=0.5"])
def test_a_change_needs_a_drafter_that_is_changed(change: str) -> None:
    with pytest.raises(ValueError, match=f"{change.replace('=', ' is ')}, which changes a trained drafter"):
        run_config("conf=demo", change)


@pytest.mark.parametrize("recipe", ["demo", "eagle3_llama3_8b", "medusa_vicuna7b"])
def test_any_recipe_can_be_adapted_whatever_it_drafts_with(recipe: str, trained: Path) -> None:
    """conf=[RECIPE,adapt] takes target, data and evaluation from the recipe.

    It takes the drafter and the schedule from `adapt`.
    """
    plain = run_config(f"conf={recipe}")
    adapted = composed(f"conf=[{recipe},adapt]", f"drafter.start_from={trained}")
    alone = composed("conf=adapt", f"drafter.start_from={trained}")
    assert adapted.drafter.start_from == str(trained)
    assert "kind" not in adapted.drafter, "the form is the trained drafter's"
    assert adapted.target.name_or_path == plain.target.name_or_path
    assert adapted.data.source == plain.data.source
    schedule = ("steps", "learning_rate", "warmup_steps", "validate_every")
    assert {name: adapted.train[name] for name in schedule} == {name: alone.train[name] for name in schedule}


def test_adapting_is_shorter_and_gentler_than_training() -> None:
    adapt, vicuna = composed("conf=adapt").train, run_config("conf=redrafter_vicuna7b").train
    assert (adapt.learning_rate, adapt.steps < vicuna.steps) == (vicuna.learning_rate / 4, True)
    adapt, demo = composed("conf=adapt_demo").train, run_config("conf=demo").train
    assert (adapt.learning_rate, adapt.steps < demo.steps) == (demo.learning_rate / 4, True)


def test_the_initial_drafter_is_looked_up_once(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    monkeypatch.setattr(build, "resolve_drafter", lambda name: looked_up.append(name) or trained)
    config = run_config(
        "conf=adapt", *SUBJECT, "drafter.start_from=me/drafter", "eval.settings=[{tree_nodes: 3}, {tree_nodes: 4}]"
    )
    assert [run.drafter.start_from for run in [*config.drafter_runs(), *config.drafter_runs()]] == [trained, trained]
    assert looked_up == ["me/drafter"]


def test_an_adapted_drafter_has_the_architecture_of_the_trained_one(trained: Path) -> None:
    (adapted,) = run_config("conf=adapt", *SUBJECT, f"drafter.start_from={trained}", "drafter.tree_nodes=7").drafter_runs()
    config = MedusaConfig(num_heads=3, num_layers=2, tree_nodes=7)
    assert adapted.drafter == DrafterSpec(kind="medusa", config=config, start_from=trained)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafter.start_from={trained}", "drafter.num_heads=4"], r"num_heads is 4, and 3 in that drafter"),
        (["drafter.start_from={trained}", "drafter.kind=redrafter"], r"kind is 'redrafter', and 'medusa' in that drafter"),
        (["drafter.start_from={trained}", "drafter.beam_width=4"], r"medusa has no option beam_width"),
        (["drafter.start_from={trained}", "distill.horizon=3"], r"num_heads is 3 and distill.horizon 3"),
        (["drafter.start_from=/nowhere"], r"/nowhere holds no drafter"),
        (["drafter.start_from=5"], r"drafter.start_from is 5; give the `drafter/` folder"),
        ([], r"drafter.start_from is missing; give drafter.start_from=VALUE"),
    ],
)
def test_an_unusable_initial_drafter_is_an_error_before_anything_is_loaded(trained, overrides, message):
    with raises(message):
        run_config("conf=adapt", *SUBJECT, *(override.format(trained=trained) for override in overrides))


def test_a_target_in_slices_is_not_evaluated() -> None:
    with raises(r"must hold the whole target. Set stages=\[distill,train\]"):
        run_config("conf=demo", "target.tensor_parallel=true")
    assert run_config("conf=demo", "target.tensor_parallel=true", "stages=[distill,train]").target.tensor_parallel


def test_a_target_over_several_devices_is_only_evaluated() -> None:
    with raises(r"device_map is auto, for evaluation only, and stages has .*: set stages=\[eval\]"):
        run_config("conf=demo", "target.device_map=auto", "stages=[distill,eval]")
    assert run_config("conf=demo", "target.device_map=auto", "stages=[eval]").target.device_map == "auto"


@pytest.mark.parametrize("stages", ["[distill]", "[train,eval]", "[eval,export]"])
def test_a_target_in_stages_is_only_evaluated(stages: str) -> None:
    options = ("conf=demo", "target.stage_layers=[4,4]", "eval.batch_sizes=[1]")
    with raises(r"stage_layers is \[4, 4\], and \w+ need the whole target in one process: set stages=\[eval\]"):
        run_config(*options, f"stages={stages}")
    assert run_config(*options, "stages=[eval]").target.stage_layers == [4, 4]


def test_one_seed_reaches_every_section() -> None:
    config = run_config("seed=7")
    assert (config.data.seed, config.train.seed, config.eval.seed) == (7, 7, 7)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.settings=[{exit_width: 64}]", "exit_width can't be changed"),
        ("train.weight_decay=.nan", "train.weight_decay=NaN: must be a finite number"),
        ("eval.settings=[{beam_widht: 4}]", r"eval.settings\[0\]: the drafter redrafter has no option beam_widht"),
        ("stages=[]", "stages=.*must not be empty"),
        ("stages=[eval,eval]", "stages=.* same value twice"),
        (
            "eval.settings=[{beam_width: 4}, {beam_width: 4}]",
            r"eval\.settings has the setting \{'beam_width': 4\} twice; remove one",
        ),
        ("distill.horizon=1", "labels of at least 2 tokens"),
        ("variants.more.drafter={kind: medusa, num_heads: 6}", "variants.more.drafter.num_heads is 6 and distill.horizon 5"),
        ("variants.more.train.steps=5", r"variants\.more\.train\.warmup_steps is 15, not less than steps, which is 5"),
        ("variants.more.settings=[{beam_width: 0}]", r"variants\.more\.settings\[0\]\.beam_width=0: must be above 0"),
        ("eval.settings=[{beam_width: 0}]", r"- eval\.settings\[0\]\.beam_width=0: must be above 0"),
        ("eval.settings=[{pace: quick}]", r"eval\.settings\[0\]\.pace=.quick.: must be one of"),
        (
            "variants.more={drafter: {kind: draft_model}, settings: [{temperature: 1}]}",
            r"variants\.more\.settings\[0\].*the drafter draft_model has no option temperature",
        ),
        ("train.steps=9223372036854775808", "train.steps=9223372036854775808: must be below"),
        ("output_dir=''", 'output_dir="": must not be empty'),
        ("eval.seed=${oc.env:HOME}", r"eval\.seed=.*: must be a whole number"),
    ],
)
def test_settings_that_would_fail_after_hours_are_errors_at_once(override: str, message: str) -> None:
    with raises(message):
        run_config(override)


def test_a_setting_with_a_pace_makes_any_kind_a_merge_of_one() -> None:
    config = run_config("eval.settings=[{pace: expected, tree_nodes: 16, beam_width: 4}]")
    (run,) = config.drafter_runs()
    assert run.drafter.in_setting(run.settings[0]).config.beam_width == 4


@pytest.mark.parametrize("stages", ["[distill]", "[distill,train,eval]"])
def test_more_medusa_heads_than_labels_are_an_error_before_the_distillation(stages: str) -> None:
    with raises(r"num_heads is 5 and distill.horizon 5.* to that, or .*distill.horizon of at least 6"):
        run_config("conf=medusa_vicuna7b", "drafter.num_heads=5", f"stages={stages}")
    run_config("conf=medusa_vicuna7b", "drafter.num_heads=5", "distill.horizon=6", f"stages={stages}")


def test_finished_shards_may_have_longer_labels_than_the_recipe_sets() -> None:
    run_config("conf=medusa_vicuna7b", "drafter.num_heads=5", "stages=[train]")


def test_one_error_names_all_problems_of_variants() -> None:
    wrong = ('name=".."', "variants.a.train.stepz", "variants.a.drafter.beam_widht: there", "drafter.beam_widht: there is no")
    with pytest.raises(ValueError, match="4 problem") as error:
        run_config("name=..", "variants.a={train: {stepz: 3}, drafter: {beam_widht: 3}}", "drafter.beam_widht=2")
    assert all(text in str(error.value) for text in wrong)
    assert max(map(len, str(error.value).splitlines())) <= 80


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["train.steps=-3", "drafter.beam_width=0"], ["drafter.beam_width=0", "train.steps=-3"]),
        (["train.steps=-3", "name=a/b"], ['name="a/b"', "train.steps=-3"]),
        (
            ["train.batch_size=0", "variants.a.train.learning_rate=.nan"],
            ["train.batch_size=0", "variants.a.train.learning_rate=NaN"],
        ),
        (["drafter.beam_width=0", "variants.a.train.seed=1", "variants.b.train.seed=2"], ["drafter.beam_width=0"]),
        (["seed=-1"], ["seed=-1"]),
    ],
)
def test_each_mistake_is_named_once_whatever_else_is_wrong(overrides: list[str], names: list[str]) -> None:
    with pytest.raises(ValueError, match="in the configuration") as error:
        run_config(*overrides)
    lines = str(error.value).splitlines()[1:]
    assert [line.removeprefix("  - ").split(": ")[0] for line in lines] == names


@pytest.mark.parametrize("name", ["", "a/b", "..", "."])
def test_a_name_that_leaves_the_outputs_folder_is_refused(name: str) -> None:
    with raises("names a folder"):
        run_config(f"name='{name}'")


def test_variants_differ_only_in_the_options_that_they_set() -> None:
    config = run_config("conf=ablation_demo")
    distilled, text = config.drafter_runs()
    assert (distilled.train.labels, text.train.labels) == ("distilled", "text")
    assert distilled.train.steps == text.train.steps == config.train.steps
    assert distilled.drafter == text.drafter
    assert distilled.drafter_dir != text.drafter_dir
    assert distilled.train_dir != text.train_dir


def test_without_variants_the_folders_are_those_of_the_run() -> None:
    (only,) = run_config("output_dir=here").drafter_runs()
    assert (only.train_dir, only.drafter_dir) == (Path("here/train"), Path("here/drafter"))


def test_a_teacher_of_another_temperature_than_the_labels_is_an_error_before_the_distillation() -> None:
    with raises(r"distill\.label_temperature is 0\.7, and train\.loss compares"):
        run_config("distill.label_temperature=0.7", "train.loss=kl")
    for others in (("train.loss=cross_entropy",), ("train.loss=kl", "train.labels=text")):
        run_config("distill.label_temperature=0.7", *others)
    run_config("distill.label_temperature=1", "train.loss=kl")


def test_questions_that_the_target_writes_need_an_engine_that_samples() -> None:
    written = ["data.source=self", "data.path=null", "data.split=train", "data.count=2"]
    vllm = ["distill.engine=vllm", "distill.base_url=http://a/v1", "distill.states_dir=states"]
    for engine, message in ((["distill.engine=null"], "distill.engine is null"), (vllm, "which writes greedily only")):
        with raises(message):
            run_config(*written, *engine)


def test_a_teacher_that_the_distillation_does_not_store_is_an_error_before_it() -> None:
    teacher = ("train.loss=kl", "train.teacher=top_k")
    with raises(r"train\.teacher is top_k, and distill\.top_logprobs is null"):
        run_config(*teacher)
    with raises(r"variants\.top\.train\.teacher is top_k"):
        run_config("variants.top={train: {teacher: top_k}}")
    assert run_config(*teacher, "distill.top_logprobs=16").distill.top_logprobs == 16
    assert run_config(*teacher, "stages=[train]").train.teacher == "top_k", "the shards are there, and say what they hold"


def test_a_recipe_may_name_a_suite_or_its_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/mine.jsonl").touch()
    suites = run_config("eval.suites=[mt_bench,dir/mine.jsonl,{name: stdlib, limit: 3}]").eval.suites
    assert [(suite.name, suite.path, suite.limit) for suite in suites] == [
        ("mt_bench", None, None),
        ("mine", "dir/mine.jsonl", None),
        ("stdlib", None, 3),
    ]
