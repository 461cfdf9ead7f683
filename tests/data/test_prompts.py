import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from outrider.data.prompts import SUITES, load_suite


def test_mt_bench_has_both_turns_and_all_categories(shared_data: Path) -> None:
    suite = load_suite("mt_bench", str(shared_data / "mt_bench" / "question.jsonl"))
    assert len(suite.prompts) == SUITES["mt_bench"].num_prompts == 80
    assert {len(prompt.turns) for prompt in suite.prompts} == {2}
    assert set(Counter(prompt.category for prompt in suite.prompts).values()) == {10}
    assert suite.prompts[0].id == "81"
    assert suite.prompts[0].turns[1].startswith("Rewrite your previous response.")


def test_alpaca_eval_is_whole(shared_data: Path) -> None:
    suite = load_suite("alpaca_eval", str(shared_data / "alpaca_eval" / "alpaca_eval.jsonl"))
    assert len(suite.prompts) == SUITES["alpaca_eval"].num_prompts == 805
    assert len({prompt.category for prompt in suite.prompts}) == 5
    assert len({prompt.id for prompt in suite.prompts}) == 805


def question(index: int, **change: object) -> dict[str, object]:
    return {"question_id": index, "category": "writing", "turns": [f"Question {index}", "And now?"], **change}


def write(path: Path, records: list[dict[str, object]]) -> str:
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def test_the_form_on_the_hub_gives_the_same_prompts(tmp_path: Path) -> None:
    """The revision must not depend on where the prompts came from."""
    ours = load_suite("mt_bench", write(tmp_path / "a.jsonl", [question(81), question(82)]))
    hub = [
        {"prompt_id": q["question_id"], "category": q["category"], "prompt": q["turns"], "reference": []}
        for q in map(question, (81, 82))
    ]
    theirs = load_suite("mt_bench", write(tmp_path / "b.jsonl", hub))
    assert ours == theirs
    alpaca = {"instruction": "Why?", "output": "Because.", "generator": "a model", "dataset": "koala"}
    suite = load_suite("alpaca_eval", write(tmp_path / "c.jsonl", [alpaca, alpaca]))
    assert [(prompt.id, prompt.category, prompt.turns) for prompt in suite.prompts] == [
        ("0", "koala", ("Why?",)),
        ("1", "koala", ("Why?",)),
    ]


def test_a_file_that_is_not_the_whole_suite_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_suite("mt_bench", write(tmp_path / "a.jsonl", [question(81)]))
    assert "holds 1 prompts where mt_bench has 80" in caplog.text


def test_a_limit_draws_by_seed_keeps_the_order_and_changes_the_revision(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [question(index) for index in range(80)])
    whole, first, again, other = (
        load_suite("mt_bench", path, limit=limit, seed=seed) for limit, seed in ((None, 0), (10, 0), (10, 0), (10, 1))
    )
    assert first == again
    assert len({whole.revision, first.revision, other.revision}) == 3
    ids = [int(prompt.id) for prompt in first.prompts]
    assert ids == sorted(ids)
    assert len(ids) == 10
    assert load_suite("mt_bench", path, limit=500) == whole


@pytest.mark.parametrize(
    "change", [{"turns": ["only one"]}, {"turns": "text"}, {"category": None}, {"question_id": None}, {"turns": ["a", ""]}]
)
def test_a_record_that_is_no_prompt_is_named(change: dict[str, object], tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [question(81), question(82, **change)])
    with pytest.raises(ValueError, match=r"a.jsonl, record 2: not a prompt of mt_bench"):
        load_suite("mt_bench", path)


def test_repeated_ids_unknown_suites_and_empty_limits_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two prompts with the id '81'"):
        load_suite("mt_bench", write(tmp_path / "a.jsonl", [question(81), question(81)]))
    with pytest.raises(ValueError, match="unknown suite 'mtbench'; the suites are mt_bench, alpaca_eval, stdlib"):
        load_suite("mtbench")
    with pytest.raises(ValueError, match="limit of suite 'stdlib' is 0"):
        load_suite("stdlib", limit=0)
    with pytest.raises(ValueError, match=r"cannot load .*HuggingFaceH4/mt_bench_prompts.*give its path"):
        load_suite("mt_bench")


def test_the_standard_library_suite_is_its_held_out_split_whatever_the_seed() -> None:
    suite = load_suite("stdlib", seed=5)
    assert suite == load_suite("stdlib", seed=6)
    assert len(suite.prompts) > 100
    assert {len(prompt.turns) for prompt in suite.prompts} == {1}
    assert {"csv", "socket"} <= {prompt.category for prompt in suite.prompts}
    assert all(prompt.category in prompt.id for prompt in suite.prompts)
