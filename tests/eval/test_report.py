"""The report: nothing that the records don't say, nothing mixed that can't be compared, and one file that needs no other."""

import json
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.data.files import write_json
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.lossless import Mismatch
from outrider.eval.records import EvalRecord, TreeTokens
from outrider.eval.report import write_report
from outrider.eval.report_cli import report_command
from outrider.eval.report_runs import read_groups
from outrider.eval.roofline import Roofline
from outrider.eval.rows import DrafterFacts, build_rows
from outrider.models.decoding.types import PhaseSeconds
from outrider.models.drafters.checkpoint import TrainingFacts

from .conftest import MakeRecord

ROOFLINE = Roofline(weight_bytes=10**9, bandwidth_gbs=20.0, given=True, cache_bytes=None)
ENVIRONMENT = {
    "python": "3.11",
    "packages": {"torch": "2.13"},
    "system": "Linux",
    "cpu": "a <small> CPU",
    "num_cpus": 2,
    "num_threads": 2,
    "device": "cpu",
    "git_hash": None,
}
DRAFTER = "redrafter beam_width=4 beam_length=3"
Changes = dict[str, Any]
WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(make_record: MakeRecord, tmp_path: Path) -> WriteRun:
    """An evaluation's folder: two prompts, plain decoding in 1 s each, and `methods`, options by name, in half of that."""

    def write(
        name: str,
        methods: dict[str, Changes] | None = None,
        *,
        temperature: float = 0.0,
        batch_size: int = 1,
        wrong: Sequence[str] = (),
        record: Changes | None = None,
        row: Changes | None = None,
        config: Changes | None = None,
        environment: Changes | None = None,
        labels: dict[str, str] | None = None,
    ) -> Path:
        methods = {DRAFTER: {"beam_width": 4, "beam_length": 3}} if methods is None else methods
        records: list[EvalRecord] = []
        for prompt, category in (("81", "writing"), ("82", "math")):
            common: Changes = {"prompt_id": prompt, "category": category, "temperature": temperature, **(record or {})}
            plain: Changes = {**common, "method": "baseline"}
            records += [
                make_record(**plain),
                make_record(**plain, phase_seconds=PhaseSeconds(draft=0.0, verify=0.5, accept=0.1)),
            ]
            for method in methods:
                drafted: Changes = {**common, "method": method, "accepted_histogram": [1, 0, 1], "num_draft_tokens": 6}
                trees = TreeTokens(separate=[12, 12], shared=[6, 8])
                records += [
                    make_record(**drafted, prefill_seconds=0.25, decode_seconds=0.25),
                    make_record(**drafted, phase_seconds=PhaseSeconds(draft=0.25, verify=0.25, accept=0.1), tree_tokens=trees),
                ]
        rows = build_rows(
            records,
            [Mismatch(record=each, position=1) for each in records if each.method in wrong],
            config=EvalConfig(suites=[SuiteConfig(name="mt_bench")], temperatures=[temperature]),
            dtype="float32",
            roofline=ROOFLINE,
            num_skipped={},
            drafters={method: DrafterFacts(parameters=10, training=facts(label)) for method, label in (labels or {}).items()},
        )
        directory = tmp_path / name
        directory.mkdir(parents=True)
        lines = [json.loads(each.to_json()) for each in records]
        for line in lines if batch_size > 1 else ():
            line["batch_size"] = batch_size
        (directory / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_json(directory / "summary.json", [{**each, "batch_size": batch_size, **(row or {})} for each in rows])
        described = {method: {"config": options, "setting": {}, "weights": "w"} for method, options in methods.items()}
        target = {"name": "tiny", "revision": None, "weights_sha256": "5e1f", "dtype": "torch.float32"}
        written = {"suites": {"mt_bench": "r"}, "target": target, "methods": described, "max_new_tokens": 128, "seed": 0}
        environment = {**ENVIRONMENT, **(environment or {})}
        write_json(
            directory / "run.json", {"config": {**written, **(config or {})}, "environment": environment, "roofline": {}}
        )
        return directory

    return write


def facts(labels: str) -> TrainingFacts:
    counts: Changes = {"steps": 1, "positions_seen": 1, "tokens_seen": 1, "parameters": 1, "tokens_per_step_estimate": 1.0}
    return TrainingFacts(seconds=1.0, labels=labels, **counts)


class Page(HTMLParser):
    """A page's sections and tables as text; a tag that is not closed where it should be fails."""

    VOID = frozenset({"meta"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.caption = ""
        self.source = path.read_text()
        self.feed(self.source)
        assert not self.open
        self.text = " ".join(re.sub(r"<style>.*?</style>|<[^>]+>", " ", self.source, flags=re.DOTALL).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.VOID:
            return
        self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value is not None]
        if tag == "figcaption":
            self.caption = ""
        if tag == "tr":
            self.tables[self.caption].append([])
        if tag in ("th", "td"):
            self.tables[self.caption][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag
        if tag == "figcaption":
            while self.caption in self.tables:  # sections share captions; the first is that of the results
                self.caption += "'"
            self.tables[self.caption] = []

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        if "figcaption" in self.open:
            self.caption += text
        elif "tr" in self.open and text:
            line = self.tables[self.caption][-1]
            line[-1] = f"{line[-1]} {text}".strip()


def report(output: Path, *directories: Path) -> Page:
    return Page(write_report(directories, output, figures=False))


def test_the_numbers_of_the_records_are_on_the_page_with_their_intervals(write_run: WriteRun, tmp_path: Path) -> None:
    page = report(tmp_path / "report", write_run("one"))
    plain, drafted = page.tables["mt_bench, greedy, batch size 1"][1:3]
    assert plain[:3] == ["plain decoding", "1.00 1.00 to 1.00", "1.00x"]
    # 4 tokens in two steps; 5 tokens in 0.5 s beside 3 in 1 s.
    assert drafted[:4] == ["redrafter beam_width 4, beam_length 3", "2.00 2.00 to 2.00", "3.33x 3.33 to 3.33", "10.0"]
    assert page.tables["mt_bench, greedy, batch size 1: speedup"][1][1:] == ["3.33x", "3.33x"]
    assert page.tables["mt_bench, greedy, batch size 1: draft tokens a step"][1][1:] == ["12", "7 6 to 8", "42%"]
    for section in ("speedup", "categories", "prefixes", "accepted", "time", "roofline", "environment"):
        assert f"g1-{section}" in page.ids


def test_a_section_without_its_records_is_named_and_not_filled_in(write_run: WriteRun, tmp_path: Path) -> None:
    empty = {"time_split": None, "tree_tokens": None, "by_category": {}, "roofline_fraction": None}
    page = report(tmp_path / "report", write_run("one", row=empty))
    assert [name for name in page.ids if name.startswith("g1-")] == ["g1-speedup", "g1-accepted", "g1-environment"]
    absent = page.text.split("Not in these records")[1]
    for told in ("By category", "Batch size", "Distillation", "Shared prefixes", "Where the time goes", "Roofline"):
        assert told in absent


def test_a_wrong_or_uncompared_method_has_no_speedup_anywhere(write_run: WriteRun, tmp_path: Path) -> None:
    broken = report(tmp_path / "broken", write_run("one", wrong=[DRAFTER]))
    assert broken.tables["mt_bench, greedy, batch size 1"][2][2] == "not lossless NO (2 of 2 prompts)"
    assert "3.33x" not in broken.source
    drawn = report(tmp_path / "drawn", write_run("two", temperature=1.0, record={"drawn": True}))
    assert drawn.tables["mt_bench, temperature 1, batch size 1"][2][2] == "not audited lossless by rule"
    assert "3.33x" not in drawn.source
    lossy = report(tmp_path / "lossy", write_run("three", temperature=1.0, record={"lossless_rule": False}))
    assert lossy.tables["mt_bench, temperature 1, batch size 1"][2][2] == "not lossless by rule"


def test_noise_of_the_arithmetic_costs_no_speedup(write_run: WriteRun, tmp_path: Path) -> None:
    noisy = {"lossless": False, "num_mismatched_prompts": 1, "num_within_noise": 1, "lossless_label": "within noise (1)"}
    page = report(tmp_path / "report", write_run("one", row=noisy))
    assert page.tables["mt_bench, greedy, batch size 1"][2][2].startswith("3.33x")
    assert "not lossless" not in page.text
    worse = report(tmp_path / "worse", write_run("two", row={**noisy, "num_mismatched_prompts": 2}))
    assert worse.tables["mt_bench, greedy, batch size 1"][2][2].startswith("not lossless")


def test_runs_of_another_environment_or_target_get_chapters_of_their_own(write_run: WriteRun, tmp_path: Path) -> None:
    here, there = write_run("here"), write_run("there", environment={"num_threads": 4})
    page = report(tmp_path / "report", here, there, write_run("other", config={"max_new_tokens": 64}))
    assert [name for name in page.ids if re.fullmatch(r"g\d", name)] == ["g1", "g2", "g3"]
    assert "it differs in environment.num_threads." in page.text
    assert "it differs in max_new_tokens." in page.text


def test_the_same_cell_measured_twice_is_told_apart_and_never_averaged(write_run: WriteRun, tmp_path: Path) -> None:
    page = report(tmp_path / "report", write_run("a/eval"), write_run("b/eval"))
    labels = [line[0] for line in page.tables["mt_bench, greedy, batch size 1"][1:]]
    assert labels == [
        *("plain decoding [a]", "plain decoding [b]"),
        *("redrafter [a] beam_width 4, beam_length 3", "redrafter [b] beam_width 4, beam_length 3"),
    ]
    assert "each speedup is over the plain decoding of its own" in page.text


def test_prompts_of_another_revision_are_another_suite(write_run: WriteRun, tmp_path: Path) -> None:
    revision = "fedcba9876543210"
    page = report(tmp_path / "report", write_run("a"), write_run("b", record={"prompt_set_revision": revision}))
    assert {
        "mt_bench (prompts 01234567), greedy, batch size 1",
        f"mt_bench (prompts {revision[:8]}), greedy, batch size 1",
    } <= {*page.tables}


def test_batch_sizes_and_widths_make_a_heat_map_with_gaps_where_nothing_was_measured(
    write_run: WriteRun, tmp_path: Path
) -> None:
    def options(*widths: int) -> dict[str, Changes]:
        return {f"redrafter beam_width={width} beam_length=3": {"beam_width": width, "beam_length": 3} for width in widths}

    page = report(tmp_path / "report", write_run("one", options(1, 4)), write_run("four", options(4), batch_size=4))
    each = page.tables["redrafter, beam_length 3; mt_bench, greedy: tokens/s of each answer"]
    assert each == [
        ["", "plain", "width 1", "width 4"],
        ["batch size 1", "3.0", "10.0", "10.0"],
        ["batch size 4", "0.8", "-", "2.5"],
    ]
    whole = page.tables["redrafter, beam_length 3; mt_bench, greedy: tokens/s x batch, of all answers"]
    assert whole[2] == ["batch size 4", "3.0", "-", "10.0"]


def test_both_ways_to_read_beams_are_set_side_by_side(write_run: WriteRun, tmp_path: Path) -> None:
    shared: Changes = {"beam_width": 4, "beam_length": 3, "tree_nodes": None}
    page = report(
        tmp_path / "report", write_run("one", {"redrafter": shared, "redrafter off": {**shared, "share_prefixes": False}})
    )
    assert "g1-prefixes" in page.ids
    assert not any("tree attention" in caption for caption in page.tables), "two drafters, not two settings"
    off = "redrafter share_prefixes=False"
    page = report(tmp_path / "report", write_run("two", {"redrafter": shared, off: {**shared, "share_prefixes": False}}))
    assert page.tables["redrafter, beam_length 3; mt_bench, greedy: tokens/s with and without tree attention"] == [
        ["", "width 4"],
        ["with batch size 1", "10.0 1.00x"],
        ["without batch size 1", "10.0"],
    ]


@pytest.mark.parametrize("noted", [True, False])
def test_what_drafters_learned_is_read_from_their_training_or_their_folders(
    write_run: WriteRun, tmp_path: Path, noted: bool
) -> None:
    places = ("one/drafter", "two/drafter") if noted else ("distilled/drafter", "text/drafter")
    methods = {f"redrafter {place} beam_width={width}": {"beam_width": width} for width in (1, 4) for place in places}
    labels = {name: "distilled" if places[0] in name else "text" for name in methods} if noted else None
    page = report(tmp_path / "report", write_run("one", methods, labels=labels))
    section = page.source.split('id="g1-distillation"')[1].split("</section>")[0]
    found = re.findall(r'<th scope="row">(.*?)<small>(.*?)</small>', section)
    assert found == [
        *(("distilled", "redrafter beam_width 1"), ("not distilled", "redrafter beam_width 1")),
        *(("distilled", "redrafter beam_width 4"), ("not distilled", "redrafter beam_width 4")),
    ]


def test_the_page_needs_no_other_file_and_escapes_what_records_say(write_run: WriteRun, tmp_path: Path) -> None:
    directory = write_run("one", {"<script>alert(1)</script>": {}})
    page = report(tmp_path / "report", directory)
    assert not re.findall(r"<(?:script|link|img|iframe)|url\(|@import|src=|https?://", page.source)
    assert "&lt;script&gt;alert(1)" in page.source
    assert "a &lt;small&gt; CPU" in page.source
    assert set(re.findall(r'href="([^"]*)"', page.source)) <= {f"#{name}" for name in page.ids}


def test_a_folder_without_records_or_run_is_reported_and_says_so(write_run: WriteRun, tmp_path: Path) -> None:
    directory = write_run("one")
    (directory / "records.jsonl").unlink()
    page = report(tmp_path / "report", directory)
    assert page.tables["mt_bench, greedy, batch size 1"][2][1] == "2.00"
    assert "no records.jsonl in one" in page.text
    (directory / "run.json").unlink()
    assert "run.json is missing" in report(tmp_path / "report", directory).text


def test_contradictions_are_refused(write_run: WriteRun, tmp_path: Path) -> None:
    directory = write_run("one")
    with pytest.raises(ValueError, match="given twice"):
        read_groups([directory, directory])
    with pytest.raises(ValueError, match=r"no summary.json: it is no finished evaluation"):
        read_groups([tmp_path])
    records = directory / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[2:]))
    with pytest.raises(ValueError, match="contradict each other: baseline on mt_bench has 3 tokens in the records and 6"):
        read_groups([directory])
    records.write_text("".join(lines).replace('"config_digest": "c"', '"config_digest": "d"', 1))
    with pytest.raises(ValueError, match="mixes the records of 2 evaluations"):
        read_groups([directory])
    records.write_text("".join(lines[:3]) + "{}\n" + "".join(lines[3:]))
    with pytest.raises(ValueError, match="line 4 is no record"):
        read_groups([directory])
    records.write_text("".join(lines) + '{"torn": ')
    assert read_groups([directory])[0].runs[0].num_records == len(lines)


def test_the_command_writes_page_and_figures_and_drops_those_of_an_earlier_report(write_run: WriteRun, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(report_command)
    figures = tmp_path / "report" / "figures"
    figures.mkdir(parents=True)
    for name in ("9-speedup-1.png", "mine.png"):
        (figures / name).write_bytes(b"")
    result = CliRunner().invoke(app, [str(write_run("one")), "--output", str(tmp_path / "report")])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "report" / "report.html") in result.output
    names = {path.name for path in figures.iterdir()}
    assert {"mine.png", "1-speedup-1.png", "1-categories-1.png", "1-accepted-1.png", "1-time-1.png"} <= names
    assert "9-speedup-1.png" not in names
    assert all((figures / name).read_bytes()[:4] == b"\x89PNG" for name in names - {"mine.png"})
