"""Tables of studies and benchmarks: single records of scripts/."""

from collections import defaultdict
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

from outrider.eval.results.marks import is_error, marks

from .pace import growth_rules
from .sampling import SAMPLING
from .scheduling import SCHEDULING
from .suffix import suffix_index
from .tables import Records, count, method_name, number, table, with_interval


def losses(records: Records, name: str) -> str:
    """Return tokens per step by training loss, over the seeds."""
    by_loss: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in records.read(name)["figures"]:
        by_loss[row["loss"], row["label_weights"]][row["seed"]] = row["tokens_per_step"]
    reference = by_loss["cross_entropy", "uniform"]
    rows = []
    for (loss, weights), values in sorted(by_loss.items(), key=lambda item: -mean(item[1].values())):
        over = [value - reference[seed] for seed, value in values.items()]
        rows.append(
            [
                f"`{loss}`",
                "all" if weights == "uniform" else "those reached",
                len(values),
                number(mean(values.values()), 3),
                f"{min(values.values()):.3f} to {max(values.values()):.3f}",
                f"{mean(over):+.3f} ({stdev(over):.3f})",
            ]
        )
    columns = ["`train.loss`", "labels that count", "seeds", "tokens per step, mean", "least to most"]
    return table([*columns, "over cross-entropy, seed by seed (deviation)"], rows, text_columns=2)


def labelling(records: Records, name: str) -> str:
    """Return the speed of labelling, and the comparison of its labels with those of `generate`."""
    record = records.read(name)
    rows = [
        ["positions labelled per second", number(record["positions_per_second"], 0)],
        ["the same labels by transformers' `generate`, in batches", number(record["generate_positions_per_second"], 1)],
        ["ratio", number(record["speedup_over_generate"], 0, "x")],
        ["share of positions where the target agrees with the text, a", number(record["agreement"])],
        ["work in plain prefills, measured", number(record["prefill_equivalents"])],
        ["work in plain prefills, expected: 1 + (1 - a)(T - 1)", number(record["expected_prefill_equivalents"])],
        ["positions whose labels differ", f"{record['num_mismatches']} of {record['num_compared']}"],
    ]
    return table(["labelling", "figure"], rows)


def stored_states(records: Records, name: str) -> str:
    """Return what storing the target's states in each type costs in accuracy and saves in time."""
    record = records.read(name)
    results = {(row["drafter"], row["shards"]): row for row in record["results"] if row["loss"] == "cross_entropy"}
    rows = []
    for shards in ("none", "bfloat16", "int8", "float8_e4m3fn"):
        errors = dict(record["relative_error"].get(shards, {}))
        last, layers = errors.pop("last_hidden", None), errors.values()
        spread = f"{min(layers):.4f} to {max(layers):.4f}" if layers else "-"
        steps = [number(results[kind, shards]["tokens_per_step"], 3) for kind in ("redrafter", "eagle3")]
        seconds = number(record["eagle3_step_seconds"][shards])
        loss = number(results["eagle3", shards]["validation_loss"], 3)
        rows.append(
            ["recomputed in every step" if shards == "none" else shards, number(last, 4), spread, *steps, loss, seconds]
        )
    columns = ["states", "relative error, last hidden states", "relative error, layers", "ReDrafter, tokens per step"]
    columns += ["EAGLE-3, tokens per step", "EAGLE-3, validation loss", "EAGLE-3, seconds per step"]
    return table(columns, rows)


def teachers(records: Records, name: str) -> str:
    """Return tokens per step of ReDrafters that learn by KL, by what teaches them."""
    names = {"bfloat16": "the whole distribution"}
    rows = [
        [
            names.get(row["shards"], f'the {row["shards"].removeprefix("top_")} likeliest tokens and "any other"'),
            number(row["validation_loss"]),
            number(row["tokens_per_step"], 3),
        ]
        for row in records.read(name)["results"]
        if row["loss"] == "kl"
    ]
    return table(["teacher", "validation loss, against the whole distribution", "tokens per step"], rows)


def loss_memory(records: Records, name: str) -> str:
    """Return the peak memory of the training loss in chunks and of all logits at once."""
    cases = [case for case in records.read(name)["cases"] if case["loss"] != "step"]
    sizes = list(dict.fromkeys((case["vocab"], case["labels"]) for case in cases))
    words = {"chunks": "in chunks, as drafters are trained", "whole": "of all logits at once"}
    rows = []
    for loss, method in dict.fromkeys((case["loss"], case["method"]) for case in cases):
        of_row = {(case["vocab"], case["labels"]): case for case in cases if (case["loss"], case["method"]) == (loss, method)}
        rows.append([f"`{loss}`, {words[method]}", *(_memory(of_row[size]) for size in sizes)])
    return table(["peak memory in MiB", *(f"{vocab:,} tokens, {labels:,} labels" for vocab, labels in sizes)], rows)


def step_memory(records: Records, name: str) -> str:
    """Return the peak memory of whole training steps of an EAGLE drafter."""
    cases = [case for case in records.read(name)["cases"] if case["loss"] == "step"]
    words = {"chunks": "loss in chunks", "whole": "loss of all logits at once", "anew": "recomputed", "kept": "kept"}
    vocabs = list(dict.fromkeys(case["vocab"] for case in cases))
    rows = []
    for method, kept in dict.fromkeys((case["method"], case["activations"]) for case in cases):
        of_row = {case["vocab"]: case for case in cases if (case["method"], case["activations"]) == (method, kept)}
        rows.append([f"{words[method]}, activations {words[kept]}", *(_memory(of_row[vocab]) for vocab in vocabs)])
    return table(["peak memory in MiB", *(f"{vocab:,} tokens" for vocab in vocabs)], rows)


def _memory(case: dict[str, Any]) -> str:
    return number(case["peak_mib"], 0) if "peak_mib" in case else f"not run: {case['skipped'].split(',')[0]}"


def training_speed(records: Records, name: str) -> str:
    """Return tokens of text per second of the processor, for each way of training."""
    record = records.read(name)
    arms = list(record["cases"][0]["rates"])
    rows = []
    for case in record["cases"]:
        rates = {arm: case["rates"][arm]["tokens_per_processor_second"] for arm in arms}
        positions = case["max_positions"]
        of_step = "every labelled position" if positions is None else f"{positions} positions"
        speeds = [number(rates[arm], 0) + f" ({rates[arm] / rates[arms[0]]:.1f}x)" * (arm != arms[0]) for arm in arms]
        rows.append([f"{method_name(case['kind']).replace('EAGLE-2', 'EAGLE-1')}, {of_step}", *speeds])
    words = {"stored": "ours, states stored", "made anew": "ours, states recomputed", "packed": "ours, recomputed and packed"}
    return table(["tokens/s", *(words.get(arm, arm) for arm in arms)], rows)


def padding(records: Records, *names: str) -> str:
    """Return the share of padding in batches, by batch size."""
    rows = []
    for name in names:
        record = records.read(name)
        data = "code" if record["settings"]["data"] is None else "chats"
        for size, shares in record["padding"].items():
            label = f"{data} of up to {record['settings']['max_length']:,} tokens, batches of {size}"
            rows.append([label, *(number(share) for share in shares.values())])
    return table(["share of padding", *shares], rows)


def plain_decoding(records: Records, name: str) -> str:
    """Return the seconds of other ways to decode plainly over ours, by number type and threads."""
    words = {
        "rows first": "layers as transformers computes them",
        "packed": "every layer packed",
        "transformers": "transformers' `generate`",
    }
    rows = [
        [
            cell["dtype"],
            str(cell["threads"]),
            number(cell["tokens_per_second"]["ours"], 0),
            *(number(cell["wall"][way]["median_over_ours"], 2) for way in words),
        ]
        for cell in records.read(name)["cells"]
    ]
    return table(["plain decoding", "threads", "tokens/s", *(f"seconds of {text}, over ours" for text in words.values())], rows)


def sizes(records: Records, name: str) -> str:
    """Return the speedup of each method over the fastest plain decoding, by the target's size."""
    tables = []
    rows = records.read(name)["rows"]
    for dtype, threads in dict.fromkeys((row["dtype"], row["threads"]) for row in rows):
        cells = {(row["method"], row["size"]): row for row in rows if (row["dtype"], row["threads"]) == (dtype, threads)}
        columns = list(dict.fromkeys(size for _, size in cells))
        lines = []
        for method in dict.fromkeys(method for method, _ in cells):
            of_method = [cells.get((method, size)) for size in columns]
            steps = next((row["tokens_per_step"] for row in of_method if row is not None), None)
            speedups = ["-" if row is None else _speedup_by_size(row) for row in of_method]
            lines.append([method, number(steps), *speedups])
        title = f"{dtype}, {count(threads, 'thread')}:"
        tables.append(f"{title}\n\n{table(['method', 'tokens per step', *columns], lines)}")
    return "\n\n".join(tables)


def _speedup_by_size(row: dict[str, Any]) -> str:
    """Format a speedup with its marks; an error of measurement has no speed."""
    if is_error(row):
        return "error"
    return ", ".join([with_interval(row["speedup"], row["speedup_ci95"], "x"), *marks(row)])


def step_parts(records: Records, name: str) -> str:
    """Return the milliseconds of the parts of a step, by drafter, here and in an older checkout."""
    measured = records.read(name)["milliseconds_per_step"]
    rows = [
        [setting, *(number(parts[part], 2) for part in ("draft", "linears", "forward", "rest")), checkout]
        for setting in measured["here"]
        for checkout, parts in (("this", measured["here"][setting]), ("older", measured.get("against", {}).get(setting)))
        if parts
    ]
    return table(["drafter", "draft, ms", "its matrix products", "the target's pass", "rest", "version"], rows)


def batches(records: Records, name: str) -> str:
    """Return tokens per second of our loop and of transformers' by batch size."""
    cells = records.read(name)["decoding"]
    words = {
        "plain": "plain, our loop",
        "transformers": "plain, transformers' `generate`",
        "chain": "chain from a draft model, our loop",
        "assisted": "the same, transformers' assisted generation",
    }
    rows = [
        [words[arm], *(number(cell["tokens_per_second"].get(arm), 0).replace("-", "not supported") for cell in cells)]
        for arm in words
    ]
    return table(["tokens/s", *(f"batch size {cell['batch']}" for cell in cells)], rows)


def overhead(records: Records, name: str) -> str:
    """Return what a step costs beside the bare forward pass, in a sentence."""
    ratio = records.read(name)["overhead"]["ratio_of_medians"]
    return f"A step over a tree takes {ratio:.2f} times as long as the bare forward pass over the same tokens."


def certificate(records: Records, name: str) -> str:
    """Return the lines of a certificate."""
    record = records.read(name)
    rows = [[line["subject"], line["method"], line["num_cases"], line["result"]] for line in record["lines"]]
    verdict = "passed" if record["passed"] else "failed"
    text = (
        f"The certificate {verdict}. A sound decoder fails it with a probability of at most {record['false_alarm_rate']:.1e}."
    )
    return table(["subject", "method", "cases", "result"], rows, text_columns=2) + f"\n\n{text}"


def regenerated_texts(records: Records, name: str) -> str:
    """Return tokens per step of drafters, by the texts that they learned from."""
    rows = [
        [
            row["texts"],
            number(row["num_examples"], 0),
            number(row["num_positions"], 0),
            number(row["agreement"]),
            number(row["tokens_per_step"]),
            with_interval(row["ratio"], row["ratio_ci95"]),
        ]
        for row in records.read(name)["figures"]
    ]
    columns = ["trained on", "texts", "labelled positions", "target agrees with the text", "tokens per step"]
    return table([*columns, "over the data's own texts, by prompt [95 %]"], rows)


def regeneration(records: Records, name: str) -> str:
    """Return tokens per second of the engines that regenerate answers."""
    rows = []
    for run in records.read(name)["runs"]:
        options = run["options"]
        kind = "greedy" if options["temperature"] == 0 else f"temperature {options['temperature']:g}"
        for engine in run["engines"]:
            ratios = engine["ratio_per_processor_second_by_round"]
            rows.append(
                [
                    f"`{engine['engine']}`, {count(run['num_requests'], 'prompt')}, batches of {options['batch_size']}, {kind}",
                    number(engine["tokens_per_processor_second"], 0),
                    with_interval(engine["ratio_per_processor_second"], (min(ratios), max(ratios)), "x"),
                    engine["answers_unlike_plain"],
                ]
            )
    columns = ["engine", "tokens per second of the processor", "times the plain decoder [range of rounds]"]
    return table([*columns, "answers that differ from the plain decoder's"], rows)


def adaptation(records: Records, name: str) -> str:
    """Return the steps that warm and cold starts take to levels of the full training."""
    record = records.read(name)
    figures = record["figures"]
    rows = []
    for arm in record["arms"]:
        at_once = " / ".join(number(figure["unadapted"]) for figure in figures) if arm.startswith("warm") else "-"
        levels = [" / ".join(_reached(figure["reached"][arm][level]) for figure in figures) for level in ("0.9", "0.95", "1")]
        ends = " / ".join(number(figure["curves"][arm][-1]["tokens_per_step"]) for figure in figures)
        rows.append([f"{arm}, {record['arms'][arm]['steps']} steps", at_once, *levels, ends])
    columns = ["start, by seed", "before any step", *(f"steps (tokens read) to {level}" for level in ("90 %", "95 %", "100 %"))]
    return table([*columns, "tokens per step at the end"], rows)


def _reached(level: dict[str, Any] | None) -> str:
    return "not reached" if level is None else f"{level['step']} ({level['text_tokens'] / 1000:.0f}k)"


def target_change(records: Records, name: str) -> str:
    """Return how far the target changed, in a sentence."""
    record = records.read(name)
    tuning, before = record["fine_tuning"], record["original_tokens_per_step"]
    return (
        f"Fine-tuning took {count(tuning['steps'], 'step')}, from {tuning['loss_before']:.2f} to "
        f"{tuning['loss_after']:.2f} nats a token. The drafter had {before:.2f} tokens per step with the original target."
    )


def checkpoints(records: Records, name: str) -> str:
    """Return what a checkpoint costs by the way it is written."""
    record = records.read(name)
    words = {"save_state": "accelerate's `save_state`", "at_once": "at once", "background": "in the background (the default)"}
    rows = [
        [words[method], number(cost["held_up_seconds"], 1), number(cost["extra_seconds"], 1)]
        for method, cost in record["methods"].items()
        if method in words
    ]
    text = f"{record['parameters'] / 1e6:.0f} million parameters with AdamW's state, {record['step_seconds']:.1f} s a step."
    columns = ["a checkpoint", "training waits, seconds", "cycle takes longer by, seconds"]
    return f"{text}\n\n{table(columns, rows)}"


STUDIES: dict[str, Callable[..., str]] = {
    **SAMPLING,
    **SCHEDULING,
    **{
        function.__name__: function
        for function in (
            losses,
            labelling,
            stored_states,
            teachers,
            loss_memory,
            step_memory,
            training_speed,
            padding,
            plain_decoding,
            sizes,
            step_parts,
            suffix_index,
            batches,
            overhead,
            certificate,
            regenerated_texts,
            regeneration,
            adaptation,
            target_change,
            checkpoints,
            growth_rules,
        )
    },
}
