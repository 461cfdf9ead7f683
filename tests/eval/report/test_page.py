"""The report: one page of figures from the records, with comparable runs together."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from outrider.data.files import write_json
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.records.names import setting_words
from outrider.eval.records.records import EvalRecord
from outrider.eval.records.run_files import RECORDED_OPTIONS, Audit, RunInfo, write_info
from outrider.eval.report.page import write_report
from outrider.eval.report.runs import read_groups
from outrider.eval.report.sections import Value, column
from outrider.eval.results.rows import rows_of
from outrider.models.phases import PhaseSeconds

from ...commands import invoke
from ..conftest import ENVIRONMENT, ROOFLINE, MakeRecord, facts_of

DRAFTER = "redrafter beam_width=4 beam_length=3"
Changes = dict[str, Any]
WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(make_record: MakeRecord, tmp_path: Path) -> WriteRun:
    """Return a function that writes an evaluation's folder of two prompts.

    Plain decoding takes 1 s for each prompt, or for both in one batch. The `methods`, options by
    name, take half of that. The answers of `wrong` methods differ from plain decoding's. The audit
    explains the differences of the prompts `noise`. `row` replaces values in the summary's rows.
    """

    def write(
        name: str,
        methods: dict[str, Changes] | None = None,
        *,
        temperature: float = 0.0,
        batch_size: int = 1,
        wrong: Sequence[str] = (),
        noise: Sequence[str] = (),
        record: Changes | None = None,
        row: Changes | None = None,
        config: Changes | None = None,
        environment: Changes | None = None,
    ) -> Path:
        methods = {DRAFTER: {"beam_width": 4, "beam_length": 3}} if methods is None else methods
        described = {
            method: {
                "drafter": drafter_name(method),
                "detail": setting_words("redrafter", options, options),
                "kind": "redrafter",
                "config": options,
                "setting": {},
                "weights": "w",
            }
            for method, options in methods.items()
        }
        target = {"name": "tiny", "revision": None, "weights_sha256": "5e1f", "vocab_size": 300}
        target["dtype"] = "torch.bfloat16" if noise else "torch.float32"
        written: Changes = {name: getattr(EvalConfig(suites=[SuiteConfig(name="mt_bench")]), name) for name in RECORDED_OPTIONS}
        written |= {"temperatures": [temperature], "batch_sizes": [batch_size], "target": target, "methods": described}
        written["suites"] = {"mt_bench": (record or {}).get("prompt_set_revision", "0123456789abcdef")}
        made_in = replace(ENVIRONMENT, **{"cpu": "a <small> CPU", "num_threads": 2, **(environment or {})})
        info = RunInfo(config={**written, **(config or {})}, environment=made_in, roofline=ROOFLINE)
        shared: Changes = {"batch_size": batch_size, "num_rows": min(2, batch_size), "config_digest": info.config_digest}
        shared |= {"temperature": temperature, "environment_digest": made_in.digest, **(record or {})}
        records = two_answers(make_record, shared, list(methods), wrong)
        audits = {
            wrong_record.answer_digest: Audit(
                deficit=0.0 if batch_size > 1 else 0.1,
                position=4,
                noise=0.1,
                ends_rightly=True,
                within_noise=batch_size > 1 or wrong_record.prompt_id in noise,
            )
            for wrong_record in records
            if wrong_record.method in wrong or batch_size > 1
        }
        run_facts = facts_of(records, num_turns={"mt_bench": 2}, audits=audits)
        directory = tmp_path / name
        directory.mkdir(parents=True)
        write_info(directory / "run.json", info)
        summary = [{**values, **(row or {})} for values in rows_of(records, info, run_facts)]
        write_json(directory / "summary.json", summary)
        return directory

    return write


def two_answers(make_record: MakeRecord, shared: Changes, methods: Sequence[str], wrong: Sequence[str]) -> list[EvalRecord]:
    """Return the timed and profiled answers of all methods to two prompts."""
    records = []
    for prompt, category in (("81", "writing"), ("82", "math")):
        common: Changes = {"prompt_id": prompt, "category": category, **shared}
        plain: Changes = {**common, "method": "baseline", "accepted_histogram": [4], "lossless_rule": True}
        records += [make_record(**plain), make_record(**plain, phase_seconds=PhaseSeconds(draft=0.0, verify=0.5, accept=0.1))]
        for method in methods:
            drafted: Changes = {
                **common,
                "method": method,
                "label": method,
                "accepted_histogram": [1, 0, 1],
                "num_draft_tokens": 14,
            }
            drafted["token_ids"] = [0, 1, 2, 3, 9 if method in wrong else 4]
            phases = PhaseSeconds(draft=0.25, verify=0.25, accept=0.1)
            records += [
                make_record(**drafted, prefill_seconds=0.25, decode_seconds=0.25),
                make_record(**drafted, phase_seconds=phases),
            ]
    return records


def drafter_name(method: str) -> str:
    """Return the label of a method without its setting: ReDrafter, and its folder if the key has one."""
    return " ".join(["ReDrafter", *(word for word in method.split()[1:] if "=" not in word)])


class Page(HTMLParser):
    """Text of a page's sections and tables. A tag that is closed in the wrong place fails."""

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
            # Sections share captions. The first one belongs to the results.
            while self.caption in self.tables:
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
    return Page(write_report(directories, output))


def test_the_numbers_of_the_records_are_on_the_page_with_their_intervals(write_run: WriteRun, tmp_path: Path) -> None:
    page = report(tmp_path / "report", write_run("one"))
    plain, drafted = page.tables["mt_bench, greedy, batch size 1"][1:3]
    assert plain[:3] == ["plain decoding", "1.00 1.00 to 1.00", "1.00x"]
    # 4 tokens in two steps; 5 tokens in 0.5 s beside as many in 1 s.
    ratio = "2.00x 2.00 to 2.00"
    assert drafted == ["ReDrafter 4 beams of 3", "2.00 2.00 to 2.00", ratio, "10.0", "2.00x", "2 of 2", "-", "-", "yes"]
    heads, *lines = page.tables["mt_bench, greedy, batch size 1: speedup"]
    assert heads == ["Category", "ReDrafter, 4 beams of 3"]
    assert lines == [["writing 1 prompt", "2.00x"], ["math 1 prompt", "2.00x"]]
    for section in ("speedup", "categories", "accepted", "time", "environment"):
        assert f"g1-{section}" in page.ids


def test_a_section_without_records_is_left_out(write_run: WriteRun, tmp_path: Path) -> None:
    empty = {"time_split": None, "by_category": {}}
    page = report(tmp_path / "report", write_run("one", row=empty))
    assert [name for name in page.ids if name.startswith("g1-")] == ["g1-speedup", "g1-accepted", "g1-environment"]


def test_a_wrong_method_has_no_speedup_and_that_of_a_lossy_one_is_marked(write_run: WriteRun, tmp_path: Path) -> None:
    broken = report(tmp_path / "broken", write_run("one", wrong=[DRAFTER]))
    assert broken.tables["mt_bench, greedy, batch size 1"][2][2] == "not lossless NO (2 of 2 prompts)"
    assert "2.00x" not in broken.source
    lossy = report(
        tmp_path / "lossy",
        write_run("three", temperature=1.0, record={"lossless_rule": False}, config={"acceptance": "typical"}),
    )
    line = lossy.tables["mt_bench, temperature 1, batch size 1"][2]
    assert (line[2], line[-1]) == ("2.00x not lossless", "no, by rule")


def test_differences_within_numeric_noise_keep_the_speedup(write_run: WriteRun, tmp_path: Path) -> None:
    page = report(tmp_path / "report", write_run("one", wrong=[DRAFTER], noise=["81", "82"]))
    line = page.tables["mt_bench, greedy, batch size 1"][2]
    assert (line[2], line[-1]) == ("2.00x 2.00 to 2.00", "within noise (2)")
    assert "not lossless" not in page.text
    worse = report(tmp_path / "worse", write_run("two", wrong=[DRAFTER], noise=["81"]))
    assert worse.tables["mt_bench, greedy, batch size 1"][2][2].startswith("not lossless")


def test_a_noisy_speed_is_marked_and_the_headline_comes_first(write_run: WriteRun, tmp_path: Path) -> None:
    timed = {"noisy": True, "processor_seconds_per_token": 0.0125, "processor_speedup": 1.5}
    page = report(tmp_path / "report", write_run("one", row=timed))
    head, _, drafted = page.tables["mt_bench, greedy, batch size 1"]
    assert drafted[2] == "2.00x 2.00 to 2.00 noisy"
    assert (head[6:8], drafted[6:8]) == (["CPU ms/tok", "CPU speedup"], ["12.50", "1.50x"])
    headline_text = "Fastest: 2.00x [2.00, 2.00], noisy by "
    assert page.text.index(headline_text) < page.text.index("Tokens per step")
    assert "noisy: more than" in page.text


def test_runs_of_another_environment_or_target_get_chapters_of_their_own(write_run: WriteRun, tmp_path: Path) -> None:
    here, there = write_run("here"), write_run("there", environment={"num_threads": 4})
    page = report(tmp_path / "report", here, there, write_run("other", config={"max_new_tokens": 64}))
    assert [name for name in page.ids if re.fullmatch(r"g\d", name)] == ["g1", "g2", "g3"]
    assert "this one differs in environment.num_threads." in page.text
    assert "this one differs in max_new_tokens." in page.text


def test_two_measurements_of_one_cell_are_never_averaged(write_run: WriteRun, tmp_path: Path) -> None:
    page = report(tmp_path / "report", write_run("a/eval"), write_run("b/eval"))
    labels = [line[0] for line in page.tables["mt_bench, greedy, batch size 1"][1:]]
    assert labels == [
        *("plain decoding [a]", "plain decoding [b]"),
        *("ReDrafter [a] 4 beams of 3", "ReDrafter [b] 4 beams of 3"),
    ]
    assert "each speedup is over plain decoding in the same folder" in page.text


def test_prompts_of_another_revision_are_another_suite(write_run: WriteRun, tmp_path: Path) -> None:
    revision = "fedcba9876543210"
    page = report(tmp_path / "report", write_run("a"), write_run("b", record={"prompt_set_revision": revision}))
    assert {
        "mt_bench (prompts 01234567), greedy, batch size 1",
        f"mt_bench (prompts {revision[:8]}), greedy, batch size 1",
    } <= {*page.tables}


def test_batch_sizes_make_a_map_with_gaps_where_nothing_was_measured(write_run: WriteRun, tmp_path: Path) -> None:
    def options(*widths: int) -> dict[str, Changes]:
        return {f"redrafter beam_width={width} beam_length=3": {"beam_width": width, "beam_length": 3} for width in widths}

    page = report(tmp_path / "report", write_run("one", options(1, 4)), write_run("four", options(4), batch_size=4))
    head, *lines = page.tables["mt_bench, greedy: tokens/s of each answer"]
    assert head == ["Method", "batch size 1", "batch size 4"]
    cells = {line[0]: line[1:] for line in lines}
    assert cells == {
        "plain decoding": ["5.0 1.00x", "5.0 1.00x"],
        "ReDrafter 1 beam of 3": ["10.0 2.00x", "-"],
        "ReDrafter 4 beams of 3": ["10.0 2.00x", "10.0 2.00x"],
    }
    whole = page.tables["mt_bench, greedy: tokens/s of the batch"]
    assert [line[2] for line in whole[1:] if line[2] != "-"] == ["10.0 1.00x", "20.0 2.00x"]


def test_a_map_of_speedups_has_plain_decoding_in_the_middle_of_its_colors() -> None:
    scale = column("", "heat", [Value(text="", number=value) for value in (0.5, 1.0, 4.0)], parity=1.0)
    assert [scale.share(value) for value in (4.0, 2.0, 1.0, 0.5, 0.1)] == pytest.approx([1.0, 0.5, 0.0, -0.5, -1.0])
    narrow = column("", "heat", [Value(text="", number=1.01)], parity=1.0)
    assert narrow.share(1.01) < 0.1, "noise has no strong color"
    assert column("", "heat", [Value(text="", number=4.0)]).share(2.0) == 0.5


def test_a_slower_method_has_another_color(write_run: WriteRun, tmp_path: Path) -> None:
    fast = report(tmp_path / "fast", write_run("fast"))
    assert 'class="heat below' not in fast.source
    by_category = {"writing": {"speedup": 0.5, "speedup_ci95": None, "tokens_per_step": 1.0, "num_prompts": 1}}
    by_category["math"] = {**by_category["writing"], "speedup": 2.0}
    slow = report(tmp_path / "slow", write_run("slow", row={"by_category": by_category}))
    assert slow.source.count('class="heat below') == 1


def test_the_page_needs_no_other_file_and_every_name_of_a_user_is_escaped(write_run: WriteRun, tmp_path: Path) -> None:
    nasty = "<img src=x onerror=alert(1)>"
    target = {"name": nasty, "revision": nasty, "weights_sha256": "5e1f", "vocab_size": 3, "dtype": "torch.float32"}
    target["quantization"] = nasty
    methods = {f"redrafter {nasty}/{name} beam_width=4": {"beam_width": 4} for name in ("a", "b")}
    options: Changes = {"config": {"target": target}, "environment": {"cpu": nasty, "packages": {nasty: nasty}}}
    page = report(tmp_path / nasty, write_run("one", methods, record={"category": nasty}, **options))
    assert page.source.count("&lt;img src=x") > 5
    assert not re.findall(r"<(?:script|link|img|iframe)|url\(|@import|https?://", page.source)
    assert set(re.findall(r'href="([^"]*)"', page.source)) <= {f"#{name}" for name in page.ids}


def test_a_folder_that_holds_no_finished_run_is_named(write_run: WriteRun, tmp_path: Path) -> None:
    directory = write_run("one")
    with pytest.raises(ValueError, match="given twice"):
        read_groups([directory, directory])
    with pytest.raises(ValueError, match="no summary.json: it is not a finished evaluation"):
        read_groups([tmp_path])
    rows = json.loads((directory / "summary.json").read_text())
    for text, message in (
        ("[", "is not a JSON file"),
        ("[]", "has no rows"),
        (json.dumps([rows[0], {**rows[1], "notes": "x"}]), r"\[1\].notes: there is no such key"),
        (json.dumps([{**rows[0], "speedup": "fast"}]), r'summary\.json: \[0\].speedup="fast": must be a number'),
    ):
        (directory / "summary.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_groups([directory])
    (directory / "summary.json").write_text(json.dumps(rows))
    info = (directory / "run.json").read_text()
    for before, after in (('"num_threads": 2', '"num_threads": 64'), ('"revision": null,', ""), ('"sha256"', '"sha"')):
        assert before in info
        (directory / "run.json").write_text(info.replace(before, after))
        with pytest.raises(ValueError, match=r"run\.json(: sha: there is no such key| was altered or damaged)"):
            read_groups([directory])
    (directory / "run.json").unlink()
    with pytest.raises(ValueError, match="run.json does not exist"):
        read_groups([directory])


def test_a_report_needs_no_torch() -> None:
    code = "import sys, outrider.eval.report.page; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_notes_say_what_was_measured_and_name_too_few_batches_or_prompts(write_run: WriteRun, tmp_path: Path) -> None:
    page = report(tmp_path / "report", write_run("one"), write_run("four", batch_size=4))
    assert "mt_bench, greedy (prompts 0123456789ab): 2 prompts, 2 turns, each answered 3 times" in page.text
    assert "Too few prompts for a reliable interval: 2." in page.text
    assert "Too few batches for a reliable interval: 1." in page.text


def test_the_command_writes_one_page(write_run: WriteRun, tmp_path: Path) -> None:
    result = invoke(["report", str(write_run("one")), "--output", str(tmp_path / "report")])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "report" / "report.html") in result.output
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["report.html"]
