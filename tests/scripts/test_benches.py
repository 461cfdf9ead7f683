"""Each benchmark on tiny models: it ends with rows, and finds what it compares equal."""

import gzip
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        folder, _, module = name.partition("/")
        monkeypatch.syspath_prepend(str(SCRIPTS / folder))
        return importlib.import_module(module)

    return load


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


# --- on a CPU


def test_decoding_measures_every_method_on_both_checkouts(
    script: Callable[[str], Any], tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = script("bench/decoding")
    wanted = {decoding.PLAIN, decoding.GENERATE, decoding.LOOKUP, "redrafter 4x3", "suffix", decoding.MERGED}
    bench = decoding.Bench(str(tiny_target_dir), "float32", 1, 12, 6, wanted)
    measured = bench.measure({}, 1)
    assert measured.keys() == wanted
    assert all(method["as_plain"] for method in measured.values())
    assert measured["suffix"]["parts"].keys() == {*decoding.PARTS}
    # The checkouts take turns: this one twice, and the other one as often.
    called = []

    def apart(checkout: Path, threads: int) -> Any:
        called.append(checkout)
        return measured

    monkeypatch.setattr(decoding, "measured_apart", apart)
    decoding.main(against=tmp_path, rounds=2, output=tmp_path / "decoding.json")
    assert called == [decoding.ROOT, tmp_path] * 2
    rows = {row["method"]: row for row in rows_of(tmp_path / "decoding.json")}
    assert rows["suffix"]["over_against"] == [1.0, 1.0, 1.0]
    assert rows[decoding.PLAIN]["tokens_per_step"] == 1.0
    with pytest.raises(typer.BadParameter, match="no_such_method"):
        decoding.main(method=["no_such_method"])


@pytest.mark.slow
def test_decoding_measures_this_checkout_as_another_one(
    script: Callable[[str], Any], tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = script("bench/decoding")
    options = {"--target": tiny_target_dir, "--method": "suffix", "--rounds": 1, "--repeats": 1, "--new-tokens": 4}
    command = [str(part) for pair in options.items() for part in pair]
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "bench" / "decoding.py"), *command])
    measured = decoding.measured_apart(decoding.ROOT, 1)
    assert measured.keys() == {decoding.PLAIN, "suffix"}


def test_a_ratio_has_the_median_of_its_pairs_and_an_interval(script: Callable[[str], Any]) -> None:
    ratio = script("bench/report").ratio
    assert ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]) == [2.0, 2.0, 2.0]
    median, low, high = ratio([1.0, 2.0, 9.0], [1.0, 1.0, 1.0])
    assert (median, low, high) == (2.0, 1.0, 9.0)


@pytest.mark.slow
def test_training_in_every_way_has_equal_losses(script: Callable[[str], Any], demo_target_dir: Path, tmp_path: Path) -> None:
    training = script("bench/training")
    options = {"texts": 2, "max_length": 400, "kind": ["redrafter"], "positions": "16", "batch_size": 2, "steps": 1}
    training.main(target=str(demo_target_dir), folder=tmp_path / "labels", output=tmp_path / "training.json", **options)
    rows = rows_of(tmp_path / "training.json")
    assert {row["way"] for row in rows} == {"stored", "recomputed", "packed", "straightforward"}


def test_labels_are_what_generate_continues_with(script: Callable[[str], Any], tiny_target_dir: Path, tmp_path: Path) -> None:
    labelling = script("bench/labelling")
    options = {"texts": 2, "seq": 16, "sample": 5, "rounds": 1, "batch_size": 2, "horizon": 3}
    with pytest.raises(typer.Exit) as ended:
        labelling.main(target=str(tiny_target_dir), output=tmp_path / "labelling.json", **options)
    assert ended.value.exit_code == 0
    assert [row["positions"] for row in rows_of(tmp_path / "labelling.json")] == [30, 30, 5]


def test_schedules_answer_all_requests(script: Callable[[str], Any], tiny_target_dir: Path, tmp_path: Path) -> None:
    scheduling, path = script("bench/scheduling"), tmp_path / "answers.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        for number in range(6):
            for model in ("a", "b"):
                turns = [{"value": "def f():"}, {"value": "return 1\n" * (1 + number)}]
                lines.write(json.dumps({"model": model, "prompt_id": number, "conversations": turns}) + "\n")
    options = {"model": "a", "known_model": "b", "requests": 6, "scale": 2, "max_new_tokens": 32, "budget_tokens": 256}
    scheduling.main(data=path, target=str(tiny_target_dir), rounds=1, output=tmp_path / "scheduling.json", **options)
    rows = rows_of(tmp_path / "scheduling.json")
    assert {scheduling.FIRST_COME, scheduling.ORACLE} < {row["schedule"] for row in rows}
    assert all(row["steps"] > 0 for row in rows)


# --- the scripts for a GPU, on a CPU


def test_decode_measures_every_drafter_and_generate(script: Callable[[str], Any], tmp_path: Path) -> None:
    decode = script("gpu/decode")
    sizes = {"prompt_tokens": 8, "steps": 2, "warm_up": 0, "batch": [2]}
    decode.main(shape="tiny", device="cpu", output=tmp_path / "decode.json", **sizes)
    report = json.loads((tmp_path / "decode.json").read_text())
    assert report["failed"] == []
    assert [row["method"] for row in report["rows"]] == [decode.GENERATE, decode.PLAIN, *decode.FRESH]
    assert all(row["break_even"] > 0 and row["speedup"] > 0 for row in report["rows"])


def test_train_measures_labels_and_every_kind_and_lists_failures(
    script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = script("gpu/train")
    monkeypatch.setitem(train.TRAININGS, "block", ("no_such_loss", {}))
    train.main(shape="tiny", device="cpu", seq=[16], batch=[2], steps=1, warm_up=0, output=tmp_path / "train.json")
    report = json.loads((tmp_path / "train.json").read_text())
    assert [row["work"] for row in report["rows"]] == ["labels", "redrafter", "eagle3"]
    assert all(row["matrix_share"] > 0 and row["positions_per_second"] > 0 for row in report["rows"])
    assert [case["work"] for case in report["failed"]] == ["block"]


@pytest.mark.parametrize(
    ("code", "status"),
    [("print(1)", "ok"), ("exit(3)", "failed with exit status 3"), ("while True: pass", "stopped after 2 s")],
)
def test_a_part_of_the_check_ends_in_time(script: Callable[[str], Any], tmp_path: Path, code: str, status: str) -> None:
    check = script("gpu/check")
    path = tmp_path / "part.py"
    path.write_text(code)
    result = check.run_part("part", (str(path),), 2, tmp_path, {})
    assert result["status"] == status
    assert result["report"] is None


def test_all_parts_of_the_check_end_within_ten_minutes(script: Callable[[str], Any]) -> None:
    check = script("gpu/check")
    assert sum(limit for limit, _ in check.PARTS.values()) <= 600
