"""`outrider export` and `outrider import`: drafters in the formats of other programs."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Revision, TrainedTarget, load_chosen_target, parse_setting, take_paths

if TYPE_CHECKING:
    from ..models.llm.hf_target import HFTarget

WANTED = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
"""Files of a Hub repository that are downloaded. None of them is code."""
UNWANTED = ["*/*", "optimizer*", "rng_state*", "scaler*", "scheduler*", "train*_state*", "training_args*"]
"""Files that are not downloaded: states of a training, which may be large, and subfolders."""


def export_command(
    drafter: Annotated[str, typer.Argument(help="The drafter to export: a directory, or its name on the Hub.")],
    target: TrainedTarget,
    to: Annotated[
        str,
        typer.Option(
            help="The engine: vllm or sglang. Or a format, with the kind of drafter that it holds: eagle3 (eagle3; "
            "vLLM and SGLang), speculators (eagle3; vLLM), dspark (block; vLLM, SGLang and llama.cpp), "
            "speculators-dspark (block; vLLM and llama.cpp), eagle1-vllm (eagle), eagle1-sglang (eagle), medusa (medusa), "
            "tensorrt-llm (medusa), apple (redrafter), transformers (draft_model; also vLLM and SGLang)."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the export. It must be new, empty, or an earlier export.")],
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the export: float32, float16 or bfloat16. Default: as stored.")
    ] = None,
    revision: Revision = None,
) -> None:
    """Write a drafter in the format of a serving engine, a library or a published release.

    A drafter that the format can't hold completely is an error; nothing is dropped.
    docs/how-to/engines shows how to serve each format.
    """
    options = take_paths({**locals()}, drafter="DRAFTER")
    drafter, target, output = options["drafter"], options["target"], options["output"]
    import torch  # torch and the modules that use it load too slowly for --help

    from ..data.files import guarded
    from ..models.drafters.saved.download import resolve_drafter
    from ..models.drafters.saved.folder import read_drafter_config
    from ..models.export.config import DTYPES
    from ..models.export.registry import ENGINES, engine_format, export_drafter, find_format

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")

    # 1. Check all arguments before the target is loaded, which may take long.
    if to not in ENGINES:
        find_format(to)
    directory = resolve_drafter(drafter)
    read_drafter_config(directory)
    name = engine_format(to, directory) if to in ENGINES else to

    # 2. Load the target, and export.
    loaded = _load(target, revision, needs_tokenizer=find_format(name).kind == "draft_model")
    with guarded(output):
        export_drafter(directory, loaded, name, output, None if dtype is None else getattr(torch, dtype))
    typer.echo(f"{output}: {drafter} in the format {name}")


def import_command(
    folder: Annotated[str, typer.Argument(help="The published drafter: a folder, or a Hub id.")],
    target: TrainedTarget,
    output: Annotated[Path, typer.Option(help="Directory for the drafter. It must be new.")],
    source: Annotated[
        str | None,
        typer.Option("--from", help="The format's name (see outrider export --to). Default: detected from the files."),
    ] = None,
    setting: Annotated[str | None, typer.Option(help="Options of the new drafter: '{depth: 5, top_k: 8}'.")] = None,
    folder_revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the published drafter on the Hub.")
    ] = None,
    revision: Revision = None,
) -> None:
    """Convert a published EAGLE, EAGLE-3, DSpark, Medusa, ReDrafter or draft model to a drafter.

    Reads only plain tensors, never code, and checks that they fit the target. The target needs a
    tokenizer only for a draft model: other kinds use its weights and sizes alone.
    """
    # 1. Check the arguments before anything is downloaded.
    paths = take_paths({**locals()})
    folder, target, output = paths["folder"], paths["target"], paths["output"]
    from ..data.files import guarded
    from ..models.drafters import save_drafter
    from ..models.drafters.registry import kind_of
    from ..models.drafters.saved.download import resolve_folder
    from ..models.export.package import require_new
    from ..models.export.registry import find_format, format_of, import_drafter

    require_new(output)
    options = {} if setting is None else parse_setting(setting)
    if source is not None:
        find_format(source)
    directory = resolve_folder(folder, WANTED, folder_revision, ignore_patterns=UNWANTED)
    if not directory.is_dir():
        raise ValueError(f"{folder} is neither a local folder nor a name on the Hub; give a directory, or user/name")
    format = format_of(directory) if source is None else find_format(source)  # loading the target may take long

    # 2. Convert, and save.
    loaded = _load(target, revision, needs_tokenizer=format.kind == "draft_model")
    drafter = import_drafter(directory, loaded, name=source, options=options)
    with guarded(output):
        require_new(output)  # another process may have written it since
        save_drafter(drafter, output, loaded.identity)
    num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    typer.echo(f"{output}: {folder} as a drafter of the kind {kind_of(drafter)}, with {num_parameters:,} parameters")
    command = ["outrider", "eval", "--target", target, *(["--revision", revision] if revision else [])]
    typer.echo(f"Measure it: {shlex.join([*command, '--drafter', str(output), '--suite', 'mt_bench'])}")


def _load(target: str, revision: str | None, *, needs_tokenizer: bool) -> "HFTarget":
    """Load the target on the CPU, as stored.

    Only its sizes, embeddings, head and at most its tokenizer are read.
    """
    options = {"target": target, "revision": revision, "device": "cpu", "dtype": "auto"}
    return load_chosen_target(options, needs_tokenizer=needs_tokenizer)
