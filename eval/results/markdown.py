"""Markdown pages: every text from outside is escaped, by one rule.

A text of a record, a configuration or a stranger's drafter must not become markup, HTML or a link
in a page that others read. So `render` escapes every value of a template, and `Markdown.format`
every argument. Only a `Markdown` is inserted as it is.
"""

import re
from typing import Any

from jinja2 import Environment, PackageLoader


class Markdown(str):
    """Text that is Markdown already: inserting it into a page doesn't escape it."""

    __slots__ = ()

    def format(self, *values: Any, **named: Any) -> "Markdown":
        """Insert values; texts among them are escaped."""
        return Markdown(str.format(self, *map(_escaped, values), **{name: _escaped(value) for name, value in named.items()}))


def escape_markdown(text: str) -> str:
    """Escape a text for Markdown, on one line.

    Underscores within a word stay, since Markdown gives them no meaning there. So do square
    brackets that begin no link.
    """
    text = re.sub(r"[\\`*|<>&$~]|\](?=[(\[:])", r"\\\g<0>", " ".join(text.split()))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def code_span(text: object) -> Markdown:
    """Format a value as Markdown code on one line, so that it can't contain markup or HTML."""
    return Markdown(f"`{code(text)}`")


def code(text: object) -> Markdown:
    """Format a value for a block of code: on one line, without backticks, which end the block."""
    return Markdown(" ".join(str(text).replace("`", "").split()))


def render(template: str, **values: Any) -> str:
    """Render a template of `templates/` as Markdown."""
    environment = Environment(loader=PackageLoader("outrider.eval", "templates"), finalize=_escaped)
    environment.filters |= {"code": code, "code_span": code_span}
    return environment.get_template(template).render(**values)


def _escaped(value: Any) -> Any:
    return escape_markdown(value) if isinstance(value, str) and not isinstance(value, Markdown) else value
