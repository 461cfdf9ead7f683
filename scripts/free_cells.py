"""Cells of the study of free drafts: what each part measures, on which prompts."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafter_settings import DrafterSetting, parse_setting, settings_of
from transformers_methods import ASSISTED, LOOKUP, TRANSFORMERS

from outrider.data.drafter_names import SEPARATOR, TRAINING_FREE_NAMES
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.records.method_names import TITLES
from outrider.models.drafters.merged import MergedConfig
from outrider.models.drafters.saved.folder import read_drafter_config

PARTS = DEMO, SAMPLED, BATCH, GROWN, PACE = "demo", "sampled", "batch", "grown", "pace"
EXPECTED = {"pace": "expected"}
BATCH_SIZE = 4
GROWN_NEW_TOKENS = SUITE_NEW_TOKENS = 64
PROFILED_PROMPTS = 2
"""Prompts of the part demo that are decoded once more for the split of times."""
KINDS = FREE, TRAINED, MERGED = "free", "trained", "merged"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A drafter in one setting, under the name that the tables show."""

    name: str
    kind: str
    """One of KINDS."""
    folders: tuple[Path, ...] = ()
    free: tuple[str, ...] = ()
    """Names of its drafters without training."""
    setting: dict[str, Any] = field(default_factory=dict)

    def drafter(self, copies: Mapping[Path, Path]) -> str:
        """Return its drafter as `--drafter` takes it, with copies in place of folders."""
        return SEPARATOR.join([*(str(copies.get(folder, folder)) for folder in self.folders), *self.free])

    @property
    def described(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "free": list(self.free), "setting": self.setting}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """An evaluation: one target in one type, suites, temperatures, batch sizes and methods."""

    part: str
    name: str
    config: EvalConfig
    arms: tuple[Arm, ...]
    dtype: str = "float32"
    size: str | None = None
    """Parameters of the grown target; None for the target as it is."""
    has_transformers: bool = False
    """Whether transformers' methods decode too: greedily, a prompt at a time."""

    def folder(self, output: Path) -> Path:
        return output / "cells" / self.name

    @property
    def num_methods(self) -> int:
        return 1 + len(self.arms) + len((TRANSFORMERS, LOOKUP, ASSISTED)) * self.has_transformers

    @property
    def num_steps(self) -> int:
        """Plain decode steps that emit as many tokens as all answers have, at most."""
        limits = [suite.limit or 0 for suite in self.config.suites]
        passes = [limit * self.config.repeats + self.config.profile_prompts for limit in limits]
        shares = sum(1 / size for size in self.config.batch_sizes)
        return int(sum(passes) * self.config.max_new_tokens * len(self.config.temperatures) * shares * self.num_methods)


def cells_of(args: argparse.Namespace, others: Sequence[DrafterSetting]) -> list[Cell]:
    """Return the cells of the chosen parts, in the order in which they are measured."""
    # 1. The methods.
    title = TITLES[read_drafter_config(args.drafter).kind]
    trained = [trained_arm(setting) for setting in settings_of(title, args.drafter, None)]
    more = [trained_arm(setting) for setting in others]
    free = [Arm(name=name, kind=FREE, free=(name,)) for name in TRAINING_FREE_NAMES]
    expected = merged_arm("expected", args, EXPECTED)
    fixed = [
        merged_arm(f"fixed, {nodes} nodes", args, fixed_setting(nodes))
        for nodes in [*sorted({*args.widths} - {fixed_nodes()}), fixed_nodes()]
    ]
    at_default = fixed[-1]
    untrained = Arm(name=f"{SEPARATOR.join(args.free)}, expected", kind=FREE, free=tuple(args.free), setting=EXPECTED)
    # 2. The cells of each part.
    demo = [*free, untrained, *trained, *more, at_default, expected]
    some = [*free, trained[-1], at_default, expected]
    stdlib = [SuiteConfig(name="stdlib", limit=args.prompts)]
    few = [SuiteConfig(name="stdlib", limit=args.grown_prompts)]
    parts = {
        DEMO: [
            Cell(
                part=DEMO,
                name=DEMO,
                config=config(args, stdlib, repeats=args.repeats, profile_prompts=PROFILED_PROMPTS),
                arms=grouped(demo),
                has_transformers=True,
            )
        ],
        SAMPLED: [Cell(part=SAMPLED, name=SAMPLED, config=config(args, stdlib, temperatures=[1.0]), arms=grouped(some))],
        BATCH: [Cell(part=BATCH, name=BATCH, config=config(args, stdlib, batch_sizes=[BATCH_SIZE]), arms=grouped(some))],
        GROWN: [
            Cell(
                part=GROWN,
                name=f"{GROWN}-{args.size}-{dtype}",
                config=config(args, few, max_new_tokens=GROWN_NEW_TOKENS),
                arms=grouped([free[-1], *trained, *fixed, expected]),
                dtype=dtype,
                size=args.size,
                has_transformers=True,
            )
            for dtype in ("float32", "bfloat16")
        ],
        PACE: [
            Cell(
                part=PACE,
                name=f"{PACE}-{suite.name}",
                config=config(
                    args, [suite], max_new_tokens=SUITE_NEW_TOKENS, temperatures=[0.0, 1.0], batch_sizes=[1, BATCH_SIZE]
                ),
                arms=grouped([*fixed, expected]),
            )
            for suite in (suite_of(text, args.suite_prompts) for text in args.suites)
        ],
    }
    return [cell for part in args.parts for cell in parts[part]]


def fixed_nodes() -> int:
    """Return the default number of nodes of merged trees."""
    return MergedConfig().tree_nodes


def fixed_setting(nodes: int) -> dict[str, Any]:
    return {"pace": "fixed", "tree_nodes": nodes}


def trained_arm(drafter: DrafterSetting) -> Arm:
    return Arm(name=drafter.name, kind=TRAINED, folders=(drafter.folder,), setting=drafter.setting)


def merged_arm(words: str, args: argparse.Namespace, setting: dict[str, Any]) -> Arm:
    """Return the trained drafter merged with those without training."""
    setting = {**setting, **parse_setting(args.search, "--search")}
    return Arm(name=f"merged, {words}", kind=MERGED, folders=(args.drafter,), free=tuple(args.free), setting=setting)


def grouped(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """Order the arms as an evaluation does: all settings of a drafter follow each other."""
    order = list(dict.fromkeys(arm.drafter({}) for arm in arms))
    return tuple(sorted(arms, key=lambda arm: order.index(arm.drafter({}))))


def suite_of(text: str, limit: int) -> SuiteConfig:
    """Return the suite that NAME or NAME=FILE stands for."""
    name, _, path = text.partition("=")
    return SuiteConfig(name=name, path=path or None, limit=limit)


def config(args: argparse.Namespace, suites: list[SuiteConfig], **options: Any) -> EvalConfig:
    values = {"max_new_tokens": args.new_tokens, "profile_prompts": 0, "num_threads": args.threads, **options}
    return EvalConfig(suites=suites, **values)
