"""What the checks against other programs' own code share: a small target, drafters for it, what
they say, and the comparison.

The other programs want other versions than outrider does, so each check is run in turns by two
Pythons. `compare` and `run`, which both need, ask for torch alone.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

HIDDEN, VOCAB, NUM_TOKENS, DEPTHS = 32, 120, 128, 3
TOLERANCE = 1e-5
"""Of the largest logit, in float32: two programs add in different orders."""
SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_target(directory: Path, rope: dict[str, Any]) -> Any:
    """A random Llama of eight layers with these rotary embeddings, saved with a tokenizer, as
    outrider loads it.
    """
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * NUM_TOKENS,
        rope_parameters=rope,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    # several files, as large models have
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="50KB")
    words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    # under the class's name that all versions of transformers know
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return load_target(directory)


def load_target(directory: Path) -> Any:
    """Load the target that `make_target` wrote."""
    from outrider.models.target import loading as target
    from outrider.models.target.config import TargetConfig

    return target.load_target(TargetConfig(name_or_path=str(directory.resolve()), device="cpu", dtype="float32"))


def make_tokens() -> torch.Tensor:
    """Make a text, and tokens to draft after it: [1, NUM_TOKENS + DEPTHS]."""
    return torch.randint(VOCAB, (1, NUM_TOKENS + DEPTHS), generator=torch.Generator().manual_seed(2))


def make_drafter(target: Any, **options: Any) -> Any:
    """Make a drafter in which every number matters, as after training."""
    from outrider.models.drafters import build_drafter, parse_drafter

    torch.manual_seed(1)
    drafter = build_drafter(parse_drafter(options), target)
    randomise(drafter)
    if drafter.wants_token_counts:
        drafter.choose_draft_vocabulary(torch.arange(VOCAB).remainder(7))
    return drafter.eval().requires_grad_(False)


def randomise(model: torch.nn.Module) -> None:
    """Numbers that all change the logits: norms near 1, the rest near 0."""
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)


@torch.no_grad()
def read_features(drafter: Any, target: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What a drafter of features reads of the target, of the text without its last token: [1,
    NUM_TOKENS, feature].
    """
    text = tokens[:, : NUM_TOKENS + 1]
    last, layers = target.hidden_states(text, drafter.feature_layers)
    return (last if layers is None else layers)[:, :-1]


@torch.no_grad()
def unrolled_logits(drafter: Any, target: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """A drafter's logits at every position and depth, as in training: each depth is fed the outputs
    of the one before, and reads the text's tokens one further on, with zeros behind them.

    Each [1, NUM_TOKENS, output].
    """
    from transformers.cache_utils import DynamicCache

    tokens = tokens[:, : NUM_TOKENS + 1]
    hidden, cache = drafter.fuse(read_features(drafter, target, tokens)), DynamicCache()
    steps, given, logits = torch.arange(NUM_TOKENS), tokens[:, 1:], []
    mask, own = (steps <= steps[:, None])[None, None], torch.eye(NUM_TOKENS, dtype=torch.bool)[None, None]
    for depth in range(DEPTHS):
        hidden = drafter.read(given, hidden, (steps + depth)[None], cache, mask)
        logits.append(drafter.logits(hidden))
        given = torch.cat([tokens[:, 2 + depth :], tokens.new_zeros(1, 1 + depth)], dim=1)
        mask = torch.cat([mask, own], dim=-1)
    return logits


@torch.no_grad()
def chained_logits(drafter: Any, target: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """A drafter's logits as in decoding: at every position of the text, [1, NUM_TOKENS, output],
    and then after each of the tokens behind it, of which all but the first are read with the
    drafter's own outputs, [1, 1, output].
    """
    from transformers.cache_utils import DynamicCache

    cache, steps = DynamicCache(), torch.arange(NUM_TOKENS)
    hidden = drafter.fuse(read_features(drafter, target, tokens))
    hidden = drafter.read(tokens[:, 1 : NUM_TOKENS + 1], hidden, steps[None], cache, (steps <= steps[:, None])[None, None])
    logits = [drafter.logits(hidden)]
    for place in range(NUM_TOKENS, NUM_TOKENS + DEPTHS - 1):
        mask = torch.ones(1, 1, 1, place + 1, dtype=torch.bool)
        given = tokens[:, place + 1 : place + 2]
        hidden = drafter.read(given, hidden[:, -1:], torch.tensor([[place]]), cache, mask)
        logits.append(drafter.logits(hidden))
    return logits


def compare(name: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether logits are the same up to rounding; prints the largest difference at each depth, or
    of each head.
    """
    assert len(found) == len(expected) > 0
    assert all(a.shape == b.shape for a, b in zip(found, expected, strict=True))
    differences = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    size = max(float(each.abs().max()) for each in expected)
    print(f"{name}: logits up to {size:.1f}; largest difference of each: {', '.join(f'{d:.1e}' for d in differences)}")
    return max(differences) <= TOLERANCE * size


def run(doc: str | None, steps: dict[str, Callable[[Path], bool]]) -> None:
    """Run the command line of a check: one step of it on a folder.

    Exits with 1 where a step finds that the two programs differ.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=tuple(steps))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if not steps[arguments.step](arguments.directory):
        sys.exit("the two programs don't say the same")
