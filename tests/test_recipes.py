"""Recipes and demos of every kind, run through all stages.

Target, data and prompts are tiny replacements.
"""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from outrider.cli.compose import load_recipe
from outrider.cli.config import RunConfig
from outrider.cli.run import require_trainable, run
from outrider.data.paths import TRAINING_FREE_NAMES
from outrider.models.drafters.saved import build
from outrider.models.drafters.saved.build import describe_untrained_depths
from outrider.models.llm.loading import load_target

from .cheap_evaluations import cheap_evaluations
from .tiny_models import save_tiny_target

__all__ = ["cheap_evaluations"]

CONF = Path(__file__).parents[1] / "conf"
RECIPES = sorted(
    path.stem
    for path in (CONF / "conf").glob("*.yaml")
    if not path.stem.startswith(("adapt", "smollm2")) and not path.stem.endswith("demo")
)
DEMOS = sorted(path.stem for path in (CONF / "drafter").glob("*_demo.yaml"))

# Only sizes change: the recipes' objectives, labels and trees stay.
SMALL_RUN = [
    "num_threads=1",
    "mixed_precision=null",
    "train.steps=2",
    "train.warmup_steps=1",
    "train.global_batch_size=null",
    "train.batch_size=2",
    "train.max_positions=16",
    "eval.max_new_tokens=8",
    "eval.profile_prompts=0",
]
SMALL_DRAFTERS = {
    "block": ["drafter.num_layers=2"],
    "redrafter2": ["drafter.draft_vocab_size=128"],
    "redrafter": ["drafter.exit_width=16", "drafter.num_blocks=1"],
    "eagle3": ["drafter.draft_vocab_size=128"],
}
KINDS = {"redrafter2": "block"}
"""The kind of a recipe's drafter where the recipe's name doesn't begin with it."""
OTHER_TARGETS = {
    *("eagle3_llama31_8b", "eagle3_llama3_8b", "eagle3_qwen3_4b"),
    *("redrafter_llama31_8b", "redrafter_llama3_8b", "redrafter_qwen3_4b", "redrafter_qwen3_8b"),
}
"""Recipes that differ from another one by the target, and by sizes, which the tests replace."""
NEEDS_DEPTH = ["export.formats=[]"]
"""Of EAGLE-3 on a target of two layers: the formats need more."""

EXPORTED: dict[str, set[str]] = {
    "block": set(),
    "redrafter": {"apple"},
    "redrafter2": set(),
    "eagle": {"eagle1-vllm", "eagle1-sglang"},
    "eagle3": {"eagle3", "speculators"},
    "medusa": {"medusa", "tensorrt-llm"},
}
"""Formats of engines that a recipe leaves."""
DEEPER_THAN_TRAINED = {"compare_demo"}
"""Recipes that search deeper than they train on purpose: their published figures are of that."""
ALL_RECIPES = sorted(path.stem for path in (CONF / "conf").glob("*.yaml") if not path.stem.startswith("adapt"))
SMALL_DEMOS = {
    # the tiny target has two layers
    "redrafter_demo": ["drafter={exit_width: 16, head_init: random}"],
    "block_dspark_demo": ["drafter.feature_layers=[0, 1]", "distill.feature_layers=[0, 1]"],
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


@pytest.fixture(scope="module")
def qwen3_dir(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random Qwen3 with the fewest layers from which engines read three, and a template with thinking."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    tokenizer.chat_template += "{%- if add_generation_prompt and not enable_thinking -%}<think></think>{%- endif -%}"
    sizes = {"num_hidden_layers": 7, "head_dim": 16, "tie_word_embeddings": True}
    return save_tiny_target(tmp_path_factory.mktemp("qwen3"), Qwen3ForCausalLM, Qwen3Config, tokenizer, **sizes)


def composed_of(*overrides: str) -> RunConfig:
    return load_recipe(*overrides)


def run_here(tmp_path: Path, target: Path, questions: Path, *overrides: str) -> list[str]:
    """Run a recipe; return the methods of its table, plain decoding first.

    The run itself checks that each method is lossless.
    """
    small = [f"output_dir={tmp_path}", f"target.name_or_path={target}", f"eval.suites=[{{name: mt_bench, path: {questions}}}]"]
    config = composed_of(*small, *SMALL_RUN, *overrides)
    run(config)
    rows = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert len(rows) == 1 + len(config.eval.baselines) + len(config.eval.settings) + bool(config.eval.merge)
    return [row["method"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, marks=pytest.mark.long if recipe in OTHER_TARGETS else []) for recipe in RECIPES]
)
def test_a_recipe_runs_through_all_stages(tiny_target_dir, qwen3_dir, conversations, questions, tmp_path, recipe, caplog):
    """With every format that the recipe names, and a warning only if no engine has one."""
    kind = recipe.split("_")[0]
    is_qwen3 = "qwen3" in recipe
    changes = [f"data.path={conversations}", "data.file=null", "target.dtype=float32", *SMALL_DRAFTERS.get(kind, [])]
    changes += NEEDS_DEPTH if kind == "eagle3" and not is_qwen3 else []
    methods = run_here(tmp_path, qwen3_dir if is_qwen3 else tiny_target_dir, questions, f"conf={recipe}", *changes)
    trained = [method for method in methods[1:] if method not in TRAINING_FREE_NAMES]
    assert trained
    assert all(method.startswith(KINDS.get(kind, kind)) for method in trained)
    exported = {path.name for path in (tmp_path / "export").glob("*")}
    assert exported == (set() if NEEDS_DEPTH[0] in changes else EXPORTED[kind])
    warnings = [record.message for record in caplog.records if "no serving engine" in record.message]
    assert len(warnings) == (not exported), warnings


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("recipe", [*ALL_RECIPES, *(f"demo drafter={demo}" for demo in DEMOS)])
def test_a_recipe_drafts_as_deep_as_it_trains(recipe: str) -> None:
    config = composed_of(*f"conf={recipe}".split())
    untrained = {describe_untrained_depths(run.drafter, config.distill.horizon) for run in config.drafter_runs()} - {None}
    assert bool(untrained) == (recipe in DEEPER_THAN_TRAINED), untrained


def test_a_run_warns_once_of_what_the_recipe_doesnt_want(tiny_target_dir: Path, tmp_path: Path) -> None:
    target = load_target(str(tiny_target_dir), torch.device("cpu"))
    drafter = [f"output_dir={tmp_path}", "drafter.initial_state=embedding", "drafter.exit_width=16", "drafter.beam_length=6"]
    two = "++variants={a: {train: {seed: 1}}, b: {train: {seed: 2}}}"
    overrides = ["conf=redrafter_vicuna7b", "export.formats=[]", two, *drafter]
    unexportable, deep = require_trainable(composed_of(*overrides), target)
    assert "its initial_state is embedding" in unexportable
    assert "drafter.beam_length is 6" in deep
    assert "set drafter.beam_length=4, or distill.horizon=7" in deep
    assert require_trainable(composed_of(*overrides, "distill.horizon=7"), target) == [unexportable]
    with pytest.raises(ValueError, match=r"export.formats has apple, and .*initial_state is embedding"):
        require_trainable(composed_of(*overrides, "export.formats=[apple]"), target)
    assert require_trainable(composed_of("conf=demo", f"output_dir={tmp_path}", *SMALL_DEMOS["redrafter_demo"]), target) == []


@pytest.mark.parametrize("target", ["vicuna_13b", "vicuna_33b"])
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.endswith("vicuna7b")])
def test_a_recipe_for_vicuna_takes_its_larger_models(recipe: str, target: str) -> None:
    config = composed_of(f"conf={recipe}", f"target={target}")
    assert config.target.name_or_path == f"lmsys/{target.replace('_', '-')}-v1.3"
    assert config.data.chat_template == "vicuna_v1.1"


def test_the_full_evaluation_takes_every_prompt() -> None:
    config = composed_of("conf=eagle3_qwen3_8b", "eval=chat_full")
    assert [(suite.name, suite.limit) for suite in config.eval.suites] == [("mt_bench", None), ("alpaca_eval", None)]


@pytest.mark.parametrize(
    "demo", ["eagle3_demo", *(pytest.param(f"{kind}_demo", marks=pytest.mark.slow) for kind in ("block_dspark", "draft_model"))]
)
def test_the_demo_runs_with_every_kind(tiny_target_dir: Path, questions: Path, tmp_path: Path, demo: str) -> None:
    data = "data={limit: 4, max_length: 64, prompt_chars: [20, 40]}"
    sizes = SMALL_DEMOS.get(demo, [])
    methods = run_here(tmp_path, tiny_target_dir, questions, "conf=demo", f"drafter={demo}", data, *sizes)
    assert len(methods) > 2


@pytest.mark.slow
def test_a_drafter_is_adapted_to_a_changed_target(tiny_target_dir, conversations, questions, tmp_path, monkeypatch):
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
    assert [method for method in methods[1:] if method not in TRAINING_FREE_NAMES] == ["medusa"]
    before, after = (json.loads((tmp_path / name / "drafter" / "config.json").read_text()) for name in ("before", "after"))
    assert before["drafter"] == after["drafter"]
    assert before["target"]["weights_sha256"] != after["target"]["weights_sha256"]


def test_the_globs_find_recipes_and_demos() -> None:
    assert len(RECIPES) >= 11
    assert set(RECIPES) >= OTHER_TARGETS
    assert len(DEMOS) >= 6
