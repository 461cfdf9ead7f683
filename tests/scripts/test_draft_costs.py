"""scripts/draft_costs.py: its arithmetic against the matrix products that real drafters compute."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

SCRIPTS = Path(__file__).parents[2] / "scripts"
DEPTH, WIDTH = 4, 3
OUTPUTS = 20
SEARCH = {"tree_nodes": 8}


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("draft_costs")


@pytest.fixture
def tiny_target(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir)), torch.device("cpu"))


def shape_of(costs: Any, target: HFTarget) -> Any:
    config: Any = target.model.config
    return costs.Shape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab=target.vocab_size,
    )


def products(target: HFTarget, options: dict[str, Any]) -> tuple[int, int]:
    """Return the weights that a draft reads, and its multiplications, counted in a real drafter."""
    # 1. Count what each linear layer reads while the drafter drafts.
    drafter: Any = build_drafter(parse_drafter(options), target).eval().requires_grad_(False)
    if options.get("draft_vocab_size"):
        drafter.choose_draft_vocabulary(torch.ones(target.vocab_size, dtype=torch.long))
    counted: list[tuple[int, int]] = []

    def count(module: nn.Linear, arguments: tuple[torch.Tensor, ...], _: Any) -> None:
        counted.append((module.weight.numel(), arguments[0].numel() // module.in_features))

    propose, drafts = drafter.propose, []

    def counting(*arguments: Any, **named: Any) -> Any:
        linears = {module for module in [*drafter.modules(), target.head] if isinstance(module, nn.Linear)}
        hooks = [linear.register_forward_hook(count) for linear in linears]
        counted.clear()
        proposal = propose(*arguments, **named)
        for hook in hooks:
            hook.remove()
        drafts.append((sum(weights for weights, _ in counted), sum(weights * rows for weights, rows in counted)))
        return proposal

    # 2. The first draft reads what the prefill left: the prompt's last token, for a draft model also the next one.
    drafter.propose = counting
    prompts = [torch.arange(5, 13)]
    list(generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=4))
    return drafts[0]


CASES: list[tuple[dict[str, Any], Callable[[Any, Any], Any]]] = [
    (
        {"kind": "redrafter", "initial_state": "zero", "beam_width": WIDTH, "beam_length": DEPTH},
        lambda costs, shape: costs.redrafter(shape, outputs=shape.vocab, exit_width=2 * shape.hidden, depth=DEPTH, width=WIDTH),
    ),
    (
        {
            "kind": "redrafter",
            "initial_state": "zero",
            "exit_width": 16,
            "draft_vocab_size": OUTPUTS,
            "beam_width": WIDTH,
            "beam_length": DEPTH,
        },
        lambda costs, shape: costs.redrafter(shape, outputs=OUTPUTS, exit_width=16, depth=DEPTH, width=WIDTH),
    ),
    ({"kind": "medusa"}, lambda costs, shape: costs.medusa(shape, share_head=False, depth=DEPTH)),
    ({"kind": "medusa", "share_head": True}, lambda costs, shape: costs.medusa(shape, share_head=True, depth=DEPTH)),
    (
        {"kind": "eagle3", "feature_layers": [0, 1], "draft_vocab_size": OUTPUTS, "depth": DEPTH, "top_k": WIDTH},
        lambda costs, shape: costs.eagle3(shape, outputs=OUTPUTS, depth=DEPTH, width=WIDTH, num_features=2, new=1),
    ),
    (
        {"kind": "draft_model", "num_layers": 2, "length": DEPTH, "top_k": WIDTH},
        lambda costs, shape: costs.draft_model(shape, depth=DEPTH, width=WIDTH, new=2),
    ),
    *(
        (
            {
                "kind": "block",
                "feature_layers": [0, 1],
                "num_layers": 2,
                "correction": correction,
                "rank": 6,
                "draft_vocab_size": size,
                "num_slots": slots,
                "width": WIDTH,
                "candidates": WIDTH,
            },
            lambda costs, shape, correction=correction, size=size, slots=slots: costs.block(
                shape,
                outputs=size or shape.vocab,
                correction=correction,
                depth=DEPTH,
                width=WIDTH,
                num_layers=2,
                num_features=2,
                num_slots=slots,
                rank=6,
                new=1,
            ),
        )
        for correction, size, slots in (
            ("rnn", None, None),
            ("rnn", OUTPUTS, None),
            ("rnn", None, 1),
            ("bilinear", None, None),
            ("bilinear", OUTPUTS, 2),
            ("none", None, None),
        )
    ),
]


@pytest.mark.parametrize(
    ("options", "cost_of"), CASES, ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else ""
)
def test_a_drafts_cost_is_that_of_the_products_a_drafter_computes(
    costs: Any, tiny_target: HFTarget, options: dict[str, Any], cost_of: Callable[[Any, Any], Any]
) -> None:
    cost = cost_of(costs, shape_of(costs, tiny_target))
    weights, multiplications = products(tiny_target, {**options, **SEARCH})
    assert cost.weights == weights
    assert cost.flops(0) == 2 * multiplications


def test_the_shapes_are_those_of_the_models_that_they_name(costs: Any) -> None:
    for shape, parameters in ((costs.LLAMA_8B, 8_030_261_248), (costs.LLAMA_1B, 1_235_814_400)):
        config = LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            tie_word_embeddings=shape is costs.LLAMA_1B,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters, "not the published model"
        matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        assert costs.target_pass(shape, 1).weights == matrices


def test_the_cache_of_a_pass_grows_by_a_tokens_keys_and_values_in_each_layer(costs: Any) -> None:
    kib = 1024
    eight, small = costs.LLAMA_8B, costs.LLAMA_1B
    grown = {
        "target": (costs.target_pass(eight, 41), 128 * kib),
        "eagle3": (costs.eagle3(eight, outputs=1, depth=6), 6 * 4 * kib),
        "block": (costs.block(eight, outputs=1, correction="rnn", num_layers=5), 5 * 4 * kib),
        "draft_model": (costs.draft_model(small, depth=5), 5 * 32 * kib),
        "redrafter": (costs.redrafter(eight, outputs=1, exit_width=1), 0),
        "medusa": (costs.medusa(eight, share_head=True), 0),
    }
    for name, (cost, expected) in grown.items():
        assert cost.bytes_read(1001) - cost.bytes_read(1000) == expected, name


def test_attention_costs_four_operations_per_head_width_query_and_key(costs: Any) -> None:
    shape = costs.LLAMA_8B
    one = costs.target_pass(shape, 1)
    assert one.flops(1000) - one.flops(0) == 1000 * 4 * shape.layers * shape.heads * shape.head_dim
    slots = costs.block(shape, outputs=1, correction="none", depth=7)
    assert slots.flops(1) - slots.flops(0) == (costs.NEW_TOKENS + 7) * 4 * shape.heads * shape.head_dim


def test_the_record_has_the_figures_of_each_context_and_the_marks(costs: Any, tmp_path: Path) -> None:
    costs.run(tmp_path)
    record = json.loads((tmp_path / "draft_costs.json").read_text())
    assert (tmp_path / "draft_costs.png").is_file()
    assert all(len(row["contexts"]) == len(costs.CONTEXTS) for row in record["rows"])
    assert max(map(len, record["tables"].splitlines())) <= 80
    by_name = {(row["drafter"], row["outputs"]): row for row in record["rows"]}
    share = by_name["block, bilinear", 32_000]["contexts"][0]["share"]
    assert share == pytest.approx(0.0580, abs=5e-4)  # (84 + 218 + 131 + 2) M of 7,505 M, and the caches
    judged = {mark["rule"]: mark["reached"] for mark in record["marks"]}
    assert judged["block, bilinear, head of 32k: a draft costs at most 0.12 of a pass"]
    assert not judged["block, recurrent, head of 128k: a draft costs at most 0.12 of a pass"]
