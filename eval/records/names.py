"""Names of a run's files and of plain decoding.

Whoever reads a finished run needs nothing heavier.
"""

BASELINE = "baseline"
"""Method name of plain decoding."""
OOM = "OOM"
"""What tables show in place of figures where memory ran out."""

RUN_FILE, RECORDS_FILE, FACTS_FILE = "run.json", "records.jsonl", "facts.json"
SUMMARY_FILE, TABLE_FILE = "summary.json", "table.md"
