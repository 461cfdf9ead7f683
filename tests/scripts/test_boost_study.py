"""scripts/boost_study.py: its comparison of merges, on a tiny target."""

import argparse
import importlib
from pathlib import Path

import pytest
import torch

from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target


def test_every_drafter_is_measured_at_equal_nodes(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    study = importlib.import_module("boost_study")
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32"), torch.device("cpu"))
    folders: dict[int, dict[str, Path]] = {}
    for seed in (0, 1):
        torch.manual_seed(seed)
        folders[seed] = {name: tmp_path / f"{name}-{seed}" for name in ("uniform", "boosted")}
        for folder in folders[seed].values():
            save_drafter(build_drafter(parse_drafter({"kind": "redrafter"}), target), folder / "drafter", target.identity)
    args = argparse.Namespace(other="suffix", new_tokens=12)
    prompts = [torch.tensor([5, 6, 7] * 4), torch.tensor([8, 9])]
    rows = study.compare(args, target, prompts, folders, 4)
    assert [row["name"] for row in rows] == [
        *("suffix", "uniform", "uniform+suffix", "boosted", "boosted+suffix"),
        "boosted merge / uniform merge",
    ]
    for row in rows[:-1]:
        assert 1 <= row["interval"][0] <= row["tokens_per_step"] <= row["interval"][1] <= 5
    assert [len(row["by_seed"]) for row in rows[:-1]] == [1, 2, 2, 2, 2]
    assert rows[-1]["ratio"] == pytest.approx(rows[4]["tokens_per_step"] / rows[2]["tokens_per_step"])
