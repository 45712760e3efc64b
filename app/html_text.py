"""HTML -> sections of plain text, a block a line, so that no two words are glued and no table is lost.

LlamaIndex's HTMLTagReader reads UTF-8 only and joins table cells without a space; EPUB chapters are XHTML, so
both readers of ours use this one.
"""

import re
import warnings
from dataclasses import dataclass, field

from bs4 import BeautifulSoup, Tag, XMLParsedAsHTMLWarning
from bs4.element import CData, NavigableString, PreformattedString

HIDDEN = {
    "button",
    "script",
    "style",
    "template",
    "noscript",
    "head",
    "svg",
    "math",
    "iframe",
    "object",
    "nav",
}
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
CELLS = {"td", "th"}
# fmt: off
BLOCKS = HEADINGS | {
    "address", "article", "aside", "blockquote", "br", "body", "caption", "dd", "details", "div", "dl", "dt",
    "fieldset", "figcaption", "figure", "footer", "form", "header", "hr", "html", "legend", "li", "main", "ol",
    "option", "p", "pre", "section", "summary", "table", "tbody", "tfoot", "thead", "title", "tr", "ul",
}
# fmt: on


@dataclass
class Section:
    """A heading ("" before the first) and the text from it to the next heading, the heading included."""

    heading: str
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        lines = (re.sub(r"[ \t\r\f\v]+", " ", line).strip(" |") for line in "".join(self.pieces).split("\n"))
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def html_sections(markup: str) -> list[Section]:
    """The text of a page, cut at its headings; scripts, styles and navigation are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", XMLParsedAsHTMLWarning
        )  # EPUB chapters are XHTML: good enough as HTML
        soup = BeautifulSoup(markup, "html.parser")
    sections = [Section("")]
    _walk(soup, sections)
    return [section for section in sections if section.text]


def html_title(markup: str) -> str:
    """The page's <title>, or nothing."""
    found = re.search(r"<title[^>]*>(.*?)</title>", markup, re.IGNORECASE | re.DOTALL)
    return " ".join(found.group(1).split()) if found else ""


def _walk(root: Tag, sections: list[Section]) -> None:
    """Depth first with a stack of our own: a page nested ten thousand deep must not overflow Python's."""
    stack: list[Tag | NavigableString | str] = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, Tag):
            _open(node, sections, stack)
        elif isinstance(node, CData) or not isinstance(
            node, PreformattedString
        ):  # comments, doctypes, instructions
            sections[-1].pieces.append(_inline(node))


def _open(tag: Tag, sections: list[Section], stack: list[Tag | NavigableString | str]) -> None:
    if tag.name in HIDDEN or tag.has_attr("hidden"):
        return
    if tag.name in HEADINGS:
        sections.append(Section(" ".join(tag.get_text(" ").split())))
    before, after = _edges(tag.name)
    children = [child for child in tag.children if isinstance(child, Tag | NavigableString)]
    stack.extend([_Edge(after), *reversed(children), _Edge(before)])


def _edges(name: str) -> tuple[str, str]:
    """What stands before and after a block."""
    if name in CELLS:
        return "", " | "
    if name == "li":
        return "\n- ", ""
    if name in {"p", "table", "ul", "ol", *HEADINGS}:
        return "\n\n", "\n\n"
    return ("\n", "\n") if name in BLOCKS else ("", "")


class _Edge(str):
    """Line ends and separators of ours: kept as they are, unlike the page's own white space."""


def _inline(text: NavigableString | str) -> str:
    return str(text) if isinstance(text, _Edge) else re.sub(r"\s+", " ", str(text))
