"""A target in stages, in the notes of tables: how it was divided, and what was cancelled."""

from collections.abc import Sequence

from .rows import Row, decoding_name, method_name

PIPELINED_NOTE = (
    "pipelined: the drafter drafts while the target's stages read earlier drafts. A step is a pass of the target that emitted "
    "tokens. Several passes are under way at a time, so tokens per step bound no speedup, and there is no ceiling. What is "
    "drafted depends on the clock, and so do steps and passes. The answers don't, apart from rounding noise."
)
SHORT_NOTE = "Pipelined: several passes are under way, so tokens per step bound no speedup."


def stages_note(row: Row) -> str:
    """Describe the target's stages; empty for a target in one process."""
    layers = row.get("stage_layers")
    if not layers:
        return ""
    divided = f"{len(layers)} processes ({', '.join(map(str, layers))})" if len(layers) > 1 else "1 process"
    return (
        f"Stages: the target's {sum(layers)} layers ran in {divided}, beside the one of embeddings, head and drafters. Times "
        "are wall times."
    )


def stages_notes(rows: Sequence[Row]) -> list[str]:
    """Describe the target's stages, and the pipelined methods if there are any."""
    notes = [stages_note(rows[0])] if rows else []
    return [*filter(None, notes), *([PIPELINED_NOTE] if pipelined_rows(rows) else [])]


def pipelined_rows(rows: Sequence[Row]) -> list[Row]:
    """Select the rows of pipelined methods."""
    return [row for row in rows if row.get("pipelined")]


def runs_note(row: Row) -> str:
    """Describe the passes of a pipelined method; empty without their counts."""
    runs = row.get("runs")
    if not runs or not runs["num_runs"]:
        return ""
    cancelled = runs["num_cancelled_entries"] / runs["num_entries"]
    return (
        f"{method_name(row)} on {row['suite']} ({decoding_name(row)}): {runs['num_runs']:,} passes of "
        f"{runs['num_entries'] / runs['num_runs']:.1f} tokens on average; {cancelled:.0%} of these tokens were cancelled."
    )
