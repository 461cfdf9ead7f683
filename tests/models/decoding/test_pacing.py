"""The rules of pacing on small tables: costs, the best number of nodes, and what is worth its time."""

import ast
import inspect
import random
from itertools import pairwise

import pytest

from outrider.models.decoding import costs, growing_tree, pacing
from outrider.models.decoding.costs import (
    REVISIT_STEPS,
    StepSeconds,
    best_width,
    interpolated,
    lowest_slopes,
    widths_up_to,
)
from outrider.models.decoding.pacing import MAX_PATIENCE, MAX_READS, NUM_TRIALS, TRIAL_WIDTHS, Gains, Pacer, Reading

HARMLESS = {"bisect", "collections", "collections.abc", "dataclasses", "itertools", "math", "statistics", "typing"}


def test_widths_end_with_the_largest():
    assert widths_up_to(1) == (0, 1)
    assert widths_up_to(40) == (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 40)
    assert widths_up_to(15) == (0, 1, 2, 3, 5, 7, 11, 15)


def test_costs_between_measurements_are_interpolated_and_never_fall():
    """The point at 3 nodes was disturbed: 9 seconds for what costs less than 5 with more nodes."""
    table = interpolated([(0, 1.0), (1, 2.0), (3, 9.0), (5, 5.0)], 9)
    assert table == pytest.approx([1, 2, 3.5, 5, 5, 5, 5, 5, 5])
    assert interpolated([(2, 3.0), (4, 5.0)], 8) == pytest.approx([3, 3, 3, 4, 5, 6, 7, 8])
    assert interpolated([(5, 2.0)], 3) == [2, 2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_the_lowest_slope_is_that_of_the_best_larger_tree(seed):
    rng = random.Random(seed)
    table = [0.0]
    for _ in range(12):
        table.append(table[-1] + rng.choice([0.0, 0.1, 1.0, 3.0]))
    slopes = lowest_slopes(table)
    for n in range(12):
        assert slopes[n] == pytest.approx(min((table[m] - table[n]) / (m - n) for m in range(n + 1, 13)))
    assert slopes[12] == float("inf")


def test_the_best_width_jumps_over_a_step_of_the_costs():
    """A tree of 3 costs as much as one of 2, and 4 nodes cost far more."""
    table = [1.0, 1.5, 1.9, 1.9, 4.0]
    widths = (0, 1, 2, 3, 4)
    assert best_width([1.0, 1.6, 2.1, 2.5, 2.6], table, 1.0, widths)[0] == 3
    assert best_width([1.0, 1.1, 1.2, 1.3, 1.4], table, 1.0, widths)[0] == 0, "nothing is worth its time"
    assert best_width([1.0, 1.9], table, 1.0, widths) == (1, pytest.approx(0.4))
    assert best_width([1.0], table, 1.0, widths)[0] == 0


def test_a_stall_moves_no_cost():
    seconds = StepSeconds(7)
    for step in range(5):
        seconds.add(0, 1.0, step)
        seconds.add(7, 2.0, step)
    before = list(seconds.table)
    seconds.add(7, 500.0, 6)
    seconds.add(0, 300.0, 7)
    assert seconds.table == before


def run_trials(pacer: Pacer, cost=lambda n: 1.0 + 0.1 * n, tokens: float = 2.0) -> list[int]:
    widths = []
    while pacer.is_trial:
        width = pacer.width([1.0 + 0.1 * n for n in range(41)])
        widths.append(width)
        pacer.add_step(width, tokens, tokens, 0.1, cost(width))
    return widths


def test_few_first_steps_measure_small_and_large_trees():
    pacer = Pacer(40, 1)
    widths = run_trials(pacer)
    assert len(widths) == TRIAL_WIDTHS * NUM_TRIALS <= 8
    assert {0, 40} < set(widths)
    assert pacer.verify.table == pytest.approx([1.0 + 0.1 * n for n in range(41)])
    assert len(run_trials(Pacer(1, 1))) == 2 * NUM_TRIALS


def test_another_batch_size_starts_from_these_costs_without_trials():
    large = Pacer(40, 1)
    run_trials(large)
    large.add_step(10, 4.0, 4.0, 0.5, 2.0)
    small = Pacer(40, 1, large)
    assert not small.is_trial
    assert small.verify.table == large.verify.table
    assert small.rate == large.rate
    # Half the seconds at one width: so are those of the others, until they are measured.
    small.add_step(7, 2.0, 2.0, 0.1, 0.5 * large.verify.table[7])
    assert small.verify.table == pytest.approx([0.5 * seconds for seconds in large.verify.table])
    small.add_step(40, 2.0, 2.0, 0.1, 3.0)
    assert small.verify.table[40] == 3.0
    assert large.verify.table[40] == pytest.approx(5.0)


def test_the_rate_begins_with_plain_decoding_and_follows_the_steps():
    pacer = Pacer(40, 1)
    assert pacer.rate == 0.0
    run_trials(pacer)
    assert pacer.rate == pytest.approx(1.0)
    for _ in range(20):
        pacer.draft[0].add(0.5)
        pacer.add_step(10, 4.0, 4.0, 0.5, 2.0)
    assert pacer.rate == pytest.approx(1.6)
    pacer.add_step(10, 4.0, 4.0, 50.0, 300.0)
    assert 1.3 < pacer.rate < 1.6, "a stall counts as a slow step"


def test_expectations_that_never_come_true_end_in_plain_steps():
    pacer = Pacer(40, 1)
    run_trials(pacer)
    gains = [1.0 + 0.3 * min(n, 10) for n in range(41)]
    widths = []
    for _ in range(60):
        widths.append(pacer.width(pacer.trusted(gains)))
        pacer.add_step(widths[-1], 1.0, gains[widths[-1]], 0.1, 1.0 + 0.1 * widths[-1])
    assert widths[0] > 0, "before any step they are taken as right"
    assert widths[-40:].count(0) > 30
    assert pacer.rate == pytest.approx(1.0), "plain decoding is always a choice"


HERE, ELSEWHERE = (0,), (1,)
"""Situations of a step."""


def is_worth(gains: Gains, cost: float, situation: tuple[int, ...] = HERE) -> bool:
    """Ask whether a source is worth some tokens, at one token per second."""
    return gains.is_worth(situation, 1.0, cost)


def test_a_source_that_gains_less_than_it_costs_is_asked_ever_more_seldom():
    gains, asked = Gains(), []
    for step in range(2000):
        if is_worth(gains, 1.0):
            asked.append(step)
            gains.add(HERE, 0.0, 0.0)
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[:2] == sorted(pauses[:2])
    assert MAX_PATIENCE <= pauses[-1] <= MAX_PATIENCE + 2
    assert len(asked) < 0.02 * 2000


def test_a_source_that_became_worth_its_time_is_asked_again():
    gains = Gains()
    for _ in range(10):
        is_worth(gains, 1.0)
        gains.add(HERE, 0.0, 0.0)
    assert not is_worth(gains, 1.0)
    asked = 0
    for _ in range(1000):
        if is_worth(gains, 1.0):
            gains.add(HERE, 9.0, 0.0)
            asked += 1
    assert asked > 500


def test_a_cheap_source_is_asked_even_if_it_failed_a_few_times():
    gains = Gains()
    for _ in range(10):
        assert is_worth(gains, 0.05)
        gains.add(HERE, 0.0, 0.0)


def test_a_source_is_worth_what_came_of_its_claims_less_its_nodes():
    """It claims 0.8 tokens in each step: half of them come, and its nodes take the time of 0.1."""
    gains = Gains()
    for _ in range(1000):
        gains.add(HERE, 0.8, 0.1)
        gains.add_outcome(0.8, 0.4)
    assert gains.value(HERE, 1.0) == pytest.approx(0.3, abs=0.02)
    assert is_worth(gains, 0.25)
    assert not is_worth(gains, 0.4)


def test_a_source_that_makes_the_others_less_likely_is_worth_less_than_nothing():
    """Its tokens differ from theirs, so fewer are expected with it than without it."""
    gains = Gains()
    for _ in range(1000):
        gains.add(HERE, -0.1, 0.0)
        gains.add_outcome(-0.1, -0.05)
    assert gains.value(HERE, 1.0) <= 0.0
    assert not is_worth(gains, 0.2)


def test_a_situation_without_observations_is_taken_as_the_others():
    """So a useless source isn't tried anew in each situation, and a good one is asked where it is good."""
    gains = Gains()
    for _ in range(200):
        gains.add(HERE, 0.0, 0.0)
    assert not is_worth(gains, 0.4, ELSEWHERE)
    for _ in range(200):
        gains.add(ELSEWHERE, 1.0, 0.0)
    assert is_worth(gains, 0.4, ELSEWHERE)
    assert not is_worth(gains, 0.9, HERE)


def test_neighbours_of_the_best_width_are_measured_again_now_and_then():
    """Else a cost that was measured too high would never be corrected."""
    pacer = Pacer(40, 1)
    run_trials(pacer)
    gains = [1.0 + min(n, 7) * 0.6 for n in range(41)]
    widths = []
    for _ in range(10 * REVISIT_STEPS):
        widths.append(pacer.width(gains))
        pacer.add_step(widths[-1], gains[widths[-1]], gains[widths[-1]], 0.1, 1.0 + 0.1 * widths[-1])
    assert max(set(widths), key=widths.count) == 7
    assert {5, 11} <= set(widths)
    assert widths.count(7) > 0.95 * len(widths)


def test_a_growing_model_reads_for_all_rows_of_a_batch():
    reading = Reading()
    for num_nodes in (1, MAX_READS):
        reading.add_seconds(num_nodes, 1.0)
    sure, hopeless = [0.9], [1e-9]
    assert reading.best([sure, hopeless], 0.1) == 1, "the pass pays for one row"
    assert reading.best([hopeless, hopeless], 0.1) == 0
    assert reading.best([[0.3] * MAX_READS], 0.1) == MAX_READS, "more nodes take no longer"


def test_a_growing_model_learns_that_children_of_unlikely_nodes_gain_little():
    reading = Reading()
    for _ in range(20):
        reading.add([[0.05]], 1.0, 0.0)
    assert reading.best([[0.05]], 0.01) == 0
    assert reading.best([[0.5]], 0.01) == 1, "of likely nodes nothing is known yet"


def test_pacing_reads_neither_a_clock_nor_random_numbers():
    """Then trees would depend on the draws of tokens to come, or tests on the machine's load."""
    for module in (costs, pacing, growing_tree):
        imported = set()
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module)
        assert imported <= HARMLESS, module
