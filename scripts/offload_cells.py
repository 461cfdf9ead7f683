"""Cells of `bench_offload`: which methods decode beside which disk and memory budget.

The letters are the rows of the tables:

    (a) transformers with accelerate's offload to disk      (e) tree verified by LLMCad's rule
    (b) the same with an assistant model                    (f) tree verified by expected gain
    (c) streamed weights, plain decoding                    (g) as (f), drafting during the pass too
    (d) a tree of fixed size                                (h) plain decoding with all in memory
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

RAW, STANDARD, ASSISTED, PLAIN, FIXED, CONFIDENCE, EXPECTED, MEANWHILE, MEMORY = "raw", *"abcdefgh"
TITLES = {
    RAW: "raw reads",
    STANDARD: "(a) transformers + accelerate",
    ASSISTED: "(b) the same, assisted",
    PLAIN: "(c) streamed, plain",
    FIXED: "(d) + fixed tree",
    CONFIDENCE: "(e) + LLMCad's rule",
    EXPECTED: "(f) + expected gain",
    MEANWHILE: "(g) + drafting during the pass",
    MEMORY: "(h) in memory, plain",
}
LETTERS = tuple(TITLES)
CLOSE, GROWN, SMALL = "close", "close, grown", "small"
"""The drafters: the one that agrees with the target most, its grown copy, and another one."""
DRAFTERS = (CLOSE, GROWN, SMALL)
SEARCH = {"top_k": 8, "tree_nodes": 256}
SETTINGS: dict[str, dict[str, Any]] = {
    FIXED: {"pace": "fixed", "length": 5, "top_k": 8, "tree_nodes": 40},
    CONFIDENCE: {"pace": "confidence", **SEARCH},
    EXPECTED: {"pace": "expected", **SEARCH},
    MEANWHILE: {"pace": "expected", **SEARCH},
}
ABLATION = (PLAIN, FIXED, CONFIDENCE, EXPECTED, MEANWHILE)
"""Rows of the ablation, as in the paper's figure 15: each adds to the one before, except that (f)
replaces (e)."""
SHARES = (0.25, 0.5, 0.75)
"""Budgets as shares of the weights. All methods are measured at the first one."""
THROTTLED, AS_IS = "throttled", "disk as it is"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of a table: a way to decode, with one of the drafters or with none."""

    letter: str
    drafter: str = ""
    """One of DRAFTERS, or empty."""
    free: tuple[str, ...] = ()
    """Drafters without training that are merged with it."""

    @property
    def key(self) -> str:
        return "-".join(filter(None, (self.letter, self.drafter.replace(", ", "-"), *self.free)))

    @property
    def title(self) -> str:
        names = " + ".join(filter(None, (self.drafter, *self.free)))
        return TITLES[self.letter] + (f", {names}" if names else "")

    @property
    def is_peer(self) -> bool:
        return self.letter in (STANDARD, ASSISTED)

    @property
    def drafts(self) -> bool:
        return bool(self.drafter)

    def spec(self, folders: Mapping[str, Path], shared: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of its worker. `plan` has the facts of a worker of PLAIN."""
        kind = "raw" if self.letter == RAW else "peer" if self.is_peer else "stream"
        names = [*([str(folders[self.drafter])] if self.drafter else []), *self.free]
        spec = {"kind": kind, **shared, "drafter": "+".join(names) or None, "setting": SETTINGS.get(self.letter, {})}
        spec["meanwhile"] = self.letter == MEANWHILE
        if self.letter == MEMORY:
            spec["budget_gib"] = None
        return {**spec, **{name: plan[name] for name in ("streamed_layers", "streamed_bytes") if name in plan}}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A disk and a budget, with the methods that take turns."""

    disk: str
    """THROTTLED or AS_IS."""
    share: float
    methods: tuple[Method, ...] = field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.disk.replace(' ', '-')}-{100 * self.share:.0f}"

    def folder(self, output: Path) -> Path:
        return output / "cells" / self.name

    @property
    def described(self) -> dict[str, Any]:
        return {"disk": self.disk, "share": self.share}


def cells_of(
    disks: Sequence[str], shares: Sequence[float], drafters: Sequence[str], free: Sequence[str], letters: Collection[str]
) -> list[Cell]:
    """Return the cells with methods of these letters, the main cells first."""
    main, *others = shares
    few = (Method(letter=STANDARD), Method(letter=PLAIN), Method(letter=MEANWHILE, drafter=CLOSE))
    cells = [Cell(disk=disk, share=main, methods=all_methods(disk, drafters, free)) for disk in disks]
    cells += [Cell(disk=disk, share=share, methods=few) for share in others for disk in disks]
    return [replace(cell, methods=tuple(method for method in cell.methods if method.letter in letters)) for cell in cells]


def all_methods(disk: str, drafters: Sequence[str], free: Sequence[str]) -> tuple[Method, ...]:
    """Return the methods of a main cell, in the order of their turns.

    The grown drafter decodes beside the throttled disk only, where it makes the paper's ratio of
    costs; the merged one beside the disk as it is, whose mark is about the best drafter.
    """
    alone = [Method(letter=letter) for letter in (RAW, STANDARD, PLAIN, MEMORY)]
    assisted = Method(letter=ASSISTED, drafter=CLOSE)
    ablated = [name for name in (CLOSE, GROWN) if name in drafters and (name == CLOSE or disk == THROTTLED)]
    steps = [Method(letter=letter, drafter=name) for name in ablated for letter in ABLATION if letter != PLAIN]
    small = [Method(letter=MEANWHILE, drafter=SMALL)] * (SMALL in drafters)
    merged = [Method(letter=MEANWHILE, drafter=CLOSE, free=tuple(free))] * (disk == AS_IS and bool(free))
    return (*alone[:2], assisted, *alone[2:], *steps, *small, *merged)
