"""Files for judges: their formats field by field, with one file for each method."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outrider.data.suites import load_suite
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.records.records import EvalRecord, RecordFile
from outrider.eval.results.judge_files import file_names, write_answers
from outrider.eval.run import evaluate
from outrider.models.llm.hf_target import HFTarget


def answers_of(tiny_target: HFTarget, drafter: Path, output: Path, suites: list[SuiteConfig], **changes: Any) -> Path:
    config = EvalConfig(
        suites=suites,
        settings=[{"beam_width": 1}],
        profile_prompts=0,
        repeats=1,
        **{"max_new_tokens": 6, **changes},
    )
    evaluate(config, tiny_target, tiny_target.tokenizer, [drafter], output)
    return output / "answers"


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_mt_bench_answers_are_those_of_fastchats_judge(tiny_target, tiny_drafter_dir, shared_data, tmp_path):
    path = str(shared_data / "mt_bench" / "question.jsonl")
    folder = answers_of(tiny_target, tiny_drafter_dir, tmp_path, [SuiteConfig(name="mt_bench", path=path, limit=2)])
    files = sorted((folder / "mt_bench").iterdir())
    assert [file.name for file in files] == ["baseline.jsonl", "redrafter_beam_width=1.jsonl"]
    prompts = load_suite("mt_bench", path, limit=2).prompts
    plain, drafted = map(read_lines, files)
    with RecordFile(tmp_path / "records.jsonl") as file:
        tokens = {(r.prompt_id, r.turn): r.token_ids for r in file.records.values() if r.method == "baseline"}
    for lines, model in ((plain, "baseline"), (drafted, "redrafter_beam_width=1")):
        assert [line["question_id"] for line in lines] == [int(prompt.id) for prompt in prompts]
        for line in lines:
            assert list(line) == ["question_id", "answer_id", "model_id", "choices", "tstamp"]
            assert line["model_id"] == model
            assert isinstance(line["tstamp"], float)
            texts = [tiny_target.tokenizer.decode(tokens[str(line["question_id"]), turn]) for turn in (0, 1)]
            assert line["choices"] == [{"index": 0, "turns": texts}]
    ids = [line["answer_id"] for line in plain + drafted]
    assert len(set(ids)) == 4
    assert [line["choices"] for line in plain] == [line["choices"] for line in drafted]


def test_alpaca_eval_answers_are_its_judges_model_outputs(tiny_target, tiny_drafter_dir, shared_data, tmp_path):
    path = str(shared_data / "alpaca_eval" / "alpaca_eval.jsonl")
    suite = SuiteConfig(name="alpaca_eval", path=path, limit=3)
    folder = answers_of(tiny_target, tiny_drafter_dir, tmp_path, [suite], batch_sizes=[2])
    prompts = load_suite("alpaca_eval", path, limit=3).prompts
    for name in ("baseline", "redrafter_beam_width=1"):
        outputs = json.loads((folder / "alpaca_eval-b2" / f"{name}.json").read_text())
        assert [list(output) for output in outputs] == [["instruction", "output", "generator", "dataset"]] * 3
        assert [(output["instruction"], output["dataset"]) for output in outputs] == [
            (prompt.turns[0], prompt.category) for prompt in prompts
        ]
        assert {output["generator"] for output in outputs} == {name}
        assert all(isinstance(output["output"], str) for output in outputs)


@pytest.mark.slow
def test_other_suites_have_plain_lines_and_each_temperature_a_folder(tiny_target, tiny_drafter_dir, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"turns": ["One", "Two"]}\n{"id": "b", "category": "x", "turns": ["Three"]}\n')
    suites = [SuiteConfig(name="mine", path=str(tmp_path / "mine.jsonl"))]
    options: dict[str, Any] = {"temperatures": [0.0, 0.5], "batch_sizes": [1, 2], "max_new_tokens": 3}
    folder = answers_of(tiny_target, tiny_drafter_dir, tmp_path / "out", suites, **options)
    assert sorted(file.name for file in folder.iterdir()) == ["mine", "mine-b2", "mine-b2-t0.5", "mine-t0.5"]
    first, second = read_lines(folder / "mine" / "baseline.jsonl")
    assert list(first) == ["id", "category", "turns", "answers", "generator"]
    assert (first["id"], first["turns"], len(first["answers"])) == ("0", ["One", "Two"], 2)
    assert (second["id"], second["category"], len(second["answers"])) == ("b", "x", 1)
    before = {file: file.read_bytes() for file in folder.rglob("*.jsonl")}
    answers_of(tiny_target, tiny_drafter_dir, tmp_path / "out", suites, **options)
    # times come from the records
    assert {file: file.read_bytes() for file in folder.rglob("*.jsonl")} == before
    assert len(before) == 8


def test_a_prompt_with_a_skipped_turn_is_left_out_and_logged(make_record, questions, tiny_target, tmp_path, caplog):
    suite = load_suite("mt_bench", str(questions))
    records: list[EvalRecord] = [
        make_record(prompt_id=prompt, turn=turn) for prompt, turn in (("0", 0), ("0", 1), ("1", 0), ("2", 0), ("2", 1))
    ]
    records += [make_record(prompt_id="0", repeat=1, token_ids=[7, 8, 9])]  # a repeat has no part in it
    write_answers(records, [suite], tiny_target.tokenizer, tmp_path, time=1.5)
    lines = read_lines(tmp_path / "mt_bench" / "baseline.jsonl")
    assert [(line["question_id"], line["tstamp"]) for line in lines] == [(0, 1.5), (2, 1.5)]
    assert "lacks 1 prompts" in caplog.text


def test_methods_have_files_of_their_own_whatever_their_names() -> None:
    methods = ["baseline", "redrafter a/b x=1", "redrafter a b x=1", "redrafter A b x=1", "../..", "medusa <2>"]
    names = file_names(methods)
    assert list(names) == methods
    assert all(re.fullmatch(r"\w[\w.=-]*", name) for name in names.values())
    assert len({name.lower() for name in names.values()}) == len(methods)
