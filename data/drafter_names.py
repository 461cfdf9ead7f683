"""Names of drafters as options have them. Importing this module loads no torch.

A drafter is a folder, a name on the Hub, a training-free drafter, a model of transformers that drafts
as it is (`draft_model:DIR`), or several of these joined by `+`: `outputs/demo/drafter+suffix+recycling`.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

TRAINING_FREE_NAMES = ("prompt_lookup", "suffix", "recycling")
"""Drafters without weights (see the registry of drafters)."""
MODEL_PREFIX = "draft_model:"
"""What precedes the folder or the Hub id of a causal LM that drafts as it is, without training."""
SEPARATOR = "+"


def split_name(name: str | Path) -> list[str]:
    """Split a drafter's name into its parts.

    A `Path` is a folder, whatever its name. So is a text where a folder of this name exists, unless
    it is the name of a training-free drafter. Raises ValueError for an empty part, and for a model
    without a name.
    """
    if isinstance(name, Path):
        return [str(name)]
    parts, words = [], name.split(SEPARATOR)
    while words:
        # A folder may have the separator in its name: the longest existing one counts.
        sizes = range(len(words), 1, -1)
        length = next((size for size in sizes if Path(model_of(text := SEPARATOR.join(words[:size])) or text).is_dir()), 1)
        parts.append(SEPARATOR.join(words[:length]))
        words = words[length:]
    if not all(parts):
        raise ValueError(f"the drafter {name!r} has an empty part; give folders and names, joined by one {SEPARATOR}")
    if MODEL_PREFIX in parts:
        raise ValueError(f"the drafter {name!r} names no model; give {MODEL_PREFIX}DIR, or {MODEL_PREFIX}user/name on the Hub")
    return parts


def model_of(part: str) -> str | None:
    """Return the model that a part names: `DIR` of `draft_model:DIR`. None for other parts."""
    return part.removeprefix(MODEL_PREFIX) if part.startswith(MODEL_PREFIX) else None


def folders_of(name: str | Path) -> list[str]:
    """Return the parts of a drafter's name that are folders of drafters, or their names on the Hub."""
    return [
        part
        for part in split_name(name)
        if isinstance(name, Path) or not (part in TRAINING_FREE_NAMES or part.startswith(MODEL_PREFIX))
    ]


def models_of(name: str | Path) -> list[str]:
    """Return the models that draft as they are: folders, or names on the Hub."""
    return [] if isinstance(name, Path) else [model for part in split_name(name) if (model := model_of(part)) is not None]


def repeated_names(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, each once."""
    names = list(names)
    return [name for index, name in enumerate(names) if names.count(name) > 1 and name not in names[:index]]


def nearest_name(part: str) -> str:
    """Return a hint at the training-free drafter that a text is nearly the name of, or nothing."""
    return "".join(f"; did you mean {close}?" for close in get_close_matches(part, TRAINING_FREE_NAMES, 1))
