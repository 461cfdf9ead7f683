"""`outrider certify`: prove by tests that decoding is lossless."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from . import options as shared
from .launch import launch_stages
from .options import chosen_suite, config_from, load_chosen_target, take_paths, target_config

if TYPE_CHECKING:
    from ..eval.certify.certificate import CertificateLine
    from ..eval.config import EvalConfig


def certify_command(
    target: shared.Target,
    drafter: Annotated[list[str], typer.Option(help=f"{shared.DRAFTER_HELP} Repeat for several.")],
    suite: Annotated[str, typer.Option(help="Prompts to decode: mt_bench, alpaca_eval, stdlib or FILE.jsonl.")] = "stdlib",
    suite_path: shared.SuitePath = None,
    limit: shared.Limit = 10,
    max_new_tokens: shared.MaxNewTokens = 64,
    dtype: Annotated[
        str, typer.Option(help="The target's dtype. float32 compares tokens; bfloat16 and float16 audit margins.")
    ] = "float32",
    quantization: shared.Quantization = None,
    memory_budget_gib: shared.MemoryBudget = None,
    budget_tokens: shared.BudgetTokens = None,
    stage_layers: shared.StageLayers = None,
    stall_seconds: shared.StallSeconds = None,
    launch: shared.Launch = None,
    decode: shared.Decode = "synchronous",
    device: shared.Device = None,
    device_map: shared.DeviceMap = None,
    compiled: shared.Compiled = False,
    cuda_graphs: shared.CudaGraphs = False,
    output: Annotated[Path, typer.Option(help="The certificate's file.")] = Path("certificate.json"),
) -> None:
    """Certify that a target decodes losslessly with some drafters.

    Decodes real prompts, and compares the answers with plain decoding's and the samples with the
    target's probabilities. Exits with status 1 if anything differs. An interrupted certificate
    resumes.
    """
    # torch and the modules that use it load too slowly for --help
    options = take_paths({**locals()})
    suite, suite_path, drafter, output = (options[name] for name in ("suite", "suite_path", "drafter", "output"))
    from ..data.files import guarded
    from ..eval.certify.certificate import certificate_table, false_alarm_rate, passes, unfinished_file, write_certificate
    from ..eval.config import EvalConfig

    # 1. Run the checks.
    config = config_from(EvalConfig, options, suites=[chosen_suite(suite, suite_path, limit=limit)])
    with guarded(output):
        lines, subject = _certify(config, drafter, options, unfinished_file(output))

        # 2. Write the certificate and print it.
        write_certificate(lines, subject, output)
        unfinished_file(output).unlink()
    (console := Console()).print(certificate_table(lines))
    verdict = "[bold green]LOSSLESS[/]" if passes(lines) else "[bold red]NOT LOSSLESS[/]"
    console.print(verdict, f"({output}); probability that a lossless decoder fails: at most {false_alarm_rate(lines):.1e}")
    if not passes(lines):
        raise typer.Exit(1)


def _certify(
    config: "EvalConfig", drafter: list[str], options: dict[str, Any], unfinished: Path
) -> "tuple[list[CertificateLine], dict[str, Any]]":
    """Certify decoding with each drafter.

    Returns the certificate's lines, and the description of what they certify. Until all are there,
    the file `unfinished` keeps the lines.
    """
    from ..data.fields import raise_problems
    from ..eval.certify.certificate import decoding_checks, run_checks
    from ..eval.config import stage_problems
    from ..eval.measure.environment import describe_environment
    from ..eval.measure.methods import load_drafters, method_specs, methods_by_place, recorded_methods
    from ..eval.measure.pipelined import recorded_stages
    from ..eval.run import check_inputs, load_suites
    from ..models.drafters.saved.parts import parse_drafter_name

    # 1. Load the target after all inputs are checked.
    # Options that can't be combined are an error before prompts are read.
    all_parts = [parse_drafter_name(name) for name in drafter]
    kinds = {part.name for parts in all_parts for part in parts.parts}
    raise_problems(stage_problems(config, target_config(options).stage_layers, kinds))
    check_inputs(config, all_parts)
    launch_stages(options["launch"], target_config(options))
    target = load_chosen_target(options)

    # 2. Name each method as the tables of an evaluation do, and decode with it.
    specs = method_specs(config, all_parts)
    (methods,) = methods_by_place(config, specs, load_drafters(specs, target), target).values()
    named = [replace(method, name=method.label) for method in methods if method.name in specs]
    suites = load_suites(config)
    checks = decoding_checks(target, named, target.tokenizer, suites, max_new_tokens=config.max_new_tokens)

    # 3. Describe what is certified (the target, its form, and the drafters' weights), and run the checks.
    subject = {
        "target": target.identity.name,
        "weights_sha256": target.identity.weights_sha256,
        "suite": config.suites[0].name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": target.identity.quantization,
        "form": target.form,
        **recorded_stages(target),
        "drafters": {spec.label: spec.parts.weights for spec in specs.values()},
        "environment": asdict(describe_environment(target.device)),
    }
    prompts = {"suite_revision": suites[0].revision, "max_new_tokens": config.max_new_tokens}
    return run_checks(checks, unfinished, {**subject, **prompts, "methods": recorded_methods(specs)}), subject
