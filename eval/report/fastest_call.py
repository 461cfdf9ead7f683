"""The fastest measured call of a drafter, which a card's example shows."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from ...data.paths import TRAINING_FREE_NAMES
from ..results.markdown import Markdown
from ..results.rows import Row, is_broken, is_lossy
from .card_options import require_plain_options
from .runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestCall:
    """How `generate` is called for the highest measured speedup."""

    speedup: float
    is_faster: bool
    """Whether any measured speedup is above 1.00x, as printed."""
    arguments: Markdown
    """Arguments of `generate` beside those of every call; code, so nothing in it is escaped."""
    partners: list[str]
    """Training-free drafters that it is merged with."""


def fastest_call(figures: Sequence[tuple[Run, Row]], packaged: Sequence[str]) -> FastestCall | None:
    """Find the call with the highest speedup, as the geometric mean over the suites.

    Calls are compared at the lowest temperature and batch size that were measured, which are those
    of the example. `packaged` names the training-free drafters that the package drafts with by
    default. Returns None without a valid speedup.
    """
    # 1. The speedups of each method that `generate` can run.
    valid = [(run, row) for run, row in figures if _is_valid(run, row)]
    if not valid:
        return None
    place = min((row["temperature"], row["batch_size"]) for _, row in valid)
    speedups: dict[tuple[str, str], list[float]] = defaultdict(list)
    runs = {str(run.directory): run for run, _ in valid}
    for run, row in valid:
        if (row["temperature"], row["batch_size"]) == place and row["speedup"]:
            speedups[str(run.directory), row["method"]].append(row["speedup"])
    # 2. The fastest one. Without a gain, the example is the package's default.
    (directory, name), values = max(speedups.items(), key=lambda item: geometric_mean(item[1]))
    is_faster = any(round(row["speedup"] or 0.0, 2) > 1 for _, row in valid)
    method = runs[directory].info.config["methods"][name]
    partners = [part for part in method["kind"].split("+") if part in TRAINING_FREE_NAMES] if is_faster else list(packaged)
    setting = method["setting"] if is_faster else {}
    require_plain_options(setting, runs[directory].directory)
    return FastestCall(
        speedup=geometric_mean(values),
        is_faster=is_faster,
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
