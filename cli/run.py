"""The pipeline: the stages of a recipe, one after the other."""

import dataclasses
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from omegaconf import OmegaConf
from pydantic import TypeAdapter
from rich.console import Console
from rich.text import Text
from tqdm import tqdm
from yaml import YAMLError

from ..data.chat import use_chat_template
from ..data.files import atomic_write_text, earlier_path, locked, sha256_file
from ..data.manifest import MANIFEST_FILE, Manifest
from ..data.paths import looks_like_path
from ..data.shards import label_store
from ..data.sources import PromptOverlap, require_data
from ..data.suites import PromptSet
from ..data.template_options import read_template
from ..distill.config import DistillConfig
from ..distill.label.features import require_features
from ..distill.label.run import distill
from ..distill.regenerate.engines.openai import require_client
from ..distill.regenerate.run import regenerate
from ..distill.regenerate.self_written import require_openings, write_conversations
from ..eval.measure.methods import Settings
from ..eval.measure.plan import require_room
from ..eval.records.names import RECORDS_FILE, RUN_FILE, TABLE_FILE
from ..eval.records.run_files import read_info
from ..eval.report.page import PAGE_FILE, write_report
from ..eval.results.rows import Row, is_broken
from ..eval.results.tables import print_table
from ..eval.run import check_inputs, evaluate, load_suites
from ..models.drafters import build_drafter
from ..models.drafters.saved.build import describe_untrained_depths, require_horizon, require_memory
from ..models.drafters.saved.folder import WEIGHTS_FILE, read_drafter_config
from ..models.drafters.saved.parts import parse_drafter_name
from ..models.export.package import README_FILE
from ..models.export.registry import refusals_after_training
from ..models.llm.hf_target import HFTarget
from ..models.llm.loading import load_target
from ..train.checkpoint import latest_checkpoint, step_of
from ..train.config import for_launch
from ..train.parallel import describe_launch
from ..train.processes import make_accelerator, require_supported_launch
from ..train.records import require_tracker
from ..train.results import CHECKPOINTS_DIR
from ..train.run import train
from .config import RunConfig
from .errors import COMMAND_VARIABLE, silence_bars
from .export_stage import PACKAGE_FOLDER, describe_unexportable, export, require_exportable
from .plan import Planner
from .rehearsal import rehearse, works_together

log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
SECTIONS = {
    "distill": ("target", "data", "distill"),
    "train": ("drafter", "train", "variants"),
    "eval": ("eval",),
    "export": ("export",),
}
"""Sections of the configuration that decide the files of each stage.

A folder's config.yaml merges them over several runs. After `stages=[distill,train]` and then
`stages=[eval] train.steps=5`, its `train` is the one of the first run: the second one trained
nothing."""
NOT_LOSSLESS = 1
"""Exit status if a drafter that must be lossless isn't."""


def run(config: RunConfig, *, plan: bool = False) -> None:
    """Run the stages. Each one skips finished work and resumes interrupted work.

    With `plan`, only print what the unfinished stages need.
    """
    accelerator = make_accelerator(config.mixed_precision)
    require_supported_launch(accelerator)
    for drafter in config.drafter_runs() if "train" in config.stages else ():
        # Raises before any long work.
        for_launch(drafter.train, describe_launch(accelerator), tensor_parallel=config.target.tensor_parallel)
    prepare(config, accelerator, plan=plan)
    folder = Path(config.output_dir)
    as_run = None if plan else _as_run(config, folder / CONFIG_FILE)
    with ExitStack() as stack:
        if accelerator.is_main_process and not plan:
            stack.enter_context(locked(folder))
        try:
            _run_stages(config, folder, as_run, accelerator)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(" ".join([describe_kept(config), *map(str, interrupt.args)])) from None


def prepare(config: RunConfig, accelerator: Accelerator, *, plan: bool) -> None:
    """Set up this process, and check what needs no target."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    configure_logging(accelerator.is_main_process)
    silence_bars()
    require_inputs(config, plan=plan)


def load_checked_target(config: RunConfig, accelerator: Accelerator) -> tuple[HFTarget, int]:
    """Load the target, check that the drafters fit it, and rehearse their training.

    Returns it with the number of tokens that target and drafters can read.
    """
    log.info("loading the target %s", config.target.name_or_path)
    target = load_target(config.target, accelerator.device)
    use_chat_template(target.tokenizer, config.data.chat_template, config.data.template_options)
    if "distill" in config.stages:
        require_openings(config.data, target)
    if {"distill", "train"} & {*config.stages} and isinstance(labels := training_labels(config), DistillConfig):
        require_features(labels, target)
    if "train" not in config.stages:
        return target, target.context_length
    for warning in require_trainable(config, target):
        if accelerator.is_main_process:
            log.warning("%s", warning)
    return target, rehearse(config.drafter_runs(), training_labels(config), target, accelerator)


def _run_stages(config: RunConfig, folder: Path, as_run: dict[str, Any] | None, accelerator: Accelerator) -> None:
    """Run the stages, and write `as_run` as the run's configuration. None: only print the plan."""
    # 1. Load the target.
    target, context_length = load_checked_target(config, accelerator)
    if as_run is None:
        _plan(config, target, folder, accelerator, context_length)
        return
    if "eval" in config.stages:
        require_room(config.eval, load_suites(config.eval), target.tokenizer, context_length)

    # 2. Distil and train, in all processes.
    if "distill" in config.stages:
        distil(config, target, folder, accelerator)
    if "train" in config.stages:
        for drafter in config.drafter_runs():
            train(
                drafter.train, drafter.drafter, target, folder / "distill", drafter.train_dir, drafter.drafter_dir, accelerator
            )
            accelerator.wait_for_everyone()

    # 3. Evaluate and export, in the first process. The others end here: a collective's time limit is
    # shorter than an evaluation.
    if not accelerator.is_main_process:
        return
    console = Console()
    rows = _evaluate(config, target, folder, console) if "eval" in config.stages else []
    # Written last: a run that fails because of another run's folder must not overwrite its config.yaml.
    atomic_write_text(folder / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(as_run)))
    if "export" in config.stages:
        export(config.export, config.drafter_runs(), target, folder)
    if files := _files_to_open(config, folder):
        print_next(files, console)
    else:
        log.info("results: %s", folder)
    if any(map(is_broken, rows)):
        raise SystemExit(NOT_LOSSLESS)


def _evaluate(config: RunConfig, target: HFTarget, folder: Path, console: Console) -> list[Row]:
    """Evaluate the drafters, print the table, and write the report into the run's folder."""
    settings: Settings = {drafter.drafter_dir: drafter.settings for drafter in config.drafter_runs()}
    set_aside_evaluation(folder / "eval", [drafter.drafter_dir for drafter in config.drafter_runs()])
    rows = evaluate(config.eval, target, target.tokenizer, [*settings], folder / "eval", settings)
    print_table(rows, console)
    write_report([folder / "eval"], folder)
    return rows


def _files_to_open(config: RunConfig, folder: Path) -> dict[Path, str]:
    """Return the files of the last stages that a user opens first, each with its content."""
    files: dict[Path, str] = {}
    if "eval" in config.stages:
        files |= {folder / "eval" / TABLE_FILE: "the table with all notes", folder / PAGE_FILE: "the report, in a browser"}
    if "export" in config.stages:
        cards = [drafter.drafter_dir.parent / PACKAGE_FOLDER / README_FILE for drafter in config.drafter_runs()]
        others = f", of the first of {len(cards)} drafters" if len(cards) > 1 else ""
        files[cards[0]] = f"the drafter's model card{others}"
    return files


def set_aside_evaluation(evaluation: Path, drafter_dirs: Sequence[Path]) -> None:
    """Rename the evaluation of earlier drafters, so that today's drafters are evaluated.

    A drafter changes in its folder where the training got more steps, and recipes may share the run's
    folder. An evaluation that has all of today's drafters stays: it is resumed, or refused with the reason.
    """
    if not (evaluation / RUN_FILE).is_file():
        return
    methods = read_info(evaluation / RUN_FILE).config["methods"].values()
    recorded = {method["weights"] for method in methods if method["weights"]}
    present = {sha256_file(directory / WEIGHTS_FILE) for directory in drafter_dirs}
    if present <= recorded or recorded <= present:
        return
    evaluation.rename(aside := earlier_path(evaluation))
    names = ", ".join(map(str, drafter_dirs))
    log.warning("%s is of other drafters than %s, or of these before more training: it is now %s", evaluation, names, aside)


def require_trainable(config: RunConfig, target: HFTarget) -> list[str]:
    """Check before the distillation that each drafter can be trained and exported.

    Returns distinct warnings, on drafters that no format can hold, and on searches that go deeper
    than the labels train. Raises ValueError for sizes that don't fit the target.
    """
    warnings: list[str | None] = []
    horizon = training_labels(config).horizon
    for drafter in config.drafter_runs():
        with works_together(target, drafter.drafter.kind):
            require_memory(drafter.drafter, target)
            fresh = build_drafter(drafter.drafter, target)
        refusals = refusals_after_training(fresh, target)
        if "export" in config.stages:
            require_exportable(config.export, drafter.drafter, refusals)
        warnings.append(describe_unexportable(refusals))
        warnings.append(describe_untrained_depths(drafter.drafter, horizon))
    return [warning for warning in dict.fromkeys(warnings) if warning is not None]


def training_labels(config: RunConfig) -> DistillConfig | Manifest:
    """Return the options of the labels to learn from, or the manifest of those of an earlier run."""
    shards = Path(config.output_dir) / "distill"
    is_distilled = "distill" not in config.stages and (shards / MANIFEST_FILE).exists()  # a plan needs none
    return label_store(shards).load() if is_distilled else config.distill


def distil(config: RunConfig, target: HFTarget, folder: Path, accelerator: Accelerator) -> None:
    """Write questions, answers and labels, as the recipe asks for."""
    overlap, examples = prompt_overlap(config), None
    data = write_conversations(config.distill, config.data, target, folder / "questions", accelerator)
    if config.distill.engine is not None:
        examples = regenerate(config.distill, data, target, folder / "answers", accelerator, overlap=overlap)
    distill(config.distill, data, target, folder / "distill", accelerator, examples=examples, overlap=overlap)
    accelerator.wait_for_everyone()


def _plan(config: RunConfig, target: HFTarget, folder: Path, accelerator: Accelerator, context_length: int) -> None:
    """Print the plan of the unfinished stages. Prompts that can't be read are omitted."""
    overlap: PromptOverlap | None = None
    suites: list[PromptSet] | None = None
    try:
        suites = load_suites(config.eval) if "eval" in config.stages else None
        overlap = prompt_overlap(config) if {"distill", "train"} & set(config.stages) else None
    except ValueError as error:
        if accelerator.is_main_process:
            log.warning("the plan has no evaluation, and no decontamination by its prompts: %s", error)
    if suites is not None:
        require_room(config.eval, suites, target.tokenizer, context_length)
    with TemporaryDirectory() as scratch:
        Planner(config, target, folder, accelerator, Path(scratch)).print(overlap, suites)


def prompt_overlap(config: RunConfig) -> PromptOverlap | None:
    """Return the search for evaluation prompts in the data; None without decontamination.

    It has all prompts of the suites, also those that `limit` doesn't draw.
    """
    num_words = config.data.overlap_words
    if num_words is None:
        return None
    whole = [dataclasses.replace(suite, limit=None) for suite in config.eval.suites]
    try:
        suites = load_suites(dataclasses.replace(config.eval, suites=whole, batch_sizes=[1]))
    except ValueError as error:
        raise ValueError(
            f"the prompts of the evaluation must be removed from the data, but they can't be read: {error}. Or turn "
            "this off: data.overlap_words=null"
        ) from error
    return PromptOverlap(suites, num_words)


def _as_run(config: RunConfig, path: Path) -> dict[str, Any]:
    """Return the configuration that made the folder's files.

    Sections of stages that don't run now come from the folder's earlier config.yaml.
    """
    merged: Any = TypeAdapter(RunConfig).dump_python(config, mode="json")
    if path.is_file():
        try:
            earlier: Any = OmegaConf.to_container(OmegaConf.load(path))
        except (OSError, ValueError, YAMLError, RecursionError) as error:
            raise ValueError(f"{path} is not a configuration ({error}); restore it, or delete it") from error
        if not isinstance(earlier, dict):
            raise ValueError(f"{path} is not a configuration but a {type(earlier).__name__}; restore it, or delete it")
        for stage, sections in SECTIONS.items():
            for section in sections if stage not in config.stages else ():
                merged[section] = earlier.get(section, merged[section])
    return dict(merged)


def require_inputs(config: RunConfig, *, plan: bool = False) -> None:
    """Check the data, the prompts, and earlier stages' files before the target is loaded."""
    if "distill" in config.stages:
        _require_distillable(config, plan=plan)
    if config.data.chat_template is not None:
        read_template(config.data.chat_template)
    if plan:
        return  # a plan doesn't need the files of earlier stages
    for drafter in config.drafter_runs() if "train" in config.stages else ():
        require_tracker(drafter.train)
        path = getattr(drafter.drafter.config, "path", None)  # the model that a draft model starts from
        if path is not None and looks_like_path(path) and not Path(path).exists():
            raise ValueError(f"drafter.path is {path!r}, and there is no such file or folder; give a model's, or its Hub id")
    if "train" in config.stages and "distill" not in config.stages:
        manifest = label_store(Path(config.output_dir) / "distill").load()
        for drafter in config.drafter_runs():
            require_horizon(drafter.drafter, manifest.horizon)
    if "eval" in config.stages:
        settings: Settings = {drafter.drafter_dir: drafter.settings for drafter in config.drafter_runs()}
        check_inputs(config.eval, [] if "train" in config.stages else [*settings], settings)
    if "export" in config.stages:
        for drafter in config.drafter_runs() if "train" not in config.stages else ():
            read_drafter_config(drafter.drafter_dir)


def _require_distillable(config: RunConfig, *, plan: bool) -> None:
    """Check what the distillation reads: the data, a drafter, and but for a plan prompts to leave out, and a server."""
    require_data(config.data)
    if config.distill.drafter is not None:
        parse_drafter_name(config.distill.drafter).configs(config.distill.drafter_settings)
    if not plan:
        prompt_overlap(config)
    if config.distill.is_served and not plan:
        require_client()


def describe_kept(config: RunConfig) -> str:
    """Return a sentence on finished shards, last checkpoints, and evaluated answers."""
    folder, parts = Path(config.output_dir), []
    for name, what in (("questions/*", "questions"), ("answers", "answers"), ("distill", "labels")):
        if any(folder.glob(f"{name}/{MANIFEST_FILE}")):
            num_shards = len([path for path in folder.glob(f"{name}/*-*.json") if not path.name.endswith(".stats.json")])
            parts += [f"{num_shards} shard{'' if num_shards == 1 else 's'} of {what}"] if num_shards else []
    parts += [
        f"the checkpoint of step {step_of(checkpoint)} of {run.train.steps} ({run.train_dir})"
        for run in config.drafter_runs()
        if (checkpoint := latest_checkpoint(run.train_dir / CHECKPOINTS_DIR)) is not None
    ]
    if (records := folder / "eval" / RECORDS_FILE).is_file():
        with records.open("rb") as file:
            num_answers = sum(1 for _ in file)
        parts += [f"{num_answers} evaluated answer{'' if num_answers == 1 else 's'}"] if num_answers else []
    return f"Kept in {folder}: {', '.join(parts) or 'nothing yet'}."


class LogHandler(logging.StreamHandler[Any]):
    """Handler that writes to stderr, on a line of its own while progress bars are open."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def configure_logging(is_main_process: bool) -> None:
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        handlers=[LogHandler()],
    )
    level = logging.INFO if is_main_process else logging.WARNING
    logging.getLogger("outrider").setLevel(level)
    logging.getLogger("openai").setLevel(level)  # the client of the engine logs its retries there


def print_next(files: Mapping[Path, str], console: Console) -> None:
    """Print the files to open, each with its content, and the command for the user's own model."""
    width = max(len(str(path)) for path in files)
    console.print(Text("\nOpen:", style="bold"))
    for path, content in files.items():
        console.print(Text(f"  {path!s:<{width}}  {content}"), soft_wrap=True)
    console.print(Text("Next, for your own model and data:", style="bold"))
    # A virtual environment that isn't active has its commands beside its Python only.
    command = "outrider" if shutil.which("outrider") else shlex.quote(str(Path(sys.executable).with_name("outrider")))
    console.print(Text(f"  {command} init my.yaml --target DIR_OR_ID --data FILE"), soft_wrap=True)
    if os.environ.get(COMMAND_VARIABLE, "").startswith("make "):  # in a clone
        console.print(Text("To see drafts at work, in a chat:", style="bold"))
        console.print(Text("  make chat"))
