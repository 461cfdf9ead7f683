"""`outrider certify`: prove by tests that decoding is lossless."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from rich.console import Console

from ..data.fields import OPTIONS, PositiveInt, raise_problems
from ..eval.config import EvalConfig, stage_problems
from ..models.llm.config import TargetConfig
from .command_line import CommandLine
from .errors import starts_again
from .launch import launch_stages
from .options import load_chosen_target, with_limit

if TYPE_CHECKING:
    import torch

    from ..eval.certify.certificate import CertificateLine


@dataclass(kw_only=True, config=OPTIONS)
class CertifyOptions:
    """Options of `outrider certify`."""

    drafter: list[str] = Field(default_factory=list)
    """Drafters to decode with, as in `outrider eval`. None: only the acceptance rules are certified,
    without a target."""
    limit: PositiveInt = 10
    """Draw at most this many prompts."""
    rules: bool = True
    """Also certify the acceptance rules, which takes a few minutes."""
    output: Path = Path("certificate.json")
    """The certificate's file."""
    launch: str | None = None
    """Run in several processes, for target.stage_layers: a launch file such as pipeline_cpu, or its
    path. Options of `accelerate launch` may follow it."""
    target: TargetConfig | None = None
    """The target. In float32 tokens are compared; bfloat16 and float16 audit margins."""
    eval: EvalConfig

    DEFAULTS: ClassVar = {
        "target": {"dtype": "float32"},
        "eval": {"suites": ["stdlib"], "max_new_tokens": 64},
    }
    USUAL: ClassVar = ("target.name_or_path", "target.dtype", "target.device", "eval.suites", "eval.max_new_tokens")

    def __post_init__(self) -> None:
        if not self.rules and not self.drafter:
            raise ValueError("nothing to certify: give target and drafter, or remove --no-rules")
        if (self.target is None) == bool(self.drafter):
            raise ValueError("target and drafter go together; give both, or neither to certify the rules alone")


def certify_command(options: CertifyOptions, line: CommandLine) -> None:
    """Certify that decoding is lossless.

    Enumerates the acceptance rules exactly. With a target and drafters, also decodes real prompts
    and compares the answers. Exits with status 1 if anything fails.
    """
    import torch

    from ..data.files import guarded
    from ..eval.certify.certificate import certificate_table, certify_rules, false_alarm_rate, passes, write_certificate
    from ..eval.measure.environment import describe_environment

    # 1. Certify decoding with the drafters, then the rules.
    used_device = torch.device("cpu")  # the rules alone are certified on a CPU
    lines: list[CertificateLine] = []
    subject: dict[str, Any] = {}
    with starts_again("certificate"):
        if options.target is not None:
            lines, subject, used_device = _certify_decoding(options, options.target, line)
        if options.rules:
            lines += certify_rules()
    subject["environment"] = asdict(describe_environment(used_device))

    # 2. Write the certificate and print it.
    with guarded(options.output):
        write_certificate(lines, subject, options.output)
    (console := Console()).print(certificate_table(lines))
    verdict = "[bold green]LOSSLESS[/]" if passes(lines) else "[bold red]NOT LOSSLESS[/]"
    note = f"({options.output}); probability that a lossless decoder fails: at most {false_alarm_rate(lines):.1e}"
    console.print(verdict, note)
    if not passes(lines):
        raise SystemExit(1)


def _certify_decoding(
    options: CertifyOptions, target_config: TargetConfig, line: CommandLine
) -> "tuple[list[CertificateLine], dict[str, Any], torch.device]":
    """Certify decoding with each drafter.

    Returns the certificate's lines, the description of what they certify, and the target's device.
    """
    from ..eval.certify.certificate import certify_decoding
    from ..eval.measure.methods import load_drafters, method_specs, methods_by_place, recorded_methods
    from ..eval.measure.pipelined import recorded_stages
    from ..eval.records.method_names import MethodFacts, method_names
    from ..eval.run import check_inputs, load_suites
    from ..models.drafters.saved.parts import parse_drafter_name

    # 1. Load the target after all inputs are checked.
    config = with_limit(options.eval, options.limit)
    all_parts = [parse_drafter_name(name) for name in options.drafter]
    kinds = {part.name for parts in all_parts for part in parts.parts}
    raise_problems(stage_problems(config, target_config.stage_layers, kinds))
    check_inputs(config, all_parts)
    launch_stages("certify", line, target_config)
    target = load_chosen_target(target_config)

    # 2. Name each method as the tables of an evaluation do, and decode with it.
    specs = method_specs(config, all_parts)
    facts = [MethodFacts(key=key, described=described) for key, described in recorded_methods(specs).items()]
    names = dict(zip(specs, map(str, method_names(facts)), strict=True))
    (methods,) = methods_by_place(config, specs, load_drafters(specs, target), target).values()
    named = [replace(method, name=names[method.name]) for method in methods if method.name in names]
    suites = load_suites(config)
    lines = certify_decoding(target, named, target.tokenizer, suites, max_new_tokens=config.max_new_tokens)

    # 3. Describe what was certified: the target, its form, and the drafters' weights.
    subject = {
        "target": target.identity.name,
        "weights_sha256": target.identity.weights_sha256,
        "suite": config.suites[0].name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": target.identity.quantization,
        "form": target.form,
        **recorded_stages(target),
        "drafters": {names[key]: spec.parts.weights for key, spec in specs.items()},
    }
    return lines, subject, target.device
