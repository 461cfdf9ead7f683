"""Merged drafters: the tokens are plain decoding's, whichever drafters share a tree."""

from typing import Any

import pytest
import torch

from outrider.models.decoding import GreedyAcceptance, RowSeeds, Sampling, SpeculativeSampling, generate
from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter
from outrider.models.drafters.calibration import source_key
from outrider.models.drafters.merged import MergedConfig, MergedDrafter
from outrider.models.drafters.registry import TRAINING_FREE

from ...decoded import texts_of

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]
NUM_NEW = 30
SMALL: dict[str, dict[str, Any]] = {
    "draft_model": {"num_layers": 1, "init": "target_layers", "length": 3, "top_k": 3},
    "eagle": {"depth": 3, "top_k": 3, "tree_nodes": 8},
    "eagle3": {"depth": 3, "top_k": 3, "tree_nodes": 8},
    "medusa": {"tree_nodes": 8},
    "redrafter": {"beam_width": 3, "beam_length": 3, "tree_nodes": 8},
}


def build(name: str, target) -> Any:
    if name in TRAINING_FREE:
        return load_drafter(name, target)
    torch.manual_seed(0)
    return build_drafter(parse_drafter({"kind": name, **SMALL[name]}), target).to(target.dtype).eval()


def merged(target, *names: str, **options: Any) -> MergedDrafter:
    config = MergedConfig(**{"tree_nodes": 12, "pace": "fixed", **options})
    return MergedDrafter({name: build(name, target) for name in names}, config)


def decode(target, drafter, rows, rule=None, num_new=NUM_NEW) -> tuple[list[list[int]], list[Any]]:
    prompts, generator = [torch.tensor(PROMPTS[row]) for row in rows], RowSeeds(rows) if rule else None
    limits = {"max_new_tokens": num_new, "stop_ids": {55}}
    steps = list(generate(target, drafter, rule or GreedyAcceptance(), prompts, generator=generator, **limits))
    answers = texts_of(steps, len(rows))
    return answers, steps


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "medusa"])
def test_tokens_are_those_of_plain_decoding(target, kind):
    rows, rule = [0, 1, 2], SpeculativeSampling(sampling=Sampling(temperature=0.8))
    plain, _ = decode(target, NullDrafter(), rows, rule)
    drafter = merged(target, kind, "prompt_lookup")
    actual, steps = decode(target, drafter, rows, rule)
    assert actual == plain
    _, same_steps = decode(target, merged(target, kind, "prompt_lookup"), rows, rule)
    assert [step.num_accepted for step in same_steps] == [step.num_accepted for step in steps], "a function of the text"
    assert {step.num_nodes for step in steps[1:]} != {0}


def test_two_trained_drafters_read_different_features(target):
    """Each EAGLE-3 gets the features of its own layers, in its own order."""
    alone = build("eagle3", target)
    plain, expected = decode(target, MergedDrafter({"eagle3": alone}, MergedConfig(tree_nodes=8, pace="fixed")), [0])
    other = build("eagle3", target)
    assert len(other.feature_layers) > 1
    other._feature_layers = other.feature_layers[::-1]
    other.fc.weight.data = torch.cat(other.fc.weight.data.chunk(len(other.feature_layers), dim=1)[::-1], dim=1)
    pair = MergedDrafter({"eagle3": alone, "eagle3_2": other, "eagle": build("eagle", target)}, MergedConfig(pace="fixed"))
    assert pair.feature_layers == tuple(sorted(alone.feature_layers))
    actual, steps = decode(target, pair, [0])
    assert actual == plain
    both = [origin for step in steps[1:] for row in step.origins for origin in row]
    assert {origin & 0b11 for origin in both} <= {0b11, 0}, "they draft the same tokens"
    assert sum(map(sum, (step.num_accepted for step in steps))) >= sum(map(sum, (step.num_accepted for step in expected)))


def test_steps_name_the_sources_of_accepted_tokens(target):
    _, steps = decode(target, merged(target, "draft_model", "prompt_lookup"), [0, 1, 2])
    origins = [origin for step in steps[1:] for row in step.origins for origin in row]
    assert len(origins) == sum(sum(step.num_accepted) for step in steps)
    assert set(origins) <= {0b01, 0b10, 0b11}
    assert len(set(origins)) > 1


def test_what_earlier_texts_showed_changes_trees_but_no_tokens(target):
    plain, _ = decode(target, NullDrafter(), [0, 1])
    sources = {name: build(name, target) for name in ("draft_model", "medusa")}
    drafter = MergedDrafter(sources, MergedConfig(tree_nodes=3, pace="fixed"))
    drafter.merge.counts |= {
        source_key(0, depth) + bin_index: (0.0, 100.0) for depth in (1, 2, 3, 4) for bin_index in range(11)
    }
    actual, steps = decode(target, drafter, [0, 1])
    _, without = decode(target, MergedDrafter(sources, MergedConfig(tree_nodes=3, pace="fixed")), [0, 1])
    assert actual == plain
    assert [step.origins for step in steps] != [step.origins for step in without]


def test_a_text_starts_from_the_counts_of_the_texts_before(target):
    """Of a batch and of recorded drafting, too."""
    drafter = merged(target, "medusa", "prompt_lookup", tree_nodes=5)
    decode(target, drafter, [0])
    after_one = dict(drafter.merge.counts)
    decode(target, drafter.recorded(lambda source: source), [1, 2])
    assert after_one
    assert sum(total for _, total in drafter.merge.counts.values()) > sum(total for _, total in after_one.values())


def test_a_tree_has_at_most_tree_nodes_nodes_and_parents_before_children(target):
    drafter = merged(target, "medusa", "prompt_lookup", tree_nodes=5)
    trees = []
    propose = drafter.propose

    def kept(*args: Any, **options: Any) -> Any:
        trees.append(propose(*args, **options)[0])
        return propose(*args, **options)

    drafter.propose = kept
    decode(target, drafter, [0, 1, 2])
    assert len(trees) > 3
    assert max(tree.num_nodes for tree in trees) <= 5 == drafter.max_nodes
    for tree in trees:
        columns = torch.arange(tree.num_nodes)
        assert (tree.parents < columns).all()
        for row, origins in enumerate(tree.origins):
            num_real = int((tree.tokens[row] != NO_NODE).sum())
            assert len(origins) == num_real
            siblings = list(zip(tree.parents[row, :num_real].tolist(), tree.tokens[row, :num_real].tolist(), strict=True))
            assert len(set(siblings)) == num_real, "siblings are different tokens"


# --- wrong input


def test_different_vocabularies_are_refused(target):
    first, second = build("medusa", target), build("redrafter", target)
    second.vocab_size += 1
    size = target.vocab_size
    with pytest.raises(ValueError, match=rf"vocabularies.*{size} tokens in medusa, {size + 1} tokens in redrafter"):
        MergedDrafter({"medusa": first, "redrafter": second}, MergedConfig())


def test_a_merge_needs_sources():
    with pytest.raises(ValueError, match="between 1 and 8"):
        MergedDrafter({}, MergedConfig())


def test_damaged_weights_are_an_error(target):
    drafter = merged(target, "redrafter", "prompt_lookup")
    drafter.sources["redrafter"].head.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="scores are not numbers"):
        decode(target, drafter, [0])


def test_unknown_options_are_errors():
    with pytest.raises(ValueError, match="pace"):
        MergedConfig(pace="quick")
    with pytest.raises(ValueError, match="tree_nodes"):
        MergedConfig(tree_nodes=0)
