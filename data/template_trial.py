"""A program that renders a chat template in a process of its own: see `chat.require_bounded`.

It reads a template, variables and conversations as JSON from its input, and exits with 0 if all are
rendered within the bounds, also if the template raises an error for them. It imports nothing of
outrider, so that it starts within a moment.
"""

import json
import sys
from contextlib import suppress
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TOO_LARGE = 3
"""Exit status for too much text or memory."""


class Generation(jinja2.ext.Extension):
    """The markers of transformers around what the assistant writes, without an effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def main() -> None:
    """Render what the input names."""
    trial: dict[str, Any] = json.load(sys.stdin)
    with suppress(ImportError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (trial["max_bytes"], trial["max_bytes"]))
    # As transformers renders templates (utils/chat_template_utils.py). What differs doesn't repeat work.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None, **options: json.dumps(value, indent=indent, ensure_ascii=False)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": str}
    for messages in trial["conversations"]:
        for adds_prompt in (False, True):
            num_chars = 0
            try:
                template = environment.from_string(trial["template"])
                for piece in template.generate(messages=messages, add_generation_prompt=adds_prompt, **trial["variables"]):
                    num_chars += len(piece)
                    if num_chars > trial["max_chars"]:
                        sys.exit(TOO_LARGE)
            except MemoryError:
                sys.exit(TOO_LARGE)
            except Exception:  # noqa: BLE001 - the caller renders it again, and reports the error
                continue


if __name__ == "__main__":
    main()
