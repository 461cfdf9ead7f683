"""Report of finished evaluations: one HTML page, from the files in their folders."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ...data.files import atomic_write_text
from ..results.notes import FEW_UNITS, headline
from .runs import Group, read_groups
from .sections import PageTable, accepted_lengths, batch_sizes, categories, misses, results, time_split

PAGE_FILE = "report.html"
NUM_OPEN = 4
"""Tables of a section that the page shows at once. Later ones are folded."""
SECTIONS: dict[str, Callable[[Group], list[PageTable]]] = {
    "speedup": results,
    "categories": categories,
    "batches": batch_sizes,
    "accepted": accepted_lengths,
    "misses": misses,
    "time": time_split,
}
"""Sections of a chapter, whose texts and order are in `templates/sections.yaml`."""


def write_report(directories: Sequence[Path], output_dir: Path) -> Path:
    """Write the page; return its path.

    Raises ValueError for folders without a finished evaluation (see `read_groups`).
    """
    chapters = [_chapter(group) for group in read_groups(directories)]
    atomic_write_text(output_dir / PAGE_FILE, render(chapters, [str(directory) for directory in directories]))
    return output_dir / PAGE_FILE


def render(chapters: Sequence[dict[str, Any]], folders: Sequence[str]) -> str:
    """Render the page as HTML. All texts from records are escaped."""
    loader = PackageLoader("outrider.eval", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    titles = ", ".join(dict.fromkeys(chapter["title"] for chapter in chapters))
    template = environment.get_template("report.html.jinja")
    return template.render(
        title=f"Speculative decoding: {titles}",
        folders=folders,
        chapters=chapters,
        num_open=NUM_OPEN,
    )


def _chapter(group: Group) -> dict[str, Any]:
    """Collect what the page shows of a group of comparable runs."""
    tables = {name: tables_of(group) for name, tables_of in SECTIONS.items()}
    names = ", ".join(run.name for run in group.runs)
    return {
        "title": group.title,
        "subtitle": f"{group.runs[0].info.environment.processor}; from {names}",
        "headlines": [f"{run.name}: " * (len(group.runs) > 1) + headline(run.rows) for run in group.runs],
        "differs_in": group.differs_in,
        "sections": [{"id": name, **texts, "tables": tables[name]} for name, texts in _texts().items() if tables[name]],
        "facts": _facts(group),
    }


@cache
def _texts() -> dict[str, dict[str, str]]:
    """Read the texts of the sections, by their names."""
    text = files("outrider.eval").joinpath("templates/sections.yaml").read_text(encoding="utf-8")
    texts: dict[str, dict[str, str]] = yaml.safe_load(text.replace("{few_units}", str(FEW_UNITS)))
    return texts


def _facts(group: Group) -> list[tuple[str, str]]:
    """Describe where and how the numbers were measured."""
    info, facts = group.runs[0].info, []
    names = {"num_cpus": "CPUs", "num_threads": "Threads", "git_hash": "Commit", "cpu": "CPU", "linears": "Linear layers"}
    for key, value in asdict(info.environment).items():
        text = ", ".join(f"{name} {version}" for name, version in value.items()) if isinstance(value, dict) else str(value)
        if key == "linears":
            shapes = {way: sorted(shape for shape in value if value[shape] == way) for way in value.values()}
            text = "; ".join(f"{', '.join(shapes[way])}: {way}" for way in shapes)
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
