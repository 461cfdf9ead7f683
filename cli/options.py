"""Options that several commands have, and what the commands make of them."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import yaml

from ..data.paths import NamedPath, built_in_templates, expand_home, require_paths
from .inputs import DATA_FILE, DRAFTER, MODEL
from .quiet import silence_bars

if TYPE_CHECKING:
    from ..eval.config import SuiteConfig
    from ..models.target.hf_target import HFTarget

T = TypeVar("T")

INPUTS = {
    "target": ("--target", MODEL),
    "drafter": ("--drafter", DRAFTER),
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
DRAFTERS = ("drafter", "folder")
"""Their names on the Hub have a slash. (A `Path` drops the ./ of ./drafter.)"""

Target = Annotated[str, typer.Option(help="The target: a directory or a Hub id.")]
TrainedTarget = Annotated[str, typer.Option(help="The target that it was trained for: a directory or a Hub id.")]
Revision = Annotated[str | None, typer.Option(help="The target's revision on the Hub.")]
Dtype = Annotated[str | None, typer.Option(help="Unless given, float32 on a CPU and as stored elsewhere.")]
Device = Annotated[str | None, typer.Option(help="Unless given, the first accelerator, else cpu.")]
Compiled = Annotated[bool, typer.Option(help="Run the target through torch.compile.")]
CudaGraphs = Annotated[bool, typer.Option(help="Replay target and drafter as CUDA graphs.")]
Quantization = Annotated[
    str | None,
    typer.Option(help="Quantise the target: torchao, bitsandbytes, or '{method: torchao, type: Int8WeightOnlyConfig}'."),
]
DEFAULT_QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "torchao": {"method": "torchao", "type": "Int8WeightOnlyConfig"},
    "bitsandbytes": {"method": "bitsandbytes", "load_in_4bit": True},
}
"""What a method's bare name stands for."""
ChatTemplate = Annotated[str | None, typer.Option(help="A .jinja file, or a template that ships with outrider.")]
TokenizerOptions = Annotated[
    list[str] | None, typer.Option("--tokenizer-option", help="NAME=VALUE for the tokenizer: legacy=true.")
]
BatchSizes = Annotated[list[int] | None, typer.Option("--batch-size", help="Prompts decoded together. Repeat for several.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens per answer, at most.")]
Limit = Annotated[int, typer.Option(help="Draw at most so many prompts.")]
SuitePath = Annotated[str | None, typer.Option(help="Local file of a named suite.")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads; torch's choice unless given.")]
PackWeights = Annotated[bool, typer.Option(help="On a CPU, pack linear layers for few rows (more memory).")]
Seed = Annotated[int, typer.Option(help="Of the prompts that --limit draws, of samples, and of the bootstrap.")]


def config_from(cls: type[T], options: Mapping[str, Any], **others: Any) -> T:
    """Build a configuration from `others` and from those options that have its fields' names.

    An option that wasn't given (None) leaves the field's default.
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
    paths = []
    for name, (option, expected) in INPUTS.items():
        for item in _items(taken.get(name)):
            text = str(item)
            if name == "suite_path" and isinstance(taken[name], list):  # SUITE=FILE
                text = text.partition("=")[2]
            is_local = name in ALWAYS_LOCAL or (name in DRAFTERS and "/" not in text)
            if name != "chat_template" or text not in built_in_templates():
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
    return expand_home(value)


def _items(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def chosen_suite(text: str, path: str | None = None, **options: Any) -> "SuiteConfig":
    """Return the suite of a --suite option, with the path that --suite-path gives it."""
    from ..eval.config import suite_of

    suite = suite_of(text, **options)
    if path is not None and suite.path is not None:
        raise ValueError(f"--suite {text} is a file, and --suite-path gives it another one, {path}; leave --suite-path out")
    return replace(suite, path=path or suite.path)


def load_chosen_target(options: Mapping[str, Any], *, needs_tokenizer: bool = True) -> "HFTarget":
    """Load the target that a command's options choose, with its chat template."""
    from ..data.chat import use_chat_template
    from ..models.target.config import TargetConfig
    from ..models.target.loading import default_device, load_target

    silence_bars()
    device = options["device"] or str(default_device())
    # A CPU emulates bfloat16, and only float32 can be held to the very same tokens.
    dtype = options["dtype"] or ("float32" if device == "cpu" else "auto")
    tokenizer_options = parse_tokenizer_options(options.get("tokenizer_options") or [])
    changes = {
        "name_or_path": options["target"],
        "device": device,
        "dtype": dtype,
        "quantization": parse_quantization(options.get("quantization")),
        "tokenizer_options": tokenizer_options,
    }
    target = load_target(config_from(TargetConfig, options, **changes), needs_tokenizer=needs_tokenizer)
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
            options[name] = value  # a text needs no quotes
    return options


def parse_quantization(text: str | None) -> dict[str, Any] | None:
    """Parse the quantisation of a target: a method's bare name, or its options as in a configuration.

    Raises ValueError for anything else, and for a method that needs options.
    """
    if text is None:
        return None
    if text in DEFAULT_QUANTIZATIONS:
        return DEFAULT_QUANTIZATIONS[text]
    from ..models.target.quantization import check_method

    try:
        options = yaml.safe_load(text)
    except yaml.YAMLError:
        options = text
    check_method(options)
    return dict(options)


def parse_setting(text: str) -> dict[str, Any]:
    """Parse a drafter's options, written as in a configuration. Raises ValueError for a text that is none."""
    try:
        setting = yaml.safe_load(text)
    except yaml.YAMLError:
        setting = None
    if not isinstance(setting, dict) or not all(isinstance(name, str) for name in setting):
        raise ValueError(f"--setting is {text!r}; give options as in a configuration: '{{depth: 5, top_k: 8}}'")
    if joined := [key for key in setting if ":" in str(key)]:
        raise ValueError(f"--setting is {text!r}, which has the one word {joined[0]!r}; YAML needs a space after the colon")
    return setting
