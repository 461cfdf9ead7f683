"""Checks of the library's annotations at run time: a wrong type or shape in a signature fails a test.

The checks took half of the suite's time. So only modules with shapes in their annotations are
checked, each function's first calls in a process, and then one call in several.
`CHECK_ALL_CALLS=1 make test` checks all calls of all modules.
"""

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import torch

FIRST, EVERY = 8, 512
ROOT = Path(__file__).parents[1]
FOLDERS = ("cli", "data", "distill", "eval", "models", "train")
NUMBERS: dict[str, Iterator[int]] = {}
"""The number of each function's next call, by its name: a function inside another is made anew at each call of that."""


def install() -> None:
    """Check the annotations of outrider's modules that are imported from now on."""
    jaxtyped = jaxtyping.jaxtyped
    modules = ["outrider"]
    if not os.environ.get("CHECK_ALL_CALLS"):
        # The hook writes `@jaxtyping.jaxtyped(typechecker=...)` above every function and class.
        jaxtyping.jaxtyped = lambda *, typechecker: sometimes(jaxtyped(typechecker=typechecker))
        modules = modules_with_shapes()
    jaxtyping.install_import_hook(modules, "beartype.beartype")


def modules_with_shapes() -> list[str]:
    """List the modules of outrider whose annotations have shapes."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if "from jaxtyping import" in path.read_text()
    ]
    assert len(names) > 50, "the folders were not found"
    return [f"outrider.{name}" for name in names]


def sometimes(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator whose functions and constructors have the checks of `check` in some of their calls."""

    def decorate(thing: Any) -> Any:
        if inspect.isfunction(thing):
            # Making a check takes longer than most calls, and many functions are never called.
            return sampled(thing, functools.cache(lambda: check(thing)))
        plain = thing.__init__
        checked = check(thing)
        if checked.__init__ is not plain:
            both = (plain, checked.__init__)
            checked.__init__ = sampled(both[0], lambda: both[1])
        return checked

    return decorate


def sampled(plain: Callable[..., Any], make_checked: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return `plain` with checks in its first calls, and then in one call in several."""
    numbers = NUMBERS.setdefault(f"{plain.__module__}.{plain.__qualname__}", itertools.count(1))

    @functools.wraps(plain)
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # a changing number would be compiled anew at each call
            return plain(*arguments, **named)
        number = next(numbers)
        if number > FIRST and number % EVERY:
            return plain(*arguments, **named)
        return make_checked()(*arguments, **named)

    return call
