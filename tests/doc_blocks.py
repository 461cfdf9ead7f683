"""The fenced blocks of the documentation, and the shell commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    is_run: bool
    """Whether the info string has the word `run`: the block runs in a test."""
    text: str

    @property
    def name(self) -> str:
        """Return where the block is."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return the pages that people read: README, CONTRIBUTING and docs/."""
    return [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks(text: str, page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    for match in FENCE.finditer(text):
        language, *words = match["info"].split() or [""]
        content = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        line = text[: match.start()].count("\n") + 1
        yield Block(page=page, line=line, language=language, is_run="run" in words, text=content)


def all_blocks() -> list[Block]:
    """Return the blocks of all pages."""
    return [
        block for path in pages() for block in blocks(path.read_text(encoding="utf-8"), path.relative_to(REPOSITORY).as_posix())
    ]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block.

    Comments, redirections and assignments before a command are left out.
    """
    lexer = shlex.shlex(_without_comments(text.replace("\\\n", " ")), posix=True, punctuation_chars="\n;&|<>()")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
    words: list[str] = []
    skips_next = False
    for token in [*lexer, "\n"]:
        if skips_next:
            skips_next = False
        elif set(token) <= set("\n;&|()"):
            if command := _without_assignments(words):
                yield command
            words = []
        elif set(token) <= set("<>"):
            skips_next = True
        else:
            words.append(token)


def _without_comments(text: str) -> str:
    """Drop `# ...` at the beginning of a word outside quotes."""
    kept, quote, in_comment = "", "", False
    for before, character in zip(" " + text, text, strict=False):
        if in_comment:
            in_comment = character != "\n"
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and before.isspace():
            in_comment = True
        kept += "" if in_comment else character
    return kept


def _without_assignments(words: list[str]) -> list[str]:
    """Drop `NAME=VALUE` before a command."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words
