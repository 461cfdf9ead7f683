"""`outrider adopt`: let a new drafter take an old one's place, if an evaluation of both allows it."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..data.fields import OPTIONS

if TYPE_CHECKING:
    from ..eval.results.adoption import Change


@dataclass(kw_only=True, config=OPTIONS)
class AdoptOptions:
    """Options of `outrider adopt`."""

    new: Path
    """Folder of the new drafter."""
    old: Path
    """Folder of the old drafter, in whose place the new one is put. The old one is kept beside it."""
    records: Path
    """Folder of a finished evaluation of both (outrider eval --drafter OLD --drafter NEW)."""
    gain_on: Annotated[list[str], Field(min_length=1)]
    """Suites on which the new drafter must be better."""
    loss: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    """Largest share of tokens per step that it may lose on another suite."""
    check: bool = False
    """Only compare, and change nothing."""

    POSITIONAL: ClassVar = ("new",)


def adopt_command(options: AdoptOptions) -> None:
    """Put a new drafter in an old one's place, if it gains where it should and loses nowhere.

    Exits with status 1, and changes nothing, if the evaluation doesn't allow it: answers that aren't proven lossless, a
    gain that could be chance, a loss on another suite, or a slower drafter.
    """
    from ..data.files import earlier_path, replacing_directory, sha256_file
    from ..eval.records.names import RECORDS_FILE, RUN_FILE
    from ..eval.records.records import read_records
    from ..eval.records.run_files import read_info
    from ..eval.results.adoption import changes, objections, pairs
    from ..eval.results.rows import read_rows
    from ..models.drafters.saved.download import resolve_drafter
    from ..models.drafters.saved.folder import WEIGHTS_FILE, read_drafter_config, require_recorded_weights
    from ..models.drafters.saved.low_rank import is_low_rank

    # 1. Both drafters, and what was measured of them.
    if Path.cwd().is_relative_to(options.old.resolve()):
        raise ValueError(f"old is {options.old}, which is or contains the current folder; change to another folder")
    if is_low_rank(options.old):
        raise ValueError(f"old is {options.old}, a low-rank change; give the folder of a whole drafter")
    new = resolve_drafter(options.new)  # a low-rank change is adopted as the whole drafter that it makes
    for folder in (options.old, new):
        require_recorded_weights(folder, read_drafter_config(folder))
    rows, info = read_rows(options.records), read_info(options.records / RUN_FILE)
    digests = [sha256_file(folder / WEIGHTS_FILE) for folder in (options.old, new)]
    methods = pairs(info.config["methods"], *digests)
    found = list(changes(read_records(options.records / RECORDS_FILE).values(), methods))
    reasons = objections(found, rows, [new for _, new in methods.values()], gain_on=options.gain_on, loss=options.loss)

    # 2. The comparison.
    console = Console()
    console.print(_table(found, options.gain_on))
    if reasons:
        console.print(f"[bold]{escape(str(options.new))} is not adopted.[/]", soft_wrap=True)
        for reason in reasons:
            console.print(f"- {escape(reason)}", soft_wrap=True)
        raise SystemExit(1)
    if options.check:
        console.print(f"[bold]{escape(str(options.new))} may take the place of {escape(str(options.old))}.[/]", soft_wrap=True)
        return

    # 3. A copy of the old one first: a kill leaves one of both whole in its place.
    kept = earlier_path(options.old)
    with replacing_directory(kept) as folder:
        shutil.copytree(options.old, folder, dirs_exist_ok=True)
    with replacing_directory(options.old) as folder:
        shutil.copytree(new, folder, dirs_exist_ok=True)
    text = f"{options.old} is now the drafter of {options.new}; the earlier one is {kept}"
    console.print(f"[bold]{escape(text)}[/]", soft_wrap=True)


def _table(found: "list[Change]", gain_on: list[str]) -> Table:
    table = Table(
        *("suite", "T", "prompts", "setting", "tokens per step", "speed"),
        box=box.SIMPLE,
        title="The new drafter over the old one",
        title_justify="left",
    )
    for change in found:
        name = f"{change.suite} (must gain)" if change.suite in gain_on else change.suite
        ratio = f"{change.ratio:.3f} [{change.low:.3f}, {change.high:.3f}]"
        cells = escape(name), f"{change.temperature:g}", str(change.num_prompts), escape(change.setting), ratio
        table.add_row(*cells, f"{change.speed:.2f}")
    return table
