"""Markdown pages: texts from outside never become markup."""

import pytest
from markdown_it import MarkdownIt

from outrider.eval.results.markdown import Markdown, code, code_span, escape_markdown

ATTACKS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "x\n\n# A heading\n\n- item",
    "x\n---\nlicense: mit\n---",
    "[click](javascript:alert(1))",
    "![pixel](https://evil.example/p.png)",
    "[a]: https://evil.example",
    "[a][b]",
    "**bold** _it_ ~~no~~",
    "```\n<script>\n```",
    "` <script>` `",
    "| cell | <b> |",
    r"\<script>",
    "&lt;script&gt; &#60;b>",
    "<!-- hidden -->",
    "$x$ <https://evil.example>",
)


def tags(text: str) -> set[str]:
    """Return the kinds of tokens that a page has, besides paragraphs, lists, code and plain text."""
    plain = {"paragraph_open", "paragraph_close", "inline", "text", "text_special", "code_inline"}
    lists = {"bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close"}
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)
    return {token.type for outer in tokens for token in (outer, *(outer.children or ()))} - plain - lists


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("page", ["{}", "- {}", "- Target: {}, as {}", "- {} and [a]"])
def test_a_text_from_outside_becomes_no_markup_wherever_it_stands(attack: str, page: str) -> None:
    assert tags(Markdown(page).format(*[attack] * page.count("{}"))) == set()
    assert tags(page.replace("{}", code_span(attack))) == set()


def test_only_markdown_is_inserted_as_it_is() -> None:
    table = Markdown("| a |")
    assert Markdown("{} {} {n:,}").format(table, "*b*", n=1234) == r"| a | \*b\* 1,234"
    assert isinstance(Markdown("{}").format("x"), Markdown)


def test_a_block_of_code_cannot_be_ended_from_inside() -> None:
    assert code("a\n```\n<script>") == "a <script>"


def test_brackets_that_begin_no_link_stay() -> None:
    assert escape_markdown("1.20x [1.10, 1.30]") == "1.20x [1.10, 1.30]"
    assert escape_markdown("[a](b)") == r"[a\](b)"
