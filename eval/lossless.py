"""Is every answer the one that plain decoding gives? And where it isn't, is arithmetic noise the reason?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from jaxtyping import Int

from ..models.decoding.prompts import Prompts
from ..models.decoding.sampling import MIN_PRECISION, wind_clocks
from ..models.decoding.tree import empty_tree
from ..models.decoding.types import Acceptance
from ..models.hf_target import HFTarget
from .records import BASELINE, EvalRecord, RecordKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A generation whose tokens are not the baseline's; `position` is the first such token of the answer, from 0."""

    record: EvalRecord
    position: int
    within_noise: bool = False


MAX_NOISE = 0.25
"""Of the logits' standard deviation: rounding in bfloat16 makes a tenth of that."""
ROUNDING = 8
"""Units of the sampler's precision: what softmax and the division by the clocks add to the noise of sampled scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """How far an answer strays from plain decoding, in scores, of which plain decoding emits the best.

    Greedy, a score is a logit; sampling with a seed, it is logit / temperature - log(clock), with the clocks that the seed
    gives to this token of the answer (see `RowSeeds`). `deficit`: over all tokens, the largest distance between the plain
    model's best score and that of the token emitted. `noise`: the largest difference between a score computed token by token
    and the same one computed by the bare model over the whole text at once (the clocks are the same, so it is that of
    logits / temperature), and the sampler's own `ROUNDING`. Two scores that are each off by `noise` may change order while
    they are `2 * noise` apart: `within_noise`. Noise of more than `MAX_NOISE` of the logits' spread explains nothing: then
    something is broken.
    """

    deficit: float
    noise: float
    within_noise: bool


def find_mismatches(records: Iterable[EvalRecord]) -> list[Mismatch]:
    """Compare every record with the baseline's first answer to the same turn at the same temperature and batch size (the
    baseline's repeats and profiles too), but for those that are other samples by design.

    What the baseline answers in batches is compared with its answer at the smallest batch size, where the prompts are the same:
    so a mistake that all methods of a batch share is seen as well. Raises ValueError where the prompts of the two differ or the
    baseline has no answer: such records prove nothing.
    """
    by_key: dict[RecordKey, EvalRecord] = {record.key: record for record in records}
    smallest = min((record.batch_size for record in by_key.values()), default=1)
    mismatches = []
    for record in by_key.values():
        place = (record.suite, record.prompt_id, record.turn, record.temperature)
        reference = by_key.get((*place, BASELINE, 0, False, record.batch_size))
        if reference is None or reference.prompt_sha256 != record.prompt_sha256:
            raise ValueError(f"{record.key} has no baseline record of the same prompt; delete the records and measure again")
        if record.method == BASELINE:
            alone = by_key.get((*place, BASELINE, 0, False, smallest))
            reference = alone if alone is not None and alone.prompt_sha256 == record.prompt_sha256 else reference
        if not record.is_other_sample and record.token_ids != reference.token_ids:
            pairs = zip_longest(record.token_ids, reference.token_ids)
            position = next(index for index, (token, expected) in enumerate(pairs) if token != expected)
            mismatches.append(Mismatch(record=record, position=position))
    return mismatches


LOSSY = "no, by rule"
"""What tables say of a rule that doesn't claim to be lossless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A method's mismatches on a suite at a temperature, counted in prompts.

    `lossy`: its acceptance rule doesn't even claim to be lossless. `by_rule`: it samples with drafts that are drawn at random,
    or by such a rule, so that its answers can't be compared, and only the rule says what it is. `first` says where to look: an
    unexplained mismatch if there is any.
    """

    num_prompts: int
    num_mismatched: int
    num_within_noise: int
    by_rule: bool
    lossy: bool
    first: dict[str, Any] | None

    @property
    def broken(self) -> bool:
        return self.num_mismatched > self.num_within_noise

    @property
    def label(self) -> str:
        if self.broken:
            return f"NO ({self.num_mismatched - self.num_within_noise} of {self.num_prompts} prompts)"
        if self.lossy:
            return LOSSY
        if self.num_within_noise:
            return f"within noise ({self.num_within_noise})"
        return "by rule" if self.by_rule else "yes"


def judge(records: Sequence[EvalRecord], mismatches: Sequence[Mismatch]) -> Verdict:
    """Sum up the mismatches among the records of one method on one suite at one temperature."""
    mismatched = {mismatch.record.prompt_id for mismatch in mismatches}
    unexplained = [mismatch for mismatch in mismatches if not mismatch.within_noise]
    examples = [
        {"prompt_id": mismatch.record.prompt_id, "turn": mismatch.record.turn, "position": mismatch.position}
        for mismatch in [*unexplained, *mismatches]
    ]
    return Verdict(
        num_prompts=len({record.prompt_id for record in records}),
        num_mismatched=len(mismatched),
        num_within_noise=len(mismatched - {mismatch.record.prompt_id for mismatch in unexplained}),
        by_rule=any(record.is_other_sample for record in records),
        lossy=not all(record.lossless_rule for record in records),
        first=examples[0] if examples else None,
    )


def is_exact(dtype: torch.dtype, temperature: float = 0.0, batch_size: int = 1) -> bool:
    """Whether decoding in `dtype` is held to the baseline's very tokens.

    Sampling never is: whatever the precision, some token's clocks leave its two best candidates as close as its rounding. Nor
    are batches: a row's last digits depend on how many rows are beside it, and these leave earlier with one method than with
    another.
    """
    return dtype in (torch.float32, torch.float64) and temperature == 0 and batch_size == 1


@torch.inference_mode()
def audit(
    target: HFTarget, prompt: Int[torch.Tensor, "1 seq"], token_ids: list[int], *, temperature: float = 0.0, seed: int = 0
) -> Audit:
    """Force an answer through the plain model, token by token as plain decoding reads it, and all at once.

    The answer is a greedy one, or, at a `temperature` above 0, one sampled with `RowSeeds([seed])`.
    """
    num_tokens = len(token_ids)
    tokens = torch.tensor([token_ids], device=prompt.device)
    prompts = Prompts.of(prompt)
    plain = [target.prefill(prompts, max_new_tokens=num_tokens, max_nodes=0).logits[:, -1]]
    nothing = empty_tree(1, prompt.device)
    for index in range(num_tokens - 1):
        plain.append(target.verify(tokens[:, index], nothing).logits[:, -1])
        keep = Acceptance(path=nothing.parents, num_accepted=tokens.new_zeros(1), bonus_token=tokens[:, index + 1])
        target.commit(nothing, keep, [0])
    stepwise = torch.cat(plain)
    stepwise = stepwise.to(torch.promote_types(stepwise.dtype, MIN_PRECISION))  # [token, vocab], as `warp` takes them

    # The model itself, without cache, mask or tree: what is audited has no part in its own yardstick.
    text = torch.cat([prompt, tokens[:, :-1]], dim=1)
    at_once = target.model(text, use_cache=False, logits_to_keep=num_tokens).logits[0].to(stepwise.dtype)
    logit_noise = float((stepwise - at_once).abs().max())
    noise, deficit = logit_noise, 0.0
    if temperature > 0:
        noise = logit_noise / temperature + ROUNDING * torch.finfo(stepwise.dtype).eps
    for position, (logits, token) in enumerate(zip(stepwise, token_ids, strict=True)):
        scores = logits.cpu().double()  # which adds no rounding of its own
        if temperature > 0:
            scores = scores / temperature - wind_clocks(torch.empty_like(logits), seed, position).cpu().double().log()
        deficit = max(deficit, float(scores.max() - scores[token]))
    explained = deficit <= 2 * noise and logit_noise <= MAX_NOISE * float(stepwise.std(-1).max())
    return Audit(deficit=deficit, noise=noise, within_noise=explained)
