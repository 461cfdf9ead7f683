"""The last stage of the pipeline: folders for the Hub, and formats of serving engines."""

import filecmp
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..data.files import TEMPORARY, earlier_path, finish_replacing, replacing_directory
from ..eval.config import CardOptions
from ..eval.records.names import SUMMARY_FILE
from ..eval.report.card import model_card
from ..eval.report.card_figures import rows_of
from ..models.drafters.registry import DrafterSpec
from ..models.drafters.saved.folder import WEIGHTS_FILE, read_drafter_config
from ..models.export.config import ExportConfig
from ..models.export.package import make_package, names_left_open
from ..models.export.registry import export_drafter, formats_for, programs_for
from ..models.llm.hf_target import HFTarget
from .config import DrafterRun

log = logging.getLogger(__name__)

PACKAGE_FOLDER, FORMATS_FOLDER = "package", "export"


def require_exportable(config: ExportConfig, spec: DrafterSpec, refusals: Mapping[str, str | None]) -> None:
    """Raise ValueError if a format of `export.formats` can't hold the drafter.

    `refusals` is the result of `refusals_after_training`.
    """
    for name in formats_for(config.formats, spec.kind, getattr(spec.config, "feature_layers", None)):
        if (reason := refusals.get(name)) is not None:
            raise ValueError(f"export.formats has {name}, and {reason}")


def describe_unexportable(refusals: Mapping[str, str | None]) -> str | None:
    """Describe why no format can hold the drafter; None if one can."""
    if None in refusals.values():
        return None
    prefix = "the drafter can't be written as {}: "
    reasons = [f"{name}: {(reason or '').removeprefix(prefix.format(name))}" for name, reason in refusals.items()]
    listing = "; ".join(reasons) or "there is no export format for its kind"
    return f"no serving engine will be able to load this drafter ({listing}); outrider can"


def export(config: ExportConfig, drafters: Sequence[DrafterRun], target: HFTarget, folder: Path) -> None:
    """Write each drafter's folder for the Hub, and its formats.

    An existing folder for the Hub with another card stays. Raises ValueError if a drafter can't be
    written; files that were written before are kept.
    """
    for drafter in drafters:
        # 1. Write the folder for the Hub, with the figures of this run's evaluation in the card.
        directory, home = drafter.drafter_dir, drafter.drafter_dir.parent
        evaluation = folder / "eval"
        rows = rows_of(evaluation, directory) if (evaluation / SUMMARY_FILE).is_file() else []
        if noisy := dict.fromkeys(row["label"] for row in rows if row["noisy"]):
            log.warning("the measurement of %s is noisy, as the card of %s says", "; ".join(noisy), directory)
        options = CardOptions(records=[evaluation] if rows else [], run=folder)
        _package(directory, home / PACKAGE_FOLDER, model_card(directory, options, programs_for(directory, target)))

        # 2. Write the formats of this kind of drafter.
        saved = read_drafter_config(directory)
        for name in formats_for(config.formats, saved.kind, saved.drafter.get("feature_layers")):
            export_drafter(directory, target, name, home / FORMATS_FOLDER / name, config.torch_dtype)
            log.info("%s: the drafter in the format %s", home / FORMATS_FOLDER / name, name)


def _package(drafter: Path, package: Path, card: str) -> None:
    """Write the folder for the Hub. One of this drafter with other content stays, and one of other weights is renamed."""
    with tempfile.TemporaryDirectory(prefix=f".{package.name}.", suffix=TEMPORARY, dir=package.parent) as temporary:
        new = Path(temporary) / "new"
        make_package(drafter, new, card)
        finish_replacing(package)
        differing = _differing(new, package)
        if WEIGHTS_FILE in differing and (package / WEIGHTS_FILE).exists():
            package.rename(aside := earlier_path(package))
            log.warning(
                "%s has other weights than %s (those before more training, or another drafter's): it is now %s",
                *(package, drafter, aside),
            )
        if differing and package.exists():
            log.warning(
                "%s has other content than a new folder would have (%s), and stays; remove it to get the new one",
                *(package, ", ".join(differing)),
            )
            return
        if differing:
            with replacing_directory(package) as folder:
                new.rename(folder)  # replaces an empty folder
    log.info("%s is the folder for the Hub", package)
    for line in names_left_open(card):
        log.info("%s", line)


def _differing(new: Path, old: Path) -> list[str]:
    """Return the names of the files that differ between two folders."""
    new_files, old_files = (
        {path.relative_to(root).as_posix(): path for path in root.rglob("*") if not path.is_dir()} for root in (new, old)
    )
    common = new_files.keys() & old_files.keys()
    equal = {name for name in common if filecmp.cmp(new_files[name], old_files[name], shallow=False)}
    return sorted((new_files.keys() | old_files.keys()) - equal)
