"""What stands for pydantic in `custom_generate/`: users of a packaged drafter have torch and transformers alone.

It is as much of pydantic as the drafters' options and files use. Options are checked, since a call of `generate` may change
them: types strictly, then the rules of `Field` and `AfterValidator`. The first wrong value is the error, where pydantic lists
all of them. Of files it checks the keys alone: they were read with pydantic when the drafter was packaged.
"""

import dataclasses
import json
import math
import operator
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "gt": ("above", operator.gt),
    "ge": ("at least", operator.ge),
    "lt": ("below", operator.lt),
    "le": ("at most", operator.le),
    "min_length": ("of a length of at least", lambda value, limit: len(value) >= limit),
}
"""The words and the comparison of each limit that a `Field` may have."""


class ValidationError(ValueError):
    """A wrong value, in the form that `problems_of` reads."""

    def errors(self, **options: Any) -> list[dict[str, Any]]:
        return [{"type": "value_error", "loc": (), "ctx": {"error": self}}]


class PydanticCustomError(ValueError):
    """A broken rule."""

    def __init__(self, kind: str, message: str, context: dict[str, Any] | None = None) -> None:
        super().__init__(message.format(**(context or {})))


@dataclasses.dataclass(frozen=True)
class AfterValidator:
    """A rule of an annotated type: `check` raises ValueError for a value that breaks it."""

    check: Callable[[Any], Any]


def Field(**limits: float) -> AfterValidator:  # noqa: N802 - pydantic's name
    """Return the rule that a value keeps to these limits."""

    def check(value: Any) -> None:
        for name, limit in limits.items():
            words, holds = LIMITS[name]
            if not holds(value, limit):
                raise ValueError(f"must be {words} {limit:g}")

    return AfterValidator(check)


def AllowInfNan(allowed: bool) -> AfterValidator:  # noqa: N802 - pydantic's name
    """Return no rule: floats are checked to be finite anyway."""
    return Field()


ConfigDict = dict
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


def dataclass(*, config: Any, **options: Any) -> Callable[[type], type]:
    """Make a dataclass that checks the values given to it, before its own `__post_init__` does."""

    def decorate(cls: type) -> type:
        made: Any = dataclasses.dataclass(**options)(cls)
        assign = made.__init__

        def init(self: Any, **values: Any) -> None:
            hints = get_type_hints(made, include_extras=True)
            for name, value in values.items():
                try:
                    _check(hints[name], value)
                except ValueError as error:
                    raise ValidationError(f"{name}={value!r}: {error}") from None
            assign(self, **values)

        made.__init__ = init
        return cast(type, made)

    return decorate


def _check(hint: Any, value: Any) -> None:
    """Raise ValueError where a value isn't of a type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        _check(parts[0], value)
        for rule in parts[1:]:
            rule.check(value)
    elif origin in (Union, UnionType):  # of a type and None
        if value is not None:
            _check(parts[0], value)
    elif hint is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
    elif hint is not Any and type(value) is not (origin or hint):
        raise ValueError(f"must be of type {(origin or hint).__name__}")
    elif origin is list:
        for item in value:
            _check(parts[0], item)


class TypeAdapter(Generic[T]):
    """Reads a dataclass, maybe of dataclasses, from JSON."""

    def __init__(self, cls: type[T]) -> None:
        self.cls = cls

    def validate_json(self, text: str | bytes, **options: Any) -> T:
        try:
            return _read(self.cls, json.loads(text))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValidationError(str(error)) from None


def _read(cls: Any, value: Any) -> Any:
    types = get_type_hints(cls) if dataclasses.is_dataclass(cls) else None
    if types is None:
        return value
    return cls(**{name: _read(types.get(name), part) for name, part in value.items()})
