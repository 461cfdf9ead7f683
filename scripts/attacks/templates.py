"""Attacks by a chat template that a stranger wrote: on time, memory, files and the terminal."""

import json
from functools import partial
from pathlib import Path

from .cases import RIGHT, SILENT, Case, Finding, outrider
from .lab import TARGET

KIND = "templates"
START = "{%- for message in messages -%}{{ message.role }}: "
END = "{%- endfor -%}"
GOOD = START + "{% generation %}{{ message.content }}{% endgeneration %}\n" + END
HOSTILE = {
    "a division by zero": GOOD + "{{ 1 // 0 }}",
    "an include": "{% include '/etc/passwd' %}" + GOOD,
    "an import": "{% import 'os' as os %}" + GOOD,
    "a parent template": "{% extends 'other' %}" + GOOD,
    "a loop of 10^12": GOOD + "{% for index in range(1000000000000) %}{% endfor %}",
    "nested loops": GOOD + "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "a macro that calls itself": GOOD + "{% macro call(depth) %}{{ call(depth + 1) }}{% endmacro %}{{ call(0) }}",
    "a macro that calls itself twice": GOOD + "{% macro call(d) %}{% if d %}{{ call(d-1) }}{{ call(d-1) }}{% endif %}"
    "{% endmacro %}{{ call(60) }}",
    "a text of 10^10 characters": GOOD + "{{ 'x' * 10000000000 }}",
    "a text that grows by powers": GOOD + "{% set ns = namespace(t='xxxxxxxxxx') %}{% for i in range(40) %}"
    "{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
    "a huge power": GOOD + "{{ (10 ** (10 ** 9)) % 7 }}",
    "a wide field": GOOD + "{{ '%9999999999d' % 1 }}",
    "a list of 10^10": GOOD + "{{ ([1] * 10000000000) | length }}",
    "the class of a text": GOOD + "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the globals of a function": GOOD + "{{ cycler.__init__.__globals__.os.popen('touch stolen').read() }}",
    "an undefined call": GOOD + "{{ no_such_function() }}",
    "an unfinished block": "{% for message in messages %}{{ message.content",
    "an error with escapes": "{{ raise_exception('\x1b[2J\x1b]0;title\x07 gone') }}",
    "bytes that aren't UTF-8": "\udcff\udcfe" + GOOD,
    "nothing": "",
    "no content of messages": "{% for message in messages %}x{% endfor %}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}" + GOOD,
}
"""Templates that must be errors."""


def make_cases(folder: Path, lab: Path) -> list[Case]:
    """Return a case for each template."""
    return [Case(kind=KIND, name=name, attack=partial(distil_with, template)) for name, template in HOSTILE.items()]


def distil_with(template: str, place: Path) -> Finding:
    """Distil two conversations that a hostile template renders."""
    turns = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "That is 3."}]
    (place / "data.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(2)))
    (place / "template.jinja").write_bytes(template.encode(errors="surrogateescape"))
    outrider(
        "run", "demo", "stages=[distill]", f"target.name_or_path={TARGET}", "num_threads=1", f"output_dir={place / 'run'}",
        "data={source: messages, path: data.jsonl, split: train, overlap_words: null, chat_template: template.jinja}",
        "distill={horizon: 3}", "data.limit=null",
    )  # fmt: skip
    harm = [path.name for path in place.rglob("stolen")]
    return Finding(SILENT, f"wrote {harm}" if harm else "the template is used") if harm or template else Finding(RIGHT)
