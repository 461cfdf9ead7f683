"""The headline: one line that claims no more than the rows show."""

from typing import Any, cast

import pytest

from outrider.eval.results.notes import headline
from outrider.eval.results.rows import Row


def make_row(label: str = "ReDrafter, 4 beams of 3, 5 nodes", **changes: Any) -> Row:
    values: dict[str, Any] = {
        "method": "baseline" if label == "plain decoding" else label,
        "label": label,
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
        "noisy": False,
    }
    return cast("Row", values | changes)


PLAIN = make_row("plain decoding", speedup=1.0, speedup_ci95=None, tokens_per_step=1.0)
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
            [make_row("Medusa", speedup=0.63, speedup_ci95=(0.5, 0.8), median_speedup=0.7, num_faster=1)],
            "Not faster than plain decoding: 0.63x [0.50, 0.80] by Medusa at best; median 0.70x, faster on 1 of 30 prompts; "
            "1.90 tokens per step; all answers identical (stdlib, greedy).",
            id="slower",
        ),
        pytest.param(
            [make_row(**WRONG)],
            "No setting has a valid speedup. Without a valid speed: 1 row (not lossless).",
            id="none is lossless",
        ),
        pytest.param(
            [make_row("Medusa"), make_row("EAGLE", speedup=1.5, noisy=True)],
            "Fastest: 1.50x [1.11, 1.34], noisy by EAGLE; median 1.25x, faster on 27 of 30 prompts; 1.90 tokens per step; all "
            "answers identical (stdlib, greedy).",
            id="noisy",
        ),
        pytest.param(
            [make_row("Medusa", speedup_ci95=None, num_compared=1, num_faster=1)],
            "Fastest: 1.22x without interval by Medusa; median 1.25x, faster on 1 of 1 prompts; 1.90 tokens per step; all "
            "answers identical (stdlib, greedy).",
            id="one prompt",
        ),
        pytest.param(
            [
                make_row(
                    "Medusa", lossless=False, lossless_label="within noise (2)", num_mismatched_prompts=2, num_within_noise=2
                )
            ],
            "Fastest: 1.22x [1.11, 1.34] by Medusa; median 1.25x, faster on 27 of 30 prompts; 1.90 tokens per step; answers "
            "to 2 prompts differ within rounding noise (stdlib, greedy).",
            id="rounding noise",
        ),
        pytest.param(
            [
                make_row("Suffix, 10 nodes", speedup=1.7),
                make_row("Recycling", speedup=1.0),
                make_row("Suffix + Recycling, 40 nodes, paced", speedup=1.5, speedup_ci95=(1.3, 1.8)),
                make_row("ReDrafter + Suffix + Recycling, 40 nodes, paced"),
            ],
            "Fastest: 1.70x [1.11, 1.34] by Suffix (10 nodes); median 1.25x, faster on 27 of 30 prompts; 1.90 tokens per step; "
            "all answers identical (stdlib, greedy). What ReDrafter adds to Suffix + Recycling: 1.22x [1.11, 1.34] with it, "
            "1.50x [1.30, 1.80] without it.",
            id="a merge with and without its trained drafter",
        ),
    ],
)
def test_the_headline_of_one_group(rows: list[Row], text: str) -> None:
    shown = headline([*(row for row in (PLAIN,) if rows[0]["batch_size"] == 1), *rows])
    assert shown == text
    assert "\n" not in shown


def test_of_several_groups_the_fastest_row_is_named_with_its_group() -> None:
    """A method without a speed in one group may be the fastest: no row of the table is above the claim."""
    elsewhere: dict[str, Any] = {"suite": "gsm8k", "temperature": 1.0}
    rows = [
        *(PLAIN, make_row("Medusa", speedup=0.19), make_row("EAGLE", speedup=1.48)),
        *(make_row("Medusa", **elsewhere), make_row("EAGLE", **elsewhere, out_of_memory=True, speedup=None)),
    ]
    text = headline(rows)
    assert text.startswith("Fastest: 1.48x [1.11, 1.34] by EAGLE;")
    assert text.endswith("all answers identical (stdlib, greedy). Without a valid speed: 1 row (out of memory).")
    assert headline([*rows, make_row("EAGLE", **WRONG, batch_size=2)]).endswith(
        "Without a valid speed: 2 rows (1 out of memory, 1 not lossless)."
    )


def test_a_row_that_no_longer_is_lossless_by_choice_is_not_counted() -> None:
    typical = make_row("Medusa", speedup=2.0, lossless=False, lossless_label="lossy", num_mismatched_prompts=3)
    assert headline([PLAIN, typical]).startswith("No setting has a valid speedup")
