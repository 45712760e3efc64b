"""Reads RTF with striprtf. What striprtf gets wrong is rewritten before: notes, list numbers, superscripts, fonts."""

import re
from pathlib import Path

from ragblend.app.library.encodings import REPLACEMENT
from ragblend.app.library.html_text import super_or_subscript
from ragblend.app.library.word_documents import font_character

# Encodings by the number of a font's `\fcharset`; not the East Asian ones, whose letters have several bytes.
CHARSETS = {161: "cp1253", 162: "cp1254", 163: "cp1258", 177: "cp1255", 178: "cp1256"}
CHARSETS |= {186: "cp1257", 204: "cp1251", 222: "cp874", 238: "cp1250"}
SYMBOL_CHARSET = 2
FONT = re.compile(r"\{\\f(\d+)[^{}]*?\\fcharset(\d+)(?:\\[a-z]++-?\d* ?|\{[^{}]*\})*([^;{}]*)")
# A byte of text in hex. After `\u` and a character's number it is meant for older programs, and stays as it is.
CODE = r"(?:\\'[\da-fA-F]{2})"
TOKEN = re.compile(
    rf"\\(?P<escaped>[{{}}\\])|(?P<plain>\\plain(?![a-z]))|\\u-?\d+ ?{CODE}?|\\f(?P<font>\d+) ?"
    rf"|(?P<brace>[{{}}])|(?P<letters>{CODE}+)"
)
CONTROL_WORDS = r"(?:\\[a-z]++(?<!nosupersub)-?\d* ?)*"  # control words, each with the blank that ends it
SUPER_OR_SUB = re.compile(rf"\\(super|sub)(?![a-z\d]) ?({CONTROL_WORDS})([^\\{{}}]*)")
# Deleted or hidden text, up to where it is switched off, or else to the end of its group.
HIDDEN_UNTIL_OFF = re.compile(r"\\(?P<how>deleted|v)(?![a-z\d-])[^{}]*?\\(?P=how)0 ?")
HIDDEN = re.compile(r"\\(?:deleted|v)(?![a-z\d-])(?=[^{}]*\})(?![^{}]*\\plain)")
ITEM_NUMBER = re.compile(r"\\(?:listtext|pntext)(?![a-z]) ?")
NOTE = re.compile(
    r"\{\\footnote(?![a-z])(?:\\[a-z]++-?\d* ?|\{[^{}]*\\chftn *\}| )*+((?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+)\}"
)


def rtf_text(path: Path, notes: list[str]) -> list[tuple[str, str]]:
    """The text of a rich text document. notes: gets a sentence where characters were replaced."""
    from striprtf.striprtf import rtf_to_text  # type: ignore[import-untyped]

    source = HIDDEN_UNTIL_OFF.sub("", _decode_fonts(path.read_bytes().decode("latin-1")))
    source = HIDDEN.sub(r"\\*", source)
    source = ITEM_NUMBER.sub("", source)
    source = SUPER_OR_SUB.sub(lambda found: found[2] + super_or_subscript(found[1][:3], found[3]), source)
    found = str(rtf_to_text(NOTE.sub(r"{ (\1)}", source), errors="replace"))
    if lost := found.count(REPLACEMENT):
        notes.append(f"{lost} characters that its encoding does not have were replaced by {REPLACEMENT}")
    return [(found, "")]


def _decode_fonts(source: str) -> str:
    """Decode the text of fonts that have an encoding of their own: striprtf would use the document's encoding."""
    fonts = {number: (int(charset), name.strip()) for number, charset, name in FONT.findall(source)}
    default = re.search(r"\\deff(\d+)", source)
    stack = [default[1] if default else ""]

    def decoded(found: re.Match[str]) -> str:
        if found["escaped"]:  # as a code, which later patterns cannot take for a control word or a group
            return f"\\'{ord(found['escaped']):x}"
        if found["brace"] == "{":
            stack.append(stack[-1])
        elif found["brace"]:
            stack[1:] = stack[1:-1]
        elif found["font"] or found["plain"]:
            stack[-1] = found["font"] or stack[0]
        elif found["letters"]:
            charset, name = fonts.get(stack[-1], (0, ""))
            codes = bytes.fromhex(found["letters"].replace("\\'", ""))
            if charset == SYMBOL_CHARSET:
                return "".join(font_character(name, 0xF000 + code) or REPLACEMENT for code in codes)
            if charset in CHARSETS:
                return codes.decode(CHARSETS[charset], "replace")
        return found[0]

    return TOKEN.sub(decoded, source)
