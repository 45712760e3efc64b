"""Converts HTML to sections of plain text, split at headings: a line per block, tables with their columns' names.

lexbor (selectolax) parses it as browsers do (HTML5): omitted and unclosed tags nest as they would on a screen. Readers
of other formats convert them to HTML and use this module too.
"""

import re
from dataclasses import dataclass, field
from html import escape
from itertools import takewhile
from typing import Any
from unicodedata import normalize

from ragblend.app.library.numerals import numeral, parse_number
from ragblend.app.library.tables import CELL_END, rows_as_text

HIDDEN = {"annotation", "annotation-xml", "rp"} | set(
    "button script style template title noscript head iframe object datalist".split()  # noqa: SIM905
)
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
BLOCKS = HEADINGS | set(
    """address article aside blockquote body caption details div dl fieldset figcaption figure footer form
    header hr html legend main menu nav ol p section summary table ul""".split()  # noqa: SIM905
)
SPACED = {"p", "table", "ul", "ol", "dl", "pre", "blockquote", *HEADINGS}  # an empty line before and after
TEXT_BEFORE = {"br": "\n", "tr": "\n", "li": "\n- ", "dt": "\n", "dd": "\n"}
# Number formats (`numerals`) by the types of ordered lists in HTML, and by docutils' classes.
LIST_TYPES = {"a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
LIST_TYPES |= {"loweralpha": "lowerLetter", "upperalpha": "upperLetter"}
LIST_TYPES |= {"lowerroman": "lowerRoman", "upperroman": "upperRoman"}
SUPERSCRIPT = str.maketrans("0123456789+-n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ")
SUBSCRIPT = str.maketrans("0123456789+-", "₀₁₂₃₄₅₆₇₈₉₊₋")
CELLS = {"td", "th"}
MAX_SPANNED = {"rowspan": 1000, "colspan": 99}  # by one cell
MAX_SPANNING_COLUMNS = 1000  # of a table: a cell further right spans only itself
CONTINUES_ABOVE = "^"  # our own value of rowspan: the cell continues the one above it, as in DOCX
CELL_CHARACTERS = 300  # a longer cell is part of a page's layout, and keeps its paragraphs
SUPER_OR_SUB = {"sup": ("^", SUPERSCRIPT), "sub": ("_", SUBSCRIPT)}
# MathML: the signs written between the arguments of an element, and around all of them.
SIGN_BETWEEN = {
    "mfrac": "/",
    "msup": "^",
    "msub": "_",
    "msubsup": "_^",
    "mover": "^",
    "munder": "_",
    "munderover": "_^",
}
SIGNED = {"mroot", *SIGN_BETWEEN} - {"msub"}  # need brackets as a term of another one of these elements
CELL_SEPARATORS = {"mtable": "; ", "mtr": ", "}
BRACKETS = {"msqrt": ("√(", ")"), "mtable": ("[", "]")}
OPERATOR = re.compile(r"[-+*/^=<>,\s\u00b1\u00b7\u00d7\u2192\u2212\u2264\u2265]")
DISPLAY_NONE = re.compile(r"\bdisplay\s*:\s*none\b", re.IGNORECASE)
# Allowed in XML, but not in HTML: text without escapes, and elements that are closed where they open.
CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
SELF_CLOSED = re.compile(r"<(?!(?:area|br|col|hr|img|input|link|meta|source|wbr)\b)([\w:-]+)(\s[^<>]*)?/>")
# Menus as HTML and ARIA mark them, then as DocBook and Publican do, and the links that Sphinx and Wikipedia put beside
# headings.
MENUS = """nav, [role=navigation], [role=search], .navheader, .navfooter, .docnav, a.headerlink, .mw-editsection,
    .mw-jump-link"""
MENU_SHARE = 0.8  # of a page's text: an element with more is no menu, but one that was not closed


@dataclass
class Section:
    """A heading ("" before the first) and the text from it to the next heading, the heading included."""

    heading: str
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        # The spaces of `pre` are markers until here, so that they are kept.
        text = re.sub(r"[ \t\r\f\v]+", " ", "".join(self.pieces))
        lines = "\n".join(_without_last_separators(line.strip()) for line in text.split("\n"))
        named = _TABLE.sub(_rows_of_table, lines).translate(_WITHOUT_MARKERS).replace(_KEPT_SPACE, " ")
        return re.sub(r"\n{3,}", "\n\n", named).strip("\n")


def _without_last_separators(line: str) -> str:
    """A row without the `|` after its last cell; without any `|` if only one cell has text."""
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
    header_rows = sum(1 for _ in takewhile(lambda row: row[0].startswith(_HEADER_ROW), rows))
    text = _EMPTY_AT_END.sub("", rows_as_text(_spread_cells(rows), header_rows=header_rows))
    return "\n".join([*titles, "", text, ""])


def _spread_cells(rows: list[list[str]]) -> list[list[str]]:
    """The rows with a spanning cell's text in each row that it spans. Of the columns that it spans, only the first gets
    the text; in a header row all do.

    A cell right of the widest row's end spans only itself: else spanning cells in each row would fill memory.
    """
    widest = max(sum(1 + cell.count(_COLUMN_SPAN) for cell in row) for row in rows)
    columns = min(widest, MAX_SPANNING_COLUMNS)
    grid: list[dict[int, str]] = [{} for _ in rows]  # texts by column
    for at, row in enumerate(rows):
        is_alone = len(row) == 1 and not grid[at]  # a line across the table
        is_header, column = row[0].startswith(_HEADER_ROW), 0
        for cell in row:
            while column in grid[at]:
                column += 1
            text = cell.translate(_WITHOUT_MARKERS).strip()
            if _CONTINUES_ABOVE in cell and at:
                text = grid[at - 1].get(column, "")
            width = 1 if is_alone else max(1, min(1 + cell.count(_COLUMN_SPAN), columns - column))
            height = 1 if column >= columns else 1 + cell.count(_ROW_SPAN)
            for below in grid[at : at + height]:
                below |= {column + n: text if n == 0 or is_header else "" for n in range(width)}
    return [[cells.get(column, "") for column in range(max(cells) + 1)] for cells in grid]


# Markers in the text until the end of the conversion. They are private-use characters, which are removed from documents
# in any case: a table's begin and end, a header row, each further row and column that a cell spans, and a cell that
# continues the one above it.
_BEGIN, _END, _HEADER_ROW = "\ue001", "\ue002", "\ue003"
_ROW_SPAN, _COLUMN_SPAN, _CONTINUES_ABOVE = "\ue004", "\ue005", "\ue006"
_TABLE = re.compile(f"{_BEGIN}(?P<lines>[^{_BEGIN}{_END}]*){_END}")
_EMPTY_AT_END = re.compile(r"(?<! \|)(?: \|)++$", re.MULTILINE)  # empty cells at the end of a row
_WITHOUT_MARKERS = dict.fromkeys(
    map(ord, (_BEGIN, _END, _HEADER_ROW, _ROW_SPAN, _COLUMN_SPAN, _CONTINUES_ABOVE))
)
_KEPT_SPACE = "\ue000"  # a space of `pre`


def html_sections(markup: str, is_book: bool = False) -> list[tuple[str, str]]:
    """(text, heading) of what a person sees on the page, split at its headings: no scripts, styles and menus.

    is_book: it is XML, and sections without a heading get the page's title.
    """
    if is_book or re.match(r"\s*<\?xml\b", markup):
        markup = CDATA.sub(lambda found: escape(found[1]), markup)
        markup = SELF_CLOSED.sub(r"<\1\2></\1>", markup)
    tree = _without_menus(markup.replace(_KEPT_SPACE, "").translate(_WITHOUT_MARKERS))
    sections = [Section("")]
    if tree.root is not None:
        _walk(tree.root, sections)
    title = tree.css_first("title") if is_book else None
    name = " ".join(title.text().split()) if title is not None else ""
    return [
        (text, _heading_as_shown(section.heading, text) if section.heading else name)
        for section in sections
        if (text := section.text)
    ]


def _heading_as_shown(heading: str, text: str) -> str:
    """The heading as the section's first paragraph shows it: `10⁶`, where the text of its element is `10 6`.

    Unchanged if that paragraph is not the heading, which may be hidden, or have several paragraphs.
    """
    first = " ".join(text.partition("\n\n")[0].split())
    letters_only = ["".join(filter(str.isalnum, normalize("NFKC", each))) for each in (first, heading)]
    return first if letters_only[0] == letters_only[1] else heading


def _parse(markup: str) -> Any:
    from selectolax.lexbor import LexborHTMLParser, SelectolaxError

    try:
        return LexborHTMLParser(markup)
    except SelectolaxError as error:  # lexbor fails only where it gets no memory
        raise MemoryError from error


def _without_menus(markup: str) -> Any:
    """The parsed page without menus; with them if they have most of its text."""
    tree = _parse(markup)
    characters = _count_characters(tree)
    # A menu that several selectors match is found several times.
    menus = {menu.mem_id: menu for menu in tree.css(MENUS)}
    for menu in reversed(menus.values()):  # inner ones first: decomposing an outer one frees them
        menu.decompose()
    return tree if _count_characters(tree) >= (1 - MENU_SHARE) * characters else _parse(markup)


def _count_characters(tree: Any) -> int:
    return len(tree.body.text(separator=" ")) if tree.body is not None else 0


def _walk(root: Any, sections: list[Section]) -> None:
    """Write the page's text into sections.

    Depth first with an explicit stack: a page nested ten thousand deep must not overflow Python's.
    """
    stack: list[tuple[Any, bool]] = [(root, False)]  # nodes; whether all of their text is on one line
    while stack:
        node, in_line = stack.pop()
        if isinstance(node, str):  # text that `_content` wrote
            sections[-1].pieces.append(node)
        elif node.tag == "-text":
            sections[-1].pieces.append(re.sub(r"\s+", " ", node.text_content or ""))
        elif not _is_hidden(node):
            stack += reversed(_content(node, sections, in_line))


def _is_hidden(node: Any) -> bool:
    tag = node.tag
    if tag is None or tag.startswith(("-", "!")) or tag in HIDDEN:
        return True
    attributes = node.attributes
    is_unshown = "hidden" in attributes or DISPLAY_NONE.search(attributes.get("style") or "") is not None
    return is_unshown or (tag == "input" and attributes.get("type") == "hidden")


def _content(node: Any, sections: list[Section], in_line: bool) -> list[tuple[Any, bool]]:
    """An element's children in order, between the texts written before and after it; each with its `in_line`."""
    tag = node.tag
    if tag in HEADINGS and not in_line:
        sections.append(Section(" ".join(node.text(separator=" ").split())))
    if (replaced := _own_text(node, in_line)) is not None:
        return [(replaced, in_line)]
    before, after = _text_around(tag)
    if tag == "ol":
        _number_items(node)
    elif tag == "li" and node.parent is not None and node.parent.tag == "ol":
        before = f"\n{node.attributes['value']} "
    elif tag == "p" and _begins_item(node):
        before, after = "", "\n"
    if tag == "tr" and _is_header_row(node):
        before += _HEADER_ROW
    if in_line and (before or after) and tag not in CELLS:
        before = after = " "
    if tag in CELLS and node.css_first("table") is None and len(node.text()) <= CELL_CHARACTERS:
        in_line = True
        above = _CONTINUES_ABOVE if node.attributes.get("rowspan") == CONTINUES_ABOVE else ""
        below, right = (
            _ROW_SPAN * _further_span(node, "rowspan"),
            _COLUMN_SPAN * _further_span(node, "colspan"),
        )
        after = f"{above}{below}{right}{after}"
    children = [(child, in_line) for child in _children(node) if child.tag != "-comment"]
    if tag in SIGN_BETWEEN or tag in CELL_SEPARATORS or tag == "mroot":
        arguments = [child for child in _children(node) if not child.tag.startswith("-")]
        children = [(part, in_line) for part in _with_operators(tag, arguments)]
        is_outermost = tag in SIGN_BETWEEN and node.parent.tag not in {"mroot", *SIGN_BETWEEN}
        following = node.next if is_outermost else None
        after += " " if following is not None and following.tag not in {"mo", "-text"} else ""
    return [(before, in_line), *children, (after, in_line)]


def _number_items(ordered: Any) -> None:
    """Write each item's label, such as `3.` or `c.`, into its attribute `value`."""
    attributes = ordered.attributes
    kinds = [attributes.get("type") or "", *(attributes.get("class") or "").split()]
    number_format = next((LIST_TYPES[kind] for kind in kinds if kind in LIST_TYPES), "decimal")
    count = parse_number(attributes.get("start") or "", 1)
    for item in _children(ordered):
        if item.tag == "li":
            count = parse_number(item.attributes.get("value") or "", count)
            item.attrs["value"] = f"{numeral(count, number_format)}."
            count += 1


def _begins_item(paragraph: Any) -> bool:
    """Whether a paragraph is the first in a list item, directly after its bullet or number."""
    before = paragraph.prev
    while before is not None and before.tag == "-text" and not before.text_content.strip():
        before = before.prev
    return before is None and paragraph.parent is not None and paragraph.parent.tag == "li"


def _further_span(cell: Any, attribute: str) -> int:
    """How many further rows or columns a cell spans."""
    digits = re.match(r"[1-9]\d{0,8}(?![\d%])", cell.attributes.get(attribute) or "")
    return min(int(digits[0]), MAX_SPANNED[attribute]) - 1 if digits else 0


def _with_operators(tag: str, arguments: list[Any]) -> list[Any]:
    """The arguments of a formula's element, with the signs between them and the brackets that plain text needs."""
    if tag in CELL_SEPARATORS:
        return [part for argument in arguments for part in (CELL_SEPARATORS[tag], argument)][1:]
    parts = [["(", each, ")"] if _needs_brackets(each) else [each] for each in arguments]
    if tag == "mroot" and len(parts) == 2:  # a root is a power
        return ["(", arguments[0], ")^(1/", *parts[1], ")"]
    for sign, part, argument in zip(SIGN_BETWEEN.get(tag, ""), parts[1:], arguments[1:], strict=False):
        part[:0] = sign if argument.text().strip() else ""
    return [each for part in parts for each in part]


def _needs_brackets(argument: Any) -> bool:
    """Whether a term of a formula has an operator, and no brackets around it."""
    term = argument.text().strip()
    has_sign = argument.tag in SIGNED or argument.css_first(", ".join(SIGNED)) is not None
    return (has_sign or OPERATOR.search(term) is not None) and re.fullmatch(r"\([^()]*\)", term) is None


def _is_header_row(row: Any) -> bool:
    """Whether all cells of a row, except perhaps the first, are headers."""
    cells = [child.tag for child in _children(row) if child.tag in CELLS]
    return {*cells[1:]} == {"th"}


def _children(node: Any) -> list[Any]:
    found, child = [], node.child
    while child is not None:
        found.append(child)
        child = child.next
    return found


def _own_text(node: Any, in_line: bool) -> str | None:
    """The text of an element that differs from the text of its children; None for any other element."""
    tag, attributes = node.tag, node.attributes
    if tag in SUPER_OR_SUB:
        return super_or_subscript(tag, re.sub(r"\s+", " ", node.text()))
    if tag == "rt":  # the pronunciation of the word before it (ruby)
        return f"({node.text().strip()})"
    if tag == "pre":
        for line_end in node.css("br"):
            line_end.replace_with("\n")
        if in_line:  # a line end would end the row
            return f" {' '.join(node.text().split())} "
        text = f"\n\n{node.text().strip(chr(10))}\n\n"
        return text.replace(" ", _KEPT_SPACE).replace("\t", _KEPT_SPACE * 4)
    if tag in {"img", "area"}:
        return f" {attributes.get('alt') or ''} "
    if tag == "input":
        shown = attributes.get("type") not in {"password", "file", "image", "checkbox", "radio"}
        return f" {attributes.get('value') or ''} " if shown else ""
    if tag == "select":
        chosen = node.css_first("option[selected]") or node.css_first("option")
        return f" {' '.join(chosen.text().split())} " if chosen is not None else ""
    return None


def inline_markup(markup: str) -> str:
    """Markup without block elements, for a note within a sentence."""
    return " ".join(re.sub(r"<(?!/?(?:su[bp]|m\w+)\b)[^>]+>", " ", markup).split())


def super_or_subscript(tag: str, text: str) -> str:
    """Superscript or subscript (tag: `sup` or `sub`) as plain text: `m²`, `10⁶`; without such characters, `x^(n+1)`."""
    letters = text.strip()
    if not letters:
        return text
    sign, table = SUPER_OR_SUB[tag]
    before, _, after = text.partition(letters)
    if all(ord(letter) in table for letter in letters):
        return before + letters.translate(table) + after
    return (
        f"{before}{sign}({letters}){after}"
        if re.search(r"\W", letters)
        else f"{before}{sign}{letters}{after}"
    )


def _text_around(tag: str) -> tuple[str, str]:
    """The texts that are written before and after an element."""
    if tag in CELLS:
        return "", " | "
    if tag in TEXT_BEFORE:
        return TEXT_BEFORE[tag], ""
    if tag in BRACKETS:
        return BRACKETS[tag]
    if tag == "table":
        return f"\n\n{_BEGIN}\n", f"\n{_END}\n\n"
    if tag in SPACED:
        return "\n\n", "\n\n"
    if tag in {"label", "textarea", "text"}:  # `text` of a picture (SVG)
        return " ", " "
    return ("\n", "\n") if tag in BLOCKS else ("", "")
