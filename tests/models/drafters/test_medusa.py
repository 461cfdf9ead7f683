"""Medusa's heads, weighted loss and static trees, each against a slow and plain version."""

import itertools
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn import functional as F

from outrider import conf
from outrider.data.types import UNKNOWN, DrafterBatch
from outrider.models.drafters import build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.drafters.losses import LossKind
from outrider.models.drafters.medusa import Medusa, likeliest_paths
from outrider.models.drafters.objective import HIT_RANKS, Loss, Objective

PROMPTS = [torch.tensor(prompt) for prompt in ([1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47])]
SHAPES = [
    {},
    {"num_layers": 2},
    {"share_head": True},
    {"head_rank": 8},
]


def make(target, *, noise: float = 0.3, **options) -> Medusa:
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": "medusa", "num_heads": 3, **options}), target).double()
    # The blocks start as the identity, which would hide mistakes in them.
    for parameter in drafter.blocks.parameters():
        torch.nn.init.normal_(parameter, std=noise)
    return drafter


def make_batch(target, tokens: list[list[int]]) -> DrafterBatch:
    """Make one row whose first positions have the given continuations."""
    seq = len(tokens) + 1
    continuations = torch.full((1, seq, len(tokens[0])), UNKNOWN)
    continuations[0, :-1] = torch.tensor(tokens)
    return DrafterBatch(
        input_ids=torch.zeros(1, seq, dtype=torch.long),
        attention_mask=torch.ones(1, seq, dtype=torch.bool),
        positions=(torch.arange(seq) < len(tokens))[None],
        continuations=continuations,
        hidden_states=torch.randn(1, seq, target.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    )


def slow_log_probs(drafter: Medusa, target, hidden: torch.Tensor, head: int) -> torch.Tensor:
    """Compute the log-probabilities of head number `head`, written out as in the papers."""
    config, x = drafter.config, hidden.double()
    for block in drafter.blocks[head]:
        x = x + F.silu(block.linear.weight @ x + block.linear.bias)
    if config.share_head:
        logits = target.head.weight @ x
    elif config.head_rank is not None:
        down, up = drafter.lm_heads[0]
        logits = up.weight @ (down.weight @ x)
    else:
        logits = drafter.lm_heads[head].weight @ x
    return logits.log_softmax(-1)


# --- heads and loss


@pytest.mark.parametrize("options", SHAPES)
def test_loss_equals_the_formulas_written_out(target, options):
    drafter = make(target, **options)
    for head in drafter.lm_heads:  # fresh heads are equal, which would hide a wrong order
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)
    texts = [[7, 8, 9, 10, 3], [11, 12, UNKNOWN, UNKNOWN, UNKNOWN], [5, 6, 2, UNKNOWN, UNKNOWN]]
    batch = make_batch(target, texts)
    drafter.requires_grad_(False)
    loss = drafter.loss(batch, Objective())
    sums, counts = [0.0] * 3, [0] * 3
    for row, text in enumerate(texts):
        for head in range(3):
            label = text[head + 1]
            if label != UNKNOWN:
                sums[head] -= 0.8**head * float(slow_log_probs(drafter, target, batch.hidden_states[0, row], head)[label])
                counts[head] += 1
    assert loss.sums.tolist() == pytest.approx(sums, rel=1e-5)
    assert loss.counts.tolist() == counts == [3, 2, 1]
    hidden = batch.hidden_states[0, :3]
    slow = torch.stack([torch.stack([slow_log_probs(drafter, target, h, head) for head in range(3)]) for h in hidden])
    torch.testing.assert_close(drafter.logits(hidden).log_softmax(-1), slow, rtol=1e-6, atol=1e-6)


def test_every_head_starts_with_the_targets_logits(target):
    hidden = torch.randn(4, target.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    num_checked = 0
    for options in [*SHAPES, {"head_rank": target.hidden_size}]:
        drafter = build_drafter(parse_drafter({"kind": "medusa", **options}), target).double()
        if options.get("head_rank") != 8:
            expected = target.head(hidden)[:, None].expand(-1, 4, -1)
            torch.testing.assert_close(drafter.logits(hidden), expected, rtol=1e-4, atol=1e-4)
            num_checked += 1
    assert num_checked == len(SHAPES)


def test_a_low_rank_head_starts_as_the_best_approximation(target):
    down, up = build_drafter(parse_drafter({"kind": "medusa", "head_rank": 8}), target).lm_heads[0]
    u, s, v = torch.linalg.svd(target.head.weight.float(), full_matrices=False)
    torch.testing.assert_close(up.weight @ down.weight, u[:, :8] @ s[:8].diag() @ v[:8], rtol=1e-3, atol=1e-4)


def test_a_shared_head_is_neither_copied_saved_nor_trained(target):
    drafter = make(target, share_head=True)
    assert all("blocks" in name or name == "accuracies" for name in drafter.state_dict())
    head = target.head.weight
    assert all(parameter.shape != head.shape for parameter in drafter.parameters())
    drafter.loss(make_batch(target, [[7, 8, 9, 10]]), Objective()).sums.sum().backward()
    assert head.grad is None
    assert all(parameter.grad.any() for parameter in drafter.parameters())


@pytest.mark.parametrize("loss", LossKind)
def test_the_decay_weighs_the_sums_of_every_objective_and_nothing_else(target, loss, monkeypatch):
    batch, objective = make_batch(target, [[7, 8, 9, 10], [3, 4, 5, UNKNOWN]]), Objective(loss=loss, head=target.head)
    with torch.no_grad():
        decayed = make(target).loss(batch, objective)
        monkeypatch.setattr("outrider.models.drafters.objective.LOSS_DECAY", 1.0)
        plain = make(target).loss(batch, objective)
    torch.testing.assert_close(decayed.sums, plain.sums * torch.tensor([1.0, 0.8, 0.64]))
    for name in ("counts", "hits", "joint_hits"):
        assert torch.equal(getattr(decayed, name), getattr(plain, name))


def test_heads_without_labels_at_their_depth_are_an_error(target):
    with pytest.raises(ValueError, match=r"is 3 and distill\.horizon 3, .* train only 2 heads.*distill\.horizon of at least 4"):
        make(target).loss(make_batch(target, [[7, 8, 9]]), Objective())


def test_deeper_labels_than_heads_are_left_out(target):
    batch = make_batch(target, [[7, 8, 9, 10, 11, 12]])
    assert make(target).loss(batch, Objective()).counts.tolist() == [1, 1, 1]


# --- trees


def expected_accepted(paths: list[tuple[int, ...]], accuracies: list[list[float]]) -> float:
    products = 0.0
    for path in paths:
        product = 1.0
        for head, rank in enumerate(path):
            product *= accuracies[head][rank]
        products += product
    return products


def test_no_other_tree_of_the_same_size_has_more_expected_accepted_tokens():
    generator = random.Random(0)
    everything = [path for length in (1, 2, 3) for path in itertools.product(range(2), repeat=length)]
    num_checked = 0
    for _ in range(4):
        accuracies = [[generator.random() / 2 for _ in range(2)] for _ in range(3)]
        for num_nodes in (1, 3, 4):
            trees = (
                tree
                for tree in itertools.combinations(everything, num_nodes)
                if all(len(path) == 1 or path[:-1] in tree for path in tree)
            )
            best = max(expected_accepted(list(tree), accuracies) for tree in trees)
            assert expected_accepted(likeliest_paths(accuracies, num_nodes), accuracies) == pytest.approx(best)
            num_checked += 1
    assert num_checked == 12


def test_a_tree_small_enough_to_check_by_eye():
    assert likeliest_paths([[0.6, 0.2], [0.5, 0.3]], 3) == [(0,), (0, 0), (1,)]
    assert len(likeliest_paths([[0.6, 0.2], [0.5, 0.3]], 99)) == 2 + 4, "there are no more"


def proposed(drafter: Medusa, hidden: torch.Tensor) -> list[list[int]]:
    """List the paths of the first row's draft tree, as tokens."""
    with torch.inference_mode():
        tree, _ = drafter.propose(hidden, torch.zeros(len(hidden), dtype=torch.long))
    tokens, lineage = tree.tokens[0].tolist(), tree.lineage[0].tolist()
    return [[tokens[node] for node in reversed(line) if node >= 0] for line in lineage]


def test_a_node_holds_the_token_of_its_rank(target):
    paths = [[1, 0, 12], [0], [1], [1, 0], [0, 2]]
    drafter = make(target, tree_paths=paths)
    hidden = torch.randn(2, target.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ranked = [slow_log_probs(drafter, target, hidden[0], head).argsort(descending=True).tolist() for head in range(3)]
    expected = [[ranked[head][rank] for head, rank in enumerate(path)] for path in paths]
    assert sorted(proposed(drafter, hidden)) == sorted(expected)
    assert drafter.max_nodes == 5


def make_measured(shares: list[list[float]]) -> Loss:
    """Make the loss record of heads that are right at the first ranks with these shares."""
    exact = torch.zeros(len(shares), HIT_RANKS)
    for head, row in enumerate(shares):
        exact[head, : len(row)] = torch.tensor(row)
    return Loss(
        sums=torch.ones(len(shares)),
        counts=torch.full((len(shares),), 1000),
        hits=(exact.cumsum(1) * 1000).round().long(),
        joint_hits=torch.zeros(len(shares), dtype=torch.long),
    )


def test_the_measured_accuracies_choose_the_tree_for_any_budget(target, tmp_path):
    shares = [[0.5, 0.2, 0.08], [0.3, 0.2], [0.01]]
    drafter = make(target, tree_nodes=4)
    drafter.calibrate(make_measured(shares))
    assert drafter.accuracies[:, 0].tolist() == pytest.approx([0.5, 0.3, 0.01])
    assert drafter.accuracies[:, 1].tolist() == pytest.approx([0.2, 0.2, 0.0])
    assert drafter.max_nodes == 4
    save_drafter(drafter, tmp_path, target.identity)
    hidden = torch.randn(2, target.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    num_checked = 0
    for budget in (1, 4, 7, 30):
        paths = likeliest_paths(drafter.accuracies.tolist(), budget)
        chosen = proposed(load_drafter(tmp_path, target, tree_nodes=budget), hidden)
        expected = proposed(load_drafter(tmp_path, target, tree_paths=[list(path) for path in paths]), hidden)
        assert sorted(chosen) == sorted(expected)
        assert len(chosen) == budget
        num_checked += 1
    assert num_checked == 4
    assert likeliest_paths(drafter.accuracies.tolist(), 4) == [(0,), (1,), (0, 0), (0, 1)]


def test_a_head_without_labels_has_accuracy_zero(target):
    drafter = make(target)
    measured = make_measured([[0.5], [0.5], [0.0]])
    measured.counts[2] = 0
    drafter.calibrate(measured)
    assert drafter.accuracies[2].tolist() == [0.0] * HIT_RANKS


@pytest.mark.parametrize("value", [-0.5, 1.5])
def test_accuracies_outside_zero_to_one_are_an_error(target, tmp_path, value):
    drafter = make(target)
    drafter.accuracies[1, 0] = value
    save_drafter(drafter, tmp_path, target.identity)
    with pytest.raises(ValueError, match="accuracies must be shares"):
        load_drafter(tmp_path, target)


# --- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0, "num_layers": 0}, "drafter.num_heads=0: must be above 0\ndrafter.num_layers=0"),
        ({"tree_nodes": 0}, "drafter.tree_nodes=0: must be at least 1"),
        ({"tree_nodes": 10**9}, "must be at most 4096"),
        ({"head_rank": 4, "share_head": True}, "leave one of them out"),
        ({"head_rank": 33}, "more than the target's width of 32"),
        ({"tree_paths": []}, r"tree_paths=\[\]: must not be empty"),
        ({"tree_paths": [[0], [1, 0]]}, r"has \[1, 0\] but not its parent \[1\]"),
        ({"tree_paths": [[0], [1], [0]]}, r"has \[0\] twice"),
        ({"tree_paths": [[0], []]}, r"tree_paths\[1\]=\[\]: must not be empty"),
        ({"tree_paths": [[-1]]}, r"tree_paths\[0\]\[0\]=-1: must be at least 0"),
        ({"num_heads": 1, "tree_paths": [[0], [0, 0]]}, "more ranks than the 1 heads"),
        ({"tree_paths": [[300]]}, "has rank 300, and the target has 300 tokens"),
        ({"tree_paths": [["0"]]}, "must be a whole number"),
        ({"num_head": 4}, "no option num_head"),
    ],
)
def test_impossible_options_of_medusa_are_named(target, options, message):
    with pytest.raises(ValueError, match=message):
        build_drafter(parse_drafter({"kind": "medusa", **options}), target)


@pytest.mark.parametrize(
    ("kind", "unnamed"), [("block", {"depth"}), ("draft_model", {"architecture"}), ("eagle", set()), ("medusa", set())]
)
def test_an_options_file_holds_the_defaults(kind, unnamed):
    options = OmegaConf.to_container(OmegaConf.load(Path(conf.__file__).parent / "drafter" / f"{kind}.yaml"))
    defaults = parse_drafter({"kind": kind})
    assert parse_drafter(options) == defaults
    assert asdict(defaults.config).keys() - options.keys() == unnamed
