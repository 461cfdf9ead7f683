"""The headline: one line that claims no more than the rows show."""

from typing import Any, cast

import pytest

from outrider.eval.results.headline import headline
from outrider.eval.results.rows import Row

DISTURBED = {"side": "method", "prompt_ids": ["7"], "turn": 0, "repeat": 0, "ratio": 27.0}


def make_row(method: str = "redrafter beam_width=4 beam_length=3 tree_nodes=5", **changes: Any) -> Row:
    values: dict[str, Any] = {
        "method": method,
        "suite": "stdlib",
        "temperature": 0.0,
        "batch_size": 1,
        "tokens_per_step": 1.9,
        "speedup": 1.22,
        "speedup_ci95": (1.11, 1.34),
        "median_speedup": 1.25,
        "num_faster": 27,
        "num_compared": 30,
        "lossless": True,
        "lossless_label": "yes",
        "num_mismatched_prompts": 0,
        "num_within_noise": 0,
        "out_of_memory": False,
        "exceeds": "",
        "disturbed": [],
    }
    return cast("Row", values | changes)


PLAIN = make_row("baseline", speedup=1.0, speedup_ci95=None, tokens_per_step=1.0)
WRONG: dict[str, Any] = {"speedup": None, "lossless": False, "lossless_label": "NO", "num_mismatched_prompts": 1}


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        pytest.param(
            [make_row()],
            "Fastest: 1.22x [1.11, 1.34] by ReDrafter (4 beams of 3, 5 nodes); median 1.25x, faster on 27 of 30 prompts; "
            "1.90 tokens per step; all answers identical (stdlib, greedy).",
            id="one fast row",
        ),
        pytest.param(
            [make_row(speedup=1.05, speedup_ci95=(0.997, 1.15))],
            "Fastest: 1.05x [1.00, 1.15] by ReDrafter (4 beams of 3, 5 nodes), not distinguishable from plain decoding; "
            "median 1.25x, faster on 27 of 30 prompts; 1.90 tokens per step; all answers identical (stdlib, greedy).",
            id="the interval includes 1.00 as printed",
        ),
        pytest.param(
            [make_row("medusa", speedup=0.63, speedup_ci95=(0.5, 0.8), median_speedup=0.7, num_faster=1)],
            "Not faster than plain decoding: 0.63x [0.50, 0.80] by Medusa at best; median 0.70x, faster on 1 of 30 prompts; "
            "1.90 tokens per step; all answers identical (stdlib, greedy).",
            id="slower",
        ),
        pytest.param(
            [make_row(**WRONG)],
            "No setting has a valid speedup (stdlib, greedy). Without a valid speed: 1 setting (not lossless).",
            id="none is lossless",
        ),
        pytest.param(
            [make_row("medusa", speedup=1.7, exceeds="tokens per step"), make_row("eagle", **WRONG), make_row()],
            "Fastest: 1.22x [1.11, 1.34] by ReDrafter (4 beams of 3, 5 nodes); median 1.25x, faster on 27 of 30 prompts; "
            "1.90 tokens per step; all answers identical (stdlib, greedy). "
            "Without a valid speed: 2 settings (1 not lossless, 1 error of measurement).",
            id="an error of measurement isn't the fastest",
        ),
        pytest.param(
            [make_row("medusa"), make_row("eagle", speedup=1.5, disturbed=[DISTURBED])],
            "Fastest: 1.50x [1.11, 1.34] by EAGLE; median 1.25x, faster on 27 of 30 prompts; 1.90 tokens per step; all "
            "answers identical (stdlib, greedy). DISTURBED: measure again.",
            id="disturbed",
        ),
        pytest.param(
            [make_row("medusa", speedup_ci95=None, median_speedup=None)],
            "Fastest: 1.22x without interval by Medusa; 1.90 tokens per step; all answers identical (stdlib, greedy).",
            id="one prompt of an older version",
        ),
        pytest.param(
            [
                make_row(
                    "medusa", lossless=False, lossless_label="within noise (2)", num_mismatched_prompts=2, num_within_noise=2
                )
            ],
            "Fastest: 1.22x [1.11, 1.34] by Medusa; median 1.25x, faster on 27 of 30 prompts; 1.90 tokens per step; answers "
            "to 2 prompts differ within rounding noise (stdlib, greedy).",
            id="rounding noise",
        ),
        pytest.param(
            [make_row("draft_model", lossless=None, lossless_label="by rule", temperature=1.0, batch_size=4)],
            "Fastest: 1.22x [1.11, 1.34] by Draft model; median 1.25x, faster on 27 of 30 batches; 1.90 tokens per step; "
            "lossless by its rule (stdlib, temperature 1, batch size 4).",
            id="samples in batches",
        ),
    ],
)
def test_the_headline_of_one_group(rows: list[Row], text: str) -> None:
    shown = headline([*(row for row in (PLAIN,) if rows[0]["batch_size"] == 1), *rows])
    assert shown == text
    assert "\n" not in shown


def test_several_groups_are_summed_up_by_ranges() -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "speedup": 0.97, "speedup_ci95": (0.9, 1.02), "median_speedup": 0.98}
    rows = [PLAIN, make_row("medusa"), make_row("medusa", **sampled, num_faster=10, tokens_per_step=1.4)]
    assert headline(rows) == (
        "Fastest: 0.97x to 1.22x by Medusa, not distinguishable from plain decoding in 1 of 2 groups; medians 0.98x to "
        "1.25x, faster on 37 of 60 prompts; 1.40 to 1.90 tokens per step; all answers identical (2 groups)."
    )


def test_prompts_and_batches_are_not_added() -> None:
    rows = [PLAIN, make_row("medusa"), make_row("medusa", batch_size=4, num_faster=3, num_compared=8)]
    assert "faster on 27 of 30 prompts and 3 of 8 batches;" in headline(rows)


def test_a_method_without_a_speed_in_one_group_is_not_the_fastest() -> None:
    elsewhere: dict[str, Any] = {"suite": "gsm8k"}
    rows = [
        *(PLAIN, make_row("medusa", speedup=1.1), make_row("eagle", speedup=1.9)),
        *(make_row("medusa", **elsewhere), make_row("eagle", **elsewhere, out_of_memory=True, speedup=None)),
    ]
    text = headline(rows)
    assert text.startswith("Fastest: 1.10x to 1.22x by Medusa;")
    assert text.endswith("all answers identical (2 groups). Without a valid speed: 1 setting (out of memory).")


def test_a_row_that_no_longer_is_lossless_by_choice_is_not_counted() -> None:
    typical = make_row("medusa", speedup=2.0, lossless=False, lossless_label="lossy", num_mismatched_prompts=3)
    assert headline([PLAIN, typical]).startswith("No setting has a valid speedup")
