"""Conversations: prompts grow at their end, numbers stay, and answers are stored whatever happens."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from app_fakes import Killed
from doubles import raising

from ragblend.app.answering import retrieval
from ragblend.app.answering.breakdown import has_breakdown
from ragblend.app.answering.chats import DELETED_TEXT, INTERRUPTED, ChatMessage
from ragblend.app.answering.conversation import AskOptions, Conversations
from ragblend.app.answering.retrieval import nearest
from ragblend.app.database import now
from ragblend.app.library.ingest import ingest
from ragblend.app.library.removal import remove_document
from ragblend.app.library.word_search import missing_codes
from ragblend.app.services import AppServices
from ragblend.kvstore.errors import (
    Cancelled,
    LibraryError,
    PromptTooLongError,
    RagBlendError,
    SettingsError,
    UsageError,
)

SKY, BOATS = "What colour has the sky over the harbour?", "Whom does the red boat belong to?"


@pytest.fixture
def chats(workspaces):
    return workspaces.chats


@pytest.fixture
def talks(workspaces, documents):
    ingest(workspaces.first, [documents])
    return Conversations(workspaces)


@pytest.fixture
def chat(chats):
    return chats.create().id


def asked(talks, chat, question, **options):
    """The stored answer."""
    options = {"top_k": 2} | options
    with talks.ask(chat, question, AskOptions(**options)) as turn:
        assert "".join(turn) == turn.text
        return turn.message


def test_ratio_of_the_settings_applies_to_its_method_only(talks):
    base = talks.settings.changed({"method": "probe", "ratio": 0.05})
    assert AskOptions().settings(base).ratio == AskOptions(method="probe").settings(base).ratio == 0.05
    assert AskOptions(method="cacheblend").settings(base).ratio == type(base).ratio
    assert AskOptions(method="cacheblend", ratio=0.3).settings(base).ratio == 0.3


def texts(prompt):
    return [segment.text for segment in prompt.segments]


def test_answer_is_stored_with_sources_and_report(talks, chats, chat, engine):
    with talks.ask(chat, f"  {SKY} ", AskOptions(top_k=2)) as turn:
        assert [message.role for message in chats.messages(chat)] == ["user"], "a kill now keeps the question"
        assert [source.number for source in turn.sources] == [1, 2] and turn.question.text == SKY
        assert list(turn) == ["It ", "is ", "blue."]
    question, answer = chats.messages(chat)
    assert (question.text, answer.text) == (SKY, "It is blue.") and answer == turn.message
    assert answer.sources[0].document == "sky.txt" and answer.sources[0].score > answer.sources[1].score
    hood = answer.report
    assert hood["retrieve_ms"] > 0 and hood["ttft_ms"] == pytest.approx(10 + hood["retrieve_ms"], abs=0.02)
    assert [s["number"] for s in hood["segments"] if s["number"]] == [2, 1], "the best passage stands last"
    assert json.loads(json.dumps(answer.report))["first_id"] == 0
    assert all(chunk.text and chunk.node_id for chunk in engine.requests[0][0].chunks)


def test_names_of_no_passage_are_told_and_marked_in_exports(talks, chats, chat, engine):
    engine.reply = ("The sky over ", "the harbour of Utrecht ", "is blue in the morning.")
    answer = asked(talks, chat, SKY)
    assert answer.report["unsupported_figures"] == ["Utrecht"]
    assert "Neither in the passages nor in the question: Utrecht." in answer.report["notice"]
    assert "harbour of Utrecht [?] is blue" in chats.export_markdown(chat)


def test_the_month_of_a_given_date_is_no_unknown_name(talks, chat, engine):
    """A passage with 17.08.2024 lacked the name August."""
    engine.reply = ("Yes, on 17 August 2024 the sky over the harbour ", "is blue, but not in October.")
    question = "What colour had the sky on 17.08.2024 over the harbour?"
    assert asked(talks, chat, question).report["unsupported_figures"] == ["October"]


def test_the_word_after_a_given_date_is_no_unknown_name(talks, chat, engine):
    """With the date its full stop was left out, so `Everybody` was no longer the first word of a sentence."""
    engine.reply = ("The sky over the harbour was blue on 5 May. ", "Everybody saw how blue the sky was.")
    assert asked(talks, chat, "Was the sky blue on 05.05.2024?").report["unsupported_figures"] == []


def test_the_letters_of_a_given_code_are_no_unknown_name(talks, chat, engine):
    engine.reply = ("Yes, the sky over the harbour that CP 40 and ", "XY 40 show is blue in the morning.")
    question = "What colour has the sky over the harbour on the CP-40?"
    assert asked(talks, chat, question).report["unsupported_figures"] == ["XY"]


def test_a_figure_that_a_passage_has_in_words_is_no_doubt(talks, chat, engine):
    """`3 boats` had a citation, and the mark of a figure that is in no passage."""
    engine.reply, engine.unsupported = ("3 boats lie at the quay, ", "not 7."), ("3", "7")
    assert asked(talks, chat, "Which boats lie at the quay?").report["unsupported_figures"] == ["7"]
    # The instruction asks for "one or two short sentences", which supports no figure.
    engine.reply, engine.unsupported = ("2 boats lie at the quay",), ("2",)
    assert asked(talks, chat, "Which boats lie at the quay?").report["unsupported_figures"] == ["2"]


def test_a_code_that_no_passage_has_is_told(talks):
    """Asked for E77, a small model answered with the meaning of E12, and nothing said that there is no E77."""
    assert (
        talks.prepare(f"{SKY} What does E77 say?", AskOptions(top_k=2)).notice
        == "No passage that was found has E77."
    )
    assert talks.prepare(SKY, AskOptions(top_k=2)).notice is None


@pytest.mark.parametrize(
    ("question", "missing"),
    [
        ("What does E77 mean?", ["E77"]),
        ("What does e23 or E23 mean?", []),
        ("When is invoice 2024-0817 due, and 2024-0317?", ["2024-0317"]),
        ("Who wrote “the old mill”?", []),  # of words the index knows other forms
        ("What is KX-2216?", ["KX-2216"]),
        ("What are KX 22161, KX22161 and E 23?", []),
        ("What are E 24 and KX 2216?", ["E 24", "KX 2216"]),
        ("What happened in 2024?", []),
        ("Which train at 9 AM 15 May costs SEK 450?", []),
    ],
)
def test_codes_of_the_question_are_looked_for_as_they_are_indexed(question, missing):
    assert missing_codes(question, ["E23 | foam", "Invoice 2024/0817 of KX-22161"]) == missing


def test_follow_ups_extend_the_same_context(talks, chat, engine):
    first = asked(talks, chat, SKY, top_k=1)
    second = asked(talks, chat, BOATS)
    before, after = (texts(request[0]) for request in engine.requests)
    assert after[: len(before)] == before, "what was read need not be read again"
    assert after[len(before) : len(before) + 2] == ["<assistant>", "It is blue."]
    assert after[-1] == " " + BOATS
    chunks = [chunk.node_id for chunk in engine.requests[1][0].chunks]
    assert len(chunks) == len(set(chunks)), "no passage twice"
    assert engine.sessions[0] is engine.sessions[1] is not None
    numbers = {s.node_id: s.number for s in first.sources}
    assert all(numbers.get(s.node_id, s.number) == s.number for s in second.sources)
    new = [source.number for source in second.sources if not source.earlier]
    assert new == [2] and [s.number for s in second.sources if s.earlier] == [1]


def test_follow_up_is_searched_with_the_question_before_it(talks, chat):
    asked(talks, chat, "Tell me of the red boat at the quay", top_k=1)
    answer = asked(talks, chat, "And when?", top_k=2)
    assert "boats.txt" in [source.document for source in answer.sources]


def test_incomplete_questions_in_a_row_are_searched_with_the_last_complete_one(
    talks, workspaces, chat, tmp_path
):
    workspaces.create("mill")
    for year in ("2021", "2022", "2023"):
        (tmp_path / f"{year}.txt").write_text(
            f"In {year} the revenue of the mill was {year[-1]} million crowns."
        )
        (tmp_path / f"festival-{year}.txt").write_text(f"A festival in {year}.")
    ingest(workspaces.of("mill"), [*tmp_path.glob("*.txt")])
    asked(talks, chat, "What was the revenue of the mill in 2022?", collections=("mill",))
    for question, first in (("And 2023?", "2023.txt"), ("2021?", "2021.txt")):
        assert asked(talks, chat, question, collections=("mill",)).sources[0].document == first


def test_passages_of_questions_asked_at_once_have_distinct_numbers_afterwards(
    talks, chat, embedder, monkeypatch
):
    """Both answers had a source 1; the next one listed both, and a click on the second opened the first."""
    embed, both_search = embedder.embed_question, threading.Barrier(2)
    with monkeypatch.context() as patched, ThreadPoolExecutor() as pool:
        patched.setattr(
            embedder, "embed_question", lambda *given: [both_search.wait(timeout=60), embed(*given)][1]
        )
        answers = [*pool.map(lambda question: asked(talks, chat, question, top_k=1), (SKY, BOATS))]
    assert [[source.number for source in answer.sources] for answer in answers] == [[1], [1]]
    assert answers[0].sources[0].node_id != answers[1].sources[0].node_id
    first, second = (asked(talks, chat, f"{SKY} {BOATS}", top_k=3).sources for _ in range(2))
    assert [source.node_id for source in first] == [source.node_id for source in second]
    assert len({source.number for source in first}) == len(first) == 3
    assert [source.number for source in first] == [source.number for source in second]


def test_several_collections_each_with_its_kv(talks, workspaces, chat, engine, tmp_path):
    workspaces.create("trains")
    (tmp_path / "train.txt").write_text("The train to the harbour is green and leaves at noon.")
    ingest(workspaces.of("trains"), [tmp_path / "train.txt"])
    where, question = ("default", "trains"), "Which colour has the train to the harbour?"
    answer = asked(talks, chat, question, collections=where, top_k=3)
    assert {s.collection for s in answer.sources} == {"default", "trains"}
    assert answer.sources[0].document == "train.txt"
    assert {c.collection for c in engine.requests[0][0].chunks} == {"default", "trains"}
    assert [s.score for s in answer.sources] == sorted((s.score for s in answer.sources), reverse=True)


@pytest.mark.parametrize("mode", ["documents", "chat"])
@pytest.mark.parametrize(
    ("collection", "said"),
    [
        ("empty", "Nothing has been ingested in 'empty' yet."),
        ("default", "Nothing about this was found in 'default'."),
    ],
)
def test_where_nothing_is_found_the_model_is_asked_in_chats_alone(
    talks, workspaces, chat, engine, mode, collection, said, unrelated
):
    workspaces.create("empty")
    answer = asked(talks, chat, "Photosynthesis?", collections=(collection,), mode=mode)
    assert answer.sources == ()
    if mode == "documents":
        assert answer.text == said and answer.report["found"] is False and engine.requests == []
        assert "notice" not in answer.report, "said once"
    else:
        assert answer.text == "It is blue." and answer.report["notice"].startswith(said)
        assert answer.report["notice"].endswith("The answer is the model's own.") == (collection != "empty")
        assert texts(engine.requests[0][0])[-1] == "Photosynthesis?" and not engine.requests[0][0].chunks
    asked(talks, chat, SKY, mode="chat")
    assert engine.requests[-1][0].chunks and "passages" in texts(engine.requests[-1][0])[1]
    users = texts(engine.requests[-1][0]).count("<user>")
    assert users == (1 if mode == "documents" else 2), "what found nothing is no context"


def test_stop_keeps_the_text_so_far(talks, chats, chat, engine):
    turn = talks.ask(chat, SKY)
    engine.on_piece = lambda number: None
    pieces = []
    for piece in turn:
        pieces.append(piece)
        turn.stop()
    assert pieces == ["It "] and engine.stream_made.stopped
    assert turn.message.report["stopped"] is True and chats.messages(chat)[1].text == "It "
    turn.close()
    assert len(chats.messages(chat)) == 2
    assert not has_breakdown(turn.message.report)


def test_error_is_stored_and_raised_and_the_conversation_continues(talks, chats, chat, engine):
    def fail(number):
        if number == 1:
            raise RagBlendError("the disk went away; plug it in again")

    engine.on_piece = fail
    with pytest.raises(RagBlendError, match="went away"):
        asked(talks, chat, SKY)
    failed = chats.messages(chat)[1]
    assert failed.report["error"].startswith("the disk went away") and failed.text == "It "
    engine.on_piece = lambda number: None
    asked(talks, chat, BOATS)
    assert SKY not in " ".join(texts(engine.requests[-1][0])), "an answer that failed is no context"


def begun(talks, chat, question, top_k=2):
    """An answer that has given its first piece, and the remaining pieces."""
    turn = talks.ask(chat, question, AskOptions(top_k=top_k))
    pieces = iter(turn)
    next(pieces)
    return turn, pieces


def test_an_answer_that_cannot_be_stored_is_shown_and_says_so(talks, chats, chat):
    turn, pieces = begun(talks, chat, SKY)
    chats.delete(chat)
    assert list(pieces) == ["is ", "blue."]
    assert turn.message.id == -1 and turn.message.text == "It is blue."
    assert "was not saved" in turn.message.report["notice"]


def test_kill_during_an_answer_keeps_the_text_shown(talks, chats, home, chat, engine):
    """It used to leave the question without a word."""
    turn, pieces = begun(talks, chat, SKY)
    shown = turn.text
    with AppServices.open(home) as desk:  # another connection sees what is on the disk
        assert [message.role for message in desk.chats.messages(chat)] == ["user"], "it may still be written"
        desk.start()
        assert desk.chats.mark_interrupted() == 0
    left = chats.messages(chat)[1]
    assert (left.text, left.report["interrupted"]) == (shown, True)
    assert [source.number for source in left.sources] == [1, 2]
    assert INTERRUPTED in chats.export_markdown(chat)
    asked(talks, chat, BOATS)
    assert shown in texts(engine.requests[-1][0]), "what the reader has seen is before the model"
    with talks.regenerate(chat) as turn:
        list(turn)
    assert [m.text for m in chats.messages(chat)][1:] == [shown, BOATS, "It is blue."]
    pieces.close()


@pytest.mark.parametrize(
    "when", ["while it is cited", "after an earlier turn", "while it is measured", "before"]
)
def test_a_deleted_document_is_neither_stored_again_nor_read_again(
    talks, workspaces, chats, chat, engine, when
):
    def delete():
        with workspaces.writing():
            remove_document(workspaces.first, workspaces.library.find("default", "sky.txt"))

    sky = workspaces.library.find("default", "sky.txt")
    (gone,) = workspaces.library.passages_of(sky.id)
    engine.reply = ("As said ", "[1].")
    if when == "while it is cited":
        turn, pieces = begun(talks, chat, SKY)
        delete()
        list(pieces)
        assert [source.text == DELETED_TEXT for source in turn.message.sources] == [True, False]
    else:
        answer = asked(talks, chat, SKY, top_k=1)
    if when == "after an earlier turn":
        turn, pieces = begun(talks, chat, BOATS, top_k=1)
        assert gone.text in str(turn.all_sources)
        delete()
        list(pieces)
        assert [s.number for s in turn.message.sources if s.text == DELETED_TEXT] == [1]
    if when == "while it is measured":
        engine.on_prefill = delete
        assert talks.measure_full(answer.id)["full_prefill_ms"] == 1234.5
    if when == "before":
        delete()
    assert gone.text[:40] not in json.dumps(chats.export_json(chat))
    asked(talks, chat, BOATS, top_k=1)
    assert not any("sky" in chunk.text for chunk in engine.requests[-1][0].chunks)


def test_answers_of_two_questions_at_once_belong_to_their_own_question(talks, chats, chat, engine):
    """The answer that came first became the last question's, and stayed it in all further prompts."""
    tokenize, meanwhile = engine.tokenize, []

    def ask_another(prompt):
        engine.tokenize, engine.reply = tokenize, ("Jan's.",)
        meanwhile.append(asked(talks, chat, BOATS))
        engine.reply = ("Blue.",)
        return tokenize(prompt)

    engine.tokenize = ask_another
    answer = asked(talks, chat, SKY)
    assert [m.text for m in chats.messages(chat)] == [SKY, BOATS, "Jan's.", "Blue."]
    for each, (prompt, *_) in zip([*meanwhile, answer], engine.requests, strict=True):
        talks.measure_full(each.id)
        assert texts(engine.prefilled[-1][0]) == texts(prompt)
    asked(talks, chat, "And then?")
    prompt = texts(engine.requests[-1][0])
    assert [prompt[prompt.index(text) - 2].strip() for text in ("Blue.", "Jan's.")] == [SKY, BOATS]


def test_answer_to_a_replaced_question_is_not_stored(talks, chats, chat, engine):
    """Edited while the older question was still being searched for."""
    asked(talks, chat, SKY)
    first, tokenize = chats.messages(chat)[0], engine.tokenize

    def edited_meanwhile(prompt):
        engine.tokenize = tokenize
        with talks.edit(first.id, "How hot are ovens?", AskOptions(top_k=2)) as turn:
            list(turn)
        return tokenize(prompt)

    engine.tokenize = edited_meanwhile
    older = talks.ask(chat, BOATS, AskOptions(top_k=2))
    list(older)
    assert "was not saved" in older.message.report["notice"]
    assert [m.text for m in chats.messages(chat)] == ["How hot are ovens?", "It is blue."]


def test_leaving_out_many_turns_tokenizes_few_prompts(talks, engine, monkeypatch):
    earlier = [
        ChatMessage(0, 0, role, f"{role} says {number} in a few words", now())
        for number in range(2000)
        for role in ("user", "assistant")
    ]
    tokenized, tokenize = [], engine.tokenize
    monkeypatch.setattr(engine, "tokenize", lambda prompt: tokenized.append(1) or tokenize(prompt))
    talks.answer(SKY, AskOptions(top_k=2), earlier)
    assert len(tokenized) < 16
    room = engine.context_window - talks.settings.answer_tokens
    assert 0.5 * room < len(engine.requests[-1][0].token_ids) <= 0.6 * room
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        talks.answer(SKY, AskOptions(top_k=2, cancel=cancel), earlier)


def test_turns_that_are_too_long_to_be_tokenized_are_left_out(talks, engine):
    engine.most_characters = 1000
    earlier = [ChatMessage(0, 0, role, f"{role} {'x' * 500}", now()) for role in ("user", "assistant") * 2]
    answer = talks.answer(SKY, AskOptions(top_k=2), earlier)
    assert "the first 2 of 2 earlier questions" in answer.notice and len(engine.requests[-1][0].chunks) == 2
    with pytest.raises(PromptTooLongError):
        talks.prepare("x" * 1001, AskOptions(top_k=2))


def test_editing_replaces_the_branch(talks, chats, chat, engine):
    asked(talks, chat, SKY)
    asked(talks, chat, BOATS)
    first = chats.messages(chat)[0]
    with talks.edit(first.id, "How hot are ovens?", AskOptions(top_k=2)) as turn:
        list(turn)
    assert [m.text for m in chats.messages(chat)] == ["How hot are ovens?", "It is blue."]
    with pytest.raises(UsageError, match="only your own questions"):
        talks.edit(chats.messages(chat)[1].id, "x")
    with pytest.raises(SettingsError):
        talks.edit(chats.messages(chat)[0].id, "x", AskOptions(top_k=-1))
    assert len(chats.messages(chat)) == 2, "nothing is removed before the new question can be asked"


def test_regenerating_asks_the_same_again(talks, chats, chat, engine):
    with pytest.raises(UsageError, match="has no question yet"):
        talks.regenerate(chat)
    asked(talks, chat, SKY)
    with talks.regenerate(chat, AskOptions(top_k=2, temperature=0.7)) as turn:
        list(turn)
    assert [m.text for m in chats.messages(chat)] == [SKY, "It is blue."]
    assert (
        texts(engine.requests[0][0]) == texts(engine.requests[1][0])
        and engine.requests[1][-1].temperature == 0.7
    )


@pytest.mark.parametrize(
    "again", [lambda talks, asked: talks.edit(asked.id, SKY), None], ids=["edit", "again"]
)
def test_a_kill_keeps_the_question_that_is_asked_again(talks, chats, chat, monkeypatch, again):
    asked(talks, chat, SKY)
    monkeypatch.setattr(chats, "add", raising(Killed()))
    with pytest.raises(Killed):
        again(talks, chats.messages(chat)[0]) if again else talks.regenerate(chat)
    assert [m.text for m in chats.messages(chat)] == [SKY]


def test_oldest_turns_are_left_out_first_and_stay_out(talks, chat, engine):
    questions = [f"Question number {n} of the sky over the harbour?" for n in range(3)]
    for question in questions:
        asked(talks, chat, question)
    whole = len(engine.requests[-1][0].token_ids)
    engine.context_window = whole + 32  # the next question does not fit behind all of them
    answer = asked(talks, chat, BOATS)
    prompt = engine.requests[-1][0]
    assert len(prompt.token_ids) <= whole and questions[0] not in " ".join(texts(prompt))
    assert "Left out: the first" in answer.report["notice"]
    assert {s.node_id for s in answer.sources} <= {c.node_id for c in prompt.chunks}, "it came again"
    engine.context_window = 4096
    asked(talks, chat, SKY)
    assert questions[0] not in " ".join(texts(engine.requests[-1][0]))
    assert texts(engine.requests[-1][0])[: len(prompt.segments)] == texts(prompt)


def test_passages_that_do_not_fit_are_left_out_with_a_notice(talks, chats, chat, engine):
    asked(talks, chat, SKY, top_k=3)
    engine.context_window = 32 + len(engine.requests[0][0].token_ids) - 1
    answer = asked(talks, chats.create().id, SKY, top_k=3)
    assert "1 lowest-ranked of 3 passages" in answer.report["notice"]
    assert [s.number for s in answer.sources] == [1, 2]
    assert len(engine.requests[1][0].chunks) == 2
    engine.context_window = 40
    with pytest.raises(PromptTooLongError, match="Shorten the question"):
        asked(talks, chat, "word " * 50)


def test_full_prefill_is_measured_on_the_same_prompt(talks, chats, chat, engine):
    asked(talks, chat, SKY)
    answer = asked(talks, chat, BOATS)
    asked(talks, chat, "And then?")
    report = talks.measure_full(answer.id)
    prompt, method = engine.prefilled[0]
    assert method == "full" and texts(prompt) == texts(engine.requests[1][0])
    assert report["full_prefill_ms"] == 1234.5 and report["full_prefill_is"] == "measured"
    assert chats.message(answer.id).report == report
    with pytest.raises(UsageError, match="not a finished answer"):
        talks.measure_full(chats.messages(chat)[0].id)


def test_full_prefill_is_measured_only_with_the_answers_model_and_prompt(
    talks, workspaces, chat, engine, monkeypatch
):
    answer = asked(talks, chat, SKY, top_k=1)
    for name in ("model_name", "device", "dtype"):
        with monkeypatch.context() as changed:
            changed.setattr(engine, name, "other")
            with pytest.raises(UsageError, match="by fake on cpu in float32"):
                talks.measure_full(answer.id)
    with workspaces.writing():
        remove_document(workspaces.first, workspaces.library.find("default", "sky.txt"))
    with pytest.raises(UsageError, match="cannot be rebuilt"):
        talks.measure_full(answer.id)
    assert engine.prefilled == []


@pytest.mark.parametrize(
    ("question", "options", "error"),
    [
        (" ", {}, UsageError),
        ("?", {"ratio": 2.0}, SettingsError),
        ("?", {"method": "magic", "mode": "chat"}, UsageError),
        ("?", {"collections": ("other",)}, UsageError),
        ("?", {"mode": "other"}, UsageError),
    ],
)
def test_invalid_questions_are_refused(talks, chat, question, options, error):
    with pytest.raises(error):
        talks.ask(chat, question, AskOptions(**options))
    with pytest.raises(LibraryError, match="was deleted"):
        talks.ask(999, SKY)


def test_conversations_are_separate_and_the_least_recent_one_leaves_memory(talks, chats, engine):
    ids = [chats.create().id for _ in range(3)]
    for key in [*ids, ids[0]]:
        asked(talks, key, SKY)
    assert texts(engine.requests[0][0]) == texts(engine.requests[1][0])
    assert len(set(map(id, engine.sessions))) == 4
    talks.forget(ids[0])
    asked(talks, ids[0], SKY)
    assert engine.sessions[3] is not engine.sessions[4]


def test_unsaved_answer_equals_saved_answer(talks, chats, chat, engine):
    kept = asked(talks, chat, SKY)
    answer = talks.answer(SKY, AskOptions(top_k=2)).whole()
    assert (answer.text, answer.sources) == (kept.text, kept.sources)
    assert texts(engine.requests[0][0]) == texts(engine.requests[1][0])
    assert engine.sessions[1] is None and len(chats.messages(chat)) == 2 and chats.page()[1] == 1


def test_answer_json_matches_the_contract(talks, unrelated):
    value = talks.answer(SKY, AskOptions(top_k=2)).whole().to_json()
    assert list(value) == [
        "answer", "model", "device", "method", "ratio", "sources", "citations", "tokens", "timings",
        "store", "unsupported_figures", "read_again_at",
    ]  # fmt: skip
    assert list(value["sources"][0]) == ["number", "node_id", "document", "location", "score", "text"]
    assert list(value["tokens"]) == [
        "prompt",
        "reused",
        "recomputed",
        "fresh",
        "missing",
        "not_loaded",
        "generated",
    ]
    promised = {"retrieve_ms", "load_ms", "stall_ms", "prefill_ms", "ttft_ms", "total_ms", "tokens_per_s"}
    assert promised <= value["timings"].keys()
    assert value["timings"]["ttft_ms"] == pytest.approx(10 + value["timings"]["retrieve_ms"], abs=0.02)
    assert value["store"] == {"hits": 2, "misses": 0}
    nothing = talks.answer("Photosynthesis?").whole().to_json()
    assert nothing.keys() - {"notice"} == value.keys() and nothing["tokens"]["prompt"] == 0


def test_few_passages_need_no_index_and_a_lost_index_says_what_to_do(talks, workspaces, monkeypatch):
    """A process that asks one question of a small library need not import Chroma."""
    index, question = workspaces.first.index, workspaces.first.embedder.embed_question(SKY)
    compared = nearest(workspaces.first, question, 3)
    with monkeypatch.context() as many:
        many.setattr(retrieval, "COMPARED_PASSAGES", 0)
        indexed = nearest(workspaces.first, question, 3)
        assert list(compared) == list(indexed) and len(compared) == 3
        assert list(compared.values()) == pytest.approx(list(indexed.values()), abs=1e-3)
        index.delete(list(index.node_ids()))
        with pytest.raises(LibraryError, match="store repair"):
            talks.answer(SKY)
    assert talks.answer(SKY).sources[0].document == "sky.txt"
