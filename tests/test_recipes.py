"""Recipes and demos of every kind, run through all stages.

Target, data and prompts are tiny replacements.
"""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
from hydra import compose, initialize_config_module

from outrider.cli.config import register, to_run_config
from outrider.cli.run import run
from outrider.models.drafters.saved import build

CONF = Path(__file__).parents[1] / "conf"
RECIPES = sorted(
    path.stem for path in (CONF / "conf").glob("*.yaml") if not path.stem.startswith("adapt") and not path.stem.endswith("demo")
)
DEMOS = sorted(path.stem for path in (CONF / "drafter").glob("*_demo.yaml"))

# Only sizes change: the recipes' objectives, labels and trees stay.
SMALL_RUN = [
    "num_threads=1",
    "mixed_precision=null",
    "train.steps=2",
    "train.warmup_steps=1",
    "train.gradient_accumulation=1",
    "train.batch_size=2",
    "train.max_positions=16",
    "eval.max_new_tokens=8",
    "eval.profile_prompts=0",
    "eval.memory_bandwidth_gbs=10.0",
]
SMALL_DRAFTERS = {
    "redrafter": ["drafter.exit_width=16", "drafter.num_blocks=1"],
    # these formats need deeper targets
    "eagle3": ["drafter.draft_vocab_size=128", "export.formats=[]"],
}


EXPORTED = {"eagle": {"eagle1-vllm", "eagle1-sglang"}, "medusa": {"medusa", "tensorrt-llm"}}
"""Formats that the recipes of a kind export."""
SMALL_DEMOS = {
    # the tiny target has two layers
    "redrafter_demo": ["drafter={exit_width: 16, head_init: random}"],
    "eagle3_demo": ["drafter.feature_layers=[0, 1]", "distill.feature_layers=[0, 1]"],
}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "question.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]}) + "\n")
    return path


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write four conversations in ShareGPT's form."""
    path = tmp_path_factory.mktemp("sharegpt") / "sharegpt.json"
    turns = [{"from": "human", "value": "Count, please."}, {"from": "gpt", "value": "1 2 3 4 5 6 7 8"}]
    path.write_text(json.dumps([{"id": f"c{index}", "conversations": turns} for index in range(4)]))
    return path


def run_here(tmp_path: Path, target: Path, questions: Path, *overrides: str) -> list[str]:
    """Run a recipe; return the methods of its table, plain decoding first.

    The run itself checks that each method is lossless.
    """
    register()
    small = [f"output_dir={tmp_path}", f"target.name_or_path={target}", f"eval.suites=[{{name: mt_bench, path: {questions}}}]"]
    with initialize_config_module("outrider.conf", version_base="1.3"):
        composed = compose("config", overrides=[*small, *SMALL_RUN, *overrides])
    config = to_run_config(composed)
    run(config)
    rows = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert len(rows) == 1 + len(config.eval.settings)
    return [row["method"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_through_all_stages(
    tiny_target_dir: Path, conversations: Path, questions: Path, tmp_path: Path, recipe: str
) -> None:
    kind = recipe.split("_")[0]
    sizes = SMALL_DRAFTERS.get(kind, [])
    if recipe == "redrafter_llama3_8b":
        sizes = [*sizes, "drafter.draft_vocab_size=128"]
    data = [f"data.path={conversations}", "data.file=null", "target.dtype=float32"]
    methods = run_here(tmp_path, tiny_target_dir, questions, f"conf={recipe}", *data, *sizes)
    assert all(method.startswith(kind) for method in methods[1:])
    exported = {path.name for path in (tmp_path / "export").glob("*")}
    assert exported == EXPORTED.get(kind, set())


@pytest.mark.parametrize(
    "demo", [pytest.param(demo, marks=[] if demo == "eagle3_demo" else pytest.mark.slow) for demo in DEMOS]
)
def test_the_demo_runs_with_every_kind(tiny_target_dir: Path, questions: Path, tmp_path: Path, demo: str) -> None:
    data = "data={limit: 4, max_length: 64, prompt_chars_min: 20, prompt_chars_max: 40}"
    sizes = SMALL_DEMOS.get(demo, [])
    methods = run_here(tmp_path, tiny_target_dir, questions, "conf=demo", f"drafter={demo}", data, *sizes)
    assert len(methods) > 2


@pytest.mark.slow
def test_a_drafter_is_adapted_to_a_changed_target(
    tiny_target_dir: Path, conversations: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run resolves `start_from` once: on the Hub each look-up is a request."""
    looked_up: list[str] = []
    monkeypatch.setattr(build, "resolve_drafter", lambda name: looked_up.append(name) or Path(name))
    data = [f"data.path={conversations}", "data.file=null", "target.dtype=float32"]
    run_here(tmp_path / "before", tiny_target_dir, questions, "conf=medusa_vicuna7b", "eval.settings=[{}]", *data)
    changed = shutil.copytree(tiny_target_dir, tmp_path / "changed")
    weights = safetensors.torch.load_file(changed / "model.safetensors")
    weights = {name: tensor * 1.01 for name, tensor in weights.items()}
    safetensors.torch.save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    start = f"drafter.start_from={tmp_path / 'before' / 'drafter'}"
    held_out = ["train.validation_texts=1", "train.validation_tokens=8", "train.validate_every=1"]
    methods = run_here(
        tmp_path / "after", changed, questions, "conf=[medusa_vicuna7b,adapt]", start, "eval.settings=[{}]", *data, *held_out
    )
    assert looked_up == [str(tmp_path / "before" / "drafter")]
    assert len(methods) == 2
    assert methods[1].startswith("medusa")
    before, after = (json.loads((tmp_path / name / "drafter" / "config.json").read_text()) for name in ("before", "after"))
    assert before["drafter"] == after["drafter"]
    assert before["target"]["weights_sha256"] != after["target"]["weights_sha256"]


def test_the_globs_find_recipes_and_demos() -> None:
    assert len(RECIPES) >= 5
    assert len(DEMOS) >= 6
