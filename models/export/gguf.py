"""A drafter as a GGUF file for llama.cpp, written by llama.cpp's own converter.

The converter is the user's, because its version must fit the llama.cpp that will read the file. It
reads one of our formats, which is written first, into a temporary folder.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from ...data.files import TEMPORARY, replacing
from ..drafters.saved.folder import read_drafter_config
from ..llm.gguf_files import SUFFIX, folder_of
from ..llm.hf_target import HFTarget
from .registry import engine_format, export_drafter

KINDS = ("eagle3", "block", "draft_model")
"""The kinds of drafters that llama.cpp drafts with."""
TYPES = {None: "f32", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
EAGLE3_LAYERS = 3
SHOWN_LINES = 5
"""Last lines of a failed converter that the error has."""


def form_of(directory: Path) -> str:
    """Return the format of ours that the converter reads: vLLM's, or the one that has all layers or a reduced vocabulary."""
    saved = read_drafter_config(directory)
    if saved.kind == "eagle3" and saved.drafter.get("feature_layers") is not None:
        return "speculators"
    reduced = saved.kind == "block" and saved.drafter.get("draft_vocab_size") is not None
    return "speculators-dspark" if reduced else engine_format("vllm", directory)


def require_convertible(directory: Path, converter: Path | None, output: Path) -> None:
    """Raise ValueError for a drafter that llama.cpp doesn't draft with as trained, and for a wrong path.

    Nothing is loaded for this.
    """
    saved = read_drafter_config(directory)
    if saved.kind not in KINDS:
        raise ValueError(
            f"llama.cpp reads drafters of the kinds {', '.join(KINDS)}, and {directory} is of the kind {saved.kind}"
        )
    if problems := unknown_to_llama_cpp(directory):
        raise ValueError(f"llama.cpp can't draft with {directory} as it was trained: {'; '.join(problems)}")
    if converter is None or not converter.is_file():
        given = "not given" if converter is None else f"{converter}, which is no file"
        raise ValueError(f"converter is {given}; give the path of convert_hf_to_gguf.py in the source of your llama.cpp")
    if output.suffix != SUFFIX or output.is_dir():
        raise ValueError(f"output is {output}; give the name of a file that ends in {SUFFIX}")


def unknown_to_llama_cpp(directory: Path) -> list[str]:
    """List what the converter or llama.cpp doesn't know, partly without an error of its own (build 11434)."""
    saved = read_drafter_config(directory)
    if saved.kind != "eagle3":
        return []
    layers, on = saved.drafter.get("feature_layers"), [name for name in ("fc_norm", "norm_output") if saved.drafter.get(name)]
    problems = [f"{name} is on (train with drafter.{name}=false)" for name in on]
    if layers is not None and len(layers) != EAGLE3_LAYERS:
        problems.append(f"it reads {len(layers)} layers of the target, not {EAGLE3_LAYERS}")
    return problems


def export_gguf(
    directory: Path, target: HFTarget, name: str, converter: Path, output: Path, dtype: torch.dtype | None = None
) -> None:
    """Convert the drafter in `directory` to the file `output`, which is replaced at once if it exists.

    `name` is the target's name, whose folder the converter reads: a folder, or a GGUF file. Check the
    other arguments with `require_convertible` first. Raises ValueError with the converter's last lines
    if it fails.
    """
    if not (folder := Path(folder_of(name))).is_dir():
        raise ValueError(f"target.name_or_path is {name}, and the converter reads a folder; download it, and give its folder")
    with (
        replacing(output) as made,
        tempfile.TemporaryDirectory(prefix=f".{output.name}.", suffix=TEMPORARY, dir=output.parent) as temporary,
    ):
        source = Path(temporary) / "drafter"
        export_drafter(directory, target, form_of(directory), source, dtype)
        command = [sys.executable, str(converter), str(source), "--target-model-dir", str(folder.resolve())]
        command += ["--outtype", TYPES[dtype], "--outfile", str(made)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
        if done.returncode or not made.is_file():
            lines = "\n".join((done.stderr or done.stdout).strip().splitlines()[-SHOWN_LINES:])
            raise ValueError(f"the converter {converter} ended with status {done.returncode}; its last lines:\n{lines}")
