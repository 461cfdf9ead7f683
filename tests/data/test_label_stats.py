"""Statistics of a distillation."""

from dataclasses import asdict
from pathlib import Path

from outrider.data.files import read_dataclass, write_json
from outrider.data.label_stats import LabelTotals


def test_figures_of_large_runs_are_read_back(tmp_path: Path) -> None:
    # Bounds of options must not apply: a target of 8B parameters takes more than 2**31 bytes.
    large = 2**40
    totals = LabelTotals(
        num_examples=large,
        num_text_tokens=large,
        num_positions=large,
        agreement=0.5,
        num_branch_tokens=large,
        process_seconds=1.0,
        positions_per_process_second=1.0,
        peak_memory_bytes=large,
        dropped={"too long": large},
    )
    write_json(tmp_path / "stats.json", asdict(totals))
    assert read_dataclass(LabelTotals, tmp_path / "stats.json") == totals
