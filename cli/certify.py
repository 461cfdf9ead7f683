"""`outrider certify`: is the decoding lossless?"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def certify_command(
    target: Annotated[str | None, typer.Option(help="A target, to certify with --drafter: a directory or a Hub id.")] = None,
    drafter: Annotated[list[Path] | None, typer.Option(help="A drafter's directory. Repeat for several.")] = None,
    suite: Annotated[str, typer.Option(help="Prompts to decode: mt_bench, alpaca_eval or stdlib.")] = "stdlib",
    suite_path: Annotated[str | None, typer.Option(help="Local file of the suite.")] = None,
    limit: Annotated[int, typer.Option(help="Draw at most so many prompts.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer, at most.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32 compares tokens; bfloat16 and float16 audit margins.")] = "float32",
    device: Annotated[str | None, typer.Option(help="Unless given, the first accelerator, else cpu.")] = None,
    compiled: Annotated[bool, typer.Option(help="Run the target through torch.compile, as eval --compiled does.")] = False,
    cuda_graphs: Annotated[
        bool, typer.Option(help="Replay target and drafters as CUDA graphs, as eval --cuda-graphs does.")
    ] = False,
    rules: Annotated[bool, typer.Option(help="Certify the acceptance rules too (a few minutes).")] = True,
    output: Annotated[Path, typer.Option(help="Where the certificate goes.")] = Path("certificate.json"),
) -> None:
    """Certify that decoding is lossless: the acceptance rules exactly, and a target with drafters on real prompts.

    Exits with 1 where anything fails.
    """
    if not rules and target is None:
        raise ValueError("nothing to certify: give --target and --drafter, or leave --no-rules out")
    if (target is None) != (not drafter):
        raise ValueError("--target and --drafter go together; give both, or neither to certify the rules alone")
    if target is None and (compiled or cuda_graphs):
        raise ValueError("--compiled and --cuda-graphs are forms of a target, and there is none; give --target and --drafter")
    import torch  # it, and all that uses it, loads too slowly for --help

    from ..data.files import sha256_file
    from ..eval.certify.certificate import (
        certificate_table,
        certify_decoding,
        certify_rules,
        false_alarm_rate,
        passes,
        write_certificate,
    )
    from ..eval.config import EvalConfig, SuiteConfig
    from ..eval.measure.environment import describe_environment
    from ..eval.measure.methods import method_specs, proposer
    from ..eval.run import check_inputs, load_suites
    from ..models.drafters import load_drafter
    from ..models.drafters.saved.download import resolve_drafter
    from ..models.drafters.saved.folder import WEIGHTS_FILE
    from ..models.target.config import TargetConfig
    from ..models.target.loading import load_target

    config = EvalConfig(suites=[SuiteConfig(name=suite, path=suite_path, limit=limit)], max_new_tokens=max_new_tokens)
    subject: dict[str, object] = {}
    place = torch.device(device or "cpu")  # the rules alone are certified on a CPU
    lines = []
    if target is not None and drafter:
        drafter = [resolve_drafter(each) for each in drafter]
        check_inputs(config, drafter)
        loaded = load_target(
            TargetConfig(name_or_path=target, dtype=dtype, device=device, compiled=compiled, cuda_graphs=cuda_graphs)
        )
        place = loaded.device
        folders = {name: spec.path for name, spec in method_specs(config, drafter).items()}
        drafters = {name: proposer(load_drafter(path, loaded), loaded) for name, path in folders.items()}
        suites = load_suites(config)
        lines += certify_decoding(loaded, drafters, loaded.tokenizer, suites, max_new_tokens=max_new_tokens)
        subject |= {"target": loaded.identity.name, "weights_sha256": loaded.identity.weights_sha256, "suite": suite}
        subject |= {"dtype": str(loaded.dtype).removeprefix("torch."), "form": loaded.form}
        subject["drafters"] = {name: sha256_file(path / WEIGHTS_FILE) for name, path in folders.items()}
    if rules:
        lines += certify_rules()
    subject["environment"] = asdict(describe_environment(place))
    write_certificate(lines, subject, output)
    console = Console()
    console.print(certificate_table(lines))
    verdict = "[bold green]LOSSLESS[/]" if passes(lines) else "[bold red]NOT LOSSLESS[/]"
    console.print(verdict, f"({output}); were all sound, it would fail with probability {false_alarm_rate(lines):.1e} at most")
    if not passes(lines):
        raise typer.Exit(1)
