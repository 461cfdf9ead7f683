"""Runs `outrider certify` for the demo's target with a trained or a fresh drafter.

    python scripts/gpu/certificate.py --drafter outputs/demo/drafter --output certificate.json

If the drafter doesn't exist, a fresh one is used. The target hardly ever accepts a fresh drafter's
tokens, but it reads them, so masks, positions and caches are certified all the same. The
certificate's oracle, which knows the answers, makes sure that draft tokens are accepted.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import typer

from outrider.cli.certify import certify_command
from outrider.eval.certify import certificate as certify
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

TARGET = Path(__file__).parents[2] / "models" / "demo_target"
SMALL = {"NUM_TEXTS": 16, "SAMPLED_BATCH_SIZE": 16}
"""Smaller numbers for a CPU, which needs minutes to sample the certificate's usual texts."""
FRESH = {"kind": "redrafter", "exit_width": 256, "head_init": "target", "beam_width": 4, "beam_length": 3, "tree_nodes": 5}


def main() -> None:
    args = parse_args()
    for name, value in SMALL.items() if args.small else ():
        setattr(certify, name, value)
    with tempfile.TemporaryDirectory() as folder:
        drafter = args.drafter if (args.drafter / "config.json").exists() else fresh_drafter(Path(folder))
        try:
            certify_command(
                target=str(TARGET),
                drafter=[str(drafter)],
                suite="stdlib",
                suite_path=None,
                limit=args.prompts,
                max_new_tokens=args.max_new_tokens,
                dtype=args.dtype,
                device=args.device,
                rules=False,
                compiled=args.compiled,
                cuda_graphs=args.cuda_graphs,
                output=args.output,
            )
        except typer.Exit as end:
            raise SystemExit(end.exit_code) from end


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default=None)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--small", action="store_true", help="sample few texts")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def fresh_drafter(folder: Path) -> Path:
    """Save a drafter with its initial weights."""
    target = load_target(TargetConfig(name_or_path=str(TARGET), dtype="float32"), torch.device("cpu"))
    torch.manual_seed(0)
    save_drafter(build_drafter(parse_drafter(FRESH), target), folder, target.identity)
    print("there is no trained drafter; certifying with a fresh one")
    return folder


if __name__ == "__main__":
    main()
