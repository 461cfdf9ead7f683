"""Types of options, messages for wrong values in configurations and files, and differences of two of them."""

import json
import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

OPTIONS = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)
"""pydantic's settings for every configuration: no conversion of types, no unknown options, no
NaN."""


def different(values: list[Any]) -> list[Any]:
    """Raise an error if a list contains a value twice."""
    if any(value in values[:index] for index, value in enumerate(values)):
        raise PydanticCustomError("different", "has the same value twice; give each once")
    return values


MAX_COUNT, MAX_SMALL_COUNT, MAX_THREADS = 2**31, 2**16, 1024
"""Bounds of counts of anything, of what is in memory at once or repeated (rows, depths, passes), and
of threads.

What is larger is a slip of the keyboard: it would hang or end the process without a message.
"""
PositiveInt = Annotated[int, Field(gt=0, lt=MAX_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
RecordedCount = Annotated[int, Field(ge=0, lt=2**63)]
"""A count that a run measured, such as bytes or tokens: large runs exceed MAX_COUNT."""
SmallCount = Annotated[int, Field(gt=0, le=MAX_SMALL_COUNT)]
NumThreads = Annotated[int, Field(gt=0, le=MAX_THREADS)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(gt=0, le=1)]

T = TypeVar("T")
Distinct = Annotated[list[T], Field(min_length=1), AfterValidator(different)]
"""A list of at least one value, without duplicates."""

MAX_VALUE_CHARS = 40
"""Longest value that a message quotes in full."""
RULES = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "enum": "must be one of {expected}",
    "literal_error": "must be {expected}",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "dataclass_type": "must be a mapping",
    "model_type": "must be a mapping",
}
"""Messages by pydantic's types of errors; other errors keep pydantic's message."""


@dataclass(frozen=True)
class OneOf:
    """A rule that allows only these strings."""

    choices: tuple[str, ...]

    def __call__(self, value: str) -> str:
        if value not in self.choices:
            raise PydanticCustomError("one_of", "must be one of {choices}", {"choices": ", ".join(self.choices)})
        return value


def one_of(*choices: str) -> AfterValidator:
    """Return a validator that allows only these strings.

    OmegaConf doesn't support `Literal`.
    """
    return AfterValidator(OneOf(choices))


def raise_problems(problems: list[str]) -> None:
    """Raise one ValueError with a line for each problem, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))


MOST_NAMED = 5
"""Names or problems of many that a message has."""


def first_of(texts: Sequence[str], separator: str = ", ") -> str:
    """Join the first texts, and the number of the others."""
    more = [f"and {len(texts) - MOST_NAMED} more"] if len(texts) > MOST_NAMED else []
    return separator.join([*texts[:MOST_NAMED], *more])


def under(section: str, line: str, options: Container[str]) -> str:
    """Prefix a message with its section, with a dot if an option's name comes first."""
    separator = "." if re.split(r"\W", line, maxsplit=1)[0] in options else ": "
    return f"{section}{separator}{line}" if section else line


def problems_of(error: ValidationError, section: str = "", known: Collection[str] = ()) -> list[str]:
    """Return a line for each wrong value: its full name, the value and the rule.

    With `known`, the names of all options, the line of an unknown option suggests one. A
    `__post_init__` that finds several problems raises a ValueError with a line for each.
    """
    problems = []
    for detail in error.errors(include_url=False):
        name = section
        for part in detail["loc"]:
            name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
        if detail["type"] == "value_error":
            options = getattr(detail["input"], "kwargs", detail["input"])
            options = options if isinstance(options, dict) else ()
            problems += [under(name, line, options) for line in str(detail["ctx"]["error"]).splitlines()]
        elif detail["type"] == "missing":
            problems.append(f"{name} is missing; give {name}=VALUE" if known else f"{name}: is missing")
        elif detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            close, noun = closest(name, known), "option" if known else "key"
            problems.append(f"{name}: there is no such {noun}{f'; did you mean {close}?' if close else ''}")
        else:
            context = {key: _plain(value) for key, value in detail.get("ctx", {}).items()}
            rule = RULES[detail["type"]].format_map(context) if detail["type"] in RULES else detail["msg"]
            problems.append(f"{name or 'the whole'}={_shown(detail['input'])}: {rule}")
    return problems


def closest(name: str, known: Collection[str]) -> str | None:
    """Return the known options that a mistyped one probably means: "distill.top_k or drafter.top_k".

    Options of its own section are searched first. None if no option is similar.
    """
    section, _, last = re.sub(r"\[\d+\]", "[]", name).rpartition(".")
    split = [option.rpartition(".") for option in dict.fromkeys(known)]
    for parts in ([part for part in split if part[0] == section], split):
        close = get_close_matches(last, list(dict.fromkeys(word for _, _, word in parts)), 1)
        parts = [part for part in parts if part[2] in close]
        if near := get_close_matches(section, [above for above, _, _ in parts], 1):
            parts = [part for part in parts if part[0] == near[0]]
        if parts:
            return " or ".join(map("".join, parts))
    return None


def name_digests(changes: dict[str, str], words: Mapping[str, str]) -> list[str]:
    """Return texts about the changes, with those of digests replaced by words.

    A name of `words` may end in `.`: it is then a prefix.
    """
    texts = []
    for name, text in changes.items():
        found = [replacement for key, replacement in words.items() if name == key or (key[-1] == "." and name.startswith(key))]
        texts.append(found[0].format(name=name.rpartition(".")[2]) if found else text)
    return list(dict.fromkeys(texts))


def differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Describe the values that differ, by their dotted names.

    Each description has both values: `target.dtype (was 'float32', is 'bfloat16')`. A missing value
    equals None, which means off.
    """
    texts: dict[str, str] = {}
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            texts |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            texts[f"{prefix}{key}"] = f"{prefix}{key} (was {old!r}, is {new!r})"
    return texts


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace("'", "").replace(" or ", ", ")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."
