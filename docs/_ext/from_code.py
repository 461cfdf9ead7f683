"""A Sphinx extension that makes the reference pages from the code.

A line `<!-- from code: NAME -->` of a page is replaced by what the function of this name in `reference` returns,
before the page is parsed. Docstrings of the API have code in single backticks, which reStructuredText writes with two.
"""

import inspect
import re
from typing import Any

import reference

MARKER = re.compile(r"^<!-- from code: (\S+)(?: (.*))? -->$", re.MULTILINE)


def fill_markers(text: str) -> str:
    """Return a page's source with the reference in place of its markers.

    Raises AttributeError for an unknown name.
    """
    return MARKER.sub(lambda match: getattr(reference, match[1].replace("-", "_"))(*filter(None, [match[2]])), text)


def _on_source_read(app: Any, page: str, source: list[str]) -> None:
    source[0] = fill_markers(source[0])


def _on_docstring(app: Any, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [rst_line(line) for line in lines]


def rst_line(line: str) -> str:
    """Convert a docstring's line to reStructuredText.

    Code gets two backticks, and stars that aren't `**bold**` get a backslash.
    """
    line = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)
    parts = re.split(r"(``.+?``|(?<![\w*])\*\*[^*`\s](?:[^*`]*[^*`\s])?\*\*(?![\w*]))", line)
    return "".join(part if number % 2 else part.replace("*", r"\*") for number, part in enumerate(parts))


def _on_signature(
    app: Any, kind: str, name: str, value: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Leave out the rules in the types of options: the options page has them in words."""
    return ("(**options)", None) if signature and "Annotated[" in signature and inspect.isclass(value) else None


def setup(app: Any) -> dict[str, bool]:
    """Connect the extension to Sphinx."""
    app.connect("source-read", _on_source_read)
    app.connect("autodoc-process-docstring", _on_docstring)
    app.connect("autodoc-process-signature", _on_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
