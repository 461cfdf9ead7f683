"""Training where another drafter is wrong: `train.label_weights=missed_by:DRAFTER`."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.data.collate import collate
from outrider.data.types import UNKNOWN, DistilledExample, DrafterBatch, TargetReads
from outrider.models.decoding import DraftTree, Prompts
from outrider.models.drafters import build_drafter, make_training_free, parse_drafter, save_drafter
from outrider.models.drafters.base import TrainableDrafter
from outrider.models.drafters.labels import Labels
from outrider.models.drafters.losses import LEAST_WEIGHT
from outrider.models.drafters.objective import Objective
from outrider.models.drafters.prompt_lookup import PromptLookup
from outrider.models.drafters.registry import TRAINING_FREE
from outrider.models.drafters.saved.loading import load_trained
from outrider.models.llm.hf_target import HFTarget
from outrider.train import missed_by as missed_by_module
from outrider.train.batches import target_reads, with_hidden_states
from outrider.train.config import TrainConfig
from outrider.train.missed_by import OtherDrafter, TrainedCounter, count_covered

from .conftest import HORIZON, TRAIN, Run, write_shards
from .test_run import records, weights

RunTrain = Callable[..., Run]
KINDS: dict[str, dict[str, Any]] = {
    "draft_model": {"num_layers": 1, "top_k": 3, "tree_nodes": 8, "length": 3},
    "eagle": {"depth": 3, "top_k": 3, "tree_nodes": 8},
    "eagle3": {"depth": 3, "top_k": 3, "tree_nodes": 8},
    "medusa": {"num_heads": 3, "tree_nodes": 8},
    "redrafter": {"beam_width": 3, "beam_length": 3},
}
TEXT_KINDS = ["prompt_lookup", "suffix"]
"""Training-free drafters that read nothing but the text."""


def trained_a_little(kind: str, target: HFTarget, batch: DrafterBatch) -> TrainableDrafter:
    """Train a drafter for some steps, so that it has some labels right and others wrong."""
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": kind, **KINDS[kind]}), target).train()
    reads = target_reads(drafter, Objective())
    batch = with_hidden_states(batch, target, reads)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(12):
        drafter.loss(batch, Objective()).sums.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval().requires_grad_(False)


def make_batch(examples: list[DistilledExample], *, packing: bool, max_positions: int | None = None) -> DrafterBatch:
    generator = torch.Generator().manual_seed(0)
    return collate(examples, max_positions=max_positions, generator=generator, labels="distilled", pad_id=0, packing=packing)


def longest_path(tree: DraftTree, labels: list[int]) -> int:
    """Count the labels from the first one on that are a path of a tree of one row, by a search."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    nodes, count = [-1], 0
    for label in labels:
        links = enumerate(zip(tokens, parents, strict=True))
        nodes = [node for node, (token, parent) in links if token == label and parent in nodes]
        if label == UNKNOWN or not nodes:
            break
        count += 1
    return count


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *TEXT_KINDS])
def test_the_other_drafter_covers_what_it_proposes_in_decoding(
    kind: str, packing: bool, target: HFTarget, examples: list[DistilledExample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missed_by_module, "PREFIX_TOKENS", 40)  # several chunks
    texts = examples[:3]
    if kind in TEXT_KINDS:
        drafter = make_training_free(kind, {}, target)
    else:
        drafter = trained_a_little(kind, target, make_batch(texts, packing=False))
    other = OtherDrafter([drafter], target)
    batch = make_batch(texts, packing=packing, max_positions=20)
    redrafter = build_drafter(parse_drafter({"kind": "redrafter"}), target)
    marked = with_hidden_states(batch, target, target_reads(redrafter, Objective(), other), other)
    assert marked.num_covered is not None
    assert not marked.num_covered[~batch.positions].any()

    counts = []
    for row, column in batch.positions.nonzero().tolist():
        start = 0 if batch.starts is None else int(batch.starts[row, column])
        prompt = batch.input_ids[row, start : column + 1]
        prefill = target.prefill(Prompts.of([prompt]), max_new_tokens=4, max_nodes=8, feature_layers=drafter.feature_layers)
        state = drafter.init_state(Prompts.of([prompt]), prefill, max_new_tokens=4)
        chosen, *labels = batch.continuations[row, column].tolist()
        tree, _ = drafter.propose(state, torch.tensor([chosen]))
        counts.append(longest_path(tree, labels))
    assert marked.num_covered[batch.positions].tolist() == counts
    assert len(set(counts)) > 1, "a constant would also pass"
    assert other.seconds > 0


def test_several_drafters_cover_what_the_best_of_them_covers(target: HFTarget, examples: list[DistilledExample]) -> None:
    batch = make_batch(examples[:3], packing=False)
    trained = trained_a_little("medusa", target, batch)
    lookup = make_training_free("prompt_lookup", {}, target)
    batch = with_hidden_states(batch, target, TargetReads(hidden_states=True))
    first, second, both = (
        OtherDrafter(parts, target).mark(batch).num_covered for parts in ([trained], [lookup], [trained, lookup])
    )
    assert first is not None
    assert second is not None
    assert both is not None
    assert torch.equal(both, first.maximum(second))
    assert (first > second).any()
    assert (first < second).any()


def test_padding_of_a_tree_is_no_unknown_label() -> None:
    """Both are -1."""
    tree = DraftTree(tokens=torch.tensor([[5, -1], [5, 6]]), parents=torch.tensor([[-1, -1], [-1, 0]]), max_depth=2)
    assert count_covered(tree, torch.tensor([[5, UNKNOWN], [5, UNKNOWN]])).tolist() == [1, 1]
    assert count_covered(tree, torch.tensor([[UNKNOWN, UNKNOWN], [5, 6]])).tolist() == [0, 2]
    assert count_covered(tree, torch.tensor([[5], [5]])).tolist() == [1, 1], "the tree is deeper than the labels"


@pytest.fixture
def other(run_train: RunTrain, target: HFTarget, examples: list[DistilledExample], tmp_path: Path) -> Path:
    """Train a drafter on the first four texts only."""
    shards = write_shards(tmp_path / "first-texts", target.identity, examples[:4])
    return run_train("other", drafter={"beam_width": 1}, steps=30, shards=shards, checkpoint_every=30).drafter_dir


def covered(drafter_dir: Path, target: HFTarget, examples: list[DistilledExample]) -> tuple[DrafterBatch, torch.Tensor]:
    """Return all positions, and the number of draft tokens that a trained drafter has right at each."""
    batch = with_hidden_states(make_batch(examples, packing=False), target, TargetReads(hidden_states=True))
    marked = OtherDrafter([load_trained(drafter_dir, target)], target).mark(batch)
    assert marked.num_covered is not None
    return batch, marked.num_covered[batch.positions]


def test_a_boosted_drafter_covers_more_of_what_the_other_misses(
    run_train: RunTrain, other: Path, target: HFTarget, examples: list[DistilledExample]
) -> None:
    batch, by_other = covered(other, target, examples)
    known = Labels.of(batch).known.sum(1)
    assert 0.2 < (by_other < known).float().mean() < 0.8
    gains, alone = [], []
    for label_weights in ("uniform", f"missed_by:{other}"):
        options = {"steps": 25, "checkpoint_every": 25, "label_weights": label_weights}
        run = run_train(f"run-{len(gains)}", drafter={"beam_width": 1}, **options)
        _, counts = covered(run.drafter_dir, target, examples)
        gains.append(int((counts - by_other).clamp(min=0).sum()))
        alone.append(int(counts.sum()))
    assert gains[1] > 1.2 * gains[0], "draft tokens beyond the other drafter's"
    assert alone[1] < alone[0], "it leaves the rest to the other drafter"


def assert_same_training(one: Run, other: Run) -> None:
    """Assert equal weights, but for the few that rounding moves.

    AdamW divides a gradient by its size: where it is nearly zero, its rounding decides the step.
    Which weights these are differs from processor to processor.
    """
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert len(ours) >= 4
    for name in ours:
        is_moved = ~torch.isclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
        assert is_moved.float().mean() < 1e-3, name
        assert (ours[name] - theirs[name]).abs().max() < TRAIN["learning_rate"] / 10, name


def test_accumulation_resuming_and_a_moved_folder_change_nothing(run_train: RunTrain, other: Path, tmp_path: Path) -> None:
    one = run_train("one", batch_size=8, label_weights=f"missed_by:{other}")
    moved = tmp_path / "moved"
    shutil.copytree(other, moved)
    four = run_train("four", batch_size=2, gradient_accumulation=4, label_weights=f"missed_by:{moved}")
    assert_same_training(one, four)
    for ours, theirs in zip(records(one), records(four), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    description = json.loads((one.train_dir / "summary.json").read_text())["run"]
    assert str(other) not in json.dumps(description)
    # A killed run resumes, here by the other path.
    (one.train_dir / "summary.json").unlink()
    shutil.rmtree(one.train_dir / "checkpoints" / "step-00000006")
    before = weights(one)
    shutil.rmtree(one.drafter_dir)
    run_train("one", batch_size=8, label_weights=f"missed_by:{moved}")
    assert all(torch.equal(before[name], weight) for name, weight in weights(one).items())
    # Another drafter is another run.
    file = moved / "model.safetensors"
    save_file({name: weight + 1 for name, weight in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=r"another configuration: the drafter that train\.label_weights names"):
        run_train("one", batch_size=8, label_weights=f"missed_by:{moved}")


def test_a_training_free_drafter_can_be_the_other_one(run_train: RunTrain) -> None:
    run = run_train(label_weights="missed_by:prompt_lookup")
    description = json.loads((run.train_dir / "summary.json").read_text())["run"]["train"]["label_weights"]
    assert description["missed_by"]["parts"].keys() == {"prompt_lookup"}
    assert not torch.equal(*(weights(each)["head.weight"] for each in (run, run_train("uniform"))))


def test_validation_measures_the_weighted_loss(run_train: RunTrain, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainedCounter, "_count", lambda self, batch, rows, *_: torch.full_like(rows, HORIZON))
    losses = []
    for label_weights in ("uniform", f"missed_by:{other}"):
        run = run_train(f"run-{len(losses)}", steps=1, validation_texts=4, validation_tokens=8, label_weights=label_weights)
        losses.append(next(line["validation_loss"] for line in records(run) if "validation_loss" in line))
    assert losses[1] == pytest.approx(LEAST_WEIGHT * losses[0], rel=1e-2)


@pytest.mark.parametrize("value", ["missed_by:", "missed", "reached:x"])
def test_weights_that_do_not_exist_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"uniform, reached, dpace, missed_by:DRAFTER"):
        TrainConfig(steps=1, label_weights=value)


def test_drafters_that_cannot_be_the_other_one_are_refused(
    run_train: RunTrain, target: HFTarget, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(drafter_dir: Path, text: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=rf"train\.label_weights is missed_by:{drafter_dir}.*{text}"):
            run_train(label_weights=f"missed_by:{drafter_dir}", **options)
        assert not list((tmp_path / "run").rglob("*.jsonl"))

    refused(tmp_path / "nowhere", "holds no drafter")
    with pytest.raises(ValueError, match=r"missed_by:sufix.*prompt_lookup, .*did you mean suffix"):
        run_train(label_weights="missed_by:sufix")
    refused(tmp_path / "run" / "drafter", "to be trained")
    reads_logits = type("ReadsLogits", (PromptLookup,), {"entries": lambda self, *args: ()})
    monkeypatch.setitem(TRAINING_FREE, "recycling", reads_logits)
    with pytest.raises(ValueError, match=r"missed_by:recycling.*logits"):
        run_train(label_weights="missed_by:recycling")
    drawn = build_drafter(parse_drafter({"kind": "draft_model", "num_layers": 1, "temperature": 0.7}), target)
    save_drafter(drawn, tmp_path / "drawn", target.identity)
    refused(tmp_path / "drawn", r"temperature 0\.7")
    foreign = replace(target.identity, vocab_size=7)
    save_drafter(load_trained(other, target), tmp_path / "foreign", foreign)
    refused(tmp_path / "foreign", "vocab_size")
    eagle = build_drafter(parse_drafter({"kind": "eagle3", "feature_layers": [1]}), target)
    save_drafter(eagle, tmp_path / "eagle3", target.identity)
    with pytest.raises(ValueError, match=r"train\.label_weights.*layers \[1\].*\[0\]"):
        run_train(label_weights=f"missed_by:{tmp_path / 'eagle3'}", replace_drafter={"kind": "eagle3", "feature_layers": [0]})
