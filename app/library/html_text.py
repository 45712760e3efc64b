"""Converts HTML to sections of plain text, split at headings: a block per line, tables with their columns' names.

Parsed by lexbor (selectolax) as browsers do (HTML5): omitted and unclosed tags nest as they would on a screen. Other
formats are converted to HTML by a library of their own, and come here too.
"""

import re
from dataclasses import dataclass, field
from html import escape
from itertools import takewhile
from typing import Any
from unicodedata import normalize

from ragblend.app.library.tables import CELL_END, rows_as_text
from ragblend.app.library.word_numbering import FORMATS, MOST, number

HIDDEN = {"annotation", "annotation-xml", "rp"} | set(
    "button script style template title noscript head iframe object datalist".split()  # noqa: SIM905
)
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
BLOCKS = HEADINGS | set(
    """address article aside blockquote body caption details div dl fieldset figcaption figure footer form
    header hr html legend main menu nav ol p section summary table ul""".split()  # noqa: SIM905
)
SPACED = {"p", "table", "ul", "ol", "dl", "pre", "blockquote", *HEADINGS}  # an empty line before and after
BEFORE = {"br": "\n", "tr": "\n", "li": "\n- ", "dt": "\n", "dd": "\n"}
# Types of ordered lists in HTML, and docutils' classes.
LETTERS = {"a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
LETTERS |= {"loweralpha": "lowerLetter", "upperalpha": "upperLetter"}
LETTERS |= {"lowerroman": "lowerRoman", "upperroman": "upperRoman"}
SUPERSCRIPT = str.maketrans("0123456789+-n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ")
SUBSCRIPT = str.maketrans("0123456789+-", "₀₁₂₃₄₅₆₇₈₉₊₋")
CELLS = {"td", "th"}
MOST_SPANNED = 1000  # rows or columns
ABOVE = "^"  # as the rowspan of a cell that goes on the one above; HTML has none such
CELL_CHARACTERS = 300  # a longer cell is part of a page's layout, and keeps its paragraphs
MARKS = {"sup": ("^", SUPERSCRIPT), "sub": ("_", SUBSCRIPT)}
# MathML: the signs written between the arguments of an element, and around all of them.
BETWEEN = {
    "mfrac": "/",
    "msup": "^",
    "msub": "_",
    "msubsup": "_^",
    "mover": "^",
    "munder": "_",
    "munderover": "_^",
}
ROWS = {"mtable": "; ", "mtr": ", "}
AROUND = {"msqrt": ("√(", ")"), "mtable": ("[", "]")}
OPERATOR = re.compile(r"[-+*/^=<>,\s\u00b1\u00b7\u00d7\u2192\u2212\u2264\u2265]")
UNSHOWN = re.compile(r"\bdisplay\s*:\s*none\b", re.IGNORECASE)
# What XML has and HTML has not: text without escapes, and elements that are closed where they open.
CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
SELF_CLOSED = re.compile(r"<(?!(?:area|br|col|hr|img|input|link|meta|source|wbr)\b)([\w:-]+)(\s[^<>]*)?/>")
# As HTML and ARIA mark menus, as DocBook and Publican do, and what Sphinx and Wikipedia put beside a heading.
MENUS = """nav, [role=navigation], [role=search], .navheader, .navfooter, .docnav, a.headerlink, .mw-editsection,
    .mw-jump-link"""
MENU_SHARE = 0.8  # of a page's text; what has more is no menu, but was not closed


@dataclass
class Section:
    """A heading ("" before the first) and the text from it to the next heading, the heading included."""

    heading: str
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        # Lines of `pre` keep their blanks, which are marked until here.
        text = re.sub(r"[ \t\r\f\v]+", " ", "".join(self.pieces))
        lines = "\n".join(_without_outer_ends(line.strip()) for line in text.split("\n"))
        named = _TABLE.sub(_rows_of_table, lines).translate(_UNMARKED).replace(_BLANK, " ")
        return re.sub(r"\n{3,}", "\n\n", named).strip("\n")


def _without_outer_ends(line: str) -> str:
    """Without the end of the last cell, and where all other cells are empty, without theirs."""
    if line != "|" and not line.endswith(" |"):
        return line.removeprefix("| ") if line.count("|") == 1 else line
    row = line[:-1].rstrip()
    return row if "|" in row.strip(" |") else row.strip(" |")


def _rows_of_table(found: re.Match[str]) -> str:
    """The text of a table that contains no other table. Lines of one cell above its first row are titles."""
    lines = [line for line in found["lines"].split("\n") if line]
    titles = list(takewhile(lambda line: not CELL_END.search(line), lines))
    rows = [CELL_END.split(line) for line in lines[len(titles) :]]
    if not rows:
        return found["lines"]
    heads = sum(1 for _ in takewhile(lambda row: row[0].startswith(_NAMES), rows))
    text = _LAST_EMPTY.sub("", rows_as_text(_spread(rows), heads=heads))
    return "\n".join([*titles, "", text, ""])


def _spread(rows: list[list[str]]) -> list[list[str]]:
    """The rows with each cell's text in all rows that it spans. Of the columns that it spans the first has it, and in a
    row of names all.
    """
    grid: list[dict[int, str]] = [{} for _ in rows]  # texts by column
    for at, row in enumerate(rows):
        is_alone = len(row) == 1 and not grid[at]  # a line across the table
        is_of_names, column = row[0].startswith(_NAMES), 0
        for cell in row:
            while column in grid[at]:
                column += 1
            text = cell.translate(_UNMARKED).strip()
            if _ABOVE in cell and at:
                text = grid[at - 1].get(column, "")
            width = 1 if is_alone else 1 + cell.count(_RIGHT)
            for below in grid[at : at + 1 + cell.count(_DOWN)]:
                below |= {column + n: text if n == 0 or is_of_names else "" for n in range(width)}
    return [[cells.get(column, "") for column in range(max(cells) + 1)] for cells in grid]


# Private-use characters, which are removed from documents in any case: a table's begin and end, a row of names, each
# further row and column that a cell spans, and a cell that goes on the one above.
_BEGIN, _END, _NAMES, _DOWN, _RIGHT, _ABOVE = "\ue001", "\ue002", "\ue003", "\ue004", "\ue005", "\ue006"
_TABLE = re.compile(f"{_BEGIN}(?P<lines>[^{_BEGIN}{_END}]*){_END}")
_LAST_EMPTY = re.compile(r"(?<! \|)(?: \|)++$", re.MULTILINE)  # cells at the end of a row
_UNMARKED = dict.fromkeys(map(ord, (_BEGIN, _END, _NAMES, _DOWN, _RIGHT, _ABOVE)))
_BLANK = "\ue000"  # a blank that counts


def html_sections(markup: str, is_book: bool = False) -> list[tuple[str, str]]:
    """(text, heading) of what a person sees on the page, split at its headings: no scripts, styles and menus.

    is_book: it is XML, and sections without a heading get the page's title.
    """
    if is_book or re.match(r"\s*<\?xml\b", markup):
        markup = CDATA.sub(lambda found: escape(found[1]), markup)
        markup = SELF_CLOSED.sub(r"<\1\2></\1>", markup)
    tree = _without_menus(markup.replace(_BLANK, "").translate(_UNMARKED))
    sections = [Section("")]
    if tree.root is not None:
        _walk(tree.root, sections)
    title = tree.css_first("title") if is_book else None
    name = " ".join(title.text().split()) if title is not None else ""
    return [
        (text, _shown_heading(section.heading, text) if section.heading else name)
        for section in sections
        if (text := section.text)
    ]


def _shown_heading(heading: str, text: str) -> str:
    """The heading as the section's first paragraph has it: `10⁶` where the text of its element is `10 6`."""
    first = " ".join(text.partition("\n\n")[0].split())
    of_both = ["".join(filter(str.isalnum, normalize("NFKC", each))) for each in (first, heading)]
    return first if of_both[0] == of_both[1] else heading  # which may not be shown, or have paragraphs


def _parsed(markup: str) -> Any:
    from selectolax.lexbor import LexborHTMLParser, SelectolaxError

    try:
        return LexborHTMLParser(markup)
    except SelectolaxError as error:  # lexbor fails only where it gets no memory
        raise MemoryError from error


def _without_menus(markup: str) -> Any:
    """The page without menus; with them where most of the text stands in them."""
    tree = _parsed(markup)
    whole = _characters(tree)
    # One that several selectors match is found several times.
    menus = {menu.mem_id: menu for menu in tree.css(MENUS)}
    for menu in reversed(menus.values()):  # inner ones first: an outer one frees them
        menu.decompose()
    return tree if _characters(tree) >= (1 - MENU_SHARE) * whole else _parsed(markup)


def _characters(tree: Any) -> int:
    return len(tree.body.text(separator=" ")) if tree.body is not None else 0


def _walk(root: Any, sections: list[Section]) -> None:
    """Walk depth first with an explicit stack: a page nested ten thousand deep must not overflow Python's."""
    stack: list[tuple[Any, bool]] = [(root, False)]  # with whether all of it stands in one line
    while stack:
        node, in_line = stack.pop()
        if isinstance(node, str):  # ours, kept as it is
            sections[-1].pieces.append(node)
        elif node.tag == "-text":
            sections[-1].pieces.append(re.sub(r"\s+", " ", node.text_content or ""))
        elif not _is_hidden(node):
            stack += reversed(_opened(node, sections, in_line))


def _is_hidden(node: Any) -> bool:
    tag = node.tag
    if tag is None or tag.startswith(("-", "!")) or tag in HIDDEN:
        return True
    attributes = node.attributes
    is_unshown = "hidden" in attributes or UNSHOWN.search(attributes.get("style") or "") is not None
    return is_unshown or (tag == "input" and attributes.get("type") == "hidden")


def _opened(node: Any, sections: list[Section], in_line: bool) -> list[tuple[Any, bool]]:
    """What an element consists of, in order, with the line ends around it."""
    tag = node.tag
    if tag in HEADINGS and not in_line:
        sections.append(Section(" ".join(node.text(separator=" ").split())))
    if (replaced := _replaced(node, in_line)) is not None:
        return [(replaced, in_line)]
    before, after = _edges(tag)
    if tag == "ol":
        _number_items(node)
    elif tag == "li" and node.parent is not None and node.parent.tag == "ol":
        before = f"\n{node.attributes['value']} "
    elif tag == "p" and _begins_item(node):
        before, after = "", "\n"
    if tag == "tr" and _has_names(node):
        before += _NAMES
    if in_line and (before or after) and tag not in CELLS:
        before = after = " "
    if tag in CELLS and node.css_first("table") is None and len(node.text()) <= CELL_CHARACTERS:
        in_line = True
        above = _ABOVE if node.attributes.get("rowspan") == ABOVE else ""
        after = f"{above}{_DOWN * _more(node, 'rowspan')}{_RIGHT * _more(node, 'colspan')}{after}"
    children = [(child, in_line) for child in _children(node) if child.tag != "-comment"]
    if tag in BETWEEN or tag in ROWS or tag == "mroot":
        arguments = [child for child in _children(node) if not child.tag.startswith("-")]
        children = [(part, in_line) for part in _with_operators(tag, arguments)]
        following = node.next if tag in BETWEEN and node.parent.tag not in {"mroot", *BETWEEN} else None
        after += " " if following is not None and following.tag not in {"mo", "-text"} else ""
    return [(before, in_line), *children, (after, in_line)]


def _number_items(ordered: Any) -> None:
    """Write each item's number or letter as its value."""
    attributes = ordered.attributes
    kinds = [attributes.get("type") or "", *(attributes.get("class") or "").split()]
    make = next((FORMATS[LETTERS[kind]] for kind in kinds if kind in LETTERS), str)
    count = number(attributes.get("start") or "", 1)
    for item in _children(ordered):
        if item.tag == "li":
            count = number(item.attributes.get("value") or "", count)
            item.attrs["value"] = f"{make(count) if count < MOST else count}."
            count += 1


def _begins_item(paragraph: Any) -> bool:
    """Whether it stands directly behind the bullet or number of a list's item."""
    before = paragraph.prev
    while before is not None and before.tag == "-text" and not before.text_content.strip():
        before = before.prev
    return before is None and paragraph.parent is not None and paragraph.parent.tag == "li"


def _more(cell: Any, attribute: str) -> int:
    """How many further rows or columns a cell spans."""
    digits = re.match(r"\d{1,4}", cell.attributes.get(attribute) or "")
    return min(int(digits[0]), MOST_SPANNED) - 1 if digits else 0


def _with_operators(tag: str, arguments: list[Any]) -> list[Any]:
    """The arguments of a formula's element, with what stands between them and with the brackets that one line needs."""
    if tag in ROWS:
        return [part for argument in arguments for part in (ROWS[tag], argument)][1:]
    parts = [["(", each, ")"] if _needs_brackets(each) else [each] for each in arguments]
    if tag == "mroot" and len(parts) == 2:  # a root is a power
        return ["(", arguments[0], ")^(1/", *parts[1], ")"]
    for sign, part, argument in zip(BETWEEN.get(tag, ""), parts[1:], arguments[1:], strict=False):
        part[:0] = sign if argument.text().strip() else ""
    return [each for part in parts for each in part]


def _needs_brackets(argument: Any) -> bool:
    """Whether a term of a formula has an operator outside of a pair of brackets around it."""
    term = argument.text().strip()
    has_sign = argument.tag in {"mfrac", "msup"} or argument.css_first("mfrac, msup") is not None
    return (has_sign or OPERATOR.search(term) is not None) and re.fullmatch(r"\([^()]*\)", term) is None


def _has_names(row: Any) -> bool:
    """Whether its cells, but perhaps the first, are headers."""
    cells = [child.tag for child in _children(row) if child.tag in CELLS]
    return {*cells[1:]} == {"th"}


def _children(node: Any) -> list[Any]:
    found, child = [], node.child
    while child is not None:
        found.append(child)
        child = child.next
    return found


def _replaced(node: Any, in_line: bool) -> str | None:
    """The text of an element that is not the text of its parts; None for any other element."""
    tag, attributes = node.tag, node.attributes
    if tag in MARKS:
        return marked(tag, re.sub(r"\s+", " ", node.text()))
    if tag == "rt":  # the reading of the word before it
        return f"({node.text().strip()})"
    if tag == "pre":
        for line_end in node.css("br"):
            line_end.replace_with("\n")
        if in_line:  # a line end would end the row
            return f" {' '.join(node.text().split())} "
        return f"\n\n{node.text().strip(chr(10))}\n\n".replace(" ", _BLANK).replace("\t", _BLANK * 4)
    if tag in {"img", "area"}:
        return f" {attributes.get('alt') or ''} "
    if tag == "input":
        shown = attributes.get("type") not in {"password", "file", "image", "checkbox", "radio"}
        return f" {attributes.get('value') or ''} " if shown else ""
    if tag == "select":
        chosen = node.css_first("option[selected]") or node.css_first("option")
        return f" {' '.join(chosen.text().split())} " if chosen is not None else ""
    return None


def in_line(markup: str) -> str:
    """Markup without its blocks, as a note stands in a sentence."""
    return " ".join(re.sub(r"<(?!/?(?:su[bp]|m\w+)\b)[^>]+>", " ", markup).split())


def marked(tag: str, text: str) -> str:
    """`m²` or `10⁶`; where there are no such characters, `x^(n+1)` and `x_max`. tag: `sup` or `sub`."""
    letters = text.strip()
    if not letters:
        return text
    sign, table = MARKS[tag]
    before, _, after = text.partition(letters)
    if all(ord(letter) in table for letter in letters):
        return before + letters.translate(table) + after
    return (
        f"{before}{sign}({letters}){after}"
        if re.search(r"\W", letters)
        else f"{before}{sign}{letters}{after}"
    )


def _edges(tag: str) -> tuple[str, str]:
    if tag in CELLS:
        return "", " | "
    if tag in BEFORE:
        return BEFORE[tag], ""
    if tag in AROUND:
        return AROUND[tag]
    if tag == "table":
        return f"\n\n{_BEGIN}\n", f"\n{_END}\n\n"
    if tag in SPACED:
        return "\n\n", "\n\n"
    if tag in {"label", "textarea", "text"}:  # `text` of a picture (SVG)
        return " ", " "
    return ("\n", "\n") if tag in BLOCKS else ("", "")
