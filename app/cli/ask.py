"""`ragblend ask`, `chat` and `digest`: questions, answers as they are generated, sources, times, kept conversations."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.app.answering.answer import Answer, AnswerSource
from ragblend.app.cli.common import ADVANCED, AnswerOptions, Cli, PromptOptions
from ragblend.app.home import absolute
from ragblend.app.library.documents import on_one_line
from ragblend.app.words import plural
from ragblend.kvstore.errors import Cancelled, LibraryError, UsageError

if TYPE_CHECKING:
    from ragblend.app.answering.answer_stream import AnswerStream
    from ragblend.app.answering.chats import Chat, ChatMessage, Chats
    from ragblend.app.answering.conversation import Conversations
    from ragblend.app.workspace import Workspace


Collection = Annotated[str | None, typer.Option(help="Which collection to ask.")]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="Write what was loaded and computed when: .json (ui.perfetto.dev) or .png.",
        rich_help_panel=ADVANCED,
    ),
]
MAX_LISTED = 50
MAX_ID_DIGITS = 18  # of a conversation's number; SQLite's largest id has 19


def ask(
    cli: Cli,
    answering: AnswerOptions,
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    collection: Collection = None,
    document: Annotated[
        list[str] | None, typer.Option(help="Search only this document: its id, path or name. Repeatable.")
    ] = None,
    trace: Trace = None,
) -> None:
    """Answer a question from the ingested documents; the answer is printed as it is generated."""
    from ragblend.app.answering.timeline import check_timeline
    from ragblend.app.cli.models import note_larger_models

    if trace is not None:
        check_timeline(trace)
    with cli.open_collection(collection, **vars(answering)) as workspace:
        conversations = load_conversations(cli, workspace)
        if workspace.reranker is not None:
            workspace.reranker.load()
        from ragblend.app.answering.conversation import AskOptions

        name, find = workspace.settings.collection, workspace.library.find
        only = tuple(find(name, each, cli.folder).id for each in document or ())
        answer = _print_answer(cli, conversations.answer(question, AskOptions(documents=only)))
        if trace is not None:  # before the result, because with --json an error is printed instead of it
            _write_trace(cli, answer, trace)
        cli.result(answer.to_json(), sources_text(answer.sources))
        note_larger_models(cli, workspace)
        _finish_background(cli, conversations, answer)


def digest(
    cli: Cli,
    answering: PromptOptions,
    file: Annotated[
        str,
        typer.Argument(
            help="A file; or a document of the library, by its id or name.", parser=os.path.expanduser
        ),
    ],
    collection: Collection = None,
) -> None:
    """Summarise a long document part by part, from its stored passages. An interrupted summary is continued."""
    from ragblend.app.answering.citations import with_marks
    from ragblend.app.cli.bars import progress_bars
    from ragblend.app.library.ingest import ingest_paths

    with cli.open(collection=collection, **vars(answering)) as workspace:
        workspace.check_engine()
        path = absolute(cli.folder / file)
        with progress_bars(cli.terminal) as show:
            if os.path.isfile(path):
                report = ingest_paths(workspace, [path], show, is_cancelled=cli.terminal.check)
                for _, reason in report.failed.values():
                    raise LibraryError(reason)
                if report.interrupted:
                    raise KeyboardInterrupt
                file = str(path)
            document = workspace.library.find(workspace.settings.collection, file, cli.folder)
            conversations = load_conversations(cli, workspace)
            with conversations.digest(document, show=show) as turn, cli.terminal.stopping(turn.stop):
                answer = turn.whole()
        text = with_marks(answer.text, answer.sources)
        cli.result(turn.to_json(), text + "\n" + sources_text(answer.sources))
        _print_notes(cli, answer)


def chat(
    cli: Cli,
    answering: AnswerOptions,
    saved: Annotated[
        str | None,
        typer.Argument(
            metavar="CHAT", help="Continue this conversation: its number or title (default: a new one)."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Title of a new conversation (default: its first question).")
    ] = None,
    go_on: Annotated[bool, typer.Option("--continue", "-c", help="Continue the latest one.")] = False,
    no_save: Annotated[bool, typer.Option("--no-save", help="Do not save the conversation.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="List the conversations, and exit.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete that conversation, and exit.")] = False,
    collection: Collection = None,
) -> None:
    """Ask one question after another in the terminal; an empty line or Ctrl-D ends it.

    The conversation is saved, and the page shows it too. With --json: one object an answer.
    """
    if sum(map(bool, (saved, name, go_on, no_save, show_list))) > 1 or (delete and not saved):
        raise UsageError(
            "CHAT, --name, --continue, --no-save and --list each say which conversation it is: give one of them. "
            "--delete needs a CHAT."
        )
    with cli.open_collection(collection, **vars(answering)) as workspace:
        chats = workspace.workspaces.chats
        if show_list:
            _print_chats(cli, chats)
            return
        earlier = _find_chat(chats, saved) if saved or go_on else None
        if delete and earlier is not None:
            freed = chats.delete(earlier.id)
            cli.result({"deleted": earlier.id, "bytes_freed": freed}, f"deleted {earlier.title}")
            return
        conversations = load_conversations(cli, workspace)
        conversations.warm_up()
        if no_save:
            messages: list[ChatMessage] = []
            while question := _read_question(cli):
                turn = conversations.answer(question, earlier=messages)
                _print_turn(cli, turn, {})
                messages += [turn.question, turn.message]
        else:
            _chat_and_save(cli, conversations, chats, earlier, name or "")


def load_conversations(cli: Cli, workspace: "Workspace") -> "Conversations":
    """Check that questions can be answered, then load the model and the embedder."""
    from ragblend.app.answering.retrieval import check_askable

    check_askable(workspace)
    workspace.check_engine()
    if note := workspace.settings.style.note:
        cli.note(f"{note} Name a larger one with --model.")
    from ragblend.app.answering.conversation import Conversations

    workspace.engine.prefetch(())  # loads the model while the embedder is loaded here
    workspace.embedder.load()
    return Conversations(workspace.workspaces)


def sources_text(sources: Sequence[AnswerSource]) -> str:
    """One line per source; "" if there are none."""
    lines = [f"  [{source.number}] {on_one_line(source.label)} ({source.score:.2f})" for source in sources]
    return "\n".join(["", "Sources:", *lines]) if lines else ""


def timing_line(answer: Answer) -> str:
    report = answer.report
    tokens = report.tokens
    fresh = tokens.fresh + tokens.missing
    not_loaded = f", {tokens.not_loaded} faster to compute than to load" if tokens.not_loaded else ""
    return (
        f"{report.method}: first token after {answer.ttft_ms:.0f} ms; of {tokens.prompt} prompt tokens "
        f"{tokens.reused} reused, {tokens.recomputed} recomputed, {fresh} fresh{not_loaded}; "
        f"{report.timings.tokens_per_s:.1f} tokens/s"
    )


def _chat_and_save(
    cli: Cli, conversations: "Conversations", chats: "Chats", earlier: "Chat | None", title: str
) -> None:
    """Ask and answer until the user ends it; a new conversation is created with its first question."""
    chat_id = None
    if earlier is not None:
        chat_id = earlier.id
        chats.mark_interrupted(chat_id)
        if not cli.json:
            print(chats.export_markdown(chat_id), file=cli.out)
    while question := _read_question(cli):
        chat_id = chats.create(title).id if chat_id is None else chat_id
        _print_turn(cli, conversations.ask(chat_id, question), {"chat": chat_id})
    if chat_id is not None and earlier is None:
        cli.note(
            f"Saved. `ragblend chat {chat_id}` continues it, `ragblend chat --delete {chat_id}` deletes it."
        )


def _print_turn(cli: Cli, turn: "AnswerStream", more: dict[str, Any]) -> None:
    """Print an answer, then its sources: their numbers hold for the whole conversation."""
    answer = _print_answer(cli, turn)
    cli.result(answer.to_json() | more, sources_text(answer.sources))


def _find_chat(chats: "Chats", wanted: str | None) -> "Chat":
    """The conversation with that number or title; None: the latest. Raises LibraryError."""
    if wanted is not None and wanted.isdecimal() and len(wanted) <= MAX_ID_DIGITS:
        return chats.get(int(wanted))
    found, _ = chats.page(limit=1 if wanted is None else -1)
    if wanted is not None:
        found = [chat for chat in found if chat.title.casefold() == wanted.casefold()]
    if len(found) == 1:
        return found[0]
    what = "there is none yet" if wanted is None else f"{len(found) or 'none'} of that title"
    raise LibraryError(
        f"Looking for the conversation{'' if wanted is None else f' {wanted!r}'}: {what}. "
        "`ragblend chat --list` shows them with their numbers."
    )


def _print_chats(cli: Cli, chats: "Chats") -> None:
    listed, total = chats.page(limit=MAX_LISTED)
    lines = [
        f"{one.id:>5}  {one.updated_at[:16].replace('T', ' ')}  {plural(one.messages, 'message'):>12}  {one.title}"
        for one in listed
    ]
    if total > len(lines):
        lines.append(f"... and {total - len(lines):,} older ones")
    value = {"chats": [asdict(one) for one in listed], "total": total}
    cli.result(value, "\n".join(lines) or "No conversations yet. `ragblend chat` begins one.")


def _print_answer(cli: Cli, turn: "AnswerStream") -> Answer:
    """Generate the answer; with --json nothing is printed meanwhile."""
    from ragblend.app.answering.citations import with_marks

    with turn:
        shown = ""
        try:
            with cli.terminal.stopping(turn.stop):
                for _ in turn:
                    marked = with_marks(turn.text, turn.all_sources, finished=False)
                    if not cli.json and marked.startswith(shown):
                        print(marked.removeprefix(shown), end="", file=cli.out, flush=True)
                        shown = marked
        except KeyboardInterrupt:
            if not cli.json:
                print(file=cli.out)
            raise Cancelled("Interrupted: the answer is incomplete.") from None
        if not cli.json:
            print(with_marks(turn.text, turn.all_sources).removeprefix(shown), file=cli.out)
    _print_notes(cli, turn.answer)
    return turn.answer


def _print_notes(cli: Cli, answer: Answer) -> None:
    if answer.notice:
        cli.note(answer.notice)
    if answer.report.tokens.prompt:
        cli.note(timing_line(answer))


def _write_trace(cli: Cli, answer: Answer, path: Path) -> None:
    from ragblend.app.answering.timeline import write_timeline

    if answer.report.trace is None:
        cli.note(f"No trace was written: {answer.report.warning}")
        return
    write_timeline(answer.report.trace, f"{answer.model}, {timing_line(answer)}", path)
    cli.note(f"Trace: {path.absolute()}")


def _finish_background(cli: Cli, conversations: "Conversations", answer: Answer) -> None:
    """Wait for background work that speeds up the next question, unless the host process does it."""
    if cli.host is not None or not answer.report.tokens.prompt:
        return
    todo = [f"encoding {plural(answer.report.misses, 'passage')}"] if answer.report.misses else []
    if conversations.engine.needs_measurement:
        todo.append("measuring the model's speed once")
    if todo:
        work = " and ".join(todo)
        cli.note(f"{work[0].upper()}{work[1:]} for the next question (Ctrl-C skips it) ...")
        with contextlib.suppress(KeyboardInterrupt):
            conversations.engine.finish_background()


def _read_question(cli: Cli) -> str:
    try:
        print("\n> ", end="", file=cli.terminal.err, flush=True)
        return cli.terminal.read_line().strip()
    except KeyboardInterrupt:
        return ""
