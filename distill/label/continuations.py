"""The target's continuation of every position of a text, greedy or sampled, in a pass per token.

Decoding the next `horizon` tokens after each of n positions one by one takes n * horizon passes.
Here pass 1 is the usual prefill, which gives the first token after all positions. Pass k reads, for
all positions at once, the token that pass k - 1 chose (see `branch_attention`). And where the
target's first token equals the text's next token, nothing is decoded at all:

    text           a b c d    continuation(i) = [text(i + 1)] + continuation(i + 1) less its last token
    first tokens   b y d z    so position 0 borrows from 1, and 2 from 3; only 1 and 3 are branches

With an agreement rate a, and a label at every position, the work is about 1 + (1 - a)(horizon - 1)
prefills.

The same holds for sampled continuations, because the random number of a token belongs to its place
in the text (`SampledLabels`). After the same tokens, the same place gets the same token: position 0
would sample what position 1 has sampled. Within a continuation the random numbers are independent,
so each continuation is a sample from the target's distribution after its position.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from transformers import DynamicCache, PreTrainedModel

from ...data.device import to_device
from ...data.types import UNKNOWN
from ...models.llm.hf_target import HFTarget
from ...models.llm.hidden_states import without_head
from ...models.llm.tree_attention import attention_kinds
from ...models.machine import is_for_users
from .branch_attention import BYPASSED, REMEDY, BranchCache, branch_attention, require_plain_scores
from .features import TextFeatures
from .next_tokens import SampledLabels, greedy, next_tokens

# Largest errors that rounding explains: relative ones of hidden states, and distances of a chosen logit to the best one, in
# standard deviations of the logits. In types of at least float32's precision, and in narrower types.
PROBE_TOLERANCE, NARROW_PROBE_TOLERANCE = 0.01, 0.25

# Length of the text that the target is probed with, beyond its longest window.
PROBE_TOKENS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelStats:
    """Work of labelling.

    `num_positions` counts wanted positions. At `num_agreeing` of them the target's first token is
    the text's next token. `num_branch_tokens` tokens were read in addition to the `num_text_tokens`
    of the prefill; padding isn't counted.
    """

    num_text_tokens: int
    num_positions: int
    num_agreeing: int
    num_branch_tokens: int

    @property
    def agreement(self) -> float:
        """Share of wanted positions where the target's first token is the text's next token."""
        return self.num_agreeing / max(1, self.num_positions)


@torch.inference_mode()
def label_continuations(
    target: HFTarget,
    input_ids: Int[torch.Tensor, "batch seq"],
    attention_mask: Bool[torch.Tensor, "batch seq"],
    wanted: Bool[torch.Tensor, "batch seq"],
    *,
    horizon: int,
    feature_layers: tuple[int, ...] = (),
    top_k: int | None = None,
    sampled: SampledLabels | None = None,
    read: tuple[Float[torch.Tensor, "batch seq hidden"], dict[int, Float[torch.Tensor, "batch seq hidden"]]] | None = None,
    branches: bool = True,
) -> tuple[Int[torch.Tensor, "batch seq horizon"], TextFeatures, LabelStats]:
    """Return the target's next `horizon` tokens after every wanted position: greedy, or `sampled`.

    Texts are right-padded. Entry [b, i, k] is the target's token k + 1 tokens after position i. It
    is UNKNOWN at positions that aren't wanted, and after a stop token, which is itself a label.

    Also returns the last hidden states, the inputs of `feature_layers`, and the `top_k` top tokens
    of every needed position. Without `branches` nothing is decoded, and the label of a position where the
    target disagrees with the text ends after its first token. So it is with `read`, states that another program computed.

    What is decoded is decided on the host, which the texts may be on. So the host waits for the first
    tokens, and for each further token except the last one. It also reads the texts if they are on the
    device.
    """
    # 1. Prefill: the first token after each position that a label may need.
    host_ids, *marks = torch.stack([input_ids, attention_mask, wanted]).cpu().numpy()  # at most one transfer
    is_token, host_wanted = (mark.astype(bool) for mark in marks)
    assert not (is_token[:, 1:] & ~is_token[:, :-1]).any(), "texts are padded on the right"
    input_ids, wanted = to_device(input_ids, target.device), to_device(wanted, target.device)
    needed = to_device(np.flatnonzero(_within(host_wanted, is_token, horizon)), target.device)
    cache = DynamicCache() if branches and read is None else None
    hidden_states, layers = _prefill(target, input_ids, feature_layers, cache) if read is None else read
    rows, columns = needed // input_ids.shape[1], needed % input_ids.shape[1] + 1
    tokens, top = next_tokens(target.model, hidden_states.flatten(0, 1)[needed], rows, columns, sampled, top_k=top_k)
    first = _at(needed, tokens, input_ids.shape, UNKNOWN)
    # 2. Where the target agrees with the text, a position borrows the next one's continuation.
    host_first = first.cpu().numpy()
    agrees = np.zeros_like(host_wanted)
    agrees[:, :-1] = (host_first[:, :-1] == host_ids[:, 1:]) & is_token[:, 1:]
    borrows = agrees & ~np.isin(host_first, target.stop_ids)
    depth = _needed_depth(host_wanted, borrows, horizon)

    # 3. Decode the other positions as branches, and fill in borrowed tokens.
    if cache is None:
        # No branches: of the keys only device and type are read.
        no_keys, no_places = [hidden_states[:, None]], np.zeros(0, np.int64)
        live = BranchCache(no_keys, no_keys, no_places, no_places)
    else:
        live = _make_branches(cache, *((depth > 1) & ~borrows).nonzero())
    continuations, num_branch_tokens = _decode_branches(target, live, first, host_first, depth, borrows, horizon, sampled)
    # 4. Keep the wanted labels, and count the work.
    continuations.masked_fill_(~wanted[..., None], UNKNOWN)
    stats = LabelStats(
        num_text_tokens=int(is_token.sum()),
        num_positions=int(host_wanted.sum()),
        num_agreeing=int((agrees & host_wanted).sum()),
        num_branch_tokens=num_branch_tokens,
    )
    features = TextFeatures(
        hidden_states=hidden_states,
        layers=layers,
        top_tokens=None if top is None else _at(needed, top.tokens, input_ids.shape, UNKNOWN),
        top_log_probs=None if top is None else _at(needed, top.log_probs, input_ids.shape, -math.inf),
    )
    return continuations, features, stats


def _decode_branches(
    target: HFTarget,
    branches: BranchCache,
    first: Int[torch.Tensor, "batch seq"],
    host_first: Int[np.ndarray, "batch seq"],
    depth: Int[np.ndarray, "batch seq"],
    borrows: Bool[np.ndarray, "batch seq"],
    horizon: int,
    sampled: SampledLabels | None,
) -> tuple[Int[torch.Tensor, "batch seq horizon"], int]:
    """Return the continuations of `first`, and the number of tokens that were decoded for them.

    A branch gets one token per pass, until its `depth` or a stop token. A position that `borrows`
    has the next position's continuation after its first token.
    """
    # 1. The first tokens.
    continuations = torch.full((*first.shape, horizon), UNKNOWN, dtype=torch.long, device=first.device)
    continuations[:, :, 0] = first
    is_borrowed = to_device(borrows[:, :-1], first.device)
    tokens, num_branch_tokens = first[branches.rows, branches.positions], 0
    host_tokens = host_first[branches.host_rows, branches.host_positions]
    with branch_attention(target.model):
        for step in range(1, horizon):
            # 2. Drop the branches that are complete.
            is_live = depth[branches.host_rows, branches.host_positions] > step
            is_live &= ~np.isin(host_tokens, target.stop_ids)
            if not is_live.all():
                tokens = tokens[branches.keep(np.flatnonzero(is_live))]
            # 3. Decode a token of all others in one pass, and fill in borrowed ones.
            if len(tokens):
                states = _branch_hidden_states(target.model, branches, tokens, step)
                tokens, _ = next_tokens(target.model, states, branches.rows, branches.positions + step + 1, sampled)
                continuations[branches.rows, branches.positions, step] = tokens
                num_branch_tokens += len(tokens)
            borrowed = continuations[:, 1:, step - 1]
            continuations[:, :-1, step] = torch.where(is_borrowed, borrowed, continuations[:, :-1, step])
            # 4. Read the tokens, which may be stop tokens: the pass's only wait.
            if step + 1 < horizon:
                host_tokens = tokens.cpu().numpy()
    return continuations, num_branch_tokens


def require_labels(target: HFTarget, num_tokens: int, horizon: int, *, branches: bool) -> None:
    """Raise ValueError if texts of up to `num_tokens` tokens can't be labelled correctly.

    With branches, up to `horizon` - 2 tokens after a text are read, too: its last position gets no label.
    """
    num_tokens += max(horizon - 2, 0) if branches else 0
    require_window(target, num_tokens)
    require_plain_labels(target)
    if branches:
        require_branch_attention(target, num_tokens)


@torch.inference_mode()
def require_plain_labels(target: HFTarget) -> None:
    """Raise ValueError if the head, on the last hidden states of a text, doesn't choose the model's own next tokens.

    Some models change the states before the head: labels, which only the head makes, would miss that.
    """
    text = target.probe_ids[None]
    states, _ = _prefill(target, text, (), None)
    logits = target.model(text, use_cache=False).logits[0].float()
    chosen = greedy(target.model, states[0])
    regret = ((logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]) / logits.std(-1)).max().item()
    if not regret < (PROBE_TOLERANCE if target.is_precise else NARROW_PROBE_TOLERANCE):
        raise ValueError(
            f"{type(target.model).__name__} does more than its output layer with its last hidden states (its choice is "
            f"{regret:.2g} standard deviations below the best logit), so its labels would be wrong. Choose another target"
        )


def require_window(target: HFTarget, num_tokens: int) -> None:
    """Raise ValueError if texts of up to `num_tokens` tokens, decoded labels included, exceed the context window."""
    if num_tokens > target.context_length:
        raise ValueError(
            f"a text and its labels take up to {num_tokens} tokens, but the target's context window has "
            f"{target.context_length}: lower data.max_length by at least {num_tokens - target.context_length}"
        )


def require_branch_attention(target: HFTarget, num_tokens: int) -> None:
    """Raise ValueError if branches of texts of up to `num_tokens` tokens, branches included, can't be read correctly.

    Besides the configuration, this tests that branches of a short text have the same hidden states as
    plain forward passes.
    """
    require_plain_scores(target.model)
    windows = [window for window in attention_kinds(target.model).values() if window is not None and window < num_tokens]
    try:
        _probe(target, max([PROBE_TOKENS, *(window + PROBE_TOKENS for window in windows)]))
    except (TypeError, AttributeError, LookupError, RuntimeError, ValueError) as error:
        if is_for_users(error):
            raise
        name = type(target.model).__name__
        raise ValueError(f"{name} can't decode branches: its own code in transformers failed with them{REMEDY}") from error


@torch.inference_mode()
def _probe(target: HFTarget, num_tokens: int) -> None:
    # 1. Two branches of a text that is longer than a window, two steps deep.
    text = target.probe_ids.repeat(-(-num_tokens // len(target.probe_ids)))[:num_tokens]
    positions = np.array([4, num_tokens - 4])
    tokens = text[[2, 9]]
    cache = DynamicCache()
    _prefill(target, text[None], (), cache)
    branches = _make_branches(cache, np.zeros_like(positions), positions)
    with branch_attention(target.model):
        _branch_hidden_states(target.model, branches, tokens, 1)
        branch_states = _branch_hidden_states(target.model, branches, tokens, 2)
    # 2. Compare their hidden states and choices with plain passes of the same tokens.
    tolerance = PROBE_TOLERANCE if target.is_precise else NARROW_PROBE_TOLERANCE
    for index, position in enumerate(positions.tolist()):
        plain_text = torch.cat([text[: position + 1], tokens[index].expand(2)])[None]
        plain_states = target.hidden_states(plain_text)[0][0, -1].float()
        logits = target.model(plain_text, use_cache=False).logits[0, -1].float()
        error = ((branch_states[index].float() - plain_states).norm() / plain_states.norm()).item()
        regret = ((logits.max() - logits[greedy(target.model, branch_states[index : index + 1])]) / logits.std()).item()
        if not max(error, regret) < tolerance:
            raise ValueError(
                f"{type(target.model).__name__} decodes branches differently from plain texts (relative error {error:.2g} of "
                f"its hidden states, a choice {regret:.2g} standard deviations below the best logit): its attention or head "
                f"does more than outrider supports, so its labels would be wrong{REMEDY}"
            )


def _make_branches(cache: DynamicCache, rows: Int[np.ndarray, " branch"], positions: Int[np.ndarray, " branch"]) -> BranchCache:
    layers: list[Any] = cache.layers
    if not layers or any(layer.keys is None for layer in layers):
        raise ValueError(BYPASSED)
    return BranchCache([layer.keys for layer in layers], [layer.values for layer in layers], rows, positions)


def _prefill(
    target: HFTarget, input_ids: Int[torch.Tensor, "batch seq"], feature_layers: tuple[int, ...], cache: DynamicCache | None
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Read texts; return their last hidden states and the inputs of layers. Keys and values go to `cache`."""
    # No mask: under causal attention no token sees the padding on its right.
    hidden_states, features = target.read_texts(feature_layers, cache, input_ids=input_ids)
    inputs = () if features is None else features.split(hidden_states.shape[-1], dim=-1)
    return hidden_states, dict(zip(feature_layers, inputs, strict=True))


def _at(
    places: Int[torch.Tensor, " place"], values: Shaped[torch.Tensor, "place ..."], shape: torch.Size, otherwise: int | float
) -> Shaped[torch.Tensor, "batch seq ..."]:
    """Put values at `places` among all batch x seq tokens, and `otherwise` elsewhere."""
    whole = values.new_full((shape.numel(), *values.shape[1:]), otherwise)
    return whole.index_copy_(0, places, values).unflatten(0, shape)


def _within(
    wanted: Bool[np.ndarray, "batch seq"], is_token: Bool[np.ndarray, "batch seq"], horizon: int
) -> Bool[np.ndarray, "batch seq"]:
    """Mark the wanted positions and the next horizon - 1 after each.

    Labels may need the first tokens of all these positions.
    """
    labelled = wanted.copy()
    for _ in range(horizon - 1):
        labelled[:, 1:] |= labelled[:, :-1].copy()
    return labelled & is_token


def _needed_depth(
    wanted: Bool[np.ndarray, "batch seq"], borrows: Bool[np.ndarray, "batch seq"], horizon: int
) -> Int[np.ndarray, "batch seq"]:
    """Return the number of tokens needed of each position's continuation.

    A wanted position needs `horizon` tokens. If its left neighbour borrows from it, it needs at
    least one less than the neighbour.
    """
    depth = wanted * horizon
    for _ in range(horizon - 1):
        lent = np.where(borrows, depth - 1, 0)
        depth[:, 1:] = np.maximum(depth[:, 1:], lent[:, :-1])
    return depth


def _branch_hidden_states(
    model: PreTrainedModel, branches: BranchCache, tokens: Int[torch.Tensor, " branch"], step: int
) -> Float[torch.Tensor, "branch hidden"]:
    """Read one token per branch, the `step`-th after its text, and return the hidden states."""
    # All tokens are in one row, so linear layers see no padding; the attention separates the
    # branches.
    positions = branches.positions + step
    output = without_head(model)(input_ids=tokens[None], position_ids=positions[None], use_cache=False, branches=branches)
    if branches.num_steps != step:
        raise ValueError(BYPASSED)
    hidden_states: torch.Tensor = output.last_hidden_state[0]
    return hidden_states
