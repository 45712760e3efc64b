"""Reads RTF with striprtf, prepared for what it leaves out: notes, lists' numbers, superscripts, fonts' letters."""

import re
from pathlib import Path

from ragblend.app.library.encodings import REPLACED
from ragblend.app.library.html_text import marked
from ragblend.app.library.word_documents import font_sign

# By the number of a font's `\fcharset`; in East Asian ones, letters have several bytes.
CHARSETS = {161: "cp1253", 162: "cp1254", 163: "cp1258", 177: "cp1255", 178: "cp1256"}
CHARSETS |= {186: "cp1257", 204: "cp1251", 222: "cp874", 238: "cp1250"}
OF_SIGNS = 2
FONT = re.compile(r"\{\\f(\d+)[^{}]*?\\fcharset(\d+)(?:\\[a-z]++-?\d* ?|\{[^{}]*\})*([^;{}]*)")
# A character's number with the code for older programs is left as it is.
CODES = r"(?:\\'[\da-fA-F]{2})"
TOKEN = re.compile(
    rf"\\(?P<escaped>[{{}}\\])|(?P<plain>\\plain(?![a-z]))|\\u-?\d+ ?{CODES}?|\\f(?P<font>\d+) ?"
    rf"|(?P<brace>[{{}}])|(?P<letters>{CODES}+)"
)
WORDS = r"(?:\\[a-z]++(?<!nosupersub)-?\d* ?)*"  # control words, each with the blank that ends it
RAISED = re.compile(rf"\\(super|sub)(?![a-z\d]) ?({WORDS})([^\\{{}}]*)")
# What is deleted or hidden, to its end or that of its group; the number of a list's item; a note with its mark.
SHOWN_AGAIN = re.compile(r"\\(?P<how>deleted|v)(?![a-z\d-])[^{}]*?\\(?P=how)0 ?")
HIDDEN = re.compile(r"\\(?:deleted|v)(?![a-z\d-])(?=[^{}]*\})(?![^{}]*\\plain)")
NUMBER = re.compile(r"\\(?:listtext|pntext)(?![a-z]) ?")
NOTE = re.compile(
    r"\{\\footnote(?![a-z])(?:\\[a-z]++-?\d* ?|\{[^{}]*\\chftn *\}| )*+((?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+)\}"
)


def rtf_text(path: Path, notes: list[str]) -> list[tuple[str, str]]:
    """The text of a rich text document. notes: gets a sentence where characters were replaced."""
    from striprtf.striprtf import rtf_to_text  # type: ignore[import-untyped]

    source = SHOWN_AGAIN.sub("", _with_letters(path.read_bytes().decode("latin-1")))
    source = HIDDEN.sub(r"\\*", source)
    source = RAISED.sub(lambda found: found[2] + marked(found[1][:3], found[3]), NUMBER.sub("", source))
    found = str(rtf_to_text(NOTE.sub(r"{ (\1)}", source), errors="replace"))
    if lost := found.count(REPLACED):
        notes.append(f"{lost} characters that its encoding does not have were replaced by {REPLACED}")
    return [(found, "")]


def _with_letters(source: str) -> str:
    """The letters of fonts that have an encoding of their own, which striprtf reads by the document's."""
    fonts = {number: (int(charset), name.strip()) for number, charset, name in FONT.findall(source)}
    default = re.search(r"\\deff(\d+)", source)
    stack = [default[1] if default else ""]

    def written(found: re.Match[str]) -> str:
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
            if charset == OF_SIGNS:
                return "".join(font_sign(name, 0xF000 + code) or REPLACED for code in codes)
            if charset in CHARSETS:
                return codes.decode(CHARSETS[charset], "replace")
        return found[0]

    return TOKEN.sub(written, source)
