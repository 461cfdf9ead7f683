"""Drafters by name: a folder, a training-free drafter, or several joined by +."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.files import read_json, write_json
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.merged import MergedDrafter
from outrider.models.drafters.prompt_lookup import PromptLookup
from outrider.models.drafters.redrafter import Redrafter
from outrider.models.drafters.saved.loading import trained_parts
from outrider.models.drafters.saved.parts import parse_drafter_name

from ....decoded import answers_of


@pytest.fixture(scope="module")
def make_folder(target, tmp_path_factory: pytest.TempPathFactory):
    def make(kind: str, **options: Any) -> Path:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("drafters") / "drafter"
        save_drafter(build_drafter(parse_drafter({"kind": kind, **options}), target), folder, target.identity)
        return folder

    return make


@pytest.fixture(scope="module")
def redrafter(make_folder) -> Path:
    return make_folder("redrafter", beam_width=2, beam_length=3)


def answer(target, drafter) -> list[int]:
    return answers_of(target, drafter, [[1, 70, 71, 72, 70, 71]], 24)[0]


def test_each_kind_of_name_loads_a_drafter_that_changes_no_token(target, redrafter):
    plain = answer(target, NullDrafter())
    classes = {
        redrafter: Redrafter,
        str(redrafter): Redrafter,
        "prompt_lookup": PromptLookup,
        f"{redrafter}+prompt_lookup": MergedDrafter,
    }
    for name, drafter_class in classes.items():
        drafter = load_drafter(name, target)
        assert type(drafter) is drafter_class, name
        assert answer(target, drafter) == plain, name
    assert [type(part) for part in trained_parts(load_drafter(f"prompt_lookup+{redrafter}", target))] == [Redrafter]
    assert trained_parts(load_drafter("prompt_lookup", target)) == []


def test_a_pace_makes_a_merge_of_one_drafter(target, redrafter):
    for name in (redrafter, "prompt_lookup"):
        drafter = load_drafter(name, target, pace="fixed", tree_nodes=7)
        assert isinstance(drafter, MergedDrafter)
        assert drafter.config.tree_nodes == 7
        assert answer(target, drafter) == answer(target, NullDrafter())


def test_trees_are_padded_where_each_shape_is_compiled_or_recorded(target, redrafter, monkeypatch):
    assert not load_drafter("prompt_lookup+suffix", target).few_sizes
    monkeypatch.setattr(type(target), "has_fixed_shapes", True)
    assert load_drafter("prompt_lookup+suffix", target).few_sizes


def test_options_go_to_the_parts_that_have_them(target, redrafter):
    name = f"{redrafter}+prompt_lookup"
    drafter = load_drafter(name, target, tree_nodes=9, beam_width=3, prompt_lookup={"max_ngram": 2, "tree_nodes": 4})
    assert isinstance(drafter, MergedDrafter)
    assert drafter.config.tree_nodes == 9
    assert drafter.sources["redrafter"].config.beam_width == 3
    assert drafter.sources["redrafter"].config.tree_nodes is None
    assert (drafter.sources["prompt_lookup"].config.max_ngram, drafter.sources["prompt_lookup"].config.tree_nodes) == (2, 4)
    assert load_drafter("prompt_lookup", target, tree_nodes=3).config.tree_nodes == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "FOLDER+prompt_lookup",
            {"max_ngram": 2},
            r"no option max_ngram; it has chain, pace, .*prompt_lookup: \{.*beam_width",
        ),
        ("FOLDER+prompt_lookup", {"prompt_lookup": 3}, r"option prompt_lookup of .* is 3; give prompt_lookup: \{"),
        ("FOLDER+prompt_lookup", {"prompt_lookup": {"depth": 3}}, "prompt_lookup has no option depth; it has: max_ngram"),
        ("FOLDER+prompt_lookup", {"pace": "fast"}, 'drafter.pace="fast": must be one of expected, fixed'),
        ("FOLDER+prompt_lookup", {"num_blocks": 2}, "num_blocks can't be changed"),
        ("prompt_lookup", {"beam_width": 2}, "prompt_lookup has no option beam_width"),
        ("prompt_lookup", {"tree_nodes": 0}, "prompt_lookup.tree_nodes=0: must be above 0"),
    ],
)
def test_a_wrong_option_is_an_error_before_weights_are_read(redrafter, name, options, message):
    parts = parse_drafter_name(name.replace("FOLDER", str(redrafter)))
    with pytest.raises(ValueError, match=message):
        parts.configs(options)


def test_an_unknown_name_is_an_error_with_the_list_and_a_near_match(redrafter):
    with pytest.raises(ValueError, match="'prompt_lokup' is neither.*suffix, recycling, .*; did you mean prompt_lookup"):
        parse_drafter_name(f"{redrafter}+prompt_lokup")
    with pytest.raises(ValueError, match="nowhere holds no drafter"):
        parse_drafter_name(str(redrafter / "nowhere"))


def test_a_part_twice_is_an_error(redrafter, monkeypatch):
    with pytest.raises(ValueError, match="has prompt_lookup twice"):
        parse_drafter_name(f"prompt_lookup+{redrafter}+prompt_lookup")
    monkeypatch.chdir(redrafter.parent)
    with pytest.raises(ValueError, match="drafter twice; give each part once"):
        parse_drafter_name(f"{redrafter}+drafter")


def test_two_folders_of_a_kind_have_different_names(target, redrafter, make_folder):
    medusa, second = make_folder("medusa", num_heads=2), make_folder("redrafter", beam_width=1)
    parts = parse_drafter_name(f"{redrafter}+{medusa}+{second}")
    assert parts.kind == "redrafter+medusa+redrafter_2"
    assert len(parts.weights.split("+")) == 3
    drafter = load_drafter(parts, target, redrafter_2={"beam_length": 2})
    assert isinstance(drafter, MergedDrafter)
    assert drafter.sources["redrafter_2"].config.beam_length == 2
    assert answer(target, drafter) == answer(target, NullDrafter())
    with pytest.raises(ValueError, match="no option beam_width; it has chain, pace.*redrafter or medusa or redrafter_2"):
        parts.configs({"beam_width": 2})


def test_parts_that_cannot_be_merged_are_an_error_before_weights_are_read(redrafter, make_folder, tmp_path):
    other = Path(shutil.copytree(redrafter, tmp_path / "other"))
    config = read_json(other / "config.json")
    write_json(other / "config.json", {**config, "target": {**config["target"], "vocab_size": 301}})
    with pytest.raises(ValueError, match="different vocabularies .*300 tokens in .*301 tokens in"):
        parse_drafter_name(f"{redrafter}+{other}").configs({})


def test_a_description_has_the_options_of_all_parts_and_no_path(redrafter):
    parts = parse_drafter_name(f"{redrafter}+prompt_lookup")
    described = parts.described({"tree_nodes": 3})
    assert described["pace"] == "expected"
    assert described["tree_nodes"] == 40  # without the setting
    assert described["redrafter"]["beam_width"] == 2
    assert described["prompt_lookup"]["max_ngram"] == 3
    assert str(redrafter) not in str(described)
    assert parse_drafter_name(redrafter).described({})["beam_width"] == 2
    assert parse_drafter_name("prompt_lookup").described({"pace": "fixed"})["tree_nodes"] == 40
    assert parse_drafter_name("prompt_lookup").weights == ""


def test_merged_with_adds_only_what_is_missing(redrafter):
    parts = parse_drafter_name(f"{redrafter}+suffix").merged_with(["suffix", "recycling"])
    assert parts.kind == "redrafter+suffix+recycling"
    assert parts.name == f"{redrafter}+suffix+recycling"
