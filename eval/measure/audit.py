"""The audit of answers that differ.

Forced through the plain model, are they its own within the noise of its arithmetic?
"""

import torch
from jaxtyping import Int

from ...models.decoding.prompts import Prompts
from ...models.decoding.sampling import MIN_PRECISION, wind_clocks
from ...models.decoding.tree import empty_tree
from ...models.decoding.types import AcceptedPath, Counts
from ...models.target.hf_target import HFTarget
from ..records.run_files import Audit

MAX_NOISE = 0.25
"""Of the logits' standard deviation: rounding in bfloat16 makes a tenth of that."""
ROUNDING = 8
"""Units of the sampler's precision: what softmax and the division by the clocks add to the noise of
sampled scores."""


@torch.inference_mode()
def audit(
    target: HFTarget,
    prompt: Int[torch.Tensor, "1 seq"],
    token_ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Audit:
    """Force an answer through the plain model, token by token and all at once.

    The answer is a greedy one, or, at a `temperature` above 0, one sampled with `RowSeeds([seed])`,
    of up to `max_new_tokens`.
    """
    num_tokens = len(token_ids)
    tokens = torch.tensor([token_ids], device=prompt.device)
    prompts = Prompts.of(prompt)
    plain = [target.prefill(prompts, max_new_tokens=num_tokens, max_nodes=0).logits[:, -1]]
    nothing = empty_tree(1, prompt.device)
    for index in range(num_tokens - 1):
        plain.append(target.verify(tokens[:, index], nothing).logits[:, -1])
        target.commit(nothing, AcceptedPath(nodes=nothing.parents, num_accepted=Counts.of([0], prompt.device)))
    stepwise = torch.cat(plain)
    stepwise = stepwise.to(torch.promote_types(stepwise.dtype, MIN_PRECISION))  # [token, vocab], as `warp` takes them

    # The model itself, without cache, mask or tree: what is audited has no part in its own
    # yardstick.
    text = torch.cat([prompt, tokens[:, :-1]], dim=1)
    at_once = target.model(text, use_cache=False, logits_to_keep=num_tokens).logits[0].to(stepwise.dtype)
    logit_noise = float((stepwise - at_once).abs().max())
    noise, deficit, worst = logit_noise, 0.0, 0
    if temperature > 0:
        noise = logit_noise / temperature + ROUNDING * torch.finfo(stepwise.dtype).eps
    for position, (logits, token) in enumerate(zip(stepwise, token_ids, strict=True)):
        scores = logits.cpu().double()  # which adds no rounding of its own
        if temperature > 0:
            scores = scores / temperature - wind_clocks(torch.empty_like(logits), seed, position).cpu().double().log()
        if (distance := float(scores.max() - scores[token])) > deficit:
            deficit, worst = distance, position
    explained = deficit <= 2 * noise and logit_noise <= MAX_NOISE * float(stepwise.std(-1).max())
    stops = [position for position, token in enumerate(token_ids) if token in target.stop_ids]
    ends_rightly = stops == [num_tokens - 1] or (not stops and num_tokens == max_new_tokens)
    if not ends_rightly:
        worst = stops[0] + 1 if stops and stops[0] + 1 < num_tokens else num_tokens - 1
    return Audit(
        deficit=deficit, position=worst, noise=noise, ends_rightly=ends_rightly, within_noise=explained and ends_rightly
    )
