"""Names of a run's files and of plain decoding; whoever reads a finished run needs nothing heavier."""

BASELINE = "baseline"
"""Method name of plain decoding."""

RUN_FILE, RECORDS_FILE, SUMMARY_FILE, TABLE_FILE = "run.json", "records.jsonl", "summary.json", "table.md"
