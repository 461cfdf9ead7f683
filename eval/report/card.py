"""Model card of a drafter.

This is the page that the Hub shows, with the figures of evaluations and other facts. Every figure
comes from a file of the run that measured it, and only from runs with exactly these weights. Facts
without a file are left out, or reported as unknown.
"""

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from pydantic import ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from ...data.fields import OPTIONS, PositiveInt, problems_of
from ...data.files import read_dataclass, read_json, sha256_file
from ...data.manifest import MANIFEST_FILE, STATS_FILE, LabelTotals
from ...data.shards import label_store
from ...models.drafters.losses import LossChoice, check_loss, describe_loss
from ...models.drafters.saved.download import HUB_ID
from ...models.drafters.saved.folder import WEIGHTS_FILE, DrafterFile, read_drafter_config, read_training_facts, tensor_names
from ...models.drafters.saved.parts import DrafterParts, parse_drafter_name
from ...models.export.certificate_file import Certificate, read_certificate
from ...models.export.package import packaged_folder
from ..records.labels import TITLES, title_of
from ..records.names import BASELINE, FACTS_FILE, SUMMARY_FILE
from ..results.markdown import Markdown, code_span
from ..results.notes import NOISY_NOTE, PACE_NOTE, stages_notes
from ..results.rows import Row, decoding_name, depends_on_clock, fault, is_broken
from ..results.tables import markdown_table
from .card_code import recorded_quantization, render_card
from .card_options import TAGS, CardOptions, code_names, require_plain_options
from .card_settings import describe_setting
from .fastest_call import fastest_call
from .runs import Run, cell_of, read_run
from .training_free_card import training_free_card

PLAIN_NAME = re.compile(r"[\w][\w .@/+-]*")
"""Valid name of a target that isn't on the Hub."""
DATA_SUFFIXES = frozenset({".csv", ".gz", ".json", ".jsonl", ".parquet", ".txt", ".zst"})
UNSERVED = frozenset({"layer.self_attn.q_norm.weight", "layer.self_attn.k_norm.weight"})
"""Weights of an EAGLE layer that no format supports."""
CERTIFICATE_HEADS = ("What", "How", "Cases", "Result", "Verdict")
STDLIB = "modules of Python's standard library"


@pydantic_dataclass(frozen=True, kw_only=True, config=OPTIONS)
class RunData:
    """Options of a run's data that its card shows."""

    source: str
    path: str | None
    max_length: PositiveInt
    chat_template: str | None = None


def model_card(name: Path | DrafterParts, options: CardOptions) -> str:
    """Write the text of README.md.

    Raises ValueError for evaluations, a run or a certificate that belong to another drafter or
    target.
    """
    # 1. Read the drafter's folder.
    parts = parse_drafter_name(name)
    drafter = packaged_folder(parts)
    if drafter is None:
        return training_free_card(parts, options)
    saved, facts = read_drafter_config(drafter), read_training_facts(drafter)
    if saved.kind not in TITLES:
        raise ValueError(f"{drafter} holds a drafter of the kind {saved.kind!r}; there are: {', '.join(TITLES)}")
    require_plain_options(saved.drafter, drafter)  # the card's commands contain some of them
    tensors = tensor_names(drafter / WEIGHTS_FILE)  # raises if the file is truncated
    weights = sha256_file(drafter / WEIGHTS_FILE)
    named = saved.target.name if HUB_ID.fullmatch(saved.target.name) else None
    base_model = options.base_model or named
    local_name = Path(saved.target.name).name if PLAIN_NAME.fullmatch(saved.target.name) else "target"
    target = base_model or local_name
    quantization = options.quantization or recorded_quantization(saved.target)
    title = f"{title_of(parts.kind)} for {target}"
    # 2. Read evaluations and certificate of exactly these weights.
    folders = {path.resolve(): path for path in options.evaluations}  # without duplicates
    runs = [_unchanged(read_run(path, path.name)) for path in folders.values()]
    figures = {run.directory: _require_rows(run, weights) for run in runs}
    merged_with = [part.name for part in parts.parts if part.folder is None]
    certificate = _read_certificate(options.certificate, saved, weights)
    is_broken_somewhere = any(is_broken(row) for rows in figures.values() for row in rows)
    results = [result for run in runs for row in figures[run.directory] for result in _results(row, run, saved)]
    data_lines = [] if options.run is None else _data(options.run, saved, weights)
    run_data = None if options.run is None else _run_sections(options.run / "config.yaml", "")[0]
    # 3. Write the page, and the metadata that the Hub reads.
    data = ModelCardData(
        base_model=base_model,
        license=options.licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, saved.kind.replace("_", "-")],
        model_name=(options.repo or title) if results else None,
        eval_results=results or None,
    )
    return render_card(
        "card.md.jinja",
        data,
        title=title,
        target=target,
        lossless=not is_broken_somewhere and (certificate is None or certificate.passed),
        programs=() if options.programs is None and UNSERVED.intersection(tensors) else options.programs,
        **code_names(options, base_model, local_name, quantization),
        merged_with=merged_with,
        fastest=fastest_call([(run, row) for run in runs for row in figures[run.directory]], merged_with),
        has_own_template=run_data is not None and run_data.chat_template is None,
        measurements=[_measurement(run, figures[run.directory], saved) for run in runs],
        certificate=certificate,
        certificate_table=markdown_table(_certificate_lines(certificate), left=CERTIFICATE_HEADS) if certificate else "",
        saved=saved,
        facts=facts,
        size=(drafter / WEIGHTS_FILE).stat().st_size,
        drafter_options=_options(saved.drafter),
        data=data_lines,
        licence=options.licence,
    )


# --- figures


def _unchanged(run: Run) -> Run:
    """Return the run. Raises ValueError if its summary was changed after the evaluation ended."""
    facts = read_json(run.directory / FACTS_FILE) if (run.directory / FACTS_FILE).is_file() else None
    if not isinstance(facts, dict) or facts.get("summary_sha256") != sha256_file(run.directory / SUMMARY_FILE):
        raise ValueError(
            f"{SUMMARY_FILE} in {run.directory} isn't the one that its evaluation wrote ({FACTS_FILE} has another digest, or "
            "none), so the card can't show its figures. Run the evaluation's command again, which writes it from the records"
        )
    return run


def _require_rows(run: Run, weights: str) -> list[Row]:
    """Select the rows of one evaluation that were measured with these weights.

    Raises ValueError if there are none.
    """
    rows, methods = _rows_of(run, weights), run.info.config["methods"]
    if not rows and weights in (method["weights"] for method in methods.values()):
        raise ValueError(
            f"this drafter ran out of memory everywhere in {run.directory}, so it has no figures there; omit this evaluation"
        )
    if not rows:
        raise ValueError(
            f"{run.directory} measured other weights ({', '.join(methods) or 'no drafter'}); give an evaluation of this "
            "drafter with its present weights"
        )
    return rows


def rows_of(evaluation: Path, drafter: Path) -> list[Row]:
    """Read the rows of an evaluation that were measured with this drafter's weights."""
    return _rows_of(read_run(evaluation, evaluation.name), sha256_file(drafter / WEIGHTS_FILE))


def _rows_of(run: Run, weights: str) -> list[Row]:
    """Select rows with figures of these weights; rows that ran out of memory have none."""
    methods = run.info.config["methods"]
    return [row for row in run.rows if methods.get(row["method"], {}).get("weights") == weights and not row["out_of_memory"]]


def _measurement(run: Run, rows: Sequence[Row], saved: DrafterFile) -> dict[str, Any]:
    """Collect the figures of one evaluation, and the environment of the measurement."""
    environment, config = run.info.environment, run.info.config
    threads = f"{environment.num_threads} thread{'s' if environment.num_threads > 1 else ''}"
    return {
        "table": markdown_table([_line(row, run, saved) for row in rows], left=("Prompts", "Decoding", "Setting", "Identical")),
        "device": f"{environment.cpu}, {threads}" if environment.device == "cpu" else environment.device,
        "form": "" if config["target"]["form"] == "eager" else f" ({config['target']['form']})",
        "dtype": run.info.dtype,
        "linears": ", linear layers in the fastest layouts for this processor" if environment.linears else "",
        "max_new_tokens": config["max_new_tokens"],
        "notes": " ".join([*([PACE_NOTE] if any(map(depends_on_clock, rows)) else []), *stages_notes(rows)]),
        "noise": NOISY_NOTE if any(row["noisy"] for row in rows) else "",
        "python": environment.python,
        "packages": ", ".join(f"{name} {number}" for name, number in environment.packages.items()),
    }


def _line(row: Row, run: Run, saved: DrafterFile) -> dict[str, str]:
    (plain,) = [
        other for other in run.rows if other["method"] == BASELINE and cell_of(other)[:-1] == cell_of(row)[:-1]
    ]  # every group of rows has one
    return {
        "Prompts": f"{row['suite']} ({row['num_prompts']})",
        "Decoding": decoding_name(row),
        "Setting": describe_setting(row, run, saved),
        "Tokens per step": _with_interval(row["tokens_per_step"], row["tokens_per_step_ci95"]),
        "Speedup": _speedup(row),
        "Median (faster on)": _median(row),
        "Tokens/s (plain)": f"{row['tokens_per_second']:.1f} ({plain['tokens_per_second']:.1f})",
        "Identical": row["lossless_label"],
    }


def _speedup(row: Row) -> str:
    if is_broken(row):
        return f"none: {fault(row)}"
    return _with_interval(row["speedup"], row["speedup_ci95"], "x") + ", noisy" * row["noisy"]


def _median(row: Row) -> str:
    compared, median = row["num_compared"], row["median_speedup"]
    if median is None or is_broken(row):
        return "-"
    return f"{median:.2f}x ({row['num_faster']} of {compared})"


def _results(row: Row, run: Run, saved: DrafterFile) -> list[EvalResult]:
    """Convert a row's figures to the Hub's format.

    The list is empty if the answers weren't the target's. A noisy speedup is left out, since the
    Hub would show it without this mark.
    """
    if is_broken(row):
        return []
    dataset, _, revision = (row["prompt_set_source"] or row["suite"]).partition("@")
    figures = {"tokens_per_step": "Tokens per step", "speedup": "Speedup over plain decoding"}
    values: dict[str, Any] = {**row}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=row["suite"],
            dataset_revision=revision or None,
            metric_type=name,
            metric_name=f"{title}, {decoding_name(row)}, {describe_setting(row, run, saved)}",
            metric_value=round(values[name], 2),
        )
        for name, title in figures.items()
        if values[name] is not None and not (name == "speedup" and row["noisy"])
    ]


def _with_interval(value: float | None, interval: Sequence[float] | None, unit: str = "") -> str:
    if value is None:
        return "unknown"
    return f"{value:.2f}{unit}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _read_certificate(path: Path | None, saved: DrafterFile, weights: str) -> Certificate | None:
    """Read a certificate of this drafter and its target.

    Raises ValueError for another drafter's or target's certificate.
    """
    if path is None:
        return None
    certificate = read_certificate(path)
    if (drafters := certificate.drafters) and weights not in drafters.values():
        raise ValueError(f"{path} certifies decoding with other drafters ({', '.join(drafters)}); give one of this drafter")
    if certificate.weights_sha256 not in (None, saved.target.weights_sha256):
        raise ValueError(
            f"{path} certifies decoding with another target ({certificate.target}); give one of this drafter's target"
        )
    return certificate


def _certificate_lines(certificate: Certificate) -> list[dict[str, str]]:
    verdicts = {True: "pass", False: "FAIL", None: "none claimed"}
    texts = [(line.subject, line.method, str(line.num_cases), line.result, verdicts[line.passed]) for line in certificate.lines]
    return [dict(zip(CERTIFICATE_HEADS, line, strict=True)) for line in texts]


# --- the drafter, its data and its cost


def _options(drafter: dict[str, Any]) -> Markdown:
    options = {name: value for name, value in drafter.items() if value is not None and not isinstance(value, dict)}
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    return Markdown(", ".join(code_span(f"{name}: {text}") for name, text in texts.items()))


def _data(run: Path, saved: DrafterFile, weights: str) -> list[Markdown]:
    """Describe the data of a training run.

    Raises ValueError for a run that trained another drafter.
    """
    # 1. Find the run, or its variant, that trained this drafter.
    config_path, homes = run / "config.yaml", [run, *sorted(run.glob("variants/*"))]
    weights_of_home = {home: path for home in homes if (path := home / "drafter" / WEIGHTS_FILE).is_file()}
    if not config_path.is_file() or not weights_of_home:
        raise ValueError(f"{run} is not the folder of a finished run: it has no config.yaml, or no drafter/{WEIGHTS_FILE}")
    home = next((home for home, path in weights_of_home.items() if sha256_file(path) == weights), None)
    if home is None:
        raise ValueError(f"the drafter of {run} has other weights than this one; give the run that trained it")
    data, drafter, loss = _run_sections(config_path, "" if home == run else home.name)

    # 2. Describe the texts. A data set of the Hub is named; a path of the user's machine is not.
    source = _public(data.path, run)
    form = STDLIB if data.source == "stdlib" else Markdown("texts in the form {}").format(code_span(data.source))
    texts = Markdown("Data: {}, cut at {} tokens").format(source or form, data.max_length)
    chat = "the target's own" if data.chat_template is None else Path(data.chat_template).name
    lines = [texts, Markdown("Chat template: {}").format(chat)]

    # 3. Describe the labels, the loss and the initial weights.
    if (run / "distill" / MANIFEST_FILE).is_file():
        manifest = label_store(run / "distill").load()
        manifest.require_target(saved.target)
        num_texts = sum(len(shard.ids) for shard in manifest.shards)
        lines[0] = Markdown("{}: {:,} texts of {:,} tokens, {:,} positions labelled with the target's next {} tokens").format(
            texts, num_texts, manifest.num_tokens, manifest.num_labels, manifest.horizon
        )
    if (stats := run / "distill" / STATS_FILE).is_file():
        seconds = read_dataclass(LabelTotals, stats).process_seconds
        lines.append(Markdown("Labelling: {:,.0f} s, summed over processes").format(seconds))
    if loss is not None:
        lines.append(Markdown("Loss: {}").format(code_span(describe_loss(loss))))
    if (start := drafter.get("start_from") or drafter.get("path")) is not None:
        trained = _public(str(start), run) or "a trained model"
        lines.append(Markdown("Started from: the weights of {}, not from random ones").format(trained))
    return lines


def _run_sections(path: Path, variant: str) -> tuple[RunData, dict[str, Any], LossChoice | None]:
    """Read the data, the drafter and the loss of a run's configuration, or of one of its variants."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        changes = config["variants"][variant] if variant else {}
        train = {**config.get("train", {}), **changes.get("train", {})}
        names = [field.name for field in fields(RunData) if field.name in config["data"]]
        data = RunData(**{name: config["data"][name] for name in names})
        loss = check_loss(train["loss"]) if "loss" in train else None
        return data, {**config["drafter"], **changes.get("drafter", {})}, loss
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(problems_of(error, 'data'))}; restore it") from error
    except (yaml.YAMLError, UnicodeDecodeError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not the configuration of a run ({type(error).__name__}: {error}); restore it") from error


def _public(name: str | None, run: Path) -> str | None:
    """Return a name if it is on the Hub.

    Returns None for a path of the user's machine: one that exists relative to the working directory
    or to a parent folder of the run.
    """
    if not name or HUB_ID.fullmatch(name) is None or Path(name).suffix in DATA_SUFFIXES:
        return None
    return None if any((folder / name).exists() for folder in (Path.cwd(), *run.resolve().parents)) else name
