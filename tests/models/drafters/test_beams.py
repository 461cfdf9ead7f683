"""The beam search and both ways to make a tree of it, against a slow search.

The slow search extends one beam at a time.
"""

import itertools

import pytest
import torch

from outrider.models.decoding import DraftTree
from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters.beams import (
    SearchTree,
    beam_search,
    likeliest_successors,
    pack_likeliest,
    pack_survivors,
)
from outrider.models.drafters.options import RedrafterConfig
from outrider.models.drafters.redrafter import Redrafter
from outrider.models.drafters.vocabulary import DraftVocabulary

VOCAB = 7


class FadingDrafter:
    """Drafter whose state is a fading sum of one-hot tokens.

    A token's score depends on all tokens before it, and less on those further back.
    """

    def __init__(self, seed: int = 0, vocab: int = VOCAB) -> None:
        self.table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))
        self.vocabulary = DraftVocabulary(size=vocab)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens, len(self.table)).float()

    def first_state(self, embedding: torch.Tensor) -> torch.Tensor:
        return embedding

    def next_state(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        return state / 2 + embedding

    def logits(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return hidden + state @ self.table


def search(drafter: FadingDrafter, *, width: int, length: int, rows: int = 2, top_k: int | None = None) -> SearchTree:
    hidden = torch.randn(rows, len(drafter.table), generator=torch.Generator().manual_seed(9))
    return beam_search(drafter, hidden[:, None].expand(-1, length, -1), torch.arange(rows), width=width, top_k=top_k)


def slow_levels(
    drafter: FadingDrafter, row: int, *, width: int, length: int, top_k: int = VOCAB
) -> list[dict[tuple[int, ...], float]]:
    """Return the beams of each depth, likeliest first, with their log-probabilities.

    Only the `top_k` likeliest tokens follow a beam, and share the whole probability.
    """
    hidden = torch.randn(row + 1, len(drafter.table), generator=torch.Generator().manual_seed(9))[row]
    beams: dict[tuple[int, ...], float] = {(): 0.0}
    levels = []
    for _ in range(length):
        grown = {}
        for path, score in beams.items():
            texts = [row, *path]
            state = sum(drafter.embed(torch.tensor(token)) / 2**age for age, token in enumerate(reversed(texts)))
            logits = hidden + state @ drafter.table
            kept = logits.argsort(descending=True)[:top_k].tolist()
            log_probs = logits[kept].log_softmax(-1).tolist()
            grown.update({(*path, token): score + value for token, value in zip(kept, log_probs, strict=True)})
        beams = dict(sorted(grown.items(), key=lambda item: -item[1])[:width])
        levels.append(beams)
    return levels


def paths(tokens: torch.Tensor, parents: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the path of every node of one row, without padding."""
    node_paths: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        if token == NO_NODE:
            assert parent == NO_NODE
            continue
        assert parent < node, "a parent must come before its child"
        node_paths.append((*(node_paths[parent] if parent != NO_NODE else ()), token))
    assert len(node_paths) == len(set(node_paths)), "a prefix is in the tree twice"
    return node_paths


def row_paths(tree: DraftTree | SearchTree, row: int) -> list[tuple[int, ...]]:
    return paths(tree.tokens[row], tree.parents[row])


SHAPES = [(1, 3), (3, 1), (3, 4), (6, 3), (40, 3)]


@pytest.mark.parametrize("top_k", [None, 1, 2, 4, VOCAB, 50])
@pytest.mark.parametrize(("width", "length"), SHAPES)
def test_the_search_finds_the_beams_of_a_slow_search(width: int, length: int, top_k: int | None):
    drafter = FadingDrafter()
    actual = search(drafter, width=width, length=length, top_k=top_k)
    for row in range(2):
        levels = slow_levels(drafter, row, width=width, length=length, top_k=top_k or VOCAB)
        assert actual.level_sizes == tuple(len(level) for level in levels)
        assert row_paths(actual, row) == [path for level in levels for path in level]
        assert actual.scores[row].tolist() == pytest.approx([score for level in levels for score in level.values()], abs=1e-5)
    assert set(row_paths(pack_survivors(actual).trimmed(), 0)) <= set(row_paths(actual, 0))


def test_a_beam_wider_than_the_vocabulary_holds_all_texts():
    actual = search(FadingDrafter(vocab=2), width=8, length=3)
    assert actual.level_sizes == (2, 4, 8)
    assert set(row_paths(actual, 0)) == {text for length in (1, 2, 3) for text in itertools.product((0, 1), repeat=length)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("width", "length"), SHAPES)
def test_the_survivors_are_the_prefixes_of_the_last_beams(width: int, length: int, seed: int):
    drafter = FadingDrafter(seed)
    tree = pack_survivors(search(drafter, width=width, length=length)).trimmed()
    assert tree.max_depth == length
    sizes = []
    for row in range(2):
        beams = list(slow_levels(drafter, row, width=width, length=length)[-1])
        expected = {beam[:depth] for beam in beams for depth in range(1, length + 1)}
        assert set(row_paths(tree, row)) == expected
        sizes.append(len(expected))
    assert tree.num_nodes == max(sizes), "more padding than the fullest row needs"


@pytest.mark.parametrize("bucket", [1, 2, 5, 7, 100])
def test_a_trimmed_tree_is_the_same_tree_with_less_padding(bucket: int):
    padded = pack_survivors(search(FadingDrafter(), width=3, length=4))
    num_real = max(len(row_paths(padded, row)) for row in range(2))
    tree = padded.trimmed(bucket)
    assert tree.num_nodes == min(-(-num_real // bucket) * bucket, 12)
    assert padded.num_nodes == 12 > num_real
    assert [row_paths(padded, row) for row in range(2)] == [row_paths(tree, row) for row in range(2)]
    again = DraftTree(tokens=tree.tokens, parents=tree.parents, max_depth=tree.max_depth)
    assert torch.equal(again.lineage, tree.lineage)
    assert torch.equal(again.depths, tree.depths)


def test_shared_prefixes_are_packed_once():
    # The docstring's example A B C / A B D / A E F, with letters as numbers. The beam A G was
    # dropped.
    actual = SearchTree(
        tokens=torch.tensor([[1, 2, 5, 7, 3, 4, 6]]),
        parents=torch.tensor([[-1, 0, 0, 0, 1, 1, 2]]),
        scores=torch.zeros(1, 7),
        level_sizes=(1, 3, 3),
    )
    tree = pack_survivors(actual).trimmed()
    assert tree.tokens.tolist() == [[1, 2, 5, 3, 4, 6]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2]]


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 9, 11, 100])
def test_the_likeliest_nodes_are_those_of_a_plain_sort(num_nodes: int):
    drafter = FadingDrafter()
    tree = pack_likeliest(search(drafter, width=3, length=4), num_nodes)
    assert tree.num_nodes == min(num_nodes, 12)
    for row in range(2):
        nodes = {path: score for level in slow_levels(drafter, row, width=3, length=4) for path, score in level.items()}
        expected = sorted(nodes, key=lambda path: -nodes[path])[:num_nodes]
        assert set(row_paths(tree, row)) == set(expected)


def test_a_child_as_likely_as_its_parent_is_never_packed_without_it():
    actual = SearchTree(
        tokens=torch.tensor([[1, 2, 3, 4, 5]]),
        parents=torch.tensor([[-1, 0, 1, 2, 3]]),
        scores=torch.zeros(1, 5),  # log-probabilities of a drafter that is certain of every token
        level_sizes=(1, 1, 1, 1, 1),
    )
    for num_nodes in range(1, 6):
        assert row_paths(pack_likeliest(actual, num_nodes), 0) == [(1, 2, 3, 4, 5)[:n] for n in range(1, num_nodes + 1)]


def test_a_node_keeps_its_parent_when_probabilities_round_to_one():
    num_checked = 0
    for seed in range(200):
        drafter = FadingDrafter(seed, vocab=64)
        drafter.table *= 12  # log-probabilities so near 0 that they differ by rounding errors only
        actual = search(drafter, width=4, length=5)
        parents = actual.parents.clamp(min=0)
        assert (actual.scores <= torch.where(actual.parents < 0, 0.0, actual.scores.gather(1, parents))).all()
        for num_nodes in (3, 7, 12):
            tree = pack_likeliest(actual, num_nodes)
            for row in range(2):
                assert set(row_paths(tree, row)) <= set(row_paths(actual, row))
                num_checked += 1
    assert num_checked == 1200


# --- the same trees as a plain search, which ranks every successor of every beam


def plain_search(
    drafter: Redrafter, hidden: torch.Tensor, last_token: torch.Tensor
) -> tuple[list[int], list[int], list[float]]:
    """Search for one row with lists: the tokens, parents and scores of all nodes, by depth."""
    width, length = drafter.config.beam_width, drafter.config.beam_length
    tokens, parents, scores = [], [], []
    beams = [(0.0, NO_NODE, drafter.first_state(drafter.embed(last_token)))]
    for _ in range(length):
        successors = []
        for score, node, state in beams:
            logits = drafter.logits(hidden[None], state[None])[0].float()
            log_probs = logits - logits.logsumexp(-1)
            top = log_probs.topk(min(width, len(log_probs)))
            successors += [(score + top.values[i], node, int(top.indices[i]), state) for i in range(len(top.values))]
        successors.sort(key=lambda successor: -successor[0])
        beams = []
        for score, parent, output, state in successors[:width]:
            token = drafter.vocabulary.target_tokens(torch.tensor(output))
            beams.append((score, len(tokens), drafter.next_state(state, drafter.embed(token))))
            tokens.append(int(token))
            parents.append(parent)
            scores.append(float(score))
    return tokens, parents, scores


def plain_tree(drafter: Redrafter, tokens: list[int], parents: list[int], scores: list[float]) -> list[tuple[int, int]]:
    """Return the (token, parent) of each node of the tree that `drafter` should draft."""
    if drafter.config.tree_nodes is not None:
        kept = set(sorted(range(len(tokens)), key=lambda node: -scores[node])[: drafter.config.tree_nodes])
    else:
        kept = set(range(len(tokens) - drafter.config.beam_width, len(tokens)))
        for node in sorted(range(len(tokens)), reverse=True):
            if node in kept and parents[node] != NO_NODE:
                kept.add(parents[node])
    number = {node: index for index, node in enumerate(sorted(kept))} | {NO_NODE: NO_NODE}
    return [(tokens[node], number[parents[node]]) for node in sorted(kept)]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("tree_nodes", [None, 9])
@pytest.mark.parametrize("draft_vocab_size", [None, 150])
@pytest.mark.parametrize(("width", "length"), [(1, 4), (4, 3), (16, 5), (40, 3), (70, 2)])
def test_the_drafted_tree_is_that_of_a_plain_search(width, length, draft_vocab_size, tree_nodes):
    torch.manual_seed(width)
    num_rows, hidden_size, vocab_size = 3, 16, 600
    config = RedrafterConfig(
        beam_width=width, beam_length=length, tree_nodes=tree_nodes, draft_vocab_size=draft_vocab_size, exit_width=24
    )
    embeddings = torch.nn.Embedding(vocab_size, hidden_size)
    # In float64, rounding of the products of many rows and of one row decides no near tie.
    drafter = Redrafter(config, embeddings, hidden_size=hidden_size, vocab_size=vocab_size).double()
    drafter.choose_draft_vocabulary(torch.randperm(vocab_size))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    hidden, last_tokens = torch.randn(num_rows, hidden_size, dtype=torch.float64), torch.tensor([5, 0, 299])
    with torch.inference_mode():
        tree, _ = drafter.propose(hidden, last_tokens)
        for row in range(num_rows):
            expected = plain_tree(drafter, *plain_search(drafter, hidden[row], last_tokens[row]))
            nodes = list(zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True))
            assert nodes == expected + [(NO_NODE, NO_NODE)] * (tree.num_nodes - len(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_successors_are_ranked_in_float32_whatever_the_logits_are(dtype: torch.dtype):
    logits = torch.randn(2, 5, 4000, generator=torch.Generator().manual_seed(1)).to(dtype)
    scores = -torch.rand(2, 5, generator=torch.Generator().manual_seed(2))
    outputs, beams, found = likeliest_successors(logits, scores, 6)
    assert found.dtype == torch.float32
    log_probs = logits.float().log_softmax(-1)
    for row in range(2):
        assert torch.equal(found[row], (scores[row][:, None] + log_probs[row]).flatten().topk(6).values)
        assert torch.equal(found[row], (scores[row][beams[row]] + log_probs[row, beams[row], outputs[row]]))
