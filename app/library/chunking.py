"""Cuts a document's parts into passages of at most N tokens of the model, each with its location."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import accumulate

from ragblend.app.library.documents import DocumentPassage, node_id
from ragblend.app.library.readers import DocumentPart
from ragblend.engine.prompts.tokenizing import MAX_TOKEN_CHARACTERS
from ragblend.kvstore.errors import OversizedDocumentError

SEPARATOR = "\n\n"
MAX_PASSAGES = 60_000  # of one document
BLOCK_CHARACTERS = 500_000  # split at once, which bounds memory
NO_SEPARATOR = "\x1f"  # no document has it
# Of what is no sentence, such as a table, where a line ends or a comma that is not in a number; and the ends of
# sentences in other scripts: NLTK finds those of Latin ones only.
PHRASE_END = r"(?:[,.;](?=\s|\Z)|[。？！।॥؟۔։።\n])"
PHRASE = rf"(?:(?!{PHRASE_END})[\s\S])+{PHRASE_END}?|{PHRASE_END}"
# NLTK knows the abbreviations and dates of English: `9. Januar`, `Nr. 23`, `Dr. Reinders` and `30 Min. an` were cut.
NOT_ENDED = re.compile(r"(?<![^\W_])(?:\d{1,3}|[^\W\d_]{1,3})\.\s*\Z")
CONTINUED = re.compile(r"\s*(?:\d|[^\W\d_A-ZÀ-ÖØ-Þ])")
# With the line of dashes below it in Markdown; in time that grows with the length of a line.
TABLE_HEADER = re.compile(r"^(?>[^\n]* \| )[^\n]*+\n(?:[|:\- ]++\n)?", re.MULTILINE)
CELL_NAME = re.compile(r"[^\n:]+: ")  # before a value in a row of CSV or XLSX
IS_ROW = re.compile(r"\brow \d+\Z")
TABLE_LINES = 3  # with cells; fewer are no table
CountTokens = Callable[[str], int]
Split = Callable[[str, int], list[str]]


def cut_document(
    document: str,
    parts: Sequence[DocumentPart],
    count_tokens: CountTokens,
    chunk_tokens: int,
    overlap_tokens: int = 0,
) -> list[DocumentPassage]:
    """Split on sentences with LlamaIndex's SentenceSplitter, across pages and sections; tables at their rows.

    Full passages matter more than stopping at headings: every retrieved passage costs the same few fresh tokens
    around it, however short it is. Its location names the first and the last page or heading that it has text of.
    """
    from llama_index.core.node_parser import SentenceSplitter
    from llama_index.core.node_parser.text.utils import split_by_sentence_tokenizer

    by_sentence, headings = split_by_sentence_tokenizer(), {part.location for part in parts}

    def units(text: str) -> list[str]:
        paragraphs = _joined(re.split(rf"(?={SEPARATOR})", text), lambda last, _: _is_heading(last, headings))
        return paragraphs if len(paragraphs) > 1 else _joined(by_sentence(text), _is_one_sentence)

    def count(piece: str) -> int:
        return _count(piece, count_tokens, chunk_tokens)

    def split(text: str, limit: int) -> list[str]:
        splitter = SentenceSplitter(
            chunk_size=limit,
            chunk_overlap=min(overlap_tokens, limit // 2),
            tokenizer=lambda piece: range(count(piece)),  # only its length is used
            paragraph_separator=NO_SEPARATOR,  # `units` cuts paragraphs, too
            chunking_tokenizer_fn=units,
            secondary_chunking_regex=PHRASE,
        )
        # The splitter counts a piece with the blank before it, and removes that: the first word may then be two tokens.
        pieces = ((piece, count(piece)) for piece in splitter.split_text(text))
        return [
            each
            for piece, tokens in pieces
            for each in ([piece] if tokens <= limit else split(piece, tokens // 2 + 1))
        ]

    with _no_deadline():
        texts = [_repeat_table_headers(part, count, split, chunk_tokens) for part in parts]
        text = SEPARATOR.join(texts)
        starts = [0, *accumulate(len(each) + len(SEPARATOR) for each in texts)][: len(parts)]
        pieces, places = list[str](), list[str]()
        for first, last in blocks(text):
            found = split(text[first:last], chunk_tokens)
            for start, end in locate(text[first:last], found, overlap_tokens > 0):
                here = slice(bisect_right(starts, first + start) - 1, bisect_right(starts, first + end))
                places.append(_span(part.location for part in parts[here]))
            pieces += found
            if len(pieces) > MAX_PASSAGES:
                raise OversizedDocumentError(
                    f"Cutting a document of {len(text):,} characters: it has more than {MAX_PASSAGES:,} passages of "
                    f"{chunk_tokens} tokens, the limit. Split it into parts, or cut longer passages."
                )
    named = [place or f"part {n} of {len(pieces)}" for n, place in enumerate(places, start=1)]
    return [
        DocumentPassage(node_id(document, index, piece), document, index, piece, place)
        for index, (piece, place) in enumerate(zip(pieces, named, strict=True))
    ]


def _joined(pieces: Sequence[str], belongs: Callable[[str, str], bool]) -> list[str]:
    """The pieces, each with the next one if that belongs to it."""
    found = list[str]()
    last = ""
    for piece in pieces:
        if found and belongs(last, piece):
            found[-1] += piece
        elif piece:
            found.append(piece)
        last = piece
    return found


def _is_heading(paragraph: str, headings: Set[str]) -> bool:
    return paragraph.strip(" \n#*_`") in headings


def _is_one_sentence(first: str, second: str) -> bool:
    """Whether a sentence was cut after the dot of a number or an abbreviation."""
    return NOT_ENDED.search(first) is not None or (
        first.rstrip().endswith(".") and CONTINUED.match(second) is not None
    )


def _repeat_table_headers(part: DocumentPart, count: CountTokens, split: Split, chunk_tokens: int) -> str:
    """The text with each table that is longer than a passage as several tables, which all begin with its header."""
    text, is_row = part.text, IS_ROW.search(part.location) is not None
    if not (is_row or " | " in text) or count(text) <= chunk_tokens:
        return text
    if is_row:
        lines = (_cell(line, count, split, chunk_tokens) for line in text.split("\n"))
        return re.sub(r"\n{3,}", SEPARATOR, "\n".join(lines)).strip()
    return SEPARATOR.join(
        SEPARATOR.join(_tables(paragraph, count, split, chunk_tokens)) for paragraph in text.split(SEPARATOR)
    )


def _cell(line: str, count: CountTokens, split: Split, chunk_tokens: int) -> str:
    """The line of a cell, or if its value is longer than a passage, pieces of it that fit, each with the name."""
    name = CELL_NAME.match(line)
    room = chunk_tokens - count(SEPARATOR + name.group()) if name else 0
    if name is None or room < chunk_tokens // 2 or count(line) <= room:
        return line
    pieces = (name.group() + piece for piece in split(line[name.end() :], room - 1))
    return f"{SEPARATOR}{SEPARATOR.join(pieces)}{SEPARATOR}"


def _tables(paragraph: str, count: CountTokens, split: Split, chunk_tokens: int) -> Iterator[str]:
    """The paragraph, or if it is a table of more tokens, its rows in groups that fit, each below the header."""
    header, lines = TABLE_HEADER.search(paragraph), paragraph.count("\n") + 1
    with_cells = sum(" | " in line for line in paragraph.split("\n")) if header else 0
    if header is None or with_cells < max(TABLE_LINES, lines / 2) or count(paragraph) <= chunk_tokens:
        yield paragraph
        return
    group = paragraph[: header.end()]  # a caption stands before the header of the first group only
    tokens, repeated = count(SEPARATOR + group), count(SEPARATOR + header.group())
    room, has_rows = chunk_tokens - tokens, False
    if room < chunk_tokens // 2:  # a header that long is not repeated
        yield paragraph
        return
    for line in paragraph[header.end() :].split("\n"):
        for row in [line] if count(f"{line}\n") <= room else split(line, room - 1):
            new = count(f"{row}\n")
            if has_rows and tokens + new > chunk_tokens:
                yield group.rstrip("\n")
                group, tokens = header.group(), repeated
            group, tokens, has_rows = f"{group}{row}\n", tokens + new, True
    yield group.rstrip("\n")


def blocks(text: str) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks that are split separately: ending at a paragraph, line or word, else anywhere.

    A text without such an end near the limit may have a passage that ends within a word; nothing is lost.
    """
    start = 0
    while len(text) - start > BLOCK_CHARACTERS:
        half, end = start + BLOCK_CHARACTERS // 2, start + BLOCK_CHARACTERS
        borders = (text.rfind(border, half, end) for border in (SEPARATOR, "\n", " "))
        stop = next((border for border in borders if border >= 0), end)
        yield start, stop
        start = stop
    yield start, len(text)


def locate(text: str, pieces: Sequence[str], overlap: bool) -> Iterator[tuple[int, int]]:
    """The index of the first and the last character of each piece in the text, which has them in this order.

    overlap: a piece may begin before the last one's end, and before its start where that was split again.
    """
    cursor = 0
    for piece in pieces:
        start = text.find(piece, cursor)
        if start < 0 and overlap:
            start = text.rfind(piece, 0, cursor + len(piece))
        assert start >= 0, "the splitter changed the text"
        yield start, start + len(piece) - 1
        cursor = start + (1 if overlap else len(piece))


@contextmanager
def _no_deadline() -> Iterator[None]:
    """Switch off NLTK's deadline of five seconds, which a busy machine exceeds for ordinary text.

    Its pattern takes linear time, and the text is bounded.
    """
    try:
        from nltk import redos  # type: ignore[import-untyped]
    except ImportError:  # an older NLTK, without a deadline
        yield
        return
    before, redos.DEFAULT_TIMEOUT = redos.DEFAULT_TIMEOUT, None
    try:
        yield
    finally:
        redos.DEFAULT_TIMEOUT = before


def _count(piece: str, count_tokens: CountTokens, chunk_tokens: int) -> int:
    """Skip tokenizing what is too long in any case: tokenizing megabytes takes a hundred times their memory."""
    is_too_long = len(piece) > MAX_TOKEN_CHARACTERS * chunk_tokens
    return chunk_tokens + 1 if is_too_long else count_tokens(piece)


def _span(locations: Iterable[str]) -> str:
    """The first and the last of these locations, without empty ones."""
    names = list(dict.fromkeys(filter(None, locations)))
    return f"{names[0]} – {names[-1]}" if len(names) > 1 else "".join(names)
