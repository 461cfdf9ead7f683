"""EAGLE-1 and EAGLE-2: one decoder layer that predicts the target's next last hidden state (arXiv 2401.15077, 2406.16858).

    x = fc([e ; f]),   a = x + attention(x),   g = a + MLP(norm(a)),   logits = target's head(g)        (section 3.1)

with e the target's own frozen embedding of the next token and f the target's last hidden state, or the layer's own output where
that isn't known yet. The layer has no norm at its input and none at its output. The two papers differ in the draft tree alone
(`tree: static` and `tree: dynamic`).
"""

from dataclasses import replace
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import nn
from torch.nn import functional as F

from ...data.fields import OPTIONS, PositiveInt, one_of
from ...data.types import DrafterBatch
from ..decoding.types import TargetOutput
from ..target.hf_target import HFTarget
from .decoder_layer import start_from_target
from .feature_drafter import FeatureDrafter, TreeOptions
from .objective import Labels, Loss, Objective, score

MEASURED_EVERY = 4
"""Depths that aren't trained cost a layer and a head each, for an estimate: so it is made of a share of the positions."""


@dataclass(kw_only=True, config=OPTIONS)
class EagleConfig(TreeOptions):
    """How an EAGLE-1 or EAGLE-2 drafter is trained, and how it drafts by default."""

    bias: bool = False
    """Whether `fc` has a bias."""
    init: Annotated[str, one_of("random", "target")] = "target"
    """`target`: the layer starts as the target's last one, but adds nothing yet, so that it lets the feature through; `random`:
    from nothing, as in the paper."""
    regression_weight: NonNegativeFloat = 1.0
    """Weight of the smooth L1 distance to the target's next feature (EAGLE-1, section 3.2)."""
    classification_weight: NonNegativeFloat = 0.1
    """Weight of the objective on the tokens."""
    feature_noise: NonNegativeFloat = 0.1
    """In training, uniform noise of up to this size is added to the features (EAGLE-1, section 3.2)."""
    unroll: PositiveInt = 1
    """Depths trained; the papers train the first only. Deeper ones are fed the drafter's own outputs, as in drafting."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.regression_weight and not self.classification_weight:
            raise ValueError("regression_weight and classification_weight are both 0; nothing would be learned")


class Eagle(FeatureDrafter):
    """The drafter of features: what it feeds back is what the target's head reads."""

    Config = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig, target: HFTarget) -> None:
        super().__init__(target, input_width=target.hidden_size, form=config.layer)
        self.config = config
        self.fc = nn.Linear(2 * target.hidden_size, target.hidden_size, bias=config.bias)
        self.layer.input_layernorm = nn.Identity()
        # Read, not owned: in a tuple, it is neither saved nor trained with the drafter.
        self._head = (target.head,)

    @classmethod
    def for_target(cls, config: EagleConfig, target: HFTarget) -> "Eagle":
        drafter = cls(config, target)
        with torch.device(target.device):  # sizes may be asked for without memory: the target is there all the same
            target.require_plain_head()
        if config.init == "target":
            start_from_target(drafter.layer, drafter.fc, target)
        return drafter

    def target_features(self, source: TargetOutput | DrafterBatch) -> Float[torch.Tensor, "batch seq hidden"]:
        if source.hidden_states is None:
            raise ValueError("EAGLE reads the target's hidden states, and the batch has none; distil them or recompute them")
        return source.hidden_states

    def fuse(self, features: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch hidden"]:
        return features.to(self.fc.weight.dtype)

    def layer_inputs(
        self, embeddings: Float[torch.Tensor, "batch seq hidden"], hidden: Float[torch.Tensor, "batch seq hidden"]
    ) -> tuple[Float[torch.Tensor, "batch seq hidden"], Float[torch.Tensor, "batch seq hidden"]]:
        pair = self.fc(torch.cat([embeddings, hidden], dim=-1))
        return pair, pair

    def logits(self, outputs: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch vocab"]:
        head = self._head[0]
        logits: torch.Tensor = head(outputs.to(head.weight.dtype))
        return logits

    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """Regression of the target's next feature, where the continuation keeps to the text, and the objective on the tokens
        (EAGLE-1, section 3.2). Depths that aren't trained have no sums: they are counted for the estimate of what decoding
        accepts, in training at every MEASURED_EVERY-th position.
        """
        all_labels = Labels.of(batch)
        labels = all_labels.first(self.config.unroll)
        features = self.target_features(batch)
        noisy = features
        if self.training and self.config.feature_noise:  # otherwise nothing is drawn: validation must not change training
            noisy = features + self.config.feature_noise * (2 * torch.rand_like(features) - 1)
        outputs = self.unroll(batch, labels, noisy)
        loss = self._score(labels, outputs, batch, objective)
        next_features = features.flatten(0, 1)[labels.text_index]  # [position, depth, hidden]
        distance = F.smooth_l1_loss(outputs, next_features.to(outputs.dtype), reduction="none").mean(-1)
        regression = (distance * (labels.on_text & labels.known)).sum(0)
        sums = self.config.classification_weight * loss.sums + self.config.regression_weight * regression
        if all_labels.tokens.shape[1] > len(sums):
            loss = self._with_untrained_depths(loss, batch, noisy, objective)
        return replace(loss, sums=sums)

    @torch.no_grad()
    def _with_untrained_depths(
        self, loss: Loss, batch: DrafterBatch, features: Float[torch.Tensor, "batch seq hidden"], objective: Objective
    ) -> Loss:
        """The loss with counts and hits of the depths behind those that it is of."""
        if self.training:
            places = batch.positions.flatten().nonzero()[:, 0][::MEASURED_EVERY]
            positions = torch.zeros_like(batch.positions).flatten().index_fill(0, places, True)
            batch = replace(batch, positions=positions.view_as(batch.positions))
        labels, num_trained = Labels.of(batch), len(loss.sums)
        measured = self._score(labels, self.unroll(batch, labels, features), batch, objective, trained_depths=0)
        deeper = {name: getattr(measured, name)[num_trained:] for name in ("counts", "hits", "joint_hits")}
        return replace(loss, **{name: torch.cat([getattr(loss, name), values]) for name, values in deeper.items()})

    def _score(
        self,
        labels: Labels,
        outputs: Float[torch.Tensor, "position depth hidden"],
        batch: DrafterBatch,
        objective: Objective,
        trained_depths: int | None = None,
    ) -> Loss:
        rows = (outputs[labels.known],)
        return score(self.logits, rows, labels, batch, objective, vocabulary=self.vocabulary, trained_depths=trained_depths)
