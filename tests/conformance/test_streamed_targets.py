"""Targets whose layers are read in each pass: the same text as in memory, from all drafters.

Both targets run the same operations on the same numbers, so even their logits are equal bit for
bit.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.data.config import DataConfig
from outrider.data.suites import Prompt, PromptSet
from outrider.distill.config import DistillConfig
from outrider.distill.label.run import distill
from outrider.eval.certify import certificate, samples
from outrider.eval.measure.plan import Method
from outrider.models.decoding import GreedyAcceptance, RowSeeds, Sampling, SpeculativeSampling, generate
from outrider.models.drafters import DRAFTERS as DRAFTER_KINDS
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.memory_plan import WeightPlace
from outrider.models.llm.weight_reader import WeightFiles
from outrider.train.config import TrainConfig
from outrider.train.run import train

from ..decoded import texts_of
from ..streamed_targets import load_in_memory, load_streamed, stream_of
from ..tiny_models import save_tiny_target
from .test_architectures import CASES, make_model
from .test_drafters import FREE, FROM_RANDOM

NUM_LAYERS = 6
NUM_NEW = 14
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama-gqa": {"num_hidden_layers": NUM_LAYERS},
    "qwen3": {"num_hidden_layers": NUM_LAYERS},
    "gemma3": {
        "num_hidden_layers": NUM_LAYERS,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "gpt-neox": {"num_hidden_layers": NUM_LAYERS},
    "gpt2": {"n_layer": NUM_LAYERS},
}
"""Cases of `test_architectures`, with more layers."""


@dataclass(frozen=True)
class Placing:
    """Type of the stored weights, the budget, and how many units of each kind result."""

    stored: str
    num_staying: int
    resident: int
    kept: int
    head_streams: bool = False
    computed: str = "float32"


PLACINGS = {
    "all streamed": Placing("float32", num_staying=0, resident=0, kept=0),
    "some resident": Placing("float32", num_staying=3, resident=3, kept=0),
    "bf16 streamed": Placing("bfloat16", num_staying=0, resident=0, kept=0),
    "bf16 kept": Placing("bfloat16", num_staying=3, resident=0, kept=3),
    "head streamed": Placing("float32", num_staying=0, resident=0, kept=0, head_streams=True),
    "bf16 passes": Placing("bfloat16", num_staying=2, resident=2, kept=0, computed="bfloat16"),
}
QUICK = {
    "qwen3": "bf16 kept",
    "gemma3": "some resident",
    "gpt2": "bf16 streamed",
}
"""The placing of each architecture's quick test; the others are slow tests."""
PROMPTS = [list(range(3, 12)), [50, 51, 52, 50, 51, 52, 50], [97, 3, 14, 15, 92, 65, 35, 89], [7, 7, 7]]
RULES = {"greedy": GreedyAcceptance(), "sampled": SpeculativeSampling(sampling=Sampling(temperature=1.2, top_p=0.95))}
MERGES = {"fixed": "suffix+recycling", "expected": "prompt_lookup+suffix+recycling"}
ITSELF: dict[str, tuple[str, dict[str, Any]]] = {
    "itself": ("", {"tree_nodes": 8}),
    "itself and suffix": ("+suffix", {"tree_nodes": 8}),
    "itself growing": ("", {"tree_nodes": 12, "pace": "expected"}),
}
"""The target in memory drafts for itself: nearly all of its tokens are accepted."""
DRAFTERS = ["plain", *FREE, *MERGES, *ITSELF, *DRAFTER_KINDS]
"""Drafters of each kind and of each use of the target; variants of a kind use it in the same way."""
QUICK_DRAFTERS = ["recycling", "itself"]
CLOCKED = {"expected", "itself growing"}
"""Their trees depend on measured seconds."""
WITH_HEAD = {"block", "medusa", "mtp", "eagle"}
"""Drafters that use the target's head outside passes."""
LLAMA_LIKE = {"llama-gqa", "qwen3"}
"""Architectures whose layers EAGLE and the block drafter can copy."""
WITH_LAYERS = {"block", "eagle", "eagle3", "mtp"}
"""Drafters with layers of the target's form."""


@dataclass
class Pair:
    """A target in memory, and the same target streamed."""

    folder: Path
    memory: HFTarget
    streamed: HFTarget
    plain: dict[str, list[list[int]]] = field(default_factory=dict)
    """Answers of plain decoding in memory, by rule."""

    def drafter(self, kind: str, target: HFTarget) -> Any:
        """Make a drafter: a fresh one of a kind, a training-free one, the target, or a merge."""
        torch.manual_seed(0)
        if kind == "plain":
            return NullDrafter()
        if kind in FREE:
            return load_drafter(kind, target, **FREE[kind])
        if kind in MERGES:
            return load_drafter(MERGES[kind], target, pace=kind, tree_nodes=12)
        if kind in ITSELF:
            suffix, options = ITSELF[kind]
            return load_drafter(f"draft_model:{self.folder}{suffix}", target, **options)
        return build_drafter(parse_drafter({"kind": kind, **FROM_RANDOM[kind]}), target).to(target.dtype).eval()


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Callable[[str, str], Pair]:
    """Return a function that loads both targets, each once, from files of a few tensors."""

    @cache
    def saved(architecture: str, stored: str) -> Path:
        name, options, _ = CASES[architecture]
        folder = tmp_path_factory.mktemp(architecture)
        model = make_model(name, {**options, **ARCHITECTURES[architecture]}, "sdpa")
        model.to(getattr(torch, stored)).save_pretrained(folder, max_shard_size="50KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        return folder

    @cache
    def load(architecture: str, name: str) -> Pair:
        placing = PLACINGS[name]
        folder = saved(architecture, placing.stored)
        streamed = load_streamed(
            folder, num_staying=placing.num_staying, dtype=placing.computed, head_streams=placing.head_streams
        )
        plan = stream_of(streamed).plan
        counts = {place: plan.count(place) for place in WeightPlace}
        num_streamed = NUM_LAYERS - placing.resident - placing.kept
        assert counts == {
            WeightPlace.RESIDENT: placing.resident,
            WeightPlace.KEPT: placing.kept,
            WeightPlace.STREAMED: num_streamed,
        }
        assert placing.head_streams == any(unit.is_head and unit.place is WeightPlace.STREAMED for unit in plan.units)
        return Pair(folder, load_in_memory(folder, dtype=placing.computed), streamed)

    return load


def answers(target: HFTarget, drafter: Any, prompts: Sequence[Sequence[int]], rule: str) -> tuple[list[list[int]], int]:
    """Return all rows' tokens, and how many draft tokens were accepted."""
    texts = [torch.tensor(prompt) for prompt in prompts]
    seeds = RowSeeds([sum(prompt) for prompt in prompts])
    steps = list(generate(target, drafter, RULES[rule], texts, max_new_tokens=NUM_NEW, generator=seeds))
    return texts_of(steps, len(prompts)), sum(sum(step.num_accepted) for step in steps)


def require_equal_texts(pair: Pair, kind: str, *, is_narrow: bool) -> int:
    """Require the text of the target in memory, alone and in a batch; return how much was accepted."""
    total = 0
    drafter = pair.drafter(kind, pair.streamed)
    for rule in RULES:
        if is_narrow:  # it rounds trees in another way than texts
            expected, _ = answers(pair.memory, pair.drafter(kind, pair.memory), PROMPTS, rule)
        else:
            if rule not in pair.plain:
                pair.plain[rule], _ = answers(pair.memory, NullDrafter(), PROMPTS, rule)
            expected = pair.plain[rule]
        assert len({tuple(tokens) for tokens in expected}) > 1, "the model answers prompts alike"
        actual, num_accepted = answers(pair.streamed, drafter, PROMPTS, rule)
        assert actual == expected, (kind, rule)
        if not is_narrow:
            assert answers(pair.streamed, drafter, PROMPTS[1:2], rule)[0] == expected[1:2], (kind, rule)
        total += num_accepted
    return total


@pytest.mark.parametrize(("architecture", "placing"), QUICK.items())
def test_a_streamed_target_decodes_the_text_of_the_target_in_memory(pair, architecture, placing):
    both = pair(architecture, placing)
    before = stream_of(both.streamed).stats
    for kind in QUICK_DRAFTERS:
        assert require_equal_texts(both, kind, is_narrow=False) > 0, kind
    stats = stream_of(both.streamed).stats - before
    assert stats.passes > 2 * NUM_NEW
    assert stats.restarts == 0, "a pass broke off"


def test_drafting_while_a_pass_waits_changes_no_text(pair, monkeypatch):
    both, read = pair("qwen3", "bf16 kept"), WeightFiles.read

    def slowly(*args: Any) -> None:
        time.sleep(0.02)
        read(*args)

    monkeypatch.setattr(WeightFiles, "read", slowly)
    before = stream_of(both.streamed).stats
    drafter = both.drafter("itself growing", both.streamed)
    drafter.clock = lambda: 0.0  # on a loaded machine a draft pass may take longer than the wait
    expected, _ = answers(both.memory, NullDrafter(), PROMPTS[:1], "greedy")
    actual, num_accepted = answers(both.streamed, drafter, PROMPTS[:1], "greedy")
    stats = stream_of(both.streamed).stats - before
    assert actual == expected
    assert num_accepted > 0
    assert stats.drafts > 0, "no draft pass ran during a wait"


def fits(architecture: str, placing: str, kind: str) -> bool:
    return not (
        (architecture not in LLAMA_LIKE and kind in WITH_LAYERS)
        or (placing == "head streamed" and (architecture in {"gpt2", "gemma3"} or kind in WITH_HEAD))  # a tied head stays
        or (placing == "bf16 passes" and kind in CLOCKED)
    )


COMBINATIONS = list(itertools.islice(zip(itertools.cycle(ARCHITECTURES), itertools.cycle(PLACINGS), strict=False), 30))
EVERY_DRAFTER = [
    pytest.param(
        *next(pair for pair in COMBINATIONS[index:] + COMBINATIONS[:index] if fits(*pair, kind)), kind, marks=pytest.mark.slow
    )
    for index, kind in enumerate(DRAFTERS)
]
"""Each drafter once. The combinations change with it, so that each architecture and each placing comes several times."""


@pytest.mark.parametrize(("architecture", "placing", "kind"), EVERY_DRAFTER)
def test_every_drafter_decodes_the_same_text_from_a_streamed_target(pair, architecture, placing, kind):
    require_equal_texts(pair(architecture, placing), kind, is_narrow=placing == "bf16 passes")


def test_drafters_that_need_a_streamed_head_are_an_error(pair):
    both = pair("llama-gqa", "head streamed")
    for kind in sorted(WITH_HEAD):
        with pytest.raises(ValueError, match="raise target.memory_budget_gib"):
            answers(both.streamed, both.drafter(kind, both.streamed), PROMPTS, "greedy")


def test_eagle3_has_a_head_of_its_own_and_drafts_where_the_targets_is_streamed(pair):
    require_equal_texts(pair("llama-gqa", "head streamed"), "eagle3", is_narrow=False)


@pytest.mark.parametrize(("architecture", "placing"), QUICK.items())
def test_plain_answers_are_those_of_transformers_generate(pair, architecture, placing):
    """The hooks also serve passes that aren't ours."""
    both, prompt = pair(architecture, placing), PROMPTS[0]
    expected, actual = (
        target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW)[0, len(prompt) :].tolist()
        for target in (both.memory, both.streamed)
    )
    assert expected == actual == answers(both.streamed, NullDrafter(), [prompt], "greedy")[0][0]


@pytest.mark.parametrize(("architecture", "placing"), QUICK.items())
def test_states_and_logits_are_equal_bit_for_bit(pair, architecture, placing):
    """Layers' inputs end passes early, and the next pass begins with the first layer's weights."""
    both = pair(architecture, placing)
    text = torch.tensor([PROMPTS[0], PROMPTS[2] + [1]])
    before = stream_of(both.streamed).stats
    for layers in ((3,), (0, 2), (1,), (5,)):
        expected, actual = (target.layer_inputs(layers, input_ids=text) for target in (both.memory, both.streamed))
        assert torch.equal(expected, actual)
        expected, actual = (target.hidden_states(text, layers) for target in (both.memory, both.streamed))
        assert all(map(torch.equal, expected, actual))
        with torch.no_grad():
            assert torch.equal(both.memory.model(text).logits, both.streamed.model(text).logits)
    assert (stream_of(both.streamed).stats - before).restarts > 0


# --- stages


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory) -> Path:
    """Save a target of six layers with a tokenizer."""
    directory = tmp_path_factory.mktemp("six_layers")
    options = {"num_hidden_layers": NUM_LAYERS, "initializer_range": 0.2}
    return save_tiny_target(directory, LlamaForCausalLM, LlamaConfig, tiny_tokenizer, **options)


@pytest.fixture(scope="module")
def both(folder) -> tuple[HFTarget, HFTarget]:
    return load_in_memory(folder, needs_tokenizer=True), load_streamed(folder, num_staying=2, needs_tokenizer=True)


def contents(directory: Path) -> dict[str, bytes]:
    """Read all files of labels, except statistics of time."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if "stats" not in path.name}


@pytest.fixture(scope="module")
def labels(both, tmp_path_factory) -> list[Path]:
    """Label the same texts with each target, without states: training computes them."""
    directory = tmp_path_factory.mktemp("labels")
    source = directory / "chats.jsonl"
    chats = [
        {
            "id": f"{i}",
            "messages": [{"role": "user", "content": "ab" * (i + 1)}, {"role": "assistant", "content": f"xyz {i}" * 4}],
        }
        for i in range(6)
    ]
    source.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    data = DataConfig(source="messages", path=str(source), max_length=60)
    for target, name in zip(both, ("memory", "streamed"), strict=True):
        for features in ("none", "last_hidden"):
            config = DistillConfig(horizon=4, features=features, shard_examples=4, batch_tokens=128)
            distill(config, data, target, directory / f"{name}_{features}", Accelerator(cpu=True))
    return [directory / f"{name}_{features}" for features in ("none", "last_hidden") for name in ("memory", "streamed")]


def test_labels_are_equal_to_the_byte(labels):
    memory, streamed, *with_states = map(contents, labels)
    assert len(memory) >= 3
    assert memory == streamed
    assert with_states[0] == with_states[1]


@pytest.mark.parametrize("kind", ["redrafter", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_training_on_a_streamed_target_gives_the_same_weights(both, labels, kind, tmp_path):
    """The states aren't in the labels, so each batch reads the target."""
    options = {"redrafter": {"exit_width": 16, "num_blocks": 1}, "eagle3": {"init": "random", "depth": 2}}[kind]
    weights = []
    for target, shards in zip(both, labels, strict=False):
        config = TrainConfig(steps=3, batch_size=2, learning_rate=1e-2)
        out = tmp_path / shards.name
        train(
            config,
            parse_drafter({"kind": kind, **options}),
            target,
            shards,
            out / "train",
            out / "drafter",
            Accelerator(cpu=True),
        )
        weights.append((out / "drafter" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_streamed_target_is_certified(both, tmp_path, monkeypatch):
    _, streamed = both
    monkeypatch.setattr(samples, "NUM_SAMPLED_PROMPTS", 1)
    prompts = tuple(Prompt(id=str(i), category="", turns=(f"abc {i}",)) for i in range(2))
    methods = [Method(name="recycling", label="recycling", drafter=load_drafter("recycling", streamed, **FREE["recycling"]))]
    suites = [PromptSet(name="two", revision="", prompts=prompts)]
    checks = certificate.decoding_checks(streamed, methods, suites, max_new_tokens=8)
    lines = certificate.run_checks(checks, tmp_path / "unfinished", {})
    assert len(lines) == 4
    assert all(line.passed for line in lines), lines
    assert all("streamed" in line.subject for line in lines)
