"""Tokens per step of drafters over another's, such as the base of adapted ones, suite by suite, on the same prompts.

    python scripts/bench/adapted.py TARGET BASE NAME=DRAFTER ... --suites code.jsonl=40,mt_bench.jsonl=30 --output FILE

Drafters are folders, or names such as `recycling`. A suite is a file of prompts, and how many of them are drawn. Answers are
greedy, and nothing is timed. `bytes` is the size of what is kept of a drafter beside its base: of a low-rank change that of
its folder `low_rank`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import finish

from outrider.data.suites import load_suite
from outrider.eval.config import suite_of
from outrider.eval.forecast.measure import decode, draw_prompts
from outrider.eval.results.stats import bootstrap, ratio_of_ratios
from outrider.models.decoding import GreedyAcceptance
from outrider.models.drafters import load_drafter
from outrider.models.drafters.saved.folder import WEIGHTS_FILE
from outrider.models.drafters.saved.low_rank import LOW_RANK_DIR
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

TOGETHER = 10
"""Prompts of a batch, whose steps don't depend on each other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("base", help="the drafter that the others are compared with")
    parser.add_argument("adapted", nargs="+", help="NAME=DRAFTER")
    parser.add_argument("--suites", required=True, help="FILE=COUNT, separated by commas")
    parser.add_argument("--setting", type=json.loads, default={}, help="options of drafting, in JSON")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, required=True, help="the record, in JSON")
    args = parser.parse_args()
    target = load_target(TargetConfig(name_or_path=args.target, dtype=args.dtype), torch.device("cpu"))
    suites = {}
    for text in args.suites.split(","):
        file, _, count = text.partition("=")
        config = suite_of(file)
        room = target.context_length - args.max_new_tokens
        suites[config.name] = draw_prompts([load_suite(config.name, config.path)], target, room, int(count), seed=0)

    def counts_of(name: str) -> dict[str, list[tuple[int, int]]]:
        drafter = load_drafter(name, target, **args.setting)
        options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "batch_size": TOGETHER}
        answers = {name: decode(target, drafter, GreedyAcceptance(), prompts, **options) for name, prompts in suites.items()}
        return {name: [(one.tokens, one.steps) for one in steps] for name, steps in answers.items()}

    base, rows = counts_of(args.base), list[dict[str, Any]]()
    for text in args.adapted:
        name, _, folder = text.partition("=")
        kept = [Path(folder) / LOW_RANK_DIR / WEIGHTS_FILE, Path(folder) / WEIGHTS_FILE]
        size = next((file.stat().st_size for file in kept if file.exists()), 0)
        for suite, counts in counts_of(folder).items():
            both = np.array([counts, base[suite]])  # [side, prompt, (tokens, steps)]
            value, interval = bootstrap(both, ratio_of_ratios, seed=0)
            before, after = (side[:, 0].sum() / side[:, 1].sum() for side in both[::-1])
            rows.append(
                {
                    "drafter": name,
                    "suite": suite,
                    "prompts": len(counts),
                    "before": round(float(before), 3),
                    "after": round(float(after), 3),
                    "ratio": [round(number, 3) for number in (value, *(interval or (0.0, 0.0)))],
                    "bytes": size,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    finish(args.output, rows, {"setting": args.setting, "max_new_tokens": args.max_new_tokens, "dtype": args.dtype})


if __name__ == "__main__":
    main()
