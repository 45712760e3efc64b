"""Cuts a document's parts into passages of at most N tokens of the model, each with its location."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from ragblend.app.library.documents import DocumentPassage, node_id
from ragblend.app.library.readers import DocumentPart
from ragblend.engine.prompts.tokenizing import MAX_TOKEN_CHARACTERS
from ragblend.kvstore.errors import OversizedDocumentError

SEPARATOR = "\n\n"
MAX_PASSAGES = 60_000  # of one document
BLOCK_CHARACTERS = 500_000  # split at once, which bounds memory
CountTokens = Callable[[str], int]


def cut_document(
    document: str,
    parts: Sequence[DocumentPart],
    count_tokens: CountTokens,
    chunk_tokens: int,
    overlap_tokens: int = 0,
) -> list[DocumentPassage]:
    """Split on sentences with LlamaIndex's SentenceSplitter, across pages and sections.

    Full passages matter more than stopping at headings: every retrieved passage costs the same few fresh tokens
    around it, however short it is.
    """
    from llama_index.core.node_parser import SentenceSplitter

    splitter = SentenceSplitter(
        chunk_size=chunk_tokens,
        chunk_overlap=overlap_tokens,
        tokenizer=lambda piece: range(_count(piece, count_tokens, chunk_tokens)),  # only its length is used
        paragraph_separator=SEPARATOR,
    )
    text = SEPARATOR.join(part.text for part in parts)
    starts = [0, *accumulate(len(part.text) + len(SEPARATOR) for part in parts)][: len(parts)]
    pieces, places = list[str](), list[str]()
    for first, last in blocks(text):
        with _no_deadline():
            found = splitter.split_text(text[first:last])
        places += [
            _span(*(parts[bisect_right(starts, first + at) - 1].location for at in ends))
            for ends in locate(text[first:last], found)
        ]
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


def locate(text: str, pieces: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The index of the first and the last character of each piece in the text, which has them in this order."""
    cursor = 0
    for piece in pieces:
        start = text.find(piece, cursor)
        assert start >= 0, "the splitter changed the text"
        yield start, start + len(piece) - 1
        cursor = start + 1  # with overlap a piece begins before the last one's end


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


def _span(first: str, last: str) -> str:
    if first == last or not last:
        return first
    return f"{first} – {last}" if first else last
