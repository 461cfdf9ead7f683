"""Rows of a finished run.

They are computed from its records when it ends, and read from its summary later.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from ...data.files import read_dataclass
from ..config import EvalConfig, SuiteConfig
from ..records.method_names import MethodFacts, method_names
from ..records.names import BASELINE, FACTS_FILE, RUN_FILE, SUMMARY_FILE
from ..records.records import EvalRecord, GroupKey
from ..records.run_files import Facts, OutOfMemory, RunInfo, changed_files, read_info
from .lossless import judged
from .rows import Row, build_rows


def complete(
    records: Iterable[EvalRecord], out_of_memory: Iterable[OutOfMemory], without_profile: Iterable[OutOfMemory] = ()
) -> list[EvalRecord]:
    """Select the records of methods that did not run out of memory.

    A method that ran out of memory only in its profile loses only its profiled records.
    """
    left_out, unprofiled = ({failure.cell for failure in failures} for failures in (out_of_memory, without_profile))
    return [record for record in records if record.cell not in left_out and not (record.profiled and record.cell in unprofiled)]


def rows_of(records: Iterable[EvalRecord], info: RunInfo, facts: Facts) -> list[Row]:
    """Build the rows of a run, in its order of suites, temperatures and batch sizes."""
    config = info.config
    order = list(config["suites"])
    records = complete(records, facts.out_of_memory, facts.without_profile)
    records.sort(key=lambda record: order.index(record.suite))
    names = ("max_new_tokens", "temperatures", "batch_sizes", "repeats", "seed")
    rows = build_rows(
        records,
        judged(records, info.dtype, facts.audits, facts.unaudited),
        config=EvalConfig(suites=[SuiteConfig(name=name) for name in order], **{name: config[name] for name in names}),
        dtype=info.dtype,
        roofline=info.roofline,
        num_skipped=_num_skipped(records, facts.num_turns),
        drafters=facts.drafters,
        out_of_memory=facts.out_of_memory,
        on_cpu=info.environment.device == "cpu",
    )
    describe_rows(rows, info)
    for row in rows:
        row["budget"] = None if facts.budget is None else asdict(facts.budget)
        row["stage_layers"], row["pipelined"] = info.stage_layers, info.is_pipelined(row["method"])
        # No bound holds where a step may be faster than plain decoding's: in another program, and
        # where several passes are under way.
        if row["method"] not in (BASELINE, *config["methods"]) or row["pipelined"]:
            row["exceeds"] = ""
    return rows


def describe_rows(rows: Iterable[Row], info: RunInfo) -> None:
    """Write each row's method name and the target's quantisation into the row."""
    training = {row["method"]: row["training"] for row in rows}
    methods = [MethodFacts(key=key, described=info.config["methods"].get(key), training=training[key]) for key in training]
    names = {method.key: str(name) for method, name in zip(methods, method_names(methods), strict=True)}
    for row in rows:
        row["name"] = names[row["method"]]
        row["quantization"] = info.config["target"].get("quantization", "")


def _num_skipped(records: Iterable[EvalRecord], num_turns: Mapping[str, int]) -> dict[GroupKey, int]:
    """Count the turns that were skipped as too long.

    The key is suite, temperature and batch size.
    """
    answered = Counter(record.group_key for record in records if record.is_reference)
    return {key: num_turns[key[0]] - count for key, count in answered.items()}


def read_rows(directory: Path) -> list[Row]:
    """Read the summary of a finished run.

    Raises ValueError if the summary is missing or malformed, or if a file changed since the evaluation ended.
    """
    path = directory / SUMMARY_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory} has no {path.name}: it is not a finished evaluation. Give the `eval/` folder of a run, or finish "
            "the run with the command that started it"
        )
    rows = read_dataclass(list[Row], path)
    if not rows:
        raise ValueError(f"{path} has no rows; run the evaluation's command again")
    if changed := changed_files(directory):
        raise ValueError(
            f"{' and '.join(changed)} in {directory} changed after the evaluation ended: the SHA-256 digest is not the one in "
            f"{FACTS_FILE}. Run the evaluation's command again, which computes {path.name} from the records"
        )
    describe_rows(rows, read_info(directory / RUN_FILE))
    return rows
