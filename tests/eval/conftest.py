"""Fixtures: invented records with statistics computed by hand, and a random tiny drafter."""

from collections import Counter
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from outrider.data.files import sha256_json, write_json
from outrider.eval.records.records import EvalRecord, read_records
from outrider.eval.records.run_files import RECORDED_OPTIONS, Environment, Facts, Roofline, RunInfo
from outrider.eval.results.lossless import Mismatch
from outrider.eval.results.rows import Row, build_rows
from outrider.eval.results.tables import print_table
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ..cheap_evaluations import cheap_evaluations, real_plots

__all__ = ["cheap_evaluations", "real_plots"]

MakeRecord = Callable[..., EvalRecord]

ENVIRONMENT = Environment(
    python="3.11",
    packages={},
    system="Linux",
    cpu="c",
    num_cpus=2,
    num_threads=1,
    device="cpu",
    git_hash=None,
    linears={},
)
ROOFLINE = Roofline(weight_bytes=10**9, bandwidth_gbs=20.0, cache_bytes=None, streamed=False)


def forge_info(folder: Path, info: dict[str, Any]) -> None:
    """Write another `run.json`, with its digest."""
    content = {name: value for name, value in info.items() if name != "sha256"}
    write_json(folder / "run.json", {**content, "sha256": sha256_json(content)})


LABELS = {"baseline": "plain decoding", "redrafter": "ReDrafter", "medusa": "Medusa"}
"""Labels of methods; others have their names."""


def info_of(
    records: Sequence[EvalRecord], *, roofline: Roofline | None = ROOFLINE, methods: Any = None, **target: Any
) -> RunInfo:
    """Describe the run that measured these records."""
    config: dict[str, Any] = {
        **dict.fromkeys(RECORDED_OPTIONS, 0),
        "suites": {record.suite: record.prompt_set_revision for record in records},
        "temperatures": list(dict.fromkeys(record.temperature for record in records)),
        "batch_sizes": sorted({record.batch_size for record in records}),
        "repeats": 1 + max(record.repeat for record in records),
        "max_new_tokens": 128,
        "target": {"dtype": "torch.float32", **target},
        "methods": methods or {},
    }
    return RunInfo(config=config, environment=ENVIRONMENT, roofline=roofline)


def read(folder: Path) -> list[EvalRecord]:
    """List the records of an evaluation's folder."""
    return list(read_records(folder / "records.jsonl").values())


def facts_of(records: Sequence[EvalRecord], **changes: Any) -> Facts:
    """Return facts of a run without skipped turns, audits and failures."""
    num_turns = Counter(record.suite for record in {r.key[:3]: r for r in records}.values())
    nothing: dict[str, Any] = {"audits": {}, "out_of_memory": [], "unaudited": [], "budget": None}
    return Facts(**{"drafters": {}, "num_turns": num_turns, **nothing, **changes})


def rows_of(
    records: Sequence[EvalRecord], mismatches: Sequence[Mismatch] = (), info: RunInfo | None = None, **facts: Any
) -> list[Row]:
    """Build the rows of a run that measured these records."""
    return build_rows(records, mismatches, info or info_of(records), facts_of(records, **facts))


def printed(rows: list[Row], width: int = 80) -> str:
    """Return the table of these rows as a terminal shows it."""
    screen = StringIO()
    print_table(rows, Console(width=width, file=screen))
    return screen.getvalue()


@pytest.fixture
def make_record() -> MakeRecord:
    """Return a function that makes the record of one prompt.

    `histogram` decides how many tokens it has. The default has two steps that accept no token.
    """

    def make(**changes: Any) -> EvalRecord:
        histogram = changes.pop("accepted_histogram", [2])
        num_tokens = sum(count * (length + 1) for length, count in enumerate(histogram))
        values: dict[str, Any] = {
            "suite": "mt_bench",
            "prompt_set_revision": "0123456789abcdef",
            "prompt_set_source": None,
            "prompt_id": "81",
            "category": "writing",
            "turn": 0,
            "temperature": 0.0,
            "method": "baseline",
            "label": LABELS.get(changes.get("method", "baseline"), changes.get("method", "")),
            "repeat": 0,
            "profiled": "phase_seconds" in changes,
            "batch_size": 1,
            "batch": 0,
            "num_rows": 1,
            "context_from": None,
            "prompt_sha256": "00",
            "num_prompt_tokens": 5,
            "token_ids": list(range(num_tokens + 1)),
            "accepted_histogram": histogram,
            "num_verify_tokens": num_tokens,
            "num_draft_tokens": 0,
            "lossless_rule": True,
            "truncated": False,
            "prefill_seconds": 0.25,
            "decode_seconds": 0.75,
            "phase_seconds": None,
            "processor_seconds": None,
            "accepted_by": None,
            "pace": None,
            "streaming": None,
            "runs": None,
            "environment_digest": "e",
            "config_digest": "c",
            "seed": 0,
        }
        return EvalRecord(**{**values, **changes})

    return make


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir: Path) -> HFTarget:
    return load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def tiny_drafter_dir(tiny_target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random ReDrafter. Its wrong drafts must not change an answer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = build_drafter(parse_drafter({"kind": "redrafter", "beam_width": 2, "beam_length": 3}), tiny_target)
    directory = tmp_path_factory.mktemp("run") / "drafter"
    save_drafter(drafter, directory, tiny_target.identity)
    return directory


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three two-turn prompts in MT-Bench's format.

    The first turn of the second prompt is too long for the tiny target.
    """
    turns = [("ab", "again"), ("word " * 1200, "again"), ("xyz", "more")]
    lines = [
        f'{{"question_id": {index}, "category": "{category}", "turns": ["{first}", "{second}"]}}'
        for index, (category, (first, second)) in enumerate(zip(("math", "math", "stem"), turns, strict=True))
    ]
    path = tmp_path_factory.mktemp("suite") / "question.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path
