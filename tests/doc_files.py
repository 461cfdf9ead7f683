"""Files that the commands of the documentation read."""

from dataclasses import asdict
from pathlib import Path

from outrider.data.files import write_json
from outrider.data.manifest import TargetIdentity
from outrider.models.drafters.redrafter import RedrafterConfig
from outrider.models.drafters.saved.folder import DrafterFile

TARGET = TargetIdentity(
    name="t",
    revision=None,
    weights_sha256="1",
    config_sha256="",
    quantization="",
    tokenizer_sha256="2",
    hidden_size=8,
    vocab_size=16,
)


def write_recipe(path: Path) -> None:
    """Write a recipe of one's own: the demo under another name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\ndefaults:\n  - demo\n  - _self_\n\nname: {path.stem}\n")


def write_drafter_config(folder: Path) -> None:
    """Write what composing a recipe reads of a trained ReDrafter."""
    saved = DrafterFile(format_version=1, kind="redrafter", drafter=asdict(RedrafterConfig()), target=TARGET)
    write_json(folder / "config.json", asdict(saved))
