"""The study of an encoder as predictor of answer lengths."""

import gzip
import json
import random
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
MODELS = ("vicuna-7b-v1.3", "OpenHermes-2.5-Mistral-7B")


def write_answers(path: Path) -> None:
    """Write answers to prompts on both sides of the first held-out number."""
    draw = random.Random(0)
    with gzip.open(path, "wt") as lines:
        for number in [*range(40), *range(700, 720)]:
            prompt = " ".join(draw.choice(("list", "write", "some", "names", "words")) for _ in range(4))
            for model in MODELS:
                turns = [{"from": "human", "value": prompt}, {"from": "gpt", "value": "word " * draw.randint(1, 60)}]
                lines.write(json.dumps({"model": model, "prompt_id": number, "conversations": turns}) + "\n")


def test_the_study_compares_an_encoder_with_the_light_predictor(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_answers(tmp_path / "answers.jsonl.gz")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    options = {"lessons": 36, "layers": 1, "hidden-size": 64, "budget-tokens": 2048, "max-new-tokens": 256, "threads": 2}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    files = [f"--data={tmp_path / 'answers.jsonl.gz'}", f"--target={tiny_target_dir}", f"--output={tmp_path / 'study.json'}"]
    monkeypatch.setattr(sys, "argv", ["encoder_study.py", *files, *arguments])
    runpy.run_path(str(SCRIPTS / "encoder_study.py"), run_name="__main__")
    report = json.loads((tmp_path / "study.json").read_text())
    assert [row["predictor"] for row in report["rows"]] == ["none", "light", "encoder"]
    assert (report["num_lessons"], report["num_held_out"]) == (36, 20)
    for row in report["rows"]:
        assert 0 <= row["bucket_accuracy"] <= 1
        assert min(row["shortest_mean_rows"], row["s3_mean_rows"], report["oracle_mean_rows"]) > 1
    assert report["rows"][2]["learning_seconds"] > 0
