"""Virtual time: stages and links by hand, and the loops on imaginary targets."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
MODULES = ("pipeline_clock", "pipeline_conditions", "pipeline_methods", "pipeline_play", "pipeline_language")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return SimpleNamespace(**{name.removeprefix("pipeline_"): importlib.import_module(name) for name in MODULES})


@pytest.fixture
def pipeline(bench: Any) -> Callable[..., Any]:
    """Three stages of 10, 20 and 10 ms, with 2 layers each. A hop takes 1 ms, and bytes take none."""

    def make(**options: Any) -> Any:
        costs = bench.clock.Costs(
            stage_seconds=(0.01, 0.02, 0.01), entry_share=0.5, bytes_per_second=float("inf"), skip_seconds=0.0, layers=2
        )
        return bench.clock.Pipeline(costs, bench.clock.Clock(), **options)

    return make


def seconds(spans: Any) -> list[tuple[int, int, float, float]]:
    return [(span.number, span.stage, round(1e3 * span.start, 6), round(1e3 * span.end, 6)) for span in spans]


def test_runs_follow_each_other_through_the_stages(pipeline: Callable[..., Any]) -> None:
    pipe = pipeline()
    pipe.send(0, 1)
    pipe.send(1, 2)
    assert not pipe.has_answer()
    assert pipe.receive().number == 0
    assert pipe.now == pytest.approx(0.044)
    assert pipe.receive().number == 1
    assert pipe.now == pytest.approx(0.079)
    wanted = [(0, 0, 1, 11), (1, 0, 11, 26), (0, 1, 12, 32), (0, 2, 33, 43), (1, 1, 32, 62), (1, 2, 63, 78)]
    assert seconds(pipe.spans) == wanted


def test_a_cancelled_run_ends_after_the_layer_and_is_skipped_by_others(pipeline: Callable[..., Any]) -> None:
    pipe = pipeline()
    pipe.send(0, 1)
    pipe.send(1, 2)
    pipe.clock.now = 0.013
    pipe.cancel([1])  # it arrives after 14 ms: the first layer of stage 0 ends at 18.5 ms
    messages = [pipe.receive(), pipe.receive()]
    assert [message.is_skipped for message in messages] == [False, True]
    assert seconds(pipe.spans) == [(0, 0, 1, 11), (1, 0, 11, 18.5), (0, 1, 12, 32), (0, 2, 33, 43)]
    assert pipe.full_seconds(1) == pytest.approx(0.06)


def test_a_backward_cancellation_arrives_first_at_the_last_stage(pipeline: Callable[..., Any]) -> None:
    pipe = pipeline(is_backward=True)
    pipe.send(0, 2)
    pipe.clock.now = 0.006
    pipe.cancel([0])  # it arrives at stage 0 after 9 ms, in the second layer (8.5 to 16 ms)
    assert pipe.receive().is_skipped is True
    assert seconds(pipe.spans) == [(0, 0, 1, 16)]


def test_without_cancellations_dead_runs_are_computed(pipeline: Callable[..., Any]) -> None:
    pipe = pipeline(cancels=False)
    pipe.send(0, 1)
    pipe.cancel([0])
    assert pipe.receive().is_skipped is False
    assert len(pipe.spans) == 3


def test_a_link_sends_one_message_after_the_other(bench: Any) -> None:
    costs = bench.clock.Costs(
        stage_seconds=(0.0,), hop_seconds=0.001, bytes_per_second=1000.0, entry_bytes=9, header_bytes=1, entry_share=0.0
    )
    pipe = bench.clock.Pipeline(costs, bench.clock.Clock())
    pipe.send(0, 1)
    pipe.send(1, 1)
    pipe.receive()
    assert pipe.now == pytest.approx(0.022)  # 10 bytes, a hop, 10 bytes, a hop
    pipe.receive()
    assert pipe.now == pytest.approx(0.032)
    assert pipe.bytes_sent == 20


def test_measured_factors_go_on_with_the_share(bench: Any) -> None:
    costs = bench.clock.Costs(stage_seconds=(2.0,), factors=(1.0, 1.5), entry_share=0.25)
    assert [costs.seconds(0, count) for count in (1, 2, 3, 4)] == [2.0, 3.0, 3.5, 4.0]


def test_the_formula_is_that_of_the_cost_model(bench: Any) -> None:
    wanted = {0.0: (0.60, 0.86, 0.99), 0.5: (1.17, 1.32, 1.78), 0.8: (2.03, 2.03, 3.48), 0.9: (2.48, 2.66, 5.61)}
    for acceptance, speeds in wanted.items():
        made = bench.conditions.predicted(bench.conditions.Condition(acceptance=acceptance))
        ratios = [speed / made.plain for speed in (made.synchronous, made.best, made.pipelined)]
        assert ratios == pytest.approx(speeds, abs=0.006)


def test_layers_are_balanced_by_the_speed_of_machines(bench: Any) -> None:
    assert bench.conditions.split(32, [1.0] * 4) == [8] * 4
    assert bench.conditions.split(12, [1.0, 5.0, 1.0]) == [5, 1, 6] or bench.conditions.split(12, [1.0, 5.0, 1.0]) == [6, 1, 5]


def test_guesses_are_right_as_often_as_dialled(bench: Any) -> None:
    for acceptance, spread in ((0.0, 0.0), (0.8, 0.0), (0.8, 0.3), (1.0, 0.0)):
        language = bench.language.Language(0, acceptance, spread=spread)
        text, right, probs = language.begin([1]), 0, 0.0
        for _ in range(4000):
            token, prob = language.guess(text)
            right += token == language.choice(text)
            probs += prob
            text = language.after(text, language.choice(text))
        assert right / 4000 == pytest.approx(acceptance, abs=0.03)
        assert probs / 4000 == pytest.approx(acceptance, abs=0.02)


def test_all_methods_write_the_same_text(bench: Any) -> None:
    for acceptance in (0.0, 0.8):
        condition = bench.conditions.Condition(acceptance=acceptance, new_tokens=32)
        play = bench.play.play
        plain = play(condition, 0, num_drafts=0)
        assert len(plain.decoded.tokens) == 32
        texts = [play(condition, 0, num_drafts=3), play(condition, 0, speculation=bench.methods.expected)]
        for name, changed, speculation in bench.methods.ablations(condition):
            assert name
            texts.append(play(changed, 0, speculation=speculation))
        assert len(texts) == 6
        assert all(text.decoded.tokens == plain.decoded.tokens for text in texts)


def test_the_loops_take_the_time_of_the_formula(bench: Any) -> None:
    condition = bench.conditions.Condition(acceptance=0.8, new_tokens=96, num_texts=3)
    wanted = bench.conditions.predicted(condition)
    row, outcomes = bench.play.row, bench.play.outcomes
    plain = row(outcomes(condition, num_drafts=0))["tokens_per_second"]
    synchronous = row(outcomes(condition, num_drafts=4))["tokens_per_second"]
    pipelined = row(outcomes(condition, speculation=bench.methods.expected))
    assert plain == pytest.approx(wanted.plain, rel=0.02)
    assert synchronous / plain == pytest.approx(wanted.synchronous / wanted.plain, rel=0.15)
    assert 0.7 <= pipelined["tokens_per_second"] / plain / (wanted.pipelined / wanted.plain) <= 1.2
    assert 0 < pipelined["saved_share"] < 1
    assert 0 < pipelined["utilisation"] < 1
