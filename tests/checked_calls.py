"""Checks of the library's annotations at run time: a wrong type or shape in a signature fails a test.

The checks took half of the suite's time. So each function's first calls in a process are checked,
and then one call in several. `CHECK_ALL_CALLS=1 make test` checks all of them.
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import jaxtyping
import torch

FIRST, EVERY = 200, 16


def install() -> None:
    """Check the annotations of all modules of outrider that are imported from now on."""
    jaxtyped = jaxtyping.jaxtyped
    if not os.environ.get("CHECK_ALL_CALLS"):
        # The hook writes `@jaxtyping.jaxtyped(typechecker=...)` above every function and class.
        jaxtyping.jaxtyped = lambda *, typechecker: sometimes(jaxtyped(typechecker=typechecker))
    jaxtyping.install_import_hook("outrider", "beartype.beartype")


def sometimes(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator whose functions have the checks of `check` in some of their calls."""

    def decorate(thing: Any) -> Any:
        checked = check(thing)
        if not inspect.isfunction(thing):  # a class, of which only the constructor is checked
            return checked
        calls = 0

        @functools.wraps(thing)
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            if torch.compiler.is_compiling():  # a changing number would be compiled anew at each call
                return thing(*arguments, **named)
            calls += 1
            chosen = checked if calls <= FIRST or calls % EVERY == 0 else thing
            return chosen(*arguments, **named)

        return call

    return decorate
