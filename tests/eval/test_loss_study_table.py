"""The table of the loss study."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import loss_study_table

    yield loss_study_table.table
    sys.modules.pop("loss_study_table")


def row(method: str, tokens_per_step: float) -> dict[str, object]:
    return {"method": method, "tokens_per_step": tokens_per_step}


def test_seeds_are_averaged_and_the_best_loss_comes_first(table) -> None:
    rows = [row("baseline", 1.0)]
    rows += [row(f"redrafter kl_{seed}/drafter tree_nodes=40", 2.0 + seed / 10) for seed in range(3)]
    rows += [row(f"redrafter kl_acceptance_reached_{seed}/drafter tree_nodes=40", 3.0) for seed in range(2)]
    *_, first, second = table(rows).splitlines()
    assert first == "| kl_acceptance | where reached | 2 | 3.000 | 0.000 | 3.000 | 3.000 |"
    assert second == "| kl | all | 3 | 2.100 | 0.100 | 2.000 | 2.200 |"


def test_another_summary_is_refused(table) -> None:
    with pytest.raises(ValueError, match="conf=loss_study_demo"):
        table([row("baseline", 1.0)])
