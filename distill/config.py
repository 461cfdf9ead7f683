"""How a target is distilled."""

from dataclasses import dataclass

from ..data.manifest import FEATURES


@dataclass(kw_only=True)  # not frozen: OmegaConf would refuse every override
class DistillConfig:
    """What is stored of the target's answers, and in which portions it is computed and written."""

    horizon: int = 5
    """Tokens of the target's own continuation that are labelled after every position."""

    features: str = "none"
    """`none` stores tokens only (training recomputes hidden states); `last_hidden` adds the target's last hidden states in
    bfloat16, 2 * hidden_size bytes per token of text."""

    shard_examples: int = 256
    """Examples in a shard: what an interruption loses at most, and what is held in memory until it is written."""

    batch_tokens: int = 8192
    """Tokens of text, padding included, in one forward pass; a longer text goes alone. Its keys and values are kept for all
    labels of the batch: lower this where memory runs out."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}; it must be at least 1"
            for name in ("horizon", "shard_examples", "batch_tokens")
            if (value := getattr(self, name)) < 1
        ]
        if self.features not in FEATURES:
            problems.append(f"features is {self.features!r}; it must be one of {', '.join(FEATURES)}")
        if problems:
            raise ValueError("distill configuration: " + "; ".join(problems))
