"""Reads formats that are text with markup, each by a library: Markdown, notebooks, reST, Org, LaTeX, mail."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from ragblend.app.library.documents import note_names
from ragblend.app.library.encodings import decode
from ragblend.app.library.html_text import html_sections, super_or_subscript
from ragblend.kvstore.errors import UnreadableDocumentError

Part = tuple[str, str]  # text, location
# A command without arguments: `\newcommand{\fee}{400}`. A value with its unit: `\SI{12.5}{\metre}`, `\si{\metre}`.
LATEX_COMMAND = re.compile(
    r"\\(?:(?:re)?newcommand\*?\s*\{?|def\s*)\\([A-Za-z]+)\}?\s*\{((?:[^{}]|\{[^{}]*\})*+)\}"
)
LATEX_SIGNS = {"euro": "€", "pounds": "£"}  # unknown to pylatexenc
# Commands that pylatexenc parses but does not know when it writes text, so that their arguments would be lost.
LATEX_SHOWN = ["verb", "mbox", "texttt", "textsf", "textmd", "textup", "keywords", "citetext"]
# Commands that pylatexenc does not know, with one or two arguments that are not text. Of `\href` the address is
# matched, with which pylatexenc fails.
LATEX_SETTING = re.compile(
    r"\\(?:href|index|cline|cmidrule|pagestyle|thispagestyle|pagenumbering|bibliographystyle"
    r"|(?:multicolumn|multirow|addtolength|fontsize)\s*\{[^{}]*\})(?:\([^)]*\))?\s*\{[^{}]*\}"
)
LATEX_UNIT = re.compile(r"\\(?:(?:SI|qty)\{([^{}]*)\}|si|unit)\{\\?([^{}]*)\}")
LATEX_SUPER_OR_SUB = re.compile(r"\\text(super|sub)script\{([^{}]*)\}")
MAIL_HEADERS = ("From", "To", "Cc", "Date", "Subject")
# Of Markdown.
FRONT_MATTER = re.compile(r"\A---\n[\w-]+:.*\n(?:.+\n)*?---$", re.MULTILINE)


def markdown_sections(text: str) -> Iterator[Part]:
    """One part for each heading, in Markdown as it is written: models read that well."""
    from markdown_it import MarkdownIt

    lines = text.strip().splitlines()
    text = "\n".join(lines)
    # The line of dashes below a file's front matter would make it a heading.
    tokens = MarkdownIt("commonmark").parse(FRONT_MATTER.sub(lambda found: "\n" * found[0].count("\n"), text))
    begin, heading = 0, ""
    for token, content in pairwise(tokens):
        if token.type == "heading_open" and token.level == 0 and token.map is not None:
            yield "\n".join(lines[begin : token.map[0]]), heading
            begin, heading = token.map[0], " ".join(content.content.split()).strip(" *_`")
    yield "\n".join(lines[begin:]), heading


def rst_sections(text: str) -> list[Part]:
    """reStructuredText, without directives that read other files or run code; unknown directives stay as written."""
    from docutils import nodes  # type: ignore[import-untyped]
    from docutils.core import publish_doctree, publish_from_doctree  # type: ignore[import-untyped]

    off = ("file_insertion_enabled", "raw_enabled", "warning_stream", "doctitle_xform")
    # By default a document with a longer line is empty. Errors (3) have the source of unknown directives.
    limits = {"line_length_limit": len(text) + 1, "report_level": 3, "halt_level": 5}
    settings = dict.fromkeys(off, False) | limits | {"initial_header_level": 1}
    tree = publish_doctree(text, settings_overrides=settings)
    for message in list(tree.findall(nodes.system_message)):
        message.parent.replace(message, list(message.findall(nodes.literal_block)))
    tree.parse_messages, tree.transform_messages = [], []  # else they are written at the end
    html = publish_from_doctree(tree, writer="html5", settings_overrides=settings)
    return html_sections(html.decode("utf-8"))


def org_sections(text: str) -> Iterator[Part]:
    """Org: a section per heading, as written, with its state, dates and properties; of links only their texts."""
    import orgparse

    for node in (root := orgparse.loads(text)):
        heading = "" if node is root else node.get_heading(format="plain")
        yield re.sub(r"\[\[[^\[\]\n]*\]\[([^\[\]\n]*)\]\]", r"\1", str(node)), heading


def latex_text(text: str) -> list[Part]:
    """LaTeX as text: the document's own commands without arguments are expanded, other commands removed; formulas stay
    as they are written.
    """
    from pylatexenc import latex2text  # type: ignore[import-untyped]

    text = LATEX_SUPER_OR_SUB.sub(lambda found: super_or_subscript(found[1][:3], found[2]), text)
    defined = LATEX_SIGNS | dict(LATEX_COMMAND.findall(re.sub(r"(?<!\\)%.*", "", text)))
    text = LATEX_COMMAND.sub("", text)
    text = re.sub(r"\\([A-Za-z]+)(?:\{\})?", lambda found: defined.get(found[1], found[0]), text)
    text = LATEX_UNIT.sub(lambda found: " ".join(found.groups("")).replace("\\", " "), text)
    text = LATEX_SETTING.sub("", text)
    context = latex2text.get_default_latex_context_db()
    shown = [latex2text.MacroTextSpec(name, discard=False) for name in LATEX_SHOWN]
    context.add_context_category("shown", macros=shown)
    body = re.search(r"\\begin\{document\}(.*)\\end\{document\}", text, re.DOTALL)
    source = body.group(1) if body else text
    reader = latex2text.LatexNodes2Text(math_mode="verbatim", latex_context=context)
    return [(reader.latex_to_text(source), "")]


def notebook_sections(text: str) -> Iterator[Part]:
    """A Jupyter notebook as Markdown: texts, code and the text of its outputs."""
    blocks = list[str]()
    for cell in json.loads(text).get("cells", []):
        texts = [cell.get("source")]
        is_code = cell.get("cell_type") == "code"
        for output in cell.get("outputs", []) if is_code else ():
            texts.append(output.get("text") or output.get("data", {}).get("text/plain"))
        shown = ["".join(each) if isinstance(each, list) else str(each or "") for each in texts]
        blocks += [f"```\n{each}\n```" for each in shown if each.strip()] if is_code else shown
    return markdown_sections("\n\n".join(blocks))


def mail_parts(path: Path, notes: list[str]) -> Iterator[Part]:
    """Each message of an .eml or .mbox: its headers and text; attachments are only named.

    notes: gets a sentence that names them, and sentences on encodings that were guessed.
    """
    import mailbox
    from email import message_from_bytes, policy

    attached = list[str]()
    with closing(mailbox.mbox(path, create=False)) as box:
        is_box = path.suffix.lower() == ".mbox"
        for number, key in enumerate(box.keys() if is_box else [""], start=1):
            data = box.get_bytes(key) if is_box else path.read_bytes()
            message = message_from_bytes(data, policy=policy.default)
            contents = list(_contents(message, path, notes))
            names = [name for _, name in contents if name]
            attached += names
            lines = [f"{name}: {message[name]}" for name in MAIL_HEADERS if message[name]]
            lines += [f"Attachments: {', '.join(names)}"] if names else []
            texts = "\n\n".join(text for text, _ in contents if text)
            yield "\n".join([*lines, "", texts]), f"message {number}" if is_box else ""
    note_names(notes, "attachments were not read", attached)


def _contents(part: Any, path: Path, notes: list[str]) -> Iterator[tuple[str, str]]:
    """(text, "") of each text of a message, ("", name) of each attachment. A message with pictures has several texts.

    Of alternatives the plain text is taken, or HTML if it is blank; if they have neither, they are attachments.
    """
    is_multipart = part.get_content_maintype() == "multipart"
    has_no_body = part.get_content_subtype() != "alternative" if is_multipart else part.get_filename()
    kinds = () if has_no_body else ("plain", "html")
    bodies = [body for kind in kinds if (body := part.get_body((kind,))) is not None]
    if is_multipart and not bodies and (parts := list(part.iter_parts())):
        for each in parts:
            yield from _contents(each, path, notes)
        return
    texts = (_body_text(body, path, notes) for body in bodies)
    yield next(filter(str.strip, texts), ""), "" if bodies else part.get_filename() or part.get_content_type()


def _body_text(body: Any, path: Path, notes: list[str]) -> str:
    try:
        text = decode(body.get_payload(decode=True), path, notes, body.get_content_charset(""))
    except UnreadableDocumentError:  # one such message must not make a whole mailbox unreadable
        notes.append("the text of a message fits no encoding, and was left out")
        return ""
    is_html = body.get_content_type() == "text/html"
    return "\n\n".join(section for section, _ in html_sections(text)) if is_html else text
