"""Grows a trained draft model to the cost of a larger one, with the same drafts.

    python scripts/grow_drafter.py outputs/offload_demo/drafter outputs/grown_drafter --parameters 30M

The trick is `grow_target`'s: neurons and layers that add nothing. So the drafter is accepted as
before, and the cost of a draft pass beside the target's can be chosen.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import silence  # noqa: F401 - before torch, whose libraries it silences
import torch
from grow_target import Size, Source, grown_config, grown_tensor, parse_parameters
from safetensors.torch import save
from script_errors import script_errors

from outrider.data.files import replacing_directory, sha256_file, write_json
from outrider.models.drafters.saved.folder import CONFIG_FILE, FORMAT_VERSION, WEIGHTS_FILE, read_drafter_config

PREFIX = "model."
"""What the names of a draft model's tensors begin with, since the drafter holds the model."""


def drafter_source(folder: Path) -> Source:
    """Read the headers of a saved draft model. Raises ValueError if it can't grow."""
    saved = read_drafter_config(folder)
    if saved.kind != "draft_model":
        raise ValueError(f"{folder} holds a {saved.kind}; only a draft_model can grow")
    return Source.of(folder, saved.drafter["architecture"], PREFIX)


def grow_drafter(folder: Path, output: Path, new: Size) -> None:
    """Write a copy of a draft model with more layers and neurons, which drafts the same.

    Its calibration isn't copied. Raises ValueError if the output exists.
    """
    # 1. All tensors, named as in the original's file.
    source, saved = drafter_source(folder), read_drafter_config(folder)
    if output.exists():
        raise ValueError(f"{output} exists; choose another folder")
    old, generator = source.size, torch.Generator().manual_seed(0)
    ends = [name for name in source.shapes if not name.startswith("model.layers.")]
    parts = [part for _, part in source.parts(old.layers - 1)]
    names = [*ends, *(f"model.layers.{layer}.{part}" for layer in range(new.layers) for part in parts)]
    tensors = {
        PREFIX + name: grown_tensor(name, source.read, old, new, torch.float32, generator).contiguous() for name in names
    }
    # 2. The folder. The type isn't part of a saved architecture.
    architecture = grown_config(source.config, new, "float32")
    del architecture["dtype"]
    with replacing_directory(output) as written:
        (written / WEIGHTS_FILE).write_bytes(save(tensors))
        options = {**saved.drafter, "architecture": architecture}
        digest = sha256_file(written / WEIGHTS_FILE)
        grown = replace(saved, format_version=FORMAT_VERSION, drafter=options, weights_sha256=digest)
        write_json(written / CONFIG_FILE, asdict(grown))


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path, help="folder of a trained draft_model")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--parameters", required=True, help="size of the grown drafter, such as 30M")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    with script_errors():
        size = drafter_source(args.drafter).choose_size(parse_parameters(args.parameters))
        grow_drafter(args.drafter, args.output, size)
    print(f"{args.output}: {size.parameters:,} parameters, {size.layers} layers of {size.intermediate:,} neurons")


if __name__ == "__main__":
    main()
