"""Token Recycling against a naive table."""

import random
from collections.abc import Sequence

import pytest
import torch

from outrider.models.decoding import Prompts, TargetOutput
from outrider.models.decoding.tree import DraftTree, accepted_path, depths_of
from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters import recycling
from outrider.models.drafters.recycling import PRIOR, Recycling, RecyclingConfig
from outrider.models.drafters.training_free import Candidates

VOCAB = 12


class Naive:
    """The table as its definition has it: all contexts of all entries, the latest wins."""

    def __init__(self, config: RecyclingConfig, prompt: list[int]) -> None:
        self.config, self.text = config, prompt
        self.table: dict[tuple[int, ...], list[int]] = {}
        for end in range(1, len(prompt)):
            for context in self.contexts(prompt[:end]):
                others = [token for token in self.table.get(context, []) if token != prompt[end]]
                self.table[context] = [prompt[end], *others][: config.top_k]

    def contexts(self, text: list[int]) -> list[tuple[int, ...]]:
        return [tuple(text[-n:]) for n in range(1, min(recycling.CONTEXT, len(text)) + 1)]

    def learn(self, last_token: int, paths: list[list[int]], accepted: list[int], logits: torch.Tensor) -> None:
        """Read the entries' logits; `paths` are the tokens from the last token to each node."""
        text = [*self.text, last_token]
        entries = [[], *paths]
        first = [place for place in range(len(entries)) if place not in (0, *[node + 1 for node in accepted])]
        for place in (*first, 0, *[node + 1 for node in accepted]):
            row = logits[place].argsort(descending=True)[: self.config.top_k].tolist()
            for context in self.contexts([*text, *entries[place]]):
                self.table[context] = row
        self.text = [*text, *(paths[accepted[-1]] if accepted else [])]

    def row(self, text: list[int]) -> tuple[list[int], int]:
        known = [context for context in self.contexts(text) if self.table.get(context)]
        return (self.table[known[-1]], len(known[-1])) if known else ([], 0)

    def tree(self, last_token: int) -> dict[tuple[int, ...], float]:
        """Return the probability of every path of the whole tree."""
        probs = {(): 1.0}
        frontier: list[tuple[int, ...]] = [()]
        for _ in range(self.config.depth):
            children = []
            for path in frontier:
                row, n = self.row([*self.text, last_token, *path])
                for rank, token in enumerate(row):
                    probs[(*path, token)] = probs[path] * PRIOR[n - 1][min(rank, len(PRIOR[0]) - 1)]
                    children.append((*path, token))
            frontier = children
        return probs


def paths_of(found: Candidates) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        paths.append([*(paths[parent] if parent != NO_NODE else []), token])
    return paths


def tree_of_paths(found: Sequence[Candidates]) -> DraftTree:
    width = max(len(row.tokens) for row in found)
    tokens, parents = (
        torch.tensor([[*values, *[NO_NODE] * (width - len(values))] for values in rows], dtype=torch.long).view(-1, width)
        for rows in ([row.tokens for row in found], [row.parents for row in found])
    )
    return DraftTree(tokens=tokens, parents=parents, max_depth=max(max(depths_of(row.parents), default=0) for row in found))


@pytest.mark.parametrize("seed", range(12))
def test_the_tree_is_the_likeliest_by_a_naive_table(seed, monkeypatch):
    monkeypatch.setattr(recycling, "CONTEXT", 1 + seed % 3)
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    config = RecyclingConfig(tree_nodes=chance.randint(1, 12), depth=chance.randint(1, 4), top_k=chance.randint(1, 3))
    drafter = Recycling(config)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 12))] for _ in range(2)]
    prefill = TargetOutput(logits=torch.randn(2, 1, VOCAB), hidden_states=torch.zeros(2, 1, 1))
    state = drafter.init_state(Prompts.of([torch.tensor(prompt) for prompt in prompts]), prefill, max_new_tokens=90)
    rows = [Naive(config, prompt) for prompt in prompts]
    num_nodes = 0
    for _ in range(12):
        last_tokens = [chance.randrange(VOCAB) for _ in rows]
        tree, drafted = drafter.propose(state, torch.tensor(last_tokens))
        found = drafter.candidates(state, last_tokens)
        logits, accepted = torch.randn(2, 1 + tree.num_nodes, VOCAB, generator=generator), []
        for row, naive, last_token, output in zip(found, rows, last_tokens, logits, strict=True):
            paths, probs = paths_of(row), naive.tree(last_token)
            best = sorted((prob for path, prob in probs.items() if path), reverse=True)[: config.tree_nodes]
            assert [probs[tuple(path)] for path in paths] == pytest.approx(best)
            assert len(set(map(tuple, paths))) == len(paths)
            accepted.append([paths.index(path[:end]) for path in paths[-1:] for end in range(1, len(path) + 1)])
            naive.learn(last_token, paths, accepted[-1], output)
            num_nodes += len(paths)
        output = TargetOutput(logits=logits, hidden_states=logits[..., :0])
        state = drafter.advance(drafted, tree, accepted_path(tree, accepted), output)
    assert num_nodes > 10


def test_a_tree_of_other_drafters_is_read_too(monkeypatch):
    """A merged tree has nodes that this drafter didn't propose."""
    monkeypatch.setattr(recycling, "CONTEXT", 1)
    drafter = Recycling(RecyclingConfig(top_k=2))
    prefill = TargetOutput(logits=torch.zeros(1, 1, VOCAB), hidden_states=torch.zeros(1, 1, 1))
    state = drafter.init_state(Prompts.of(torch.tensor([[1, 2]])), prefill, max_new_tokens=9)
    _, drafted = drafter.propose(state, torch.tensor([3]))
    tree = DraftTree(tokens=torch.tensor([[7, 8]]), parents=torch.tensor([[NO_NODE, 0]]), max_depth=2)
    logits = torch.zeros(1, 3, VOCAB)
    for entry, token in enumerate((7, 5, 9)):
        logits[0, entry, token], logits[0, entry, 0] = 2.0, 1.0
    output = TargetOutput(logits=logits, hidden_states=logits[..., :0])
    state = drafter.advance(drafted, tree, accepted_path(tree, [[0]]), output)
    found = [drafter.candidates(state, [token])[0] for token in (3, 7, 8)]
    assert [list(row.tokens[:2]) for row in found] == [[7, 5], [5, 0], [9, 0]]
