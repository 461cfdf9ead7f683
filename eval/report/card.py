"""A drafter's model card: the page that the Hub shows, with the figures of its evaluations and what is known besides.

Every figure comes from a file of the run that made it, and only from runs with these very weights. What no file tells is left
out, or said to be unknown.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from ...data.files import read_json, sha256_file
from ...data.manifest import MANIFEST_FILE, load_manifest
from ...models.drafters.saved.download import HUB_ID
from ...models.drafters.saved.folder import WEIGHTS_FILE, DrafterFile, read_drafter_config, read_training_facts
from ...models.export.certificate import read_certificate
from ...models.export.package import UNNAMED, UNNAMED_TARGET, require_names, require_whole
from ..records.names import BASELINE
from ..results.rows import Row, decoding_name, fault, is_broken
from ..results.tables import escape_markdown
from .runs import Run, cell_of, read_run

TITLES = {
    "draft_model": "Draft model",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "redrafter": "ReDrafter",
}
PLAIN_NAME = re.compile(r"[\w][\w .@/+-]*")
"""Of a target that isn't on the Hub."""
DATA_SUFFIXES = frozenset({".csv", ".gz", ".json", ".jsonl", ".parquet", ".txt", ".zst"})
TAGS = ("custom_generate", "speculative-decoding", "outrider")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardOptions:
    """What a card says beside the drafter's own files."""

    evaluations: Sequence[Path] = ()
    """Folders of finished evaluations."""
    run: Path | None = None
    """Folder of the training run: its data, and what labelling took."""
    certificate: Path | None = None
    """What `outrider certify` wrote."""
    licence: str | None = None
    """The Hub's name of the licence, such as apache-2.0."""
    base_model: str | None = None
    """Hub id of the target; None is the name that it was trained with, where that is one."""
    repo: str | None = None
    """Hub id of the drafter."""

    def __post_init__(self) -> None:
        require_names(base_model=self.base_model, repo=self.repo, licence=self.licence)


def model_card(drafter: Path, options: CardOptions) -> str:
    """The text of README.md.

    Raises ValueError for evaluations, a run or a certificate that aren't of this drafter, or of its target.
    """
    saved = read_drafter_config(drafter)
    require_whole(drafter / WEIGHTS_FILE)
    weights = sha256_file(drafter / WEIGHTS_FILE)
    named = saved.target.name if HUB_ID.fullmatch(saved.target.name) else None
    base_model = options.base_model or named
    target = base_model or (saved.target.name if PLAIN_NAME.fullmatch(saved.target.name) else "its target")
    folders = {path.resolve(): path for path in options.evaluations}  # each once
    runs = [read_run(path, path.name) for path in folders.values()]
    failed = any(is_broken(row) for run in runs for row in _rows_of(run, weights))
    failed |= options.certificate is not None and not read_certificate(options.certificate)["passed"]
    promise = "" if failed else " The text stays the target's own, decoded greedily or sampled; it comes in fewer passes."
    trained = "" if read_training_facts(drafter) is None else " Trained with outrider."
    data = ModelCardData(
        base_model=base_model,
        license=options.licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, saved.kind.replace("_", "-")],
    )
    title = f"{TITLES.get(saved.kind, saved.kind)} for {target}"
    about = (
        f"A drafter for speculative decoding: a small model that proposes tokens which **{target}** checks several at a "
        f"time.{promise} It does nothing without its target.{trained}"
    )
    drafters_licence = options.licence or "not stated"
    sections = [
        f"---\n{data.to_yaml()}\n---\n\n# {title}",
        about,
        _usage(base_model or UNNAMED_TARGET, options.repo or UNNAMED),
        _measurements(runs, saved, weights),
        _certificate(options.certificate, saved, weights),
        _drafter(saved, drafter),
        _training(drafter, options.run, saved, weights),
        f"## Licence\n\nOf the drafter: {drafters_licence}. The target has one of its own.",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _usage(target: str, folder: str) -> str:
    return f'''## How to use

With [transformers](https://github.com/huggingface/transformers) alone. `trust_remote_code` runs the code in `custom_generate/`:
read it first, and pin a `revision`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
model = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")
inputs = tokenizer("Once upon a time", return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=256, custom_generate="{folder}", trust_remote_code=True)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
```

With outrider, measured against plain decoding: `outrider eval --target {target} --drafter {folder} --suite mt_bench`.'''


# --- figures


def _measurements(runs: Sequence[Run], saved: DrafterFile, weights: str) -> str:
    if not runs:
        return "## Speed\n\nNot measured, or not told here."
    parts = [_measured(run, saved, weights) for run in runs]
    note = (
        "A step is one pass of the target; tokens per step count the token that it adds itself. The speedup is that of whole "
        "generations over plain decoding, through the same loop on the same machine. In brackets: 95 % intervals, by a "
        "bootstrap over prompts, or over batches of them. Lossless: whether the answers were those of plain decoding, token "
        "for token."
    )
    return "\n\n".join(["## Speed", *parts, note])


def _measured(run: Run, saved: DrafterFile, weights: str) -> str:
    """The rows of one evaluation that are this drafter's, and where they were measured."""
    rows, methods = _rows_of(run, weights), run.info.config["methods"]
    if not rows and weights in (method["weights"] for method in methods.values()):
        raise ValueError(
            f"this drafter ran out of memory everywhere in {run.directory}, so it has no figures there; leave it out"
        )
    if not rows:
        raise ValueError(
            f"{run.directory} has measured other weights ({', '.join(methods) or 'no drafter'}); give an evaluation of this "
            "drafter as it is"
        )
    heads = ("Prompts", "Decoding", "Setting", "Tokens per step", "Speedup", "Tokens/s (plain)", "Lossless")
    lines = [heads, ("---", "---", "---", "---:", "---:", "---:", "---"), *(_line(row, run, saved) for row in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{table}\n\n{_conditions(run, rows[0])}"


def rows_of(evaluation: Path, drafter: Path) -> list[Row]:
    """The rows of an evaluation that are of this drafter's weights."""
    return _rows_of(read_run(evaluation, evaluation.name), sha256_file(drafter / WEIGHTS_FILE))


def _rows_of(run: Run, weights: str) -> list[Row]:
    """Rows with figures of these weights; where memory ran out there is nothing to tell."""
    methods = run.info.config["methods"]
    return [row for row in run.rows if methods.get(row["method"], {}).get("weights") == weights and not row["out_of_memory"]]


def _line(row: Row, run: Run, saved: DrafterFile) -> tuple[str, ...]:
    (plain,) = [
        each for each in run.rows if each["method"] == BASELINE and cell_of(each)[:-1] == cell_of(row)[:-1]
    ]  # every group of rows has one
    method = run.info.config["methods"][row["method"]]
    return tuple(
        escape_markdown(text)
        for text in (
            f"{row['suite']} ({row['num_prompts']})",
            decoding_name(row),
            _setting(method["config"], method["setting"], saved),
            _with_interval(row["tokens_per_step"], row["tokens_per_step_ci95"]),
            f"none: {fault(row)}" if is_broken(row) else _with_interval(row["speedup"], row["speedup_ci95"], "x"),
            f"{row['tokens_per_second']:.1f} ({plain['tokens_per_second']:.1f})",
            row["lossless_label"],
        )
    )


def _setting(config: dict[str, Any], setting: dict[str, Any] | None, saved: DrafterFile) -> str:
    """Options that were set for a measurement, and those that have been changed in the drafter's own file since."""
    if setting is None:
        return "off: plain decoding"
    used = {**config, **setting}
    told = {name: value for name, value in used.items() if name in setting or saved.drafter.get(name) != value}
    return ", ".join(f"{name} {value}" for name, value in told.items()) or "as saved"


def _with_interval(value: float | None, interval: Sequence[float] | None, unit: str = "") -> str:
    if value is None:
        return "unknown"
    return f"{value:.2f}{unit}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _conditions(run: Run, row: Row) -> str:
    place, config = run.info.environment, run.info.config
    device = f"{place.cpu}, {place.num_threads} threads" if place.device == "cpu" else place.device
    packages = ", ".join(f"{name} {number}" for name, number in place.packages.items())
    packed = ", linear layers packed for few rows" if config["pack_weights"] and place.device == "cpu" else ""
    form = "" if config["target"]["form"] == "eager" else f" ({config['target']['form']})"
    return (
        f"Measured on {device}, the target{form} in {row['dtype']}{packed}, up to {row['max_new_tokens']} new tokens; Python "
        f"{place.python}, {packages}."
    )


def _certificate(path: Path | None, saved: DrafterFile, weights: str) -> str:
    if path is None:
        return ""
    found = read_certificate(path)
    decoded = found.get("drafters", {})
    if decoded and weights not in decoded.values():
        raise ValueError(f"{path} certifies decoding with other drafters ({', '.join(decoded)}); make one with this drafter")
    if found.get("weights_sha256", saved.target.weights_sha256) != saved.target.weights_sha256:
        raise ValueError(f"{path} certifies decoding with another target ({found.get('target')}); make one with this drafter's")
    verdicts = {True: "pass", False: "FAIL", None: "none claimed"}
    lines: list[tuple[str, ...]] = [("What", "How", "Cases", "Result", "Verdict"), ("---",) * 5]
    for line in found["lines"]:
        texts = (line["subject"], line["method"], str(line["num_cases"]), line["result"], verdicts[line["passed"]])
        lines.append(tuple(map(escape_markdown, texts)))
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    verdict = "Lossless" if found["passed"] else "NOT LOSSLESS"
    unnamed = "" if decoded else " It doesn't say which drafter's weights were decoded with."
    return (
        f"## Certificate\n\n**{verdict}.** Were all sound, this verdict would be another with probability "
        f"{found['false_alarm_rate']:.1e} at most. In full: `certificate.json`.{unnamed}\n\n{table}"
    )


# --- what it is and what it took


def _drafter(saved: DrafterFile, directory: Path) -> str:
    """Kind, options, size and target."""
    facts, target = read_training_facts(directory), saved.target
    size = (directory / WEIGHTS_FILE).stat().st_size
    options = {name: value for name, value in saved.drafter.items() if value is not None and not isinstance(value, dict)}
    lines = [
        f"- Kind: {saved.kind}, {f'{facts.parameters:,} parameters, ' if facts else ''}{size / 1e6:.1f} MB",
        f"- Options: {', '.join(f'`{name}: {_json_like(value)}`' for name, value in options.items())}",
        f"- Target: {target.name}{f' at revision {target.revision}' if target.revision else ''}, {target.hidden_size} wide, "
        f"{target.vocab_size:,} tokens; digest of its weights `{target.weights_sha256[:16]}`, of its tokenizer "
        f"`{target.tokenizer_sha256[:16]}`"
        + (f"; quantised when loaded: `{target.quantization}`" if target.quantization else ""),
    ]
    return "## The drafter\n\n" + "\n".join(lines)


def _json_like(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _training(directory: Path, run: Path | None, saved: DrafterFile, weights: str) -> str:
    """What it was trained on, and for how long."""
    facts, lines = read_training_facts(directory), []
    if run is not None:
        lines += _data(run, saved, weights)
    else:
        lines.append("- Data: not told here")
    if facts is None:
        lines.append("- Cost: unknown")
    else:
        labels = {"distilled": "the target's own continuations", "text": "the texts as they are"}
        lines.append(
            f"- Training: {facts.steps:,} steps on {labels[facts.labels]}, {facts.tokens_seen:,} tokens seen, "
            f"{facts.positions_seen:,} positions trained, {facts.seconds:,.0f} s on {facts.hardware}"
        )
    return "## Data and cost\n\n" + "\n".join(lines)


def _data(run: Path, saved: DrafterFile, weights: str) -> list[str]:
    """The data of a training run. Raises ValueError for a run that made another drafter."""
    config_path, homes = run / "config.yaml", [run, *sorted(run.glob("variants/*"))]
    made = {home: path for home in homes if (path := home / "drafter" / WEIGHTS_FILE).is_file()}
    if not config_path.is_file() or not made:
        raise ValueError(f"{run} is no folder of a finished run: it has no config.yaml, or no drafter/{WEIGHTS_FILE}")
    home = next((home for home, path in made.items() if sha256_file(path) == weights), None)
    if home is None:
        raise ValueError(f"the drafter of {run} has other weights than this one; give the run that made it")
    data, drafter = _run_sections(config_path, "" if home == run else home.name)
    # A path of somebody's machine tells readers nothing; a data set of the Hub does.
    source = _public(data["path"], run)
    form = {"stdlib": "modules of Python's standard library"}.get(data["source"], f"texts in the form `{data['source']}`")
    lines = [f"- Data: {source or form}, cut at {data['max_length']} tokens"]
    if (run / "distill" / MANIFEST_FILE).is_file():
        manifest = load_manifest(run / "distill")
        manifest.require_target(saved.target)
        num_texts = sum(len(shard.ids) for shard in manifest.shards)
        lines[0] += (
            f": {num_texts:,} texts of {manifest.num_tokens:,} tokens, {manifest.num_labels:,} positions labelled with the "
            f"target's next {manifest.horizon} tokens"
        )
    if (stats := run / "distill" / "stats.json").is_file():
        seconds = read_json(stats).get("process_seconds")
        lines += [f"- Labelling: {seconds:,.0f} s, summed over processes"] if seconds else []
    if (start := drafter.get("start_from") or drafter.get("path")) is not None:
        lines.append(f"- Started from: the weights of {_public(start, run) or 'a trained model'}, not from fresh ones")
    return lines


def _run_sections(path: Path, variant: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The data and the drafter of a run's configuration, or of one of its variants."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        changes = config["variants"][variant].get("drafter", {}) if variant else {}
        data, drafter = dict(config["data"]), {**config["drafter"], **changes}
        if (
            not isinstance(data["path"], str | None)
            or not isinstance(data["source"], str)
            or type(data["max_length"]) is not int
        ):
            raise TypeError("its section data isn't one")
        if not all(isinstance(drafter.get(name), str | None) for name in ("start_from", "path")):
            raise TypeError("its section drafter isn't one")
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no configuration of a run ({type(error).__name__}: {error}); restore it") from error
    return data, drafter


def _public(name: str | None, run: Path) -> str | None:
    """A name on the Hub; None for a path of somebody's machine, told to the run in one of the folders that it lies in."""
    if not name or HUB_ID.fullmatch(name) is None or Path(name).suffix in DATA_SUFFIXES:
        return None
    return None if any((folder / name).exists() for folder in (Path.cwd(), *run.resolve().parents)) else name
