"""Sources of accepted drafts: from the steps of a merged drafter to its row, category by category."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure.plan import count_by_source
from outrider.eval.results.notes import source_shares
from outrider.eval.run import evaluate
from outrider.models.drafters.saved.parts import parse_drafter_name

from ..conftest import read

SOURCES = ("drafter", "suffix", "recycling")
NAMES = ("prompt_lookup", "suffix")
NEW_TOKENS = 12


def test_counts_by_source_have_each_source_alone_and_each_combination() -> None:
    origins = Counter({0b110: 4, 0b001: 2, 0b101: 1})
    assert count_by_source(origins, SOURCES, 7) == {
        "drafter": 2,
        "suffix": 0,
        "recycling": 0,
        "drafter+recycling": 1,
        "suffix+recycling": 4,
    }
    assert count_by_source(Counter(), ("suffix",), 5) == {"suffix": 5}  # a merge of one source names no origins
    assert count_by_source(Counter(), (), 5) is None


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write prompts of two categories that repeat themselves."""
    path = tmp_path_factory.mktemp("suite") / "question.jsonl"
    turns = {"code": ["abc abc abc abc", "abc abc"], "prose": ["to be or not to be, to be or not"]}
    lines = [
        {"question_id": f"{category}{index}", "category": category, "turns": texts}
        for category, texts in turns.items()
        for index in range(2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_accepted_drafts_are_counted_by_source_in_records_rows_and_categories(tiny_target, suite, tmp_path):
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "profile_prompts": 1, "repeats": 1}
    # On a busy machine the paced drafter may find that no draft is worth its time; the fixed one always drafts.
    settings = [{"tree_nodes": 6, "pace": pace} for pace in ("expected", "fixed")]
    options |= {"batch_sizes": [3], "temperatures": [0.0, 1.0], "settings": settings}
    config = EvalConfig(suites=[SuiteConfig(name="spec_bench", path=str(suite))], **options)
    rows = evaluate(config, tiny_target, tiny_target.tokenizer, [parse_drafter_name("+".join(NAMES))], tmp_path)
    merged = [row for row in rows if row["method"] != "baseline"]
    assert [(row["temperature"], row["pace"]) for row in merged] == [
        (0.0, "expected"), (0.0, "fixed"), (1.0, "expected"), (1.0, "fixed")
    ]  # fmt: skip
    for row in merged:
        assert row["lossless"] is True
        # 1. The row has the sum over its records, and the sum over its categories.
        counts: Counter[str] = Counter()
        for record in read(tmp_path):
            place = (record.method, record.temperature, record.pace)
            if place == (row["method"], row["temperature"], row["pace"]) and not record.profiled:
                assert record.accepted_by is not None
                counts.update(record.accepted_by)
        assert row["accepted_by"] == dict(counts)
        by_category: Counter[str] = Counter()
        for values in row["by_category"].values():
            by_category.update(values["accepted_by"])
        assert dict(by_category) == dict(counts)
        assert list(row["by_category"]) == ["code", "prose"]
        # 2. It has the sources alone first, and the tokens that both proposed.
        assert list(counts) in ([*NAMES], [*NAMES, "prompt_lookup+suffix"])
        assert source_shares(row).startswith("Prompt lookup ")
    assert sum((merged[1]["accepted_by"] or {}).values()) > 0, "nothing was accepted, so nothing was tested"
    for row in rows:
        if row["method"] == "baseline":
            assert (row["accepted_by"], row["pace"], source_shares(row)) == (None, None, "")
