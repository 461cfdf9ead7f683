"""Write benchmarks/README.md, and the tables of drafters in README and docs, from the records.

    python scripts/make_benchmarks_page.py           # write all
    python scripts/make_benchmarks_page.py --check   # exit with 1 where a file differs from what would be written

The text around the tables is benchmarks_page/page.md.jinja, which contains no measured number.
"""

import argparse
import sys
from pathlib import Path

from benchmarks_page.free_drafts import FREE_DRAFTS, FREE_STUDY, free_table
from benchmarks_page.printed import PRINTED
from benchmarks_page.studies import STUDIES
from benchmarks_page.summaries import SUMMARIES, drafters_table
from benchmarks_page.tables import Records
from jinja2 import Environment, FileSystemLoader, StrictUndefined

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- table of drafters: begin -->", "<!-- table of drafters: end -->"
FREE_PAGE = ROOT / "docs" / "explanation" / "free-drafts.md"
COMMAND = "make benchmarks"


def main() -> None:
    """Write the page and the tables of README and docs, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=ROOT / "benchmarks", help="folder of the records")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file with the markers of the table")
    parser.add_argument("--free-page", type=Path, default=FREE_PAGE, help="file with the markers of the same table in docs/")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file is out of date")
    options = parser.parse_args()

    records = Records(options.records)
    wanted = {options.records / "README.md": page(records)}
    has_free = records.has(FREE_STUDY)
    tables = {
        options.readme: free_table(records) if has_free else drafters_table(records),
        options.free_page: free_table(records) if has_free else "",
    }
    for path, made in tables.items():
        if BEGIN in (text := path.read_text(encoding="utf-8")):
            wanted[path] = with_table(text, made)
    if options.check:
        sys.exit(report_stale(wanted))
    for path, content in wanted.items():
        path.write_text(content, encoding="utf-8")


def page(records: Records) -> str:
    """Return benchmarks/README.md."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "benchmarks_page"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made = {**SUMMARIES, **STUDIES, **FREE_DRAFTS, **PRINTED}
    functions = {name: records.bound(function) for name, function in made.items()}
    return environment.get_template("page.md.jinja").render(facts=records.facts, has=records.has, command=COMMAND, **functions)


def with_table(text: str, table: str) -> str:
    """Return a text with the table between its markers.

    Raises ValueError where a marker is missing or repeated.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text must have the lines {BEGIN} and {END} once each, in this order")
    before, rest = text.split(BEGIN)
    lines = f"{table}\n" if table else ""
    return f"{before}{BEGIN}\n{lines}{END}{rest.split(END)[1]}"


def report_stale(wanted: dict[Path, str]) -> int:
    """Print which files are out of date and what renews them; return an exit status."""
    stale = [path for path, content in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != content]
    for path in stale:
        print(f"{path} doesn't fit the records in benchmarks/; renew it with `{COMMAND}`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    main()
