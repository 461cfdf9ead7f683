"""Why drafts end: each miss of a traced evaluation has one cause, and belongs to a kind of token and text.

A miss is a step whose draft ended before a token that the drafter could have had. Its cause is the first of
these that holds:

    uncertain       the target itself gave its token less than half of the probability
    outside         the token is not in the reduced draft vocabulary
    free            the same tokens stood earlier in the text, before the same token: suffix lookup finds it
    ranked too low  the drafter's search had the token, and the draft tree left it out
    not learned     the drafter didn't think of it

Not misses: steps at the end of an answer, steps without a draft, and drafts that were right up to their last level.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ...data.paths import TRAINING_FREE_NAMES
from ...data.questions import scripts_of
from ..records.names import RECORDS_FILE, RUN_FILE
from ..records.records import ENDED, FULL, IN_REACH, NO_DRAFT, OUTSIDE, EvalRecord, read_records
from ..records.run_files import read_info
from .rows import read_rows

UNCERTAIN, FREE, RANKED, NOT_IN_VOCABULARY, NOT_LEARNED = "uncertain", "free", "ranked too low", "outside", "not learned"
CAUSES = (UNCERTAIN, NOT_IN_VOCABULARY, FREE, RANKED, NOT_LEARNED)
"""In the order in which they are tried."""
NOT_COPIED = "no"
SURE = 0.5
"""Least probability of a token of which the target is not called uncertain."""
LOOKUP = (4, 3, 2)
"""Tokens before a token that must have stood earlier in the text, the longest match first."""
CONTEXTS = (256, 1024, 4096)
"""Bounds of the classes of context length, in tokens."""
GROUPS = ("token", "copied", "place", "context", "suite", "category", "script")
"""Columns by which misses are told apart."""
LEAST_STEPS = 20
"""Steps that a group has at least, for its rate to be compared with the others'."""
LEAST_ESTIMATE = 1.2
"""Tokens per step of a training below which there is hardly anything to lose."""
FAR_LESS, HARDLY_ANY = 0.5, 0.2
"""Shares of the accepted tokens of its training below which a drafter falls short of it, and has lost it."""
MUCH_WORSE = 1.5
"""Ratio of a group's rate of misses to that of all others from which it is named as the place of a cause."""


def steps_of(record: EvalRecord) -> Iterator[dict[str, Any]]:
    """Describe every step of a traced answer."""
    assert record.drafts is not None
    drafts, ids = record.drafts, [*record.drafts.prompt_ids, *record.token_ids]
    start = len(drafts.prompt_ids)
    copied = earlier_matches(ids)
    places = list(places_of(drafts.texts))
    scripts = scripts_of("".join(drafts.texts)).most_common(1)
    position = 1  # the prefill emits the first token
    for accepted, end, probability in zip(drafts.accepted, drafts.ends, drafts.probabilities, strict=True):
        chosen = min(position + accepted, len(record.token_ids) - 1)
        match = copied[start + chosen]
        yield {
            "label": record.label,
            "temperature": record.temperature,
            "batch_size": record.batch_size,
            "suite": record.suite,
            "category": record.category,
            "script": scripts[0][0].lower() if scripts else "no letters",
            "answer": record.prompt_id,
            "emitted": min(accepted + 1, len(record.token_ids) - position),
            "accepted": accepted,
            "token": kind_of(drafts.texts[chosen]),
            "copied": "from the prompt" if match is not None and match < start else NOT_COPIED,
            "place": places[chosen],
            "context": next((f"up to {bound}" for bound in CONTEXTS if start + chosen <= bound), f"over {CONTEXTS[-1]}"),
            "end": end,
            "cause": cause_of(end, probability, is_free=match is not None),
        }
        position += accepted + 1


def cause_of(end: str, probability: float, *, is_free: bool) -> str | None:
    """Return the cause of a step's miss; None if it has none."""
    if end in (ENDED, NO_DRAFT, FULL):
        return None
    if probability < SURE:
        return UNCERTAIN
    if end == OUTSIDE:
        return NOT_IN_VOCABULARY
    if is_free:
        return FREE
    return RANKED if end == IN_REACH else NOT_LEARNED


def earlier_matches(ids: Sequence[int]) -> list[int | None]:
    """Return for each token where it stood earlier after the same tokens: its last place, or None."""
    seen: dict[tuple[int, ...], int] = {}
    result: list[int | None] = []
    for place, token in enumerate(ids):
        before = [tuple(ids[place - size : place]) for size in LOOKUP if place >= size]
        matches = [seen[key] for key in before if key in seen]
        result.append(matches[0] if matches and ids[matches[0]] == token else None)
        seen.update(dict.fromkeys(before, place))
    return result


def kind_of(text: str) -> str:
    """Return the kind of a token, by its text."""
    body = text.strip()
    if not body:
        return "space"
    if "\ufffd" in body:
        return "part of a character"
    if body[0].isdigit():
        return "digits"
    if body[0].isalpha():
        return "first of a word" if text[0].isspace() else "letters"
    return "punctuation"


def places_of(texts: Iterable[str]) -> Iterator[str]:
    """Return whether each token is in a block of code, in the model's thinking, or in the answer itself."""
    text, is_code, is_thinking = "", False, False
    for new in texts:
        text += new
        if text.endswith("```"):
            is_code, text = not is_code, ""
        if text.rstrip().endswith(("<think>", "</think>")):
            is_thinking = not text.rstrip().endswith("</think>")
        yield "thinking" if is_thinking else "code" if is_code else "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Misses of one cause."""

    name: str
    count: int
    most: float
    """Tokens per step, at most, if none of them had ended a draft."""
    where: str | None
    """The group of texts or tokens that has far more of them than the others; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why the drafts of a method end."""

    label: str
    steps: pd.DataFrame
    causes: list[Cause]
    """Those that occur, the one that costs most first."""
    estimate: float | None
    """Tokens per step that the drafter's training estimated at its end, on its own texts; None if unknown."""
    has_other_template: bool
    """Whether the drafter was trained with another chat template."""
    sources: list[str]
    """Kinds of the drafters of the method."""

    @property
    def doubt(self) -> str | None:
        """What comes before all causes: that the drafter has other inputs than in its training; None if nothing says so."""
        if self.has_other_template:
            return (
                "Its training had another chat template, so it sees other inputs here. Evaluate with that one "
                "(--chat-template), or train with this one (data.chat_template)."
            )
        if self.estimate is None or self.estimate < LEAST_ESTIMATE:
            return None
        share = (self.tokens_per_step - 1) / (self.estimate - 1)
        if share < HARDLY_ANY:
            return (
                f"On its training's own texts it was {self.estimate:.2f}; that is lost here, as if its inputs were others. "
                "Compare the target, its quantisation and the feature layers with those of its training."
            )
        own = [cause.name for cause in self.causes if cause.name not in (UNCERTAIN, FREE)]
        if share < FAR_LESS and own[:1] == [NOT_LEARNED]:
            return (
                f"On its training's own texts it was {self.estimate:.2f}. Either it has learned those by heart, or these are "
                "texts of another kind."
            )
        return None

    @property
    def tokens_per_step(self) -> float:
        return float(self.steps["emitted"].sum() / len(self.steps))

    @property
    def num_misses(self) -> int:
        return int(self.steps["cause"].notna().sum())

    def positions(self) -> pd.DataFrame:
        """By position in the draft: how often it was reached, and how often its token was right."""
        drafted = self.steps[self.steps["end"] != NO_DRAFT]
        has_miss = ~drafted["end"].isin([ENDED, FULL])
        rows = []
        for depth in range(1, int(drafted["accepted"].max()) + 2) if len(drafted) else ():
            is_right = drafted["accepted"] >= depth
            num_reached = int((is_right | ((drafted["accepted"] == depth - 1) & has_miss)).sum())
            if num_reached:
                rows.append({"draft token": depth, "reached": num_reached, "right": float(is_right.sum() / num_reached)})
        return pd.DataFrame(rows)

    def groups(self, column: str) -> pd.DataFrame:
        """By the values of a column: steps, tokens per step, misses, and their most frequent cause."""
        rows = []
        for value, steps in self.steps.groupby(column, sort=False):
            causes = steps["cause"].dropna()
            rows.append(
                {
                    column: value,
                    "steps": len(steps),
                    "tokens per step": float(steps["emitted"].sum() / len(steps)),
                    "misses": len(causes),
                    "most are": causes.mode().iloc[0] if len(causes) else "-",
                }
            )
        return pd.DataFrame(rows).sort_values("misses", ascending=False)


def explain_folder(directory: Path) -> list[Explanation]:
    """Explain the misses of a finished evaluation; empty if no answer's drafts were recorded."""
    training = {row["label"]: row["training"] for row in read_rows(directory)}
    template = read_info(directory / RUN_FILE).config.get("chat_template")
    return explain(read_records(directory / RECORDS_FILE).values(), training, template)


def explain(
    records: Iterable[EvalRecord], training: Mapping[str, Mapping[str, Any] | None], template: str | None = None
) -> list[Explanation]:
    """Explain the misses of each method, temperature and batch size.

    `training` has the facts of each drafter's training, by label, and `template` is the digest of the prompts' chat template.
    """
    traced = [record for record in records if record.drafts is not None]
    rows = [step for record in traced for step in steps_of(record)]
    kinds = {record.label: record.method.split()[0] for record in traced}
    if not rows:
        return []
    explanations = []
    for (label, temperature, size), steps in pd.DataFrame(rows).groupby(["label", "temperature", "batch_size"], sort=False):
        place = f", temperature {temperature:g}" * (temperature > 0) + f", batches of {size}" * (size > 1)
        facts = training.get(label) or {}
        explanations.append(
            Explanation(
                label=f"{label}{place}",
                steps=steps,
                causes=causes_of(steps),
                estimate=facts.get("tokens_per_step_estimate"),
                has_other_template=facts.get("chat_template") not in (None, template),
                sources=kinds[label].split("+"),
            )
        )
    return explanations


def causes_of(steps: pd.DataFrame) -> list[Cause]:
    """Return the causes of misses that occur, the one that costs most first."""
    emitted, counts = int(steps["emitted"].sum()), steps["cause"].value_counts()
    return [
        Cause(name=name, count=count, most=emitted / max(1, len(steps) - count), where=where_of(steps, name))
        for name, count in sorted(counts.items(), key=lambda item: -item[1])
    ]


def where_of(steps: pd.DataFrame, cause: str) -> str | None:
    """Return the group that tells most about where a cause's misses are: that with the largest log-likelihood ratio.

    Its rate must be far beyond the others', and its misses beyond their rate a quarter of all of this cause; else None.
    """
    is_cause = steps["cause"] == cause
    best, most = None, 0.0
    for column in GROUPS:
        for value, inside in steps.groupby(column)[column]:
            own, others = is_cause[inside.index], is_cause.drop(inside.index)
            if min(len(own), len(others)) < LEAST_STEPS or value == NOT_COPIED:  # a copied token has another cause
                continue
            excess = own.sum() - len(own) * others.mean()
            gain = _log_likelihood(own) + _log_likelihood(others) - _log_likelihood(is_cause)
            if own.mean() > MUCH_WORSE * others.mean() and excess > is_cause.sum() / 4 and gain > most:
                best, most = f"{column} {value}", gain
    return best


def _log_likelihood(is_cause: pd.Series) -> float:
    """Return the log-likelihood of these steps at their own rate."""
    count, total = int(is_cause.sum()), len(is_cause)
    return sum(part * math.log(part / total) for part in (count, total - count) if part)


ADVICE = {
    NOT_LEARNED: "train longer, or on more texts like these{where}",
    RANKED: "verify larger trees: `outrider tune` finds which pay (drafter.tree_nodes, drafter.top_k)",
    FREE: "merge free sources with the drafter: eval.merge=[suffix, recycling]",
    NOT_IN_VOCABULARY: "train with a larger drafter.draft_vocab_size, or on texts like these{where}: their tokens are counted",
}
"""What could mend each cause but the target's own uncertainty."""
NUM_STEPS = 3
"""Next steps that are named."""


def advice(explanation: Explanation) -> list[str]:
    """Return the next steps that could win most, with the tokens per step that each could bring at most."""
    steps, advised = [], dict(ADVICE)
    if "suffix" in explanation.sources:  # it is merged already
        del advised[FREE]
    if {*explanation.sources} <= {*TRAINING_FREE_NAMES}:
        advised[NOT_LEARNED] = "train a drafter on texts like these{where}, and merge it with this one: eval.merge"
    for cause in explanation.causes:
        if cause.name in advised:
            where = f" ({cause.where})" if cause.where else ""
            steps.append((cause.most, advised[cause.name].format(where=where)))
    if num_full := int((explanation.steps["end"] == FULL).sum()):
        most = float(explanation.steps["emitted"].sum() / max(1, len(explanation.steps) - num_full))
        steps.append((most, f"draft deeper: {num_full} drafts were right to their last token"))
    steps.sort(key=lambda step: -step[0])
    return [f"{text}: at most {most:.2f} tokens per step" for most, text in steps[:NUM_STEPS]]
