"""Files that the commands of the documentation read."""

from dataclasses import asdict
from pathlib import Path

import yaml

from outrider.cli.compose import DEMO_TARGET
from outrider.data.files import write_json
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.drafters.options import RedrafterConfig
from outrider.models.drafters.saved.folder import FORMAT_VERSION, DrafterFile
from outrider.models.drafters.saved.loading import TunedChoice, describe_setup, save_tuned
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

from .tiny_models import IDENTITY


def write_recipe(path: Path) -> None:
    """Write a recipe of one's own: the demo under another name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"base: demo\nname: {path.stem}\n")


def write_drafter_config(folder: Path) -> None:
    """Write what composing a recipe reads of a trained ReDrafter."""
    saved = DrafterFile(
        format_version=FORMAT_VERSION,
        kind="redrafter",
        drafter=asdict(RedrafterConfig()),
        target=IDENTITY,
        weights_sha256="00",
        shape_sha256="00",
    )
    write_json(folder / "config.json", asdict(saved))


def write_target_folder(target: Path) -> None:
    """Link the folder of outputs that a target's configuration names to the demo's target."""
    folder = Path(yaml.safe_load(target.read_text())["name_or_path"])
    if folder.parts[0] == "outputs" and not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        folder.symlink_to(DEMO_TARGET)


def write_demo_drafter(folder: Path) -> None:
    """Write a drafter for the demo's target with random weights, and a tuned setting for it."""
    target = load_target(TargetConfig(name_or_path=str(DEMO_TARGET), dtype="float32"))
    drafter = build_drafter(parse_drafter({"kind": "redrafter", "exit_width": 16, "num_blocks": 1}), target)
    save_drafter(drafter, folder, target.identity)
    choice = TunedChoice(setting={"beam_width": 2}, tokens_per_step=1.5, tokens_per_second=2.0, plain_tokens_per_second=1.0)
    save_tuned(folder, describe_setup(target, folder), {1: choice, 4: choice})
