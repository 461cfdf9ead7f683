"""Commands that scripts/paper_tables.sh runs, with recorders in place of the real ones."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "paper_tables.sh"
RECORDER = r"""#!/usr/bin/env bash
printf '%s\n' "$(basename "$0") $*" >> "$(dirname "$0")/log"
if [[ "$*" == *"$LOSSY"* ]]; then
  folder=$(sed -E 's/.*output_dir=(\S+).*/\1/' <<< "$*")/eval
  mkdir -p "$folder" && sleep 0.05 && touch "$folder/summary.json"
  exit 1
fi
if [[ "$*" == *"$FAIL"* ]]; then exit 1; fi
"""


def run(
    tmp_path: Path, *arguments: str, fail: str = "nothing", lossy: str = "nothing", **settings: str
) -> tuple[int, list[str]]:
    for name in ("accelerate", "outrider"):
        (tmp_path / name).write_text(RECORDER)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "BIN": str(tmp_path), "FAIL": fail, "LOSSY": lossy, **settings}
    result = subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=30, check=False)
    log = tmp_path / "log"
    return result.returncode, log.read_text().splitlines() if log.exists() else [result.stderr]


def test_the_demo_trains_measures_and_reports_with_the_given_settings(tmp_path: Path) -> None:
    settings = {
        "WIDTHS": "2 3",
        "BATCH_SIZES": "1 4",
        "BEAM_LENGTH": "7",
        "LIMIT": "5",
        "OVERRIDES": "train.steps=20 data.limit=9",
    }
    code, (compare, ablation, batches, report) = run(tmp_path, "demo", "out", fail="nothing", **settings)
    assert code == 0
    assert "conf=compare_demo output_dir=out/compare train.steps=20 data.limit=9" in compare
    beams = "[{beam_width: 2, beam_length: 7},{beam_width: 3, beam_length: 7}]"
    assert f"conf=ablation_demo output_dir=out/ablation train.steps=20 data.limit=9 eval.settings={beams}" in ablation
    for width in (2, 3):
        for share in ("true", "false"):
            assert f"--setting {{beam_width: {width}, beam_length: 7, share_prefixes: {share}}}" in batches
    assert "--drafter out/ablation/variants/distilled/drafter" in batches
    assert "--batch-size 1 --batch-size 4 --limit 5 --output out/batches" in batches
    assert report == "outrider report out/compare/eval out/ablation/eval out/batches --output out/report"


def test_several_batch_sizes_are_measured_by_default(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "demo")
    assert (code, len(lines)) == (0, 4)
    assert "--batch-size 1 --batch-size 2 --batch-size 4 --batch-size 8 --limit" in lines[2]


def test_vicuna_compares_three_kinds_and_both_labels(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "vicuna", "out")
    assert code == 0
    kinds = ("redrafter", "medusa", "eagle")
    for line, kind in zip(lines, kinds, strict=False):
        assert f"conf={kind}_vicuna7b output_dir=out/{kind}" in line
    assert "+variants={distilled: {train: {labels: distilled}}, text: {train: {labels: text}}}" in lines[0]
    assert lines[-1] == f"outrider report {' '.join(f'out/{kind}/eval' for kind in kinds)} out/batches --output out/report"


@pytest.mark.parametrize(("arguments", "fail", "num_lines"), [(["llama"], "nothing", 1), (["demo"], "conf=ablation_demo", 2)])
def test_a_wrong_argument_or_a_failed_step_ends_the_script(
    tmp_path: Path, arguments: list[str], fail: str, num_lines: int
) -> None:
    code, lines = run(tmp_path, *arguments, fail=fail)
    assert code != 0
    assert len(lines) == num_lines


def test_a_drafter_that_is_not_lossless_is_reported_and_fails_at_the_end(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "demo", str(tmp_path / "out"), lossy="conf=compare_demo")
    assert (code, len(lines)) == (1, 4)
    assert lines[-1].startswith("outrider report")
