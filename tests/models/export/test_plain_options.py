"""The drafters' options in a packaged drafter's code, where there is no pydantic: what is right and wrong stays so."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.models.drafters.saved.build import DrafterSpec
from outrider.models.export.bundle import custom_generate_files

PROGRAM = """
import json, sys
sys.modules.update(dict.fromkeys(("pydantic", "pydantic_core", "jaxtyping", "outrider")))  # to import them raises
from bundle.drafters_saved_build import DrafterSpec
from bundle.drafters_saved_folder import read_drafter_config
from dataclasses import asdict
from pathlib import Path

def answer(act):
    try:
        return asdict(act())
    except ValueError as error:
        return str(error)

cases, folders = json.load(sys.stdin)
print(json.dumps([answer(lambda: DrafterSpec.of(kind, options).config) for kind, options in cases]))
print(json.dumps([answer(lambda: read_drafter_config(Path(folder))) for folder in folders]))
"""
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("redrafter", {"beam_width": 8, "tree_nodes": 12, "tree_padding": "full", "rnn": False}),
    ("medusa", {"head_decay": 1, "tree_paths": [[0], [1], [0, 0]]}),
    ("eagle", {"layer": {"model_type": "llama"}, "tree": "static"}),
    ("eagle3", {"feature_layers": [0, 1, 2]}),
    ("draft_model", {"temperature": 0.5, "tokenizer_options": {"legacy": True}}),
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("redrafter", {"beam_width": 0}, "beam_width=0: must be above 0"),
    ("redrafter", {"beam_width": "8"}, "beam_width='8': must be of type int"),
    ("redrafter", {"beam_width": True}, "beam_width=True: must be of type int"),
    ("redrafter", {"share_prefixes": 1}, "share_prefixes=1: must be of type bool"),
    ("redrafter", {"tree_padding": "most"}, "tree_padding='most': must be one of "),
    ("redrafter", {"share_prefixes": False, "tree_nodes": 4}, "share_prefixes is off and tree_nodes 4"),
    ("redrafter", {"beams": 4}, "no option beams"),
    ("medusa", {"tree_nodes": 2**12 + 1}, "tree_nodes=4097: must be at most 4096"),
    ("medusa", {"tree_paths": []}, "must be of a length of at least 1"),
    ("medusa", {"tree_paths": [[0], [-1]]}, "must be at least 0"),
    ("medusa", {"tree_paths": [0]}, "must be of type list"),
    ("eagle", {"layer": {"model_type": "gpt2"}}, "gpt2"),
    ("eagle3", {"feature_layers": [1, 1, 2]}, "the same value twice"),
    ("draft_model", {"temperature": float("inf")}, "must be a finite number"),
]


def test_options_are_checked_where_pydantic_cannot_be_imported(package_dirs: dict[str, Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for name, text in custom_generate_files().items():
        (bundle / name).write_text(text, encoding="utf-8")
    (tmp_path / "config.json").write_text('{"format_version": 1, "kinds": "redrafter"}', encoding="utf-8")
    cases = [*RIGHT, *(case[:2] for case in WRONG)]
    folders = [*map(str, package_dirs.values()), str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([cases, folders]),
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    specs, saved = map(json.loads, result.stdout.splitlines())
    assert specs[: len(RIGHT)] == [vars(DrafterSpec.of(kind, options).config) for kind, options in RIGHT]
    for (kind, options, message), problem in zip(WRONG, specs[len(RIGHT) :], strict=True):
        assert message in problem, (kind, options)
        with pytest.raises(ValueError, match="."):
            DrafterSpec.of(kind, options)
    assert [config["kind"] for config in saved[:-1]] == list(package_dirs)
    assert str(tmp_path / "config.json") in saved[-1]
    assert "kinds" in saved[-1]
