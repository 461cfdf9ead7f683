"""`outrider eval`: measure the speedup of drafters against plain decoding."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from . import options as shared
from .options import chosen_suite, config_from, load_chosen_target, parse_setting, take_paths, target_config

if TYPE_CHECKING:
    from ..eval.config import EvalConfig, SuiteConfig
    from ..eval.results.rows import Row
    from ..models.drafters.saved.parts import DrafterParts

Drafters = Annotated[list[str], typer.Option(help=f"{shared.DRAFTER_HELP} Repeatable.")]
SuiteNames = Annotated[
    list[str],
    typer.Option(help="Prompts: mt_bench, alpaca_eval, spec_bench, human_eval, gsm8k, stdlib, or FILE.jsonl. Repeatable."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(help="Options of each drafter: '{depth: 5, top_k: 8}', '{pace: expected}'. Repeat to compare."),
]
Bandwidth = Annotated[float | None, typer.Option("--bandwidth", help="GB/s of memory, for the roofline. Default: measured.")]
Acceptance = Annotated[str, typer.Option(help="exact is lossless; typical is faster above temperature 0, but not lossless.")]


def eval_command(
    target: shared.Target,
    drafter: Drafters,
    suite: SuiteNames,
    suite_path: Annotated[list[str] | None, typer.Option(help="SUITE=FILE: read the suite from a local file.")] = None,
    suite_revision: Annotated[list[str] | None, typer.Option(help="SUITE=COMMIT: read the suite's commit on the Hub.")] = None,
    limit: Annotated[int | None, typer.Option(help="Draw at most this many prompts of each suite.")] = None,
    beam_width: Annotated[list[int] | None, typer.Option(help="Number of beams of a ReDrafter. Repeat to compare.")] = None,
    beam_length: Annotated[list[int] | None, typer.Option(help="ReDrafter's draft tokens per beam. Repeat to compare.")] = None,
    tree_nodes: Annotated[list[int] | None, typer.Option(help="Nodes of the draft tree, at most. Repeat.")] = None,
    setting: Settings = None,
    baselines: Annotated[
        list[str] | None,
        typer.Option("--baseline", help="Also compare prompt_lookup, suffix, recycling or draft_model:MODEL. Repeat."),
    ] = None,
    merge: Annotated[
        list[str] | None, typer.Option(help="Also merge each trained drafter with suffix, recycling or prompt_lookup. Repeat.")
    ] = None,
    tuned: Annotated[bool, typer.Option(help="Use the settings that `outrider tune` chose on this machine.")] = False,
    temperatures: Annotated[
        list[float] | None,
        typer.Option("--temperature", help="Sampling temperature; 0, the default, is greedy. Repeat to compare."),
    ] = None,
    batch_sizes: shared.BatchSizes = None,
    acceptance: Acceptance = "exact",
    decode: shared.Decode = "synchronous",
    micro_batch: Annotated[int, typer.Option(help="Most draft tokens that a pass of pipelined decoding reads.")] = 4,
    max_new_tokens: shared.MaxNewTokens = 128,
    repeats: Annotated[int, typer.Option("--repeat", help="Number of times that each answer is measured.")] = 1,
    profile_prompts: Annotated[int, typer.Option(help="Prompts per suite decoded again to time a step's parts.")] = 3,
    too_long: Annotated[str, typer.Option(help="For a prompt that doesn't fit the target's context: skip or error.")] = "skip",
    memory_bandwidth_gbs: Bandwidth = None,
    output: Annotated[Path, typer.Option(help="Folder for the records, summary, table and plots.")] = Path("outputs/eval"),
    revision: shared.Revision = None,
    chat_template: shared.ChatTemplate = None,
    tokenizer_options: shared.TokenizerOptions = None,
    dtype: shared.Dtype = None,
    quantization: shared.Quantization = None,
    memory_budget_gib: shared.MemoryBudget = None,
    budget_tokens: shared.BudgetTokens = None,
    stage_layers: shared.StageLayers = None,
    stall_seconds: shared.StallSeconds = None,
    launch: shared.Launch = None,
    device: shared.Device = None,
    device_map: shared.DeviceMap = None,
    compiled: shared.Compiled = False,
    cuda_graphs: shared.CudaGraphs = False,
    num_threads: shared.Threads = None,
    fast_linears: shared.FastLinears = True,
    seed: shared.Seed = 0,
) -> None:
    """Measure the speedup of drafters against plain decoding on the same prompts.

    After an interruption, run the same command to resume. Exits with status 1 if an answer with a
    drafter differs from the target's own answer.
    """
    # 1. Check the options.
    options = take_paths({**locals()})
    suite, drafter, output = options["suite"], options["drafter"], options["output"]
    suite_path = options["suite_path"]
    from ..data.fields import raise_problems
    from ..eval.config import EvalConfig, stage_problems
    from ..models.drafters.saved.parts import parse_drafter_name

    suites = _suites(suite, suite_path or [], suite_revision or [], limit)
    settings = _settings(setting or [], beam_width=beam_width, beam_length=beam_length, tree_nodes=tree_nodes)
    config = config_from(EvalConfig, options, suites=suites, settings=settings)
    # Options that can't be combined are an error before prompts are read.
    drafters = [parse_drafter_name(name) for name in drafter]
    kinds = {part.name for parts in drafters for part in parts.parts}
    raise_problems(stage_problems(config, target_config(options).stage_layers, kinds))
    if tuned and settings != [{}]:
        raise ValueError("--tuned takes its settings from `outrider tune`; remove --setting, --beam-width and the like")

    # 2. Measure, and print the table.
    rows = _measure(config, drafters, output, options)
    if not _print_results(rows, output):
        raise typer.Exit(1)


def _measure(config: "EvalConfig", drafters: "list[DrafterParts]", output: Path, options: dict[str, Any]) -> "list[Row]":
    from ..data.files import guarded
    from ..eval.run import check_inputs, cpu_threads, evaluate
    from ..eval.tune.run import tuned_settings
    from .launch import launch_stages

    check_inputs(config, drafters)
    launch_stages(options["launch"], target_config(options))
    with cpu_threads(config.num_threads):  # loading chooses how linear layers are computed with them
        target = load_chosen_target(options)
    tuned = tuned_settings(config, target, drafters) if options["tuned"] else None
    with guarded(output, folders=[output]):
        return evaluate(config, target, target.tokenizer, drafters, output, tuned=tuned)


def _print_results(rows: "Sequence[Row]", output: Path) -> bool:
    """Print the table, and the methods that aren't lossless or not proven lossless.

    Returns whether all methods are lossless.
    """
    from ..eval.results.rows import is_broken, is_unproven, method_name
    from ..eval.results.terminal import print_table

    console = Console()
    print_table(rows, console)
    console.print(f"Records, summary, tables and plots: {escape(str(output))}", soft_wrap=True)
    unproven = dict.fromkeys(method_name(row) for row in rows if is_unproven(row))
    broken = dict.fromkeys(method_name(row) for row in rows if is_broken(row) and not is_unproven(row))
    for verdict, names in (("NOT PROVEN LOSSLESS", unproven), ("NOT LOSSLESS", broken)):
        if names:
            console.print(f"[bold red]{verdict}:[/] {escape('; '.join(names))}", soft_wrap=True)
    return not broken and not unproven


def _suites(names: list[str], paths: list[str], revisions: list[str], limit: int | None) -> "list[SuiteConfig]":
    path_of = _by_suite(paths, names, "--suite-path", "FILE")
    revision_of = _by_suite(revisions, names, "--suite-revision", "COMMIT")
    return [chosen_suite(name, path_of.get(name), revision=revision_of.get(name), limit=limit) for name in names]


def _by_suite(texts: list[str], names: list[str], option: str, what: str) -> dict[str, str]:
    by_name = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or name not in names:
            raise ValueError(f"{option} {text!r} must be SUITE={what}, where SUITE is one of --suite: {', '.join(names)}")
        by_name[name] = value
    return by_name


def _settings(texts: list[str], **options: list[int] | None) -> list[dict[str, Any]]:
    """Return one setting per text, or per combination of the options' values.

    An option without a value keeps the drafter's own value.
    """
    chosen = {name: values for name, values in options.items() if values}
    if texts and chosen:
        raise ValueError("--setting excludes --beam-width, --beam-length and --tree-nodes; use --setting alone")
    if texts:
        return [parse_setting(text) for text in texts]
    return [dict(zip(chosen, values, strict=True)) for values in product(*chosen.values())]
