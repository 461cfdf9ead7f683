"""Numbers of the table, compared with values computed by hand."""

import pytest

from outrider.eval.results import stats

from ..conftest import MakeRecord


def test_tokens_per_step_leaves_the_prefill_out_on_both_sides(make_record: MakeRecord) -> None:
    # Three steps accept 0, 2 and 2 draft tokens: 1 + 3 + 3 tokens, and the prefill's is an eighth.
    record = make_record(accepted_histogram=[1, 0, 2])
    assert len(record.token_ids) == 8
    assert stats.tokens_per_step([record]) == 7 / 3
    assert stats.tokens_per_step([record, make_record(accepted_histogram=[1])]) == 8 / 4


def test_tokens_per_step_counts_the_emitted_tokens_of_a_cut_path(make_record: MakeRecord) -> None:
    record = make_record(accepted_histogram=[0, 0, 2], token_ids=[1, 2, 3, 4, 5], num_verify_tokens=4)
    assert stats.tokens_per_step([record]) == 4 / 2
    assert stats.mean_accepted(record.accepted_histogram) == 2.0


def test_an_answer_that_stops_at_its_first_token_has_no_tokens_per_step(make_record: MakeRecord) -> None:
    record = make_record(accepted_histogram=[])
    assert stats.tokens_per_step([record]) is None
    assert stats.mean_accepted(stats.accepted_histogram([record])) is None
    assert stats.decode_tokens_per_second([record]) is None
    assert stats.time_split([record]) is None


def test_histograms_of_different_lengths_add_up(make_record: MakeRecord) -> None:
    records = [make_record(accepted_histogram=[1, 2]), make_record(accepted_histogram=[1, 0, 0, 5])]
    assert stats.accepted_histogram(records) == [2, 2, 0, 5]
    assert stats.mean_accepted([2, 2, 0, 5]) == 17 / 9


def timed(make_record: MakeRecord, method: str, seconds: dict[str, float], **changes: object) -> list:
    return [
        make_record(method=method, prompt_id=prompt, prefill_seconds=0.5 * total, decode_seconds=0.5 * total, **changes)
        for prompt, total in seconds.items()
    ]


def test_speedup_is_a_ratio_of_sums_and_not_a_mean_of_ratios(make_record: MakeRecord) -> None:
    plain = timed(make_record, "baseline", {"a": 1.0, "b": 3.0})
    drafted = timed(make_record, "drafter", {"a": 0.5, "b": 1.0})
    point, interval = stats.speedup(plain, drafted, seed=0)
    assert point == pytest.approx(4.0 / 1.5)  # the mean of ratios would be 2.5
    assert interval is not None
    # Two prompts can only be drawn as aa, ab, ba, bb.
    assert interval == (pytest.approx(2.0), pytest.approx(3.0))


def test_speedup_is_per_token_where_a_method_writes_less(make_record: MakeRecord) -> None:
    plain = timed(make_record, "baseline", {"a": 1.0, "b": 1.0}, accepted_histogram=[9])
    shorter = timed(make_record, "drafter", {"a": 0.5, "b": 0.5}, accepted_histogram=[4])
    assert stats.speedup(plain, shorter, seed=0)[0] == pytest.approx(1.0)


def test_the_interval_covers_the_spread_of_prompts_and_narrows_with_their_number(make_record: MakeRecord) -> None:
    widths = []
    for num_prompts in (8, 128):
        seconds = {str(index): 0.5 if index % 2 else 1.0 for index in range(num_prompts)}
        plain = timed(make_record, "baseline", dict.fromkeys(seconds, 1.0))
        point, interval = stats.speedup(plain, timed(make_record, "drafter", seconds), seed=0)
        assert point == pytest.approx(4 / 3)
        assert interval is not None
        assert interval[0] < point < interval[1]
        widths.append(interval[1] - interval[0])
    assert widths[1] == pytest.approx(widths[0] / 4, rel=0.25)  # the square root of 16


def test_the_turns_of_a_prompt_stay_together_in_the_bootstrap(make_record: MakeRecord) -> None:
    # One prompt of two turns is still one prompt: too few for an interval.
    plain = [make_record(turn=turn) for turn in (0, 1)]
    assert stats.speedup(plain, plain, seed=0) == (1.0, None)


def test_a_speedup_over_different_prompts_is_refused(make_record: MakeRecord) -> None:
    plain = timed(make_record, "baseline", {"a": 1.0, "b": 3.0})
    with pytest.raises(ValueError, match="1 generations were measured with only one"):
        stats.speedup(plain, timed(make_record, "drafter", {"a": 1.0}), seed=0)


def test_categories_keep_their_own_numbers(make_record: MakeRecord) -> None:
    plain = [make_record(prompt_id="1"), make_record(prompt_id="2", category="math")]
    drafted = [
        make_record(prompt_id="1", method="d", accepted_histogram=[0, 1]),
        make_record(prompt_id="2", method="d", category="math", decode_seconds=0.25),
    ]
    result = stats.by_category(plain, drafted, seed=0)
    assert list(result) == ["writing", "math"]
    shared = {"num_prompts": 1, "accepted_by": None, "speedup_ci95": None}
    assert result["writing"] == {**shared, "num_steps": 1, "tokens_per_step": 2.0, "speedup": 1.0}
    assert result["math"] == {**shared, "num_steps": 2, "tokens_per_step": 1.0, "speedup": 2.0}


def test_accepted_drafts_are_summed_by_source_with_each_source_alone_first(make_record: MakeRecord) -> None:
    records = [
        make_record(accepted_histogram=[0, 3], accepted_by={"suffix": 0, "drafter": 2, "suffix+drafter": 1}),
        make_record(accepted_histogram=[0, 0, 1], accepted_by={"suffix": 2, "drafter": 0, "third": 0}),
    ]
    total = stats.accepted_by(records)
    assert total == {"suffix": 2, "drafter": 2, "suffix+drafter": 1, "third": 0}
    assert total is not None
    assert list(total) == ["suffix", "drafter", "third", "suffix+drafter"]
    assert stats.accepted_by([*records, make_record()]) is None
    assert stats.accepted_by([]) is None
