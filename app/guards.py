"""What a file must pass before a parser sees it: size, rights, what it is, what it unpacks to, its encoding.

Parsers trust their input. These checks read a bounded number of bytes and end in one named DocumentError each.
"""

import codecs
import stat
import zipfile
from pathlib import Path

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
READ_BYTES = 1 * MIB

MAGIC = {
    b"%PDF-": "pdf",
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "ole",
    b"\x1f\x8b": "gzip archive",
    b"7z\xbc\xaf": "7z archive",
    b"Rar!": "rar archive",
    b"\x89PNG": "PNG image",
    b"\xff\xd8\xff": "JPEG image",
    b"GIF8": "GIF image",
    b"\x7fELF": "program",
    b"MZ\x90": "program",
    b"SQLite format 3": "SQLite database",
    b"{\\rtf": "RTF document",
}
MARKUP = {".xml", ".xhtml", ".html", ".htm", ".opf"}
BOMS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
KIND_OF = {".pdf": "pdf", ".docx": "docx", ".epub": "epub"}  # every other suffix promises text


def check_file(path: Path) -> None:
    """Refuse what no parser should open. Raises the DocumentError that says what is wrong with it."""
    promised = check_size(path)
    found = _kind(path)
    if promised == "docx" and found == "ole":
        raise EncryptedDocumentError(
            f"Reading {path}: it is an encrypted document, or an old .doc. Save it as .docx without a password."
        )
    if found != promised:
        raise UnreadableDocumentError(_mislabelled(path, promised, found))
    if promised in {"docx", "epub"}:
        check_zip(path)


def check_size(path: Path) -> str:
    """The kind of file that its suffix promises. Raises DocumentError for no file, or one too large for its kind."""
    size = _check_regular(path)
    promised = KIND_OF.get(path.suffix.lower(), "text")
    limit = MAX_TEXT_BYTES if promised == "text" else MAX_FILE_BYTES
    if size > limit:
        raise OversizedDocumentError(
            f"Reading {path}: it has {size / MIB:.0f} MiB, the limit is {limit / MIB:.0f} MiB. Split it into parts."
        )
    return promised


def check_zip(path: Path) -> None:
    """Refuse an archive that needs a password or unpacks to far more than it is. Raises DocumentError."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check_directory(path, archive.infolist())
            _check_contents(path, archive)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
        raise UnreadableDocumentError(
            f"Reading {path}: its archive is damaged ({error}). Open it in its own program and save it again."
        ) from error
    except (
        RuntimeError,
        ValueError,
    ) as error:  # what zipfile and zlib raise for what they cannot make sense of
        raise UnreadableDocumentError(f"Reading {path}: its archive cannot be read ({error}).") from error


def read_text(path: Path) -> str:
    """A text file's text, whatever its encoding. Raises UnreadableDocumentError when none fits."""
    return decode(path.read_bytes(), path)


def decode(data: bytes, path: Path) -> str:
    """UTF-8 first, then what the byte order mark says, then the best guess of charset-normalizer."""
    for encoding in ("utf-8-sig", *(("utf-32",) if data.startswith(BOMS[:2]) else ("utf-16",))):
        if encoding == "utf-8-sig" or data.startswith(BOMS):
            try:
                return data.decode(encoding)
            except UnicodeDecodeError:
                continue
    return _guess(data, path)


def _guess(data: bytes, path: Path) -> str:
    from charset_normalizer import from_bytes

    best = from_bytes(data).best()
    if best is None:
        raise UnreadableDocumentError(
            f"Reading {path}: it is not UTF-8, and no other encoding fits it. Save it as UTF-8 text."
        )
    return str(best)


def _check_regular(path: Path) -> int:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableDocumentError(
                f"Reading {path}: it is not a regular file. Give a file or a folder."
            )
        with path.open("rb"):
            pass
    except FileNotFoundError as error:
        raise DocumentNotFoundError(f"Reading {path}: there is no such file. Check the path.") from error
    except OSError as error:
        raise UnreadableDocumentError(
            f"Reading {path}: {error.strerror or error}. Check its rights (chmod u+r) and its disk."
        ) from error
    if found.st_size == 0:
        raise EmptyDocumentError(f"Reading {path}: the file is empty. Nothing of it was ingested.")
    return found.st_size


def _kind(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(4096)
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            return _zip_kind(path) if kind == "zip" else kind
    if b"%PDF-" in head[:1024]:  # the format allows rubbish before its mark
        return "pdf"
    if b"\0" in head and not head.startswith(BOMS):
        return "binary file"
    return "text"


def _zip_kind(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise UnreadableDocumentError(
            f"Reading {path}: its archive is damaged ({error}). Open it in its own program and save it again."
        ) from error
    if "word/document.xml" in names:
        return "docx"
    return "epub" if "META-INF/container.xml" in names else "zip archive"


def _mislabelled(path: Path, promised: str, found: str) -> str:
    what = "an older Office document" if found == "ole" else f"a {found}"
    advice = (
        f"Rename it to .{found}" if found in KIND_OF.values() else "Give it its right suffix, or convert it"
    )
    return f"Reading {path}: its name promises {promised}, but its content is {what}. {advice}."


def _check_directory(path: Path, members: list[zipfile.ZipInfo]) -> None:
    if any(member.flag_bits & 1 for member in members):
        raise EncryptedDocumentError(f"Reading {path}: it is encrypted. Save it without a password.")
    packed, unpacked = path.stat().st_size, sum(member.file_size for member in members)
    if len(members) > MAX_MEMBERS:
        raise OversizedDocumentError(
            f"Reading {path}: its archive has {len(members)} files; {MAX_MEMBERS} at most."
        )
    largest = max(
        (member.file_size for member in members if Path(member.filename).suffix in MARKUP), default=0
    )
    if largest > MAX_TEXT_BYTES:  # parsers hold a part's whole tree, ten times its size, in memory
        raise OversizedDocumentError(
            f"Reading {path}: one part of it has {largest / MIB:.0f} MiB of text, the limit is {MAX_TEXT_BYTES // MIB} "
            "MiB. Split the document."
        )
    _check_unpacked(path, packed, unpacked)


def _check_unpacked(path: Path, packed: int, unpacked: int) -> None:
    ratio = unpacked / max(packed, 1)
    if unpacked > MAX_UNPACKED_BYTES or (unpacked > RATIO_MATTERS_BYTES and ratio > MAX_UNPACK_RATIO):
        raise OversizedDocumentError(
            f"Reading {path}: its {packed} bytes unpack to {unpacked / MIB:.0f} MiB or more ({ratio:.0f} times), as a "
            f"zip bomb does; the limits are {MAX_UNPACKED_BYTES // MIB} MiB and {MAX_UNPACK_RATIO} times. If it is "
            "honest, split it, or save it again without pictures."
        )


def _check_contents(path: Path, archive: zipfile.ZipFile) -> None:
    """Unpack all of it once, piece by piece, because the directory may lie about sizes."""
    packed, unpacked = path.stat().st_size, 0
    for member in archive.infolist():
        with archive.open(member) as file:
            while piece := file.read(READ_BYTES):
                unpacked += len(piece)
                _check_unpacked(path, packed, unpacked)
