"""Targets in stages: the logits and the text of the whole target, from all drafters.

Slices run the same operations on the same numbers as the whole model, so even logits are equal bit
for bit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.eval.measure.audit import audit
from outrider.models.decoding import GreedyAcceptance, Prompts, RowSeeds, Sampling, SpeculativeSampling, chain_tree, generate
from outrider.models.decoding.tree import DraftTree, accepted_path
from outrider.models.drafters import DRAFTERS as DRAFTER_KINDS
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.models.llm.stages.staged_target import StagedTarget

from ..models.llm.stages.inline import in_stages
from .test_architectures import CASES, SMALL, VOCAB, adapt, make_model
from .test_drafters import FREE, FROM_RANDOM, OPTIONS

NUM_NEW = 14
PROMPTS = [list(range(3, 12)), [50, 51, 52, 50, 51, 52, 50], [97, 3, 14, 15, 92, 65, 35, 89]]
RULES = {"greedy": GreedyAcceptance(), "sampled": SpeculativeSampling(sampling=Sampling(temperature=1.2, top_p=0.95))}
MERGES = {"expected": "prompt_lookup+suffix+recycling"}
TUPLES = {
    "falcon": ("Falcon", {**SMALL, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}, ("sdpa",)),
    "gptj": ("GPTJ", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4}, ("eager",)),
}
"""Architectures whose layers return tuples."""
DRAFTERS = ["plain", "suffix", "expected", *DRAFTER_KINDS]
"""Drafters of each kind and of each use of the target; variants of a kind use it in the same way."""
WITH_FEATURES = {"block", "eagle3"}


def outputs(target: HFTarget) -> list[torch.Tensor]:
    """Return the logits and hidden states of a prefill, of a tree, and of a chain after its path."""
    tree = DraftTree(tokens=torch.tensor([[5, 7, 6]]), parents=torch.tensor([[-1, -1, 0]]), max_depth=2)
    with torch.inference_mode():
        results = [target.prefill(Prompts.of(torch.tensor([PROMPTS[0]])), max_new_tokens=NUM_NEW, max_nodes=4)]
        results.append(target.verify(torch.tensor([20]), tree))
        target.commit(tree, accepted_path(tree, [[0, 2]]))
        results.append(target.verify(torch.tensor([21]), chain_tree(tree.tokens)))
    return [tensor for output in results for tensor in (output.logits, output.hidden_states)]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("case", CASES | TUPLES)
def test_slices_have_the_logits_of_the_whole_model(case, tiny_tokenizer):
    architecture, options, (attention, *_) = (CASES | TUPLES)[case]
    whole = adapt(make_model(architecture, options, attention), tiny_tokenizer)
    expected = outputs(whole)
    num_layers = whole.model.config.get_text_config().num_hidden_layers
    visited = 0
    for stage_layers in ([1, num_layers - 1], [1] * num_layers):
        for actual, tensor in zip(outputs(in_stages(whole, stage_layers)), expected, strict=True):
            assert torch.equal(actual, tensor), stage_layers
            visited += 1
    assert visited == 12


@pytest.fixture(scope="module")
def whole(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float64"), torch.device("cpu"))


@pytest.fixture(scope="module")
def staged(whole: HFTarget) -> StagedTarget:
    return in_stages(whole, [1, 1])


def make_drafter(kind: str, whole: HFTarget) -> Any:
    """Make a drafter of a target with random weights. Its text must be that of plain decoding, too."""
    torch.manual_seed(0)
    if kind == "plain":
        return NullDrafter()
    if kind in FREE:
        return load_drafter(kind, whole, **FREE[kind])
    if kind in MERGES:
        return load_drafter(MERGES[kind], whole, pace=kind, tree_nodes=12)
    # Layers of the target can't be copied where it is in stages.
    return build_drafter(parse_drafter({"kind": kind, **FROM_RANDOM[kind]}), whole).to(whole.dtype).eval()


def answers(target: HFTarget, drafter: Any, rule: str) -> tuple[list[list[int]], int]:
    """Return each prompt's answer, one after the other, and the number of accepted draft tokens."""
    texts, num_accepted = [], 0
    for prompt in PROMPTS:
        seeds = RowSeeds([sum(prompt)])
        steps = list(generate(target, drafter, RULES[rule], torch.tensor([prompt]), max_new_tokens=NUM_NEW, generator=seeds))
        texts.append([token for step in steps for token in step.tokens[0]])
        num_accepted += sum(sum(step.num_accepted) for step in steps)
    return texts, num_accepted


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_target_in_stages_decodes_the_text_of_the_whole_target(kind, whole, staged):
    drafter = make_drafter(kind, staged)
    if kind in WITH_FEATURES:
        with pytest.raises(ValueError, match=r"reads the inputs of the target's layers \[.*target\.stage_layers"):
            answers(staged, drafter, "greedy")
        return
    total = 0
    for rule in RULES:
        expected, _ = answers(whole, NullDrafter(), rule)
        assert len({tuple(tokens) for tokens in expected}) > 1, "the model answers prompts alike"
        actual, num_accepted = answers(staged, drafter, rule)
        assert actual == expected, rule
        total += num_accepted
    assert total > 0 or kind == "plain" or kind in OPTIONS, "no draft token was accepted"


def test_an_audit_reads_the_text_through_the_stages(staged):
    prompt = torch.tensor([PROMPTS[0]])
    steps = generate(staged, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=NUM_NEW)
    answer = [token for step in steps for token in step.tokens[0]]
    result = audit(staged, prompt, answer, max_new_tokens=NUM_NEW)
    assert result.within_noise
    assert not audit(staged, prompt, [*answer[:-1], answer[-1] - 1], max_new_tokens=NUM_NEW).within_noise


def test_a_drafter_that_copies_layers_is_refused(staged):
    with pytest.raises(ValueError, match=r"in other processes \(target\.stage_layers\).*drafter\.init=random"):
        build_drafter(parse_drafter({"kind": "eagle", **OPTIONS["eagle"]}), staged)
