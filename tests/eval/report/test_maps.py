"""Tables of the report over the answer's length, over a ReDrafter's shapes, and over types."""

from pathlib import Path
from typing import Any

import pytest

from outrider.eval.report.types import type_name

from .test_page import DRAFTER, Changes, WriteRun, report
from .test_page import write_run as write_run  # a fixture

CELL = "mt_bench, greedy, batch size 1"


def test_tokens_per_step_over_the_length_are_a_table_with_later_windows_hidden(write_run: WriteRun, tmp_path: Path) -> None:
    windows = [
        {"first_token": 32 * i, "num_answers": 15 - i, "num_steps": 10, "tokens_per_step": 3 - 0.1 * i} for i in range(15)
    ]
    page = report(tmp_path / "report", write_run("one", row={"by_window": windows}))
    head, line = page.tables[f"{CELL}: tokens per step by the answer's tokens"]
    assert (head[:3], head[-1], len(head)) == (["Method", "1 to 32", "33 to 64"], "353 to 384", 13)
    assert line[:3] == ["ReDrafter 4 beams of 3", "3.00 15 answers", "2.90 14 answers"]
    assert "Windows of 32 tokens; 3 later ones are in summary.json." in page.text
    old = report(tmp_path / "old", write_run("old"))
    assert "length: no drafter, or records of an older version" in old.text


def test_widths_and_lengths_make_a_map_with_its_best_cell_and_gaps(write_run: WriteRun, tmp_path: Path) -> None:
    def shapes(*pairs: tuple[int, int]) -> dict[str, Changes]:
        return {f"redrafter beam_width={w} beam_length={n}": {"beam_width": w, "beam_length": n} for w, n in pairs}

    page = report(tmp_path / "report", write_run("one", shapes((1, 3), (4, 3), (4, 5))))
    caption = f"ReDrafter; {CELL}"
    assert page.tables[f"{caption}: tokens per step"] == [
        ["", "width 1", "width 4"],
        ["length 3", "2.00", "2.00"],
        ["length 5", "-", "2.00"],
    ]
    assert page.tables[f"{caption}: speedup"][2] == ["length 5", "-", "2.00x above its ceiling"]
    line = report(tmp_path / "line", write_run("two", shapes((1, 3), (4, 3))))
    assert f"{caption}: speedup" not in line.tables, "one length makes no map"
    assert "Beam width and length: no drafter in several widths" in line.text


def target_of(dtype: str, quantization: str = "", **changes: Any) -> Changes:
    facts = {"name": "tiny", "revision": None, "weights_sha256": "5e1f", "vocab_size": 300, "quantization": quantization}
    return {"target": {**facts, "dtype": f"torch.{dtype}", **changes}}


def test_types_of_one_target_share_a_table_and_other_differences_dont(write_run: WriteRun, tmp_path: Path) -> None:
    four_bits = '{"load_in_4bit": true, "method": "bitsandbytes"}'
    runs = [
        write_run("fp32", config=target_of("float32")),
        write_run("bf16", config=target_of("bfloat16")),
        write_run("int4", config=target_of("bfloat16", four_bits)),
    ]
    page = report(tmp_path / "report", *runs, write_run("other", config=target_of("bfloat16", weights_sha256="ffff")))
    head, plain, drafted = page.tables[f"tiny, {CELL}: tokens/s by type"]
    assert head == ["Method", "float32", "bfloat16", "int4 (bitsandbytes), bfloat16"]
    assert plain == ["plain decoding", *["5.0 1.00 a step, 1.00x"] * 3]
    assert drafted[1] == "10.0 2.00 a step, 2.00x above its ceiling"
    assert page.ids[0] == "types"
    alone = report(tmp_path / "alone", runs[0], write_run("longer", config={**target_of("bfloat16"), "max_new_tokens": 64}))
    assert "types" not in alone.ids, "two differences at once can't be compared"


def test_a_wrong_method_has_no_speed_in_the_table_of_types(write_run: WriteRun, tmp_path: Path) -> None:
    right = write_run("fp32", config=target_of("float32"))
    wrong = write_run("f64", config=target_of("float64"), wrong=[DRAFTER])
    page = report(tmp_path / "report", right, wrong)
    assert page.tables[f"tiny, {CELL}: tokens/s by type"][2][2] == "not lossless NO (2 of 2 prompts)"


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ("", "bfloat16"),
        ('{"load_in_8bit": true, "method": "bitsandbytes"}', "int8 (bitsandbytes), bfloat16"),
        ('{"bits": 4, "method": "gptq"}', "int4 (gptq), bfloat16"),
        ('{"method": "torchao", "type": "Int8WeightOnlyConfig"}', "Int8WeightOnlyConfig (torchao), bfloat16"),
        ("no JSON", "bfloat16, no JSON"),
    ],
)
def test_types_are_named_by_their_bits(quantization: str, name: str) -> None:
    assert type_name({"dtype": "torch.bfloat16", "quantization": quantization}) == name
