"""`ragblend ask` and `ragblend chat`: questions, answers as they come, sources, times; conversations that are kept."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.app.answering.answer import Answer, Source
from ragblend.app.answering.citations import with_marks
from ragblend.app.cli.common import AnswerOptions, Cli, plural
from ragblend.app.home import absolute
from ragblend.kvstore.errors import Cancelled, LibraryError, UsageError

if TYPE_CHECKING:
    from ragblend.app.answering.chats import Chat, Chats, Message
    from ragblend.app.answering.conversation import Conversations
    from ragblend.app.answering.turn import Turn
    from ragblend.app.workspace import Workspace


Collection = Annotated[str | None, typer.Option(help="Which collection to ask.")]
Trace = Annotated[
    Path | None,
    typer.Option(help="Write what was loaded and computed when: .json (ui.perfetto.dev) or .png."),
]
LISTED = 50
LONG_NUMBER = 19  # digits; a conversation's number has fewer, as SQLite's have


def ask(
    cli: Cli,
    answering: AnswerOptions,
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    collection: Collection = None,
    trace: Trace = None,
) -> None:
    """Answer a question from the ingested documents; the answer is printed as it comes."""
    from ragblend.app.answering.timeline import check_timeline
    from ragblend.app.cli.models import name_better_ones

    if trace is not None:
        check_timeline(trace)
    with cli.open_collection(collection, **vars(answering)) as workspace:
        talks = ready(cli, workspace)
        from ragblend.app.answering.conversation import ANY, AskOptions

        answer = _answered(cli, talks.answer(question, AskOptions(least_score=ANY)))
        cli.result(answer.to_json(), sources_text(answer.sources))
        if trace is not None:
            _write_trace(cli, answer, trace)
        name_better_ones(cli, workspace)
        _keep_missing(cli, talks, answer)


def digest(
    cli: Cli,
    answering: AnswerOptions,
    file: Annotated[
        str,
        typer.Argument(
            help="A file; or a document of the library, by its id or name.", parser=os.path.expanduser
        ),
    ],
    collection: Collection = None,
) -> None:
    """Summarise a long document, part by part, from its stored passages; what was stopped goes on where it was."""
    from ragblend.app.cli.bars import progress_bars
    from ragblend.app.library.ingest import take_in

    with cli.open(collection=collection, **vars(answering)) as workspace:
        workspace.check_engine()
        name, library = workspace.settings.collection, workspace.library
        path = absolute(cli.folder / file)
        with progress_bars(cli.terminal) as show:
            if os.path.isfile(path):
                report = take_in(workspace, [path], show, leave=cli.terminal.check)
                for _, reason in report.failed.values():
                    raise LibraryError(reason)
                if report.interrupted:
                    raise KeyboardInterrupt
            document = library.find(name, str(path) if os.path.isfile(path) else file, cli.folder)
            talks = ready(cli, workspace)
            with talks.digest(document, show=show) as turn, cli.terminal.stopping(turn.stop):
                answer = turn.whole()
        cli.result(turn.to_json(), answer.text + "\n" + sources_text(answer.sources))
        for line in (answer.notice, timing_line(answer)):
            if line:
                cli.note(line)


def chat(
    cli: Cli,
    answering: AnswerOptions,
    saved: Annotated[
        str | None,
        typer.Argument(metavar="CHAT", help="Go on with this conversation: its number or title [a new one]."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Title of a new conversation [its first question].")
    ] = None,
    go_on: Annotated[bool, typer.Option("--continue", "-c", help="Go on with the latest one.")] = False,
    no_save: Annotated[bool, typer.Option("--no-save", help="Keep nothing of what is said.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="List the conversations, and end.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete that conversation, and end.")] = False,
    collection: Collection = None,
) -> None:
    """Ask one question after another in the terminal; an empty line or Ctrl-D ends it.

    What is said is kept, here and on the page alike. With --json: one object an answer.
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
        going_on = _found(chats, saved) if saved or go_on else None
        if delete and going_on is not None:
            freed = chats.delete(going_on.id)
            cli.result({"deleted": going_on.id, "bytes_freed": freed}, f"deleted {going_on.title}")
            return
        talks = ready(cli, workspace)
        if no_save:
            said: list[Message] = []
            while question := _read_question(cli):
                turn = talks.answer(question, earlier=said)
                _show(cli, _answered(cli, turn), turn.message, {})
                said += [turn.question, turn.message]
        else:
            _talk(cli, talks, chats, going_on, name or "")


def ready(cli: Cli, workspace: "Workspace") -> "Conversations":
    """What answers questions, loaded; what cannot be is refused before anything is."""
    from ragblend.app.answering.retrieval import check_askable

    check_askable(workspace)
    workspace.check_engine()
    if note := workspace.settings.manner.note:
        cli.note(f"{note} Name a larger one with --model.")
    from ragblend.app.answering.conversation import Conversations

    talks = Conversations(workspace.workspaces)
    talks.warm_up()
    return talks


def sources_text(sources: Sequence[Source]) -> str:
    lines = (f"  [{source.number}] {source.label} ({source.score:.2f})" for source in sources)
    return "\n".join(["", "Sources:", *lines])


def timing_line(answer: Answer) -> str:
    report = answer.report
    tokens = report.tokens
    return (
        f"{report.method}: first token after {answer.ttft_ms:.0f} ms; of {tokens.prompt} prompt tokens "
        f"{tokens.reused} reused, {tokens.recomputed} recomputed, {tokens.fresh + tokens.missing} fresh; "
        f"{report.timings.tokens_per_s:.1f} tokens/s"
    )


def _talk(cli: Cli, talks: "Conversations", chats: "Chats", going_on: "Chat | None", title: str) -> None:
    """Question by question; a new conversation begins with its first one."""
    chat_id = None
    if going_on is not None:
        chat_id = going_on.id
        chats.end_unfinished(chat_id)
        if not cli.json:
            print(chats.export_markdown(chat_id), file=cli.out)
    while question := _read_question(cli):
        chat_id = chats.create(title).id if chat_id is None else chat_id
        turn = talks.ask(chat_id, question)
        _show(cli, _answered(cli, turn), turn.message, {"chat": chat_id})
    if chat_id is not None and going_on is None:
        cli.note(
            f"Kept. `ragblend chat {chat_id}` goes on with it, `ragblend chat --delete {chat_id}` deletes it."
        )


def _show(cli: Cli, answer: Answer, message: "Message", more: dict[str, Any]) -> None:
    """Sources keep their numbers for the whole conversation, and an answer may cite those of earlier questions."""
    numbers = {"numbers": [source.number for source in answer.sources]}
    cli.result(answer.to_json() | numbers | more, sources_text(message.sources))


def _found(chats: "Chats", wanted: str | None) -> "Chat":
    """The conversation with that number or title; None: the latest. Raises LibraryError."""
    if wanted is not None and wanted.isdecimal() and len(wanted) < LONG_NUMBER:
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
    listed, total = chats.page(limit=LISTED)
    lines = [
        f"{one.id:>5}  {one.updated_at[:16].replace('T', ' ')}  {plural(one.messages, 'message'):>12}  {one.title}"
        for one in listed
    ]
    if total > len(lines):
        lines.append(f"... and {total - len(lines):,} older ones")
    value = {"chats": [asdict(one) for one in listed], "total": total}
    cli.result(value, "\n".join(lines) or "No conversations yet. `ragblend chat` begins one.")


def _answered(cli: Cli, turn: "Turn") -> Answer:
    """The answer; printed piece by piece unless it is for a program."""
    with turn:
        shown = ""
        try:
            with cli.terminal.stopping(turn.stop):
                for _ in turn:
                    marked = with_marks(turn.text, turn.present, finished=False)
                    if not cli.json and marked.startswith(shown):
                        print(marked.removeprefix(shown), end="", file=cli.out, flush=True)
                        shown = marked
        except KeyboardInterrupt:
            if not cli.json:
                print(file=cli.out)
            raise Cancelled("Interrupted: the answer ends here, before its end.") from None
        if not cli.json:
            print(with_marks(turn.text, turn.present).removeprefix(shown), file=cli.out)
    answer = turn.answer
    for line in (answer.notice, timing_line(answer)):
        if line:
            cli.note(line)
    return answer


def _write_trace(cli: Cli, answer: Answer, path: Path) -> None:
    from ragblend.app.answering.timeline import write_timeline

    if answer.report.trace is None:
        cli.note(f"No trace was written: {answer.report.warning}")
        return
    write_timeline(answer.report.trace, f"{answer.model}, {timing_line(answer)}", path)
    cli.note(f"What was done when: {path.absolute()}")


def _keep_missing(cli: Cli, talks: "Conversations", answer: Answer) -> None:
    """What is done in the background for the next question: a process that ends at once would lose it."""
    if cli.shared is not None:
        return  # it goes on in the process that has the home open
    todo = [f"Encoding {answer.report.misses} passages"] if answer.report.misses else []
    if talks.engine.measures_answers:
        todo.append("Measuring once how answers are computed fastest")
    if todo:
        cli.note(f"{' and '.join(todo)} for the next question (Ctrl-C skips it) ...")
        with contextlib.suppress(KeyboardInterrupt):
            talks.engine.finish_background()


def _read_question(cli: Cli) -> str:
    try:
        print("\n> ", end="", file=cli.terminal.err, flush=True)
        return cli.terminal.read_line().strip()
    except KeyboardInterrupt:
        return ""
