"""The evaluation stage: measure, check, tell."""

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from ..data.files import atomic_write_text, parse_dataclass, read_json, sha256_file, write_json
from ..data.prompts import PromptSet, load_suite
from ..models.decoding.acceptance import GreedyAcceptance, SpeculativeSampling, TypicalAcceptance
from ..models.decoding.sampling import Sampling
from ..models.drafters import NullDrafter, load_drafter
from ..models.drafters.checkpoint import WEIGHTS_FILE, read_drafter_config, read_training_facts
from ..models.drafters.registry import parse_drafter_config
from ..models.graphs import GraphedDrafter
from ..models.hf_target import HFTarget
from ..models.interfaces import AcceptanceRule, Drafter, TrainableDrafter
from ..models.packing import packed_linears
from .answers import write_answers
from .config import EvalConfig
from .environment import Environment, describe_environment, differences, digest_of
from .lossless import Mismatch, audit, find_mismatches, is_exact
from .measure import Bench, Method, answer_seed
from .names import BASELINE, RECORDS_FILE, RUN_FILE, SUMMARY_FILE, TABLE_FILE
from .plots import plot_comparison, plot_suite
from .records import EvalRecord, GroupKey, RecordFile, group_name
from .roofline import Roofline, measure_roofline
from .rows import DrafterFacts, Row, build_rows
from .table_files import csv_table, latex_table
from .tables import markdown

logger = logging.getLogger(__name__)

CSV_FILE, LATEX_FILE = "table.csv", "table.tex"
ANSWERS_DIR = "answers"
Settings = Mapping[Path, Sequence[dict[str, Any]]]
"""Run-time options by drafter's directory, each one a method of the table: in place of the configuration's."""

RECORDED_OPTIONS = (
    "max_new_tokens",
    "temperatures",
    "acceptance",
    "batch_sizes",
    "warmup_prompts",
    "repeats",
    "profile_prompts",
    "too_long",
    "seed",
    "pack_weights",
)
"""Options of EvalConfig that a record depends on, besides suites and settings; threads are part of the environment."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What all records of a folder have in common: they are never mixed with others."""

    config: dict[str, Any]
    environment: Environment
    roofline: Roofline


def evaluate(
    config: EvalConfig,
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    drafter_dirs: Sequence[Path],
    output_dir: Path,
    settings: Settings | None = None,
) -> list[Row]:
    """Measure plain decoding and every drafter in every setting on every suite, and write records, summary, table and plots.

    What `output_dir` already holds of the same evaluation is not measured again. Raises ValueError for unusable input, and for
    an `output_dir` with records of another evaluation.
    """
    suites = load_suites(config)
    labels = method_labels(config, drafter_dirs, settings)
    with ExitStack() as stack:
        stack.enter_context(cpu_threads(config.num_threads))
        drafters = {name: load_drafter(path, target, **setting) for name, (path, setting) in labels.items()}
        facts = {name: drafter_facts(drafters[name], path) for name, (path, _) in labels.items()}
        limits = [drafter.context_length for drafter in drafters.values() if drafter.context_length is not None]
        context_length = min([target.context_length, *limits])
        if config.pack_weights:
            stack.enter_context(packed_linears(target.model, *drafters.values()))
        methods = [Method(name=BASELINE, drafter=NullDrafter())]
        # A TrainableDrafter is an nn.Module first, so that its type doesn't say that it drafts.
        proposers = {name: cast("Drafter[Any]", drafter) for name, drafter in drafters.items()}
        if target.cuda_graphs:
            proposers |= {name: GraphedDrafter(proposers[name]) for name, drafter in drafters.items() if drafter.recordable}
        methods += [Method(name=name, drafter=drafter) for name, drafter in proposers.items()]
        output_dir.mkdir(parents=True, exist_ok=True)
        environment = describe_environment(target.device)
        recorded = recorded_config(config, suites, target, tokenizer, labels)
        info = open_run(output_dir, recorded, environment, target, config)
        with RecordFile(output_dir / RECORDS_FILE) as file:
            bench = Bench(
                target=target,
                tokenizer=tokenizer,
                rules={temperature: acceptance_rule(config.acceptance, temperature) for temperature in config.temperatures},
                methods=methods,
                config=config,
                context_length=context_length,
                file=file,
                config_digest=digest_of(info.config),
                environment=environment,
                recorded_environment=info.environment,
            )
            bench.measure(suites)
            mismatches = check_lossless(bench, suites)
    if not file.records:
        raise ValueError(
            f"no prompt of {', '.join(suite.name for suite in suites)} fits the context window of "
            f"{context_length} tokens together with {config.max_new_tokens} new ones; lower max_new_tokens"
        )
    measured = {record.suite for record in file.records.values()}
    for suite in suites:
        if suite.name not in measured:
            logger.warning("no prompt of %s fits the context window: the table has no row for it", suite.name)
    rows = build_rows(
        list(file.records.values()),
        mismatches,
        config=config,
        dtype=str(target.dtype).removeprefix("torch."),
        roofline=info.roofline,
        num_skipped=count_skipped(suites, file.records.values()),
        drafters=facts,
    )
    write_results(rows, output_dir)
    time = (output_dir / RECORDS_FILE).stat().st_mtime
    write_answers(file.records.values(), suites, tokenizer, output_dir / ANSWERS_DIR, time)
    return rows


def check_inputs(config: EvalConfig, drafter_dirs: Sequence[Path], settings: Settings | None = None) -> None:
    """Raise ValueError for all that is wrong without looking at a target: the suites, the drafters and their options."""
    load_suites(config)
    for path, _ in method_labels(config, drafter_dirs, settings).values():
        read_training_facts(path)


def drafter_facts(drafter: TrainableDrafter, directory: Path) -> DrafterFacts:
    """What the tables say of a drafter as such."""
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    return DrafterFacts(parameters=parameters, training=read_training_facts(directory))


def acceptance_rule(acceptance: str, temperature: float) -> AcceptanceRule:
    """How drafts are accepted at a temperature (see `EvalConfig.acceptance`)."""
    if temperature == 0:
        return GreedyAcceptance()
    sampling = Sampling(temperature=temperature)
    return TypicalAcceptance(sampling=sampling) if acceptance == "typical" else SpeculativeSampling(sampling=sampling)


def load_suites(config: EvalConfig) -> list[PromptSet]:
    """The suites' prompts. Raises ValueError for an unknown or empty suite."""
    suites = [load_suite(suite.name, suite.path, suite.limit, config.seed, suite.revision) for suite in config.suites]
    for suite in suites:
        if not suite.prompts:
            raise ValueError(f"the suite {suite.name} has no prompts; check its file")
        if len(suite.prompts) < max(config.batch_sizes):
            raise ValueError(
                f"a batch size is {max(config.batch_sizes)}, and {suite.name} has {len(suite.prompts)} prompts here, which "
                "fill no such batch; raise the suite's limit, or lower the batch size"
            )
    return suites


def method_labels(
    config: EvalConfig, drafter_dirs: Sequence[Path], settings: Settings | None = None
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Directory and setting of each drafter's rows, by the name that the table shows.

    The name is the drafter's kind and the setting, and between them what tells its directory from the others', unless that is
    its kind. Raises
    ValueError for a directory without a drafter, an option that it doesn't have, and for a drafter named twice.
    """
    labels: dict[str, tuple[Path, dict[str, Any]]] = {}
    paths = [directory.resolve() for directory in drafter_dirs]
    places = _distinct_parts(paths)
    for path, directory, place in zip(paths, drafter_dirs, places, strict=True):
        saved = read_drafter_config(path)
        if not (path / WEIGHTS_FILE).is_file():
            raise ValueError(f"{path / WEIGHTS_FILE} is missing; its export is incomplete: copy or export it again")
        for setting in (settings or {}).get(directory, config.settings):
            parse_drafter_config({"kind": saved.kind, **saved.drafter, **setting})
            name = " ".join(
                [
                    saved.kind,
                    *([place] if place not in ("", saved.kind) else []),
                    *(f"{key}={value}" for key, value in setting.items()),
                ]
            )
            if name in labels:
                raise ValueError(f"{name} is to be evaluated twice; give each drafter and each setting once")
            labels[name] = (path, setting)
    return labels


def _distinct_parts(paths: Sequence[Path]) -> list[str]:
    """What tells each path from the others: without the folders above all of them, and without a last one that they share."""
    if len(paths) == 1:
        return [""]
    parts = [path.relative_to(os.path.commonpath(paths)).parts for path in paths]
    if all(len(each) > 1 and each[-1] == parts[0][-1] for each in parts):
        parts = [each[:-1] for each in parts]
    return ["/".join(each) for each in parts]


def recorded_config(
    config: EvalConfig,
    suites: Sequence[PromptSet],
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    labels: dict[str, tuple[Path, dict[str, Any]]],
) -> dict[str, Any]:
    """Everything that a record depends on, apart from the environment; no paths, so that a folder may be moved."""
    return {
        "suites": {suite.name: suite.revision for suite in suites},
        "target": {**dataclasses.asdict(target.identity), "dtype": str(target.dtype), "form": target.form},
        "chat_template": digest_of(tokenizer.chat_template),
        "methods": {
            name: {"config": read_drafter_config(path).drafter, "setting": setting, "weights": sha256_file(path / WEIGHTS_FILE)}
            for name, (path, setting) in labels.items()
        },
        **{name: getattr(config, name) for name in RECORDED_OPTIONS},
    }


def open_run(
    output_dir: Path, recorded: dict[str, Any], environment: Environment, target: HFTarget, config: EvalConfig
) -> RunInfo:
    """Start a run's folder, or take up the one that is there. Raises ValueError where it belongs to another evaluation."""
    path = output_dir / RUN_FILE
    if path.exists():
        info = parse_dataclass(RunInfo, read_json(path), path)
        if differing := differences(info.config, recorded):
            raise ValueError(
                f"{output_dir} holds another evaluation's records; it differs in {'; '.join(differing)}. "
                "Give another output directory, or delete this one to measure anew"
            )
        return info
    if (output_dir / RECORDS_FILE).exists():
        raise ValueError(
            f"{output_dir} holds records but no {RUN_FILE} to say how they were made; give another output directory"
        )
    roofline = measure_roofline(target.model, target.device, config.memory_bandwidth_gbs)
    info = RunInfo(config=recorded, environment=environment, roofline=roofline)
    write_json(path, dataclasses.asdict(info))
    return info


def check_lossless(bench: Bench, suites: Sequence[PromptSet]) -> list[Mismatch]:
    """Every answer that differs from the baseline's; in low precision, in batches and where it was sampled, each is audited."""
    prompts = {(suite.name, prompt.id): (suite, prompt) for suite in suites for prompt in suite.prompts}
    checked = []
    for mismatch in find_mismatches(bench.file.records.values()):
        record = mismatch.record
        if is_exact(bench.target.dtype, record.temperature, record.batch_size):
            checked.append(mismatch)
            continue
        turns = bench.prompt_turns(*prompts[record.suite, record.prompt_id], record.temperature, record.batch_size)
        input_ids = next(turn.input_ids for turn in turns if turn.turn == record.turn)
        assert input_ids is not None  # it had room when it was measured
        seed = answer_seed(record.seed, record.suite, record.prompt_id, record.turn)
        result = audit(bench.target, input_ids, record.token_ids, temperature=record.temperature, seed=seed)
        logger.info("%s: deficit %.4g, noise %.4g", record.key, result.deficit, result.noise)
        checked.append(dataclasses.replace(mismatch, within_noise=result.within_noise))
    return checked


def count_skipped(suites: Sequence[PromptSet], records: Iterable[EvalRecord]) -> dict[GroupKey, int]:
    """The turns of each suite that were left out as too long, by suite, temperature and batch size."""
    answered = Counter(record.group_key for record in records if record.is_reference)
    num_turns = {suite.name: sum(len(prompt.turns) for prompt in suite.prompts) for suite in suites}
    return {key: num_turns[key[0]] - count for key, count in answered.items()}


def write_results(rows: Sequence[Row], output_dir: Path) -> None:
    """Summary, tables, and per suite and batch size a plot of each temperature and a comparison of its drafters."""
    write_json(output_dir / SUMMARY_FILE, rows)
    atomic_write_text(output_dir / TABLE_FILE, markdown(rows))
    atomic_write_text(output_dir / CSV_FILE, csv_table(rows))
    atomic_write_text(output_dir / LATEX_FILE, latex_table(rows))
    groups: dict[GroupKey, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["suite"], row["temperature"], row["batch_size"]), []).append(row)
    first = next(iter(groups))
    for key, own in groups.items():
        plot_suite(own, output_dir / f"{group_name(key, first)}.png")
    for suite, size in dict.fromkeys((suite, size) for suite, _, size in groups):
        own = [row for row in rows if (row["suite"], row["batch_size"]) == (suite, size)]
        plot_comparison(own, output_dir / f"{group_name((suite, first[1], size), first)}-comparison.png")


@contextmanager
def cpu_threads(num_threads: int | None) -> Iterator[None]:
    """torch's CPU threads for a while; None leaves them."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
