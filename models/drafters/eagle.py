"""EAGLE-1 and EAGLE-2: one decoder layer that predicts the target's last hidden state at the next token.

Papers: arXiv 2401.15077 and 2406.16858.

    x = fc([e ; f]),   a = x + attention(x),   g = a + MLP(norm(a)),   logits = target's head(g)

(section 3.1). Here e is the target's frozen embedding of the next token. f is the target's last
hidden state, or the layer's previous output if that state isn't known yet. The layer has no norm at
its input and none at its output. The two papers differ only in the draft tree: EAGLE-1's has the same
shape in every text, and EAGLE-2's the most probable nodes. Here it is EAGLE-2's.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import nn
from torch.nn import functional as F

from ...data.types import DrafterBatch
from ..llm.hf_target import HFTarget
from .decoder_layer import make_layer, start_from_target
from .feature_drafter import StateDrafter, TextEntries
from .labels import Labels
from .objective import Loss, Objective
from .options import EagleConfig
from .scoring import score

CLASSIFICATION_WEIGHT = 0.1
"""Weight of the objective on tokens, beside the smooth L1 distance to the target's next feature (EAGLE-1,
section 3.2)."""
MEASURED_EVERY = 4
"""In training, untrained depths are measured at one position of so many, for an estimate: each costs a layer and a head."""


class Eagle(StateDrafter):
    """EAGLE-1 and EAGLE-2. The layer's output approximates the input of the target's head."""

    Config = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig, target: HFTarget) -> None:
        super().__init__(target, make_layer(target, target.hidden_size, config.layer), config.layer)
        self.config = config
        self.fc = nn.Linear(2 * target.hidden_size, target.hidden_size, bias=config.bias)
        self.layer.input_layernorm = nn.Identity()  # unused: no weights

    @classmethod
    def for_target(cls, config: EagleConfig, target: HFTarget) -> "Eagle":
        drafter = cls(config, target)
        if config.init == "target":
            start_from_target(drafter.layer, drafter.fc, target)
        return drafter

    def layer_inputs(
        self, inputs: Float[torch.Tensor, "batch seq hidden"], hidden: Float[torch.Tensor, "batch seq hidden"]
    ) -> tuple[Float[torch.Tensor, "batch seq hidden"], Float[torch.Tensor, "batch seq hidden"]]:
        pair = self.fc(torch.cat([inputs, hidden], dim=-1))
        return pair, pair

    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """Return the loss: regression to the next feature, plus the objective on tokens.

        Regression counts only where the continuation follows the text (EAGLE-1, section 3.2), at
        positions with a label, since sums are divided by the number of these.
        Untrained depths have no sums. They have counts and hits, for the estimate of accepted
        tokens; in training these come from every MEASURED_EVERY-th position.
        """
        # 1. Features, with noise in training only: validation must not change the random state.
        all_labels = Labels.of(batch)
        labels = all_labels.first(1)
        features = self.target_features(batch)
        noisy = features
        if self.training and self.config.feature_noise:
            noisy = features.float()
            noisy = noisy + self.config.feature_noise * (2 * torch.rand_like(noisy) - 1)
        # 2. The objective on tokens, at the first depth, which is the only one trained.
        text = self.read_text(batch, noisy)
        outputs = self.unroll(batch, labels, text)
        loss = score(self.logits, (outputs,), labels, batch, objective, vocabulary=self.vocabulary)
        # 3. The distance to the target's next features, and the weighted sum of both.
        next_features = features.flatten(0, 1)[labels.text_index]  # [position, depth, hidden]
        distance = F.smooth_l1_loss(outputs, next_features.to(outputs.dtype), reduction="none").mean(-1)
        regression = (distance * (labels.on_text & labels.known)).sum(0)
        sums = CLASSIFICATION_WEIGHT * loss.sums + regression
        # 4. Counts of the untrained depths.
        if all_labels.tokens.shape[1] > len(sums):
            loss = self._with_untrained_depths(loss, all_labels, batch, text)
        return replace(loss, sums=sums)

    @torch.no_grad()
    def _with_untrained_depths(self, loss: Loss, labels: Labels, batch: DrafterBatch, text: TextEntries) -> Loss:
        """Return the loss with counts and hits of the untrained depths added."""
        labels = labels.every(MEASURED_EVERY) if self.training else labels
        num_trained = len(loss.sums)
        outputs = self.unroll(batch, labels, text)
        measured = score(self.logits, (outputs,), labels, batch, Objective(), vocabulary=self.vocabulary)
        deeper = {name: getattr(measured, name)[num_trained:] for name in ("counts", "hits", "joint_hits")}
        return replace(loss, **{name: torch.cat([getattr(loss, name), values]) for name, values in deeper.items()})
