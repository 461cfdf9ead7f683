"""`outrider tune`: find a drafter's fastest settings on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic.dataclasses import dataclass
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..data.fields import OPTIONS, PositiveInt
from ..data.paths import folders_of, looks_like_path
from ..eval.config import EvalConfig
from .errors import starts_again
from .options import BY_MACHINE, TargetOptions, require_used, with_limit

if TYPE_CHECKING:
    from ..eval.tune.halving import Speed
    from ..eval.tune.run import Tuning
    from ..models.drafters.saved.parts import DrafterParts

USED = frozenset({"suites", "settings", "max_new_tokens", "temperatures", "batch_sizes", "seed"})
"""Options of the section `eval` that tuning depends on."""
NameOf = Callable[[dict[str, Any] | None], str]
"""A function that names a setting in words; None is plain decoding."""


@dataclass(kw_only=True, config=OPTIONS)
class TuneOptions(TargetOptions):
    """Options of `outrider tune`."""

    drafter: str
    """The drafter: its directory, prompt_lookup, suffix, recycling, or several joined by +. A drafter
    on the Hub needs --no-write."""
    limit: PositiveInt = 16
    """Draw at most this many prompts."""
    write: bool = True
    """Write the choice to the drafter's directory, for `outrider eval --tuned`."""
    output: Path = Path("outputs/tune")
    """Folder for the measured speeds."""
    eval: EvalConfig

    DEFAULTS: ClassVar = {"target": BY_MACHINE, "eval": {"suites": ["stdlib"]}}
    USUAL: ClassVar = (
        *("target.name_or_path", "target.dtype", "target.device"),
        *("eval.suites", "eval.settings", "eval.temperatures", "eval.batch_sizes", "eval.max_new_tokens"),
    )

    def __post_init__(self) -> None:
        require_used(self.eval, USED, "tune")
        if self.eval.max_new_tokens < 2:
            raise ValueError(
                f"eval.max_new_tokens is {self.eval.max_new_tokens}; it must be at least 2: the prefill yields the first token"
            )
        if len(self.eval.suites) > 1 or len(self.eval.temperatures) > 1:
            raise ValueError("eval.suites or eval.temperatures has several values; tuning is for one suite and one temperature")


def tune_command(options: TuneOptions) -> None:
    """Find the setting in which a drafter decodes fastest on this machine, per batch size.

    About thirty settings decode a few prompts, in turns with plain decoding. The faster half decodes
    twice as many, and so on, until a few finalists decode all prompts. This takes minutes. Merged
    and training-free drafters have few settings: all of them are finalists, and expected gain is one
    of them. With `eval.settings`, only these are tried.
    """
    from ..data.files import guarded
    from ..eval.run import check_inputs
    from ..eval.tune.run import tune
    from ..models.drafters.saved.folder import HUB_ID
    from ..models.drafters.saved.loading import tuned_folder
    from ..models.drafters.saved.parts import parse_drafter_name

    # 1. Check what doesn't need the target.
    config, output = with_limit(options.eval, options.limit), options.output
    for part in folders_of(options.drafter) if options.write else ():
        if not Path(part).is_dir() and not looks_like_path(part) and HUB_ID.fullmatch(part):
            raise ValueError(
                f"drafter is {options.drafter}, which is on the Hub, and the choice is written to the drafter's directory; run "
                f"`outrider pull {part} --output DIR` and tune DIR, or add --no-write"
            )
    parts = parse_drafter_name(options.drafter)
    directory = tuned_folder(parts) if options.write else None
    check_inputs(config, [parts])

    # 2. Tune, and print the choice.
    written = [output] if directory is None else [output, directory]
    with guarded(*written, folders=[output]), starts_again("tuning"):
        loaded = options.load()
        tuning = tune(config, loaded, parts, output, write=options.write)
    _print_tuning(tuning, setting_namer(parts), directory, output)


def setting_namer(parts: "DrafterParts") -> NameOf:
    """Return a function that names settings of this drafter in words."""
    from ..eval.records.names import PLAIN_DECODING, setting_words

    def name_of(setting: dict[str, Any] | None) -> str:
        if setting is None:
            return PLAIN_DECODING
        return setting_words(parts.kind, {**parts.described(setting), **setting}, setting) or "as saved"

    return name_of


def _print_tuning(tuning: "Tuning", name_of: NameOf, written_to: Path | None, output: Path) -> None:
    console = Console()
    for size in tuning.choices:
        console.print(tuning_table(tuning, size, name_of))
        console.print(escape(verdict(tuning, size, name_of)))
    if tuning.left_out:
        names = "; ".join(f"{name_of(entry.setting)} (batches of {entry.batch_size})" for entry in tuning.left_out)
        console.print(escape(f"Not measured, because memory ran out: {names}"), soft_wrap=True)
    written = "" if written_to is None else f"; the choice to {written_to / 'tuned.json'}"
    console.print(escape(f"The speeds were written to {output / 'tuning.json'}{written}"), soft_wrap=True)


def tuning_table(tuning: "Tuning", batch_size: int, name_of: NameOf) -> Table:
    """Return a table of plain decoding and the finalists at a batch size, the fastest first."""
    plain, *finalists = _finals(tuning, batch_size)
    table = Table(title=f"Batches of {batch_size}: tokens/s")
    table.add_column("setting", overflow="fold", min_width=15)
    for column in ("tok/step", "tok/s", "speedup"):
        table.add_column(column, justify="right")
    for speed in [plain, *sorted(finalists, key=lambda speed: -speed.speedup)]:
        numbers = (f"{speed.tokens_per_step:.2f}", f"{speed.tokens_per_second:,.1f}", f"{speed.speedup:.2f}x")
        table.add_row(name_of(speed.setting), *numbers)
    failed = sum(entry.setting is not None and entry.batch_size == batch_size for entry in tuning.left_out)
    if slower := tuning.num_settings - len(finalists) - failed:
        table.caption = f"{slower} more settings were slower on some of the prompts"
    return table


def verdict(tuning: "Tuning", batch_size: int, name_of: NameOf) -> str:
    """Return a sentence on the choice for a batch size."""
    choice = tuning.choices[batch_size]
    if choice.setting is None:
        best = max(_finals(tuning, batch_size)[1:], key=lambda speed: speed.speedup, default=None)
        reason = "no setting fits into memory"
        if best is not None:
            reason = f"the best setting ({name_of(best.setting)}) loses {100 * (1 - best.speedup):.0f} %"
        summary = f"speculation is off: {reason}"
    else:
        summary = f"{name_of(choice.setting)}, {choice.speedup:.2f}x of plain decoding"
    return f"Batches of {batch_size}: {summary}"


def _finals(tuning: "Tuning", batch_size: int) -> "list[Speed]":
    """List the speeds of a batch size's last round, plain decoding first."""
    return [speed for speed in tuning.finals if speed.batch_size == batch_size]
