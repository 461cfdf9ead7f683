"""Audit of answers that differ from the baseline's.

The audit feeds such an answer to the plain model and checks whether the rounding noise of its
arithmetic explains the difference.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch.nn.functional import pad

from ...models.decoding.sampling import MIN_PRECISION, RowSeeds
from ...models.decoding.tree import accepted_path, empty_tree
from ...models.decoding.types import Prompts
from ...models.llm.hf_target import HFTarget
from ..records.run_files import Audit

MAX_NOISE = 0.25
"""Largest noise of a pass that may explain a difference: its root mean square over a position's logits, as a
share of their standard deviation. The largest difference of a single logit would
grow with the vocabulary. SmolLM2 in bfloat16 has 0.02 at most positions, and 0.19 at a digit; logits of another
token have 1."""
MAX_LOUD = 8
"""Most positions of an answer whose noise is above MAX_NOISE and is measured again."""
LENGTHS = (0, 1, 16)
"""Tokens of the answer behind a position when it is read again: kernels round differently in passes of different length."""
TINY, HUGE = 1e-30, 1e30
"""Noise in place of none, in a ratio, and in place of one that isn't a number, which JSON doesn't have."""
ROUNDING = 8
"""Noise that softmax and the division by the clocks add to sampled scores, in units of the
sampler's precision."""


@torch.inference_mode()
def audits(
    target: HFTarget,
    prompt: Int[torch.Tensor, "1 seq"],
    answers: Sequence[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Audit]:
    """Feed answers to one prompt to the plain model, token by token and all at once.

    Each has up to `max_new_tokens`. It is greedy at temperature 0. Above 0 it was sampled with
    `RowSeeds([seed])`.
    """
    # Token by token: the logits of plain decoding, step by step through the KV cache. The answers are rows of a batch, and
    # one that has ended goes on with its last token, unread.
    longest = max(map(len, answers))
    rows = [torch.tensor([answer], device=prompt.device) for answer in answers]
    tokens = torch.cat([pad(row, (0, longest - row.shape[1]), value=int(row[0, -1])) for row in rows])
    prompts = Prompts.of(prompt.expand(len(answers), -1))
    plain = [target.prefill(prompts, max_new_tokens=longest, max_nodes=0).logits[:, -1]]
    nothing = empty_tree(len(answers), prompt.device)
    for index in range(longest - 1):
        plain.append(target.verify(tokens[:, index], nothing).logits[:, -1].clone())  # a recorded pass overwrites its output
        target.commit(nothing, accepted_path(nothing, [[]] * len(answers)))
    found = []
    for row, answer in enumerate(answers):
        # All at once: the bare model without KV cache, mask or tree, so that the code under audit has no part in the check.
        text = torch.cat([prompt, rows[row][:, :-1]], dim=1)
        at_once = target.plain_logits(text, len(answer))[0]
        stepwise = torch.stack([logits[row] for logits in plain[: len(answer)]])
        again = partial(read_again, target, text, stepwise)
        found.append(_compare(stepwise, at_once, again, answer, target.stop_ids, max_new_tokens, temperature, seed))
    return found


def audit(target: HFTarget, prompt: Int[torch.Tensor, "1 seq"], token_ids: list[int], **options: Any) -> Audit:
    """Audit one answer (see `audits`)."""
    return audits(target, prompt, [token_ids], **options)[0]


def _noise(one: Float[torch.Tensor, "*rows vocab"], other: Float[torch.Tensor, "*rows vocab"]) -> Float[torch.Tensor, "*rows"]:
    """Return the noise of a pass at each position. Both passes have noise, so it is their difference over the root of 2."""
    return ((one - other).square().mean(-1) / 2).sqrt()


def read_again(
    target: HFTarget,
    text: Int[torch.Tensor, "1 seq"],
    stepwise: Float[torch.Tensor, "token vocab"],
    position: int,
    limit: float,
) -> Float[torch.Tensor, " vocab"] | None:
    """Return the logits at a position in another pass of the bare model, which differ from decoding's by at most `limit`.

    Passes of the bare model differ from each other too: rarely, and at single positions, by as much as MAX_NOISE. None if
    no pass comes so near.
    """
    end = text.shape[1] - len(stepwise) + position + 1
    for part in (text[:, : end + more] for more in LENGTHS):
        logits = target.plain_logits(part, part.shape[1] - end + 1)[0, 0]
        if float(_noise(stepwise[position], logits.to(stepwise.dtype))) <= limit:
            return logits
    return None


def _compare(
    stepwise: Float[torch.Tensor, "token vocab"],
    at_once: Float[torch.Tensor, "token vocab"],
    again: Callable[[int, float], torch.Tensor | None],
    token_ids: list[int],
    stop_ids: Collection[int],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Audit:
    # 1. The noise of each position.
    stepwise = stepwise.to(torch.promote_types(stepwise.dtype, MIN_PRECISION))  # as `warp` takes them
    at_once = at_once.to(stepwise.dtype)
    limits = MAX_NOISE * stepwise.std(-1)
    loud = (~(_noise(stepwise, at_once) <= limits)).nonzero()[:, 0].tolist()  # NaN is loud
    explained = len(loud) <= MAX_LOUD
    for position in loud if explained else ():
        # What explains a deficit here is the noise of the nearer pass.
        if (logits := again(position, float(limits[position]))) is None:
            explained = False
            break
        at_once[position] = logits
    # A position's own noise, or what is usual in the answer: rounding differs from pass to pass.
    noises = (stepwise - at_once).abs().amax(-1)
    noises = noises.maximum(noises.median())
    if temperature > 0:
        noises = noises / temperature + ROUNDING * torch.finfo(stepwise.dtype).eps

    # 2. The deficit of each position: the distance between the best score and the score of the answer's token. The worst
    # one is the largest in units of its noise.
    noise, deficit, worst = float(noises.max()), 0.0, 0
    largest = 0.0
    for position, (logits, token) in enumerate(zip(stepwise, token_ids, strict=True)):
        scores = logits.cpu().double()  # float64 adds no rounding here
        if temperature > 0:
            # The arg-max of probs / clocks, which was drawn, is that of logits / temperature - log(clocks).
            here = torch.zeros(1, dtype=torch.long, device=logits.device)
            clocks = RowSeeds([seed], [position]).clocks(logits[None], here, len(logits))[0, 0]
            scores = scores / temperature - clocks.cpu().double().log()
        distance, own_noise = float(scores.max() - scores[token]), float(noises[position])
        explained &= distance <= 2 * own_noise
        if (share := distance / max(own_noise, TINY)) > largest:
            largest, noise, deficit, worst = share, own_noise, distance, position

    # 3. The verdict: noise must explain each deficit, and the answer must end at its first stop token or at the limit.
    stops = [position for position, token in enumerate(token_ids) if token in stop_ids]
    num_tokens = len(token_ids)
    ends_rightly = stops == [num_tokens - 1] or (not stops and num_tokens == max_new_tokens)
    if not ends_rightly:
        worst = stops[0] + 1 if stops and stops[0] + 1 < num_tokens else num_tokens - 1
    deficit, noise = (value if math.isfinite(value) else HUGE for value in (deficit, noise))
    return Audit(
        deficit=deficit, position=worst, noise=noise, ends_rightly=ends_rightly, within_noise=explained and ends_rightly
    )
