"""Measures what draft trees cost on a target with recurrent layers, against one of the same sizes with attention only.

    python scripts/bench/recurrent.py
    python scripts/bench/recurrent.py --layers 24 --hidden 1024 --dtype bfloat16 --threads 8

Both targets have random weights: costs depend on sizes alone. Of the recurrent one's layers, which are
those of Qwen3.5, every fourth has attention. All ways take turns, each with a text of its own. A step is
a pass over the last token and a tree, and its commit, which for recurrent layers reads the accepted
tokens again. Two draft tokens are accepted where the tree has as many.
"""

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from report import finish, median, ratio, take_turns
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.data.manifest import TargetIdentity
from outrider.models.decoding import Prompts
from outrider.models.decoding.tree import DraftTree, accepted_path, chain_tree, empty_tree
from outrider.models.llm.hf_target import HFTarget

VOCAB = 8192
NUM_ACCEPTED = 2
TREES = {"plain": 0, "chain": 4, "tree of 16": 16, "tree of 40": 40}
"""Nodes of each tree. Each node of a tree has four children, but those of the last level."""


def main(
    layers: int = 24,
    hidden: int = 576,
    text: Annotated[int, typer.Option(help="Tokens of the text.")] = 256,
    dtype: str = "float32",
    rounds: int = 30,
    threads: int = 2,
    output: Path = Path("outputs/bench/recurrent.json"),
) -> None:
    """Measure steps of both targets."""
    options = dict(locals())
    torch.set_num_threads(threads)
    targets = {name: make_target(name, layers, hidden, getattr(torch, dtype)) for name in ("attention", "recurrent")}
    steps = {f"{name}, {tree}": Steps(target, tree, text, rounds) for name, target in targets.items() for tree in TREES}
    seconds = take_turns({name: each.step for name, each in steps.items()}, rounds=rounds)
    rows = []
    for name, each in steps.items():
        kind, tree = name.split(", ")
        plain, wall = seconds[f"{kind}, plain"].wall, seconds[name].wall
        shares = [commit / step for commit, step in zip(each.commits[1:], wall, strict=True)]
        rows.append(
            {
                "target": kind,
                "tree": tree,
                "nodes": TREES[tree],
                "milliseconds": median([1000 * spent for spent in wall]),
                "plain_steps": ratio(wall, plain),
                "commit_share": median(shares, 2),
            }
        )
    sizes = {f"{name}_parameters": sum(weight.numel() for weight in one.model.parameters()) for name, one in targets.items()}
    state_bytes = steps["recurrent, plain"].state_bytes
    finish(output, rows, options, state_bytes=state_bytes, token_bytes=steps["recurrent, plain"].token_bytes, **sizes)
    print(f"The state of a text takes {state_bytes / 2**20:.1f} MiB")


def make_target(kind: str, layers: int, hidden: int, dtype: torch.dtype) -> HFTarget:
    """Return a target with random weights: with attention in every layer, or in every fourth."""
    heads = hidden // 64
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 8 * hidden // 3, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 3), "head_dim": 64}
    sizes |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
    sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    linear = "linear_attention" if kind == "recurrent" else "full_attention"
    kinds = [linear if index % 4 < 3 else "full_attention" for index in range(layers)]
    config = AutoConfig.for_model("qwen3_5_text", **sizes, layer_types=kinds, eos_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    digests = dict.fromkeys(("weights_sha256", "config_sha256", "tokenizer_sha256", "quantization"), "")
    return HFTarget(model, None, TargetIdentity(name=kind, revision=None, hidden_size=hidden, vocab_size=VOCAB, **digests))


class Steps:
    """Steps of a target over one text, all with trees of one shape."""

    def __init__(self, target: HFTarget, tree: str, length: int, rounds: int) -> None:
        self.target = HFTarget(target.model, None, target.identity)  # its own cache
        self.tree = make_tree(tree)
        self.commits: list[float] = []
        prompt = Prompts.of([torch.arange(length) % VOCAB])
        most = (rounds + 2) * (1 + NUM_ACCEPTED)
        self.target.prefill(prompt, max_new_tokens=most, max_nodes=self.tree.num_nodes)
        cache = self.target._require_cache()
        self.state_bytes = cache.recurrent.num_bytes if cache.recurrent is not None else 0
        self.token_bytes = sum(tensor.nbytes for layer in cache.states(1) for tensor in layer)

    @torch.inference_mode()
    def step(self) -> None:
        """Verify the tree, and commit two of its nodes."""
        self.target.verify(torch.tensor([1]), self.tree)
        started = time.perf_counter()
        path = [] if not self.tree.num_nodes else [0, int((self.tree.parents[0] == 0).nonzero()[0])]
        self.target.commit(self.tree, accepted_path(self.tree, [path]))
        self.commits.append(time.perf_counter() - started)


def make_tree(name: str) -> DraftTree:
    """Return a tree of the shape of `TREES`."""
    num_nodes = TREES[name]
    tokens = torch.arange(10, 10 + num_nodes)[None]
    if not num_nodes:
        return empty_tree(1, tokens.device)
    if name == "chain":
        return chain_tree(tokens)
    parents = torch.arange(num_nodes)[None] // 4 - 1
    return DraftTree(tokens=tokens, parents=parents, max_depth=num_nodes.bit_length())


if __name__ == "__main__":
    typer.run(main)
