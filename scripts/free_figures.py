"""Figures of the study of free drafts: a row for each method of a cell, and paired comparisons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from free_cells import DEMO, MERGED, fixed_nodes
from study_cells import SETTINGS_FILE
from transformers_methods import ASSISTED, LOOKUP, PLAIN, TRANSFORMERS

from outrider.data.files import read_json
from outrider.eval.records.names import BASELINE, RECORDS_FILE, RUN_FILE
from outrider.eval.records.records import EvalRecord, GroupKey, read_records
from outrider.eval.records.run_files import read_info
from outrider.eval.results import marks, stats
from outrider.eval.results.attempts import least_disturbed
from outrider.eval.results.finished import read_rows
from outrider.eval.results.rows import Row, fault, is_broken
from outrider.eval.results.sources import shares_text

NGRAM = 4
THEIRS = (TRANSFORMERS, LOOKUP, ASSISTED)
StudyRow = dict[str, Any]
Pair = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CellFigures:
    """Rows of the methods of a cell, and comparisons of one method with another."""

    rows: list[StudyRow]
    pairs: list[Pair]


def read_cell(folder: Path) -> CellFigures:
    """Compute the figures of a finished cell from its records."""
    # 1. The methods by their keys, under the names of the tables.
    info, saved = read_info(folder / RUN_FILE), read_json(folder / SETTINGS_FILE)
    arms = {arm["name"]: arm for arm in saved["methods"]}
    names = {BASELINE: PLAIN, **dict(zip(info.config["methods"], arms, strict=True)), **{name: name for name in THEIRS}}
    records = [record for record in read_records(folder / RECORDS_FILE).values() if not record.profiled]
    # 2. The groups: suite, temperature, batch size.
    summary = read_rows(folder)
    result = CellFigures(rows=[], pairs=[])
    for key in dict.fromkeys(record.group_key for record in records):
        by_name = {name: [r for r in records if r.group_key == key and r.method == method] for method, name in names.items()}
        by_name = {name: of_name for name, of_name in by_name.items() if of_name}
        rows = {names[row["method"]]: row for row in summary if group_of(row) == key and row["method"] in names}
        group = Group(records=by_name, summary=rows, seed=int(info.config["seed"]))
        cell = {
            "cell": folder.name,
            "part": folder.name.split("-")[0],
            "size": saved["size"],
            "dtype": saved["dtype"],
            "threads": info.environment.num_threads,
            **dict(zip(("suite", "temperature", "batch_size"), key, strict=True)),
        }
        result.rows.extend({**cell, **row} for row in group.rows(arms, by_prompt=cell["part"] == DEMO))
        result.pairs.extend({**cell, **pair} for pair in group.pairs(arms))
    return result


def group_of(row: Row) -> GroupKey:
    return (row["suite"], row["temperature"], row["batch_size"])


@dataclass(frozen=True, kw_only=True)
class Group:
    """Methods that answered the same prompts, at one temperature and batch size."""

    records: Mapping[str, Sequence[EvalRecord]]
    """Timed answers by the method's name."""
    summary: Mapping[str, Row]
    """The evaluation's own rows, by the method's name."""
    seed: int

    @property
    def baseline(self) -> str:
        """The faster plain decoding: ours, or transformers' if it was measured."""
        theirs = self.summary.get(TRANSFORMERS)
        return TRANSFORMERS if theirs is not None and (theirs["speedup"] or 0.0) > 1 else PLAIN

    def rows(self, arms: Mapping[str, Mapping[str, Any]], *, by_prompt: bool) -> list[StudyRow]:
        """Build the rows of all methods; speedups are over the faster plain decoding."""
        rare = least_repeating(self.records[PLAIN])
        rows = []
        for name in self.records:
            row = self.summary[name]
            broken = is_broken(row)
            rows.append(
                {
                    "method": name,
                    "kind": arms[name]["kind"]
                    if name in arms
                    else "plain"
                    if name in (PLAIN, TRANSFORMERS)
                    else "transformers",
                    "baseline": self.baseline,
                    "tokens_per_step": row["tokens_per_step"],
                    "tokens_per_step_ci95": row["tokens_per_step_ci95"],
                    "draft_tokens_per_step": row["draft_tokens_per_step"],
                    "sources": shares_text(row),
                    "tokens_per_second": row["tokens_per_second"],
                    "num_prompts": row["num_prompts"],
                    "num_identical": row["num_prompts"] - row["num_mismatched_prompts"],
                    "num_repeated": row.get("num_repeated", 0),
                    "lossless_label": row["lossless_label"],
                    "exceeds": row.get("exceeds", ""),
                    "disturbed": row.get("disturbed", []),
                    "fault": fault(row) if broken else "",
                    **({} if broken else self.compare(name, self.baseline)),
                    "least_repeating": self.compare(name, self.baseline, rare) if by_prompt and not broken else None,
                    "by_prompt": self.by_prompt(name) if by_prompt and not broken else {},
                }
            )
        return rows

    def pairs(self, arms: Mapping[str, Mapping[str, Any]]) -> list[Pair]:
        """Compare the merged tree by expected gain with fixed ones and with transformers' methods.

        The best fixed setting is chosen in hindsight, by total time.
        """
        merged = {name: arm["setting"] for name, arm in arms.items() if arm["kind"] == MERGED and self.is_sound(name)}
        expected = next((name for name, setting in merged.items() if setting["pace"] == "expected"), None)
        if expected is None:
            return []
        others = {name: name for name in THEIRS if self.is_sound(name)}
        fixed = [name for name in merged if name != expected]
        if fixed:
            others["best fixed"] = max(fixed, key=lambda name: self.compare(name, PLAIN)["speedup"])
            others["default fixed"] = next(name for name in fixed if merged[name]["tree_nodes"] == fixed_nodes())
        pairs = [
            {"against": words, "method": expected, "other": name, **self.compare(expected, name)}
            for words, name in others.items()
        ]
        if all(self.is_sound(name) for name in ("prompt_lookup", LOOKUP)):
            lookups = self.compare("prompt_lookup", LOOKUP)
            pairs.append({"against": LOOKUP, "method": "prompt_lookup", "other": LOOKUP, **lookups})
        return pairs

    def is_sound(self, name: str) -> bool:
        """Check whether a method was measured and its answers are the target's."""
        return name in self.records and not is_broken(self.summary[name])

    def compare(self, name: str, other: str, prompts: frozenset[str] | None = None) -> dict[str, Any]:
        """Compare the times of two methods on the same prompts (by default all)."""
        sides = [[r for r in self.records[side] if prompts is None or r.prompt_id in prompts] for side in (other, name)]
        pairs = least_disturbed(*sides, on_cpu=True)
        seconds = [stats.processor_seconds_per_token(side) for side in (pairs.plain, pairs.method)]
        speedup, interval = (1.0, None) if name == other else stats.speedup(pairs.plain, pairs.method, seed=self.seed)
        return {
            "speedup": speedup,
            "speedup_ci95": interval,
            "processor_speedup": seconds[0] / seconds[1] if seconds[0] and seconds[1] else None,
            "num_compared": len({record.unit for record in pairs.method}),
        }

    def by_prompt(self, name: str) -> dict[str, dict[str, float]]:
        """Compute the speedup of each prompt, or batch, and how much its answers repeat themselves."""
        pairs = least_disturbed(self.records[self.baseline], self.records[name], on_cpu=True)
        units = sorted({record.unit for record in pairs.plain}, key=str)
        distinct = distinct_shares(self.records[PLAIN])
        speeds = stats.unit_speedups(pairs.plain, pairs.method)
        return {str(unit): {"speedup": speed, "distinct": distinct[unit]} for unit, speed in zip(units, speeds, strict=True)}


def distinct_shares(records: Sequence[EvalRecord]) -> dict[str | int, float]:
    """Compute the share of distinct 4-grams in the answers to each prompt, or of each batch.

    An answer that doesn't repeat itself has 1.
    """
    grams: dict[str | int, list[tuple[int, ...]]] = {}
    for record in records:
        if record.repeat == 0 and record.attempt == 0:
            tokens = record.token_ids
            new = [(record.prompt_id, *tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
            grams.setdefault(record.unit, []).extend(new)  # type: ignore[arg-type]
    return {unit: len(set(of_unit)) / len(of_unit) if of_unit else 1.0 for unit, of_unit in grams.items()}


def least_repeating(records: Sequence[EvalRecord]) -> frozenset[str]:
    """Select the prompts of the third of units whose answers repeat themselves least."""
    shares = distinct_shares(records)
    units = sorted(shares, key=lambda unit: -shares[unit])[: max(1, len(shares) // 3)]
    return frozenset(record.prompt_id for record in records if record.unit in units)


def has_speed(row: Mapping[str, Any]) -> bool:
    return row.get("speedup") is not None and not marks.is_error(row)
