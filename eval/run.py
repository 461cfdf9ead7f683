"""The evaluation stage: measure, check, and write the results."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.chat import template_digest
from ..data.fields import differences, name_digests, raise_problems
from ..data.files import atomic_write_text, sha256_file, write_json
from ..data.suites import SUITE_NAMES, PromptSet, load_suite
from ..models.drafters.saved.folder import read_training_facts
from ..models.drafters.saved.loading import LoadedDrafter, common_context_length, trained_parts
from ..models.drafters.saved.parts import DrafterParts
from ..models.llm.hf_target import HFTarget
from .audited import audit_answers
from .config import EvalConfig, stage_problems
from .measure.bench import Bench
from .measure.environment import (
    budget_facts,
    describe_environment,
    measure_roofline,
    recorded_budget,
    recorded_stages,
)
from .measure.methods import (
    Drafters,
    MethodSpec,
    Settings,
    TunedSettings,
    acceptance_rule,
    load_drafters,
    method_specs,
    methods_by_place,
    recorded_methods,
)
from .measure.plan import Plan, require_room
from .records.names import FACTS_FILE, RECORDS_FILE, RUN_FILE, SUMMARY_FILE, TABLE_FILE
from .records.records import EvalRecord, RecordFile, group_name
from .records.run_files import RECORDED_OPTIONS, DrafterFacts, Environment, Facts, RunInfo, read_info, write_info
from .results.judge_files import write_answers
from .results.plots import plot
from .results.rows import Row, complete, rows_of
from .results.tables import csv_table, markdown

logger = logging.getLogger(__name__)

CSV_FILE = "table.csv"
ANSWERS_DIR = "answers"
DIGESTS = {
    "suites.": "the prompts of {name} (its file, its limit in eval.suites, or eval.seed, which draws them)",
    "chat_template": "the chat template (data.chat_template and data.template_options, or the target's)",
    "target.weights_sha256": "the target's weights (target.name_or_path)",
    "target.config_sha256": "the target's config.json",
    "target.tokenizer_sha256": "the target's tokenizer",
}
"""What a digest depends on; a message prints this in place of two long hexadecimal numbers."""


def evaluate(
    config: EvalConfig,
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    drafters: Drafters,
    output_dir: Path,
    settings: Settings | None = None,
    tuned: TunedSettings | None = None,
) -> list[Row]:
    """Measure plain decoding and every drafter in every setting, and write all results.

    Answers that `output_dir` already holds are not measured again. Raises ValueError for invalid
    input, and for an `output_dir` with records of another evaluation.
    """
    # 1. Load what is compared: prompts and drafters.
    raise_problems(stage_problems(config, recorded_stages(target).get("stage_layers")))
    suites = load_suites(config)
    specs = method_specs(config, drafters, settings, tuned)
    loaded = load_drafters(specs, target)
    limit = common_context_length(target, *loaded.values())
    require_room(config, suites, tokenizer, limit)
    warn_of_templates(specs, tokenizer)
    # 2. Start or resume the run's folder. A resumed run computes linear layers as its first process did.
    parts = [part for drafter in loaded.values() for part in trained_parts(drafter)]
    path = output_dir / RUN_FILE
    target.choose_linears(*parts, recorded=read_info(path).environment.linears if path.exists() else None)
    environment = describe_environment(target.device, target.linears)
    info = open_run(output_dir, recorded_config(config, suites, target, tokenizer, specs), environment, target)
    with RecordFile(output_dir / RECORDS_FILE) as file:
        require_own_records(file, info)
        # 3. Measure the answers that the records lack.
        plan = Plan(
            suites=suites,
            methods=methods_by_place(config, specs, loaded, target),
            config=config,
            target=target,
            tokenizer=tokenizer,
            context_length=limit,
            records=file.records,
        )
        rules = {temperature: acceptance_rule(config.acceptance, temperature, target) for temperature in config.temperatures}
        bench = Bench(plan=plan, rules=rules, environment=environment, file=file, info=info)
        bench.measure()
        records = complete(file.records.values(), bench.out_of_memory)
        check_measured(bench, records)
        # 4. Audit answers that differ from the baseline's.
        audits, unaudited = audit_answers(bench, records)
    facts = Facts(
        drafters={name: drafter_facts(drafter, specs[name].parts) for name, drafter in loaded.items()},
        num_turns={suite.name: sum(len(prompt.turns) for prompt in suite.prompts) for suite in suites},
        audits=audits,
        out_of_memory=bench.out_of_memory,
        unaudited=unaudited,
        budget=budget_facts(target),
    )
    # 5. Write tables and plots, facts with the summary's digest, and answers.
    rows = rows_of(records, info, facts)
    write_results(rows, output_dir)
    digest = {"summary_sha256": sha256_file(output_dir / SUMMARY_FILE)}
    write_json(output_dir / FACTS_FILE, {**dataclasses.asdict(facts), **digest})
    write_answers(records, suites, tokenizer, output_dir / ANSWERS_DIR, file.path.stat().st_mtime)
    return rows


def check_inputs(config: EvalConfig, drafters: Drafters, settings: Settings | None = None) -> None:
    """Check suites, drafters and their options, without a target.

    Raises ValueError for each problem that doesn't need the target to be detected.
    """
    load_suites(config)
    for spec in method_specs(config, drafters, settings).values():
        for folder in spec.parts.folders:
            read_training_facts(folder)


def warn_of_templates(specs: Mapping[str, MethodSpec], tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn of trained drafters that have seen another chat template than that of the prompts."""
    for folder in dict.fromkeys(folder for spec in specs.values() for folder in spec.parts.folders):
        facts = read_training_facts(folder)
        if facts is not None and facts.chat_template not in (None, template_digest(tokenizer)):
            logger.warning("%s was trained with another chat template: it will accept less", folder)


def drafter_facts(drafter: LoadedDrafter, parts: DrafterParts) -> DrafterFacts:
    """Collect the facts about a drafter that tables show: its size, and its (first) training."""
    parameters = sum(parameter.numel() for part in trained_parts(drafter) for parameter in part.parameters())
    training = read_training_facts(parts.folders[0]) if parts.folders else None
    facts = None if training is None else dataclasses.asdict(training)
    return DrafterFacts(parameters=parameters, training=facts)


def load_suites(config: EvalConfig) -> list[PromptSet]:
    """Load the suites' prompts.

    Raises one ValueError that lists all suites that are unknown or can't be read. Raises ValueError
    for an empty suite, and for one with fewer prompts than the largest batch size.
    """
    # 1. Read all suites, and list all problems at once.
    suites, unreadable = [], {}
    for chosen in config.suites:
        try:
            suites.append(load_suite(chosen.name, chosen.path, chosen.limit, config.seed))
        except (ValueError, OSError) as error:
            unreadable[chosen.name] = str(error)
    if unreadable:
        problems = "; ".join(unreadable.values())
        # A file that can't be read and an unknown name have other remedies, which the problems state.
        is_remote = any(one.name in unreadable and one.path is None and one.name in SUITE_NAMES for one in config.suites)
        raise ValueError(f"{problems}. Give local files: eval.suites=[{{name: NAME, path: FILE}}]" if is_remote else problems)
    # 2. Check that each has enough prompts.
    for suite in suites:
        if not suite.prompts:
            raise ValueError(f"the suite {suite.name} has no prompts; check its file")
        if len(suite.prompts) < max(config.batch_sizes):
            raise ValueError(
                f"the batch size {max(config.batch_sizes)} exceeds the {len(suite.prompts)} prompts of {suite.name}, so no "
                "batch would be full; raise the suite's limit, or lower the batch size"
            )
    return suites


def recorded_config(
    config: EvalConfig,
    suites: Sequence[PromptSet],
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    specs: Mapping[str, MethodSpec],
) -> dict[str, Any]:
    """Collect everything that a record depends on, except the environment.

    The result has no paths, so that a folder may move.
    """
    return {
        "suites": {suite.name: suite.revision for suite in suites},
        "target": {
            **dataclasses.asdict(target.identity),
            "dtype": str(target.dtype),
            "form": target.form,
            "fast_linears": target.fast_linears,
            **recorded_budget(target),
            **recorded_stages(target),
        },
        "chat_template": template_digest(tokenizer),
        "methods": recorded_methods(specs),
        **{name: getattr(config, name) for name in RECORDED_OPTIONS},
    }


def open_run(output_dir: Path, recorded: dict[str, Any], environment: Environment, target: HFTarget) -> RunInfo:
    """Start a run's folder, or resume an existing one.

    A resumed run may add suites, temperatures and batch sizes. Raises ValueError if the folder
    belongs to another evaluation.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / RUN_FILE
    if path.exists():
        info = read_info(path)
        if differing := differences(info.config, info.within(recorded)):
            texts = "; ".join(name_digests(differing, DIGESTS))
            raise ValueError(
                f"{output_dir} holds another evaluation's records; it differs in {texts}. You may add suites, "
                "temperatures and batch sizes to a folder; to remove some, or to change anything else, give another "
                "output directory (or delete this one to start over)"
            )
        info = dataclasses.replace(info, config=recorded)
    elif (output_dir / RECORDS_FILE).exists():
        raise ValueError(
            f"{output_dir} holds records but no {RUN_FILE}, which describes how they were measured; give another output "
            "directory"
        )
    else:
        roofline = None if recorded_stages(target) else measure_roofline(target)
        info = RunInfo(config=recorded, environment=environment, roofline=roofline)
    write_info(path, info)
    return info


def require_own_records(file: RecordFile, info: RunInfo) -> None:
    """Raise ValueError for a record of another configuration or environment."""
    expected = {"config_digest": info.config_digest, "environment_digest": info.environment.digest}
    for record in file.records.values():
        for name, digest in expected.items():
            if (recorded := getattr(record, name)) != digest:
                raise ValueError(
                    f"{file.path} holds records of another evaluation: {record.name} has {name} {recorded!r}, and {RUN_FILE} "
                    f"has {digest!r}; give another output directory"
                )


def check_measured(bench: Bench, records: Sequence[EvalRecord]) -> None:
    """Warn of each suite whose prompts all exceed the context window. Raises ValueError if nothing fits into memory."""
    measured = {record.suite for record in records} | {missing.suite for missing in bench.out_of_memory}
    if bench.out_of_memory and not records:
        raise ValueError(
            f"plain decoding ran out of memory on every suite ({', '.join(sorted(measured))}), at every temperature and batch "
            f"size ({', '.join(map(str, bench.config.batch_sizes))}), so nothing was measured; lower the batch size or "
            "max_new_tokens, or load the target in a narrower type (dtype, target.quantization) or on a larger device"
        )
    for suite in bench.plan.suites:
        if suite.name not in measured:
            logger.warning("no prompt of %s fits the context window: the table has no row for it", suite.name)


def write_results(rows: Sequence[Row], output_dir: Path) -> None:
    """Write summary and tables, and a plot for each suite and batch size."""
    write_json(output_dir / SUMMARY_FILE, rows)
    atomic_write_text(output_dir / TABLE_FILE, markdown(rows))
    atomic_write_text(output_dir / CSV_FILE, csv_table(rows))
    for suite, size in dict.fromkeys((row["suite"], row["batch_size"]) for row in rows):
        compared = [row for row in rows if (row["suite"], row["batch_size"]) == (suite, size)]
        plot(compared, output_dir / f"{group_name((suite, 0.0, size))}.png")
