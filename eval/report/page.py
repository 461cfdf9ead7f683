"""The report of finished evaluations: one page and PNGs, of what their folders hold."""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...data.files import atomic_write_text
from ..records.names import BASELINE
from ..records.run_files import Environment as EvalEnvironment
from ..results.rows import Row
from .distillation import distillation
from .page_plots import plot_table
from .page_tables import Section
from .prefixes import prefixes
from .runs import Group, decoding, read_groups
from .sections import accepted_lengths, categories, heat_maps, results, roofline, time_split

logger = logging.getLogger(__name__)

PAGE_FILE, FIGURES_DIR = "report.html", "figures"
FIGURE = re.compile(r"\d+-[a-z]+-\d+\.png")
"""A figure's name: its chapter, section and table."""
NUM_OPEN = 4
"""Tables of a section that the page shows at once; those after them are folded, and have no PNG."""
SECTIONS: dict[Callable[[Group], Section | None], str] = {
    results: "Speedup and tokens per step",
    categories: "By category: no suite with two categories or more",
    heat_maps: "Batch size and beam width: no drafter at several batch sizes or beam widths, all else equal "
    "(outrider eval --beam-width 4 --beam-width 16)",
    distillation: "Distillation: no pair of drafters that learned the target's labels and the text's (conf=ablation_demo)",
    prefixes: "Shared prefixes: tokens before and after merging are counted in profiled answers (--profile-prompts); with and "
    "without tree attention need the setting share_prefixes both ways",
    accepted_lengths: "Accepted lengths: no drafter",
    time_split: "Where the time goes: no profiled answers (--profile-prompts)",
    roofline: "Roofline: no plain decoding",
}
"""What a report may hold, and what it says where a section's records aren't there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """All that is told of one group of comparable runs."""

    title: str
    subtitle: str
    differs_in: list[str]
    sections: list[Section]
    facts: list[tuple[str, str]]
    absent: list[str]


def write_report(directories: Sequence[Path], output_dir: Path, *, figures: bool = True) -> Path:
    """Write the page, and its figures as PNGs unless `figures` is off, and return the page's path.

    Raises ValueError for folders that hold no finished evaluation (see `read_groups`).
    """
    chapters = [_chapter(group) for group in read_groups(directories)]
    atomic_write_text(output_dir / PAGE_FILE, render(chapters, [str(directory) for directory in directories]))
    if figures:
        _write_figures(chapters, output_dir / FIGURES_DIR)
    return output_dir / PAGE_FILE


def render(chapters: Sequence[Chapter], folders: Sequence[str]) -> str:
    """The page. Whatever comes from records is escaped."""
    loader = PackageLoader("outrider.eval", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    titles = ", ".join(dict.fromkeys(chapter.title for chapter in chapters))
    template = environment.get_template("report.html.jinja")
    return template.render(
        title=f"Speculative decoding: {titles}", folders=folders, chapters=chapters, share=_percent, num_open=NUM_OPEN
    )


def _percent(value: float, top: float) -> float:
    return round(100 * min(1.0, max(0.0, value / top)), 2)


def _chapter(group: Group) -> Chapter:
    made = {told: section(group) for section, told in SECTIONS.items()}
    return Chapter(
        title=group.title,
        subtitle=_subtitle(group),
        differs_in=group.differs_in,
        sections=[section for section in made.values() if section is not None],
        facts=_facts(group),
        absent=[told for told, section in made.items() if section is None],
    )


def _subtitle(group: Group) -> str:
    names = ", ".join(run.name for run in group.runs)
    return f"{_device(group.runs[0].info.environment)}; from {names}"


def _device(environment: EvalEnvironment) -> str:
    if environment.device != "cpu":
        return environment.device
    return f"{environment.num_threads} thread{'s' if environment.num_threads > 1 else ''} of {environment.cpu}"


def _facts(group: Group) -> list[tuple[str, str]]:
    """Where and how the numbers were measured."""
    info, facts = group.runs[0].info, []
    names = {"num_cpus": "CPUs", "num_threads": "Threads", "git_hash": "Commit", "cpu": "CPU"}
    for key, value in asdict(info.environment).items():
        text = ", ".join(f"{name} {version}" for name, version in value.items()) if isinstance(value, dict) else str(value)
        facts.append((names.get(key, key.capitalize()), "unknown" if value is None else text))
    target = info.config["target"]
    facts.append(("Target", f"{target['name']}, weights {target['weights_sha256'][:12]}, revision {target['revision']}"))
    options = ("max_new_tokens", "acceptance", "seed", "pack_weights")
    facts.append(("Options", ", ".join(f"{name} {info.config[name]}" for name in options)))
    for run in group.runs:
        prompts = {(row["suite"], row["prompt_set_revision"][:12]) for row in run.rows}
        suites = ", ".join(f"{suite} (prompts {revision})" for suite, revision in sorted(prompts))
        left_out = [
            f"{row['suite']} ({decoding(row['temperature'])}, batch size {row['batch_size']}): {reasons}"
            for row in run.rows
            if row["method"] == BASELINE and (reasons := _left_out(row))
        ]
        facts.append((f"Folder {run.name}", "; ".join([suites, *left_out])))
    return facts


def _left_out(row: Row) -> str:
    """What a reader of the row's figures should know of its answers."""
    reasons = []
    if row["num_skipped"]:
        reasons.append(f"{row['num_skipped']} turns skipped as too long")
    if row["num_truncated"]:
        reasons.append(f"{row['num_truncated']} plain answers ended at the token limit")
    return ", ".join(reasons)


def _write_figures(chapters: Sequence[Chapter], folder: Path) -> None:
    """A PNG for each table that isn't folded, and none that an earlier report left."""
    written = set()
    for chapter_number, chapter in enumerate(chapters, start=1):
        for section in chapter.sections:
            for number, table in enumerate(section.tables[:NUM_OPEN], start=1):
                path = folder / f"{chapter_number}-{section.id}-{number}.png"
                plot_table(table, f"{section.title}: {table.caption}", path)
                written.add(path.name)
    for stale in folder.glob("*.png"):
        if FIGURE.fullmatch(stale.name) and stale.name not in written:
            logger.info("removing %s, which an earlier report left", stale)
            stale.unlink()
