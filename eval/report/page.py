"""Report of finished evaluations: one HTML page, from the files in their folders."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ...data.files import atomic_write_text
from ..records.run_files import Environment as EvalEnvironment
from ..results.notes import FEW_UNITS, headline
from .page_tables import PageSection, PageTable
from .runs import Group, read_groups
from .sections import accepted_lengths, batch_sizes, categories, results, time_split

PAGE_FILE = "report.html"
NUM_OPEN = 4
"""Tables of a section that the page shows at once. Later ones are folded."""
SECTIONS: dict[str, Callable[[Group], list[PageTable]]] = {
    "speedup": results,
    "categories": categories,
    "batches": batch_sizes,
    "accepted": accepted_lengths,
    "time": time_split,
}
"""Sections of a chapter, in order; their texts are in `templates/sections.yaml`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One chapter of the page: a group of comparable runs."""

    title: str
    subtitle: str
    headlines: list[str]
    """The result of each run in one line."""
    differs_in: list[str]
    sections: list[PageSection]
    facts: list[tuple[str, str]]


def write_report(directories: Sequence[Path], output_dir: Path) -> Path:
    """Write the page; return its path.

    Raises ValueError for folders without a finished evaluation (see `read_groups`).
    """
    chapters = [_chapter(group) for group in read_groups(directories)]
    atomic_write_text(output_dir / PAGE_FILE, render(chapters, [str(directory) for directory in directories]))
    return output_dir / PAGE_FILE


def render(chapters: Sequence[Chapter], folders: Sequence[str]) -> str:
    """Render the page as HTML. All texts from records are escaped."""
    loader = PackageLoader("outrider.eval", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    titles = ", ".join(dict.fromkeys(chapter.title for chapter in chapters))
    template = environment.get_template("report.html.jinja")
    return template.render(
        title=f"Speculative decoding: {titles}",
        folders=folders,
        chapters=chapters,
        num_open=NUM_OPEN,
    )


def _chapter(group: Group) -> Chapter:
    tables = {name: tables_of(group) for name, tables_of in SECTIONS.items()}
    return Chapter(
        title=group.title,
        subtitle=_subtitle(group),
        headlines=[headline(run.rows) if len(group.runs) == 1 else f"{run.name}: {headline(run.rows)}" for run in group.runs],
        differs_in=group.differs_in,
        sections=[_section(name, tables[name]) for name in SECTIONS if tables[name]],
        facts=_facts(group),
    )


def _section(name: str, tables: list[PageTable]) -> PageSection:
    texts = _texts()[name]
    return PageSection(id=name, title=texts["title"], intro=texts["intro"].format(few_units=FEW_UNITS), tables=tables)


@cache
def _texts() -> dict[str, dict[str, str]]:
    """Read the texts of the sections, by their names."""
    texts: dict[str, dict[str, str]] = yaml.safe_load(
        files("outrider.eval").joinpath("templates/sections.yaml").read_text(encoding="utf-8")
    )
    return texts


def _subtitle(group: Group) -> str:
    names = ", ".join(run.name for run in group.runs)
    return f"{_device(group.runs[0].info.environment)}; from {names}"


def _device(environment: EvalEnvironment) -> str:
    if environment.device != "cpu":
        return environment.device
    return f"{environment.num_threads} thread{'s' if environment.num_threads > 1 else ''} of {environment.cpu}"


def _shapes_by_way(linears: Mapping[str, str]) -> dict[str, list[str]]:
    shapes: dict[str, list[str]] = {}
    for shape, way in linears.items():
        shapes.setdefault(way, []).append(shape)
    return shapes


def _facts(group: Group) -> list[tuple[str, str]]:
    """Describe where and how the numbers were measured."""
    info, facts = group.runs[0].info, []
    names = {"num_cpus": "CPUs", "num_threads": "Threads", "git_hash": "Commit", "cpu": "CPU", "linears": "Linear layers"}
    for key, value in asdict(info.environment).items():
        text = ", ".join(f"{name} {version}" for name, version in value.items()) if isinstance(value, dict) else str(value)
        if key == "linears":
            text = "; ".join(f"{', '.join(sorted(shapes))}: {way}" for way, shapes in _shapes_by_way(value).items())
        if text:
            facts.append((names.get(key, key.capitalize()), "unknown" if value is None else text))
    target = info.config["target"]
    facts.append(("Target", f"{target['name']}, weights {target['weights_sha256'][:12]}, revision {target['revision']}"))
    if target.get("quantization"):
        facts.append(("Quantisation", target["quantization"]))
    options = ("max_new_tokens", "acceptance", "seed")
    facts.append(("Options", ", ".join(f"{name} {info.config[name]}" for name in options)))
    for run in group.runs:
        prompts = {(row["suite"], row["prompt_set_revision"][:12]) for row in run.rows}
        suites = ", ".join(f"{suite} (prompts {revision})" for suite, revision in sorted(prompts))
        facts.append((f"Folder {run.name}", suites))
    return facts
