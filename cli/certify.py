"""`outrider certify`: prove by tests that decoding is lossless."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from . import options as shared
from .errors import starts_again
from .launch import launch_stages
from .options import chosen_suite, config_from, load_chosen_target, take_paths, target_config

if TYPE_CHECKING:
    import torch

    from ..eval.certify.certificate import CertificateLine
    from ..eval.config import EvalConfig


def certify_command(
    target: Annotated[str | None, typer.Option(help="The target, a directory or a Hub id. Needs --drafter.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help=f"{shared.DRAFTER_HELP} Repeat for several.")] = None,
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
    rules: Annotated[bool, typer.Option(help="Also certify the acceptance rules (takes a few minutes).")] = True,
    output: Annotated[Path, typer.Option(help="The certificate's file.")] = Path("certificate.json"),
) -> None:
    """Certify that decoding is lossless.

    Enumerates the acceptance rules exactly. With --target and --drafter, also decodes real prompts
    and compares the answers. Exits with status 1 if anything fails.
    """
    # 1. Check the options before anything slow is imported.
    options = take_paths({**locals()})
    suite, suite_path, drafter, output = (options[name] for name in ("suite", "suite_path", "drafter", "output"))
    if not rules and target is None:
        raise ValueError("nothing to certify: give --target and --drafter, or remove --no-rules")
    if (target is None) != (not drafter):
        raise ValueError("--target and --drafter go together; give both, or neither to certify the rules alone")
    is_of_stages = stage_layers or launch or decode != "synchronous"
    if target is None and (compiled or cuda_graphs or quantization or memory_budget_gib or device_map or is_of_stages):
        raise ValueError(
            "--compiled, --cuda-graphs, --quantization, --memory-budget-gib, --device-map, --stage-layers, --launch and "
            "--decode need a target, and there is none; give --target and --drafter"
        )
    import torch  # torch and the modules that use it load too slowly for --help

    from ..data.files import guarded
    from ..eval.certify.certificate import certificate_table, certify_rules, false_alarm_rate, passes, write_certificate
    from ..eval.config import EvalConfig
    from ..eval.measure.environment import describe_environment

    # 2. Certify decoding with the drafters, then the rules.
    used_device = torch.device(device or "cpu")  # the rules alone are certified on a CPU
    lines: list[CertificateLine] = []
    subject: dict[str, Any] = {}
    with starts_again("certificate"):
        if drafter:
            config = config_from(EvalConfig, options, suites=[chosen_suite(suite, suite_path, limit=limit)])
            lines, subject, used_device = _certify_decoding(config, drafter, options)
        if rules:
            lines += certify_rules()
    subject["environment"] = asdict(describe_environment(used_device))

    # 3. Write the certificate and print it.
    with guarded(output):
        write_certificate(lines, subject, output)
    (console := Console()).print(certificate_table(lines))
    verdict = "[bold green]LOSSLESS[/]" if passes(lines) else "[bold red]NOT LOSSLESS[/]"
    console.print(verdict, f"({output}); probability that a lossless decoder fails: at most {false_alarm_rate(lines):.1e}")
    if not passes(lines):
        raise typer.Exit(1)


def _certify_decoding(
    config: "EvalConfig", drafter: list[str], options: dict[str, Any]
) -> "tuple[list[CertificateLine], dict[str, Any], torch.device]":
    """Certify decoding with each drafter.

    Returns the certificate's lines, the description of what they certify, and the target's device.
    """
    from ..data.fields import raise_problems
    from ..eval.certify.certificate import certify_decoding
    from ..eval.config import stage_problems
    from ..eval.measure.methods import load_drafters, method_specs, methods_by_place
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
        "drafters": {spec.label: spec.parts.weights for spec in specs.values()},
    }
    return lines, subject, target.device
