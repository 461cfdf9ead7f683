"""`outrider eval`: the speedup table of any exported drafter."""

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from ..eval.config import SuiteConfig


def eval_command(
    target: Annotated[str, typer.Option(help="The target: a directory or a Hub id.")],
    drafter: Annotated[list[Path], typer.Option(help="A drafter's directory, or user/name[@revision] on the Hub. Repeat.")],
    suite: Annotated[
        list[str], typer.Option(help="mt_bench, alpaca_eval, spec_bench, human_eval, gsm8k, stdlib, or a name for a file.")
    ],
    suite_path: Annotated[list[str] | None, typer.Option(help="SUITE=FILE reads a suite from a local file.")] = None,
    suite_revision: Annotated[list[str] | None, typer.Option(help="SUITE=COMMIT of a suite on the Hub.")] = None,
    limit: Annotated[int | None, typer.Option(help="Draw at most so many prompts of each suite.")] = None,
    beam_width: Annotated[list[int] | None, typer.Option(help="Beams of a ReDrafter. Repeat to compare widths.")] = None,
    beam_length: Annotated[list[int] | None, typer.Option(help="Draft tokens per beam. Repeat, for each width.")] = None,
    tree_nodes: Annotated[list[int] | None, typer.Option(help="Nodes of the draft tree, of any kind. Repeat.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="Options of any drafter: '{depth: 5, top_k: 8}'. Repeat to compare.")
    ] = None,
    tuned: Annotated[bool, typer.Option(help="In the settings that `outrider tune` chose here, in place of others.")] = False,
    temperature: Annotated[list[float] | None, typer.Option(help="0, the default, is greedy. Repeat for several.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Prompts decoded together. Repeat for several.")] = None,
    acceptance: Annotated[str, typer.Option(help="exact, or typical: faster above temperature 0, and not lossless.")] = "exact",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer, at most.")] = 128,
    repeat: Annotated[int, typer.Option(help="Measure every answer so many times.")] = 1,
    profile_prompts: Annotated[int, typer.Option(help="Prompts per suite decoded once more for the time split.")] = 3,
    too_long: Annotated[str, typer.Option(help="A prompt that doesn't fit the target's context: skip or error.")] = "skip",
    bandwidth: Annotated[float | None, typer.Option(help="GB/s for the roofline; measured unless given.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for records, summary, table and plots.")] = Path("outputs/eval"),
    revision: Annotated[str | None, typer.Option(help="The target's revision on the Hub.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="A .jinja file, or a template that ships with outrider.")] = None,
    tokenizer_option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the tokenizer: legacy=true.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Unless given, float32 on a CPU and as stored elsewhere.")] = None,
    device: Annotated[str | None, typer.Option(help="Unless given, the first accelerator, else cpu.")] = None,
    compiled: Annotated[bool, typer.Option(help="Run the target through torch.compile.")] = False,
    cuda_graphs: Annotated[bool, typer.Option(help="Replay target and drafter as CUDA graphs.")] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's choice unless given.")] = None,
    pack_weights: Annotated[bool, typer.Option(help="On a CPU, pack linear layers for few rows (more memory).")] = True,
    seed: Annotated[int, typer.Option(help="Of the prompts that --limit draws, of samples, and of the bootstrap.")] = 0,
) -> None:
    """Measure drafters against plain decoding, on the same prompts and through the same loop.

    Interrupted, the same command goes on where it stopped. Exits with 1 where a drafter's answers are not the target's own.
    """

    from ..data.chat import use_chat_template
    from ..data.files import locked
    from ..eval.config import EvalConfig
    from ..eval.results.rows import is_broken, is_unproven
    from ..eval.results.tables import print_table
    from ..eval.run import check_inputs, evaluate
    from ..eval.tune.run import tuned_settings
    from ..models.drafters.saved.download import resolve_drafter
    from ..models.target.config import TargetConfig
    from ..models.target.loading import default_device, load_target

    config = EvalConfig(
        suites=_suites(suite, suite_path or [], suite_revision or [], limit),
        settings=_settings(setting or [], beam_width=beam_width, beam_length=beam_length, tree_nodes=tree_nodes),
        temperatures=temperature or [0.0],
        batch_sizes=batch_size or [1],
        acceptance=acceptance,
        max_new_tokens=max_new_tokens,
        repeats=repeat,
        profile_prompts=profile_prompts,
        too_long=too_long,
        memory_bandwidth_gbs=bandwidth,
        seed=seed,
        num_threads=threads,
        pack_weights=pack_weights,
    )
    if tuned and config.settings != [{}]:
        raise ValueError("--tuned takes its settings from `outrider tune`; leave out --setting, --beam-width and the like")
    drafter = [resolve_drafter(each) for each in drafter]
    check_inputs(config, drafter)
    place = device or str(default_device())
    # A CPU emulates bfloat16, and only float32 can be held to the very same tokens.
    dtype = dtype or ("float32" if place == "cpu" else "auto")
    options = tokenizer_options(tokenizer_option or [])
    loaded = load_target(
        TargetConfig(
            name_or_path=target,
            revision=revision,
            dtype=dtype,
            device=place,
            compiled=compiled,
            cuda_graphs=cuda_graphs,
            tokenizer_options=options,
        )
    )
    use_chat_template(loaded.tokenizer, chat_template)
    choices = tuned_settings(config, loaded, drafter) if tuned else None
    with locked(output):
        rows = evaluate(config, loaded, loaded.tokenizer, drafter, output, tuned=choices)
    console = Console()
    print_table(rows, console)
    console.print(f"Records, summary, tables and plots: {escape(str(output))}", soft_wrap=True)
    unproven = dict.fromkeys(row["method"] for row in rows if is_unproven(row))
    broken = dict.fromkeys(row["method"] for row in rows if is_broken(row) and not is_unproven(row))
    for verdict, names in (("NOT PROVEN LOSSLESS", unproven), ("NOT LOSSLESS", broken)):
        if names:
            console.print(f"[bold red]{verdict}:[/] {escape(', '.join(names))}", soft_wrap=True)
    if broken or unproven:
        raise typer.Exit(1)


def tokenizer_options(texts: list[str]) -> dict[str, Any]:
    """Options for the tokenizer as the command line has them. Raises ValueError for a text without a value."""
    options = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--tokenizer-option is {text!r}; give NAME=VALUE, such as legacy=true")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value  # a text needs no quotes
    return options


def _suites(names: list[str], paths: list[str], revisions: list[str], limit: int | None) -> "list[SuiteConfig]":
    from ..eval.config import SuiteConfig

    path_of, revision_of = (
        _by_suite(paths, names, "--suite-path", "FILE"),
        _by_suite(revisions, names, "--suite-revision", "COMMIT"),
    )
    return [SuiteConfig(name=name, path=path_of.get(name), revision=revision_of.get(name), limit=limit) for name in names]


def _by_suite(texts: list[str], names: list[str], option: str, what: str) -> dict[str, str]:
    by_name = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or name not in names:
            raise ValueError(f"{option} {text!r} must be SUITE={what}, with a suite that --suite names ({', '.join(names)})")
        by_name[name] = value
    return by_name


def _settings(texts: list[str], **options: list[int] | None) -> list[dict[str, Any]]:
    """One setting per text, or per combination of the options' values; what isn't given stays as the drafter has it."""
    given = {name: values for name, values in options.items() if values}
    if texts and given:
        raise ValueError("--setting says all that a method changes; leave out --beam-width, --beam-length and --tree-nodes")
    if texts:
        return [parse_setting(text) for text in texts]
    return [dict(zip(given, values, strict=True)) for values in product(*given.values())]


def parse_setting(text: str) -> dict[str, Any]:
    """A setting as the command line has it. Raises ValueError for a text that is none."""
    try:
        setting = yaml.safe_load(text)
    except yaml.YAMLError:
        setting = None
    if not isinstance(setting, dict) or not all(isinstance(name, str) for name in setting):
        raise ValueError(f"--setting is {text!r}; give options as in a configuration: '{{depth: 5, top_k: 8}}'")
    if joined := [key for key in setting if ":" in str(key)]:
        raise ValueError(f"--setting is {text!r}, which has the one word {joined[0]!r}; YAML needs a space after the colon")
    return setting
