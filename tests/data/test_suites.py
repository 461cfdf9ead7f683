import gzip
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.data import suites as prompts_module
from outrider.data.stdlib import MANUAL_CHARS, MANUAL_PARTS
from outrider.data.suites import SUITES, load_suite


def test_mt_bench_has_both_turns_and_all_categories(shared_data: Path) -> None:
    suite = load_suite("mt_bench", str(shared_data / "mt_bench" / "question.jsonl"))
    assert len(suite.prompts) == SUITES["mt_bench"].num_prompts == 80
    assert {len(prompt.turns) for prompt in suite.prompts} == {2}
    assert set(Counter(prompt.category for prompt in suite.prompts).values()) == {10}
    assert suite.prompts[0].id == "81"
    assert suite.prompts[0].turns[1].startswith("Rewrite your previous response.")


def test_alpaca_eval_has_all_prompts(shared_data: Path) -> None:
    suite = load_suite("alpaca_eval", str(shared_data / "alpaca_eval" / "alpaca_eval.jsonl"))
    assert len(suite.prompts) == SUITES["alpaca_eval"].num_prompts == 805
    assert len({prompt.category for prompt in suite.prompts}) == 5
    assert len({prompt.id for prompt in suite.prompts}) == 805


def test_the_shipped_suite_has_ten_prompts_a_language() -> None:
    suite = load_suite("languages")
    assert Counter(prompt.category for prompt in suite.prompts) == dict.fromkeys(
        ["german", "french", "spanish", "chinese", "hindi"], SUITES["languages"].num_prompts // 5
    )
    assert len({prompt.turns for prompt in suite.prompts}) == 50
    assert suite.source is None


def test_the_manual_has_parts_of_three_sizes() -> None:
    suite = load_suite("manual")
    sizes = {size: [len(prompt.turns[0]) for prompt in suite.prompts if prompt.category == size] for size in MANUAL_CHARS}
    assert all(len(lengths) == MANUAL_PARTS for lengths in sizes.values())
    assert all(num_chars <= min(sizes[size]) and max(sizes[size]) < 1.3 * num_chars for size, num_chars in MANUAL_CHARS.items())
    assert len({prompt.id for prompt in suite.prompts}) == len(suite.prompts)


def question(index: int, **change: object) -> dict[str, object]:
    return {"question_id": index, "category": "writing", "turns": [f"Question {index}", "And now?"], **change}


def write(path: Path, records: list[dict[str, object]]) -> str:
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def test_the_hubs_format_gives_the_same_prompts(tmp_path: Path) -> None:
    """The revision must not depend on the source of the prompts."""
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


def test_an_incomplete_suite_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_suite("mt_bench", write(tmp_path / "a.jsonl", [question(81)]))
    assert "holds 1 prompts where mt_bench has 80" in caplog.text


def test_a_limit_samples_by_seed_keeps_the_order_and_changes_the_revision(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("change", [{"turns": ["only one"]}, {"category": None}, {"turns": ["a", ""]}])
def test_a_record_that_is_no_prompt_is_an_error_with_its_number(change: dict[str, object], tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [question(81), question(82, **change)])
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: not a prompt of mt_bench"):
        load_suite("mt_bench", path)


def test_repeated_ids_and_unknown_suites_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two prompts with the id '81'"):
        load_suite("mt_bench", write(tmp_path / "a.jsonl", [question(81), question(81)]))
    with pytest.raises(ValueError, match="unknown suite 'mtbench'; did you mean mt_bench.*stdlib.*your own.*mtbench.jsonl"):
        load_suite("mtbench")
    with pytest.raises(ValueError, match=r"HuggingFaceH4/mt_bench_prompts.* neither a local file nor in the cache"):
        load_suite("mt_bench")


def test_the_standard_library_suite_does_not_depend_on_the_seed() -> None:
    suite = load_suite("stdlib", seed=5)
    assert suite == load_suite("stdlib", seed=6)
    assert len(suite.prompts) > 100
    assert {len(prompt.turns) for prompt in suite.prompts} == {1}
    assert {"csv", "socket"} <= {prompt.category for prompt in suite.prompts}
    assert all(prompt.category in prompt.id for prompt in suite.prompts)


def test_spec_bench_has_any_number_of_turns(tmp_path: Path) -> None:
    records = [question(81), question(161, category="summarization", turns=["Only one."])]
    suite = load_suite("spec_bench", write(tmp_path / "question.jsonl", records))
    assert [(prompt.id, prompt.category, len(prompt.turns)) for prompt in suite.prompts] == [
        ("81", "writing", 2),
        ("161", "summarization", 1),
    ]
    with pytest.raises(ValueError, match="spec_bench isn't on the Hub: download https://github.com/hemingkx/Spec-Bench"):
        load_suite("spec_bench")


def test_code_and_grade_school_problems_are_read_from_their_published_files(tmp_path: Path) -> None:
    problem = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""}
    file = tmp_path / "HumanEval.jsonl.gz"
    file.write_bytes(gzip.compress((json.dumps(problem) + "\n").encode()))
    (prompt,) = load_suite("human_eval", str(file)).prompts
    assert (prompt.id, prompt.turns) == ("HumanEval/0", ("def f():\n",))
    sums = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in (1, 2)]
    suite = load_suite("gsm8k", write(tmp_path / "test.jsonl", sums))
    assert [(prompt.id, prompt.turns) for prompt in suite.prompts] == [("0", ("What is 1 + 1?",)), ("1", ("What is 2 + 1?",))]
    for name, path in (("gsm8k", file), ("human_eval", tmp_path / "test.jsonl")):
        with pytest.raises(ValueError, match=f"(line|record) 1: not a prompt of {name}"):
            load_suite(name, str(path))


def test_published_suites_are_read_at_their_pinned_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[dict[str, Any]] = []

    def load_records(path: str, **options: Any) -> Iterator[Any]:
        requests.append({"path": path, **options})
        return iter([{"question": "1 + 1?", "answer": "2", "prompt": "1 + 1?"}])

    monkeypatch.setattr(prompts_module, "load_records", load_records)
    pinned = load_suite("gsm8k")
    commit = SUITES["gsm8k"].revision
    assert commit is not None
    assert requests[0] == {
        "path": "openai/gsm8k",
        "split": "test",
        "subset": "main",
        "file": None,
        "revision": commit,
    }
    assert pinned.source == f"openai/gsm8k@{commit}"
    custom = load_suite("mine", "user/prompts")
    assert (custom.source, requests[-1]["path"], requests[-1]["revision"]) == ("user/prompts", "user/prompts", None)
    assert {name for name, suite in SUITES.items() if suite.revision is None} == {"spec_bench", "languages"}


def test_a_users_prompts_and_conversations_are_a_suite_of_any_name(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"prompt": "Why?"},
        {"id": 7, "category": "law", "turns": ["One", "Two", "Three"]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        {"id": "c", "conversations": [{"from": f, "value": v} for f, v in (("human", "A"), ("gpt", "B"), ("human", "C"))]},
        {"prompt": "What?", "system": "Be brief.", "tools": [{"name": "f"}]},
        {"messages": [{"role": "developer", "content": "Be kind."}, {"role": "User", "content": "Hey"}]},
    ]
    path = write(tmp_path / "mine.jsonl", records)
    suite = load_suite("our-prompts.v2", path)
    assert (suite.name, suite.source) == ("our-prompts.v2", None)
    assert [(prompt.id, prompt.category, prompt.turns) for prompt in suite.prompts] == [
        ("0", "prompt", ("Why?",)),
        ("7", "law", ("One", "Two", "Three")),
        ("2", "prompt", ("Hi",)),
        ("c", "prompt", ("A", "C")),
        ("4", "prompt", ("What?",)),
        ("5", "prompt", ("Hey",)),
    ]
    assert [prompt.system for prompt in suite.prompts[3:]] == [None, "Be brief.", "Be kind."]
    assert [turn.role for turn in suite.prompts[4].messages("What?")] == ["system", "user"]
    assert suite.prompts[4].tools == [{"type": "function", "function": {"name": "f"}}]
    assert len(load_suite("our-prompts.v2", path, limit=2).prompts) == 2


@pytest.mark.parametrize(
    "record",
    [
        {"text": "Why?"},
        {"prompt": ""},
        {"turns": ["One", 2]},
        {"prompt": "Why?", "turns": ["Why?"]},
        {"prompt": "Why?", "id": True},
        {"messages": [{"role": "assistant", "content": "Ho"}]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}]},
        {"prompt": "Why?", "tools": "none"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Hello?"}]},
        {"conversations": [{"from": "human", "text": "Hi"}]},
    ],
)
def test_an_ambiguous_record_of_a_users_suite_is_an_error_with_the_forms(record: dict[str, object], tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{"prompt": "Hm?"}, record])
    with pytest.raises(ValueError, match=r"mine.jsonl, line 2: not a prompt of mine: .*Records are \{\"prompt\": TEXT\}"):
        load_suite("mine", path)


def test_the_file_of_a_published_suite_under_another_name_is_an_error_with_the_option(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", [{"question": "1 + 1?", "answer": "It is 2.\n#### 2"}])
    with pytest.raises(ValueError, match=r"a record of gsm8k: eval.suites=\[\{name: gsm8k, path: .*test.jsonl\}\] reads"):
        load_suite("test", path)


def test_a_suite_name_that_is_no_file_name_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "Hm?"}])
    for name in ("../mine", "", ".hidden", "a b", "a/b"):
        with pytest.raises(ValueError, match="use letters, digits, .*rename its file"):
            load_suite(name, path)


def test_logged_requests_are_a_suite_without_what_is_private(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "Write to jane@example.org, please."}]}
    reply = {"choices": [{"message": {"role": "assistant", "content": "Done."}}]}
    records = [{"id": "jane@example.org", "request": asked, "response": reply}, {"request": asked}, {"body": asked}]
    prompts = load_suite("log", write(tmp_path / "log.jsonl", records)).prompts
    assert {prompt.turns for prompt in prompts} == {("Write to [e-mail], please.",)}
    assert [prompt.id for prompt in prompts] == ["0", "1", "2"], "a log's own ids may be private"
    for more in ({}, {"response": reply}):
        path = write(tmp_path / "log.jsonl", [{"request": {"messages": [{"role": "tool", "content": "secret"}]}, **more}])
        with pytest.raises(ValueError, match="line 1: not a prompt of log: a logged request") as error:
            load_suite("log", path)
        assert "secret" not in str(error.value)
