"""`outrider options` and `outrider recipes`: describe the configuration, in 80 columns."""

import difflib
import json
from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .describe import Choice, Option, Section

WIDTH = 80


def options_command(
    section: Annotated[
        str | None,
        typer.Argument(help="A section (train), a kind of drafter (eagle3) or an option (train.steps). Default: an overview."),
    ] = None,
) -> None:
    """List the options of recipes, with type, default and meaning of each."""
    typer.echo("\n".join(_overview() if section is None else _one_section(section)))


def recipes_command(
    name: Annotated[
        str | None, typer.Argument(help="A recipe, to describe it, or a word, to list the recipes with it. Default: all.")
    ] = None,
) -> None:
    """List the recipes that ship with outrider. To run one: outrider run NAME."""
    from .describe import recipes  # imports the whole schema

    known = recipes()
    matching = [
        recipe for recipe in known.values() if (name or "").lower() in f"{recipe.name} {recipe.target} {recipe.summary}".lower()
    ]
    if name is None or (name not in known and matching):
        lines = [f"{'RECIPE':20} {'TARGET':10} {'DATA':9} DRAFTER"]
        for recipe in matching:
            lines.append(f"{recipe.name:20} {recipe.target:10} {recipe.data:9} {recipe.drafter}")
            lines.append(_wrapped(recipe.summary, 4))
        lines += [
            "",
            "outrider run conf=RECIPE        run a recipe",
            "outrider recipes RECIPE         print its description",
        ]
    elif name in known:
        recipe = known[name]
        choices = f"target={recipe.target} data={recipe.data} drafter={recipe.drafter} eval={recipe.eval}"
        lines = [f"conf={name}: {choices}", "", recipe.comment, "", f"File: {recipe.path}"]
    else:
        raise ValueError(f"there is no recipe {name!r}{_suggestion(name, list(known))}; there are: {', '.join(known)}")
    typer.echo("\n".join(lines))


def _overview() -> Iterator[str]:
    """Yield the run's own options, then the names of sections and the choices of groups."""
    from .describe import GROUPS, choices, drafter_sections, sections

    yield from _section_lines(sections()[""])
    yield "SECTIONS (outrider options SECTION lists one)\n"
    for name, section in sections().items():
        if name:
            yield _wrapped(f"{name}: {section.meaning}", 2)
    yield _wrapped(f"drafter: Options of each kind of drafter: {', '.join(drafter_sections())}", 2)
    yield "\nGROUPS (GROUP=NAME chooses a file of settings)\n"
    for group in GROUPS:
        yield _wrapped(f"{group}={'|'.join(choices(group))}".replace("|", " | "), 2)


def _one_section(name: str) -> Iterator[str]:
    """Yield the lines of a section, of a kind of drafter, or of the options below a name.

    Raises ValueError for another name.
    """
    # 1. A section or a kind of drafter.
    from .describe import choices, drafter_sections, sections
    from .keys import closest

    kinds = drafter_sections()
    if name == "drafter":
        for section in kinds.values():
            yield from _section_lines(section)
    elif (kind := name.removeprefix("drafter.")) in kinds:
        yield from _section_lines(kinds[kind])
    elif name and name in sections():
        yield from _section_lines(sections()[name])
    else:
        # 2. Options whose name is `name` or starts with it.
        everything = [(f"({section.name})", option) for section in kinds.values() for option in section.options]
        everything += [("", option) for section in sections().values() for option in section.options]
        matching = [(where, option) for where, option in everything if f"{option.name}.".startswith(f"{name}.")]
        matching += [(where, option) for where, option in everything if option.name.startswith(f"{name}[")]
        if not matching:
            names = [*filter(None, sections()), "drafter", *kinds, *(option.name for _, option in everything)]
            there_are = ", ".join([*filter(None, sections()), "drafter", *kinds])
            suggestion = _suggestion(name, names, closest(name, names))
            raise ValueError(f"there is no section or option {name!r}{suggestion}; the sections are: {there_are}")
        for where, option in matching:
            yield from _option_lines(option, where)

    # 3. The choices of the group with this name.
    if name in ("target", "data", "drafter", "eval"):
        yield f"CHOICES ({name}=NAME chooses a file of settings)\n"
        for choice in choices(name).values():
            yield _choice_line(choice)


def _section_lines(section: "Section") -> Iterator[str]:
    yield _wrapped(f"{(section.name or 'run').upper()}: {section.meaning}", 0) + "\n"
    for option in section.options:
        yield from _option_lines(option)


def _option_lines(option: "Option", where: str = "") -> Iterator[str]:
    yield f"  {option.name} {where}".rstrip()
    facts = option.type + (f": {' | '.join(option.choices)}" if option.choices else "")
    facts += "; required" if option.required else f"; default {shown(option.default)}"
    yield _wrapped(facts + ("; may be set in eval.settings" if option.at_run_time else ""), 6)
    yield _wrapped(option.meaning, 6) + "\n"


def shown(value: object) -> str:
    """Return a default as in a recipe: null, true, 0.001, [a, b]."""
    return value if isinstance(value, str) else json.dumps(value)


def _choice_line(choice: "Choice") -> str:
    return _wrapped(f"{choice.group}={choice.name}{': ' if choice.meaning else ''}{choice.summary}", 2)


def _wrapped(text: str, indent: int) -> str:
    return fill(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2 * (indent < 4)),
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip


def _suggestion(name: str, known: list[str], meant: str | None = None) -> str:
    close = [meant] if meant else difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""
