"""Descriptions of sections and options, compared with the config classes."""

from dataclasses import asdict, fields

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from pydantic import ValidationError

from outrider.cli.compose import DEMO_TARGET
from outrider.cli.config import RunConfig
from outrider.cli.describe import GROUPS, Option, choices, chosen_by, drafter_sections, sections
from outrider.cli.help import WIDTH
from outrider.cli.reference import OptionsOptions, RecipesOptions, options_command, recipes_command
from outrider.models.drafters import DRAFTERS

SECTIONS = ("target", "data", "distill", "train", "eval", "export")


def every_option() -> dict[str, Option]:
    described = [*sections().values(), *drafter_sections().values()]
    return {f"{section.name}: {option.name}": option for section in described for option in section.options}


def test_every_section_and_option_of_a_run_is_described() -> None:
    assert set(sections()) == {"", *SECTIONS}
    top_level = {option.name for option in sections()[""].options}
    assert top_level | set(SECTIONS) == {field.name for field in fields(RunConfig)}
    options = every_option()
    assert len(options) > 120
    assert all(option.meaning and option.type for option in options.values())
    assert not any("None" in option.meaning.split() for option in options.values()), "recipes write null"


def test_types_defaults_and_choices_are_those_of_the_config_classes() -> None:
    options = {option.name: option for option in every_option().values()}
    rate, steps, suites = options["train.learning_rate"], options["train.steps"], options["eval.suites"]
    assert (rate.type, rate.default) == ("number above 0", 1e-3)
    assert (steps.type, steps.required) == ("whole number above 0", True)
    assert options["data.limit"].type == "whole number above 0, or null"
    assert options["eval.temperatures"].default == [0.0]
    assert options["train.schedule"].choices == ("cosine", "linear", "constant")
    assert "kl" in options["train.loss"].choices
    assert suites.type.startswith("list of mappings")
    assert options["eval.suites[].limit"].meaning


@pytest.mark.parametrize("kind", sorted(DRAFTERS))
def test_a_drafters_options_are_those_of_its_class(kind: str) -> None:
    """The options read from the source equal those of the imported class."""
    assert set(drafter_sections()) == set(DRAFTERS)
    config_class = DRAFTERS[kind].Config
    described = {option.name.removeprefix("drafter."): option for option in drafter_sections()[kind].options}
    assert described.pop("kind").meaning
    assert described.pop("start_from").meaning
    assert {name: option.default for name, option in described.items()} == asdict(config_class())
    assert {name for name, option in described.items() if option.at_run_time} == set(config_class.RUNTIME_FIELDS)
    for name, option in described.items():
        if option.choices:
            with pytest.raises(ValidationError) as error:
                config_class(**{name: "no such choice"})
            assert all(choice in str(error.value) for choice in option.choices)


@pytest.mark.parametrize("name", ["demo", "ablation_demo", "adapt", "eagle3_llama3_8b", "offload_demo"])
def test_a_recipes_choices_are_those_that_it_composes(name: str) -> None:
    OmegaConf.register_new_resolver("demo_target", lambda: str(DEMO_TARGET), replace=True)
    with initialize_config_module("outrider.conf", version_base="1.3"):
        composed = compose("config", overrides=[f"conf={name}"], return_hydra_config=True)
    chosen = composed.hydra.runtime.choices
    assert chosen_by(name) == {group: chosen[group] or "" for group in GROUPS[:-1]}
    assert choices("conf")[name].summary


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (None, "conf="),
        ("train", "train.learning_rate"),
        ("drafter", "drafter=eagle3"),
        ("eagle3", "drafter.draft_vocab_size"),
        ("drafter.medusa", "drafter.num_heads"),
        ("eval.suites", "eval.suites[].path"),
        ("data.path", "a data set id of the Hub"),
    ],
)
def test_options_are_printed_in_80_columns(section: str | None, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    options_command(OptionsOptions(section=section))
    printed = capsys.readouterr().out
    assert expected in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= WIDTH


@pytest.mark.parametrize(("section", "near"), [("trian", "train"), ("eagel3", "eagle3"), ("train.step", "train.steps")])
def test_the_error_for_an_unknown_section_suggests_the_nearest(section: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {near}"):
        options_command(OptionsOptions(section=section))


def test_recipes_are_printed_with_their_choices(capsys: pytest.CaptureFixture[str]) -> None:
    recipes_command(RecipesOptions())
    printed = capsys.readouterr().out
    assert all(name in printed for name in choices("conf"))
    assert max(map(len, printed.splitlines())) <= WIDTH
    recipes_command(RecipesOptions(name="eagle3_llama3_8b"))
    assert "drafter=eagle3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="did you mean demo"):
        recipes_command(RecipesOptions(name="dmeo"))
