"""Converts HTML to sections of plain text, split at headings: a line per block, tables with their columns' names.

lexbor (selectolax) parses it as browsers do (HTML5): omitted and unclosed tags nest as they would on a screen. Readers
of other formats convert them to HTML and use this module too.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain, groupby, takewhile
from typing import Any

from ragblend.app.library.numerals import numeral, parse_number
from ragblend.app.library.tables import MAX_SPANNING_COLUMNS, TableCell, rows_as_text, spread_cells

HIDDEN = {"annotation", "annotation-xml", "rp"} | set(
    "button script style template title noscript head iframe object datalist".split()  # noqa: SIM905
)
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
# The texts that are written before and after an element. `text` is one of a picture (SVG).
AROUND = dict.fromkeys(
    """address article aside body caption details div fieldset figcaption figure footer form header hr html legend main
    menu nav section summary""".split(),  # noqa: SIM905
    ("\n", "\n"),
)
AROUND |= dict.fromkeys(("p", "table", "ul", "ol", "dl", "blockquote", *HEADINGS), ("\n\n", "\n\n"))
AROUND |= {"br": ("\n", ""), "li": ("\n- ", ""), "dt": ("\n", ""), "dd": ("\n", "")}
AROUND |= dict.fromkeys(("label", "textarea", "text"), (" ", " "))
SUPERSCRIPT = str.maketrans("0123456789+-n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ")
SUBSCRIPT = str.maketrans("0123456789+-", "₀₁₂₃₄₅₆₇₈₉₊₋")
SUPER_OR_SUB = {"sup": ("^", SUPERSCRIPT), "sub": ("_", SUBSCRIPT)}
CELLS = ("td", "th")
MAX_SPANNED = {"rowspan": 1000, "colspan": 99}  # by one cell
CONTINUES_ABOVE = "^"  # our own value of rowspan: the cell continues the one above it, as in DOCX
CELL_CHARACTERS = 300  # a longer cell is part of a page's layout, and keeps its paragraphs
# MathML: the signs written between the arguments of an element.
SIGN_BETWEEN = {"mfrac": "/", "msup": "^", "msub": "_", "msubsup": "_^"}
SIGN_BETWEEN |= {"mover": "^", "munder": "_", "munderover": "_^", "mroot": ""}
SIGNED = set(SIGN_BETWEEN) - {"msub"}  # need brackets as a term of another one of these elements
CELL_SEPARATORS = {"mtable": "; ", "mtr": ", "}
FORMULAS = {"msqrt", *SIGN_BETWEEN, *CELL_SEPARATORS}
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
KEPT_SPACE = "\ufdd0"  # a space of `pre`, until the end of the conversion: Unicode has no such character


@dataclass
class Section:
    """A heading ("" before the first) and the text from it to the next heading, the heading included."""

    heading: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        text = re.sub(r"[ \t\r\f\v]+", " ", "".join(self.pieces))
        lines = "\n".join(line.strip() for line in text.split("\n")).replace(KEPT_SPACE, " ")
        return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


def html_sections(markup: str, is_book: bool = False) -> list[tuple[str, str]]:
    """(text, heading) of what a person sees on the page, split at its headings: no scripts, styles and menus.

    is_book: it is XML, and sections without a heading get the page's title.
    """
    if is_book or re.match(r"\s*<\?xml\b", markup):
        markup = CDATA.sub(lambda found: escape(found[1]), markup)
        markup = SELF_CLOSED.sub(r"<\1\2></\1>", markup)
    tree = _without_menus(markup)
    sections = _sections_of(tree.root) if tree.root is not None else []
    title = tree.css_first("title") if is_book else None
    name = " ".join(title.text().split()) if title is not None else ""
    return [(text, section.heading or name) for section in sections if (text := section.text)]


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


def _sections_of(root: Any, in_line: bool = False) -> list[Section]:
    """The text of an element, as it is shown or all on one line.

    Depth first with an explicit stack: a page nested ten thousand deep must not overflow Python's.
    """
    sections, stack = [Section()], list[tuple[Any, bool]]([(root, in_line)])
    while stack:
        node, in_line = stack.pop()
        if isinstance(node, str):  # text that `_content` wrote
            sections[-1].pieces.append(node)
        elif isinstance(node, Section):  # its heading ends
            node.heading = _on_one_line(node.pieces) or node.heading
        elif node.tag == "-text":
            sections[-1].pieces.append(re.sub(r"\s+", " ", node.text_content or ""))
        elif not _is_hidden(node):
            if node.tag in HEADINGS and not in_line:
                sections.append(Section(" ".join(node.text(separator=" ").split())))
                stack.append((sections[-1], False))
            stack += reversed(_content(node, in_line))
    return sections


def _on_one_line(pieces: Iterable[str]) -> str:
    return " ".join("".join(pieces).replace(KEPT_SPACE, " ").split())


def _cell_text(cell: Any) -> str:
    return _on_one_line(_sections_of(cell, in_line=True)[0].pieces)


def _is_hidden(node: Any) -> bool:
    tag = node.tag
    if tag is None or tag.startswith(("-", "!")) or tag in HIDDEN:
        return True
    attributes = node.attributes
    is_unshown = "hidden" in attributes or DISPLAY_NONE.search(attributes.get("style") or "") is not None
    return is_unshown or (tag == "input" and attributes.get("type") == "hidden")


def _content(node: Any, in_line: bool) -> list[tuple[Any, bool]]:
    """What an element is written as: texts and nodes, each with its `in_line`."""
    tag = node.tag
    if (replaced := _own_text(node, in_line)) is not None:
        return [(replaced, in_line)]
    if tag in FORMULAS:
        return [(part, in_line) for part in _formula(node)]
    if tag == "tr":  # of a page's layout
        return [(part, in_line) for part in _layout_row(node)]
    before, after = AROUND.get(tag, ("", ""))
    if tag == "ol":
        _number_items(node)
    elif tag == "li" and node.parent is not None and node.parent.tag == "ol":
        before = f"\n{node.attributes['value']} "
    elif tag == "p" and _begins_item(node):
        before, after = "", "\n"
    if in_line and (before or after):
        before = after = " "
    return [(part, in_line) for part in (before, *node.iter(include_text=True), after)]


def _own_text(node: Any, in_line: bool) -> str | None:
    """The text of an element that differs from the text of its children; None for any other element."""
    tag, attributes = node.tag, node.attributes
    if tag == "table":
        return _table_text(node)
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
        return text.replace(" ", KEPT_SPACE).replace("\t", KEPT_SPACE * 4)
    if tag in {"img", "area"}:
        return f" {attributes.get('alt') or ''} "
    if tag == "input":
        shown = attributes.get("type") not in {"password", "file", "image", "checkbox", "radio"}
        return f" {attributes.get('value') or ''} " if shown else ""
    if tag == "select":
        chosen = node.css_first("option[selected]") or node.css_first("option")
        return f" {' '.join(chosen.text().split())} " if chosen is not None else ""
    return None


def _number_items(ordered: Any) -> None:
    """Write each item's label, such as `3.` or `c.`, into its attribute `value`."""
    attributes = ordered.attributes
    kinds = [attributes.get("type") or "", *(attributes.get("class") or "").split()]  # the latter by docutils
    number_format = next((kind for kind in kinds if numeral(1, kind) != "1"), "")
    count = parse_number(attributes.get("start") or "", 1)
    for item in ordered.iter():
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


def _table_text(table: Any) -> str | None:
    """The text of a table; None if there is a table or a long cell of several lines in it: a page's layout."""
    groups = _visible(table, "thead", "tbody", "tfoot")
    rows = [_visible(row, *CELLS) for group in groups for row in _visible(group, "tr")]
    captions = _visible(table, "caption")
    if any(map(_has_table, chain(captions, *rows))) or any(map(_has_lines, chain.from_iterable(rows))):
        return None
    found = [(nodes, cells) for nodes in rows if (cells := _row_cells(nodes))]
    above = list(takewhile(lambda each: len(each[1]) == 1, found))
    lines = [*map(_cell_text, captions), *(cells[0].text for _, cells in above)]
    below = found[len(above) :]
    header_rows = sum(1 for _ in takewhile(lambda each: {cell.tag for cell in each[0][1:]} == {"th"}, below))
    widest = max((sum(cell.columns for cell in cells) for _, cells in below), default=0)
    spread = spread_cells((cells for _, cells in below), header_rows, min(widest, MAX_SPANNING_COLUMNS))
    text = rows_as_text(list(filter(None, spread)), header_rows=header_rows)
    return "\n\n".join(["", "\n".join(lines), text, ""])


def _row_cells(cells: Sequence[Any]) -> list[TableCell]:
    """A row's cells; only the first if no other one has text; none if the row is empty."""
    found = [TableCell(_cell_text(each), _span(each, "colspan"), _span(each, "rowspan")) for each in cells]
    filled = [cell for cell in found if cell.text or not cell.rows]
    return filled if len(filled) < 2 else found


def _span(cell: Any, attribute: str) -> int:
    """How many rows or columns a cell spans."""
    value = cell.attributes.get(attribute) or ""
    digits = re.match(r"[1-9]\d{0,8}(?![\d%])", value)
    return min(int(digits[0]), MAX_SPANNED[attribute]) if digits else int(value != CONTINUES_ABOVE)


def _visible(node: Any, *tags: str) -> list[Any]:
    return [child for child in node.iter() if child.tag in tags and not _is_hidden(child)]


def _has_table(cell: Any) -> bool:
    return cell.css_first("table") is not None


def _is_short(cell: Any) -> bool:
    return not _has_table(cell) and len(cell.text()) <= CELL_CHARACTERS


def _has_lines(cell: Any) -> bool:
    """Whether a cell is too long to be written on one line."""
    return not _is_short(cell) and (len(found := _sections_of(cell)) > 1 or "\n" in found[0].text)


def _layout_row(row: Any) -> Iterator[Any]:
    """A row's short cells on one line; long cells keep their paragraphs."""
    for is_short, cells in groupby(_visible(row, *CELLS), _is_short):
        if is_short:
            texts = list(map(_cell_text, cells))
            yield "\n" + (" | ".join(texts) if sum(map(bool, texts)) > 1 else "".join(texts))
        for cell in () if is_short else cells:
            yield from ("\n", cell)


def _formula(node: Any) -> list[Any]:
    """The arguments of a formula's element, with the signs between them and the brackets that plain text needs."""
    tag, arguments = node.tag, list(node.iter())
    if tag in CELL_SEPARATORS:
        parts = [part for argument in arguments for part in (CELL_SEPARATORS[tag], argument)][1:]
        return ["[", *parts, "]"] if tag == "mtable" else parts
    if tag == "msqrt" or (tag == "mroot" and not any(each.text().strip() for each in arguments[1:])):
        return ["√(", *arguments, ")"]
    terms = [["(", each, ")"] if _needs_brackets(each) else [each] for each in arguments]
    if tag == "mroot":  # a root is a power
        terms = [["(", *arguments[:1], ")^(1/"], *terms[1:], [")"]]
    for sign, term, argument in zip(SIGN_BETWEEN[tag], terms[1:], arguments[1:], strict=False):
        term[:0] = sign if argument.text().strip() else ""
    following = node.next if node.parent.tag not in SIGN_BETWEEN else None
    after = " " if following is not None and following.tag not in {"mo", "-text"} else ""
    return [*chain.from_iterable(terms), after]


def _needs_brackets(argument: Any) -> bool:
    """Whether a term of a formula has an operator, and no brackets around it."""
    term = argument.text().strip()
    has_sign = argument.tag in SIGNED or argument.css_first(", ".join(SIGNED)) is not None
    return (has_sign or OPERATOR.search(term) is not None) and re.fullmatch(r"\([^()]*\)", term) is None


def inline_markup(markup: str) -> str:
    """Markup without block elements, for a note within a sentence."""
    return " ".join(re.sub(r"<(?!/?(?:su[bp]|m\w+)\b)[^>]+>", " ", markup).split())


def super_or_subscript(tag: str, text: str) -> str:
    """Superscript or subscript (tag: `sup` or `sub`) as plain text: `m²`, `10⁶`; without such characters, `x^(n+1)`."""
    if not (letters := text.strip()):
        return text
    sign, table = SUPER_OR_SUB[tag]
    shown = f"{sign}({letters})" if re.search(r"\W", letters) else f"{sign}{letters}"
    if all(ord(letter) in table for letter in letters):
        shown = letters.translate(table)
    return text.replace(letters, shown)
