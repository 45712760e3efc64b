"""Parts of a document -> passages of at most so many tokens of the model, each with where it stands."""

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
STRETCH_CHARACTERS = 500_000  # cut at once
CountTokens = Callable[[str], int]


def cut_document(
    document: str,
    parts: Sequence[DocumentPart],
    count_tokens: CountTokens,
    chunk_tokens: int,
    overlap_tokens: int = 0,
) -> list[DocumentPassage]:
    """Split on sentences with LlamaIndex's SentenceSplitter, over the borders of pages and sections.

    Filling passages up matters more than stopping at a heading: every passage that is retrieved costs the same
    few fresh tokens around it, however short it is.
    """
    from llama_index.core.node_parser import SentenceSplitter

    splitter = SentenceSplitter(
        chunk_size=chunk_tokens,
        chunk_overlap=overlap_tokens,
        tokenizer=lambda piece: range(
            _count(piece, count_tokens, chunk_tokens)
        ),  # it only asks for the length
        paragraph_separator=SEPARATOR,
    )
    text = SEPARATOR.join(part.text for part in parts)
    starts = [0, *accumulate(len(part.text) + len(SEPARATOR) for part in parts)][: len(parts)]
    pieces, places = list[str](), list[str]()
    for first, last in stretches(text):
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


def stretches(text: str) -> Iterator[tuple[int, int]]:
    """(start, stop) of what is cut by itself, so that memory is bounded: to a paragraph, line or word, else anywhere.

    Of a text without a border near the limit a passage may end in a word; nothing of it is lost.
    """
    start = 0
    while len(text) - start > STRETCH_CHARACTERS:
        half, end = start + STRETCH_CHARACTERS // 2, start + STRETCH_CHARACTERS
        borders = (text.rfind(border, half, end) for border in (SEPARATOR, "\n", " "))
        stop = next((border for border in borders if border >= 0), end)
        yield start, stop
        start = stop
    yield start, len(text)


def locate(text: str, pieces: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Where the first and the last character of each piece stand in the text, which has them in this order."""
    cursor = 0
    for piece in pieces:
        start = text.find(piece, cursor)
        assert start >= 0, "the splitter changed the text"
        yield start, start + len(piece) - 1
        cursor = start + 1  # with overlap a piece begins before the last one's end


@contextmanager
def _no_deadline() -> Iterator[None]:
    """NLTK gives up on finding sentences after five seconds of the clock, which a busy machine takes for honest text.

    Its pattern is linear, and what it is given is bounded.
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
    """More than fit for what is too long whatever it says: tokenizing megabytes takes a hundred times their memory."""
    is_long = len(piece) > MAX_TOKEN_CHARACTERS * chunk_tokens
    return chunk_tokens + 1 if is_long else count_tokens(piece)


def _span(first: str, last: str) -> str:
    if first == last or not last:
        return first
    return f"{first} – {last}" if first else last
