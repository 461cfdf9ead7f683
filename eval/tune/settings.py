"""Settings of a drafter that tuning tries: about thirty for each kind."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from ...models.drafters.saved.build import DrafterSpec
from ...models.drafters.saved.parts import DrafterParts

Grid = Mapping[str, tuple[Any, ...]]
"""Values by option; tuning tries every useful combination of them."""

GRIDS: Mapping[str, Grid] = {
    "block": {"width": (1, 2, 4, 8, 16), "tree_nodes": (2, 4, 8, 16, 32, 60)},
    "draft_model": {"length": (2, 3, 4, 6), "top_k": (1, 2, 4), "tree_nodes": (4, 8, 16, 32)},
    "eagle": {"depth": (2, 3, 5, 7), "top_k": (1, 2, 8), "tree_nodes": (4, 8, 16, 32, 60)},
    "eagle3": {"depth": (2, 3, 5, 7), "top_k": (1, 2, 8), "tree_nodes": (4, 8, 16, 32, 60)},
    "medusa": {"tree_nodes": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)},
    "redrafter": {"beam_width": (1, 2, 4, 8), "beam_length": (2, 3, 5), "tree_nodes": (None, 4, 8, 16, 32)},
}
"""Grid of each trained kind. Small trees are for a CPU; on an accelerator larger ones may cost no
more."""
TRAINING_FREE_NODES: Mapping[str, tuple[int, ...]] = {
    "prompt_lookup": (3, 5, 8, 16),
    "recycling": (4, 8, 16, 40),
    "suffix": (4, 8, 16, 32),
}
"""Numbers of nodes of each training-free drafter."""
MERGED_NODES = (5, 10, 20, 40)
"""Numbers of nodes of a merged drafter."""


def settings_to_try(parts: DrafterParts) -> list[dict[str, Any]]:
    """List the settings of a drafter that are worth a trial, each once."""
    if parts.is_merged({}):
        return [{"pace": "expected"}, *({"tree_nodes": size, "pace": "fixed"} for size in MERGED_NODES)]
    if not parts.with_weights:
        return [{"pace": "expected"}, *({"tree_nodes": size} for size in TRAINING_FREE_NODES[parts.kind])]
    return _grid_settings(parts.parts[0].spec())


def _grid_settings(spec: DrafterSpec) -> list[dict[str, Any]]:
    """List a trained drafter's settings: the saved one first, then those of its kind's grid."""
    default, grid = spec.config, GRIDS[spec.kind]
    # A tree given as paths would override the number of its nodes, and a pace its form.
    fixed: dict[str, Any] = {} if getattr(default, "tree_paths", None) is None else {"tree_paths": None}
    fixed |= {} if getattr(default, "pace", "fixed") == "fixed" else {"pace": "fixed"}
    settings = [{name: getattr(default, name) for name in grid}]
    for values in product(*grid.values()):
        setting = {**dict(zip(grid, values, strict=True)), **fixed}
        if setting not in settings and _makes_sense(setting, grid) and _is_possible(spec, setting):
            settings.append(setting)
    return settings


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
