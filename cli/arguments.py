"""The command line of `outrider run` and train.py: help and parsing."""

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from textwrap import fill

from .describe import choices
from .recipe_file import SUFFIXES

HELP = """Usage: outrider run RECIPE [OPTION=VALUE]... [--plan|--cfg job] [--launch NAME]

Run a recipe: distil a target's answers, train a drafter on them, evaluate it,
and export it. A finished stage is skipped, an interrupted one is resumed.

  RECIPE          A recipe's name (outrider recipes lists them) or your own YAML
                  file. conf=RECIPE is the same; conf=[A,B] puts B on top of A.
  OPTION=VALUE    Changes an option: train.steps=20 data.path=chats.jsonl
                  (outrider options SECTION lists them with their meanings).
  GROUP=NAME      Chooses a file of settings: drafter=eagle3 eval=chat
  --plan          Only print what the run would take: time, memory, disk.
  --cfg job       Only print the whole configuration; --resolve fills in ${...}.
  --launch NAME   Run on several processes: the name of a packaged launch file
                  (LAUNCH_FILES)
                  or the path of a file. Options of `accelerate launch` may
                  follow: --launch one_node --num_processes 4
  --hydra-help    Help of Hydra, which composes the recipe.

Examples:
  outrider run demo
  outrider run demo drafter=medusa_demo train.steps=100
  outrider run my.yaml --plan
  outrider run eagle3_llama3_8b target.name_or_path=DIR data.path=FILE \\
      --launch one_node

`outrider init my.yaml --target DIR_OR_ID --data FILE` writes a recipe for your
own model and data. With accelerate or torchrun instead of --launch:
`accelerate launch -m outrider.train conf=RECIPE OPTION=VALUE...`
"""
VALUE_OPTIONS = (
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    *("--experimental-rerun", "--package", "-p"),
)
"""Options of Hydra that are followed by a value."""
HYDRA_OPTIONS = (
    *VALUE_OPTIONS,
    *("--hydra-help", "--version", "--info", "-i", "--multirun", "-m", "--run", "-r", "--shell-completion", "-sc"),
)
OWN_OPTIONS = ("--help", "--plan", "--cfg", "--resolve", "--launch")
LAUNCHER_OPTIONS = (
    *("--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port", "--gpu_ids"),
    *("--num_cpu_threads_per_process", "--mixed_precision", "--config_file", "--multi_gpu", "--cpu", "--zero_stage"),
    *("--use_deepspeed", "--use_fsdp", "--offload_optimizer_device", "--dynamo_backend", "--rdzv_backend"),
)
"""Usual options of `accelerate launch`."""


@dataclass
class Request:
    """A parsed command line."""

    overrides: list[str] = field(default_factory=list)
    """Overrides in Hydra's form. The recipe is one of them: conf=RECIPE."""
    show: bool = False
    """Only print the configuration."""
    resolve: bool = False
    launch: str | None = None
    """Name or path of a launch file."""
    launch_options: list[str] = field(default_factory=list)
    """Options for `accelerate launch`."""
    hydra_options: list[str] = field(default_factory=list)
    """Options of Hydra itself. If there are any, Hydra handles the whole command line."""


def run_help() -> str:
    """Return the help of `outrider run`."""
    indent = " " * 18
    names = fill(f"({', '.join(choices('launch'))})", 80, initial_indent=indent, subsequent_indent=indent)
    return HELP.replace("                  (LAUNCH_FILES)", names)


def parse_arguments(arguments: list[str]) -> Request:
    """Sort the arguments of a command line: overrides, recipes, and options."""
    # 1. `--launch` decides to which program unknown options belong: to accelerate or to Hydra.
    request = Request()
    rest = iter(arguments)
    is_launched = any(argument.partition("=")[0] == "--launch" for argument in arguments)

    # 2. Sort one argument at a time. An option may consume the argument after it.
    for argument in rest:
        name, separator, value = argument.partition("=")
        if argument == "--plan":
            request.overrides.append("plan=true")
        elif argument == "--resolve":
            request.resolve = True
        elif name in ("--cfg", "-c") and (choice := value if separator else next(rest, "job")) == "job":
            request.show = True
        elif name in ("--cfg", "-c"):
            request.hydra_options += ["--cfg", choice]
        elif name == "--launch":
            request.launch = value if separator else next(rest, None)
            if not request.launch:
                raise ValueError(f"--launch needs a launch file: one of {', '.join(choices('launch'))}, or a path")
        elif argument.startswith("-") and argument != "-":
            if not is_launched and name not in HYDRA_OPTIONS:
                raise ValueError(_unknown_option(name))
            options = request.launch_options if is_launched else request.hydra_options
            options.append(argument)
            if not separator and (is_launched or argument in VALUE_OPTIONS):
                options += [next(rest) for _ in _values_after(argument, arguments)]
        elif argument.startswith("~") or (separator and re.fullmatch(r"\+{0,2}[\w./@:-]+", name)):
            request.overrides.append(argument)
        else:
            request.overrides.append(f"conf={argument}")
    return request


def with_underscores(option: str) -> str:
    """Return an option as accelerate's files spell it: --num_processes for --num-processes."""
    return option.replace("-", "_").replace("__", "--", 1)


def _unknown_option(name: str) -> str:
    """Return the message for an unknown option, with the option that it probably means."""
    if with_underscores(name) in LAUNCHER_OPTIONS:
        names = ", ".join(choices("launch"))
        return f"{name} is an option of accelerate launch; give --launch NAME before it. NAME is one of {names}"
    close = get_close_matches(name, [*OWN_OPTIONS, *HYDRA_OPTIONS], 1)
    meant = f"did you mean {close[0]}?" if close else f"the options are {', '.join(OWN_OPTIONS)}; outrider run --help"
    return f"unknown option {name}; {meant}"


def _values_after(option: str, arguments: list[str]) -> list[str]:
    """Return the value that follows an option, or nothing.

    Another option, an override, a recipe and a recipe's file are not values.
    """
    following = arguments[arguments.index(option) + 1 :][:1]
    return [
        text
        for text in following
        if not text.startswith("-")
        and (option in VALUE_OPTIONS or not ("=" in text or text.endswith(SUFFIXES) or text in choices("conf")))
    ]
