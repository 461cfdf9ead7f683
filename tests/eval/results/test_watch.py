"""Logs of servers say whether drafts are accepted as before."""

import gzip
import json
import math
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from outrider.data.raw_records import CUT_FILE, EMPTY_FILE
from outrider.eval.results.watch import BAD_COUNTS, NO_COUNTS, NO_TIME, Watch, category_of, counts_of, watch, week_of

from ...commands import invoke

OLD, NEW = 1_695_000_000, 1_695_700_000
"""Times in two weeks."""


def request(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def reply(steps: int, accepted: int, created: float | None = None) -> dict[str, Any]:
    spec = {"num_spec_steps": steps, "num_accepted_draft_tokens": accepted, "num_draft_tokens": 3 * steps}
    return {
        "choices": [{"message": {"role": "assistant", "content": "secret answer"}}],
        "metrics": {"speculative_decoding": spec},
        **({} if created is None else {"created": created}),
    }


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def words(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefgh", k=12))


def log_of(path: Path, rates: dict[tuple[float, str], float], number: int = 60) -> Path:
    """Write a log with so many requests for each time and category, with accepted tokens at random around a rate a step."""
    draw = random.Random(0)
    records = []
    for (time, task), rate in rates.items():
        for _ in range(number):
            asked = request(f"secret question {words(draw)}", metadata={"task": task})
            records.append({"request": asked, "response": reply(40, round(40 * draw.gauss(rate, 0.05)), time)})
    return write(path, records)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (reply(43, 10), (53, 43)),
        # llama.cpp: tokens and accepted ones
        ({"timings": {"predicted_n": 200, "draft_n": 347, "draft_n_accepted": 65}}, (200, 135)),
        # SGLang
        ({"meta_info": {"completion_tokens": 90, "spec_verify_ct": 30}}, (90, 30)),
        (reply(0, 0), None),
        ({"timings": {"predicted_n": 200}}, None),
        ({"usage": {"completion_tokens": 5}}, None),
        ({"metrics": {"speculative_decoding": None}}, None),
    ],
)
def test_counts_of_drafts_are_read_as_each_server_writes_them(body, expected):
    assert counts_of(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        reply(-1, 3),
        reply(3, -1),
        {"timings": {"predicted_n": 2, "draft_n": 9, "draft_n_accepted": 7}},
        {"metrics": {"speculative_decoding": {"num_spec_steps": "4", "num_accepted_draft_tokens": 1}}},
        {"metrics": {"speculative_decoding": {"num_spec_steps": True, "num_accepted_draft_tokens": 1}}},
    ],
)
def test_impossible_counts_are_no_counts(body):
    with pytest.raises(ValueError, match="whole numbers"):
        counts_of(body)


@pytest.mark.parametrize(
    ("value", "week"),
    [
        ("2023-11-28T09:00:00Z", "2023-W48"),
        ("2023-11-28 09:00:00", "2023-W48"),
        ("20231128", "2023-W48"),
        (datetime(2023, 11, 28, tzinfo=UTC), "2023-W48"),  # of a Parquet file
        (1701162000, "2023-W48"),
        ("1701162000.5", "2023-W48"),
        (1701162000_000, "2023-W48"),
        ("2021-01-01", "2020-W53"),
        ("2999-01-01", None),
        ("1701162000123", "2023-W48"),
        ("1970-01-01T00:00:00Z", None),
        ("0001-01-01", None),
        ("yesterday", None),
        (float("inf"), None),
        (True, None),
        (1701162000_000_000, "2023-W48"),
        ("2023-11-27T01:00:00+02:00", "2023-W47"),  # a Sunday in UTC
        ({}, None),
    ],
)
def test_times_are_weeks(value, week):
    assert week_of({}, {"timestamp": value}) == week


def test_categories_are_a_key_or_what_is_asked_for():
    assert category_of({}, request("x", metadata={"task": "mail"}), "task") == "mail"
    assert category_of({"task": "a\x1b[31m" + "b" * 99}, {}, "task") == "a?[31m" + "b" * 34
    assert category_of({"task": 3}, request("x"), "task") == "3"
    assert category_of({}, request("x"), "task") == category_of({"task": ""}, request("x"), "task") == "(none)"
    assert category_of({}, request("x", tools=[{}]), None) == "tools"
    assert category_of({}, request("Mend this:\n```py\n1\n```"), None) == "code"
    assert category_of({}, {"messages": "?"}, None) == "text"


@pytest.mark.parametrize("per_conversation", [1, 10])
def test_intervals_hold_the_true_ratio_as_often_as_they_say(per_conversation: int):
    """The requests of a conversation have one level."""
    draw, inside = random.Random(1), 0
    for _ in range(300):
        found = Watch([])
        for number in range(60):
            question, rate = words(draw), draw.choice([0.5, 1.5])
            for _ in range(per_conversation):
                steps = draw.randint(5, 60)
                accepted = sum(draw.random() < rate / 2 for _ in range(2 * steps))
                found.add(("2023-W01", "x"), question, (steps + accepted, steps), 0, number)
        low, high = found.sums(found.groups).interval(1.96)
        inside += low <= 2.0 <= high
    assert 0.9 <= inside / 300 <= 0.985


def test_a_fall_of_one_category_is_found_and_no_text_is_printed(tmp_path: Path):
    rates = {(OLD, "mail"): 1.5, (OLD, "code"): 2.0, (NEW, "mail"): 1.5, (NEW, "code"): 1.5}
    log = log_of(tmp_path / "log.jsonl", rates)
    changes = {change.category: change for change in watch([log], "task").changes()}
    assert changes["code"].ratio == pytest.approx(2.5 / 3, rel=0.02)
    assert changes["code"].fell(0.03)
    assert not changes["mail"].fell(0.03)
    result = invoke(["watch", str(log), "--category", "task"])
    assert result.exit_code == 1
    assert "fallen (all requests, code)" in " ".join(result.output.split())
    assert "secret" not in result.output
    assert max(len(line) for line in result.output.splitlines() if str(log) not in line) <= 80


def test_nothing_fell_where_nothing_changed_or_there_is_one_week(tmp_path: Path):
    log = log_of(tmp_path / "log.jsonl", {(OLD, "a"): 1.5, (NEW, "a"): 1.5})
    result = invoke(["watch", str(log)])
    assert (result.exit_code, "not fallen" in result.output) == (0, True)
    result = invoke(["watch", str(log_of(tmp_path / "one.jsonl", {(NEW, "a"): 1.5}))])
    assert (result.exit_code, "fallen" in result.output) == (0, False)


def test_few_requests_show_no_fall_and_say_so(tmp_path: Path):
    log = log_of(tmp_path / "log.jsonl", {(OLD, "a"): 2.0, (NEW, "a"): 1.0}, number=10)
    assert not any(change.fell(0.03) for change in watch([log]).changes())
    result = invoke(["watch", str(log)])
    assert (result.exit_code, "too few requests to tell" in result.output) == (0, True)


def test_a_week_that_has_just_begun_does_not_hide_a_fall(tmp_path: Path):
    log = log_of(tmp_path / "log.jsonl", {(OLD, "a"): 2.0, (NEW, "a"): 1.5})
    with log.open("a") as file:
        file.write(json.dumps({"request": request("one"), "response": reply(4, 8, NEW + 1_000_000)}) + "\n")
    found = watch([log])
    assert len(found.weeks()) == 3
    assert found.changes()[0].fell(0.03)


def test_repeated_questions_are_ranked_by_the_steps_that_they_cost(tmp_path: Path):
    records = [{"request": request("fine"), "response": reply(10, 30, OLD)} for _ in range(50)]
    records += [{"request": request(f"What does order {number} cost?"), "response": reply(30, 10, OLD)} for number in range(9)]
    log = write(tmp_path / "log.jsonl", records)
    log.write_text("no json\n" + log.read_text())
    found = watch([log, log])
    (question,) = found.costliest(5)
    assert (question.count, found.place(question)) == (9, f"{log}:52")


def test_a_drafter_of_llama_cpp_that_stops_is_seen(tmp_path: Path):
    """It writes no counts of drafts for a reply without any."""
    draw = random.Random(0)

    def replies(time: float, **counts: int) -> list[dict[str, Any]]:
        timings = {"predicted_n": 90, **counts}
        return [{"messages": request(words(draw))["messages"], "timings": timings, "created": time} for _ in range(30)]

    drafted, undrafted = replies(OLD, draft_n=90, draft_n_accepted=60), replies(NEW)
    found = watch([write(tmp_path / "log.jsonl", [*drafted, *undrafted])])
    assert [sums.ratio for sums in found.weeks().values()] == [3.0, 1.0]
    assert found.changes()[0].fell(0.03)
    with pytest.raises(ValueError, match="30 requests without counts"):
        watch([write(tmp_path / "without.jsonl", undrafted)])


def test_what_cannot_be_used_is_counted_and_a_log_without_counts_is_an_error(tmp_path: Path):
    good = {"request": request("x"), "response": reply(4, 2, OLD)}
    bad = [{"request": request("x"), "response": body} for body in ({"error": 1}, reply(4, 2), reply(-4, 2, OLD))]
    path = write(tmp_path / "log.jsonl", [good, *bad, 7])
    with path.open("a") as file:
        file.write('{"request": {"mess')  # the server is still writing
    with path.open("ab") as binary:
        binary.write("\u00e9".encode()[:1])
    found = watch([path])
    assert found.notes == {NO_COUNTS: 2, NO_TIME: 1, BAD_COUNTS: 1, "lines that are no JSON: not used": 1}
    sums = found.sums(found.groups)
    assert (sums.count, math.isinf(sums.deviation)) == (1, True)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(path.read_bytes())[:-20])
    assert watch([path, tmp_path / "empty.jsonl", tmp_path / "cut.jsonl.gz"]).notes.keys() > {EMPTY_FILE, CUT_FILE}
    with pytest.raises(ValueError, match=r"no request of the log can be counted: 1 requests without counts.*--per-request"):
        watch([write(tmp_path / "none.jsonl", bad[:1])])
