"""Write benchmarks/README.md, and the tables of drafters and engines in README and docs, from the records.

    python scripts/make_benchmarks_page.py           # write all
    python scripts/make_benchmarks_page.py --check   # exit with 1 where a file differs from what would be written

The text around the tables is benchmarks.md.jinja, which contains no measured number. A record is a
JSON object with the `command` that made it, and its `tables` in Markdown or its `rows`; or the
folder of an evaluation.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- table of drafters: begin -->", "<!-- table of drafters: end -->"
CHAT_BEGIN, CHAT_END = "<!-- table of the chat model: begin -->", "<!-- table of the chat model: end -->"
ENGINES_BEGIN, ENGINES_END = "<!-- table of engines: begin -->", "<!-- table of engines: end -->"
DRAFTERS, CHAT_MODEL, ENGINES = "free_study/free_study.json", "smollm2", "engines.json"
"""Records of the tables in README and docs."""
COMMAND = "make benchmarks"


def main(
    records: Annotated[Path, typer.Option(help="Folder of the records.")] = ROOT / "benchmarks",
    readme: Annotated[Path, typer.Option(help="File with the markers of the table.")] = ROOT / "README.md",
    explanation: Annotated[Path, typer.Option(help="File with the same markers.")] = ROOT / "docs/explanation/free-drafts.md",
    engines: Annotated[Path, typer.Option(help="File with the table of engines.")] = ROOT / "docs/how-to/engines/README.md",
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 where a file is out of date.")] = False,
) -> None:
    """Write the page and the tables of README and docs, or check them."""
    page = Page(records)
    wanted = {records / "README.md": page.written()}
    tables = [
        (BEGIN, END, page.drafters),
        (CHAT_BEGIN, CHAT_END, page.chat_model),
        (ENGINES_BEGIN, ENGINES_END, page.engines),
    ]
    for path in (readme, explanation, engines):
        text = path.read_text(encoding="utf-8")
        for begin, end, made in tables:
            if begin in text:
                wanted[path] = text = with_table(text, made(), begin, end)
    stale = [path for path, content in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != content]
    for path in stale:
        if check:
            print(f"{path} doesn't fit the records in benchmarks/; renew it with `{COMMAND}`", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
    raise typer.Exit(int(check and bool(stale)))


class Page:
    """The page's text, and what it shows of each record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def written(self) -> str:
        """Return benchmarks/README.md."""
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
            autoescape=False,
        )
        names = {"record": self.record, "evaluation": self.evaluation, "certificate": self.certificate, "command": COMMAND}
        names["server"] = self.server
        names["engines"] = lambda: f"{self.engines()}\n\n{facts([ENGINES], self.read(ENGINES)['command'], None, None)}"
        return environment.get_template("benchmarks.md.jinja").render(names)

    def read(self, name: str) -> Any:
        """Return a record's content."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def record(self, name: str, tables: int | None = None) -> str:
        """Return the first tables of a record, all unless `tables` is given, and its facts."""
        record = self.read(name)
        parts = re.split(r"\n\n+", record["tables"] if "tables" in record else table(record["rows"]))
        ends = [index for index, part in enumerate(parts) if part.startswith("|")]
        if tables is not None and tables < len(ends):
            parts = [*parts[: ends[tables - 1] + 1], f"The record has {len(ends) - tables} more tables."]
        return "\n\n".join([*parts, facts([name], record["command"], record.get("code"), record.get("environment"))])

    def evaluation(
        self, *folders: str, command: str, code: str | None = None, temperature: float = 0.0, speeds: bool = True
    ) -> str:
        """Return the rows of evaluations at one temperature; without `speeds` where other work disturbed them.

        `code` is the git tag of the code that made them, if today's has other methods or options.
        """
        found = [row for folder in folders for row in self.read(f"{folder}/summary.json") if row["temperature"] == temperature]
        first = found[0]
        kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        suites = dict.fromkeys(row["suite"] for row in found)
        on = "" if len(suites) > 1 else f"{first['num_prompts']} prompts, "
        on += f"answers of at most {first['max_new_tokens']} tokens, {kind}"
        rows = []
        for row in found:
            suite = {"suite": row["suite"]} if len(suites) > 1 else {}
            cells = {**suite, "method": row["method"], "tokens per step": f"{row['tokens_per_step']:.2f}"}
            if speeds:
                seconds = row.get("draft_seconds_per_step")
                cells |= {
                    "tokens/s": f"{row['tokens_per_second']:,.0f}",
                    "speedup [95 %]": with_interval(row["speedup"], row["speedup_ci95"]),
                    "ceiling (computed)": f"{row['ceiling']:.2f}x" if row["ceiling"] else "-",
                    "drafter, ms per step": f"{1e3 * seconds:.1f}" if seconds else "-",
                }
            rows.append({**cells, "lossless": row.get("lossless_label") or ("yes" if row["lossless"] else "NO")})
        run = next((f"{folder}/run.json" for folder in folders if (self.folder / folder / "run.json").is_file()), None)
        environment = None if run is None else self.read(run)["environment"]
        named = [f"{name} ({next(row['num_prompts'] for row in found if row['suite'] == name)} prompts)" for name in suites]
        where = f"Suite {first['suite']}" if len(suites) == 1 else f"Suites {', '.join(named)}"
        text = f"{where}, {on}, batch size {first['batch_size']}, {first['dtype']}."
        names = [f"{folder}/summary.json" for folder in folders]
        shown = table(rows, text_columns=1 + (len(suites) > 1))
        return "\n\n".join([text, shown, facts(names, command, code, environment)])

    def certificate(self, name: str, command: str) -> str:
        """Return the lines of a certificate."""
        record = self.read(name)
        rows = [
            {"subject": line["subject"], "method": line["method"], "cases": line["num_cases"], "result": line["result"]}
            for line in record["lines"]
        ]
        verdict = "passed" if record["passed"] else "failed"
        rate = f"A sound decoder fails it with a probability of at most {record['false_alarm_rate']:.1e}."
        return "\n\n".join(
            [
                table(rows, text_columns=2),
                f"The certificate {verdict}. {rate}",
                facts([name], command, None, record["environment"]),
            ]
        )

    def server(self, name: str, command: str) -> str:
        """Return a check of a server: its verdict, what it accepts, and its speed with and without a drafter."""
        record = self.read(name)
        checks = [{"check": line["subject"], "cases": line["num_cases"], "result": line["result"]} for line in record["lines"]]
        drafts = [
            {
                "drafts": side,
                "steps": counts["all"]["steps"],
                "accepted by depth": " ".join(map(str, counts["all"]["by_depth"])),
            }
            for side, counts in record["drafts"].items()
        ]
        speeds = [
            {
                "at a time": speed["concurrency"],
                "": side,
                "tokens/s": f"{speed[f'{prefix}tokens_per_second']:.1f}",
                "ms per token": f"{1e3 * speed[f'{prefix}seconds_per_token']:.1f}",
                "first token, ms": f"{1e3 * speed[f'{prefix}first_token_seconds']:.0f}",
                "speedup [95 %]": "-" if prefix else with_interval(speed["speedup"], speed["speedup_ci95"]),
            }
            for speed in record["speeds"]
            for side, prefix in (("with", ""), ("without", "plain_"))
        ]
        tables = [table(rows, text_columns=columns) for rows, columns in ((checks, 1), (drafts, 1), (speeds, 2))]
        return "\n\n".join([f"{record['verdict']}.", *tables, facts([name], command, None, record["environment"])])

    def drafters(self) -> str:
        """Return the table of README and docs: all methods on the demo, and beside the grown target."""
        record = self.read(DRAFTERS)
        # 1. The grown target in its faster type.
        grown = [row for row in record["rows"] if row["part"] == "grown"]
        fastest = max((row for row in grown if row["method"] == "plain"), key=lambda row: row["tokens_per_second"])
        large = {row["method"]: row for row in grown if row["dtype"] == fastest["dtype"]}
        # 2. The table.
        demo = [row for row in record["rows"] if row["part"] == "demo"]
        rows = [
            {
                "method": row["method"],
                "tokens per step": f"{row['tokens_per_step']:.2f}",
                "the demo's target": with_interval(row["speedup"], row["speedup_ci95"]),
                f"grown to {fastest['size']} parameters": with_interval(beside["speedup"], beside["speedup_ci95"])
                if (beside := large.get(row["method"]))
                else "-",
            }
            for row in demo
        ]
        machine, first = record["environment"], demo[0]
        hardware = f"{machine['cpu']}, {machine['num_cpus']} cores, {device_name(machine)}"
        types = " and ".join(dict.fromkeys([first["dtype"], fastest["dtype"]]))
        settings = f"{types}, greedy, batch size {first['batch_size']}, {first['threads']} threads"
        return f"{table(rows)}\n\n{hardware}; {settings}."

    def chat_model(self) -> str:
        """Return the table of README: all methods on the chat model, by suite."""
        found = self.read(f"{CHAT_MODEL}/summary.json")
        machine = self.read(f"{CHAT_MODEL}/run.json")["environment"]
        suites, rows = list(dict.fromkeys(row["suite"] for row in found)), dict[str, dict[str, str]]()
        for row in found:
            cells = rows.setdefault(row["method"], {"method": row["label"], "tokens per step": f"{row['tokens_per_step']:.2f}"})
            cells[row["suite"]] = with_interval(row["speedup"], row["speedup_ci95"])
        numbers = [f"{name} {next(row['num_turns'] for row in found if row['suite'] == name)}" for name in suites]
        settings = f"{found[0]['dtype']}, greedy, at most {found[0]['max_new_tokens']} tokens, {machine['num_threads']} threads"
        hardware = f"{machine['cpu']}, {machine['num_cpus']} cores, {device_name(machine)}"
        note = f"Tokens per step are those of {suites[0]}. Number of answers: {', '.join(numbers)}."
        return f"{table([*rows.values()])}\n\n{hardware}; {settings}. {note}"

    def engines(self) -> str:
        """Return the table of exports in running engines: what they accept, and what outrider accepts."""
        record = self.read(ENGINES)
        # 1. One row for each drafter in an engine, with its chains.
        cells = dict[tuple[str, ...], list[dict[str, Any]]]()
        for row in record["rows"]:
            cells.setdefault((row["format"], row["drafter"], row["engine"]), []).append(row)
        rows = [
            {
                "format": f"`{form}`",
                "drafter": drafter,
                "ran in": engine,
                "text": "the same" if all(row["same_text"] for row in chains) else "DIFFERS",
                "accepted there": _accepted(chains, "there"),
                "accepted here": _accepted(chains, "here"),
                "in each answer": "the same" if all(row["same_counts"] for row in chains) else "DIFFERENT",
            }
            for (form, drafter, engine), chains in cells.items()
        ]
        # 2. The setting.
        chains = " and ".join(str(length) for length in dict.fromkeys(row["chain"] for row in record["rows"]))
        setting = (
            f"{record['num_prompts']} prompts, greedy answers of at most {record['max_new_tokens']} tokens, {record['dtype']}"
        )
        setting += f", chains of {chains} (DSpark: whole blocks)"
        return f"{table(rows, text_columns=4)}\n\nOn {record['date']}, on a CPU: {setting}."


def _accepted(chains: Sequence[dict[str, Any]], side: str) -> str:
    """Return how often each draft token was accepted; the steps where the engine counts nothing else."""
    if not all("by_depth" in row["there"] for row in chains):
        return "; ".join(f"{row[side]['steps']} steps" for row in chains)
    return "; ".join(" ".join(map(str, row[side]["by_depth"])) for row in chains)


def table(rows: Sequence[dict[str, Any]], *, text_columns: int = 1) -> str:
    """Return a Markdown table of rows with the same keys; its columns of numbers are set to the right."""
    rule = ["---" if index < text_columns else "---:" for index in range(len(rows[0]))]
    lines = [[*rows[0]], rule, *([str(cell) for cell in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def facts(names: Sequence[str], command: str, code: str | None, machine: dict[str, Any] | None) -> str:
    """Return a list of the records, the command that made them, and the machine."""
    links = ", ".join(f"[{name}]({name})" for name in names)
    lines = [f"- Record: {links}", f"- Command: `{command}`" + (f", at the git tag `{code}`" if code else "")]
    if machine is not None:
        packages = machine["packages"]
        lines.append(
            f"- Machine: {machine['cpu']}, {machine['num_cpus']} cores, {device_name(machine)}, threads: "
            f"{machine['num_threads']}, torch {packages['torch']}, transformers {packages['transformers']}"
        )
    return "\n".join(lines)


def device_name(machine: dict[str, Any]) -> str:
    """Return the accelerator of a machine, in words."""
    return "no GPU" if machine["device"] == "cpu" else str(machine["device"])


def with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    """Return a ratio with its interval; a dash where there is none."""
    if value is None:
        return "-"
    if interval is None or min(interval) == max(interval):
        return f"{value:.2f}x"
    return f"{value:.2f}x [{interval[0]:.2f}, {interval[1]:.2f}]"


def with_table(text: str, made: str, begin: str = BEGIN, end: str = END) -> str:
    """Return a text with the table between its markers. Raises ValueError where a marker is missing or repeated."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text must have the lines {begin} and {end} once each, in this order")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{made}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    typer.run(main)
