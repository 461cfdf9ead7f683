"""Conditions of the pipeline bench, and the speeds that a formula predicts for some of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline_clock import Costs

TARGET_SECONDS, NUM_LAYERS = 0.16, 32
"""A pass of one entry through all stages of the usual pipeline, and its layers."""
STAGES = 8
BASE = Costs(stage_seconds=(TARGET_SECONDS / STAGES,) * STAGES)
MARK_ACCEPTANCES = (0.0, 0.5, 0.8, 0.9)
ACCEPTANCES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
STAGE_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
HOPS = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
ENTRY_SHARES = (0.02, 0.08, 0.16, 0.3)
DRAFTS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
HEADS = (0.0005, 0.001, 0.005, 0.01)
SPREADS = (0.1, 0.3, 0.5)
USUAL = 0.8
SLOWER, SLOW_STAGE = 5.0, 3
"""One stage is so many times slower: this one, counted from 0."""
OLD, NEW, OLD_SLOWER = 5, 8, 3.0
"""Machines of the paper's mixed cluster (section V-A), and how much slower the old ones are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What is decoded: the pipeline, the drafter's guesses, and the texts."""

    costs: Costs = BASE
    acceptance: float = USUAL
    spread: float = 0.0
    claimed: float | None = None
    cancels: bool = True
    is_backward: bool = False
    sends_twice: bool = False
    num_texts: int = 8
    new_tokens: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpadded:
    """What real processes decode without emulated times."""

    num_stages: int
    target: str
    """The grown target in words."""
    drafter: str
    """Digest of the drafter's weights."""
    num_texts: int
    new_tokens: int


def stages_of_target(num_stages: int) -> Costs:
    """Return the usual target in so many equal stages: the more stages, the fewer layers each."""
    return replace(BASE, stage_seconds=(TARGET_SECONDS / num_stages,) * num_stages, layers=max(NUM_LAYERS // num_stages, 1))


def more_stages(num_stages: int) -> Costs:
    """Return a larger target in so many stages of the usual time."""
    return replace(BASE, stage_seconds=(TARGET_SECONDS / STAGES,) * num_stages)


def machines(slowness: Sequence[float], *, balanced: bool) -> Costs:
    """Return the usual target on machines that are so many times slower than usual.

    Layers are split evenly, or so that all stages take about the same time.
    """
    layer = TARGET_SECONDS / NUM_LAYERS
    layers = split(NUM_LAYERS, slowness if balanced else [1.0] * len(slowness))
    seconds = tuple(count * layer * slow for count, slow in zip(layers, slowness, strict=True))
    return replace(BASE, stage_seconds=seconds, layers=max(NUM_LAYERS // len(slowness), 1))


def split(num_layers: int, slowness: Sequence[float]) -> list[int]:
    """Split layers over machines so that the slowest stage is as fast as possible: `stage_layers`."""
    layers = [1] * len(slowness)
    for _ in range(num_layers - len(slowness)):
        stage = min(range(len(layers)), key=lambda stage: (layers[stage] + 1) * slowness[stage])
        layers[stage] += 1
    return layers


SLOW = [1.0] * SLOW_STAGE + [SLOWER] + [1.0] * (STAGES - SLOW_STAGE - 1)
MIXED = [OLD_SLOWER] * OLD + [1.0] * NEW


def usual() -> str:
    """Describe the usual condition, in lines of a table's width."""
    rate, stage, hop, draft, head = (
        BASE.bytes_per_second / 1e6,
        *(1e3 * seconds for seconds in (BASE.stage_seconds[0], BASE.hop_seconds, BASE.draft_seconds, BASE.head_seconds)),
    )
    return (
        f"Unless a row says otherwise: {BASE.num_stages} stages of {stage:g} ms, acceptance {USUAL:g}; each further\n"
        f"entry of a run costs {BASE.entry_share:g} of a pass; a hop takes {hop:g} ms, and {rate:g} MB/s for\n"
        f"{BASE.entry_bytes / 1e3:.0f} KB an entry; a draft pass {draft:g} ms; the head {head:g} ms for an answer.\n"
        "Slow stage: one of 8 is five times slower. 13 unequal: five are three times\n"
        "slower, as in the paper's mixed cluster. Balanced: layers are split by speed."
    )


def conditions(factors: Sequence[float]) -> Iterator[tuple[str, Condition]]:
    """Yield all conditions of the sweeps with their names.

    `factors` are the measured seconds of 1, 2, ... entries over those of one; empty: not measured.
    """
    for acceptance in ACCEPTANCES:
        yield f"acceptance {acceptance:g}", Condition(acceptance=acceptance)
    for count in STAGE_COUNTS:
        yield f"stages {count}", Condition(costs=stages_of_target(count))
    for acceptance in (USUAL, 0.9):
        yield f"16 x 20 ms, a = {acceptance:g}", Condition(costs=more_stages(16), acceptance=acceptance)
    for seconds in HOPS:
        yield f"hop {1e3 * seconds:g} ms", Condition(costs=replace(BASE, hop_seconds=seconds))
    for share in ENTRY_SHARES:
        yield f"entry {share:g}", Condition(costs=replace(BASE, entry_share=share))
    for seconds in DRAFTS:
        yield f"draft {1e3 * seconds:g} ms", Condition(costs=replace(BASE, draft_seconds=seconds))
    for seconds in HEADS:
        yield f"head {1e3 * seconds:g} ms", Condition(costs=replace(BASE, head_seconds=seconds))
    for spread in SPREADS:
        yield f"spread {spread:g}", Condition(spread=spread)
    yield "useless, claims 0.8", Condition(acceptance=0.0, claimed=0.8)
    yield "slow stage", Condition(costs=machines(SLOW, balanced=False))
    yield "slow stage, balanced", Condition(costs=machines(SLOW, balanced=True))
    yield "13 unequal", Condition(costs=machines(MIXED, balanced=False))
    yield "13 unequal, balanced", Condition(costs=machines(MIXED, balanced=True))
    if factors:
        for count in (STAGES, 2 * STAGES):
            for acceptance in (USUAL, 0.9):
                costs = replace(more_stages(count), factors=tuple(factors), entry_share=last_share(factors))
                yield (
                    f"measured {count}, a = {acceptance:g}",
                    Condition(costs=costs, acceptance=acceptance),
                )


def anchors(factors: Sequence[float]) -> Iterator[tuple[str, Condition]]:
    """Yield the conditions that are measured in processes, with the names that they have in virtual time."""
    for acceptance in (USUAL, 0.5, 0.9, 0.0):
        yield f"acceptance {acceptance:g}", Condition(acceptance=acceptance)
    yield "useless, claims 0.8", Condition(acceptance=0.0, claimed=0.8)
    for count in (2, 4, 16):
        yield f"stages {count}", Condition(costs=stages_of_target(count))
    yield "hop 10 ms", Condition(costs=replace(BASE, hop_seconds=0.01))
    yield "slow stage", Condition(costs=machines(SLOW, balanced=False))
    yield "slow stage, balanced", Condition(costs=machines(SLOW, balanced=True))
    yield "13 unequal, balanced", Condition(costs=machines(MIXED, balanced=True))
    if factors:
        costs = replace(more_stages(16), factors=tuple(factors), entry_share=last_share(factors))
        yield "measured 16, a = 0.9", Condition(costs=costs, acceptance=0.9)


def last_share(factors: Sequence[float]) -> float:
    """Return what an entry beyond the measured ones costs: the mean of those that were measured."""
    return (factors[-1] - 1.0) / (len(factors) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Tokens per second of a formula."""

    plain: float
    synchronous: float
    best: float
    pipelined: float


def predicted(condition: Condition, *, num_drafts: int = 4, most_drafts: int = 24, most_batch: int = 8) -> Predicted:
    """Predict speeds of equal stages: no waiting for drafts, and no queues behind dead runs.

    plain        1 / (N s(1) + (N + 1) h)
    synchronous  (1 + a + ... + a^K) / (K d + N s(K + 1) + (N + 1) h)
    pipelined    E / (N s(m) + (N + 1) h + (E - 1) / m max(s(m), m d) + m d / 2),  E = 1 / (1 - a)
    """
    costs, rate = condition.costs, condition.acceptance
    stages, hops, draft = costs.num_stages, (costs.num_stages + 1) * costs.hop_seconds, costs.draft_seconds

    def synchronous(count: int) -> float:
        tokens = sum(rate**index for index in range(count + 1))
        return tokens / (count * draft + stages * costs.seconds(0, count + 1) + hops)

    def pipelined(batch: int) -> float:
        tokens = min(1 / (1 - rate), condition.new_tokens) if rate < 1 else condition.new_tokens
        seconds = costs.seconds(0, batch)
        more = (tokens - 1) / batch * max(seconds, batch * draft)
        return tokens / (stages * seconds + hops + more + batch * draft / 2)

    return Predicted(
        plain=synchronous(0),
        synchronous=synchronous(num_drafts),
        best=max(synchronous(count) for count in range(1, most_drafts + 1)),
        pipelined=max(pipelined(batch) for batch in range(1, most_batch + 1)),
    )
