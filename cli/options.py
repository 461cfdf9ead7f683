"""Options that several commands share, and the functions that parse them."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import yaml

from ..data.drafter_names import MODEL_PREFIX, TRAINING_FREE_NAMES
from ..data.paths import NamedPath, built_in_templates, expand_home, require_paths
from .inputs import ANY_DRAFTER, DATA_FILE, MODEL, named_folders
from .quiet import silence_bars

if TYPE_CHECKING:
    from ..eval.config import SuiteConfig
    from ..models.llm.config import TargetConfig
    from ..models.llm.hf_target import HFTarget

T = TypeVar("T")

INPUTS = {
    "target": ("--target", MODEL),
    "drafter": ("--drafter", ANY_DRAFTER),
    "folder": ("FOLDER", "a folder of another program, or its name on the Hub (user/name)"),
    "suite": ("--suite", DATA_FILE),
    "suite_path": ("--suite-path", DATA_FILE),
    "chat_template": ("--chat-template", "a .jinja file, or the name of a template that ships with outrider"),
    "records": ("--records", "the folder of an evaluation"),
    "run": ("--run", "the folder of a training run"),
    "certificate": ("--certificate", "a certificate of `outrider certify`"),
}
"""Parameters of commands that may name a local file or folder, with their options and valid values."""
ALWAYS_LOCAL = ("records", "run", "certificate")

DRAFTER_HELP = (
    f"The drafter: its directory, user/name[@revision] on the Hub, {', '.join(TRAINING_FREE_NAMES)}, {MODEL_PREFIX}MODEL (a "
    "small causal LM as it is), or several joined by +."
)
Target = Annotated[str, typer.Option(help="The target: a directory or a Hub id.")]
TrainedTarget = Annotated[str, typer.Option(help="The target of the drafter: a directory or a Hub id.")]
Revision = Annotated[str | None, typer.Option(help="The target's branch, tag or commit on the Hub.")]
Dtype = Annotated[str | None, typer.Option(help="The target's dtype. Default: float32 on a CPU, else as stored.")]
Device = Annotated[str | None, typer.Option(help="Device such as cuda:1. Default: the first accelerator, else cpu.")]
Compiled = Annotated[bool, typer.Option(help="Compile the target with torch.compile.")]
CudaGraphs = Annotated[bool, typer.Option(help="Run target and drafter as CUDA graphs.")]
Quantization = Annotated[
    str | None,
    typer.Option(help="Quantise the target: torchao, bitsandbytes, or '{method: torchao, type: Int8WeightOnlyConfig}'."),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="Divide the target's layers over several devices: auto, or '{\"\": 0, model.layers.20: 1}'."),
]
MemoryBudget = Annotated[
    float | None,
    typer.Option(
        "--memory-budget-gib",
        help="Most GiB for the target's weights, keys and values. Other layers are read from its files in every pass.",
    ),
]
BudgetTokens = Annotated[
    int | None,
    typer.Option(help="Tokens of all rows whose keys and values --memory-budget-gib has room for. Default: 4096."),
]
StageLayers = Annotated[
    str | None,
    typer.Option(
        help="Divide the target: layers of each stage, such as 8,8. With --launch pipeline_cpu --num_processes 3: a process "
        "for each stage, and one more."
    ),
]
StallSeconds = Annotated[
    float | None,
    typer.Option(help="Seconds without progress after which a stage counts as lost. Default: by its speed, at least 30."),
]
Launch = Annotated[
    str | None,
    typer.Option(
        help="Run in several processes, for --stage-layers: a launch file such as pipeline_cpu, or its path. Options of "
        "`accelerate launch` may follow: --num_processes 5"
    ),
]
Decode = Annotated[
    str, typer.Option(help="synchronous; pipelined (drafts while the target's stages read, needs --stage-layers); or both.")
]
DEFAULT_QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "torchao": {"method": "torchao", "type": "Int8WeightOnlyConfig"},
    "bitsandbytes": {"method": "bitsandbytes", "load_in_4bit": True},
}
"""Options for the name of a method without options."""
ChatTemplate = Annotated[str | None, typer.Option(help="A .jinja file or a template's name. Default: the tokenizer's.")]
TokenizerOptions = Annotated[
    list[str] | None, typer.Option("--tokenizer-option", help="An option of the tokenizer: legacy=true. Repeat.")
]
BatchSizes = Annotated[list[int] | None, typer.Option("--batch-size", help="Prompts decoded together. Repeat to compare.")]
MaxNewTokens = Annotated[int, typer.Option(help="Maximum number of tokens per answer.")]
Limit = Annotated[int, typer.Option(help="Maximum number of prompts, drawn at random.")]
SuitePath = Annotated[str | None, typer.Option(help="Local file to read the suite of --suite from.")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads. Default: torch's choice.")]
FastLinears = Annotated[bool, typer.Option(help="On a CPU, compute linear layers in the fastest way, by a measurement.")]
Seed = Annotated[int, typer.Option(help="Random seed of drawn prompts, samples and the bootstrap.")]


def config_from(cls: type[T], options: Mapping[str, Any], **others: Any) -> T:
    """Build a configuration from `others` and from the options with its fields' names.

    An option without a value (None) keeps the field's default.
    """
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    chosen = {name: value for name, value in options.items() if name in names and value is not None}
    return cls(**{**chosen, **others})


def take_paths(options: Mapping[str, Any], **arguments: str) -> dict[str, Any]:
    """Return the options of a command with `~` expanded.

    Raises one ValueError with all missing local paths. `arguments` are the names of parameters that
    stand alone, without an option: drafter="DRAFTER".
    """
    taken = {name: _expanded(value) for name, value in options.items()}
    paths: list[NamedPath] = []
    for name, (option, expected) in INPUTS.items():
        for item in _items(taken.get(name)):
            text = str(item)
            if name == "suite_path" and isinstance(taken[name], list):  # SUITE=FILE
                text = text.partition("=")[2]
            is_local = name in ALWAYS_LOCAL or (name == "folder" and "/" not in text)
            if name == "drafter":
                paths += named_folders(arguments.get(name, option), item)
            elif name != "chat_template" or text not in built_in_templates():
                paths.append(NamedPath(option=arguments.get(name, option), value=text, expected=expected, is_local=is_local))
    require_paths(paths)
    return taken


def _expanded(value: Any) -> Any:
    """Expand `~` in a path, a text or a list of them; SUITE=FILE names a suite before its file."""
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    if isinstance(value, Path):
        return value.expanduser()
    if isinstance(value, str) and "=~" in value:
        name, _, path = value.partition("=")
        return f"{name}={expand_home(path)}"
    if isinstance(value, str) and value.startswith(MODEL_PREFIX):
        return f"{MODEL_PREFIX}{expand_home(value.removeprefix(MODEL_PREFIX))}"
    return expand_home(value)


def _items(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def chosen_suite(text: str, path: str | None = None, **options: Any) -> "SuiteConfig":
    """Return the suite of a --suite option, read from the path of --suite-path if there is one."""
    from ..eval.config import suite_of

    suite = suite_of(text, **options)
    if path is not None and suite.path is not None:
        raise ValueError(f"--suite {text} is a file, and --suite-path is another one, {path}; remove --suite-path")
    return replace(suite, path=path or suite.path)


def target_config(options: Mapping[str, Any]) -> "TargetConfig":
    """Return the configuration of the target that a command's options choose.

    Raises ValueError for options that can't be combined.
    """
    from ..models.llm.config import TargetConfig
    from ..models.llm.loading import default_device

    if options.get("budget_tokens") is not None and options.get("memory_budget_gib") is None:
        raise ValueError(f"--budget-tokens is {options['budget_tokens']}, without --memory-budget-gib; give both, or neither")
    if options.get("stall_seconds") is not None and options.get("stage_layers") is None:
        raise ValueError(f"--stall-seconds is {options['stall_seconds']:g}, without --stage-layers; give both, or neither")
    device = options["device"] or str(default_device())
    # Only float32 reproduces exactly the same tokens, and not every CPU has fast bfloat16.
    dtype = options["dtype"] or ("float32" if device == "cpu" else "auto")
    tokenizer_options = parse_tokenizer_options(options.get("tokenizer_options") or [])
    changes = {
        "name_or_path": options["target"],
        "device": device if options.get("device_map") is None else options["device"],
        "device_map": parse_device_map(options.get("device_map")),
        "dtype": dtype,
        "quantization": parse_quantization(options.get("quantization")),
        "tokenizer_options": tokenizer_options,
        "stage_layers": parse_stage_layers(options.get("stage_layers")),
    }
    return config_from(TargetConfig, options, **changes)


def load_chosen_target(options: Mapping[str, Any], *, needs_tokenizer: bool = True) -> "HFTarget":
    """Load the target that a command's options choose, with its chat template."""
    from ..data.chat import use_chat_template
    from ..models.llm.loading import load_target

    silence_bars()
    target = load_target(target_config(options), needs_tokenizer=needs_tokenizer)
    if target.stream is not None:
        typer.echo(f"{options['target']}: {target.stream.plan.describe(target.stream.bytes_per_second)}", err=True)
    elif options.get("memory_budget_gib") is not None:
        typer.echo(f"{options['target']}: all weights fit into --memory-budget-gib, so none are read in passes", err=True)
    if not needs_tokenizer:
        return target
    use_chat_template(target.tokenizer, options.get("chat_template"))
    return target


def parse_tokenizer_options(texts: list[str]) -> dict[str, Any]:
    """Parse NAME=VALUE options of the tokenizer. Raises ValueError for a text without a value."""
    options = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--tokenizer-option is {text!r}; give NAME=VALUE, such as legacy=true")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value  # a string without quotes
    return options


def parse_stage_layers(text: str | None) -> list[int] | None:
    """Parse the numbers of layers of a target's stages. Raises ValueError for other texts."""
    if text is None:
        return None
    try:
        return [int(number) for number in text.strip("[] ").split(",")]
    except ValueError:
        raise ValueError(f"--stage-layers is {text!r}; give the number of layers of each stage: 8,8,8,8") from None


def parse_quantization(text: str | None) -> dict[str, Any] | None:
    """Parse the quantisation of a target: a method's name, or options as in a configuration.

    Raises ValueError for other texts, and for a method that needs options.
    """
    if text is None:
        return None
    if text in DEFAULT_QUANTIZATIONS:
        return DEFAULT_QUANTIZATIONS[text]
    from ..models.llm.quantization import check_method

    try:
        options = yaml.safe_load(text)
    except yaml.YAMLError:
        options = text
    check_method(options)
    return dict(options)


def parse_device_map(text: str | None) -> Any:
    """Parse `auto`, or a mapping of modules to devices. Raises ValueError for other texts."""
    from ..models.llm.config import check_device_map

    try:
        return check_device_map(None if text is None else yaml.safe_load(text))
    except (ValueError, yaml.YAMLError):
        raise ValueError(
            f"--device-map is {text!r}; give auto, or the devices of modules: '{{\"\": 0, model.layers.20: 1}}'"
        ) from None


def parse_setting(text: str) -> dict[str, Any]:
    """Parse a drafter's options, written as in a configuration.

    Raises ValueError for a text that isn't a mapping of options.
    """
    try:
        setting = yaml.safe_load(text)
    except yaml.YAMLError:
        setting = None
    if not isinstance(setting, dict) or not all(isinstance(name, str) for name in setting):
        raise ValueError(f"--setting is {text!r}; give options as in a configuration: '{{depth: 5, top_k: 8}}'")
    if joined := [key for key in setting if ":" in str(key)]:
        raise ValueError(f"--setting is {text!r}, where {joined[0]!r} is one word; put a space after the colon")
    return setting
