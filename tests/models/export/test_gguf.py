"""Drafters as GGUF files, by a converter that the tests write."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.export.gguf import form_of
from outrider.models.llm.loading import load_target

from ...commands import invoke
from ...tiny_models import save_tiny_target

WORKS = """
import json, pathlib, sys
arguments = sys.argv[1:]
folder, out = pathlib.Path(arguments[0]), pathlib.Path(arguments[arguments.index("--outfile") + 1])
note = json.loads((folder / "outrider.json").read_text())
out.write_text(json.dumps({"arguments": arguments[1:], "format": note["format"]}))
"""
LLAMA = {"model_type": "llama", "hidden_act": "silu"}
FAILS = """
import pathlib, sys
pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1]).write_text("half")
print(*range(20), sep="\\n", file=sys.stderr)
sys.exit("NotImplementedError: BPE pre-tokenizer was not recognized")
"""


def make(kind: str, target_dir: Path, directory: Path, **options: Any) -> Path:
    target = load_target(str(target_dir), torch.device("cpu"))
    save_drafter(build_drafter(parse_drafter({"kind": kind, **options}), target), directory, target.identity)
    return directory


def export(drafter: Path, target: Path, output: Path, *more: str | Path) -> Any:
    command = ("export", drafter, "--target", target, "--to", "gguf", "--output", output, *more)
    return invoke([str(part) for part in command])


def test_the_converter_gets_our_format_and_the_target(tiny_target_dir: Path, tmp_path: Path) -> None:
    drafter = make("draft_model", tiny_target_dir, tmp_path / "drafter", num_layers=1)
    converter, output = tmp_path / "convert.py", tmp_path / "new" / "drafter.gguf"
    converter.write_text(WORKS)
    result = export(drafter, tiny_target_dir, output, "--converter", converter, "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "in the format gguf" in result.output
    written = json.loads(output.read_text())
    assert written["format"] == "transformers"
    assert written["arguments"][:4] == ["--target-model-dir", str(tiny_target_dir.resolve()), "--outtype", "bf16"]
    assert list(output.parent.iterdir()) == [output], "nothing else is left"


def test_a_failed_converter_leaves_the_old_file_and_its_last_lines_are_shown(tiny_target_dir: Path, tmp_path: Path) -> None:
    drafter = make("draft_model", tiny_target_dir, tmp_path / "drafter", num_layers=1)
    converter, output = tmp_path / "convert.py", tmp_path / "drafter.gguf"
    converter.write_text(FAILS)
    output.write_text("old")
    before = sorted(tmp_path.iterdir())
    result = export(drafter, tiny_target_dir, output, "--converter", converter)
    assert "ended with status 1; its last lines: 16 17 18 19 NotImplementedError: BPE" in result.message
    assert output.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == before


def test_what_llama_cpp_cannot_draft_is_refused_before_anything_is_loaded(tiny_target_dir, tmp_path, monkeypatch):
    eagle = make("eagle3", tiny_target_dir, tmp_path / "normed", feature_layers=[0, 1], norm_output=True)
    two = make("eagle3", tiny_target_dir, tmp_path / "two", feature_layers=[0, 1])
    medusa = make("medusa", tiny_target_dir, tmp_path / "medusa", num_heads=2)
    small = make("draft_model", tiny_target_dir, tmp_path / "small", num_layers=1)
    converter, output = tmp_path / "convert.py", tmp_path / "drafter.gguf"
    converter.write_text(WORKS)
    monkeypatch.setattr("outrider.models.llm.loading.load_target", lambda *arguments: pytest.fail("the target was loaded"))
    given = ("--converter", converter)
    for drafter, arguments, problem in (
        (eagle, given, "norm_output is on (train with drafter.norm_output=false)"),
        (two, given, "it reads 2 layers of the target, not 3"),
        (medusa, given, "eagle3, block, draft_model, and "),
        (small, (), "converter is not given; give the path of convert_hf_to_gguf.py"),
        (small, ("--converter", tmp_path), "which is no file"),
    ):
        assert problem in export(drafter, tiny_target_dir, output, *arguments).message
    assert "a file that ends in .gguf" in export(small, tiny_target_dir, tmp_path / "folder", *given).message
    other = ("export", medusa, "--target", tiny_target_dir, "--to", "medusa", "--output", tmp_path / "a", *given)
    assert "converter is for gguf only" in invoke([str(part) for part in other]).message
    assert not output.exists()


def test_the_format_is_the_one_that_holds_the_drafter(tiny_target_dir: Path, tmp_path: Path) -> None:
    reduced = make("block", tiny_target_dir, tmp_path / "block", feature_layers=[0, 1], draft_vocab_size=8)
    whole = make("block", tiny_target_dir, tmp_path / "whole", feature_layers=[0, 1])
    assert [form_of(reduced), form_of(whole)] == ["speculators-dspark", "dspark"]
    assert form_of(make("eagle3", tiny_target_dir, tmp_path / "eagle", feature_layers=[0, 1])) == "speculators", "other layers"
    assert form_of(make("eagle3", tiny_target_dir, tmp_path / "usual")) == "eagle3"


def test_an_export_that_llama_cpp_would_misread_says_so(tiny_tokenizer: Any, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "deep", LlamaForCausalLM, LlamaConfig, tiny_tokenizer, num_hidden_layers=8)
    eagle = make("eagle3", tmp_path / "deep", tmp_path / "normed", norm_output=True, layer=LLAMA)
    command = ("export", eagle, "--target", tmp_path / "deep", "--to", "eagle3", "--output", tmp_path / "a")
    result = invoke([str(part) for part in command])
    assert "llama.cpp can't draft with it as it was trained, partly without an error: norm_output is on" in result.output
