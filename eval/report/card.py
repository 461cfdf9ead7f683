"""Model card of a drafter.

This is the page that the Hub shows, with the figures of evaluations and other facts. Every figure
comes from a file of the run that measured it, and only from runs with exactly these weights. Facts
without a file are left out, or reported as unknown.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import field as dataclass_field
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from pydantic import ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from ...data.config import HUB_PREFIX
from ...data.fields import OPTIONS, PositiveInt, problems_of
from ...data.files import read_dataclass, sha256_file
from ...data.manifest import MANIFEST_FILE, STATS_FILE, LabelTotals, TargetIdentity
from ...data.shards import label_store
from ...data.template_options import DATE
from ...models.drafters.saved.folder import (
    HUB_ID,
    WEIGHTS_FILE,
    read_drafter_config,
    read_training_facts,
    tensor_names,
)
from ...models.drafters.saved.parts import DrafterParts, parse_drafter_name
from ...models.export.package import Certificate, packaged_folder, read_certificate, require_names
from ..config import CardOptions
from ..records.names import TITLES, title_of
from ..results.markdown import Markdown, code, code_span, render
from ..results.rows import is_broken
from ..results.tables import certificate_cells, markdown_table
from .card_figures import fastest_call, hub_results, measurement, require_rows, unchanged
from .card_options import TAGS, code_names, recorded_quantization, require_plain_options
from .runs import read_run

PLAIN_NAME = re.compile(r"[\w][\w .@/+-]*")
"""Valid name of a target that isn't on the Hub."""
DATA_SUFFIXES = frozenset({".csv", ".gz", ".json", ".jsonl", ".parquet", ".txt", ".zst"})
UNSERVED = frozenset({"layer.self_attn.q_norm.weight", "layer.self_attn.k_norm.weight"})
"""Weights of an EAGLE layer that no format supports."""
STDLIB = "modules of Python's standard library"


@pydantic_dataclass(frozen=True, kw_only=True, config=OPTIONS)
class RunData:
    """Options of a run's data that its card shows."""

    source: str | None
    path: str | None
    max_length: PositiveInt
    train_on: str = "all"
    sources: list[dict[str, Any]] = dataclass_field(default_factory=list)
    chat_template: str | None = None
    template_options: dict[str, Any] = dataclass_field(default_factory=dict)

    @property
    def arguments(self) -> str:
        """The options of the chat template, as arguments of a call: `, enable_thinking=False`."""
        options = {name: value for name, value in self.template_options.items() if name != DATE and name.isidentifier()}
        return "".join(f", {name}={value!r}" for name, value in options.items())


def model_card(name: Path | DrafterParts, options: CardOptions, programs: Collection[str] | None = None) -> str:
    """Write the text of README.md.

    `programs` are the engines and formats for which the drafter can be exported (`programs_for`). None
    takes all of its kind, except for a layer with a weight of UNSERVED. Raises ValueError for
    evaluations, a run or a certificate that belong to another drafter or target.
    """
    require_names(base_model=options.base_model, repo=options.repo, licence=options.licence)
    # 1. Read the drafter's folder.
    parts = parse_drafter_name(name)
    drafter = packaged_folder(parts)
    if drafter is None:
        return _training_free_card(parts, options)
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
    folders = {path.resolve(): path for path in options.records}  # without duplicates
    runs = [unchanged(read_run(path, path.name)) for path in folders.values()]
    figures = {run.directory: require_rows(run, weights) for run in runs}
    merged_with = [part.name for part in parts.parts if part.folder is None]
    certificate = _read_certificate(options.certificate, weights, saved.target.weights_sha256)
    lines = [certificate_cells(line) for line in certificate.lines] if certificate else []
    is_broken_somewhere = any(is_broken(row) for rows in figures.values() for row in rows)
    results = [result for run in runs for row in figures[run.directory] for result in hub_results(row)]
    data_lines = [] if options.run is None else _data(options.run, saved.target, weights)
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
    return _render(
        "card.md.jinja",
        data,
        title=title,
        target=target,
        lossless=not is_broken_somewhere and (certificate is None or certificate.passed),
        programs=() if programs is None and UNSERVED.intersection(tensors) else programs,
        **code_names(options.repo, base_model, local_name, quantization),
        merged_with=merged_with,
        fastest=fastest_call([(run, row) for run in runs for row in figures[run.directory]], merged_with),
        has_own_template=run_data is not None and run_data.chat_template is None,
        template_arguments=code(run_data.arguments if run_data else ""),
        measurements=[measurement(run, figures[run.directory]) for run in runs],
        certificate=certificate,
        certificate_table=markdown_table(lines, left=lines[0]) if lines else "",
        saved=saved,
        facts=facts,
        size=(drafter / WEIGHTS_FILE).stat().st_size,
        drafter_options=_options(saved.drafter),
        data=data_lines,
        licence=options.licence,
    )


def _training_free_card(parts: DrafterParts, options: CardOptions) -> str:
    """Write the card of a package without weights. Raises ValueError for facts about weights."""
    sources = {"an evaluation": options.records, "a run": options.run, "a certificate": options.certificate}
    if given := [name for name, value in sources.items() if value]:
        raise ValueError(f"{parts.name} has no weights that {', '.join(given)} could belong to; package it without")
    data = ModelCardData(
        base_model=options.base_model,
        license=options.licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, *(part.name.replace("_", "-") for part in parts.parts)],
    )
    return _render(
        "training_free_card.md.jinja",
        data,
        title=title_of(parts.kind),
        name=parts.name,
        licence=options.licence,
        **code_names(options.repo, options.base_model, "", options.quantization),
    )


def _render(template: str, metadata: ModelCardData, **values: Any) -> str:
    """Render a card with its metadata; every text among the values is escaped (`markdown.render`)."""
    return f"{ModelCard(render(template, card_data=Markdown(metadata.to_yaml()), **values))}\n"


# --- the certificate


def _read_certificate(path: Path | None, weights: str, target_weights: str) -> Certificate | None:
    """Read a certificate of this drafter and its target.

    Raises ValueError for another drafter's or target's certificate.
    """
    if path is None:
        return None
    certificate = read_certificate(path)
    if (drafters := certificate.drafters) and weights not in drafters.values():
        raise ValueError(f"{path} certifies decoding with other drafters ({', '.join(drafters)}); give one of this drafter")
    if certificate.weights_sha256 not in (None, target_weights):
        raise ValueError(
            f"{path} certifies decoding with another target ({certificate.target}); give one of this drafter's target"
        )
    return certificate


# --- the drafter, its data and its cost


def _options(drafter: dict[str, Any]) -> Markdown:
    options = {name: value for name, value in drafter.items() if value is not None and not isinstance(value, dict)}
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    return Markdown(", ".join(code_span(f"{name}: {text}") for name, text in texts.items()))


def _data(run: Path, target: TargetIdentity, weights: str) -> list[Markdown]:
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
    named = [_described(one, run) for one in data.sources or [{"source": data.source, "path": data.path}]]
    texts = Markdown("Data: {}, cut at {} tokens").format(Markdown(", ".join(named)), data.max_length)
    chat = "the target's own" if data.chat_template is None else Path(data.chat_template).name
    lines = [texts, Markdown("Chat template: {}").format(chat)]
    if data.train_on != "all":
        trained = "the last answer of each text" if data.train_on == "last" else data.train_on
        lines.append(Markdown("Trained on: {}").format(trained))
    if data.template_options:
        lines[1] = Markdown("{} with {}").format(lines[1], code_span(json.dumps(data.template_options, ensure_ascii=False)))

    # 3. Describe the labels, the loss and the initial weights.
    if (run / "distill" / MANIFEST_FILE).is_file():
        manifest = label_store(run / "distill").load()
        manifest.require_target(target)
        num_texts = sum(len(shard.ids) for shard in manifest.shards)
        lines[0] = Markdown("{}: {:,} texts of {:,} tokens, {:,} positions labelled with the target's next {} tokens").format(
            texts, num_texts, manifest.num_tokens, manifest.num_labels, manifest.horizon
        )
    if (stats := run / "distill" / STATS_FILE).is_file():
        seconds = read_dataclass(LabelTotals, stats).process_seconds
        lines.append(Markdown("Labelling: {:,.0f} s, summed over processes").format(seconds))
    if loss is not None:
        lines.append(Markdown("Loss: {}").format(code_span(loss)))
    if (start := drafter.get("start_from") or drafter.get("path")) is not None:
        trained = _public(str(start), run) or "a trained model"
        lines.append(Markdown("Started from: the weights of {}, not from random ones").format(trained))
    return lines


def _described(source: Mapping[str, Any], run: Path) -> Markdown:
    """Describe a source of texts: its name if it is on the Hub, or its form."""
    path, form = source.get("path"), str(source.get("source"))
    if isinstance(path, str) and (name := _public(path.removeprefix(HUB_PREFIX), run)):
        return Markdown("{}").format(name)
    return Markdown(STDLIB) if form == "stdlib" else Markdown("texts in the form {}").format(code_span(form))


def _run_sections(path: Path, variant: str) -> tuple[RunData, dict[str, Any], str | None]:
    """Read the data, the drafter and the loss of a run's configuration, or of one of its variants."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        changes = config["variants"][variant] if variant else {}
        train = {**config.get("train", {}), **changes.get("train", {})}
        names = [field.name for field in fields(RunData) if field.name in config["data"]]
        data = RunData(**{name: config["data"][name] for name in names})
        loss = str(train["loss"]) if "loss" in train else None
        return data, {**config["drafter"], **changes.get("drafter", {})}, loss
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(problems_of(error, 'data'))}; restore it") from error
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a run ({type(error).__name__}: {error}); restore it") from error


def _public(name: str | None, run: Path) -> str | None:
    """Return a name if it is on the Hub.

    Returns None for a path of the user's machine: one that exists relative to the working directory
    or to a parent folder of the run.
    """
    if not name or HUB_ID.fullmatch(name) is None or Path(name).suffix in DATA_SUFFIXES:
        return None
    return None if any((folder / name).exists() for folder in (Path.cwd(), *run.resolve().parents)) else name
