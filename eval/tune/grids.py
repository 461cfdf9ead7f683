"""Which settings of a drafter are tried.

A grid for each kind, which grows where its edge turns out to be the best place.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from ...models.drafters.saved.build import DrafterSpec, saved_spec
from ...models.drafters.saved.loading import read_drafter_config

Grid = Mapping[str, tuple[Any, ...]]
"""Values by option, of which every combination that makes sense is tried."""

GRIDS: dict[str, Grid] = {
    "draft_model": {"length": (2, 3, 4, 6), "top_k": (1, 2, 4), "tree_nodes": (4, 8, 16, 32)},
    "eagle": {"depth": (2, 3, 4, 5, 7), "top_k": (1, 2, 4, 8), "tree_nodes": (2, 4, 8, 16, 32, 60)},
    "eagle3": {"depth": (2, 3, 4, 5, 7), "top_k": (1, 2, 4, 8), "tree_nodes": (2, 4, 8, 16, 32, 60)},
    "medusa": {"tree_nodes": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)},
    "redrafter": {"beam_width": (1, 2, 4, 8, 16), "beam_length": (2, 3, 4, 5), "tree_nodes": (None, 4, 8, 16, 32)},
}
"""What is tried of each kind at first. On a CPU the best lies inside; to an accelerator larger
trees may cost no more."""


def grid_of(directory: Path) -> Grid:
    """Return the grid of the drafter in a directory.

    Raises ValueError for an unknown kind.
    """
    return GRIDS[saved_spec(read_drafter_config(directory)).kind]


def candidates(directory: Path, grid: Grid) -> list[dict[str, Any]]:
    """Settings of the drafter in a directory that are worth trying.

    Its own first, then those of the grid.
    """
    spec = saved_spec(read_drafter_config(directory))
    default = spec.config
    settings = [{name: getattr(default, name) for name in grid}]
    # A tree that is written down would overrule the number of its nodes.
    chosen: dict[str, Any] = {} if getattr(default, "tree_paths", None) is None else {"tree_paths": None}
    for values in product(*grid.values()):
        setting = {**dict(zip(grid, values, strict=True)), **chosen}
        if setting not in settings and _makes_sense(setting, grid) and _is_possible(spec, setting):
            settings.append(setting)
    return settings


def extended(grid: Grid, best: Mapping[str, Any]) -> Grid:
    """Return the grid, extended where the `best` setting has the largest or smallest value.

    The new value is twice or half as large. The same grid where the best lies inside.
    """
    return {name: (*values, *_beyond(values, best.get(name))) for name, values in grid.items()}


def _beyond(values: tuple[Any, ...], value: int | None) -> tuple[int, ...]:
    """Return the next values beyond the largest or smallest one, down to 1.

    (A drafter's own value may be either, and not be among them.)
    """
    numbers = [number for number in values if number is not None]
    if value is None or min(numbers) < value < max(numbers):
        return ()
    added = (value, 2 * value) if value >= max(numbers) else (value, value // 2) if value > 1 else ()
    return tuple(number for number in added if number not in values)


def _is_possible(spec: DrafterSpec, setting: Mapping[str, Any]) -> bool:
    """Return whether the drafter takes it beside its other options.

    A search has bounds, and only shared prefixes make a tree whose nodes are chosen.
    """
    try:
        spec.with_options(setting)
    except ValueError:
        return False
    return True


def _makes_sense(setting: Mapping[str, Any], grid: Grid) -> bool:
    """Return whether no smaller setting drafts the same.

    A chain has no more nodes than tokens, and a tree more than a chain.
    """
    length = next((setting[name] for name in ("beam_length", "depth", "length") if name in setting), None)
    width = next((setting[name] for name in ("beam_width", "top_k") if name in setting), None)
    nodes = setting.get("tree_nodes")
    if length is None or width is None:
        return True
    if width == 1:  # in the smallest tree that holds it
        sizes = grid["tree_nodes"]
        return nodes == (None if None in sizes else min((size for size in sizes if size >= length), default=length))
    return nodes is None or length <= nodes <= length * width * (width if "top_k" in setting else 1)
