"""Checks of the rotary embeddings in other programs' configurations.

transformers only warns of unknown values, and ignores them.
"""

import math
from collections.abc import Mapping
from typing import Any

ROPE_KEYS = ("rope_parameters", "rope_scaling")
"""Keys of a configuration with rotary embeddings: the current one of transformers, and that of
older versions."""
NEEDED: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    "longrope": frozenset({"short_factor", "long_factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}
"""Parameters that each kind needs (transformers' modeling_rope_utils.py)."""
OPTIONAL: dict[str, frozenset[str]] = {
    "dynamic": frozenset({"original_max_position_embeddings"}),
    "yarn": frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    "longrope": frozenset({"attention_factor", "factor"}),
}
OF_ALL = frozenset({"rope_theta", "rope_type", "type"})
MOST = 1e12
"""Largest plausible value of a base, a factor, or a number of tokens."""


def rope_problems(config: Mapping[str, Any]) -> list[str]:
    """List the problems of a configuration's rotary embeddings.

    A value may be unknown, missing, impossible or set twice.
    """
    present = {key: config[key] for key in ROPE_KEYS if config.get(key) is not None}
    problems = [f"{key} {rope!r}" for key, rope in present.items() if not isinstance(rope, Mapping)]
    if problems:
        return problems
    for key, rope in present.items():
        problems += _problems(key, rope)
    bases = {key: rope["rope_theta"] for key, rope in present.items() if rope.get("rope_theta") is not None}
    bases |= {"the configuration": config["rope_theta"]} if config.get("rope_theta") is not None else {}
    problems += [f"rope_theta {base!r}" for base in bases.values() if not is_positive(base)]
    if not problems and len(set(bases.values())) > 1:
        problems.append(f"several rope_theta: {', '.join(f'{base} in {key}' for key, base in bases.items())}")
    if not problems and len({repr(sorted(_plain(rope).items())) for rope in present.values()}) > 1:
        problems.append("different rope_parameters and rope_scaling")
    return problems


def _problems(key: str, rope: Mapping[str, Any]) -> list[str]:
    kind = rope.get("rope_type", rope.get("type"))
    if not isinstance(kind, str) or kind not in NEEDED:
        if kind is None and not rope.keys() - {"rope_theta"}:
            return []
        return [f"{key} of the type {kind!r} (known: {', '.join(NEEDED)})"]
    if rope.get("type", kind) != kind:
        return [f"{key} of two types, {kind} and {rope['type']}"]
    optional = OPTIONAL.get(kind, frozenset())
    problems = [f"no {key}.{name}" for name in sorted(NEEDED[kind]) if rope.get(name) is None]
    problems += [f"an unknown key {key}.{name}" for name in sorted(map(str, rope.keys() - NEEDED[kind] - optional - OF_ALL))]
    numbers = {name: rope[name] for name in (NEEDED[kind] | optional) & rope.keys() if rope[name] is not None}
    return problems + [f"{key}.{name} {value!r}" for name, value in sorted(numbers.items()) if not _is_possible(name, value)]


def _is_possible(name: str, value: Any) -> bool:
    if name == "truncate":
        return isinstance(value, bool)
    if name in ("short_factor", "long_factor"):
        return isinstance(value, list) and bool(value) and all(map(is_positive, value))
    return is_positive(value)


def _plain(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Normalize the parameters, so that both ways to write them can be compared."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rope_type": kind, **{name: value for name, value in rope.items() if name not in OF_ALL}}


def is_positive(value: Any) -> bool:
    """Check for a number that is possible as a base, a factor or a length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf and value <= MOST
