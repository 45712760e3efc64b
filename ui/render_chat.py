"""The conversation as HTML: turns, citations, what did not fit, and the list of conversations. All pure."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from ragblend.ui import icons
from ragblend.ui.render_text import attributes, button, escape, markdown, milliseconds, plural, problem

if TYPE_CHECKING:
    from ragblend.app.chat_records import Chat, ChatPage, FoundChat, Message
    from ragblend.app.citations import Citation, Cited, SourceRow

SUGGESTIONS = 3


def transcript(messages: Sequence["Message"], cited: Sequence["Cited | None"]) -> str:
    """All stored turns; cited: one a message, None for those of users. The last answer can be made anew."""
    last = max((n for n, message in enumerate(messages) if message.role == "assistant"), default=-1)
    turns = [
        user_turn(message) if found is None else answer_turn(message, found, is_last=number == last)
        for number, (message, found) in enumerate(zip(messages, cited, strict=True))
    ]
    return (
        f'<div class="rb-turns" role="log" aria-label="Conversation" aria-live="off">{"".join(turns)}</div>'
    )


def user_turn(message: "Message") -> str:
    edit = button(icons.EDIT, "edit-open", title="Edit and send again", kind="icon", id=message.id)
    text = f'<div class="rb-text"{attributes(data_raw=message.text)}>{_lines(message.text)}</div>'
    return (
        f'<article class="rb-turn user" data-message="{message.id}" aria-label="Your '
        f'question">{text}{edit}</article>'
    )


def pending_turn(question: str) -> str:
    """A question whose answer is on its way."""
    return (
        '<article class="rb-turn user" aria-label="Your question"><div '
        f'class="rb-text">{_lines(question)}</div></article>'
    )


def answer_turn(message: "Message", cited: "Cited", is_last: bool = False) -> str:
    report = message.report
    body = f'<div class="rb-text rb-prose">{answer_text(cited, message.id)}</div>' if message.text else ""
    parts = [body, *_notices(report), unknown_citations(cited)]
    parts.append(source_list(message.sources, message.id))
    parts.append(_answer_actions(message, is_last))
    inner = "".join(parts)
    return (
        f'<article class="rb-turn answer" data-message="{message.id}" aria-label="Answer">{inner}</article>'
    )


def live_turn(question: str, text: str, status: str, notice: str | None = None) -> str:
    """The running turn: what has come so far, and what is being done. Its height only grows."""
    body = f'<div class="rb-text rb-prose">{markdown(text)}<span class="rb-caret" aria-hidden="true"></span></div>'
    said = problem(notice, "info") if notice else ""
    dots = '<span class="rb-dots" aria-hidden="true"><i></i><i></i><i></i></span>' if not text else ""
    state = f'<div class="rb-status" role="status">{dots}{escape(status)}</div>'
    answer = (
        '<article class="rb-turn answer live" aria-label="Answer, being '
        f'written">{said}{body if text else ""}{state}</article>'
    )
    return f'<div class="rb-turns">{pending_turn(question) if question else ""}{answer}</div>'


def answer_text(cited: "Cited", message_id: int) -> str:
    """The answer as safe HTML with its citations as buttons; a number without a source is crossed out."""
    pieces = cited.pieces()
    found = [piece for piece in pieces if not isinstance(piece, str)]
    numbers = iter(range(len(found)))
    marked = [piece if isinstance(piece, str) else next(numbers) for piece in pieces]
    return markdown(marked, lambda number: citation_mark(found[number], message_id))


def citation_mark(citation: "Citation", message_id: int) -> str:
    source = citation.source
    if source is None:
        return (
            f'<span class="rb-cite unknown" title="The model wrote a number that no source has">'
            f"{citation.number}</span>"
        )
    how = "" if citation.by == "model" else "; found by its words, not written by the model"
    label = f"Source {citation.number}: {source.document}, {source.location}{how}"
    values = attributes(
        class_=f"rb-cite {citation.by}",
        data_act="cite",
        data_message=message_id,
        data_number=citation.number,
        title=label,
        aria_label=label,
    )
    return f'<button type="button"{values}>{citation.number}</button>'


def unknown_citations(cited: "Cited") -> str:
    if not cited.unknown:
        return ""
    numbers = ", ".join(f"[{number}]" for number in cited.unknown)
    return problem(f"The model cited {numbers}, which is not among its sources.", "warning")


def source_list(sources: Sequence["SourceRow"], message_id: int) -> str:
    """The passages that the model was given, each a button that opens it."""
    if not sources:
        return ""
    rows = "".join(_source(source, message_id) for source in sources)
    return (
        f'<details class="rb-sources"><summary>{plural(len(sources), "source")}</summary>'
        f"<ol>{rows}</ol></details>"
    )


def _source(source: "SourceRow", message_id: int) -> str:
    earlier = ' <span class="rb-tag">from an earlier question</span>' if source.earlier else ""
    values = attributes(data_act="cite", data_message=message_id, data_number=source.number)
    return (
        f'<li value="{source.number}"><button type="button" class="rb-source"{values}>'
        f'<span class="name">{escape(source.document)}</span> <span class="where">{escape(source.location)}</span>'
        '<span class="score" title="Similarity to the question, at most '
        f'1">{source.score:.2f}</span></button>{earlier}</li>'
    )


def _notices(report: dict) -> list[str]:
    made = []
    if error := report.get("error"):
        made.append(problem(str(error)))
    if notice := report.get("notice"):
        made.append(problem(str(notice), "info"))
    if report.get("stopped"):
        made.append('<div class="rb-status">Stopped.</div>')
    return made


def _answer_actions(message: "Message", is_last: bool) -> str:
    made = [button(icons.COPY, "copy", title="Copy the answer", kind="icon", text=message.text)]
    if is_last:
        made.append(button(icons.AGAIN, "regenerate", title="Answer again", kind="icon"))
    if "ttft_ms" in message.report:
        speed = f"first token {milliseconds(message.report['ttft_ms'])}"
        made.append(
            button(
                f"{icons.GAUGE} {speed}", "hood", title="Look under the hood", kind="chip", message=message.id
            )
        )
    return f'<div class="rb-actions">{"".join(made)}</div>'


def welcome(documents: int, questions: Sequence[str] = ()) -> str:
    """What an empty conversation shows: the way to the first answer."""
    if not documents:
        return (
            '<div class="rb-welcome"><h2>Ask your own documents</h2>'
            "<p>Drop files in, or try the sample documents: nothing leaves this machine.</p>"
            f"<div>{button('Add the sample documents', 'samples', kind='primary')}"
            f"{button('Add your own', 'go-library', kind='plain')}</div></div>"
        )
    chips = "".join(
        button(escape(question), "suggest", kind="suggestion", text=question)
        for question in questions[:SUGGESTIONS]
    )
    return (
        f'<div class="rb-welcome"><h2>What would you like to know?</h2><p>{plural(documents, "document")} '
        f'{"is" if documents == 1 else "are"} ready.</p><div class="rb-suggestions">{chips}</div></div>'
    )


def reading_samples() -> str:
    """What stands there while the sample documents are being read."""
    return (
        '<div class="rb-welcome"><h2>Reading the sample documents</h2><p>A tramway on an invented '
        "island, in eight files. "
        "You can ask as soon as the first is ready; the Library tab shows how far they are.</p>"
        '<span class="rb-dots" aria-hidden="true"><i></i><i></i><i></i></span></div>'
    )


def conversations(page: "ChatPage", current: int | None) -> str:
    """The list of conversations, newest first."""
    if not page.chats:
        return '<p class="rb-empty">No conversations yet.</p>'
    rows = "".join(_conversation(chat, chat.id == current) for chat in page.chats)
    more = page.total - len(page.chats)
    rest = button(f"{more:,} older ones", "more-chats", kind="outlined") if more > 0 else ""
    return f'<ul class="rb-chats">{rows}</ul>{rest}'


def export_links(chat_id: int | None) -> str:
    """Where the open conversation can be had as a file."""
    if chat_id is None:
        return ""
    links = "".join(
        f'<a class="rb-button outlined" href="/ragblend/chats/{chat_id}.{kind}" download>{word}</a>'
        for kind, word in (("md", "Markdown"), ("json", "JSON"))
    )
    return f'<div class="rb-export">Export {links}</div>'


def found_conversations(found: Sequence["FoundChat"], current: int | None) -> str:
    """What a search in the conversations found, with the place."""
    if not found:
        return '<p class="rb-empty">Nothing found.</p>'
    rows = "".join(_conversation(each.chat, each.chat.id == current, each.snippet) for each in found)
    return f'<ul class="rb-chats">{rows}</ul>'


def _conversation(chat: "Chat", is_current: bool, snippet: str = "") -> str:
    place = f'<span class="snippet">{escape(snippet)}</span>' if snippet else ""
    title = escape(chat.title or "New conversation")
    opening = attributes(
        class_="rb-chat-open",
        data_act="open-chat",
        data_id=chat.id,
        aria_current="true" if is_current else None,
    )
    tools = "".join(
        (
            button(icons.EDIT, "rename-open", title="Rename", kind="icon", id=chat.id, text=chat.title),
            button(icons.BIN, "delete-chat", title="Delete", kind="icon", id=chat.id, confirm="Delete?"),
        )
    )
    return (
        f'<li{attributes(class_="rb-chat" + (" current" if is_current else ""))}><button type="button"{opening}>'
        f'<span class="title">{title}</span>{place}<span class="when">{day(chat.updated_at)}</span></button>'
        f'<span class="tools">{tools}</span></li>'
    )


def day(when: str) -> str:
    """An ISO time as a short day: 5 Mar, or 5 Mar 2024 for another year than this."""
    try:
        moment = datetime.fromisoformat(when)
    except ValueError:
        return ""
    year = "" if moment.year == datetime.now(moment.tzinfo).year else f" {moment.year}"
    return f"{moment.day} {moment:%b}{year}"


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")
