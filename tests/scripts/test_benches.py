"""Each benchmark on tiny models: it ends with rows, and finds what it compares equal."""

import gzip
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from outrider.cli.main import run_command
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

from .conftest import SCRIPTS


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


# --- on a CPU


def test_decoding_measures_every_method_on_both_checkouts(script, tiny_target_dir, tmp_path, monkeypatch):
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
        # One answer of the first process of this checkout is ten times as slow as the others.
        slow = checkout == decoding.ROOT and len(called) == 1
        methods = {
            name: {**method, "wall": [20.0 if slow else 2.0, 2.0, 2.0], "processor": [1.0] * 3}
            for name, method in measured.items()
        }
        methods[decoding.GENERATE]["wall"] = [1.0] * 3
        return {"git_hash": f"commit of {checkout.name}", "methods": methods}

    monkeypatch.setattr(decoding, "measured_apart", apart)
    monkeypatch.setattr(sys, "argv", ["decoding.py", "--against", "an older one"])
    decoding.main(against=tmp_path, rounds=2, output=tmp_path / "decoding.json")
    assert called == [decoding.ROOT, tmp_path] * 2
    record = json.loads((tmp_path / "decoding.json").read_text())
    assert record["command"] == "python decoding.py --against 'an older one'"
    assert record["options"]["against"] == str(tmp_path)
    assert record["options"]["rounds"] == 2
    assert record["commits"]["against"] == f"commit of {tmp_path.name}"
    assert record["fastest_plain"] == decoding.GENERATE
    rows = {row["method"]: row for row in record["rows"]}
    assert rows["suffix"]["over_against"] == [1.0, 1.0, 1.0], "the medians of the processes are compared"
    assert rows["suffix"]["over_plain"][0] == 0.5, "the fastest plain decoding is the baseline"
    assert rows[decoding.PLAIN]["tokens_per_step"] == 1.0
    with pytest.raises(typer.BadParameter, match="no_such_method"):
        decoding.main(method=["no_such_method"])


@pytest.mark.slow
def test_decoding_measures_this_checkout_as_another_one(script, tiny_target_dir, tmp_path, monkeypatch):
    decoding = script("bench/decoding")
    options = {"--target": tiny_target_dir, "--method": "suffix", "--rounds": 1, "--repeats": 1, "--new-tokens": 4}
    command = [str(part) for pair in options.items() for part in pair]
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "bench" / "decoding.py"), *command])
    measured = decoding.measured_apart(decoding.ROOT, 1)
    assert measured["methods"].keys() == {decoding.PLAIN, "suffix"}


def test_a_ratio_has_the_median_of_its_pairs_and_an_interval(script: Callable[[str], Any]) -> None:
    ratio = script("bench/report").ratio
    assert ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]) == [2.0, 2.0, 2.0]
    median, low, high = ratio([1.0, 2.0, 9.0], [1.0, 1.0, 1.0])
    assert (median, low, high) == (2.0, 1.0, 9.0)


def test_the_first_of_all_turns_is_not_counted(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    report, now = script("bench/report"), [0.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    durations = {"a": iter([100.0, 1.0, 2.0]), "b": iter([200.0, 3.0, 4.0])}

    def way(name: str) -> Callable[[], None]:
        def call() -> None:
            now[0] += next(durations[name])

        return call

    seconds = report.take_turns({name: way(name) for name in durations}, rounds=2)
    assert {name: each.wall for name, each in seconds.items()} == {"a": [1.0, 2.0], "b": [3.0, 4.0]}


def test_weights_leave_the_page_cache(script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offload, dropped = script("bench/offload"), []
    files = [tmp_path / "first", tmp_path / "second"]
    for file in files:
        file.write_bytes(b"weights")

    def advise(file: int, *advice: int) -> None:
        dropped.append((Path(f"/proc/self/fd/{file}").readlink(), *advice))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    offload.drop_from_cache(files)
    assert dropped == [(file, 0, 0, os.POSIX_FADV_DONTNEED) for file in files]


@pytest.mark.slow
def test_training_in_every_way_has_equal_losses(script: Callable[[str], Any], demo_target_dir: Path, tmp_path: Path) -> None:
    training = script("bench/training")
    options = {"texts": 2, "max_length": 400, "kind": ["redrafter"], "positions": "16", "batch_size": 2, "steps": 1}
    training.main(target=str(demo_target_dir), folder=tmp_path / "labels", output=tmp_path / "training.json", **options)
    rows = rows_of(tmp_path / "training.json")
    assert {row["way"] for row in rows} == {"stored", "recomputed", "packed", "straightforward"}


def test_steps_of_a_recurrent_target_are_timed_beside_attention(script: Callable[[str], Any], tmp_path: Path) -> None:
    output = tmp_path / "recurrent.json"
    script("bench/recurrent").main(layers=4, hidden=64, text=8, rounds=1, threads=1, output=output)
    rows = rows_of(output)
    assert [row["nodes"] for row in rows] == [0, 4, 16, 40] * 2
    assert all(0 < row["commit_share"] < 1 and row["milliseconds"] > 0 for row in rows)
    assert json.loads(output.read_text())["state_bytes"] > 0


def test_labels_are_what_generate_continues_with_and_another_label_is_found(script, tiny_target_dir, tmp_path, monkeypatch):
    labelling, output = script("bench/labelling"), tmp_path / "labelling.json"
    options = {"texts": 2, "seq": 16, "sample": 5, "rounds": 1, "batch_size": 2, "horizon": 3}
    with pytest.raises(typer.Exit) as ended:
        labelling.main(target=str(tiny_target_dir), output=output, **options)
    assert ended.value.exit_code == 0
    assert [row["positions"] for row in rows_of(output)] == [30, 30, 30, 5]
    label = labelling.Bench.label

    def label_wrongly(bench: Any) -> None:
        label(bench)
        row, position = bench.sample[2]
        bench.labels[row, position, 1] += 1

    monkeypatch.setattr(labelling.Bench, "label", label_wrongly)
    with pytest.raises(typer.Exit) as ended:
        labelling.main(target=str(tiny_target_dir), output=output, **options)
    assert ended.value.exit_code == 1
    (difference,) = json.loads(output.read_text())["differences"]
    assert (difference["depth"], difference["ours"]) == (1, difference["theirs"] + 1)


def test_pacing_decodes_the_known_text_on_a_clock_that_only_passes_and_drafts_move(script, tiny_target_dir):
    pacing = script("bench/pacing")
    target = load_target(str(tiny_target_dir), torch.device("cpu"))
    text = [5, 6, 7, 8] * 6
    states = torch.zeros(len(text), target.hidden_size)
    row = pacing.row_of("suffix", target, [(text, 6, states)], 0.1, 0.5)
    assert row["tokens per step"] > 2, "the text repeats itself"
    assert row["asked"] == {"suffix": 1.0}
    num_tokens = len(text) - 7  # the prefill gives the first
    seconds = row["steps"] * (1 + 0.1 * row["nodes per step"] + pacing.SUFFIX)
    assert row["speedup"] == pytest.approx(num_tokens / seconds, rel=0.02)


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
    sizes = ["--prompt-tokens", "8", "--steps", "2", "--warm-up", "0", "--batch", "2"]
    decode.main(["--shape", "tiny", "--device", "cpu", *sizes, "--output", str(tmp_path / "decode.json")])
    report = json.loads((tmp_path / "decode.json").read_text())
    assert report["failed"] == []
    assert [row["method"] for row in report["rows"]] == [decode.GENERATE, decode.PLAIN, *decode.FRESH]
    assert all(row["break_even"] > 0 and row["speedup"] > 0 for row in report["rows"])


def test_a_real_target_answers_held_out_prompts_again_and_again(script, demo_target_dir, tmp_path):
    decode = script("gpu/decode")
    decode.ROOM = 1  # so that an answer ends before all steps are measured
    sizes = ["--prompt-tokens", "8", "--steps", "6", "--warm-up", "0", "--batch", "2"]
    options = [
        "--target",
        str(demo_target_dir),
        "--drafter",
        "suffix",
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "decode.json"),
    ]
    decode.main([*options, *sizes])
    report = json.loads((tmp_path / "decode.json").read_text())
    assert report["failed"] == []
    assert [row["method"] for row in report["rows"]] == [decode.GENERATE, decode.PLAIN, "suffix"]
    bench = decode.Bench(torch.device("cpu"), "", str(demo_target_dir), [], 1, 0)
    texts = bench.target.tokenizer.batch_decode(bench.prompts(2, 40))
    assert all("<|assistant|>" in text for text in texts), "prompts, and not random ids"
    with pytest.raises(ValueError, match="give fewer --prompt-tokens"):
        bench.prompts(2, 10**6)


def test_generate_is_measured_by_a_median(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    decode, now = script("gpu/decode"), [0.0]
    seconds = iter([50.0, 12.0, 2.0, 92.0, 2.0, 13.0, 3.0])  # warms up; ten steps and one, three times

    class Model:
        def generate(self, *_: Any, **__: Any) -> None:
            now[0] += next(seconds)

    class Target:
        model = Model()

    monkeypatch.setattr(decode, "clock", lambda _: now[0])
    bench = object.__new__(decode.Bench)
    bench.device, bench.steps, bench.num_bytes, bench.bandwidth = torch.device("cpu"), 10, 1e9, 2.0
    row = bench.theirs(Target(), torch.zeros(2, 3))
    assert (row["milliseconds"], row["tokens_per_second"], row["bandwidth_share"]) == (1000.0, 2.0, 0.5)


def test_the_baseline_is_the_fastest_plain_decoding_of_all_parts(script: Callable[[str], Any]) -> None:
    def part(form: str, **milliseconds: float) -> dict[str, Any]:
        rows = [
            {"form": form, "batch": 1, "method": method, "milliseconds": value, "tokens_per_second": 1e3 / value * tokens}
            for (method, value), tokens in zip(milliseconds.items(), (1, 1, 3), strict=False)
        ]
        return {"report": {"rows": rows}}

    parts = {"tests": {"report": None}, "decode_eager": part("eager", transformers=8.0, plain=10.0, medusa=12.0)}
    parts |= {"decode_graphs": part("graphs", plain=4.0), "train": {"report": {"rows": [{}]}}}
    rows = script("gpu/check").decoding_rows(parts)
    assert [row["break_even"] for row in rows] == [2.0, 2.5, 3.0, 1.0]
    assert [row["speedup"] for row in rows] == [0.5, 0.4, 1.0, 1.0]
    del parts["decode_graphs"]
    assert [row["break_even"] for row in script("gpu/check").decoding_rows(parts)] == [1.0, 1.25, 1.5]


def test_train_measures_labels_and_every_kind_and_lists_failures(script, tmp_path, monkeypatch):
    train = script("gpu/train")
    monkeypatch.setitem(train.TRAININGS, "block", ("no_such_loss", {}))
    sizes = ["--seq", "16", "--batch", "2", "--steps", "1", "--warm-up", "0"]
    train.main(["--shape", "tiny", "--device", "cpu", *sizes, "--output", str(tmp_path / "train.json")])
    report = json.loads((tmp_path / "train.json").read_text())
    assert [row["work"] for row in report["rows"]] == ["labels", "redrafter", "eagle3"]
    assert all(row["matrix_share"] > 0 and row["positions_per_second"] > 0 for row in report["rows"])
    assert [case["work"] for case in report["failed"]] == ["block"]


def test_training_is_timed_by_the_median_after_a_warm_up(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    train, now = script("gpu/train"), [0.0]
    seconds = iter([100.0, 1.0, 9.0, 2.0])

    def work() -> None:
        now[0] += next(seconds)

    monkeypatch.setattr(train, "clock", lambda _: now[0])
    assert train.timed(work, torch.device("cpu"), 3, 1) == {"seconds": 2.0, "peak_gib": None}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print(1)", "ok"),
        ("exit(3)", "failed with exit status 3"),
        # The process that it starts is stopped, too.
        ("import subprocess as s; s.run(['sh', '-c', 'sleep 2; touch still_running'])", "stopped after 1 s"),
    ],
)
def test_a_part_of_the_check_ends_in_time(script, tmp_path, code, status, monkeypatch):
    check = script("gpu/check")
    path = tmp_path / "part.py"
    path.write_text(code)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    result = check.run_part("part", (str(path),), 1, tmp_path, {"PATH": os.environ["PATH"]})
    assert result["status"] == status
    if "sleep" in code:
        time.sleep(1.5)
        assert not (tmp_path / "still_running").exists()
    assert result["report"] is None


def test_all_parts_of_the_check_end_within_ten_minutes_and_a_failed_one_fails_it(script, tmp_path, monkeypatch):
    check = script("gpu/check")
    assert sum(limit for limit, _ in check.PARTS.values()) <= 600
    monkeypatch.setenv("OUT", str(tmp_path))
    statuses = dict.fromkeys(check.PARTS, "ok")
    monkeypatch.setattr(check, "run_part", lambda name, *_: {"status": statuses[name], "seconds": 1.0, "report": None})
    assert check.main([]) == 0
    statuses["tests"] = "failed with exit status 1"
    assert check.main([]) == 1
    assert json.loads((tmp_path / "check.json").read_text())["parts"]["tests"]["status"] == statuses["tests"]


@pytest.mark.slow
def test_an_mtp_head_is_trained_from_its_checkpoint(script, tmp_path, monkeypatch):
    mtp, output = script("bench/mtp"), tmp_path / "mtp.json"
    monkeypatch.setitem(mtp.RECIPE, "num_threads", 1)  # two threads wait for each other on a busy machine
    mtp.main(examples=4, texts=4, steps=16, prompts=1, max_new_tokens=4, folder=tmp_path / "mtp", output=output)
    record = json.loads(output.read_text())
    assert [row["head"] for row in record["rows"]] == ["random weights", "as in the checkpoint", "trained on labels"]
    assert all(row["identical"] for row in record["rows"])
    assert record["labels"] > 1000


def test_forecasts_are_compared_with_the_evaluation_that_followed(script, tmp_path, monkeypatch):
    forecast = script("bench/forecast")
    methods = [("A", [1.2, 1.3], [2.0, 1.8, 2.2]), ("Free", [1.5], [1.5, 1.4, 1.6])]
    forecasts = [
        {
            "label": label,
            "temperature": 0.0,
            "measured": measured,
            "tokens_per_step": {"0.5": [1.7, 1.6, 1.8], "1.0": interval},
            "speedup": {"1": [1.5, 1.45, 1.55]},
        }
        for label, measured, interval in methods
    ]
    record = {"target": "t", "num_labels": [10, 40], "total_labels": 400, "forecasts": forecasts}
    (tmp_path / "forecast.json").write_text(json.dumps(record))
    shared = {"temperature": 0.0, "batch_size": 1, "num_tokens": 100}
    summary = [
        {
            **shared,
            "suite": suite,
            "method": method,
            "label": label,
            "tokens_per_step": tps,
            "accepted_histogram": [50],
            **speed,
        }
        for suite in ("x", "y")
        for method, label, tps, speed in (
            ("baseline", "plain decoding", 1.0, {"tokens_per_second": 10.0}),
            ("a", "A", 1.9 if suite == "x" else 1.8, {"tokens_per_second": 20.0}),
        )
    ]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    pairs = [f"{tmp_path}/forecast.json={tmp_path}", f"{tmp_path}/forecast.json={tmp_path}@0.5"]
    monkeypatch.setattr(sys, "argv", ["forecast.py", *pairs, "--output", str(tmp_path / "out.json")])
    forecast.main()
    written = json.loads((tmp_path / "out.json").read_text())
    whole, half = written["rows"]
    assert (whole["drafter"], whole["measured"], whole["held"], whole["held speedup"]) == ("A", 1.85, True, False)
    assert whole["measured speedup"] == 2.0
    assert (half["labels"], half["held"], half["error"]) == (200, False, round(1.7 / 1.85 - 1, 3))
    assert written["tokens_per_step"] == {"rows": 2, "held": 1, "median error": 0.081}


@pytest.mark.slow
def test_a_label_curve_has_a_row_for_each_part_kind_and_seed(script, tiny_target_dir, tmp_path, monkeypatch):
    questions = tmp_path / "question.jsonl"
    questions.write_text(
        "".join(json.dumps({"question_id": i, "category": "c", "turns": ["Write.", "Again."]}) + "\n" for i in range(4))
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""base: demo
output_dir: {tmp_path / "run"}
target: {{name_or_path: {tiny_target_dir}}}
data: {{limit: 16, max_length: 96, prompt_chars: [20, 40]}}
distill: {{horizon: 3, shard_examples: 8}}
drafter: {{exit_width: 16, num_blocks: 1, head_init: random}}
train: {{steps: 8, warmup_steps: 1, batch_size: 4, max_positions: 64, gradient_accumulation: 1}}
eval: {{suites: [{{name: mt_bench, path: {questions}}}], settings: [{{beam_width: 2, beam_length: 3}}]}}
variants: {{redrafter: {{}}}}
"""
    )
    run_command(["run", str(recipe), "stages=[distill]"])
    output = tmp_path / "curve.json"
    command = ["label_curve.py", str(recipe), "--kinds", "redrafter", "--parts", "0.5,1", "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", [*command, "--prompts", "4", "--max-new-tokens", "8", "--output", str(output)])
    script("bench/label_curve").main()
    rows = rows_of(output)
    assert [(row["seed"], row["steps"]) for row in rows] == [(0, 4), (1, 4), (0, 8), (1, 8)]
    assert rows[0]["labels"] < rows[2]["labels"]
    assert all(1 <= row["tokens per step"] <= 4 and row["95 %"] for row in rows)


@pytest.mark.slow
def test_adapted_drafters_are_compared_with_their_base_by_suite(script, tiny_target_dir, tmp_path, monkeypatch):
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32"), torch.device("cpu"))
    drafter, folder = build_drafter(parse_drafter({"kind": "redrafter", "exit_width": 16}), target), tmp_path / "drafter"
    save_drafter(drafter, folder, target.identity)
    prompts, output = tmp_path / "mine.jsonl", tmp_path / "adapted.json"
    prompts.write_text("".join(json.dumps({"prompt": f"Write {word}."}) + "\n" for word in ("one", "two", "three")))
    command = ["adapted.py", str(tiny_target_dir), str(folder), f"same={folder}", "free=suffix", "--suites", f"{prompts}=3"]
    monkeypatch.setattr(sys, "argv", [*command, "--max-new-tokens", "8", "--dtype", "float32", "--output", str(output)])
    script("bench/adapted").main()
    row, free = rows_of(output)
    assert (row["drafter"], row["suite"], row["prompts"], row["ratio"]) == ("same", "mine", 3, [1.0, 1.0, 1.0])
    assert row["bytes"] == (folder / "model.safetensors").stat().st_size
    assert (free["drafter"], free["before"], free["bytes"]) == ("free", row["before"], 0)


FAKE_ENGINE = """
import json, sys
options = json.loads(sys.argv[1])
if options.get("additional_config") == {"outrider_drafter": "suffix"}:
    sys.exit("the proposer is refused")
accepted = 2 if "speculative_config" in options else 1
print("{}", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    tokens = [prompt[-1] for prompt in asked["prompts"] for _ in range(asked["max_tokens"])]
    counts = {"num_tokens": len(tokens), "num_steps": len(tokens) // accepted}
    print(json.dumps({"token_ids": tokens, "seconds": 1 / accepted, "processor_seconds": 1.0, **counts}), flush=True)
"""


def test_engines_with_and_without_a_drafter_answer_the_same_prompts(script, tiny_target_dir, tmp_path, monkeypatch):
    served = script("bench/served")
    (tmp_path / "engine.py").write_text(FAKE_ENGINE)
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"prompt": f"Question {n}?"}) + "\n" for n in range(5)))
    monkeypatch.setattr(served, "PYTHON", sys.executable)
    monkeypatch.setattr(served, "WORKER", tmp_path / "engine.py")
    options = {"suite": [f"mine={tmp_path / 'mine.jsonl'}"], "output": tmp_path / "found.json", "limit": 4, "rounds": 2}
    options |= {"max_new_tokens": 6, "concurrency": "[1, 2]"}
    served.main(str(tiny_target_dir), drafter=["ngram=3"], **options)
    rows = rows_of(tmp_path / "found.json")
    assert [(row["at a time"], row["method"], row["answers"]) for row in rows] == [
        (size, method, 8 // size) for size in (1, 2) for method in ("plain decoding", "ngram, 3 tokens")
    ]
    assert [row["over plain decoding"][0] for row in rows] == [1.0, 2.0] * 2
    assert [row["tokens_per_step"] for row in rows] == [1.0, 2.0] * 2
    assert [row["identical"] for row in rows] == [8, 8, 4, 4]
    for drafter in (["ngram"], ["ngram=x"], ["a/drafter=3", "b/drafter=3"]):
        with pytest.raises(typer.BadParameter, match="--drafter is .*; give NAME=LENGTH"):
            served.main(str(tiny_target_dir), drafter=drafter, **options)
    with pytest.raises(RuntimeError, match="vLLM has ended:\\nthe proposer is refused"):
        served.main(str(tiny_target_dir), drafter=["suffix=3"], **options)
