"""Reading of a step's decision on the host, and the check that it was made from numbers.

Token n of a step was chosen from entry n of the accepted path, whose entry 0 is the last committed
token. **Only these entries count**: a draft that isn't accepted may have any logits.

    path    root ── a ── b             NaN after the root, a or b: an error, and nothing of the step
    chosen        a    b    bonus      is emitted. NaN after another draft: no difference.

A NaN inside the model can spread in its pass: zero times NaN is NaN, so a draft token that the mask
hides can make every entry NaN. That is an error too, where plain decoding might have gone on. So is
a NaN behind a token that would have ended the answer.

Logits are numbers here if their maximum is finite. Otherwise one of them is NaN or infinite, or all
of them are minus infinity, and their softmax is NaN. Single tokens may have minus infinity.
"""

from collections.abc import Callable, Sequence
from math import inf, isnan

import torch
from jaxtyping import Bool, Int
from torch.nn.functional import pad

from .tree import DraftTree
from .types import NUM_FIRST, Acceptance, AcceptedPath, TargetOutput

Where = Callable[[int, int], str]
"""Names the token of a row's answer that a step chooses from an entry of its path, 0 for the root."""


def numbers_of(tree: DraftTree, output: TargetOutput, acceptance: Acceptance) -> Int[torch.Tensor, "batch number"]:
    """Return all numbers of a decision in one tensor, which the host reads in one transfer.

    Its first columns are those of `AcceptedPath`. The last ones, which only the host reads, are 1 if the
    logits of the root, or of an entry of the path, are numbers, and 0 if not.
    """
    path = acceptance.path
    # In plain decoding, which is the baseline, nothing is computed that isn't needed.
    entries = pad(path + 1, (1, 0)) if tree.num_nodes else acceptance.entry[:, None]
    drafts = tree.tokens.gather(1, path.clamp(min=0)).clamp(min=0) if tree.num_nodes else path
    first = torch.stack([acceptance.num_accepted, acceptance.num_accepted + 1, acceptance.entry, acceptance.bonus_token], dim=1)
    # Of one type: tensors of several types would be copied one by one.
    return torch.cat([first, path, entries, drafts, _are_numbers(output, acceptance, entries).long()], dim=1)


def acceptance_of(numbers: Int[torch.Tensor, "batch number"], depth: int) -> Acceptance:
    """Return the decision in the first columns of `numbers`, whose paths are `depth` wide."""
    num_accepted, entry, bonus_token = (numbers[:, column] for column in (0, 2, 3))
    path = numbers[:, NUM_FIRST : NUM_FIRST + depth]
    return Acceptance(path=path, num_accepted=num_accepted, entry=entry, bonus_token=bonus_token, numbers=numbers)


def read_acceptance(tree: DraftTree, output: TargetOutput, acceptance: Acceptance, where: Where) -> AcceptedPath:
    """Read each row's path and the token after it, in one transfer from the device.

    Raises ValueError if a token was chosen from logits that aren't numbers.
    """
    numbers = numbers_of(tree, output, acceptance) if acceptance.numbers is None else acceptance.numbers
    depth = acceptance.path.shape[1]
    nodes, tokens, next_tokens = [], [], []
    for row, (num_accepted, _, _, bonus, *rest) in enumerate(numbers.tolist()):
        path, drafts, are_numbers = rest[:depth], rest[2 * depth + 1 : 3 * depth + 1], rest[3 * depth + 1 :]
        if 0 in are_numbers[: num_accepted + 1]:
            place = are_numbers.index(0)
            peak = float(output.logits[row, path[place - 1] + 1 if place else 0].amax())
            what = "not numbers (NaN)" if isnan(peak) else "infinite" if peak == inf else "all minus infinity"
            raise ValueError(
                f"the target's logits are {what} at {where(row, place)}: its weights are damaged, or its type overflows; load "
                "it in another target.dtype"
            )
        nodes.append(tuple(path[:num_accepted]))
        tokens.append(tuple(drafts[:num_accepted]))
        next_tokens.append(bonus)
    return AcceptedPath(
        numbers=numbers,
        depth=depth,
        width=depth,
        host_nodes=tuple(nodes),
        tokens=tuple(tokens),
        next_tokens=tuple(next_tokens),
    )


def token_names(rows: Sequence[int], answers: Sequence[Sequence[int]]) -> Where:
    """Return what names a row's next tokens in an error; `rows` are those of the whole batch."""
    return lambda row, place: f"token {len(answers[rows[row]]) + 1 + place} of the answer in row {rows[row]} of the batch"


def _are_numbers(
    output: TargetOutput, acceptance: Acceptance, entries: Int[torch.Tensor, "batch entry"]
) -> Bool[torch.Tensor, "batch entry"]:
    """Return whether the logits of the entries are numbers."""
    if acceptance.peaks is not None:
        return acceptance.peaks.gather(1, entries).abs() < inf
    logits = output.logits
    if logits.shape[1] > 1:  # whole trees of logits are large
        logits = logits[torch.arange(len(logits), device=logits.device)[:, None], entries]
    return logits.amax(-1).abs() < inf  # false for NaN, which `amax` passes on
