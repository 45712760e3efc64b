"""Checks a file before a parser sees it: size, rights, type, unpacked size.

Parsers trust their input. Each failed check raises a DocumentError of its own kind.
"""

import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from xml.etree.ElementTree import Element

from ragblend.app.library.encodings import HEAD_BYTES, is_binary
from ragblend.kvstore.errors import (
    DocumentNotFoundError,
    EmptyDocumentError,
    EncryptedDocumentError,
    OversizedDocumentError,
    UnreadableDocumentError,
)

MIB = 1024**2
MAX_FILE_BYTES = 256 * MIB
MAX_TEXT_BYTES = 64 * MIB  # plain text is held, decoded and split in memory
MAX_UNPACKED_BYTES = 512 * MIB
MAX_UNPACK_RATIO = 250  # honest Office XML shrinks 10 to 60 times
RATIO_MATTERS_BYTES = 16 * MIB
MAX_MEMBERS = 20_000

MAGIC = {
    b"%PDF-": "pdf",
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
    b"\x89PNG": "PNG image",
    b"{\\rtf": "rtf",
}
MAGIC |= {b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "ole"}
MARKUP = {".xml", ".xhtml", ".html", ".htm", ".opf"}
# The types that are not text, by suffix.
KIND_OF = {f".{kind}": kind for kind in ("pdf", "rtf", "docx", "pptx", "xlsx", "epub", "odt", "odp")}
ARCHIVES = frozenset(KIND_OF.values()) - {"pdf", "rtf"}
# How the type of an archive is recognised: by a folder in it, or by the end of its media type.
OFFICE_FOLDERS = {"word": "docx", "ppt": "pptx", "xl": "xlsx"}
OPENDOCUMENT = {"text": "odt", "presentation": "odp"}


def check_file(path: Path) -> str:
    """Check a file without reading its content, and return the type that its suffix promises.

    Raises DocumentError if it is not a readable file, or too large for its type.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableDocumentError(f"Reading {path}: not a regular file. Give a file or a folder.")
        path.open("rb").close()
    except FileNotFoundError as error:
        raise DocumentNotFoundError(f"Reading {path}: there is no such file. Check the path.") from error
    except OSError as error:
        raise UnreadableDocumentError(
            f"Reading {path}: {error.strerror or error}. Check its rights (chmod u+r) and its disk."
        ) from error
    if found.st_size == 0:
        raise EmptyDocumentError(f"Reading {path}: the file is empty. Nothing of it was ingested.")
    promised = KIND_OF.get(path.suffix.lower(), "text")
    limit = MAX_TEXT_BYTES if promised == "text" else MAX_FILE_BYTES
    if found.st_size > limit:
        sizes = f"it has {found.st_size / MIB:.0f} MiB, the limit is {limit / MIB:.0f} MiB"
        raise OversizedDocumentError(f"Reading {path}: {sizes}. Split it into parts.")
    return promised


def check_content(path: Path) -> None:
    """Raise DocumentError if the content is not of the type that the name promises."""
    promised = check_file(path)
    found = _content_type(path)
    if promised in OFFICE_FOLDERS.values() and found == "ole":
        advice = f"Save it as .{promised} without a password."
        raise EncryptedDocumentError(f"Reading {path}: it is encrypted, or of an old format. {advice}")
    if found == "zip":
        # If it is damaged, `open_archive` says that.
        found = promised if promised in ARCHIVES else "zip archive"
        with suppress(zipfile.BadZipFile, OSError, ValueError, RuntimeError), zipfile.ZipFile(path) as file:
            found = _archive_type(file)
    if found != promised:
        kind = "an older Office document" if found == "ole" else f"a {found}"
        is_read = found in KIND_OF.values()
        advice = f"Rename it to .{found}" if is_read else "Give it its right suffix, or convert it"
        what = f"its name promises {promised}, but its content is {kind}"
        raise UnreadableDocumentError(f"Reading {path}: {what}. {advice}.")


def archive_xml(archive: zipfile.ZipFile, name: str) -> Element:
    """A member of an archive as XML. Raises whatever the parser raises."""
    from defusedxml.ElementTree import fromstring  # no entities, so no billion laughs and no outside files

    return fromstring(archive.read(name))


@contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive whose members are safe to read: zipfile unpacks no more of a member than the directory says.

    Raises DocumentError if it needs a password or unpacks to far more than its size. Damage to a member is found when
    that is read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_directory(path, archive.infolist())
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError) as error:
        raise UnreadableDocumentError(
            f"Reading {path}: its archive is damaged ({error}). Open it in its own program and save it again."
        ) from error


def _content_type(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    found = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "")
    if not found and b"%PDF-" in head[:1024]:  # the format allows other bytes before its mark
        return "pdf"
    return found or ("binary file" if is_binary(head) else "text")


def _archive_type(archive: zipfile.ZipFile) -> str:
    names = archive.NameToInfo
    if "META-INF/container.xml" in names:
        return "epub"
    if "[Content_Types].xml" in names or "_rels/.rels" in names:
        folders = {name.lstrip("/").partition("/")[0] for name in names}
        return next((kind for folder, kind in OFFICE_FOLDERS.items() if folder in folders), "zip archive")
    if "mimetype" in names:
        declared = archive.read("mimetype")[:100].decode("ascii", "replace")
        return OPENDOCUMENT.get(declared.rpartition(".")[2].removesuffix("-template"), "zip archive")
    return "docx" if "word/document.xml" in names else "zip archive"


def _check_directory(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Check an archive's directory of its members. Raises DocumentError."""
    if any(member.flag_bits & 1 for member in members):
        raise EncryptedDocumentError(f"Reading {path}: it is encrypted. Save it without a password.")
    packed, unpacked = path.stat().st_size, sum(member.file_size for member in members)
    ratio, problem = unpacked / max(packed, 1), ""
    markup = (member.file_size for member in members if Path(member.filename).suffix in MARKUP)
    largest = max(markup, default=0)  # a parser holds its tree, ten times its size
    if len(members) > MAX_MEMBERS:
        problem = f"its archive has {len(members)} files; {MAX_MEMBERS} at most."
    elif largest > MAX_TEXT_BYTES:
        problem = (
            f"one part of it has {largest / MIB:.0f} MiB of text, the limit is {MAX_TEXT_BYTES // MIB} MiB. Split the "
            "document."
        )
    elif unpacked > MAX_UNPACKED_BYTES or (unpacked > RATIO_MATTERS_BYTES and ratio > MAX_UNPACK_RATIO):
        problem = (
            f"its {packed} bytes unpack to {unpacked / MIB:.0f} MiB or more ({ratio:.0f} times), as a zip bomb does; "
            f"the limits are {MAX_UNPACKED_BYTES // MIB} MiB and {MAX_UNPACK_RATIO} times. If it is a real document, "
            "split it, or save it again without pictures."
        )
    if problem:
        raise OversizedDocumentError(f"Reading {path}: {problem}")
