"""Grows a small target to the cost of a large model, with the same text.

    python scripts/grow_target.py outputs/grown_400m --parameters 400M
    python scripts/grow_target.py outputs/grown --layers 32 --intermediate 16384 --dtype float32

The grown target computes the same hidden states as the original:

- MLPs get more neurons, whose columns in the down projection are zero.
- More layers follow the real ones. Their o_proj and down_proj are zero.

All other new weights are random, so the bytes and the operations are those of a large model. Hidden
size, vocabulary and tokenizer stay, so drafters of the original load, and accept as much. A drafter
whose layer has the sizes of the target's needs a copy that names them: `--drafters FOLDER`, which may
be repeated, writes such copies to OUTPUT/drafters.

Layers are written one by one, so memory holds one layer. The folder appears when it is complete.
"""

import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import silence  # noqa: F401 - before torch, whose libraries it silences
import torch
import typer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tqdm import tqdm

from outrider.data.files import read_json, replacing_directory, write_json
from outrider.models.drafters.decoder_layer import FORMS, PROJECTIONS
from outrider.models.drafters.fused_layers import default_feature_layers
from outrider.models.drafters.saved.build import shape_digest
from outrider.models.drafters.saved.folder import CONFIG_FILE, WEIGHTS_FILE, DrafterFile, read_drafter_config
from outrider.models.drafters.small_models import PER_LAYER
from outrider.models.llm.gguf_files import folder_of
from outrider.models.llm.loading import TOKENIZER_PATTERNS

RECORD_FILE = "grown.json"
"""File of a grown target's sizes. Only a folder with this file is overwritten."""
COPIED = (*TOKENIZER_PATTERNS, "*token*.json", "merges.txt", "chat_template.*", "generation_config.json")
"""Names of the files that a grown target takes from the original, besides weights and config."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STD = 0.02
"""Standard deviation of new random weights, as transformers initialises a Llama."""
MAX_LAYERS, LAYER_STEP, WIDTH_STEP = 32, 4, 64
"""Sizes that `choose_size` picks: at most so many layers, and multiples of these numbers."""
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
WIDENED = {"mlp.gate_proj.weight": 0, "mlp.up_proj.weight": 0, "mlp.gate_proj.bias": 0, "mlp.up_proj.bias": 0}
WIDENED["mlp.down_proj.weight"] = 1
"""Dimension of each tensor that grows with the number of neurons."""
OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")
"""Projections into the residual stream. What is added to them is zero."""
NOTE = (
    "Made by scripts/grow_target.py, to measure speed: it costs as much as a large model, and generates the same text as its "
    "source. The source's licence applies."
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a target."""

    layers: int
    intermediate: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint that can grow: its configuration, the file of each tensor, and shapes."""

    folder: Path
    config: dict[str, Any]
    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    dtype: str

    @classmethod
    def of(cls, folder: Path) -> "Source":
        """Read a checkpoint's headers, and its config.json. Raises ValueError if it can't grow."""
        # 1. The configuration.
        folder = Path(folder_of(str(folder)))
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json; give the folder of a Llama-like model")
        config = read_json(folder / "config.json")
        kind = config.get("model_type")
        if lacking := [name for name in ("num_hidden_layers", "intermediate_size") if not isinstance(config.get(name), int)]:
            raise ValueError(f"{folder} is a {kind} without {' and '.join(lacking)}; give a Llama-like model")
        if config.get("quantization_config"):
            raise ValueError(f"the weights of {folder} are quantised; give the unquantised model")
        # 2. The tensors.
        files, shapes, dtypes = {}, {}, set()
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - this is no dictionary
                        part = file.get_slice(name)
                        files[name], shapes[name] = path, tuple(part.get_shape())
                        dtypes.add(part.get_dtype())
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged ({error}); copy or download it again") from error
        if not files:
            raise ValueError(f"{folder} has no *.safetensors; save the model with save_pretrained, which writes them")
        if wrong := sorted(dtypes - {"F64", "F32", "BF16", "F16"}):
            raise ValueError(f"{folder} has weights of type {', '.join(wrong)}; give the unquantised model, in 16 or 32 bits")
        # 3. The structure of each layer.
        source = cls(folder=folder, config=config, files=files, shapes=shapes, dtype=max(dtypes))
        for layer in range(source.size.layers):
            source.require_layer(layer, f"{folder} is a {kind}, which can't grow")
        return source

    def require_layer(self, layer: int, problem: str) -> None:
        """Raise ValueError if a layer has other matrices than Llama's."""
        matrices = {part for name, part in self.parts(layer) if len(self.shapes[name]) > 1}
        wanted = {f"{name}.weight" for name in PROJECTIONS}
        rule = "each layer must consist of q, k, v, o, gate, up and down projections"
        if missing := sorted(wanted - matrices):
            raise ValueError(f"{problem}: layer {layer} has no {missing[0]}, and {rule}; give a Llama-like model")
        if unknown := sorted(matrices - wanted):
            raise ValueError(f"{problem}: layer {layer} has {unknown[0]}, and {rule}; give a Llama-like model")
        if self.shapes[f"model.layers.{layer}.mlp.up_proj.weight"][0] != self.config["intermediate_size"]:
            raise ValueError(f"{problem}: layer {layer} has another number of neurons than config.json; copy the model again")

    def parts(self, layer: int) -> Iterator[tuple[str, str]]:
        """Yield name and name inside the layer of each of its tensors."""
        for name in self.shapes:
            if (match := LAYER_NAME.fullmatch(name)) and int(match[1]) == layer:
                yield name, match[2]

    @property
    def size(self) -> Size:
        return Size(
            layers=self.config["num_hidden_layers"],
            intermediate=self.config["intermediate_size"],
            parameters=sum(math.prod(shape) for shape in self.shapes.values()),
        )

    def grown_size(self, layers: int, intermediate: int) -> Size:
        """Return the size with so many layers and neurons. Raises ValueError if they are fewer."""
        old = self.size
        for name, value, least in (("layers", layers, old.layers), ("intermediate", intermediate, old.intermediate)):
            if value < least:
                raise ValueError(f"{name} is {value}; the original has {least}, and can't shrink: give {least} or more")
        last = [(part, math.prod(self.shapes[name])) for name, part in self.parts(old.layers - 1)]
        new = sum(count * intermediate // old.intermediate if part in WIDENED else count for part, count in last)
        added = layers * new - old.layers * sum(count for _, count in last)
        return Size(layers=layers, intermediate=intermediate, parameters=old.parameters + added)

    def choose_size(self, parameters: int) -> Size:
        """Choose layers and neurons of a model of about so many parameters.

        The layers grow with the cube root of the parameters, up to MAX_LAYERS; the rest is width.
        """
        old = self.size
        if parameters < old.parameters:
            raise ValueError(f"parameters is {parameters:,}; the original has {old.parameters:,}, and can't shrink: give more")
        growth = (parameters / old.parameters) ** (1 / 3)
        layers = min(MAX_LAYERS, LAYER_STEP * round(old.layers * growth / LAYER_STEP))
        for number in range(max(layers, old.layers), old.layers - 1, -1):
            at_least = self.grown_size(number, old.intermediate).parameters
            each_step = self.grown_size(number, old.intermediate + WIDTH_STEP).parameters - at_least
            if at_least <= parameters:
                return self.grown_size(number, old.intermediate + WIDTH_STEP * round((parameters - at_least) / each_step))
        raise AssertionError("the original's number of layers always fits")

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor


def parse_parameters(text: str) -> int:
    """Parse a number such as 400M or 1.6B. Raises ValueError for other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBG]?)", text.strip().upper())
    if match is None or not float(match[1]):
        raise ValueError(f"parameters is {text!r}; give a number above 0, such as 400M or 1.6B")
    return round(float(match[1]) * UNITS.get(match[2], 1))


def grown_tensor(
    name: str,
    read: Callable[[str], torch.Tensor],
    old: Size,
    new: Size,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return a tensor of the grown target, on the generator's device.

    `read` returns a tensor of the original. A layer behind the real ones has the last one's norms.
    """
    match = LAYER_NAME.fullmatch(name)
    if match is None:
        return read(name).to(generator.device, dtype)
    # 1. The original's tensor, or the last real layer's as a model of an added one.
    layer, part = int(match[1]), match[2]
    source = read(f"model.layers.{min(layer, old.layers - 1)}.{part}").to(generator.device, dtype)
    is_added, axis, is_output = layer >= old.layers, WIDENED.get(part), part.startswith(OUTPUTS)
    if is_added and axis is None and source.ndim == 1 and not is_output:
        return source
    # 2. New rows or columns, or a whole new tensor: zero in the output projections, else random.
    shape = list(source.shape)
    if axis is not None:
        shape[axis] = new.intermediate if is_added else new.intermediate - old.intermediate
    elif not is_added:
        return source
    fresh = torch.empty(shape, dtype=dtype, device=generator.device)
    if is_output:
        fresh.zero_()
    else:
        fresh.normal_(std=STD, generator=generator)
    return fresh if is_added else torch.cat([source, fresh], dim=axis)


def grown_config(config: dict[str, Any], new: Size, dtype: str) -> dict[str, Any]:
    """Build the configuration with the new sizes. Lists by layer continue with their last item."""
    sizes = {"num_hidden_layers": new.layers, "intermediate_size": new.intermediate, "dtype": dtype}
    by_layer = {
        name: [*config[name], *[config[name][-1]] * (new.layers - len(config[name]))] for name in PER_LAYER if config.get(name)
    }
    return {**{name: value for name, value in config.items() if name != "torch_dtype"}, **sizes, **by_layer}


def grow(source: Source, output: Path, new: Size, *, dtype: str | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Write a grown target, and return its record.

    Raises ValueError if the folder exists, or the disk has too little room.
    """
    # 1. Check the folder and the disk.
    dtype = dtype or ("bfloat16" if source.dtype == "BF16" else "float32")
    require_free(output, overwrite=overwrite)
    num_bytes = new.parameters * DTYPES[dtype].itemsize
    require_room(output, num_bytes)
    # 2. Everything but the layers, then layer by layer. The names of all tensors go to the index.
    old, generator = source.size, torch.Generator().manual_seed(0)
    ends = [name for name in source.shapes if not LAYER_NAME.fullmatch(name)]
    parts = [part for _, part in source.parts(old.layers - 1)]
    groups = [ends, *([f"model.layers.{layer}.{part}" for part in parts] for layer in range(new.layers))]
    sizes = {**asdict(new), "original": asdict(old), "dtype": dtype}
    record = {"note": NOTE, "source": source.folder.resolve().name, **sizes}
    with replacing_directory(output) as folder:
        weight_map = {}
        for number, names in enumerate(tqdm(groups, desc="grow", unit="file"), 1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            tensors = {name: grown_tensor(name, source.read, old, new, DTYPES[dtype], generator).contiguous() for name in names}
            (folder / file).write_bytes(save(tensors, metadata={"format": "pt"}))  # save_file's error hides a full disk
            weight_map |= dict.fromkeys(names, file)
        # 3. The other files. Without config.json, which is the last, nothing loads the folder.
        for path in {path for pattern in COPIED for path in source.folder.glob(pattern) if path.is_file()}:
            if path.suffix != ".safetensors":
                shutil.copyfile(path, folder / path.name)
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})
        write_json(folder / RECORD_FILE, record)
        write_json(folder / "config.json", grown_config(source.config, new, dtype))
    return record


def require_free(output: Path, *, overwrite: bool) -> None:
    """Raise ValueError if the folder holds files, unless it is a grown target to overwrite."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / RECORD_FILE).is_file():
        raise ValueError(f"{output} exists and is no grown target, so nothing is overwritten; choose another folder")
    if not overwrite:
        raise ValueError(f"{output} exists; choose another folder, or replace it with --overwrite")


def require_room(output: Path, num_bytes: int) -> None:
    """Raise ValueError if the disk has less room than this."""
    parent = next(path for path in output.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < 1.01 * num_bytes:
        raise ValueError(
            f"{output} needs {num_bytes / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB free; free some space, give an "
            "output on another disk, or grow less"
        )


def fitted_drafter(folder: Path, original: dict[str, Any]) -> DrafterFile:
    """Write out the sizes that a drafter's configuration took from the original.

    An EAGLE drafter's layer has as many neurons as the target's, and EAGLE-3 reads layers that
    depend on their number. Raises ValueError for a layer of a form that has no name.
    """
    saved = read_drafter_config(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"{folder / WEIGHTS_FILE} is missing; give the `drafter/` folder of a finished training")
    options = dict(saved.drafter)
    if "layer" in options:
        form = options["layer"] or {"model_type": original["model_type"]}
        if form["model_type"] not in FORMS:
            raise ValueError(f"the layer of the drafter in {folder} is a {form['model_type']}'s; it must be {', '.join(FORMS)}")
        options["layer"] = {"intermediate_size": original["intermediate_size"], **form}
    if options.get("feature_layers", ()) is None:
        options["feature_layers"] = default_feature_layers(original["num_hidden_layers"])
    return replace(saved, drafter=options, shape_sha256=shape_digest(saved.kind, options, saved.target))


def copy_drafter(folder: Path, output: Path, original: dict[str, Any]) -> None:
    """Copy a drafter's files, with the configuration of `fitted_drafter`."""
    fitted = fitted_drafter(folder, original)
    output.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file():
            shutil.copyfile(path, output / path.name)
    write_json(output / CONFIG_FILE, asdict(fitted))


def drafter_name(folder: Path) -> str:
    """Name a drafter after its folder, or after its run if the folder is just `drafter`."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "drafter" else folder.name


def main(
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    target: Annotated[Path, typer.Option(help="Folder or GGUF file of the model to grow.")] = Path("models/demo_target"),
    parameters: Annotated[str | None, typer.Option(help="Size, such as 400M; chooses layers and neurons.")] = None,
    layers: Annotated[int | None, typer.Option(help="Decoder layers; as many as the original unless given.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Neurons of an MLP; as many as the original unless given.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; the original's unless given.")] = None,
    drafters: Annotated[list[Path] | None, typer.Option(help="A drafter of the original to copy, adapted. Repeatable.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a grown target.")] = False,
) -> None:
    """Grow a small target to the cost of a large model, with the same text."""
    # 1. Check everything before anything is written.
    if parameters and (layers is not None or intermediate is not None):
        raise ValueError("--parameters chooses layers and neurons; give it alone, or --layers and --intermediate")
    if dtype not in (None, *DTYPES):
        raise ValueError(f"--dtype is {dtype}; it must be one of {', '.join(DTYPES)}")
    source, folders = Source.of(target), drafters or []
    names = [drafter_name(folder) for folder in folders]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two --drafters have the name {repeated[0]}; rename a folder, or give one of them")
    for folder in folders:
        fitted_drafter(folder, source.config)
    if parameters:
        size = source.choose_size(parse_parameters(parameters))
    else:
        values = (layers, source.size.layers), (intermediate, source.size.intermediate)
        size = source.grown_size(*(default if value is None else value for value, default in values))
    # 2. Write the target, then the drafters.
    record = grow(source, output, size, dtype=dtype, overwrite=overwrite)
    for name, folder in zip(names, folders, strict=True):
        copy_drafter(folder, output / "drafters" / name, source.config)
    print(
        f"{output}: {size.parameters:,} parameters in {record['dtype']}, {size.layers} layers of {size.intermediate:,} "
        f"neurons. It costs as much as a large model, and generates the same text as {record['source']}"
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
