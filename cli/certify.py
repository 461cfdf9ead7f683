"""`outrider certify`: prove by tests that decoding is lossless."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic.dataclasses import dataclass
from rich.console import Console

from ..data.fields import OPTIONS, PositiveInt
from ..eval.config import EvalConfig
from .command_line import CommandLine
from .options import DrafterNames, TargetOptions, loaded_with, require_used, with_limit

if TYPE_CHECKING:
    from ..models.drafters.saved.parts import DrafterParts
    from ..models.export.package import CertificateLine
    from ..models.llm.hf_target import HFTarget

USED = frozenset({"suites", "settings", "baselines", "merge", "max_new_tokens", "decode", "seed"})
"""Options of the section `eval` that a certificate depends on."""


@dataclass(kw_only=True, config=OPTIONS)
class CertifyOptions(TargetOptions):
    """Options of `outrider certify`."""

    drafter: DrafterNames
    """Drafters to decode with, as in `outrider eval`."""
    limit: PositiveInt = 10
    """Draw at most this many prompts."""
    output: Path = Path("certificate.json")
    """The certificate's file."""
    launch: str | None = None
    """Run in several processes, for target.stage_layers: a launch file such as pipeline_cpu, or its
    path. Options of `accelerate launch` may follow it."""
    eval: EvalConfig

    DEFAULTS: ClassVar = {
        "target": {"dtype": "float32"},
        "eval": {"suites": ["stdlib"], "max_new_tokens": 64},
    }
    USUAL: ClassVar = ("target.name_or_path", "target.dtype", "target.device", "eval.suites", "eval.max_new_tokens")

    def __post_init__(self) -> None:
        require_used(self.eval, USED, "certify")


def certify_command(options: CertifyOptions, line: CommandLine) -> None:
    """Certify that a target decodes losslessly with some drafters.

    Decodes real prompts, and compares the answers with plain decoding's and the samples with the
    target's probabilities. Exits with status 1 if anything differs. An interrupted certificate
    resumes.
    """
    # torch and the modules that use it load too slowly for --help
    from ..data.files import guarded, write_json
    from ..eval.certify.certificate import certificate_of, certificate_table, unfinished_file

    # 1. Run the checks.
    output = options.output
    with guarded(output):
        config = with_limit(options.eval, options.limit)
        drafters, target = loaded_with("certify", config, options, line)
        lines, subject = _decode(config, drafters, target, unfinished_file(output))

        # 2. Write the certificate and print it.
        certificate = certificate_of(lines, subject)
        write_json(output, asdict(certificate))
        unfinished_file(output).unlink()
    (console := Console()).print(certificate_table(lines))
    verdict = "[bold green]LOSSLESS[/]" if certificate.passed else "[bold red]NOT LOSSLESS[/]"
    rate = certificate.false_alarm_rate
    console.print(verdict, f"({output}); probability that a lossless decoder fails: at most {rate:.1e}")
    if not certificate.passed:
        raise SystemExit(1)


def _decode(
    config: EvalConfig, drafters: "list[DrafterParts]", target: "HFTarget", unfinished: Path
) -> "tuple[list[CertificateLine], dict[str, Any]]":
    """Run the checks of a loaded target."""
    from ..data.files import sha256_json
    from ..eval.certify.certificate import decoding_checks, read_unfinished, run_checks
    from ..eval.measure.environment import describe_environment, recorded_stages
    from ..eval.measure.methods import load_drafters, method_specs, methods_by_place, recorded_methods
    from ..eval.run import load_suites
    from ..models.drafters.saved.loading import trained_parts

    # 1. Load the drafters, and name each method as the tables of an evaluation do.
    specs = method_specs(config, drafters)
    loaded = load_drafters(specs, target)
    parts = [part for drafter in loaded.values() for part in trained_parts(drafter)]
    (methods,) = methods_by_place(config, specs, loaded, target).values()
    named = [replace(method, name=method.label) for method in methods if method.name in specs]
    suites = load_suites(config)
    checks = decoding_checks(target, named, suites, max_new_tokens=config.max_new_tokens)

    # 2. Describe what is certified: the target, its form, and the drafters' weights.
    subject = {
        "target": target.identity.name,
        "weights_sha256": target.identity.weights_sha256,
        "suites": {suite.name: suite.revision for suite in suites},
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": target.identity.quantization,
        "chat_template_sha256": sha256_json(target.tokenizer.chat_template),
        "form": target.form,
        **recorded_stages(target),
        "drafters": {spec.label: spec.parts.weights for spec in specs.values()},
        "environment": asdict(describe_environment(target.device, {})),
    }
    request = {**subject, "max_new_tokens": config.max_new_tokens, "methods": recorded_methods(specs)}
    # 3. Run the checks, with linear layers as for the lines that are kept.
    kept = read_unfinished(unfinished, request)
    target.choose_linears(*parts, recorded=None if kept is None else kept.request["environment"]["linears"])
    subject["environment"]["linears"] = target.linears
    return run_checks(checks, unfinished, request, kept), subject
