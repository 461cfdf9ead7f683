"""Defaults of `outrider init` for each kind of drafter."""

from collections.abc import Callable
from dataclasses import dataclass

from .init_facts import TargetFacts

LARGE_VOCABULARY = 64_000
"""From this size, the drafter's head is reduced: it would be most of a drafter's weights."""
REDUCED_VOCABULARY = 32_000
"""Size of a reduced vocabulary, as in EAGLE-3's release."""

DEEP_TARGET = 24
"""Targets of at least so many layers get a block drafter of five layers, as the released ones have."""
PUBLISHED_LAYERS, MIN_EAGLE3_LAYERS = 7, 3
"""Fewest layers of a target whose published three layers (2, half, all - 3) differ, and that has
three layers at all."""


@dataclass(frozen=True, kw_only=True)
class KindDefaults:
    """Values for one kind of drafter, from its published recipe if there is one."""

    title: str
    horizon: int
    horizon_reason: str
    epochs: int
    batch_size: int
    global_batch_size: int
    train: tuple[str, ...]
    """Further lines of the section train."""
    settings: tuple[str, ...]
    formats: tuple[str, ...]
    drafter_lines: Callable[[TargetFacts], list[str]] = lambda target: []
    """Lines of the section drafter."""


def feature_layers(num_layers: int) -> list[int]:
    """Return an early, a middle and a late layer, as in EAGLE-3's release."""
    return sorted({min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3)})


def _eagle3_layers(num_layers: int) -> tuple[list[int], str]:
    """Return the target's layers to read, and the reason as a comment."""
    if num_layers >= PUBLISHED_LAYERS:
        return feature_layers(num_layers), "an early, a middle and a late layer, as in the paper"
    if num_layers >= MIN_EAGLE3_LAYERS:
        layers = [min(1, num_layers - 3), num_layers // 2, num_layers - 1]
        return layers, "the target is too shallow for the paper's layers; vLLM reads these, from the format speculators"
    return feature_layers(num_layers), "this target is too shallow for serving engines, which need three layers"


def export_lines(drafter: str, kind: KindDefaults, target: TargetFacts) -> list[str]:
    """Return the lines of the section export, a comment if the section isn't needed."""
    if drafter == "eagle3" and target.num_layers < MIN_EAGLE3_LAYERS:
        return ["export: {allow_no_format: true} # no serving engine loads an EAGLE-3 that reads fewer than three layers"]
    if drafter == "block":
        return ["export: {allow_no_format: true} # serving engines load the form of drafter=block_dspark only"]
    formats = ("speculators",) if drafter == "eagle3" and target.num_layers < PUBLISHED_LAYERS else kind.formats
    return [
        "# Formats of serving engines that are written at the end (outrider export --help lists them):",
        f"# export: {{formats: [{', '.join(formats)}]}}",
    ]


def _eagle3(target: TargetFacts) -> list[str]:
    layers, reason = _eagle3_layers(target.num_layers)
    lines = [f"feature_layers: {layers} # {reason}"]
    if target.vocab_size >= LARGE_VOCABULARY:
        lines.append(f"draft_vocab_size: {REDUCED_VOCABULARY} # the most frequent of {target.vocab_size} tokens")
    return lines


def _eagle(target: TargetFacts) -> list[str]:
    if target.model_type in ("llama", "mistral"):
        return []
    return ["layer: {model_type: llama, hidden_act: silu} # serving engines load only this kind of layer"]


def _redrafter(target: TargetFacts) -> list[str]:
    if target.vocab_size < LARGE_VOCABULARY:
        return []
    return [f"exit_width: {target.hidden_size // 2} # a quarter of the paper's width: the vocabulary is large"]


def _medusa(target: TargetFacts) -> list[str]:
    if target.vocab_size < LARGE_VOCABULARY:
        return []
    return ["share_head: true # all heads use the target's output layer: the vocabulary is large"]


def _block(target: TargetFacts) -> list[str]:
    lines = [f"num_layers: {5 if target.num_layers >= DEEP_TARGET else 1} # of the drafter itself", "block: 7"]
    if target.vocab_size >= LARGE_VOCABULARY:
        lines.append(f"draft_vocab_size: {REDUCED_VOCABULARY} # the most frequent of {target.vocab_size} tokens")
    return lines


KIND_DEFAULTS = {
    "eagle3": KindDefaults(
        title="An EAGLE-3 drafter",
        horizon=8,
        horizon_reason="tokens of each label: one that the target chooses, and seven that the drafter learns",
        epochs=4,
        batch_size=2,
        global_batch_size=16,
        train=("loss: kl", "learning_rate: 1e-4", "schedule: linear", "max_grad_norm: 0.5"),
        settings=("{depth: 4, top_k: 2, tree_nodes: 8}", "{depth: 8, top_k: 10, tree_nodes: 59}"),
        formats=("eagle3",),
        drafter_lines=_eagle3,
    ),
    "redrafter": KindDefaults(
        title="A ReDrafter",
        horizon=5,
        horizon_reason="tokens of each label: one that the target chooses, and four that the drafter learns",
        epochs=2,
        batch_size=4,
        global_batch_size=128,
        train=("learning_rate: 1e-3",),
        settings=("{beam_width: 4, beam_length: 4}", "{beam_width: 16, beam_length: 4, tree_nodes: 40}"),
        formats=("apple",),
        drafter_lines=_redrafter,
    ),
    "block": KindDefaults(
        title="A block drafter",
        horizon=8,
        horizon_reason="tokens of each label: one that the target chooses, and one for each slot of the block",
        epochs=4,
        batch_size=2,
        global_batch_size=16,
        train=("loss: kl_acceptance", "learning_rate: 6e-4", "max_grad_norm: 1.0"),
        settings=("{width: 4, tree_nodes: 8}", "{width: 16, tree_nodes: 59}"),
        formats=(),
        drafter_lines=_block,
    ),
    "medusa": KindDefaults(
        title="A Medusa drafter",
        horizon=5,
        horizon_reason="tokens of each label: one that the target chooses, and one for each of four heads",
        epochs=2,
        batch_size=4,
        global_batch_size=128,
        train=("learning_rate: 1e-3",),
        settings=("{tree_nodes: 8}", "{tree_nodes: 63}"),
        formats=("medusa",),
        drafter_lines=_medusa,
    ),
    "eagle": KindDefaults(
        title="An EAGLE drafter",
        horizon=5,
        horizon_reason="tokens of each label; one draft token is trained, the others measure accepted lengths",
        epochs=4,
        batch_size=2,
        global_batch_size=16,
        train=("loss: kl", "learning_rate: 3e-5", "schedule: linear", "max_grad_norm: 0.5"),
        settings=("{depth: 4, top_k: 2, tree_nodes: 8}", "{depth: 6, top_k: 10, tree_nodes: 59}"),
        formats=("eagle1-vllm",),
        drafter_lines=_eagle,
    ),
    "draft_model": KindDefaults(
        title="An independent draft model",
        horizon=5,
        horizon_reason="tokens of each label: the target's continuation after each position",
        epochs=2,
        batch_size=2,
        global_batch_size=16,
        train=("learning_rate: 3e-4",),
        settings=("{length: 4, top_k: 1}", "{length: 5, top_k: 8, tree_nodes: 40}"),
        formats=(),
        drafter_lines=lambda target: [
            "init: target_layers # the target's own first layers; or path: DIR of a smaller model of the same tokenizer",
            f"num_layers: {max(1, min(4, target.num_layers // 4))}",
        ],
    ),
}
"""The kinds that `outrider init --drafter` knows."""
