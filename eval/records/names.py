"""Names of a run's files and of plain decoding.

This module imports nothing heavy, so that readers of a finished run start fast.
"""

BASELINE = "baseline"
"""Method name of plain decoding."""
PIPELINED = "pipelined"
"""Word for decoding that drafts while the stages of a target read."""
OOM = "OOM"
"""Text that tables show in place of figures where memory ran out."""

RUN_FILE, RECORDS_FILE, FACTS_FILE = "run.json", "records.jsonl", "facts.json"
SUMMARY_FILE, TABLE_FILE = "summary.json", "table.md"
