"""`outrider options` and `outrider recipes`: describe the configuration, in 80 columns."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS, closest
from .describe import GROUPS, Option, Section, choices, chosen_by, drafter_sections, sections
from .help import facts, wrapped


@dataclass(kw_only=True, config=OPTIONS)
class OptionsOptions:
    """Options of `outrider options`."""

    section: str | None = None
    """A section (train), a kind of drafter (eagle3) or an option (train.steps). null: an overview."""

    POSITIONAL: ClassVar = ("section",)


def options_command(options: OptionsOptions) -> None:
    """List the options of recipes and commands, with type, default and meaning of each."""
    print("\n".join(_overview() if options.section is None else _one_section(options.section)))


@dataclass(kw_only=True, config=OPTIONS)
class RecipesOptions:
    """Options of `outrider recipes`."""

    name: str | None = None
    """A recipe, to describe it, or a word, to list the recipes with it. null: all."""

    POSITIONAL: ClassVar = ("name",)


def recipes_command(options: RecipesOptions) -> None:
    """List the recipes that ship with outrider. To run one: outrider run NAME."""
    known, name = choices("conf"), options.name
    chosen = {recipe: chosen_by(recipe) for recipe in known}
    matching = [
        recipe for recipe in known.values()
        if (name or "").lower() in f"{recipe.name} {chosen[recipe.name]['target']} {recipe.summary}".lower()
    ]  # fmt: skip
    if name is None or (name not in known and matching):
        lines = [f"{'RECIPE':20} {'TARGET':10} {'DATA':9} DRAFTER"]
        for recipe in matching:
            lines.append("{:20} {target:10} {data:9} {drafter}".format(recipe.name, **chosen[recipe.name]))
            lines.append(wrapped(recipe.summary, 4))
        lines += [
            "",
            "outrider run conf=RECIPE        run a recipe",
            "outrider recipes RECIPE         print its description",
        ]
    elif name in known:
        choice = " ".join(f"{group}={value}" for group, value in chosen[name].items())
        lines = [f"conf={name}: {choice}", "", known[name].meaning, "", f"File: {known[name].path}"]
    else:
        raise ValueError(f"there is no recipe {name!r}{_suggestion(name, list(known))}; there are: {', '.join(known)}")
    print("\n".join(lines))


def _overview() -> Iterator[str]:
    """Yield the run's own options, then the names of sections and the choices of groups."""
    yield from _section_lines(sections()[""])
    yield "SECTIONS (outrider options SECTION lists one)\n"
    for name, section in sections().items():
        if name:
            yield wrapped(f"{name}: {section.meaning}", 2)
    yield wrapped(f"drafter: Options of each kind of drafter: {', '.join(drafter_sections())}", 2)
    yield "\nGROUPS (GROUP=NAME chooses a file of settings)\n"
    for group in GROUPS:
        yield wrapped(f"{group}={'|'.join(choices(group))}".replace("|", " | "), 2)


def _one_section(name: str) -> Iterator[str]:
    """Yield the lines of a section, of a kind of drafter, or of the options below a name.

    Raises ValueError for another name.
    """
    # 1. A section or a kind of drafter.

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
            raise ValueError(f"there is no section or option {name!r}{_suggestion(name, names)}; the sections are: {there_are}")
        for where, option in matching:
            yield from _option_lines(option, where)

    # 3. The choices of the group with this name.
    if name in ("target", "data", "drafter", "eval"):
        yield f"CHOICES ({name}=NAME chooses a file of settings)\n"
        for choice in choices(name).values():
            yield wrapped(f"{name}={choice.name}{': ' if choice.meaning else ''}{choice.summary}", 2)


def _section_lines(section: Section) -> Iterator[str]:
    yield wrapped(f"{(section.name or 'run').upper()}: {section.meaning}", 0) + "\n"
    for option in section.options:
        yield from _option_lines(option)


def _option_lines(option: Option, where: str = "") -> Iterator[str]:
    yield f"  {option.name} {where}".rstrip()
    yield wrapped(facts(option) + ("; may be set in eval.settings" if option.at_run_time else ""), 6)
    yield wrapped(option.meaning, 6) + "\n"


def _suggestion(name: str, known: list[str]) -> str:
    close = closest(name, known)
    return f" (did you mean {close}?)" if close else ""
