"""Measures what labels teach an MTP head that a target's checkpoint has already.

    python scripts/bench/mtp.py
    python scripts/bench/mtp.py --examples 280 --output outputs/bench/mtp_more.json

The demo's target gets a head as large models have one: it learns the text's next tokens at one depth, and is
written into the checkpoint. From there it is imported as it is, or trained on the target's continuations at all
depths. Tokens per step of both, and of the head with random weights, are those of one evaluation.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from report import finish
from safetensors.torch import load_file, save_file

from outrider.cli.compose import DEMO_TARGET
from outrider.cli.main import run_command
from outrider.data.shards import label_store
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters.mtp_weights import LAYOUTS, Head
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

RECIPE = {"base": ["demo", "drafter=mtp_demo"], "drafter": {"init": "target"}}


def main(
    examples: Annotated[int, typer.Option(help="Texts that are labelled for the training.")] = 130,
    texts: Annotated[int, typer.Option(help="Texts that the head in the checkpoint has learned.")] = 280,
    steps: int = 800,
    prompts: int = 16,
    max_new_tokens: int = 128,
    folder: Path = Path("outputs/bench/mtp"),
    output: Path = Path("outputs/bench/mtp.json"),
) -> None:
    """Train a head twice, and evaluate all three."""
    options = dict(locals())
    shutil.rmtree(folder, ignore_errors=True)
    # 1. A checkpoint with a head that has learned the text.
    num_parameters = write_random_head(folder / "random")
    text: dict[str, Any] = {"distill": {"horizon": 2}, "train": {"labels": "text", "steps": min(steps, 450)}}
    text["data"] = {"limit": texts}
    run(folder, "text", folder / "random", text | {"stages": ["distill", "train", "export"], "export": {"formats": ["mtp"]}})
    target = folder / "text" / "export" / "mtp"
    # 2. The same head, trained on labels.
    training = {"stages": ["distill", "train"], "train": {"learning_rate": 2e-3, "steps": steps}}
    run(folder, "labels", target, training | {"data": {"limit": examples}})
    num_labels = label_store(folder / "labels" / "distill").load().num_labels
    # 3. All of them in one evaluation.
    drafters = {"random weights": folder / "own_random", "as in the checkpoint": folder / "own_text"}
    for drafter, source in zip(drafters.values(), (folder / "random", target), strict=True):
        outrider("import", source, "--target", target, "--output", drafter)
    drafters["trained on labels"] = folder / "labels" / "drafter"
    named = [argument for drafter in drafters.values() for argument in ("--drafter", drafter)]
    suite = ("--suite", "stdlib", "--limit", prompts, "--settings", "[{depth: 5, top_k: 8, tree_nodes: 40}]")
    outrider("eval", "--target", target, *named, *suite, "--max-new-tokens", max_new_tokens, "--output", folder / "eval")
    _, *summary = json.loads((folder / "eval" / "summary.json").read_text())  # the first is plain decoding
    rows = [
        {
            "head": head,
            "tokens_per_step": round(row["tokens_per_step"], 3),
            "identical": row["lossless"],
        }
        for head, row in zip(drafters, summary, strict=True)
    ]
    finish(output, rows, options, labels=num_labels, parameters=num_parameters)


def write_random_head(folder: Path) -> int:
    """Write the demo's target with a head of random weights, under the names of MiMo; return its parameters."""
    shutil.copytree(DEMO_TARGET, folder)
    target = load_target(TargetConfig(name_or_path=str(folder)), torch.device("cpu"))
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": "mtp", "init": "random"}), target)
    layout = LAYOUTS[-1]
    places = Head(layout, f"model.{layout.prefix}", frozenset()).places(drafter.state_dict())
    tensors = {place.name: place.written().to(target.model.dtype).contiguous() for place in places}
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", {"format": "pt"})
    return sum(parameter.numel() for parameter in drafter.parameters())


def run(folder: Path, name: str, target: Path, options: dict[str, Any]) -> None:
    """Run stages of a recipe."""
    recipe = {**RECIPE, "name": name, "target": {"name_or_path": str(target)}, **options}
    (folder / f"{name}.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    outrider("run", folder / f"{name}.yaml", f"output_dir={folder / name}")


def outrider(*arguments: object) -> None:
    run_command([*map(str, arguments)])


if __name__ == "__main__":
    typer.run(main)
