"""Operations needed for labelling and training, by formula.

A multiplication and an addition are two operations. Only matrix products count. A linear layer
needs 2 x inputs x outputs per row in the forward pass, the same again for the gradient of its
weights, and again for that of its inputs. A term is left out if it isn't needed (frozen weights,
inputs without trained parameters before them). Attention needs 4 x heads x head_dim for every pair
of a query and a visible key, and three times that with its gradient. Embeddings, norms, softmaxes
and the optimizer don't count, as is usual.

These are necessary operations, not executed ones. Recomputation to save memory, masked entries and
padding take time, but don't count here. So the resulting share of the GPU's matrix rate is that of
useful work.
"""

from typing import Any, NamedTuple

FORWARD, FROZEN_INPUTS, FROZEN_WEIGHTS, TRAINED = 2, 4, 4, 6
"""Operations per weight and row: forward only; with the gradient of the weights; of the inputs; of
both."""


class Operations(NamedTuple):
    """Operations of linear layers and of attention."""

    linear: float
    attention: float = 0.0

    @property
    def total(self) -> float:
        return self.linear + self.attention

    def plus(self, other: "Operations") -> "Operations":
        return Operations(self.linear + other.linear, self.attention + other.attention)


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def layer_weights(config: Any, input_width: int | None = None) -> int:
    """Return the number of weights in a decoder layer's matrices.

    Its attention reads vectors of `input_width`, by default the model's hidden size.
    """
    hidden, head_dim, width = config.hidden_size, head_dim_of(config), input_width or config.hidden_size
    attention = width * (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
    return attention + config.num_attention_heads * head_dim * hidden + 3 * hidden * config.intermediate_size


def pair_operations(config: Any) -> int:
    """Return the operations of attention in a layer, forward, for a pair of query and key."""
    return 4 * config.num_attention_heads * head_dim_of(config)


def target_pass(config: Any, batch: int, seq: int, num_layers: int) -> Operations:
    """Return the operations of `num_layers` layers over `batch` texts, without head and
    gradient."""
    pairs = batch * seq * (seq + 1) / 2
    linear = FORWARD * layer_weights(config) * batch * seq
    return Operations(num_layers * linear, num_layers * pairs * pair_operations(config))


def labelling(config: Any, batch: int, seq: int, num_branch_tokens: int) -> Operations:
    """Return the operations of `label_continuations` for all positions.

    These are a prefill with the head at each position, and the branches' tokens. Branches begin all
    over the text, so on average they see half of it.
    """
    num_layers, head = config.num_hidden_layers, config.hidden_size * config.vocab_size
    branches = Operations(
        FORWARD * num_branch_tokens * (num_layers * layer_weights(config) + head),
        num_layers * num_branch_tokens * (seq + 1) / 2 * pair_operations(config),
    )
    return target_pass(config, batch, seq, num_layers).plus(branches).plus(Operations(FORWARD * head * batch * seq))


def redrafter(drafter: Any, *, positions: int, depths: int) -> Operations:
    """Return the operations of one training step of a ReDrafter with a full head.

    There are `positions` labels at each of the `depths`. The states of the first depth are
    embeddings. At other depths the token goes through W, and the previous state through U.
    """
    hidden, width, outputs = drafter.hidden_size, drafter.exit_width, drafter.head.out_features
    recurrence = (depths - 1) * (TRAINED + FROZEN_INPUTS) * hidden**2 - (TRAINED - FROZEN_INPUTS) * hidden**2
    projection = 0 if width == 2 * hidden else 2 * hidden * width
    per_label = TRAINED * (projection + drafter.config.num_blocks * width**2 + width * outputs)
    return Operations(positions * (recurrence + depths * per_label))


def medusa(drafter: Any, *, positions: int, depths: int) -> Operations:
    """Return the operations of one training step of residual heads with separate output layers.

    The first block's input is frozen.
    """
    vocab, hidden = drafter.lm_heads[0].weight.shape
    blocks = FROZEN_INPUTS + TRAINED * (drafter.config.num_layers - 1)
    return Operations(positions * depths * (blocks * hidden**2 + TRAINED * hidden * vocab))


def eagle3(drafter: Any, config: Any, *, batch: int, seq: int, positions: int, depths: int) -> Operations:
    """Return the operations of one training step of EAGLE-3 with the target as teacher.

    For the text before a branch only the layer's keys and values are needed. At each depth the
    whole layer is needed, over half the text on average and the branch's entries. Each label needs
    the drafter's head. The teacher needs the target's head for at most each token of the text.
    """
    hidden, kv_width = config.hidden_size, config.num_key_value_heads * head_dim_of(config)
    entries = positions * depths
    fusion = FROZEN_INPUTS * drafter.fc.in_features * hidden * batch * seq
    text = TRAINED * 2 * (2 * hidden) * kv_width * batch * seq
    layer = TRAINED * layer_weights(config, input_width=2 * hidden) * entries
    heads = TRAINED * drafter.lm_head.out_features * hidden * entries
    heads += FORWARD * config.vocab_size * hidden * min(entries, batch * seq)
    pairs = entries * ((seq + 1) / 2 + (depths + 1) / 2)
    return Operations(fusion + text + layer + heads, 3 * pairs * pair_operations(config))
