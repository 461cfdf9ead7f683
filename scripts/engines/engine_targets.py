"""Shared code of the checks against other programs: targets, drafters, logits, comparison.

The other programs need other versions than outrider, so two Pythons run each check in turns. Both
use `compare` and `run`, which need only torch.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HIDDEN, VOCAB, NUM_TOKENS, DEPTHS = 32, 120, 128, 3
RESULTS_FILE = "results.pt"
"""What a case's folder holds beside the drafter: logits, and what the other program needs for its own."""
TOLERANCE = 1e-5
"""Allowed difference as a share of the largest logit; programs sum in different orders."""
SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
USUAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
"""The rotary embeddings of programs that read no base from the configuration."""
OWN_LAYER = {
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}
"""A decoder layer of another shape than the target's."""
EAGLE3_CASES: dict[str, dict[str, Any]] = {
    "whole_vocabulary": {"kind": "eagle3"},
    "reduced_vocabulary": {"kind": "eagle3", "draft_vocab_size": 50},
    "layer_of_its_own": {"kind": "eagle3", "init": "random", "layer": OWN_LAYER},
}
"""Options of drafters that every program for EAGLE-3 reads, by case."""
EAGLE3_1 = {"kind": "eagle3", "fc_norm": True, "norm_output": True}


def make_target(directory: Path, rope: dict[str, Any]) -> Any:
    """Save a random Llama of eight layers with these rotary embeddings; load it with outrider."""
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
    # several files, like large models
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="50KB")
    words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    # a class name that all versions of transformers have
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return load_target(directory)


def load_target(directory: Path) -> Any:
    """Load the target that `make_target` wrote."""
    from outrider.models.llm import loading as target
    from outrider.models.llm.config import TargetConfig

    return target.load_target(TargetConfig(name_or_path=str(directory.resolve()), device="cpu", dtype="float32"))


def make_tokens() -> torch.Tensor:
    """Make a text, and tokens to draft after it: [1, NUM_TOKENS + DEPTHS]."""
    return torch.randint(VOCAB, (1, NUM_TOKENS + DEPTHS), generator=torch.Generator().manual_seed(2))


def make_drafter(target: Any, **options: Any) -> Any:
    """Make a drafter in which every weight changes the logits, as after training."""
    from outrider.models.drafters import build_drafter, parse_drafter

    torch.manual_seed(1)
    drafter = build_drafter(parse_drafter(options), target)
    randomise(drafter)
    if drafter.wants_token_counts:
        drafter.choose_draft_vocabulary(torch.arange(VOCAB).remainder(7))
    return drafter.eval().requires_grad_(False)


def randomise(model: torch.nn.Module) -> None:
    """Set weights that all change the logits: norms near 1, all others near 0."""
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)


def make_exports(
    directory: Path,
    cases: Mapping[str, dict[str, Any]],
    format_of: Callable[[str], Any],
    results_of: Callable[[Any, Any], Any],
    rope: dict[str, Any] = SCALED_ROPE,
) -> bool:
    """Write the target, and a folder for each case with the export of a drafter and outrider's results.

    `cases` has the drafter's options by name, `format_of` returns the format of a name, and
    `results_of` computes results from a drafter and its target.
    """
    from outrider.models.export.formats import write_folder

    target = make_target(directory / "target", rope)
    for name, options in cases.items():
        drafter = make_drafter(target, **options)
        write_folder(format_of(name), drafter, directory / name, target)
        torch.save(results_of(drafter, target), directory / name / RESULTS_FILE)
    print(f"{len(cases)} exports are in {directory}")
    return True


def point_to_target(config: Path, target: Path) -> None:
    """Name the target's folder in the configuration of speculators, which loads the target by this name."""
    values = json.loads(config.read_text())
    values["speculators_config"]["verifier"]["name_or_path"] = str(target.resolve())
    config.write_text(json.dumps(values, indent=2))


def read_results(folder: Path) -> Any:
    """Return a case's results."""
    return torch.load(folder / RESULTS_FILE, weights_only=True)


def compare_imports(directory: Path, names: Iterable[str], logits_of: Callable[[Any, Any], list[torch.Tensor]]) -> bool:
    """Import each drafter that the other program wrote, and compare its logits (outrider's Python)."""
    from outrider.models.export.registry import import_drafter

    alike, target = True, load_target(directory / "target")
    for name in names:
        logits = logits_of(import_drafter(directory / name, target), target)
        alike &= compare(name, logits, read_results(directory / name))
    return alike


def usual_results(drafter: Any, target: Any, logits: Callable[..., list[torch.Tensor]]) -> dict[str, Any]:
    """Return features of the text, a drafter's logits, the target's weights and the drafted tokens."""
    tokens = make_tokens()
    drafted = getattr(getattr(drafter, "vocabulary", None), "tokens", None)
    return {
        "features": read_features(drafter, target, tokens),
        "logits": logits(drafter, target, tokens),
        "embeddings": target.embed_tokens.weight.clone(),
        "head": target.head.weight.clone(),
        "drafted": torch.arange(VOCAB) if drafted is None else drafted,
    }


@torch.no_grad()
def read_features(drafter: Any, target: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Read a drafter's features of the text without its last token: [1, NUM_TOKENS, feature]."""
    text = tokens[:, : NUM_TOKENS + 1]
    last, layers = target.hidden_states(text, drafter.feature_layers)
    return (last if layers is None else layers)[:, :-1]


@torch.no_grad()
def unrolled_logits(drafter: Any, target: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Compute a drafter's logits at every position and depth, as in training.

    Each depth reads the outputs of the previous depth, and the text's tokens shifted by one more,
    padded with zeros. Returns tensors [1, NUM_TOKENS, output].
    """
    from transformers.cache_utils import DynamicCache

    tokens = tokens[:, : NUM_TOKENS + 1]
    hidden, cache = drafter.fuse(read_features(drafter, target, tokens)), DynamicCache()
    steps, read_tokens, logits = torch.arange(NUM_TOKENS), tokens[:, 1:], []
    mask, diagonal = (steps <= steps[:, None])[None, None], torch.eye(NUM_TOKENS, dtype=torch.bool)[None, None]
    for depth in range(DEPTHS):
        hidden = drafter.read(read_tokens, hidden, (steps + depth)[None], cache, mask)
        logits.append(drafter.logits(hidden))
        read_tokens = torch.cat([tokens[:, 2 + depth :], tokens.new_zeros(1, 1 + depth)], dim=1)
        mask = torch.cat([mask, diagonal], dim=-1)
    return logits


@torch.no_grad()
def chained_logits(drafter: Any, target: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Compute a drafter's logits as in decoding.

    The first tensor has every position of the text [1, NUM_TOKENS, output]. The others follow the
    tokens after the text [1, 1, output]; these are read with the drafter's own outputs, except for
    the first.
    """
    from transformers.cache_utils import DynamicCache

    cache, steps = DynamicCache(), torch.arange(NUM_TOKENS)
    hidden = drafter.fuse(read_features(drafter, target, tokens))
    hidden = drafter.read(tokens[:, 1 : NUM_TOKENS + 1], hidden, steps[None], cache, (steps <= steps[:, None])[None, None])
    logits = [drafter.logits(hidden)]
    for position in range(NUM_TOKENS, NUM_TOKENS + DEPTHS - 1):
        mask = torch.ones(1, 1, 1, position + 1, dtype=torch.bool)
        read_token = tokens[:, position + 1 : position + 2]
        hidden = drafter.read(read_token, hidden[:, -1:], torch.tensor([[position]]), cache, mask)
        logits.append(drafter.logits(hidden))
    return logits


def compare(name: str, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return whether logits are equal up to rounding errors.

    Prints the largest difference at each depth, or of each head.
    """
    assert len(actual) == len(expected) > 0
    assert all(a.shape == b.shape for a, b in zip(actual, expected, strict=True))
    differences = [float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True)]
    size = max(float(logits.abs().max()) for logits in expected)
    print(f"{name}: logits up to {size:.1f}; largest difference of each: {', '.join(f'{d:.1e}' for d in differences)}")
    return max(differences) <= TOLERANCE * size


def run(doc: str | None, steps: dict[str, Callable[[Path], bool]]) -> None:
    """Run one step of a check from the command line, on a folder that the first step makes.

    Exits with 1 if the two programs differ.
    """
    if len(sys.argv) != 3 or sys.argv[1] not in steps:
        sys.exit(f"{doc}\nusage: {Path(sys.argv[0]).name} {'|'.join(steps)} DIRECTORY")
    if not steps[sys.argv[1]](Path(sys.argv[2])):
        sys.exit("the two programs give different results")
