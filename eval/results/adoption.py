"""Whether a drafter may take another's place: an evaluation of both, compared on the same prompts."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...models.drafters.options import DRAFTER_OPTIONS
from ..records.names import PIPELINED
from ..records.records import EvalRecord
from .figures import counted
from .rows import Row, is_broken, is_wrong
from .stats import bootstrap, ratio_of_ratios, speedup

RUN_TIME = {kind: options.RUNTIME_FIELDS for kind, options in DRAFTER_OPTIONS.items()}
"""Options of drafting by kind. Two drafters are compared where these are equal, as saved or as set."""
DOUBT = 5.0
"""Times the largest loss that the interval's lower bound may still be."""
LEAST_PROMPTS = 20
"""Prompts of a suite below which nothing is concluded from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Tokens per step of a new drafter over those of the old one, in one setting on one suite."""

    setting: str
    suite: str
    temperature: float
    num_prompts: int
    ratio: float
    low: float
    """Lower bound of the ratio's interval, over prompts; 0 without one. All settings and temperatures of a suite are inside
    theirs with 95 %, so the best of many isn't found by chance."""
    high: float
    speed: float
    """Seconds per token of the old drafter over those of the new one: above 1 the new one is faster."""
    speed_high: float
    """Upper bound of its 95 % interval."""


def pairs(methods: Mapping[str, Mapping[str, Any]], old: str, new: str) -> dict[str, tuple[str, str]]:
    """Return the methods of both drafters by the setting that they share.

    `methods` are those that an evaluation records; `old` and `new` are digests of weights. Paced and pipelined ones
    have no part: their drafts depend on the clock. Raises ValueError if a drafter isn't among the others, or if they
    share no setting.
    """
    if old == new:
        raise ValueError("the old and the new drafter have the same weights; give the folder that the new training wrote")
    by_weights: dict[str, dict[str, str]] = {old: {}, new: {}}
    for name, method in methods.items():
        is_timed = method["config"].get("pace") == "expected" or method.get("decode") == PIPELINED
        if method["weights"] in by_weights and not is_timed:
            options = {name: method["config"].get(name) for name in sorted(RUN_TIME.get(method["kind"], method["config"]))}
            setting = ", ".join(f"{option} {value}" for option, value in options.items() if value is not None)
            by_weights[method["weights"]][f"{method['kind']}: {setting}"] = name
    for weights, what in ((old, "old"), (new, "new")):
        if not by_weights[weights]:
            raise ValueError(
                f"the evaluation doesn't have the {what} drafter, or only paced or pipelined; evaluate both: outrider eval "
                "--drafter OLD --drafter NEW"
            )
    shared = {
        setting: (by_weights[old][setting], name) for setting, name in by_weights[new].items() if setting in by_weights[old]
    }
    if not shared:
        raise ValueError("the evaluation has no setting of both drafters; give --settings, so that both are measured in them")
    return shared


def changes(records: Iterable[EvalRecord], methods: Mapping[str, tuple[str, str]]) -> Iterator[Change]:
    """Yield the change in each setting, on each suite and at each temperature."""
    sides = {name: (setting, side) for setting, names in methods.items() for side, name in enumerate(names)}
    groups: dict[tuple[str, str, float], tuple[list[EvalRecord], list[EvalRecord]]] = defaultdict(lambda: ([], []))
    for record in records:
        if record.method in sides and not record.profiled:
            setting, side = sides[record.method]
            groups[setting, record.suite, record.temperature][side].append(record)
    num_tested = Counter(suite for _, suite, _ in groups)
    for (setting, suite, temperature), sides_of_group in groups.items():
        # A drafter that ran out of memory lacks answers.
        shared = set[Any].intersection(*({_answer(record) for record in answers} for answers in sides_of_group))
        old, new = ([record for record in answers if _answer(record) in shared] for answers in sides_of_group)
        sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((2, 2)))
        for side, answers in enumerate((old, new)):
            for record in answers:
                sums[record.prompt_id][side] += (record.num_verify_tokens, record.num_steps)
        measured = np.array([prompt for prompt in sums.values() if prompt[:, 1].all()])  # [prompt, side, (tokens, steps)]
        if not len(measured):
            continue
        ratio, interval = bootstrap(measured.transpose(1, 0, 2)[::-1], ratio_of_ratios, seed=0, num_tested=num_tested[suite])
        low, high = interval or (0.0, float("inf"))
        speed, speeds = speedup(counted(old), counted(new), seed=0)
        yield Change(
            setting=setting,
            suite=suite,
            temperature=temperature,
            num_prompts=len(measured),
            ratio=ratio,
            low=low,
            high=high,
            speed=speed,
            speed_high=speeds[1] if speeds else float("inf"),
        )


def _answer(record: EvalRecord) -> tuple[Any, ...]:
    """Return what the answers of both drafters to the same turn have in common."""
    return record.prompt_id, record.turn, record.batch_size, record.repeat


def objections(
    found: Sequence[Change], rows: Iterable[Row], new: Iterable[str], *, gain_on: Sequence[str], loss: float
) -> list[str]:
    """Return why the new drafter may not take the old one's place; nothing if it may.

    It must be lossless everywhere, show a gain on each suite of `gain_on` (in some setting its whole interval, and none
    may lose), lose at most the share `loss` elsewhere, and nowhere be slower than that beyond doubt: a drafter of other
    sizes may accept more, and yet take longer. Raises ValueError for a suite that wasn't evaluated.
    """
    # 1. Losslessness.
    methods = set(new)
    of_new = [row for row in rows if row["method"] in methods]
    wrong = sorted({row["label"] for row in of_new if is_broken(row) or is_wrong(row)})
    reasons = [f"{label} isn't proven lossless" for label in wrong]
    reasons += [f"{row['label']} ran out of memory on {row['suite']}" for row in of_new if row["out_of_memory"]]
    # 2. The gain, and losses elsewhere.
    suites = dict.fromkeys(change.suite for change in found)
    if missing := [suite for suite in gain_on if suite not in suites]:
        raise ValueError(f"gain_on has {', '.join(missing)}, which wasn't evaluated; there are: {', '.join(suites)}")
    for change in found:
        where = f"{change.suite} at temperature {change.temperature:g} ({change.setting})"
        if change.num_prompts < LEAST_PROMPTS:
            reasons.append(f"{where} has {change.num_prompts} prompts, too few to tell")
        elif change.ratio < 1 - (0.0 if change.suite in gain_on else loss):
            reasons.append(f"{where} loses {1 - change.ratio:.1%} of its tokens per step")
        elif change.suite not in gain_on and change.low < 1 - DOUBT * loss:
            reasons.append(f"{where} may lose {1 - change.low:.1%} of its tokens per step; evaluate more prompts")
        if change.num_prompts >= LEAST_PROMPTS and change.speed_high < 1 - loss:
            reasons.append(f"{where} has {change.speed:.3f} of the old one's speed")
    for suite in gain_on:
        best = max((change for change in found if change.suite == suite), key=lambda change: change.low)
        if best.low <= 1:
            reasons.append(f"no gain is shown on {suite}: at best {best.ratio:.3f} [{best.low:.3f}, {best.high:.3f}]")
    return reasons
