"""Every kind of drafter on targets with recurrent layers: labelled along the text, trained, saved, loaded and decoded."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.data.types import DrafterBatch
from outrider.distill.config import DistillConfig
from outrider.distill.label.continuations import label_continuations
from outrider.distill.regenerate.engine import Limits, Request
from outrider.distill.regenerate.engines.batch import cache_bytes
from outrider.distill.regenerate.engines.registry import open_engine
from outrider.models.decoding import Sampling, SpeculativeSampling
from outrider.models.decoding.tree import DraftTree, chain_tree
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.objective import Objective
from outrider.models.drafters.oracle import OracleDrafter
from outrider.models.llm import memory_plan, streamed_loading
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.models.llm.recurrent_states import Paths, find_mixers
from outrider.models.llm.stages.slices import EndSlice
from outrider.models.llm.streamed_loading import build_without_weights
from outrider.models.llm.tree_cache import TreeCache
from outrider.train.batches import states_of_texts

from ..tiny_models import IDENTITY
from .families import ALONG_THE_TEXT, PROMPTS, VOCAB, decode, make_family
from .test_drafters import FREE, FROM_RANDOM, VARIANTS, fit

FAMILIES = ("qwen3_5_text", "falcon_h1", "lfm2")
KINDS = sorted(FROM_RANDOM.keys() - VARIANTS)
"""One row of each kind: the others differ inside the drafter, and read the target in the same way."""
QUICK = {"redrafter", "eagle3", "draft_model"}
SAMPLED = SpeculativeSampling(sampling=Sampling(temperature=0.7, top_p=0.95))
NUM_NEW, HORIZON = 16, 5
HYBRIDS = [name for name in ALONG_THE_TEXT if name not in ("llama4_text", "deepseek_v32", "glm_moe_dsa", "hy_v4")]
FUZZED_BATCHES = 1 + 5_000 * 2 // (7 * len(HYBRIDS))
"""Of 3.5 answers on average."""
CHUNKS = {"qwen3_5_text": {64}, "falcon_h1": {8}, "lfm2": set()}
"""Tokens in a chunk of each family's kernels."""
REFUSALS = {
    ("draft_model", "falcon_h1"): "recurrent layers",
    **dict.fromkeys((("mtp", "falcon_h1"), ("mtp", "lfm2")), "no layer that is plain attention to the whole text"),
}
"""What a kind can't be on a family, and why."""
BUDGET_MARKS = {
    "qwen3_5_text": [],
    **dict.fromkeys(("falcon_h1", "lfm2", "mamba2", "nemotron_h", "qwen3_next", "zamba2"), pytest.mark.slow),
}
"""Of the families that are read within a budget; the others are long tests."""
LLAMA = {"layer": {"model_type": "llama"}}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tiny_tokenizer) -> HFTarget:
    return HFTarget(make_family(request.param), tiny_tokenizer, replace(IDENTITY, hidden_size=32, vocab_size=VOCAB))


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    return [decode(target, NullDrafter(), [prompt], NUM_NEW)[0][0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def batch(target, plain) -> DrafterBatch:
    """Label the target's own texts, without branches."""
    texts = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor([*prompt, *tokens]) for prompt, tokens in zip(PROMPTS, plain, strict=True)], batch_first=True
    )
    lengths = torch.tensor([[len(prompt) + NUM_NEW] for prompt in PROMPTS])
    column = torch.arange(texts.shape[1])
    is_token = column < lengths
    wanted = is_token & (column >= lengths - NUM_NEW - 1)
    labels, features, stats = label_continuations(target, texts, is_token, wanted, horizon=HORIZON, branches=False)
    assert stats.num_branch_tokens == 0
    assert stats.num_agreeing >= NUM_NEW * len(PROMPTS), "the text isn't the target's own"
    return DrafterBatch(
        input_ids=texts,
        attention_mask=is_token,
        positions=wanted,
        continuations=labels,
        hidden_states=features.hidden_states.float(),
    )


def options_of(name: str) -> dict[str, Any]:
    options = {"kind": name, **FROM_RANDOM[name]}
    return options | (LLAMA if name in {"eagle", "eagle3", "block"} else {})


@pytest.fixture(scope="module")
def plainly_sampled(target) -> list[list[int]]:
    return decode(target, NullDrafter(), PROMPTS, NUM_NEW, SAMPLED, range(3))[0]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in KINDS])
def test_each_kind_learns_from_labels_along_the_text_and_changes_no_token(
    name, target, plain, plainly_sampled, batch, tmp_path
):
    torch.manual_seed(0)
    # 1. Train.
    family = target.model.config.model_type
    refusal = REFUSALS.get((name, family))
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            build_drafter(parse_drafter(options_of(name)), target)
        return
    drafter = build_drafter(parse_drafter(options_of(name)), target).train()
    if drafter.feature_layers:
        _, features = states_of_texts(target, batch, last=False, layers=drafter.feature_layers)
        batch = replace(batch, features=features.float())
    fit(drafter, batch, num_steps=30)
    drafter.eval().calibrate(drafter.loss(batch, Objective()))
    save_drafter(drafter, tmp_path, target.identity)
    # 2. Decode.
    drafter = load_drafter(tmp_path, target)
    answers, num_accepted = decode(target, drafter, PROMPTS, NUM_NEW)
    assert answers == plain
    assert num_accepted > NUM_NEW, "it has learned nothing"
    assert decode(target, drafter, PROMPTS, NUM_NEW, SAMPLED, range(3))[0] == plainly_sampled


class FuzzedOracle(OracleDrafter):
    """Drafts a chain or a tree of another depth and breadth in each step, right down to another depth in each row."""

    DEPTH, BREADTH = 5, 3
    max_nodes = DEPTH * BREADTH

    def __init__(self, texts: list[list[int]], numbers: np.random.Generator) -> None:
        super().__init__(texts, [], VOCAB)
        self.numbers = numbers

    def propose(self, state: Any, last_token: torch.Tensor, *, generator: Any = None) -> Any:
        depth, breadth = int(self.numbers.integers(0, self.DEPTH + 1)), int(self.numbers.integers(1, self.BREADTH + 1))
        parents = [level * breadth - 1 for level in range(depth) for _ in range(breadth)]
        tokens = []
        for row, position in state.tolist():
            text, right = [*self.texts[row], *[0] * 99][position : position + depth], self.numbers.integers(0, depth + 1)
            path = [token if level < right else (token + 9) % VOCAB for level, token in enumerate(text)]
            tokens.append([(token + other) % VOCAB for token in path for other in reversed(range(breadth))])
        shape = (len(tokens), len(parents))
        tree = DraftTree(
            tokens=torch.tensor(tokens).view(shape).long(),
            parents=torch.tensor(parents * len(tokens)).view(shape).long(),
            max_depth=depth,
        )
        return tree, state


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", HYBRIDS)
def test_fuzzed_answers_are_those_of_generate(name, tiny_tokenizer):
    """Some 5,000 answers over all families, in float64: chains, trees, batches of unequal prompts, sampled rows."""
    model, numbers, num_accepted = make_family(name), np.random.default_rng(0), 0
    target = HFTarget(model, tiny_tokenizer, replace(IDENTITY, hidden_size=32, vocab_size=VOCAB))
    rule = SpeculativeSampling(sampling=Sampling(temperature=0.8, top_p=0.95))
    for number in range(FUZZED_BATCHES):
        size = int(numbers.integers(2, 6))
        prompts = [numbers.integers(0, VOCAB, numbers.integers(1, 24)).tolist() for _ in range(size)]
        num_new, drawn = int(numbers.integers(1, 12)), number % 4 == 3
        how = (rule, range(size)) if drawn else (None, None)
        if drawn:
            expected = [
                decode(target, NullDrafter(), [prompt], num_new, rule, [row])[0][0] for row, prompt in enumerate(prompts)
            ]
        else:
            options = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            texts = [torch.tensor([prompt]) for prompt in prompts]
            whole = [model.generate(text, attention_mask=torch.ones_like(text), **options)[0] for text in texts]
            expected = [answer[text.shape[1] :].tolist() for answer, text in zip(whole, texts, strict=True)]
        answers, accepted = decode(target, FuzzedOracle(expected, numbers), prompts, num_new, *how)
        assert answers == expected, (name, number)
        num_accepted += accepted
    assert num_accepted > FUZZED_BATCHES


def test_merged_free_drafts_change_no_token(target, plain):
    for pace in ("fixed", "expected"):
        drafter = load_drafter("+".join(FREE), target, pace=pace, tree_nodes=12, **FREE)
        for _ in range(2):  # the second time it knows the texts
            assert decode(target, drafter, PROMPTS, NUM_NEW)[0] == plain


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=BUDGET_MARKS.get(name, [pytest.mark.slow, pytest.mark.long])) for name in ALONG_THE_TEXT]
)
def test_a_budget_changes_no_token(name, tmp_path, monkeypatch):
    """Weights of mixers that a commit reads stay in memory."""

    def streaming(units, **options):
        return memory_plan._least(memory_plan.plan_memory(units, **options), staging_bytes=0, head_streams=False)

    make_family(name).float().save_pretrained(tmp_path, save_original_format=False)
    monkeypatch.setattr(streamed_loading, "plan_memory", streaming)
    config = TargetConfig(name_or_path=str(tmp_path), dtype="float32", fast_linears=False)
    if name == "zamba2":
        with pytest.raises(ValueError, match="its layers share weights; leave target.memory_budget_gib"):
            load_target(replace(config, memory_budget_gib=1.0), torch.device("cpu"), needs_tokenizer=False)
        return
    memory, streamed = (
        load_target(replace(config, memory_budget_gib=gib), torch.device("cpu"), needs_tokenizer=False) for gib in (None, 1.0)
    )
    assert streamed.stream is not None
    assert len(streamed.stream.units) > 2
    for parameter in memory.model.parameters():  # kernels of experts round by the address, which a file decides
        parameter.data = parameter.data.clone()
    plain, _ = decode(memory, NullDrafter(), PROMPTS, NUM_NEW)
    assert decode(streamed, NullDrafter(), PROMPTS, NUM_NEW)[0] == plain
    expected, actual = (
        decode(target, OracleDrafter(plain, [2, 3, 0], VOCAB), PROMPTS, NUM_NEW) for target in (memory, streamed)
    )
    assert actual == expected
    assert actual[1] > 0
    text = torch.tensor([PROMPTS[0] + plain[0]])
    everywhere = torch.ones_like(text, dtype=torch.bool)
    expected, actual = (
        label_continuations(one, text, everywhere, everywhere, horizon=HORIZON, branches=False) for one in (memory, streamed)
    )
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1].hidden_states, expected[1].hidden_states)


def test_stages_are_refused(target, tmp_path):
    target.model.save_pretrained(tmp_path)
    config = TargetConfig(name_or_path=str(tmp_path))
    skeleton = build_without_weights(config)
    with pytest.raises(
        ValueError, match="recurrent layers, whose states can't hold several drafts at once; leave target.stage_l"
    ):
        EndSlice.load(skeleton, torch.device("cpu"))


def test_room_is_for_the_keys_and_values_of_layers_that_have_some(target, monkeypatch):
    monkeypatch.setattr(TreeCache, "trim", lambda cache: None)
    token_bytes, _ = cache_bytes(target)
    num_layers = {"qwen3_5_text": 2, "falcon_h1": 4, "lfm2": 2}[target.model.config.model_type]
    assert token_bytes == num_layers * 2 * 2 * 8 * 8  # keys and values of two heads of 8, in float64
    assert streamed_loading._token_bytes(target.model) == token_bytes


def test_evicted_answers_are_those_of_requests_alone(target, plain, monkeypatch):
    # 1. Answers of several lengths: all tokens of one of them end answers.
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", sorted({*plain[0][4:6], plain[1][9]}))
    limits = Limits(max_new_tokens=NUM_NEW, max_tokens=64)
    expected = []
    for tokens in plain:
        end = next((place for place, token in enumerate(tokens) if token in target.stop_ids), NUM_NEW)
        expected.append(tokens[: end + 1])
    requests = [Request(id=f"{n}", prompt_ids=torch.tensor(PROMPTS[n % 3]), seed=n) for n in range(12)]
    # 2. A budget for the states and texts of few rows.
    token_bytes, state_bytes = cache_bytes(target)
    assert min(token_bytes, state_bytes) > 0
    config = DistillConfig(engine="batch", kv_budget_gib=3 * (64 * token_bytes + state_bytes) / 2**30)
    taken: list[int] = []
    take = HFTarget.take
    monkeypatch.setattr(HFTarget, "take", lambda self, row: (taken.append(row), take(self, row))[1])
    with open_engine(config, target, limits) as engine:
        assert engine.state_tokens == math.ceil(state_bytes / token_bytes)
        answers = {answer.id: answer.tokens.tolist() for answer in engine.answer(requests)}
    assert answers == {f"{n}": expected[n % 3] for n in range(12)}
    assert len(taken) > 2, "no answer left its batch"
    with pytest.raises(ValueError, match=r"holds the keys and values of 64 tokens, .* with states as large as those of \d+"):
        open_engine(DistillConfig(engine="batch", kv_budget_gib=64.5 * token_bytes / 2**30), target, limits).__enter__()


def test_paths_of_trees():
    parents = torch.tensor([[-1, 0, 0, -1, 3], [-1, 0, -2, -2, -2]])
    nodes = {0: [0], 1: [1, 0], 2: [2, 0], 3: [3], 4: [4, 3]}
    lineage = torch.full((2, 5, 2), -1)
    for row, count in enumerate((5, 2)):
        for node in range(count):
            lineage[row, node, : len(nodes[node])] = torch.tensor(nodes[node])
    assert parents.shape == lineage.shape[:2]
    paths = Paths.of(lineage)
    assert paths.entries.tolist() == [[[0, 1, 2], [0, 1, 3], [0, 4, 5]], [[0, 1, 2], [0, 0, 0], [0, 0, 0]]]
    values = torch.arange(12.0).view(2, 6, 1)
    spread = paths.spread(values)
    assert spread.shape == (6, 3, 1)
    assert torch.equal(paths.gather(spread)[0], values[0])
    assert torch.equal(paths.gather(spread)[1, :3], values[1, :3])
    chain = Paths.of(chain_tree(torch.zeros(2, 4, dtype=torch.long)).lineage)
    assert chain.is_chain
    assert Paths.of(torch.zeros(2, 0, 0, dtype=torch.long)).entries.tolist() == [[[0]], [[0]]]


def test_mixers_are_restored_after_an_error(target, monkeypatch):
    mixers = find_mixers(target.model)
    decode(target, NullDrafter(), PROMPTS, NUM_NEW)
    assert not any("forward" in vars(mixer.module) for mixer in mixers)
    monkeypatch.setattr(type(mixers[-1].module), "forward", lambda self, *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decode(target, NullDrafter(), PROMPTS, NUM_NEW)
    assert not any("forward" in vars(part) for mixer in mixers for part in (mixer.module, *mixer.linears))
    assert all(mixer._scope[name] is function for mixer in mixers for name, (function, _) in mixer._chunked.items())
    chunks = {vars(mixer.module).get("chunk_size") for mixer in mixers} | {c for m in mixers for _, c in m._chunked.values()}
    assert chunks - {None} == CHUNKS[target.model.config.model_type]
