"""How a target is distilled."""

from dataclasses import dataclass, field

from ..data.manifest import FEATURES
from ..data.states import STATE_DTYPES


@dataclass(kw_only=True)  # not frozen: OmegaConf would refuse every override
class DistillConfig:
    """What is stored of the target's answers, and in which portions it is computed and written."""

    horizon: int = 5
    """Tokens of the target's own continuation that are labelled after every position."""

    features: str = "none"
    """`none` stores no hidden states (training recomputes them); `last_hidden` the target's last ones, which all drafters but
    EAGLE-3 and draft models read."""

    feature_layers: list[int] = field(default_factory=list)
    """Layers of the target whose inputs are stored: those that an EAGLE-3 drafter reads (drafter.feature_layers), which then
    trains without a pass of the target."""

    features_dtype: str = "bfloat16"
    """Type of the stored states: `bfloat16`, or `float8_e4m3fn` or `int8` with a scale for each token, in half the space."""

    top_k: int | None = None
    """So many of the target's likeliest next tokens are stored with their log-probabilities, at every position that training
    may ask for: what train.teacher=top_k learns from. None stores none."""

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
        if self.features_dtype not in STATE_DTYPES:
            problems.append(f"features_dtype is {self.features_dtype!r}; it must be one of {', '.join(STATE_DTYPES)}")
        elif self.features_dtype != "bfloat16" and not self.last_hidden and not self.feature_layers:
            problems.append(
                f"features_dtype is {self.features_dtype}, and nothing is stored in it; set features or feature_layers too"
            )
        if len(set(self.feature_layers)) < len(self.feature_layers) or min(self.feature_layers, default=0) < 0:
            problems.append(f"feature_layers is {self.feature_layers}; name different layers, from 0 on")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k is {self.top_k}; it must be at least 1, or null to store none")
        if problems:
            raise ValueError("distill configuration: " + "; ".join(problems))

    @property
    def last_hidden(self) -> bool:
        """Whether the target's last hidden states are stored."""
        return self.features == "last_hidden"
