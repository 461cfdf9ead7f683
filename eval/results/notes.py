"""The result of an evaluation in words: its headline, and its notes.

Notes describe what went wrong, and how to read the numbers. The table in the terminal, the file of
the table, the report and the card take their notes from here. A note is one line of plain text.
"""

from collections import Counter
from collections.abc import Sequence

from ...data.paths import TRAINING_FREE_NAMES
from ..records.names import BASELINE, OOM, title_of
from .figures import NOISY_SHARE, SLOW
from .lossless import LOSSY
from .rows import (
    Row,
    depends_on_clock,
    fault,
    group_name,
    is_broken,
    is_lossy,
    is_unproven,
    loop_share,
    row_name,
    speedup_text,
    units,
)

FEW_UNITS = 8
"""Number of prompts or batches below which a bootstrap interval means little."""
LOOP_SHARE = 0.1
"""Smallest share of answers with loops at which a note warns about them."""
NOT_DISTINGUISHABLE = "not distinguishable from plain decoding"
NOISY_NOTE = (
    f"noisy: more than {NOISY_SHARE:.0%} of the time, the method's or plain decoding's, is of slow answers. An answer is slow "
    f"if it took more than {SLOW:g} times its processor time (on a CPU), or the time of its fastest repeat. Measure again into "
    "another folder, while the machine is quiet."
)
LOSSY_NOTE = (
    f"{LOSSY}: typical acceptance (arXiv 2401.10774, section 2.3.1) changes the target's distribution. Its speedup can't be "
    "compared with that of a lossless method."
)
PACE_NOTE = (
    "pace: expected means that the draft trees depend on the clock. So tokens per step vary from run to run. The answers "
    "don't, apart from rounding noise. With pace: fixed tokens per step can be reproduced."
)
PIPELINED_NOTE = (
    "pipelined: the drafter drafts while the stages read earlier drafts. Several passes are under way at a time, so tokens per "
    "step bound no speedup, and there is no ceiling. Steps and passes depend on the clock, the answers don't."
)
SMALL_TARGET_BYTES = 100e6
SMALL_TARGET_NOTE = (
    "Small target: a pass over its weights takes so little time that drafting costs about as much as it saves. Beside a larger "
    "target the same tokens per step are a larger speedup."
)
SEVERAL, BONUS = "several", "bonus"
"""Names of the shares of draft tokens that several sources proposed, and of bonus tokens."""
SOURCES_NOTE = (
    "Sources: shares of the tokens that the steps emitted. A draft token counts for the source that proposed it, or as "
    f"{SEVERAL}. The {BONUS} token of a step is the target's; a step without accepted drafts emits only this one."
)


def headline(rows: Sequence[Row]) -> str:
    """Name the row with the highest speedup of a lossless method; count the rows without a valid one."""
    drafted = [row for row in rows if row["method"] != BASELINE]
    valid = [row for row in drafted if row["speedup"] is not None and not is_lossy(row)]
    if not valid:
        return f"No setting has a valid speedup.{_without_speed(drafted)}"
    best = max(valid, key=lambda row: row["speedup"] or 0.0)
    facts = [_verdict(best), _by_unit(best), f"{_number(best['tokens_per_step'])} tokens per step", _answers(best)]
    return f"{'; '.join(facts)} ({group_name(best)}).{_trained_part(valid)}{_without_speed(drafted)}"


def _trained_part(rows: Sequence[Row]) -> str:
    """Compare the fastest merge that has a trained drafter with the same merge without it, if both were measured."""
    names = [row["label"].partition(", ")[0] for row in rows]
    pairs = [
        (row, other, name.removesuffix(f" + {rest}"), rest)
        for row, name in zip(rows, names, strict=True)
        for other, rest in zip(rows, names, strict=True)
        if name.endswith(f" + {rest}") and group_name(row) == group_name(other)
    ]
    pairs = [pair for pair in pairs if pair[2] not in map(title_of, TRAINING_FREE_NAMES)]
    if not pairs:
        return ""
    row, other, trained, rest = max(pairs, key=lambda pair: (pair[0]["speedup"] or 0.0, len(pair[3])))
    return f" What {trained} adds to {rest}: {speedup_text(row)} with it, {speedup_text(other)} without it."


def includes_one(row: Row) -> bool:
    """Check whether the interval of a row's speedup includes 1, as printed."""
    low, high = row["speedup_ci95"] or (None, None)
    return low is not None and high is not None and round(low, 2) <= 1 <= round(high, 2)


def _verdict(row: Row) -> str:
    """Describe the speedup with its interval, and the setting that has it."""
    # 1. The setting in brackets, unless the label has some already.
    drafter, separator, setting = row["label"].partition(", ")
    name = f"{drafter} ({setting})" if separator and "(" not in row["label"] else row["label"]
    # 2. The speedup, and whether it differs from plain decoding's.
    speed = speedup_text(row) + " without interval" * (row["speedup_ci95"] is None)
    doubt = f", {NOT_DISTINGUISHABLE}" if includes_one(row) else ""
    if (row["speedup"] or 0.0) > 1:
        return f"Fastest: {speed} by {name}{doubt}"
    return f"Not faster than plain decoding: {speed} by {name} at best{doubt}"


def _by_unit(row: Row) -> str:
    """Describe the median and the number of prompts, or batches, in which the method is faster."""
    return f"median {_number(row['median_speedup'])}x, faster on {row['num_faster']} of {row['num_compared']} {units(row)}"


def _answers(row: Row) -> str:
    """Describe how the answers compare with plain decoding's."""
    if row["lossless"] is None:  # of earlier versions, whose drafters could draw at random
        return "answers not compared"
    if differing := row["num_mismatched_prompts"]:
        return f"answers to {differing} prompts differ within rounding noise"
    return "all answers identical"


def _without_speed(rows: Sequence[Row]) -> str:
    """Count the rows without a valid speed, by reason."""
    reasons = Counter(reason for row in rows if (reason := _reason(row)) is not None)
    if not reasons:
        return ""
    number = sum(reasons.values())
    listing = ", ".join(reasons if len(reasons) == 1 else (f"{count} {reason}" for reason, count in reasons.items()))
    return f" Without a valid speed: {number} row{'s' if number > 1 else ''} ({listing})."


def _reason(row: Row) -> str | None:
    """Return the reason why a row has no valid speedup; None if it has one."""
    if row["out_of_memory"]:
        return "out of memory"
    return fault(row) if is_broken(row) else "not lossless" if is_lossy(row) else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def notes(rows: Sequence[Row]) -> list[str]:
    """Write all notes: what went wrong, what was measured, and how to read the numbers."""
    return [*problems(rows), *measured_notes(rows), *explanations(rows)]


def problems(rows: Sequence[Row]) -> list[str]:
    """Say what went wrong, or misleads, the most important first."""
    measured = [row for row in rows if not row["out_of_memory"]]
    result = [mismatch_note(row) for row in measured if is_broken(row)]
    if left_out := [row for row in rows if row["out_of_memory"]]:
        result.append(f"{OOM}: memory ran out, so there are no figures of {'; '.join(map(row_name, left_out))}.")
        if any(row["method"] == BASELINE for row in left_out):
            result.append(f"{OOM} of plain decoding: without it no method has a speedup there.")
    if any(row["noisy"] for row in measured):
        result.append(NOISY_NOTE)
    result += [
        f"{row['num_skipped']} turns were SKIPPED ({group_name(row)}): too long for the context window of target or drafter."
        for row in measured
        if row["method"] == BASELINE and row["num_skipped"]
    ]
    if (looping := max(measured, key=loop_share, default=None)) is not None and loop_share(looping) >= LOOP_SHARE:
        result.append(loop_note(looping))
    bound = measured[0]["roofline"] if measured else None
    if bound is not None and bound["weight_bytes"] < SMALL_TARGET_BYTES and not bound["streamed"]:
        result.append(SMALL_TARGET_NOTE)
    if any(row["lossless_label"] == LOSSY for row in measured):
        result.append(LOSSY_NOTE)
    return result + [mismatch_note(row) for row in measured if row["first_mismatch"] and not is_broken(row)]


def measured_notes(rows: Sequence[Row]) -> list[str]:
    """Say what was measured: the prompts of each group, the target's placement, the sources of merges."""
    plain = [row for row in rows if row["method"] == BASELINE and not row["out_of_memory"]]
    measured = [row for row in rows if not row["out_of_memory"]]
    result = [group_note(row) for row in plain]
    result += [*stages_notes(rows), *(runs_note(row) for row in measured if row["runs"] and row["pipelined"])]
    if rows[0]["budget"]:
        result.append(budget_note(rows[0]))
        result += [
            f"{row_name(row)}: drafts during waits made verification {row['late_draft_seconds']:.2f} s later in all."
            for row in measured
            if row["late_draft_seconds"]
        ]
    if sources := [f"Sources of {row_name(row)}: {shares}." for row in measured if (shares := source_shares(row))]:
        result += [SOURCES_NOTE, *sources]
    return result


def explanations(rows: Sequence[Row]) -> list[str]:
    """Say how to read the numbers."""
    over = "/".join(dict.fromkeys(map(units, rows)))
    result = [
        "Tok/step: tokens emitted per step of the target, with the bonus token and without the prefill.",
        speed_note(rows),
        f"Median and Faster on: the median of the speedups of single {over}, and how many {over} were faster.",
        "CPU ms/tok: processor time of all threads per token; CPU speedup compares it with plain decoding's.",
        "Ceiling: Tok/step / (1 + rho), where rho is the drafter's time per step over a plain step's. Computed, not measured.",
        "Draft ms: the drafter's time per step. It and the shares of time come from a separate pass with phase timers on.",
    ]
    if rows[0]["budget"]:
        result.append("GB/tok: gigabytes of weights read from the target's files per token of the answers, prefill included.")
    if rows[0]["roofline"] is not None:
        result.append(roofline_note(rows[0]))
    if any(row["batch_size"] > 1 for row in rows):
        result.append(
            "Batches: Tok/step counts one answer, Tok/s the whole batch. The speedup compares with plain decoding in batches "
            "of the same prompts. Rounding depends on the other rows of a batch, so answers that differ are audited, as in "
            "low precision."
        )
    if any(row["temperature"] > 0 for row in rows):
        result.append(
            "Above temperature 0 all methods sample with the same seeds. A lossless method must give exactly the tokens "
            "of plain decoding, and each of its answers is compared."
        )
    return result + [PACE_NOTE] * any(map(depends_on_clock, rows))


def speed_note(rows: Sequence[Row]) -> str:
    """Say how speeds are computed, so that a reader can repeat it from the table."""
    number = rows[0]["num_repeats"]
    repeats = "" if number == 1 else f" Of the {number} repeats of an answer, the one with the median time counts."
    return (
        "Tok/s: tokens of all answers over the time of all answers, prefill included. Speedup: Tok/s over plain decoding's "
        f"Tok/s in the same group, which has the same answers.{repeats} The headline is the highest speedup of a lossless "
        f"method. The interval is a bootstrap over {'/'.join(dict.fromkeys(map(units, rows)))}."
    )


def mismatch_note(row: Row) -> str:
    """Describe the row's answers that differ from plain decoding's."""
    first, number = row["first_mismatch"], row["num_mismatched_prompts"]
    where = "" if first is None else f"the first at prompt {first['prompt_id']}, turn {first['turn'] + 1}"
    position = "" if first is None else f"{where}, token {first['position']} (counted from 0)"
    if is_unproven(row):
        reason = (
            f"memory ran out in the audits of answers to {row['num_unaudited']} prompts, {where}. To audit them, run the "
            "evaluation's command again with more free memory."
            if row["num_unaudited"]
            else "plain decoding is unproven there."
        )
        return f"{row_name(row)} is NOT PROVEN to be lossless, so it has no speedup: {reason}"
    if is_broken(row):
        reason = f"the answers to {number} prompts differ from plain decoding, {position}"
        reason = reason if first else "plain decoding is wrong there"
        return f"{row_name(row)} is NOT LOSSLESS, so it has no speedup: {reason}."
    return (
        f"{row_name(row)}: the answers to {number} prompts differ from plain decoding, {position}. An audit confirmed that "
        "rounding noise explains every difference."
    )


def loop_note(row: Row) -> str:
    """Describe the row's answers that end in a loop, and how they distort the figures."""
    return (
        f"Loops: {row['num_loops']} of {row['num_turns']} answers of {row_name(row)} end in a short cycle of tokens "
        f"({loop_share(row):.0%}). Loops are easy to draft, so tokens per step and speedup mean little for such answers."
    )


def too_few(row: Row) -> str:
    """Format a warning about intervals over few prompts or batches; empty for enough of them."""
    return f" Too few {units(row)} for a reliable interval: {row['num_batches']}." if row["num_batches"] < FEW_UNITS else ""


def group_note(row: Row) -> str:
    """Describe what was measured in the group of a row of plain decoding."""
    source = "" if row["prompt_set_source"] is None else f" of {row['prompt_set_source']}"
    repeats = f", each answered {row['num_repeats']} times" if row["num_repeats"] > 1 else ""
    weights = f" with quantised weights ({row['quantization']})" if row["quantization"] else ""
    batches = f", in {row['num_batches']} batches" if row["batch_size"] > 1 else ""
    return (
        f"{group_name(row)} (prompts {row['prompt_set_revision'][:12]}{source}): {row['num_prompts']} prompts, "
        f"{row['num_turns']} turns{repeats}, in {row['dtype']}{weights}{batches}; {row['num_truncated']} of {row['num_turns']} "
        f"plain answers ended at the limit of {row['max_new_tokens']} tokens.{too_few(row)}"
    )


def roofline_note(row: Row) -> str:
    """Describe the bound on plain decoding's speed; the row must have one."""
    bound = row["roofline"] or {}
    megabytes, speed = bound["weight_bytes"] / 1e6, bound["tokens_per_second"]
    if bound["streamed"]:
        return (
            f"Roofline of plain decoding: {megabytes:.1f} MB of weights read from files per pass at "
            f"{bound['bandwidth_gbs']:.2f} GB/s (the rate at which they were read): {speed:.3g} tokens/s."
        )
    cached = (
        f" The weights fit into the cache ({bound['cache_bytes'] / 1e6:.0f} MB), so main memory doesn't bound this target."
        if bound["fits_in_cache"]
        else ""
    )
    return (
        f"Roofline of plain decoding: {megabytes:.1f} MB of weights per token at {bound['bandwidth_gbs']:.1f} GB/s (measured "
        f"on a buffer of that size, at most 1 GiB; 4 GiB on an accelerator): {speed:.0f} tokens/s.{cached}"
    )


def budget_note(row: Row) -> str:
    """Describe the target's memory budget: its plan, the measured rate, and the peak of memory."""
    budget = row["budget"] or {}
    peak = budget["peak_bytes"]
    memory = "" if peak is None else f" Peak memory, with Python, torch and the drafters: {peak / 2**30:.2f} GiB."
    return f"Memory budget: {budget['plan']}. Weights were read at {budget['read_gbs']:.2f} GB/s.{memory}"


def stages_notes(rows: Sequence[Row]) -> list[str]:
    """Describe the target's stages, and pipelined methods, if there are any."""
    layers = rows[0]["stage_layers"] if rows else None
    if not layers:
        return []
    divided = f"{len(layers)} processes ({', '.join(map(str, layers))})" if len(layers) > 1 else "1 process"
    note = (
        f"Stages: the target's {sum(layers)} layers ran in {divided}, beside the one of embeddings, head and drafters. Times "
        "are wall times."
    )
    return [note, *([PIPELINED_NOTE] if any(row["pipelined"] for row in rows) else [])]


def runs_note(row: Row) -> str:
    """Describe the passes of a pipelined method."""
    runs = row["runs"] or {}
    mean, cancelled = runs["num_entries"] / runs["num_runs"], runs["num_cancelled_entries"] / runs["num_entries"]
    return (
        f"{row_name(row)}: {runs['num_runs']:,} passes of {mean:.1f} tokens on average; {cancelled:.0%} of these tokens were "
        "cancelled."
    )


def source_shares(row: Row) -> str:
    """Describe the shares of the emitted tokens by source: `ReDrafter 31 %, Suffix 20 %, several 9 %, bonus 40 %`.

    Tokens that an answer's end cut off count too. Empty for a drafter that isn't merged, and if there was no step.
    """
    counts, num_steps = row["accepted_by"], sum(row["accepted_histogram"])
    if counts is None or not num_steps:
        return ""
    shares = {title_of(name): count for name, count in counts.items() if "+" not in name}
    if len(shares) > 1:
        shares[SEVERAL] = sum(count for name, count in counts.items() if "+" in name)
    shares[BONUS] = num_steps
    return ", ".join(f"{name} {100 * count / sum(shares.values()):.0f} %" for name, count in shares.items())
