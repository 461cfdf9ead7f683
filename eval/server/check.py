"""Check of a running server: its tokens, its samples, its drafts, its answers' quality and its speed."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ...models.decoding.acceptance import GreedyAcceptance
from ...models.export.package import CertificateLine
from ...models.llm.hf_target import HFTarget
from ..certify.samples import sampling_line
from ..measure.plan import Method
from ..measure.timing import time_generation
from ..results.stats import bootstrap, ratio, ratio_of_ratios
from .client import Reply, Server
from .draft_counts import NO_DRAFTS, DraftCounts
from .questions import Question, ask, is_right
from .readings import Reader

NUM_SAMPLED_PROMPTS, SAMPLED_TOKENS, SAMPLED_AT_ONCE = 4, 4, 16
"""Extent of the test of samples: prompts at most, tokens of a text, and requests at a time."""
BESIDE_SAMPLES = " beside sampled ones"
"""Where greedy answers stand whose batch has sampled ones, too."""
ISOLATED_NATS, ISOLATED_SHARE, OTHER_MODEL_SHARE = 3.0, 0.02, 0.2
"""Bounds that name the cause of wrong tokens: nats below the best token, and two shares of all tokens."""
LEAST_ACCEPTED = 0.9
"""Least share of what outrider accepts: a server that stops drafting at an answer's end accepts a little less."""

ROUNDING = 1e-3
"""Relative error of a difference of log-probabilities: logits of bfloat16 often differ by exactly the tolerance."""
SAME_DRAFTS = 0.1
"""Largest relative difference of drafted tokens per step between two sides that draft in one form: an engine may draft
less at the end of an answer."""

WAVES = 2
"""The two servers take turns after so many questions for each request at a time."""

Told = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed at one concurrency; seconds are of whole answers."""

    concurrency: int
    tokens_per_second: float
    """Of all answers together: the throughput."""
    seconds_per_token: float
    first_token_seconds: float
    plain_seconds_per_token: float | None = None
    """Without the drafter."""
    plain_first_token_seconds: float | None = None
    plain_tokens_per_second: float | None = None
    speedup: float | None = None
    """Of an answer: seconds per token without the drafter over those with it."""
    speedup_ci95: tuple[float, float] | None = None


@dataclass(kw_only=True)
class ServerCheck:
    """What was found."""

    lines: list[CertificateLine] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    drafts: dict[str, dict[str, DraftCounts]] = field(default_factory=dict)
    """Drafts by category, of the `server`, and `here`."""
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(line.passed for line in self.lines)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if bad := [line for line in self.lines if not line.passed]:
            return f"FAIL: {bad[0].subject}: {bad[0].result}"
        speeds = [f"{_interval(speed)} at {speed.concurrency} at a time" for speed in self.speeds if speed.speedup]
        return "PASS: the server's text is the reference's" + (f"; {', '.join(speeds)}" if speeds else "")

    def as_json(self) -> dict[str, Any]:
        """Return everything for the JSON file."""
        return {"passed": self.passed, "verdict": self.verdict, **asdict(self)}


def check_tokens(
    reader: Reader, questions: Sequence[Question], replies: Sequence[Reply], where: str, tolerance: float, told: Told
) -> CertificateLine:
    """Check that each greedy token is the reference's most probable one, but for near ties."""
    readings = reader.read([question.ids for question in questions], replies, told)
    deficits = [reading.deficit for answer in readings for reading in answer]
    most = tolerance * (1 + ROUNDING)
    wrong = [deficit for deficit in deficits if deficit > most]
    ties = [deficit for deficit in deficits if 0 < deficit <= most]
    result = f"{len(wrong)} wrong tokens, {len(ties)} near ties (at most {max(ties, default=0):.2g} nats)"
    if wrong:
        is_beside = where == BESIDE_SAMPLES
        cause = "If they are right alone, it mixes temperatures up" if is_beside else _cause(wrong, len(deficits))
        result += f"; the worst is {max(wrong):.2g} nats below the best. {cause}"
    return CertificateLine(
        subject=f"greedy answers{where}, {len(deficits)} tokens",
        method=f"each the reference's most probable, or within {tolerance:g} nats of it",
        num_cases=len(replies),
        result=result,
        passed=not wrong,
    )


def _cause(wrong: Sequence[float], num_tokens: int) -> str:
    share = len(wrong) / num_tokens
    if share >= OTHER_MODEL_SHARE:
        return "So many are another model's, or another prompt's"
    if median(wrong) >= ISOLATED_NATS:
        far = "Few and far" if share < ISOLATED_SHARE else "Far"
        return f"{far} from the best: the server accepts drafts that it should reject, or its cache is damaged"
    return "Near the best: one side has other weights (a quantisation, a type, a checkpoint)"


def check_samples(reader: Reader, questions: Sequence[Question], replies: Sequence[Reply], told: Told) -> CertificateLine:
    """Test that tokens sampled at temperature 1 have the reference's probabilities (see `certify_sampling`)."""
    generator = torch.Generator().manual_seed(0)
    quantiles = torch.rand(len(replies), SAMPLED_TOKENS, generator=generator, dtype=torch.float64)  # after an end: any number
    for row, readings in enumerate(reader.read([question.ids for question in questions], replies, told)):
        for place, reading in enumerate(readings[:SAMPLED_TOKENS]):
            quantiles[row, place] = reading.greater + reading.own * quantiles[row, place]
    subject = f"sampled answers, {sum(len(reply.tokens) for reply in replies)} tokens"
    return sampling_line(subject, f"G-tests of {len(replies)} texts at temperature 1", quantiles)


def ask_one_by_one(
    server: Server, questions: Sequence[Question], max_new_tokens: int, told: Told
) -> tuple[list[Reply], list[DraftCounts] | None]:
    """Ask the questions one by one; return the replies, and the server's counts of its drafts for each.

    None if it doesn't count them. Counts that come with each answer are taken if they have depths. Else those at
    /metrics are, and nobody else may use the server meanwhile.
    """
    replies, totals = list[Reply](), [server.counts()]
    for question in questions:
        replies += ask(server, [question], concurrency=1, max_new_tokens=max_new_tokens, told=told)[0]
        totals.append(server.counts())
    by_reply = [reply.drafts or NO_DRAFTS for reply in replies]
    if any(count.by_depth for count in by_reply):
        return replies, by_reply
    if counts := [after.plus(before, -1) for before, after in pairwise(totals) if before and after]:
        if bad := next(
            (count for count in counts if min(count.steps, count.accepted, count.drafted - count.accepted) < 0), None
        ):
            raise ValueError(f"{server.url} counts {bad.accepted} accepted of {bad.drafted} drafts: /metrics is wrong")
        if len(counts) == len(questions) and any(count.steps for count in counts):
            return replies, counts
    return replies, by_reply if any(count.drafted for count in by_reply) else None


@torch.inference_mode()
def drafts_here(
    target: HFTarget, method: Method, questions: Sequence[Question], max_new_tokens: int, num_depths: int, told: Told
) -> list[DraftCounts]:
    """Decode the questions here; return what is accepted for each, at `num_depths`, or at all depths if that is zero."""
    counts = []
    for question in questions:
        prompt = torch.tensor(question.ids, device=target.device)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": target.stop_ids, "seeds": [0]}
        generation = time_generation(target, method.drafter, GreedyAcceptance(), [prompt], loop=method.loop, **options)
        answer = generation.answer(0)
        counts.append(
            DraftCounts(
                steps=sum(answer.accepted_histogram),
                drafted=answer.num_draft_tokens,
                accepted=answer.num_accepted,
                by_depth=tuple(
                    sum(answer.accepted_histogram[depth:])
                    for depth in range(1, 1 + (num_depths or len(answer.accepted_histogram) - 1))
                ),
            )
        )
        told()
    return counts


def check_drafts(server: Sequence[DraftCounts], here: Sequence[DraftCounts], *, seed: int) -> CertificateLine:
    """Check that a server accepts as much per step as outrider does with the same drafter on the same prompts."""
    sums = np.array([[(count.accepted, count.steps) for count in side] for side in (server, here)], dtype=float)
    with np.errstate(invalid="ignore", divide="ignore"):  # where nothing is accepted
        _, interval = bootstrap(sums, ratio_of_ratios, seed=seed)
    theirs, ours = ratio(sums.sum(1))
    share = theirs / ours if ours else 1.0
    passed = not (share < LEAST_ACCEPTED and (interval is None or not interval[1] >= LEAST_ACCEPTED))
    result = f"{theirs:.3f} accepted per step against {ours:.3f} here"
    is_more = interval is not None and interval[0] > 1 / LEAST_ACCEPTED
    if not passed or is_more:
        drafted = [sum(count.drafted for count in side) / max(1, sum(count.steps for count in side)) for side in (server, here)]
        result += f". {drafted[0]:.1f} tokens are drafted per step there, and {drafted[1]:.1f} here: "
        if abs(drafted[0] - drafted[1]) > SAME_DRAFTS * drafted[1]:
            result += "give eval.settings the server's form of drafts"
        else:
            result += "compare the drafter's weights, its feature layers and the chat template"
    return CertificateLine(
        subject=f"drafts of {sum(count.steps for count in server)} steps",
        method="outrider's decoding of the same prompts",
        num_cases=len(server),
        result=result,
        passed=passed,
    )


def no_drafts(num_questions: int) -> CertificateLine:
    """Return the failure of a server that should draft and counts no drafts."""
    return CertificateLine(
        subject="drafts",
        method="outrider's decoding of the same prompts",
        num_cases=num_questions,
        result="the server counts none at /metrics, and sends none with its answers: it doesn't draft, or doesn't say "
        "(SGLang's counts aren't read)",
        passed=False,
    )


def by_category(questions: Sequence[Question], counts: Sequence[DraftCounts]) -> dict[str, DraftCounts]:
    """Sum the drafts of all questions, under "all", of each suite if there are several, and of each category."""
    groups: dict[str, list[DraftCounts]] = {"all": list(counts)}
    has_suites = len({question.suite for question in questions}) > 1
    for question, count in zip(questions, counts, strict=True):
        category = question.prompt.category
        for name in (question.suite, f"{question.suite}, {category}") if has_suites else (category,):
            groups.setdefault(name, []).append(count)
    return {name: reduce(DraftCounts.plus, group) for name, group in groups.items()}


def check_quality(
    questions: Sequence[Question],
    sides: Sequence[Sequence[Reply]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    may_run: bool,
    seed: int,
) -> list[CertificateLine]:
    """Score the answers of each suite that can be scored, with the drafter and without."""
    lines = []
    for suite in dict.fromkeys(question.suite for question in questions):
        scores = []
        for replies in sides:
            texts = [str(tokenizer.decode(reply.tokens, skip_special_tokens=True)) for reply in replies]
            pairs = [(question, text) for question, text in zip(questions, texts, strict=True) if question.suite == suite]
            scores.append([is_right(question, text, may_run=may_run) for question, text in pairs])
        if None in scores[0]:
            continue
        sums = np.stack([np.array([[float(bool(score)), 1.0] for score in side]) for side in scores])
        right = [int(sum(map(bool, side))) for side in scores]
        result, passed = f"{right[0]} of {len(scores[0])}", True
        if len(sides) > 1:
            change, interval = bootstrap(sums, _difference, seed=seed)
            passed = interval is None or interval[1] >= 0
            shown = f" [{interval[0]:+.1%}, {interval[1]:+.1%}]" if interval else ""
            result += f", without it {right[1]}: {change:+.1%}{shown}"
        lines.append(
            CertificateLine(
                subject=f"right answers of {suite}", method="scored by its solutions", num_cases=len(scores[0]), result=result,
                passed=passed,
            )
        )  # fmt: skip
    return lines


def _difference(sums: np.ndarray) -> np.ndarray:
    first, second = ratio(sums)
    return np.asarray(first - second)


def measure_speed(
    sides: Sequence[Server],
    questions: Sequence[Question],
    concurrency: int,
    *,
    max_new_tokens: int,
    repeats: int,
    seed: int,
    told: Told,
) -> tuple[Speed, list[Reply]]:
    """Time the server, and the one without the drafter, in turns; return the speed and the server's replies.

    Both answer the same few questions before both go on, so that a slow moment of the machine costs them alike. The
    replies are those of all questions, `repeats` times.
    """
    replies: list[list[list[Reply]]] = [[[] for _ in range(repeats)] for _ in sides]
    walls = [0.0 for _ in sides]
    size, places = WAVES * concurrency, list(range(len(sides)))
    for repeat in range(repeats):
        for start in range(0, len(questions), size):
            some = questions[start : start + size]
            for side in places:
                answers, wall = ask(sides[side], some, concurrency=concurrency, max_new_tokens=max_new_tokens, told=told)
                replies[side][repeat] += answers
                walls[side] += wall
            places.reverse()
    return speed_of(replies, walls, concurrency, seed=seed), [reply for answers in replies[0] for reply in answers]


def speed_of(replies: Sequence[Sequence[Sequence[Reply]]], walls: Sequence[float], concurrency: int, *, seed: int) -> Speed:
    """Return the speed of a server, and of the one without a drafter if there is one.

    `replies` are those of each side, round and question, and `walls` the seconds of each side.
    """
    sums = np.stack([_by_question(side) for side in replies])
    times = [float(side[:, 0].sum() / side[:, 1].sum()) for side in sums]
    firsts = [median(reply.first_seconds for answers in side for reply in answers) for side in replies]
    faster, interval = bootstrap(sums[::-1], ratio_of_ratios, seed=seed) if len(replies) > 1 else (None, None)
    return Speed(
        concurrency=concurrency,
        tokens_per_second=float(sums[0][:, 1].sum()) / walls[0],
        seconds_per_token=times[0],
        first_token_seconds=firsts[0],
        plain_seconds_per_token=times[1] if len(replies) > 1 else None,
        plain_first_token_seconds=firsts[1] if len(replies) > 1 else None,
        plain_tokens_per_second=float(sums[1][:, 1].sum()) / walls[1] if len(replies) > 1 else None,
        speedup=faster,
        speedup_ci95=interval,
    )


def _by_question(rounds: Sequence[Sequence[Reply]]) -> np.ndarray:
    """Sum seconds and tokens of each question: [question, (seconds, tokens)]. A stop token counts as one."""
    return np.array(
        [
            [sum(reply.seconds for reply in replies), sum(len(reply.tokens) + reply.ended for reply in replies)]
            for replies in zip(*rounds, strict=True)
        ]
    )


def _interval(speed: Speed) -> str:
    if speed.speedup is None:
        return "-"
    interval = f" [{speed.speedup_ci95[0]:.2f}, {speed.speedup_ci95[1]:.2f}]" if speed.speedup_ci95 else ""
    return f"{speed.speedup:.2f}x{interval}"


def speed_table(speeds: Sequence[Speed]) -> Table:
    """Format the speeds for a terminal."""
    names = ("At a time", "", "Tok/s", "ms/token", "First ms", "Speedup [95 %]")
    table = Table(*names, box=box.SIMPLE)
    for speed in speeds:
        for name, rate, each, first in (
            ("with", speed.tokens_per_second, speed.seconds_per_token, speed.first_token_seconds),
            ("without", speed.plain_tokens_per_second, speed.plain_seconds_per_token, speed.plain_first_token_seconds),
        ):
            if rate is not None and each is not None and first is not None:
                cells = (f"{rate:.1f}", f"{1000 * each:.1f}", f"{1000 * first:.1f}", _interval(speed) if name == "with" else "")
                table.add_row(str(speed.concurrency), name, *cells)
    return table


def drafts_table(drafts: dict[str, dict[str, DraftCounts]]) -> Table:
    """Format the tokens per step, and what is accepted by depth, for a terminal."""
    table = Table("Prompts", "", "Steps", "Tokens per step", "Accepted by depth", box=box.SIMPLE)
    for category in drafts["server"]:
        for side, depths in drafts.items():
            counts = depths[category]
            steps = max(1, counts.steps)
            shares = " ".join(f"{count / steps:.2f}" for count in counts.by_depth) or "not reported"
            table.add_row(category, side, str(counts.steps), f"{1 + counts.accepted / steps:.2f}", shares)
    return table
