"""Cuts a document's parts into passages of at most N tokens of the model, each with its location."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import accumulate, pairwise

from ragblend.app.library.documents import DocumentPassage, node_id
from ragblend.app.library.readers import DocumentPart
from ragblend.app.library.tables import CELL_NAME
from ragblend.engine.prompts.tokenizing import MAX_TOKEN_CHARACTERS
from ragblend.kvstore.errors import OversizedDocumentError

SEPARATOR = "\n\n"
MAX_PASSAGES = 60_000  # of one document
BLOCK_CHARACTERS = 500_000  # split at once, which bounds memory
NO_SEPARATOR = "\x1f"  # occurs in no document
# For text without sentences, such as a table: the end of a line, or a comma that is not in a number. Also the ends of
# sentences in other scripts, because NLTK finds only those in Latin script.
PHRASE_END = r"(?:[,.;](?=\s|\Z)|[。？！।॥؟۔։።\n])"
PHRASE = rf"(?:(?!{PHRASE_END})[\s\S])+{PHRASE_END}?|{PHRASE_END}"
# NLTK knows only English abbreviations and dates: `9. Januar`, `Nr. 23`, `Dr. Reinders` and `30 Min. an` would be cut.
ENDS_IN_ABBREVIATION = re.compile(r"(?<![^\W_])(?:\d{1,3}|[^\W\d_]{1,3})\.\s*\Z")
CONTINUES_SENTENCE = re.compile(r"\s*(?:\d|[^\W\d_A-ZÀ-ÖØ-Þ])")
# Includes the line of dashes below it in Markdown. Takes linear time.
TABLE_HEADER = re.compile(r"^(?>[^\n]* \| )[^\n]*+\n(?:[|:\- ]++\n)?", re.MULTILINE)
ROW_LOCATION = re.compile(r"\brow \d+\Z")
TABLE_LINES = 3  # with cells; a paragraph with fewer is not a table
CountTokens = Callable[[str], int]


def cut_document(
    document_id: str, parts: Sequence[DocumentPart], count_tokens: CountTokens, chunk_tokens: int
) -> list[DocumentPassage]:
    """Split at sentences with LlamaIndex's SentenceSplitter, across pages and sections; split tables at their rows.

    Full passages matter more than stopping at headings: every retrieved passage costs the same few fresh tokens
    around it, however short it is. A passage's location names the first and the last page or heading of its text.
    """
    splitter = _Splitter(count_tokens, chunk_tokens, {part.location for part in parts})
    with _no_nltk_deadline():
        texts = [splitter.with_repeated_headers(part) for part in parts]
        text = SEPARATOR.join(texts)
        part_starts = [0, *accumulate(len(each) + len(SEPARATOR) for each in texts)][: len(parts)]
        found = list[tuple[str, str]]()  # text and location
        for block_start, block_stop in blocks(text):
            pieces = splitter.split(block := text[block_start:block_stop], chunk_tokens)
            for piece, span in zip(pieces, locate(block, pieces), strict=True):
                first, stop = (bisect_right(part_starts, block_start + at) for at in span)
                found.append((piece, _span(part.location for part in parts[first - 1 : stop])))
            if len(found) > MAX_PASSAGES:
                raise OversizedDocumentError(
                    f"Cutting a document of {len(text):,} characters: it has more than {MAX_PASSAGES:,} passages of "
                    f"{chunk_tokens} tokens, the limit. Split it into parts, or raise `chunk_tokens`."
                )
    return [
        DocumentPassage(
            node_id(document_id, n, piece), document_id, n, piece, place or f"part {n + 1} of {len(found)}"
        )
        for n, (piece, place) in enumerate(found)
    ]


class _Splitter:
    """Splits text into pieces of at most so many tokens; headings: lines that belong to the paragraph after them."""

    def __init__(self, count_tokens: CountTokens, chunk_tokens: int, headings: Set[str]) -> None:
        from llama_index.core.node_parser.text.utils import split_by_sentence_tokenizer

        self._count_tokens, self._chunk_tokens, self._headings = count_tokens, chunk_tokens, headings
        self._by_sentence = split_by_sentence_tokenizer()

    def split(self, text: str, limit: int) -> list[str]:
        """Pieces of at most `limit` tokens."""
        from llama_index.core.node_parser import SentenceSplitter

        splitter = SentenceSplitter(
            chunk_size=limit,
            chunk_overlap=0,  # text in two passages would be stored twice, and could be in a prompt twice
            tokenizer=lambda piece: range(self._count(piece)),  # only its length is used
            paragraph_separator=NO_SEPARATOR,  # none: `_paragraphs_or_sentences` splits paragraphs
            chunking_tokenizer_fn=self._paragraphs_or_sentences,
            secondary_chunking_regex=PHRASE,
        )
        # The splitter counts a piece with the space before it, which it then removes: without the space, the first word
        # may have more tokens.
        found = list[str]()
        for piece in splitter.split_text(text):
            tokens = self._count(piece)
            found += [piece] if tokens <= limit else self.split(piece, tokens // 2 + 1)
        return found

    def _paragraphs_or_sentences(self, text: str) -> list[str]:
        """The text's paragraphs, each with its heading; if it is a single paragraph, its sentences."""
        paragraphs = _merge_if(
            re.split(rf"(?={SEPARATOR})", text), lambda last, _: last.strip(" \n#*_`") in self._headings
        )
        return paragraphs if len(paragraphs) > 1 else _merge_if(self._by_sentence(text), _is_one_sentence)

    def _count(self, piece: str) -> int:
        """The tokens of a piece; just more than the limit, without tokenizing, if it is certainly too long.

        Tokenizing megabytes takes a hundred times their memory.
        """
        is_too_long = len(piece) > MAX_TOKEN_CHARACTERS * self._chunk_tokens
        return self._chunk_tokens + 1 if is_too_long else self._count_tokens(piece)

    def with_repeated_headers(self, part: DocumentPart) -> str:
        """The text, with each table that is longer than a passage split into several, each with the table's header."""
        text, is_row = part.text, ROW_LOCATION.search(part.location) is not None
        if not (is_row or " | " in text) or self._count(text) <= self._chunk_tokens:
            return text
        if is_row:
            lines = (self._split_cell(line) for line in text.split("\n"))
            return re.sub(r"\n{3,}", SEPARATOR, "\n".join(lines)).strip()
        return SEPARATOR.join(SEPARATOR.join(self._split_table(each)) for each in text.split(SEPARATOR))

    def _split_cell(self, line: str) -> str:
        """The line of a cell; if it is longer than a passage, as pieces that fit, each with the cell's name."""
        name = CELL_NAME.match(line)
        room = self._chunk_tokens - self._count(SEPARATOR + name.group()) if name else 0
        if name is None or room < self._chunk_tokens // 2 or self._count(line) <= room:
            return line
        pieces = (name.group() + piece for piece in self.split(line[name.end() :], room - 1))
        return f"{SEPARATOR}{SEPARATOR.join(pieces)}{SEPARATOR}"

    def _split_table(self, paragraph: str) -> Iterator[str]:
        """The paragraph; if it is a table with too many tokens, its rows in groups that fit, each below the header."""
        limit, header = self._chunk_tokens, TABLE_HEADER.search(paragraph)
        lines = paragraph.split("\n")
        is_table = sum(" | " in line for line in lines) >= max(TABLE_LINES, len(lines) / 2)
        if header is None or not is_table or self._count(paragraph) <= limit:
            yield paragraph
            return
        group = paragraph[: header.end()]  # a caption stands before the header of the first group only
        tokens, repeated = self._count(SEPARATOR + group), self._count(SEPARATOR + header.group())
        room, has_rows = limit - tokens, False
        if room < limit // 2:  # a header that long is not repeated
            yield paragraph
            return
        for line in paragraph[header.end() :].split("\n"):
            for row in [line] if self._count(f"{line}\n") <= room else self.split(line, room - 1):
                new = self._count(f"{row}\n")
                if has_rows and tokens + new > limit:
                    yield group.rstrip("\n")
                    group, tokens = header.group(), repeated
                group, tokens, has_rows = f"{group}{row}\n", tokens + new, True
        yield group.rstrip("\n")


def _merge_if(pieces: Sequence[str], belongs: Callable[[str, str], bool]) -> list[str]:
    """The pieces, of which those that belong to the one before them are appended to it."""
    found = list[str]()
    for last, piece in pairwise(["", *pieces]):
        if found and belongs(last, piece):
            found[-1] += piece
        elif piece:
            found.append(piece)
    return found


def _is_one_sentence(first: str, second: str) -> bool:
    """Whether a sentence was cut after the dot of a number or an abbreviation."""
    return ENDS_IN_ABBREVIATION.search(first) is not None or (
        first.rstrip().endswith(".") and CONTINUES_SENTENCE.match(second) is not None
    )


def blocks(text: str) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks that are split separately: ending at a paragraph, line or word, else anywhere.

    If a text has no such end near the limit, a passage may end within a word; nothing is lost.
    """
    start = 0
    while len(text) - start > BLOCK_CHARACTERS:
        half, end = start + BLOCK_CHARACTERS // 2, start + BLOCK_CHARACTERS
        borders = (text.rfind(border, half, end) for border in (SEPARATOR, "\n", " "))
        stop = next((border for border in borders if border >= 0), end)
        yield start, stop
        start = stop
    yield start, len(text)


def locate(text: str, pieces: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The index of the first and the last character of each piece in the text, which has them in this order."""
    cursor = 0
    for piece in pieces:
        start = text.find(piece, cursor)
        assert start >= 0, "the splitter changed the text"
        cursor = start + len(piece)
        yield start, cursor - 1


@contextmanager
def _no_nltk_deadline() -> Iterator[None]:
    """Switch off NLTK's deadline of five seconds, which a busy machine exceeds for ordinary text.

    Its pattern takes linear time, and the text is bounded.
    """
    try:
        from nltk import redos  # type: ignore[import-untyped]
    except ImportError:  # an older NLTK, without a deadline
        yield
        return
    deadline, redos.DEFAULT_TIMEOUT = redos.DEFAULT_TIMEOUT, None
    try:
        yield
    finally:
        redos.DEFAULT_TIMEOUT = deadline


def _span(locations: Iterable[str]) -> str:
    """The first and the last of these locations, without empty ones."""
    names = list(dict.fromkeys(filter(None, locations)))
    return f"{names[0]} – {names[-1]}" if len(names) > 1 else "".join(names)
