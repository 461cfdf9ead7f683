"""Operations that distilling and training need, by formula: a multiplication and an addition are
two.

Counted are the products of matrices: a linear layer takes 2 x inputs x outputs for every row,
forward, as much again for the gradient of its weights, and again for that of its inputs; a factor
is left out where it isn't needed (frozen weights, inputs that nothing trained has made). Attention
takes 4 x heads x head_dim for every pair of a query and a key that it sees, and three times that
with its gradient. Embeddings, norms, softmaxes and the optimizer are left out, as is usual.

Needed, not done: what is recomputed to save memory, computed under a mask or for padding adds time
and nothing here. So the share of the card's matrix rate that follows is of useful work.
"""

from typing import Any, NamedTuple

FORWARD, FROZEN_INPUTS, FROZEN_WEIGHTS, TRAINED = 2, 4, 4, 6
"""Operations per weight and row: forward alone; with the gradient of the weights, of the inputs, of both."""


class Operations(NamedTuple):
    """What linear layers and what attention take."""

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
    """Weights of a decoder layer's matrices, whose attention reads vectors of `input_width`: by
    default the model's own.
    """
    hidden, head_dim, width = config.hidden_size, head_dim_of(config), input_width or config.hidden_size
    attention = width * (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
    return attention + config.num_attention_heads * head_dim * hidden + 3 * hidden * config.intermediate_size


def pair_operations(config: Any) -> int:
    """Count the forward operations of attention in a layer, for a query and a key."""
    return 4 * config.num_attention_heads * head_dim_of(config)


def target_pass(config: Any, batch: int, seq: int, num_layers: int) -> Operations:
    """Count `num_layers` layers over `batch` texts of `seq` tokens, without head and gradient."""
    pairs = batch * seq * (seq + 1) / 2
    linear = FORWARD * layer_weights(config) * batch * seq
    return Operations(num_layers * linear, num_layers * pairs * pair_operations(config))


def labelling(config: Any, batch: int, seq: int, num_branch_tokens: int) -> Operations:
    """`label_continuations` of all positions: a prefill with the head at each, and the tokens of
    branches, which begin all over the text and so see half of it.
    """
    num_layers, head = config.num_hidden_layers, config.hidden_size * config.vocab_size
    branches = Operations(
        FORWARD * num_branch_tokens * (num_layers * layer_weights(config) + head),
        num_layers * num_branch_tokens * (seq + 1) / 2 * pair_operations(config),
    )
    return target_pass(config, batch, seq, num_layers).plus(branches).plus(Operations(FORWARD * head * batch * seq))


def redrafter(drafter: Any, *, positions: int, depths: int) -> Operations:
    """One step's forward and backward of a ReDrafter with a full head at `positions` labels of each
    of the `depths`.

    The states of the first depth are embeddings; the token that each other depth reads goes through
    W, the state before it through U.
    """
    hidden, width, outputs = drafter.hidden_size, drafter.exit_width, drafter.head.out_features
    recurrence = (depths - 1) * (TRAINED + FROZEN_INPUTS) * hidden**2 - (TRAINED - FROZEN_INPUTS) * hidden**2
    projection = 0 if width == 2 * hidden else 2 * hidden * width
    per_label = TRAINED * (projection + drafter.config.num_blocks * width**2 + width * outputs)
    return Operations(positions * (recurrence + depths * per_label))


def medusa(drafter: Any, *, positions: int, depths: int) -> Operations:
    """One step's forward and backward of residual heads with output layers of their own.

    The first block's input is frozen.
    """
    vocab, hidden = drafter.lm_heads[0].weight.shape
    blocks = FROZEN_INPUTS + TRAINED * (drafter.config.num_layers - 1)
    return Operations(positions * depths * (blocks * hidden**2 + TRAINED * hidden * vocab))


def eagle3(drafter: Any, config: Any, *, batch: int, seq: int, positions: int, depths: int) -> Operations:
    """One step's forward and backward of EAGLE-3 with the target's distribution as its teacher.

    Of the text before a branch the layer's keys and values are needed; at each depth all of the
    layer, over half the text in the mean and the branch's own entries; for each label the drafter's
    head; and the target's, as the teacher, for each token of the text that labels meet, at most.
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
