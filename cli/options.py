"""What several commands do with their options before their work."""

import sys
from collections.abc import Collection
from dataclasses import field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS, NumThreads, raise_problems
from ..data.template_options import read_template
from ..eval.config import stage_problems
from ..models.llm.config import TargetConfig
from .errors import silence_bars
from .launch import launch_stages

if TYPE_CHECKING:
    from ..eval.config import EvalConfig
    from ..models.drafters.saved.parts import DrafterParts
    from ..models.llm.hf_target import HFTarget
    from .command_line import CommandLine


@dataclass(kw_only=True, config=OPTIONS)
class TargetOptions:
    """Options of a command that decodes with a target."""

    target: TargetConfig
    chat_template: str | None = None
    """A .jinja file or a template's name. null: the tokenizer's."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, as in a recipe's data: {enable_thinking: false}."""
    num_threads: NumThreads | None = None
    """CPU threads. null: torch's default."""

    def load(self) -> "HFTarget":
        """Set torch's threads, and load the target with its chat template, as `load_chosen_target` does."""
        import torch

        from ..data.chat import use_chat_template

        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        if self.chat_template is not None:
            read_template(self.chat_template)  # a missing file is an error before the weights are read
        target = load_chosen_target(self.target)
        use_chat_template(target.tokenizer, self.chat_template, self.template_options)
        return target


DrafterNames = Annotated[list[str], Field(min_length=1)]
BY_MACHINE = {"dtype": None}
"""Default of a command's target: float32 on a CPU, else as stored."""


def with_limit(config: "EvalConfig", limit: int | None) -> "EvalConfig":
    """Return the evaluation with this limit for each suite that has none."""
    return replace(config, suites=[suite if suite.limit else replace(suite, limit=limit) for suite in config.suites])


def require_used(config: "EvalConfig", used: Collection[str], command: str) -> None:
    """Raise ValueError for options of the section `eval` that are set, and that a command doesn't use."""
    unset = type(config)(**{name: getattr(config, name) for name in used})
    names = [option.name for option in fields(config)]
    if unused := [f"eval.{name}" for name in names if getattr(config, name) != getattr(unset, name)]:
        raise ValueError(f"{', '.join(unused)}: `outrider {command}` doesn't use this; leave it out")


def loaded_with(command: str, config: "EvalConfig", options: Any, line: "CommandLine") -> "tuple[list[DrafterParts], HFTarget]":
    """Check the drafters and the prompts of `eval` or `certify`, start the stages, and load the target."""
    from ..eval.run import check_inputs
    from ..models.drafters.saved.parts import parse_drafter_name

    drafters = [parse_drafter_name(name) for name in options.drafter]
    kinds = {part.name for parts in drafters for part in parts.parts}
    raise_problems(stage_problems(config, options.target.stage_layers, kinds))
    check_inputs(config, drafters)
    launch_stages(command, line, options.target)
    return drafters, options.load()


def load_chosen_target(config: TargetConfig, *, needs_tokenizer: bool = True) -> "HFTarget":
    """Load a command's target. Prints which weights are read in passes."""
    from ..models.llm.loading import load_target

    silence_bars()
    target = load_target(config, needs_tokenizer=needs_tokenizer)
    if config.memory_budget_gib is not None:
        fits = "all weights fit into target.memory_budget_gib, so none are read in passes"
        text = fits if target.stream is None else target.stream.plan.describe(target.stream.bytes_per_second)
        print(f"{config.name_or_path}: {text}", file=sys.stderr)
    return target
