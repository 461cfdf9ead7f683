"""The text of a chat template, with values of the options that it reads. Imports no torch."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .paths import TEMPLATES, built_in_templates

DATE = "strftime_now"
"""transformers' function for today's date, which templates call with a format. As an option it is the
text that every call gives."""
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
"""Variables of every template, which are no options."""
FUNCTIONS = frozenset({"raise_exception", "range", "namespace", "dict", "lipsum", "cycler", "joiner"})
"""Functions that transformers and jinja give to every template."""


def read_template(name: str) -> str:
    """Return the text of a .jinja file or of a built-in template. Raises ValueError if there is none."""
    path = TEMPLATES / f"{name}.jinja" if name in built_in_templates() else Path(name)
    if not path.is_file():
        hint = "; to turn thinking off, set data.template_options={enable_thinking: false}" if "think" in name else ""
        known = ", ".join(built_in_templates())
        raise ValueError(f"data.chat_template is {name!r}; give the path of a .jinja file, or one of {known}{hint}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.chat_template is {name!r}, which is not UTF-8 text ({error}); convert it") from error


def template_options(template: str) -> set[str]:
    """Return the names of the variables that a template reads besides those of every template.

    Raises ValueError for a text that is no template.
    """
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    # jinja has no such block by itself, and its content matters here.
    text = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    try:
        names = meta.find_undeclared_variables(environment.parse(text))
    except (TemplateError, RecursionError) as error:
        raise ValueError(f"the chat template, which begins {template[:60]!r}, can't be read ({error}); correct it") from error
    return names - GIVEN - FUNCTIONS


def with_options(templates: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, str]:
    """Return a tokenizer's templates, in each of which the variables that it reads have these values.

    Raises ValueError for an option that none of them reads, or whose value has no text in jinja.
    """
    known = {name: template_options(template) for name, template in templates.items()}
    every = set[str]().union(*known.values())
    if unknown := [option for option in options if option not in every]:
        raise ValueError(
            f"data.template_options has {', '.join(map(repr, unknown))}, which the chat template doesn't read; it reads "
            f"{', '.join(sorted(every)) or 'no option'}"
        )
    return {
        name: "".join(_setting(option, value) for option, value in options.items() if option in known[name]) + template
        for name, template in templates.items()
    }


def _setting(name: str, value: Any) -> str:
    """Return the text that gives a template's variable its value. jinja drops the line break behind a block."""
    try:
        literal = json.dumps(str(value) if name == DATE else value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"data.template_options.{name} is {value!r}, which has no text in a template ({error})") from error
    if name == DATE:
        return f"{{%- macro {DATE}(format='') -%}}{{{{ {literal} }}}}{{%- endmacro %}}\n"
    literal = re.sub(r'("(?:[^"\\]|\\.)*")|\bnull\b', lambda match: match[1] or "none", literal)
    return f"{{%- set {name} = {literal} %}}\n"
