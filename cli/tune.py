"""`outrider tune`: how is a drafter run best on this machine?"""

import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from ..eval.tune.run import Tuning
    from ..eval.tune.search import Speed

SHOWN = 5
"""Settings that the table has for each batch size, at least."""


def tune_command(
    target: Annotated[str, typer.Option(help="The target: a directory or a Hub id.")],
    drafter: Annotated[Path, typer.Option(help="The drafter's directory, which gets the choice; a Hub id with --no-write.")],
    suite: Annotated[str, typer.Option(help="Prompts to decode: a suite as `outrider eval` names them.")] = "stdlib",
    suite_path: Annotated[str | None, typer.Option(help="Local file of the suite.")] = None,
    suite_revision: Annotated[str | None, typer.Option(help="Commit of a suite on the Hub.")] = None,
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
    tokenizer_option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the tokenizer: legacy=true.")] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts that --limit draws.")] = 0,
) -> None:
    """Find the setting in which a drafter decodes fastest here, for each batch size, and whether it pays at all.

    The target answers some prompts once; every setting drafts for those answers, and the target's step is timed by the size of
    batch and tree. The few settings that come out fastest then decode for real. Takes minutes, not the hours of measuring all.
    """

    from ..data.chat import use_chat_template
    from ..eval.config import EvalConfig, SuiteConfig
    from ..eval.run import check_inputs
    from ..eval.tune.run import tune
    from ..models.drafters.saved.download import HUB_ID, resolve_drafter
    from ..models.target.config import TargetConfig
    from ..models.target.loading import default_device, load_target
    from .eval import parse_setting, tokenizer_options

    sizes = sorted(set(batch_size or [1]))
    if sizes[0] < 1:
        raise ValueError(f"--batch-size is {sizes[0]}; it must be at least 1")
    if max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens is {max_new_tokens}; the first token is the prefill's, so it must be at least 2")
    config = EvalConfig(
        suites=[SuiteConfig(name=suite, path=suite_path, revision=suite_revision, limit=limit)],
        settings=[parse_setting(text) for text in setting or []] or [{}],
        temperatures=[temperature],
        batch_sizes=sizes,
        max_new_tokens=max_new_tokens,
        seed=seed,
        num_threads=threads,
        pack_weights=pack_weights,
    )
    if write and not drafter.is_dir() and HUB_ID.fullmatch(str(drafter)):
        raise ValueError(
            f"there is no folder {drafter} here, and the choice is written beside the drafter: `outrider pull {drafter} "
            "--output DIR` and tune that, or leave the choice unwritten (--no-write)"
        )
    drafter = resolve_drafter(drafter)
    check_inputs(config, [drafter])
    place = device or str(default_device())
    loaded = load_target(
        TargetConfig(
            name_or_path=target,
            revision=revision,
            dtype=dtype or ("float32" if place == "cpu" else "auto"),
            device=place,
            compiled=compiled,
            cuda_graphs=cuda_graphs,
            tokenizer_options=tokenizer_options(tokenizer_option or []),
        )
    )
    use_chat_template(loaded.tokenizer, chat_template)
    settings = config.settings if setting else None
    tuning = tune(config, loaded, drafter, output, settings=settings, batch_sizes=sizes, check=check, write=write)
    console = Console()
    for size in tuning.choices:
        console.print(tuning_table(tuning, size))
        console.print(escape(verdict(tuning, size)))
    if tuning.left_out:
        names = ", ".join(f"{_name(each.setting)} (batches of {each.batch_size})" for each in tuning.left_out)
        console.print(escape(f"Left out, since memory ran out: {names}"), soft_wrap=True)
    written = f"; the choice to {drafter / 'tuned.json'}" if write else ""
    console.print(escape(f"All predictions were written to {output / 'tuning.json'}{written}"), soft_wrap=True)


def tuning_table(tuning: "Tuning", batch_size: int) -> Table:
    """The settings that are fastest for a batch size, and plain decoding: as predicted, and as measured where they were."""
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
            _name(each.setting),
            f"{each.tokens_per_step:.2f}",
            f"{each.num_nodes:.1f}",
            f"{1000 * each.own_seconds:.1f}",
            f"{each.tokens_per_second:,.1f}",
            *(["-", "-"] if speed is None else [f"{speed:,.1f}", f"{speed / plain:.2f}x"]),
        )
    if len(order) > table.row_count:
        table.caption = f"and {len(order) - table.row_count} that are predicted to be slower"
    return table


def verdict(tuning: "Tuning", batch_size: int) -> str:
    """The choice for a batch size in a sentence, and what a check says of it in another."""
    choice = tuning.choices[batch_size]
    if choice.setting is None:
        tried = [each for each in tuning.finals if each.batch_size == batch_size and each.setting is not None]
        best = max(tried, key=lambda each: each.tokens_per_second, default=None)
        reason = "no setting fits into memory"
        if best is not None:
            loss = 1 - best.tokens_per_second / choice.plain_tokens_per_second
            reason = f"the best setting ({_name(best.setting)}) loses {100 * loss:.0f} %"
        told = f"speculation is off: {reason}"
    else:
        told = f"{_name(choice.setting)}, {choice.speedup:.2f}x of plain decoding (prompts' reading left out)"
    if batch_size in tuning.regrets and batch_size in tuning.predicted_regrets:
        wrong = sorted(map(abs, tuning.errors(batch_size)))
        told += (
            f". Checked: {100 * tuning.regrets[batch_size]:.1f} % slower than the best setting (what was predicted to be best: "
            f"{100 * tuning.predicted_regrets[batch_size]:.1f} %); predicted speedups are off by {100 * median(wrong):.0f} % "
            f"(median), {100 * wrong[-1]:.0f} % at most"
        )
    return f"Batches of {batch_size}: {told}"


def _name(setting: dict[str, Any] | None) -> str:
    if setting is None:
        return "plain decoding"
    return " ".join(f"{name}={value}" for name, value in setting.items()) or "as saved"


def _key(speed: "Speed") -> str:
    return json.dumps(speed.setting, sort_keys=True)
