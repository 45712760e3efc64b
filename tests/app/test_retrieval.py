"""Retrieval: vectors and words are combined, collections are separate, and no question breaks it."""

import random
import sys

import numpy as np
import pytest
from app_fakes import write_files

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.retrieval import (
    reciprocal_rank_fusion,
    search,
    search_in_stages,
    without_duplicates,
)
from ragblend.app.library.documents import DocumentPassage, FileFacts, node_id
from ragblend.app.library.ingest import ingest
from ragblend.app.library.registry import UnrelatedSimilarity
from ragblend.app.library.stop_words import languages_of, stop_words_in
from ragblend.app.library.word_search import by_words
from ragblend.integrations.embeddings import BUNDLED


@pytest.fixture
def far(monkeypatch):
    """No passage is near enough."""
    monkeypatch.setattr(
        "ragblend.app.answering.retrieval._measured_similarity",
        lambda workspaces: UnrelatedSimilarity(0.0, 9.0),
    )


@pytest.mark.parametrize("seed", range(50))
def test_fusion_keeps_all_passages_and_agreed_orders(seed):
    chance = random.Random(seed)
    rankings = [chance.sample("abcdefgh", chance.randrange(9)) for _ in range(chance.randrange(4))]
    order = reciprocal_rank_fusion(*rankings)
    assert sorted(order) == sorted({each for ranking in rankings for each in ranking})
    for ranking in rankings:
        assert reciprocal_rank_fusion(ranking, ranking) == ranking
    for better in order:
        for worse in order:
            places = [(r.index(better), r.index(worse)) for r in rankings if better in r and worse in r]
            if len(places) == len(rankings) and all(a < b for a, b in places):
                assert order.index(better) < order.index(worse)


@pytest.mark.parametrize(
    ("rankings", "fused"), [(("ab", "ba"), "ab"), (("abc", "cb"), "cba"), (("ab", "b"), "ba")]
)
def test_fusion_counts_ranks_and_prefers_the_first_ranking_among_equals(rankings, fused):
    """1/63 + 1/61 is a little more than 2/62."""
    assert "".join(reciprocal_rank_fusion(*rankings)) == fused


@pytest.mark.parametrize(("rank", "best"), [(61, "both"), (63, "one")])
def test_the_constant_of_fusion_is_that_of_the_paper(rank, best):
    """Two 1/(60 + 61) are a little more than one 1/(60 + 1), and two 1/(60 + 63) a little less."""
    first, second = ([f"{name}{n}" for n in range(rank - 1)] for name in "ab")
    assert reciprocal_rank_fusion(["one", *first[1:], "both"], [*second, "both"])[0] == best


def test_best_ranked_of_equal_texts_is_kept():
    texts = {"a": "Ships  lie\nhere.", "b": "A mill.", "c": "Ships lie here. "}
    found = [AnswerSource(0, name, name, "default", name, "", 0.5, text) for name, text in texts.items()]
    assert [source.document for source in without_duplicates(found)] == ["a", "b"]


@pytest.fixture
def logs(tmp_path):
    """Thirty files that differ in one number each."""
    texts = [f"The pump {7000 + 13 * n} was tested and found in order." for n in range(30)]
    return write_files(tmp_path / "logs", texts)


class Blurred:
    """Tells all passages from one another by chance alone, as an embedder does with numbers."""

    name = "blurred"

    def load(self):
        pass

    def embed_passages(self, texts, progress=None, part="whole"):
        chance = np.random.default_rng(1)
        rows = [self.embed_question("") + 0.1 * chance.normal(size=8) for _ in texts]
        return [(row / np.linalg.norm(row)).astype(np.float32)[None] for row in rows]

    def terms(self, words, cancel=None):
        return set()

    def embed_question(self, text, cancel=None):
        return np.full(8, 8**-0.5, np.float32)


def test_a_number_is_found_that_vectors_miss(open_workspace, logs, monkeypatch):
    """The two values of the setting."""
    monkeypatch.setattr("ragblend.app.answering.retrieval._measured_similarity", lambda workspaces: None)
    found = {}
    for way in ("vectors", "hybrid"):
        workspace = open_workspace(search=way)
        monkeypatch.setattr(type(workspace), "embedder", Blurred())
        ingest(workspace, [logs])
        questions = [f"What became of pump {7000 + 13 * n}?" for n in range(30)]
        best = [search([workspace], question, 1)[0] for question in questions]
        found[way] = sum(source.document == f"{n}.txt" for n, source in enumerate(best))
        assert all(0.5 < source.score <= 1 for source in best), "the score is the cosine in both"
    assert found["hybrid"] == 30 and found["vectors"] < 5


def test_of_one_document_all_passages_count_and_no_others(open_workspace, logs, tmp_path):
    """A question that no passage is near to, such as what the document is about, was answered with `Nothing found`."""
    text = " ".join(f"Ferry {n} leaves at noon." for n in range(40))
    (tmp_path / "ferry.txt").write_text(f"{text} Pump 7013 is aboard.")
    workspace = open_workspace(chunk_tokens=64)
    ingest(workspace, [logs, tmp_path / "ferry.txt"])
    ferry = workspace.library.find("default", "ferry.txt")
    known = workspace.library.passages_of(ferry.id)
    *_, found = search_in_stages([workspace], "What is this about?", 50, documents=[ferry.id])
    assert len(known) > 3 and {source.node_id for source in found} == {each.node_id for each in known}
    *_, found = search_in_stages([workspace], "What became of pump 7013?", 1, documents=[ferry.id])
    assert "7013" in found[0].text, "its words count, though another document has them as well"
    assert list(search_in_stages([workspace], "What became of pump 7013?", 9, documents=["empty"])) == [[]], (
        "a document without passages has none: all others were searched"
    )


WHO = "Ohlsen Reuter Kamp Boysen Tietjen Harms Meyn Stehr Wulf Voss Quast Timm".split()  # noqa: SIM905


def test_where_the_embedder_does_not_know_the_language_words_decide(open_workspace, tmp_path, monkeypatch):
    """Measured or not, as among few passages. Each of four passages has the house's name, one the ferryman's."""
    for number, who in enumerate(WHO):
        house = f"Speicher {chr(97 + number) * 4}"
        (tmp_path / f"{who}.txt").write_text(f"Der Fährmann {who} wohnt heute noch neben {house} am Hafen.")
        for other in range(3):
            (tmp_path / f"{who}{other}.txt").write_text(f"Im Jahr {1900 + other} wurde {house} verkauft.")
    workspace = open_workspace()
    monkeypatch.setattr(type(workspace), "embedder", Blurred())
    ingest(workspace, [tmp_path])
    monkeypatch.setattr(Blurred, "name", BUNDLED)
    asked = [f"Wo wohnt {who}, neben Speicher {chr(97 + n) * 4}?" for n, who in enumerate(WHO)]
    for measured in (None, UnrelatedSimilarity(0.1, 0.5)):
        monkeypatch.setattr(
            "ragblend.app.answering.retrieval._measured_similarity", lambda _, known=measured: known
        )
        found = [search([workspace], question, 1)[0].document for question in asked]
        assert found == [f"{who}.txt" for who in WHO]


def test_a_code_is_found_however_far_its_passage_is_and_a_word_is_not(workspace, logs, far, tmp_path):
    """Far from every question are all passages here, but for what words bring."""
    letter = tmp_path / "letter.txt"
    letter.write_text(
        "In 2018, the 19th of May at 10.30, they said thanks to the crew for invoice INV-2024-0817 and room 214, "
        "paid 5000 crowns, or 25.000, and went home with 250kg at 7. Part A4711/b."
    )
    ingest(workspace, [logs, letter])
    for asked in ("7013", "Who has tested 7013?", "Is anything known of pump-7013, please?"):
        (source,) = search([workspace], asked, 6)
        assert source.document == "1.txt"
    for asked in ("Is INV-2024-0817 paid?", "inv 2024-0817", "What is a4711/B?", "214", "2018"):
        assert [source.document for source in search([workspace], asked, 6)] == ["letter.txt"], asked
    for asked in (
        "Thanks!", "7", "7014", "INV-2024-0818", "0817-2024 or INV-0817", "Who won the cup in 2018?",
        "Who ruled in the 19th century?", "Are 5000 steps enough?", "25.000 feet in metres", "Do 250kg sink?",
        "What has 214 legs?", "Is it 10.30 yet?",
    ):  # fmt: skip
        assert search([workspace], asked, 6) == [], asked


def test_of_passages_with_a_code_that_with_the_other_words_comes_first(open_workspace, tmp_path):
    """The dishwasher's E07 came before the boiler's, because its whole passage is about error codes."""
    texts = {
        "dishwasher.txt": "Error codes of the Brise. E03: the water does not drain. E07: the heating is defective.",
        "boiler.txt": "Aquila combination boiler, user's manual. Error E03: no flame. E07: the flue is closed.",
    }
    write_files(tmp_path, [f"On day {n} the heron stood in the reeds and ate {n} frogs." for n in range(6)])
    workspace = open_workspace(chunk_tokens=64)
    ingest(workspace, [write_files(tmp_path, texts)])
    for name in ("dishwasher", "boiler"):
        first, *_ = search([workspace], f"What does error E07 of the {name} mean?", 2)
        assert first.document == f"{name}.txt"


def test_a_passage_with_the_code_and_all_that_is_asked_leaves_no_other_documents(open_workspace, tmp_path):
    """The other invoice's date was answered, and junk was read. But a question with more in it may need others."""
    invoices = {"2024-0317": "16 April", "2024-0892": "23 September"}
    for number, day in invoices.items():
        more = "Spare parts are listed here. " * 20
        (tmp_path / f"{number}.txt").write_text(f"Invoice {number} of Nordlicht. To be paid by {day}. {more}")
    letters = [f"Letter {n}: the bill of the mill is settled, and {n} sacks are paid." for n in range(8)]
    write_files(tmp_path, letters)
    workspace = open_workspace(chunk_tokens=64)
    ingest(workspace, [tmp_path])

    def documents(question):
        return {source.document for source in search([workspace], question, 6)}

    for asked in ("By when must invoice 2024-0317 be paid?", "2024-0317"):
        found = search([workspace], asked, 6)
        assert "16 April" in found[0].text
        assert {source.document for source in found} == {"2024-0317.txt"}, asked
    assert documents("Must invoice 2024-0317 or 2024-0892 be paid first?") >= {
        f"{each}.txt" for each in invoices
    }
    assert len(documents("Is invoice 2024-0317 of Nordlicht older than the other invoice?")) > 1


def test_a_code_is_found_in_the_only_passage_there_is(workspace, far, tmp_path):
    """BM25 gives a word nothing that half of all passages have."""
    (tmp_path / "one.txt").write_text("The pump 7013 was tested.")
    ingest(workspace, [tmp_path / "one.txt"])
    assert len(search([workspace], "7013", 6)) == 1


def test_without_words_the_nearest_come_first(open_workspace, documents):
    workspace = open_workspace(search="vectors")
    ingest(workspace, [documents])
    found = search([workspace], "Is the sky over the harbour blue?", 9)
    scores = [source.score for source in found]
    assert found[0].document == "sky.txt" and scores == sorted(scores, reverse=True)
    assert len(set(scores)) == workspace.library.count_passages("default") > 2


@pytest.mark.parametrize(
    ("question", "found"),
    [("Old?", ["boats.txt"]), ("Spinach vitamins iodine zinc copper?", [])],
)
def test_a_new_topic_is_not_joined_to_the_question_before_it(
    workspace, documents, monkeypatch, question, found
):
    """A question about the World Cup, after one about espresso machines, was given passages about these."""
    monkeypatch.setattr(
        "ragblend.app.answering.retrieval.recorded_similarity", lambda name: UnrelatedSimilarity(0.0, 0.45)
    )
    ingest(workspace, [documents])
    before = "The red boat belongs to Ada?"
    assert [source.document for source in search([workspace], question, 1, before)] == found


REVENUE = {
    "2022.txt": "In 2022 the revenue of the mill was 4 million crowns.",
    "2023.txt": "In 2023 the revenue of the mill was 5 million crowns.",
    "festival.txt": "A festival in 2023.",
    "choir.txt": "Turin sings.",
    "turin.txt": "In Turin the revenue of the shop was 6 million crowns in 2022.",
}


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("and in 2023?", "2023.txt"),
        ("2023?", "2023.txt"),
        ("Und 2023?", "2023.txt"),
        ("What about 2023?", "2023.txt"),
        ("What about Turin?", "turin.txt"),
        ("And which festival?", "festival.txt"),  # names a subject
        ("Who sings?", "choir.txt"),
    ],
)
def test_an_incomplete_question_is_searched_only_with_the_one_before_it(
    open_workspace, tmp_path, question, first
):
    """`And in 2023?`, after a question about 2022's revenue, preferred passages that merely have 2023."""
    workspace = open_workspace(chunk_tokens=64)
    ingest(workspace, [write_files(tmp_path, REVENUE)])
    assert search([workspace], question, 6, "What was the revenue in 2022?")[0].document == first


@pytest.mark.parametrize(
    ("previous", "question", "first"),
    [
        ("Wie hoch ist die Kaution der Wohnung?", "Und die Miete?", "rent.txt"),
        ("What did invoice 4711 cost in 2022?", "And in 2023?", "4711.txt"),
        ("What did the visit on 16.08.2024 cost?", "And on 17.08.2024?", "visit.txt"),
    ],
)
def test_a_follow_up_keeps_its_own_noun_and_the_code_before_it(
    open_workspace, tmp_path, previous, question, first
):
    """German nouns counted as names, an invoice's number as a year that `2023` replaces, and dates as codes."""
    texts = {
        "deposit.txt": "Wie hoch die Kaution der Wohnung ist: 200 Euro. Die Kaution ist hoch.",
        "rent.txt": "Die Miete ist 80 Euro.",
        "4711.txt": "In 2023 the harbour paid for invoice 4711, a cost of 5 crowns.",
        "4712.txt": "What invoice 4712 did cost in 2023: 6 crowns.",
        "visit.txt": "The visit on 17.08.2024 did cost 7 crowns, unlike others.",
        "fair.txt": "The fair on 17.08.2024.",
    }
    workspace = open_workspace(chunk_tokens=64)
    ingest(workspace, [write_files(tmp_path, texts)])
    assert search([workspace], question, 6, previous)[0].document == first


@pytest.mark.parametrize(
    ("question", "share", "is_joined"),
    [
        ("Translate that into German.", 0.87, True),  # says nothing of its own
        ("Translate vitamins into German.", 0.87, False),
        ("Translate that into German.", 0.84, False),
    ],
)
def test_a_question_with_a_pronoun_is_joined_sooner(workspace, monkeypatch, question, share, is_joined):
    def rank(_, asked, **others):
        score = {"Who bakes?": 1.0, question: 0.0}.get(asked, share)
        return [AnswerSource(0, "a", "a", "default", "a", "", score, "text")] if score else []

    monkeypatch.setattr("ragblend.app.answering.retrieval._rank", rank)
    assert bool(search([workspace], question, 6, "Who bakes?")) is is_joined


def test_collections_are_searched_separately_and_together(workspaces, tmp_path, logs, request):
    workspaces.create("trains")
    text = tmp_path / "train.txt"
    text.write_text("The train to the harbour is green. The pump 7013 is in it.")
    default, trains = workspaces.first, workspaces.of("trains")
    ingest(default, [logs])
    ingest(trains, [text])
    question = "Where is the pump 7013?"
    assert {source.collection for source in search([default], question, 30)} == {"default"}
    assert {source.document for source in search([trains], question, 30)} == {"train.txt"}
    both = search([default, trains], question, 2)
    assert {source.document for source in both} == {"1.txt", "train.txt"}
    request.getfixturevalue("far")
    for one, other in ((default, trains), (trains, default)):
        far = search([one, other], question, 6)
        assert {source.document for source in far} == {"1.txt", "train.txt"}, "by its number in either"
    assert search([], question, 2) == []


def fill(library, path, texts, collection="default"):
    document = library.begin(collection, path)
    passages = [
        DocumentPassage(node_id(document, i, text), document, i, text, "") for i, text in enumerate(texts)
    ]
    rows = [np.ones((1, 3), np.float32)] * len(texts)
    library.replace_passages(document, FileFacts(1, 2, "ab"), "r", passages, rows)
    return document, [passage.node_id for passage in passages]


def test_other_collections_do_not_change_the_order(library):
    """How rare a word is there would tell whether others have it."""
    texts = ["red boat", "red house and its garden", "green boat", "a mill", "a well", "a sluice"]
    fill(library, "/a", texts)
    before = by_words(library, ["default"], "Whose is the red boat or the mill?", 9)
    assert len(before) == 4
    fill(library, "/b", ["mill"] * 40, "secret")
    fill(library, "/c", ["weather in the hills"] * 40, "other")
    after = by_words(library, ["default"], "Whose is the red boat or the mill?", 9)
    assert list(after.items()) == list(before.items())


def test_a_word_counts_once_by_how_rare_it_is(library):
    """FTS5 has weighed it already: three of log(7.5 / 3.5) are more than one of log(9.5 / 1.5), squares are not."""
    texts = ["sluice b c d", "oak elm ash e", "oak f g h", "oak i j k", "elm l m n", "elm o p q", "ash r s t"]
    _, nodes = fill(library, "/a", [*texts, "ash u v w", "x y z zz", "xx yy zz xz"])
    assert list(by_words(library, ["default"], "sluice oak elm ash", 2)) == [nodes[1], nodes[0]]


def test_repeated_word_of_a_question_counts_once(library):
    """Three of log(7.5 / 3.5) are more than one of log(9.5 / 1.5)."""
    texts = ["sluice b c d", "elm e f g", "elm h i j", "elm k l m", *(f"{n} x y z" for n in range(6))]
    _, nodes = fill(library, "/a", texts)
    assert next(iter(by_words(library, ["default"], "Elm, elm or ELM at the sluice?", 9))) == nodes[0]


@pytest.mark.parametrize(
    ("texts", "question", "wanted"),
    [
        (
            ["码头的钥匙挂在蓝色的门后面。", "会议七点在厨房开始。", "苹果和油由约尔格带来。"],
            "船库的钥匙在哪里？",
            0,
        ),
        (
            [
                "鍵は青いドアの後ろに掛かっています。",
                "会議は七時に台所で始まります。",
                "費用は年に千円です。",
            ],
            "会議はいつ始まりますか",
            1,
        ),
        (["กุญแจแขวนอยู่หลังประตูสีน้ำเงิน", "การประชุมเริ่มเจ็ดโมงในครัว", "ค่าธรรมเนียมปีละพันบาท"], "ค่าธรรมเนียมเท่าไร", 2),
        (["ＡＢＣの価格は五円", "会議は七時", "鍵は青い"], "abcの値段", 0),  # full-width letters
    ],
)
def test_scripts_without_blanks_are_found_by_their_words(library, texts, question, wanted):
    _, nodes = fill(library, "/a", texts)
    assert next(iter(by_words(library, ["default"], question, 3))) == nodes[wanted]


def test_passages_with_the_code_come_first(library):
    _, nodes = fill(library, "/a", ["4711 b c d", "red boat e f", "red boat g h", *"ijklmn"])
    (first,) = by_words(library, ["default"], "red boat 4711", 1).items()
    assert first[0] == nodes[0] and first[1].is_exact
    both = by_words(library, ["default"], "red boat 4711", 9)
    assert next(iter(both)) == nodes[0]
    assert {node: match.is_exact for node, match in both.items()} == {
        node: node == nodes[0] for node in nodes[:3]
    }


@pytest.mark.parametrize("code", ["CP40", "CP-40", "CP 40", "cp\u201140"])
def test_a_code_is_found_with_and_without_a_hyphen_or_blank(library, code):
    """`What is CP40?` did not find `CP-40`."""
    texts = [
        "pump CP-40 a", "pump CP40 b", "pump CP 40 c", "valve CP-400 d", "valve CP-4 0 e", "valve CP4-0 f",
        "valve XCP40 g", "valve CP of 40 h", *"ijklmnopq",
    ]  # fmt: skip
    _, nodes = fill(library, "/a", texts)
    found = by_words(library, ["default"], f"What is {code}?", 99)
    assert {node for node, match in found.items() if match.is_exact} == set(nodes[:3])
    assert set(by_words(library, ["default"], code, 3)) == set(nodes[:3])


@pytest.mark.parametrize(
    ("question", "exact"),
    [
        ("Where is KX7731B?", [0]),
        ("Where is KX-7731B?", [0]),
        ("What does ID 48213 cost?", [1, 2]),
        ("What costs EUR 450?", []),
        ("What is due in FY 2024?", []),
        ("WHAT IS DUE IN 12 MONTHS?", []),
    ],
)
def test_other_words_before_numbers_are_no_codes(library, question, exact):
    texts = ["KX-7731-B a", "ID-48213 b", "48213 c", "EUR 450 d", "FY 2024 e", "in 12 months f", *"ghijklm"]
    _, nodes = fill(library, "/a", texts)
    found = by_words(library, ["default"], question, 99)
    assert {node for node, match in found.items() if match.is_exact} == {nodes[at] for at in exact}


def test_passages_with_a_rare_term_are_marked(library):
    """`levothyroxine` is shared by no chance; a term that many passages have is the library's subject."""
    texts = [
        "levothyroxine daily",
        "dose of paint",
        "ORD-Zuckerrueben-2",
        *(f"thermostat {n}" for n in range(4)),
        *"abc",
    ]
    _, nodes = fill(library, "/a", texts)
    terms = {"levothyroxine", "thermostat", "zuckerrueben"}
    found = by_words(library, ["default"], "What dose of levothyroxine?", 9, terms=terms)
    assert {node for node, match in found.items() if match.has_term} == {nodes[0]}
    assert nodes[1] in found
    part_of_another_code = "Where is ORD-Zuckerrueben-7?"
    for question, count in (("Which thermostat?", 4), (part_of_another_code, 1)):
        found = by_words(library, ["default"], question, 9, terms=terms)
        assert len(found) == count and not any(match.has_term for match in found.values()), question


def test_words_in_half_of_the_passages_are_ignored(library):
    """Whichever collection they are in."""
    fill(library, "/a", ["a red boat", "a mill"])
    assert by_words(library, ["default"], "boat", 9) == {}
    _, nodes = fill(library, "/b", ["a green boat", "a blue boat", *"cdefgh"], "other")
    for asked in (["default", "other"], ["other", "default"]):
        assert len(by_words(library, asked, "boat", 9)) == 3
    assert set(by_words(library, ["other"], "boat", 9)) == set(nodes[:2])


def test_other_forms_of_a_word_are_found(library):
    _, nodes = fill(
        library, "/a", ["Lighthouses at Orléans", "The e\u0301cluse ﬁts", "foo_bar(x)", "NASA", "x", "y", "z"]
    )
    for question, place in (
        ("lighthouse", 0), ("ORLEANS", 0), ("écluse", 1), ("ecluses", 1), ("fit", 1), ("bar", 2), ("nasa", 3),
    ):  # fmt: skip
        assert list(by_words(library, ["default"], question, 9)) == [nodes[place]], question


HOSTILE = [
    "", " ", '"', '""', "'", "*", "boat*", "NEAR(boat, 2)", "boat AND", "OR", "NOT", "^boat", "text:boat", "words:boat",
    "-boat", "+", "(", ")", "{}", "boat)", "\\", "%", "\x00", "boat\x00", "\ud800", "boat\udfff", "🚢", "👩‍👩‍👧",
    "the of and", "'; DROP TABLE words; --", "١٢٣", "船", "boat " * 20_000,
    " ".join(map(str, range(5_000))), "b" * 100_000,
]  # fmt: skip


def test_no_question_breaks_the_search_for_words(library, caplog):
    """What FTS5 refuses is said, and answered by vectors alone: it refuses nothing, of its own language either."""
    fill(library, "/a", ["a red boat", "a green house", "the mill", "船 🚢"])
    chance = random.Random(0)
    signs = [*"\"*^:+-(){}'", "AND", "OR", "NOT", "NEAR", " ", "boat"]
    strange = [
        "".join(chance.choices([*signs, chr(chance.randrange(sys.maxunicode))], k=chance.randrange(12)))
        for _ in range(300)
    ]
    for question in HOSTILE + strange:
        found = by_words(library, ["default"], f"{question} BOATS", 3)
        assert len(found) >= 1 or len(question) > 200, question
        assert not caplog.records, question
    assert len(by_words(library, ["default"], "boat", 3)) == 1


GERMAN = {
    "hecke.txt": "Die Hecke schneide ich am Samstag, wenn es trocken bleibt, und deine Leiter bringe ich dann zurück.",
    "heizung.txt": "Die Heizkostenabrechnung wurde vom Dienst erstellt, und das Guthaben wird mit Miete verrechnet.",
    "regeln.txt": "Die Ruhezeiten gelten von 13 bis 15 Uhr, und das Grillen ist auf den Balkonen verboten.",
}


@pytest.mark.parametrize("level", [9.0, 0.01], ids=["nothing is near", "all is near"])
@pytest.mark.parametrize(
    ("question", "found"),
    [
        ("Wann schneidest du die Hecke?", ["hecke.txt"]),
        ("Wer hat die Heizkosten berechnet?", ["heizung.txt"]),  # a part of its compound
        ("Wer stört die Ruhezeitens?", ["regeln.txt"]),  # with another ending
        ("Welche Impfungen braucht mein Hund für Norwegen?", []),
        ("What is the capital of Australia?", []),
    ],
)
def test_in_a_language_that_the_embedder_does_not_know_words_decide(
    workspace, tmp_path, monkeypatch, level, question, found
):
    """A few German letters were refused as unrelated to all questions; among English ones, each was related to any."""
    known = UnrelatedSimilarity(0.0, level)
    monkeypatch.setattr("ragblend.app.answering.retrieval.recorded_similarity", lambda name: known)
    monkeypatch.setattr(
        "ragblend.app.answering.retrieval._measured_similarity", lambda _: known if level < 1 else None
    )
    ingest(workspace, [write_files(tmp_path, GERMAN)])
    assert [source.document for source in search([workspace], question, 3)] == found


def test_a_name_alone_is_no_stop_word():
    """`Ada` is one in Indonesian."""
    assert stop_words_in("Ada") == set() and "wann" in stop_words_in("Wann kommt die Ada?")


@pytest.mark.parametrize("question", ["How long does the red boat take?", "What does `red boat` mean?"])
def test_words_that_any_question_may_have_do_not_count(workspace, tmp_path, question):
    """A row of a table was refused, because it had neither `long` nor `take`."""
    ingest(
        workspace,
        [write_files(tmp_path, ["The red boat takes long.", "Long oars mean work.", "A mill.", "An elm."])],
    )
    assert [match.share for match in by_words(workspace.library, ["default"], question, 9).values()] == [1.0]


def test_stop_words_of_no_language_find_passages(workspace, tmp_path):
    """`wer`, `hat`, `die` and `am` outweighed the question's one noun."""
    ingest(workspace, [write_files(tmp_path, GERMAN)])
    assert (
        by_words(workspace.library, ["default"], "Wer hat von wem das auf dem am, vom und mit der?", 9) == {}
    )


@pytest.mark.parametrize(
    ("text", "languages"),
    [
        ("Who pays for the lift?", {"english"}),
        ("Wer zahlt den Fahrstuhl und seine Wartung?", {"german"}),
        ("¿Cuánto cuesta el ascensor y quién lo paga en los pisos?", {"spanish"}),
        ("Combien coûte l'ascenseur de la maison pour nous?", {"french"}),
        ("F31", set()),
    ],
)
def test_stop_words_tell_the_language(text, languages):
    assert languages_of(text) == languages
