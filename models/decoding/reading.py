"""Reading of a step on the host, as far as the target's logits are numbers.

**What plain decoding would have read decides.** Plain decoding reads the logits after the last
token of the text, and nothing else. So only the entries of the accepted path count: token n of a
step was chosen from entry n of the path, whose entry 0 is the last committed token.

    path    root ── a ── b ── c        NaN after b: the step emits a and b, and b is the next root.
    chosen        a    b    ?    ?     NaN after the root: the step is repeated without drafts.

Inside a pass, a NaN spreads: zero times NaN is NaN, so a hidden draft token can make every entry
NaN. Without drafts the pass is that of plain decoding. If its logits aren't numbers either, plain
decoding has no answer, and that is an error.

Logits are numbers here if their maximum is finite. Otherwise one of them is NaN or infinite, or all
of them are minus infinity, and their softmax is NaN. Single tokens may have minus infinity.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isnan

import torch
from jaxtyping import Bool, Int
from torch.nn.functional import pad

from .protocols import AcceptanceRule, Target
from .sampling import Randomness
from .tree import DraftTree, accepted_path, empty_tree
from .types import NUM_FIRST, Acceptance, AcceptedPath, TargetOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """The new tokens of a step, after the host has read them."""

    tokens: list[list[int]]
    """Accepted draft tokens of each row, then the bonus token, up to the first one that was chosen
    from logits that aren't numbers. Empty if the first one was."""
    accepted: AcceptedPath
    last_token: Int[torch.Tensor, " batch"]
    """The last of each row's tokens, on the device."""
    is_whole: bool
    """Whether no row was cut."""


def accept(
    target: Target,
    rule: AcceptanceRule,
    tree: DraftTree,
    output: TargetOutput,
    last_token: Int[torch.Tensor, " batch"],
    *,
    generator: Randomness,
    where: Callable[[int], str],
) -> tuple[Emitted, TargetOutput]:
    """Accept a path of the tree in each row. Nothing is committed.

    If a row's logits after `last_token` aren't numbers, the target reads that token again without
    drafts. The output is then the same at all entries of the tree, since nothing is accepted.
    Raises ValueError if that doesn't help; its message has what `where` returns for the row.
    """
    emitted = read_acceptance(tree, output, rule(tree, output, generator=generator))
    if all(emitted.tokens):
        return emitted, output
    target.discard()
    plain = empty_tree(len(last_token), last_token.device)
    output = target.verify(last_token, plain)
    emitted = read_acceptance(plain, output, rule(plain, output, generator=generator))
    require_numbers(emitted, output, where)
    return emitted, _at_all_entries(output, 1 + tree.num_nodes)


def numbers_of(tree: DraftTree, output: TargetOutput, acceptance: Acceptance) -> Int[torch.Tensor, "batch number"]:
    """Return all numbers of a decision in one tensor, which the host reads in one transfer.

    Its columns are those of `AcceptedPath`. The last ones, which only the host reads, tell whether the
    logits of the root and of each entry of the path are numbers.
    """
    path = acceptance.path
    # In plain decoding, which is the baseline, nothing is computed that isn't needed.
    entries = pad(path + 1, (1, 0)) if tree.num_nodes else acceptance.entry[:, None]
    drafts = tree.tokens.gather(1, path.clamp(min=0)).clamp(min=0) if tree.num_nodes else path
    first = torch.stack([acceptance.num_accepted, acceptance.num_accepted + 1, acceptance.entry, acceptance.bonus_token], dim=1)
    # Of one type: tensors of several types would be copied one by one.
    return torch.cat([first, path, entries, drafts, _are_numbers(output, entries).long()], dim=1)


def acceptance_of(numbers: Int[torch.Tensor, "batch number"], depth: int) -> Acceptance:
    """Return the decision in the first columns of `numbers`, whose paths are `depth` wide."""
    num_accepted, entry, bonus_token = (numbers[:, column] for column in (0, 2, 3))
    path = numbers[:, NUM_FIRST : NUM_FIRST + depth]
    return Acceptance(path=path, num_accepted=num_accepted, entry=entry, bonus_token=bonus_token, numbers=numbers)


def read_acceptance(tree: DraftTree, output: TargetOutput, acceptance: Acceptance) -> Emitted:
    """Read each row's new tokens and its path, in one transfer from the device."""
    # 1. Transfer everything at once.
    numbers = numbers_of(tree, output, acceptance) if acceptance.numbers is None else acceptance.numbers
    values = numbers.tolist()
    # 2. Cut each row before the first token that was chosen from no numbers.
    depth = acceptance.path.shape[1]
    tokens: list[list[int]] = []
    nodes: list[list[int]] = []
    for num_accepted, _, _, bonus, *rest in values:
        path, drafts, are_numbers = rest[:depth], rest[2 * depth + 1 : 3 * depth + 1], rest[3 * depth + 1 :]
        row_tokens = [*drafts[:num_accepted], bonus]
        if 0 in are_numbers[: num_accepted + 1]:
            row_tokens = row_tokens[: are_numbers.index(0)]
        tokens.append(row_tokens)
        nodes.append(path[: max(0, len(row_tokens) - 1)])
    # 3. Use the device's tensors, unless a row was cut.
    if is_whole := all(len(new) == 1 + num_accepted for new, (num_accepted, *_) in zip(tokens, values, strict=True)):
        accepted = AcceptedPath(
            numbers=numbers,
            depth=depth,
            width=depth,
            host_nodes=tuple(map(tuple, nodes)),
            tokens=tuple(tuple(new[:-1]) for new in tokens),
            next_tokens=tuple(new[-1] for new in tokens),
        )
        last_token = acceptance.bonus_token
    else:
        accepted = accepted_path(tree, nodes)
        last_token = acceptance.bonus_token.new_tensor([new[-1] if new else 0 for new in tokens])
    return Emitted(tokens=tokens, accepted=accepted, last_token=last_token, is_whole=is_whole)


def require_numbers(emitted: Emitted, output: TargetOutput, where: Callable[[int], str]) -> None:
    """Raise ValueError if a row has no token, because the logits of its entry 0 aren't numbers."""
    for row, tokens in enumerate(emitted.tokens):
        if not tokens:
            peak = float(output.logits[row, 0].amax())
            what = "not numbers (NaN)" if isnan(peak) else "infinite" if peak == inf else "all minus infinity"
            raise ValueError(
                f"the target's logits are {what} at {where(row)}: its weights are damaged, or its type overflows; load it "
                "in another target.dtype"
            )


def in_batch(rows: Sequence[int], answers: Sequence[Sequence[int]]) -> Callable[[int], str]:
    """Return a function that names the next token of a row; `rows` are those of the whole batch."""
    return lambda row: f"token {len(answers[rows[row]]) + 1} of the answer in row {rows[row]} of the batch"


def _are_numbers(output: TargetOutput, entries: Int[torch.Tensor, "batch entry"]) -> Bool[torch.Tensor, "batch entry"]:
    """Return whether the logits of the entries are numbers."""
    logits = output.logits
    if logits.shape[1] > 1:  # whole trees of logits are large
        logits = logits[torch.arange(len(logits), device=logits.device)[:, None], entries]
    return logits.amax(-1).abs() < inf  # false for NaN, which `amax` passes on


def _at_all_entries(output: TargetOutput, num_entries: int) -> TargetOutput:
    """Return an output of one entry as that of `num_entries` equal ones."""

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.expand(-1, num_entries, -1)

    return TargetOutput(
        logits=spread(output.logits),
        hidden_states=spread(output.hidden_states),
        features=None if output.features is None else spread(output.features),
    )
