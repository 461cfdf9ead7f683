"""`outrider tune`: how is a drafter run best on this machine?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .config import EvalConfig, SuiteConfig

if TYPE_CHECKING:
    from .tune import Tuning

SHOWN = 5
"""Settings that the table has for each batch size, the fastest ones."""


def tune_command(
    target: Annotated[str, typer.Option(help="The target: a directory or a Hub id.")],
    drafter: Annotated[Path, typer.Option(help="The drafter's directory, which gets the choice.")],
    suite: Annotated[str, typer.Option(help="Prompts to decode: mt_bench, alpaca_eval or stdlib.")] = "stdlib",
    suite_path: Annotated[str | None, typer.Option(help="Local file of the suite.")] = None,
    limit: Annotated[int, typer.Option(help="Draw at most so many prompts.")] = 16,
    batch_size: Annotated[list[int] | None, typer.Option(help="Prompts decoded together. Repeat for several; 1.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="Try only these, and plain decoding: '{depth: 5, top_k: 8}'. Repeat.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer, at most.")] = 128,
    check: Annotated[bool, typer.Option(help="Decode with every setting for real, and tell the regret of the choice.")] = False,
    write: Annotated[bool, typer.Option(help="Write the choice beside the drafter, where eval --tuned reads it.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for all predictions.")] = Path("outputs/tune"),
    revision: Annotated[str | None, typer.Option(help="The target's revision on the Hub.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Unless given, float32 on a CPU and as stored elsewhere.")] = None,
    device: Annotated[str | None, typer.Option(help="Unless given, the first accelerator, else cpu.")] = None,
    compiled: Annotated[bool, typer.Option(help="Run the target through torch.compile.")] = False,
    cuda_graphs: Annotated[bool, typer.Option(help="Replay the target as CUDA graphs.")] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's choice unless given.")] = None,
    pack_weights: Annotated[bool, typer.Option(help="On a CPU, pack linear layers for few rows (more memory).")] = True,
    chat_template: Annotated[str | None, typer.Option(help="A .jinja file, or a template that ships with outrider.")] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts that --limit draws.")] = 0,
) -> None:
    """Find the setting in which a drafter decodes fastest here, for each batch size, and whether it pays at all.

    The target answers some prompts once; every setting drafts for those answers, and the target's step is timed by the size of
    batch and tree. Takes minutes, not the hours of measuring every setting.
    """
    import torch  # it, and all that uses it, loads too slowly for --help

    from ..data.chat import use_chat_template
    from ..models.config import TargetConfig
    from ..models.target import load_target
    from .cli import parse_setting
    from .run import check_inputs
    from .tune import tune

    sizes = sorted(set(batch_size or [1]))
    if sizes[0] < 1:
        raise ValueError(f"--batch-size is {sizes[0]}; it must be at least 1")
    config = EvalConfig(
        suites=[SuiteConfig(name=suite, path=suite_path, limit=limit)],
        settings=[parse_setting(text) for text in setting or []] or [{}],
        temperatures=[temperature],
        max_new_tokens=max_new_tokens,
        seed=seed,
        num_threads=threads,
        pack_weights=pack_weights,
    )
    check_inputs(config, [drafter])
    place = device or str(torch.accelerator.current_accelerator() or "cpu")
    loaded = load_target(
        TargetConfig(
            name_or_path=target,
            revision=revision,
            dtype=dtype or ("float32" if place == "cpu" else "auto"),
            device=place,
            compiled=compiled,
            cuda_graphs=cuda_graphs,
        )
    )
    use_chat_template(loaded.tokenizer, chat_template)
    settings = config.settings if setting else None
    tuning = tune(config, loaded, drafter, output, settings=settings, batch_sizes=sizes, check=check, write=write)
    console = Console()
    for size in sizes:
        console.print(tuning_table(tuning, size))
        console.print(verdict(tuning, size))
    written = f"; the choice to {drafter / 'tuned.json'}" if write else ""
    console.print(f"All predictions were written to {output / 'tuning.json'}{written}", soft_wrap=True)


def tuning_table(tuning: "Tuning", batch_size: int) -> Table:
    """The fastest settings for a batch size, and plain decoding."""
    title = f"Batches of {batch_size}: predicted; own is a step's time beside the target's"
    columns = ["setting", "tokens per step", "nodes", "own ms", "tokens/s", "speedup"]
    measured = {_key(each.setting): each for each in tuning.measured if each.batch_size == batch_size}
    table = Table(title=title)
    for column in [*columns, *(["measured"] if measured else [])]:
        left = column == "setting"
        table.add_column(
            column, justify="left" if left else "right", overflow="fold" if left else "ellipsis", min_width=24 * left
        )
    of_size = [each for each in tuning.predictions if each.batch_size == batch_size]
    plain = next(each for each in of_size if each.setting is None)
    best = sorted((each for each in of_size if each.setting is not None), key=lambda each: -each.tokens_per_second)
    for each in (plain, *best[:SHOWN]):
        cells = [
            _name(each.setting),
            f"{each.tokens_per_step:.2f}",
            f"{each.num_nodes:.1f}",
            f"{1000 * each.own_seconds:.1f}",
            f"{each.tokens_per_second:,.1f}",
            f"{each.tokens_per_second / plain.tokens_per_second:.2f}x",
        ]
        if measured:
            cells.append(f"{measured[_key(each.setting)].tokens_per_second:,.1f}")
        table.add_row(*cells)
    if len(best) > SHOWN:
        table.caption = f"and {len(best) - SHOWN} slower ones"
    return table


def verdict(tuning: "Tuning", batch_size: int) -> str:
    """The choice for a batch size in a sentence."""
    choice = tuning.choices[batch_size]
    if choice.setting is None:
        best = max(
            (each for each in tuning.predictions if each.batch_size == batch_size and each.setting is not None),
            key=lambda each: each.tokens_per_second,
        )
        loss = 1 - best.tokens_per_second / choice.plain_tokens_per_second
        told = f"speculation is off: the best setting ({_name(best.setting)}) would lose {100 * loss:.0f} %"
    else:
        told = f"{_name(choice.setting)}, {choice.speedup:.2f}x of plain decoding"
    if batch_size in tuning.regrets:
        told += f"; measured, the choice is {100 * tuning.regrets[batch_size]:.1f} % slower than the best setting"
    return f"Batches of {batch_size}: {told}"


def _name(setting: dict[str, Any] | None) -> str:
    return "plain decoding" if setting is None else " ".join(f"{name}={value}" for name, value in setting.items())


def _key(setting: dict[str, Any] | None) -> str:
    return json.dumps(setting, sort_keys=True)
