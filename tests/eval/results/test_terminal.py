"""The table in the terminal: 80 columns and six lines of notes, whatever was measured."""

from io import StringIO
from typing import Any, cast

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from outrider.eval.records.method_names import MethodFacts, method_names
from outrider.eval.results.finished import read_rows
from outrider.eval.results.rows import Row
from outrider.eval.results.terminal import note_lines, print_table

from ...conftest import REPOSITORY

RECORDED = REPOSITORY / "benchmarks" / "demo" / "compare"
"""Summary of an older version, which has no medians, processor times or repeated answers."""
STALL = {"side": "method", "turn": 0, "repeat": 0, "ratio": 27.0}


def printed(rows: list[Row], width: int = 80) -> str:
    screen = StringIO()
    print_table(rows, Console(width=width, file=screen))
    return screen.getvalue()


def notes_of(text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    blank = max(index for index, line in enumerate(lines) if not line.strip())
    return lines[blank + 1 :]


def names_of_the_recipe() -> list[str]:
    """Return the names of compare_demo's methods, from its variants and their settings."""
    recipe: Any = OmegaConf.to_container(OmegaConf.load(REPOSITORY / "conf" / "conf" / "compare_demo.yaml"))
    methods = []
    for name, variant in recipe["variants"].items():
        drafter = variant.get("drafter", {})
        kind = drafter.get("kind", "redrafter")
        for setting in variant["settings"]:
            words = " ".join(f"{option}={value}" for option, value in setting.items())
            described = {"config": {**drafter}, "setting": setting, "weights": name}
            methods.append(MethodFacts(key=f"{kind} {name}/drafter {words}", described=described))
    return [str(name) for name in method_names(methods)]


def test_an_older_summary_has_a_table_and_a_headline() -> None:
    rows = read_rows(RECORDED)
    text = printed(rows)
    assert "median" not in text.split("\n\n")[0]
    assert " ReDrafter,  " in text
    assert " 16 beams of 5, 40 nodes " in text


@pytest.mark.parametrize("suite", ["stdlib", "a_suite_with_a_very_long_name_of_a_file_without_any_space"])
def test_the_longest_names_fit_eighty_columns(suite: str) -> None:
    (plain, *others) = read_rows(RECORDED)
    names = names_of_the_recipe()
    assert max(map(len, names)) > 80, "the recipe has long names"
    worst: dict[str, Any] = {
        "tokens_per_step": 10.25,
        "tokens_per_second": 12345.6,
        "speedup": 10.25,
        "lossless_label": "NO (30 of 30 prompts)",
    }
    worst |= {"speedup_ci95": (10.12, 11.34), "disturbed": [{**STALL, "prompt_ids": ["7"]}], "exceeds": "ceiling"}
    rows = [plain, *({**others[0], **worst, "name": name} for name in [*names, "x" * 200])]
    text = printed([cast("Row", {**row, "suite": suite}) for row in rows])
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert text.split("─\n")[1].count(" 10.25x [10.12, 11.34] ") == len(names) + 1
    assert "disturbed" in text
    assert text.count("  Identical\n") == 1, "a column's name is never folded"
    assert len(notes_of(text)) <= 6


def test_the_most_important_notes_come_first_and_six_lines_are_enough() -> None:
    rows = read_rows(RECORDED)
    changes: list[dict[str, Any]] = [
        {"num_skipped": 3},
        {"speedup": None, "lossless": False, "lossless_label": "NO (1 of 16 prompts)"},
        {"exceeds": "tokens per step"},
        {"disturbed": [{**STALL, "prompt_ids": [str(number)]} for number in range(2)], "num_repeated": 2},
        {"exceeds": "ceiling"},
        {"num_loops": 16},
        {"lossless": None},
    ]
    changed = [cast("Row", {**row, **change}) for row, change in zip(rows, changes, strict=False)]
    notes = notes_of(printed(changed))
    assert len(notes) <= 6
    assert max(map(len, notes)) <= 80
    assert notes[0].startswith("  NOT LOSSLESS, so without a speedup: ReDrafter, 4 beams of 3, 5 nodes")
    starts = [line.split()[0] for line in notes if not line.startswith("    ")]
    assert starts == ["NOT", "No", "table.md"]
    wide = [line.split()[0] for line in note_lines(changed, 300)]
    assert wide == ["NOT", "No", "Disturbed:", "Above", "Repeated:", "table.md"]
    plain = notes_of(printed(rows))
    assert plain[0].startswith("  stdlib, greedy: 16 prompts in float32, up to 128 new tokens.")


def test_a_narrow_terminal_loses_no_column() -> None:
    lines = printed(read_rows(RECORDED), width=60).splitlines()
    (head,) = [line for line in lines if line.split()[:1] == ["Method"]]
    assert head.split() == ["Method", "Tok/step", "Tok/s", "Speedup", "[95", "%]", "Identical"]
    assert max(map(len, lines)) <= 80


def test_few_prompts_are_a_sentence_of_the_notes() -> None:
    rows = read_rows(RECORDED)
    texts = {3: "Intervals are over 3 prompts, which are too few.", 1: "Too few prompts for a reliable interval: 1."}
    for number, text in texts.items():
        few = [cast("Row", {**row, "num_prompts": number, "num_batches": number}) for row in rows]
        assert text in " ".join(printed(few).split())


def test_what_is_not_a_speed_is_not_printed_as_one() -> None:
    plain, drafted, *_ = read_rows(RECORDED)
    wrong: dict[str, Any] = {"speedup": 7.77, "speedup_ci95": (7.0, 8.0), "exceeds": "tokens per step"}
    text = printed([plain, cast("Row", {**drafted, **wrong})])
    assert "7.77" not in text
    assert "error: above its" in text
    assert "No speedup for ReDrafter" in " ".join(text.split())
    assert "Measure again into another folder" in " ".join(text.split())
    stalled: dict[str, Any] = {"disturbed": [{**STALL, "prompt_ids": ["7"]}]}
    text = printed([plain, cast("Row", {**drafted, **stalled})])
    assert "DISTURBED: measure again" in " ".join(text.split())
    assert "Disturbed: 1 answer. The worst took 27 times its usual time (ReDrafter" in " ".join(text.split())
