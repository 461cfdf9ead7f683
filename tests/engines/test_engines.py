"""Exports in running engines: the same text as plain decoding, and the same accepted tokens as outrider, by depth.

`make engines` makes the engines, runs these tests and keeps their figures. They write them to the file that
OUTRIDER_ENGINES_RECORD names. OUTRIDER_ENGINES_RUN names a folder that keeps the drafters for the next run.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outrider.data.chat import encode_prompt
from outrider.data.suites import load_suite
from outrider.eval.measure.methods import Method
from outrider.eval.measure.timing import answers_of
from outrider.eval.server.check import drafts_here
from outrider.eval.server.draft_counts import DraftCounts
from outrider.eval.server.questions import Question
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, load_drafter
from outrider.models.drafters.saved.folder import read_drafter_config
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

from ..commands import invoke
from . import openvino_models as openvino
from .servers import CONVERTER, LLAMA_CPP, LLAMA_SERVER, VLLM_PYTHON, converted, llama_cpp, missing, version_of, vllm

pytestmark = pytest.mark.engines

RECIPE = Path(__file__).parent / "recipe.yaml"
NUM_PROMPTS, MAX_NEW_TOKENS = 8, 96
CANDIDATES = 1024
"""Tokens that a slot of a block drafter ranks: engines rank all 4,096, and so many pairs don't fit in memory here."""
WORDS = {
    "redrafter": "ReDrafter",
    "redrafter+suffix": "ReDrafter + suffix",
    "eagle3": "EAGLE-3",
    "reduced": "EAGLE-3, reduced vocabulary",
    "eagle31": "EAGLE-3.1",
    "layers": "EAGLE-3, other layers of the target",
    "eagle": "EAGLE-1",
    "draft_model": "draft model",
    "medusa": "Medusa",
    "block": "block drafter",
    "block_reduced": "block drafter, reduced vocabulary",
    "block+suffix": "block drafter + suffix",
    "dspark": "DSpark",
    "dspark_reduced": "DSpark, reduced vocabulary",
}
"""The recipe's drafters, as the record names them."""


class Cell(NamedTuple):
    """A drafter in an engine."""

    engine: str
    drafter: str
    format: str
    method: str
    """The engine's name of such drafters."""

    def __str__(self) -> str:
        name = self.engine.split()[0] + ("-divided" if self.engine == DIVIDED else "")
        return f"{name}-{self.drafter}-{self.format.split()[-1]}"

    @property
    def version(self) -> str:
        """The engine's version, as the record has it."""
        return self.engine.partition(",")[0].split()[-1]


VLLM, LLAMA, OPENVINO = "vLLM 0.32.0", "llama.cpp b11434", "OpenVINO GenAI 2026.4.1"
DIVIDED = f"{VLLM}, two processes"
"""With tensor parallelism."""
PROPOSER = "none: a proposer"
"""In place of a format: vLLM loads the drafter's own folder by outrider's proposer."""
CELLS = [
    Cell(VLLM, "eagle3", "eagle3", "eagle3"),
    Cell(VLLM, "reduced", "eagle3", "eagle3"),
    Cell(VLLM, "eagle31", "eagle3", "eagle3"),
    Cell(VLLM, "eagle3", "speculators", "eagle3"),
    Cell(VLLM, "reduced", "speculators", "eagle3"),
    Cell(VLLM, "layers", "speculators", "eagle3"),
    Cell(VLLM, "eagle", "eagle1-vllm", "eagle"),
    Cell(VLLM, "draft_model", "transformers", "draft_model"),
    Cell(VLLM, "medusa", "medusa", "medusa"),
    Cell(VLLM, "redrafter", PROPOSER, "custom_class"),
    Cell(VLLM, "medusa", PROPOSER, "custom_class"),
    Cell(VLLM, "redrafter+suffix", PROPOSER, "custom_class"),
    Cell(VLLM, "block", PROPOSER, "custom_class"),
    Cell(VLLM, "block_reduced", PROPOSER, "custom_class"),
    Cell(VLLM, "block+suffix", PROPOSER, "custom_class"),
    Cell(DIVIDED, "redrafter+suffix", PROPOSER, "custom_class"),
    Cell(DIVIDED, "block_reduced", PROPOSER, "custom_class"),
    Cell(LLAMA, "eagle3", "gguf", "draft-eagle3"),
    Cell(LLAMA, "layers", "gguf", "draft-eagle3"),
    Cell(LLAMA, "reduced", "gguf", "draft-eagle3"),
    Cell(LLAMA, "dspark", "gguf", "draft-dspark"),
    Cell(LLAMA, "dspark_reduced", "gguf", "draft-dspark"),
    Cell(LLAMA, "draft_model", "gguf", "draft-simple"),
]
OPENVINO_CELLS = [
    Cell(OPENVINO, "eagle3", "eagle3", "eagle3"),
    Cell(OPENVINO, "reduced", "eagle3", "eagle3"),
    Cell(OPENVINO, "draft_model", "transformers", "draft_model"),
]
CHAINS = [
    pytest.param(cell, length, marks=missing(LLAMA_SERVER if cell.engine == LLAMA else VLLM_PYTHON), id=f"{cell}-{length}")
    for cell in CELLS
    for length in (1, 4)
    if length == 4 or (cell.method != "draft-dspark" and cell.engine != DIVIDED)
]
"""Chains of one token and of four. The slots of a DSpark see each other, so it drafts whole blocks, of four."""
OncePerRun = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def run(once_per_run: OncePerRun) -> Path:
    """The folder of a run that trained all drafters on the same labels."""

    def train(folder: Path) -> None:
        result = invoke(["run", RECIPE, f"output_dir={os.environ.get('OUTRIDER_ENGINES_RUN', folder / 'run')}"])
        assert result.exit_code == 0, result.output

    folder = once_per_run("engines", train)
    return Path(os.environ.get("OUTRIDER_ENGINES_RUN", folder / "run"))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of the demo's suite, each a category of its own, so that each answer is counted alone."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    chosen = enumerate(load_suite("stdlib", limit=NUM_PROMPTS).prompts)
    path.write_text("".join(f"{json.dumps({'prompt': prompt.turns[0], 'category': str(at)})}\n" for at, prompt in chosen))
    return path


def chain(drafter: Path, length: int, *, is_merged: bool = False) -> dict[str, Any]:
    """Return the run-time options of a chain of `length` draft tokens."""
    if is_merged:
        alone = {name: value for name, value in chain(drafter, length).items() if name != "tree_nodes"}
        return {**alone, "pace": "fixed", "chain": True, "tree_nodes": length}
    match read_drafter_config(drafter).kind:
        case "medusa":
            return {"tree_paths": [[0] * depth for depth in range(1, length + 1)]}
        case "redrafter":
            return {"beam_width": 1, "beam_length": length, "tree_nodes": length}
        case "draft_model":
            return {"length": length, "top_k": 1, "tree_nodes": length}
        case "block":
            return {"depth": length, "width": 1, "tree_nodes": length, "candidates": CANDIDATES}
    return {"depth": length, "top_k": 1, "tree_nodes": length}


@pytest.mark.parametrize(("cell", "length"), CHAINS)
def test_an_engine_accepts_what_outrider_accepts(
    cell: Cell, length: int, run: Path, prompts: Path, demo_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1. Export.
    is_vllm = cell.engine != LLAMA
    monkeypatch.setenv("OUTRIDER_LLAMA_CPP", str(LLAMA_CPP))
    trained, plus, lookup = cell.drafter.partition("+")
    folder, exported = run / "variants" / trained / "drafter", tmp_path / ("drafter" if is_vllm else "drafter.gguf")
    drafter = f"{folder}{plus}{lookup}"
    converter = [] if is_vllm else ["--converter", CONVERTER]
    if cell.format == PROPOSER:
        exported = Path(drafter)
    else:
        result = invoke(["export", drafter, "--target", demo_target_dir, "--to", cell.format, "--output", exported, *converter])
        assert result.exit_code == 0, result.output

    # 2. Serve, and compare its answers with plain decoding: without tolerance, so every token is the most probable one.
    served = demo_target_dir if is_vllm else converted(demo_target_dir, run / "target.gguf")
    output = tmp_path / "check.json"
    served_by = partial(vllm, processes=1 + (cell.engine == DIVIDED)) if is_vllm else llama_cpp
    with served_by(served, cell.method, exported, length, tmp_path / "log") as url:
        assert cell.version in version_of(url, is_vllm=is_vllm), (
            "another version: remove it from build/engines, and make it again"
        )
        # A merge learns from text to text, so its texts must come in our order.
        checks = ["--suites", prompts, "--max-new-tokens", MAX_NEW_TOKENS, "--repeats", 1, "--samples", 0]
        checks += ["--concurrency", 1 if lookup else 4]
        settings = json.dumps(chain(folder, length, is_merged=bool(lookup)))
        options = ["--drafter", drafter, "--settings", settings, "--tolerance", 0]
        result = invoke(["check-server", url, "--target", demo_target_dir, *checks, *options, "--output", output])

    # 3. Compare what is accepted, answer by answer.
    assert output.exists(), result.output
    found = json.loads(output.read_text())
    assert found["drafts"], found["notes"]
    there, here = (found["drafts"][side] for side in ("server", "here"))
    same = {answer: _is_same(there[answer], here[answer], is_vllm=is_vllm) for answer in here if answer != "all"}
    greedy = [line for line in found["lines"] if line["subject"].startswith("greedy")]
    is_right = all(line["passed"] for line in greedy)
    _record(cell, length, there["all"], here["all"], text=is_right, same=all(same.values()))
    assert is_right, greedy
    assert len(same) == NUM_PROMPTS
    assert here["all"]["accepted"] > 0, "nothing is accepted, so nothing is compared"
    assert all(same.values()), {answer: (there[answer], here[answer]) for answer in same if not same[answer]}


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("cell", OPENVINO_CELLS, ids=str)
@missing(openvino.PYTHON)
def test_openvino_takes_the_steps_that_outrider_takes(
    cell: Cell, length: int, run: Path, demo_target_dir: Path, tmp_path: Path, once_per_run: OncePerRun
) -> None:
    # 1. Export, and convert once for both lengths.
    folder, is_eagle3 = run / "variants" / cell.drafter / "drafter", cell.format == "eagle3"
    target = load_target(TargetConfig(name_or_path=str(demo_target_dir), dtype="float32"))
    drafter = load_drafter(str(folder), target, **chain(folder, length))

    def convert(output: Path) -> None:
        exported = output / "exported"
        result = invoke(["export", folder, "--target", demo_target_dir, "--to", cell.format, "--output", exported])
        assert result.exit_code == 0, result.output
        if is_eagle3:
            openvino.add_map(exported)
        made = openvino.converted(exported, output / "drafter")
        if is_eagle3:
            openvino.choose_layers(made, drafter.feature_layers)

    there = once_per_run("openvino_target", lambda output: openvino.converted(demo_target_dir, output / "target"))
    request: dict[str, Any] = {"target": str(there / "target")}
    request |= {"draft": str(once_per_run(f"openvino_{cell.drafter}", convert) / "drafter"), "num_draft_tokens": length}

    # 2. Answer there and here. The tokens of plain decoding are compared, and the steps with the drafter.
    prompts = load_suite("stdlib", limit=NUM_PROMPTS).prompts
    rows = [encode_prompt(prompt.messages(prompt.turns[0]), target.tokenizer)[0] for prompt in prompts]
    questions = [Question(suite="stdlib", prompt=prompt, ids=row.tolist()) for prompt, row in zip(prompts, rows, strict=True)]
    request |= {"prompts": [question.ids for question in questions]}
    request |= {"max_new_tokens": MAX_NEW_TOKENS, "stop_ids": [*target.stop_ids]}
    answers, steps, version = openvino.answers(tmp_path, request)
    assert version.startswith(cell.version)
    options: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "stop_ids": target.stop_ids}
    plain = answers_of(generate(target, NullDrafter(), GreedyAcceptance(), rows, **options))
    method = Method(name=cell.drafter, label=cell.drafter, drafter=drafter)
    here = drafts_here(target, method, questions, MAX_NEW_TOKENS, length, lambda: None)

    # 3. Compare.
    ours = [count.steps for count in here]
    total = asdict(reduce(DraftCounts.plus, here))
    _record(cell, length, {"steps": sum(steps)}, total, text=answers == plain, same=steps == ours)
    assert answers == plain
    assert total["accepted"] > 0, "nothing is accepted, so nothing is compared"
    assert steps == ours


def _is_same(there: dict[str, Any], here: dict[str, Any], *, is_vllm: bool) -> bool:
    """Whether an engine's counts of one answer are ours.

    vLLM drafts past the end of an answer, as we do. llama.cpp doesn't, so its last step accepts as many fewer as would
    be past the limit. A stop token that was drafted isn't counted there, unless it is the last draft token.
    """
    if is_vllm:
        return there == here
    past = 1 + here["steps"] + here["accepted"] - MAX_NEW_TOKENS  # below zero where a stop token ended the answer
    fewer = [ours - theirs for theirs, ours in zip(there["by_depth"], here["by_depth"], strict=True)]
    return sum(fewer) in ((past,) if past >= 0 else (0, 1)) and {*fewer, here["steps"] - there["steps"]} <= {0, 1}


def _record(cell: Cell, length: int, there: dict[str, Any], here: dict[str, Any], *, text: bool, same: bool) -> None:
    """Add a cell to the record, if one is asked for."""
    if not (name := os.environ.get("OUTRIDER_ENGINES_RECORD")):
        return
    path = Path(name)
    row = {"engine": cell.engine, "format": cell.format, "drafter": WORDS[cell.drafter], "chain": length}
    row |= {"same_text": text, "same_counts": same, "there": there, "here": here}
    record = {"command": "make engines", "date": datetime.now(UTC).date().isoformat(), "dtype": "float32"}
    record |= {"num_prompts": NUM_PROMPTS, "max_new_tokens": MAX_NEW_TOKENS}
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    path.write_text(json.dumps({**record, "rows": [*rows, row]}, indent=1) + "\n")
