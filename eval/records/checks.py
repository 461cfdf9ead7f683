"""Do records belong to their run? What doesn't was altered, or comes from elsewhere, and proves nothing."""

from collections.abc import Iterable
from pathlib import Path

from .records import BASELINE, EvalRecord
from .run_files import RunInfo

REMEDY = "Delete the record's line, and the run measures it anew; or measure all anew elsewhere"


def check_records(records: Iterable[EvalRecord], info: RunInfo, path: Path) -> None:
    """Raise ValueError for a record of the file at `path` that is not of the run that `info` describes."""
    config, environment = info.config, info.environment.digest
    methods = {BASELINE, *config["methods"]}
    fixed = {"config_digest": info.config_digest, "environment_digest": environment, "seed": config["seed"]}
    vocab_size = config["target"]["vocab_size"]
    categories: dict[tuple[str, str], str] = {}
    for record in records:
        for name, expected in {**fixed, "prompt_set_revision": config["suites"].get(record.suite)}.items():
            if (value := getattr(record, name)) != expected:
                raise foreign(path, record, f"has {name} {value!r}, and this run has {expected!r}")
        for name, value, known in (
            ("method", record.method, methods),
            ("temperature", record.temperature, config["temperatures"]),
            ("batch_size", record.batch_size, config["batch_sizes"]),
        ):
            if value not in known:
                raise foreign(path, record, f"has {name} {value!r}, and this run has {', '.join(map(str, known))}")
        if max(record.token_ids) >= vocab_size:
            raise foreign(path, record, f"has the token id {max(record.token_ids)}; the vocabulary ends at {vocab_size - 1}")
        exact = record.method == BASELINE or record.temperature == 0 or config["acceptance"] != "typical"
        if record.lossless_rule != exact:
            raise foreign(path, record, f"has lossless_rule {record.lossless_rule}, and this run's rule says {exact}")
        known_as = categories.setdefault((record.suite, record.prompt_id), record.category)
        if record.category != known_as:
            raise foreign(path, record, f"has the category {record.category!r}, and another answer to it {known_as!r}")


def foreign(path: Path, record: EvalRecord, what: str) -> ValueError:
    """The error of a record that is not of its run."""
    return ValueError(f"{path}: {record.name} {what}. {REMEDY}")
