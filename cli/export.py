"""`outrider export` and `outrider import`: drafters in the formats of other programs."""

import shlex
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS, one_of
from ..models.export.config import DTYPES
from ..models.llm.config import TargetConfig
from .options import load_chosen_target

WANTED = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
"""Files of a Hub repository that are downloaded. None of them is code."""
UNWANTED = ["*/*", "optimizer*", "rng_state*", "scaler*", "scheduler*", "train*_state*", "training_args*"]
"""Files that are not downloaded: states of a training, which may be large, and subfolders."""


GGUF = "gguf"
AS_STORED = {"device": "cpu"}
"""The target of an export: only its sizes, embeddings, head and at most its tokenizer are read."""


@dataclass(kw_only=True, config=OPTIONS)
class ExportOptions:
    """Options of `outrider export`."""

    drafter: str
    """The drafter to export: a directory, or its name on the Hub."""
    to: str
    """The engine: vllm or sglang. Or a format, with the kind of drafter that it holds: eagle3 (eagle3;
    vLLM and SGLang), speculators (eagle3; vLLM), dspark (block; vLLM, SGLang and llama.cpp),
    speculators-dspark (block; vLLM and llama.cpp), eagle1-vllm (eagle), eagle1-sglang (eagle), medusa
    (medusa; also vLLM up to 0.32), tensorrt-llm (medusa), apple (redrafter), transformers
    (draft_model; also vLLM and SGLang), mtp (mtp; a copy of the target's checkpoint, for vLLM and
    SGLang). Or gguf (eagle3, block and draft_model; llama.cpp), which
    needs `converter`."""
    output: Path
    """Folder for the export, which must be new, empty, or an earlier export. For gguf, a file."""
    converter: Path | None = None
    """For gguf: convert_hf_to_gguf.py in the source of the llama.cpp that will read the file."""
    dtype: Annotated[str, one_of(*DTYPES)] | None = None
    """Type of the exported numbers. null: as stored; for gguf float32. mtp has the types of the target's
    checkpoint in any case."""
    target: TargetConfig

    POSITIONAL: ClassVar = ("drafter",)
    DEFAULTS: ClassVar = {"target": AS_STORED}
    USUAL: ClassVar = ("target.name_or_path", "target.revision")


def export_command(options: ExportOptions) -> None:
    """Write a drafter in the format of a serving engine, a library or a published release.

    A drafter that the format can't hold completely is an error; nothing is dropped.
    docs/how-to/engines shows how to serve each format.
    """
    import torch  # torch and the modules that use it load too slowly for --help

    from ..data.files import guarded
    from ..models.drafters.saved.download import resolve_drafter
    from ..models.drafters.saved.folder import read_drafter_config
    from ..models.export.gguf import export_gguf, form_of, require_convertible, unknown_to_llama_cpp
    from ..models.export.registry import ENGINES, engine_format, export_drafter, find_format

    # 1. Check all arguments before the target is loaded, which may take long.
    output, to_gguf = options.output, options.to == GGUF
    if options.to not in (*ENGINES, GGUF):
        find_format(options.to)
    if options.converter is not None and not to_gguf:
        raise ValueError(f"converter is for gguf only, and to is {options.to}; leave one of them out")
    directory = resolve_drafter(options.drafter)
    read_drafter_config(directory)
    if to_gguf:
        require_convertible(directory, options.converter, output)
        name = form_of(directory)
    else:
        name = engine_format(options.to, directory) if options.to in ENGINES else options.to

    # 2. Load the target, and export.
    loaded = load_chosen_target(options.target, needs_tokenizer=find_format(name).kind == "draft_model")
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    with guarded(output):
        if options.converter is not None:
            export_gguf(directory, loaded, options.target.name_or_path, options.converter, output, dtype)
            name = GGUF
        else:
            export_drafter(directory, loaded, name, output, dtype)
    print(f"{options.output}: {options.drafter} in the format {name}")
    if problems := unknown_to_llama_cpp(directory):
        print(f"llama.cpp can't draft with it as it was trained, partly without an error: {'; '.join(problems)}")


@dataclass(kw_only=True, config=OPTIONS)
class ImportOptions:
    """Options of `outrider import`."""

    folder: str
    """The published drafter: a folder, or user/name[@revision] on the Hub."""
    output: Path
    """Directory for the drafter. It must be new."""
    format: str | None = None
    """The format's name (see --to of outrider export). null: detected from the files."""
    setting: dict[str, Any] = field(default_factory=dict)
    """Options of the new drafter, such as {depth: 5, top_k: 8}."""
    target: TargetConfig

    POSITIONAL: ClassVar = ("folder",)
    DEFAULTS: ClassVar = {"target": AS_STORED}
    USUAL: ClassVar = ("target.name_or_path", "target.revision")


def import_command(options: ImportOptions) -> None:
    """Convert a published EAGLE, EAGLE-3, DSpark, Medusa, ReDrafter, MTP head or draft model to a drafter.

    Reads only plain tensors, never code, and checks that they fit the target. The target needs a
    tokenizer only for a draft model: other kinds use its weights and sizes alone.
    """
    from ..data.files import guarded, replacing_directory
    from ..models.drafters import save_drafter
    from ..models.drafters.registry import kind_of
    from ..models.drafters.saved.download import resolve_folder
    from ..models.export.package import require_new
    from ..models.export.registry import find_format, format_of, import_drafter

    # 1. Check the arguments before anything is downloaded.
    folder, output, target = options.folder, options.output, options.target
    require_new(output)
    if options.format is not None:
        find_format(options.format)
    directory = resolve_folder(folder, WANTED, ignore_patterns=UNWANTED)
    if not directory.is_dir():
        raise ValueError(f"{folder} is neither a local folder nor a name on the Hub; give a directory, or user/name")
    found = format_of(directory) if options.format is None else find_format(options.format)  # the target may take long

    # 2. Convert, and save.
    loaded = load_chosen_target(target, needs_tokenizer=found.kind == "draft_model")
    drafter = import_drafter(directory, loaded, name=options.format, options=options.setting)
    with guarded(output), replacing_directory(output) as directory:
        require_new(output)  # another process may have written it since
        save_drafter(drafter, directory, loaded.identity)
    num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    print(f"{output}: {folder} as a drafter of the kind {kind_of(drafter)}, with {num_parameters:,} parameters")
    revision = ["--revision", target.revision] if target.revision else []
    command = ["outrider", "eval", "--target", target.name_or_path, *revision, "--drafter", str(output), "--suite", "mt_bench"]
    print(f"Measure it: {shlex.join(command)}")
