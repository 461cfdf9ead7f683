"""A tiny model as users of transformers hold it, and packaged drafters for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.models.config import TargetConfig
from outrider.models.drafters import build_drafter, save_drafter
from outrider.models.export.package import make_package
from outrider.models.target import load_target

KINDS: dict[str, dict[str, Any]] = {
    "redrafter": {"beam_width": 3, "beam_length": 3, "exit_width": 32, "head_init": "target"},
    "medusa": {"num_heads": 3},
    "eagle": {},
    "eagle3": {},
    "draft_model": {"init": "target_layers", "num_layers": 2},  # all of the target: always right
}

Package = Callable[..., Path]


@pytest.fixture
def model(tiny_target_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def drafter_dirs(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter of each kind, untrained: some of its drafts are right, most are wrong. Read only."""
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))
    directories = {}
    for kind, options in KINDS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drafter = build_drafter({"kind": kind, **options}, target)
        directories[kind] = tmp_path_factory.mktemp(kind) / "drafter"
        save_drafter(drafter, directories[kind], target.identity)
    return directories


@pytest.fixture(scope="session")
def package_dirs(drafter_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same as folders for the Hub. Read only."""
    folders = {kind: tmp_path_factory.mktemp("packages") / kind for kind in drafter_dirs}
    for kind, folder in folders.items():
        make_package(drafter_dirs[kind], folder, f"# A {kind}\n")
    return folders
