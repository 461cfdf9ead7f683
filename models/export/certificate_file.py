"""Certificates as `outrider certify` writes them, read strictly: a card repeats what they say."""

from pathlib import Path
from typing import Any

from ...data.files import read_json

TYPES: dict[str, tuple[type, ...]] = {
    "passed": (bool,),
    "false_alarm_rate": (float, int),
    "environment": (dict,),
    "lines": (list,),
}
TYPES_OF_A_LINE: dict[str, tuple[type, ...]] = {
    "subject": (str,),
    "method": (str,),
    "num_cases": (int,),
    "result": (str,),
    "passed": (bool, type(None)),
}
OPTIONAL: dict[str, tuple[type, ...]] = {
    "drafters": (dict,),
    **dict.fromkeys(("target", "weights_sha256", "dtype", "form"), (str,)),
}
"""Where a target was certified, too, and not the rules alone."""


def read_certificate(path: Path) -> dict[str, Any]:
    """What `outrider certify` wrote. Raises ValueError for another file, and for a verdict that isn't that of its lines."""
    found = read_json(path)
    if not _has(found, TYPES) or not found["lines"] or not all(_has(line, TYPES_OF_A_LINE) for line in found["lines"]):
        raise ValueError(f"{path} is no certificate; give the file that `outrider certify --output` wrote")
    if not _has(found, {name: types for name, types in OPTIONAL.items() if name in found}):
        raise ValueError(f"{path} is no certificate, by what it says of {', '.join(OPTIONAL)}; certify again")
    if not 0 <= found["false_alarm_rate"] <= 1 or found["passed"] != all(
        line["passed"] is not False for line in found["lines"]
    ):
        raise ValueError(f"{path} was altered: its verdict isn't that of its lines; certify again")
    return dict(found)


def _has(value: Any, types: dict[str, tuple[type, ...]]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name, ...), kinds) for name, kinds in types.items())
