"""Figures of a model card: rows of evaluations, and the fastest measured call."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from huggingface_hub import EvalResult

from ...data.files import read_json, sha256_file
from ...data.paths import SEPARATOR, TRAINING_FREE_NAMES
from ...models.drafters.saved.folder import WEIGHTS_FILE
from ..records.names import BASELINE, FACTS_FILE, SUMMARY_FILE
from ..results.markdown import Markdown
from ..results.notes import NOISY_NOTE, PACE_NOTE, stages_notes
from ..results.rows import Row, decoding_name, depends_on_clock, fault, is_broken, is_lossy
from ..results.tables import cells, markdown_table
from .card_options import require_plain_options
from .runs import Run, cell_of, read_run


def unchanged(run: Run) -> Run:
    """Return the run. Raises ValueError if its summary was changed after the evaluation ended."""
    facts = read_json(run.directory / FACTS_FILE) if (run.directory / FACTS_FILE).is_file() else None
    if not isinstance(facts, dict) or facts.get("summary_sha256") != sha256_file(run.directory / SUMMARY_FILE):
        raise ValueError(
            f"{SUMMARY_FILE} in {run.directory} isn't the one that its evaluation wrote ({FACTS_FILE} has another digest, or "
            "none), so the card can't show its figures. Run the evaluation's command again, which writes it from the records"
        )
    return run


def require_rows(run: Run, weights: str) -> list[Row]:
    """Select the rows of one evaluation that were measured with these weights.

    Raises ValueError if there are none.
    """
    rows, methods = rows_with(run, weights), run.info.config["methods"]
    if not rows and weights in (method["weights"] for method in methods.values()):
        raise ValueError(
            f"this drafter ran out of memory everywhere in {run.directory}, so it has no figures there; omit this evaluation"
        )
    if not rows:
        raise ValueError(
            f"{run.directory} measured other weights ({', '.join(methods) or 'no drafter'}); give an evaluation of this "
            "drafter with its present weights"
        )
    return rows


def rows_of(evaluation: Path, drafter: Path) -> list[Row]:
    """Read the rows of an evaluation that were measured with this drafter's weights."""
    return rows_with(read_run(evaluation, evaluation.name), sha256_file(drafter / WEIGHTS_FILE))


def rows_with(run: Run, weights: str) -> list[Row]:
    """Select rows with figures of these weights; rows that ran out of memory have none."""
    methods = run.info.config["methods"]
    return [row for row in run.rows if methods.get(row["method"], {}).get("weights") == weights and not row["out_of_memory"]]


def measurement(run: Run, rows: Sequence[Row]) -> dict[str, Any]:
    """Collect the figures of one evaluation, and the environment of the measurement."""
    environment, config = run.info.environment, run.info.config
    return {
        "table": markdown_table([_line(row, run) for row in rows], left=("Prompts", "Decoding", "Method", "Identical")),
        "device": environment.processor,
        "form": "" if config["target"]["form"] == "eager" else f" ({config['target']['form']})",
        "dtype": run.info.dtype,
        "linears": ", linear layers in the fastest layouts for this processor" if environment.linears else "",
        "max_new_tokens": config["max_new_tokens"],
        "notes": " ".join([*([PACE_NOTE] if any(map(depends_on_clock, rows)) else []), *stages_notes(rows)]),
        "noise": NOISY_NOTE if any(row["noisy"] for row in rows) else "",
        "python": environment.python,
        "packages": ", ".join(f"{name} {number}" for name, number in environment.packages.items()),
    }


def _line(row: Row, run: Run) -> dict[str, str]:
    (plain,) = [
        other for other in run.rows if other["method"] == BASELINE and cell_of(other)[:-1] == cell_of(row)[:-1]
    ]  # every group of rows has one
    texts = cells(row)
    return {
        "Prompts": f"{row['suite']} ({row['num_prompts']})",
        "Decoding": decoding_name(row),
        "Method": row["label"],
        "Tokens per step": texts["Tok/step"],
        "Speedup": f"none: {fault(row)}" if is_broken(row) else texts["Speedup [95 %]"],
        "Median (faster on)": f"{texts['Median']} ({texts['Faster on']})" if row["num_compared"] else "-",
        "Tokens/s (plain)": f"{texts['Tok/s']} ({cells(plain)['Tok/s']})",
        "Identical": texts["Identical"],
    }


def hub_results(row: Row) -> list[EvalResult]:
    """Convert a row's figures to the Hub's format.

    The list is empty if the answers weren't the target's. A noisy speedup is left out, since the
    Hub would show it without this mark.
    """
    if is_broken(row):
        return []
    dataset, _, revision = (row["prompt_set_source"] or row["suite"]).partition("@")
    figures = {"tokens_per_step": "Tokens per step", "speedup": "Speedup over plain decoding"}
    values: dict[str, Any] = {**row}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=row["suite"],
            dataset_revision=revision or None,
            metric_type=name,
            metric_name=f"{title}, {decoding_name(row)}, {row['label']}",
            metric_value=round(values[name], 2),
        )
        for name, title in figures.items()
        if values[name] is not None and not (name == "speedup" and row["noisy"])
    ]


# --- the fastest call


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestCall:
    """How `generate` is called for the highest measured speedup."""

    speedup: float
    """Geometric mean over the suites."""
    is_faster: bool
    """Whether the speedup is above 1.00x, as printed."""
    scope: str
    """What a reader must know about the speedup, after a comma; empty for one suite without noise."""
    arguments: Markdown
    """Arguments of `generate` beside those of every call; code, so nothing in it is escaped."""
    partners: list[str]
    """Training-free drafters that it is merged with."""


def fastest_call(figures: Sequence[tuple[Run, Row]], packaged: Sequence[str]) -> FastestCall | None:
    """Find the call with the highest speedup, as the geometric mean over the suites.

    Calls are compared at the lowest temperature and batch size that were measured, which are those
    of the example. Only calls with a valid speedup in every suite count. `packaged` names the
    training-free drafters that the package drafts with by default. Returns None if no call counts.
    """
    # 1. The rows of each call that `generate` can run, and the suites that they must have.
    valid = [(run, row) for run, row in figures if _is_valid(run, row)]
    place = min(((row["temperature"], row["batch_size"]) for _, row in valid), default=None)
    suites = {row["suite"] for run, _ in figures for row in run.rows if (row["temperature"], row["batch_size"]) == place}
    rows_of_call: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for run, row in valid:
        if (row["temperature"], row["batch_size"]) == place:
            method = run.info.config["methods"][row["method"]]
            rows_of_call[method["kind"], json.dumps(method["setting"])].append(row)
    means = {
        call: geometric_mean([row["speedup"] or 0.0 for row in rows])
        for call, rows in rows_of_call.items()
        if {row["suite"] for row in rows} == suites
    }
    if not means:
        return None
    # 2. The fastest one. Without a gain, the example is the package's default.
    kind, written = call = max(means, key=means.__getitem__)
    is_faster = round(means[call], 2) > 1
    setting = json.loads(written) if is_faster else {}
    partners = [part for part in kind.split(SEPARATOR) if part in TRAINING_FREE_NAMES] if is_faster else list(packaged)
    require_plain_options(setting, figures[0][0].directory)
    scope = f", on average over {len(suites)} suites" if len(suites) > 1 else ""
    return FastestCall(
        speedup=means[call],
        is_faster=is_faster,
        scope=scope + ", noisy" * any(row["noisy"] for row in rows_of_call[call]),
        arguments=_arguments(partners, setting, packaged),
        partners=partners,
    )


def _is_valid(run: Run, row: Row) -> bool:
    method: dict[str, Any] = run.info.config["methods"][row["method"]]
    can_run = method["setting"] is not None and not run.info.is_pipelined(row["method"])
    return can_run and row["speedup"] is not None and not is_broken(row) and not is_lossy(row)


def _arguments(partners: Sequence[str], setting: dict[str, Any], packaged: Sequence[str]) -> Markdown:
    """Write the arguments of `generate` that differ from the package's defaults."""
    name = "".join(f"+{partner}" for partner in partners)
    drafter = "" if list(partners) == list(packaged) else f', drafter=drafter + "{name}"' if name else ", drafter=drafter"
    return Markdown(f"{drafter}{f', drafter_options={setting!r}' if setting else ''}")
