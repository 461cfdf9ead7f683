"""`outrider tune`: how is a drafter run best on this machine?"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import options as shared
from .errors import starts_again
from .options import chosen_suite, config_from, load_chosen_target, parse_setting, take_paths

if TYPE_CHECKING:
    from ..eval.tune.run import Tuning
    from ..eval.tune.search import Speed

Settings = Annotated[list[str] | None, typer.Option(help="Try only these, and plain decoding: '{depth: 5, top_k: 8}'. Repeat.")]
NameOf = Callable[[dict[str, Any] | None], str]
"""Puts a setting into words; None is plain decoding."""
SHOWN = 5
"""Settings that the table has for each batch size, at least."""


def tune_command(
    target: shared.Target,
    drafter: Annotated[Path, typer.Option(help="The drafter's directory, which gets the choice; a Hub id with --no-write.")],
    suite: Annotated[str, typer.Option(help="Prompts to decode: a suite of `outrider eval`, or FILE.jsonl.")] = "stdlib",
    suite_path: shared.SuitePath = None,
    suite_revision: Annotated[str | None, typer.Option(help="Commit of a suite on the Hub.")] = None,
    limit: shared.Limit = 16,
    batch_sizes: shared.BatchSizes = None,
    setting: Settings = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_new_tokens: shared.MaxNewTokens = 128,
    check: Annotated[bool, typer.Option(help="Decode with every setting, and print the regret of the choice.")] = False,
    write: Annotated[bool, typer.Option(help="Write the choice beside the drafter, where eval --tuned reads it.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for all predictions.")] = Path("outputs/tune"),
    revision: shared.Revision = None,
    dtype: shared.Dtype = None,
    quantization: shared.Quantization = None,
    device: shared.Device = None,
    compiled: shared.Compiled = False,
    cuda_graphs: shared.CudaGraphs = False,
    num_threads: shared.Threads = None,
    pack_weights: shared.PackWeights = True,
    chat_template: shared.ChatTemplate = None,
    tokenizer_options: shared.TokenizerOptions = None,
    seed: shared.Seed = 0,
) -> None:
    """Find the setting in which a drafter decodes fastest here, for each batch size.

    The target answers some prompts once; every setting drafts for those answers, and the target's
    step is timed by the size of batch and tree. The few settings that come out fastest then decode
    for real. Takes minutes, not the hours of measuring all.
    """
    options = take_paths({**locals()})
    suite, suite_path, drafter, output = (options[name] for name in ("suite", "suite_path", "drafter", "output"))
    from ..eval.config import EvalConfig
    from ..eval.run import check_inputs
    from ..eval.tune.run import tune
    from ..models.drafters.saved.download import HUB_ID, resolve_drafter

    sizes = sorted(set(batch_sizes or [1]))
    if max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens is {max_new_tokens}; the first token is the prefill's, so it must be at least 2")
    suites = [chosen_suite(suite, suite_path, revision=suite_revision, limit=limit)]
    settings = [parse_setting(text) for text in setting or []]
    choices = {"settings": settings or [{}], "temperatures": [temperature], "batch_sizes": sizes}
    config = config_from(EvalConfig, options, suites=suites, **choices)
    if write and not drafter.is_dir() and HUB_ID.fullmatch(str(drafter)):
        raise ValueError(
            f"there is no folder {drafter} here, and the choice is written beside the drafter: `outrider pull {drafter} "
            "--output DIR` and tune that, or leave the choice unwritten (--no-write)"
        )
    directory = resolve_drafter(drafter)
    check_inputs(config, [directory])
    loaded = load_chosen_target(options)
    with starts_again("tuning"):
        tuning = tune(config, loaded, directory, output, settings=settings or None, batch_sizes=sizes, check=check, write=write)
    _print_tuning(tuning, setting_namer(directory), directory if write else None, output)


def setting_namer(directory: Path) -> NameOf:
    """Return the function that puts settings of the drafter in a directory into words."""
    from ..eval.records.method_names import PLAIN_DECODING, setting_words
    from ..models.drafters.saved.folder import read_drafter_config

    saved = read_drafter_config(directory)

    def name_of(setting: dict[str, Any] | None) -> str:
        if setting is None:
            return PLAIN_DECODING
        return setting_words(saved.kind, {**saved.drafter, **setting}, setting) or "as saved"

    return name_of


def _print_tuning(tuning: "Tuning", name_of: NameOf, written_to: Path | None, output: Path) -> None:
    console = Console()
    for size in tuning.choices:
        console.print(tuning_table(tuning, size, name_of))
        console.print(escape(verdict(tuning, size, name_of)))
    if tuning.left_out:
        names = "; ".join(f"{name_of(each.setting)} (batches of {each.batch_size})" for each in tuning.left_out)
        console.print(escape(f"Left out, since memory ran out: {names}"), soft_wrap=True)
    written = "" if written_to is None else f"; the choice to {written_to / 'tuned.json'}"
    console.print(escape(f"All predictions were written to {output / 'tuning.json'}{written}"), soft_wrap=True)


def tuning_table(tuning: "Tuning", batch_size: int, name_of: NameOf) -> Table:
    """Return the settings that are fastest for a batch size, and plain decoding.

    As predicted, and as measured where they were.
    """
    table = Table(title=f"Batches of {batch_size}: decoded tokens/s; own ms is a step's time beside the target's")
    table.add_column("setting", overflow="fold", min_width=15)
    for column in ("tok/step", "nodes", "own ms", "predicted", "measured", "speedup"):
        table.add_column(column, justify="right")
    of_size = [each for each in tuning.predictions if each.batch_size == batch_size]
    measured = {_key(each): each.tokens_per_second for each in tuning.finals if each.batch_size == batch_size}
    order = sorted(of_size, key=lambda each: (each.setting is not None, -measured.get(_key(each), 0), -each.tokens_per_second))
    plain = measured[_key(order[0])]
    for each in order[: 1 + max(SHOWN, len(measured) - 1)]:
        speed = measured.get(_key(each))
        table.add_row(
            name_of(each.setting),
            f"{each.tokens_per_step:.2f}",
            f"{each.num_nodes:.1f}",
            f"{1000 * each.own_seconds:.1f}",
            f"{each.tokens_per_second:,.1f}",
            *(["-", "-"] if speed is None else [f"{speed:,.1f}", f"{speed / plain:.2f}x"]),
        )
    if len(order) > table.row_count:
        table.caption = f"and {len(order) - table.row_count} that are predicted to be slower"
    return table


def verdict(tuning: "Tuning", batch_size: int, name_of: NameOf) -> str:
    """Return the choice for a batch size in a sentence, and what a check says of it in another."""
    choice = tuning.choices[batch_size]
    if choice.setting is None:
        tried = [each for each in tuning.finals if each.batch_size == batch_size and each.setting is not None]
        best = max(tried, key=lambda each: each.tokens_per_second, default=None)
        reason = "no setting fits into memory"
        if best is not None:
            loss = 1 - best.tokens_per_second / choice.plain_tokens_per_second
            reason = f"the best setting ({name_of(best.setting)}) loses {100 * loss:.0f} %"
        summary = f"speculation is off: {reason}"
    else:
        summary = f"{name_of(choice.setting)}, {choice.speedup:.2f}x of plain decoding (prompts' reading left out)"
    if batch_size in tuning.regrets and batch_size in tuning.predicted_regrets:
        wrong = sorted(map(abs, tuning.errors(batch_size)))
        summary += (
            f". Checked: {100 * tuning.regrets[batch_size]:.1f} % slower than the best setting (what was predicted to be best: "
            f"{100 * tuning.predicted_regrets[batch_size]:.1f} %); predicted speedups are off by {100 * median(wrong):.0f} % "
            f"(median), {100 * wrong[-1]:.0f} % at most"
        )
    return f"Batches of {batch_size}: {summary}"


def _key(speed: "Speed") -> str:
    return json.dumps(speed.setting, sort_keys=True)
