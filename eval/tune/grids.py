"""Settings of a drafter that tuning tries.

Each kind has a grid. It grows if the fastest setting is at its edge.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from ...models.drafters.saved.build import DrafterSpec
from ...models.drafters.saved.parts import DrafterParts

Grid = Mapping[str, tuple[Any, ...]]
"""Values by option; tuning tries every useful combination of them."""

GRIDS: dict[str, Grid] = {
    "block": {"width": (1, 2, 4, 8, 16), "tree_nodes": (2, 4, 8, 16, 32, 60)},
    "draft_model": {"length": (2, 3, 4, 6), "top_k": (1, 2, 4), "tree_nodes": (4, 8, 16, 32)},
    "eagle": {"depth": (2, 3, 4, 5, 7), "top_k": (1, 2, 4, 8), "tree_nodes": (2, 4, 8, 16, 32, 60)},
    "eagle3": {"depth": (2, 3, 4, 5, 7), "top_k": (1, 2, 4, 8), "tree_nodes": (2, 4, 8, 16, 32, 60)},
    "medusa": {"tree_nodes": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)},
    "redrafter": {"beam_width": (1, 2, 4, 8, 16), "beam_length": (2, 3, 4, 5), "tree_nodes": (None, 4, 8, 16, 32)},
}
"""Initial grid of each kind. On a CPU the fastest setting lies inside it. On an accelerator larger
trees may cost no more."""


NODES: Mapping[str, tuple[int, ...]] = {
    "prompt_lookup": (3, 5, 8, 16),
    "recycling": (4, 8, 16, 40),
    "suffix": (4, 8, 16, 32),
}
"""Numbers of nodes of each training-free drafter. All of these settings are measured."""
MERGED_NODES = (5, 10, 20, 40)
"""Numbers of nodes of a merged drafter."""


def is_replayed(parts: DrafterParts, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether stored answers determine the drafter's steps in all of these settings.

    This holds for one drafter with weights. Recycling reads the target's logits, and a paced tree
    depends on measured times.
    """
    return bool(parts.with_weights) and not any(parts.is_merged(setting) or parts.grows(setting) for setting in settings)


def measured_settings(parts: DrafterParts) -> list[dict[str, Any]]:
    """List the settings to measure for a drafter that isn't replayed: expected gain, and fixed
    trees."""
    pace = {"pace": "fixed"} if parts.is_merged({}) else {}
    sizes = MERGED_NODES if pace else NODES[parts.kind]
    return [{"pace": "expected"}, *({"tree_nodes": size, **pace} for size in sizes)]


def grid_of(spec: DrafterSpec) -> Grid:
    """Look up the initial grid of a drafter."""
    return GRIDS[spec.kind]


def candidates(spec: DrafterSpec, grid: Grid) -> list[dict[str, Any]]:
    """List the settings of a drafter that are worth a trial.

    The drafter's saved setting comes first, then those of the grid.
    """
    default = spec.config
    settings = [{name: getattr(default, name) for name in grid}]
    # A tree given as paths would override the number of its nodes.
    chosen: dict[str, Any] = {} if getattr(default, "tree_paths", None) is None else {"tree_paths": None}
    for values in product(*grid.values()):
        setting = {**dict(zip(grid, values, strict=True)), **chosen}
        if setting not in settings and _makes_sense(setting, grid) and _is_possible(spec, setting):
            settings.append(setting)
    return settings


def extended(grid: Grid, best: Mapping[str, Any]) -> Grid:
    """Extend the grid where the `best` setting has the largest or smallest value.

    The new value is twice or half as large. A grid with the best setting inside stays the same.
    """
    return {name: (*values, *_beyond(values, best.get(name))) for name, values in grid.items()}


def _beyond(values: tuple[Any, ...], value: int | None) -> tuple[int, ...]:
    """List the next values beyond the largest or smallest one, down to 1.

    (A drafter's saved value may be beyond the grid itself.)
    """
    numbers = [number for number in values if number is not None]
    if value is None or min(numbers) < value < max(numbers):
        return ()
    added = (value, 2 * value) if value >= max(numbers) else (value, value // 2) if value > 1 else ()
    return tuple(number for number in added if number not in values)


def _is_possible(spec: DrafterSpec, setting: Mapping[str, Any]) -> bool:
    """Check whether the drafter allows a setting beside its other options.

    For example, the search has bounds, and selected nodes need shared prefixes.
    """
    try:
        spec.with_options(setting)
    except ValueError:
        return False
    return True


def _makes_sense(setting: Mapping[str, Any], grid: Grid) -> bool:
    """Check that no smaller setting drafts the same tree.

    A chain has no more nodes than tokens. A tree has at least the nodes of a chain.
    """
    length = next((setting[name] for name in ("beam_length", "depth", "length") if name in setting), None)
    width = next((setting[name] for name in ("beam_width", "top_k", "width") if name in setting), None)
    nodes = setting.get("tree_nodes")
    if length is None or width is None:
        return True
    if width == 1:  # a chain: use the smallest tree size that holds it
        sizes = grid["tree_nodes"]
        return nodes == (None if None in sizes else min((size for size in sizes if size >= length), default=length))
    return nodes is None or length <= nodes <= length * width * (width if "top_k" in setting else 1)
