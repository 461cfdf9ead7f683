"""Drafting by expected gain: how much of a draft is worth its time, decided at each step.

Decoding is a series of steps, each of which takes D seconds of drafting and T(n) seconds for a tree
of n nodes, and emits 1 + sum of q tokens on average, where q is a node's probability of acceptance.
The most tokens per second, R, are reached by the choices that maximise

    tokens - R * seconds                                    (Dinkelbach's rule for a ratio of means)

at each step: the n likeliest nodes are verified where n maximises 1 + sum of q - R * T(n), and a
source drafts if the tokens that it adds are expected to exceed R times its seconds. R is the mean of
the steps so far, which the rule improves until no choice is better, and at least that of plain
decoding, which is always a choice. The nodes that seem likeliest are those whose q is most often too
high. So the expected draft tokens are scaled by the share of them that was accepted in the steps
before.

All costs are running medians of measured seconds (`costs`), so that a stall moves nothing. Nothing
here reads random numbers. The choices change the shapes of passes. A token changes only where the
rounding of another shape changes it.

`Pacer` makes these choices. A model whose tree grows makes one more (`Reading`): each of its passes
reads some nodes and adds their children, and another pass is worth its time if what it adds, less
what its nodes cost, exceeds R times its seconds.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import NamedTuple

from .costs import STALL, Seconds, StepSeconds, best_width, lowest_slopes, mean_sums, widths_up_to

NUM_TRIALS = 2
"""How often each width of the first steps is tried: the first pass of a shape may take longer."""
TRIAL_WIDTHS = 4
"""Widths of the first steps. They cost users with short answers little; the widths between them are
measured when they are chosen, or next to the best one."""
BORROWED_WEIGHT = 0.1
"""Weight of another batch size's tokens per second."""
RATE_MEMORY = 50
"""Steps that the mean of tokens per second remembers. What a token is worth depends on how hard the
text is here, so the memory is short."""
UNCERTAINTY = 1.0
"""Tokens by which a gain that was observed once may be too low; it falls with the count."""
GAIN_MEMORY = 60
"""Observations that a mean gain remembers."""
OUTCOME_MEMORY = 200
"""Steps for which it is remembered how much of a source's expected gain came true."""
OVERALL_WEIGHT = 8.0
"""Observations in one situation that the mean gain of all situations counts for."""
PATIENCE, MAX_PATIENCE = 40.0, 160.0
"""A source that isn't worth its time is asked again after so many steps per token that it costs, so
that asking in vain takes a few hundredths of the time; the more often in vain, the later."""
MAX_READS = 8
"""Most nodes that a pass of a growing model reads. So few take about the time of one: reading the weights."""
READ_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Bounds of the sum of the probabilities of the nodes that a pass reads, averaged over rows: the less
likely the nodes are, the smaller the share of it that their children gain."""
MAX_SKIPPED = 160
"""Most steps for which a source isn't asked: what it cost may have been a stall."""
TRUST_WEIGHT = 4.0
"""Draft tokens that count as expected and accepted before any step."""


def trial_widths(max_nodes: int) -> list[int]:
    """Return the widths of the first steps, the largest first: zero, the largest, some between."""
    widths = widths_up_to(max_nodes)
    last = len(widths) - 1
    return sorted({widths[round(last * part / (TRIAL_WIDTHS - 1))] for part in range(TRIAL_WIDTHS)}, reverse=True)


@dataclass(slots=True)
class TokenRate:
    """Mean tokens per second of the last steps, and the share of the expected drafts that came.

    All fields are sums over the steps so far, in which earlier steps count less (RATE_MEMORY).
    """

    tokens: float = 0.0
    seconds: float = 0.0
    expected: float = TRUST_WEIGHT
    """Draft tokens that were expected to be accepted."""
    accepted: float = TRUST_WEIGHT

    @property
    def share(self) -> float:
        """Accepted draft tokens per expected one."""
        return self.accepted / self.expected

    def of(self, table: Sequence[float]) -> float:
        """Return the rate, at least that of plain decoding: a token in the seconds of no nodes."""
        plain = 1.0 / table[0] if table[0] > 0.0 else 0.0
        return max(self.tokens / self.seconds, plain) if self.seconds > 0.0 else plain

    def add(self, tokens: float, expected: float, seconds: float) -> None:
        """Add a step: the tokens that it emitted, those that it was expected to, and its seconds."""
        kept = 1 - 1 / RATE_MEMORY
        self.tokens, self.seconds = kept * (self.tokens + tokens), kept * (self.seconds + seconds)
        self.expected = kept * (self.expected + expected - 1.0) + (1.0 - kept) * TRUST_WEIGHT
        self.accepted = kept * (self.accepted + tokens - 1.0) + (1.0 - kept) * TRUST_WEIGHT


@dataclass(slots=True)
class MeanGain:
    """Mean of what a group of sources was expected to add to a step, over the last GAIN_MEMORY ones."""

    count: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    """Seconds of the nodes that it added, without those of drafting."""

    def add(self, tokens: float, seconds: float) -> None:
        self.count += 1
        share = 1.0 / min(self.count, GAIN_MEMORY)
        self.tokens += share * (tokens - self.tokens)
        self.seconds += share * (seconds - self.seconds)


@dataclass(slots=True)
class Gains:
    """What a group of sources adds to the steps that ask it, and how much of that comes true."""

    overall: MeanGain = field(default_factory=MeanGain)
    by_situation: dict[tuple[int, ...], MeanGain] = field(default_factory=dict)
    expected: float = TRUST_WEIGHT
    came: float = TRUST_WEIGHT
    """Tokens that it added to the tree of the groups before it: expected, and accepted. Both are sums
    over the steps so far, in which earlier steps count less (OUTCOME_MEMORY)."""
    skipped: int = 0
    """Steps since it was asked last."""
    patience: float = PATIENCE
    """Skipped steps per token of its cost after which it is asked again."""

    def add(self, situation: tuple[int, ...], tokens: float, seconds: float) -> None:
        """Add what it is expected to add to this step."""
        self.overall.add(tokens, seconds)
        self.by_situation.setdefault(situation, MeanGain()).add(tokens, seconds)
        self.skipped = 0

    def add_outcome(self, expected: float, came: float) -> None:
        """Add the tokens that it was expected to add to a step, and those that it has added."""
        kept = 1.0 - 1.0 / OUTCOME_MEMORY
        self.expected = kept * (self.expected + expected) + (1.0 - kept) * TRUST_WEIGHT
        self.came = kept * (self.came + came) + (1.0 - kept) * TRUST_WEIGHT

    def value(self, situation: tuple[int, ...], rate: float) -> float:
        """Return the tokens that it adds in a situation, less what the time of its nodes is worth.

        Few observations there leave the value near that of all situations.
        """
        here = self.by_situation.get(situation, MeanGain())
        count = min(here.count, GAIN_MEMORY)
        tokens, seconds = (
            (OVERALL_WEIGHT * overall + count * mean) / (OVERALL_WEIGHT + count)
            for overall, mean in ((self.overall.tokens, here.tokens), (self.overall.seconds, here.seconds))
        )
        return self.share * tokens - rate * seconds

    @property
    def share(self) -> float:
        """Tokens that came per expected one.

        A source whose tokens are new after every node makes those of the others less likely, so that
        fewer tokens may be expected with it than without it. Then there is no share to speak of.
        """
        return max(self.came, 0.0) / max(self.expected, TRUST_WEIGHT)

    def is_worth(self, situation: tuple[int, ...], rate: float, draft_seconds: float) -> bool:
        """Return whether to ask it, at `rate` tokens per second."""
        # Few observations may be too low by chance: a source that costs little is asked anyway. They
        # are those of all situations, or a useless source would be asked again in each of them.
        count, cost = self.overall.count, rate * draft_seconds
        if not count or self.value(situation, rate) + UNCERTAINTY / sqrt(count) > cost:
            self.patience = PATIENCE
            return True
        self.skipped += 1
        if self.skipped > min(self.patience * cost, MAX_SKIPPED):
            self.patience = min(2 * self.patience, MAX_PATIENCE)
            return True
        return False

    def copy(self) -> "Gains":
        by_situation = {situation: replace(mean) for situation, mean in self.by_situation.items()}
        return replace(self, overall=replace(self.overall), by_situation=by_situation)


class Reading:
    """Cost and gain of the passes of a growing model, each of which reads some nodes of a tree."""

    def __init__(self, like: "Reading | None" = None) -> None:
        self.seconds: StepSeconds = StepSeconds(MAX_READS, like.seconds if like else None)
        """Seconds of a pass by the nodes that it reads."""
        self.passes = 0
        first = [MeanGain(1, 1.0) for _ in range(len(READ_BOUNDS) + 1)]
        self.ratios: list[MeanGain] = first if like is None else [replace(mean) for mean in like.ratios]
        """Tokens that children were expected to add, less what their nodes cost, per probability of the nodes
        that were read. The first guess is that the children have all of their parent's probability."""

    def best(self, probs: Sequence[Sequence[float]], rate: float) -> int:
        """Return how many nodes the next pass reads; 0: none are worth its time (see `Pacer.num_reads`)."""
        gains = [self._ratio(total).tokens * total for total in mean_sums(probs)]
        best, value = best_width(gains, self.seconds.table, rate, self.seconds.widths)
        return max(self.seconds.revisited(best, len(gains) - 1, self.passes), 1) if value > 0.0 else 0

    def add_seconds(self, num_nodes: int, seconds: float) -> None:
        """Learn what a pass took."""
        self.seconds.add(num_nodes, seconds, self.passes)
        self.passes += 1

    def add(self, probs: Sequence[Sequence[float]], seconds: float, gained: float) -> None:
        """Learn from a pass: the probabilities of its nodes, and the tokens that their children add."""
        self.add_seconds(max(map(len, probs)), seconds)
        read = sum(map(sum, probs)) / len(probs)
        self._ratio(read).add(max(gained, 0.0) / read, 0.0)

    def _ratio(self, read: float) -> MeanGain:
        return self.ratios[bisect(READ_BOUNDS, read)]


class Best(NamedTuple):
    """The best number of nodes of a tree: how many, the tokens that they are expected to give, and their pass's seconds."""

    nodes: int
    tokens: float
    seconds: float


class Pacer:
    """Costs and gains of the steps of batches of about one size, and the choices they lead to.

    `num_groups` groups of sources draft one after another. All tokens are per row. The first steps
    are trials, unless there are costs of another batch size (`like`) to start from.
    """

    def __init__(self, max_nodes: int, num_groups: int, like: "Pacer | None" = None) -> None:
        self.verify: StepSeconds = StepSeconds(max_nodes, like.verify if like else None)
        self.draft = [Seconds() for _ in range(num_groups)]
        self.gains = [Gains() for _ in range(num_groups)]
        self.reads: list[Reading] = [Reading(like.reads[group] if like else None) for group in range(num_groups)]
        self._trials = trial_widths(max_nodes) * NUM_TRIALS
        self.step = 0
        self.mean = TokenRate()
        if like is not None:
            for cost, other in zip(self.draft, like.draft, strict=True):
                if other.samples:
                    cost.add(other.median)
            self.gains = [gains.copy() for gains in like.gains]
            self._trials = [*like._trials]
            self.mean = TokenRate(BORROWED_WEIGHT * like.mean.tokens, BORROWED_WEIGHT * like.mean.seconds)
        self._read_seconds = 0.0
        """What this step's passes of growing models usually take."""
        self._floors: tuple[float, list[float]] | None = None

    @property
    def rate(self) -> float:
        """Tokens per second so far, and at least those of plain decoding."""
        return self.mean.of(self.verify.table)

    def trusted(self, gains: Sequence[float]) -> list[float]:
        """Scale the draft tokens among expected tokens by the share that came so far."""
        share = self.mean.share
        return [1.0 + share * (gain - 1.0) for gain in gains]

    @property
    def is_trial(self) -> bool:
        """Whether the next step only measures."""
        return bool(self._trials)

    def floors(self) -> list[float]:
        """Return the least probability that makes a further node worth its time.

        The index is the number of nodes that the tree has without it.
        """
        rate = self.rate
        # The slopes change slowly, and so does the rate: compute them anew now and then.
        if self._floors is None or self.step % 8 == 0 or abs(rate - self._floors[0]) > 0.03 * rate:
            cost = rate / self.mean.share
            self._floors = rate, [cost * slope for slope in lowest_slopes(self.verify.table)]
        return self._floors[1]

    def is_worth(self, group: int, situation: tuple[int, ...]) -> bool:
        """Return whether a group of sources is worth its time in this situation; if not, it counts as skipped."""
        return self.gains[group].is_worth(situation, self.rate, self.draft[group].median)

    def add_draft(self, group: int, seconds: float, *, grows: bool) -> None:
        """Learn what the draft of a group took. A model that `grows` has read one node: the root."""
        self.draft[group].add(seconds)
        if grows:
            self.reads[group].add_seconds(1, seconds)

    def add_gain(self, group: int, situation: tuple[int, ...], before: Best, after: Best) -> None:
        """Learn what a group that was asked is expected to add."""
        self.gains[group].add(situation, after.tokens - before.tokens, after.seconds - before.seconds)

    def num_reads(self, group: int, probs: Sequence[Sequence[float]]) -> int:
        """Return how many nodes of each row the next pass of a growing model reads; 0: it isn't worth its time.

        `probs` are the probabilities of each row's nodes, the likeliest first.
        """
        return self.reads[group].best(probs, self.rate)

    def add_read(self, group: int, probs: Sequence[Sequence[float]], seconds: float, before: Best, after: Best) -> None:
        """Learn from such a pass."""
        self._read_seconds += self.reads[group].seconds.table[max(map(len, probs))] or seconds
        gained = after.tokens - before.tokens - self.rate * (after.seconds - before.seconds)
        self.reads[group].add(probs, seconds, gained)

    def longest_read(self, group: int) -> float:
        """Return the seconds of a growing model's pass that reads most nodes; 0 before the first pass."""
        return self.reads[group].seconds.table[-1]

    def width(self, gains: Sequence[float]) -> int:
        """Return how many nodes to verify; in a trial the width to be tried."""
        if self._trials:
            return min(self._trials[-1], len(gains) - 1)
        return self.verify.revisited(self.best(gains).nodes, len(gains) - 1, self.step)

    def best(self, gains: Sequence[float]) -> Best:
        """Return the best number of nodes, given the expected tokens of the likeliest n."""
        nodes, _ = best_width(gains, self.verify.table, self.rate, self.verify.widths)
        return Best(nodes, gains[nodes], self.verify.table[nodes])

    def add_step(self, num_nodes: int, tokens: float, expected: float, draft_seconds: float, verify_seconds: float) -> None:
        """Learn from a step that is over; `expected` are its tokens before scaling."""
        num_nodes = min(num_nodes, len(self.verify.table) - 1)
        usual_seconds = self.verify.table[num_nodes]
        self.verify.add(num_nodes, verify_seconds, self.step)
        self.step += 1
        if self._trials:
            trial = self._trials.pop()
            if num_nodes < trial:  # there are no larger trees to try
                self._trials = [width for width in self._trials if width <= trial]
            return
        usual_draft, self._read_seconds = sum(cost.median for cost in self.draft) + self._read_seconds, 0.0
        draft_seconds = min(draft_seconds, STALL * usual_draft)
        self.mean.add(tokens, expected, draft_seconds + min(verify_seconds, STALL * usual_seconds))
