"""Reads DOCX: mammoth converts it to HTML, after what it leaves out was put where it reads: formulas, headers, footers.

Footnotes, endnotes and comments are put behind their references, so that a passage has both.
"""

import io
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from ragblend.app.library.encodings import decode
from ragblend.app.library.file_checks import archive_xml, local_name, open_archive
from ragblend.app.library.html_text import Section, html_sections
from ragblend.kvstore.errors import UnreadableDocumentError

COMPATIBILITY = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
# Separators between the arguments of Office Math elements.
BETWEEN = {"f": "/", "sSup": "^", "sSub": "_", "func": " ", "limLow": " ", "limUpp": " "}
ENDS_OF = {"rad": ("√(", ")"), "d": ("(", ")"), "m": ("[", "]")}
# What mammoth passes over, read as what it knows: fields, ruby's base text, directions; shapes of the old kind.
READ_AS = dict.fromkeys(("fldSimple", "ruby", "rubyBase", "dir", "bdo"), "smartTag") | dict.fromkeys(
    ("arc", "curve", "image", "line", "oval", "polyline"), "shape"
)
# Several references may share a `sup`.
REFERENCE = re.compile(
    r'(?:<sup>)?<a href="#((?:footnote|endnote|comment)-[^"]+)"[^>]*>\[[^\]]*\]</a>(?:</sup>)?'
)
NOTE = re.compile(
    r'<li id="((?:footnote|endnote)-[^"]+)">(.*?)</li>|<dt id="(comment-[^"]+)">.*?</dt><dd>(.*?)</dd>',
    re.DOTALL,
)
BACK = re.compile(r'<a href="#(?:footnote|endnote|comment)-ref-[^"]*">↑</a>')
TAG = re.compile(r"<[^>]+>")


def docx_sections(path: Path) -> list[Section]:
    """The text of a DOCX by heading. Raises DocumentError."""
    import mammoth  # type: ignore[import-untyped]
    from mammoth.images import img_element  # type: ignore[import-untyped]

    with open_archive(path) as archive:
        prepared = _prepared(archive, path)
    try:
        found = mammoth.convert_to_html(
            prepared,
            style_map="comment-reference => sup",
            convert_image=img_element(lambda image: {}),  # its alternative text only
        )
    except OSError as error:  # its package names no document
        raise UnreadableDocumentError(
            f"Reading {path}: {error} Open it in Word and save it again."
        ) from error
    return html_sections(_notes_in_place(found.value))


def _notes_in_place(html: str) -> str:
    """The HTML with each note at its reference, in parentheses, instead of at the end."""
    notes = {
        number or comment: " ".join(TAG.sub(" ", BACK.sub("", text or comment_text)).split())
        for number, text, comment, comment_text in NOTE.findall(html)
    }
    return REFERENCE.sub(lambda found: f" ({notes.get(found.group(1), '')}) ", NOTE.sub("", html))


def _prepared(archive: zipfile.ZipFile, path: Path) -> io.BytesIO:
    """A copy of the package without pictures, whose parts have only what mammoth reads."""
    names = [name for name in archive.namelist() if name.lower().endswith((".xml", ".rels"))]
    parts = {name: archive_xml(archive, name) for name in names if name.endswith(".xml")}
    bodies = [(name, root) for name, root in parts.items() if _body(root) is not None]
    for root in parts.values():
        _write_formulas(root)
        _rename_unknown(root)
        _take_boxes_out(root)
        _take_alternatives(root)
    edges = [part for part in parts.values() if local_name(part) in {"hdr", "ftr"}]
    for name, root in bodies:
        _read_chunks(archive, name, root, path)
        _add_edges(root, edges)
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w") as prepared:
        for name in names:
            prepared.writestr(name, tostring(parts[name]) if name in parts else archive.read(name))
    copy.seek(0)
    return copy


def _namespace(element: Element) -> str:
    return str(element.tag).rpartition("}")[0] + "}"


def _body(root: Element) -> Element | None:
    if local_name(root) != "document":
        return None
    return next((child for child in root if local_name(child) == "body"), None)


def _add_edges(root: Element, edges: Iterable[Element]) -> None:
    """Put the texts of headers before the document's, and those of footers after it, each once."""
    body = _body(root)
    assert body is not None
    for part in edges:
        if local_name(part) == "hdr":
            body[:0] = list(part)
        else:
            body.extend(part)


def _write_formulas(root: Element) -> None:
    """Replace formulas by runs of text, in one line."""
    word = _namespace(root)
    for parent in list(root.iter()):
        for at, child in enumerate(list(parent)):
            if local_name(child) in {"oMath", "oMathPara"} and "math" in _namespace(child).lower():
                run = Element(f"{word}r")
                SubElement(run, f"{word}t").text = _formula(child)
                parent[at] = run


def _formula(element: Element) -> str:
    """Office Math as one line: `(a+b)/c`, `x^2`, `√(2)`."""
    name = local_name(element)
    if name == "t":
        return element.text or ""
    parts = [text for child in element if not local_name(child).endswith("Pr") and (text := _formula(child))]
    if name in BETWEEN and len(parts) > 1:
        return BETWEEN[name].join(f"({part})" if re.search(r"[-+*/ ]", part) else part for part in parts)
    before, after = ENDS_OF.get(name, ("", ""))
    return before + "".join(parts) + after


def _rename_unknown(root: Element) -> None:
    for element in root.iter():
        element.tag = _namespace(element) + READ_AS.get(local_name(element), local_name(element))


def _take_boxes_out(root: Element) -> None:
    """Put the text boxes of drawings behind these, as text boxes of the old kind."""
    word = _namespace(root)
    for parent in list(root.iter()):
        for drawing in [child for child in parent if local_name(child) == "drawing"]:
            box = Element(f"{word}pict")
            box.extend(element for element in drawing.iter() if local_name(element) == "txbxContent")
            parent.insert(list(parent).index(drawing) + 1, box)


def _take_alternatives(root: Element) -> None:
    """Of an `AlternateContent` without a fallback, which is what mammoth reads, make the first choice the fallback."""
    for alternatives in root.iter(f"{COMPATIBILITY}AlternateContent"):
        choice = alternatives.find(f"{COMPATIBILITY}Choice")
        fallback = alternatives.find(f"{COMPATIBILITY}Fallback")
        if choice is not None and (fallback is None or not "".join(fallback.itertext()).strip()):
            for found in [] if fallback is None else [fallback]:
                alternatives.remove(found)
            choice.tag = f"{COMPATIBILITY}Fallback"


def _read_chunks(archive: zipfile.ZipFile, name: str, root: Element, path: Path) -> None:
    """Replace documents that are embedded as text (altChunk: HTML, plain text) by their paragraphs."""
    body = _body(root)
    assert body is not None
    word = _namespace(root)
    targets = _targets(archive, name)
    for at, child in reversed(list(enumerate(body))):
        if local_name(child) != "altChunk":
            continue
        target = next((targets[value] for value in child.attrib.values() if value in targets), "")
        body[at : at + 1] = [
            _paragraph(word, line) for line in _chunk_lines(archive, target, path) if line.strip()
        ]


def _chunk_lines(archive: zipfile.ZipFile, target: str, path: Path) -> Iterator[str]:
    if target not in archive.namelist() or not target.lower().endswith((".htm", ".html", ".xhtml", ".txt")):
        return
    text = decode(archive.read(target), path)
    if not target.lower().endswith(".txt"):
        text = "\n".join(section.text for section in html_sections(text))
    yield from text.split("\n")


def _targets(archive: zipfile.ZipFile, name: str) -> dict[str, str]:
    """The package's parts by the ids under which this part refers to them."""
    folder, _, file = name.rpartition("/")
    relations = f"{folder}/_rels/{file}.rels"
    if relations not in archive.namelist():
        return {}
    root = archive_xml(archive, relations)
    return {
        str(item.get("Id")): (target.lstrip("/") if target.startswith("/") else f"{folder}/{target}")
        for item in root
        if (target := item.get("Target"))
    }


def _paragraph(word: str, text: str) -> Element:
    paragraph = Element(f"{word}p")
    SubElement(SubElement(paragraph, f"{word}r"), f"{word}t").text = text
    return paragraph
