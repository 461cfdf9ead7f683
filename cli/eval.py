"""`outrider eval` and `outrider report`: measure the speedup of drafters, and write a page of tables."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from rich.console import Console
from rich.markup import escape

from ..data.fields import OPTIONS, PositiveInt
from ..eval.config import EvalConfig
from .check_server import USED, CheckServerOptions, check_server_command
from .command_line import CommandLine
from .options import BY_MACHINE, DrafterNames, TargetOptions, loaded_with, require_used, with_limit

ONE_SERVER = "engine asks a server with one drafter; give that one alone, and leave tuned and launch out"


@dataclass(kw_only=True, config=OPTIONS)
class EvalOptions(TargetOptions):
    """Options of `outrider eval`."""

    drafter: DrafterNames
    """Drafters, each a row of the table: its directory, user/name[@revision] on the Hub,
    prompt_lookup, suffix, recycling, draft_model:MODEL (a small causal LM as it is), or several
    joined by +."""
    limit: PositiveInt | None = None
    """Draw at most this many prompts of each suite."""
    engine: str | None = None
    """Address of a running server (vLLM, llama.cpp) that uses the drafter: the table is of its own decoding, beside
    outrider's, and eval.settings has the server's form of drafts. `outrider check-server` has more options and checks."""
    tuned: bool = False
    """Use the settings that `outrider tune` chose on this machine."""
    output: Path = Path("outputs/eval")
    """Folder for the records, summary, table and plots."""
    launch: str | None = None
    """Run in several processes, for target.stage_layers: a launch file such as pipeline_cpu, or its
    path. Options of `accelerate launch` may follow it: --num_processes 5"""
    eval: EvalConfig

    DEFAULTS: ClassVar = {"target": BY_MACHINE}
    USUAL: ClassVar = (
        *("target.name_or_path", "target.dtype", "target.device"),
        *("eval.suites", "eval.settings", "eval.baselines", "eval.merge", "eval.temperatures", "eval.batch_sizes"),
        *("eval.max_new_tokens",),
    )

    def __post_init__(self) -> None:
        if self.tuned and self.eval.settings != [{}]:
            raise ValueError("tuned takes the settings from `outrider tune`; remove eval.settings")
        if self.engine is not None:
            if self.tuned or len(self.drafter) > 1:
                raise ValueError(ONE_SERVER)
            require_used(self.eval, USED - {"repeats"}, "eval --engine")
            self.of_server()

    def of_server(self) -> CheckServerOptions:
        """Return the options of `check-server` for this table. Raises ValueError for options that it doesn't use."""
        assert self.engine is not None
        output = self.output / "check-server.json"
        same = {option.name: getattr(self, option.name) for option in fields(TargetOptions)}
        same |= {"limit": self.limit, "eval": self.eval}
        return CheckServerOptions(url=self.engine, drafter=self.drafter[0], concurrency=[], samples=0, output=output, **same)


def eval_command(options: EvalOptions, line: CommandLine) -> None:
    """Measure the speedup of drafters against plain decoding on the same prompts.

    After an interruption, run the same command to resume (not with `engine`). Exits with status 1 if an answer with a
    drafter differs from the target's own answer, or a server accepts less than outrider does.
    """
    if options.engine is not None:
        if line.launch is not None:
            raise ValueError(ONE_SERVER)
        check_server_command(options.of_server())
        return
    from ..data.files import guarded
    from ..eval.results.rows import is_broken
    from ..eval.results.tables import print_table
    from ..eval.run import evaluate
    from ..eval.tune.run import tuned_settings

    config, output = with_limit(options.eval, options.limit), options.output
    drafters, target = loaded_with("eval", config, options, line)
    tuned = tuned_settings(config, target, drafters) if options.tuned else None
    with guarded(output, folders=[output]):
        rows = evaluate(config, target, target.tokenizer, drafters, output, tuned=tuned)
    console = Console()
    print_table(rows, console)
    console.print(f"Records, summary, tables and plots: {escape(str(output))}", soft_wrap=True)
    if any(map(is_broken, rows)):  # the table and its first notes name them
        raise SystemExit(1)


@dataclass(kw_only=True, config=OPTIONS)
class ReportOptions:
    """Options of `outrider report`."""

    directories: Annotated[list[Path], Field(min_length=1)]
    """Folders of finished evaluations, from `outrider eval`."""
    output: Path = Path("outputs/report")
    """Folder for report.html."""

    POSITIONAL: ClassVar = ("directories",)


def report_command(options: ReportOptions) -> None:
    """Write the tables of evaluations as one static page.

    Nothing is measured. Evaluations with different targets, options or environments are in separate
    chapters.
    """
    from ..data.files import guarded
    from ..eval.report.page import write_report

    with guarded(options.output):
        page = write_report(options.directories, options.output)
    print(f"Report: {page}")
